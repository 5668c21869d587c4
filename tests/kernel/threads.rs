// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads for the workers of a call, in builds with and without `rayon`.

use cpattn::kernel::cpu::{Executor, Scratch};
use std::sync::Arc;

/// A thread for each worker.
pub struct Threads;

impl Executor for Threads {
    fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| (0..n).for_each(|_| drop(scope.spawn(work))));
    }
}

/// With the feature `rayon` the scratch as it is, so that its workers run in rayon's pool.
pub fn threaded(scratch: Scratch) -> Scratch {
    if cfg!(feature = "rayon") { scratch } else { scratch.with_executor(Arc::new(Threads)) }
}
