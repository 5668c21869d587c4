// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transposition of rows to the lanes of a panel and back, and the check for numbers that are not finite.

use crate::element::Accumulator;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::Vector;

/// Whether a NaN or an infinity is among `n` numbers (whole vectors).
///
/// # Safety
/// The instruction set of `V` is present; `p` is valid for reads of `n`.
#[inline(always)]
pub(crate) unsafe fn any_non_finite<V: Vector>(p: *const V::T, n: usize) -> bool {
    // SAFETY: the contract.
    unsafe { V::call(AnyNonFinite { p, n }) }
}

struct AnyNonFinite<T> {
    p: *const T,
    n: usize,
}

impl<V: Vector> Routine<V> for AnyNonFinite<V::T> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run(self) -> bool {
        let Self { p, n } = self;
        // SAFETY: `i + W ≤ n`, and the contract of `any_non_finite`.
        unsafe {
            let zero = V::splat(V::T::ZERO);
            // Several chains hide the latency of the multiply-adds.
            let mut acc = [zero; 8];
            let mut i = 0;
            while i + 8 * V::W <= n {
                let mut j = 0;
                while j < 8 {
                    acc[j] = V::load(p.add(i + j * V::W)).fma(zero, acc[j]);
                    j += 1;
                }
                i += 8 * V::W;
            }
            while i < n {
                acc[0] = V::load(p.add(i)).fma(zero, acc[0]);
                i += V::W;
            }
            let mut j = 1;
            while j < 8 {
                acc[0] = acc[0].add(acc[j]);
                j += 1;
            }
            !is_zero(acc[0])
        }
    }
}

/// Whether all lanes are 0. A sum of products with 0 is 0 unless some factor is not finite.
///
/// # Safety
/// The instruction set of `V` is present.
#[inline(always)]
pub(crate) unsafe fn is_zero<V: Vector>(x: V) -> bool {
    let mut out = [V::T::ZERO; 16];
    // SAFETY: `out` has room for the widest vector.
    unsafe { x.store(out.as_mut_ptr()) };
    out[..V::W].iter().all(|&x| x == V::T::ZERO)
}

/// `V::W` rows of `dim`, `ld` apart, to the lanes from `lane` on of a panel `[dim][lanes]`.
///
/// # Safety
/// The instruction set of `V` is present.
#[inline(always)]
pub(crate) unsafe fn to_lanes<V: Vector>(
    rows: &[V::T],
    ld: usize,
    dim: usize,
    panel: &mut [V::T],
    lanes: usize,
    lane: usize,
) {
    // SAFETY: the contract.
    unsafe { V::call(ToLanes { rows, ld, dim, panel, lanes, lane }) }
}

struct ToLanes<'a, T> {
    rows: &'a [T],
    ld: usize,
    dim: usize,
    panel: &'a mut [T],
    lanes: usize,
    lane: usize,
}

impl<V: Vector> Routine<V> for ToLanes<'_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { rows, ld, dim, panel, lanes, lane } = self;
        let whole = dim - dim % V::W;
        assert!(lane + V::W <= lanes && rows.len() >= (V::W - 1) * ld + dim && panel.len() >= dim * lanes);
        for d in (0..whole).step_by(V::W) {
            // SAFETY: blocks of W by W within both (asserted above).
            unsafe { V::transpose(rows.as_ptr().add(d), ld, panel.as_mut_ptr().add(d * lanes + lane), lanes) };
        }
        for d in whole..dim {
            for i in 0..V::W {
                panel[d * lanes + lane + i] = rows[i * ld + d];
            }
        }
    }
}

/// The inverse: `V::W` lanes from `lane` on of a panel `[dim][lanes]` to rows of `dim`, one after another.
///
/// # Safety
/// The instruction set of `V` is present.
#[inline(always)]
pub(crate) unsafe fn to_rows<V: Vector>(panel: &[V::T], lanes: usize, lane: usize, rows: &mut [V::T], dim: usize) {
    // SAFETY: the contract.
    unsafe { V::call(ToRows { panel, lanes, lane, rows, dim }) }
}

struct ToRows<'a, T> {
    panel: &'a [T],
    lanes: usize,
    lane: usize,
    rows: &'a mut [T],
    dim: usize,
}

impl<V: Vector> Routine<V> for ToRows<'_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { panel, lanes, lane, rows, dim } = self;
        let whole = dim - dim % V::W;
        assert!(lane + V::W <= lanes && rows.len() >= V::W * dim && panel.len() >= dim * lanes);
        for d in (0..whole).step_by(V::W) {
            // SAFETY: blocks of W by W within both (asserted above).
            unsafe { V::transpose(panel.as_ptr().add(d * lanes + lane), lanes, rows.as_mut_ptr().add(d), dim) };
        }
        for d in whole..dim {
            for i in 0..V::W {
                rows[i * dim + d] = panel[d * lanes + lane + i];
            }
        }
    }
}
