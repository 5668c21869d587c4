// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes over MPI: all of them measure links and run cases together, and rank 0 has the figures.
//!
//! Kernels, copies and operations are measured by rank 0 alone, on a thread for each core; the others wait. All
//! processes read one clock, which is never set: they are on one machine, be it as hosts of `examples/hosts`.

use std::{sync::Arc, thread::sleep, time::Duration};

use cpattn::{
    Machine, Rank, Result,
    schedule::Direction,
    transport::{Label, Message, Transport, mpi::Mpi},
};
use mpi::{Threading, topology::Communicator};

use super::{
    Arguments, Host, SHAPES,
    cases::{self, Case},
    check::Cases,
    cores, description,
    links::{DEADLINE, Links},
    print,
};

/// From the meeting of all ranks until a run begins: messages of the meeting are over, and buckets of rate limits are
/// full.
const PAUSE: Duration = Duration::from_millis(60);

/// All ranks, for what is between runs.
struct Meeting(Arc<Mpi>);

impl Meeting {
    /// Rank 0's number to all.
    fn tell(&self, mut number: u64) -> Result<u64> {
        let word = |peer, number: &mut u64| Message { peer, ptr: std::ptr::from_mut(number).cast(), bytes: 8 };
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        if self.0.rank() == 0 {
            sends = (1..self.0.world()).map(|peer| word(peer, &mut number)).collect();
        } else {
            recvs.push(word(0, &mut number));
        }
        // SAFETY: one number of this function, which is only read by sends and has one receive, until the call returns.
        unsafe { self.0.exchange(Label::new("a number to all", 0), &sends, &recvs) }?;
        Ok(number)
    }

    /// Waits for all ranks, then until the same moment on all.
    fn begin(&self) -> Result<()> {
        self.0.agree(0..self.0.world(), 0)?;
        let moment = self.tell(cases::now() + PAUSE.as_nanos() as u64)?;
        sleep(Duration::from_nanos(moment.saturating_sub(cases::now())));
        Ok(())
    }

    /// The laps of all ranks, on rank 0; its own elsewhere.
    fn gather(&self, mut mine: Vec<[u64; 2]>) -> Result<Vec<Vec<[u64; 2]>>> {
        let word = |peer, laps: &mut Vec<[u64; 2]>| Message {
            peer,
            ptr: laps.as_mut_ptr().cast(),
            bytes: size_of_val(laps.as_slice()),
        };
        let (mut sends, mut recvs, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        if self.0.rank() == 0 {
            theirs = vec![mine.clone(); self.0.world() - 1];
            recvs = theirs.iter_mut().enumerate().map(|(i, laps)| word(i + 1, laps)).collect();
        } else {
            sends.push(word(0, &mut mine));
        }
        // SAFETY: vectors of this function, used by nothing else until the call returns.
        unsafe { self.0.exchange(Label::new("laps to rank 0", 0), &sends, &recvs) }?;
        theirs.insert(0, mine);
        Ok(theirs)
    }
}

/// The same on every rank; only rank 0 prints.
pub fn over_processes(arguments: &Arguments) -> Result<(), String> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple).ok_or("MPI is initialised already")?;
    let world = universe.world();
    // MPI_Finalize would wait for the other processes, which wait for this one.
    together(arguments, &world).map_err(|error| {
        eprintln!("error: {error}");
        world.abort(2)
    })
}

fn together(arguments: &Arguments, world: &impl Communicator) -> Result<(), String> {
    let text = |e: cpattn::Error| e.to_string();
    let (end, side) = (Mpi::new(world, DEADLINE).map_err(text)?, Mpi::new(world, DEADLINE).map_err(text)?);
    let node = Mpi::ranks_per_node(world).map_err(text)?;
    let (number, ranks) = (end.rank(), end.world());
    if ranks < 4 || !ranks.is_multiple_of(4) {
        return Err(format!("mpirun started {ranks} processes, expected a multiple of 4"));
    }
    let (mut rank, meeting) = (Rank::new(end), Meeting(Arc::new(side)));
    let list = if arguments.check {
        cases::of_processes(ranks, node, arguments.tokens as usize).map_err(text)?
    } else {
        Vec::new()
    };
    let mut cases = Cases::new(list);
    let known = description(arguments)?;
    let (cores, mut links) = (cores(), Links::new(node));
    let mut host = Host::new(&SHAPES[..1], cores);
    for _ in 0..arguments.rounds {
        if known.is_none() {
            meeting.begin().map_err(text)?;
            if number == 0 {
                host.round().map_err(text)?;
            }
            links.round(&mut rank, || meeting.begin()).map_err(text)?;
        }
        let makespan = |case: &Case, direction: Direction| {
            let laps = cases::laps(&mut rank, &case.plan, direction, 2, || meeting.begin())?;
            Ok(cases::makespan(&meeting.gather(laps)?))
        };
        cases.round(makespan).map_err(text)?;
    }
    if number == 0 {
        let machine = match known {
            Some(machine) => machine,
            None => described(arguments, ranks, node, cores, &host, &links).map_err(text)?,
        };
        print(arguments, &machine, arguments.check.then_some(&cases))?;
    }
    meeting.begin().map_err(text)
}

fn described(
    arguments: &Arguments,
    ranks: usize,
    node: usize,
    cores: usize,
    host: &Host,
    links: &Links,
) -> Result<Machine> {
    let (inside, (between, burst, work)) = (links.inside()?, links.between()?);
    let mut text = format!(
        "name = {} hosts of {node} ranks, {cores} cores{}, ranks as processes over MPI\nestimate = no\nranks_per_node = {node}\n\
         cards_per_node = 1\ncores = {cores}\nmemory = {:e}\n",
        ranks / node,
        if arguments.one_machine { " for all" } else { "" },
        arguments.memory
    );
    if arguments.one_machine {
        text += "nodes_share_cores = yes\n";
    }
    for (level, link) in [("inside", inside), ("between", between)] {
        text += &format!("{level}.latency = {:e}\n{level}.rate = {:e}\n", link.latency, link.rate);
    }
    text += &format!("between.burst = {burst:e}\nbetween.work = {work:e}\n");
    Machine::parse(&(text + &host.lines()))
}
