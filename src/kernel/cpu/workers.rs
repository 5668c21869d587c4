// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workers of a call: how units of work are distributed, and on which instruction set they run.
//!
//! A job is a list of units with disjoint results. One worker computes a unit from start to end, in an order that does
//! not depend on other units, so results have the same bits for any number of workers. Workers draw units from a
//! counter.

#[cfg(target_arch = "x86_64")]
use super::attention::{dq_order::DqOrder, tiled::Tiled};
use super::executor::{self, Executor};
use super::isa::Isa;
use super::job::{Job, SumType};
use super::memory::arena::Line;
#[cfg(target_arch = "x86_64")]
use super::product::amx::has_f16;
#[cfg(target_arch = "x86_64")]
use super::product::dots::DotBf16;
#[cfg(target_arch = "x86_64")]
use super::product::engine::AttentionEngine;
use super::product::engine::Dense;
#[cfg(target_arch = "x86_64")]
use super::product::forms::{Bf16, F16, ThreeParts, TileForm, TwoParts};
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
            _ => split(self.lines, self.each, worker),
        }
    }
}

/// A job over some documents of a call.
pub(super) struct Units<J> {
    job: J,
    isa: Isa,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone depend on the type"))]
    dtype: Dtype,
    next: AtomicUsize,
}

impl<J: Job> Units<J> {
    /// The units of a job with elements of `dtype`, on `isa`.
    pub(super) fn new(job: J, isa: Isa, dtype: Dtype) -> Self {
        Self { job, isa, dtype, next: AtomicUsize::new(0) }
    }

    /// Does units until none is left.
    ///
    /// # Safety
    /// The instruction set is present; the tensors of the call are valid, and no other code writes them (or, for the
    /// results, reads them) meanwhile.
    pub(super) unsafe fn work(&self, lines: &mut [Line]) {
        let (job, next) = (&self.job, &self.next);
        // SAFETY: the instruction set is there, the caller says; the counter hands out each unit once.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 if J::ENGINE && self.dtype == Dtype::Bf16 => {
                    amx::<J, <J::Acc as SumType>::DotBf16>(job, lines, next)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if J::ENGINE && self.dtype == Dtype::Bf16 => {
                    amx::<J, <J::Acc as SumType>::AmxBf16>(job, lines, next)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if J::ENGINE && self.dtype == Dtype::F16 && has_f16() => {
                    amx::<J, <J::Acc as SumType>::AmxF16>(job, lines, next)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if J::ENGINE && self.dtype == Dtype::F16 => {
                    amx::<J, <J::Acc as SumType>::AmxTwoParts>(job, lines, next)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx if J::ENGINE && self.dtype == Dtype::F32 => {
                    amx::<J, <J::Acc as SumType>::AmxThreeParts>(job, lines, next)
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => avx512(job, lines, next),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2(job, lines, next),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => job.work::<Dense<<J::Acc as SumType>::Neon>>(lines, next),
                _ => job.work::<Dense<<J::Acc as SumType>::Portable>>(lines, next),
            }
        }
    }
}

/// The units of a backward call on tiles.
#[cfg(target_arch = "x86_64")]
pub(super) struct TiledUnits<'a> {
    job: Tiled<'a>,
    next: AtomicUsize,
    order: DqOrder,
}

#[cfg(target_arch = "x86_64")]
impl<'a> TiledUnits<'a> {
    pub(super) fn new(job: Tiled<'a>) -> Self {
        Self { job, next: AtomicUsize::new(0), order: DqOrder::new() }
    }

    /// Does units until none is left.
    ///
    /// # Safety
    /// As [`Units::work`]; products of the call's type go through tiles on the job's instruction set.
    pub(super) unsafe fn work(&self, lines: &mut [Line]) {
        /// # Safety
        /// As [`Tiled::work`].
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
        unsafe fn work<H: TileForm>(units: &TiledUnits, lines: &mut [Line]) {
            // SAFETY: lines, units and instruction set are as `Tiled::work` needs them (the contract of this function).
            unsafe { units.job.work::<H>(lines, &units.next, &units.order) }
        }
        // SAFETY: the instruction set is there, the caller says; the counter hands out each unit once.
        unsafe {
            match self.job.call.q.dtype {
                _ if self.job.documents.isa == Isa::Avx512Bf16 => work::<DotBf16>(self, lines),
                Dtype::F16 if has_f16() => work::<F16>(self, lines),
                Dtype::F16 => work::<TwoParts>(self, lines),
                Dtype::F32 => work::<ThreeParts>(self, lines),
                _ => work::<Bf16>(self, lines),
            }
        }
    }
}

/// # Safety
/// As [`Job::work`]; AVX-512 with BF16 is present, and AMX and AMX-FP16 where they are the engine's.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn amx<J: Job, E: AttentionEngine<Sum = J::Acc>>(job: &J, lines: &mut [Line], next: &AtomicUsize) {
    // SAFETY: the contract of `Job::work`, and the engine's instruction set is present.
    unsafe { job.work::<E>(lines, next) }
}

/// # Safety
/// As [`Job::work`]; AVX-512 is present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
unsafe fn avx512<J: Job>(job: &J, lines: &mut [Line], next: &AtomicUsize) {
    // SAFETY: the contract of `Job::work`, and AVX-512 is present: the engine's instruction set.
    unsafe { job.work::<Dense<<J::Acc as SumType>::Avx512>>(lines, next) }
}

/// # Safety
/// As [`Job::work`]; AVX2 and FMA are present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<J: Job>(job: &J, lines: &mut [Line], next: &AtomicUsize) {
    // SAFETY: the contract of `Job::work`, and AVX2 and FMA are present: the engine's instruction set.
    unsafe { job.work::<Dense<<J::Acc as SumType>::Avx2>>(lines, next) }
}

/// One worker for each `each` lines.
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
fn split(lines: &mut [Line], each: usize, f: &(dyn Fn(&mut [Line]) + Sync)) {
    f(&mut lines[..each]);
}
