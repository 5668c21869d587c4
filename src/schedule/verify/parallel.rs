// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on several processors, if there are threads. Results do not depend on the number of threads: each rank's result
//! is computed alone, and results are returned in rank order.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
#[cfg(feature = "std")]
use std::sync::{Mutex, PoisonError};

/// The number of threads worth starting.
pub(super) fn processors() -> usize {
    #[cfg(feature = "std")]
    let processors = std::thread::available_parallelism().map_or(1, core::num::NonZero::get);
    #[cfg(not(feature = "std"))]
    let processors = 1;
    processors
}

/// The number of ranks for each further thread, at least.
#[cfg(feature = "std")]
const RANKS_OF_A_THREAD: usize = 16;

/// Calls `work` for each rank, on at most `threads` threads, each with its own scratch `R`.
#[cfg_attr(not(feature = "std"), expect(unused_variables, reason = "threads need std"))]
pub(super) fn each<T: Send, R: Default>(
    ranks: usize,
    threads: usize,
    work: impl Fn(usize, &mut R) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut room = R::default();
        let left = core::iter::from_fn(|| Some(next.fetch_add(1, Relaxed)).filter(|&rank| rank < ranks));
        left.map(|rank| (rank, work(rank, &mut room))).collect::<Vec<_>>()
    };
    #[cfg(feature = "std")]
    let mut done = std::thread::scope(|scope| {
        let threads = threads.min(ranks / RANKS_OF_A_THREAD);
        // If a thread cannot be started, the other threads do its part.
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, take).ok();
        let helpers: Vec<_> = (1..threads).filter_map(start).collect();
        let mut done = take();
        helpers.into_iter().for_each(|helper| done.extend(joined(helper)));
        done
    });
    #[cfg(not(feature = "std"))]
    let mut done = take();
    done.sort_unstable_by_key(|of_rank| of_rank.0);
    done.into_iter().map(|of_rank| of_rank.1).collect()
}

/// The results of both closures, in parallel if possible.
#[cfg(feature = "std")]
pub(super) fn two<A: Send, B>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B) -> (A, B) {
    if processors() == 1 {
        return (a(), b());
    }
    // If a thread cannot be started, its closure is dropped, so `a` is kept outside of it.
    let waiting = Mutex::new(Some(a));
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
    let run = || take().map(|a| a());
    std::thread::scope(|scope| {
        let helper = std::thread::Builder::new().spawn_scoped(scope, run);
        let b = b();
        let done = match helper {
            Ok(helper) => joined(helper),
            Err(_) => run(),
        };
        (done.expect("nothing else took it"), b)
    })
}

/// The results of both closures.
#[cfg(not(feature = "std"))]
pub(super) fn two<A, B>(a: impl FnOnce() -> A, b: impl FnOnce() -> B) -> (A, B) {
    (a(), b())
}

/// The result of a thread; its panic is resumed here.
#[cfg(feature = "std")]
fn joined<T>(helper: std::thread::ScopedJoinHandle<'_, T>) -> T {
    helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
