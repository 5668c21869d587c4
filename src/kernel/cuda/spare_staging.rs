// SPDX-License-Identifier: MIT OR Apache-2.0
//! Staging memory on loan from its device, which keeps the memory that no user has at present.
//!
//! To free memory, a driver waits until the whole device is idle. So a [`StreamKernels`](super::StreamKernels) that is
//! dropped frees nothing: its staging memory stays with the device for the next user of the same size, and is freed
//! with the device. Memory beyond `MAX_BYTES` is freed at once.

use super::{Cuda, staging::Staging};
use crate::error::Result;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

/// Bytes that a device keeps, on each side.
const MAX_BYTES: usize = 16 << 20;

/// Staging memory that goes back to its device when it is dropped, after a wait for the launches that use it.
#[derive(Debug)]
pub(super) struct LentStaging {
    /// `None` in `drop` alone.
    staging: Option<Staging>,
    cuda: Arc<Cuda>,
}

impl LentStaging {
    /// Takes spare staging memory of this size, or allocates it.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize, launches: usize) -> Result<Self> {
        let staging = match cuda.spare_staging.take(bytes, launches) {
            Some(staging) => staging,
            None => cuda.staging(bytes, launches)?,
        };
        Ok(Self { staging: Some(staging), cuda: Arc::clone(cuda) })
    }
}

impl Deref for LentStaging {
    type Target = Staging;

    fn deref(&self) -> &Staging {
        self.staging.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for LentStaging {
    fn deref_mut(&mut self) -> &mut Staging {
        self.staging.as_mut().expect("taken by drop alone")
    }
}

impl Drop for LentStaging {
    fn drop(&mut self) {
        // A failure means that the context is gone, and its memory with it.
        if let Some(mut staging) = self.staging.take()
            && staging.drain().is_ok()
        {
            self.cuda.spare_staging.put(staging);
        }
    }
}

/// Staging memory without launches in flight.
#[derive(Debug, Default)]
pub(super) struct SpareStaging(Mutex<Vec<Staging>>);

impl SpareStaging {
    /// Takes spare memory of this size, if there is any.
    pub fn take(&self, bytes: usize, launches: usize) -> Option<Staging> {
        // A panic leaves the list consistent.
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = spares.iter().position(|staging| staging.is_like(bytes, launches))?;
        Some(spares.swap_remove(at))
    }

    /// Adds memory without launches in flight, or frees it.
    pub fn put(&self, staging: Staging) {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spares.iter().map(Staging::bytes).sum::<usize>() + staging.bytes() <= MAX_BYTES {
            spares.push(staging);
        } else {
            // The memory is freed after the lock, so that other threads need not wait.
            drop(spares);
            drop(staging);
        }
    }
}
