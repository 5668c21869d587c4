// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions of the kernels that are compiled for an instruction set and called. Nothing that runs for each key belongs
//! here.

/// Code that kernels call. Everything else is inlined into each kernel: one for each pass, type of sums, instruction
/// set and form of tiles. What runs once for a unit, a tile of keys or a row takes no longer as a function, of which
/// there is one for each type of vectors.
///
/// As in [`Job`](crate::kernel::cpu::job::Job), the functions that enter an instruction set are the routine's and not
/// the vector's, so that rustc compiles them side by side.
pub(crate) trait Routine<V>: Sized {
    type Output;

    /// # Safety
    /// The instruction set of `V` is present; the rest is up to the routine.
    unsafe fn run(self) -> Self::Output;

    /// # Safety
    /// As [`Routine::run`]; AVX-512 is present.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
    #[inline(never)]
    unsafe fn avx512(self) -> Self::Output {
        // SAFETY: the contract.
        unsafe { self.run() }
    }

    /// # Safety
    /// As [`Routine::run`]; AVX2 and FMA are present.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    unsafe fn avx2(self) -> Self::Output {
        // SAFETY: the contract.
        unsafe { self.run() }
    }

    /// # Safety
    /// As [`Routine::run`]; `V` needs no instruction set that the target lacks.
    #[inline(never)]
    unsafe fn plain(self) -> Self::Output {
        // SAFETY: the contract.
        unsafe { self.run() }
    }
}
