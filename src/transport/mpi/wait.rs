// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a call waits: it first polls often, then sleeps between polls, and after the deadline asks which rank is at
//! fault.
//!
//! MPI cannot sleep until something arrives, and the kernels need the cores. So if nothing moved, a call first yields
//! its core and polls again, then sleeps for increasing times up to a fifth of a millisecond. A message is noticed at
//! most that much later, and a rank that waits for a long time uses a few percent of a core. If other programs use the
//! cores, it sleeps at once, because a yielded core would come back only after their time slices.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
    vec::Vec,
};

use super::notices::{Notice, Notices, WaitsFor};
use crate::sync::yield_core;

/// How long a failed call, or a rank that leaves, gives MPI to let go of what it holds, before that is put aside.
pub(super) const SETTLE: Duration = Duration::from_millis(20);

/// How often a call yields its core and looks again before it sleeps.
const YIELDS: u32 = 64;

const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_micros(200);

/// How long a call goes on looking for messages of a rank that has left.
const LEFT: Duration = Duration::from_millis(50);

/// A call that does not look for that long did not run: it was stopped, or got no core.
const STOPPED: Duration = Duration::from_millis(100);

/// A question that is open.
struct Question {
    number: u64,
    asked: usize,
    at: Instant,
    seen: Vec<usize>,
    /// The first rank of the chain, this one included, that waits in an exchange, and the first in an agreement.
    kinds: [Option<usize>; 2],
    /// The rank that has waited least, and for how many milliseconds.
    least: (u64, usize),
}

/// Whose fault an expired deadline is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankAtFault {
    /// A rank that does not answer.
    Silent(usize),
    /// All wait for each other, and this one has only just come to: it computed for too long, or was stopped.
    Late(usize),
    /// All wait for each other, each in an exchange or each in an agreement: the one that this rank waits for.
    Circle(usize),
    /// All wait for each other, one in an agreement and one in an exchange: they run different things.
    Crossed { agreeing: usize, exchanging: usize },
}

/// How long a call has been waiting since something moved, without the time in which its process did not run.
pub(super) struct DeadlineState {
    deadline: Duration,
    since: Instant,
    /// When it last looked.
    seen: Instant,
    /// Since when it knows that the rank it waits for has left.
    left: Option<Instant>,
    yields: u32,
    sleeps: u32,
    question: Option<Question>,
}

impl DeadlineState {
    pub(super) fn new(deadline: Duration) -> Self {
        let now = Instant::now();
        Self { deadline, since: now, seen: now, left: None, yields: 0, sleeps: 0, question: None }
    }

    /// Notes that it looks. A process that was stopped, and whose peers are still there, has the rest of its deadline
    /// before it: what it waits for may have arrived meanwhile, and else the others name the right rank, this one. For how long
    /// it did not run; 0 if it was not stopped.
    pub(super) fn runs(&mut self) -> Duration {
        let now = Instant::now();
        let gap = now.duration_since(self.seen);
        self.seen = now;
        if gap <= STOPPED {
            return Duration::ZERO;
        }
        self.since += gap;
        if let Some(question) = &mut self.question {
            question.at += gap;
        }
        gap
    }

    /// When it last looked.
    pub(super) fn seen(&self) -> Instant {
        self.seen
    }

    /// Since when it waits.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// The rank that it waits for has left; whether that was known long enough for all to arrive that it had sent.
    pub(super) fn is_left_behind(&mut self) -> bool {
        self.left.get_or_insert(self.seen).elapsed() >= LEFT
    }

    /// Something moved.
    pub(super) fn moved(&mut self) {
        *self = Self::new(self.deadline);
    }

    /// Whether the deadline had passed when it last looked: it may have been stopped since then.
    pub(super) fn is_over(&self) -> bool {
        self.seen.duration_since(self.since) >= self.deadline
    }

    /// Gives the core away for a moment.
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

    /// Which rank to blame for a deadline that has passed, and how many milliseconds it took: found by questions, each of
    /// which gets time for an answer. `wait` is what this rank does.
    pub(super) fn expired(
        &mut self,
        rank: usize,
        wait: WaitsFor,
        notices: &Notices,
        questions: &AtomicU64,
    ) -> Option<(RankAtFault, u64)> {
        if !self.is_over() {
            return None;
        }
        let ask = |to: usize, mut seen: Vec<usize>, kinds, least| {
            // 0 is no question.
            let number = questions.fetch_add(1, Ordering::Relaxed) + 1;
            notices.send(to, Notice::Ask { from: rank, question: number });
            seen.push(to);
            Some(Question { number, asked: to, at: Instant::now(), seen, kinds, least })
        };
        let Some(mut question) = self.question.take() else {
            let mut kinds = [None; 2];
            kinds[usize::from(wait.agreeing)] = Some(rank);
            self.question = ask(wait.on, Vec::new(), kinds, (u64::MAX, rank));
            return None;
        };
        let ms = || self.since.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
        // As long as a rank that waits may take to get a core and answer.
        let grace = (self.deadline / 2).clamp(Duration::from_millis(250), Duration::from_secs(5));
        match notices.answer(question.number) {
            Some((WaitsFor { on, agreeing }, waited)) => {
                question.kinds[usize::from(agreeing)].get_or_insert(question.asked);
                question.least = question.least.min((waited, question.asked));
                if on != rank && !question.seen.contains(&on) {
                    self.question = ask(on, question.seen, question.kinds, question.least);
                    return None;
                }
                // Ranks that run different things, or wait for what is lost, have all waited for about as long.
                let (waited, last) = question.least;
                let is_late = |part: u32| Duration::from_millis(waited) < self.deadline / part;
                let verdict = match question.kinds {
                    [Some(_), Some(_)] if is_late(4) => RankAtFault::Late(last),
                    [Some(exchanging), Some(agreeing)] => RankAtFault::Crossed { agreeing, exchanging },
                    _ if is_late(2) => RankAtFault::Late(last),
                    // The first is as good as any.
                    _ => RankAtFault::Circle(question.seen[0]),
                };
                Some((verdict, ms()))
            }
            None if self.seen.saturating_duration_since(question.at) >= grace => {
                Some((RankAtFault::Silent(question.asked), ms()))
            }
            None => {
                self.question = Some(question);
                None
            }
        }
    }
}
