// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tile of keys: the position, the range and the row of the key in each slot, and k and v packed for their products.
//!
//! [`KeyStream`] says which keys come next; here they get their slots. A slot without a key has an infinite position,
//! which no row sees, so loops over a tile need no case for it.
//!
//! A tile may place keys by position and not one after another. The slot of a key then does not depend on which other
//! keys are present, so products that sum keys in groups have the same bits.

use super::bands::Reader;
use super::stream::KeyStream;
use super::tile::SPAN;
use crate::call::{Pair, RawTensor};
use crate::kernel::cpu::memory::arena::{Arena, KEYS};
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use bytemuck::Pod;
use core::ops::Range as Span;

/// Keys of a tile that are computed or skipped together.
pub(crate) const BLOCK: usize = 32;

/// The positions of [`BLOCK`] slots of a tile.
#[derive(Clone, Copy)]
pub(crate) struct KeyBlock {
    pub min: i64,
    pub max: i64,
    /// Whether every slot has a key.
    pub full: bool,
}

/// The positions, ranges and rows of the keys of a tile.
pub(crate) struct Slots<'a, A> {
    /// Positions relative to the base. A slot without a key has an infinite one, which no row sees.
    pub rel: &'a mut [A],
    /// The k range of each key.
    pub index: &'a mut [u32],
    /// The row of each key in k and v; negative where a slot has no key.
    pub row: &'a mut [i64],
    /// The number of slots up to the last one with a key.
    pub n: usize,
    pub base: i64,
    pub min: i64,
    pub max: i64,
    /// The least and the largest index of the ranges of the keys; the tile has keys.
    pub ranges: (u32, u32),
    pub blocks: [KeyBlock; KEYS / BLOCK],
}

/// A tile of keys: k and v packed for their products, and the position of each key.
pub(crate) struct KeyTile<'a, T, A> {
    pub k: &'a mut [T],
    pub v: &'a mut [T],
    pub slots: Slots<'a, A>,
}

impl<'a, A: Real> Slots<'a, A> {
    pub(crate) fn new(arena: &mut Arena<'a>, keys: usize) -> Self {
        Self {
            rel: arena.zeros(keys),
            index: arena.take(keys),
            row: arena.take(keys),
            n: 0,
            base: 0,
            min: 0,
            max: 0,
            ranges: (0, 0),
            blocks: [KeyBlock { min: 0, max: 0, full: false }; KEYS / BLOCK],
        }
    }

    /// Takes the next tile of the stream; false when there is none. An aligned tile may be `placed` by position.
    #[inline(never)]
    pub(crate) fn next(&mut self, stream: &mut KeyStream, aligned: bool, placed: bool) -> bool {
        debug_assert!(aligned || !placed, "positions of a tile that is not aligned need not grow");
        self.min = i64::MAX;
        self.max = i64::MIN;
        self.ranges = (u32::MAX, 0);
        let infinity = -A::NEG_INFINITY;
        if placed {
            self.row.fill(-1);
            self.rel.fill(infinity);
        }
        let mut slots = 0;
        let (n, base) = stream.fill(aligned, |run| {
            let range = &run.range;
            self.min = self.min.min(range.position(run.first));
            self.max = self.max.max(range.position(run.first + run.count - 1));
            self.ranges = (self.ranges.0.min(run.index), self.ranges.1.max(run.index));
            for i in 0..run.count {
                let rel = range.position(run.first + i) - run.base;
                let s = if placed { rel as usize } else { run.slot + i as usize };
                self.index[s] = run.index;
                self.row[s] = range.row + i64::from(run.first + i);
                self.rel[s] = A::from_f64(rel as f64);
                slots = slots.max(s + 1);
            }
        });
        (self.n, self.base) = (slots, base);
        if !stream.table.is_empty() {
            self.look_up(stream.table);
        }
        // The unused slots of the last block.
        let end = slots.next_multiple_of(BLOCK);
        self.row[slots..end].fill(-1);
        self.rel[slots..end].fill(infinity);
        n > 0
    }

    /// Turns rows of ranges into rows of k and v.
    #[cold]
    fn look_up(&mut self, table: &[u32]) {
        for row in self.row[..self.n].iter_mut().filter(|row| **row >= 0) {
            *row = i64::from(table[*row as usize]);
        }
    }

    /// `range` of the slots, shortened at both ends by groups of `grain` slots whose positions are all outside
    /// `lo..=hi`. If all slots are outside, the result may be any part of `range`.
    #[inline(always)]
    pub(crate) fn seen(&self, range: Span<usize>, grain: usize, (lo, hi): (i64, i64)) -> Span<usize> {
        let relative = |p: i64| A::from_f64(p.saturating_sub(self.base).clamp(-2 * SPAN, 2 * SPAN) as f64);
        let (lo, hi) = (relative(lo), relative(hi));
        let unseen = |slots: Span<usize>| self.rel[slots].iter().all(|&rel| rel < lo || rel > hi);
        let Span { start: mut begin, mut end } = range;
        while begin + grain < end && unseen(begin..begin + grain) {
            begin += grain;
        }
        while end > begin + grain {
            let last = (end - 1) / grain * grain;
            if !unseen(last..end) {
                break;
            }
            end = last;
        }
        begin..end
    }

    /// The rows that may see a key of the tile, without a look at each key; none if no pair has one of its ranges.
    #[inline]
    pub(crate) fn rows_near(&self, reader: &Reader) -> Span<u32> {
        let (first, last) = self.ranges;
        if !reader.pairs.iter().any(|pair| first <= pair.k && pair.k <= last) {
            return 0..0;
        }
        reader.limits.rows(&reader.q, (self.min.max(reader.keys.0), self.max.min(reader.keys.1)))
    }

    /// Whether the reader reads all keys of the tile; it has rows near them.
    #[inline]
    pub(crate) fn is_read_whole(&self, reader: &Reader) -> bool {
        let one_range = self.ranges.0 == self.ranges.1;
        one_range && (reader.all_keys() || (reader.has(self.min) && reader.has(self.max)))
    }

    /// For each slot up to the last one with a key, whether its range is among the pairs and its position in the band.
    #[inline(always)]
    pub(crate) fn read_by(&self, reader: &Reader) -> impl Iterator<Item = bool> {
        let (pairs, reader, all) = (reader.pairs, *reader, reader.all_keys());
        self.of_ranges(pairs)
            .zip(&self.rel[..self.n])
            .map(move |(read, rel)| read && (all || reader.has(self.base + rel.to_f64() as i64)))
    }

    /// For each slot up to the last one with a key, whether its range is among the pairs.
    #[inline(always)]
    fn of_ranges(&self, pairs: &[Pair]) -> impl Iterator<Item = bool> {
        let mut last = None;
        self.index[..self.n].iter().map(move |&index| {
            let (_, read) = *last.insert(match last {
                Some(known @ (range, _)) if range == index => known,
                _ => (index, pairs.iter().any(|pair| pair.k == index)),
            });
            read
        })
    }

    /// Computes the positions of each block.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn find_blocks<V: Vector<T = A>>(&mut self) {
        // SAFETY: the contract.
        unsafe { V::call(FindBlocks(self)) }
    }
}

/// [`Slots::find_blocks`].
struct FindBlocks<'s, 'a, A>(&'s mut Slots<'a, A>);

impl<V: Vector> Routine<V> for FindBlocks<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let slots = self.0;
        for (block, rel) in slots.blocks.iter_mut().zip(slots.rel[..slots.n.next_multiple_of(BLOCK)].chunks(BLOCK)) {
            *block = KeyBlock::of(rel, slots.base);
        }
        slots.blocks[slots.n.div_ceil(BLOCK)..].fill(KeyBlock::EMPTY);
    }
}

impl KeyBlock {
    pub(crate) const EMPTY: Self = Self { min: i64::MAX, max: i64::MIN, full: false };

    /// The block of keys at these positions, which are relative to a base, and infinite for slots without a key.
    #[inline(always)]
    pub(crate) fn of<A: Real>(rel: &[A], base: i64) -> Self {
        let mut block = Self { full: true, ..Self::EMPTY };
        for &rel in rel {
            if rel < -A::NEG_INFINITY {
                let position = base + rel.to_f64() as i64;
                block.min = block.min.min(position);
                block.max = block.max.max(position);
            } else {
                block.full = false;
            }
        }
        block
    }
}

impl<'a, T: Pod, A: Real> KeyTile<'a, T, A> {
    /// A tile for `d` dims of k and `dv` dims of v; without memory, if it is not `used`.
    pub(crate) fn new<E: AttentionEngine<T = T, Sum = A>>(
        arena: &mut Arena<'a>,
        d: usize,
        dv: usize,
        used: bool,
    ) -> Self {
        let n = usize::from(used);
        let slots = Slots::new(arena, n * KEYS);
        let tile = Self { k: arena.take(n * E::keys_len(d)), v: arena.take(n * E::keys_len(dv)), slots };
        if !E::WRITES_ALL {
            tile.k.fill(T::zeroed());
            tile.v.fill(T::zeroed());
        }
        tile
    }

    /// Packs the rows of k and of v. Returns, for each, whether all numbers are finite.
    ///
    /// # Safety
    /// The rows and `head` lie within `k` and `v`, whose memory is valid and whose sums are `A`s; the engine's
    /// instruction set is present, and entered.
    #[inline(always)]
    pub(crate) unsafe fn load<E: AttentionEngine<T = T, Sum = A>>(
        &mut self,
        k: &RawTensor,
        v: &RawTensor,
        head: u32,
    ) -> (bool, bool) {
        let rows = &self.slots.row[..self.slots.n.next_multiple_of(E::GRAIN)];
        // SAFETY: rows and head lie within k and v, and the instruction set is entered (the contract).
        unsafe { (E::keys(k, head, rows, self.k), E::values(v, head, rows, self.v)) }
    }
}

impl<'a, T, A> core::ops::Deref for KeyTile<'a, T, A> {
    type Target = Slots<'a, A>;
    fn deref(&self) -> &Slots<'a, A> {
        &self.slots
    }
}

impl<'a, T, A> core::ops::DerefMut for KeyTile<'a, T, A> {
    fn deref_mut(&mut self) -> &mut Slots<'a, A> {
        &mut self.slots
    }
}
