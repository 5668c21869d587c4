// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vectors of NEON, which every AArch64 has.
//!
//! A vector of the kernels is two registers. The register block of the matrix product, six rows by two vectors, then
//! has its sums in 24 of the 32 registers: 24 multiply-adds for ten loads, and enough independent sums to hide their
//! latency.

#![allow(unused_unsafe, reason = "newer compilers take these intrinsics for safe where the target has NEON")]

use super::routine::Routine;
use super::simd::Vector;
use crate::kernel::cpu::product::Gemm;
use crate::kernel::cpu::product::gemm::gemm;
use core::arch::aarch64::*;

/// Eight f32.
#[derive(Clone, Copy)]
pub(crate) struct Floats(pub [float32x4_t; 2]);

/// Four f64.
#[derive(Clone, Copy)]
pub(crate) struct Doubles(pub [float64x2_t; 2]);

macro_rules! vector {
    ($v:ident, $t:ty, $w:literal,
     $splat:ident $load:ident $store:ident $add:ident $sub:ident $mul:ident $div:ident $fma:ident
     $gt:ident $select:ident $bits:ident; $($own:tt)*) => {
        impl Vector for $v {
            type T = $t;
            const W: usize = $w;
            const MR: usize = 6;
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                // SAFETY: NEON is part of the target.
                unsafe { Self([$splat(x); 2]) }
            }
            #[inline(always)]
            unsafe fn load(p: *const $t) -> Self {
                // SAFETY: `p` is to W elements.
                unsafe { Self([$load(p), $load(p.add($w / 2))]) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $t) {
                // SAFETY: `p` is to W elements.
                unsafe {
                    $store(p, self.0[0]);
                    $store(p.add($w / 2), self.0[1]);
                }
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe { Self([$add(self.0[0], b.0[0]), $add(self.0[1], b.0[1])]) }
            }
            #[inline(always)]
            unsafe fn sub(self, b: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe { Self([$sub(self.0[0], b.0[0]), $sub(self.0[1], b.0[1])]) }
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe { Self([$mul(self.0[0], b.0[0]), $mul(self.0[1], b.0[1])]) }
            }
            #[inline(always)]
            unsafe fn div(self, b: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe { Self([$div(self.0[0], b.0[0]), $div(self.0[1], b.0[1])]) }
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe { Self([$fma(c.0[0], self.0[0], b.0[0]), $fma(c.0[1], self.0[1], b.0[1])]) }
            }
            #[inline(always)]
            unsafe fn any_gt(a: Self, b: Self) -> bool {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe {
                    let both = [$gt(a.0[0], b.0[0]), $gt(a.0[1], b.0[1])];
                    both.into_iter().any(|lanes| vmaxvq_u32($bits(lanes)) != 0)
                }
            }
            #[inline(always)]
            unsafe fn gt(a: Self, b: Self, x: Self, y: Self) -> Self {
                // SAFETY: NEON is part of the target; registers alone.
                unsafe {
                    Self([0, 1].map(|i| $select($gt(a.0[i], b.0[i]), x.0[i], y.0[i])))
                }
            }
            unsafe fn gemm(g: &Gemm<$t>) {
                // SAFETY: the panels are as `Gemm` says (the contract of `gemm`).
                unsafe { gemm::<Self>(g) }
            }
            #[inline(always)]
            unsafe fn call<R: Routine<Self>>(routine: R) -> R::Output {
                // SAFETY: the contract of `Vector`.
                unsafe { routine.plain() }
            }
            $($own)*
        }
    };
}

vector!(Floats, f32, 8,
    vdupq_n_f32 vld1q_f32 vst1q_f32 vaddq_f32 vsubq_f32 vmulq_f32 vdivq_f32 vfmaq_f32 vcgtq_f32 vbslq_f32 words_f32;
    #[inline(always)]
    unsafe fn pow2(p: Self, t: Self) -> Self {
        // SAFETY: NEON is part of the target.
        unsafe {
            Self([0, 1].map(|i| {
                let n = vshlq_n_u32::<23>(vreinterpretq_u32_f32(t.0[i]));
                vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p.0[i]), n))
            }))
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
        // SAFETY: the contract of `Vector`.
        unsafe { transpose8(from, ld, to, to_ld) }
    }
);
vector!(Doubles, f64, 4,
    vdupq_n_f64 vld1q_f64 vst1q_f64 vaddq_f64 vsubq_f64 vmulq_f64 vdivq_f64 vfmaq_f64 vcgtq_f64 vbslq_f64 words_f64;);

/// A comparison's lanes, for [`vmaxvq_u32`].
#[inline(always)]
fn words_f32(lanes: uint32x4_t) -> uint32x4_t {
    lanes
}

/// As [`words_f32`].
#[inline(always)]
fn words_f64(lanes: uint64x2_t) -> uint32x4_t {
    // SAFETY: NEON is part of the target.
    unsafe { vreinterpretq_u32_u64(lanes) }
}

/// `[4][4]` f32, transposed.
#[inline(always)]
unsafe fn transpose4(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: NEON is part of the target.
    unsafe {
        // Pairs of rows, element by element, and then pairs of pairs.
        let low = [vzip1q_f32(rows[0], rows[2]), vzip1q_f32(rows[1], rows[3])];
        let high = [vzip2q_f32(rows[0], rows[2]), vzip2q_f32(rows[1], rows[3])];
        [
            vzip1q_f32(low[0], low[1]),
            vzip2q_f32(low[0], low[1]),
            vzip1q_f32(high[0], high[1]),
            vzip2q_f32(high[0], high[1]),
        ]
    }
}

/// `[8][8]` f32, transposed as four blocks of four by four.
///
/// # Safety
/// `from` and `to` are valid for 8 rows of 8, `ld` and `to_ld` apart, and do not overlap.
#[inline(always)]
unsafe fn transpose8(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
    for (i, j) in [(0, 0), (0, 4), (4, 0), (4, 4)] {
        // SAFETY: rows i to i + 4 and columns j to j + 4 lie within 8 by 8.
        unsafe {
            let block = transpose4([0, 1, 2, 3].map(|r| vld1q_f32(from.add((i + r) * ld + j))));
            for (r, row) in block.into_iter().enumerate() {
                vst1q_f32(to.add((j + r) * to_ld + i), row);
            }
        }
    }
}
