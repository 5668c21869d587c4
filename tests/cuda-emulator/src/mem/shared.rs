// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shared memory of one block: bytes, which of them were written, and an exact race detector between warps.
//!
//! Each line of 16 bytes has a record: the last writer (warp and clock), its instruction, and for every warp the clock
//! of its last read. A read is ordered when the reader knows the writer's clock; a write when the writer knows that
//! clock and the clocks of all readers. Readers need not be forgotten at a write: whoever is ordered after the write is
//! ordered after them too. Lines of which different bytes have different histories are split into bytes.
//!
//! An asynchronous copy owns its destination from the instruction to the wait: any access in between is a fault, and
//! the bytes are poison until then.

use super::lanes::{LaneAccess, LaneRace, LaneShadow};
use super::touch::Touches;
use crate::exec::clock::Clocks;
use std::collections::HashMap;

/// Set in a writer's word while an asynchronous copy is under way.
const PENDING: u32 = 1 << 31;
const CLOCK: u32 = 0xff_ffff;

/// Words before the readers' clocks in a record.
const HEAD: usize = 2;

/// What went wrong at a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SharedFault {
    /// Written by a warp that is not ordered before this access.
    Written { by: u32, pc: u32, at: u32 },
    /// Read by a warp that is not ordered before this write.
    Read { by: u32, at: u32 },
    /// An asynchronous copy is under way.
    Pending { by: u32, pc: u32, at: u32 },
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
    written: Vec<u16>,
    records: Vec<u32>,
    split: HashMap<u32, Box<[u32]>>,
    is_split: Vec<bool>,
    lanes: LaneShadow,
}

impl SharedMemory {
    pub(crate) fn new(size: u32, warps: usize, races: bool) -> Self {
        let lines = size.div_ceil(16) as usize;
        Self {
            bytes: vec![u128::MAX; lines],
            size,
            warps,
            written: vec![0; lines],
            records: vec![0; if races { lines * (warps + HEAD) } else { 0 }],
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
        let stride = self.warps + HEAD;
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
            cell[HEAD + warp] = clocks[warp];
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
        self.each(line, mask, |cell, at| {
            ordered_after_all(cell, at, clocks)?;
            cell[0] = (warp as u32) << 24 | clocks[warp] & CLOCK;
            cell[1] = pc;
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
        self.each(line, mask, |cell, at| {
            ordered_after_all(cell, at, clocks)?;
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
fn ordered_after_all(cell: &[u32], at: u32, clocks: &Clocks) -> Result<(), SharedFault> {
    ordered_after_writer(cell, at, clocks)?;
    for (by, (&read, &known)) in cell[HEAD..].iter().zip(clocks).enumerate() {
        if read > known {
            return Err(SharedFault::Read { by: by as u32, at });
        }
    }
    Ok(())
}
