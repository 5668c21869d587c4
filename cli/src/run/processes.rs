// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, under `mpirun`.
//!
//! Every process reads the same input, makes the same plan and runs its rank, exactly as a thread of a
//! [`Team`](super::team::Team) would. The differences: results are gathered on rank 0 over a second transport
//! (`tests/mpi/together.rs`), and traces are gathered by the ranks, because their clocks differ ([`gather_events`]).

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::{Duration, Instant},
};

use bytemuck::Pod;
use cpattn::{
    Cause, Element, Error, Plan, Rank,
    schedule::Direction,
    transport::{Transport, mpi::Mpi},
};
use mpi::{Threading, environment::Universe, topology::SimpleCommunicator, traits::*};

use crate::{json::JsonOption, say};

use super::{
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
    world: SimpleCommunicator,
    // Last: finalises MPI.
    _universe: Universe,
}

/// Checks the ring of all processes; `world`: how many were expected.
pub fn check_ring(deadline: Duration, world: Option<usize>, json: &JsonOption) -> Result<bool, String> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Multiple)
        .ok_or("MPI is initialised already, which this program does not do")?;
    let comm = universe.world();
    let end = Mpi::new(&comm, deadline).unwrap_or_else(|e| leave(&comm, &e.to_string()));
    let asked = match world {
        Some(world) if world != end.world() => {
            Err(format!("--world is {world}, expected {}, the number of processes that mpirun started", end.world()))
        }
        _ => Ok(()),
    };
    let outcome = compared(&end, &comm, asked).and_then(|()| crate::ring::process(&end, json)).and_then(|well| {
        // A rank that was stopped after its last link would keep the others in MPI_Finalize.
        end.agree(0..end.world(), 0).map_err(|e| format!("after the check: {e}"))?;
        Ok(well)
    });
    if let Err(text) = &outcome {
        end.abort(Cause::Failed);
        leave(&comm, text)
    }
    outcome
}

/// Says it on standard error and ends all processes. To return the error would drop the [`Universe`], which calls
/// `MPI_Finalize`: that may wait for a process that is stopped or dead, and the error would not be seen.
fn leave(comm: &SimpleCommunicator, text: &str) -> ! {
    say(text);
    end(comm)
}

fn end(comm: &SimpleCommunicator) -> ! {
    // Others have something to say too.
    std::thread::sleep(Duration::from_secs(1));
    comm.abort(2)
}

/// What a process found before anything is run. Where all of them are refused for the same reason rank 0 says so, for
/// all.
fn compared<T>(rank: &Mpi, comm: &SimpleCommunicator, found: Result<T, String>) -> Result<T, String> {
    let mut hasher = DefaultHasher::new();
    found.as_ref().err().hash(&mut hasher);
    match (rank.agree(0..rank.world(), hasher.finish()), found) {
        (Ok(()), Err(text)) if rank.rank() == 0 => leave(comm, &text),
        (Ok(()), Err(_)) => end(comm),
        // A rank that was refused ends the run of the others, which say so.
        (Ok(()) | Err(Error::Disagreement { .. }), found) => found,
        (Err(error), found) => found.and_then(|_| Err(error.to_string())),
    }
}

impl Processes {
    /// Makes this process's rank, with all others at the same time.
    pub fn new(deadline: Duration) -> Result<Self, String> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Multiple)
            .ok_or("MPI is initialised already, which this program does not do")?;
        let world = universe.world();
        let make = || Mpi::new(&world, deadline).unwrap_or_else(|e| leave(&world, &e.to_string()));
        let end = make();
        let epoch = Instant::now();
        let side = Arc::new(make());
        Ok(Self { rank: Rank::new(end), side, alive: None, deadline, epoch, world, _universe: universe })
    }

    /// What this process found before anything is run. It does not return where all are refused for the same reason.
    pub fn compared<T>(&self, found: Result<T, String>) -> Result<T, String> {
        compared(&self.side, &self.world, found)
    }

    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    pub fn world(&self) -> usize {
        self.rank.world()
    }

    /// Says it on standard error and ends all processes: MPI cannot be finalised with one that is dead or waits. Those
    /// that wait for this rank, in a run or after it, say so first.
    pub fn give_up(&self, text: &str) -> ! {
        self.rank.handle().abort();
        self.side.abort(Cause::Failed);
        leave(&self.world, text)
    }

    /// Waits for rank 0, which still compares results, without taking its cores: `MPI_Finalize` may spin. All ranks
    /// call it last; an error names one that does not.
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
        for lap in mine.laps.iter_mut().filter(|_| how.record) {
            lap.events = self.rank.trace().gather_events(self.epoch, &lap.events).map_err(|e| e.to_string())?;
        }
        let theirs = together::gather(&*self.side, &pack(&mine)).map_err(|e| e.to_string())?;
        if self.rank() != 0 {
            return Ok(None);
        }
        if self.world() > 1 {
            self.alive = Some(Alive::new(Arc::clone(&self.side), self.deadline / 4));
        }
        let mut whole: Vec<_> = (0..plan.mesh().replicas).map(|_| Results::unwritten(plan)).collect();
        // Rank 0 has the events of all.
        let events: Vec<_> = mine.laps.iter_mut().map(|lap| std::mem::take(&mut lap.events)).collect();
        let (mut laps, mut planning) = (Vec::new(), Vec::new());
        let theirs = theirs.iter().map(|bytes| unpack(bytes));
        for (rank, mut part) in std::iter::once(mine).chain(theirs).enumerate() {
            for (lap, events) in part.laps.iter_mut().zip(&events) {
                lap.events = events.iter().filter(|e| e.rank == rank).copied().collect();
            }
            let into = &mut whole[plan.mesh().coordinates(rank).replica];
            into.put(plan, rank, &part.results).map_err(|e| e.to_string())?;
            laps.push(part.laps);
            planning.push(part.planning);
        }
        Ok(Some(Outcome { results: whole, laps, planning }))
    }
}

/// A part as bytes: six tensors, the time of planning, and for each lap its direction and time.
fn pack<T: Element>(part: &Part<T>) -> Vec<u8> {
    let Results { o, lse, dq, dk, dv, dsinks } = &part.results;
    let lap = |lap: &Lap| [u64::from(lap.direction == Direction::Backward), lap.wall.as_nanos() as u64];
    let laps: Vec<[u64; 2]> = part.laps.iter().map(lap).collect();
    let planning = [part.planning.as_nanos() as u64];
    together::pack(&[
        bytemuck::cast_slice(o),
        bytemuck::cast_slice(lse),
        bytemuck::cast_slice(dq),
        bytemuck::cast_slice(dk),
        bytemuck::cast_slice(dv),
        bytemuck::cast_slice(dsinks),
        bytemuck::cast_slice(&planning),
        bytemuck::cast_slice(&laps),
    ])
}

fn unpack<T: Element>(bytes: &[u8]) -> Part<T> {
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
    let lap = |&[backward, wall]: &[u64; 2]| Lap {
        direction: if backward == 1 { Direction::Backward } else { Direction::Forward },
        wall: Duration::from_nanos(wall),
        events: Vec::new(),
    };
    let laps = numbers::<[u64; 2]>(runs[7]).iter().map(lap).collect();
    Part { results, laps, planning: Duration::from_nanos(numbers::<u64>(runs[6])[0]) }
}
