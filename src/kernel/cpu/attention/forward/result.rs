// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a unit of the forward: sums become rows of the result, merged and finished as the mode of their range
//! says.

use super::{ForwardPass, ForwardTiles};
use crate::call::QRange;
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::attention::tile::{Scoring, at};
use crate::kernel::cpu::memory::rows::narrow;
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::vector::simd::Vector;
use crate::kernel::merge::{self, LogSumExp};
use core::sync::atomic::{AtomicU32, Ordering};

impl ForwardPass<'_> {
    /// Normalises up to [`Vector::W`] lanes from `first` on, whose sums are in `rows`, and merges and finishes them as
    /// the mode of their range says.
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
        let c = self.call;
        let dv = c.v.dim as usize;
        let end = t.lanes.n.min(first + E::V::W);
        if q.mode.continues() {
            for (lane, other) in (first..end).zip(t.others.chunks_exact_mut(dv)) {
                // SAFETY: the running result exists (checked). It may be o itself, so it is copied before anything is
                // written.
                unsafe {
                    let running = at::<E::Sum>(&c.running, t.lanes.row[lane], t.lanes.head[lane]);
                    other.copy_from_slice(core::slice::from_raw_parts(running, dv));
                }
            }
        }
        for (lane, (row, other)) in (first..end).zip(t.rows.chunks_exact_mut(dv).zip(t.others.chunks_exact_mut(dv))) {
            let (token, head) = (t.lanes.row[lane], t.lanes.head[lane]);
            let (m, l) = (t.m[lane], t.l[lane]);
            let mut lse = LogSumExp::NOTHING;
            if m == E::Sum::NEG_INFINITY && l == E::Sum::ZERO {
                row.fill(E::Sum::ZERO);
            } else {
                lse = LogSumExp::of(scoring.lse(m, l));
                let inverse = E::Sum::from_f64(c.dropout.map_or(1.0, |dropout| dropout.mask.factor())) / l;
                for x in row.iter_mut() {
                    // Adding 0 makes −0 (a product that underflowed) the 0 it would be with one more masked key.
                    *x = *x * inverse + E::Sum::ZERO;
                }
            }
            // SAFETY: the tensors that the mode uses exist (checked), and max_logit has a number for each head.
            unsafe {
                if let Some(&best) = t.best.get(lane) {
                    raise(at(&c.max_logit, 0, head), scoring.logit(best));
                }
                if q.mode.continues() {
                    let before = LogSumExp::load(at::<E::Sum>(&c.running_lse, token, head), c.running_lse.dim);
                    let w = merge::weights(before, lse);
                    merge::combine(&w, other, row);
                    row.copy_from_slice(other);
                    lse = w.lse;
                }
                if q.mode.finishes() {
                    if !c.sinks.is_none() {
                        let (factor, with_sink) = merge::sink(lse, merge::sinks_of(&c.sinks, head));
                        for x in row.iter_mut() {
                            *x = *x * factor;
                        }
                        lse.lse = with_sink;
                    }
                    E::write(row, &c.o, token, head, self.stream);
                    *at::<E::Sum>(&c.lse, token, head) = lse.lse;
                } else {
                    narrow(row, &c.running, token, head);
                    lse.store(at::<E::Sum>(&c.running_lse, token, head), c.running_lse.dim);
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
