// SPDX-License-Identifier: MIT OR Apache-2.0
//! Row sums before the backward: `delta = rowsum(do ∘ o) − d_lse`.
//!
//! Every row is summed in sixteen lanes, which are then added in pairs. The order is the same on every instruction set,
//! and there are no fused multiply-adds, so the bits are the same on all of them.

use super::convert::{self, Convert, Four, VectorLoop};
use super::rows::address;
use crate::call::Delta;
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::check::lse_gradient;
use crate::kernel::cpu::attention::tile::at;
use crate::kernel::cpu::check;
use crate::kernel::cpu::vector::simd::Real;

const LANES: usize = 16;

pub(crate) fn check_delta(d: &Delta) -> Result<()> {
    check::same_shape(|| "d_o".into(), &d.d_o, &d.o)?;
    check::tensor("d_o", &d.d_o, d.o.heads, d.o.dim, d.o.dtype)?;
    check::tensor("delta", &d.delta, d.o.heads, 1, d.o.dtype.accumulator())?;
    if d.delta.tokens != d.o.tokens {
        return Err(Error::invalid("delta.tokens", d.delta.tokens, d.o.tokens));
    }
    lse_gradient(d, |name, t| check::tensor(name, t, d.o.heads, 1, d.o.dtype.accumulator()))
}

/// # Safety
/// Checked for sums of `A`; tensors are valid, and `delta` overlaps nothing.
pub(crate) unsafe fn delta<A: Real>(c: &Delta) {
    if A::DTYPE == Dtype::F32 {
        // SAFETY: checked for sums of f32, tensors valid, and delta overlaps nothing (the contract of `delta`).
        return unsafe { convert::on_best(&DeltaRows(c)) };
    }
    let dim = c.o.dim as usize;
    for (t, h) in (0..c.o.tokens as i64).flat_map(|t| (0..c.o.heads).map(move |h| (t, h))) {
        let mut sums = [A::ZERO; LANES];
        // SAFETY: the row is within the three tensors, whose elements are `A`s.
        unsafe {
            let (o, d_o) = (at::<A>(&c.o, t, h), at::<A>(&c.d_o, t, h));
            for d in 0..dim {
                sums[d % LANES] = sums[d % LANES] + *o.add(d) * *d_o.add(d);
            }
            *at::<A>(&c.delta, t, h) = less_lse(c, t, h, total(sums));
        }
    }
}

/// A row's sum less the gradient of its lse, if the call has one and lse depends on any score.
///
/// # Safety
/// As [`delta`]; the row is in the tensors.
#[inline(always)]
unsafe fn less_lse<A: Real>(c: &Delta, t: i64, h: u32, sum: A) -> A {
    if c.d_lse.is_none() {
        return sum;
    }
    // SAFETY: the row is in both tensors, which hold `A`s (the contract of this function).
    unsafe { if *at::<A>(&c.lse, t, h) == A::NEG_INFINITY { sum } else { sum - *at::<A>(&c.d_lse, t, h) } }
}

/// All sums, added in pairs that are half of them apart.
fn total<A: Real>(mut sums: [A; LANES]) -> A {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] = sums[i] + sums[i + width];
        }
    }
    sums[0]
}

/// Rows with sums in f32.
struct DeltaRows<'a>(&'a Delta);

impl VectorLoop for DeltaRows<'_> {
    #[inline(always)]
    unsafe fn run<V: Convert>(&self) {
        let c = self.0;
        let (dim, size, dtype) = (c.o.dim as usize, c.o.dtype.size(), c.o.dtype);
        let (unit, rest) = (4 * V::W, dim % (4 * V::W));
        for t in 0..c.o.tokens as i64 {
            for h in 0..c.o.heads {
                // SAFETY: `dim` elements of both rows are there, and the number in delta; the instruction set of V is
                // present (the contract of `run`).
                unsafe {
                    let (o, d_o) = (address(&c.o, t, h), address(&c.d_o, t, h));
                    let mut sums = [V::splat(0.0); 4];
                    for done in (0..dim - rest).step_by(unit) {
                        let (o, d_o) = (o.add(done * size), d_o.add(done * size));
                        convert::prefetch::<V>(o, unit * size);
                        convert::prefetch::<V>(d_o, unit * size);
                        sums = add(sums, convert::load::<V>(dtype, o), convert::load(dtype, d_o));
                    }
                    if rest > 0 {
                        let done = (dim - rest) * size;
                        let (mut x, mut y) = ([0f32; 64], [0f32; 64]);
                        let (x, y) = (x.as_mut_ptr().cast::<u8>(), y.as_mut_ptr().cast::<u8>());
                        core::ptr::copy_nonoverlapping(o.add(done), x, rest * size);
                        core::ptr::copy_nonoverlapping(d_o.add(done), y, rest * size);
                        sums = add(sums, convert::load::<V>(dtype, x), convert::load(dtype, y));
                    }
                    *at::<f32>(&c.delta, t, h) = less_lse(c, t, h, across(sums));
                }
            }
        }
    }
}

/// Adds four vectors of products, to lanes that are those of the row modulo [`LANES`].
///
/// # Safety
/// As [`Convert`].
#[inline(always)]
unsafe fn add<V: Convert>(mut sums: Four<V>, x: Four<V>, y: Four<V>) -> Four<V> {
    for i in 0..4 {
        // SAFETY: the instruction set of V is present (the contract of this function).
        unsafe { sums[i % (LANES / V::W)] = sums[i % (LANES / V::W)].add(x[i].mul(y[i])) };
    }
    sums
}

/// The sum of all lanes of the first `LANES / W` vectors, in the order of [`total`].
///
/// # Safety
/// As [`Convert`].
#[inline(always)]
unsafe fn across<V: Convert>(mut sums: Four<V>) -> f32 {
    let mut vectors = LANES / V::W;
    while vectors > 1 {
        vectors /= 2;
        for i in 0..vectors {
            // SAFETY: the instruction set of V is present (the contract of this function), here and below.
            sums[i] = unsafe { sums[i].add(sums[i + vectors]) };
        }
    }
    // SAFETY: as above.
    unsafe { sums[0].total() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::RawTensor;
    use crate::element::Element;
    use crate::kernel::cpu::vector::portable::FourLanes;
    use alloc::{vec, vec::Vec};
    use half::{bf16, f16};

    /// Rows of `dim` elements by one instruction set, bit for bit against the lanes written out.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    unsafe fn check<E: Element<Acc = f32>, V: Convert>(tokens: usize, heads: usize, dim: usize) {
        let numbers = |seed: usize| -> Vec<E> {
            let one = |i| E::from_f64(((i * 7919 + seed * 104_729) % 2003) as f64 / 1000.0 - 1.0);
            (0..tokens * heads * dim).map(one).collect()
        };
        let (mut o, mut d_o, mut found) = (numbers(1), numbers(2), vec![f32::NAN; tokens * heads]);
        let raw = |x: &mut Vec<E>| {
            RawTensor::compact(x.as_mut_ptr().cast(), E::DTYPE, tokens as u64, heads as u32, dim as u32)
        };
        let per_row = RawTensor::compact(found.as_mut_ptr().cast(), Dtype::F32, tokens as u64, heads as u32, 1);
        let call = Delta::new([raw(&mut o), raw(&mut d_o), per_row]);
        // SAFETY: the tensors are the vectors above.
        unsafe { DeltaRows(&call).run::<V>() };
        for (row, found) in found.iter().enumerate() {
            let mut lanes = [0f32; LANES];
            for d in 0..dim {
                lanes[d % LANES] += o[row * dim + d].widen() * d_o[row * dim + d].widen();
            }
            let expected = total(lanes);
            assert_eq!(found.to_bits(), expected.to_bits(), "row {row} of {dim}, {} lanes", V::W);
        }
    }

    #[test]
    fn every_instruction_set_sums_in_the_same_order() {
        for (tokens, heads, dim) in [(1, 1, 1), (3, 2, 15), (70, 3, 64), (5, 1, 72), (65, 2, 128), (2, 2, 300)] {
            // SAFETY: arrays need no instruction set, and the other types are checked for.
            unsafe {
                check::<f32, FourLanes<f32>>(tokens, heads, dim);
                check::<bf16, FourLanes<f32>>(tokens, heads, dim);
                check::<f16, FourLanes<f32>>(tokens, heads, dim);
                #[cfg(target_arch = "aarch64")]
                {
                    check::<f32, crate::kernel::cpu::vector::neon::Floats>(tokens, heads, dim);
                    check::<bf16, crate::kernel::cpu::vector::neon::Floats>(tokens, heads, dim);
                }
                #[cfg(target_arch = "x86_64")]
                if crate::kernel::cpu::vector::x86::has_avx2() && std::is_x86_feature_detected!("f16c") {
                    check::<f32, core::arch::x86_64::__m256>(tokens, heads, dim);
                    check::<bf16, core::arch::x86_64::__m256>(tokens, heads, dim);
                }
                #[cfg(target_arch = "x86_64")]
                if crate::kernel::cpu::vector::x86::has_avx512() {
                    check::<f32, core::arch::x86_64::__m512>(tokens, heads, dim);
                    check::<f16, core::arch::x86_64::__m512>(tokens, heads, dim);
                }
            }
        }
    }
}
