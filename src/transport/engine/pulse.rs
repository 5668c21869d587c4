// SPDX-License-Identifier: MIT OR Apache-2.0
//! A clock that does not advance while the process is stopped or gets no core: that time does not count as waiting.
//!
//! A thread reads the system clock at short intervals. If two readings are much further apart, the time between them
//! does not count.

use std::{
    boxed::Box,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// A gap: two readings further apart than three intervals plus this time.
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
    lost: Duration,
    seen: Duration,
}

impl Pulse {
    pub(super) fn new(deadline: Duration) -> Self {
        let every = (deadline / 32).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let state = PulseState { running: false, lost: Duration::ZERO, seen: Duration::ZERO };
        Self { every, began: Instant::now(), state: Mutex::new(state), over: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, PulseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to count; without a thread it is an ordinary clock.
    pub(super) fn start(self: &Arc<Self>) {
        self.state().running = true;
        let pulse = self.clone();
        if !detached("cpattn pulse", Box::new(move || pulse.run())) {
            self.state().running = false;
        }
    }

    fn run(&self) {
        let mut state = self.state();
        while state.running {
            self.look(&mut state);
            state = self.over.wait_timeout(state, self.every).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn look(&self, state: &mut PulseState) {
        let now = self.began.elapsed();
        if state.running && now - state.seen > 3 * self.every + LATE {
            state.lost += now - state.seen;
        }
        state.seen = now;
    }

    /// The time since the clock was made, without gaps.
    pub(super) fn time(&self) -> Duration {
        let mut state = self.state();
        self.look(&mut state);
        state.seen - state.lost
    }

    /// It is an ordinary clock from now on.
    pub(super) fn close(&self) {
        self.state().running = false;
        self.over.notify_all();
    }
}

/// Runs a job on a thread that is never joined; false if no thread can be started.
pub(super) fn detached(name: &str, job: Box<dyn FnOnce() + Send>) -> bool {
    // Boxed, so that the code of a spawn, some kilobytes, exists once.
    thread::Builder::new().name(name.into()).spawn(job).is_ok()
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
