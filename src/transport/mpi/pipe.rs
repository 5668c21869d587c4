// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages to or from one peer, sent in pieces through the transport's own memory.
//!
//! They are not sent directly from and into the caller's memory, because MPI cannot cancel a transfer that has begun.
//! `MPI_Cancel` only cancels a receive that has not matched a message; if the sender dies or stops in the middle of a
//! transfer, MPI may continue to write at any later time. But a caller that gets an error from an exchange must be able
//! to use its memory. So MPI gets only slots of the transport, and a slot that MPI still holds at the end is never
//! freed. This costs a memory copy; a piece is small enough to stay in the cache between the two copies.
//!
//! Pieces also allow messages beyond 2 GiB, the limit of MPI's counts. They begin with a header with the length of the
//! whole message, so that two ranks with different lengths get an error with both.

use std::{alloc::Layout, ffi::c_int, ptr::NonNull, vec::Vec};

use super::raw::{Comm, Refused, Request};
use crate::transport::Message;

/// Bytes of a message that travel at once.
pub(super) const PIECE: usize = 256 << 10;

/// Pieces to or from one peer that are under way at once.
const SLOTS: usize = 3;

/// The header of each piece: the size of its message, and the message's index among those of this pair.
const HEADER: usize = 16;

/// Direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PipeDirection {
    Send,
    Receive,
}

/// Memory that MPI may hold.
struct PipeSlot {
    memory: NonNull<u8>,
    layout: Layout,
    request: Request,
}

// SAFETY: memory of its own and a request, which any thread may use.
unsafe impl Send for PipeSlot {}

impl PipeSlot {
    fn new(piece: usize) -> Self {
        let layout = Layout::from_size_align(HEADER + piece, 64).expect("a piece is small");
        // SAFETY: the size is not 0.
        let Some(memory) = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }) else {
            std::alloc::handle_alloc_error(layout)
        };
        Self { memory, layout, request: Request::none() }
    }
}

impl Drop for PipeSlot {
    fn drop(&mut self) {
        if self.request.is_none() {
            // SAFETY: allocated with this layout, and MPI is done with it.
            unsafe { std::alloc::dealloc(self.memory.as_ptr(), self.layout) }
        }
    }
}

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
    way: PipeDirection,
    peer: usize,
    piece: usize,
    slots: Vec<PipeSlot>,
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
    pub(super) fn new(way: PipeDirection, peer: usize) -> Self {
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
            self.slots.extend((0..SLOTS).map(|_| PipeSlot::new(piece)));
        }
        self.list.push(message);
        self.list.len() == 1
    }

    /// Whether all that was listed has moved.
    pub(super) fn is_done(&self) -> bool {
        self.complete.message == self.list.len()
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
            let memory = slot.memory.as_ptr();
            slot.request = match self.way {
                // SAFETY: the slot is free and has room for a header and a piece; the message is valid for reads (the
                // contract of `advance`); MPI reads the slot, which nothing writes until the request is complete.
                PipeDirection::Send => unsafe {
                    let header = [message.bytes as u64, self.begun.number];
                    memory.cast::<[u64; 2]>().write(header);
                    memory.add(HEADER).copy_from_nonoverlapping(message.ptr.add(self.begun.offset), bytes);
                    comm.send(memory, HEADER + bytes, self.peer, tag)
                },
                // SAFETY: the slot is free, and nothing touches it until the request is complete.
                PipeDirection::Receive => unsafe { comm.receive(memory, HEADER + self.piece, Some(self.peer), tag) },
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
        let slot = &mut self.slots[self.oldest];
        let call = match self.way {
            PipeDirection::Send => "MPI_Isend",
            PipeDirection::Receive => "MPI_Irecv",
        };
        if !slot.request.test(call)? {
            return Ok(false);
        }
        let message = self.list[self.complete.message];
        let bytes = self.piece.min(message.bytes - self.complete.offset);
        if self.way == PipeDirection::Receive {
            let memory = slot.memory.as_ptr();
            // SAFETY: complete, so MPI is done with the slot, which is aligned and at least a header long.
            let [total, number] = unsafe { memory.cast::<[u64; 2]>().read() };
            if total != message.bytes as u64 {
                return Err(Broken::Size { ours: message.bytes, theirs: total });
            }
            if number != self.complete.number {
                return Err(Broken::Order);
            }
            // SAFETY: the piece has as many bytes, since both sides cut messages of this size alike; the message is
            // valid for writes and used by nothing else (the contract of `advance`).
            unsafe { message.ptr.add(self.complete.offset).copy_from_nonoverlapping(memory.add(HEADER), bytes) };
        }
        step(&mut self.complete, &message, bytes);
        self.oldest = (self.oldest + 1) % SLOTS;
        self.under_way -= 1;
        Ok(true)
    }

    /// Asks MPI to give up the receives that are under way.
    pub(super) fn cancel(&mut self) {
        if self.way == PipeDirection::Receive {
            self.slots.iter_mut().for_each(|slot| slot.request.cancel());
        }
    }

    /// Whether MPI holds no slot any more.
    pub(super) fn is_free(&mut self) -> bool {
        // A request that cannot even be tested counts as held.
        self.slots.iter_mut().all(|slot| matches!(slot.request.test("MPI_Test"), Ok(true)))
    }
}

fn step(cursor: &mut Cursor, message: &Message, bytes: usize) {
    cursor.offset += bytes;
    if cursor.offset == message.bytes {
        *cursor = Cursor { message: cursor.message + 1, offset: 0, number: cursor.number + 1 };
    }
}
