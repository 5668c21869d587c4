// SPDX-License-Identifier: MIT OR Apache-2.0
//! The time that ranks of an engine's group wait, without gaps in which the process did not run. The
//! [clock](crate::transport::fault) has to be read at short intervals, also while every other thread waits for the
//! library, so a thread reads it.

use crate::transport::fault::Clock;
use std::{
    boxed::Box,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Readings lie further apart than three intervals plus this time only if the process did not run.
const LATE: Duration = Duration::from_millis(50);

pub(super) struct Pulse {
    /// The interval between two polls.
    pub(super) every: Duration,
    began: Instant,
    state: Mutex<PulseState>,
    over: Condvar,
}

struct PulseState {
    running: bool,
    clock: Clock,
    gaps: Duration,
}

impl Pulse {
    pub(super) fn new(deadline: Duration) -> Self {
        let every = (deadline / 32).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let clock = Clock::new(3 * every + LATE);
        let state = PulseState { running: false, clock, gaps: Duration::ZERO };
        Self { every, began: clock.seen(), state: Mutex::new(state), over: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, PulseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to count.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        self.state().running = true;
        let pulse = self.clone();
        detached("cpattn pulse", Box::new(move || pulse.run())).inspect_err(|_| self.state().running = false)
    }

    fn run(&self) {
        let mut state = self.state();
        while state.running {
            self.update(&mut state);
            state = self.over.wait_timeout(state, self.every).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The time since the clock was made, without gaps.
    pub(super) fn time(&self) -> Duration {
        self.update(&mut self.state())
    }

    fn update(&self, state: &mut PulseState) -> Duration {
        let gap = state.clock.gap();
        if state.running {
            state.gaps += gap;
        }
        state.clock.seen() - self.began - state.gaps
    }

    /// It is an ordinary clock from now on.
    pub(super) fn close(&self) {
        self.state().running = false;
        self.over.notify_all();
    }
}

/// Runs a job on a thread that is never joined.
pub(super) fn detached(name: &str, job: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    // Boxed, so that the code of a spawn, some kilobytes, exists once.
    thread::Builder::new().name(name.into()).spawn(job).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_between_two_looks_that_lie_far_apart_does_not_count() {
        let pulse = Pulse::new(Duration::from_millis(1));
        pulse.state().running = true;
        let before = pulse.time();
        thread::sleep(Duration::from_millis(200));
        assert!(pulse.time() - before < Duration::from_millis(100));
        pulse.close();
        thread::sleep(Duration::from_millis(200));
        assert!(pulse.time() - before > Duration::from_millis(150));
    }
}
