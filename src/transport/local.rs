// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as threads of one process.
//!
//! The group shares one board (`board.rs`) under one mutex. A rank that enters an exchange posts its lists there, and
//! then copies *its own receives* as their senders arrive: one copy, directly from the sender's memory to the
//! receiver's. The receiver copies, not the rank that arrives last, for three reasons: the copies of an exchange are
//! spread over all threads; the bytes are in the cache of the core that will use them; and each thread writes only its
//! own memory, so that ranks wait only for readers of a sender's memory.
//!
//! The mutex guards a few numbers per rank. It is never held during a copy, so pairs copy in parallel. A rank that has
//! nothing to copy yields its core a few times and checks again, then parks on its own condition variable; it never
//! spins. After [`group`] nothing is allocated unless something fails.
//!
//! The first failure is written on the board and stays there: every waiting rank is woken, and every later call returns
//! it. A rank whose call fails first removes its lists, so that no rank starts to copy from them, and then waits for
//! copies in progress; so no memory is accessed after an exchange has returned.
//!
//! - A rank that is dropped fails the group only once another rank needs it; a rank that is dropped by a panic fails
//!   the group at once.
//! - The deadline counts from the last message that moved. The error names the nearest rank that is in no call, along
//!   the chain of ranks that wait for each other; it does not name a peer that is itself waiting.
//! - An exchange that is complete returns `Ok` even if something failed meanwhile; the next call reports the failure.
//! - If numbers differ in `agree`, the group does not fail: every rank gets the error and may plan again. If two ranks
//!   wait for each other in different groups, as with plans of different numbers of replicas, both get that error at
//!   once, and the group fails.
//! - If a rank's exchange needs a peer that waits in an `agree` with this rank, neither call can end: both fail at
//!   once, without waiting for the deadline. If the exchange belongs to a run, every rank gets the error that says that
//!   the two run different things.

mod board;
#[cfg(any(feature = "cuda", cpattn_loom))]
mod enqueued;

use super::{
    Label, Message, Transport,
    fault::{AGREEMENT, GroupFailure, millis},
    rules,
};
use crate::error::{Cause, Error, Result};
use crate::sync::{AtomicBool, Condvar, Lent, Limit, Mutex, MutexGuard, YIELDS, lock, wait, yield_core};
use board::{Board, Claim, Phase};
use std::ops::Range;
use std::sync::{Arc, atomic::Ordering};
use std::time::{Duration, Instant};

/// Makes `world` ranks of one group; move each into its thread. `deadline` is a timeout: if a call waits so long while
/// none of its messages moves, the group fails.
///
/// # Errors
/// [`Error::Invalid`] if `world` is 0.
///
/// ```
/// use cpattn::transport::{Label, Message, Transport, local};
/// use std::time::Duration;
///
/// let ranks = local::group(2, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for rank in ranks {
///         scope.spawn(move || {
///             let (mine, mut theirs) = ([rank.rank() as u8; 4], [9; 4]);
///             let send = Message { peer: 1 - rank.rank(), ptr: mine.as_ptr().cast_mut(), bytes: 4 };
///             let recv = Message { peer: 1 - rank.rank(), ptr: theirs.as_mut_ptr(), bytes: 4 };
///             // SAFETY: both arrays outlive the call, and nothing else touches them.
///             unsafe { rank.exchange(Label::new("swap", 0), &[send], &[recv]) }.unwrap();
///             assert_eq!(theirs, [1 - rank.rank() as u8; 4]);
///         });
///     }
/// });
/// # Ok::<(), cpattn::Error>(())
/// ```
pub fn group(world: usize, deadline: Duration) -> Result<Vec<Local>> {
    if world == 0 {
        return Err(Error::invalid("world", 0, "at least 1 rank"));
    }
    rules::check_deadline(deadline)?;
    let shared = Arc::new(Shared {
        board: Mutex::new(Board::new(world, deadline)),
        condvars: (0..world).map(|_| Condvar::new()).collect(),
        memory: (0..world).map(|_| Lent::new()).collect(),
        failed: AtomicBool::new(false),
        world,
    });
    Ok((0..world).map(|rank| Local { shared: Arc::clone(&shared), rank }).collect())
}

/// Runs `rank` on `world` threads, each with its rank of a new [`group`], and returns their results in the order of
/// ranks. `deadline` as there.
///
/// # Errors
/// Of [`group`]; [`Error::Device`] if a thread cannot start. If ranks fail, the error of the lowest rank that failed by
/// itself. An error that only names another
/// rank ([`Error::Peer`]) is returned if there is no other.
///
/// # Panics
/// If a rank panics, with its panic, once all ranks have ended.
///
/// ```
/// use cpattn::transport::{Transport, local};
/// use std::time::Duration;
///
/// let fingerprints = local::run(3, Duration::from_secs(10), |end| {
///     end.agree(0..3, 42)?;
///     Ok(end.rank())
/// })?;
/// assert_eq!(fingerprints, [0, 1, 2]);
/// # Ok::<(), cpattn::Error>(())
/// ```
pub fn run<T: Send>(world: usize, deadline: Duration, rank: impl Fn(Local) -> Result<T> + Sync) -> Result<Vec<T>> {
    let ends = group(world, deadline)?;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |end: Local| {
            let (shared, number, rank) = (Arc::clone(&end.shared), end.rank, &rank);
            std::thread::Builder::new().spawn_scoped(scope, move || rank(end)).map_err(|error| {
                // The ranks that have started must not wait for this one.
                shared.fail(&mut lock(&shared.board), GroupFailure::of(number, Cause::Failed));
                Error::of_thread(&std::format!("rank {number}"), &error)
            })
        };
        let threads: Vec<_> = ends.into_iter().map(start).collect();
        let joined: Vec<_> =
            threads.into_iter().map(|thread| thread.map(std::thread::ScopedJoinHandle::join)).collect();
        let result =
            |joined: std::thread::Result<Result<T>>| joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        joined.into_iter().map(|joined| joined.and_then(result)).collect()
    });
    let by_itself = |result: &Result<T>| matches!(result, Err(error) if error.peer().is_none());
    match results.iter().position(by_itself) {
        Some(cause) => Err(results.into_iter().nth(cause).and_then(Result::err).expect("it was found among them")),
        None => results.into_iter().collect(),
    }
}

/// One rank of a [`group`]. Dropping it means that the rank leaves.
///
/// Any thread may call [`poll`](Transport::poll) and [`abort`](Transport::abort) at any time; a second call of `agree`
/// or `exchange` on the same rank at the same time is refused with [`Error::Invalid`]. A program that shares a rank
/// between threads must call `abort` when one of them ends early, because the rank is not dropped while another thread
/// waits in a call.
pub struct Local {
    shared: Arc<Shared>,
    rank: usize,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Local").field("rank", &self.rank).field("world", &self.shared.world).finish_non_exhaustive()
    }
}

struct Shared {
    board: Mutex<Board>,
    /// One per rank: only that rank's waiting call parks on it.
    condvars: Vec<Condvar>,
    /// One per rank: the memory of its sends.
    memory: Vec<Lent>,
    /// A copy of "the board has a failure", so that `poll` takes no lock.
    failed: AtomicBool,
    world: usize,
}

impl Shared {
    fn wake(&self, board: &mut Board, rank: usize) {
        if std::mem::replace(&mut board.ranks[rank].parked, false) {
            self.condvars[rank].notify_one();
        }
    }

    fn wake_all(&self, board: &mut Board) {
        (0..self.world).for_each(|rank| self.wake(board, rank));
    }

    /// Puts a failure on the board, unless there is one, and wakes all ranks.
    fn fail(&self, board: &mut Board, failure: GroupFailure) {
        if board.fail(failure) {
            self.failed.store(true, Ordering::Release);
            self.wake_all(board);
        }
    }

    /// Fails the group, because the two sides of a message that `rank` has claimed differ in size.
    fn fail_size(&self, board: &mut Board, rank: usize, Claim { send, recv }: &Claim) {
        board.release(rank, recv.peer);
        let sizes = [recv.bytes, send.bytes].map(|bytes| bytes as u64);
        self.fail(board, GroupFailure::of_size(rank, recv.peer, sizes));
    }

    /// Parks `rank`; true if the limit has passed and no rank has woken it.
    fn park<'a>(&self, mut board: MutexGuard<'a, Board>, rank: usize, limit: Limit) -> (MutexGuard<'a, Board>, bool) {
        board.ranks[rank].parked = true;
        let (mut board, expired) = wait(&self.condvars[rank], board, limit);
        let woken = !std::mem::replace(&mut board.ranks[rank].parked, false);
        (board, expired && !woken)
    }
}

/// How long a call has been waiting since something moved.
struct WaitProgress {
    limit: Option<Limit>,
    since: Instant,
    moved: u64,
    /// How often the rank yielded its core before it parks.
    yields: u32,
}

impl WaitProgress {
    fn new(moved: u64) -> Self {
        Self { limit: None, since: Instant::now(), moved, yields: 0 }
    }
}

impl Local {
    /// Replaces this rank's deadline, from its next wait on.
    pub fn set_deadline(&self, deadline: Duration) {
        lock(&self.shared.board).ranks[self.rank].deadline = deadline;
    }

    /// Refuses lists that break the contract, before any of their messages is posted.
    pub(super) fn check(&self, sends: &[Message], recvs: &[Message]) -> Result<()> {
        rules::check_messages(self.rank, self.shared.world, sends, recvs)
    }

    /// Parks this rank, whose call is not complete, unless that call cannot become complete any more.
    fn pause<'a>(
        &'a self,
        mut board: MutexGuard<'a, Board>,
        label: Label,
        progress: &mut WaitProgress,
    ) -> (MutexGuard<'a, Board>, Result<()>) {
        if let Some(peer) = board.gone(self.rank) {
            self.shared.fail(&mut board, GroupFailure::of(peer, Cause::Left));
        }
        if let Some(crossed) = board.crossed(self.rank) {
            self.shared.fail(&mut board, crossed);
        }
        if let Some(error) = board.error(self.rank, label) {
            return (board, Err(error));
        }
        let place = &board.ranks[self.rank];
        let deadline = place.deadline;
        if place.moved != progress.moved {
            *progress = WaitProgress::new(place.moved);
        }
        if progress.yields < YIELDS {
            drop(board);
            progress.yields = if yield_core() { progress.yields + 1 } else { YIELDS };
            // The mutex was released, so the caller must check again before this rank parks.
            return (lock(&self.shared.board), Ok(()));
        }
        let limit = *progress.limit.get_or_insert_with(|| Limit::after(deadline));
        let (mut board, expired) = self.shared.park(board, self.rank, limit);
        if expired {
            match board.at_fault(self.rank) {
                Some(at_fault) if board.ranks[self.rank].moved == progress.moved => {
                    let ms = millis(progress.since.elapsed());
                    let bytes = board.waiting(self.rank);
                    self.shared.fail(&mut board, GroupFailure::of_deadline(self.rank, at_fault, ms, bytes));
                }
                _ => progress.limit = None,
            }
        }
        (board, Ok(()))
    }
}

impl Transport for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.world
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let (rank, shared) = (self.rank, &*self.shared);
        rules::check_group(rank, shared.world, &group)?;
        let label = Label::new(AGREEMENT, 0);
        let mut board = lock(&shared.board);
        board.enter(rank, label, Some(fingerprint))?;
        if board.offer(rank, group.clone()) {
            group.for_each(|peer| shared.wake(&mut board, peer));
        } else if let Some((peer, theirs)) = board.other_group(rank) {
            // Both get the error that says what they run. The group fails: other ranks may wait for one of the two.
            board.answer(peer, (rank, fingerprint));
            board.ranks[rank].phase = Phase::Idle;
            let failure = GroupFailure::crossed(rank, peer).of_runs(Some(fingerprint), Some(theirs));
            shared.fail(&mut board, failure);
            return Err(Error::disagreement(rank, peer, fingerprint, theirs));
        }
        let mut progress = WaitProgress::new(board.ranks[rank].moved);
        while board.ranks[rank].phase != Phase::Answered {
            let outcome;
            (board, outcome) = self.pause(board, label, &mut progress);
            if let Err(error) = outcome
                && board.ranks[rank].phase != Phase::Answered
            {
                board.ranks[rank].phase = Phase::Idle;
                return Err(error);
            }
        }
        board.ranks[rank].phase = Phase::Idle;
        match board.ranks[rank].verdict {
            None => Ok(()),
            Some((peer, theirs)) => Err(Error::disagreement(rank, peer, fingerprint, theirs)),
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.check(sends, recvs)?;
        let (rank, shared) = (self.rank, &*self.shared);
        let mut board = lock(&shared.board);
        board.enter(rank, label, label.number())?;
        shared.memory[rank].own();
        board.post(rank, sends, recvs);
        for send in sends {
            if board.ranks[send.peer].phase == Phase::Exchange {
                shared.wake(&mut board, send.peer);
            }
        }
        let mut progress = WaitProgress::new(board.ranks[rank].moved);
        let outcome = loop {
            let before = board.ranks[rank].moved;
            for peer in recvs.iter().map(|recv| recv.peer) {
                if board.error(rank, label).is_some() {
                    break;
                }
                let Some(claim) = board.claim(peer, rank) else { continue };
                if claim.recv.bytes != claim.send.bytes {
                    shared.fail_size(&mut board, rank, &claim);
                    break;
                }
                drop(board);
                let (from, to, bytes) = (claim.send.ptr.cast_const(), claim.recv.ptr, claim.recv.bytes);
                // SAFETY: both ranges are valid for `bytes` and nothing else writes either, by the contract of the two
                // exchanges that posted them. Neither exchange has returned: this one is here, and the sender's counts
                // this copy among its readers from the claim until `moved` below.
                shared.memory[peer].borrow(|| unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) });
                board = lock(&shared.board);
                if board.moved(rank, peer) {
                    shared.wake(&mut board, peer);
                }
            }
            let place = &board.ranks[rank];
            if place.unread + place.unwritten == 0 {
                break Ok(());
            }
            // Senders may have come while the mutex was released for a copy.
            if place.moved != before {
                continue;
            }
            let outcome;
            (board, outcome) = self.pause(board, label, &mut progress);
            if outcome.is_err() {
                break outcome;
            }
        };
        board.retire(rank);
        while board.ranks[rank].readers > 0 {
            (board, _) = shared.park(board, rank, Limit::NEVER);
        }
        board.ranks[rank].phase = Phase::Idle;
        drop(board);
        shared.memory[rank].own();
        outcome
    }

    fn poll(&self) -> Result<()> {
        if !self.shared.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let board = lock(&self.shared.board);
        let label = board.ranks[self.rank].label;
        board.error(self.rank, label).map_or(Ok(()), Err)
    }

    fn abort(&self, cause: Cause) {
        self.shared.fail(&mut lock(&self.shared.board), GroupFailure::of(self.rank, cause));
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let mut board = lock(&self.shared.board);
        board.ranks[self.rank].phase = Phase::Gone;
        if std::thread::panicking() {
            self.shared.fail(&mut board, GroupFailure::of(self.rank, Cause::Panicked));
        }
        self.shared.wake_all(&mut board);
    }
}
