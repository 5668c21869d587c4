// SPDX-License-Identifier: MIT OR Apache-2.0
//! The band of a pair of ranges, as the kernels use it: limits of the keys that a row sees, in positions of one frame.
//!
//! A band shifts the positions of keys against those of queries. Where rows of q are outside and keys inside, the shift
//! is added to the positions of keys; where keys are outside, it is taken from those of queries. The distance of two
//! rows is then the difference of their positions. A band's limits of k rows are applied where keys are chosen, so
//! lanes have none.

use crate::call::{Band, Pair, QRange, Range, Ranges, Score};

/// A row at position `x` in `begin..=end` sees the keys at `x + low ..= x + high`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    begin: i64,
    end: i64,
    low: i64,
    high: i64,
}

impl Limits {
    /// Those of a band and the window of `score`, with positions of q as they are.
    #[inline]
    pub(crate) fn of(band: &Band, score: &Score) -> Self {
        let (low, high) = band.distances((score.window_left, score.window_right));
        Self { begin: band.q_begin, end: band.q_end.saturating_sub(1), low, high }
    }

    /// No row sees any key.
    pub(crate) const NOTHING: Self = Self { begin: i64::MAX, end: i64::MIN, low: 0, high: 0 };

    /// The first and the last position that a row at `x` sees; the last before the first if it sees none.
    #[inline(always)]
    pub(crate) fn keys(&self, x: i64) -> (i64, i64) {
        if x < self.begin || x > self.end {
            return (i64::MAX, i64::MIN);
        }
        (x.saturating_add(self.low), x.saturating_add(self.high))
    }

    /// The first and the last position that rows at `first..=last` see; the last before the first if they see none.
    #[inline]
    pub(crate) fn reach(&self, (first, last): (i64, i64)) -> (i64, i64) {
        let (first, last) = (first.max(self.begin), last.min(self.end));
        if first > last || self.low > self.high {
            return (i64::MAX, i64::MIN);
        }
        (first.saturating_add(self.low), last.saturating_add(self.high))
    }

    /// The rows of `q` that may see a key at `min..=max`.
    #[inline]
    pub(crate) fn rows(&self, q: &Range, (min, max): (i64, i64)) -> core::ops::Range<u32> {
        if min > max || self.low > self.high {
            return 0..0;
        }
        let (first, last) = (min.saturating_sub(self.high), max.saturating_sub(self.low));
        let rows = q.rows_at(first.max(self.begin), last.min(self.end));
        rows.start..rows.end.max(rows.start)
    }
}

/// A q range with some of its pairs, all of one band, in the positions of the keys.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub pairs: &'a [Pair],
    /// The q range, with the shift of the band taken from its positions.
    pub q: Range,
    pub limits: Limits,
    /// The first and the last position of k in the band.
    pub keys: (i64, i64),
}

impl<'a> Reader<'a> {
    pub(crate) fn new(ranges: &Ranges, score: &Score, q: &QRange, pairs: &'a [Pair]) -> Self {
        let (mut range, keys) = (q.range, (i64::MIN, i64::MAX));
        let Some(first) = pairs.first() else {
            return Self { pairs, q: range, limits: Limits::NOTHING, keys };
        };
        let band = &ranges.bands[first.band as usize];
        range.pos -= band.shift;
        let mut limits = Limits::of(band, score);
        limits.begin = limits.begin.saturating_sub(band.shift);
        limits.end = limits.end.saturating_sub(band.shift);
        Self { pairs, q: range, limits, keys: (band.k_begin, band.k_end.saturating_sub(1)) }
    }

    /// Whether the band has no limits of rows of k.
    #[inline(always)]
    pub(crate) fn all_keys(&self) -> bool {
        self.keys.0 == i64::MIN && self.keys.1 >= i64::MAX - 1
    }

    /// Whether the band has a key at this position.
    #[inline(always)]
    pub(crate) fn has(&self, position: i64) -> bool {
        self.keys.0 <= position && position <= self.keys.1
    }
}

/// Pairs in runs of one band each.
pub(crate) fn by_band(pairs: &[Pair]) -> impl Iterator<Item = &[Pair]> + Clone {
    pairs.chunk_by(|a, b| a.band == b.band)
}

/// Whether all pairs have one band.
#[inline(always)]
pub(crate) fn one_band(pairs: &[Pair]) -> bool {
    pairs.iter().all(|pair| pair.band == pairs[0].band)
}

/// Whether q ranges read keys of other documents than their own. The documents of such a call share rows of dk and dv,
/// so all its keys are one list.
pub(crate) fn crosses(ranges: &Ranges) -> bool {
    let documents = |q: &QRange| ranges.pairs_of(q).iter().any(|pair| ranges.k[pair.k as usize].doc != q.range.doc);
    // A band without limits is of one document (checked).
    ranges.bands.iter().any(|band| *band != Band::WHOLE) && ranges.q.iter().any(documents)
}

/// The rows from the first to the last of several runs.
pub(crate) fn union(runs: impl Iterator<Item = core::ops::Range<u32>>) -> core::ops::Range<u32> {
    let join = |a: core::ops::Range<u32>, b: core::ops::Range<u32>| a.start.min(b.start)..a.end.max(b.end);
    runs.filter(|rows| !rows.is_empty()).reduce(join).unwrap_or(0..0)
}
