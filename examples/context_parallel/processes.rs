// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, under `mpirun`.
//!
//! Every process reads the same input, makes the same plan and runs its rank, exactly as a thread of a
//! [`Team`](crate::team::Team) would. What differs is around it: parts come together at rank 0 as messages of the caller's
//! own, on the caller's communicator, which the transport never uses; and clocks differ, so that they are compared first,
//! over the transport.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytemuck::{Pod, Zeroable};
use cpattn::{
    Element, Plan, Rank,
    report::trace::Event,
    schedule::{Direction, Lane},
    transport::{Transport, mpi::Mpi},
};
use mpi::{
    Threading,
    environment::Universe,
    topology::{Process, SimpleCommunicator},
    traits::*,
};

use crate::{
    clock,
    team::{How, Inputs, Lap, Outcome, Part, Results, part},
};

/// This process's rank, and MPI.
pub struct Processes {
    rank: Rank,
    /// Times of this process's events count from here.
    epoch: Instant,
    /// What to add to them, in nanoseconds, for times of rank 0.
    offset: i64,
    world: SimpleCommunicator,
    // Last: finalises MPI.
    _universe: Universe,
}

/// Checks the ring of all processes; `world`: how many were expected.
pub fn check_ring(deadline: Duration, world: Option<usize>) -> Result<bool, String> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple)
        .ok_or("MPI is initialised already, which this program does not do")?;
    let comm = universe.world();
    let end = Mpi::new(&comm, deadline).map_err(|e| e.to_string())?;
    let outcome = match world {
        Some(world) if world != end.world() => {
            Err(format!("--world is {world}, expected {}, the number of processes that mpirun started", end.world()))
        }
        _ => crate::ring::process(&end),
    };
    if let Err(text) = &outcome {
        eprintln!("error: {text}");
        // Others have something to say too; MPI cannot be finalised with one that is dead.
        std::thread::sleep(Duration::from_secs(1));
        comm.abort(2)
    }
    outcome
}

/// An [`Event`] as it travels; names are indices into a text.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Travelling {
    start_ns: u64,
    end_ns: u64,
    bytes: u64,
    step: u32,
    name: u32,
    phase: u32,
    communication: u32,
}

impl Processes {
    /// Makes this process's rank, with all others at the same time.
    pub fn new(deadline: Duration) -> Result<Self, String> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Multiple)
            .ok_or("MPI is initialised already, which this program does not do")?;
        let world = universe.world();
        let end = Mpi::new(&world, deadline).map_err(|e| e.to_string())?;
        let epoch = Instant::now();
        let offset = clock::offset(&end, epoch).map_err(|e| e.to_string())?;
        Ok(Self { rank: Rank::new(end), epoch, offset, world, _universe: universe })
    }

    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    pub fn world(&self) -> usize {
        self.rank.world()
    }

    /// Says it on standard error and ends all processes: MPI cannot be finalised with one that is dead or waits.
    pub fn give_up(&self, text: &str) -> ! {
        eprintln!("error: {text}");
        self.world.abort(2)
    }

    /// Waits for rank 0, which still compares results, without taking its cores: `MPI_Finalize` may spin.
    pub fn meet(&self) {
        let mut word = 0_u8;
        if self.rank() == 0 {
            (1..self.world()).for_each(|rank| self.world.process_at_rank(rank as i32).send(&word));
            return;
        }
        mpi::request::scope(|scope| {
            let mut request = self.world.process_at_rank(0).immediate_receive_into(scope, &mut word);
            while let Err(waiting) = request.test() {
                request = waiting;
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }

    /// Forward and backward of `plan`, whose world must be that of the job; the whole on rank 0, nothing elsewhere.
    pub fn run<T: Element>(
        &mut self,
        plan: &Plan,
        inputs: &Arc<Inputs<T>>,
        how: &How,
    ) -> Result<Option<Outcome<T>>, String> {
        plan.fits_world(self.world()).map_err(|e| e.to_string())?;
        let mut mine = part(&mut self.rank, plan, inputs, how, self.epoch).map_err(|e| e.to_string())?;
        let here = |ns: u64| ns.saturating_add_signed(self.offset);
        for event in mine.laps.iter_mut().flat_map(|lap| &mut lap.events) {
            (event.start_ns, event.end_ns) = (here(event.start_ns), here(event.end_ns));
        }
        let root = self.world.process_at_rank(0);
        if self.rank() != 0 {
            send(&root, &mine);
            return Ok(None);
        }
        let mut whole: Vec<_> = (0..plan.mesh().replicas).map(|_| Results::unwritten(plan)).collect();
        let (mut laps, mut planning) = (Vec::new(), Vec::new());
        let mut first = Some(mine);
        for rank in 0..self.world() {
            let part = first.take().unwrap_or_else(|| receive(&self.world.process_at_rank(rank as i32), rank));
            let into = &mut whole[plan.mesh().coordinates(rank).replica];
            into.put(plan, rank, &part.results).map_err(|e| e.to_string())?;
            laps.push(part.laps);
            planning.push(part.planning);
        }
        Ok(Some(Outcome { results: whole, laps, planning }))
    }
}

fn send<T: Element>(root: &Process<'_>, part: &Part<T>) {
    let Results { o, lse, dq, dk, dv, dsinks } = &part.results;
    let tensors: [&[u8]; 6] = [
        bytemuck::cast_slice(o),
        bytemuck::cast_slice(lse),
        bytemuck::cast_slice(dq),
        bytemuck::cast_slice(dk),
        bytemuck::cast_slice(dv),
        bytemuck::cast_slice(dsinks),
    ];
    tensors.into_iter().for_each(|bytes| root.send(bytes));
    root.send(&[part.planning.as_nanos() as u64, part.laps.len() as u64][..]);
    for lap in &part.laps {
        let mut names: Vec<&str> = Vec::new();
        let mut number = |name| {
            names.iter().position(|&n| n == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            }) as u32
        };
        let events: Vec<Travelling> = lap
            .events
            .iter()
            .map(|e| Travelling {
                start_ns: e.start_ns,
                end_ns: e.end_ns,
                bytes: e.bytes,
                step: e.step,
                name: number(e.name),
                phase: number(e.phase),
                communication: u32::from(e.lane == Lane::Communication),
            })
            .collect();
        root.send(&[u64::from(lap.direction == Direction::Backward), lap.wall.as_nanos() as u64][..]);
        root.send(names.join("\n").as_bytes());
        root.send(bytemuck::cast_slice::<_, u8>(&events));
    }
}

fn receive<T: Element>(from: &Process<'_>, rank: usize) -> Part<T> {
    let bytes = || from.receive_vec::<u8>().0;
    fn tensor<E: Pod>(bytes: &[u8]) -> Vec<E> {
        let mut all = vec![E::zeroed(); bytes.len() / size_of::<E>()];
        bytemuck::cast_slice_mut(&mut all).copy_from_slice(bytes);
        all
    }
    let results = Results {
        o: tensor(&bytes()),
        lse: tensor(&bytes()),
        dq: tensor(&bytes()),
        dk: tensor(&bytes()),
        dv: tensor(&bytes()),
        dsinks: tensor(&bytes()),
    };
    let head = from.receive_vec::<u64>().0;
    let laps = (0..head[1])
        .map(|_| {
            let lap = from.receive_vec::<u64>().0;
            // Names of events live as long as the program: there are a dozen of them.
            let names: &'static str = String::from_utf8_lossy(&bytes()).into_owned().leak();
            let names: Vec<&'static str> = names.split('\n').collect();
            let event = |e: &Travelling| Event {
                rank,
                lane: if e.communication == 1 { Lane::Communication } else { Lane::Compute },
                name: names[e.name as usize],
                phase: names[e.phase as usize],
                step: e.step,
                start_ns: e.start_ns,
                end_ns: e.end_ns,
                bytes: e.bytes,
            };
            Lap {
                direction: if lap[0] == 1 { Direction::Backward } else { Direction::Forward },
                wall: Duration::from_nanos(lap[1]),
                events: tensor::<Travelling>(&bytes()).iter().map(event).collect(),
            }
        })
        .collect();
    Part { results, laps, planning: Duration::from_nanos(head[0]) }
}
