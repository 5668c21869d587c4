// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a kernel call is to the workers: units of work, done on vectors or tiles that its type of sums has.

use super::arena::Line;
#[cfg(target_arch = "x86_64")]
use super::engine::Dense;
use super::engine::Engine;
#[cfg(target_arch = "x86_64")]
use super::forms::{Bf16, F16, ThreeParts, TwoParts};
use super::portable::FourLanes;
use super::simd::{Real, Vector};
use core::sync::atomic::AtomicUsize;

/// A type of sums, with what works on it: vectors, and where it is the type of their sums, tiles.
pub(super) trait Machine: Real {
    type Portable: Vector<T = Self>;
    #[cfg(target_arch = "aarch64")]
    type Neon: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<T = Self>;
    #[cfg(target_arch = "x86_64")]
    type DotBf16: Engine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxBf16: Engine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxF16: Engine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxTwoParts: Engine<Sum = Self>;
    #[cfg(target_arch = "x86_64")]
    type AmxThreeParts: Engine<Sum = Self>;
}

impl Machine for f32 {
    type Portable = FourLanes<f32>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::neon::Floats;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = core::arch::x86_64::__m256;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = core::arch::x86_64::__m512;
    #[cfg(target_arch = "x86_64")]
    type DotBf16 = super::tile_engine::TileEngine<super::dots::DotBf16>;
    #[cfg(target_arch = "x86_64")]
    type AmxBf16 = super::tile_engine::TileEngine<Bf16>;
    #[cfg(target_arch = "x86_64")]
    type AmxF16 = super::tile_engine::TileEngine<F16>;
    #[cfg(target_arch = "x86_64")]
    type AmxTwoParts = super::tile_engine::TileEngine<TwoParts>;
    #[cfg(target_arch = "x86_64")]
    type AmxThreeParts = super::tile_engine::TileEngine<ThreeParts>;
}

impl Machine for f64 {
    type Portable = FourLanes<f64>;
    #[cfg(target_arch = "aarch64")]
    type Neon = super::neon::Doubles;
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
    type Acc: Machine;
    /// Products are the engine's, and not those of its vectors alone.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone ask"))]
    const ENGINE: bool = false;

    /// Does units until none is left: `next` counts those taken.
    ///
    /// # Safety
    /// The instruction set of `E` is present, the tensors of the call are valid, and each unit is taken once.
    unsafe fn work<E: Engine<Sum = Self::Acc>>(&self, lines: &mut [Line], next: &AtomicUsize);
}
