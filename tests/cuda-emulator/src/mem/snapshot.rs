// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies of all of global memory, to run a launch again from the same start.

use super::global::Memory;

/// Bytes and written bits of every live allocation.
pub(crate) struct Snapshot(Vec<(u64, Vec<u8>, Vec<u16>)>);

impl Memory {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let copy = |a: &super::global::Allocation| (a.base, a.bytes().to_vec(), a.written.clone());
        Snapshot(self.live().map(copy).collect())
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
        let mut live = self.live();
        s.0.iter().any(|(base, bytes, written)| {
            live.next().is_none_or(|a| a.base != *base || a.bytes() != &bytes[..] || a.written != *written)
        })
    }
}
