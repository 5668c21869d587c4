// SPDX-License-Identifier: MIT OR Apache-2.0
//! A test tool: a transport on which one call fails.
//!
//! To test that nothing hangs and that errors name rank and step, a test must inject a fault at a known moment of an
//! otherwise unchanged run. [`Faulty`] wraps one rank's transport, counts its calls of `agree` and `exchange`, and
//! makes exactly one of them fail; all others pass through. Give one rank of a group a fault and the others
//! [`Fault::None`], so that all ranks have the same type.
//!
//! ```
//! use cpattn::transport::{Transport, fault::{Fault, Faulty}, local};
//! use std::time::Duration;
//!
//! let ranks = local::group(2, Duration::from_secs(10))?;
//! let results: Vec<_> = std::thread::scope(|scope| {
//!     let agree = |rank: local::Local| {
//!         let fault = if rank.rank() == 1 { Fault::Leave } else { Fault::None };
//!         Faulty::new(rank, 0, fault).agree(0..2, 42)
//!     };
//!     let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || agree(rank))).collect();
//!     threads.into_iter().map(|thread| thread.join().unwrap()).collect()
//! });
//! assert_eq!(results[0].as_ref().unwrap_err().to_string(), "rank 0, agree, step 0: rank 1 left");
//! # Ok::<(), cpattn::Error>(())
//! ```

use super::{Label, Message, Transport};
use crate::error::{Cause, Error, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    None,
    /// The call is delayed, and then made.
    Delay(Duration),
    /// The calling thread panics.
    Panic,
    /// The call aborts the run with [`Cause::Failed`] and returns an error.
    Fail,
    /// The transport is dropped; this call and all later ones return an error with [`Cause::Left`].
    Leave,
    /// The call never answers. It returns when the group has failed, with the group's error.
    Silence,
}

/// A transport whose call number `at` goes wrong; `agree` and `exchange` count, from 0.
#[derive(Debug)]
pub struct Faulty<T> {
    inner: RwLock<Option<Arc<T>>>,
    rank: usize,
    world: usize,
    at: u64,
    fault: Fault,
    calls: AtomicU64,
}

impl<T: Transport> Faulty<T> {
    /// Wraps `inner`.
    pub fn new(inner: T, at: u64, fault: Fault) -> Self {
        let (rank, world) = (inner.rank(), inner.world());
        Self { inner: RwLock::new(Some(Arc::new(inner))), rank, world, at, fault, calls: AtomicU64::new(0) }
    }

    /// The number of calls of `agree` and `exchange` so far. A run without a fault shows which values of `at` are
    /// possible.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn inner(&self) -> Option<Arc<T>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn own(&self, label: Label, cause: Cause) -> Error {
        label.error(self.rank, self.rank, cause)
    }

    /// Counts a call, and injects the fault if it is its turn.
    fn enter(&self, label: Label) -> Result<Arc<T>> {
        let gone = || self.own(label, Cause::Left);
        let inner = self.inner().ok_or_else(gone)?;
        if self.calls.fetch_add(1, Ordering::Relaxed) != self.at {
            return Ok(inner);
        }
        match self.fault {
            Fault::None => {}
            Fault::Delay(duration) => std::thread::sleep(duration),
            Fault::Panic => panic!("fault injected on rank {}, {}, step {}", self.rank, label.operation, label.step),
            Fault::Fail => {
                inner.abort(Cause::Failed);
                return Err(self.own(label, Cause::Failed));
            }
            Fault::Leave => {
                *self.inner.write().unwrap_or_else(PoisonError::into_inner) = None;
                return Err(gone());
            }
            Fault::Silence => loop {
                inner.poll()?;
                std::thread::sleep(Duration::from_millis(1));
            },
        }
        Ok(inner)
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        self.enter(Label::new("agree", 0))?.agree(group, fingerprint)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let inner = self.enter(label)?;
        // SAFETY: the lists are valid until the exchange is over (the contract of `exchange`), which is the wrapped one's.
        unsafe { inner.exchange(label, sends, recvs) }
    }

    fn poll(&self) -> Result<()> {
        match self.inner() {
            Some(inner) => inner.poll(),
            None => Err(self.own(Label::new("poll", 0), Cause::Left)),
        }
    }

    fn abort(&self, cause: Cause) {
        if let Some(inner) = self.inner() {
            inner.abort(cause);
        }
    }
}
