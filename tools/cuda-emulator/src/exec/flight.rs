// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies under way in a block.
//!
//! A load lands in shared memory at once, some time after it was issued, and tells its barrier: often late, and in some
//! blocks only when no warp can go on without it. A store is read from shared memory at one time and written to global
//! memory at a later one; a wait for its group forces the first or both. What is never waited for is written when the
//! block ends.

use super::block::Block;
use super::clock::slot;
use crate::mem::Memory;
use crate::report::Fault;

/// Sixteen bytes of shared memory and where they come from or go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) shared: u32,
    /// Which of its bytes are moved.
    pub(crate) from: u8,
    pub(crate) to: u8,
    /// The address of byte 0, if it were moved.
    pub(crate) global: u64,
}

impl Piece {
    fn len(&self) -> usize {
        usize::from(self.to - self.from)
    }

    fn address(&self) -> u64 {
        self.global.wrapping_add(self.from.into())
    }

    pub(crate) fn mask(&self) -> u16 {
        (((1u32 << self.to) - 1) & !((1u32 << self.from) - 1)) as u16
    }
}

/// What a copy does.
#[derive(Debug)]
pub(crate) enum Work {
    Load {
        barrier: u32,
        /// Bytes the barrier is told of: the whole box.
        bytes: u32,
        /// What stands for bytes that are not moved.
        filling: [u8; 16],
    },
    /// Some bytes of a piece that a store to another block carries along.
    Send {
        barrier: u32,
        bytes: u32,
        filling: [u8; 16],
    },
    Store(Store),
}

/// A store to global memory.
#[derive(Debug)]
pub(crate) struct Store {
    /// The bulk group of its thread.
    pub(crate) group: u32,
    /// Adds f32 to what is there.
    pub(crate) adds: bool,
    /// Its clock in the slot of its warp's stores.
    pub(crate) ticket: u32,
    /// Shared memory has not been waited for.
    pub(crate) held: bool,
    /// What was read, with the bytes that something wrote.
    data: Option<Vec<([u8; 16], u16)>>,
    written: bool,
}

impl Store {
    pub(crate) fn new(group: u32, adds: bool, ticket: u32) -> Self {
        Self { group, adds, ticket, held: true, data: None, written: false }
    }
}

/// A copy.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) warp: usize,
    pub(crate) lane: u32,
    pub(crate) pc: usize,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) work: Work,
}

/// What went wrong when a copy landed, and its instruction.
pub(crate) type Landed = Result<(), (Fault, String, usize)>;

/// The copies of a block.
#[derive(Default)]
pub(crate) struct Flights {
    pub(crate) list: Vec<Flight>,
    /// Stores begun, by slot.
    pub(crate) tickets: [u32; slot::STORE_COUNT],
}

impl Flights {
    /// Whether something would move if it were given time.
    pub(crate) fn any(&self) -> bool {
        self.list.iter().any(Flight::moves)
    }

    /// The copies that would move if they were given time.
    pub(crate) fn moving(&self) -> Vec<usize> {
        (0..self.list.len()).filter(|&k| self.list[k].moves()).collect()
    }
}

impl Flight {
    fn moves(&self) -> bool {
        match &self.work {
            Work::Load { .. } | Work::Send { .. } => true,
            Work::Store(s) => !s.written,
        }
    }
}

impl Block {
    /// Gives a copy time: a load lands, a store is read or, later, written.
    pub(crate) fn advance(&mut self, mem: &mut Memory, k: usize) -> Landed {
        match &self.flights.list[k].work {
            Work::Load { .. } => self.land(mem, k),
            Work::Send { .. } => self.arrive_sent(k),
            Work::Store(s) if s.data.is_none() => {
                self.read_store(k);
                Ok(())
            }
            Work::Store(_) => self.write_store(mem, k),
        }
    }

    fn land(&mut self, mem: &mut Memory, k: usize) -> Landed {
        let f = self.flights.list.swap_remove(k);
        let Work::Load { barrier, bytes, filling } = f.work else { return Ok(()) };
        let fail = |(fault, text)| (fault, text, f.pc);
        let (slot, clock) = self.mbarriers.land(barrier, bytes).map_err(|text| fail((Fault::Barrier, text)))?;
        for p in &f.pieces {
            let mut data = filling;
            let mut written = !p.mask();
            if p.len() > 0 {
                let base = mem.locate(p.address(), p.len()).map_err(fail)?;
                let a = mem.at(base);
                let offset = (p.address() - base) as usize;
                data[p.from.into()..p.to.into()].copy_from_slice(&a.bytes()[offset..offset + p.len()]);
                if a.first_unwritten(offset, p.len()).is_none() {
                    written = !0;
                } else {
                    for b in (0..p.len()).filter(|&b| a.is_written(offset + b)) {
                        written |= 1 << (usize::from(p.from) + b);
                    }
                }
            }
            // SAFETY: the piece was checked to lie in shared memory when the copy began.
            unsafe { self.shared.ptr(p.shared).cast::<[u8; 16]>().write_unaligned(data) };
            self.shared.set_written(p.shared / 16, written);
            self.shared.end_async(p.shared / 16, 0xffff, slot, clock);
        }
        Ok(())
    }

    fn arrive_sent(&mut self, k: usize) -> Landed {
        let f = self.flights.list.swap_remove(k);
        let Work::Send { barrier, bytes, filling } = f.work else { return Ok(()) };
        let landed = self.mbarriers.land(barrier, bytes);
        let (slot, clock) = landed.map_err(|text| (Fault::Barrier, text, f.pc))?;
        for p in &f.pieces {
            let (from, at) = (usize::from(p.from), p.shared + u32::from(p.from));
            // SAFETY: the piece was checked to lie in shared memory when the store began.
            unsafe { std::ptr::copy_nonoverlapping(filling[from..].as_ptr(), self.shared.ptr(at), p.len()) };
            self.shared.mark_written(p.shared / 16, p.mask());
            self.shared.end_async(p.shared / 16, p.mask(), slot, clock);
        }
        Ok(())
    }

    /// Reads a store's bytes from shared memory.
    pub(crate) fn read_store(&mut self, k: usize) {
        let Flight { pieces, work: Work::Store(s), .. } = &mut self.flights.list[k] else { return };
        if s.data.is_none() {
            let mut data = Vec::with_capacity(pieces.len());
            for p in pieces.iter() {
                // SAFETY: as in `land`.
                let bytes = unsafe { self.shared.ptr(p.shared).cast::<[u8; 16]>().read_unaligned() };
                data.push((bytes, self.shared.written(p.shared / 16)));
            }
            s.data = Some(data);
        }
    }

    /// Writes them to global memory.
    pub(crate) fn write_store(&mut self, mem: &mut Memory, k: usize) -> Landed {
        self.read_store(k);
        let Flight { pieces, work: Work::Store(s), pc, .. } = &mut self.flights.list[k] else { return Ok(()) };
        if s.written {
            return Ok(());
        }
        s.written = true;
        let data = s.data.take().unwrap_or_default();
        for (p, (bytes, known)) in pieces.iter().zip(data).filter(|(p, _)| p.len() > 0) {
            let base = mem.locate(p.address(), p.len()).map_err(|(fault, text)| (fault, text, *pc))?;
            let a = mem.at(base);
            let (offset, from) = ((p.address() - base) as usize, usize::from(p.from));
            let bytes = &bytes[from..from + p.len()];
            if s.adds {
                let there = &mut a.bytes_mut()[offset..offset + p.len()];
                for (to, x) in there.as_chunks_mut::<4>().0.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *to = (f32::from_le_bytes(*to) + f32::from_le_bytes(*x)).to_le_bytes();
                }
            } else {
                a.bytes_mut()[offset..offset + p.len()].copy_from_slice(bytes);
                a.mark(offset, p.len());
            }
            for b in (0..p.len()).filter(|b| known >> (from + b) & 1 == 0) {
                a.unmark(offset + b, 1);
            }
        }
        Ok(())
    }

    /// A warp ends: shared memory that its stores have not read would be gone.
    pub(crate) fn unread(&self, warp: usize) -> Option<usize> {
        let held = |f: &&Flight| f.warp == warp && matches!(&f.work, Work::Store(s) if s.held);
        self.flights.list.iter().find(held).map(|f| f.pc)
    }

    /// The block ends: stores are written, and a load that is still under way is a fault.
    pub(crate) fn finish(&mut self, mem: &mut Memory) -> Landed {
        for k in 0..self.flights.list.len() {
            if let Work::Load { .. } | Work::Send { .. } = self.flights.list[k].work {
                let text = "the block has ended and nothing has waited for this copy".to_owned();
                return Err((Fault::AsyncPending, text, self.flights.list[k].pc));
            }
            self.write_store(mem, k)?;
        }
        Ok(())
    }
}
