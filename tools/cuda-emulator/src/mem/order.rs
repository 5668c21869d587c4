// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who accessed which bytes of global memory last, for races between the warps of one launch.
//!
//! An epoch names a block, a warp in it and that warp's clock. An access is ordered after an epoch when the accessing
//! warp has learned of that clock: through a barrier of its block, or through a release and an acquire. Each line keeps
//! its last writer and two readers since; a line of which different bytes were accessed by different warps is split
//! into bytes. Two readers, not all: a third replaces one of them, so that a write which is unordered with only one
//! of many readers may go unnoticed on a rare line. Writes are exact.

use crate::exec::clock::{Knowledge, WARPS};
use std::collections::HashMap;

/// Block, warp and clock of an access; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epoch(pub(crate) u64);

const STRONG: u64 = 1 << 31;

impl Epoch {
    pub(crate) fn new(block: u32, warp: u32, clock: u32, strong: bool) -> Self {
        Self(u64::from(block) << 32 | if strong { STRONG } else { 0 } | u64::from(warp) << 24 | u64::from(clock))
    }
    pub(crate) fn block(self) -> u32 {
        (self.0 >> 32) as u32
    }
    pub(crate) fn warp(self) -> u32 {
        (self.0 >> 24) as u32 & 0x7f
    }
    pub(crate) fn clock(self) -> u32 {
        self.0 as u32 & 0xff_ffff
    }
    fn strong(self) -> bool {
        self.0 & STRONG != 0
    }
}

#[derive(Clone, Copy, Default)]
struct Cell {
    writer: Epoch,
    readers: [Epoch; 2],
    /// Instruction of the writer.
    pc: u32,
}

/// The other side of a race.
pub(crate) struct Race {
    pub(crate) other: Epoch,
    /// The other's instruction, when it was a write.
    pub(crate) pc: Option<u32>,
    /// It is ordered, but not fenced for the asynchronous proxy.
    pub(crate) unfenced: bool,
}

/// An access and what its warp knows.
pub(crate) struct Accessor<'a> {
    pub(crate) epoch: Epoch,
    pub(crate) pc: u32,
    /// Blocks before this one belong to earlier launches.
    pub(crate) first_block: u32,
    pub(crate) knowledge: &'a Knowledge,
    /// Accesses by way of the asynchronous proxy.
    pub(crate) asynchronous: bool,
}

impl Accessor<'_> {
    #[inline]
    fn after(&self, e: Epoch) -> bool {
        let block = e.block();
        if block < self.first_block {
            return true;
        }
        if e.strong() && self.epoch.strong() {
            return true;
        }
        if block == self.knowledge.block {
            return self.knowledge.own[e.warp() as usize] >= e.clock();
        }
        self.knowledge.of(block, e.warp()) >= e.clock()
    }

    #[inline]
    fn same(&self, e: Epoch) -> bool {
        (e.0 ^ self.epoch.0) >> 32 == 0 && e.warp() == self.epoch.warp()
    }

    /// Whether the asynchronous proxy sees the last write, when it is the one that accesses.
    #[inline]
    fn fenced(&self, c: &Cell) -> Result<(), Race> {
        let w = c.writer;
        if self.asynchronous
            && w.block() >= self.first_block
            && (w.warp() as usize) < WARPS
            && w.clock() > self.knowledge.fenced_of(w.block(), w.warp())
        {
            return Err(Race { other: w, pc: Some(c.pc), unfenced: true });
        }
        Ok(())
    }

    #[inline]
    fn read(&self, c: &mut Cell) -> Result<(), Race> {
        if !self.after(c.writer) {
            return Err(Race { other: c.writer, pc: Some(c.pc), unfenced: false });
        }
        self.fenced(c)?;
        let [a, b] = c.readers;
        if a.block() < self.first_block || self.same(a) {
            c.readers[0] = self.epoch;
        } else if b.block() < self.first_block || self.same(b) || self.epoch.0 & 1 == 0 {
            c.readers[1] = self.epoch;
        } else {
            c.readers[0] = self.epoch;
        }
        Ok(())
    }

    #[inline]
    fn write(&self, c: &mut Cell) -> Result<(), Race> {
        if !self.after(c.writer) {
            return Err(Race { other: c.writer, pc: Some(c.pc), unfenced: false });
        }
        self.fenced(c)?;
        for r in c.readers {
            if !self.after(r) {
                return Err(Race { other: r, pc: None, unfenced: false });
            }
        }
        c.writer = self.epoch;
        c.pc = self.pc;
        Ok(())
    }
}

/// The shadow of one allocation; empty until a kernel touches it.
#[derive(Default)]
pub(crate) struct OrderShadow {
    lines: Vec<Cell>,
    split: HashMap<u32, Box<[Cell; 16]>>,
}

impl OrderShadow {
    /// Checks and records an access to bytes of one line.
    pub(crate) fn access(
        &mut self,
        size: usize,
        line: u32,
        mask: u16,
        write: bool,
        who: &Accessor<'_>,
    ) -> Result<(), Race> {
        if self.lines.is_empty() {
            self.lines = vec![Cell::default(); size.div_ceil(16)];
        }
        let cell = &mut self.lines[line as usize];
        // A whole line, or bytes of a line that no other cell covers: one cell stands for all of them.
        let whole = mask == 0xffff || line as usize == size / 16 && mask == ((1u32 << (size % 16)) - 1) as u16;
        if cell.pc != u32::MAX && whole {
            return if write { who.write(cell) } else { who.read(cell) };
        }
        if cell.pc != u32::MAX {
            let copy = [*cell; 16];
            cell.pc = u32::MAX;
            self.split.insert(line, Box::new(copy));
        }
        let Some(cells) = self.split.get_mut(&line) else { return Ok(()) };
        for (byte, c) in cells.iter_mut().enumerate() {
            if mask >> byte & 1 == 1 {
                if write { who.write(c)? } else { who.read(c)? }
            }
        }
        Ok(())
    }
}
