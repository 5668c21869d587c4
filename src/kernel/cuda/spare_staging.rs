// SPDX-License-Identifier: MIT OR Apache-2.0
//! Staging memory of a device that no user has at present.
//!
//! To free memory, a driver waits until the whole device is idle. So a [`StreamKernels`](super::StreamKernels) that is
//! dropped frees nothing: its staging memory stays with the device for the next user of the same size, and is freed
//! with the device. Memory beyond `MAX_BYTES` is freed at once.

use super::staging::Staging;
use alloc::vec::Vec;
use std::sync::{Mutex, PoisonError};

/// Bytes that a device keeps, on each side.
const MAX_BYTES: usize = 16 << 20;

/// Staging memory without launches in flight.
#[derive(Debug, Default)]
pub(super) struct SpareStaging(Mutex<Vec<Staging>>);

impl SpareStaging {
    /// Takes spare memory of this size, if there is any.
    pub(super) fn take(&self, bytes: usize, launches: usize) -> Option<Staging> {
        // A panic leaves the list consistent.
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = spares.iter().position(|staging| staging.is_like(bytes, launches))?;
        Some(spares.swap_remove(at))
    }

    /// Adds memory without launches in flight, or frees it.
    pub(super) fn put(&self, staging: Staging) {
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
