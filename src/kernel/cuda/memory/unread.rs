// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges cut where rows begin or cease to be read, for the fused backward.
//!
//! That backward multiplies whole tiles of its ranges: a row that no pair reads is multiplied by zero, which is not
//! zero if it holds NaN. The other kernels walk over the rows in reach of a band alone. So ranges with such rows are
//! cut: what is read, and what is not, which then has no pairs. Stripes are left whole. Without bands nothing is cut:
//! a document's rows are all read, or its window says otherwise for whole ranges.

use crate::call::{Band, Pair, QRange, Range, Ranges};
use crate::kernel::cuda::abi::params::SidedBand;
use alloc::vec;
use alloc::vec::Vec;

/// The ranges of a call after cutting. A pair is as it was: what it reads lies in one piece of q and one of k.
#[derive(Debug)]
pub(in crate::kernel::cuda) struct Pieces {
    q: Vec<QRange>,
    k: Vec<Range>,
    pairs: Vec<Pair>,
}

/// Some rows of a range: first, and one past the last.
type Rows = (u32, u32);

/// The rows of a partner in reach of an own range under a band.
fn read(band: &SidedBand, own: &Range, partner: &Range) -> Rows {
    if own.len == 0 || partner.len == 0 {
        return (0, 0);
    }
    let reach = band.reach(own.pos, own.last());
    reach.map_or((0, 0), |(first, last)| (partner.rows_before(first), partner.rows_before(last + 1)))
}

/// Cuts a range, of which some rows are read: the pieces in their order.
fn cut(range: &Range, mut rows: Vec<Rows>) -> Vec<Rows> {
    if !range.is_plain() || range.len == 0 {
        return vec![(0, range.len)];
    }
    rows.sort_unstable();
    let mut out: Vec<Rows> = Vec::new();
    for (begin, end) in rows {
        match out.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => out.push((begin, end)),
        }
    }
    // What lies between them.
    let (ends, begins) = (core::iter::once(0).chain(out.iter().map(|r| r.1)), out.iter().map(|r| r.0));
    let gaps: Vec<Rows> = ends.zip(begins.chain([range.len])).filter(|(begin, end)| begin < end).collect();
    out.extend(gaps);
    out.sort_unstable();
    out
}

fn piece(range: &Range, (begin, end): Rows) -> Range {
    if (begin, end) == (0, range.len) {
        return *range;
    }
    Range { row: range.row + i64::from(begin), pos: range.position(begin), len: end - begin, ..*range }
}

/// Which piece holds a row.
fn holder(pieces: &[Rows], row: u32) -> usize {
    pieces.partition_point(|&(_, end)| end <= row)
}

/// The most cuts of [`Pieces::of`] on either side: two at each pair.
pub(in crate::kernel::cuda) fn most_cuts(ranges: &Ranges) -> usize {
    if are_whole(ranges) { 0 } else { 2 * crate::kernel::cuda::memory::metadata::inverse_len(ranges) }
}

fn are_whole(ranges: &Ranges) -> bool {
    ranges.bands.iter().all(|band| *band == Band::WHOLE)
}

impl Pieces {
    /// `None` if no row has to be cut off. Ranges were checked.
    pub(in crate::kernel::cuda) fn of(ranges: &Ranges, window: (i64, i64)) -> Option<Self> {
        if are_whole(ranges) {
            return None;
        }
        let bands: Vec<SidedBand> = crate::kernel::cuda::memory::bands::of_queries(ranges, window).collect();
        // By pair of a q range, what it reads of q and of k; and by k range.
        let mut read_rows: Vec<(Rows, Rows)> = Vec::new();
        let mut of_k: Vec<Vec<Rows>> = vec![Vec::new(); ranges.k.len()];
        for q in ranges.q {
            for pair in ranges.pairs_of(q) {
                let (k, band) = (&ranges.k[pair.k as usize], &bands[pair.band as usize]);
                let rows = (read(&band.transposed(), k, &q.range), read(band, &q.range, k));
                let is_read = rows.0.0 < rows.0.1 && rows.1.0 < rows.1.1;
                read_rows.push(if is_read { rows } else { ((0, 0), (0, 0)) });
                of_k[pair.k as usize].extend(is_read.then_some(rows.1));
            }
        }
        let cuts: Vec<Vec<Rows>> = ranges.k.iter().zip(of_k).map(|(k, rows)| cut(k, rows)).collect();
        let mut out = Self { q: Vec::new(), k: Vec::new(), pairs: Vec::new() };
        let mut first_piece = Vec::new();
        for (k, pieces) in ranges.k.iter().zip(&cuts) {
            first_piece.push(out.k.len());
            out.k.extend(pieces.iter().map(|&rows| piece(k, rows)));
        }
        let mut rest = &read_rows[..];
        for q in ranges.q {
            let pairs = ranges.pairs_of(q);
            let (own, others) = rest.split_at(pairs.len());
            rest = others;
            let pieces = cut(&q.range, own.iter().map(|r| r.0).filter(|r| r.0 < r.1).collect());
            for (at, &rows) in pieces.iter().enumerate() {
                let keys_begin = out.pairs.len() as u32;
                for (pair, (of_q, of_k)) in pairs.iter().zip(own) {
                    if of_q.0 < of_q.1 && holder(&pieces, of_q.0) == at {
                        let k = pair.k as usize;
                        let k = (first_piece[k] + holder(&cuts[k], of_k.0)) as u32;
                        out.pairs.push(Pair { k, ..*pair });
                    }
                }
                out.q.push(QRange { range: piece(&q.range, rows), keys_begin, keys_end: out.pairs.len() as u32, ..*q });
            }
        }
        (out.q.len() > ranges.q.len() || out.k.len() > ranges.k.len()).then_some(out)
    }

    /// The ranges, with the bands of the call.
    pub(in crate::kernel::cuda) fn ranges<'a>(&'a self, bands: &'a [Band]) -> Ranges<'a> {
        Ranges { q: &self.q, k: &self.k, pairs: &self.pairs, bands }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Mode;

    fn q_range(range: Range, keys_begin: u32, keys_end: u32) -> QRange {
        QRange { range, document: [0; 2], keys_begin, keys_end, mode: Mode::Only }
    }

    #[test]
    fn rows_that_nothing_reads_are_cut_off() {
        let q = [q_range(Range::plain(10, 100, 0, 0), 0, 2), q_range(Range::plain(200, 30, 100, 0), 2, 3)];
        let k = [Range::plain(5, 80, 0, 0), Range::plain(90, 9, 0, 1)];
        let bands = [
            Band { q_begin: 20, q_end: 40, k_begin: 10, k_end: 20, ..Band::WHOLE },
            Band { q_begin: 40, q_end: 60, k_begin: 50, k_end: 70, ..Band::WHOLE },
            Band { low: 1, high: 0, ..Band::WHOLE },
        ];
        let pairs = [Pair { k: 0, band: 1 }, Pair { k: 0, band: 0 }, Pair { k: 1, band: 2 }];
        let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &bands };
        let pieces = Pieces::of(&ranges, (i64::MAX, i64::MAX)).expect("rows that nothing reads");
        let rows = |r: &Range| (r.row, r.pos, r.len);
        let found: Vec<_> = pieces.q.iter().map(|q| (rows(&q.range), q.keys_begin..q.keys_end)).collect();
        let expected = [((10, 0, 20), 0..0), ((30, 20, 40), 0..2), ((70, 60, 40), 2..2), ((200, 100, 30), 2..2)];
        assert_eq!(found, expected);
        let found: Vec<_> = pieces.k.iter().map(rows).collect();
        assert_eq!(found, [(5, 0, 10), (15, 10, 10), (25, 20, 30), (55, 50, 20), (75, 70, 10), (90, 0, 9)]);
        assert_eq!(pieces.pairs, [Pair { k: 3, band: 1 }, Pair { k: 1, band: 0 }]);
    }

    #[test]
    fn what_is_read_is_left_whole() {
        let q = [q_range(Range::plain(0, 100, 0, 0), 0, 1)];
        let k = [Range::plain(0, 100, 0, 0)];
        for (band, window, cut) in [
            (Band::WHOLE, (3, 0), false),
            (Band { high: 0, ..Band::WHOLE }, (i64::MAX, i64::MAX), false),
            (Band { high: -1, ..Band::WHOLE }, (i64::MAX, i64::MAX), true),
            (Band { k_end: 99, ..Band::WHOLE }, (i64::MAX, i64::MAX), true),
        ] {
            let ranges = Ranges { q: &q, k: &k, pairs: &[Pair::of(0)], bands: &[band] };
            assert_eq!(Pieces::of(&ranges, window).is_some(), cut, "{band:?}");
        }
    }
}
