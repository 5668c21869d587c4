// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared by both backward passes: p and ds from scores and `do·v`, sums in two stages, and clearing of dq.
//!
//! `p = exp(s − lse)`, `ds = p · (do·v − delta)`, times the derivative of the softcap and the scale (Dao et al.,
//! FlashAttention, 2022). The queries' pass loops over rows, inside over keys, and writes dq; the keys' pass loops over
//! keys, inside over rows, and writes dk and dv. If all three are wanted the keys' pass adds to dq too, which saves
//! computing the scores twice; not in aligned calls, which keep the order of the separate passes.
//!
//! Sums over a long document are kept in two stages, a run of at most [`FLUSH`] positions and the total, so that their
//! rounding error grows with the square root of the run and not of the document. In an aligned call
//! runs end at positions that are multiples of [`FLUSH`], and where the band or the document changes.

use super::slots::Slots;
use super::tile::{Cover, Lanes, Scoring, at};
use crate::call::{AttendBackward, RawTensor};
use crate::element::{Accumulator, Dtype};
use crate::kernel::cpu::memory::convert::runs::sum;
use crate::kernel::cpu::memory::convert::{Convert, VectorLoop, on_best, streams};
use crate::kernel::cpu::memory::rows::address;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::ops::Range;

/// Positions (or rows, where a call is not aligned) in the first stage of a sum; a multiple of a tile's keys.
pub(crate) const FLUSH: i64 = 512;

/// When the first stage of a sum is added to the total.
pub(crate) struct Flush {
    aligned: bool,
    /// The contents of the first stage, if anything was added: in an aligned call the band, the document and the index
    /// of a run of [`FLUSH`] positions, otherwise the number of rows.
    run: Option<((u32, u32), i64)>,
}

impl Flush {
    pub(crate) fn new(aligned: bool) -> Self {
        Self { aligned, run: None }
    }

    /// Whether to flush before adding `count` rows from position `pos` on, under this band and of this document.
    #[inline(always)]
    pub(crate) fn before(&mut self, of: (u32, u32), pos: i64, count: usize) -> bool {
        let old = self.run;
        if self.aligned {
            self.run = Some((of, pos.div_euclid(FLUSH)));
            old.is_some() && old != self.run
        } else {
            let run = old.map_or(0, |(_, run)| run);
            let flush = run >= FLUSH;
            self.run = Some(((0, 0), if flush { 0 } else { run } + count as i64));
            flush
        }
    }
}

/// `total += part; part = 0`.
#[inline(always)]
pub(crate) fn flush<A: Real>(total: &mut [A], part: &mut [A]) {
    for (t, p) in total.iter_mut().zip(part) {
        *t = *t + *p;
        *p = A::ZERO;
    }
}

/// Sets the rows of dq to 0 that units will add to, except those that already hold a value.
///
/// # Safety
/// The rows of the q ranges lie within dq, whose elements are `A`s and which nothing else accesses.
pub(crate) unsafe fn clear_queries<A: Real>(call: &AttendBackward) {
    let ranges = call.ranges.q.iter().filter(|q| !q.mode.continues()).map(|q| q.range);
    let rows = ranges.clone().flat_map(|range| (0..i64::from(range.len)).map(move |i| range.row + i));
    let places = rows.flat_map(|row| (0..call.q.heads).map(move |head| (row, head)));
    if A::DTYPE == Dtype::F32 && streams(&call.dq, ranges.map(|range| u64::from(range.len)).sum()) {
        // SAFETY: rows and heads lie within dq, whose elements are f32 (the contract).
        return unsafe { on_best(&Zeros { dq: &call.dq, places }) };
    }
    for (row, head) in places {
        // SAFETY: as above, of elements that are `A`s.
        unsafe { core::slice::from_raw_parts_mut(at::<A>(&call.dq, row, head), call.dq.dim as usize) }.fill(A::ZERO);
    }
}

/// Sets rows to 0 with stores past the caches.
struct Zeros<'a, I> {
    dq: &'a RawTensor,
    /// Rows and heads.
    places: I,
}

impl<I: Iterator<Item = (i64, u32)> + Clone> VectorLoop for Zeros<'_, I> {
    #[inline(always)]
    unsafe fn run<V: Convert>(&self) {
        for (row, head) in self.places.clone() {
            // SAFETY: the row lies within dq, of f32, and nothing else accesses it (the contract of `clear_queries`).
            unsafe {
                let to = (address(self.dq, row, head), Dtype::F32);
                sum::<V>(to, core::iter::empty(), self.dq.dim as usize, true);
            }
        }
        // SAFETY: the instruction set of V is present (the contract).
        unsafe { V::finished() };
    }
}

/// The keys of a tile that any of lanes `first..first + width` sees, and whether pairs of them are masked. Prepares the
/// lanes for [`gradients`].
///
/// # Safety
/// The instruction set of `V` is present.
#[inline(always)]
pub(crate) unsafe fn visible_keys<'a, V: Vector>(
    lanes: &mut Lanes<'a, V::T>,
    first: usize,
    width: usize,
    keys: &Slots<'a, V::T>,
    alibi: bool,
) -> Option<(Range<usize>, bool)> {
    // SAFETY: the contract.
    unsafe { V::call(Visible { lanes, first, width, keys, alibi }) }
}

/// [`visible_keys`].
struct Visible<'v, 'a, A> {
    lanes: &'v mut Lanes<'a, A>,
    first: usize,
    width: usize,
    keys: &'v Slots<'a, A>,
    alibi: bool,
}

impl<V: Vector> Routine<V> for Visible<'_, '_, V::T> {
    type Output = Option<(Range<usize>, bool)>;

    #[inline(always)]
    unsafe fn run(self) -> Self::Output {
        let Self { lanes, first, width, keys, alibi } = self;
        // SAFETY: the instruction set is present (the contract), here and below.
        let visible = unsafe { lanes.visible_keys::<V>(first, width) };
        let cover = visible.cover(keys.min, keys.max);
        if cover == Cover::None {
            return None;
        }
        let masked = cover == Cover::Some;
        // SAFETY: as above.
        unsafe { lanes.relate::<V>(first, width, keys.base, masked, alibi) };
        let all = 0..keys.n;
        Some((if masked { keys.seen(all, 2, visible.span()) } else { all }, masked))
    }
}

/// One vector of lanes against all keys of a tile, in place: `s` from products to p, `dp` from `do·v` to ds.
///
/// # Safety
/// The instruction set is present; `s` and `dp` are `[keys, ≥ W]`, `ld` apart; `lse` and `delta` are of W.
#[inline(always)]
pub(crate) unsafe fn gradients<V: Vector>(
    scoring: &Scoring<V::T>,
    lanes: &Lanes<V::T>,
    lane: usize,
    keys: &[V::T],
    valid: impl Fn(usize) -> bool,
    masked: bool,
    s: *mut V::T,
    dp: *mut V::T,
    ld: usize,
    lse: *const V::T,
    delta: *const V::T,
) {
    // SAFETY: `j < keys.len()`, and `s`, `dp`, `lse` and `delta` are as long as the contract says.
    unsafe {
        let zero = V::splat(V::T::ZERO);
        let tiny = V::splat(V::T::TINY);
        let (lse, delta) = (V::load(lse), V::load(delta));
        let most = most_above(lse, V::splat(-V::T::NEG_INFINITY));
        for (j, &key) in keys.iter().enumerate() {
            let (s, dp) = (s.add(j * ld), dp.add(j * ld));
            if !valid(j) {
                zero.store(s);
                zero.store(dp);
                continue;
            }
            let (score, slope) = scoring.apply(V::load(s), lanes, lane, key, masked);
            let above = score.sub(lse);
            let mut p = V::gt(above, most, most, above).exp();
            if masked {
                // Masked keys get p = 0 even if lse is NaN; a NaN reaches only keys that the row sees.
                p = V::gt(V::splat(V::T::LOWEST), score, zero, p);
            }
            let ds = p.mul(V::load(dp).sub(delta)).mul(slope).mul(V::splat(scoring.scale));
            p.store(s);
            // A key with p = 0 must not contribute, even if its k or v is NaN: 0 · NaN would be NaN.
            V::gt(tiny, p, zero, ds).store(dp);
        }
    }
}

/// The most that a score may exceed its lse by. No key has more weight than 1, but an lse of the caller's may be that
/// of some keys only. From [`Real::WHOLE`] on it is rounded by more than the logarithm of any sum, and so p would be
/// any number up to infinity: 0 there, `otherwise` for other lanes.
///
/// # Safety
/// The instruction set of `V` is present.
#[inline(always)]
pub(crate) unsafe fn most_above<V: Vector>(lse: V, otherwise: V) -> V {
    // SAFETY: the contract.
    unsafe {
        let zero = V::splat(V::T::ZERO);
        V::gt(V::max(lse, zero.sub(lse)), V::splat(V::T::WHOLE), zero, otherwise)
    }
}

/// Replaces an lse of −∞ by +∞, which makes every p 0: for rows that attended to nothing, and for unused lanes.
#[inline(always)]
pub(crate) fn no_row<A: Real>(lse: &mut [A]) {
    for x in lse {
        if *x == A::NEG_INFINITY {
            *x = -A::NEG_INFINITY;
        }
    }
}
