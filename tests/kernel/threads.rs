// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads for the workers of a call, in builds with and without `rayon`.

use cpattn::kernel::cpu::Executor;

/// A thread for each worker.
pub struct Threads;

impl Executor for Threads {
    fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| (0..n).for_each(|_| drop(scope.spawn(work))));
    }
}
