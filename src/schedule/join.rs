// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which rows of one share another share needs.
//!
//! A *circulating* share (k and v, or the q side) is sent to the rank of a *stationary* share. A circulating row is
//! needed if at least one pair with a stationary row is allowed; [`join`] finds exactly those
//! rows, as [`Fragment`]s that are compact in the receive buffer. Owner and reader both call it with the same
//! arguments, so they get the same messages without communicating.
//!
//! Both shares list documents in ascending order and the segments of one document in ascending positions, so the
//! segments that a document attends to are found near those of the document before, and nothing is allocated beyond the
//! lists given.

use alloc::vec::Vec;

use crate::{
    batch::Side,
    call::{Band, Range},
    layout::Segment,
    slice::parts::Allowed,
};

/// A run of rows of a share that some rank needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// The ring rank at the other end: the owner of what arrives, the reader of what leaves.
    pub peer: u32,
    /// First row in the owner's share.
    pub owner_row: i64,
    /// Rows in the slot, with positions and document.
    pub range: Range,
}

/// Which segments of a share are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Segments that are sent in ring direction.
    Forward,
    /// Segments that are sent in the reverse direction.
    Reverse,
    /// All segments.
    All,
}

impl Class {
    pub(super) fn has(self, reverse: bool) -> bool {
        match self {
            Self::Forward => !reverse,
            Self::Reverse => reverse,
            Self::All => true,
        }
    }
}

/// The circulating positions that the rows of a stationary segment need, as intervals `low..=high`, ascending. `limits`
/// are seen from the stationary side.
fn reach(s: &Range, limits: &Band, mut each: impl FnMut(i64, i64)) {
    let rows = s.rows_at(limits.q_begin, limits.q_end.saturating_sub(1));
    if rows.is_empty() {
        return;
    }
    let mut run = |first: u32, end: u32| {
        let low = s.position(first).saturating_add(limits.low).max(limits.k_begin);
        let high = s.position(end - 1).saturating_add(limits.high).min(limits.k_end.saturating_sub(1));
        if low <= high {
            each(low, high);
        }
    };
    if s.is_plain() || i64::from(s.period - s.block) <= limits.high.saturating_sub(limits.low) {
        return run(rows.start, rows.end);
    }
    let mut i = rows.start;
    while i < rows.end {
        let n = (s.block - i % s.block).min(rows.end - i);
        run(i, i + n);
        i += n;
    }
}

/// Whether some row of `s` may be paired with some row of `v` within the limits, seen from `s`.
pub(crate) fn has_allowed_pair(s: &Range, v: &Range, limits: &Band) -> bool {
    let (first, last) = (v.pos, v.last());
    let mut found = false;
    reach(s, limits, |low, high| {
        found |= low <= last && high >= first && !v.rows_at(low, high).is_empty();
    });
    found
}

/// The document of a segment.
pub(super) fn document(s: &Segment) -> u32 {
    s.range.doc
}

/// A list in the order of documents, in which those near the last one are found fast.
pub(super) struct ByDocument<'a, T, F> {
    list: &'a [T],
    document_of: F,
    /// The first entry of the last document, and the number of its entries.
    at: usize,
    len: usize,
}

impl<'a, T, F: Fn(&T) -> u32> ByDocument<'a, T, F> {
    pub(super) fn new(list: &'a [T], document_of: F) -> Self {
        Self { list, document_of, at: 0, len: 0 }
    }

    /// The entries of a document, and the index of the first.
    pub(super) fn of(&mut self, doc: u32) -> (usize, &'a [T]) {
        // A document may have many parts.
        if self.len > 0 && (self.document_of)(&self.list[self.at]) == doc {
            return (self.at, &self.list[self.at..self.at + self.len]);
        }
        let before = |x: &T| (self.document_of)(x) < doc;
        // Back to the begin for an earlier document.
        let mut at = if self.at > 0 && !before(&self.list[self.at - 1]) { 0 } else { self.at };
        // Doubling steps, then a binary search in the last step.
        let rest = &self.list[at..];
        let mut step = 1;
        while step <= rest.len() && before(&rest[step - 1]) {
            step *= 2;
        }
        at += step / 2 + rest[step / 2..rest.len().min(step)].partition_point(before);
        let of_document = self.list[at..].iter().take_while(|x| (self.document_of)(x) == doc).count();
        (self.at, self.len) = (at, of_document);
        (at, &self.list[at..at + of_document])
    }
}

/// Ranges in the order of documents and positions, of which those near some rows are found fast: a document may have
/// thousands of parts, and as many ranges.
pub(super) struct NearRanges<'a, F> {
    ranges: ByDocument<'a, Range, F>,
    /// The document seen last, and whether the ends of its ranges ascend as their begins do. Those of stripes need not.
    ends_ascend: Option<(u32, bool)>,
}

/// The ranges of a list, by document.
pub(super) fn near_ranges(list: &[Range]) -> NearRanges<'_, impl Fn(&Range) -> u32> {
    NearRanges { ranges: ByDocument::new(list, |r: &Range| r.doc), ends_ascend: None }
}

impl<'a, F: Fn(&Range) -> u32> NearRanges<'a, F> {
    /// The ranges of a document in which `s` may have pairs within the limits, seen from `s`, and the index of the
    /// first: all that do, and perhaps a few more.
    pub(super) fn of(&mut self, doc: u32, s: &Range, limits: &Band) -> (usize, &'a [Range]) {
        let (first, list) = self.ranges.of(doc);
        if list.len() < FEW {
            return (first, list);
        }
        let ends_ascend = match self.ends_ascend {
            Some((last, ascend)) if last == doc => ascend,
            _ => list.is_sorted_by_key(Range::last),
        };
        self.ends_ascend = Some((doc, ends_ascend));
        let low = s.pos.max(limits.q_begin).saturating_add(limits.low).max(limits.k_begin);
        let high = s.last().min(limits.q_end.saturating_sub(1)).saturating_add(limits.high);
        let high = high.min(limits.k_end.saturating_sub(1));
        let end = list.partition_point(|r| r.pos <= high);
        let begin = if ends_ascend { list[..end].partition_point(|r| r.last() < low) } else { 0 };
        (first + begin, &list[begin..end])
    }
}

/// So few ranges are looked at one by one.
const FEW: usize = 8;

/// Appends the fragments of `circulating`, which are of `side`, that `stationary` needs, compact from slot row `row`
/// on; returns the row after them. `intervals` has no contents.
pub(crate) fn join(
    stationary: &[Segment],
    (circulating, side): (&[Segment], Side),
    class: Class,
    allowed: &Allowed,
    peer: u32,
    mut row: i64,
    intervals: &mut Vec<(u32, u32)>,
    out: &mut Vec<Fragment>,
) -> i64 {
    // Where documents attend to themselves, those of the shorter list are enough.
    let few = allowed.is_by_document() && stationary.len() < circulating.len();
    let documents = stationary.chunk_by(|a, b| document(a) == document(b)).map(|of| document(&of[0]));
    let mut of_documents = ByDocument::new(circulating, document);
    let parts = documents.filter(|_| few).map(|doc| of_documents.of(doc).1);
    let all = (!few).then_some(circulating);
    let mut stationary = ByDocument::new(stationary, document);
    for v in parts.chain(all).flatten().filter(|v| class.has(v.reverse)).map(|v| &v.range) {
        needed(&mut stationary, v, side, allowed, intervals);
        for &(i0, i1) in &*intervals {
            v.split(i0, i1, |i, piece| {
                out.push(Fragment { peer, owner_row: v.row + i64::from(i), range: Range { row, ..piece } });
                row += i64::from(piece.len);
            });
        }
    }
    row
}

/// `intervals` := the rows of a circulating segment of `side` that stationary segments need, ascending and joined.
fn needed(
    stationary: &mut ByDocument<Segment, impl Fn(&Segment) -> u32>,
    v: &Range,
    side: Side,
    allowed: &Allowed,
    intervals: &mut Vec<(u32, u32)>,
) {
    intervals.clear();
    let mut ascending = true;
    for of in allowed.of_rows(side, v) {
        let limits = of.limits.transposed();
        for s in stationary.of(of.document).1 {
            reach(&s.range, &limits, |low, high| {
                let (i0, i1) = (v.rows_before(low), v.rows_before(high.saturating_add(1)));
                match intervals.last_mut() {
                    _ if i0 >= i1 => {}
                    Some((a, e)) if *a <= i0 && i0 <= *e => *e = (*e).max(i1),
                    last => {
                        ascending &= last.is_none_or(|last| last.0 <= i0);
                        intervals.push((i0, i1));
                    }
                }
            });
        }
    }
    // The intervals of one slice ascend, those of several need not.
    if !ascending {
        unite(intervals);
    }
}

/// Sorts intervals of rows, each given by its first row and its end, and joins those that overlap or touch.
pub(super) fn unite<T: Copy + Ord>(intervals: &mut Vec<(T, T)>) {
    intervals.sort_unstable();
    intervals.dedup_by(|next, open| {
        let joined = next.0 <= open.1;
        open.1 = if joined { open.1.max(next.1) } else { open.1 };
        joined
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{batch::Batch, layout::Layout, layout::Shares, mask::Mask};
    use alloc::vec;

    /// Every pair of shares of many small problems: the fragments hold exactly the rows that brute force finds.
    #[test]
    fn fragments_are_exactly_the_rows_that_are_needed() {
        let batches = [
            Batch::from_lengths(&[7, 0, 1, 13, 3]).unwrap(),
            Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
            Batch::cross(&[0, 6, 11], &[0, 2, 14], Some(&[-2, 5])).unwrap(),
        ];
        let masks = [
            Mask::full(),
            Mask::causal(),
            Mask::window(2, 0),
            Mask::window(0, 0),
            Mask::window(1, 3),
            Mask::window(0, 1),
        ];
        let layouts = [
            Layout::Contiguous,
            Layout::Zigzag,
            Layout::ZigzagPack,
            Layout::Striped { stripe: 1 },
            Layout::Striped { stripe: 3 },
            Layout::Balanced { chunks: 3 },
        ];
        let (mut checked, mut left_out) = (0, 0);
        for batch in &batches {
            for mask in masks {
                for layout in layouts {
                    for ring in [1, 2, 3, 5] {
                        let shares = Shares::new(batch, mask, layout, ring).unwrap();
                        for r in 0..ring {
                            for j in 0..ring {
                                let (mut q, mut k, mut out) = (vec![], vec![], vec![]);
                                shares.segments(Side::Q, r, &mut q);
                                shares.segments(Side::K, j, &mut k);
                                let rows =
                                    join(&q, (&k, Side::K), Class::All, &mask.into(), 9, 0, &mut vec![], &mut out);
                                assert_eq!(rows, out.iter().map(|f| i64::from(f.range.len)).sum::<i64>());
                                // The same with no more segments of either than may have pairs.
                                let (mut some, mut again) = (vec![], vec![]);
                                shares.segments_beside(Side::K, j, &q, &mut some);
                                let near = (&*some, Side::K);
                                join(&q, near, Class::All, &mask.into(), 9, 0, &mut vec![], &mut again);
                                assert_eq!(again, out, "{layout} ring {ring} q of {r}, k of {j}, {mask:?}");
                                shares.segments_beside(Side::Q, r, &k, &mut some);
                                again.clear();
                                join(&some, (&k, Side::K), Class::All, &mask.into(), 9, 0, &mut vec![], &mut again);
                                assert_eq!(again, out, "{layout} ring {ring} q of {r}, k of {j}, {mask:?}");
                                let all: Vec<_> = q.iter().map(document).collect();
                                left_out += q.len() - some.len();
                                assert!(some.iter().all(|s| q.contains(s) && all.contains(&document(s))));
                                let got: Vec<_> = out
                                    .iter()
                                    .flat_map(|f| {
                                        (0..f.range.len)
                                            .map(|i| (f.owner_row + i64::from(i), f.range.doc, f.range.position(i)))
                                    })
                                    .collect();
                                let positions = |list: &[Segment]| -> Vec<(i64, u32, i64)> {
                                    list.iter()
                                        .flat_map(|s| {
                                            (0..s.range.len)
                                                .map(|i| (s.range.row + i64::from(i), s.range.doc, s.range.position(i)))
                                        })
                                        .collect()
                                };
                                let want: Vec<_> = positions(&k)
                                    .into_iter()
                                    .filter(|&(_, d, kp)| {
                                        positions(&q).iter().any(|&(_, e, qp)| d == e && mask.allows(qp, kp))
                                    })
                                    .collect();
                                assert_eq!(got, want, "{layout} ring {ring} q of {r}, k of {j}, {mask:?}");
                                checked += want.len();
                            }
                        }
                    }
                }
            }
        }
        assert!(checked > 10_000 && left_out > 1_000, "{checked} {left_out}");
    }
}
