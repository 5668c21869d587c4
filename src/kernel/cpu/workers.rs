// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who does which unit of work, and on which instruction set.
//!
//! A job is a list of units that touch disjoint results; each is computed by one worker from start to end, in an order
//! of its own that knows nothing of the others. So results have the same bits for any number of workers, and the
//! workers may take units as they come: a counter hands them out.

use super::scratch::Line;
use super::simd::{Real, Vector};
use core::sync::atomic::AtomicUsize;

/// A kernel call, ready to run on any number of workers.
pub(super) trait Job: Sync {
    /// Type of the sums.
    type Acc: Real;

    /// Does units until none is left: `next` counts those taken.
    ///
    /// # Safety
    /// The instruction set of `V` is present, the tensors of the call are valid, and each unit is taken once.
    unsafe fn work<V: Vector<T = Self::Acc>>(&self, lines: &mut [Line], next: &AtomicUsize);
}

/// Runs the job on `workers` workers with `each` lines of memory.
///
/// # Safety
/// The tensors of the call are valid, and shared with nobody who writes (or, for the results, reads).
pub(super) unsafe fn run<J: Job>(job: &J, lines: &mut [Line], each: usize) {
    let next = AtomicUsize::new(0);
    let isa = Isa::best();
    split(lines, each, &|lines: &mut [Line]| {
        // SAFETY: `best` has asked for the instruction set; the rest is the caller's promise, and the counter hands
        // out each unit once.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512(job, lines, &next),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2(job, lines, &next),
                Isa::Portable => job.work::<<J::Acc as Real>::Portable>(lines, &next),
            }
        }
    });
}

#[derive(Clone, Copy)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if super::x86::has_avx512() {
                return Self::Avx512;
            }
            if super::x86::has_avx2() {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// # Safety
/// As [`Job::work`]; AVX-512 is present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
unsafe fn avx512<J: Job>(job: &J, lines: &mut [Line], next: &AtomicUsize) {
    // SAFETY: the caller's promise is passed on.
    unsafe { job.work::<<J::Acc as Real>::Avx512>(lines, next) }
}

/// # Safety
/// As [`Job::work`]; AVX2 and FMA are present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<J: Job>(job: &J, lines: &mut [Line], next: &AtomicUsize) {
    // SAFETY: the caller's promise is passed on.
    unsafe { job.work::<<J::Acc as Real>::Avx2>(lines, next) }
}

/// One worker for each `each` lines.
#[cfg(feature = "rayon")]
fn split(lines: &mut [Line], each: usize, f: &(impl Fn(&mut [Line]) + Sync)) {
    let workers = lines.len() / each;
    if workers <= 1 {
        return f(lines);
    }
    let (a, b) = lines.split_at_mut(workers / 2 * each);
    rayon::join(|| split(a, each, f), || split(b, each, f));
}

/// Without a thread pool the first worker does everything.
#[cfg(not(feature = "rayon"))]
fn split(lines: &mut [Line], each: usize, f: &(impl Fn(&mut [Line]) + Sync)) {
    f(&mut lines[..each]);
}
