// SPDX-License-Identifier: MIT OR Apache-2.0
//! Notices between ranks, beside the messages of exchanges: that a run has failed, which rank waits for which, that a
//! rank leaves.
//!
//! A receive from any rank is always posted for notices. Calls that wait check it, and so does `poll`; a rank that
//! computes gets a failure at its next call. A rank whose deadline has passed asks the peer it waits for which rank
//! that peer waits for, and so on: the search of [`fault`](crate::transport::fault).
//!
//! A rank whose exchange has waited for a moment says to its peers which message it needs. A peer that agrees with it,
//! and has not sent or received that message in an exchange before, runs something else: neither call can end, and both
//! find it at once. Messages between two ranks are numbered, so this is certain however late a notice arrives.

use std::{
    boxed::Box,
    ffi::c_int,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
    vec::Vec,
};

use super::{
    in_flight::{MemoryInFlight, poll_until},
    raw::{Comm, Refused},
};
use crate::{
    error::Cause,
    transport::fault::{GroupFailure, millis},
};

/// Which rank a rank waits for, and in what: an agreement or an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitsFor {
    pub on: usize,
    pub agreeing: bool,
}

/// A rank that asks, and the number of its question.
type Asked = (usize, u64);

/// Differs from the tag of agreements, which use the same communicator.
const TAG: c_int = 2;

/// A notice as it is sent.
type Words = [u64; 7];

/// A message that the exchange of rank `from` needs: its number in the order of all messages between the two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub from: usize,
    /// Whether `from` waits to receive it; otherwise it waits for the other to receive.
    pub receives: bool,
    pub number: u64,
    /// What the ranks compare in the run of `from`; 0 if it is in none.
    pub fingerprint: u64,
}

/// A notice that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The run is over.
    Over(GroupFailure),
    /// Rank `from` asks which rank this one waits for.
    Ask { from: usize, question: u64 },
    /// The answer to a question, and for how many milliseconds the rank has waited.
    Waits { question: u64, wait: WaitsFor, ms: u64 },
    /// Rank `from` was dropped, in good order: nothing comes from it any more.
    Left { from: usize },
    /// Another rank has waited for a while for a message of its exchange.
    Needs(Need),
}

impl Notice {
    fn encode(self) -> Words {
        match self {
            Self::Over(GroupFailure { peer, cause, other, runs }) => {
                let (kind, a, b) = match cause {
                    Cause::Deadline { ms, bytes } => (1, ms, bytes),
                    Cause::Panicked => (2, 0, 0),
                    Cause::Left => (3, 0, 0),
                    Cause::Aborted => (4, 0, 0),
                    Cause::Size { ours, theirs } => (5, ours, theirs),
                    Cause::Disagreed { with } => (7, with as u64, 0),
                    // A code that another process's own function returned has no meaning here.
                    _ => (6, 0, 0),
                };
                // Fingerprints are not 0.
                let [of_peer, of_other] = runs.unwrap_or_default();
                [kind, a, b, peer as u64, other as u64, of_peer, of_other]
            }
            Self::Ask { from, question } => [16, from as u64, question, 0, 0, 0, 0],
            Self::Waits { question, wait, ms } => [17, question, wait.on as u64, ms, wait.agreeing.into(), 0, 0],
            Self::Left { from } => [18, from as u64, 0, 0, 0, 0, 0],
            Self::Needs(Need { from, receives, number, fingerprint }) => {
                [19, from as u64, receives.into(), number, fingerprint, 0, 0]
            }
        }
    }

    fn decode([kind, a, b, c, d, of_peer, of_other]: Words) -> Option<Self> {
        let runs = (of_peer != 0 && of_other != 0).then_some([of_peer, of_other]);
        let over = |cause| Some(Self::Over(GroupFailure { peer: c as usize, cause, other: d as usize, runs }));
        match kind {
            1 => over(Cause::Deadline { ms: a, bytes: b }),
            2 => over(Cause::Panicked),
            3 => over(Cause::Left),
            4 => over(Cause::Aborted),
            5 => over(Cause::Size { ours: a, theirs: b }),
            6 => over(Cause::Failed),
            7 => over(Cause::Disagreed { with: a as usize }),
            16 => Some(Self::Ask { from: a as usize, question: b }),
            17 => Some(Self::Waits { question: a, wait: WaitsFor { on: b as usize, agreeing: d != 0 }, ms: c }),
            18 => Some(Self::Left { from: a as usize }),
            19 => Some(Self::Needs(Need { from: a as usize, receives: b != 0, number: c, fingerprint: d })),
            _ => None,
        }
    }
}

/// The notices of a rank: the posted receive, the sends in flight, and the state of questions.
pub(super) struct Notices {
    comm: Comm,
    arriving: Mutex<MemoryInFlight<Words>>,
    leaving: Mutex<Vec<MemoryInFlight<Words>>>,
    questions: Mutex<Questions>,
    /// By rank: whether it has left.
    left: Vec<AtomicBool>,
}

#[derive(Default)]
struct Questions {
    /// Which rank this one waits for just now, and since when.
    wait: Option<(WaitsFor, Instant)>,
    /// Questions that came while this rank waited for none: answered once it waits again.
    asked: Vec<Asked>,
    /// The last answer, behind its question.
    answer: Option<(u64, WaitsFor, u64)>,
    /// The last need of each rank and way.
    needs: Vec<Need>,
}

impl Notices {
    pub(super) fn new(comm: Comm, world: usize) -> Result<Self, Refused> {
        let mut notices = Self::closed(comm, world);
        notices.arriving.get_mut().unwrap_or_else(PoisonError::into_inner).receive(comm, None, TAG)?;
        Ok(notices)
    }

    /// Neither receives nor sends anything.
    fn closed(comm: Comm, world: usize) -> Self {
        Self {
            comm,
            arriving: Mutex::new(MemoryInFlight::new(Box::default())),
            leaving: Mutex::default(),
            questions: Mutex::default(),
            left: (0..world).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Moves the receive and the sends in flight out, and leaves an empty value.
    pub(super) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::closed(self.comm, 0))
    }

    fn questions(&self) -> MutexGuard<'_, Questions> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this rank waits for no other.
    pub(super) fn wait_for_none(&self) {
        self.questions().wait = None;
    }

    /// Records which rank this one waits for, and since when, and answers the ranks that have asked.
    pub(super) fn wait_for(&self, wait: WaitsFor, since: Instant) {
        let asked = {
            let mut questions = self.questions();
            questions.wait = Some((wait, since));
            std::mem::take(&mut questions.asked)
        };
        for asked in asked {
            self.send_answer(asked, wait, since);
        }
    }

    /// Answers a question.
    fn send_answer(&self, (from, question): Asked, wait: WaitsFor, since: Instant) {
        self.send(from, Notice::Waits { question, wait, ms: millis(since.elapsed()) });
    }

    /// Whether a rank has said that it leaves.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::Relaxed)
    }

    /// Whether all ranks except `but` have left.
    pub(super) fn all_left(&self, but: usize) -> bool {
        (0..self.left.len()).all(|rank| rank == but || self.has_left(rank))
    }

    /// Receives notices and answers questions. Returns the failure of another rank, if one has arrived. Never waits.
    pub(super) fn listen(&self) -> Result<Option<GroupFailure>, Refused> {
        // Another thread is receiving.
        let Ok(mut in_flight) = self.arriving.try_lock() else { return Ok(None) };
        while let Some(&mut words) = in_flight.poll()? {
            in_flight.receive(self.comm, None, TAG)?;
            match Notice::decode(words) {
                Some(Notice::Over(failure)) => return Ok(Some(failure)),
                Some(Notice::Ask { from, question }) => {
                    let mut questions = self.questions();
                    match questions.wait {
                        Some((wait, since)) => {
                            drop(questions);
                            self.send_answer((from, question), wait, since);
                        }
                        // `poll` may find it between two calls.
                        None => questions.asked.push((from, question)),
                    }
                }
                Some(Notice::Needs(need)) => {
                    let needs = &mut self.questions().needs;
                    needs.retain(|old| (old.from, old.receives) != (need.from, need.receives));
                    needs.push(need);
                }
                Some(Notice::Waits { question, wait, ms }) => self.questions().answer = Some((question, wait, ms)),
                Some(Notice::Left { from }) => {
                    if let Some(left) = self.left.get(from) {
                        left.store(true, Ordering::Relaxed);
                    }
                }
                None => {}
            }
        }
        Ok(None)
    }

    /// The answer to a question, if it has come: for which rank the other one waits, and for how many milliseconds.
    pub(super) fn answer(&self, question: u64) -> Option<(WaitsFor, u64)> {
        self.questions().answer.filter(|a| a.0 == question).map(|a| (a.1, a.2))
    }

    /// The needs of other ranks for which `stands` is true. The others are forgotten: they were met.
    pub(super) fn needs(&self, stands: impl Fn(&Need) -> bool) -> Vec<Need> {
        let needs = &mut self.questions().needs;
        needs.retain(stands);
        needs.clone()
    }

    /// Sends a notice, and does not wait for it. An error is ignored: a rank that misses a notice reaches its own
    /// deadline.
    pub(super) fn send(&self, to: usize, notice: Notice) {
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        sent(&mut leaving);
        let mut in_flight = MemoryInFlight::new(Box::new(notice.encode()));
        if in_flight.send(self.comm, size_of::<Words>(), to, TAG).is_ok() {
            leaving.push(in_flight);
        }
    }

    /// Cancels the receive, and waits a moment for that. Returns whether MPI has released all memory.
    pub(super) fn close(&mut self) -> bool {
        let in_flight = self.arriving.get_mut().unwrap_or_else(PoisonError::into_inner);
        in_flight.cancel();
        poll_until(|| in_flight.is_done()) && self.all_sent()
    }

    /// Whether all sends are complete.
    pub(super) fn all_sent(&mut self) -> bool {
        let leaving = self.leaving.get_mut().unwrap_or_else(PoisonError::into_inner);
        sent(leaving);
        leaving.is_empty()
    }
}

/// Removes sends that are complete.
fn sent(leaving: &mut Vec<MemoryInFlight<Words>>) {
    leaving.retain_mut(|in_flight| !in_flight.is_done());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_survive_the_way() {
        let causes = [
            Cause::Deadline { ms: 7, bytes: u64::MAX },
            Cause::Panicked,
            Cause::Left,
            Cause::Aborted,
            Cause::Size { ours: 1, theirs: 2 },
            Cause::Failed,
            Cause::Disagreed { with: 5 },
        ];
        for cause in causes {
            for runs in [None, Some([8, u64::MAX])] {
                let over = Notice::Over(GroupFailure { peer: 3, cause, other: 4, runs });
                assert_eq!(Notice::decode(over.encode()), Some(over));
            }
        }
        let foreign = Cause::Returned { function: "exchange", code: 9 };
        let over = Notice::Over(GroupFailure { peer: 3, cause: foreign, other: 3, runs: None });
        let told = Notice::Over(GroupFailure { peer: 3, cause: Cause::Failed, other: 3, runs: None });
        assert_eq!(Notice::decode(over.encode()), Some(told));
        let waits = |agreeing| Notice::Waits { question: 8, wait: WaitsFor { on: 2, agreeing }, ms: 70 };
        let needs = |receives| Notice::Needs(Need { from: 5, receives, number: 7, fingerprint: u64::MAX });
        let others = [Notice::Ask { from: 5, question: 6 }, waits(false), waits(true), Notice::Left { from: 3 }];
        for notice in others.into_iter().chain([needs(false), needs(true)]) {
            assert_eq!(Notice::decode(notice.encode()), Some(notice));
        }
        assert_eq!(Notice::decode([99, 0, 0, 0, 0, 0, 0]), None);
    }
}
