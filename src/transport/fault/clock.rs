// SPDX-License-Identifier: MIT OR Apache-2.0
//! The clock of deadlines: time in which the process did not run does not count as waiting.
//!
//! Whoever waits reads the clock at short intervals. If two readings lie further apart than the waiting program could
//! let them, the process was stopped or got no core, and the time between them is a gap.

use std::time::{Duration, Instant};

/// The times at which somebody looked.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport) struct Clock {
    seen: Instant,
    longest: Duration,
}

impl Clock {
    /// A clock that is read at least every `longest` while the process runs.
    pub(in crate::transport) fn new(longest: Duration) -> Self {
        Self { seen: Instant::now(), longest }
    }

    /// Reads the clock. The time since the last reading, if the process did not run then; 0 if it did.
    pub(in crate::transport) fn gap(&mut self) -> Duration {
        let now = Instant::now();
        let since = now - self.seen;
        self.seen = now;
        if since > self.longest { since } else { Duration::ZERO }
    }

    /// The time of the last reading.
    pub(in crate::transport) fn seen(&self) -> Instant {
        self.seen
    }
}
