// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pairs of ranges as pieces: rows of q and keys, of which row i sees key j if `low ≤ j − i ≤ high`.
//!
//! Ranges of consecutive positions are one piece. Where all rows of q see the same keys, positions do not matter, and
//! stripes are one piece too. Others are cut, in the way that copies fewer rows:
//!
//! - by residues, if both ranges have the same period: every `block`-th row of q has positions `period` apart, and so
//!   have the keys. That makes a piece for each pair of residues, and a single one of stripes of one token;
//! - by blocks: the rows of a block have consecutive positions. They see some keys all of them, and at either end of
//!   these a few more blocks in part.
//!
//! Slopes need distances: then every piece has consecutive positions.

use core::ops::Range as Rows;

use crate::call::{Band, Range};

/// Limits this far are none. Limits of distances are within ±2^63.
pub(super) const FAR: i128 = 1 << 100;

/// Rows `first`, `first + step`, … of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RowRun {
    pub first: u64,
    pub count: u32,
    pub step: u32,
}

impl RowRun {
    fn of(range: &Range, rows: Rows<u32>) -> Self {
        Self { first: (range.row + i64::from(rows.start)) as u64, count: rows.end - rows.start, step: 1 }
    }
}

/// Rows and keys, counted from 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPiece {
    pub q: RowRun,
    pub k: RowRun,
    pub low: i128,
    pub high: i128,
    /// The distance `k_pos − q_pos` of the first of both, where positions of both are consecutive.
    pub base: Option<i128>,
}

impl RowPiece {
    /// A piece of rows whose positions are consecutive, with limits of distances.
    fn straight(q: (&Range, Rows<u32>), k: (&Range, Rows<u32>), (low, high): (i128, i128), band: &Band) -> Self {
        let base = distance(band, q.0.position(q.1.start), k.0.position(k.1.start));
        let minus = |limit: i128| if limit.abs() >= FAR { limit } else { limit - base };
        let (low, high) = (minus(low), minus(high));
        Self { q: RowRun::of(q.0, q.1), k: RowRun::of(k.0, k.1), low, high, base: Some(base) }
    }

    /// A piece of rows that see all of the keys.
    fn whole(q: (&Range, Rows<u32>), k: (&Range, Rows<u32>)) -> Self {
        Self { q: RowRun::of(q.0, q.1), k: RowRun::of(k.0, k.1), low: -FAR, high: FAR, base: None }
    }
}

fn distance(band: &Band, q_pos: i64, k_pos: i64) -> i128 {
    i128::from(k_pos) - i128::from(q_pos) + i128::from(band.shift)
}

/// Whether the positions of these rows are consecutive.
fn plain(r: &Range, rows: &Rows<u32>) -> bool {
    r.block == r.period || rows.start / r.block == (rows.end - 1) / r.block
}

/// Calls `each` with rows in parts of consecutive positions.
fn blocks(r: &Range, rows: Rows<u32>, mut each: impl FnMut(Rows<u32>)) {
    if !rows.is_empty() && plain(r, &rows) {
        return each(rows);
    }
    let mut at = rows.start;
    while at < rows.end {
        let end = rows.end.min((at / r.block + 1) * r.block);
        each(at..end);
        at = end;
    }
}

/// Calls `each` with the pieces of two ranges under a band and the window `(left, right)`. `slopes`: distances are
/// needed.
pub(super) fn pieces(
    q: &Range,
    k: &Range,
    band: &Band,
    window: (i64, i64),
    slopes: bool,
    each: &mut impl FnMut(RowPiece),
) {
    let rows = q.rows_before(band.q_begin)..q.rows_before(band.q_end);
    let keys = k.rows_before(band.k_begin)..k.rows_before(band.k_end);
    if rows.is_empty() || keys.is_empty() {
        return;
    }
    let (low, high) = band.distances(window);
    let limits = (if low == i64::MIN { -FAR } else { low.into() }, if high == i64::MAX { FAR } else { high.into() });
    let least = distance(band, q.position(rows.end - 1), k.position(keys.start));
    let most = distance(band, q.position(rows.start), k.position(keys.end - 1));
    if limits.0 > limits.1 || limits.0 > most || limits.1 < least {
        return;
    }
    let both_plain = plain(q, &rows) && plain(k, &keys);
    if both_plain {
        return each(RowPiece::straight((q, rows), (k, keys), limits, band));
    }
    if !slopes && limits.0 <= least && limits.1 >= most {
        return each(RowPiece::whole((q, rows), (k, keys)));
    }
    let by_residues = !slopes && q.period == k.period && !plain(q, &rows) && !plain(k, &keys);
    // Rows copied: each residue's for each of the other range; about half of all keys for each block.
    let (n, m) = (u64::from(rows.end - rows.start), u64::from(keys.end - keys.start));
    let of_blocks = (n / u64::from(q.block)).max(1) * m / 2;
    if by_residues && n * u64::from(k.block) + m * u64::from(q.block) <= of_blocks {
        residues(q, rows, k, keys, limits, band, each);
    } else {
        by_blocks(q, rows, k, keys, limits, band, window, slopes, each);
    }
}

fn residues(
    q: &Range,
    rows: Rows<u32>,
    k: &Range,
    keys: Rows<u32>,
    (low, high): (i128, i128),
    band: &Band,
    each: &mut impl FnMut(RowPiece),
) {
    let period = i128::from(q.period);
    let run = |r: &Range, i: u32, end: u32| RowRun {
        first: (r.row + i64::from(i)) as u64,
        count: (end - i).div_ceil(r.block),
        step: r.block,
    };
    for i in rows.clone().take(q.block as usize) {
        for j in keys.clone().take(k.block as usize) {
            let base = distance(band, q.position(i), k.position(j));
            // low ≤ base + period · (key − row) ≤ high
            let low = if low <= -FAR { low } else { -(base - low).div_euclid(period) };
            let high = if high >= FAR { high } else { (high - base).div_euclid(period) };
            each(RowPiece { q: run(q, i, rows.end), k: run(k, j, keys.end), low, high, base: None });
        }
    }
}

fn by_blocks(
    q: &Range,
    rows: Rows<u32>,
    k: &Range,
    keys: Rows<u32>,
    limits: (i128, i128),
    band: &Band,
    window: (i64, i64),
    slopes: bool,
    each: &mut impl FnMut(RowPiece),
) {
    blocks(q, rows, |mine| {
        // Keys of some row, and between them those of all rows.
        let seen = mine.clone().map(|i| {
            let (begin, end) = band.keys(q.position(i), window);
            let of = |x| k.rows_before(x).clamp(keys.start, keys.end);
            if begin < end { of(begin)..of(end) } else { 0..0 }
        });
        let (mut outer, mut inner) = (keys.end..keys.start, keys.clone());
        for one in seen {
            if one.is_empty() {
                inner = 0..0;
                continue;
            }
            outer = outer.start.min(one.start)..outer.end.max(one.end);
            inner = inner.start.max(one.start)..inner.end.min(one.end);
        }
        if outer.is_empty() {
            return;
        }
        if slopes || inner.is_empty() {
            inner = outer.start..outer.start;
        } else {
            each(RowPiece::whole((q, mine.clone()), (k, inner.clone())));
        }
        for part in [outer.start..inner.start, inner.end..outer.end] {
            blocks(k, part, |part| each(RowPiece::straight((q, mine.clone()), (k, part), limits, band)));
        }
    });
}
