// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scores to probabilities, one vector of lanes at a time.
//!
//! In logarithms to the base 2, `p = exp2(s·log2 − m·log2)`: one multiply-add and one exp2 for each score. The
//! reference `m` of a lane is not its running maximum: the maximum may exceed it by up to [`SLACK`]. Beyond that m is
//! raised to the maximum, and the sums so far are multiplied by `alpha = exp2((m_old − m)·log2)`. Most tiles therefore
//! do not rescale the sums of o. p is at most `2^SLACK`, which loses neither range nor precision (FlashAttention-4,
//! 2025, does the same). Whether m is raised depends on the lane alone, and a factor of 1 changes no bits, so the lanes
//! of a panel are independent.
//!
//! `m·log2` is rounded, by up to half of its last digit; every p of the lane has the same error, which the division by
//! their sum removes. It grows with the score: from 2²⁴ on by more than 1, from 2³¹ on p would overflow. Lanes that
//! large take a path of their own ([`Recentre`]): scores less m are exact where p is not 0, so they are subtracted
//! first, and multiplied by `log2` afterwards.
//!
//! Code with vectors must not use closures: a closure is compiled as a function without the instruction set, and every
//! vector operation in it becomes a call.

use super::slots::BLOCK;
use super::tile::{Cover, Scores, Scoring};
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::ops::Range;

/// The amount, in units of log2, by which a score may exceed the reference of its lane.
pub(crate) const SLACK: f64 = 8.0;

/// Below [`Real::WHOLE`] by this lies the size of a reference at which a vector takes [`Recentre`]: a lane that goes
/// from a large reference to a usual one without passing the margin keeps nothing of its sums (p is 0 from −127 on).
const MARGIN: f64 = 256.0;

/// The size of a reference, in units of log2, from which on some lane of a vector may be large.
#[inline(always)]
pub(crate) fn near_whole<A: Real>() -> A {
    A::from_f64(A::WHOLE.to_f64() - MARGIN)
}

impl<A: Real> Scores<'_, A> {
    /// Converts the products `s` of one vector of lanes with the keys `range` to p, updates the reference `m` and the
    /// sum `l`, and writes `alpha`; raises `best`, unless it is null, to the largest score. If the result is true, the
    /// lanes' sums of o must be multiplied by `alpha`.
    ///
    /// # Safety
    /// The engine's instruction set is present; `s` and `p` are as the engine says, with a row behind an odd range;
    /// `m`, `l` and `alpha` are of W, and so is `best` unless it is null.
    #[inline(always)]
    pub(crate) unsafe fn run<E: AttentionEngine<Sum = A>>(
        &self,
        lane: usize,
        range: Range<usize>,
        s: *mut A,
        p: *mut E::T,
        m: *mut A,
        l: *mut A,
        alpha: *mut A,
        best: *mut A,
    ) -> bool {
        // SAFETY: the instruction set is present and `s`, `p`, `m`, `l`, `alpha` and `best` are as long as the contract
        // says.
        unsafe {
            let max = self.largest::<E>(lane, range.clone(), s.add(lane));
            if !best.is_null() {
                E::V::max(max, E::V::load(best)).store(best);
            }
            let log2 = E::V::splat(self.scoring.log2);
            let zero = E::V::splat(A::ZERO);
            let never = E::V::splat(A::NEG_INFINITY);
            let old = E::V::load(m);
            let limit = old.mul(log2).add(E::V::splat(A::from_f64(SLACK)));
            let mut raise = E::V::any_gt(max.mul(log2), limit);
            let mut new = E::V::gt(max.mul(log2), limit, max, old);
            // For a lane that has seen no key yet, m is −inf; subtracting it would give NaN, so 0 is subtracted.
            let mut shift = zero.sub(E::V::gt(new, never, new.mul(log2), zero));
            let mut factor = E::V::splat(A::from_f64(1.0));
            if raise {
                factor = E::V::gt(new, old, old.mul(log2).add(shift).exp2(), factor);
                new.store(m);
            }
            if E::V::any_gt(E::V::max(shift, zero.sub(shift)), E::V::splat(near_whole())) {
                let scores = (s.add(lane), E::PANEL, range.clone());
                let recentre = Recentre { scores, log2: self.scoring.log2, old, new, max };
                (new, shift, factor) = E::V::call(recentre);
                raise |= E::V::any_gt(new, old);
                new.store(m);
            }
            factor.store(alpha);
            let sum = if self.careful {
                self.weights::<E, true>(lane, range, s, p, shift)
            } else {
                self.weights::<E, false>(lane, range, s, p, shift)
            };
            E::V::load(l).fma(factor, sum).store(l);
            raise
        }
    }

    /// Computes scores in place, and the maximum of each lane. A NaN is ignored by the maximum and reaches the sum.
    ///
    /// # Safety
    /// As [`Scores::run`].
    #[inline(always)]
    unsafe fn largest<E: AttentionEngine<Sum = A>>(&self, lane: usize, range: Range<usize>, s: *mut A) -> E::V {
        // SAFETY: keys are within the tile, lanes within the panel.
        unsafe {
            let never = E::V::splat(A::NEG_INFINITY);
            let mut max = [never; 4];
            let mut begin = range.start;
            while begin < range.end {
                let end = range.end.min((begin / BLOCK + 1) * BLOCK);
                let masked = self.covers[begin / BLOCK] != Cover::All;
                if masked || !self.scoring.plain {
                    for (j, &key) in self.keys[..end].iter().enumerate().skip(begin) {
                        let at = s.add(j * E::PANEL);
                        let mut score = E::V::load(at);
                        if !self.scoring.plain {
                            score = self.scoring.apply(score, self.lanes, self.first + lane, key, masked).0;
                        } else if masked {
                            score = Scoring::mask(score, self.lanes, self.first + lane, key);
                        }
                        score.store(at);
                        max[0] = E::V::max(score, max[0]);
                    }
                } else {
                    let mut j = begin;
                    while j + 4 <= end {
                        let mut i = 0;
                        while i < 4 {
                            max[i] = E::V::max(E::V::load(s.add((j + i) * E::PANEL)), max[i]);
                            i += 1;
                        }
                        j += 4;
                    }
                    while j < end {
                        max[0] = E::V::max(E::V::load(s.add(j * E::PANEL)), max[0]);
                        j += 1;
                    }
                }
                begin = end;
            }
            if range.end % 2 == 1 {
                never.store(s.add(range.end * E::PANEL));
            }
            E::V::max(E::V::max(max[0], max[1]), E::V::max(max[2], max[3]))
        }
    }

    /// Scores to p, and their sums.
    ///
    /// # Safety
    /// As [`Scores::run`].
    #[inline(always)]
    unsafe fn weights<E: AttentionEngine<Sum = A>, const CAREFUL: bool>(
        &self,
        lane: usize,
        range: Range<usize>,
        s: *mut A,
        p: *mut E::T,
        shift: E::V,
    ) -> E::V {
        // SAFETY: keys are within the tile, lanes within the panel.
        unsafe {
            let (mut even, mut odd) = (E::V::splat(A::ZERO), E::V::splat(A::ZERO));
            let mut j = range.start;
            while j < range.end {
                let a = self.weight::<E::V, CAREFUL>(s.add(j * E::PANEL + lane), shift);
                let b = self.weight::<E::V, CAREFUL>(s.add((j + 1) * E::PANEL + lane), shift);
                (even, odd) = (even.add(a), odd.add(b));
                E::put(s, p, j, lane, a, b);
                j += 2;
            }
            even.add(odd)
        }
    }

    /// p of one vector of scores.
    ///
    /// # Safety
    /// The instruction set is present; `s` is of W.
    #[inline(always)]
    unsafe fn weight<V: Vector<T = A>, const CAREFUL: bool>(&self, s: *const A, shift: V) -> V {
        // SAFETY: the instruction set is present and `s` is of W (the contract).
        unsafe {
            let x = V::load(s).fma(V::splat(self.scoring.log2), shift);
            let p = x.exp2();
            if !CAREFUL {
                return p;
            }
            // exp2 of a NaN need not be NaN.
            V::gt(x, V::splat(A::LOWEST), p, V::max(V::splat(A::ZERO), x))
        }
    }
}

/// A vector of lanes of which some are large: their reference, in units of log2, exceeds [`Real::WHOLE`].
///
/// The reference of a large lane is `m·log2` without a rounding, and never less than its maximum; its scores become
/// `s − m`, in place. Other lanes keep what they have, bit by bit.
struct Recentre<V: Vector> {
    /// The scores of these lanes, how far apart those of two keys are, and the keys.
    scores: (*mut V::T, usize, Range<usize>),
    log2: V::T,
    /// The references before, and those that the usual rule gives.
    old: V,
    new: V,
    /// The largest scores.
    max: V,
}

impl<V: Vector> Recentre<V> {
    /// `x` where a reference is large, `y` elsewhere.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    unsafe fn if_large(&self, reference: V, x: V, y: V) -> V {
        // SAFETY: the contract.
        unsafe {
            let (zero, never) = (V::splat(V::T::ZERO), V::splat(V::T::NEG_INFINITY));
            let units = reference.mul(V::splat(self.log2));
            let size = V::max(units, zero.sub(units));
            V::gt(reference, never, V::gt(size, V::splat(V::T::WHOLE), x, y), y)
        }
    }
}

/// Scores lie within the panel.
impl<V: Vector> Routine<V> for Recentre<V> {
    /// The references, what is added to products of scores and `log2`, and the factors of the sums so far.
    type Output = (V, V, V);

    #[inline(always)]
    unsafe fn run(self) -> (V, V, V) {
        // SAFETY: the instruction set is present, and scores are those of the lanes (the contract).
        unsafe {
            let (zero, never) = (V::splat(V::T::ZERO), V::splat(V::T::NEG_INFINITY));
            let (log2, old) = (V::splat(self.log2), self.old);
            let new = self.if_large(self.new, V::gt(self.max, self.new, self.max, self.new), self.new);
            let origin = self.if_large(new, new, zero);
            let usual = zero.sub(V::gt(new, never, new.mul(log2), zero));
            let shift = self.if_large(new, zero, usual);
            // The distance of two references, of which either may be rounded.
            let to_large = self.if_large(old, old.sub(new).mul(log2), zero.sub(new).fma(log2, old.mul(log2)));
            let to_usual = self.if_large(old, old.fma(log2, usual), old.mul(log2).add(usual));
            let distance = self.if_large(new, to_large, to_usual);
            let factor = V::gt(new, old, distance.exp2(), V::splat(V::T::from_f64(1.0)));
            let (scores, apart, keys) = self.scores;
            for j in keys {
                let at = scores.add(j * apart);
                V::load(at).sub(origin).store(at);
            }
            (new, shift, factor)
        }
    }
}

/// `o[..dim][..width]` of a panel times `alpha` of each lane.
///
/// # Safety
/// The instruction set is present; `o` is `[dim][panel]`, `alpha` of `width`, a multiple of W.
#[inline(always)]
pub(crate) unsafe fn rescale<V: Vector>(o: *mut V::T, dim: usize, panel: usize, width: usize, alpha: *const V::T) {
    for d in 0..dim {
        for lane in (0..width).step_by(V::W) {
            // SAFETY: within o and alpha.
            unsafe {
                let at = o.add(d * panel + lane);
                V::load(at).mul(V::load(alpha.add(lane))).store(at);
            }
        }
    }
}
