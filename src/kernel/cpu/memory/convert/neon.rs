// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions of NEON. The instructions between f16 and f32 are part of every AArch64, but their intrinsics need a
//! type that stable Rust lacks, so they are written as assembly.

#![allow(unused_unsafe, reason = "newer compilers take these intrinsics for safe where the target has NEON")]

use super::Convert;
use crate::kernel::cpu::vector::neon::Floats;
use core::arch::aarch64::*;
use core::arch::asm;

/// Four f16 as f32.
#[inline(always)]
fn widen(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: an instruction on registers.
    unsafe {
        asm!("fcvtl {:v}.4s, {:v}.4h", out(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags))
    };
    wide
}

/// Four f32 as f16, to nearest even.
#[inline(always)]
fn narrow(wide: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: as above.
    unsafe {
        asm!("fcvtn {:v}.4h, {:v}.4s", out(vreg) halves, in(vreg) wide, options(pure, nomem, nostack, preserves_flags))
    };
    halves
}

/// Four f32 as bf16, to nearest even; a NaN stays one, quiet, with its sign and the upper bits of its payload.
#[inline(always)]
fn bf16(x: float32x4_t) -> uint16x4_t {
    // SAFETY: NEON is part of the target.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
    }
}

impl Convert for Floats {
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: `p` is to eight elements of any alignment (the contract of `Convert`, here and below).
        let halves = unsafe { vld1q_u8(p) };
        // SAFETY: NEON is part of the target, here and below.
        unsafe {
            let halves = vreinterpretq_u16_u8(halves);
            Self([widen(vget_low_u16(halves)), widen(vget_high_u16(halves))])
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: as above.
        unsafe {
            let halves = vreinterpretq_u16_u8(vld1q_u8(p));
            Self([vget_low_u16(halves), vget_high_u16(halves)].map(|h| vreinterpretq_f32_u32(vshll_n_u16::<16>(h))))
        }
    }
    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        // SAFETY: as above.
        unsafe {
            Self(self.0.map(|x| {
                let bits = vreinterpretq_u32_f32(x);
                let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
                vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(x, x), bits, quiet))
            }))
        }
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: as above.
        unsafe {
            let four = vaddq_f32(self.0[0], self.0[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        // SAFETY: as above.
        unsafe { vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(narrow(self.0[0]), narrow(self.0[1])))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        // SAFETY: as above.
        unsafe { vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(bf16(self.0[0]), bf16(self.0[1])))) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of an unmapped address does nothing.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
}
