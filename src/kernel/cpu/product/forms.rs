// SPDX-License-Identifier: MIT OR Apache-2.0
//! The representation of each element type on matrix units.
//!
//! Tiles hold half-precision numbers. A number with more digits than bf16 is represented as a sum of bf16 numbers, its
//! *parts*; each part is the remainder of the parts before it, rounded. An f16 is exactly the sum of two parts and an
//! f32 of three (while the last part is a normal number, which holds from 2⁻¹⁰⁹ on). A product of such sums is the sum
//! of the products of their parts, computed from the smallest. Of the nine products for f32, three are omitted:
//! together they are below 2⁻²² of the product, of either sign, and on average as large as the rounding error of an f32
//! multiplication. Each tile product sums 32 products before it rounds, so the error of a sum is no larger than that of
//! a chain of f32 multiply-adds (`tests/kernel` has the same bounds for both).
//!
//! Whether a number is finite is determined by its first part only; if it is not, the other parts are undefined.

use super::amx_product::{
    Apart, Product, product_bf16, product_f16, product_three, product_two, step_bf16, step_f16, step_three, step_two,
};
use core::arch::x86_64::*;

/// The largest number of parts.
const MOST: usize = 3;

/// The parts of 32 numbers; only as many are used as the form has.
pub(crate) type Parts = [__m512i; MOST];

/// The conversion of an element type to tiles, and the multiplication of tiles.
pub(crate) trait TileForm: 'static {
    /// The number of parts, and so of tiles, for one tile of elements.
    const PARTS: usize;
    /// Whether products run on the matrix unit, which must be configured and works in parallel with the vector units.
    /// If not, they run on the vector units, and [`TileForm::step`] is not implemented.
    const MATRIX_UNIT: bool = true;
    /// The bits of infinity as a first part. A number whose first part is not below it (without the sign) is not
    /// finite.
    const INFINITY: u16 = 0x7f80;
    /// Whether the type has a narrow range, so that gradients must be scaled.
    const NARROW: bool = false;
    /// Tiles of keys that the forward packs together. They share the L2 cache with the panels.
    const TILES: usize;
    /// Bytes of an element in memory.
    const SIZE: usize;

    /// The value of a part.
    fn widen(bits: u16) -> f32 {
        half::bf16::from_bits(bits).to_f32()
    }
    /// Reads an element.
    ///
    /// # Safety
    /// `element` is valid for reads.
    unsafe fn read(element: *const u8) -> f32;
    /// Whether tiles can hold the number: it and its first part are finite.
    fn in_exact_range(x: f32) -> bool {
        x.is_finite()
    }
    /// The parts of 32 elements of a row from `at` on, with zeros past its end.
    ///
    /// # Safety
    /// AVX-512 with BW and BF16 is present; the row is valid for reads of `dim` elements, and `at < dim`.
    #[inline(always)]
    unsafe fn load(row: *const u8, at: usize, dim: usize) -> Parts {
        // SAFETY: the contract, here and below.
        unsafe { alone(halves(row, at, dim)) }
    }
    /// The parts of the elements of `a` and `b`, in pairs.
    ///
    /// # Safety
    /// The instruction set is present.
    #[inline(always)]
    unsafe fn pairs(a: __m512, b: __m512) -> Parts {
        // SAFETY: as above.
        unsafe { if Self::PARTS == 1 { in_pairs(Self::row(a, b)) } else { pairs_of(Self::PARTS, a, b) } }
    }
    /// The parts of the elements of `a`, then those of `b`.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn row(a: __m512, b: __m512) -> Parts {
        // SAFETY: as above.
        unsafe { rows_of(Self::PARTS, a, b) }
    }
    /// # Safety
    /// As [`product_bf16`].
    #[inline(always)]
    unsafe fn product(p: &Product) {
        if Self::PARTS == 1 || !p.add {
            // SAFETY: the contract, here and below.
            return unsafe { Self::product_to(p) };
        }
        let mut apart = Apart::new();
        // SAFETY: as above.
        unsafe {
            Self::product_to(&apart.instead(p));
            apart.add_to(p);
        }
    }
    /// As `product`, with each product of tiles added to C.
    ///
    /// # Safety
    /// As [`product_bf16`].
    unsafe fn product_to(p: &Product);
    /// One step of a product that was begun; for the matrix unit only.
    ///
    /// # Safety
    /// As [`step_bf16`].
    unsafe fn step(p: &Product);
}

/// bfloat16.
pub(crate) struct Bf16;

/// IEEE binary16, on machines with f16 tiles.
pub(crate) struct F16;

/// IEEE binary16 as the sum of two parts.
pub(crate) struct TwoParts;

/// f32 as the sum of three parts.
pub(crate) struct ThreeParts;

/// 32 halves of a row from `at` on, with zeros past its end.
///
/// # Safety
/// AVX-512 BW is present; the row is valid for reads of `dim` elements, and `at < dim`.
#[inline(always)]
unsafe fn halves(row: *const u8, at: usize, dim: usize) -> __m512i {
    let mask = if dim - at >= 32 { u32::MAX } else { (1 << (dim - at)) - 1 };
    // SAFETY: elements outside the mask are not read.
    unsafe { _mm512_maskz_loadu_epi16(mask, row.cast::<i16>().add(at)) }
}

/// The elements of `a`, then those of `b`, as bf16.
///
/// # Safety
/// AVX-512 BF16 is present.
#[inline(always)]
unsafe fn bf16_row(a: __m512, b: __m512) -> __m512i {
    // SAFETY: AVX-512 BF16 is present; the two types are 512 bits each, of which all are values.
    unsafe { core::mem::transmute(_mm512_cvtne2ps_pbh(b, a)) }
}

/// The remainder of two vectors after `row`, their rounding by [`bf16_row`], is subtracted.
///
/// # Safety
/// AVX-512 F is present.
#[inline(always)]
unsafe fn without(a: __m512, b: __m512, row: __m512i) -> (__m512, __m512) {
    // SAFETY: AVX-512 F is present.
    unsafe {
        let low = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(row)));
        let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(row)));
        (_mm512_sub_ps(a, _mm512_castsi512_ps(low)), _mm512_sub_ps(b, _mm512_castsi512_ps(high)))
    }
}

/// `parts` parts of two vectors in rows, each rounded to nearest even.
///
/// # Safety
/// AVX-512 BF16 is present.
#[inline(always)]
unsafe fn rows_of(parts: usize, mut a: __m512, mut b: __m512) -> Parts {
    // SAFETY: AVX-512 BF16 is present.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); MOST];
        let mut part = 0;
        while part < parts {
            rows[part] = bf16_row(a, b);
            if part + 1 < parts {
                (a, b) = without(a, b, rows[part]);
            }
            part += 1;
        }
        rows
    }
}

/// `parts` parts of two vectors in pairs, with fewer instructions than [`rows_of`]. The first part is truncated, so it
/// is finite or NaN exactly if its number is. The others are rounded, ties away from 0.
///
/// # Safety
/// AVX-512 F is present.
#[inline(always)]
unsafe fn pairs_of(parts: usize, mut a: __m512, mut b: __m512) -> Parts {
    // SAFETY: AVX-512 F is present.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        let half = _mm512_set1_epi32(0x8000);
        let mut pairs = [_mm512_setzero_si512(); MOST];
        let mut part = 0;
        while part < parts {
            let (mut x, mut y) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            if part > 0 {
                (x, y) = (_mm512_add_epi32(x, half), _mm512_add_epi32(y, half));
            }
            // (y & upper) | x >> 16
            pairs[part] = _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(x), y, upper);
            if part + 1 < parts {
                a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(x, upper)));
                b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(y, upper)));
            }
            part += 1;
        }
        pairs
    }
}

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

/// One part alone.
///
/// # Safety
/// AVX-512 F is present.
#[inline(always)]
unsafe fn alone(part: __m512i) -> Parts {
    // SAFETY: AVX-512 F is present.
    unsafe { [part, _mm512_setzero_si512(), _mm512_setzero_si512()] }
}

/// The rows of one part, in pairs.
///
/// # Safety
/// AVX-512 BW is present.
#[inline(always)]
unsafe fn in_pairs([row, ..]: Parts) -> Parts {
    // SAFETY: AVX-512 BW is present.
    unsafe { alone(_mm512_permutexvar_epi16(_mm512_loadu_si512(HALVES.as_ptr().cast()), row)) }
}

impl TileForm for Bf16 {
    const PARTS: usize = 1;
    const SIZE: usize = 2;
    const TILES: usize = 4;

    unsafe fn read(element: *const u8) -> f32 {
        // SAFETY: an element is there (the contract).
        unsafe { element.cast::<half::bf16>().read() }.to_f32()
    }

    #[inline(always)]
    unsafe fn product_to(p: &Product) {
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

impl TileForm for F16 {
    const INFINITY: u16 = 0x7c00;
    const NARROW: bool = true;
    const PARTS: usize = 1;
    const SIZE: usize = 2;
    const TILES: usize = 4;

    fn widen(bits: u16) -> f32 {
        half::f16::from_bits(bits).to_f32()
    }

    unsafe fn read(element: *const u8) -> f32 {
        // SAFETY: an element is there (the contract).
        unsafe { element.cast::<half::f16>().read() }.to_f32()
    }

    #[inline(always)]
    unsafe fn row(a: __m512, b: __m512) -> Parts {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
            alone(_mm512_inserti64x4::<1>(low, _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(b)))
        }
    }

    #[inline(always)]
    unsafe fn product_to(p: &Product) {
        // SAFETY: as above.
        unsafe { product_f16(p) }
    }

    #[inline(always)]
    unsafe fn step(p: &Product) {
        // SAFETY: as above, of a product that was begun.
        unsafe { step_f16(p) }
    }
}

impl TileForm for TwoParts {
    const PARTS: usize = 2;
    const SIZE: usize = 2;
    const TILES: usize = 2;

    unsafe fn read(element: *const u8) -> f32 {
        // SAFETY: an element is there (the contract).
        unsafe { F16::read(element) }
    }

    #[inline(always)]
    unsafe fn load(row: *const u8, at: usize, dim: usize) -> Parts {
        // SAFETY: the contract, here and below.
        unsafe {
            let x = halves(row, at, dim);
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
            rows_of(Self::PARTS, low, _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(x)))
        }
    }

    #[inline(always)]
    unsafe fn product_to(p: &Product) {
        // SAFETY: as above.
        unsafe { product_two(p) }
    }

    #[inline(always)]
    unsafe fn step(p: &Product) {
        // SAFETY: as above, of a product that was begun.
        unsafe { step_two(p) }
    }
}

impl TileForm for ThreeParts {
    const PARTS: usize = 3;
    const SIZE: usize = 4;
    const TILES: usize = 2;

    unsafe fn read(element: *const u8) -> f32 {
        // SAFETY: an element is there (the contract).
        unsafe { element.cast::<f32>().read() }
    }

    fn in_exact_range(x: f32) -> bool {
        half::bf16::from_f32(x).is_finite()
    }

    #[inline(always)]
    unsafe fn load(row: *const u8, at: usize, dim: usize) -> Parts {
        let mask = if dim - at >= 32 { u32::MAX } else { (1 << (dim - at)) - 1 };
        // SAFETY: elements outside the masks are not read.
        unsafe {
            let from = row.cast::<f32>().add(at);
            let low = _mm512_maskz_loadu_ps(mask as u16, from);
            rows_of(Self::PARTS, low, _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16)))
        }
    }

    #[inline(always)]
    unsafe fn product_to(p: &Product) {
        // SAFETY: as above.
        unsafe { product_three(p) }
    }

    #[inline(always)]
    unsafe fn step(p: &Product) {
        // SAFETY: as above, of a product that was begun.
        unsafe { step_three(p) }
    }
}
