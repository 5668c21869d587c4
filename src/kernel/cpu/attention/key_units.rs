// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the backward pass of keys, in the order in which workers take them.
//!
//! Units of a document and a kv head add to the same rows of dq, one after another. Several workers therefore take the blocks
//! of several heads in turn, so that they do not wait for each other; one worker takes all blocks of a head first, whose
//! q and do then stay in its cache. Under a window a block reads few rows of q and do, and the next one few of them again: there,
//! where heads lie side by side, blocks of all heads are taken in turn, which read and write the same pages. Bits do not depend
//! on it: the blocks of a head have one order.

use super::stream::KeyStream;
use crate::call::{AttendBackward, Range};
use crate::kernel::cpu::choice::Documents;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Walks the units of some documents: blocks of keys, times kv heads, times documents.
pub(crate) struct KeyUnits<'a> {
    k: &'a [Range],
    documents: Documents<'a>,
    kv_heads: usize,
    /// Heads whose blocks are taken in turn.
    turns: usize,
    /// Tiles of keys of a block, and whether they are aligned.
    tiles: usize,
    aligned: bool,
    sorted: bool,
    /// The k range in hand, and the blocks of its document if it is the first of that.
    at: usize,
    blocks: Option<usize>,
    base: usize,
    /// The keys from the last block on that was asked for, with the first range of its document and its number.
    walked: Option<(usize, usize, KeyStream<'a>)>,
}

pub(crate) struct KeyUnit {
    /// Its number among all.
    pub index: usize,
    /// The number of the unit before it that adds to the same rows of dq.
    pub before: Option<usize>,
    /// The first k range of the document.
    pub first: usize,
    pub kv: u32,
    pub block: usize,
}

impl<'a> KeyUnits<'a> {
    /// Of blocks of up to `tiles` tiles, for this many workers.
    pub(crate) fn new(
        call: &AttendBackward<'a>,
        documents: Documents<'a>,
        tiles: usize,
        aligned: bool,
        workers: usize,
    ) -> Self {
        let (k, kv_heads) = (call.ranges.k, call.k.heads as usize);
        let sorted = k.is_sorted_by_key(|r| r.doc);
        let beside = call.k.head_stride.unsigned_abs() < call.k.token_stride.unsigned_abs();
        let window = call.score.window_left.max(call.score.window_right) < i64::MAX;
        let turns = if beside && window { kv_heads } else { kv_heads.min(workers) }.max(1);
        Self { k, documents, kv_heads, turns, tiles, aligned, sorted, at: 0, blocks: None, base: 0, walked: None }
    }

    pub(crate) fn next(&mut self, counter: &AtomicUsize) -> Option<KeyUnit> {
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
                // All blocks of `turns` heads, then those of the next ones; the last may be fewer.
                let first_head = local / (blocks * self.turns) * self.turns;
                let heads = self.turns.min(self.kv_heads - first_head);
                let local = local - first_head * blocks;
                let (block, kv) = (local / heads, (first_head + local % heads) as u32);
                return Some(KeyUnit { index, before: (block > 0).then(|| index - heads), first: at, kv, block });
            }
            self.base += blocks * self.kv_heads;
            self.at += 1;
            self.blocks = None;
        }
        None
    }

    /// The keys of a unit, and those behind. A worker's blocks of a document mostly follow each other, so that it walks over the
    /// keys once, and not from the start for each block.
    pub(crate) fn keys(&mut self, unit: &KeyUnit) -> KeyStream<'a> {
        let (from, mut keys) = match self.walked.take() {
            Some((first, block, keys)) if first == unit.first && block <= unit.block => (block, keys),
            _ => (0, KeyStream::document(self.k, unit.first)),
        };
        for _ in from * self.tiles..unit.block * self.tiles {
            keys.fill(self.aligned, |_| ());
        }
        self.walked = Some((unit.first, unit.block, keys.clone()));
        keys
    }
}
