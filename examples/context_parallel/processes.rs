// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, under `mpirun`.
//!
//! Every process reads the same input, makes the same plan and runs its rank, exactly as a thread of a
//! [`Team`](crate::team::Team) would. What differs is around it: parts come together at rank 0, over a second transport
//! (`together.rs`); and clocks differ, so that they are compared first, over the transport of the run.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytemuck::{Pod, Zeroable};
use cpattn::{
    Cause, Element, Plan, Rank,
    report::trace::Event,
    schedule::{Direction, Lane},
    transport::{Transport, mpi::Mpi},
};
use mpi::{Threading, environment::Universe, topology::SimpleCommunicator, traits::*};

use crate::{
    clock, say,
    team::{How, Inputs, Lap, Outcome, Part, Results, part},
    together::{self, Alive},
};

/// This process's rank, and MPI.
pub struct Processes {
    rank: Rank,
    /// For what comes after a run.
    side: Arc<Mpi>,
    /// On rank 0, after a run.
    alive: Option<Alive>,
    deadline: Duration,
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
        _ => crate::ring::process(&end).and_then(|well| {
            // A rank that was stopped after its last link would keep the others in MPI_Finalize.
            end.agree(0..end.world(), 0).map_err(|e| format!("after the check: {e}"))?;
            Ok(well)
        }),
    };
    if let Err(text) = &outcome {
        say(text);
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
        let side = Arc::new(Mpi::new(&world, deadline).map_err(|e| e.to_string())?);
        Ok(Self { rank: Rank::new(end), side, alive: None, deadline, epoch, offset, world, _universe: universe })
    }

    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    pub fn world(&self) -> usize {
        self.rank.world()
    }

    /// Says it on standard error and ends all processes: MPI cannot be finalised with one that is dead or waits.
    pub fn give_up(&self, text: &str) -> ! {
        self.side.abort(Cause::Failed);
        say(text);
        // Others have something to say too.
        std::thread::sleep(Duration::from_secs(1));
        self.world.abort(2)
    }

    /// Waits for rank 0, which still compares results, without taking its cores: `MPI_Finalize` may spin. All ranks call it
    /// last; an error names one that does not.
    pub fn meet(&mut self) -> Result<(), String> {
        together::meet(&*self.side, self.alive.take())
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
        let theirs = together::gather(&*self.side, &pack(&mine)).map_err(|e| e.to_string())?;
        if self.rank() != 0 {
            return Ok(None);
        }
        if self.world() > 1 {
            self.alive = Some(Alive::new(Arc::clone(&self.side), self.deadline / 4));
        }
        let mut whole: Vec<_> = (0..plan.mesh().replicas).map(|_| Results::unwritten(plan)).collect();
        let (mut laps, mut planning) = (Vec::new(), Vec::new());
        let theirs = theirs.iter().zip(1..).map(|(bytes, rank)| unpack(bytes, rank));
        for (rank, part) in std::iter::once(mine).chain(theirs).enumerate() {
            let into = &mut whole[plan.mesh().coordinates(rank).replica];
            into.put(plan, rank, &part.results).map_err(|e| e.to_string())?;
            laps.push(part.laps);
            planning.push(part.planning);
        }
        Ok(Some(Outcome { results: whole, laps, planning }))
    }
}

/// A part as bytes: six tensors, the time of planning, and for each lap its direction and time, names and events.
fn pack<T: Element>(part: &Part<T>) -> Vec<u8> {
    let Results { o, lse, dq, dk, dv, dsinks } = &part.results;
    let laps: Vec<_> = part
        .laps
        .iter()
        .map(|lap| {
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
            let head = [u64::from(lap.direction == Direction::Backward), lap.wall.as_nanos() as u64];
            (head, names.join("\n"), events)
        })
        .collect();
    let planning = [part.planning.as_nanos() as u64];
    let mut runs: Vec<&[u8]> = vec![
        bytemuck::cast_slice(o),
        bytemuck::cast_slice(lse),
        bytemuck::cast_slice(dq),
        bytemuck::cast_slice(dk),
        bytemuck::cast_slice(dv),
        bytemuck::cast_slice(dsinks),
        bytemuck::cast_slice(&planning),
    ];
    for (head, names, events) in &laps {
        runs.extend([bytemuck::cast_slice(head), names.as_bytes(), bytemuck::cast_slice(events)]);
    }
    together::pack(&runs)
}

fn unpack<T: Element>(bytes: &[u8], rank: usize) -> Part<T> {
    fn numbers<E: Pod>(bytes: &[u8]) -> Vec<E> {
        let mut all = vec![E::zeroed(); bytes.len() / size_of::<E>()];
        bytemuck::cast_slice_mut(&mut all).copy_from_slice(bytes);
        all
    }
    let runs = together::unpack(bytes);
    let results = Results {
        o: numbers(runs[0]),
        lse: numbers(runs[1]),
        dq: numbers(runs[2]),
        dk: numbers(runs[3]),
        dv: numbers(runs[4]),
        dsinks: numbers(runs[5]),
    };
    let laps = runs[7..]
        .chunks_exact(3)
        .map(|runs| {
            let lap: Vec<u64> = numbers(runs[0]);
            // Names of events live as long as the program: there are a dozen of them.
            let names: &'static str = String::from_utf8_lossy(runs[1]).into_owned().leak();
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
                events: numbers::<Travelling>(runs[2]).iter().map(event).collect(),
            }
        })
        .collect();
    Part { results, laps, planning: Duration::from_nanos(numbers::<u64>(runs[6])[0]) }
}
