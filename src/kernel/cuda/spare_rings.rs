// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings of a device that are between two users.
//!
//! To free memory, a driver waits until the whole device is idle. A [`StreamKernels`](super::StreamKernels) that is
//! dropped therefore frees nothing: its ring stays with the device for the next one that is of the same size, and is freed
//! with the device. Only rings beyond a bound are freed at once.

use super::staging::Staging;
use alloc::vec::Vec;
use std::sync::{Mutex, PoisonError};

/// Bytes of rings that a device keeps, on each side.
const MOST_BYTES: usize = 16 << 20;

/// Rings without launches in flight.
#[derive(Debug, Default)]
pub(super) struct SpareRings(Mutex<Vec<Staging>>);

impl SpareRings {
    /// One of this size.
    pub fn take(&self, bytes: usize, launches: usize) -> Option<Staging> {
        // A panic leaves the list whole.
        let mut rings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = rings.iter().position(|ring| ring.is_like(bytes, launches))?;
        Some(rings.swap_remove(at))
    }

    /// Adds one without launches in flight, or frees it.
    pub fn put(&self, ring: Staging) {
        let mut rings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if rings.iter().map(Staging::bytes).sum::<usize>() + ring.bytes() <= MOST_BYTES {
            rings.push(ring);
        } else {
            // Freed, with the list free for others meanwhile.
            drop(rings);
            drop(ring);
        }
    }
}
