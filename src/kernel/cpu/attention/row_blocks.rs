// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the forward pass: blocks of rows of a q range, with one kv head and all q heads that read it.
//!
//! Workers take units from a shared counter; all workers count in the same order. Each row of a unit, for each of its q
//! heads, is a lane; k and v are packed once for all lanes. The queries' pass of the backward has the same units.

use super::slots::BLOCK;
use crate::call::{Attend, HeadMap, QRange, RawTensor};
use crate::kernel::cpu::choice::Documents;
use crate::kernel::cpu::memory::arena::{LANES, MAX_LANES};
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// A range (in the backward, a document) of at most this many rows prefetches the rows of the unit after it.
pub(crate) const FEW_ROWS: u32 = 64;

/// Iterates over the units of some documents, and yields those whose numbers this worker draws from the counter.
pub(crate) struct RowUnits<'a> {
    q: &'a [QRange],
    documents: Documents<'a>,
    rows: u32,
    /// Rows of a block, which is one unit or several.
    block: u32,
    kv_heads: u32,
    /// Whether all heads of a block of rows come before the next block.
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
    /// The rows of its block. Tiles are cut from the keys that any of these rows sees, so the tiles are the same
    /// however the block is divided into units.
    pub block: Range<u32>,
}

impl<'a> RowUnits<'a> {
    /// Units of `rows` rows, in blocks of `block` rows. Where heads are adjacent in memory, all units of the same rows
    /// come one after another, since they read the same pages.
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
                // Last rows first: under a causal mask they have the most keys, and the longest units should not come
                // last.
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

/// Lanes of a unit, and of a block of units, for some documents of a call. Units are largest on matrix units. They are
/// made smaller if there would be too few per worker: packing keys more often costs less than an idle worker.
pub(crate) fn lanes(call: &Attend, mut documents: Documents, workers: usize) -> [usize; 2] {
    let block = if documents.isa.has_tiles(call.q.dtype) { MAX_LANES } else { LANES };
    let mut enough = |lanes, each: usize| {
        let rows = unit_rows(lanes, &call.heads, call.q.heads);
        let ranges = call.ranges.q.iter().filter(|q| documents.has(q.range.doc));
        let blocks = ranges.map(|q| (q.range.len as usize).div_ceil(rows)).sum::<usize>();
        workers == 1 || blocks * call.k.heads as usize >= each * workers
    };
    if block == MAX_LANES && enough(MAX_LANES, 8) {
        return [MAX_LANES, block];
    }
    let lanes = [LANES, LANES / 2].into_iter().find(|&lanes| enough(lanes, 4)).unwrap_or(LANES / 4);
    [lanes, block]
}

/// Rows that fill `lanes` lanes with all heads of a group, rounded down to multiples of [`BLOCK`] so that no panel has
/// rows of two heads.
pub(crate) fn unit_rows(lanes: usize, map: &HeadMap, q_heads: u32) -> usize {
    let rows = lanes / map.group.min(q_heads).max(1) as usize;
    if rows > BLOCK { rows - rows % BLOCK } else { rows.max(1) }
}
