// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prefetches of the forward: rows are asked for before they are packed, since a short range computes for less time
//! than rows take to arrive from memory.

use super::ForwardPass;
use crate::kernel::cpu::attention::row_blocks::{FEW_ROWS, RowUnit, readers};
use crate::kernel::cpu::memory::rows::prefetch;
use core::ops::Range;

impl ForwardPass<'_> {
    /// Prefetches rows of k and v, one tile before they are packed. Where many heads are adjacent in memory, the rows
    /// of one head are a page apart, and the hardware does not prefetch across pages.
    ///
    /// # Safety
    /// The rows, looked up in the table if there is one, and the head are within k and v.
    #[inline(always)]
    pub(super) unsafe fn prefetch(&self, rows: Range<i64>, head: u32) {
        for row in rows {
            let row = self.table.get(row as usize).map_or(row, |&row| i64::from(row));
            // SAFETY: the rows and the head are within k and v (the contract).
            unsafe {
                prefetch(&self.call.k, row, head);
                prefetch(&self.call.v, row, head);
            }
        }
    }

    /// Prefetches the rows of the unit that most likely comes next: the next kv head of the same range or, after the
    /// last one, the next range. A range of few rows computes for less time than the next one's rows take to arrive
    /// from memory.
    ///
    /// # Safety
    /// Ranges and heads of the call lie within its tensors.
    #[inline(never)]
    pub(super) unsafe fn prefetch_next(&self, unit: &RowUnit) {
        let c = self.call;
        let (range, kv) = if unit.kv + 1 < c.k.heads { (unit.range, unit.kv + 1) } else { (unit.range + 1, 0) };
        let Some(q) = c.ranges.q.get(range).filter(|q| q.range.len <= FEW_ROWS) else { return };
        // SAFETY: rows and heads are within the tensors (the contract), within o and the running result where the mode
        // uses them.
        unsafe {
            for row in (q.range.row..).take(q.range.len as usize) {
                for head in readers(&c.heads, kv, c.q.heads) {
                    prefetch(&c.q, row, head);
                    if q.mode.finishes() {
                        prefetch(&c.o, row, head);
                    }
                    if q.mode.continues() || !q.mode.finishes() {
                        prefetch(&c.running, row, head);
                    }
                }
            }
            let mut left = 2 * FEW_ROWS;
            for &pair in c.ranges.pairs_of(q) {
                let k = &c.ranges.k[pair.k as usize];
                let rows = k.len.min(left);
                self.prefetch(k.row..k.row + i64::from(rows), kv);
                left -= rows;
                if left == 0 {
                    break;
                }
            }
        }
    }
}
