// SPDX-License-Identifier: MIT OR Apache-2.0
//! The half-precision types of matrix units.

use super::amx_product::{Product, product_bf16, product_f16, step_bf16, step_f16};
use core::arch::x86_64::*;

/// A type of operands, as bits.
pub(super) trait Half: 'static {
    /// The bits of infinity: what is not below it, its sign aside, is not finite.
    const INFINITY: u16;
    /// The type has a narrow range: sums of gradients must be brought into it.
    const NARROW: bool;
    fn widen(bits: u16) -> f32;
    /// The elements of `a` and `b`, rounded to nearest even, in pairs.
    ///
    /// # Safety
    /// The instruction set is present.
    unsafe fn pairs(a: __m512, b: __m512) -> __m512i;
    /// The elements of `a`, then those of `b`, rounded likewise.
    ///
    /// # Safety
    /// As above.
    unsafe fn row(a: __m512, b: __m512) -> __m512i;
    /// # Safety
    /// As [`product_bf16`].
    unsafe fn product(p: &Product);
    /// # Safety
    /// As [`step_bf16`].
    unsafe fn step(p: &Product);
}

/// bfloat16.
pub(super) struct Bf16;

/// IEEE binary16.
pub(super) struct F16;

/// Element `i` of the lower half and of the upper half of a vector, side by side.
static HALVES: [u16; 32] = {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = i as u16;
        index[2 * i + 1] = 16 + i as u16;
        i += 1;
    }
    index
};

impl Half for Bf16 {
    const INFINITY: u16 = 0x7f80;
    const NARROW: bool = false;

    fn widen(bits: u16) -> f32 {
        half::bf16::from_bits(bits).to_f32()
    }

    #[inline(always)]
    unsafe fn pairs(a: __m512, b: __m512) -> __m512i {
        // SAFETY: AVX-512 BW and BF16 are present.
        unsafe { _mm512_permutexvar_epi16(_mm512_loadu_si512(HALVES.as_ptr().cast()), Self::row(a, b)) }
    }

    #[inline(always)]
    unsafe fn row(a: __m512, b: __m512) -> __m512i {
        // SAFETY: AVX-512 BF16 is present; the two types are 512 bits each, of which all are values.
        unsafe { core::mem::transmute(_mm512_cvtne2ps_pbh(b, a)) }
    }

    #[inline(always)]
    unsafe fn product(p: &Product) {
        // SAFETY: tiles and panels are as `Product` says, and the instruction set is entered (the contract of
        // `product`).
        unsafe { product_bf16(p) }
    }

    #[inline(always)]
    unsafe fn step(p: &Product) {
        // SAFETY: as above, of a product that was begun.
        unsafe { step_bf16(p) }
    }
}

impl Half for F16 {
    const INFINITY: u16 = 0x7c00;
    const NARROW: bool = true;

    fn widen(bits: u16) -> f32 {
        half::f16::from_bits(bits).to_f32()
    }

    #[inline(always)]
    unsafe fn pairs(a: __m512, b: __m512) -> __m512i {
        // SAFETY: AVX-512 F and BW are present.
        unsafe { _mm512_permutexvar_epi16(_mm512_loadu_si512(HALVES.as_ptr().cast()), Self::row(a, b)) }
    }

    #[inline(always)]
    unsafe fn row(a: __m512, b: __m512) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
            _mm512_inserti64x4::<1>(low, _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(b))
        }
    }

    #[inline(always)]
    unsafe fn product(p: &Product) {
        // SAFETY: as above.
        unsafe { product_f16(p) }
    }

    #[inline(always)]
    unsafe fn step(p: &Product) {
        // SAFETY: as above, of a product that was begun.
        unsafe { step_f16(p) }
    }
}
