// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one matrix product of the kernels over vectors: `C = A·B` or `C += A·B`, on tiles that fit the cache.
//!
//! A is read element by element (broadcast), so it may be stored by rows or by columns; B and C are rows of vectors.
//! Every element of C is one chain of multiply-adds in the order of k: its bits depend on its own row and column alone,
//! not on its place in a register block. The reproducible mode depends on this.
//!
//! `0 · NaN` is NaN, but a masked key must not contribute, even if it is NaN. Tiles with a number that is not finite
//! therefore take a scalar path, which skips products with a probability of exactly 0.

use crate::element::Accumulator;
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::simd::{Real, Vector};

/// # Safety
/// The instruction set of `V` is present; A, B and C are valid for the sizes given, and C
/// overlaps none of the others.
#[inline(always)]
pub(crate) unsafe fn gemm<V: Vector>(g: &Gemm<V::T>) {
    // SAFETY: every block lies within the m by n of the contract.
    unsafe {
        if g.skip != Skip::None {
            return careful::<V>(g);
        }
        let mut n = 0;
        while n + 2 * V::W <= g.n {
            column::<V, 2>(g, n);
            n += 2 * V::W;
        }
        if n < g.n {
            column::<V, 1>(g, n);
        }
    }
}

/// One column of blocks, `N` vectors wide.
///
/// A block of few rows has too few sums to hide the latency of a multiply-add; 4 rows of 2 vectors have just enough.
/// The remainder after blocks of [`Vector::MR`] rows is therefore made of blocks of 4 if possible: 32 rows are 4 blocks
/// of 6 and 2 of 4.
///
/// # Safety
/// As [`gemm`]; `n + N · W ≤ g.n`.
#[inline(always)]
unsafe fn column<V: Vector, const N: usize>(g: &Gemm<V::T>, n: usize) {
    let mut r = 0;
    let whole = g.m - 4 * fours(g.m, V::MR);
    // SAFETY: rows `r..r + block` are below m.
    unsafe {
        while r + V::MR <= whole {
            match V::MR {
                8 => block::<V, 8, N>(g, r, n),
                6 => block::<V, 6, N>(g, r, n),
                _ => block::<V, 4, N>(g, r, n),
            }
            r += if V::MR == 8 || V::MR == 6 { V::MR } else { 4 };
        }
        while r + 4 <= g.m {
            block::<V, 4, N>(g, r, n);
            r += 4;
        }
        while r < g.m {
            block::<V, 1, N>(g, r, n);
            r += 1;
        }
    }
}

/// The number of blocks of 4 rows at the end of `m` rows.
#[inline(always)]
fn fours(m: usize, mr: usize) -> usize {
    match (m % mr, mr) {
        (2 | 3, 6) if m >= 8 => 2,
        (rest, _) => rest / 4,
    }
}

/// `R` rows of `N` vectors, kept in registers over all of k.
///
/// # Safety
/// As [`gemm`]; the block lies within C.
#[inline(always)]
unsafe fn block<V: Vector, const R: usize, const N: usize>(g: &Gemm<V::T>, r0: usize, n0: usize) {
    // SAFETY: `r0 + R ≤ m`, `n0 + N·W ≤ n`, `k < kk` (the contract).
    unsafe {
        let mut acc = [[V::splat(V::T::ZERO); N]; R];
        let a = g.a.add(r0 * g.a_row);
        let b = g.b.add(n0);
        if g.store == Store::Chain {
            let mut r = 0;
            while r < R {
                let mut n = 0;
                while n < N {
                    acc[r][n] = V::load(g.c.add((r0 + r) * g.ldc + n0 + n * V::W));
                    n += 1;
                }
                r += 1;
            }
        }
        let mut k = 0;
        while k + 2 <= g.kk {
            step(g, a, b, k, &mut acc);
            step(g, a, b, k + 1, &mut acc);
            k += 2;
        }
        if k < g.kk {
            step(g, a, b, k, &mut acc);
        }
        let mut r = 0;
        while r < R {
            let mut n = 0;
            while n < N {
                let c = g.c.add((r0 + r) * g.ldc + n0 + n * V::W);
                match g.store {
                    Store::Set | Store::Chain => acc[r][n].store(c),
                    Store::Add => V::load(c).add(acc[r][n]).store(c),
                }
                n += 1;
            }
            r += 1;
        }
    }
}

/// `acc += A[..][k] · B[k][..]`.
///
/// # Safety
/// As [`block`], of which `a` and `b` are the first row and the first column.
#[inline(always)]
unsafe fn step<V: Vector, const R: usize, const N: usize>(
    g: &Gemm<V::T>,
    a: *const V::T,
    b: *const V::T,
    k: usize,
    acc: &mut [[V; N]; R],
) {
    // SAFETY: the panels are as `Gemm` says, and the instruction set is present (the contract of this function).
    unsafe {
        let mut bs = [V::splat(V::T::ZERO); N];
        let mut n = 0;
        while n < N {
            bs[n] = V::load(b.add(k * g.ldb + n * V::W));
            n += 1;
        }
        let mut r = 0;
        while r < R {
            let x = V::splat(*a.add(r * g.a_row + k * g.a_col));
            let mut n = 0;
            while n < N {
                acc[r][n] = x.fma(bs[n], acc[r][n]);
                n += 1;
            }
            r += 1;
        }
    }
}

/// The same chains, one row of one vector at a time, without the products that `skip` names.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn careful<V: Vector>(g: &Gemm<V::T>) {
    // SAFETY: indices are below m, n and kk.
    unsafe {
        let zero = V::splat(V::T::ZERO);
        let mut n = 0;
        while n < g.n {
            for r in 0..g.m {
                let c = g.c.add(r * g.ldc + n);
                let mut acc = if g.store == Store::Chain { V::load(c) } else { zero };
                for k in 0..g.kk {
                    let a = *g.a.add(r * g.a_row + k * g.a_col);
                    if g.skip == Skip::A && a == V::T::ZERO {
                        continue;
                    }
                    let b = V::load(g.b.add(k * g.ldb + n));
                    let next = V::splat(a).fma(b, acc);
                    // |b| below the smallest positive number means zero. A NaN is not below it, and is multiplied.
                    let negative = zero.sub(b);
                    let size = V::gt(negative, zero, negative, b);
                    acc = if g.skip == Skip::B { V::gt(V::splat(V::T::TINY), size, acc, next) } else { next };
                }
                match g.store {
                    Store::Set | Store::Chain => acc.store(c),
                    Store::Add => V::load(c).add(acc).store(c),
                }
            }
            n += V::W;
        }
    }
}
