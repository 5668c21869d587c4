// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies of all device memory, to run a launch again from the same start.
//!
//! Page-locked memory of the host is left out: threads of the host write it while a launch is tried again, so that
//! putting it back would undo their work, and comparing it would blame the launch for it.

use super::global::{Allocation, Memory, Owner};

/// Bytes and written bits of every live allocation on a device.
pub(crate) struct Snapshot(Vec<(u64, Vec<u8>, Vec<u16>)>);

impl Memory {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let copy = |a: &Allocation| (a.base, a.bytes().to_vec(), a.written.clone());
        Snapshot(self.on_devices().map(copy).collect())
    }

    fn on_devices(&self) -> impl Iterator<Item = &Allocation> {
        self.live().filter(|a| a.owner != Owner::Host)
    }

    /// Puts back what a snapshot holds. Allocations made since then stay as they are.
    pub(crate) fn restore(&mut self, s: &Snapshot) {
        for (base, bytes, written) in &s.0 {
            if self.find(*base).is_none_or(|f| f.1 != bytes.len()) {
                continue;
            }
            let a = self.at(*base);
            a.written.clone_from(written);
            // SAFETY: the allocation is live and has as many bytes as the copy.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), *base as *mut u8, bytes.len()) };
        }
    }

    /// Whether any byte differs from a snapshot, or is written in one and not in the other.
    pub(crate) fn differs(&self, s: &Snapshot) -> bool {
        let mut live = self.on_devices();
        s.0.iter().any(|(base, bytes, written)| {
            live.next().is_none_or(|a| a.base != *base || a.bytes() != &bytes[..] || a.written != *written)
        })
    }
}
