// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges: the rows of a call, with their positions in their documents.
//!
//! A layout gives a rank consecutive tokens or stripes of tokens. A [`Range`] describes both with six numbers. From
//! these, the positions of rows and the rows at given positions are computed: no tokens are listed. A [`QRange`] adds
//! the k ranges that it attends to, the length of its document and how the result is stored; [`Ranges`] is the argument
//! of one call.

/// Consecutive rows of a `[tokens, heads, dim]` tensor, with the positions of its tokens.
///
/// Row `row + i` holds the token at position `pos + (i / block) · period + i mod block` of document `doc`. In a plain
/// range `block == period`, for example 1: positions then count up by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Range {
    /// First row in its tensor.
    pub row: i64,
    /// Position of the first token in its document.
    pub pos: i64,
    /// Rows.
    pub len: u32,
    /// Consecutive positions in one block of the stripe; at least 1.
    pub block: u32,
    /// Distance in positions from one block to the next; at least `block`.
    pub period: u32,
    /// The document. Kernels do not mask by it: the pairs and their bands say what attends to what.
    pub doc: u32,
}

impl Range {
    /// A range whose positions count up by one.
    pub const fn plain(row: i64, len: u32, pos: i64, doc: u32) -> Self {
        Self { row, pos, len, block: 1, period: 1, doc }
    }

    /// The position of the `i`-th row. For `i == len` it is the position that the next token would have.
    #[inline]
    pub const fn position(&self, i: u32) -> i64 {
        if self.block == self.period {
            // Called for every row of every tile; a division takes as long as ten additions.
            return self.pos + i as i64;
        }
        self.pos + (i / self.block) as i64 * self.period as i64 + (i % self.block) as i64
    }

    /// The position of the last row; `len` must not be 0.
    #[inline]
    pub const fn last(&self) -> i64 {
        self.position(self.len - 1)
    }

    /// [`Range::last`] of a range from any source, whose last position may not fit in 64 bits; `len` must not be 0.
    pub(crate) fn wide_last(&self) -> i128 {
        let (at, block) = (i128::from(self.len - 1), i128::from(self.block));
        i128::from(self.pos) + at / block * i128::from(self.period) + at % block
    }

    /// Whether positions count up by one throughout.
    #[inline]
    pub const fn is_plain(&self) -> bool {
        self.block == self.period || self.len <= self.block
    }

    /// The number of rows at positions before `x`: the index of the first row at or after `x`, or `len`.
    ///
    /// Rows at positions `a..e` are rows `rows_before(a)..rows_before(e)`, for any stripe. Planners use this to count,
    /// and kernels to restrict a range to a window, without a loop over rows.
    #[inline]
    pub const fn rows_before(&self, x: i64) -> u32 {
        if x <= self.pos {
            return 0;
        }
        // As u64 the distance is exact even between the ends of i64, and no row count below exceeds it.
        let distance = x.abs_diff(self.pos);
        let rows = if self.is_plain() {
            distance
        } else {
            let (block, period) = (self.block as u64, self.period as u64);
            let rest = distance % period;
            distance / period * block + if rest < block { rest } else { block }
        };
        if rows < self.len as u64 { rows as u32 } else { self.len }
    }

    /// Rows `i0..i1` as one or two ranges, each with the number of its first row in this one: a stripe that is cut
    /// inside a block needs a plain run first.
    pub(crate) fn split(&self, i0: u32, i1: u32, mut each: impl FnMut(u32, Self)) {
        let mut i = i0;
        let phase = i % self.block;
        if self.block != self.period && phase != 0 && i < i1 {
            let n = (self.block - phase).min(i1 - i);
            each(i, Self { pos: self.position(i), len: n, block: 1, period: 1, ..*self });
            i += n;
        }
        if i < i1 {
            each(i, Self { pos: self.position(i), len: i1 - i, ..*self });
        }
    }

    /// The rows at positions `low..=high`.
    #[inline]
    pub(crate) const fn rows_at(&self, low: i64, high: i64) -> core::ops::Range<u32> {
        self.rows_before(low)..self.rows_before(high.saturating_add(1))
    }
}

/// How a q range's result is stored. The mode belongs to the range, not to the call: one call may finish one range and
/// start another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// First of several calls for this range: write the running (o, lse). Backward: write dq.
    First = 0,
    /// A later call: merge into the running (o, lse). Backward: add to dq.
    Merge = 1,
    /// The last of several: merge, then apply the sink and write o in the element type. Backward: as `Merge`.
    Last = 2,
    /// First and last at once: there is no running result. Backward: as `First`.
    Only = 3,
}

impl Mode {
    /// Whether the running result is read.
    pub const fn continues(self) -> bool {
        matches!(self, Self::Merge | Self::Last)
    }

    /// Whether o is finished: the sink is applied and o is written in the element type.
    pub const fn finishes(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }

    /// The mode of a call that is the first for its range, the last, both or neither.
    pub const fn of(first: bool, last: bool) -> Self {
        match (first, last) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Merge,
        }
    }
}

/// Which rows of a q range attend to which rows of a k range: the part of a [slice](crate::Slice) that lies in one
/// document of q and one of k.
///
/// A q row at position `x` and a k row at position `y` are a pair if `q_begin ≤ x < q_end`, `k_begin ≤ y < k_end`,
/// `low ≤ y − x + shift ≤ high`, and the window of the [`Score`](super::Score) allows the distance `y − x + shift`.
/// ALiBi is computed from that distance too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Band {
    /// First position of q.
    pub q_begin: i64,
    /// One past the last position of q.
    pub q_end: i64,
    /// First position of k.
    pub k_begin: i64,
    /// One past the last position of k.
    pub k_end: i64,
    /// The least distance; `i64::MIN` for no limit.
    pub low: i64,
    /// The largest distance; `i64::MAX` for no limit.
    pub high: i64,
    /// Is added to `y − x`: positions in the slice may begin elsewhere than those in the documents. Within ±2^42.
    pub shift: i64,
}

impl Band {
    /// No limits: q and k of the same document.
    pub const WHOLE: Self = Self {
        q_begin: i64::MIN,
        q_end: i64::MAX,
        k_begin: i64::MIN,
        k_end: i64::MAX,
        low: i64::MIN,
        high: i64::MAX,
        shift: 0,
    };

    /// The distance of a q row from a k row: positive if k comes later. Accepts positions within ±2^61.
    #[inline]
    pub const fn distance(&self, q_pos: i64, k_pos: i64) -> i64 {
        k_pos - q_pos + self.shift
    }

    /// The positions of k that a q row at `q_pos` attends to, as `begin..end`, under a window of `left` keys before and
    /// `right` after (`i64::MAX` for no limit); empty if `begin ≥ end`. Accepts positions within ±2^61.
    #[inline]
    pub const fn keys(&self, q_pos: i64, (left, right): (i64, i64)) -> (i64, i64) {
        if q_pos < self.q_begin || q_pos >= self.q_end {
            return (0, 0);
        }
        let (low, high) = self.distances((left, right));
        let here = q_pos - self.shift;
        let (begin, end) = (here.saturating_add(low), here.saturating_add(high).saturating_add(1));
        (if begin > self.k_begin { begin } else { self.k_begin }, if end < self.k_end { end } else { self.k_end })
    }

    /// The least and the largest distance of a pair, with the window `(left, right)`.
    #[inline]
    pub const fn distances(&self, (left, right): (i64, i64)) -> (i64, i64) {
        let low = if left == i64::MAX { i64::MIN } else { -left };
        (if low > self.low { low } else { self.low }, if right < self.high { right } else { self.high })
    }

    /// The band within a window `(left, right)` of distances, with limits that include its shift. If no distance is
    /// left, no position is.
    pub(crate) const fn within(&self, window: (i64, i64)) -> Self {
        let (low, high) = self.distances(window);
        if low > high {
            return Self { q_begin: 0, q_end: 0, k_begin: 0, k_end: 0, low: 0, high: 0, shift: 0 };
        }
        let low = if low == i64::MIN { low } else { low.saturating_sub(self.shift) };
        let high = if high == i64::MAX { high } else { high.saturating_sub(self.shift) };
        Self { low, high, shift: 0, ..*self }
    }

    /// The band with the roles of q and k exchanged.
    #[must_use]
    pub const fn transposed(&self) -> Self {
        Self {
            q_begin: self.k_begin,
            q_end: self.k_end,
            k_begin: self.q_begin,
            k_end: self.q_end,
            low: negated(self.high),
            high: negated(self.low),
            shift: -self.shift,
        }
    }
}

/// `−x`; the ends of i64, which are no limits, for each other.
const fn negated(x: i64) -> i64 {
    match x {
        i64::MIN => i64::MAX,
        i64::MAX => i64::MIN,
        _ => -x,
    }
}

/// A k range that a q range attends to, and the band of these two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Pair {
    /// Index of the k range in [`Ranges::k`].
    pub k: u32,
    /// Index of the band in [`Ranges::bands`].
    pub band: u32,
}

impl Pair {
    /// A k range under the first band.
    pub const fn of(k: u32) -> Self {
        Self { k, band: 0 }
    }
}

/// A q range with its mode and the k ranges it attends to: entries `keys_begin..keys_end` of [`Ranges::pairs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct QRange {
    /// The rows of q (and of o, lse, do, delta, dq).
    pub range: Range,
    /// Tokens of q and of k of the whole document, of which a call may have parts; `[0, 0]` if they are not given. They
    /// do not mask anything. A kernel may use one algorithm for long documents and another for short ones: with these
    /// lengths it uses the same one for all parts of a document, so that the error does not depend on how the document
    /// is cut. Without them, the ranges of each call decide. All q ranges of a document in a call have the same
    /// lengths; if any range has lengths, q ranges are in the order of their documents.
    pub document: [u32; 2],
    /// First entry of `pairs`.
    pub keys_begin: u32,
    /// One past the last entry of `pairs`.
    pub keys_end: u32,
    /// How the result is stored.
    pub mode: Mode,
}

/// The pairs of one call, by q range. A pair is a q range, a k range and a band; the pairs of a q range are in the
/// order in which keys are read. The same two ranges may be in several pairs; a q row and a k row are in one pair at
/// most, which the caller sees to. A row that the call writes may be in only one range, which is checked; rows that it
/// only reads may be in several. The call writes the rows of q ranges (unless only dk and dv are computed), and the
/// rows of k ranges if dk and dv are computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranges<'a> {
    /// The q ranges. One without pairs is legal: its rows attend to nothing in this call.
    pub q: &'a [QRange],
    /// The k ranges.
    pub k: &'a [Range],
    /// The pairs, q range by q range.
    pub pairs: &'a [Pair],
    /// The bands of the pairs. For documents, [`Band::WHOLE`] alone.
    pub bands: &'a [Band],
}

impl<'a> Ranges<'a> {
    /// The pairs of a q range.
    #[inline]
    pub fn pairs_of(&self, q: &QRange) -> &'a [Pair] {
        &self.pairs[q.keys_begin as usize..q.keys_end as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stripes of every kind: plain ones, blocks that touch, blocks longer than the range.
    #[test]
    fn rows_before_is_what_counting_gives() {
        for seed in 0..512 {
            let mut draw = fastrand::Rng::with_seed(seed);
            let block = draw.u32(1..12);
            let (pos, len, period) = (draw.i64(-70..70), draw.u32(..90), block + draw.u32(..12));
            let range = Range { row: 5, pos, len, block, period, doc: 0 };
            let beyond = range.position(range.len) + 30;
            for x in -100..beyond {
                let want = (0..range.len).filter(|&i| range.position(i) < x).count() as u32;
                assert_eq!(range.rows_before(x), want, "seed {seed}: {range:?} before {x}");
            }
        }
    }

    #[test]
    fn rows_before_knows_the_ends_of_i64() {
        for (pos, len, block, period) in
            [(0, 7, 1, 1), (-9, u32::MAX, 1, 1), (i64::MIN, 9, 2, 3), (i64::MIN, u32::MAX, 1, u32::MAX), (5, 4, 3, 8)]
        {
            let range = Range { row: 0, pos, len, block, period, doc: 0 };
            assert_eq!(range.rows_before(i64::MIN), 0, "{range:?}");
            assert_eq!(range.rows_before(i64::MAX), len, "{range:?}");
        }
    }
}
