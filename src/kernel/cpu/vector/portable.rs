// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vectors without a specific instruction set: plain arrays.

use super::routine::Routine;
use super::simd::{Real, Vector};
use crate::kernel::cpu::product::Gemm;
use crate::kernel::cpu::product::gemm::gemm;
use core::array::from_fn;

/// Four lanes in an array; the compiler may vectorise them for the target.
#[derive(Clone, Copy)]
pub(crate) struct FourLanes<T>([T; 4]);

impl<T: Real> Vector for FourLanes<T> {
    type T = T;
    const W: usize = 4;
    const MR: usize = 4;
    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Self([x; 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const T) -> Self {
        // SAFETY: the caller passes a pointer to W elements.
        Self(unsafe { p.cast::<[T; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut T) {
        // SAFETY: as above.
        unsafe { p.cast::<[T; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        Self(from_fn(|i| self.0[i] + b.0[i]))
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        Self(from_fn(|i| self.0[i] - b.0[i]))
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Self(from_fn(|i| self.0[i] * b.0[i]))
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        Self(from_fn(|i| self.0[i] / b.0[i]))
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Self(from_fn(|i| self.0[i].fma(b.0[i], c.0[i])))
    }
    #[inline(always)]
    unsafe fn any_gt(a: Self, b: Self) -> bool {
        (0..4).any(|i| a.0[i] > b.0[i])
    }
    #[inline(always)]
    unsafe fn gt(a: Self, b: Self, x: Self, y: Self) -> Self {
        Self(from_fn(|i| if a.0[i] > b.0[i] { x.0[i] } else { y.0[i] }))
    }
    unsafe fn gemm(g: &Gemm<T>) {
        // SAFETY: the panels are as `Gemm` says (the contract of `gemm`); this type needs no instruction set.
        unsafe { gemm::<Self>(g) }
    }
    #[inline(always)]
    unsafe fn call<R: Routine<Self>>(routine: R) -> R::Output {
        // SAFETY: the contract of `Vector`.
        unsafe { routine.plain() }
    }
}
