// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tiles: keys as a stream cut to tiles, q rows as lanes of vectors.
//!
//! Scores are computed transposed, keys by lanes: a *lane* is one q row of one head, a tile has up to 128 keys by some
//! lanes. So softmax runs down the lanes without a horizontal sum, k and v are used as they lie in memory, and the few
//! rows of a short document can share a tile with other heads of the same group.
//!
//! Positions enter a tile as numbers of the accumulator's type relative to a base: exact in f32 as long as no tile
//! spans more than [`SPAN`] positions, which is why a stream also breaks tiles there.

use super::gemm::{Gemm, Skip};
use super::scratch::{Arena, KEYS, vectors};
use super::simd::{Real, Vector};
use crate::element::{Accumulator, Dtype, Element};
use crate::kernel::{Range, RawTensor, Score};
use half::slice::HalfFloatSliceExt;

/// Positions that one tile of keys may span.
const SPAN: i64 = 1 << 22;

/// How many rows of the range lie before position `pos`.
#[inline]
pub(super) fn rows_before(range: &Range, pos: i64) -> u32 {
    if pos <= range.pos {
        return 0;
    }
    // Saturates where the window is unlimited; the quotient is then beyond `len` all the same.
    let d = pos.saturating_sub(range.pos);
    if range.is_plain() {
        return d.min(i64::from(range.len)) as u32;
    }
    let (block, period) = (i64::from(range.block), i64::from(range.period));
    let full = d / period;
    if full >= i64::from(range.len) {
        return range.len;
    }
    (full * block + (d % period).min(block)).min(i64::from(range.len)) as u32
}

/// The address of element `[token, head, 0]`.
///
/// # Safety
/// The indices lie within the tensor, whose memory is valid.
#[inline(always)]
pub(super) unsafe fn at<T>(t: &RawTensor, token: i64, head: u32) -> *mut T {
    let offset = token as isize * t.token_stride as isize + head as isize * t.head_stride as isize;
    // SAFETY: in bounds, the caller says; offsets of valid tensors fit.
    unsafe { t.ptr.cast::<T>().offset(offset) }
}

/// Widens `dst.len()` elements.
///
/// # Safety
/// `src` is valid for reads of as many.
#[inline(always)]
pub(super) unsafe fn widen<E: Element>(src: *const E, dst: &mut [E::Acc]) {
    // SAFETY: the caller's promise.
    let src = unsafe { core::slice::from_raw_parts(src, dst.len()) };
    if E::DTYPE == Dtype::F16 {
        bytemuck::cast_slice::<E, half::f16>(src).convert_to_f32_slice(bytemuck::cast_slice_mut(dst));
    } else {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = s.widen();
        }
    }
}

/// Rounds `src.len()` elements.
///
/// # Safety
/// `dst` is valid for writes of as many, and is not `src`.
#[inline(always)]
pub(super) unsafe fn narrow<E: Element>(src: &[E::Acc], dst: *mut E) {
    for (i, &x) in src.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { dst.add(i).write(E::narrow(x)) };
    }
}

/// Whether a NaN or an infinity is among `n` numbers (whole vectors).
///
/// # Safety
/// The instruction set of `V` is present; `p` is valid for reads of `n`.
#[inline(always)]
pub(super) unsafe fn any_non_finite<V: Vector>(p: *const V::T, n: usize) -> bool {
    let mut out = [V::T::ZERO; 16];
    // SAFETY: `i + W ≤ n`; `out` has room for the widest vector.
    unsafe {
        let zero = V::splat(V::T::ZERO);
        let mut acc = zero;
        let mut i = 0;
        while i < n {
            acc = V::load(p.add(i)).fma(zero, acc);
            i += V::W;
        }
        acc.store(out.as_mut_ptr());
    }
    !out[..V::W].iter().all(|&x| x == V::T::ZERO)
}

/// Some rows of one range, on their way into a tile.
pub(super) struct Run {
    /// Where in the tile.
    slot: usize,
    /// Index of the range.
    index: u32,
    range: Range,
    /// First row, within the range.
    first: u32,
    /// Rows.
    count: u32,
    /// Base of the tile's positions.
    base: i64,
}

/// The k ranges still to come.
enum Rest<'a> {
    /// Indices into the k ranges.
    Pairs(&'a [u32]),
    /// Those of a document, from an index on.
    Document { doc: u32, from: u32 },
}

/// The keys that some q rows attend to: k ranges in order, cut to the positions `lo..=hi`.
pub(super) struct Stream<'a> {
    k: &'a [Range],
    rest: Rest<'a>,
    /// Index of the range in hand.
    index: u32,
    current: Range,
    at: u32,
    stop: u32,
    lo: i64,
    hi: i64,
}

impl<'a> Stream<'a> {
    pub(super) fn new(k: &'a [Range], pairs: &'a [u32], lo: i64, hi: i64) -> Self {
        Self { k, rest: Rest::Pairs(pairs), index: 0, current: Range::plain(0, 0, 0, 0), at: 0, stop: 0, lo, hi }
    }

    /// All keys of the document of k range `first`, from that range on.
    pub(super) fn document(k: &'a [Range], first: usize) -> Self {
        let rest = Rest::Document { doc: k[first].doc, from: first as u32 };
        Self { rest, ..Self::new(k, &[], i64::MIN, i64::MAX) }
    }

    fn next_range(&mut self) -> Option<u32> {
        match &mut self.rest {
            Rest::Pairs(pairs) => {
                let (&index, rest) = pairs.split_first()?;
                *pairs = rest;
                Some(index)
            }
            Rest::Document { doc, from } => {
                let ahead = self.k[*from as usize..].iter().position(|r| r.doc == *doc)?;
                *from += ahead as u32 + 1;
                Some(*from - 1)
            }
        }
    }

    /// Hands the rows of the next tile to `run`, and returns their number and the base of their positions.
    #[inline(always)]
    pub(super) fn fill(&mut self, aligned: bool, mut run: impl FnMut(Run)) -> (usize, i64) {
        let (mut n, mut base, keys) = (0, 0, KEYS as i64);
        loop {
            if self.at >= self.stop {
                let Some(index) = self.next_range() else { break };
                self.index = index;
                self.current = self.k[index as usize];
                self.at = rows_before(&self.current, self.lo);
                self.stop =
                    if self.hi == i64::MAX { self.current.len } else { rows_before(&self.current, self.hi + 1) };
                continue;
            }
            let pos = self.current.position(self.at);
            if n == 0 {
                base = if aligned { pos.div_euclid(keys) * keys } else { pos };
            }
            let (first, end) = if aligned { (base, base + keys) } else { (base - SPAN, base + SPAN) };
            if pos < first || pos >= end {
                break;
            }
            let near = rows_before(&self.current, end).min(self.stop) - self.at;
            let take = near.min((KEYS - n) as u32);
            run(Run { slot: n, index: self.index, range: self.current, first: self.at, count: take, base });
            self.at += take;
            n += take as usize;
            if n == KEYS {
                break;
            }
        }
        (n, base)
    }
}

/// A tile of keys: k and v widened, rows padded with zeros to whole vectors.
pub(super) struct KeyTile<'a, A> {
    pub k: &'a mut [A],
    pub v: &'a mut [A],
    pub ldk: usize,
    pub ldv: usize,
    /// Positions relative to the base.
    pub rel: &'a mut [A],
    /// The k range of each key.
    pub index: &'a mut [u32],
    /// The row of each key in k and v.
    pub row: &'a mut [i64],
    pub n: usize,
    pub base: i64,
    pub min: i64,
    pub max: i64,
}

impl<'a, A: Real> KeyTile<'a, A> {
    pub(super) fn new<V: Vector<T = A>>(arena: &mut Arena<'a>, d: usize, dv: usize) -> Self {
        let (ldk, ldv) = (vectors::<V>(d), vectors::<V>(dv));
        Self {
            k: arena.zeros(KEYS * ldk),
            v: arena.zeros(KEYS * ldv),
            ldk,
            ldv,
            rel: arena.zeros(KEYS),
            index: arena.take(KEYS),
            row: arena.take(KEYS),
            n: 0,
            base: 0,
            min: 0,
            max: 0,
        }
    }

    /// Takes the next tile of the stream; false when there is none.
    ///
    /// # Safety
    /// The stream's rows and `head` lie within `k` and `v`, of element type `E`, whose memory is valid.
    #[inline(always)]
    pub(super) unsafe fn next<E: Element<Acc = A>>(
        &mut self,
        stream: &mut Stream,
        aligned: bool,
        k: &RawTensor,
        v: &RawTensor,
        head: u32,
    ) -> bool {
        let (d, dv) = (k.dim as usize, v.dim as usize);
        self.min = i64::MAX;
        self.max = i64::MIN;
        (self.n, self.base) = stream.fill(aligned, |run| {
            let range = &run.range;
            self.min = self.min.min(range.position(run.first));
            self.max = self.max.max(range.position(run.first + run.count - 1));
            for i in 0..run.count {
                let (s, row) = (run.slot + i as usize, range.row + i64::from(run.first + i));
                // SAFETY: the rows lie within the tensors, the caller says.
                unsafe {
                    widen::<E>(at(k, row, head), &mut self.k[s * self.ldk..][..d]);
                    widen::<E>(at(v, row, head), &mut self.v[s * self.ldv..][..dv]);
                }
                self.index[s] = run.index;
                self.row[s] = row;
                self.rel[s] = A::from_f64((range.position(run.first + i) - run.base) as f64);
            }
        });
        self.n > 0
    }
}

/// The lanes of a tile: which q row and head each is, and which positions it may see.
pub(super) struct Lanes<'a, A> {
    pub n: usize,
    pub row: &'a mut [i64],
    pub head: &'a mut [u32],
    pub pos: &'a mut [i64],
    lo: &'a mut [i64],
    hi: &'a mut [i64],
    slope: &'a mut [A],
    rel_lo: &'a mut [A],
    rel_hi: &'a mut [A],
    rel_pos: &'a mut [A],
}

/// What a tile of keys is to a panel of lanes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cover {
    /// No pair is allowed.
    None,
    /// Some may be.
    Some,
    /// All are.
    All,
}

impl<'a, A: Real> Lanes<'a, A> {
    pub(super) fn new(arena: &mut Arena<'a>, capacity: usize) -> Self {
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

    /// Rows `first..first + rows` of the range, for each head of `heads`. Returns the positions that any of them sees.
    ///
    /// # Safety
    /// `slopes` is NONE, or holds an f32 for each head.
    #[inline(always)]
    pub(super) unsafe fn set(
        &mut self,
        range: &Range,
        first: u32,
        rows: u32,
        heads: core::ops::Range<u32>,
        score: &Score,
        slopes: &RawTensor,
    ) -> (i64, i64) {
        let mut n = 0;
        for head in heads {
            let mut slope = A::ZERO;
            if !slopes.is_none() {
                // SAFETY: the caller's promise.
                slope = A::from_f64(unsafe { *at::<f32>(slopes, 0, head) }.into());
            }
            for i in first..first + rows {
                let pos = range.position(i);
                self.row[n] = range.row + i64::from(i);
                self.head[n] = head;
                self.pos[n] = pos;
                self.lo[n] = pos.saturating_sub(score.window_left);
                self.hi[n] = pos.saturating_add(score.window_right);
                self.slope[n] = slope;
                n += 1;
            }
        }
        self.n = n;
        // Lanes that only fill up a vector see nothing.
        self.lo[n..].fill(i64::MAX);
        self.hi[n..].fill(i64::MIN);
        self.slope[n..].fill(A::ZERO);
        self.pos[n..].fill(0);
        // Positions grow along a range, so its ends bound them.
        (self.lo[0], self.hi[n - 1])
    }

    /// What the keys `tile` are to lanes `first..first + width`, whose relative positions are made ready.
    #[inline(always)]
    pub(super) fn meet(&mut self, first: usize, width: usize, min: i64, max: i64, base: i64, alibi: bool) -> Cover {
        let end = (first + width).min(self.n);
        let (lo, hi) = (&self.lo[first..end], &self.hi[first..end]);
        let (mut lo_min, mut lo_max, mut hi_min, mut hi_max) = (i64::MAX, i64::MIN, i64::MAX, i64::MIN);
        for (&l, &h) in lo.iter().zip(hi) {
            (lo_min, lo_max) = (lo_min.min(l), lo_max.max(l));
            (hi_min, hi_max) = (hi_min.min(h), hi_max.max(h));
        }
        if max < lo_min || min > hi_max {
            return Cover::None;
        }
        let all = min >= lo_max && max <= hi_min;
        let relative = |p: i64| A::from_f64(p.saturating_sub(base).clamp(-2 * SPAN, 2 * SPAN) as f64);
        if !all {
            for i in first..first + width {
                self.rel_lo[i] = relative(self.lo[i]);
                self.rel_hi[i] = relative(self.hi[i]);
            }
        }
        if alibi {
            for i in first..first + width {
                self.rel_pos[i] = A::from_f64(self.pos[i].saturating_sub(base) as f64);
            }
        }
        if all { Cover::All } else { Cover::Some }
    }

    /// Packs a row of each lane transposed: element `d` of lane `l` to `[l / panel][d][l mod panel]`. Lanes that only
    /// fill up get zeros.
    ///
    /// # Safety
    /// The lanes' rows and heads lie within `t`, of type `E`, whose memory is valid.
    #[inline(always)]
    pub(super) unsafe fn pack_transposed<E: Element<Acc = A>>(
        &self,
        t: &RawTensor,
        dst: &mut [A],
        panel: usize,
        lanes: usize,
        row: &mut [A],
    ) {
        let dim = t.dim as usize;
        for l in 0..lanes.next_multiple_of(panel) {
            let dst = &mut dst[l / panel * panel * dim..][..panel * dim];
            let row = &mut row[..dim];
            if l < self.n {
                // SAFETY: the caller's promise.
                unsafe { widen::<E>(at(t, self.row[l], self.head[l]), row) };
            } else {
                row.fill(A::ZERO);
            }
            for (d, &x) in dst.chunks_exact_mut(panel).zip(row.iter()) {
                d[l % panel] = x;
            }
        }
    }

    /// Packs a row of each lane as it is, `ld` apart. Lanes that only fill up get zeros.
    ///
    /// # Safety
    /// As [`Lanes::pack_transposed`].
    #[inline(always)]
    pub(super) unsafe fn pack<E: Element<Acc = A>>(&self, t: &RawTensor, dst: &mut [A], ld: usize, lanes: usize) {
        let dim = t.dim as usize;
        for l in 0..lanes {
            let dst = &mut dst[l * ld..][..dim];
            if l < self.n {
                // SAFETY: the caller's promise.
                unsafe { widen::<E>(at(t, self.row[l], self.head[l]), dst) };
            } else {
                dst.fill(A::ZERO);
            }
        }
    }

    /// One number of each lane from a `[tokens, heads, 1]` tensor; `otherwise` for lanes that only fill up.
    ///
    /// # Safety
    /// As [`Lanes::pack_transposed`], with `A` the element type.
    #[inline(always)]
    pub(super) unsafe fn gather(&self, t: &RawTensor, dst: &mut [A], otherwise: A) {
        for (l, d) in dst.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *d = if l < self.n { unsafe { *at::<A>(t, self.row[l], self.head[l]) } } else { otherwise };
        }
    }
}

/// How a score is made of a product, in the accumulator's type.
#[derive(Clone, Copy)]
pub(super) struct Scoring<A> {
    pub scale: A,
    pub softcap: A,
    pub capped: bool,
    pub alibi: bool,
}

impl<A: Real> Scoring<A> {
    pub(super) fn new(score: &Score, slopes: &RawTensor) -> Self {
        Self {
            scale: A::from_f64(score.scale),
            softcap: A::from_f64(score.softcap),
            capped: score.softcap != 0.0,
            alibi: !slopes.is_none(),
        }
    }

    /// The scores of one key with the lanes at `lane`: before the mask, and the derivative of the softcap.
    ///
    /// # Safety
    /// The instruction set is present; `lane + W` lanes are ready (see [`Lanes::meet`]).
    #[inline(always)]
    pub(super) unsafe fn apply<V: Vector<T = A>>(
        &self,
        product: V,
        lanes: &Lanes<A>,
        lane: usize,
        key: A,
        masked: bool,
    ) -> (V, V) {
        debug_assert!(lane + V::W <= lanes.rel_lo.len());
        // SAFETY: the caller's promise; the arrays of a `Lanes` all have its capacity.
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
            if masked {
                let (key, never) = (V::splat(key), V::splat(A::NEG_INFINITY));
                s = V::gt(V::load(lanes.rel_lo.as_ptr().add(lane)), key, never, s);
                s = V::gt(key, V::load(lanes.rel_hi.as_ptr().add(lane)), never, s);
            }
            (s, slope)
        }
    }
}

/// A product with A row by row.
#[inline(always)]
pub(super) fn product<A: Real>(m: usize, n: usize, kk: usize) -> Gemm<A> {
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
        store: super::gemm::Store::Set,
        factor: core::ptr::null(),
        skip: Skip::None,
    }
}
