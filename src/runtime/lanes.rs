// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two lanes of a rank, and how they wait for each other.
//!
//! The compute lane is the thread that calls; the communication lane is a thread of the rank's own that sleeps between
//! runs. Each walks its operations of the list in order and notes how far it has come; an operation with a predecessor
//! in the other lane parks until that lane has come far enough. That is all the synchronisation there is, and it is
//! the schedule's: which lane is ahead changes no result.
//!
//! When either lane fails or panics, the other is told, the transport is aborted so that no peer waits for this rank,
//! and the call returns (or goes on unwinding) only after both lanes have let go of the caller's memory.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, PoisonError},
    thread::JoinHandle,
    time::Instant,
    vec::Vec,
};

#[cfg(cpattn_tsan)]
use crate::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(cpattn_tsan))]
use std::sync::{Condvar, Mutex, MutexGuard};

use super::{
    failure::abort,
    host::Host,
    ops::{Memory, Room, perform},
    prepared::Prepared,
};
use crate::{
    error::{Cause, Error, Result},
    kernel::cpu::Scratch,
    plan::Plan,
    report::trace,
    schedule::{Lane, Schedule},
    transport::Transport,
};

/// One run, as the communication lane sees it. The caller's stack holds what it points to until the run is over.
struct Job {
    plan: *const Plan,
    schedule: *const Schedule,
    room: *mut Room,
    memory: *const Memory,
}

// SAFETY: the pointers are used by one thread, the communication lane, while `Lanes::run` waits for it.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// The communication lane has a job, or is at it.
    busy: bool,
    leave: bool,
    /// How many operations of the list each lane has behind it: all those with a lower index are done.
    done: [usize; 2],
    /// Somebody failed: stop at the next wait.
    stop: bool,
    error: Option<Error>,
    panic: Option<Box<dyn Any + Send>>,
    recorder: Option<Recorder>,
}

struct Recorder {
    epoch: Instant,
    rank: usize,
    events: Vec<trace::Event>,
}

struct Shared {
    state: Mutex<State>,
    compute: Condvar,
    communication: Condvar,
}

/// The lanes of one rank.
pub(super) struct Lanes {
    shared: Arc<Shared>,
    transport: Arc<dyn Transport>,
    thread: Option<JoinHandle<()>>,
}

const fn index(lane: Lane) -> usize {
    match lane {
        Lane::Compute => 0,
        Lane::Communication => 1,
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bell(&self, lane: Lane) -> &Condvar {
        match lane {
            Lane::Compute => &self.compute,
            Lane::Communication => &self.communication,
        }
    }

    /// Parks `lane` until operation `op` of the other lane is done; false when the run has failed.
    fn wait_for(&self, lane: Lane, op: usize) -> bool {
        let other = 1 - index(lane);
        let mut state = self.lock();
        while !state.stop && state.done[other] <= op {
            state = self.bell(lane).wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.stop
    }

    /// Notes that `lane` has done everything below `upto`.
    fn advance(&self, lane: Lane, upto: usize, event: Option<trace::Event>) {
        let mut state = self.lock();
        state.done[index(lane)] = upto;
        if let (Some(event), Some(r)) = (event, &mut state.recorder)
            && r.events.len() < r.events.capacity()
        {
            r.events.push(event);
        }
        drop(state);
        self.bell(match lane {
            Lane::Compute => Lane::Communication,
            Lane::Communication => Lane::Compute,
        })
        .notify_one();
    }

    /// Walks one lane's operations.
    ///
    /// # Safety
    /// As for [`perform`], for the whole list.
    unsafe fn walk(
        &self,
        lane: Lane,
        plan: &Plan,
        schedule: &Schedule,
        memory: &Memory,
        room: &mut Room,
        mut host: Host<'_>,
    ) -> Result<()> {
        let clock = self.lock().recorder.as_ref().map(|r| (r.epoch, r.rank));
        for (i, op) in schedule.ops.iter().enumerate().filter(|(_, op)| op.lane == lane) {
            if let Some(after) = op.after
                && !self.wait_for(lane, after as usize)
            {
                return Ok(());
            }
            let start = clock.map(|(epoch, _)| epoch.elapsed());
            // SAFETY: the memory fits the proved schedule and is nobody else's (promised by `run`'s caller); the waits above
            // are the order that the schedule asks for.
            let bytes = unsafe { perform(plan, schedule, i, memory, room, &mut host) }?;
            let event = start.zip(clock).map(|(start, (epoch, rank))| trace::Event {
                rank,
                lane,
                name: op.kind.name(),
                phase: op.phase,
                step: op.step,
                start_ns: start.as_nanos() as u64,
                end_ns: epoch.elapsed().as_nanos() as u64,
                bytes,
            });
            self.advance(lane, i + 1, event);
        }
        self.advance(lane, schedule.ops.len(), None);
        Ok(())
    }

    /// Ends the run for both lanes.
    fn fail(&self, error: Option<Error>, panic: Option<Box<dyn Any + Send>>) {
        let mut state = self.lock();
        // The first error is the cause; what follows from it says less.
        if !state.stop {
            state.error = error;
        }
        if state.panic.is_none() {
            state.panic = panic;
        } else {
            // What a second panic carries may itself panic when it is dropped, and a lane must not unwind from here.
            std::mem::forget(panic);
        }
        state.stop = true;
        drop(state);
        self.compute.notify_one();
        self.communication.notify_one();
    }
}

/// What the peers are told of an error of this rank's.
const fn cause_of(error: &Error) -> Cause {
    match error {
        Error::Disagreement { .. } => Cause::Disagreed,
        _ => Cause::Failed,
    }
}

impl Lanes {
    pub(super) fn new(transport: Arc<dyn Transport>) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            compute: Condvar::new(),
            communication: Condvar::new(),
        });
        Self { shared, transport, thread: None }
    }

    pub(super) fn record(&mut self, epoch: Instant, capacity: usize) {
        let rank = self.transport.rank();
        self.shared.lock().recorder =
            (capacity > 0).then(|| Recorder { epoch, rank, events: Vec::with_capacity(capacity) });
    }

    pub(super) fn events(&mut self) -> Vec<trace::Event> {
        let mut state = self.shared.lock();
        state.recorder.as_mut().map_or_else(Vec::new, |r| {
            let room = r.events.capacity();
            std::mem::replace(&mut r.events, Vec::with_capacity(room))
        })
    }

    /// Starts the communication lane's thread, once it is first needed.
    fn ensure_thread(&mut self) -> Result<()> {
        if self.thread.is_some() {
            return Ok(());
        }
        let (shared, transport) = (Arc::clone(&self.shared), Arc::clone(&self.transport));
        let spawned = std::thread::Builder::new()
            .name(std::format!("cpattn-comm-{}", self.transport.rank()))
            .spawn(move || communicate(&shared, transport))
            .map_err(|e| Error::Device {
                call: "thread spawn",
                code: i64::from(e.raw_os_error().unwrap_or(0)),
                message: std::format!("{e}"),
            })?;
        self.thread = Some(spawned);
        Ok(())
    }

    /// Makes sure that the lanes of `schedule` are there; whether it meets other ranks.
    fn meets(&mut self, schedule: &Schedule) -> Result<bool> {
        let meets = schedule.ops.iter().any(|op| op.lane == Lane::Communication);
        if meets {
            self.ensure_thread()?;
        }
        Ok(meets)
    }

    /// Does what running `schedule` would otherwise do first.
    pub(super) fn prepare(&mut self, schedule: &Schedule) -> Result<()> {
        self.meets(schedule).map(drop)
    }

    /// Runs a schedule on both lanes.
    ///
    /// # Safety
    /// As for [`perform`], for the whole list.
    pub(super) unsafe fn run(&mut self, prepared: &mut Prepared, memory: &Memory, scratch: &mut Scratch) -> Result<()> {
        let meets = self.meets(&prepared.schedule)?;
        let Prepared { plan, schedule, compute, communication, .. } = prepared;
        {
            let mut state = self.shared.lock();
            state.done = [0, if meets { 0 } else { usize::MAX }];
            (state.stop, state.error, state.panic) = (false, None, None);
            if meets {
                state.job = Some(Job { plan, schedule, room: communication, memory });
                state.busy = true;
            }
        }
        self.shared.communication.notify_one();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the memory fits the proved schedule and is nobody else's until this returns (promised);
            // `communication`'s room is the other lane's, `compute`'s is this one's.
            unsafe {
                let host = Host { scratch: Some(scratch), transport: &*self.transport };
                self.shared.walk(Lane::Compute, plan, schedule, memory, compute, host)
            }
        }));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let cause = cause_of(&error);
                self.shared.fail(Some(error), None);
                abort(&*self.transport, cause);
            }
            Err(panic) => {
                self.shared.fail(None, Some(panic));
                abort(&*self.transport, Cause::Panicked);
            }
        }
        let mut state = self.shared.lock();
        while state.busy {
            state = self.shared.compute.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (error, panic) = (state.error.take(), state.panic.take());
        drop(state);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        error.map_or(Ok(()), Err)
    }
}

/// The communication lane's life.
fn communicate(shared: &Shared, transport: Arc<dyn Transport>) {
    loop {
        let job = {
            let mut state = shared.lock();
            loop {
                if state.leave {
                    return;
                }
                if let Some(job) = state.job.take() {
                    break job;
                }
                state = shared.communication.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `Lanes::run` keeps what the job points to alive and untouched until `busy` is cleared below; the
            // room is this lane's own.
            unsafe {
                let (plan, schedule) = (&*job.plan, &*job.schedule);
                let host = Host { scratch: None, transport: &*transport };
                shared.walk(Lane::Communication, plan, schedule, &*job.memory, &mut *job.room, host)
            }
        }));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let cause = cause_of(&error);
                shared.fail(Some(error), None);
                abort(&*transport, cause);
            }
            Err(panic) => {
                shared.fail(None, Some(panic));
                abort(&*transport, Cause::Panicked);
            }
        }
        shared.lock().busy = false;
        shared.compute.notify_one();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.lock().leave = true;
        self.shared.communication.notify_one();
        if let Some(thread) = self.thread.take() {
            // The lane catches its own panics; a join error could only repeat one that was already reported.
            let _ = thread.join();
        }
    }
}
