// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the backward pass of keys, in the order in which workers take them.

use super::choice::Documents;
use super::stream::KeyStream;
use crate::call::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Walks the units of some documents: blocks of keys, times kv heads, times documents.
pub(super) struct KeyUnits<'a> {
    k: &'a [Range],
    documents: Documents<'a>,
    kv_heads: usize,
    /// Tiles of keys of a block, and whether they are aligned.
    tiles: usize,
    aligned: bool,
    sorted: bool,
    /// The k range in hand, and the blocks of its document if it is the first of that.
    at: usize,
    blocks: Option<usize>,
    base: usize,
}

pub(super) struct KeyUnit {
    /// Its number among all.
    pub index: usize,
    /// The first k range of the document.
    pub first: usize,
    pub kv: u32,
    pub block: usize,
}

impl<'a> KeyUnits<'a> {
    /// Of blocks of up to `tiles` tiles.
    pub(super) fn new(k: &'a [Range], documents: Documents<'a>, kv_heads: usize, tiles: usize, aligned: bool) -> Self {
        let sorted = k.is_sorted_by_key(|r| r.doc);
        Self { k, documents, kv_heads, tiles, aligned, sorted, at: 0, blocks: None, base: 0 }
    }

    pub(super) fn next(&mut self, counter: &AtomicUsize) -> Option<KeyUnit> {
        let index = counter.fetch_add(1, Ordering::Relaxed);
        while let Some(range) = self.k.get(self.at) {
            let (k, at, sorted, documents) = (self.k, self.at, self.sorted, &mut self.documents);
            let (tiles, aligned) = (self.tiles, self.aligned);
            let blocks = *self.blocks.get_or_insert_with(|| {
                let before = &k[..at];
                let seen = match before.last() {
                    Some(last) if last.doc == range.doc => true,
                    _ => !sorted && before.iter().any(|r| r.doc == range.doc),
                };
                if seen || !documents.has(range.doc) {
                    0
                } else {
                    KeyStream::document(k, at).count(aligned).div_ceil(tiles)
                }
            });
            let local = index - self.base;
            if local < blocks * self.kv_heads {
                return Some(KeyUnit { index, first: at, kv: (local / blocks) as u32, block: local % blocks });
            }
            self.base += blocks * self.kv_heads;
            self.at += 1;
            self.blocks = None;
        }
        None
    }
}
