// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports: how ranks communicate.
//!
//! All communication is in *exchanges*. An exchange is a batch of sends and receives of contiguous bytes that completes
//! as a whole: an all-to-all, a ring step, a halo, an all-gather, a return of gradients. Every transport keeps this
//! contract, and the schedule verifier assumes it:
//!
//! - each send matches exactly one receive of the same size; between two ranks, sends and receives match in the order
//!   in which each rank lists them;
//! - an exchange is a rendezvous: no rank relies on buffering, and an exchange ends when all of its messages have moved
//!   (a transport may send small messages before the receiver is ready; a failure there is then reported by the next
//!   call);
//! - a rank makes one exchange at a time; one exchange has at most eight messages to each peer and at most eight from
//!   it, so that requests can be allocated once;
//! - `agree` on one rank and `exchange` on another may run at the same time: they need different tags or communicators;
//! - `peer` is a rank number in the transport's group, not in the job;
//! - empty messages are not listed, on either side, and no rank lists itself;
//! - nothing hangs: when a peer dies, leaves, or does not answer before the deadline, every rank of the group gets an
//!   error that names rank, operation, step and peer, and for a deadline the time and the bytes that were still to
//!   move. A rank that is computing gets it at its next call. Deadlines must be longer than the longest time that a
//!   peer computes between two exchanges;
//! - a group that failed stays failed: make a new one. The library calls `abort` after the first error, so that peers
//!   do not wait until their deadlines;
//! - when a call has returned, also with an error, the transport no longer accesses the memory of its messages. A
//!   transport that cannot cancel a receive that has begun must receive into its own memory and copy, as transport
//!   `mpi` does.
//!
//! `docs/transport_contract.md` has the same contract for authors of transports, with the test of each rule.

#[cfg(feature = "cuda")]
use crate::call::RawStream;
pub use crate::error::Label;
use crate::error::{Cause, Result, RunName};

#[cfg(feature = "cuda")]
use crate::kernel::cuda::Cuda;
#[cfg(feature = "cuda")]
use alloc::sync::Arc;

#[cfg(feature = "std")]
pub(crate) mod carrier;
#[cfg(feature = "std")]
pub mod engine;
#[cfg(feature = "std")]
mod fault;
#[cfg(feature = "std")]
pub(crate) mod gather;
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
#[cfg(feature = "std")]
mod rules;

/// Contiguous bytes to send to `peer`, or to receive from it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Message {
    /// The other rank, by its number in the group.
    pub peer: usize,
    /// The address of the bytes; the bytes of a send are only read.
    pub ptr: *mut u8,
    /// The number of bytes; at least 1.
    pub bytes: usize,
}

// SAFETY: a Message is an address and numbers; the contract of `Transport::exchange` says which thread may touch the
// bytes.
unsafe impl Send for Message {}
// SAFETY: a Message is an address and numbers; the contract of `Transport::exchange` says which thread may touch the
// bytes.
unsafe impl Sync for Message {}

/// One rank's transport. One group of transports serves every mesh. The [module](self) states the contract.
///
/// `agree` and `exchange` wait, and are called by one thread at a time, but not always the same: a
/// [`Rank`](crate::Rank) calls `agree` on the caller's thread and `exchange` on one of its own. `poll` and `abort` are
/// called by any thread at any time, also while another thread waits.
pub trait Transport: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// Compares one number over the ranks of `group`, by an all-gather outside of any schedule; waits for all of them.
    /// Fails with [`Error::Disagreement`](crate::Error::Disagreement) on every rank of the group if the numbers differ.
    fn agree(&self, group: core::ops::Range<usize>, fingerprint: u64) -> Result<()>;

    /// Sets the label of the next [`agree`](Self::agree), for errors.
    fn announce(&self, run: Option<RunName>) {
        let _ = run;
    }

    /// Moves a batch of messages. Transports of host memory return when it is complete, transports of device memory
    /// when it is enqueued on their stream.
    ///
    /// # Safety
    /// Until the batch is complete, or the call has returned an error: every `recvs` range is valid for writes and
    /// accessed by nothing else, every `sends` range is valid for reads and written by nothing.
    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()>;

    /// Returns an error if anything has failed so far; never waits.
    fn poll(&self) -> Result<()>;

    /// Ends the run on every rank of the world. May be called from any thread, any number of times.
    fn abort(&self, cause: Cause);
}

/// A transport that is shared, by a rank and by the code that made it.
impl<T: Transport + ?Sized> Transport for alloc::sync::Arc<T> {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world(&self) -> usize {
        (**self).world()
    }

    fn announce(&self, run: Option<RunName>) {
        (**self).announce(run);
    }

    fn agree(&self, group: core::ops::Range<usize>, fingerprint: u64) -> Result<()> {
        (**self).agree(group, fingerprint)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the contract of `exchange`, which is the same.
        unsafe { (**self).exchange(label, sends, recvs) }
    }

    fn poll(&self) -> Result<()> {
        (**self).poll()
    }

    fn abort(&self, cause: Cause) {
        (**self).abort(cause);
    }
}

/// A transport of device memory: `exchange` enqueues a batch on the transport's own stream and returns. The caller must
/// order that stream after the work that writes the bytes, and the work that reads them after that stream.
#[cfg(feature = "cuda")]
pub trait DeviceTransport: Transport {
    /// The rank's device.
    fn device(&self) -> &Arc<Cuda>;

    /// The stream that exchanges are enqueued on. It does not wait for the default stream.
    fn stream(&self) -> RawStream;

    /// Waits on the host until everything on the stream is done.
    fn synchronize(&self) -> Result<()>;

    /// Called at the start of a run, with the number of the CUDA graph capture that its exchanges are part of, if any.
    /// For transports where the exchanges of several ranks must be in one graph.
    fn begin_run(&self, capture: Option<u64>) {
        let _ = capture;
    }

    /// Whether an exchange can be enqueued while the stream is being captured into a CUDA graph: its replays then move
    /// the data again, without the host. Otherwise a run with exchanges is refused during a capture.
    fn can_capture(&self) -> bool {
        false
    }
}

/// A shared transport. If [`Rank::on_device`](crate::Rank::on_device) fails, its caller still has the transport.
#[cfg(feature = "cuda")]
impl<T: DeviceTransport + ?Sized> DeviceTransport for Arc<T> {
    fn device(&self) -> &Arc<Cuda> {
        (**self).device()
    }

    fn stream(&self) -> RawStream {
        (**self).stream()
    }

    fn synchronize(&self) -> Result<()> {
        (**self).synchronize()
    }

    fn begin_run(&self, capture: Option<u64>) {
        (**self).begin_run(capture);
    }

    fn can_capture(&self) -> bool {
        (**self).can_capture()
    }
}
