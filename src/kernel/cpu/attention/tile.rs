// SPDX-License-Identifier: MIT OR Apache-2.0
//! q rows as lanes of vectors, and how their scores are computed.
//!
//! Scores are computed transposed, `[key][lane]`: a *lane* is one q row of one head, and a tile has up to 128 keys. The
//! softmax then needs no horizontal sum, k and v are used in the order that they have in memory, and the few rows of a
//! short document can share a tile with other heads of the same group.

use crate::call::{Range, RawTensor, Score};
use crate::kernel::cpu::memory::arena::{Arena, PANEL};
use crate::kernel::cpu::memory::panel::to_lanes;
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::simd::{Real, Vector};
use crate::kernel::merge::LogSumExp;

/// Positions that one tile of keys may span.
pub(crate) const SPAN: i64 = 1 << 22;

/// The address of element `[token, head, 0]`.
///
/// # Safety
/// The indices lie within the tensor, whose memory is valid.
#[inline(always)]
pub(crate) unsafe fn at<T>(t: &RawTensor, token: i64, head: u32) -> *mut T {
    let offset = token as isize * t.token_stride as isize + head as isize * t.head_stride as isize;
    // SAFETY: in bounds (the contract); offsets of valid tensors fit.
    unsafe { t.ptr.cast::<T>().offset(offset) }
}

/// The lanes of a tile: the q row and head of each, and the positions that it may see.
pub(crate) struct Lanes<'a, A> {
    pub n: usize,
    pub row: &'a mut [i64],
    pub head: &'a mut [u32],
    pub pos: &'a mut [i64],
    pub(super) lo: &'a mut [i64],
    pub(super) hi: &'a mut [i64],
    slope: &'a mut [A],
    pub(super) rel_lo: &'a mut [A],
    pub(super) rel_hi: &'a mut [A],
    pub(super) rel_pos: &'a mut [A],
}

/// Which (lane, key) pairs of a panel and some keys the mask allows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cover {
    /// No pair is allowed.
    None,
    /// Some pairs may be allowed.
    Some,
    /// All pairs are allowed.
    All,
}

/// For some lanes: bounds of the first position that a lane sees, and of the last one.
#[derive(Clone, Copy, Default)]
pub(crate) struct VisibleKeys {
    pub(super) lo_min: i64,
    pub(super) lo_max: i64,
    pub(super) hi_min: i64,
    pub(super) hi_max: i64,
}

impl VisibleKeys {
    /// The first and the last position that any of these lanes sees.
    #[inline(always)]
    pub(crate) fn span(&self) -> (i64, i64) {
        (self.lo_min, self.hi_max)
    }

    /// Which pairs of these lanes and of keys at positions `min..=max` are allowed; `None` if the interval is empty.
    #[inline(always)]
    pub(crate) fn cover(&self, min: i64, max: i64) -> Cover {
        if min > max || max < self.lo_min || min > self.hi_max {
            Cover::None
        } else if min >= self.lo_max && max <= self.hi_min {
            Cover::All
        } else {
            Cover::Some
        }
    }
}

impl<'a, A: Real> Lanes<'a, A> {
    pub(crate) fn new(arena: &mut Arena<'a>, capacity: usize) -> Self {
        Self {
            n: 0,
            row: arena.take(capacity),
            head: arena.take(capacity),
            pos: arena.take(capacity),
            lo: arena.take(capacity),
            hi: arena.take(capacity),
            slope: arena.zeros(capacity),
            rel_lo: arena.zeros(capacity),
            rel_hi: arena.zeros(capacity),
            rel_pos: arena.zeros(capacity),
        }
    }

    /// Rows `first..first + rows` of the range, for each head of `heads`. What they see is set by [`Lanes::limit`].
    ///
    /// # Safety
    /// `slopes` is NONE, or holds an f32 for each head: in one row, or in a row for each document.
    #[inline(never)]
    pub(crate) unsafe fn set(
        &mut self,
        range: &Range,
        first: u32,
        rows: u32,
        heads: core::ops::Range<u32>,
        slopes: &RawTensor,
    ) {
        let mut n = 0;
        let row = if slopes.tokens == 1 { 0 } else { i64::from(range.doc) };
        for head in heads {
            let mut slope = A::ZERO;
            if !slopes.is_none() {
                // SAFETY: `slopes` is not NONE (checked above), so it holds an f32 for each head, in one row or in one
                // of the range's document (the contract).
                slope = A::from_f64(unsafe { *at::<f32>(slopes, row, head) }.into());
            }
            for i in first..first + rows {
                let pos = range.position(i);
                self.row[n] = range.row + i64::from(i);
                self.head[n] = head;
                self.pos[n] = pos;
                self.slope[n] = slope;
                n += 1;
            }
        }
        self.n = n;
        let end = n.next_multiple_of(PANEL).min(self.lo.len());
        self.slope[n..end].fill(A::ZERO);
        self.pos[n..end].fill(0);
    }

    /// Packs a row of each lane transposed: element `d` of lane `l` to `[l / panel][d][l mod panel]`. Unused lanes get
    /// zeros. `rows` holds `V::W` rows.
    ///
    /// # Safety
    /// The lanes' rows and heads lie within `t`, whose memory is valid and whose sums are `A`s; the instruction set of
    /// `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn pack_transposed<V: Vector<T = A>>(
        &self,
        t: &RawTensor,
        dst: &mut [A],
        panel: usize,
        lanes: usize,
        rows: &mut [A],
    ) {
        let dim = t.dim as usize;
        for l in (0..lanes.next_multiple_of(panel)).step_by(V::W) {
            let panel_of = &mut dst[l / panel * panel * dim..][..panel * dim];
            // SAFETY: the lanes lie within `t`, and the instruction set of V is present (the contract).
            unsafe {
                self.pack::<V>(t, rows, dim, l..l + V::W);
                to_lanes::<V>(rows, dim, dim, panel_of, panel, l % panel);
            }
        }
    }

    /// One number of each lane from a `[tokens, heads, 1]` tensor; `otherwise` for unused lanes.
    ///
    /// # Safety
    /// As [`Lanes::pack_transposed`], with `A` the element type.
    #[inline(never)]
    pub(crate) unsafe fn gather(&self, t: &RawTensor, dst: &mut [A], otherwise: A) {
        for (l, d) in dst.iter_mut().enumerate() {
            // SAFETY: the lane's row and head lie within `t`, whose elements are `A`s (the contract).
            *d = if l < self.n { unsafe { *at::<A>(t, self.row[l], self.head[l]) } } else { otherwise };
        }
    }
}

/// How a score is computed from a product, in the accumulator's type.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<A> {
    pub scale: A,
    pub softcap: A,
    pub capped: bool,
    pub alibi: bool,
    /// Whether a score is its product times a positive factor. The softmax then applies the factor, and no pass over
    /// the scores is needed before it.
    pub plain: bool,
    /// Factor from scores (if plain, from products) to logarithms to the base 2.
    pub log2: A,
    /// Factor to natural logarithms.
    pub natural: f64,
}

impl<A: Real> Scoring<A> {
    pub(crate) fn new(score: &Score, slopes: &RawTensor) -> Self {
        let (capped, alibi) = (score.softcap != 0.0, !slopes.is_none());
        let factor = |natural: f64| A::from_f64(natural * core::f64::consts::LOG2_E);
        // A factor that is 0 or infinite in the type of the sums would make NaN of a masked score.
        let plain = !capped && !alibi && factor(score.scale) >= A::TINY && factor(score.scale) < -A::NEG_INFINITY;
        let natural = if plain { score.scale } else { 1.0 };
        Self {
            scale: A::from_f64(score.scale),
            softcap: A::from_f64(score.softcap),
            capped,
            alibi,
            plain,
            log2: factor(natural),
            natural,
        }
    }

    /// The natural logarithm of the sum of exponentials of a lane with reference `m` and sum `l`. Computed in f64, and
    /// corrected for the rounding of `m · log2` that is contained in l, so that its error does not grow with the
    /// scores. Large lanes have no such rounding (`softmax.rs`).
    pub(crate) fn lse(&self, m: A, l: A) -> LogSumExp<A> {
        let units = (m * self.log2).to_f64();
        let large = units.abs() > A::WHOLE.to_f64();
        let rounding = if large { 0.0 } else { m.to_f64() * self.log2.to_f64() - units };
        LogSumExp::sum(m.to_f64() * self.natural, l.to_f64().ln() - rounding * core::f64::consts::LN_2)
    }

    /// The final score of a score as the softmax has it: if plain, of a product.
    pub(crate) fn logit(&self, s: A) -> f32 {
        (s.to_f64() * self.natural) as f32
    }

    /// The scores of one key with the lanes at `lane`, and the derivative of the softcap.
    ///
    /// # Safety
    /// The instruction set is present, and [`Lanes::relate`] was called for `lane + W` lanes.
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Vector<T = A>>(
        &self,
        product: V,
        lanes: &Lanes<A>,
        lane: usize,
        key: A,
        masked: bool,
    ) -> (V, V) {
        debug_assert!(lane + V::W <= lanes.rel_lo.len());
        // SAFETY: the instruction set is present (the contract), and every array has room for `lane + W` lanes.
        unsafe {
            let one = V::splat(A::from_f64(1.0));
            let zero = V::splat(A::ZERO);
            let mut s = product.mul(V::splat(self.scale));
            let mut slope = one;
            if self.capped {
                let t = s.div(V::splat(self.softcap)).tanh();
                slope = zero.sub(t).fma(t, one);
                s = t.mul(V::splat(self.softcap));
            }
            if self.alibi {
                let x = V::load(lanes.rel_pos.as_ptr().add(lane)).sub(V::splat(key));
                let negative = zero.sub(x);
                let distance = V::gt(negative, zero, negative, x);
                s = zero.sub(distance).fma(V::load(lanes.slope.as_ptr().add(lane)), s);
            }
            (if masked { Self::mask(s, lanes, lane, key) } else { s }, slope)
        }
    }

    /// Sets the score to minus infinity in lanes that do not see the key.
    ///
    /// # Safety
    /// As [`Scoring::apply`].
    #[inline(always)]
    pub(crate) unsafe fn mask<V: Vector<T = A>>(s: V, lanes: &Lanes<A>, lane: usize, key: A) -> V {
        debug_assert!(lane + V::W <= lanes.rel_lo.len());
        // SAFETY: as above.
        unsafe {
            let (key, never) = (V::splat(key), V::splat(A::NEG_INFINITY));
            let s = V::gt(V::load(lanes.rel_lo.as_ptr().add(lane)), key, never, s);
            V::gt(key, V::load(lanes.rel_hi.as_ptr().add(lane)), never, s)
        }
    }
}

/// The inputs of the softmax of a panel of lanes with a tile of keys.
pub(crate) struct Scores<'a, A> {
    pub scoring: &'a Scoring<A>,
    pub lanes: &'a Lanes<'a, A>,
    /// The panel's first lane.
    pub first: usize,
    /// Positions of the keys, relative to the tile.
    pub keys: &'a [A],
    /// How much of each block of keys the panel sees.
    pub covers: &'a [Cover],
    /// Whether there are options, or numbers that may not be finite.
    pub careful: bool,
}

/// A product of an `m × kk` and a `kk × n` matrix, with A stored row by row; the caller fills in the pointers.
#[inline(always)]
pub(crate) fn product<A: Real>(m: usize, n: usize, kk: usize) -> Gemm<A> {
    Gemm {
        m,
        n,
        kk,
        a: core::ptr::null(),
        a_row: 0,
        a_col: 1,
        b: core::ptr::null(),
        ldb: 0,
        c: core::ptr::null_mut(),
        ldc: 0,
        store: Store::Set,
        skip: Skip::None,
    }
}
