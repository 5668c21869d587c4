// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversion of rows between a tensor's element type and the type of the sums.
//!
//! The kernels compute in the type of the sums only. The element type of a tensor is looked up once for each row that
//! is packed or written, so the same code serves f16, bf16 and f32 on each instruction set.

use crate::call::RawTensor;
use crate::element::{Dtype, Element};
use crate::kernel::cpu::vector::simd::Real;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Widens the first `dst.len()` elements of a row.
///
/// # Safety
/// Token and head lie within `t`, whose memory is valid, whose rows are as long and whose sums are `A`s.
#[inline(always)]
pub(crate) unsafe fn widen<A: Real>(t: &RawTensor, token: i64, head: u32, dst: &mut [A]) {
    // SAFETY: token and head lie within `t`, so its row is valid for `dst.len()` elements (the contract).
    unsafe { widen_from(t.dtype, address(t, token, head), dst) }
}

/// Rounds to the first `src.len()` elements of a row.
///
/// # Safety
/// As [`widen`]; nothing else accesses the row.
#[inline(always)]
pub(crate) unsafe fn narrow<A: Real>(src: &[A], t: &RawTensor, token: i64, head: u32) {
    // SAFETY: token and head lie within `t`, and no other thread accesses the row (the contract).
    unsafe { narrow_to(t.dtype, src, address(t, token, head)) }
}

/// The address of a row, whatever its type.
///
/// # Safety
/// The indices lie within the tensor, whose memory is valid.
#[inline(always)]
pub(crate) unsafe fn address(t: &RawTensor, token: i64, head: u32) -> *mut u8 {
    let offset = token as isize * t.token_stride as isize + head as isize * t.head_stride as isize;
    // SAFETY: in bounds (the contract); offsets of valid tensors fit.
    unsafe { t.ptr.offset(offset * t.dtype.size() as isize) }
}

/// Prefetches a row into the L2 cache.
///
/// # Safety
/// As [`widen`], of any type.
#[inline(always)]
pub(crate) unsafe fn prefetch(t: &RawTensor, token: i64, head: u32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: token and head lie within the tensor (the contract); a prefetch has no visible effect.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let row = address(t, token, head);
        for at in (0..t.dim as usize * t.dtype.size()).step_by(64) {
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(at).cast());
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        let row = address(t, token, head);
        for at in (0..t.dim as usize * t.dtype.size()).step_by(64) {
            let line = row.wrapping_add(at);
            core::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (t, token, head);
}

/// Widens elements whose sums are `A`s.
///
/// # Safety
/// `src` is valid for reads of `dst.len()` elements.
#[inline(always)]
pub(crate) unsafe fn widen_from<A: Real>(dtype: Dtype, src: *const u8, dst: &mut [A]) {
    debug_assert_eq!(dtype.accumulator(), A::DTYPE);
    let n = dst.len();
    if A::DTYPE == Dtype::F32 && dtype != Dtype::F32 {
        // SAFETY: A is f32.
        let dst = unsafe { core::slice::from_raw_parts_mut(dst.as_mut_ptr().cast::<f32>(), n) };
        if dtype == Dtype::F16 {
            // SAFETY: `src` is valid for reads of `dst.len()` elements (the contract), which are f16.
            let src = unsafe { core::slice::from_raw_parts(src.cast::<f16>(), n) };
            src.convert_to_f32_slice(dst);
        } else {
            // SAFETY: `src` is valid for reads of `dst.len()` elements (the contract), which are bf16.
            let src = unsafe { core::slice::from_raw_parts(src.cast::<bf16>(), n) };
            // In integers, so that the compiler vectorises it. A signalling NaN stays one until the first arithmetic.
            for (d, s) in dst.iter_mut().zip(src) {
                *d = f32::from_bits(u32::from(s.to_bits()) << 16);
            }
        }
    } else {
        // SAFETY: the elements are As.
        dst.copy_from_slice(unsafe { core::slice::from_raw_parts(src.cast::<A>(), n) });
    }
}

/// Rounds to elements whose sums are `A`s.
///
/// # Safety
/// `dst` is valid for writes of `src.len()` elements.
#[inline(always)]
pub(crate) unsafe fn narrow_to<A: Real>(dtype: Dtype, src: &[A], dst: *mut u8) {
    debug_assert_eq!(dtype.accumulator(), A::DTYPE);
    if A::DTYPE == Dtype::F32 && dtype != Dtype::F32 {
        // SAFETY: A is f32.
        let src = unsafe { core::slice::from_raw_parts(src.as_ptr().cast::<f32>(), src.len()) };
        if dtype == Dtype::F16 {
            // `half` converts slices with the machine's instructions, and single elements after a check of the machine
            // for each. Through a buffer on the stack, since `dst` may be uninitialised.
            let mut rounded = [f16::ZERO; 64];
            for (i, part) in src.chunks(64).enumerate() {
                let rounded = &mut rounded[..part.len()];
                rounded.convert_from_f32_slice(part);
                // SAFETY: `dst` is valid for writes of `src.len()` elements (the contract), these are `64 i ..` of
                // them.
                unsafe { core::ptr::copy_nonoverlapping(rounded.as_ptr(), dst.cast::<f16>().add(64 * i), part.len()) };
            }
        } else {
            for (i, &x) in src.iter().enumerate() {
                // SAFETY: `i < src.len()`, and `dst` is valid for writes of as many elements (the contract).
                unsafe { dst.cast::<u16>().add(i).write(nearest_bf16(x)) };
            }
        }
    } else {
        // SAFETY: the elements are As, and no other thread has them.
        unsafe { core::ptr::copy_nonoverlapping(src.as_ptr(), dst.cast::<A>(), src.len()) };
    }
}

/// The bits of `bf16::from_f32` (nearest, ties to even, NaNs made quiet), without a branch, so that the compiler
/// vectorises it.
#[inline(always)]
fn nearest_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    (bits >> 16) as u16
}

/// Widens elements of any type to f64.
///
/// # Safety
/// As [`widen_from`].
pub(crate) unsafe fn load(dtype: Dtype, src: *const u8, dst: &mut [f64]) {
    /// # Safety
    /// As [`load`], with elements `E`.
    unsafe fn each<E: Element>(src: *const u8, dst: &mut [f64]) {
        // SAFETY: `src` is valid for reads of `dst.len()` elements `E` (the contract of `load`).
        let src = unsafe { core::slice::from_raw_parts(src.cast::<E>(), dst.len()) };
        for (d, s) in dst.iter_mut().zip(src) {
            *d = s.to_f64();
        }
    }
    // SAFETY: `src` is valid for reads of `dst.len()` elements of `dtype` (the contract of `load`).
    unsafe {
        match dtype {
            Dtype::F16 => each::<f16>(src, dst),
            Dtype::Bf16 => each::<bf16>(src, dst),
            Dtype::F32 => each::<f32>(src, dst),
            Dtype::F64 => each::<f64>(src, dst),
        }
    }
}

/// Rounds f64 to elements of any type, once.
///
/// # Safety
/// As [`narrow_to`].
pub(crate) unsafe fn store(dtype: Dtype, src: &[f64], dst: *mut u8) {
    /// # Safety
    /// As [`store`], with elements `E`.
    unsafe fn each<E: Element>(src: &[f64], dst: *mut u8) {
        for (i, x) in src.iter().enumerate() {
            // SAFETY: `i < src.len()`, and `dst` is valid for writes of as many elements `E` (the contract of `store`).
            unsafe { dst.cast::<E>().add(i).write(E::from_f64(*x)) };
        }
    }
    // SAFETY: `dst` is valid for writes of `src.len()` elements of `dtype` (the contract of `store`).
    unsafe {
        match dtype {
            Dtype::F16 => each::<f16>(src, dst),
            Dtype::Bf16 => each::<bf16>(src, dst),
            Dtype::F32 => each::<f32>(src, dst),
            Dtype::F64 => each::<f64>(src, dst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_rounded_as_one_by_one() {
        let halves = (0..=u16::MAX).flat_map(|high| {
            // On a bf16, on both sides of it, at a tie and beside that.
            [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low)
        });
        for bits in halves {
            let x = f32::from_bits(bits);
            assert_eq!(nearest_bf16(x), bf16::from_f32(x).to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn bf16_is_widened_as_one_by_one() {
        let halves: alloc::vec::Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut wide = alloc::vec![0f32; halves.len()];
        // SAFETY: both have as many elements.
        unsafe { widen_from(Dtype::Bf16, halves.as_ptr().cast(), &mut wide) };
        for (wide, half) in wide.into_iter().zip(halves) {
            assert!(wide.to_bits() == half.to_f32().to_bits() || wide.is_nan() && half.is_nan(), "{half:?}");
        }
    }
}
