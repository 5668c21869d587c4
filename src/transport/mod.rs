// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchange: the one way in which ranks communicate.
//!
//! All-to-all, ring step, halo, all-gather, gradient return: each is a batch of sends and receives of contiguous bytes
//! that completes as a whole. The contract every transport keeps, and that the schedule verifier assumes:
//!
//! - a send meets exactly one receive of the same size; between two ranks, messages meet in the order in which both
//!   list them;
//! - it is a rendezvous: no rank relies on buffering, and an exchange ends when all of its messages have moved (a transport
//!   may send what is small before its receiver has come, and then tells of a failure there at the next call);
//! - the exchanges of one rank are serial, in the order in which it starts them; at most eight
//!   messages go to a peer in one of them, and as many come, so that requests can be allocated once;
//! - `agree` of one rank and `exchange` of another overlap in time: they need tags, or communicators, of their own;
//! - `peer` numbers the ranks of the group that the transport was made for, not of the job;
//! - empty messages are not listed, on either side, and no rank lists itself;
//! - nothing hangs: when a peer dies, leaves, or does not answer before the deadline, every rank of the group gets an
//!   error that names rank, operation, step and peer, and for a deadline the time and the bytes that were still to move. A
//!   rank that computes gets it at its next call. Deadlines exceed the longest time that a peer computes between two
//!   exchanges;
//! - a group that failed stays failed: make a new one. The library calls `abort` after the first error, so that peers do not
//!   wait out their deadlines;
//! - when a call has returned, with an error too, the memory of its messages is no longer touched. An engine that cannot
//!   take back a receive that has begun gives it memory of its own, as transport `mpi` does, and copies.
//!
//! `docs/transports.md` has the same for authors of transports, with the test of each sentence.

#[cfg(feature = "cuda")]
use crate::call::RawStream;
use crate::error::{Cause, Error, Result, RunName};

#[cfg(feature = "cuda")]
use crate::kernel::cuda::Cuda;
#[cfg(feature = "cuda")]
use alloc::sync::Arc;
use alloc::vec::Vec;

#[cfg(feature = "std")]
pub mod fault;
#[cfg(feature = "std")]
mod lists;
#[cfg(feature = "std")]
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod peer;
#[cfg(feature = "std")]
pub mod ring_check;

/// Contiguous bytes that go to, or come from, `peer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Message {
    /// The other rank, numbered in the world.
    pub peer: usize,
    /// Where the bytes lie (a send is only read).
    pub ptr: *mut u8,
    /// How many; at least 1.
    pub bytes: usize,
}

// SAFETY: a Message is an address and numbers; the contract of `Transport::exchange` says which thread may touch the bytes.
unsafe impl Send for Message {}
// SAFETY: a Message is an address and numbers; the contract of `Transport::exchange` says which thread may touch the
// bytes.
unsafe impl Sync for Message {}

/// Names an exchange in errors and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The operation, as the schedule names it.
    pub operation: &'static str,
    /// The step of the schedule.
    pub step: u32,
    /// The run that it belongs to, if any.
    pub run: Option<RunName>,
}

impl Label {
    /// An exchange outside of runs.
    pub const fn new(operation: &'static str, step: u32) -> Self {
        Self { operation, step, run: None }
    }

    /// What `rank` reports when `peer` made an exchange of this name fail.
    pub const fn error(self, rank: usize, peer: usize, cause: Cause) -> Error {
        let Self { operation, step, run } = self;
        Error::Peer { rank, operation, step, run, peer, cause }
    }

    /// As [`error`](Self::error), where one of several peers is to blame.
    pub const fn error_of_one(self, rank: usize, peers: Vec<usize>, cause: Cause) -> Error {
        let Self { operation, step, run } = self;
        Error::Peers { rank, operation, step, run, peers, cause }
    }
}

/// One rank's end of a communicator. One communicator serves every mesh. The module has the contract.
///
/// `agree` and `exchange` wait, and are called by one thread at a time, not always the same: a [`Rank`](crate::Rank) agrees on
/// the caller's thread and exchanges on one of its own. `poll` and `abort` are called by any thread at any time, in
/// particular while another one waits.
pub trait Transport: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// An all-gather of one number over the ranks of `group`, outside any schedule; it waits for all of them.
    /// Fails with [`Error::Disagreement`] on every rank of the group if the numbers differ.
    fn agree(&self, group: core::ops::Range<usize>, fingerprint: u64) -> Result<()>;

    /// Moves a batch. Transports of host memory return when it is complete; stream-ordered ones when it is enqueued on
    /// their stream.
    ///
    /// # Safety
    /// Until the batch is complete, or the call has returned an error: every `recvs` range is valid for writes and
    /// touched by nothing else, every `sends` range is valid for reads and written by nothing.
    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()>;

    /// Whether anything has failed so far; never waits.
    fn poll(&self) -> Result<()>;

    /// Ends the run on every rank of the world. May be called from any thread, any number of times.
    fn abort(&self, cause: Cause);
}

/// A transport of device memory: `exchange` enqueues a batch on the transport's own stream and returns. The caller
/// orders that stream after what wrote the bytes, and what reads them after that stream.
#[cfg(feature = "cuda")]
pub trait DeviceTransport: Transport {
    /// The rank's device.
    fn device(&self) -> &Arc<Cuda>;

    /// The stream that exchanges are enqueued on. It does not wait for the default stream.
    fn stream(&self) -> RawStream;

    /// Waits on the host until everything on the stream is done.
    fn synchronize(&self) -> Result<()>;

    /// Makes room for exchanges of that many messages each way, so that none allocates.
    fn reserve(&self, messages: usize);

    /// A run begins whose exchanges are captured into a CUDA graph, by the number of its capture, or are not. Of use where
    /// the exchanges of several ranks have to be in one graph.
    fn begin_run(&self, capture: Option<u64>) {
        let _ = capture;
    }

    /// Whether an exchange can be enqueued while the stream is being captured into a CUDA graph: its replays then move the
    /// data again, without the host. Otherwise a run that exchanges anything is refused during a capture.
    fn can_capture(&self) -> bool {
        false
    }
}
