// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward: online softmax over tiles of keys (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
//!
//! A unit is a block of rows of one q range with one kv head. Its rows, of every q head that reads this kv head, are
//! the lanes; the keys stream by. Per tile and panel of lanes: scores = K·Qᵀ, their maximum, `p = exp(s − m)`, and
//! `Oᵀ = Oᵀ·diag(exp(m_old − m)) + Vᵀ·P`. At the end the result is normalised, merged into the running one if the mode
//! says so, and finished if the mode says that.
//!
//! Nothing a lane does depends on the other lanes of its panel: a tile that is of no use to it leaves its bits alone
//! (`exp(0)` is exactly 1, a product with p = 0 adds nothing). With tiles broken by position, that is what makes
//! results independent of how rows and keys were cut.

use super::gemm::{Gemm, Skip, Store};
use super::rows::narrow;
use super::scratch::{Arena, KEYS, LANES, Line};
use super::simd::{Real, Vector};
use super::stream::{KeyTile, Stream};
use super::tile::{Cover, Lanes, ROWS, Scoring, any_non_finite, at, product, to_rows};
use super::workers::Job;
use crate::element::Accumulator;
use crate::kernel::{Attend, HeadMap, QRange, merge};
use core::marker::PhantomData;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Walks the units of a call in order, and stops at those that the counter hands out.
pub(super) struct Units<'a> {
    q: &'a [QRange],
    rows: u32,
    kv_heads: u32,
    range: usize,
    /// Units of all ranges before `range`.
    base: usize,
}

/// Some rows of one q range, with one kv head.
pub(super) struct Unit {
    pub range: usize,
    pub first: u32,
    pub rows: u32,
    pub kv: u32,
}

impl<'a> Units<'a> {
    pub(super) fn new(q: &'a [QRange], rows: usize, kv_heads: u32) -> Self {
        Self { q, rows: rows as u32, kv_heads, range: 0, base: 0 }
    }

    pub(super) fn next(&mut self, counter: &AtomicUsize) -> Option<Unit> {
        let unit = counter.fetch_add(1, Ordering::Relaxed);
        while let Some(q) = self.q.get(self.range) {
            let blocks = q.range.len.div_ceil(self.rows) as usize;
            let units = blocks * self.kv_heads as usize;
            if unit < self.base + units {
                let (kv, block) = ((unit - self.base) / blocks, (unit - self.base) % blocks);
                let first = block as u32 * self.rows;
                let rows = self.rows.min(q.range.len - first);
                return Some(Unit { range: self.range, first, rows, kv: kv as u32 });
            }
            self.base += units;
            self.range += 1;
        }
        None
    }
}

/// The q heads (of `q_heads` in the call) that read kv head `kv`.
pub(super) fn readers(map: &HeadMap, kv: u32, q_heads: u32) -> core::ops::Range<u32> {
    let first = (u64::from(kv) + u64::from(map.kv_offset)) * u64::from(map.group);
    let offset = u64::from(map.q_offset);
    let begin = first.saturating_sub(offset).min(q_heads.into()) as u32;
    let end = (first + u64::from(map.group)).saturating_sub(offset).min(q_heads.into()) as u32;
    begin..end
}

/// A forward call whose sums are `A`s.
pub(super) struct Forward<'a, A> {
    pub call: &'a Attend<'a>,
    pub sums: PhantomData<A>,
}

/// The tiles of one worker.
struct Tiles<'a, A> {
    lanes: Lanes<'a, A>,
    keys: KeyTile<'a, A>,
    /// `[panel][head_dim][lanes of a panel]`.
    q: &'a mut [A],
    /// `[panel][value_dim][lanes of a panel]`.
    o: &'a mut [A],
    /// `[key][lanes of a panel]`: scores, then probabilities.
    s: &'a mut [A],
    /// Running maximum and sum of each lane.
    m: &'a mut [A],
    l: &'a mut [A],
    /// `exp(m_old − m)` of a panel.
    alpha: &'a mut [A],
    /// Results of [`ROWS`] lanes, and what was running.
    rows: &'a mut [A],
    others: &'a mut [A],
}

impl<A: Real> Job for Forward<'_, A> {
    type Acc = A;

    #[inline(always)]
    unsafe fn work<V: Vector<T = A>>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let mut arena = Arena(lines);
        let panel = 2 * V::W;
        let mut tiles = Tiles {
            lanes: Lanes::new(&mut arena, LANES),
            keys: KeyTile::new::<V>(&mut arena, d, dv),
            q: arena.zeros(LANES * d),
            o: arena.zeros(LANES * dv),
            s: arena.zeros(KEYS * panel),
            m: arena.zeros(LANES),
            l: arena.zeros(LANES),
            alpha: arena.zeros(panel),
            rows: arena.zeros(ROWS * d.max(dv)),
            others: arena.zeros(ROWS * dv),
        };
        let scoring = Scoring::new(&c.score, &c.slopes);
        let mut units = Units::new(c.ranges.q, LANES, c.k.heads);
        while let Some(unit) = units.next(next) {
            let heads = readers(&c.heads, unit.kv, c.q.heads);
            let share = (LANES as u32 / unit.rows).max(1);
            let mut h = heads.start;
            while h < heads.end {
                let end = heads.end.min(h + share);
                // SAFETY: unit and heads are within the call, whose shapes are checked and memory is valid.
                unsafe { self.unit::<V>(&mut tiles, &scoring, &unit, h..end) };
                h = end;
            }
        }
    }
}

impl<A: Real> Forward<'_, A> {
    /// One block of rows with some of the heads that read one kv head.
    ///
    /// # Safety
    /// As [`Job::work`].
    #[inline(always)]
    unsafe fn unit<V: Vector<T = A>>(
        &self,
        t: &mut Tiles<A>,
        scoring: &Scoring<A>,
        unit: &Unit,
        heads: core::ops::Range<u32>,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let panel = 2 * V::W;
        let q = &c.ranges.q[unit.range];
        // SAFETY: slopes has one number per head (checked); rows and heads are within q.
        let (lo, hi) = unsafe { t.lanes.set(&q.range, unit.first, unit.rows, heads, &c.score, &c.slopes) };
        let lanes = super::scratch::vectors::<V>(t.lanes.n);
        // SAFETY: as above.
        unsafe { t.lanes.pack_transposed(&c.q, t.q, panel, lanes, t.rows) };
        t.o[..lanes.next_multiple_of(panel) * dv].fill(A::ZERO);
        t.m.fill(A::NEG_INFINITY);
        t.l.fill(A::ZERO);
        let pairs = &c.ranges.pairs[q.keys_begin as usize..q.keys_end as usize];
        let mut stream = Stream::new(c.ranges.k, pairs, lo, hi);
        while t.keys.next(&mut stream, c.aligned) {
            // SAFETY: the ranges' rows and the kv head are within k and v (checked).
            unsafe { t.keys.load(&c.k, &c.v, unit.kv) };
            let keys = &t.keys;
            // SAFETY: rows are padded to whole vectors.
            let bad = unsafe { any_non_finite::<V>(keys.v.as_ptr(), keys.n * keys.ldv) };
            let mut first = 0;
            while first < lanes {
                let width = panel.min(lanes - first);
                let cover = t.lanes.meet(first, width, keys.min, keys.max, keys.base, scoring.alibi);
                if cover != Cover::None {
                    let p = first / panel;
                    // SAFETY: all tiles are as large as the sizes say: keys.n by width scores, d by width of q,
                    // dv by width of o.
                    unsafe {
                        V::gemm(&Gemm {
                            a: keys.k.as_ptr(),
                            a_row: keys.ldk,
                            b: t.q.as_ptr().add(p * panel * d),
                            ldb: panel,
                            c: t.s.as_mut_ptr(),
                            ldc: panel,
                            ..product(keys.n, width, d)
                        });
                        let mut w = 0;
                        while w < width {
                            softmax::<V>(
                                scoring,
                                &t.lanes,
                                first + w,
                                &keys.rel[..keys.n],
                                cover == Cover::Some,
                                t.s.as_mut_ptr().add(w),
                                panel,
                                t.m.as_mut_ptr().add(first + w),
                                t.l.as_mut_ptr().add(first + w),
                                t.alpha.as_mut_ptr().add(w),
                            );
                            w += V::W;
                        }
                        V::gemm(&Gemm {
                            a: keys.v.as_ptr(),
                            a_row: 1,
                            a_col: keys.ldv,
                            b: t.s.as_ptr(),
                            ldb: panel,
                            c: t.o.as_mut_ptr().add(p * panel * dv),
                            ldc: panel,
                            store: Store::Scale,
                            factor: t.alpha.as_ptr(),
                            skip: if bad { Skip::B } else { Skip::None },
                            ..product(dv, width, keys.n)
                        });
                    }
                }
                first += panel;
            }
        }
        for first in (0..t.lanes.n).step_by(ROWS) {
            // SAFETY: the lanes' rows and heads are within the tensors; this unit alone touches them.
            unsafe { self.finish(t, first, panel, q) };
        }
    }

    /// Normalises up to [`ROWS`] lanes from `first` on, and does what the mode of their range says.
    ///
    /// # Safety
    /// The lanes' rows and heads lie within the tensors of the call.
    #[inline(always)]
    unsafe fn finish(&self, t: &mut Tiles<A>, first: usize, panel: usize, q: &QRange) {
        let c = self.call;
        let dv = c.v.dim as usize;
        let end = t.lanes.n.min(first + ROWS);
        if q.mode.continues() {
            for (lane, other) in (first..end).zip(t.others.chunks_exact_mut(dv)) {
                // SAFETY: running is there (checked). It may be o itself, so it is copied before anything is written.
                unsafe {
                    let running = at::<A>(&c.running, t.lanes.row[lane], t.lanes.head[lane]);
                    other.copy_from_slice(core::slice::from_raw_parts(running, dv));
                }
            }
        }
        to_rows(&t.o[first / panel * panel * dv..][..panel * dv], panel, first % panel, t.rows, dv);
        for (lane, (row, other)) in (first..end).zip(t.rows.chunks_exact_mut(dv).zip(t.others.chunks_exact_mut(dv))) {
            let (token, head) = (t.lanes.row[lane], t.lanes.head[lane]);
            let (m, l) = (t.m[lane], t.l[lane]);
            let mut lse = A::NEG_INFINITY;
            if m == A::NEG_INFINITY && l == A::ZERO {
                row.fill(A::ZERO);
            } else {
                lse = m + l.ln();
                let inverse = A::from_f64(1.0) / l;
                for x in row.iter_mut() {
                    // Adding 0 makes −0 (a product that underflowed) the 0 it would be with one more masked key.
                    *x = *x * inverse + A::ZERO;
                }
            }
            // SAFETY: tensors of modes that are used are there (checked).
            unsafe {
                let lse_at = at::<A>(&c.lse, token, head);
                if q.mode.continues() {
                    let w = merge::weights(*lse_at, lse);
                    merge::combine(&w, other, row);
                    row.copy_from_slice(other);
                    lse = w.lse;
                }
                if q.mode.finishes() {
                    if !c.sinks.is_none() {
                        let sink = A::from_f64((*at::<f32>(&c.sinks, 0, head)).into());
                        let (factor, with_sink) = merge::sink(lse, sink);
                        for x in row.iter_mut() {
                            *x = *x * factor;
                        }
                        lse = with_sink;
                    }
                    narrow(row, &c.o, token, head);
                } else {
                    narrow(row, &c.running, token, head);
                }
                *lse_at = lse;
            }
        }
    }
}

/// One vector of lanes against all keys of a tile: scores to probabilities, in place, with the running maximum `m`,
/// the sum `l`, and `alpha = exp(m_old − m)`.
///
/// # Safety
/// The instruction set is present; `s` is `[keys, ≥ W]`, `ld` apart; `m`, `l` and `alpha` are of W.
#[inline(always)]
unsafe fn softmax<V: Vector>(
    scoring: &Scoring<V::T>,
    lanes: &Lanes<V::T>,
    lane: usize,
    keys: &[V::T],
    masked: bool,
    s: *mut V::T,
    ld: usize,
    m: *mut V::T,
    l: *mut V::T,
    alpha: *mut V::T,
) {
    // SAFETY: `j < keys.len()`; the rest is the caller's promise.
    unsafe {
        let never = V::splat(V::T::NEG_INFINITY);
        let old = V::load(m);
        let mut max = old;
        for (j, &key) in keys.iter().enumerate() {
            let at = s.add(j * ld);
            let (score, _) = scoring.apply(V::load(at), lanes, lane, key, masked);
            score.store(at);
            // A NaN is not a maximum; it reaches the sum below.
            max = V::gt(score, max, score, max);
        }
        // A lane that has seen nothing yet: exp(−inf − 0) is 0, exp(−inf − −inf) would be NaN.
        let shift = V::gt(max, never, max, V::splat(V::T::ZERO));
        let factor = old.sub(shift).exp();
        let mut sum = V::splat(V::T::ZERO);
        for j in 0..keys.len() {
            let at = s.add(j * ld);
            let p = V::load(at).sub(shift).exp();
            p.store(at);
            sum = sum.add(p);
        }
        V::load(l).fma(factor, sum).store(l);
        max.store(m);
        factor.store(alpha);
    }
}
