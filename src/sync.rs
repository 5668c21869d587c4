// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locks, condition variables, atomics and threads: the standard library's, or loom's.
//!
//! The code with which ranks, lanes and workers of a process wait for each other (transport `local`, the lanes of a
//! rank, the order of dq) takes its primitives from here, so that the model checker explores the same code that runs in
//! production. Waits for something outside of the process are not in a model: MPI's requests and notices, and the
//! thread that watches NCCL and the driver; tests over processes and over the stand-ins cover these. Loom's primitives
//! are used under the crate's own `--cfg cpattn_loom`: a user who model-checks with `--cfg loom` does not change this
//! crate by accident. Time does not exist in a model, so there a wait never expires, and loom reports a wait that no
//! thread ends as a deadlock.
//!
//! Poison is ignored: no code of this crate leaves a locked value half-written when it unwinds.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

#[cfg(cpattn_loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64},
};
#[cfg(cpattn_loom)]
pub(crate) use loom::thread;
#[cfg(not(any(cpattn_loom, cpattn_tsan)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(cpattn_loom))]
pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicU64},
    thread,
};

#[cfg(cpattn_tsan)]
mod spin;
#[cfg(cpattn_tsan)]
pub(crate) use spin::{Condvar, Mutex, MutexGuard};

/// Locks `mutex`, poisoned or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parks on `condvar` until notified. May wake for no reason.
pub(crate) fn park<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Parks on `condvar` until notified or until `limit`; the flag says that `limit` has passed. May wake for no reason.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, limit: Limit) -> (MutexGuard<'a, T>, bool) {
    let forever = |guard| (park(condvar, guard), false);
    match limit.0 {
        None => forever(guard),
        Some(_) if cfg!(cpattn_loom) => forever(guard),
        Some(at) => {
            let left = at.saturating_duration_since(Instant::now());
            let (guard, _) = condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner);
            (guard, Instant::now() >= at)
        }
    }
}

/// How often a thread yields its core before it parks.
pub(crate) const YIELDS: u32 = 4;

/// Yields the core once, so that a thread can check again without being parked and notified, which costs two system
/// calls and work of the scheduler. False if a yield does not pay at the moment: if the last yield returned late, other
/// programs use the core, and this thread would wait for their time slices of milliseconds, whereas a parked thread is
/// woken in time. After a late yield no thread of the process yields for sixteen times its duration, at most 100 ms.
/// Models do not yield.
pub(crate) fn yield_core() -> bool {
    #[cfg(cpattn_loom)]
    return false;
    #[cfg(not(cpattn_loom))]
    {
        use std::sync::{
            OnceLock,
            atomic::{AtomicU64, Ordering},
        };
        /// A yield that takes longer is late. It is less than the time slice of another program, and more than the
        /// threads of a few ranks take one after another.
        const LATE: u64 = 1_000_000;
        const LONGEST: u64 = 100_000_000;
        static START: OnceLock<Instant> = OnceLock::new();
        /// No thread yields before this time, in nanoseconds after `START`. It affects speed only.
        static UNTIL: AtomicU64 = AtomicU64::new(0);
        let start = *START.get_or_init(Instant::now);
        let now = || start.elapsed().as_nanos() as u64;
        let began = now();
        if began < UNTIL.load(Ordering::Relaxed) {
            return false;
        }
        thread::yield_now();
        let over = now();
        let took = over - began;
        if took > LATE {
            UNTIL.fetch_max(over + (16 * took).min(LONGEST), Ordering::Relaxed);
        }
        true
    }
}

/// A process. A thread that it starts, and whatever waits for that thread, is of no use in a process that is forked
/// from it: of the threads the child has only the one that forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// The process that runs this.
    pub(crate) fn this() -> Self {
        // Elsewhere no process is forked, and some systems have no processes.
        Self(if cfg!(unix) { std::process::id() } else { 0 })
    }

    pub(crate) fn is_this(self) -> bool {
        self == Self::this()
    }

    /// The number that the system gives it.
    pub(crate) const fn id(self) -> u32 {
        self.0
    }
}

/// Stands for memory that its owner lends to other threads. In a model, [`borrow`](Self::borrow) and [`own`](Self::own)
/// are accesses that loom checks: it reports accesses that are not ordered. Otherwise they do nothing.
pub(crate) struct Lent(#[cfg(cpattn_loom)] loom::cell::UnsafeCell<()>);

// SAFETY: there is nothing inside that could be shared; loom's bookkeeping runs on one thread at a time.
#[cfg(cpattn_loom)]
unsafe impl Sync for Lent {}

impl Lent {
    pub(crate) fn new() -> Self {
        Self(
            #[cfg(cpattn_loom)]
            loom::cell::UnsafeCell::new(()),
        )
    }

    /// Runs `read`, which reads the memory.
    pub(crate) fn borrow<R>(&self, read: impl FnOnce() -> R) -> R {
        #[cfg(cpattn_loom)]
        return self.0.with(|_| read());
        #[cfg(not(cpattn_loom))]
        read()
    }

    /// From here on the owner may write the memory, or free it.
    pub(crate) fn own(&self) {
        #[cfg(cpattn_loom)]
        self.0.with_mut(|_| ());
    }
}

/// A moment at which a wait ends, if any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit(Option<Instant>);

impl Limit {
    /// No limit.
    pub(crate) const NEVER: Self = Self(None);

    /// `duration` from now; a duration beyond what the clock can express never ends.
    pub(crate) fn after(duration: Duration) -> Self {
        Self(Instant::now().checked_add(duration))
    }
}
