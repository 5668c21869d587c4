// SPDX-License-Identifier: MIT OR Apache-2.0
//! The keys of a call as a stream of tiles.
//!
//! A tile takes keys from as many ranges as it needs, so that many short ranges do not make many small tiles. It ends
//! early in three cases. In an aligned call it ends at positions that are multiples of a tile's keys, and where the
//! document changes, so that tiles do not depend on how keys were cut. In all calls it ends where the band changes,
//! since lanes have limits of one band, and where positions are too far apart: a tile stores positions relative to a
//! base in the type of the accumulator, which is exact in f32 while no tile spans more than [`SPAN`].

use super::bands::Limits;
use super::tile::SPAN;
use crate::call::{Band, Pair, Range, Ranges, Score};
use crate::kernel::cpu::memory::arena::KEYS;
use core::ops::Range as Span;

/// Consecutive rows of one range that go into a tile.
pub(crate) struct TileRun {
    /// The first slot of the tile.
    pub slot: usize,
    /// Index of the range.
    pub index: u32,
    pub range: Range,
    /// First row, within the range.
    pub first: u32,
    /// Rows.
    pub count: u32,
    /// Base of the tile's positions.
    pub base: i64,
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
    pub table: &'a [u32],
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
