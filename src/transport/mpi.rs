// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, over MPI.
//!
//! A program that runs on many hosts has an MPI made for the network; this transport is the exchange contract in its
//! non-blocking sends and receives. It works on two duplicates of the caller's communicator, one for messages and one for
//! agreements and notices, so that nothing of the caller's ever meets anything of its own. An `exchange` runs on the
//! rank's communication thread: it lets MPI work while the kernels compute, and sleeps when nothing moves.
//!
//! - Initialise MPI with `MPI_THREAD_MULTIPLE`. A rank calls MPI from a thread of its own, at times when the caller may
//!   call MPI too.
//! - Where there are more processes than cores, Open MPI (`mpirun --oversubscribe`) gives the core away in every look at a
//!   request; beside other programs that costs milliseconds an exchange. `--mca mpi_yield_when_idle 0` turns it off: the
//!   transport gives its core away itself, while it comes back in time.
//! - Only memory of the transport is handed to MPI (`pipe.rs` says why): an exchange that has failed has let go of the
//!   caller's. Three pieces of 256 KiB each way for each peer that it exchanges with; nothing else is allocated in a run.
//! - A small message may leave before its receiver has come, as MPI decides; its sender then returns and learns of what went
//!   wrong there at its next call.
//! - A failure is told to every rank (`notices.rs`); a rank that gets no notice reaches its deadline, which counts from the
//!   last piece that moved. Finding the peer to blame then takes half the deadline more (0.25 to 5 s) where that one does not
//!   answer. The peer that is blamed is the nearest one, along the chain of those that wait for each other,
//!   that does not answer, or one that has only just come to wait, having computed or been stopped for too long. A rank
//!   that is dropped says so to all others, and those that still need it say that it left. Where all of them answer and some
//!   wait in an agreement, others in an exchange, they run different things; each names one on the other side.
//! - By its defaults MPI ends the whole job when a process dies: `mpirun` kills the others, and there is no error to
//!   return. Where it lets them live (Open MPI: `mpirun --enable-recovery`; MPICH: `mpiexec -disable-auto-cleanup`, and
//!   a shell round each process that ignores SIGUSR1), each gets its error after its deadline. After a failure, do not call
//!   `MPI_Finalize`: it may wait for the dead. Leave with `MPI_Abort`, or end the process.
//! - Without a failure too, `MPI_Finalize` waits for every process, without a limit, also for one that was stopped or died after
//!   its last run. So let a last [`agree`](Transport::agree) of all ranks come before it, after whatever one of them does alone
//!   (`meet` in `examples/context_parallel/together.rs`): it fails at the deadline and names the rank.
//! - After a failure what MPI still holds is never freed: some pieces, and the two duplicates. An abort by a caller leaves
//!   all processes alive; they can make new transports. A rank that leaves long before the others frees its duplicates when
//!   it next makes or drops a transport (`left_ranks.rs`).
//! - Nothing is sent on the caller's communicator itself, unless a rank does not come to make its transport (`arrival.rs`).

mod arrival;
mod group;
mod left_ranks;
mod notices;
mod pipe;
mod pipes;
mod raw;
mod votes;
mod wait;

use std::{
    format,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use ::mpi::{ffi::MPI_Comm, raw::AsRaw};

use super::{Label, Message, Transport};
use crate::error::{Cause, Error, Result};
use group::{AGREEMENT, Group};
use notices::Notices;
use pipes::Pipes;
use raw::Comm;
use votes::Votes;
use wait::SETTLE;

/// What two libraries must have in common to understand each other.
const PROTOCOL: u64 = 3;

/// One process's end of a group. After a failure leave with `MPI_Abort`, as the module says.
///
/// Any thread may call [`poll`](Transport::poll) and [`abort`](Transport::abort) at any time; of the calls that wait, a
/// second one is refused with [`Error::Invalid`]. Drop it, or the rank that has it, before MPI is finalised; dropping it
/// frees its communicators, which MPI may count as a collective call.
pub struct Mpi {
    group: Group,
    messages: Comm,
    others: Comm,
    calls: Mutex<Calls>,
}

/// What the calls that wait work with.
struct Calls {
    pipes: Pipes,
    votes: Votes,
}

impl Calls {
    /// After a failure: has MPI let go of what it will let go of. The rest is abandoned.
    fn settle(&mut self) {
        self.pipes.cancel();
        self.votes.cancel();
        let began = Instant::now();
        while began.elapsed() < SETTLE {
            // All of them are looked at, every time.
            let (pipes, votes) = (self.pipes.is_free(), self.votes.is_free());
            if pipes && votes {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Group { rank, world, .. } = &self.group;
        f.debug_struct("Mpi").field("rank", rank).field("world", world).finish_non_exhaustive()
    }
}

impl Mpi {
    /// The calling process's end, among all processes of `comm` (crate `mpi`, version 0.8), which have to make theirs at
    /// the same time. Its rank is that of the communicator. `deadline` is how long a call, this one too, waits without
    /// anything moving before it fails the group; it has to exceed the longest time that a peer computes between two
    /// exchanges.
    ///
    /// # Errors
    /// [`Error::Invalid`] if MPI was not initialised, is finalised, or does not allow several threads at a time; if the process
    /// was started as one of several by the launcher of another MPI, and so is alone in its world; if `comm`
    /// is null or joins two groups; if `deadline` is 0; if the processes run different versions of this crate.
    /// [`Error::Device`] if a call of MPI fails. [`Error::Peer`] with [`Cause::Absent`], which names one that did not come, if
    /// not all processes made theirs before the deadline; with [`Cause::Deadline`] if the one that it names came and was
    /// stopped. While a process is stopped the others cannot tell whether it came.
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
        raw::own_launcher()?;
        left_ranks::sweep();
        if deadline.is_zero() {
            return Err(Error::invalid("deadline", "0 ms", "at least 1 ms"));
        }
        // SAFETY: `comm` is live or null (the contract of this function); MPI is usable (checked above).
        let comm = unsafe { Comm::new(comm) }?;
        let (rank, world) = comm.place()?;
        let [messages, others] = arrival::duplicates(comm, rank, world, deadline)?;
        messages.return_errors()?;
        others.return_errors()?;
        let end = Self {
            group: Group::new(rank, world, Notices::new(others, world)?),
            messages,
            others,
            calls: Mutex::new(Calls { pipes: Pipes::new(world), votes: Votes::new(world) }),
        };
        end.set_deadline(deadline);
        end.same_library()?;
        Ok(end)
    }

    /// Replaces this rank's deadline, from its next call on.
    pub fn set_deadline(&self, deadline: Duration) {
        self.group.set_deadline(deadline);
    }

    /// Has messages travel in pieces of that many bytes, on all ranks alike, before the first exchange. For tests.
    #[doc(hidden)]
    pub fn set_piece(&self, bytes: usize) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).pipes.piece = bytes.clamp(1, 1 << 30);
    }

    /// Ranks that speak differently must not exchange anything.
    fn same_library(&self) -> Result<()> {
        let version = env!("CARGO_PKG_VERSION");
        let number = |text: &str| text.bytes().fold(PROTOCOL, |n, b| n.wrapping_mul(0x0100_0000_01b3) ^ u64::from(b));
        match self.agree(0..self.group.world, number(version)) {
            Err(Error::Disagreement { peer, .. }) => Err(Error::invalid(
                "cpattn of the group",
                format!("{version} here, another on rank {peer}"),
                "one version",
            )
            .hint("build all processes alike")),
            outcome => outcome,
        }
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
                let Label { operation, step, .. } = self.group.label();
                let found = format!("called on rank {} while it is in {operation}, step {step}", self.group.rank);
                return Err(Error::invalid(label.operation, found, "one call at a time")
                    .hint("the exchanges and agreements of one rank are serial: start them from one thread"));
            }
        };
        raw::usable()?;
        self.group.set_label(label);
        match self.group.look() {
            Some(failure) => Err(self.group.error(label, failure)),
            None => Ok(calls),
        }
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world(&self) -> usize {
        self.group.world
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let Group { rank, world, .. } = self.group;
        if !group.contains(&rank) || group.end > world {
            return Err(Error::invalid(
                "group",
                format_args!("{group:?}"),
                format_args!("a range within 0..{world} that contains rank {rank}"),
            ));
        }
        let label = Label::new(AGREEMENT, 0);
        let mut calls = self.enter(label)?;
        let outcome = calls.votes.take(&self.group, self.others, group.clone(), fingerprint);
        self.group.notices.wait_for_none();
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some((peer, theirs))) => {
                if theirs[1..] != [group.start as u64, group.end as u64] {
                    // Ranks of one mesh have equal groups or none in common: what follows would not match either.
                    self.group.fail_by(peer, Cause::Failed);
                }
                Err(Error::disagreement(rank, peer, fingerprint, theirs[0]))
            }
            Err(failure) => {
                calls.settle();
                Err(self.group.error(label, failure))
            }
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        super::lists::check(self.group.rank, self.group.world, "sends", sends)?;
        super::lists::check(self.group.rank, self.group.world, "recvs", recvs)?;
        let mut calls = self.enter(label)?;
        calls.pipes.list(sends, recvs);
        // SAFETY: the messages' bytes are valid until this returns (the contract of `Transport::exchange`).
        let outcome = unsafe { calls.pipes.travel(&self.group, self.messages) };
        self.group.notices.wait_for_none();
        if outcome.is_err() {
            calls.settle();
        }
        calls.pipes.clear(sends, recvs);
        outcome.map_err(|failure| self.group.error(label, failure))
    }

    fn poll(&self) -> Result<()> {
        raw::usable()?;
        let label = self.group.label();
        self.group.look().map_or(Ok(()), |failure| Err(self.group.error(label, failure)))
    }

    fn abort(&self, cause: Cause) {
        self.group.fail_by(self.group.rank, cause);
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
        if self.group.has_failed() {
            // Nothing is freed of what MPI may still work on.
            self.group.notices.close(SETTLE);
            left_ranks::sweep();
        } else {
            let Group { rank, world, .. } = self.group;
            left_ranks::leave(rank, world, self.group.notices.take(), [self.messages, self.others]);
        }
    }
}
