// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, over MPI.
//!
//! The transport implements the exchange contract with MPI's non-blocking sends and receives. It works on two
//! duplicates of the caller's communicator, one for messages and one for `agree` and failure notices, so its messages
//! never match the caller's. An `exchange` runs on the rank's communication thread: it lets MPI make progress while the
//! kernels compute, and sleeps when nothing moves.
//!
//! - Initialise MPI with `MPI_THREAD_MULTIPLE`. A rank calls MPI from its own thread, possibly while the caller calls
//!   MPI too.
//! - With more processes than cores, Open MPI (`mpirun --oversubscribe`) yields the core each time a request is
//!   checked; beside other programs that costs milliseconds per exchange. `--mca mpi_yield_when_idle 0` turns it off;
//!   the transport yields the core itself, as long as it gets the core back soon.
//! - MPI gets only the transport's own memory (`pipe.rs` says why), so after a failed exchange nothing accesses the
//!   caller's. This takes three pieces of 256 KiB each way for each peer; nothing else is allocated in a run.
//! - MPI may send a small message before the receiver is ready; the sender's call then returns, and a failure at the
//!   receiver is reported by the sender's next call.
//! - Every rank is notified of a failure (`notices.rs`). A rank that gets no notice reaches its deadline, which counts
//!   from the last piece that moved. Finding the peer at fault then takes another half of the deadline (0.25 to 5 s) if
//!   that peer does not answer. The error names the nearest peer, along the chain of ranks that wait for each other,
//!   that does not answer or that has only just started to wait, because it computed or was stopped for too long. A
//!   rank that is dropped notifies all others; those that still need it report that it left.
//! - If a rank's exchange needs a peer that waits in an `agree` with this rank, they run different things. This is
//!   found within a fraction of a second, without waiting for the deadline, and reported on every rank.
//! - By default MPI ends the whole job when a process dies: `mpirun` kills the others, and there is no error to return.
//!   If MPI lets them continue (Open MPI: `mpirun --enable-recovery`; MPICH: `mpiexec -disable-auto-cleanup`, with each
//!   process in a shell that ignores SIGUSR1), each gets its error after its deadline. After a failure do not call
//!   `MPI_Finalize`: it may wait for the dead process. Call `MPI_Abort`, or end the process.
//! - `MPI_Finalize` waits for every process without a limit, also for one that was stopped or died after its last run.
//!   So call [`agree`](Transport::agree) on all ranks before it, after the last work that one rank does alone (`meet`
//!   in `tests/mpi/together.rs`): `agree` fails at the deadline and names the rank.
//! - After a failure, memory that MPI still holds is never freed: some pieces, and the two duplicates. After an `abort`
//!   all processes stay usable and can make new transports. A rank that leaves long before the others frees its
//!   duplicates when it next makes or drops a transport (`left_ranks.rs`).
//! - If not all ranks came to make their transports, a duplicate of the caller's communicator stays under way until
//!   they come to a later attempt. Until then, with Open MPI 4.1, do not make any communicator (duplicate, split, a
//!   transport of another communicator), and call no non-blocking collective on this one: they may wait for ever. Each
//!   rank counts its attempts: one that missed an attempt must make one more than the others.
//! - Nothing is sent on the caller's communicator itself, unless a rank does not make its transport in time
//!   (`arrival.rs`).

mod arrival;
mod duplicates;
mod environment;
mod group;
mod in_flight;
mod left_ranks;
mod notices;
mod pipe;
mod pipes;
mod raw;
mod wait;

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ::mpi::{ffi::MPI_Comm, raw::AsRaw};

use super::{
    Label, Message, Transport,
    fault::{AGREEMENT, GroupFailure},
    rules,
};
use crate::error::{Cause, Error, Result};
use crate::plan::{Fingerprint, ranks_per_node};
use group::MpiGroup;
use notices::Notices;
use pipes::Pipes;
use raw::Comm;

/// The version of the messages between two libraries.
const PROTOCOL: u64 = 5;

/// What a rank compares in an agreement: its number, and first and end of the group.
type Compared = [u64; 3];

/// One process's transport. After a failure end the process with `MPI_Abort`, as the module says.
///
/// Any thread may call [`poll`](Transport::poll) and [`abort`](Transport::abort) at any time; a second call of `agree`
/// or `exchange` at the same time is refused with [`Error::Invalid`]. Drop it, or the rank that has it, before MPI is
/// finalised; dropping it frees its communicators, which MPI may count as a collective call.
pub struct Mpi {
    group: MpiGroup,
    messages: Comm,
    others: Comm,
    calls: Mutex<Calls>,
}

/// The state of calls that wait.
struct Calls {
    exchanges: Pipes,
    agreements: Pipes,
}

impl Calls {
    /// Sends `ours` to every other rank of `group`. Returns the first rank that sent something else, with that.
    fn compare(
        &mut self,
        own: &MpiGroup,
        group: Range<usize>,
        ours: Compared,
    ) -> Result<Option<(usize, Compared)>, GroupFailure> {
        let mut all = vec![ours; group.len()];
        let message = |peer, words: *mut Compared| {
            (peer != own.rank).then_some(Message { peer, ptr: words.cast(), bytes: size_of::<Compared>() })
        };
        let out = (&raw const ours).cast_mut();
        let sends: Vec<_> = group.clone().filter_map(|peer| message(peer, out)).collect();
        let recvs: Vec<_> = group.clone().zip(&mut all).filter_map(|(peer, theirs)| message(peer, theirs)).collect();
        // SAFETY: the words live until the call has returned, and nothing else uses them before.
        unsafe { self.agreements.carry(own, &sends, &recvs, Some(&self.exchanges)) }?;
        Ok(group.zip(all).find(|&(_, theirs)| theirs != ours))
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MpiGroup { rank, world, .. } = &self.group;
        f.debug_struct("Mpi").field("rank", rank).field("world", world).finish_non_exhaustive()
    }
}

impl Mpi {
    /// Makes the transport of the calling process. All processes of `comm` (crate `mpi`, version 0.8) must make theirs
    /// at the same time; ranks are those of `comm`. `deadline` is a timeout: if a call, including this one, waits so
    /// long while nothing moves, the group fails. It must be longer than the longest time that a peer computes between
    /// two exchanges.
    ///
    /// # Errors
    /// [`Error::Invalid`] if MPI was not initialised, is finalised, or does not allow several threads at a time; if the
    /// launcher of another MPI started the process as one of several, so that it is alone in its world; if `comm` is
    /// null or joins two groups; if `deadline` is 0; if the processes run different versions of this crate.
    /// [`Error::Device`] if a call of MPI fails. [`Error::Peer`] if not all processes made theirs before the deadline:
    /// with [`Cause::Absent`] it names one that did not, with [`Cause::Deadline`] one that began to and was stopped.
    /// While a process is stopped the others cannot distinguish the two.
    ///
    /// ```no_run
    /// use cpattn::{Rank, transport::mpi::Mpi};
    /// use mpi::traits::Communicator;
    /// use std::time::Duration;
    ///
    /// let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).unwrap();
    /// let world = universe.world();
    /// // Not `?`: it would drop `universe`, which calls MPI_Finalize, and that may wait for a rank that does not come.
    /// let transport = Mpi::new(&world, Duration::from_secs(60)).unwrap_or_else(|error| {
    ///     eprintln!("{error}");
    ///     world.abort(2)
    /// });
    /// let rank = Rank::new(transport);
    /// println!("rank {} of {}", rank.rank(), rank.world());
    /// drop(rank);
    /// ```
    pub fn new(comm: &impl AsRaw<Raw = MPI_Comm>, deadline: Duration) -> Result<Self> {
        environment::usable()?;
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
        environment::usable()?;
        environment::multiple_threads()?;
        environment::own_launcher()?;
        left_ranks::sweep();
        rules::check_deadline(deadline)?;
        // SAFETY: `comm` is live or null (the contract of this function); MPI is usable (checked above).
        let comm = unsafe { Comm::new(comm) }?;
        let (rank, world) = comm.place()?;
        let [messages, others] = arrival::duplicates(comm, rank, world, deadline)?;
        messages.return_errors()?;
        others.return_errors()?;
        let end = Self {
            group: MpiGroup::new(rank, world, Notices::new(others, world)?),
            messages,
            others,
            calls: Mutex::new(Calls {
                exchanges: Pipes::new(world, messages, false),
                agreements: Pipes::new(world, others, true),
            }),
        };
        end.set_deadline(deadline);
        end.same_version(env!("CARGO_PKG_VERSION"))?;
        Ok(end)
    }

    /// How many ranks of `comm` share a node, for [`Options::ranks_per_node`](crate::Options::ranks_per_node):
    /// processes of a node share memory (`MPI_COMM_TYPE_SHARED`). All processes of `comm` make this call; it is a
    /// collective of MPI on `comm`, and waits as such.
    ///
    /// # Errors
    /// As [`ranks_per_node`], where ranks are not numbered node by node or nodes have
    /// different numbers of them; [`Error::Invalid`] if MPI is not usable or `comm` null or of two groups;
    /// [`Error::Device`] if a call of MPI fails.
    pub fn ranks_per_node(comm: &impl AsRaw<Raw = MPI_Comm>) -> Result<usize> {
        environment::usable()?;
        // SAFETY: `AsRaw` vouches for the handle while MPI is usable.
        unsafe { Self::ranks_per_node_of_raw(comm.as_raw()) }
    }

    /// The same from a raw handle.
    ///
    /// # Safety
    /// As [`Mpi::from_raw`].
    ///
    /// # Errors
    /// As [`Mpi::ranks_per_node`].
    pub unsafe fn ranks_per_node_of_raw(comm: MPI_Comm) -> Result<usize> {
        environment::usable()?;
        // SAFETY: `comm` is live or null (the contract of this function); MPI is usable (checked above).
        let comm = unsafe { Comm::new(comm) }?;
        ranks_per_node(&comm.nodes()?)
    }

    /// Replaces this rank's deadline, from its next call on.
    pub fn set_deadline(&self, deadline: Duration) {
        self.group.set_deadline(deadline);
    }

    /// Sets the size of pieces, before the first exchange and the same on all ranks. For tests.
    #[doc(hidden)]
    pub fn set_piece(&self, bytes: usize) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).exchanges.piece = bytes.clamp(1, 1 << 30);
    }

    /// Refuses a group whose ranks run different versions. Tests pass a version of their own.
    #[doc(hidden)]
    pub fn same_version(&self, version: &str) -> Result<()> {
        let mut number = Fingerprint::of_version(version);
        number.word(PROTOCOL);
        match self.agree(0..self.group.world, number.finish()) {
            Err(Error::Disagreement { peer, .. }) => Err(Error::invalid(
                "cpattn of the group",
                format!("{version} here, another on rank {peer}"),
                "one version",
            )
            .hint("build all processes alike")),
            outcome => outcome,
        }
    }

    /// Begins a call that waits, in which the ranks compare `number`, if anything.
    fn enter(&self, label: Label, number: Option<u64>) -> Result<MutexGuard<'_, Calls>> {
        let calls = rules::begin_call(self, &self.calls, label, || Some(self.group.label()))?;
        environment::usable()?;
        self.group.set_label(label, number);
        match self.group.check() {
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
        let MpiGroup { rank, world, .. } = self.group;
        rules::check_group(rank, world, &group)?;
        let label = Label::new(AGREEMENT, 0);
        let mut calls = self.enter(label, Some(fingerprint))?;
        match calls.compare(&self.group, group.clone(), [fingerprint, group.start as u64, group.end as u64]) {
            Ok(None) => Ok(()),
            Ok(Some((peer, theirs))) => {
                if theirs[1..] != [group.start as u64, group.end as u64] {
                    // Ranks of one mesh have equal groups or none in common: what follows would not match either.
                    self.group.fail_by(peer, Cause::Failed);
                }
                Err(Error::disagreement(rank, peer, fingerprint, theirs[0]))
            }
            Err(failure) => Err(self.group.error(label, failure)),
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        rules::check_messages(self.group.rank, self.group.world, sends, recvs)?;
        let mut calls = self.enter(label, label.number())?;
        // SAFETY: the messages' bytes are valid until this returns (the contract of `Transport::exchange`).
        let outcome = unsafe { calls.exchanges.carry(&self.group, sends, recvs, None) };
        outcome.map_err(|failure| self.group.error(label, failure))
    }

    fn poll(&self) -> Result<()> {
        environment::usable()?;
        let label = self.group.label();
        self.group.check().map_or(Ok(()), |failure| Err(self.group.error(label, failure)))
    }

    fn abort(&self, cause: Cause) {
        self.group.fail_by(self.group.rank, cause);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if environment::usable().is_err() {
            return;
        }
        if std::thread::panicking() {
            self.abort(Cause::Panicked);
        }
        if self.group.has_failed() {
            // Memory that MPI may still use is not freed.
            self.group.notices.close();
            left_ranks::sweep();
        } else {
            let MpiGroup { rank, world, .. } = self.group;
            left_ranks::leave(rank, world, self.group.notices.take(), [self.messages, self.others]);
        }
    }
}
