// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many multiprocessors of a device are to be left free: the largest of all requests applies.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// The margins that were requested on one device.
#[derive(Debug, Default)]
pub(super) struct MarginRequests {
    /// The largest request, for launches.
    most: AtomicU32,
    asked: Mutex<RequestList>,
}

#[derive(Debug, Default)]
struct RequestList {
    /// By the device's owner.
    own: u32,
    /// By each [`SmMargin`](super::sm_margin::SmMargin).
    others: Vec<u32>,
}

impl MarginRequests {
    /// The largest current request.
    pub(super) fn most(&self) -> u32 {
        self.most.load(Ordering::Relaxed)
    }

    /// Sets the request of the device's owner.
    pub(super) fn set_own(&self, n: u32) {
        self.change(|asked| asked.own = n);
    }

    /// Adds a request for `n`.
    pub(super) fn add(&self, n: u32) {
        self.change(|asked| asked.others.push(n));
    }

    /// Removes one request for `n`.
    pub(super) fn remove(&self, n: u32) {
        self.change(|asked| {
            if let Some(at) = asked.others.iter().position(|&m| m == n) {
                asked.others.swap_remove(at);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut RequestList)) {
        // A panic leaves the list unchanged, or with one more number.
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut asked);
        self.most.store(asked.others.iter().copied().fold(asked.own, u32::max), Ordering::Relaxed);
    }
}
