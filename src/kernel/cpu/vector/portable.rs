// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vectors without a specific instruction set: plain arrays.

use super::simd::{Pow2, Vector, exp_f32, exp2_f32, map_f64, tanh_f32};
use crate::kernel::cpu::product::Gemm;
use crate::kernel::cpu::product::gemm::gemm;

/// Four lanes in an array; the compiler may vectorise them for the target.
#[derive(Clone, Copy)]
pub(crate) struct FourLanes<T>([T; 4]);

macro_rules! lanes {
    ($t:ty, |$z:ident| $exp2:expr, |$x:ident| $exp:expr, |$y:ident| $tanh:expr) => {
        impl Vector for FourLanes<$t> {
            type T = $t;
            const W: usize = 4;
            const MR: usize = 4;
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                Self([x; 4])
            }
            #[inline(always)]
            unsafe fn load(p: *const $t) -> Self {
                // SAFETY: the caller passes a pointer to W elements.
                Self(unsafe { p.cast::<[$t; 4]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $t) {
                // SAFETY: as above.
                unsafe { p.cast::<[$t; 4]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                Self(core::array::from_fn(|i| self.0[i] + b.0[i]))
            }
            #[inline(always)]
            unsafe fn sub(self, b: Self) -> Self {
                Self(core::array::from_fn(|i| self.0[i] - b.0[i]))
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                Self(core::array::from_fn(|i| self.0[i] * b.0[i]))
            }
            #[inline(always)]
            unsafe fn div(self, b: Self) -> Self {
                Self(core::array::from_fn(|i| self.0[i] / b.0[i]))
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                    Self(core::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
                } else {
                    Self(core::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
                }
            }
            #[inline(always)]
            unsafe fn max(a: Self, b: Self) -> Self {
                Self(core::array::from_fn(|i| if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] }))
            }
            #[inline(always)]
            unsafe fn any_gt(a: Self, b: Self) -> bool {
                (0..4).any(|i| a.0[i] > b.0[i])
            }
            #[inline(always)]
            unsafe fn exp2(self) -> Self {
                let $z = self;
                // SAFETY: arrays need no instruction set.
                unsafe { $exp2 }
            }
            #[inline(always)]
            unsafe fn gt(a: Self, b: Self, x: Self, y: Self) -> Self {
                Self(core::array::from_fn(|i| if a.0[i] > b.0[i] { x.0[i] } else { y.0[i] }))
            }
            #[inline(always)]
            unsafe fn exp(self) -> Self {
                let $x = self;
                // SAFETY: arrays need no instruction set.
                unsafe { $exp }
            }
            #[inline(always)]
            unsafe fn tanh(self) -> Self {
                let $y = self;
                // SAFETY: arrays need no instruction set.
                unsafe { $tanh }
            }
            unsafe fn gemm(g: &Gemm<$t>) {
                // SAFETY: the panels are as `Gemm` says (the contract of `gemm`); this type needs no instruction set.
                unsafe { gemm::<Self>(g) }
            }
        }
    };
}
lanes!(f32, |x| exp2_f32(x), |x| exp_f32(x), |y| tanh_f32(y));
lanes!(f64, |x| map_f64(x, f64::exp2), |x| map_f64(x, f64::exp), |y| map_f64(y, f64::tanh));

impl Pow2 for FourLanes<f32> {
    #[inline(always)]
    unsafe fn pow2(p: Self, t: Self) -> Self {
        Self(core::array::from_fn(|i| f32::from_bits(p.0[i].to_bits().wrapping_add(t.0[i].to_bits() << 23))))
    }
}
