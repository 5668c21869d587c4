// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the forward pass: blocks of rows of a q range, with a kv head and all q heads that read it.
//!
//! Workers take units from a counter, in an order that is the same for all of them. A unit's rows and heads are the lanes of
//! its tiles; k and v are packed once for all of them. The pass that makes dq alone is cut in the same way.

use super::stream::BLOCK;
use crate::call::{Attend, HeadMap, QRange, RawTensor};
use crate::kernel::cpu::choice::Documents;
use crate::kernel::cpu::memory::arena::{LANES, LANES_MOST};
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a range, or of a document in the backward, up to which a unit prefetches those that mostly come next.
pub(crate) const FEW_ROWS: u32 = 64;

/// Walks the units of some documents of a call in order, and stops at those that the counter hands out.
pub(crate) struct RowUnits<'a> {
    q: &'a [QRange],
    documents: Documents<'a>,
    rows: u32,
    /// Rows of a block, one unit or several.
    block: u32,
    kv_heads: u32,
    /// All heads of a block of rows come before the next block.
    heads_first: bool,
    range: usize,
    /// Units of all ranges before `range`.
    base: usize,
}

/// Some rows of one q range, with one kv head.
pub(crate) struct RowUnit {
    pub range: usize,
    pub first: u32,
    pub rows: u32,
    pub kv: u32,
    /// The rows of the block that it is of. The keys that any of them sees are cut into tiles, so that tiles are the same
    /// however a block is cut into units.
    pub block: Range<u32>,
}

impl<'a> RowUnits<'a> {
    /// Of `rows` rows, in blocks of at least as many. Where heads lie side by side in memory, units of the same rows follow each
    /// other: they read the same pages.
    pub(crate) fn new(q: &'a [QRange], documents: Documents<'a>, (rows, block): (usize, usize), k: &RawTensor) -> Self {
        let heads_first = k.head_stride.unsigned_abs() < k.token_stride.unsigned_abs();
        let (rows, block) = (rows as u32, block as u32);
        Self { q, documents, rows, block, kv_heads: k.heads, heads_first, range: 0, base: 0 }
    }

    pub(crate) fn next(&mut self, counter: &AtomicUsize) -> Option<RowUnit> {
        let unit = counter.fetch_add(1, Ordering::Relaxed);
        let each = self.block.div_ceil(self.rows);
        while let Some(q) = self.q.get(self.range) {
            let len = if self.documents.has(q.range.doc) { q.range.len } else { 0 };
            let of_range = (len / self.block * each + (len % self.block).div_ceil(self.rows)) as usize;
            let units = of_range * self.kv_heads as usize;
            if unit < self.base + units {
                // The last rows first: under a causal mask they have the most keys, and a long unit should not come last.
                let at = unit - self.base;
                let heads = self.kv_heads as usize;
                let (kv, at) = if self.heads_first { (at % heads, at / heads) } else { (at / of_range, at % of_range) };
                let at = (of_range - 1 - at) as u32;
                let begin = at / each * self.block;
                let block = begin..len.min(begin + self.block);
                let first = begin + at % each * self.rows;
                let rows = self.rows.min(block.end - first);
                return Some(RowUnit { range: self.range, first, rows, kv: kv as u32, block });
            }
            self.base += units;
            self.range += 1;
        }
        None
    }
}

/// The q heads (of `q_heads` in the call) that read kv head `kv`.
pub(crate) fn readers(map: &HeadMap, kv: u32, q_heads: u32) -> Range<u32> {
    let first = (u64::from(kv) + u64::from(map.kv_offset)) * u64::from(map.group);
    let offset = u64::from(map.q_offset);
    let begin = first.saturating_sub(offset).min(q_heads.into()) as u32;
    let end = (first + u64::from(map.group)).saturating_sub(offset).min(q_heads.into()) as u32;
    begin..end
}

/// Lanes of the units of some documents of a call, and of the blocks that they are of: many on matrix units. Units are smaller
/// where there would be few to a worker: packing costs less than a worker without work.
pub(crate) fn lanes(call: &Attend, mut documents: Documents, workers: usize) -> [usize; 2] {
    let block = if documents.isa.has_tiles(call.q.dtype) { LANES_MOST } else { LANES };
    let mut enough = |lanes, each: usize| {
        let rows = unit_rows(lanes, &call.heads, call.q.heads);
        let ranges = call.ranges.q.iter().filter(|q| documents.has(q.range.doc));
        let blocks = ranges.map(|q| (q.range.len as usize).div_ceil(rows)).sum::<usize>();
        workers == 1 || blocks * call.k.heads as usize >= each * workers
    };
    if block == LANES_MOST && enough(LANES_MOST, 8) {
        return [LANES_MOST, block];
    }
    let lanes = [LANES, LANES / 2].into_iter().find(|&lanes| enough(lanes, 4)).unwrap_or(LANES / 4);
    [lanes, block]
}

/// Rows of a unit, or of a block, that fill `lanes` lanes with all heads of a group; whole blocks of [`BLOCK`], so that panels do
/// not mix heads.
pub(crate) fn unit_rows(lanes: usize, map: &HeadMap, q_heads: u32) -> usize {
    let rows = lanes / map.group.min(q_heads).max(1) as usize;
    if rows > BLOCK { rows - rows % BLOCK } else { rows.max(1) }
}
