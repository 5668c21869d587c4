// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages that one call posts and waits for.
//!
//! Agreements and exchanges use one order of messages between two ranks. Two ranks that make the same calls make them
//! in the same order, so the header that arrives next belongs to the call that this rank is in.
//!
//! Headers and joined messages use the transport's own memory, which the next call reuses. After a failure this memory
//! is not reused, although the engine was closed: that is an extra safeguard.

use std::{format, sync::Arc, vec, vec::Vec};

use super::{
    super::{Label, Message},
    contract::{Engine, Failed, MessageDirection},
    packets::{Header, Packet, SMALL, packets},
    search::EngineGroup,
    verdict::Verdict,
    waits::Wait,
};

// The tags of messages; messages of one tag match in their order.
pub(super) const HEADERS: u32 = 7002;
const BODIES: u32 = 7003;

/// Why a call ends.
pub(super) enum Stop {
    /// A peer sends something else than this rank expects.
    Differs(Verdict),
    Failed(Failed),
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

/// Buffers for the calls of one rank. The engine gets their addresses, so they are used by address alone during a call.
/// They are dropped with the transport, or after a call whose messages have all moved.
#[derive(Default)]
pub(super) struct MessageBuffers {
    /// Each has room for a header and a small packet.
    free: Vec<Vec<u8>>,
    used: Vec<Vec<u8>>,
    /// Memory of large joined messages of the current call.
    large: Vec<Vec<u8>>,
}

impl MessageBuffers {
    pub(super) fn small(&mut self) -> *mut u8 {
        let mut room = self.free.pop().unwrap_or_else(|| vec![0; Header::BYTES + SMALL]);
        let at = room.as_mut_ptr();
        self.used.push(room);
        at
    }

    fn large(&mut self, bytes: usize) -> *mut u8 {
        let mut room = vec![0; bytes];
        let at = room.as_mut_ptr();
        self.large.push(room);
        at
    }

    /// All messages of the call have moved.
    pub(super) fn reuse(&mut self) {
        self.free.append(&mut self.used);
        self.large.clear();
    }
}

/// The messages of one call.
pub(super) struct Moves<'a, E> {
    pub(super) group: &'a Arc<EngineGroup<E>>,
    pub(super) label: Label,
    pub(super) rooms: &'a mut MessageBuffers,
}

/// A message that was posted.
pub(super) struct PostedMessage {
    wait: Wait,
    pub(super) number: u64,
}

/// A header that a peer sends, with a small packet behind it if it is that of an exchange.
pub(super) struct Arriving {
    pub(super) peer: usize,
    pub(super) room: *mut u8,
    pub(super) posted: PostedMessage,
}

// SAFETY: an address and numbers; the room is read only after its message has moved.
unsafe impl Sync for Arriving {}

impl Arriving {
    /// The header: bytes that have arrived, or zeros.
    pub(super) fn header(&self) -> Header {
        let mut bytes = [0; Header::BYTES];
        // SAFETY: the room has space for a header, and lives as long as the call; its message has moved, so nothing
        // writes it.
        unsafe { self.room.copy_to_nonoverlapping(bytes.as_mut_ptr(), Header::BYTES) };
        Header::from_bytes(bytes)
    }
}

impl<E: Engine> Moves<'_, E> {
    /// Starts to move a message; errors report `told` bytes.
    ///
    /// # Safety
    /// As [`Engine::post`].
    pub(super) unsafe fn post(
        &self,
        way: MessageDirection,
        peer: usize,
        tag: u32,
        data: *mut u8,
        bytes: usize,
        told: usize,
    ) -> Result<PostedMessage, Failed> {
        let wait = Wait { label: self.label, of: Some((way, peer)), bytes: told };
        self.group.set_wait(Some(wait));
        // SAFETY: promised.
        let number = unsafe { self.group.engine.post(way, peer, tag, data, bytes) }?;
        Ok(PostedMessage { wait, number })
    }

    pub(super) fn wait(&self, posted: &PostedMessage) -> Result<(), Failed> {
        self.group.set_wait(Some(posted.wait));
        self.group.engine.wait(posted.number, self.group.deadline)
    }

    /// Moves a batch.
    ///
    /// # Safety
    /// The messages are valid, as `Transport::exchange` asks for, until this has returned and, after a failure, the
    /// engine was closed.
    pub(super) unsafe fn exchange(&mut self, sends: &[Message], recvs: &[Message]) -> Result<(), Stop> {
        let (incoming, outgoing) = (packets(recvs), packets(sends));
        let mut heads = Vec::with_capacity(incoming.len());
        for packet in &incoming {
            let (room, bytes, told) = (self.rooms.small(), Header::BYTES + SMALL, packet.bytes());
            // SAFETY: a room of these bytes, which lives until the message has moved or the engine is closed.
            let posted = unsafe { self.post(MessageDirection::Receive, packet.peer, HEADERS, room, bytes, told) }?;
            heads.push((packet, Arriving { peer: packet.peer, room, posted }));
        }
        let mut sent = Vec::with_capacity(2 * outgoing.len());
        for packet in &outgoing {
            // SAFETY: promised.
            unsafe { self.send(packet, &mut sent) }?;
        }
        let mut bodies = Vec::new();
        for (packet, arriving) in &heads {
            self.wait(&arriving.posted)?;
            let room = arriving.room;
            let (Label { operation, step, run }, rank) = (self.label, self.group.rank);
            let expected = Header::new(packet, run);
            let call = || format!("{operation}, step {step}");
            if let Some(verdict) = expected.compare(&arriving.header(), rank, packet.peer, call) {
                return Err(Stop::Differs(verdict));
            }
            if packet.is_small() {
                // SAFETY: the messages are valid (promised), and the packet lies behind its header.
                unsafe { packet.scatter(room.add(Header::BYTES)) };
            } else {
                let (to, bytes) = (self.body(packet), packet.bytes());
                // SAFETY: the message itself (promised), or a room of these bytes as above.
                let posted = unsafe { self.post(MessageDirection::Receive, packet.peer, BODIES, to, bytes, bytes) }?;
                bodies.push((packet, to, posted));
            }
        }
        for (packet, from, posted) in &bodies {
            self.wait(posted)?;
            if packet.is_joined() {
                // SAFETY: the messages are valid (promised), and the room holds the packet.
                unsafe { packet.scatter(*from) };
            }
        }
        for posted in &sent {
            self.wait(posted)?;
        }
        Ok(())
    }

    /// The memory of a packet that travels without its header: its only message, or a room.
    fn body(&mut self, packet: &Packet) -> *mut u8 {
        match packet.messages[..] {
            [one] => one.ptr,
            _ => self.rooms.large(packet.bytes()),
        }
    }

    /// Begins to send a packet.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange).
    unsafe fn send(&mut self, packet: &Packet, sent: &mut Vec<PostedMessage>) -> Result<(), Failed> {
        let (room, bytes) = (self.rooms.small(), packet.bytes());
        let header = Header::new(packet, self.label.run).to_bytes();
        // SAFETY: the room has space for a header and a small packet.
        unsafe {
            room.copy_from_nonoverlapping(header.as_ptr(), Header::BYTES);
            if packet.is_small() {
                packet.gather(room.add(Header::BYTES));
            }
        }
        let length = Header::BYTES + if packet.is_small() { bytes } else { 0 };
        // SAFETY: the room lives until the message has moved or the engine is closed.
        sent.push(unsafe { self.post(MessageDirection::Send, packet.peer, HEADERS, room, length, bytes) }?);
        if !packet.is_small() {
            let from = self.body(packet);
            if packet.is_joined() {
                // SAFETY: the messages are valid (promised), the room has these bytes.
                unsafe { packet.gather(from) };
            }
            // SAFETY: the message itself (promised), or the room, as above.
            sent.push(unsafe { self.post(MessageDirection::Send, packet.peer, BODIES, from, bytes, bytes) }?);
        }
        Ok(())
    }
}
