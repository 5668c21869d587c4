// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products by the BF16 dot products of AVX-512, in place of AMX tiles: `vdpbf16ps` adds the products of two pairs of
//! bf16 to each f32 of a vector.
//!
//! Operands have the layout of tiles (`tile_engine.rs`): A as rows of 32 numbers, B as pairs of 16 columns. A broadcast
//! pair of a row of A with a row of B gives 16 sums of two products. Packing, softmax, masks and the treatment of
//! numbers that are not finite are therefore the same as on AMX. Eight rows by two vectors of C stay in registers,
//! enough independent sums to hide the latency of the instruction.
//!
//! Products and softmax use the same units here, so they are not interleaved. Like the matrix unit, the instruction
//! reads subnormal bf16 as 0 and flushes subnormal results.

use super::amx_product::Product;
use super::forms::{Bf16, TileForm};
use core::arch::x86_64::*;

/// Rows of C in registers.
const ROWS: usize = 8;

/// bfloat16 multiplied by vector units.
pub(crate) struct DotBf16;

impl TileForm for DotBf16 {
    const MATRIX_UNIT: bool = false;
    const PARTS: usize = 1;
    const SIZE: usize = 2;
    const TILES: usize = Bf16::TILES;

    unsafe fn read(element: *const u8) -> f32 {
        // SAFETY: the contract is that of `Bf16`.
        unsafe { Bf16::read(element) }
    }

    #[inline(always)]
    unsafe fn product_to(p: &Product) {
        // SAFETY: tiles are as `Product` says, and AVX-512 BF16 is present (the contract of `product`).
        unsafe { product_dots(p) }
    }

    unsafe fn step(_: &Product) {
        unreachable!("products of vectors are not interleaved with the softmax")
    }
}

/// The product of 32 rows of A with 32 columns of B.
///
/// # Safety
/// AVX-512 F and BF16 are present; tiles are 1,024 bytes, valid for reads, and those of C 16 rows of 64 bytes, valid
/// for writes (and reads, where it is added to).
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn product_dots(p: &Product) {
    for (a, c) in [(p.a0, p.c0), (p.a1, p.c1)] {
        for first in (0..16).step_by(ROWS) {
            // SAFETY: rows `first..first + ROWS` are within the 16 of each tile (the contract).
            unsafe { rows(p, a.add(32 * first), c.byte_add(first * p.ldc)) };
        }
    }
}

/// [`ROWS`] rows of the product, beginning at `a` and `c`.
///
/// # Safety
/// As [`product_dots`]; as many rows are there in the tiles of A and C.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(p: &Product, mut a: *const u16, c: *mut f32) {
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    let (mut b0, mut b1) = (p.b0, p.b1);
    // SAFETY: rows and columns are within the tiles of A, B and C (the contract); a tile of B has 16 rows of 32
    // numbers; pairs of bf16, and vectors of them, are integers of as many bits.
    unsafe {
        if p.add {
            for (i, sums) in sums.iter_mut().enumerate() {
                let from = c.byte_add(i * p.ldc);
                *sums = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
            }
        }
        for _ in 0..p.steps {
            for pair in 0..16 {
                let right = [b0, b1]
                    .map(|b| core::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.add(32 * pair).cast())));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let left = _mm512_set1_epi32(a.add(32 * i + 2 * pair).cast::<i32>().read_unaligned());
                    let left = core::mem::transmute::<__m512i, __m512bh>(left);
                    *sums = [_mm512_dpbf16_ps(sums[0], left, right[0]), _mm512_dpbf16_ps(sums[1], left, right[1])];
                }
            }
            a = a.wrapping_byte_add(p.a_step);
            (b0, b1) = (b0.wrapping_byte_add(p.b_step), b1.wrapping_byte_add(p.b_step));
        }
        for (i, sums) in sums.iter().enumerate() {
            let to = c.byte_add(i * p.ldc);
            _mm512_storeu_ps(to, sums[0]);
            _mm512_storeu_ps(to.add(16), sums[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::cpu::product::amx_product::TILE;
    use alloc::vec;
    use half::bf16;

    /// Products of several depths, written and added to, against sums in f64. Operands begin at odd addresses of two
    /// bytes, steps skip tiles, and rows of C are apart: nothing but what `Product` names may be read or written.
    #[test]
    fn products_of_dots() {
        if !crate::kernel::cpu::vector::x86::has_avx512_bf16() {
            return;
        }
        let mut random = fastrand::Rng::with_seed(11);
        for (steps, add, apart) in [(1, false, 0), (4, false, 3), (4, true, 0), (3, true, 5), (8, true, 1)] {
            // Tiles of A: the upper and the lower ones in turn, then `apart` tiles of NaN; of B likewise.
            let (each, ldc) = (2 + apart, 32 + 7 * apart);
            let mut numbers = || {
                let mut x = vec![bf16::NAN.to_bits(); 1 + steps * each * TILE];
                for step in 0..steps {
                    let tiles = 1 + step * each * TILE;
                    x[tiles..tiles + 2 * TILE].fill_with(|| bf16::from_f32(random.f32() - 0.5).to_bits());
                }
                x
            };
            let (a, b) = (numbers(), numbers());
            let before: vec::Vec<f32> = (0..32 * ldc).map(|_| random.f32()).collect();
            let mut c = before.clone();
            let (a0, b0, c0) = (a[1..].as_ptr(), b[1..].as_ptr(), c.as_mut_ptr());
            // SAFETY: the instruction set is present; tiles and rows are those of the vectors.
            unsafe {
                DotBf16::product(&Product {
                    a0,
                    a1: a0.add(TILE),
                    a_step: 2 * each * TILE,
                    b0,
                    b1: b0.add(TILE),
                    b_step: 2 * each * TILE,
                    steps,
                    c0,
                    c1: c0.add(16 * ldc),
                    ldc: 4 * ldc,
                    add,
                });
            }
            for (at, (&found, &before)) in c.iter().zip(&before).enumerate() {
                let (row, column) = (at / ldc, at % ldc);
                if column >= 32 {
                    assert_eq!(found.to_bits(), before.to_bits(), "beside C, row {row} column {column}");
                    continue;
                }
                let number = |x: &[u16], at: usize| f64::from(bf16::from_bits(x[at]).to_f32());
                let mut expected = if add { f64::from(before) } else { 0.0 };
                for k in 0..32 * steps {
                    let tile = k / 32 * each;
                    let left = 1 + (tile + row / 16) * TILE + row % 16 * 32 + k % 32;
                    let right = 1 + (tile + column / 16) * TILE + k % 32 / 2 * 32 + column % 16 * 2 + k % 2;
                    expected += number(&a, left) * number(&b, right);
                }
                let error = (f64::from(found) - expected).abs();
                assert!(
                    error <= 2e-6 * (1.0 + expected.abs()),
                    "row {row}, column {column}: {found}, expected {expected}"
                );
            }
        }
    }

    /// As on AMX: a subnormal bf16 counts as 0.
    #[test]
    fn subnormal_numbers_are_zeros() {
        if !crate::kernel::cpu::vector::x86::has_avx512_bf16() {
            return;
        }
        for (bits, expected) in [(0x0001u16, 0.0), (0x007f, 0.0), (0x0080, 32.0 * 2f32.powi(-126 + 100))] {
            let (a, b) = (vec![bits; 2 * TILE], vec![bf16::from_f32(2f32.powi(100)).to_bits(); 2 * TILE]);
            let mut c = vec![f32::NAN; 32 * 32];
            let (a0, b0, c0) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
            // SAFETY: the instruction set is present; tiles and rows are those of the vectors.
            unsafe {
                let (a1, b1, c1) = (a0.add(TILE), b0.add(TILE), c0.add(16 * 32));
                let (a_step, b_step, ldc) = (0, 0, 4 * 32);
                DotBf16::product(&Product { a0, a1, a_step, b0, b1, b_step, steps: 1, c0, c1, ldc, add: false });
            }
            assert!(c.iter().all(|&x| x == expected), "{bits:#x}: {}, expected {expected}", c[0]);
        }
    }
}
