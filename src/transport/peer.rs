// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks of one process whose memory is on CUDA devices: one device each, or several on one.
//!
//! The data moves by device copies, ordered by events alone. The host threads of the ranks meet at each exchange, over
//! transport [`local`], only to tell each other addresses and events; no rank waits for a device. What a pair agrees on:
//!
//! 1. the sender records an event behind whatever wrote the bytes, and offers address, size, event and its stream and
//!    context;
//! 2. the receiver has its own stream wait for that event, enqueues the copies, records an event behind them, and has
//!    the *sender's* stream wait for it, so that the bytes are not overwritten too early;
//! 3. it then says so. Not before has the sender's host gone on, so neither event is recorded anew too early.
//!
//! Between devices a copy goes directly where the driver gives the receiver's device access to the sender's memory, which
//! [`group`] asks for, and through host memory otherwise: [`Peer::is_direct`].
//!
//! Deadlines, abort and the naming of culprits are those of transport `local`. A device that stops is noticed by
//! [`poll`](Transport::poll).

use std::{
    format,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
    vec::Vec,
};

use super::{
    DeviceTransport, Label, Message, Transport,
    local::{self, Local},
};
use crate::{
    call::RawStream,
    error::{Cause, Error, Result},
    kernel::cuda::{
        Cuda,
        driver::{Event, check, enter_other, sys},
        memory::{OwnStream, copy},
    },
};

/// What a sender tells about one message.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Offer {
    ptr: usize,
    bytes: usize,
    ready: usize,
    stream: usize,
    context: usize,
    /// The capture that the sender's run is part of; 0 for none.
    capture: u64,
}

/// One rank of a [`group`]. Dropping it means that the rank leaves.
pub struct Peer {
    local: Local,
    cuda: Arc<Cuda>,
    lanes: Arc<[Lane]>,
    events: Mutex<Events>,
    /// By rank: whether copies from there are direct.
    direct: Vec<bool>,
}

/// What a rank's peers are told the handles of. It lives as long as any rank of the group: a rank that fails may be gone
/// while another still enqueues what it was offered before.
struct Lane {
    stream: OwnStream,
    ready: Event,
    /// Whose context it is.
    cuda: Arc<Cuda>,
}

struct Events {
    done: Event,
    out: Vec<Offer>,
    arrived: Vec<Offer>,
    sends: Vec<Message>,
    recvs: Vec<Message>,
    peers: Vec<usize>,
    notes: Vec<u8>,
    /// The capture that the run is part of; 0 for none.
    capture: u64,
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

/// One rank for each entry of `devices`, in that order; several entries may be the same device. Each device gets access to
/// the memory of the others where the driver can give it.
///
/// # Errors
/// As [`local::group`], or the driver's.
pub fn group(devices: &[Arc<Cuda>], deadline: Duration) -> Result<Vec<Peer>> {
    let lane = |cuda: &Arc<Cuda>| -> Result<Lane> {
        let context = cuda.context();
        Ok(Lane { stream: OwnStream::new(context)?, ready: Event::new(context)?, cuda: Arc::clone(cuda) })
    };
    let lanes: Arc<[Lane]> = devices.iter().map(lane).collect::<Result<Vec<_>>>()?.into();
    local::group(devices.len(), deadline)?
        .into_iter()
        .zip(devices)
        .map(|(local, cuda)| {
            let context = cuda.context();
            let events = Events {
                done: Event::new(context)?,
                out: Vec::new(),
                arrived: Vec::new(),
                sends: Vec::new(),
                recvs: Vec::new(),
                peers: Vec::new(),
                notes: Vec::new(),
                capture: 0,
            };
            let access = |other: &Arc<Cuda>| context.enable_access_to(other.context());
            let direct = devices.iter().map(access).collect::<Result<_>>()?;
            let (lanes, cuda) = (Arc::clone(&lanes), Arc::clone(cuda));
            Ok(Peer { local, lanes, cuda, events: Mutex::new(events), direct })
        })
        .collect()
}

impl Peer {
    /// Whether what rank `peer` sends is copied directly, inside a device or from one to the other. Where it is not, the
    /// driver stages it in host memory: results are the same, and slower by the way through the host.
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

    fn lane(&self) -> &Lane {
        &self.lanes[self.local.rank()]
    }
}

impl DeviceTransport for Peer {
    fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    fn stream(&self) -> RawStream {
        self.lane().stream.handle()
    }

    fn synchronize(&self) -> Result<()> {
        self.lane().stream.synchronize()
    }

    /// Each replay repeats the copies, in the order of the events that were captured. The hosts of the ranks meet while
    /// they capture, not when the graph is replayed.
    fn can_capture(&self) -> bool {
        true
    }

    fn begin_run(&self, capture: Option<u64>) {
        // The driver counts captures from 1.
        self.events.lock().unwrap_or_else(PoisonError::into_inner).capture = capture.unwrap_or(0);
    }

    fn reserve(&self, messages: usize) {
        let mut e = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let world = self.local.world();
        e.out.reserve(messages);
        e.arrived.reserve(messages);
        e.sends.reserve(world);
        e.recvs.reserve(world);
        // A peer for each message, until each is there once.
        e.peers.reserve(messages.max(world));
        e.notes.reserve(2 * world);
    }
}

/// The peers of a list of messages, each once, in rank order.
fn peers_of(list: &[Message], into: &mut Vec<usize>) {
    into.clear();
    into.extend(list.iter().map(|m| m.peer));
    into.sort_unstable();
    into.dedup();
}

/// Why two ranks' exchange cannot be: a copy waits for an event of its sender, and a graph for none of another graph.
fn apart(rank: usize, peer: usize, [ours, theirs]: [u64; 2]) -> Error {
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

impl Events {
    /// Tells every receiver what it is offered and takes what every sender offers. `arrived` then lists offers by peer,
    /// and for each peer in the order of its messages.
    fn exchange_offers(
        &mut self,
        local: &Local,
        label: Label,
        lane: &Lane,
        sends: &[Message],
        recvs: &[Message],
    ) -> Result<()> {
        let (context, ready, stream) = (lane.cuda.context().handle(), &lane.ready, lane.stream.handle());
        let Self { out, arrived, sends: host_sends, recvs: host_recvs, peers, capture, .. } = self;
        out.clear();
        host_sends.clear();
        peers_of(sends, peers);
        for &peer in &*peers {
            let offers = sends.iter().filter(|m| m.peer == peer).map(|m| Offer {
                ptr: m.ptr as usize,
                bytes: m.bytes,
                ready: ready.handle() as usize,
                stream: stream as usize,
                context: context as usize,
                capture: *capture,
            });
            out.extend(offers);
        }
        // Addresses are taken once the list has stopped growing.
        let mut at = 0;
        for &peer in &*peers {
            let n = sends.iter().filter(|m| m.peer == peer).count();
            host_sends.push(Message { peer, ptr: out[at..].as_mut_ptr().cast(), bytes: n * size_of::<Offer>() });
            at += n;
        }
        arrived.clear();
        arrived.resize(recvs.len(), Offer { ptr: 0, bytes: 0, ready: 0, stream: 0, context: 0, capture: 0 });
        host_recvs.clear();
        peers_of(recvs, peers);
        let mut at = 0;
        for &peer in &*peers {
            let n = recvs.iter().filter(|m| m.peer == peer).count();
            host_recvs.push(Message { peer, ptr: arrived[at..].as_mut_ptr().cast(), bytes: n * size_of::<Offer>() });
            at += n;
        }
        // SAFETY: the lists live in `self`, do not grow during the call, and `arrived` is written by nothing else.
        unsafe { local.exchange(label, host_sends, host_recvs) }
    }

    /// Enqueues the copies, and has each sender's stream wait for them.
    unsafe fn enqueue(&mut self, local: &Local, label: Label, stream: RawStream, recvs: &[Message]) -> Result<()> {
        let mut at = 0;
        for &peer in &self.peers {
            let mut held = false;
            for recv in recvs.iter().filter(|m| m.peer == peer) {
                let offer = self.arrived[at];
                at += 1;
                if offer.capture != self.capture {
                    return Err(apart(local.rank(), peer, [self.capture, offer.capture]));
                }
                if offer.bytes != recv.bytes {
                    let cause = Cause::Size { ours: recv.bytes as u64, theirs: offer.bytes as u64 };
                    let Label { operation, step } = label;
                    return Err(Error::Peer { rank: local.rank(), operation, step, peer, cause });
                }
                if !held {
                    // SAFETY: the sender keeps its event alive until it is told that this is done.
                    check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, offer.ready as _, 0) })?;
                    held = true;
                }
                // SAFETY: both ends promised their bytes until the batch is complete; the events order the copy.
                unsafe { copy(recv.ptr, offer.ptr as *const u8, recv.bytes, stream) }?;
            }
        }
        self.done.record(stream)?;
        let mut last = None;
        for offer in &self.arrived {
            if last != Some(offer.stream) {
                // A stream is given work while its own context is current.
                // SAFETY: the sender holds its context until it is told that this is done.
                let _entered = unsafe { enter_other(offer.context as _) }?;
                self.done.hold(offer.stream as RawStream)?;
                last = Some(offer.stream);
            }
        }
        Ok(())
    }

    /// Tells the senders that their streams wait, and is told so by the receivers.
    fn acknowledge(&mut self, local: &Local, label: Label, sends: &[Message]) -> Result<()> {
        let Self { sends: host_sends, recvs: host_recvs, peers, notes, .. } = self;
        notes.clear();
        notes.resize(2 * local.world(), 1);
        let (out, heard) = notes.split_at_mut(local.world());
        host_sends.clear();
        host_sends.extend(peers.iter().map(|&peer| Message { peer, ptr: out[peer..].as_mut_ptr(), bytes: 1 }));
        peers_of(sends, peers);
        host_recvs.clear();
        host_recvs.extend(peers.iter().map(|&peer| Message { peer, ptr: heard[peer..].as_mut_ptr(), bytes: 1 }));
        // SAFETY: one byte for each peer each way, in a list that lives in `self` and does not grow during the call.
        unsafe { local.exchange(label, host_sends, host_recvs) }
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
        self.local.check("sends", sends)?;
        self.local.check("recvs", recvs)?;
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = self.cuda.context().enter()?;
        let lane = self.lane();
        let stream = lane.stream.handle();
        lane.ready.record(stream)?;
        events.exchange_offers(&self.local, label, lane, sends, recvs)?;
        // SAFETY: the messages' bytes are valid until the exchange is over (the contract of `Transport::exchange`).
        if let Err(error) = unsafe { events.enqueue(&self.local, label, stream, recvs) } {
            // The senders wait to be told, and their memory is theirs again once they are: what was enqueued is over
            // first. If the driver cannot even wait, the first error says more. What is captured has not begun, and its
            // stream cannot be waited for.
            if events.capture == 0 {
                let _ = lane.stream.synchronize();
            }
            self.local.abort(if let Error::Peer { cause, .. } = error { cause } else { Cause::Failed });
            return Err(error);
        }
        events.acknowledge(&self.local, label, sends)
    }

    fn poll(&self) -> Result<()> {
        self.local.poll()?;
        self.lane().stream.query().map(|_| ())
    }

    fn abort(&self, cause: Cause) {
        self.local.abort(cause);
    }
}
