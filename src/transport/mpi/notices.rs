// SPDX-License-Identifier: MIT OR Apache-2.0
//! Notices between ranks, beside the messages of exchanges: that a run has failed, which rank waits for which, that a
//! rank leaves.
//!
//! A receive from any rank is always posted for notices. Calls that wait check it, and so does `poll`; a rank that
//! computes gets a failure at its next call. A rank whose deadline has passed asks the peer it waits for which rank
//! that peer waits for, and so on: the search of [`fault`](crate::transport::fault).

use std::{
    ffi::c_int,
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
    vec::Vec,
};

use super::raw::{Comm, Refused, Request};
use crate::{error::Cause, transport::fault::GroupFailure};

/// Which rank a rank waits for, and in what: an agreement or an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitsFor {
    pub on: usize,
    pub agreeing: bool,
}

impl WaitsFor {
    /// The code of no wait.
    const NONE: usize = usize::MAX;

    fn code(self) -> usize {
        self.on << 1 | usize::from(self.agreeing)
    }

    fn from_code(code: usize) -> Option<Self> {
        (code != Self::NONE).then_some(Self { on: code >> 1, agreeing: code & 1 == 1 })
    }
}

/// A rank that asks, and the number of its question.
type Asked = (usize, u64);

/// Differs from the tag of agreements, which use the same communicator.
const TAG: c_int = 2;

/// A notice as it is sent.
type Words = [u64; 5];

/// A notice in flight: words that MPI may still read or write.
struct NoticeInFlight {
    words: NonNull<Words>,
    request: Request,
}

// SAFETY: memory of its own and a request, which any thread may use.
unsafe impl Send for NoticeInFlight {}

impl NoticeInFlight {
    fn new(words: Words) -> Self {
        Self { words: NonNull::from(Box::leak(Box::new(words))), request: Request::none() }
    }
}

impl Drop for NoticeInFlight {
    fn drop(&mut self) {
        if self.request.is_none() {
            // SAFETY: made by Box in `new`, and MPI is done with it.
            drop(unsafe { Box::from_raw(self.words.as_ptr()) });
        }
    }
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
}

impl Notice {
    fn words(self) -> Words {
        match self {
            Self::Over(GroupFailure { peer, cause, other }) => {
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
                [kind, a, b, peer as u64, other as u64]
            }
            Self::Ask { from, question } => [16, from as u64, question, 0, 0],
            Self::Waits { question, wait, ms } => [17, question, wait.code() as u64, ms, 0],
            Self::Left { from } => [18, from as u64, 0, 0, 0],
        }
    }

    fn from_words([kind, a, b, c, d]: Words) -> Option<Self> {
        let over = |cause| Some(Self::Over(GroupFailure { peer: c as usize, cause, other: d as usize }));
        match kind {
            1 => over(Cause::Deadline { ms: a, bytes: b }),
            2 => over(Cause::Panicked),
            3 => over(Cause::Left),
            4 => over(Cause::Aborted),
            5 => over(Cause::Size { ours: a, theirs: b }),
            6 => over(Cause::Failed),
            7 => over(Cause::Disagreed { with: a as usize }),
            16 => Some(Self::Ask { from: a as usize, question: b }),
            17 => WaitsFor::from_code(b as usize).map(|wait| Self::Waits { question: a, wait, ms: c }),
            18 => Some(Self::Left { from: a as usize }),
            _ => None,
        }
    }
}

/// The notices of a rank: the posted receive, the sends in flight, and the last answer.
pub(super) struct Notices {
    comm: Comm,
    arriving: Mutex<NoticeInFlight>,
    leaving: Mutex<Vec<NoticeInFlight>>,
    /// Which rank this one waits for just now, as a code, and since when, in milliseconds after `began`.
    waits: AtomicUsize,
    since: AtomicU64,
    began: Instant,
    /// Questions that came while this rank waited for none: answered once it waits again.
    asked: Mutex<Vec<Asked>>,
    /// Whether `asked` may have any.
    open: AtomicBool,
    /// The last answer, behind its question.
    answer: Mutex<Option<(u64, WaitsFor, u64)>>,
    /// By rank: whether it has left.
    left: Vec<AtomicBool>,
}

impl Notices {
    pub(super) fn new(comm: Comm, world: usize) -> Result<Self, Refused> {
        let mut arriving = NoticeInFlight::new([0; 5]);
        post(comm, &mut arriving)?;
        let leaving = Mutex::new(Vec::with_capacity(16));
        Ok(Self {
            comm,
            arriving: Mutex::new(arriving),
            leaving,
            waits: AtomicUsize::new(WaitsFor::NONE),
            since: AtomicU64::new(0),
            began: Instant::now(),
            asked: Mutex::new(Vec::with_capacity(4)),
            open: AtomicBool::new(false),
            answer: Mutex::new(None),
            left: (0..world).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// Moves the receive and the sends in flight out, and leaves an empty value.
    pub(super) fn take(&mut self) -> Self {
        let rest = Self {
            comm: self.comm,
            arriving: Mutex::new(NoticeInFlight::new([0; 5])),
            leaving: Mutex::default(),
            waits: AtomicUsize::new(WaitsFor::NONE),
            since: AtomicU64::new(0),
            began: self.began,
            asked: Mutex::default(),
            open: AtomicBool::new(false),
            answer: Mutex::default(),
            left: Vec::new(),
        };
        std::mem::replace(self, rest)
    }

    /// Records that this rank waits for no other.
    pub(super) fn wait_for_none(&self) {
        self.waits.store(WaitsFor::NONE, Ordering::Relaxed);
    }

    /// Records which rank this one waits for, and since when, and answers the ranks that have asked.
    pub(super) fn wait_for(&self, wait: WaitsFor, since: Instant) {
        let ms = since.saturating_duration_since(self.began).as_millis();
        self.since.store(ms.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        self.waits.store(wait.code(), Ordering::Relaxed);
        // A question that is stored just now is found by the next poll: a rank that waits calls this again.
        if self.open.swap(false, Ordering::Acquire) {
            let asked = std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner));
            for (from, question) in asked {
                self.send(from, Notice::Waits { question, wait, ms: self.waited() });
            }
        }
    }

    /// For how many milliseconds this rank has waited.
    fn waited(&self) -> u64 {
        let now: u64 = self.began.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
        now.saturating_sub(self.since.load(Ordering::Relaxed))
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
        while in_flight.request.test("MPI_Irecv")? {
            if in_flight.request.is_none() {
                // SAFETY: complete, so MPI is done with the words.
                let words = unsafe { *in_flight.words.as_ptr() };
                post(self.comm, &mut in_flight)?;
                match Notice::from_words(words) {
                    Some(Notice::Over(failure)) => return Ok(Some(failure)),
                    Some(Notice::Ask { from, question }) => {
                        match WaitsFor::from_code(self.waits.load(Ordering::Relaxed)) {
                            Some(wait) => self.send(from, Notice::Waits { question, wait, ms: self.waited() }),
                            // `poll` may find it between two calls.
                            None => {
                                self.asked.lock().unwrap_or_else(PoisonError::into_inner).push((from, question));
                                self.open.store(true, Ordering::Release);
                            }
                        }
                    }
                    Some(Notice::Waits { question, wait, ms }) => {
                        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some((question, wait, ms));
                    }
                    Some(Notice::Left { from }) => {
                        if let Some(left) = self.left.get(from) {
                            left.store(true, Ordering::Relaxed);
                        }
                    }
                    None => {}
                }
            }
        }
        Ok(None)
    }

    /// The answer to a question, if it has come: for which rank the other one waits, and for how many milliseconds.
    pub(super) fn answer(&self, question: u64) -> Option<(WaitsFor, u64)> {
        let answer = *self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        answer.filter(|a| a.0 == question).map(|a| (a.1, a.2))
    }

    /// Sends a notice, and does not wait for it. An error is ignored: a rank that misses a notice reaches its own
    /// deadline.
    pub(super) fn send(&self, to: usize, notice: Notice) {
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        sent(&mut leaving);
        let mut in_flight = NoticeInFlight::new(notice.words());
        // SAFETY: the words live until the request is complete, or for ever.
        if let Ok(request) = unsafe { self.comm.send(in_flight.words.as_ptr().cast(), size_of::<Words>(), to, TAG) } {
            in_flight.request = request;
            leaving.push(in_flight);
        }
    }

    /// Cancels the receive, and waits for that at most `limit`. Returns whether MPI has released all memory.
    pub(super) fn close(&mut self, limit: Duration) -> bool {
        let in_flight = self.arriving.get_mut().unwrap_or_else(PoisonError::into_inner);
        in_flight.request.cancel();
        let began = std::time::Instant::now();
        let mut free = false;
        while !free && began.elapsed() < limit {
            free = matches!(in_flight.request.test("MPI_Irecv"), Ok(true));
        }
        free && self.all_sent()
    }

    /// Whether all sends are complete.
    pub(super) fn all_sent(&mut self) -> bool {
        let leaving = self.leaving.get_mut().unwrap_or_else(PoisonError::into_inner);
        sent(leaving);
        leaving.is_empty()
    }
}

/// Removes sends that are complete.
fn sent(leaving: &mut Vec<NoticeInFlight>) {
    leaving.retain_mut(|in_flight| !matches!(in_flight.request.test("MPI_Isend"), Ok(true)));
}

fn post(comm: Comm, in_flight: &mut NoticeInFlight) -> Result<(), Refused> {
    // SAFETY: the words live until the request is complete, or for ever; nothing reads them before.
    in_flight.request = unsafe { comm.receive(in_flight.words.as_ptr().cast(), size_of::<Words>(), None, TAG) }?;
    Ok(())
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
            let over = Notice::Over(GroupFailure { peer: 3, cause, other: 4 });
            assert_eq!(Notice::from_words(over.words()), Some(over));
        }
        let foreign = Cause::Returned { function: "exchange", code: 9 };
        let over = Notice::Over(GroupFailure { peer: 3, cause: foreign, other: 3 });
        let told = Notice::Over(GroupFailure { peer: 3, cause: Cause::Failed, other: 3 });
        assert_eq!(Notice::from_words(over.words()), Some(told));
        let waits = |agreeing| Notice::Waits { question: 8, wait: WaitsFor { on: 2, agreeing }, ms: 70 };
        for notice in [Notice::Ask { from: 5, question: 6 }, waits(false), waits(true), Notice::Left { from: 3 }] {
            assert_eq!(Notice::from_words(notice.words()), Some(notice));
        }
        assert_eq!(Notice::from_words([99, 0, 0, 0, 0]), None);
    }
}
