// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a unit of the forward: sums become rows of the result, merged and finished as the mode of their range
//! says.

use super::{ForwardPass, ForwardTiles};
use crate::call::{Attend, QRange};
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::attention::small::Small;
use crate::kernel::cpu::attention::tile::{Lanes, Scoring, at};
use crate::kernel::cpu::memory::rows::{address, narrow};
use crate::kernel::cpu::product::engine::{AttentionEngine, StoreRow};
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::Vector;
use crate::kernel::merge::{self, LogSumExp};
use core::sync::atomic::{AtomicU32, Ordering};

impl ForwardPass<'_> {
    /// A unit of few rows with the keys of the first tile, if it has any.
    ///
    /// # Safety
    /// As [`ForwardPass::unit`], of which the lanes are.
    #[inline(always)]
    pub(super) unsafe fn small<E: AttentionEngine>(
        &self,
        t: &mut ForwardTiles<E::T, E::Sum>,
        scoring: &Scoring<E::Sum>,
        any: bool,
        kv: u32,
        q: &QRange,
    ) {
        let dv = self.call.v.dim as usize;
        let n = t.lanes.n;
        let few = Small {
            call: self.call,
            scoring,
            lanes: &mut t.lanes,
            keys: any.then_some(&t.keys[0].slots),
            kv,
            sums: t.o,
            s: t.s,
            m: t.m,
            l: t.l,
            alpha: t.alpha,
            best: t.best,
            row: t.rows,
        };
        // SAFETY: the contract; `is_small` has looked at the lengths.
        unsafe {
            E::V::call(few);
            for first in (0..n).step_by(E::V::W) {
                let rows = first * dv..n.min(first + E::V::W) * dv;
                t.rows[..rows.len()].copy_from_slice(&t.o[rows]);
                self.finish::<E>(t, scoring, first, q);
            }
        }
    }

    /// See [`FinishLanes`].
    ///
    /// # Safety
    /// The lanes' rows and heads lie within the tensors of the call; the instruction set is present.
    #[inline(always)]
    pub(super) unsafe fn finish<E: AttentionEngine>(
        &self,
        t: &mut ForwardTiles<E::T, E::Sum>,
        scoring: &Scoring<E::Sum>,
        first: usize,
        q: &QRange,
    ) {
        let (call, lanes, m, l, best) = (self.call, &t.lanes, &*t.m, &*t.l, &*t.best);
        let store = if self.stream { E::AROUND_CACHES } else { None };
        let (rows, others) = (&mut *t.rows, &mut *t.others);
        // SAFETY: the contract.
        unsafe { E::V::call(FinishLanes { call, scoring, lanes, first, q, m, l, best, rows, others, store }) };
    }
}

/// Normalises up to [`Vector::W`] lanes from `first` on, whose sums are in `rows`, and merges and finishes them as the
/// mode of their range says.
struct FinishLanes<'l, 'a, A> {
    pub call: &'l Attend<'l>,
    pub scoring: &'l Scoring<A>,
    pub lanes: &'l Lanes<'a, A>,
    pub first: usize,
    pub q: &'l QRange,
    /// Of all lanes: the reference m, the sum of p, and the largest score, unless it is empty.
    pub m: &'l [A],
    pub l: &'l [A],
    pub best: &'l [A],
    /// Sums of the lanes from `first` on, and room for the running result of the same lanes.
    pub rows: &'l mut [A],
    pub others: &'l mut [A],
    /// Stores rows of o, if they are not to be in the caches.
    pub store: Option<StoreRow<A>>,
}

/// Lanes' rows and heads lie within the tensors of the call.
impl<V: Vector> Routine<V> for FinishLanes<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { call: c, lanes, first, q, rows, others, .. } = self;
        let dv = c.v.dim as usize;
        let end = lanes.n.min(first + V::W);
        if q.mode.continues() {
            for (lane, other) in (first..end).zip(others.chunks_exact_mut(dv)) {
                // SAFETY: the running result exists (checked). It may be o itself, so it is copied before anything is
                // written.
                unsafe {
                    let running = at::<V::T>(&c.running, lanes.row[lane], lanes.head[lane]);
                    other.copy_from_slice(core::slice::from_raw_parts(running, dv));
                }
            }
        }
        for (lane, (row, other)) in (first..end).zip(rows.chunks_exact_mut(dv).zip(others.chunks_exact_mut(dv))) {
            let (token, head) = (lanes.row[lane], lanes.head[lane]);
            let (m, l) = (self.m[lane], self.l[lane]);
            let mut lse = LogSumExp::NOTHING;
            if m == V::T::NEG_INFINITY && l == V::T::ZERO {
                row.fill(V::T::ZERO);
            } else {
                lse = self.scoring.lse(m, l);
                let inverse = V::T::from_f64(c.dropout.map_or(1.0, |dropout| dropout.mask.factor())) / l;
                for x in row.iter_mut() {
                    // Adding 0 makes −0 (a product that underflowed) the 0 it would be with one more masked key.
                    *x = *x * inverse + V::T::ZERO;
                }
            }
            // SAFETY: the tensors that the mode uses exist (checked), max_logit has a number for each head, and the
            // engine that `store` belongs to has the instruction set of V.
            unsafe {
                if let Some(&best) = self.best.get(lane) {
                    raise(at(&c.max_logit, 0, head), self.scoring.logit(best));
                }
                if q.mode.continues() {
                    let before = LogSumExp::load(at::<V::T>(&c.running_lse, token, head), c.running_lse.dim);
                    let w = merge::weights(before, lse);
                    merge::combine(&w, other, row);
                    row.copy_from_slice(other);
                    lse = w.lse;
                }
                let (mut to, mut store) = (&c.running, None);
                if q.mode.finishes() {
                    if !c.sinks.is_none() {
                        let (factor, with_sink) = merge::sink(lse, merge::sinks_of(&c.sinks, head));
                        for x in row.iter_mut() {
                            *x = *x * factor;
                        }
                        lse.lse = with_sink;
                    }
                    (to, store) = (&c.o, self.store);
                    *at::<V::T>(&c.lse, token, head) = lse.lse;
                } else {
                    lse.store(at::<V::T>(&c.running_lse, token, head), c.running_lse.dim);
                }
                match store {
                    Some(store) => store(row, address(to, token, head), to.dtype),
                    None => narrow(row, to, token, head),
                }
            }
        }
    }
}

/// Raises a number that other workers raise too: the maximum of all does not depend on their order.
///
/// # Safety
/// `to` is valid for reads and writes, aligned, and accessed by nothing but this function meanwhile.
unsafe fn raise(to: *mut f32, x: f32) {
    // SAFETY: valid, aligned and accessed by this function alone (the contract), as an atomic.
    let to = unsafe { AtomicU32::from_ptr(to.cast()) };
    let mut seen = to.load(Ordering::Relaxed);
    // A NaN is not larger than anything.
    while x > f32::from_bits(seen) {
        match to.compare_exchange_weak(seen, x.to_bits(), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => seen = now,
        }
    }
}
