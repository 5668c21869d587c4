// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel call as units of work, on the vectors or tiles of its type of sums.

use super::memory::arena::Line;
use super::product::engine::AttentionEngine;
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
}
