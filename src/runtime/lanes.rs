// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two lanes of a rank, and how they wait for each other.
//!
//! The compute lane is the calling thread; the communication lane is a thread of the rank that sleeps between runs.
//! Each executes its operations in order and publishes its progress; an operation with a predecessor in the other lane
//! waits until that lane has finished it. There is no other synchronisation; which lane is ahead changes no result.
//!
//! When either lane fails or panics, the other stops at its next wait, the transport is aborted so that no peer waits
//! for this rank, and the call returns (or unwinds) only after both lanes have stopped using the caller's memory.
//!
//! This module does not define what the lanes execute: [`host`](super::host) executes a schedule, and the models of
//! `.ci/loom` execute work for the model checker.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Instant,
    vec::Vec,
};

use super::failure::{abort, cause_of};
use crate::{
    error::{Cause, Error, Result},
    report::trace,
    schedule::Lane,
    sync::{self, Condvar, Mutex, MutexGuard, Process, thread},
    transport::Transport,
};

/// The communication lane's part of one run.
pub type Task<'a> = dyn FnMut(&Progress) -> Result<()> + Send + 'a;

/// The task of one run. It lies on the stack of [`LaneThreads::run`], which does not return before the lane is done
/// with it.
struct TaskPointer(*mut Task<'static>);

// SAFETY: the task is `Send`, and used by one thread, the communication lane, while `LaneThreads::run` waits for it.
unsafe impl Send for TaskPointer {}

#[derive(Default)]
struct LaneState {
    job: Option<TaskPointer>,
    /// The communication lane has a job or is executing it.
    busy: bool,
    leave: bool,
    /// Progress of each lane: all of its operations with a lower index are complete.
    done: [usize; 2],
    /// The event that each lane is parked for. Only a parked lane is notified, because a notification is a system call
    /// even if no thread waits.
    parked: [Option<Parked>; 2],
    /// One lane failed: stop at the next wait.
    stop: bool,
    error: Option<Error>,
    panic: Option<Box<dyn Any + Send>>,
    recorder: Option<TraceRecorder>,
}

/// The event that wakes a parked lane. The failure of a run wakes it too.
#[derive(Clone, Copy)]
enum Parked {
    /// This operation of the other lane is done.
    Operation(usize),
    /// For the communication lane: it has a job or must end. For the compute lane: the job is over.
    Job,
}

impl LaneState {
    /// Whether the event that `lane` waits for has happened.
    const fn ends(&self, lane: Lane, until: Parked) -> bool {
        match (until, lane) {
            (Parked::Operation(op), _) => self.stop || self.done[1 - lane as usize] > op,
            (Parked::Job, Lane::Communication) => self.leave || self.job.is_some(),
            (Parked::Job, Lane::Compute) => !self.busy,
        }
    }
}

struct TraceRecorder {
    epoch: Instant,
    rank: usize,
    events: Vec<trace::Event>,
}

/// The progress of both lanes, and the failure of a run.
pub struct Progress {
    state: Mutex<LaneState>,
    /// Wakes each lane.
    wakes: [Condvar; 2],
}

/// The lanes of one rank.
pub struct LaneThreads {
    progress: Arc<Progress>,
    transport: Arc<dyn Transport>,
    /// With the process that has started it.
    thread: Option<(Process, thread::JoinHandle<()>)>,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, LaneState> {
        sync::lock(&self.state)
    }

    /// Waits until the event has happened: yields the core a few times, then parks `lane`.
    fn park(&self, lane: Lane, until: Parked) -> MutexGuard<'_, LaneState> {
        let mut state = self.lock();
        while !state.ends(lane, until) {
            for _ in 0..sync::YIELDS {
                drop(state);
                let again = sync::yield_core();
                state = self.lock();
                // The event may have happened while the lock was free; then no notification would follow.
                if state.ends(lane, until) {
                    return state;
                }
                if !again {
                    break;
                }
            }
            state.parked[lane as usize] = Some(until);
            state = sync::park(&self.wakes[lane as usize], state);
            state.parked[lane as usize] = None;
        }
        state
    }

    /// Releases the lock, and wakes `lane` if it is parked and its event has happened.
    fn wake(&self, mut state: MutexGuard<'_, LaneState>, lane: Lane) {
        let i = lane as usize;
        let ends = state.parked[i].is_some_and(|until| state.ends(lane, until));
        if ends {
            state.parked[i] = None;
        }
        drop(state);
        if ends {
            self.wakes[i].notify_one();
        }
    }

    /// Parks `lane` until operation `op` of the other lane is done; false when the run has failed.
    pub fn wait_for(&self, lane: Lane, op: usize) -> bool {
        !self.park(lane, Parked::Operation(op)).stop
    }

    /// Records that `lane` has completed all of its operations below `upto`.
    pub fn advance(&self, lane: Lane, upto: usize, event: Option<trace::Event>) {
        let mut state = self.lock();
        state.done[lane as usize] = upto;
        if let (Some(event), Some(r)) = (event, &mut state.recorder)
            && r.events.len() < r.events.capacity()
        {
            r.events.push(event);
        }
        self.wake(
            state,
            match lane {
                Lane::Compute => Lane::Communication,
                Lane::Communication => Lane::Compute,
            },
        );
    }

    /// The clock of the trace and the rank, while one is recorded.
    pub(super) fn clock(&self) -> Option<(Instant, usize)> {
        self.lock().recorder.as_ref().map(|r| (r.epoch, r.rank))
    }

    /// Ends the run for both lanes.
    fn fail(&self, error: Option<Error>, panic: Option<Box<dyn Any + Send>>) {
        let mut state = self.lock();
        // The first error is the cause; later ones follow from it.
        if !state.stop {
            state.error = error;
        }
        if state.panic.is_none() {
            state.panic = panic;
        } else {
            // Dropping the payload of a second panic may panic too, and a lane must not unwind from here.
            std::mem::forget(panic);
        }
        state.stop = true;
        self.wake(state, Lane::Compute);
        self.wake(self.lock(), Lane::Communication);
    }

    /// Runs one lane's part. An error or a panic ends the run for both lanes and for the peers.
    fn part(&self, transport: &dyn Transport, lane: impl FnOnce() -> Result<()>) {
        match catch_unwind(AssertUnwindSafe(lane)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let cause = cause_of(&error);
                self.fail(Some(error), None);
                abort(transport, cause);
            }
            Err(panic) => {
                self.fail(None, Some(panic));
                abort(transport, Cause::Panicked);
            }
        }
    }
}

impl LaneThreads {
    /// The lanes of a rank at that end of a transport.
    pub fn new(transport: Arc<dyn Transport>) -> Self {
        let progress =
            Arc::new(Progress { state: Mutex::new(LaneState::default()), wakes: [Condvar::new(), Condvar::new()] });
        Self { progress, transport, thread: None }
    }

    pub(super) fn record(&mut self, epoch: Instant, capacity: usize) {
        let rank = self.transport.rank();
        self.progress.lock().recorder =
            (capacity > 0).then(|| TraceRecorder { epoch, rank, events: Vec::with_capacity(capacity) });
    }

    pub(super) fn events(&mut self) -> Vec<trace::Event> {
        let mut state = self.progress.lock();
        state.recorder.as_mut().map_or_else(Vec::new, |r| {
            let room = r.events.capacity();
            std::mem::replace(&mut r.events, Vec::with_capacity(room))
        })
    }

    /// Refuses a forked process, which has no communication lane if its parent has started one, and would wait for it.
    pub(super) fn check_process(&self) -> Result<()> {
        match &self.thread {
            Some((process, _)) if !process.is_this() => Err(Error::invalid(
                "rank",
                std::format!("of process {}", process.id()),
                std::format!("one of this process, {}, which was forked from that one", Process::this().id()),
            )
            .hint("use the rank in its own process, or make a new group here")),
            _ => Ok(()),
        }
    }

    /// Starts the communication lane's thread, once it is first needed. If it cannot start, a later call tries again.
    pub fn ensure_thread(&mut self) -> Result<()> {
        if self.thread.is_some() {
            return Ok(());
        }
        let (progress, transport) = (Arc::clone(&self.progress), Arc::clone(&self.transport));
        let spawned = thread::Builder::new()
            .name(std::format!("cpattn-comm-{}", self.transport.rank()))
            .spawn(move || communicate(&progress, &*transport))
            .map_err(|error| Error::of_thread("the rank's communication", &error))?;
        self.thread = Some((Process::this(), spawned));
        Ok(())
    }

    /// Runs `compute` on this thread and, at the same time, `communication` on the communication lane's thread; without
    /// `communication` it never waits for that lane. Returns when both are over, with the first error, or resumes a
    /// panic.
    ///
    /// # Errors
    /// The error of a lane; [`Error::Device`] when the thread cannot be started.
    pub fn run(
        &mut self,
        compute: impl FnOnce(&Progress) -> Result<()>,
        communication: Option<&mut Task<'_>>,
    ) -> Result<()> {
        if communication.is_some() {
            self.ensure_thread()?;
        }
        let mut state = self.progress.lock();
        state.done = [0, if communication.is_some() { 0 } else { usize::MAX }];
        (state.stop, state.error, state.panic) = (false, None, None);
        if let Some(task) = communication {
            // SAFETY: only the lifetime changes. The lane is done with the task before `busy` is cleared, and this
            // function does not end, not even by a panic, before that.
            let task = unsafe { core::mem::transmute::<*mut Task<'_>, *mut Task<'static>>(task) };
            state.job = Some(TaskPointer(task));
            state.busy = true;
            self.progress.wake(state, Lane::Communication);
        } else {
            drop(state);
        }
        self.progress.part(&*self.transport, || compute(&self.progress));
        let mut state = self.progress.park(Lane::Compute, Parked::Job);
        let (error, panic) = (state.error.take(), state.panic.take());
        drop(state);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        error.map_or(Ok(()), Err)
    }
}

/// The body of the communication lane's thread.
fn communicate(progress: &Progress, transport: &dyn Transport) {
    loop {
        let job = progress.park(Lane::Communication, Parked::Job).job.take();
        // A rank leaves when no run is under way.
        let Some(job) = job else { return };
        // SAFETY: `LaneThreads::run` keeps the task alive, and does not use it itself, until `busy` is cleared below.
        progress.part(transport, || unsafe { (*job.0)(progress) });
        let mut state = progress.lock();
        state.busy = false;
        progress.wake(state, Lane::Compute);
    }
}

impl Drop for LaneThreads {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // Nothing would end the wait for a thread of another process, or for a lock that it held when this one was
            // forked.
            std::mem::forget(self.thread.take());
            return;
        }
        let mut state = self.progress.lock();
        state.leave = true;
        self.progress.wake(state, Lane::Communication);
        if let Some((_, thread)) = self.thread.take() {
            // The lane catches its own panics; a join error could only repeat one that was already reported.
            let _ = thread.join();
        }
    }
}
