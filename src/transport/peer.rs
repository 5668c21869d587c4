// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as threads of one process with tensors on CUDA devices; several ranks may share a device.
//!
//! The data is moved by device copies, ordered by CUDA events; no rank waits for a device. An event must be recorded
//! before another stream can wait for it, so the host threads of two ranks must both have reached an exchange before
//! its copies can be enqueued. They synchronise over transport [`local`], once for each exchange: the second of the two
//! to arrive enqueues the copies in both directions, also on the other's stream, so that the first parks at most once.
//!
//! 1. Each rank records its event `ready` after the work that writes the bytes it sends, and enters the exchange.
//! 2. For each pair of ranks, the second to arrive makes the receiver's stream wait for the sender's `ready`. It
//!    enqueues the copies on the receiver's stream and records the pair's event `done` after them.
//! 3. When all copies from and to a rank are enqueued, its own stream waits for `done` of all that it sent to, so that
//!    the bytes are not overwritten too early. These waits come behind its own receives: both ways of a link copy at
//!    the same time.
//!
//! A pair's `done` is recorded again in the next exchange only, which the sender enters after its wait.
//!
//! A rank that fails also waits for `done` before its run returns the error: after that, no copy from or to its memory
//! is enqueued or in progress.
//!
//! Between devices a copy is direct if the driver gives the receiver's device access to the sender's memory, which
//! [`group`] requests; otherwise it goes through host memory ([`Peer::is_direct`]).
//!
//! Deadlines, abort and the rank that errors name are those of transport `local`. A device that stops is noticed by
//! [`poll`](Transport::poll).

use std::{
    format,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
    vec::Vec,
};

use super::{
    DeviceTransport, Label, Message, Transport,
    local::{self, Local},
};
use crate::{
    call::RawStream,
    device::{
        driver::CudaEvent,
        memory::{OwnStream, copy},
    },
    error::{Cause, Error, Result},
    kernel::cuda::Cuda,
};

/// One rank of a [`group`]. Dropping it means that the rank leaves.
pub struct Peer {
    local: Local,
    cuda: Arc<Cuda>,
    streams: Arc<[PeerStream]>,
    /// By rank: whether copies from there are direct.
    direct: Vec<bool>,
}

/// The stream and events of a rank, which its peers use too. They live as long as any rank of the group: a rank may be
/// gone while another still waits for its events.
struct PeerStream {
    stream: OwnStream,
    ready: CudaEvent,
    /// By sender: recorded after the copies from that sender to this rank.
    done: Vec<CudaEvent>,
    /// The device of the stream.
    cuda: Arc<Cuda>,
    /// The capture that the rank's run is part of; 0 for none. Written before the run's exchanges, read in them.
    capture: AtomicU64,
}

impl core::fmt::Debug for Peer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (rank, world, device) = (self.local.rank(), self.local.world(), self.cuda.ordinal());
        f.debug_struct("Peer")
            .field("rank", &rank)
            .field("world", &world)
            .field("device", &device)
            .finish_non_exhaustive()
    }
}

/// One rank for each entry of `devices`, in that order; several entries may be the same device. Each device gets access
/// to the memory of the others if the driver supports it.
///
/// # Errors
/// As [`local::group`], or the driver's.
pub fn group(devices: &[Arc<Cuda>], deadline: Duration) -> Result<Vec<Peer>> {
    let lane = |cuda: &Arc<Cuda>| -> Result<PeerStream> {
        let context = cuda.context();
        let done = devices.iter().map(|_| CudaEvent::new(context)).collect::<Result<_>>()?;
        let (stream, ready) = (OwnStream::new(context)?, CudaEvent::new(context)?);
        Ok(PeerStream { stream, ready, done, cuda: Arc::clone(cuda), capture: AtomicU64::new(0) })
    };
    let streams: Arc<[PeerStream]> = devices.iter().map(lane).collect::<Result<Vec<_>>>()?.into();
    local::group(devices.len(), deadline)?
        .into_iter()
        .zip(devices)
        .map(|(local, cuda)| {
            let access = |other: &Arc<Cuda>| cuda.context().enable_access_to(other.context());
            let direct = devices.iter().map(access).collect::<Result<_>>()?;
            Ok(Peer { local, streams: Arc::clone(&streams), cuda: Arc::clone(cuda), direct })
        })
        .collect()
}

impl Peer {
    /// Whether messages from rank `peer` are copied directly, inside a device or between two. If not, the driver copies
    /// them through host memory: the results are the same, but it is slower.
    ///
    /// ```no_run
    /// # use {cpattn::{kernel::cuda::Cuda, transport::{Transport, peer}}, std::{sync::Arc, time::Duration}};
    /// let devices = [Arc::new(Cuda::new(0)?), Arc::new(Cuda::new(1)?)];
    /// for end in peer::group(&devices, Duration::from_secs(10))? {
    ///     let staged: Vec<usize> = (0..end.world()).filter(|&r| !end.is_direct(r)).collect();
    ///     println!("rank {} receives through the host from {staged:?}", end.rank());
    /// }
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Panics
    /// When there is no rank `peer`.
    pub fn is_direct(&self, peer: usize) -> bool {
        self.direct[peer]
    }

    fn own(&self) -> &PeerStream {
        &self.streams[self.local.rank()]
    }
}

impl DeviceTransport for Peer {
    fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    fn stream(&self) -> RawStream {
        self.own().stream.handle()
    }

    fn synchronize(&self) -> Result<()> {
        self.own().stream.synchronize()
    }

    /// Each replay repeats the copies, in the order of the events that were captured. The hosts of the ranks meet while
    /// they capture, not when the graph is replayed.
    fn can_capture(&self) -> bool {
        true
    }

    fn begin_run(&self, capture: Option<u64>) {
        // The driver counts captures from 1. The mutex of the exchange orders this for the ranks that read it.
        self.own().capture.store(capture.unwrap_or(0), Ordering::Relaxed);
    }
}

/// The error of an exchange between two captures: a copy waits for an event of its sender, and a graph cannot wait for
/// an event of another graph.
fn capture_mismatch(rank: usize, peer: usize, [ours, theirs]: [u64; 2]) -> Error {
    let of = |capture| if capture == 0 { "in no graph" } else { "captured into a graph" };
    let how = if ours != 0 && theirs != 0 { ", of another capture" } else { "" };
    let found = format!("rank {rank} {}, rank {peer} {}{how}", of(ours), of(theirs));
    let limit = "ranks of transport peer copy from each other, in the order of events of one graph";
    Error::unsupported(
        found,
        limit,
        "have the streams of all ranks join one capture by events, or capture none of them",
    )
}

impl PeerStream {
    /// Enqueues the messages from one rank to another on the receiver's stream, after the work that wrote them and
    /// before `done`.
    fn enqueue(streams: &[Self], [from, to]: [usize; 2], next: &mut dyn FnMut() -> Option<[Message; 2]>) -> Result<()> {
        let Some(first) = next() else { return Ok(()) };
        let (sender, receiver) = (&streams[from], &streams[to]);
        let captures = [receiver, sender].map(|rank| rank.capture.load(Ordering::Relaxed));
        if captures[0] != captures[1] {
            return Err(capture_mismatch(to, from, captures));
        }
        let stream = receiver.stream.handle();
        let mut enqueue = || {
            // The stream is given work while its own context is current.
            let _entered = receiver.cuda.context().enter()?;
            sender.ready.make_stream_wait(stream)?;
            let mut message = Some(first);
            while let Some([send, recv]) = message {
                // SAFETY: both ranks are in exchanges that list these bytes, of one size, and so promise them until the
                // batch is complete, which the events order.
                unsafe { copy(recv.ptr, send.ptr, recv.bytes, stream) }?;
                message = next();
            }
            receiver.done[from].record(stream)
        };
        enqueue().inspect_err(|_| {
            // When its call has returned, the sender may reuse its memory, so the enqueued copies must be over first.
            // If the driver cannot even wait, the first error says more. Captured copies have not begun, and their
            // stream cannot be waited for.
            if captures == [0, 0] {
                let _ = receiver.stream.synchronize();
            }
        })
    }
}

impl Peer {
    /// Makes the rank's stream wait for the copies out of its memory.
    fn hold_until_sent(&self, sends: &[Message]) -> Result<()> {
        let (me, stream) = (self.local.rank(), self.own().stream.handle());
        let mut last = None;
        for peer in sends.iter().map(|m| m.peer) {
            // Messages to one peer are mostly adjacent; a second wait for one event does no harm.
            if last.replace(peer) != Some(peer) {
                self.streams[peer].done[me].make_stream_wait(stream)?;
            }
        }
        Ok(())
    }
}

impl Transport for Peer {
    fn rank(&self) -> usize {
        self.local.rank()
    }

    fn world(&self) -> usize {
        self.local.world()
    }

    fn agree(&self, group: core::ops::Range<usize>, fingerprint: u64) -> Result<()> {
        self.local.agree(group, fingerprint)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.local.check(sends, recvs)?;
        let _entered = self.cuda.context().enter()?;
        let own = self.own();
        own.ready.record(own.stream.handle())?;
        let mut enqueue = |pair: [usize; 2], next: &mut dyn FnMut() -> Option<[Message; 2]>| {
            PeerStream::enqueue(&self.streams, pair, next)
        };
        let outcome = self.local.exchange_enqueued(label, sends, recvs, &mut enqueue);
        if outcome.is_ok() {
            return self.hold_until_sent(sends);
        }
        // After a failed call some copies may be in progress: the run waits for them on the host, through this stream.
        // During a capture none is. A second error says nothing new.
        if own.capture.load(Ordering::Relaxed) == 0 {
            let _ = self.hold_until_sent(sends);
        }
        outcome
    }

    fn poll(&self) -> Result<()> {
        self.local.poll()?;
        self.own().stream.query().map(|_| ())
    }

    fn abort(&self, cause: Cause) {
        self.local.abort(cause);
    }
}
