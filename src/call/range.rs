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
    /// The document. Kernels do not mask by it: a pair is always two ranges of one document.
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

/// The pairs of one call, by q range. A pair is a q range and a k range of the same document; the pairs of a q range
/// are in the order in which keys are read. A row that the call writes may be in only one range, which is checked; rows
/// that it only reads may be in several. The call writes the rows of q ranges (unless only dk and dv are computed), and
/// the rows of k ranges if dk and dv are computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ranges<'a> {
    /// The q ranges. One without pairs is legal: its rows attend to nothing in this call.
    pub q: &'a [QRange],
    /// The k ranges.
    pub k: &'a [Range],
    /// Indices into `k`.
    pub pairs: &'a [u32],
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Stripes of every kind: plain ones, blocks that touch, blocks longer than the range.
    fn stripes() -> impl Strategy<Value = Range> {
        (-70i64..70, 0u32..90, 1u32..12, 0u32..12).prop_map(|(pos, len, block, gap)| Range {
            row: 5,
            pos,
            len,
            block,
            period: block + gap,
            doc: 0,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn rows_before_is_what_counting_gives(range in stripes()) {
            let beyond = range.position(range.len) + 30;
            for x in -100..beyond {
                let want = (0..range.len).filter(|&i| range.position(i) < x).count() as u32;
                prop_assert_eq!(range.rows_before(x), want, "{:?} before {}", range, x);
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
