// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fingerprints: ranks compare their plans and their next calls by them.

use crate::batch::{Batch, Side};

/// A 64-bit fingerprint: words are folded in with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn new() -> Self {
        Self(0x6370_6174_746e_0001)
    }

    /// The fingerprint of a version of this library. Another version may plan or communicate differently, so it must
    /// differ.
    pub(crate) fn of_version(version: &str) -> Self {
        let mut h = Self::new();
        version.bytes().for_each(|byte| h.word(byte.into()));
        h
    }

    /// The documents of a batch.
    pub(crate) fn batch(&mut self, batch: &Batch) {
        let (q, k) = (batch.cu_seqlens(Side::Q), batch.cu_seqlens(Side::K));
        self.slice_i32(q);
        // Usually both are equal; no list has this length.
        if core::ptr::eq(q, k) || q == k {
            self.word(u64::MAX)
        } else {
            self.slice_i32(k)
        }
        match batch.explicit_starts() {
            Some(starts) => {
                self.word(starts.len() as u64);
                starts.iter().for_each(|&s| self.word(s as u64));
            }
            None => self.word(u64::MAX),
        }
    }

    /// The slices of a batch, if there are any.
    pub(crate) fn slices(&mut self, batch: &Batch) {
        let Some(slices) = batch.slices() else { return };
        self.word(slices.len() as u64);
        for s in slices {
            self.slice_i32(&[s.q_begin, s.q_end, s.k_begin, s.k_end]);
            [s.q_start, s.low, s.high].into_iter().for_each(|x| self.word(x as u64));
        }
    }

    pub(crate) fn word(&mut self, w: u64) {
        let mut z = (self.0 ^ w).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = z ^ (z >> 31);
    }

    /// A list, by its length and its entries, two a word. Long lists of documents are folded at every step, so their
    /// words go to four fingerprints in turn, which a processor computes side by side.
    pub(crate) fn slice_i32(&mut self, s: &[i32]) {
        self.word(s.len() as u64);
        let pair = |a: i32, b: i32| u64::from(a as u32) | u64::from(b as u32) << 32;
        let mut lanes = [1, 2, 3, 4].map(|lane| Self(self.0 ^ lane));
        let mut whole = s.chunks_exact(8);
        for eight in &mut whole {
            lanes.iter_mut().zip(eight.chunks_exact(2)).for_each(|(lane, p)| lane.word(pair(p[0], p[1])));
        }
        if s.len() >= 8 {
            lanes.iter().for_each(|lane| self.word(lane.0));
        }
        whole.remainder().chunks(2).for_each(|p| self.word(pair(p[0], p.get(1).copied().unwrap_or(0))));
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}
