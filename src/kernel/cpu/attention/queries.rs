// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward pass of queries: rows outside, keys inside, dq.
//!
//! Units, tiles and the order of keys are those of the forward. `dQᵀ += Kᵀ·dS` stays in the cache until the last key,
//! and is then written to dq or added to it, as the mode of the range says.

use super::backward::{FLUSH, Flush, flush, gradients, no_row, visible_keys};
use super::dropout::Kept;
use super::row_blocks::{RowUnit, RowUnits, readers};
use super::slots::KeyTile;
use super::stream::KeyStream;
use super::tile::{Lanes, Scoring, at, product};
use crate::call::AttendBackward;
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::choice::Documents;
use crate::kernel::cpu::job::Job;
use crate::kernel::cpu::memory::arena::{Arena, KEYS, LANES_BACK, Line, vectors};
use crate::kernel::cpu::memory::panel::{any_non_finite, to_rows};
use crate::kernel::cpu::product::engine::{AttentionEngine, Dense};
#[cfg(target_arch = "x86_64")]
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::simd::Vector;
use core::sync::atomic::AtomicUsize;

const _: () = assert!(FLUSH % KEYS as i64 == 0, "a tile must lie in one run");

/// The queries' pass of a call.
pub(crate) struct Queries<'a> {
    pub call: &'a AttendBackward<'a>,
    pub documents: Documents<'a>,
}

struct QueryTiles<'a, A> {
    lanes: Lanes<'a, A>,
    /// Elements from one row of k, and of v, to the next.
    ldk: usize,
    ldv: usize,
    keys: KeyTile<'a, A, A>,
    /// `[panel][head_dim][lanes of a panel]`, and `[panel][value_dim][lanes of a panel]`.
    q: &'a mut [A],
    d_o: &'a mut [A],
    /// As `q`: the first stage of the sums, and the total (see `backward.rs`).
    part: &'a mut [A],
    total: &'a mut [A],
    /// `[key][lanes of a panel]`.
    s: &'a mut [A],
    dp: &'a mut [A],
    lse: &'a mut [A],
    delta: &'a mut [A],
    /// Which pairs are not dropped.
    kept: Kept<'a>,
    rows: &'a mut [A],
}

impl Job for Queries<'_> {
    #[inline(always)]
    unsafe fn work<E: AttentionEngine>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the lines are large enough and each unit is handed out once (the contract of `Job::work`).
        unsafe { self.dense::<E::V>(lines, next) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn work_on_tiles<H: TileForm>(&self, _: &mut [Line], _: &AtomicUsize) {
        unreachable!("the queries' pass runs on vectors")
    }
}

impl Queries<'_> {
    /// Takes units until none is left, with vectors `V`.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn dense<V: Vector>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let mut arena = Arena(lines);
        let panel = 2 * V::W;
        let mut tiles = QueryTiles {
            ldk: Dense::<V>::row(d),
            ldv: Dense::<V>::row(dv),
            lanes: Lanes::new(&mut arena, LANES_BACK),
            keys: KeyTile::new::<Dense<V>>(&mut arena, d, dv, true),
            q: arena.zeros(LANES_BACK * d),
            d_o: arena.zeros(LANES_BACK * dv),
            part: arena.zeros(LANES_BACK * d),
            total: arena.zeros(LANES_BACK * d),
            s: arena.zeros(KEYS * panel),
            dp: arena.zeros(KEYS * panel),
            lse: arena.zeros(LANES_BACK),
            delta: arena.zeros(LANES_BACK),
            kept: Kept::new(&mut arena, &c.dropout),
            rows: arena.zeros(V::W * d.max(dv)),
        };
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let mut units = RowUnits::new(c.ranges.q, self.documents, (LANES_BACK, LANES_BACK), &c.k);
        while let Some(unit) = units.next(next) {
            let heads = readers(&c.heads, unit.kv, c.q.heads);
            let share = (LANES_BACK as u32 / unit.rows).max(1);
            for head in heads.clone().step_by(share as usize) {
                let heads = head..heads.end.min(head + share);
                // SAFETY: unit and heads are within the call, whose shapes are checked and memory is valid.
                unsafe { self.unit::<V>(&mut tiles, &scoring, &unit, heads) };
            }
        }
    }
}

impl Queries<'_> {
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn unit<V: Vector>(
        &self,
        t: &mut QueryTiles<V::T>,
        scoring: &Scoring<V::T>,
        unit: &RowUnit,
        heads: core::ops::Range<u32>,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let panel = 2 * V::W;
        let q = &c.ranges.q[unit.range];
        // SAFETY: slopes has a number for each head and the document (checked); rows and heads are within the tensors.
        unsafe { t.lanes.set(&q.range, unit.first, unit.rows, heads, &c.alibi_slopes) };
        let lanes = vectors::<V>(t.lanes.n);
        let size = lanes.next_multiple_of(panel) * d;
        // SAFETY: as above.
        unsafe {
            t.lanes.pack_transposed::<V>(&c.q, t.q, panel, lanes, t.rows);
            t.lanes.pack_transposed::<V>(&c.d_o, t.d_o, panel, lanes, t.rows);
            t.lanes.gather(&c.lse, t.lse, V::T::NEG_INFINITY);
            t.lanes.gather(&c.delta, t.delta, V::T::ZERO);
        }
        no_row(t.lse);
        t.part[..size].fill(V::T::ZERO);
        t.total[..size].fill(V::T::ZERO);
        let rows = (q.range.position(unit.first), q.range.position(unit.first + unit.rows - 1));
        let mut stream = KeyStream::new(&c.ranges, c.ranges.pairs_of(q), &c.score, rows);
        let mut run = Flush::new(c.aligned);
        let mut band = None;
        while let Some(next) = stream.band() {
            if band != Some(next) {
                band = Some(next);
                // SAFETY: the instruction set is present (the contract).
                unsafe { t.lanes.limit::<V>(&stream.limits()) };
            }
            t.keys.next(&mut stream, c.aligned, false);
            // SAFETY: the ranges' rows and the kv head are within k and v (checked).
            unsafe { t.keys.load::<Dense<V>>(&c.k, &c.v, unit.kv) };
            let keys = &t.keys;
            let doc = c.ranges.k[keys.index[0] as usize].doc;
            if run.before((next, doc), keys.base, keys.n) {
                flush(&mut t.total[..size], &mut t.part[..size]);
            }
            // SAFETY: rows are apart by whole vectors.
            let bad = unsafe { any_non_finite::<V>(keys.k.as_ptr(), keys.n * t.ldk) };
            for first in (0..lanes).step_by(panel) {
                let width = panel.min(lanes - first);
                // SAFETY: the instruction set is present (the contract).
                let visible = unsafe { visible_keys::<V>(&mut t.lanes, first, width, &keys.slots, scoring.alibi) };
                let Some((range, masked)) = visible else { continue };
                let (begin, count) = (range.start, range.len());
                // SAFETY: all tiles are as large as the sizes say; lanes from `first` on are panel `first / panel`.
                unsafe {
                    let scores = [(&keys.k, &t.q, &mut t.s, t.ldk, d), (&keys.v, &t.d_o, &mut t.dp, t.ldv, dv)];
                    for (keys, rows, scores, ld, dim) in scores {
                        V::gemm(&Gemm {
                            a: keys.as_ptr().add(begin * ld),
                            a_row: ld,
                            b: rows.as_ptr().add(first * dim),
                            ldb: panel,
                            c: scores.as_mut_ptr().add(begin * panel),
                            ldc: panel,
                            ..product(count, width, dim)
                        });
                    }
                    if let Some(dropout) = &c.dropout {
                        let (row, lanes) = ((q, c.heads.q_offset), (&t.lanes, first, width));
                        t.kept.draw::<V>(dropout, &c.ranges, row, lanes, &keys.slots, range.clone());
                        let factor = V::T::from_f64(dropout.mask.factor());
                        t.kept.apply::<V>(t.dp.as_mut_ptr(), panel, range.clone(), width, factor);
                    }
                    for w in (0..width).step_by(V::W) {
                        gradients::<V>(
                            scoring,
                            &t.lanes,
                            first + w,
                            &keys.rel[range.clone()],
                            |_| true,
                            masked,
                            t.s.as_mut_ptr().add(begin * panel + w),
                            t.dp.as_mut_ptr().add(begin * panel + w),
                            panel,
                            t.lse.as_ptr().add(first + w),
                            t.delta.as_ptr().add(first + w),
                        );
                    }
                    V::gemm(&Gemm {
                        a: keys.k.as_ptr().add(begin * t.ldk),
                        a_row: 1,
                        a_col: t.ldk,
                        b: t.dp.as_ptr().add(begin * panel),
                        ldb: panel,
                        c: t.part.as_mut_ptr().add(first * d),
                        ldc: panel,
                        store: Store::Add,
                        skip: if bad { Skip::B } else { Skip::None },
                        ..product(d, width, count)
                    });
                }
            }
        }
        flush(&mut t.total[..size], &mut t.part[..size]);
        for first in (0..t.lanes.n).step_by(V::W) {
            // SAFETY: the instruction set is present (the contract of `Job::work`).
            unsafe {
                to_rows::<V>(&t.total[first / panel * panel * d..][..panel * d], panel, first % panel, t.rows, d)
            };
            for (lane, sums) in (first..t.lanes.n).zip(t.rows.chunks_exact(d).take(V::W)) {
                // SAFETY: the lane's row and head are within dq, which this unit alone touches there.
                let dq = unsafe {
                    core::slice::from_raw_parts_mut(at::<V::T>(&c.dq, t.lanes.row[lane], t.lanes.head[lane]), d)
                };
                if !q.mode.continues() {
                    dq.copy_from_slice(sums);
                    continue;
                }
                for (x, &sum) in dq.iter_mut().zip(sums) {
                    *x = *x + sum;
                }
            }
        }
    }
}
