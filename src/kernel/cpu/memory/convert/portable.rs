// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions without a specific instruction set: those of the crate `half`.

use super::Convert;
use crate::kernel::cpu::vector::portable::FourLanes;
use crate::kernel::cpu::vector::simd::Vector;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

impl Convert for FourLanes<f32> {
    // Calls, since `half` asks for the machine's instructions in each copy.
    #[inline(never)]
    unsafe fn load_f16(p: *const u8) -> Self {
        let (mut halves, mut wide) = ([f16::ZERO; Self::W], [0.0; Self::W]);
        // SAFETY: `p` is to W elements, the arrays have W; arrays need no instruction set, here and below.
        unsafe {
            core::ptr::copy_nonoverlapping(p, halves.as_mut_ptr().cast(), 2 * Self::W);
            halves.convert_to_f32_slice(&mut wide);
            Self::load(wide.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: as above.
        let halves = unsafe { p.cast::<[bf16; Self::W]>().read_unaligned() };
        // SAFETY: as above.
        unsafe { Self::load(halves.map(bf16::to_f32).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        // `load_bf16` has made it quiet.
        self
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        let mut x = [0.0; Self::W];
        // SAFETY: as above.
        unsafe { self.store(x.as_mut_ptr()) };
        (x[0] + x[2]) + (x[1] + x[3])
    }
    #[inline(never)]
    unsafe fn store_f16(self, p: *mut u8) {
        let (mut halves, mut wide) = ([f16::ZERO; Self::W], [0.0; Self::W]);
        // SAFETY: as above.
        unsafe {
            self.store(wide.as_mut_ptr());
            halves.convert_from_f32_slice(&wide);
            p.cast::<[f16; Self::W]>().write_unaligned(halves);
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        let mut wide = [0.0; Self::W];
        // SAFETY: as above.
        unsafe {
            self.store(wide.as_mut_ptr());
            p.cast::<[bf16; Self::W]>().write_unaligned(wide.map(bf16::from_f32));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
