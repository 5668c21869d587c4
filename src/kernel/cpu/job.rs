// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel call as units of work, on the vectors or tiles of its type of sums.

use super::memory::arena::Line;
use super::product::engine::{AttentionEngine, Dense};
#[cfg(target_arch = "x86_64")]
use super::product::forms::TileForm;
use super::vector::portable::FourLanes;
use super::vector::simd::{Real, Vector};
use core::sync::atomic::AtomicUsize;

/// A type of sums, with its vectors.
pub(super) trait SumType: Real {
    type Portable: Vector<T = Self>;
    #[cfg(target_arch = "aarch64")]
    type Neon: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<T = Self>;
}

impl SumType for f32 {
    type Portable = FourLanes<f32>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::vector::neon::Floats;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = core::arch::x86_64::__m256;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = core::arch::x86_64::__m512;
}

impl SumType for f64 {
    type Portable = FourLanes<f64>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::vector::neon::Doubles;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = core::arch::x86_64::__m256d;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = core::arch::x86_64::__m512d;
}

/// A kernel call, ready to run on any number of workers.
///
/// The methods that enter an instruction set are the job's, not those of the type that calls them: rustc distributes
/// what it compiles over units by the module of a method's type, so forward, dk and dv, and dq are compiled side by
/// side. They are never inlined, for the same reason.
pub(super) trait Job: Sync {
    /// Takes units until none is left; `next` counts the units taken.
    ///
    /// # Safety
    /// The instruction set of `E` is present, the tensors of the call are valid and have sums of `E`, and each unit is
    /// taken once.
    unsafe fn work<E: AttentionEngine>(&self, lines: &mut [Line], next: &AtomicUsize);

    /// The same on tiles.
    ///
    /// # Safety
    /// As [`Job::work`]; AVX-512 with BF16 and the products of `H` are present.
    #[cfg(target_arch = "x86_64")]
    unsafe fn work_on_tiles<H: TileForm>(&self, lines: &mut [Line], next: &AtomicUsize);

    /// # Safety
    /// As [`Job::work_on_tiles`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn tiles<H: TileForm>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract.
        unsafe { self.work_on_tiles::<H>(lines, next) }
    }

    /// # Safety
    /// As [`Job::work`]; AVX-512 is present.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
    #[inline(never)]
    unsafe fn avx512<A: SumType>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract of `Job::work`, and AVX-512 is present: the engine's instruction set.
        unsafe { self.work::<Dense<A::Avx512>>(lines, next) }
    }

    /// # Safety
    /// As [`Job::work`]; AVX2 and FMA are present.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    unsafe fn avx2<A: SumType>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract of `Job::work`, and AVX2 and FMA are present: the engine's instruction set.
        unsafe { self.work::<Dense<A::Avx2>>(lines, next) }
    }

    /// # Safety
    /// As [`Job::work`].
    #[cfg(target_arch = "aarch64")]
    #[inline(never)]
    unsafe fn neon<A: SumType>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract of `Job::work`; NEON is part of every AArch64.
        unsafe { self.work::<Dense<A::Neon>>(lines, next) }
    }

    /// # Safety
    /// As [`Job::work`].
    #[inline(never)]
    unsafe fn portable<A: SumType>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract of `Job::work`; the engine needs no instruction set.
        unsafe { self.work::<Dense<A::Portable>>(lines, next) }
    }
}
