// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward pass of keys: keys outside, rows inside, dk and dv (and dq on the way).
//!
//! A unit is a tile of a document's keys with one kv head. Only this unit writes dk and dv of these keys; units add to
//! dq in the order of their keys (`dq_order.rs`), so the bits do not depend on the number of workers. For each q head
//! the unit goes through the q ranges in the order of the call: `dV += Pᵀ·dO`, `dK += dSᵀ·Q`. Each element is summed
//! over the rows in that order. Where ranges are short, several q heads are processed together; not in aligned calls,
//! where the order of a sum must not depend on how the rows are cut.

use super::backward::{Flush, flush, gradients, no_row, visible_keys};
use super::bands::{Reader, by_band};
use super::dq_order::{DqOrder, DqTurn};
use super::key_units::{Group, KeyUnits};
use super::row_blocks::{FEW_ROWS, readers};
use super::tile::{Scoring, at, product};
use crate::call::{AttendBackward, Pair, QRange};
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::choice::Documents;
use crate::kernel::cpu::job::Job;
use crate::kernel::cpu::memory::arena::{LANES_BACK, Line, vectors};
use crate::kernel::cpu::memory::panel::{any_non_finite, to_lanes};
use crate::kernel::cpu::memory::rows::prefetch;
use crate::kernel::cpu::product::engine::{AttentionEngine, Dense};
#[cfg(target_arch = "x86_64")]
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::sync::atomic::AtomicUsize;

mod range;
mod tiles;

use tiles::KeyTiles;

/// The keys' pass of a call.
pub(crate) struct KeyPass<'a> {
    pub call: &'a AttendBackward<'a>,
    pub documents: Documents<'a>,
    /// Add to dq as well, which holds a value in every row.
    pub queries: bool,
    /// How many workers take units.
    pub workers: usize,
    /// The order in which units add to dq.
    pub order: DqOrder,
}

impl Job for KeyPass<'_> {
    #[inline(always)]
    unsafe fn work<E: AttentionEngine>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the lines are large enough and each unit is handed out once (the contract of `Job::work`).
        unsafe { self.dense::<E::V>(lines, next) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn work_on_tiles<H: TileForm>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract.
        unsafe { self.tiled::<H>(lines, next) }
    }
}

impl KeyPass<'_> {
    /// Takes units until none is left, with vectors `V`.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn dense<V: Vector>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let mut tiles = KeyTiles::new::<V>(lines, c);
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let mut units = KeyUnits::new(c, self.documents, 1, c.aligned, self.workers);
        while let Some(unit) = units.next(next) {
            let turn = self.order.begin(unit.index, unit.before.filter(|_| self.queries));
            let (group, kv) = (units.group(&unit), unit.kv);
            let mut stream = units.keys(&unit);
            // Most ring steps attend to some of the keys only; adding 0 to the others would cost reading and writing
            // them.
            let next = tiles.keys.next(&mut stream, c.aligned, false);
            if !next || (c.accumulate_keys && !self.reached(&mut tiles, &group)) {
                continue;
            }
            // SAFETY: ranges and heads are within the call, whose shapes are checked and memory is valid; the unit
            // alone writes dk and dv of these keys and this kv head, and dq is added to in turn.
            unsafe {
                tiles.keys.load::<Dense<V>>(&c.k, &c.v, kv);
                self.tile::<V>(&mut tiles, &scoring, &group, kv, &turn);
            }
        }
    }
}

impl KeyPass<'_> {
    /// Whether any row may see a key of the current tile.
    fn reached<A: Real>(&self, t: &mut KeyTiles<A>, group: &Group) -> bool {
        let mut reaches = |q: &QRange, pairs: &[Pair]| !t.mark_read(&self.reader(q, pairs)).is_empty();
        group.iter().any(|q| by_band(self.call.ranges.pairs_of(q)).any(|pairs| reaches(q, pairs)))
    }

    /// A q range with pairs of one band.
    pub(crate) fn reader<'p>(&self, q: &QRange, pairs: &'p [Pair]) -> Reader<'p> {
        Reader::new(&self.call.ranges, &self.call.score, q, pairs)
    }

    /// How many q heads share the lanes. If a document's ranges have few rows, one head would leave most lanes empty.
    /// It is 1 if sums must keep their order or are written per q head.
    fn heads_together(&self, group: &Group) -> u32 {
        if self.call.aligned || self.call.per_q_head {
            return 1;
        }
        let rows = group.iter().map(|q| q.range.len).max();
        (LANES_BACK as u32 / rows.unwrap_or(1).max(1)).max(1)
    }

    /// dk and dv of one tile of keys.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn tile<V: Vector>(
        &self,
        t: &mut KeyTiles<V::T>,
        scoring: &Scoring<V::T>,
        group: &Group,
        kv: u32,
        turn: &DqTurn,
    ) {
        let c = self.call;
        // SAFETY: rows and heads are within the tensors (checked).
        unsafe { self.prefetch_next_head(t, group, kv) };
        // SAFETY: rows are apart by whole vectors.
        let bad_k = unsafe { any_non_finite::<V>(t.keys.k.as_ptr(), t.keys.n * t.ldk) };
        // Only the rows that hold keys, so that a tile of a short document costs less.
        let (nk, nv) = (t.keys.n * t.ldk, t.keys.n * t.ldv);
        for sums in [&mut t.dk[..nk], &mut t.dk_part[..nk], &mut t.dv[..nv], &mut t.dv_part[..nv]] {
            sums.fill(V::T::ZERO);
        }
        let heads = readers(&c.heads, kv, c.q.heads);
        let together = self.heads_together(group);
        // Rows of dq before the current range, in the order in which units add to them.
        let mut place = 0u32;
        for first_head in heads.clone().step_by(together as usize) {
            let heads = first_head..heads.end.min(first_head + together);
            let mut run = Flush::new(c.aligned);
            if c.aligned && c.ranges.bands.len() > 1 {
                // Band by band, so that the order of a sum does not depend on how q is cut.
                let keys = t.keys.ranges;
                let mut from = Some(0);
                while let Some(band) = from.and_then(|from| group.next_band(&c.ranges, keys, from)) {
                    for q in group.iter() {
                        for pairs in by_band(c.ranges.pairs_of(q)).filter(|pairs| pairs[0].band == band) {
                            // SAFETY: rows and head are within the tensors (checked).
                            unsafe {
                                self.range::<V>(t, scoring, (q, pairs), heads.clone(), &mut run, bad_k, (turn, 0))
                            };
                        }
                    }
                    from = band.checked_add(1);
                }
            } else {
                for q in group.iter() {
                    let pairs = c.ranges.pairs_of(q);
                    // SAFETY: as above.
                    unsafe { self.range::<V>(t, scoring, (q, pairs), heads.clone(), &mut run, bad_k, (turn, place)) };
                    place += q.range.len;
                }
            }
            turn.pass(place);
            flush(&mut t.dk[..nk], &mut t.dk_part[..nk]);
            flush(&mut t.dv[..nv], &mut t.dv_part[..nv]);
            if c.per_q_head {
                // SAFETY: the partial of this q head is this unit's alone.
                unsafe { t.write(c, first_head) };
                t.dk[..nk].fill(V::T::ZERO);
                t.dv[..nv].fill(V::T::ZERO);
            }
        }
        if !c.per_q_head {
            // SAFETY: dk and dv of this kv head are this unit's alone.
            unsafe { t.write(c, kv) };
        }
    }

    /// If the document has few rows, prefetches them for the next kv head: so short a unit computes for less time than
    /// the next one's rows take to arrive from memory.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(never)]
    unsafe fn prefetch_next_head<A>(&self, t: &KeyTiles<A>, group: &Group, kv: u32) {
        let c = self.call;
        let few = |rows: u32| rows <= FEW_ROWS;
        if kv + 1 >= c.k.heads || !few(t.keys.n as u32) || !few(group.iter().map(|q| q.range.len).sum()) {
            return;
        }
        let heads = readers(&c.heads, kv + 1, c.q.heads);
        // Heads of dk and dv.
        let written = if c.per_q_head { heads.clone() } else { kv + 1..kv + 2 };
        // SAFETY: rows and heads are within the tensors (the contract).
        unsafe {
            for &row in t.keys.row[..t.keys.n].iter().filter(|&&row| row >= 0) {
                [&c.k, &c.v].into_iter().for_each(|tensor| prefetch(tensor, row, kv + 1));
                for head in written.clone() {
                    [&c.dk, &c.dv].into_iter().for_each(|tensor| prefetch(tensor, row, head));
                }
            }
            for q in group.iter() {
                for row in (q.range.row..).take(q.range.len as usize) {
                    for head in heads.clone() {
                        [&c.q, &c.d_o].into_iter().for_each(|tensor| prefetch(tensor, row, head));
                        if self.queries {
                            prefetch(&c.dq, row, head);
                        }
                    }
                }
            }
        }
    }

    /// The current lanes with the current tile of keys.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn tile_pairs<V: Vector>(
        &self,
        t: &mut KeyTiles<V::T>,
        scoring: &Scoring<V::T>,
        run: &mut Flush,
        (of, pos, row): ((u32, u32), i64, &QRange),
        bad_k: bool,
        (turn, place): (&DqTurn, u32),
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let keys = &t.keys;
        let lanes = vectors::<V>(t.lanes.n);
        // SAFETY: the instruction set is present (the contract).
        let visible = unsafe { visible_keys::<V>(&mut t.lanes, 0, lanes, &keys.slots, scoring.alibi) };
        let Some((range, masked)) = visible else { return };
        if run.before(of, pos, t.lanes.n) {
            let (nk, nv) = (keys.n * t.ldk, keys.n * t.ldv);
            flush(&mut t.dk[..nk], &mut t.dk_part[..nk]);
            flush(&mut t.dv[..nv], &mut t.dv_part[..nv]);
        }
        let (begin, count) = (range.start, range.len());
        let skip = |bad: bool| if bad { Skip::A } else { Skip::None };
        // SAFETY: rows and heads are within the tensors; all tiles are as large as the sizes say.
        unsafe {
            t.lanes.pack::<V>(&c.q, t.q, t.ldk, 0..lanes);
            t.lanes.pack::<V>(&c.d_o, t.d_o, t.ldv, 0..lanes);
            for lane in (0..lanes).step_by(V::W) {
                to_lanes::<V>(&t.q[lane * t.ldk..], t.ldk, d, t.qt, lanes, lane);
                to_lanes::<V>(&t.d_o[lane * t.ldv..], t.ldv, dv, t.d_ot, lanes, lane);
            }
            t.lanes.gather(&c.lse, t.lse, V::T::NEG_INFINITY);
            t.lanes.gather(&c.delta, t.delta, V::T::ZERO);
            no_row(t.lse);
            let bad_q = any_non_finite::<V>(t.q.as_ptr(), lanes * t.ldk);
            let bad_d_o = any_non_finite::<V>(t.d_o.as_ptr(), lanes * t.ldv);
            let scores = [(&keys.k, &t.qt, &mut t.s, t.ldk, d), (&keys.v, &t.d_ot, &mut t.dp, t.ldv, dv)];
            for (keys, rows, scores, ld, dim) in scores {
                V::gemm(&Gemm {
                    a: keys.as_ptr().add(begin * ld),
                    a_row: ld,
                    b: rows.as_ptr(),
                    ldb: lanes,
                    c: scores.as_mut_ptr().add(begin * lanes),
                    ldc: lanes,
                    ..product(count, lanes, dim)
                });
            }
            let (s, dp) = (t.s.as_mut_ptr(), t.dp.as_mut_ptr());
            if let Some(dropout) = &c.dropout {
                let row = (row, c.heads.q_offset);
                t.kept.draw::<V>(dropout, &c.ranges, row, (&t.lanes, 0, lanes), &keys.slots, range.clone());
                t.kept.apply::<V>(dp, lanes, range.clone(), lanes, V::T::from_f64(dropout.mask.factor()));
            }
            for w in (0..lanes).step_by(V::W) {
                gradients::<V>(
                    scoring,
                    &t.lanes,
                    w,
                    &keys.rel[range.clone()],
                    |j| t.valid[begin + j] != 0,
                    masked,
                    s.add(begin * lanes + w),
                    dp.add(begin * lanes + w),
                    lanes,
                    t.lse.as_ptr().add(w),
                    t.delta.as_ptr().add(w),
                );
            }
            if let Some(dropout) = &c.dropout {
                t.kept.apply::<V>(s, lanes, range.clone(), lanes, V::T::from_f64(dropout.mask.factor()));
            }
            let sums =
                [(&t.s, &t.d_o, &mut t.dv_part, t.ldv, bad_d_o, dv), (&t.dp, &t.q, &mut t.dk_part, t.ldk, bad_q, d)];
            for (weights, rows, sums, ld, bad, dim) in sums {
                V::gemm(&Gemm {
                    a: weights.as_ptr().add(begin * lanes),
                    a_row: lanes,
                    b: rows.as_ptr(),
                    ldb: ld,
                    c: sums.as_mut_ptr().add(begin * ld),
                    ldc: ld,
                    store: Store::Chain,
                    skip: skip(bad),
                    ..product(count, vectors::<V>(dim), t.lanes.n)
                });
            }
            if !self.queries {
                return;
            }
            V::gemm(&Gemm {
                a: t.dp.as_ptr().add(begin * lanes),
                a_row: 1,
                a_col: lanes,
                b: keys.k.as_ptr().add(begin * t.ldk),
                ldb: t.ldk,
                c: t.dq.as_mut_ptr(),
                ldc: t.ldk,
                skip: skip(bad_k),
                ..product(t.lanes.n, vectors::<V>(d), count)
            });
            turn.wait(place);
            for lane in 0..t.lanes.n {
                let dq = at::<V::T>(&c.dq, t.lanes.row[lane], t.lanes.head[lane]);
                for (x, &sum) in core::slice::from_raw_parts_mut(dq, d).iter_mut().zip(&t.dq[lane * t.ldk..]) {
                    *x = *x + sum;
                }
            }
        }
    }
}
