// SPDX-License-Identifier: MIT OR Apache-2.0
//! In which form the elements of a type go through matrix units.
//!
//! Tiles hold half-precision numbers. A number with more digits than those of bf16 goes as a sum of bf16 numbers, its
//! *parts*, each of which has what the ones before it leave over: an f16 is the sum of two parts, and so is an f32 of three,
//! without an error (as long as the last part is a normal number, which it is from 2⁻¹⁰⁹ on). A product of such sums is the
//! sum of the products of their parts, least first. Of the nine for f32, three are left out: together they are below
//! 2⁻²² of the product, of either sign, and on average where the rounding of an f32 multiplication is. Each tile
//! product adds 32 numbers by themselves before it rounds the total, so that the sums are no worse than a chain of
//! multiply-adds of f32 (`tests/kernel` asks the same of both).
//!
//! Which numbers are not finite is to be seen in the first part. The others then hold anything.

use super::amx_product::{
    Apart, Product, product_bf16, product_f16, product_three, product_two, step_bf16, step_f16, step_three, step_two,
};
use core::arch::x86_64::*;

/// The most parts of a form.
const MOST: usize = 3;

/// The parts of 32 numbers, as far as the form has them.
pub(crate) type Parts = [__m512i; MOST];

/// How elements of a type become tiles, and how tiles are multiplied.
pub(crate) trait TileForm: 'static {
    /// Tiles that one tile of elements becomes.
    const PARTS: usize;
    /// Products are those of the matrix unit: it must be configured first, and works beside the vector units. Otherwise
    /// they are the vector units' own, and [`TileForm::step`] is not there.
    const MATRIX_UNIT: bool = true;
    /// The bits of infinity as the first part: what is not below it, its sign aside, is not finite.
    const INFINITY: u16 = 0x7f80;
    /// The type has a narrow range: sums of gradients must be brought into it.
    const NARROW: bool = false;
    /// Tiles of keys that the forward packs together: they share the L2 cache with the panels.
    const TILES: usize;
    /// Bytes of an element in memory.
    const SIZE: usize;

    /// The number of a part.
    fn widen(bits: u16) -> f32 {
        half::bf16::from_bits(bits).to_f32()
    }
    /// An element in memory.
    ///
    /// # Safety
    /// `element` is valid for reads.
    unsafe fn read(element: *const u8) -> f32;
    /// Whether tiles hold the number: it is finite, and so is its first part.
    fn in_exact_range(x: f32) -> bool {
        x.is_finite()
    }
    /// The parts of 32 elements of a row from `at` on, zeros behind its end.
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
    /// The same, with each product of tiles added to C.
    ///
    /// # Safety
    /// As [`product_bf16`].
    unsafe fn product_to(p: &Product);
    /// One step of a product that was begun, if they are those of the matrix unit.
    ///
    /// # Safety
    /// As [`step_bf16`].
    unsafe fn step(p: &Product);
}

/// bfloat16.
pub(crate) struct Bf16;

/// IEEE binary16, where tiles may hold it.
pub(crate) struct F16;

/// IEEE binary16 as the sum of two parts.
pub(crate) struct TwoParts;

/// f32 as the sum of three parts.
pub(crate) struct ThreeParts;

/// 32 halves of a row from `at` on, zeros behind its end.
///
/// # Safety
/// AVX-512 BW is present; the row is valid for reads of `dim` elements, and `at < dim`.
#[inline(always)]
unsafe fn halves(row: *const u8, at: usize, dim: usize) -> __m512i {
    let mask = if dim - at >= 32 { u32::MAX } else { (1 << (dim - at)) - 1 };
    // SAFETY: what the mask leaves out is not read.
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

/// Two vectors without what `row`, made of them by [`bf16_row`], has of them.
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

/// `parts` parts of two vectors in pairs, with fewer instructions than [`rows_of`] takes. The first is cut off and not
/// rounded: so it stays finite, or not a number, where its number is. The others are rounded, ties away from 0.
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
        // SAFETY: what the masks leave out is not read.
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
