// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which rows of one share another share needs.
//!
//! A *circulating* share (k and v, or the q side) is sent to the rank of a *stationary* share. A circulating row is
//! needed if the mask allows at least one pair with a stationary row of its document; [`join`] finds exactly those
//! rows, as [`Fragment`]s that are compact in the receive buffer. Owner and reader both call it with the same
//! arguments, so they get the same messages without communicating.
//!
//! Both shares list documents in ascending order and the segments of one document in ascending positions, so one pass
//! over both suffices and nothing is allocated beyond the output.

use alloc::vec::Vec;

use crate::{call::Range, layout::Segment, mask::Mask};

/// A run of rows of a share that some rank needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// The ring rank at the other end: the owner of what arrives, the reader of what leaves.
    pub peer: u32,
    /// First row in the owner's share.
    pub owner_row: i64,
    /// Rows in the slot, with positions and document.
    pub range: Range,
}

/// Which segments of a share are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Segments that are sent in ring direction.
    Forward,
    /// Segments that are sent in the reverse direction.
    Reverse,
    /// All segments.
    All,
}

impl Class {
    fn has(self, reverse: bool) -> bool {
        match self {
            Self::Forward => !reverse,
            Self::Reverse => reverse,
            Self::All => true,
        }
    }
}

/// Rows `i0..i1` of a range as one or two ranges: a stripe cut inside a block needs a plain run first.
pub(super) fn split_stripe(range: &Range, i0: u32, i1: u32, mut each: impl FnMut(u32, Range)) {
    let mut i = i0;
    let phase = i % range.block;
    if range.block != range.period && phase != 0 {
        let n = (range.block - phase).min(i1 - i);
        each(i, Range { pos: range.position(i), len: n, block: 1, period: 1, ..*range });
        i += n;
    }
    if i < i1 {
        each(i, Range { pos: range.position(i), len: i1 - i, ..*range });
    }
}

/// The circulating positions that the rows of a stationary segment need, as intervals `low..=high`, ascending.
fn reach(s: &Range, mask: Mask, mut each: impl FnMut(i64, i64)) {
    let span = mask.left_limit().saturating_add(mask.right_limit());
    let interval = |a: i64, b: i64| (a.saturating_sub(mask.left_limit()), b.saturating_add(mask.right_limit()));
    if s.is_plain() || i64::from(s.period - s.block) <= span {
        let (low, high) = interval(s.pos, s.last());
        return each(low, high);
    }
    let mut i = 0;
    while i < s.len {
        let n = s.block.min(s.len - i);
        let a = s.position(i);
        let (low, high) = interval(a, a + i64::from(n) - 1);
        each(low, high);
        i += n;
    }
}

/// Whether some row of `s` may be paired with some row of `v`.
pub(crate) fn meets(s: &Range, v: &Range, mask: Mask) -> bool {
    let (first, last) = (v.pos, v.last());
    let mut found = false;
    reach(s, mask, |low, high| {
        found |= low <= last && high >= first && !v.rows_at(low, high).is_empty();
    });
    found
}

/// The document of a segment.
pub(super) fn document(s: &Segment) -> u32 {
    s.range.doc
}

/// Calls `each(index, entries of a, index, entries of b)` for every document that two lists hold, with the index of the
/// first entry of each. Both lists come with the document of an entry, and are in ascending order of it.
pub(super) fn by_document<'a, A, B>(
    (a, document_of_a): (&'a [A], impl Fn(&A) -> u32),
    (b, document_of_b): (&'a [B], impl Fn(&B) -> u32),
    mut each: impl FnMut(usize, &'a [A], usize, &'a [B]),
) {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        let (doc, of_b) = (document_of_a(&a[i]), document_of_b(&b[j]));
        match doc.cmp(&of_b) {
            core::cmp::Ordering::Less => i += 1,
            core::cmp::Ordering::Greater => j += 1,
            core::cmp::Ordering::Equal => {
                let ie = i + a[i..].iter().take_while(|x| document_of_a(x) == doc).count();
                let je = j + b[j..].iter().take_while(|x| document_of_b(x) == doc).count();
                each(i, &a[i..ie], j, &b[j..je]);
                (i, j) = (ie, je);
            }
        }
    }
}

/// Appends the fragments of `circulating` that `stationary` needs, compact from slot row `row` on; returns the row
/// after them. `mask` is seen from the stationary side: it is the problem's mask when k circulates and its transpose
/// when q does.
pub(crate) fn join(
    stationary: &[Segment],
    circulating: &[Segment],
    class: Class,
    mask: Mask,
    peer: u32,
    mut row: i64,
    out: &mut Vec<Fragment>,
) -> i64 {
    by_document((stationary, document), (circulating, document), |_, stationary, _, circulating| {
        for v in circulating.iter().filter(|v| class.has(v.reverse)) {
            let v = &v.range;
            let mut emit = |i0: u32, i1: u32| {
                split_stripe(v, i0, i1, |i, piece| {
                    out.push(Fragment { peer, owner_row: v.row + i64::from(i), range: Range { row, ..piece } });
                    row += i64::from(piece.len);
                });
            };
            // The intervals ascend, so one pass computes their union.
            let mut open: Option<(u32, u32)> = None;
            for s in stationary {
                reach(&s.range, mask, |low, high| {
                    let (i0, i1) = (v.rows_before(low), v.rows_before(high.saturating_add(1)));
                    if i0 >= i1 {
                        return;
                    }
                    match &mut open {
                        Some((_, end)) if i0 <= *end => *end = (*end).max(i1),
                        Some((a, e)) => {
                            emit(*a, *e);
                            open = Some((i0, i1));
                        }
                        None => open = Some((i0, i1)),
                    }
                });
            }
            if let Some((a, e)) = open {
                emit(a, e);
            }
        }
    });
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{batch::Batch, batch::Side, layout::Layout, layout::Shares};
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
        let mut checked = 0;
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
                                let rows = join(&q, &k, Class::All, mask, 9, 0, &mut out);
                                assert_eq!(rows, out.iter().map(|f| i64::from(f.range.len)).sum::<i64>());
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
        assert!(checked > 10_000);
    }
}
