// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locks that ThreadSanitizer can check; used by `.ci/tsan` only (`--cfg cpattn_tsan`).
//!
//! The standard library is compiled without instrumentation. ThreadSanitizer therefore does not see the order that its
//! condition variables make, and reports every access that relies on it. The locks here are made of atomics of this
//! crate, which are instrumented. They are slow, and wake for no reason; both are allowed. A run with them shows that
//! all memory the crate shares between threads is ordered by its locks, not that the standard library's locks are
//! right.

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::LockResult,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};

#[derive(Default)]
pub(crate) struct Mutex<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through a guard only, and one guard exists at a time.
unsafe impl<T: Send> Sync for Mutex<T> {}

pub(crate) struct MutexGuard<'a, T>(&'a Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        while self.taken.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok(MutexGuard(self))
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock.
        unsafe { &mut *self.0.value.get() }
    }
}

#[derive(Default)]
pub(crate) struct Condvar(AtomicU32);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notify_one(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.wait_timeout(guard, Duration::from_secs(3600)).map(|(guard, _)| guard).map_err(|_| unreachable!())
    }

    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, ())> {
        let (seen, mutex, start) = (self.0.load(Ordering::Acquire), guard.0, Instant::now());
        drop(guard);
        while self.0.load(Ordering::Acquire) == seen && start.elapsed() < limit {
            std::thread::sleep(Duration::from_micros(50));
        }
        match mutex.lock() {
            Ok(guard) => Ok((guard, ())),
            Err(_) => unreachable!(),
        }
    }
}
