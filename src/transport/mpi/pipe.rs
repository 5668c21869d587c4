// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages to or from one peer, sent in pieces through the transport's own memory.
//!
//! They are not sent directly from and into the caller's memory, because MPI cannot cancel a transfer that has begun
//! (`in_flight.rs`), and a caller that gets an error from an exchange must be able to use its memory. This costs a
//! memory copy; a piece is small enough to stay in the cache between the two copies.
//!
//! Pieces also allow messages beyond 2 GiB, the limit of MPI's counts. They begin with a header with the length of the
//! whole message, so that two ranks with different lengths get an error with both.

use std::{ffi::c_int, vec, vec::Vec};

use super::{
    in_flight::MemoryInFlight,
    raw::{Comm, Refused},
};
use crate::transport::{Message, engine::MessageDirection};

/// Bytes of a message that travel at once.
pub(super) const PIECE: usize = 256 << 10;

/// Pieces to or from one peer that are under way at once.
const SLOTS: usize = 3;

/// Bytes of the header of each piece: the size of its message, and the message's index among those of this pair.
const HEADER: usize = 16;

/// A place in the messages of one peer.
#[derive(Clone, Copy, Default)]
struct Cursor {
    /// Index in `Pipe::list`.
    message: usize,
    /// Bytes of that message that lie before.
    offset: usize,
    /// Number of that message in the life of the pair.
    number: u64,
}

/// Why a pipe cannot go on.
pub(super) enum Broken {
    Mpi(Refused),
    /// The peer's message has another size.
    Size {
        ours: usize,
        theirs: u64,
    },
    /// The peer's message has another index.
    Order,
}

impl From<Refused> for Broken {
    fn from(refused: Refused) -> Self {
        Self::Mpi(refused)
    }
}

/// One way between this rank and one peer.
pub(super) struct Pipe {
    way: MessageDirection,
    peer: usize,
    piece: usize,
    /// Each has a header and a piece.
    slots: Vec<MemoryInFlight<[u64]>>,
    /// Pieces handed to MPI that are not complete; the oldest is in slot `oldest`.
    under_way: usize,
    oldest: usize,
    /// The messages of this exchange.
    list: Vec<Message>,
    begun: Cursor,
    complete: Cursor,
}

// SAFETY: the messages are used while the exchange that listed them lasts, by the thread that is in it.
unsafe impl Send for Pipe {}

impl Pipe {
    pub(super) fn new(way: MessageDirection, peer: usize) -> Self {
        Self {
            way,
            peer,
            piece: PIECE,
            slots: Vec::new(),
            under_way: 0,
            oldest: 0,
            list: Vec::new(),
            begun: Cursor::default(),
            complete: Cursor::default(),
        }
    }

    /// Lists a message; true for the first.
    pub(super) fn add(&mut self, message: Message, piece: usize) -> bool {
        if self.slots.is_empty() {
            self.piece = piece;
            let slot = || MemoryInFlight::new(vec![0; (HEADER + piece).div_ceil(8)].into_boxed_slice());
            self.slots.extend((0..SLOTS).map(|_| slot()));
        }
        self.list.push(message);
        self.list.len() == 1
    }

    /// Whether all that was listed has moved.
    pub(super) fn is_done(&self) -> bool {
        self.complete.message == self.list.len()
    }

    /// How many messages have moved so far, in all calls.
    pub(super) fn moved(&self) -> u64 {
        self.complete.number
    }

    /// Bytes that have not moved.
    pub(super) fn waiting(&self) -> u64 {
        let all: u64 = self.list[self.complete.message..].iter().map(|m| m.bytes as u64).sum();
        all - self.complete.offset as u64
    }

    /// Forgets the messages; the numbers go on.
    pub(super) fn clear(&mut self) {
        self.list.clear();
        for cursor in [&mut self.begun, &mut self.complete] {
            (cursor.message, cursor.offset) = (0, 0);
        }
    }

    /// Ends complete pieces and begins the next ones. Returns whether anything moved.
    ///
    /// # Safety
    /// The listed messages are valid, as `Transport::exchange` demands.
    pub(super) unsafe fn advance(&mut self, comm: Comm, tag: c_int) -> Result<bool, Broken> {
        let mut moved = false;
        loop {
            // SAFETY: the listed messages are valid (the contract of this function).
            unsafe { self.begin(comm, tag) }?;
            // SAFETY: the listed messages are valid (the contract of this function).
            if self.under_way == 0 || !unsafe { self.take() }? {
                return Ok(moved);
            }
            moved = true;
        }
    }

    /// Hands pieces to MPI while there are slots.
    ///
    /// # Safety
    /// As [`Pipe::advance`].
    unsafe fn begin(&mut self, comm: Comm, tag: c_int) -> Result<(), Refused> {
        while self.under_way < SLOTS && self.begun.message < self.list.len() {
            let message = self.list[self.begun.message];
            let bytes = self.piece.min(message.bytes - self.begun.offset);
            let slot = &mut self.slots[(self.oldest + self.under_way) % SLOTS];
            match self.way {
                MessageDirection::Send => {
                    let (header, piece) = slot.get().expect("the slot is free").split_at_mut(HEADER / 8);
                    header.copy_from_slice(&[message.bytes as u64, self.begun.number]);
                    let piece = &mut bytemuck::cast_slice_mut::<_, u8>(piece)[..bytes];
                    // SAFETY: the message is valid for reads (the contract of `advance`).
                    unsafe { message.ptr.add(self.begun.offset).copy_to_nonoverlapping(piece.as_mut_ptr(), bytes) };
                    slot.send(comm, HEADER + bytes, self.peer, tag)
                }
                MessageDirection::Receive => slot.receive(comm, Some(self.peer), tag),
            }?;
            self.under_way += 1;
            step(&mut self.begun, &message, bytes);
        }
        Ok(())
    }

    /// Takes the oldest piece if it is complete.
    ///
    /// # Safety
    /// As [`Pipe::advance`].
    unsafe fn take(&mut self) -> Result<bool, Broken> {
        let Some(slot) = self.slots[self.oldest].poll()? else { return Ok(false) };
        let message = self.list[self.complete.message];
        let bytes = self.piece.min(message.bytes - self.complete.offset);
        if self.way == MessageDirection::Receive {
            let (header, piece) = slot.split_at(HEADER / 8);
            if header[0] != message.bytes as u64 {
                return Err(Broken::Size { ours: message.bytes, theirs: header[0] });
            }
            if header[1] != self.complete.number {
                return Err(Broken::Order);
            }
            let piece = &bytemuck::cast_slice::<_, u8>(piece)[..bytes];
            // SAFETY: the message is valid for writes and used by nothing else (the contract of `advance`).
            unsafe { message.ptr.add(self.complete.offset).copy_from_nonoverlapping(piece.as_ptr(), bytes) };
        }
        step(&mut self.complete, &message, bytes);
        self.oldest = (self.oldest + 1) % SLOTS;
        self.under_way -= 1;
        Ok(true)
    }

    /// Asks MPI to give up the receives that are under way.
    pub(super) fn cancel(&mut self) {
        if self.way == MessageDirection::Receive {
            self.slots.iter_mut().for_each(MemoryInFlight::cancel);
        }
    }

    /// Whether MPI holds no slot any more.
    pub(super) fn is_free(&mut self) -> bool {
        self.slots.iter_mut().all(MemoryInFlight::is_done)
    }
}

fn step(cursor: &mut Cursor, message: &Message, bytes: usize) {
    cursor.offset += bytes;
    if cursor.offset == message.bytes {
        *cursor = Cursor { message: cursor.message + 1, offset: 0, number: cursor.number + 1 };
    }
}
