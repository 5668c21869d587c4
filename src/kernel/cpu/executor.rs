// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads of the caller's for the workers of a kernel call.
//!
//! With the feature `rayon` workers run in a pool of this crate, or in that of the thread that calls; a program with
//! its own pool passes it as an [`Executor`]. Otherwise the kernels start no threads. The work of a worker does not
//! depend on its thread, on the time, or on the number of workers: a counter hands out the work units, and when the
//! executor returns, the thread that made the call does the rest. So an executor can make a call slow, but not wrong.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// A pool of threads.
///
/// ```
/// use cpattn::kernel::cpu::{Executor, Scratch};
/// use std::sync::Arc;
///
/// /// New threads for each call: simple, and 100 microseconds or more a call.
/// struct Threads;
///
/// impl Executor for Threads {
///     fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
///         std::thread::scope(|scope| (0..n).for_each(|_| drop(scope.spawn(work))));
///     }
/// }
///
/// let scratch = Scratch::new(4).with_executor(Arc::new(Threads));
/// assert_eq!(scratch.workers(), 4);
/// ```
pub trait Executor: Send + Sync {
    /// Calls `work` `n` times, best on `n` threads at once, and returns when all calls have returned. Each call is one
    /// worker, which works until nothing is left to begin. Fewer calls, or calls one after another, only take longer.
    ///
    /// A panic of `work` should reach the caller of `execute`; where it does not, the kernel call panics.
    fn execute(&self, n: usize, work: &(dyn Fn() + Sync));
}

/// Records that a worker has unwound.
struct Unwound<'a>(&'a AtomicBool);

impl Drop for Unwound<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs one worker for each `each` lines of memory.
pub(super) fn execute<L: Send>(
    executor: &dyn Executor,
    lines: &mut [L],
    each: usize,
    worker: &(dyn Fn(&mut [L]) + Sync),
) {
    let (workers, unwound) = (lines.len() / each, AtomicBool::new(false));
    let free = Mutex::new(lines.chunks_exact_mut(each));
    executor.execute(workers, &|| {
        // If `work` is called too often, the extra call finds no memory and does nothing.
        let Some(lines) = free.lock().unwrap_or_else(PoisonError::into_inner).next() else { return };
        let note = Unwound(&unwound);
        worker(lines);
        core::mem::forget(note);
    });
    // A unit that was begun and not finished cannot be repaired here.
    assert!(!unwound.load(Ordering::Relaxed), "a worker of a kernel call panicked, and the executor went on");
    // Does the work that an executor with fewer calls has left; otherwise no unit remains.
    worker(&mut lines[..each]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Catches a panic that it should pass on.
    struct Swallows;

    impl Executor for Swallows {
        fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
            (0..n).for_each(|_| drop(catch_unwind(AssertUnwindSafe(work))));
        }
    }

    #[test]
    fn a_swallowed_panic_is_not_silent() {
        let mut lines = [0u8; 6];
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            execute(&Swallows, &mut lines, 2, &|_: &mut [u8]| panic!("a unit"));
        }));
        let message = outcome.unwrap_err();
        assert!(message.downcast_ref::<&str>().is_some_and(|m| m.contains("the executor went on")));
    }

    #[test]
    fn each_worker_has_memory_of_its_own() {
        let mut lines = [0u8; 7];
        // The last line is left over and belongs to no worker.
        execute(&Swallows, &mut lines, 2, &|mine: &mut [u8]| {
            assert_eq!(mine.len(), 2);
            mine.iter_mut().for_each(|x| *x += 1);
        });
        // The calling thread has run the first worker once more.
        assert_eq!(lines, [2, 2, 1, 1, 1, 1, 0]);
    }
}
