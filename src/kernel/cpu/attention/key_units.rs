// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of the backward pass of keys, in the order in which workers take them.
//!
//! Units of one document and kv head add to the same rows of dq, one after another (`dq_order.rs`). Several workers
//! therefore take blocks of several heads in turn, so that they do not wait for each other. A single worker takes all
//! blocks of one head first, so that q and do of that head stay in its cache. Under a window each block reads only a
//! few rows of q and do; if heads are then adjacent in memory, blocks of all heads are taken in turn, since they read
//! and write the same pages. The results do not depend on this: the blocks of one head always have the same order.
//!
//! Where q ranges read keys of other documents, a row of dq belongs to several documents, and all keys of the call are
//! taken as one.

use super::bands::crosses;
use super::stream::KeyStream;
use crate::call::{AttendBackward, QRange, Range, Ranges, Score};
use crate::kernel::cpu::choice::Documents;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Iterates over the units of some documents: blocks of keys, times kv heads, times documents.
pub(crate) struct KeyUnits<'a> {
    k: &'a [Range],
    ranges: Ranges<'a>,
    score: &'a Score,
    /// All keys are one document's.
    together: bool,
    q_sorted: bool,
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

/// The q ranges of a document, or of all.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    q: &'a [QRange],
    doc: Option<u32>,
}

impl<'a> Group<'a> {
    #[inline(always)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a QRange> + Clone + use<'a> {
        let doc = self.doc;
        self.q.iter().filter(move |q| doc.is_none_or(|doc| q.range.doc == doc))
    }

    /// The first band from `from` on under which a q range of the group reads one of the k ranges `keys`.
    pub(crate) fn next_band(&self, ranges: &Ranges, keys: (u32, u32), from: u32) -> Option<u32> {
        let pairs = self.iter().flat_map(|q| ranges.pairs_of(q));
        pairs.filter(|pair| pair.band >= from && keys.0 <= pair.k && pair.k <= keys.1).map(|pair| pair.band).min()
    }
}

impl<'a> KeyUnits<'a> {
    /// Units of up to `tiles` tiles of keys, for this many workers.
    pub(crate) fn new(
        call: &'a AttendBackward<'a>,
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
        let (ranges, score, together) = (call.ranges, &call.score, crosses(&call.ranges));
        let q_sorted = ranges.q.is_sorted_by_key(|q| q.range.doc);
        let (at, blocks, base, walked) = (0, None, 0, None);
        Self {
            k,
            ranges,
            score,
            together,
            q_sorted,
            documents,
            kv_heads,
            turns,
            tiles,
            aligned,
            sorted,
            at,
            blocks,
            base,
            walked,
        }
    }

    /// The q ranges that may read the keys of a unit.
    pub(crate) fn group(&self, unit: &KeyUnit) -> Group<'a> {
        let (q, doc) = (self.ranges.q, self.k[unit.first].doc);
        if self.together {
            return Group { q, doc: None };
        }
        Group { q: if self.q_sorted { QRange::of_document(q, doc) } else { q }, doc: Some(doc) }
    }

    fn document(&self, first: usize) -> KeyStream<'a> {
        KeyStream::document(&self.ranges, self.score, first, self.together)
    }

    pub(crate) fn next(&mut self, counter: &AtomicUsize) -> Option<KeyUnit> {
        let index = counter.fetch_add(1, Ordering::Relaxed);
        while let Some(range) = self.k.get(self.at) {
            let at = self.at;
            let blocks = match self.blocks {
                Some(blocks) => blocks,
                None => {
                    let before = &self.k[..at];
                    let seen = match before.last() {
                        Some(last) if self.together || last.doc == range.doc => true,
                        _ => !self.sorted && before.iter().any(|r| r.doc == range.doc),
                    };
                    if seen || !self.documents.has(range.doc) {
                        0
                    } else {
                        self.document(at).count(self.aligned).div_ceil(self.tiles)
                    }
                }
            };
            self.blocks = Some(blocks);
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
            _ => (0, self.document(unit.first)),
        };
        for _ in from * self.tiles..unit.block * self.tiles {
            keys.fill(self.aligned, |_| ());
        }
        self.walked = Some((unit.first, unit.block, keys.clone()));
        keys
    }
}
