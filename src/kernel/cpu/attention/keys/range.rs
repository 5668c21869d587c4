// SPDX-License-Identifier: MIT OR Apache-2.0
//! One q range with the current tile of keys.

use super::KeyPass;
use super::tiles::KeyTiles;
use crate::call::{Pair, QRange};
use crate::kernel::cpu::attention::backward::{FLUSH, Flush};
use crate::kernel::cpu::attention::bands::{by_band, one_band, union};
use crate::kernel::cpu::attention::dq_order::DqTurn;
use crate::kernel::cpu::attention::tile::Scoring;
use crate::kernel::cpu::memory::arena::LANES_BACK;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::Vector;

impl KeyPass<'_> {
    /// The rows of a q range, with some of its pairs and some heads: blocks of rows, and for each block the bands of
    /// the pairs. `place` is that of the first row.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    pub(super) unsafe fn range<V: Vector>(
        &self,
        t: &mut KeyTiles<V::T>,
        scoring: &Scoring<V::T>,
        (q, pairs): (&QRange, &[Pair]),
        heads: core::ops::Range<u32>,
        run: &mut Flush,
        bad_k: bool,
        (turn, place): (&DqTurn, u32),
    ) {
        // SAFETY: the contract.
        unsafe { V::call(RangeOfRows { of: self, t, scoring, q, pairs, heads, run, bad_k, turn, place }) }
    }
}

/// [`KeyPass::range`].
struct RangeOfRows<'r, 'a, A> {
    of: &'r KeyPass<'r>,
    t: &'r mut KeyTiles<'a, A>,
    scoring: &'r Scoring<A>,
    q: &'r QRange,
    pairs: &'r [Pair],
    heads: core::ops::Range<u32>,
    run: &'r mut Flush,
    bad_k: bool,
    turn: &'r DqTurn<'r>,
    place: u32,
}

impl<V: Vector> Routine<V> for RangeOfRows<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { of, t, scoring, q, pairs, heads, run, bad_k, turn, place } = self;
        let c = of.call;
        let one = one_band(pairs);
        let mut reader = of.reader(q, pairs);
        let core::ops::Range { start: mut first, end } = if one {
            t.mark_read(&reader)
        } else {
            union(by_band(pairs).map(|pairs| t.keys.rows_near(&of.reader(q, pairs))))
        };
        while first < end {
            let mut rows = (end - first).min(LANES_BACK as u32);
            let pos = q.range.position(first);
            if c.aligned {
                let border = (pos.div_euclid(FLUSH) + 1) * FLUSH;
                rows = rows.min(q.range.rows_before(border) - first);
            }
            for pairs in by_band(pairs) {
                if !one {
                    reader = of.reader(q, pairs);
                    let near = t.keys.rows_near(&reader);
                    if near.start >= first + rows || near.end <= first || t.mark_read(&reader).is_empty() {
                        continue;
                    }
                }
                // SAFETY: rows and heads are within the tensors (checked).
                unsafe {
                    t.lanes.set(&reader.q, first, rows, heads.clone(), &c.alibi_slopes);
                    t.lanes.limit::<V>(&reader.limits);
                    let at = (pairs[0].band, q.range.doc);
                    of.tile_pairs::<V>(t, scoring, run, (at, pos, q), bad_k, (turn, place + first + rows));
                }
            }
            first += rows;
            turn.pass(place + first);
        }
    }
}
