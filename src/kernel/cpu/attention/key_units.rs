// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the backward pass of keys, in the order in which workers take them.
//!
//! Units of one document and kv head add to the same rows of dq, one after another (`dq_order.rs`). Several workers
//! therefore take blocks of several heads in turn, so that they do not wait for each other. A single worker takes all
//! blocks of one head first, so that q and do of that head stay in its cache. Under a window each block reads only a
//! few rows of q and do; if heads are then adjacent in memory, blocks of all heads are taken in turn, since they read
//! and write the same pages. The results do not depend on this: the blocks of one head always have the same order.

use super::stream::KeyStream;
use crate::call::{AttendBackward, Range};
use crate::kernel::cpu::choice::Documents;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Iterates over the units of some documents: blocks of keys, times kv heads, times documents.
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
    /// The current k range, and the number of blocks of its document if the range is the document's first.
    at: usize,
    blocks: Option<usize>,
    base: usize,
    /// The last block that was requested: the first range of its document, its number, and the keys from it on.
    walked: Option<(usize, usize, KeyStream<'a>)>,
}

pub(crate) struct KeyUnit {
    /// Its number among all units.
    pub index: usize,
    /// The index of the preceding unit that adds to the same rows of dq.
    pub before: Option<usize>,
    /// The first k range of the document.
    pub first: usize,
    pub kv: u32,
    pub block: usize,
}

impl<'a> KeyUnits<'a> {
    /// Units of up to `tiles` tiles of keys, for this many workers.
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
                // All blocks of the first `turns` heads, then of the next; the last group may have fewer heads.
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

    /// The keys of a unit and all later ones of its document. Successive blocks of a worker are mostly of the same
    /// document, so the position in the list of keys is remembered.
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
