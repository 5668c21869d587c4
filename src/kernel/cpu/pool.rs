// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads for the workers of a call: a pool of this crate in each process.
//!
//! Rayon's global pool is not used. A fork copies the memory of a process, but of its threads only the one that forks:
//! in a child of a program that has used the global pool, that pool has no threads and does not know it, so a job that
//! is given to it is never begun; and nothing tells whether the program has used it. If its threads cannot start it is
//! lost for the whole process. So the pool is made with the first call of a process that has several workers, also in
//! a process that was forked, and made again by the next call if its threads cannot start. Rayon decides on its size:
//! `RAYON_NUM_THREADS`, else the number of cores.
//!
//! There is no lock here, which a fork could copy while it is held.

use crate::{
    error::{Error, Result},
    sync::Process,
};
use core::ptr::null_mut;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::{
    boxed::Box,
    io,
    sync::atomic::{AtomicPtr, Ordering},
};

/// The pool of the process that made it.
struct OwnPool {
    process: Process,
    threads: ThreadPool,
}

/// Makes sure that [`run`] has threads.
///
/// # Errors
/// [`Error::Device`] if a thread cannot start; the next call tries again.
pub(super) fn ready() -> Result<()> {
    if is_in_a_pool() {
        return Ok(());
    }
    own().map(|_| ())
}

/// Where `rayon::join` has threads that are not those of rayon's global pool.
pub(super) enum PoolThreads {
    /// On this thread, which is one of a pool.
    Here,
    /// In the pool of this crate.
    Own(&'static ThreadPool),
    /// Nowhere, since none can start: the thread that calls does all work.
    Nowhere,
}

/// The threads of a call.
pub(super) fn threads() -> PoolThreads {
    if is_in_a_pool() { PoolThreads::Here } else { own().map_or(PoolThreads::Nowhere, PoolThreads::Own) }
}

/// Whether this thread belongs to a pool, such as one of the caller's: its other threads take part, and what none of
/// them begins it does itself.
fn is_in_a_pool() -> bool {
    rayon::current_thread_index().is_some()
}

fn own() -> Result<&'static ThreadPool> {
    static OWN: AtomicPtr<OwnPool> = AtomicPtr::new(null_mut());
    let seen = OWN.load(Ordering::Acquire);
    // SAFETY: what is stored below is never freed.
    if let Some(pool) = unsafe { seen.as_ref() }
        && pool.process.is_this()
    {
        return Ok(&pool.threads);
    }
    let threads = build()?;
    let made = Box::into_raw(Box::new(OwnPool { process: Process::this(), threads }));
    // The pool of a parent stays where it is: its end would wait for locks that another thread held at the fork.
    match OWN.compare_exchange(seen, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was stored, and is never freed.
        Ok(_) => Ok(unsafe { &(*made).threads }),
        Err(first) => {
            // SAFETY: nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: what was stored is never freed. Another thread of this process stored it, just now.
            Ok(unsafe { &(*first).threads })
        }
    }
}

fn build() -> Result<ThreadPool> {
    ThreadPoolBuilder::new().thread_name(|i| std::format!("cpattn-worker-{i}")).build().map_err(|error| {
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
        match source {
            Some(source) => Error::of_thread("a worker of the kernels", source),
            None => Error::of_thread("a worker of the kernels", &io::Error::other(error)),
        }
    })
}
