// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rayon's pool for the workers of a call, also in a process that was forked.
//!
//! A fork copies the memory of a process, but of its threads only the one that forks. Rayon's global pool has no
//! threads in the child and does not know it, so a job that is given to it is never begun. A child of the process that
//! first used the pool here therefore gets a pool of its own.

use crate::sync::Process;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Runs `job` where `rayon::join` has threads; or gives it back if no thread can be started.
pub(super) fn run<J: FnOnce() + Send>(job: J) -> Result<(), J> {
    static FIRST: OnceLock<Process> = OnceLock::new();
    // A thread of a pool takes back what no other thread of it begins.
    if rayon::current_thread_index().is_some() || FIRST.get_or_init(Process::this).is_this() {
        job();
        return Ok(());
    }
    match own() {
        Some(pool) => pool.install(job),
        None => return Err(job),
    }
    Ok(())
}

/// The pool of this process, as large as the global one.
fn own() -> Option<Arc<ThreadPool>> {
    static OWN: Mutex<Option<(Process, Arc<ThreadPool>)>> = Mutex::new(None);
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((process, pool)) = &*own
        && process.is_this()
    {
        return Some(Arc::clone(pool));
    }
    let pool = ThreadPoolBuilder::new().num_threads(rayon::current_num_threads()).build().ok()?;
    let (_, pool) = own.insert((Process::this(), Arc::new(pool)));
    Some(Arc::clone(pool))
}
