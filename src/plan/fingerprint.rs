// SPDX-License-Identifier: MIT OR Apache-2.0
//! The number by which ranks compare what they planned, and what they are about to do.

use crate::batch::{Batch, Side};

/// A 64-bit fingerprint: words are folded in with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn new() -> Self {
        Self(0x6370_6174_746e_0001)
    }

    /// Of a version of this library: one that plans, or speaks, otherwise must not pass for the same.
    pub(crate) fn of_version(version: &str) -> Self {
        let mut h = Self::new();
        version.bytes().for_each(|byte| h.word(byte.into()));
        h
    }

    /// The documents of a batch.
    pub(crate) fn batch(&mut self, batch: &Batch) {
        self.slice_i32(batch.cu_seqlens(Side::Q));
        self.slice_i32(batch.cu_seqlens(Side::K));
        match batch.explicit_starts() {
            Some(starts) => {
                self.word(starts.len() as u64);
                starts.iter().for_each(|&s| self.word(s as u64));
            }
            None => self.word(u64::MAX),
        }
    }

    pub(crate) fn word(&mut self, w: u64) {
        let mut z = (self.0 ^ w).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = z ^ (z >> 31);
    }

    pub(crate) fn slice_i32(&mut self, s: &[i32]) {
        self.word(s.len() as u64);
        // Two entries a word: long lists of documents are folded at every step.
        for pair in s.chunks(2) {
            self.word(pair[0] as u32 as u64 | pair.get(1).map_or(0, |&x| (x as u32 as u64) << 32));
        }
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}
