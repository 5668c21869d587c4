// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shared memory of one block: bytes, which of them were written, and an exact race detector between warps.
//!
//! Each line of 16 bytes has a record: the last writer (warp and clock), its instruction, and for every warp the clock
//! of its last read. A read is ordered when the reader knows the writer's clock; a write when the writer knows that
//! clock and the clocks of all readers. Readers need not be forgotten at a write: a thread that is ordered after the
//! write is ordered after them too. Lines of which different bytes have different histories are split into bytes.
//!
//! An asynchronous copy owns its destination from the instruction to the wait: any access in between is a fault, and
//! the bytes are poison until then. What the hardware reads on its own (bulk stores, products of a warpgroup) is held
//! from the instruction to the wait as well: it may be read, not written. A barrier in shared memory is owned by the
//! instructions made for it as long as it lives.

use super::lanes::{LaneAccess, LaneRace, LaneShadow};
use super::touch::Touches;
use crate::exec::clock::{Clocks, WARPS, WarpClocks, slot};
use std::collections::HashMap;

/// Set in a writer's word while an asynchronous copy is under way.
const PENDING: u32 = 1 << 31;
const CLOCK: u32 = 0xff_ffff;
/// The owner of a barrier in shared memory, as a writer that never ends.
pub(crate) const BARRIER_OWNER: u32 = 0x7f;
/// One hold in a reader's word, above its clock.
const HOLD: u32 = 1 << 24;

/// Words before the readers' clocks in a record.
const HEAD: usize = 2;

/// What went wrong at a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SharedFault {
    /// Written by a warp that is not ordered before this access.
    Written { by: u32, pc: u32, at: u32 },
    /// Read by a warp that is not ordered before this write.
    Read { by: u32, at: u32 },
    /// An asynchronous copy is under way, or a barrier lives there.
    Pending { by: u32, pc: u32, at: u32 },
    /// Being read asynchronously by a bulk store of this warp, or by a product of a warpgroup (from
    /// [`slot::PRODUCTS`]).
    Held { by: u32, at: u32 },
    /// Written through the generic proxy and not fenced for the asynchronous one.
    Unfenced { by: u32, pc: u32, at: u32 },
    /// Never written.
    Unwritten { at: u32 },
    /// Accessed by another lane of this warp without a synchronisation of the warp.
    Lane(LaneRace),
}

/// Shared memory of one block.
pub(crate) struct SharedMemory {
    bytes: Vec<u128>,
    size: u32,
    warps: usize,
    /// Words of a record: the head, each warp, each warpgroup that may read asynchronously.
    stride: usize,
    written: Vec<u16>,
    records: Vec<u32>,
    split: HashMap<u32, Box<[u32]>>,
    is_split: Vec<bool>,
    lanes: LaneShadow,
}

impl SharedMemory {
    /// `products`: warpgroups may read it asynchronously.
    pub(crate) fn new(size: u32, warps: usize, products: bool, races: bool) -> Self {
        let lines = size.div_ceil(16) as usize;
        let stride = HEAD + warps + if products { warps.div_ceil(4) } else { 0 };
        Self {
            bytes: vec![u128::MAX; lines],
            size,
            warps,
            stride,
            written: vec![0; lines],
            records: vec![0; if races { lines * stride } else { 0 }],
            split: HashMap::new(),
            is_split: vec![false; if races { lines } else { 0 }],
            lanes: LaneShadow::new(if races { lines } else { 0 }),
        }
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// The bytes from an offset on; the caller has checked the range.
    #[inline]
    pub(crate) fn ptr(&mut self, offset: u32) -> *mut u8 {
        debug_assert!(offset <= self.size);
        // SAFETY: the offset is inside the vector or one past its end.
        unsafe { self.bytes.as_mut_ptr().cast::<u8>().add(offset as usize) }
    }

    /// Finds bytes that were never written.
    #[inline]
    pub(crate) fn check_written(&self, touches: &Touches) -> Result<(), SharedFault> {
        for (line, mask) in touches.iter() {
            let missing = mask & !self.written[line as usize];
            if missing != 0 {
                return Err(SharedFault::Unwritten { at: line * 16 + missing.trailing_zeros() });
            }
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn mark_written(&mut self, line: u32, mask: u16) {
        self.written[line as usize] |= mask;
    }

    /// Poisons 16 bytes or fewer and forgets that they were written.
    pub(crate) fn poison(&mut self, offset: u32, len: u32) {
        // SAFETY: the caller has checked the range.
        unsafe { std::ptr::write_bytes(self.ptr(offset), 0xff, len as usize) };
    }

    fn each(
        &mut self,
        line: u32,
        mask: u16,
        mut f: impl FnMut(&mut [u32], u32) -> Result<(), SharedFault>,
    ) -> Result<(), SharedFault> {
        if self.records.is_empty() {
            return Ok(());
        }
        let stride = self.stride;
        let start = line as usize * stride;
        if !self.is_split[line as usize] {
            if mask == 0xffff {
                return f(&mut self.records[start..start + stride], line * 16);
            }
            let copy = self.records[start..start + stride].repeat(16).into_boxed_slice();
            self.split.insert(line, copy);
            self.is_split[line as usize] = true;
        }
        let Some(cells) = self.split.get_mut(&line) else { return Ok(()) };
        for (byte, cell) in cells.chunks_exact_mut(stride).enumerate() {
            if mask >> byte & 1 == 1 {
                f(cell, line * 16 + byte as u32)?;
            }
        }
        // Once all bytes have one history again, one record is enough.
        if mask == 0xffff && cells.chunks_exact(stride).all(|c| *c == cells[..stride]) {
            self.records[start..start + stride].copy_from_slice(&cells[..stride]);
            self.split.remove(&line);
            self.is_split[line as usize] = false;
        }
        Ok(())
    }

    /// Checks and records the order between lanes.
    #[inline]
    pub(crate) fn lanes(&mut self, a: &LaneAccess<'_>) -> Result<(), SharedFault> {
        self.lanes.access(a).map_err(SharedFault::Lane)
    }

    /// Records that a copy of a lane arrived.
    #[inline]
    pub(crate) fn arrived(&mut self, offset: u32, size: u32, lane: u32, key: u64) {
        self.lanes.arrived(offset, size, lane, key);
    }

    /// Checks and records a read by a warp that knows `clocks`.
    #[inline]
    pub(crate) fn read(&mut self, line: u32, mask: u16, warp: usize, clocks: &Clocks) -> Result<(), SharedFault> {
        self.each(line, mask, |cell, at| {
            ordered_after_writer(cell, at, clocks)?;
            let reader = &mut cell[HEAD + warp];
            *reader = *reader & !CLOCK | clocks[warp] & CLOCK;
            Ok(())
        })
    }

    /// Checks and records a write.
    #[inline]
    pub(crate) fn write(
        &mut self,
        line: u32,
        mask: u16,
        warp: usize,
        clocks: &Clocks,
        pc: u32,
    ) -> Result<(), SharedFault> {
        let warps = self.warps;
        self.each(line, mask, |cell, at| {
            ordered_after_all(cell, at, warps, clocks)?;
            cell[0] = (warp as u32) << 24 | clocks[warp] & CLOCK;
            cell[1] = pc;
            Ok(())
        })
    }

    /// The same for bytes that do not change: the order with who wrote them before does not matter.
    pub(crate) fn rewrite(
        &mut self,
        line: u32,
        mask: u16,
        warp: usize,
        clocks: &Clocks,
        pc: u32,
    ) -> Result<(), SharedFault> {
        let warps = self.warps;
        self.each(line, mask, |cell, at| {
            match ordered_after_writer(cell, at, clocks) {
                Err(SharedFault::Written { by, .. }) if (by as usize) < WARPS => return Ok(()),
                other => other?,
            }
            ordered_after_all(cell, at, warps, clocks)?;
            (cell[0], cell[1]) = ((warp as u32) << 24 | clocks[warp] & CLOCK, pc);
            Ok(())
        })
    }

    /// Begins an asynchronous write.
    pub(crate) fn begin(
        &mut self,
        line: u32,
        mask: u16,
        warp: usize,
        clocks: &Clocks,
        pc: u32,
    ) -> Result<(), SharedFault> {
        let warps = self.warps;
        self.each(line, mask, |cell, at| {
            ordered_after_all(cell, at, warps, clocks)?;
            cell[0] = PENDING | (warp as u32) << 24 | clocks[warp] & CLOCK;
            cell[1] = pc;
            Ok(())
        })
    }

    /// Ends an asynchronous write: it counts as the waiting warp's, made now.
    pub(crate) fn end(&mut self, line: u32, mask: u16, warp: usize, clocks: &Clocks) {
        let done = self.each(line, mask, |cell, _| {
            if cell[0] & PENDING != 0 {
                cell[0] = (warp as u32) << 24 | clocks[warp] & CLOCK;
            }
            Ok(())
        });
        debug_assert!(done.is_ok());
    }

    /// Begins a write by the asynchronous proxy on behalf of a warp that knows `clocks` and `fences`.
    pub(crate) fn begin_async(
        &mut self,
        line: u32,
        mask: u16,
        clocks: &Clocks,
        fences: &WarpClocks,
        pc: u32,
    ) -> Result<(), SharedFault> {
        let warps = self.warps;
        self.each(line, mask, |cell, at| {
            ordered_after_all(cell, at, warps, clocks)?;
            fenced(cell, at, fences)?;
            (cell[0], cell[1]) = (PENDING | (slot::BARRIERS as u32) << 24, pc);
            Ok(())
        })
    }

    /// Ends it: a thread that has seen this clock of this slot is ordered after it. `(0, 0)` is known to all.
    pub(crate) fn end_async(&mut self, line: u32, mask: u16, slot: u32, clock: u32) {
        let done = self.each(line, mask, |cell, _| {
            cell[0] = slot << 24 | clock & CLOCK;
            Ok(())
        });
        debug_assert!(done.is_ok());
        self.lanes.forget(line);
    }

    /// Begins a read by the asynchronous proxy for a reader: a warp, or `warps` plus a warpgroup.
    pub(crate) fn hold(
        &mut self,
        line: u32,
        mask: u16,
        reader: usize,
        clocks: &Clocks,
        fences: &WarpClocks,
    ) -> Result<(), SharedFault> {
        self.each(line, mask, |cell, at| {
            ordered_after_writer(cell, at, clocks)?;
            fenced(cell, at, fences)?;
            debug_assert!(cell[HEAD + reader] < 0xff00_0000, "255 holds on one line");
            cell[HEAD + reader] += HOLD;
            Ok(())
        })
    }

    /// Ends it at a clock of the reader.
    pub(crate) fn release(&mut self, line: u32, mask: u16, reader: usize, clock: u32) {
        let done = self.each(line, mask, |cell, _| {
            let word = &mut cell[HEAD + reader];
            let held = (*word >> 24).saturating_sub(1);
            *word = held << 24 | (*word & CLOCK).max(clock & CLOCK);
            Ok(())
        });
        debug_assert!(done.is_ok());
    }

    /// The first of these bytes that nothing wrote: no warp, and no copy either (a copy may bring bytes that nothing
    /// wrote).
    pub(crate) fn never_written(&self, line: u32, mask: u16) -> Option<u32> {
        let missing = mask & !self.written[line as usize];
        if missing == 0 || self.records.is_empty() {
            return None;
        }
        let whole = &self.records[line as usize * self.stride..];
        let by_copy = |byte: u32| {
            let word = match self.split.get(&line) {
                Some(cells) => cells[byte as usize * self.stride],
                None => whole[0],
            };
            (word >> 24) as usize >= WARPS
        };
        (0..16).filter(|b| missing >> b & 1 == 1).find(|&b| !by_copy(b)).map(|b| line * 16 + b)
    }

    /// Which bytes of a line something wrote.
    pub(crate) fn written(&self, line: u32) -> u16 {
        self.written[line as usize]
    }

    /// Sets which bytes of a line something wrote.
    pub(crate) fn set_written(&mut self, line: u32, mask: u16) {
        self.written[line as usize] = mask;
    }

    /// Eight bytes become a barrier: from now on they are no data. They must be ordered after all other accesses.
    pub(crate) fn own(&mut self, offset: u32, clocks: &Clocks, pc: u32) -> Result<(), SharedFault> {
        let warps = self.warps;
        self.each(offset / 16, 0xff << (offset % 16), |cell, at| {
            ordered_after_all(cell, at, warps, clocks)?;
            (cell[0], cell[1]) = (PENDING | BARRIER_OWNER << 24, pc);
            Ok(())
        })?;
        self.written[offset as usize / 16] |= 0xff << (offset % 16);
        Ok(())
    }

    /// They become data again, which nothing has written, touched last by a warp.
    pub(crate) fn disown(&mut self, offset: u32, warp: usize, clocks: &Clocks) {
        let done = self.each(offset / 16, 0xff << (offset % 16), |cell, _| {
            cell[0] = (warp as u32) << 24 | clocks[warp] & CLOCK;
            Ok(())
        });
        debug_assert!(done.is_ok());
        self.written[offset as usize / 16] &= !(0xff << (offset % 16));
    }
}

#[inline]
fn ordered_after_writer(cell: &[u32], at: u32, clocks: &Clocks) -> Result<(), SharedFault> {
    let w = cell[0];
    let by = w >> 24 & 0x7f;
    if w & PENDING != 0 {
        return Err(SharedFault::Pending { by, pc: cell[1], at });
    }
    if w & CLOCK > clocks[by as usize] {
        return Err(SharedFault::Written { by, pc: cell[1], at });
    }
    Ok(())
}

#[inline]
fn ordered_after_all(cell: &[u32], at: u32, warps: usize, clocks: &Clocks) -> Result<(), SharedFault> {
    ordered_after_writer(cell, at, clocks)?;
    let (by_warps, by_groups) = cell[HEAD..].split_at(warps);
    for (by, (&read, &known)) in by_warps.iter().zip(clocks).enumerate() {
        if read > known {
            return Err(unordered_reader(read, by as u32, at));
        }
    }
    for (by, (&read, &known)) in by_groups.iter().zip(&clocks[slot::PRODUCTS..]).enumerate() {
        if read > known {
            return Err(unordered_reader(read, (slot::PRODUCTS + by) as u32, at));
        }
    }
    Ok(())
}

#[cold]
fn unordered_reader(read: u32, by: u32, at: u32) -> SharedFault {
    if read >= HOLD { SharedFault::Held { by, at } } else { SharedFault::Read { by, at } }
}

/// Whether the asynchronous proxy sees the last write.
fn fenced(cell: &[u32], at: u32, fences: &WarpClocks) -> Result<(), SharedFault> {
    let by = cell[0] >> 24 & 0x7f;
    if (by as usize) < WARPS && cell[0] & CLOCK > fences[by as usize] {
        return Err(SharedFault::Unfenced { by, pc: cell[1], at });
    }
    Ok(())
}
