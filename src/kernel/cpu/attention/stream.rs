// SPDX-License-Identifier: MIT OR Apache-2.0
//! The keys of a call as a stream of tiles.
//!
//! A tile takes keys from as many ranges as it needs, so that many short ranges do not make many small tiles. It ends
//! early in three cases. In an aligned call it ends at positions that are multiples of a tile's keys, and where the
//! document changes, so that tiles do not depend on how keys were cut. In all calls it ends where the band changes,
//! since lanes have limits of one band, and where positions are too far apart: a tile stores positions relative to a
//! base in the type of the accumulator, which is exact in f32 while no tile spans more than [`SPAN`].
//!
//! A tile may place keys by position and not one after another. The slot of a key then does not depend on which other
//! keys are present, so products that sum keys in groups have the same bits.

use super::bands::{Limits, Reader};
use super::tile::SPAN;
use crate::call::{Band, Pair, Range, Ranges, RawTensor, Score};
use crate::kernel::cpu::memory::arena::{Arena, KEYS};
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use bytemuck::Pod;
use core::ops::Range as Span;

/// Keys of a tile that are computed or skipped together.
pub(crate) const BLOCK: usize = 32;

/// Consecutive rows of one range that go into a tile.
pub(crate) struct TileRun {
    /// The first slot of the tile.
    slot: usize,
    /// Index of the range.
    index: u32,
    range: Range,
    /// First row, within the range.
    first: u32,
    /// Rows.
    count: u32,
    /// Base of the tile's positions.
    base: i64,
}

/// The k ranges that remain.
#[derive(Clone)]
enum Rest<'a> {
    /// Indices into the k ranges.
    Pairs(&'a [Pair]),
    /// The ranges of a document, or of all, from an index on.
    Document { doc: Option<u32>, from: u32 },
}

/// The keys that some q rows attend to: k ranges in order, cut to the positions that the rows may see. The shift of the
/// band is added to their positions.
#[derive(Clone)]
pub(crate) struct KeyStream<'a> {
    k: &'a [Range],
    bands: &'a [Band],
    /// Where each row of the ranges lies in k and v; empty if they are rows of k and v.
    table: &'a [u32],
    score: &'a Score,
    /// The first and the last position of the rows.
    rows: (i64, i64),
    rest: Rest<'a>,
    /// Index of the current range.
    index: u32,
    current: Range,
    at: u32,
    stop: u32,
    /// The band of the current range, its shift, and the keys that the rows see under it.
    band: u32,
    shift: i64,
    lo: i64,
    hi: i64,
}

impl<'a> KeyStream<'a> {
    /// The keys of the pairs that rows at positions `rows.0..=rows.1` may see.
    pub(crate) fn new(ranges: &Ranges<'a>, pairs: &'a [Pair], score: &'a Score, rows: (i64, i64)) -> Self {
        let current = Range::plain(0, 0, 0, 0);
        let (k, bands, rest) = (ranges.k, ranges.bands, Rest::Pairs(pairs));
        let (index, at, stop, band, shift, lo, hi) = (0, 0, 0, u32::MAX, 0, i64::MIN, i64::MAX);
        Self { k, bands, table: &[], score, rows, rest, index, current, at, stop, band, shift, lo, hi }
    }

    /// The same keys, whose rows are found through a table; an empty one says that they are rows of k and v.
    pub(crate) fn through(self, table: &'a [u32]) -> Self {
        Self { table, ..self }
    }

    /// The number of tiles that remain.
    pub(crate) fn count(mut self, aligned: bool) -> usize {
        core::iter::from_fn(|| (self.fill(aligned, |_| ()).0 > 0).then_some(())).count()
    }

    /// All keys of the document of k range `first`, or with `all` of all documents, from that range on. Positions are
    /// those of the ranges.
    pub(crate) fn document(ranges: &Ranges<'a>, score: &'a Score, first: usize, all: bool) -> Self {
        let doc = (!all).then(|| ranges.k[first].doc);
        let rest = Rest::Document { doc, from: first as u32 };
        Self { rest, ..Self::new(ranges, &[], score, (0, 0)) }
    }

    /// The band of the next key; nothing if there is none.
    #[inline(always)]
    pub(crate) fn band(&mut self) -> Option<u32> {
        self.advance().then_some(self.band)
    }

    /// The limits of the current band.
    pub(crate) fn limits(&self) -> Limits {
        self.bands.get(self.band as usize).map_or(Limits::NOTHING, |band| Limits::of(band, self.score))
    }

    /// Whether at most so many keys remain.
    pub(crate) fn at_most(mut self, keys: usize) -> bool {
        let mut n = 0;
        while n <= keys && self.advance() {
            n += (self.stop - self.at) as usize;
            self.at = self.stop;
        }
        n <= keys
    }

    /// Makes sure that `at` is a row of the current range, or of a following one; false if none is left.
    #[inline(always)]
    fn advance(&mut self) -> bool {
        while self.at >= self.stop {
            let Some(index) = self.next_range() else { return false };
            self.index = index;
            self.current = self.k[index as usize];
            self.current.pos += self.shift;
            Span { start: self.at, end: self.stop } = self.current.rows_at(self.lo, self.hi);
        }
        true
    }

    /// The next rows of k and v that lie in one range, at most those of `tiles` tiles.
    pub(crate) fn ahead(&mut self, tiles: usize) -> Span<i64> {
        if !self.advance() {
            return 0..0;
        }
        let rows = self.at..self.stop.min(self.at.saturating_add((tiles * KEYS) as u32));
        self.current.row + i64::from(rows.start)..self.current.row + i64::from(rows.end)
    }

    fn next_range(&mut self) -> Option<u32> {
        match &mut self.rest {
            Rest::Pairs(pairs) => {
                let (&Pair { k: index, band }, rest) = pairs.split_first()?;
                *pairs = rest;
                if band != self.band {
                    self.turn_to(band);
                }
                Some(index)
            }
            Rest::Document { doc, from } => {
                let ahead = self.k[*from as usize..].iter().position(|r| doc.is_none_or(|doc| r.doc == doc))?;
                *from += ahead as u32 + 1;
                Some(*from - 1)
            }
        }
    }

    fn turn_to(&mut self, band: u32) {
        let of = &self.bands[band as usize];
        let (lo, hi) = Limits::of(of, self.score).reach(self.rows);
        (self.band, self.shift) = (band, of.shift);
        self.lo = lo.max(of.k_begin.saturating_add(of.shift));
        self.hi = hi.min(of.k_end.saturating_sub(1).saturating_add(of.shift));
    }

    /// Passes the rows of the next tile to `run`, and returns their number and the base of their positions.
    #[inline(always)]
    pub(crate) fn fill(&mut self, aligned: bool, mut run: impl FnMut(TileRun)) -> (usize, i64) {
        let (mut n, mut base, keys) = (0, 0, KEYS as i64);
        let mut last = i64::MIN;
        let mut of = (0, 0);
        loop {
            if !self.advance() {
                break;
            }
            let pos = self.current.position(self.at);
            let here = (self.band, if aligned { self.current.doc } else { 0 });
            if n > 0 && here != of {
                break;
            }
            if n == 0 {
                of = here;
                base = if aligned { pos.div_euclid(keys) * keys } else { pos };
            }
            let (first, end) = if aligned { (base, base + keys) } else { (base - SPAN, base + SPAN) };
            if pos < first || pos >= end || (aligned && n > 0 && pos <= last) {
                break;
            }
            let near = self.current.rows_before(end).min(self.stop) - self.at;
            let take = near.min((KEYS - n) as u32);
            run(TileRun { slot: n, index: self.index, range: self.current, first: self.at, count: take, base });
            self.at += take;
            last = self.current.position(self.at - 1);
            n += take as usize;
            if n == KEYS {
                break;
            }
        }
        (n, base)
    }
}

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
