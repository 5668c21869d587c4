// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workers of a call: how units of work are distributed, and on which instruction set they run.
//!
//! A job is a list of units with disjoint results. One worker computes a unit from start to end, in an order that does
//! not depend on other units, so results have the same bits for any number of workers. Workers draw units from a
//! counter.

use super::executor::{self, Executor};
use super::isa::Isa;
use super::job::{Job, SumType};
use super::memory::arena::Line;
#[cfg(feature = "rayon")]
use super::pool;
#[cfg(target_arch = "x86_64")]
use super::product::amx::has_f16;
#[cfg(target_arch = "x86_64")]
use super::product::dots::DotBf16;
#[cfg(target_arch = "x86_64")]
use super::product::forms::{Bf16, F16, ThreeParts, TwoParts};
use crate::element::Dtype;
use core::sync::atomic::AtomicUsize;

/// The workers of one call: one for each `each` lines of memory, on the caller's threads or this crate's.
pub(super) struct Crew<'a> {
    pub lines: &'a mut [Line],
    pub each: usize,
    pub executor: Option<&'a dyn Executor>,
}

impl<'a> Crew<'a> {
    /// The number of workers.
    pub(super) fn workers(&self) -> usize {
        self.lines.len() / self.each
    }

    /// The same workers, for one of several jobs.
    pub(super) fn again(&mut self) -> Crew<'_> {
        Crew { lines: self.lines, each: self.each, executor: self.executor }
    }

    /// `worker` is a trait object, so that the kernels are compiled once for all callers.
    pub(super) fn run(self, worker: &(dyn Fn(&mut [Line]) + Sync)) {
        match self.executor {
            Some(executor) if self.lines.len() > self.each => {
                executor::execute(executor, self.lines, self.each, worker)
            }
            _ => on_pool(self.lines, self.each, worker),
        }
    }
}

/// A job over some documents of a call.
pub(super) struct Units<J> {
    job: J,
    isa: Isa,
    dtype: Dtype,
    next: AtomicUsize,
}

impl<J: Job> Units<J> {
    /// The units of a job with elements of `dtype`, on `isa`: on tiles if it has tiles for this type.
    pub(super) fn new(job: J, isa: Isa, dtype: Dtype) -> Self {
        Self { job, isa, dtype, next: AtomicUsize::new(0) }
    }

    /// Does units until none is left.
    ///
    /// # Safety
    /// The instruction set is present; the tensors of the call are valid, with sums of `A`, and no other code writes
    /// them (or, for the results, reads them) meanwhile.
    pub(super) unsafe fn work<A: SumType>(&self, lines: &mut [Line]) {
        // SAFETY: the instruction set is there, the caller says; the counter hands out each unit once.
        unsafe {
            match (self.isa, self.dtype) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512Bf16, _) => self.job.tiles::<DotBf16>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Amx, Dtype::Bf16) => self.job.tiles::<Bf16>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Amx, Dtype::F16) if has_f16() => self.job.tiles::<F16>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Amx, Dtype::F16) => self.job.tiles::<TwoParts>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Amx, _) => self.job.tiles::<ThreeParts>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, _) => self.job.avx512::<A>(lines, &self.next),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, _) => self.job.avx2::<A>(lines, &self.next),
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon, _) => self.job.neon::<A>(lines, &self.next),
                _ => self.job.portable::<A>(lines, &self.next),
            }
        }
    }
}

/// One worker for each `each` lines, in a pool of rayon's.
#[cfg(feature = "rayon")]
fn on_pool(lines: &mut [Line], each: usize, worker: &(dyn Fn(&mut [Line]) + Sync)) {
    if lines.len() / each <= 1 {
        return worker(lines);
    }
    match pool::threads() {
        pool::PoolThreads::Here => split(lines, each, worker),
        pool::PoolThreads::Own(threads) => threads.install(|| split(lines, each, worker)),
        pool::PoolThreads::Nowhere => worker(&mut lines[..each]),
    }
}

#[cfg(feature = "rayon")]
fn split(lines: &mut [Line], each: usize, f: &(dyn Fn(&mut [Line]) + Sync)) {
    let workers = lines.len() / each;
    if workers <= 1 {
        return f(lines);
    }
    let (a, b) = lines.split_at_mut(workers / 2 * each);
    rayon::join(|| split(a, each, f), || split(b, each, f));
}

/// Without a thread pool the first worker does everything.
#[cfg(not(feature = "rayon"))]
fn on_pool(lines: &mut [Line], each: usize, worker: &(dyn Fn(&mut [Line]) + Sync)) {
    worker(&mut lines[..each]);
}
