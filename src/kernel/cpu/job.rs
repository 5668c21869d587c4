// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel call as units of work, on the vectors or tiles of its type of sums.

use super::memory::arena::Line;
use super::product::engine::AttentionEngine;
#[cfg(target_arch = "x86_64")]
use super::product::engine::Dense;
#[cfg(target_arch = "x86_64")]
use super::product::forms::{Bf16, F16, ThreeParts, TwoParts};
use super::vector::portable::FourLanes;
use super::vector::simd::{Real, Vector};
use core::sync::atomic::AtomicUsize;

/// A type of sums, with its vectors and, for f32, its tiles.
pub(super) trait SumType: Real {
    type Portable: Vector<T = Self>;
    #[cfg(target_arch = "aarch64")]
    type Neon: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type DotBf16: AttentionEngine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxBf16: AttentionEngine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxF16: AttentionEngine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxTwoParts: AttentionEngine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxThreeParts: AttentionEngine<Sum = Self>;
}

impl SumType for f32 {
    type Portable = FourLanes<f32>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::vector::neon::Floats;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = core::arch::x86_64::__m256;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = core::arch::x86_64::__m512;
    #[cfg(target_arch = "x86_64")]
    type DotBf16 = super::product::tile_engine::TileEngine<super::product::dots::DotBf16>;
    #[cfg(target_arch = "x86_64")]
    type AmxBf16 = super::product::tile_engine::TileEngine<Bf16>;
    #[cfg(target_arch = "x86_64")]
    type AmxF16 = super::product::tile_engine::TileEngine<F16>;
    #[cfg(target_arch = "x86_64")]
    type AmxTwoParts = super::product::tile_engine::TileEngine<TwoParts>;
    #[cfg(target_arch = "x86_64")]
    type AmxThreeParts = super::product::tile_engine::TileEngine<ThreeParts>;
}

impl SumType for f64 {
    type Portable = FourLanes<f64>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::vector::neon::Doubles;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = core::arch::x86_64::__m256d;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = core::arch::x86_64::__m512d;
    // No type of tiles has f64 sums.
    #[cfg(target_arch = "x86_64")]
    type DotBf16 = Dense<Self::Avx512>;
    #[cfg(target_arch = "x86_64")]
    type AmxBf16 = Dense<Self::Avx512>;
    #[cfg(target_arch = "x86_64")]
    type AmxF16 = Dense<Self::Avx512>;
    #[cfg(target_arch = "x86_64")]
    type AmxTwoParts = Dense<Self::Avx512>;
    #[cfg(target_arch = "x86_64")]
    type AmxThreeParts = Dense<Self::Avx512>;
}

/// A kernel call, ready to run on any number of workers.
pub(super) trait Job: Sync {
    /// Type of the sums.
    type Acc: SumType;
    /// Whether the products are those of the engine; if not, the job uses only its vectors.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone ask"))]
    const ENGINE: bool = false;

    /// Takes units until none is left; `next` counts the units taken.
    ///
    /// # Safety
    /// The instruction set of `E` is present, the tensors of the call are valid, and each unit is taken once.
    unsafe fn work<E: AttentionEngine<Sum = Self::Acc>>(&self, lines: &mut [Line], next: &AtomicUsize);
}
