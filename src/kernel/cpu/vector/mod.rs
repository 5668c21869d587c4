// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vectors: the trait that the algorithms are written in, and one thin file for each instruction set that implements
//! it.
//!
//! The file of an instruction set only wraps its instructions. It contains no algorithm, so every machine runs the same
//! one.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;
pub(crate) mod routine;
pub(crate) mod simd;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;
