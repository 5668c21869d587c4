// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single blocks of the backward pass on matrix units: p and ds of 32 keys with 32 lanes, rows packed in pairs, and
//! products of numbers that are not finite.

use super::super::backward::most_above;
use super::super::slots::BLOCK;
use super::super::tile::{Lanes, Scoring};
use crate::call::RawTensor;
use crate::kernel::cpu::memory::rows::address;
use crate::kernel::cpu::product::amx_product::{PANEL, TILE};
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::tile_engine::{HIGH, LOW};
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::arch::x86_64::*;

/// Lanes of a block of rows.
pub(crate) const ROWS: usize = 128;
/// Panels of a block of rows.
pub(crate) const PANELS: usize = ROWS / PANEL;

/// Where p and ds of a block of 32 keys with a panel are written.
pub(crate) struct GradientOutputs {
    pub p: *mut u16,
    pub ds: *mut u16,
    pub pairs: *mut u16,
}

/// The inputs of p and ds.
pub(crate) struct GradientInputs<'a> {
    pub scoring: &'a Scoring<f32>,
    pub lanes: &'a Lanes<'a, f32>,
    pub first: usize,
    pub rel: &'a [f32],
    pub s: *const f32,
    pub dp: *const f32,
    /// Logarithms to the base 2, less the shift.
    pub lse: *const f32,
    /// The logarithm to the base 2 of what p is multiplied by.
    pub shift: f32,
    /// −delta times the factor.
    pub delta: *const f32,
    pub factor: f32,
    pub masked: bool,
}

impl GradientInputs<'_> {
    /// # Safety
    /// AVX-512 with BW and BF16 is present; all are as large as their comments say.
    #[inline(always)]
    pub(crate) unsafe fn gradients<H: TileForm, const CAREFUL: bool, const MASKED: bool>(&self, out: &GradientOutputs) {
        // SAFETY: keys are within the block, lanes within the panel.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(LOW.as_ptr().cast()), _mm512_loadu_si512(HIGH.as_ptr().cast()));
            let mut j = 0;
            while j < BLOCK {
                let mut ds_rows = [[_mm512_setzero_si512(); 3]; 2];
                let mut u = 0;
                while u < 2 {
                    let mut p = [_mm512_setzero_ps(); 2];
                    let mut ds = [_mm512_setzero_ps(); 2];
                    let mut w = 0;
                    while w < 2 {
                        (p[w], ds[w]) = self.one::<CAREFUL, MASKED>(j + u, 16 * w);
                        w += 1;
                    }
                    ds_rows[u] = H::row(ds[0], ds[1]);
                    let p = H::row(p[0], p[1]);
                    let to = (j + u) / 16 * PANELS * H::PARTS * TILE + (j + u) % 16 * 32;
                    let mut part = 0;
                    while part < H::PARTS {
                        _mm512_storeu_si512(out.p.add(to + part * TILE).cast(), p[part]);
                        _mm512_storeu_si512(out.ds.add(to + part * TILE).cast(), ds_rows[u][part]);
                        part += 1;
                    }
                    u += 1;
                }
                let [a, b] = ds_rows;
                let mut part = 0;
                while part < H::PARTS {
                    let to = out.pairs.add(16 * j + part * TILE);
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(a[part], low, b[part]));
                    let upper = to.add(H::PARTS * TILE);
                    _mm512_storeu_si512(upper.cast(), _mm512_permutex2var_epi16(a[part], high, b[part]));
                    part += 1;
                }
                j += 2;
            }
        }
    }

    /// p, and ds without the factor of scores, of key `j` with 16 lanes.
    ///
    /// # Safety
    /// As [`Of::gradients`].
    #[inline(always)]
    unsafe fn one<const CAREFUL: bool, const MASKED: bool>(&self, j: usize, lane: usize) -> (__m512, __m512) {
        // SAFETY: `j` and `lane` are within the tiles, and AVX-512 is present (the contract of `Of::gradients`).
        unsafe {
            let mut s = <__m512 as Vector>::load(self.s.add(j * PANEL + lane));
            let dp = <__m512 as Vector>::load(self.dp.add(j * PANEL + lane));
            let (lse, delta) = (__m512::load(self.lse.add(lane)), __m512::load(self.delta.add(lane)));
            let zero = __m512::splat(0.0);
            let mut slope = __m512::splat(1.0);
            let lanes = self.first + lane;
            if CAREFUL && !self.scoring.plain {
                (s, slope) = self.scoring.apply(s, self.lanes, lanes, self.rel[j], self.masked);
            } else if MASKED && self.masked {
                s = Scoring::mask(s, self.lanes, lanes, self.rel[j]);
            }
            let mut x = s.fma(__m512::splat(self.scoring.log2), zero.sub(lse));
            if CAREFUL {
                let most = most_above(lse, __m512::splat(f32::INFINITY)).add(__m512::splat(self.shift));
                x = __m512::gt(x, most, most, x);
            }
            let p = x.exp2();
            let difference = dp.fma(__m512::splat(self.factor), delta);
            let ds = p.mul(difference);
            if !CAREFUL {
                return (p, ds);
            }
            // A masked key contributes nothing, even if a NaN is involved. The NaN of an unmasked key is kept (exp2 may
            // lose it).
            let p = __m512::gt(x, __m512::splat(<f32 as Real>::LOWEST), p, __m512::max(zero, x));
            let p = __m512::gt(__m512::splat(<f32 as Real>::LOWEST), s, zero, p);
            let ds = p.mul(difference).mul(slope);
            (p, __m512::gt(__m512::splat(<f32 as Real>::TINY), p, zero, ds))
        }
    }
}

/// Packs the lanes' rows as `[panel][dim / 16][16 pairs of lanes][16 dims][2]`, with zeros for numbers that are not
/// finite. Returns a bit for each lane that has such numbers, and the bits of the largest finite number.
///
/// # Safety
/// As [`AttentionEngine::queries`](crate::kernel::cpu::product::engine::AttentionEngine::queries).
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
#[inline(never)]
pub(crate) unsafe fn pack_pairs<H: TileForm>(lanes: &Lanes<f32>, t: &RawTensor, to: &mut [u16]) -> (u128, u16) {
    let dim = t.dim as usize;
    let deep = dim.next_multiple_of(32) / 16;
    let mut bad = 0;
    assert!(to.len() >= lanes.n.next_multiple_of(PANEL) * deep * 16 * H::PARTS && lanes.n <= ROWS);
    // SAFETY: lanes' rows are those of the tensor (the contract); tiles are within `to` (asserted).
    unsafe {
        let (low, high) = (_mm512_loadu_si512(LOW.as_ptr().cast()), _mm512_loadu_si512(HIGH.as_ptr().cast()));
        let mut largest = _mm512_setzero_si512();
        for pair in 0..lanes.n.next_multiple_of(PANEL) / 2 {
            for at in (0..dim).step_by(32) {
                let mut both = [[_mm512_setzero_si512(); 3]; 2];
                for (i, x) in both.iter_mut().enumerate() {
                    let lane = 2 * pair + i;
                    if lane < lanes.n {
                        *x = H::load(address(t, lanes.row[lane], lanes.head[lane]), at, dim);
                        let size = _mm512_and_si512(x[0], _mm512_set1_epi16(0x7fff));
                        let finite = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(H::INFINITY as i16));
                        if finite != u32::MAX {
                            for x in &mut x[..H::PARTS] {
                                *x = _mm512_maskz_mov_epi16(finite, *x);
                            }
                            bad |= 1 << lane;
                        }
                        if H::NARROW {
                            largest = _mm512_max_epu16(largest, _mm512_maskz_mov_epi16(finite, size));
                        }
                    }
                }
                let [a, b] = both;
                let to = to.as_mut_ptr().add((pair / 16 * deep + at / 16) * H::PARTS * TILE + pair % 16 * 32);
                for part in 0..H::PARTS {
                    let to = to.add(part * TILE);
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(a[part], low, b[part]));
                    let upper = to.add(H::PARTS * TILE);
                    _mm512_storeu_si512(upper.cast(), _mm512_permutex2var_epi16(a[part], high, b[part]));
                }
            }
        }
        let mut each = [0u16; 32];
        _mm512_storeu_si512(each.as_mut_ptr().cast(), largest);
        (bad, each.into_iter().fold(0, u16::max))
    }
}

/// `to[key][..] += weights[key][lane] · row[lane][..]` over the lanes `bad`, for the numbers of their rows that are not
/// finite (the packed rows have zeros there) and for weights other than 0.
///
/// # Safety
/// All are as large as for the product of `block` with the panels `panels`.
#[cold]
pub(crate) unsafe fn not_finite_lanes<H: TileForm>(
    lanes: &Lanes<f32>,
    t: &RawTensor,
    bad: u128,
    weights: &[u16],
    block: usize,
    panels: core::ops::Range<usize>,
    to: *mut f32,
    ld: usize,
) {
    let dim = t.dim as usize;
    for lane in (panels.start * PANEL..(panels.end * PANEL).min(lanes.n)).filter(|lane| bad >> lane & 1 == 1) {
        for key in 0..BLOCK {
            let tile = ((2 * block + key / 16) * PANELS + lane / PANEL) * H::PARTS;
            let at = key % 16 * 32 + lane % PANEL;
            let weight: f32 = (0..H::PARTS).map(|part| H::widen(weights[(tile + part) * TILE + at])).sum();
            if weight == 0.0 {
                continue;
            }
            // SAFETY: the lane's row is within `t`, and `to` has room for the product of `block` with `panels` (the
            // contract).
            let (row, to) = unsafe {
                let row = address(t, lanes.row[lane], lanes.head[lane]);
                (row, core::slice::from_raw_parts_mut(to.add(key * ld), dim))
            };
            for (d, to) in to.iter_mut().enumerate() {
                // SAFETY: as above.
                let x = unsafe { H::read(row.add(d * H::SIZE)) };
                if !H::in_exact_range(x) {
                    *to += weight * x;
                }
            }
        }
    }
}
