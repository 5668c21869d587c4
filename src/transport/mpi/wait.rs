// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a call waits: it first polls often, then sleeps between polls, and after the deadline searches for the rank at
//! fault.
//!
//! MPI cannot sleep until something arrives, and the kernels need the cores. So if nothing moved, a call first yields
//! its core and polls again, then sleeps for increasing times up to a fifth of a millisecond. A message is noticed at
//! most that much later, and a rank that waits for a long time uses a few percent of a core. If other programs use the
//! cores, it sleeps at once, because a yielded core would come back only after their time slices.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::notices::{Notice, Notices, WaitsFor};
use crate::{
    sync::yield_core,
    transport::fault::{Answer, AtFault, Clock, Search, grace, millis},
};

/// How often a call yields its core and polls again before it sleeps.
const YIELDS: u32 = 64;

const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_micros(200);

/// How long an exchange waits before it says to its peers what it waits for: longer than most of them take.
const SLOW: Duration = Duration::from_millis(50);

/// How long a call still polls for messages of a rank that has left.
const LEFT: Duration = Duration::from_millis(50);

/// Polls lie further apart only if the process did not run.
const STOPPED: Duration = Duration::from_millis(100);

/// The shortest time that an asked rank has for its answer.
pub(super) const SHORTEST_GRACE: Duration = Duration::from_millis(250);

/// The open question to the rank that the search asks.
struct Question {
    number: u64,
    at: Instant,
    search: Search<bool>,
}

/// How long a call has been waiting since something moved, without the time in which its process did not run.
pub(super) struct DeadlineState {
    deadline: Duration,
    since: Instant,
    /// Read at each poll.
    clock: Clock,
    /// Since when it knows that the rank it waits for has left.
    left: Option<Instant>,
    yields: u32,
    sleeps: u32,
    /// [`is_slow`](Self::is_slow) was true.
    slow: bool,
    question: Option<Question>,
}

impl DeadlineState {
    pub(super) fn new(deadline: Duration) -> Self {
        let clock = Clock::new(STOPPED);
        Self { deadline, since: clock.seen(), clock, left: None, yields: 0, sleeps: 0, slow: false, question: None }
    }

    /// Records a poll. If the process was stopped since the last one, extends the deadline by the gap, and returns the
    /// gap; otherwise 0.
    pub(super) fn runs(&mut self) -> Duration {
        let gap = self.clock.gap();
        self.since += gap;
        if let Some(question) = &mut self.question {
            question.at += gap;
        }
        gap
    }

    /// Time of the last poll.
    pub(super) fn seen(&self) -> Instant {
        self.clock.seen()
    }

    /// Time from which the wait counts.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// For a peer that has left: whether that has been known for long enough for its last messages to arrive.
    pub(super) fn is_left_behind(&mut self) -> bool {
        self.left.get_or_insert(self.clock.seen()).elapsed() >= LEFT
    }

    /// Something moved.
    pub(super) fn moved(&mut self) {
        *self = Self::new(self.deadline);
    }

    /// Whether the deadline had passed at the last poll; the process may have been stopped since then.
    pub(super) fn is_over(&self) -> bool {
        self.seen().duration_since(self.since) >= self.deadline
    }

    /// Whether nothing has moved for [`SLOW`]: true once.
    pub(super) fn is_slow(&mut self) -> bool {
        let slow = !self.slow && self.seen().saturating_duration_since(self.since) >= SLOW;
        self.slow |= slow;
        slow
    }

    /// Yields the core, or sleeps.
    pub(super) fn sleep(&mut self) {
        if self.yields < YIELDS {
            self.yields += 1;
            if yield_core() {
                return;
            }
        }
        self.sleeps = self.sleeps.saturating_add(1);
        std::thread::sleep((SHORTEST * (1 << (self.sleeps / 16).min(5))).min(LONGEST));
    }

    /// The rank at fault once the deadline has passed and the search has ended, and the milliseconds since something
    /// moved. `wait` is the wait of this rank. Never waits: each call goes on with the search.
    pub(super) fn expired(
        &mut self,
        rank: usize,
        wait: WaitsFor,
        notices: &Notices,
        questions: &AtomicU64,
    ) -> Option<(AtFault<bool>, u64)> {
        if !self.is_over() {
            return None;
        }
        let waited = self.since.elapsed();
        let waits = |wait: WaitsFor, time| Answer::Waits { on: std::vec![wait.on], call: wait.agreeing, time };
        let (mut search, answer) = match self.question.take() {
            None => (Search::new(rank, self.deadline), waits(wait, waited)),
            Some(question) => {
                let answer = match notices.answer(question.number) {
                    Some((theirs, ms)) => waits(theirs, Duration::from_millis(ms)),
                    None if self.seen().saturating_duration_since(question.at)
                        >= grace(self.deadline, SHORTEST_GRACE) =>
                    {
                        Answer::Silent
                    }
                    None => {
                        self.question = Some(question);
                        return None;
                    }
                };
                (question.search, answer)
            }
        };
        if let Some(at_fault) = search.record_answer(answer) {
            return Some((at_fault, millis(waited)));
        }
        // 0 stands for no question.
        let number = questions.fetch_add(1, Ordering::Relaxed) + 1;
        notices.send(search.current_rank(), Notice::Ask { from: rank, question: number });
        self.question = Some(Question { number, at: Instant::now(), search });
        None
    }
}
