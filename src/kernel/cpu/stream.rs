// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys as a stream: ranges in order, cut into tiles.
//!
//! A tile takes keys from as many ranges as it needs, so that many short ranges make no small tiles. It ends early in
//! two cases: when the call is aligned, wherever a position is a multiple of a tile's keys, so that tiles do not
//! depend on how keys were cut; and when positions run too far apart. Positions enter a tile as numbers of the
//! accumulator's type relative to a base: exact in f32 as long as no tile spans more than [`SPAN`].

use super::rows::widen;
use super::scratch::{Arena, KEYS, vectors};
use super::simd::{Real, Vector};
use crate::kernel::{Range, RawTensor};

/// Positions that one tile of keys may span.
pub(super) const SPAN: i64 = 1 << 22;

/// Some rows of one range, on their way into a tile.
pub(super) struct Run {
    /// Where in the tile.
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

/// The k ranges still to come.
enum Rest<'a> {
    /// Indices into the k ranges.
    Pairs(&'a [u32]),
    /// Those of a document, from an index on.
    Document { doc: u32, from: u32 },
}

/// The keys that some q rows attend to: k ranges in order, cut to the positions `lo..=hi`.
pub(super) struct Stream<'a> {
    k: &'a [Range],
    rest: Rest<'a>,
    /// Index of the range in hand.
    index: u32,
    current: Range,
    at: u32,
    stop: u32,
    lo: i64,
    hi: i64,
}

impl<'a> Stream<'a> {
    pub(super) fn new(k: &'a [Range], pairs: &'a [u32], lo: i64, hi: i64) -> Self {
        Self { k, rest: Rest::Pairs(pairs), index: 0, current: Range::plain(0, 0, 0, 0), at: 0, stop: 0, lo, hi }
    }

    /// All keys of the document of k range `first`, from that range on.
    pub(super) fn document(k: &'a [Range], first: usize) -> Self {
        let rest = Rest::Document { doc: k[first].doc, from: first as u32 };
        Self { rest, ..Self::new(k, &[], i64::MIN, i64::MAX) }
    }

    fn next_range(&mut self) -> Option<u32> {
        match &mut self.rest {
            Rest::Pairs(pairs) => {
                let (&index, rest) = pairs.split_first()?;
                *pairs = rest;
                Some(index)
            }
            Rest::Document { doc, from } => {
                let ahead = self.k[*from as usize..].iter().position(|r| r.doc == *doc)?;
                *from += ahead as u32 + 1;
                Some(*from - 1)
            }
        }
    }

    /// Hands the rows of the next tile to `run`, and returns their number and the base of their positions.
    #[inline(always)]
    pub(super) fn fill(&mut self, aligned: bool, mut run: impl FnMut(Run)) -> (usize, i64) {
        let (mut n, mut base, keys) = (0, 0, KEYS as i64);
        loop {
            if self.at >= self.stop {
                let Some(index) = self.next_range() else { break };
                self.index = index;
                self.current = self.k[index as usize];
                self.at = self.current.rows_before(self.lo);
                self.stop = if self.hi == i64::MAX { self.current.len } else { self.current.rows_before(self.hi + 1) };
                continue;
            }
            let pos = self.current.position(self.at);
            if n == 0 {
                base = if aligned { pos.div_euclid(keys) * keys } else { pos };
            }
            let (first, end) = if aligned { (base, base + keys) } else { (base - SPAN, base + SPAN) };
            if pos < first || pos >= end {
                break;
            }
            let near = self.current.rows_before(end).min(self.stop) - self.at;
            let take = near.min((KEYS - n) as u32);
            run(Run { slot: n, index: self.index, range: self.current, first: self.at, count: take, base });
            self.at += take;
            n += take as usize;
            if n == KEYS {
                break;
            }
        }
        (n, base)
    }
}

/// A tile of keys: k and v widened, rows padded with zeros to whole vectors.
pub(super) struct KeyTile<'a, A> {
    pub k: &'a mut [A],
    pub v: &'a mut [A],
    pub ldk: usize,
    pub ldv: usize,
    /// Positions relative to the base.
    pub rel: &'a mut [A],
    /// The k range of each key.
    pub index: &'a mut [u32],
    /// The row of each key in k and v.
    pub row: &'a mut [i64],
    pub n: usize,
    pub base: i64,
    pub min: i64,
    pub max: i64,
}

impl<'a, A: Real> KeyTile<'a, A> {
    pub(super) fn new<V: Vector<T = A>>(arena: &mut Arena<'a>, d: usize, dv: usize) -> Self {
        let (ldk, ldv) = (vectors::<V>(d), vectors::<V>(dv));
        Self {
            k: arena.zeros(KEYS * ldk),
            v: arena.zeros(KEYS * ldv),
            ldk,
            ldv,
            rel: arena.zeros(KEYS),
            index: arena.take(KEYS),
            row: arena.take(KEYS),
            n: 0,
            base: 0,
            min: 0,
            max: 0,
        }
    }

    /// Takes the next tile of the stream, all but its numbers; false when there is none.
    #[inline(always)]
    pub(super) fn next(&mut self, stream: &mut Stream, aligned: bool) -> bool {
        self.min = i64::MAX;
        self.max = i64::MIN;
        (self.n, self.base) = stream.fill(aligned, |run| {
            let range = &run.range;
            self.min = self.min.min(range.position(run.first));
            self.max = self.max.max(range.position(run.first + run.count - 1));
            for i in 0..run.count {
                let s = run.slot + i as usize;
                self.index[s] = run.index;
                self.row[s] = range.row + i64::from(run.first + i);
                self.rel[s] = A::from_f64((range.position(run.first + i) - run.base) as f64);
            }
        });
        self.n > 0
    }

    /// Widens the tile's rows of k and v.
    ///
    /// # Safety
    /// The rows and `head` lie within `k` and `v`, whose memory is valid and whose sums are `A`s.
    #[inline(always)]
    pub(super) unsafe fn load(&mut self, k: &RawTensor, v: &RawTensor, head: u32) {
        let (d, dv) = (k.dim as usize, v.dim as usize);
        for (s, &row) in self.row[..self.n].iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                widen(k, row, head, &mut self.k[s * self.ldk..][..d]);
                widen(v, row, head, &mut self.v[s * self.ldv..][..dv]);
            }
        }
    }
}
