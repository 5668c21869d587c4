// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is done to all lanes of a tile or of a panel at once, before products: functions for each type of vectors.

use super::bands::Limits;
use super::tile::{Lanes, SPAN, VisibleKeys};
use crate::call::RawTensor;
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::memory::arena::PANEL;
use crate::kernel::cpu::memory::rows::widen;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};

impl<A: Real> Lanes<'_, A> {
    /// Sets the positions that each lane sees.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn limit<V: Vector<T = A>>(&mut self, limits: &Limits) {
        // SAFETY: the contract.
        unsafe { V::call(SetLimits { lanes: self, limits }) }
    }

    /// Bounds of the positions that lanes `first..first + width` see.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn visible_keys<V: Vector<T = A>>(&self, first: usize, width: usize) -> VisibleKeys {
        // SAFETY: the contract.
        unsafe { V::call(Bounds { lanes: self, first, width }) }
    }

    /// Computes the positions of lanes `first..first + width` relative to `base`, for [`Scoring::apply`].
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn relate<V: Vector<T = A>>(
        &mut self,
        first: usize,
        width: usize,
        base: i64,
        masked: bool,
        alibi: bool,
    ) {
        if masked || alibi {
            // SAFETY: the contract.
            unsafe { V::call(Relate { lanes: self, first, width, base, masked, alibi }) }
        }
    }

    /// Packs a row of each lane of `lanes`, `ld` elements apart. Unused lanes get zeros.
    ///
    /// # Safety
    /// As [`Lanes::pack_transposed`].
    #[inline(always)]
    pub(crate) unsafe fn pack<V: Vector<T = A>>(
        &self,
        t: &RawTensor,
        dst: &mut [A],
        ld: usize,
        lanes: core::ops::Range<usize>,
    ) {
        // SAFETY: the contract.
        unsafe { V::call(Pack { of: self, t, dst, ld, lanes }) }
    }
}

/// [`Lanes::limit`].
struct SetLimits<'l, 'a, A> {
    lanes: &'l mut Lanes<'a, A>,
    limits: &'l Limits,
}

impl<V: Vector> Routine<V> for SetLimits<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let (n, lanes) = (self.lanes.n, self.lanes);
        for ((lo, hi), &pos) in lanes.lo[..n].iter_mut().zip(&mut lanes.hi[..n]).zip(&lanes.pos[..n]) {
            (*lo, *hi) = self.limits.keys(pos);
        }
        // Unused lanes of a panel see nothing.
        let end = n.next_multiple_of(PANEL).min(lanes.lo.len());
        lanes.lo[n..end].fill(i64::MAX);
        lanes.hi[n..end].fill(i64::MIN);
    }
}

/// [`Lanes::visible_keys`].
struct Bounds<'l, 'a, A> {
    lanes: &'l Lanes<'a, A>,
    first: usize,
    width: usize,
}

impl<V: Vector> Routine<V> for Bounds<'_, '_, V::T> {
    type Output = VisibleKeys;

    #[inline(always)]
    unsafe fn run(self) -> VisibleKeys {
        let Self { lanes, first, width } = self;
        let end = (first + width).min(lanes.n);
        let mut s = VisibleKeys { lo_min: i64::MAX, lo_max: i64::MIN, hi_min: i64::MAX, hi_max: i64::MIN };
        for (&l, &h) in lanes.lo[first..end].iter().zip(&lanes.hi[first..end]) {
            (s.lo_min, s.lo_max) = (s.lo_min.min(l), s.lo_max.max(l));
            (s.hi_min, s.hi_max) = (s.hi_min.min(h), s.hi_max.max(h));
        }
        s
    }
}

/// [`Lanes::relate`].
struct Relate<'l, 'a, A> {
    lanes: &'l mut Lanes<'a, A>,
    first: usize,
    width: usize,
    base: i64,
    masked: bool,
    alibi: bool,
}

impl<V: Vector> Routine<V> for Relate<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { lanes, first, width, base, masked, alibi } = self;
        let relative = |p: i64| V::T::from_f64(p.saturating_sub(base).clamp(-2 * SPAN, 2 * SPAN) as f64);
        if masked {
            for i in first..first + width {
                lanes.rel_lo[i] = relative(lanes.lo[i]);
                lanes.rel_hi[i] = relative(lanes.hi[i]);
            }
        }
        if alibi {
            for i in first..first + width {
                lanes.rel_pos[i] = V::T::from_f64(lanes.pos[i].saturating_sub(base) as f64);
            }
        }
    }
}

/// [`Lanes::pack`].
struct Pack<'l, 'a, A> {
    of: &'l Lanes<'a, A>,
    t: &'l RawTensor,
    dst: &'l mut [A],
    ld: usize,
    lanes: core::ops::Range<usize>,
}

impl<V: Vector> Routine<V> for Pack<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { of, t, dst, ld, lanes } = self;
        let dim = t.dim as usize;
        for (i, l) in lanes.enumerate() {
            let dst = &mut dst[i * ld..][..dim];
            if l < of.n {
                // SAFETY: the lane's row and head lie within `t` (the contract of `pack_transposed`).
                unsafe { widen(t, of.row[l], of.head[l], dst) };
            } else {
                dst.fill(V::T::ZERO);
            }
        }
    }
}
