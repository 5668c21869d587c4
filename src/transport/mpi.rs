// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, over MPI.
//!
//! Whoever runs on many hosts has an MPI that knows the network; this transport is the exchange contract in its
//! non-blocking sends and receives. It works on two duplicates of the caller's communicator, one for messages and one for
//! agreements and notices, so that nothing of the caller's ever meets anything of its own. An `exchange` runs on the
//! rank's communication thread: it lets MPI work while the kernels compute, and sleeps when nothing moves.
//!
//! - Initialise MPI with `MPI_THREAD_MULTIPLE`. A rank calls MPI from a thread of its own, at times when the caller may
//!   call MPI too.
//! - Only memory of the transport is handed to MPI (`pipe.rs` says why): an exchange that has failed has let go of the
//!   caller's. Three pieces of 256 KiB each way for each peer that it exchanges with; nothing else is allocated in a run.
//! - A small message may leave before its receiver has come, as MPI decides; its sender then returns and hears of what went
//!   wrong there at its next call.
//! - A failure is told to every rank (`notices.rs`); a rank that hears nothing reaches its deadline, which counts from the
//!   last piece that moved. The peer that is blamed is the nearest one, along the chain of those who wait for each other,
//!   that does not answer. A rank that left without a word is one that does not answer.
//! - By its defaults MPI ends the whole job when a process dies: `mpirun` kills the others, and there is no error to
//!   return. Where it lets them live (Open MPI: `mpirun --enable-recovery`; MPICH: `mpiexec -disable-auto-cleanup`, and
//!   a shell round each process that ignores SIGUSR1), each gets its error at the deadline. After a failure, do not call `MPI_Finalize`: it may wait for the dead. Leave with
//!   `MPI_Abort`, or end the process.
//! - After a failure what MPI still holds is never freed: some pieces, and the two duplicates. An abort by a caller leaves
//!   all processes alive; they can make new transports.

mod notices;
mod pipe;
mod raw;
mod wait;

use std::{
    format,
    ops::Range,
    ptr::NonNull,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
    vec::Vec,
};

use ::mpi::{ffi::MPI_Comm, raw::AsRaw};

use super::{Label, Message, Transport};
use crate::error::{Cause, Error, Result};
use notices::{Failure, NOBODY, Notice, Notices};
use pipe::{Broken, Pipe, Way};
use raw::{Comm, Refused, Request};
use wait::Patience;

/// Messages have a communicator to themselves; agreements share one with notices.
const EXCHANGE: std::ffi::c_int = 1;
const AGREE: std::ffi::c_int = 1;

/// How long a failed call gives MPI to let go of what it holds, before that is abandoned.
const SETTLE: Duration = Duration::from_millis(20);

/// What two libraries must have in common to understand each other.
const PROTOCOL: u64 = 1;

/// One process's end of a group. See the module for what to do after a failure.
///
/// Any thread may call [`poll`](Transport::poll) and [`abort`](Transport::abort) at any time; of the calls that wait, a
/// second one is refused with [`Error::Invalid`]. Drop it, or the rank that has it, before MPI is finalised; dropping it
/// frees its communicators, which MPI may count as a collective call.
pub struct Mpi {
    rank: usize,
    world: usize,
    messages: Comm,
    others: Comm,
    notices: Notices,
    deadline: AtomicU64,
    label: Mutex<Label>,
    failure: OnceLock<Failure>,
    questions: AtomicU64,
    calls: Mutex<Calls>,
}

/// What the calls that wait work with.
struct Calls {
    sends: Vec<Pipe>,
    recvs: Vec<Pipe>,
    /// Those of this exchange that have anything left to do, by peer.
    active: Vec<(Way, usize)>,
    piece: usize,
    votes: Votes,
}

/// By rank: what it agrees to, here and there. MPI may hold them.
struct Votes {
    ours: NonNull<[u64; 3]>,
    theirs: NonNull<[u64; 3]>,
    requests: Vec<(Request, Request)>,
}

// SAFETY: memory of its own and requests, which any thread may use.
unsafe impl Send for Votes {}

impl Votes {
    fn new(world: usize) -> Self {
        let room = || NonNull::from(std::vec![[0u64; 3]; world].leak()).cast();
        let requests = (0..world).map(|_| (Request::none(), Request::none())).collect();
        Self { ours: room(), theirs: room(), requests }
    }
}

impl Drop for Votes {
    fn drop(&mut self) {
        if self.requests.iter().all(|(a, b)| a.is_none() && b.is_none()) {
            for room in [self.ours, self.theirs] {
                let all = NonNull::slice_from_raw_parts(room, self.requests.len());
                // SAFETY: leaked by `new` with this length, and MPI is done with it.
                drop(unsafe { Box::from_raw(all.as_ptr()) });
            }
        }
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

impl Mpi {
    /// The calling process's end, among all processes of `comm` (crate `mpi`, version 0.8), which have to make theirs at
    /// the same time. Its rank is that of the communicator. `deadline` is how long a call, this one too, waits without
    /// anything moving before it fails the group; it has to exceed the longest time that a peer computes between two
    /// exchanges.
    ///
    /// # Errors
    /// [`Error::Invalid`] if MPI was not initialised, is finalised, or does not allow several threads at a time; if `comm`
    /// is null or joins two groups; if `deadline` is 0; if the processes run different versions of this crate.
    /// [`Error::Device`] if a call of MPI fails, or if not all processes made theirs before the deadline.
    ///
    /// ```no_run
    /// use cpattn::{Rank, transport::mpi::Mpi};
    /// use std::time::Duration;
    ///
    /// let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).unwrap();
    /// let rank = Rank::new(Mpi::new(&universe.world(), Duration::from_secs(60))?);
    /// println!("rank {} of {}", rank.rank(), rank.world());
    /// drop(rank);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn new(comm: &impl AsRaw<Raw = MPI_Comm>, deadline: Duration) -> Result<Self> {
        raw::usable()?;
        // SAFETY: `AsRaw` vouches for the handle while MPI is usable.
        unsafe { Self::from_raw(comm.as_raw(), deadline) }
    }

    /// The same from a raw handle: of C, or of other bindings to the same library.
    ///
    /// # Safety
    /// `comm` is a live communicator, or `MPI_COMM_NULL`, of the MPI that this crate was built with.
    ///
    /// # Errors
    /// As [`Mpi::new`].
    pub unsafe fn from_raw(comm: MPI_Comm, deadline: Duration) -> Result<Self> {
        raw::usable()?;
        raw::multiple_threads()?;
        if deadline.is_zero() {
            return Err(Error::invalid("deadline", "0 ms", "at least 1 ms"));
        }
        // SAFETY: the caller's promise that it is live or null; MPI is usable.
        let comm = unsafe { Comm::new(comm) }?;
        let (rank, world) = comm.place()?;
        let messages = duplicate(comm, world, deadline)?;
        let others = duplicate(comm, world, deadline)?;
        messages.return_errors()?;
        others.return_errors()?;
        let pipes = |way| (0..world).map(|peer| Pipe::new(way, peer)).collect();
        let calls = Calls {
            sends: pipes(Way::Send),
            recvs: pipes(Way::Receive),
            active: Vec::with_capacity(2 * world),
            piece: pipe::PIECE,
            votes: Votes::new(world),
        };
        let end = Self {
            rank,
            world,
            messages,
            others,
            notices: Notices::new(others)?,
            deadline: AtomicU64::new(0),
            label: Mutex::new(Label { operation: "start", step: 0 }),
            failure: OnceLock::new(),
            questions: AtomicU64::new(0),
            calls: Mutex::new(calls),
        };
        end.set_deadline(deadline);
        end.same_library()?;
        Ok(end)
    }

    /// Replaces this rank's deadline, from its next call on.
    pub fn set_deadline(&self, deadline: Duration) {
        self.deadline.store(deadline.as_nanos().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Has messages travel in pieces of that many bytes, on all ranks alike, before the first exchange. For tests.
    #[doc(hidden)]
    pub fn set_piece(&self, bytes: usize) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).piece = bytes.clamp(1, 1 << 30);
    }

    /// Ranks that speak differently must not exchange anything.
    fn same_library(&self) -> Result<()> {
        let version = env!("CARGO_PKG_VERSION");
        let number = |text: &str| text.bytes().fold(PROTOCOL, |n, b| n.wrapping_mul(0x0100_0000_01b3) ^ u64::from(b));
        match self.agree(0..self.world, number(version)) {
            Err(Error::Disagreement { peer, .. }) => Err(Error::invalid(
                "cpattn of the group",
                format!("{version} here, another on rank {peer}"),
                "one version",
            )
            .hint("build all processes alike")),
            outcome => outcome,
        }
    }

    /// The failure as this rank reports it.
    fn error(&self, label: Label, failure: Failure) -> Error {
        let Failure { mut peer, mut cause, expecting } = failure;
        if let Cause::Size { ours, theirs } = cause
            && self.rank == peer
        {
            (peer, cause) = (expecting, Cause::Size { ours: theirs, theirs: ours });
        }
        Error::Peer { rank: self.rank, operation: label.operation, step: label.step, peer, cause }
    }

    /// Notes a failure, unless there is one, and tells everybody; the failure that counts.
    fn fail(&self, failure: Failure) -> Failure {
        if self.failure.set(failure).is_ok() && raw::usable().is_ok() {
            for peer in (0..self.world).filter(|&peer| peer != self.rank) {
                self.notices.send(peer, Notice::Over(failure));
            }
        }
        self.failure.get().copied().unwrap_or(failure)
    }

    fn fail_mpi(&self, peer: usize, Refused { call, code }: Refused) -> Failure {
        let cause = Cause::Returned { function: call, code };
        self.fail(Failure { peer, cause, expecting: peer })
    }

    /// Whether anything has failed, here or as others tell.
    fn look(&self) -> Option<Failure> {
        match self.notices.listen() {
            // Whoever failed has told everybody.
            Ok(Some(failure)) => {
                let _ = self.failure.set(failure);
            }
            Ok(None) => {}
            Err(refused) => {
                self.fail_mpi(self.rank, refused);
            }
        }
        self.failure.get().copied()
    }

    /// Begins a call that waits.
    fn enter(&self, label: Label) -> Result<MutexGuard<'_, Calls>> {
        let calls = match self.calls.try_lock() {
            Ok(calls) => calls,
            Err(TryLockError::Poisoned(poisoned)) => {
                // Half a call lies there, and is never gone on with.
                self.abort(Cause::Panicked);
                poisoned.into_inner()
            }
            Err(TryLockError::WouldBlock) => {
                let Label { operation, step } = *self.label.lock().unwrap_or_else(PoisonError::into_inner);
                let found = format!("called on rank {} while it is in {operation}, step {step}", self.rank);
                return Err(Error::invalid(label.operation, found, "one call at a time")
                    .hint("the exchanges and agreements of one rank are serial: start them from one thread"));
            }
        };
        raw::usable()?;
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = label;
        match self.look() {
            Some(failure) => Err(self.error(label, failure)),
            None => Ok(calls),
        }
    }

    fn patience(&self) -> Patience {
        Patience::new(Duration::from_nanos(self.deadline.load(Ordering::Relaxed)))
    }

    /// What a call does that waits for `peer` and saw nothing move: it listens, asks, sleeps a little. After a failure the
    /// caller looks once more: a call that is complete by then has succeeded, and the next one tells.
    fn pause(&self, patience: &mut Patience, peer: usize, waiting: impl FnOnce() -> u64) -> Result<(), Failure> {
        self.notices.wait_for(peer);
        if let Some(failure) = self.look() {
            return Err(failure);
        }
        match patience.expired(self.rank, peer, &self.notices, &self.questions) {
            None => {
                patience.sleep();
                Ok(())
            }
            Some((peer, ms)) => {
                let cause = Cause::Deadline { ms, bytes: waiting() };
                Err(self.fail(Failure { peer, cause, expecting: peer }))
            }
        }
    }

    /// Moves what is listed in the pipes.
    ///
    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn travel(&self, calls: &mut Calls) -> Result<(), Failure> {
        let (mut patience, mut failed) = (self.patience(), None);
        while !calls.active.is_empty() {
            let mut moved = false;
            let (mut at, mut broken) = (0, None);
            while let Some(&(way, peer)) = calls.active.get(at) {
                let pipe = match way {
                    Way::Send => &mut calls.sends[peer],
                    Way::Receive => &mut calls.recvs[peer],
                };
                // SAFETY: the caller's promise about the messages.
                match unsafe { pipe.advance(self.messages, EXCHANGE) } {
                    Ok(now) => moved |= now,
                    Err(why) => {
                        broken = Some((peer, why));
                        break;
                    }
                }
                if pipe.is_done() {
                    calls.active.swap_remove(at);
                } else {
                    at += 1;
                }
            }
            if let Some((peer, why)) = broken {
                return Err(match why {
                    Broken::Mpi(refused) => self.fail_mpi(peer, refused),
                    Broken::Size { ours, theirs } => {
                        let cause = Cause::Size { ours: ours as u64, theirs };
                        self.fail(Failure { peer, cause, expecting: self.rank })
                    }
                    Broken::Order => self.fail(Failure { peer, cause: Cause::Failed, expecting: peer }),
                });
            }
            if moved {
                patience.moved();
                continue;
            }
            // What arrived before the news of a failure counts.
            if let Some(failure) = failed {
                return Err(failure);
            }
            // Receives first: who waits to send waits for a peer that has not come to receive.
            let first = calls.active.iter().find(|a| a.0 == Way::Receive).or(calls.active.first());
            if let Some(&(_, peer)) = first {
                let pipes = || calls.sends.iter().chain(&calls.recvs);
                failed = self.pause(&mut patience, peer, || pipes().map(Pipe::waiting).sum()).err();
            }
        }
        Ok(())
    }

    /// Asks every rank of the group for its number, and gives them ours.
    fn vote(&self, calls: &mut Calls, group: Range<usize>, number: u64) -> Result<(), Failure> {
        let Votes { ours, theirs, requests } = &mut calls.votes;
        let vote = [number, group.start as u64, group.end as u64];
        let peers = group.clone().filter(|&peer| peer != self.rank);
        for peer in peers.clone() {
            // SAFETY: both rooms have a place for every rank; MPI holds none of them, since the last agreement ended
            // well. Nobody touches them until the requests are complete.
            let begun = unsafe {
                ours.add(peer).write(vote);
                let bytes = size_of_val(&vote);
                let receive = self.others.receive(theirs.add(peer).as_ptr().cast(), bytes, Some(peer), AGREE);
                requests[peer].1 = receive.map_err(|refused| self.fail_mpi(peer, refused))?;
                self.others.send(ours.add(peer).as_ptr().cast_const().cast(), bytes, peer, AGREE)
            };
            requests[peer].0 = begun.map_err(|refused| self.fail_mpi(peer, refused))?;
        }
        let (mut patience, mut failed) = (self.patience(), None);
        let mut left = 2 * peers.clone().count();
        while left > 0 {
            let (mut now, mut first) = (0, NOBODY);
            for peer in peers.clone() {
                let (send, receive) = &mut requests[peer];
                for (call, request) in [("MPI_Irecv", receive), ("MPI_Isend", send)] {
                    if !request.test(call).map_err(|refused| self.fail_mpi(peer, refused))? {
                        now += 1;
                        first = first.min(peer);
                    }
                }
            }
            if now < left {
                patience.moved();
            } else if let Some(failure) = failed {
                return Err(failure);
            } else {
                failed = self.pause(&mut patience, first, || 0).err();
            }
            left = now;
        }
        Ok(())
    }

    /// After a failure: has MPI let go of what it will let go of. The rest is abandoned.
    fn settle(calls: &mut Calls) {
        calls.recvs.iter_mut().for_each(Pipe::cancel);
        calls.votes.requests.iter_mut().for_each(|(_, receive)| receive.cancel());
        let began = Instant::now();
        while began.elapsed() < SETTLE {
            // All of them are looked at, every time.
            let votes = calls.votes.requests.iter_mut().flat_map(|(a, b)| [a, b]);
            let held = votes.filter_map(|r| (!matches!(r.test("MPI_Test"), Ok(true))).then_some(())).count()
                + calls.sends.iter_mut().chain(&mut calls.recvs).filter_map(|p| (!p.is_free()).then_some(())).count();
            if held == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}

/// Duplicates a communicator, unless that takes too long.
fn duplicate(comm: Comm, world: usize, deadline: Duration) -> Result<Comm> {
    let mut duplicate = comm.duplicate()?;
    let mut patience = Patience::new(deadline);
    loop {
        if let Some(made) = duplicate.poll()? {
            return Ok(made);
        }
        if patience.is_over() {
            let ms = deadline.as_millis();
            let message = format!("not all {world} ranks of the communicator made their transport within {ms} ms");
            return Err(Error::Device { call: "MPI_Comm_idup", code: 0, message });
        }
        patience.sleep();
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let (rank, world) = (self.rank, self.world);
        if !group.contains(&rank) || group.end > world {
            return Err(Error::invalid(
                "group",
                format_args!("{group:?}"),
                format_args!("a range within 0..{world} that contains rank {rank}"),
            ));
        }
        let label = Label { operation: "agree", step: 0 };
        let mut calls = self.enter(label)?;
        let outcome = self.vote(&mut calls, group.clone(), fingerprint);
        self.notices.wait_for(NOBODY);
        if let Err(failure) = outcome {
            Self::settle(&mut calls);
            return Err(self.error(label, failure));
        }
        let votes = &calls.votes;
        // SAFETY: the agreement is complete, so every member's place was written, and MPI holds none of them.
        let vote = |peer: usize| unsafe { votes.theirs.add(peer).read() };
        let ours = [fingerprint, group.start as u64, group.end as u64];
        let other = group.clone().filter(|&peer| peer != rank).map(|peer| (peer, vote(peer))).find(|v| v.1 != ours);
        let Some((peer, theirs)) = other else { return Ok(()) };
        if theirs[1..] != ours[1..] {
            // Ranks of one mesh have equal groups or none in common: what follows would not match either.
            self.fail(Failure { peer, cause: Cause::Failed, expecting: peer });
        }
        Err(Error::disagreement(rank, peer, fingerprint, theirs[0]))
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        super::lists::check(self.rank, self.world, "sends", sends)?;
        super::lists::check(self.rank, self.world, "recvs", recvs)?;
        let mut calls = self.enter(label)?;
        let calls = &mut *calls;
        calls.active.clear();
        for (way, list) in [(Way::Receive, recvs), (Way::Send, sends)] {
            let pipes = if way == Way::Send { &mut calls.sends } else { &mut calls.recvs };
            for &message in list {
                if pipes[message.peer].add(message, calls.piece) {
                    calls.active.push((way, message.peer));
                }
            }
        }
        // SAFETY: the caller's promise about the messages.
        let outcome = unsafe { self.travel(calls) };
        self.notices.wait_for(NOBODY);
        if outcome.is_err() {
            Self::settle(calls);
        }
        for message in recvs {
            calls.recvs[message.peer].clear();
        }
        for message in sends {
            calls.sends[message.peer].clear();
        }
        outcome.map_err(|failure| self.error(label, failure))
    }

    fn poll(&self) -> Result<()> {
        raw::usable()?;
        let label = *self.label.lock().unwrap_or_else(PoisonError::into_inner);
        self.look().map_or(Ok(()), |failure| Err(self.error(label, failure)))
    }

    fn abort(&self, cause: Cause) {
        self.fail(Failure { peer: self.rank, cause, expecting: self.rank });
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if raw::usable().is_err() {
            return;
        }
        if std::thread::panicking() {
            self.abort(Cause::Panicked);
        }
        if self.notices.close(SETTLE) && self.failure.get().is_none() {
            self.messages.free();
            self.others.free();
        }
    }
}
