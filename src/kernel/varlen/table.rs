// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls that an operation makes: its ranges as rectangles, those with the same window limits in one call.
//!
//! A kernel attends `sq` rows to `sk` rows with limits that count from the bottom-right corner, are not negative, and
//! may be none. A piece becomes that when rows of q without keys and keys without rows are left out: then the last row
//! has a key and the last key a row, so that both limits are at least 0. A limit that excludes nothing is none.

use alloc::{vec, vec::Vec};

use super::{
    call::Rectangles,
    pieces::{FAR, RowPiece, RowRun, pieces},
};
use crate::call::{Ranges, RawTensor, Score};

/// A call may have as many rows as twice the operation's ranges, or so many if that is more: its packed tensors are a
/// copy, and stripes of q have one of the keys each.
const FEW_ROWS: u64 = 1 << 16;

/// The calls of one operation. Made once for a prepared plan.
#[derive(Debug, Default)]
pub(crate) struct CallTable {
    pub(super) groups: Vec<CallGroup>,
}

/// The rectangles of one call.
#[derive(Debug)]
pub(super) struct CallGroup {
    pub left: Option<u32>,
    pub right: Option<u32>,
    pub cu_seqlens_q: Vec<i32>,
    pub cu_seqlens_k: Vec<i32>,
    /// The rows of each rectangle: one run.
    pub q_runs: Vec<RowRun>,
    /// The q range of each rectangle.
    pub q_ranges: Vec<u32>,
    /// The keys of all rectangles.
    pub k_runs: Vec<RowRun>,
    /// With slopes: the distance of the last key of each from its last row, and its document.
    pub corners: Vec<i64>,
    pub documents: Vec<u32>,
}

impl CallGroup {
    pub(super) fn rows(&self) -> u64 {
        self.q_runs.iter().map(|run| u64::from(run.count)).sum()
    }

    pub(super) fn keys(&self) -> u64 {
        self.k_runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// The call as the kernel gets it, with the packed q, k and v.
    pub(super) fn call<'a>(
        &'a self,
        score: &Score,
        alibi_slopes: &'a [f32],
        [q, k, v]: [&RawTensor; 3],
    ) -> Rectangles<'a> {
        Rectangles {
            cu_seqlens_q: &self.cu_seqlens_q,
            cu_seqlens_k: &self.cu_seqlens_k,
            window_left: self.left,
            window_right: self.right,
            scale: score.scale,
            softcap: score.softcap,
            alibi_slopes,
            corners: &self.corners,
            heads: q.heads as usize,
            kv_heads: k.heads as usize,
            head_dim: q.dim as usize,
            value_dim: v.dim as usize,
            dtype: q.dtype,
        }
    }
}

/// Rows of q and of k, with the limits from the bottom-right corner.
#[derive(Clone, Debug)]
struct Rectangle {
    q: RowRun,
    k: Vec<RowRun>,
    keys: u32,
    left: Option<u32>,
    right: Option<u32>,
    /// The distance of the last key from the last row; 0 if it is not needed.
    corner: i64,
}

impl CallTable {
    /// Of the ranges of a call. `windows`: the kernel takes any limits.
    pub(super) fn new(ranges: &Ranges<'_>, score: &Score, slopes: bool, windows: bool) -> Self {
        let mut table = Self::default();
        let lengths = ranges.q.iter().map(|q| q.range.len).chain(ranges.k.iter().map(|k| k.len));
        let shard: u64 = lengths.map(u64::from).sum();
        let most = (2 * shard).clamp(FEW_ROWS, i32::MAX as u64) as i64;
        let mut of_range = Vec::new();
        for (i, q) in ranges.q.iter().enumerate() {
            of_range.clear();
            for pair in ranges.pairs_of(q) {
                let (k, band) = (&ranges.k[pair.k as usize], &ranges.bands[pair.band as usize]);
                let window = (score.window_left, score.window_right);
                pieces(&q.range, k, band, window, slopes, &mut |piece| of_range.push((piece, vec![piece.k])));
            }
            join(&mut of_range);
            for rectangle in of_range.drain(..).filter_map(|(piece, keys)| trimmed(&piece, &keys)) {
                let whole = windows || rectangle.left.is_some() || rectangle.right.unwrap_or(0) == 0;
                let list = if whole { vec![rectangle] } else { causal(rectangle).into() };
                list.into_iter()
                    .for_each(|rectangle| table.push(rectangle, most, i as u32, slopes.then_some(q.range.doc)));
            }
        }
        table
    }

    fn push(&mut self, r: Rectangle, most: i64, q_range: u32, document: Option<u32>) {
        let fits = |cu: &[i32], more: u32| i64::from(cu[cu.len() - 1]) + i64::from(more) <= most;
        let found = self.groups.iter_mut().find(|g| {
            (g.left, g.right) == (r.left, r.right) && fits(&g.cu_seqlens_q, r.q.count) && fits(&g.cu_seqlens_k, r.keys)
        });
        let group = match found {
            Some(group) => group,
            None => {
                self.groups.push(CallGroup {
                    left: r.left,
                    right: r.right,
                    cu_seqlens_q: vec![0],
                    cu_seqlens_k: vec![0],
                    q_runs: Vec::new(),
                    q_ranges: Vec::new(),
                    k_runs: Vec::new(),
                    corners: Vec::new(),
                    documents: Vec::new(),
                });
                self.groups.last_mut().expect("pushed above")
            }
        };
        for (cu, more) in [(&mut group.cu_seqlens_q, r.q.count), (&mut group.cu_seqlens_k, r.keys)] {
            cu.push(cu[cu.len() - 1] + more as i32);
        }
        group.q_runs.push(r.q);
        group.q_ranges.push(q_range);
        group.k_runs.extend(r.k);
        if let Some(document) = document {
            group.corners.push(r.corner);
            group.documents.push(document);
        }
    }
}

/// Makes one piece of those that have the same rows and limits of distances, and keys whose positions follow each
/// other.
fn join(list: &mut Vec<(RowPiece, Vec<RowRun>)>) {
    let limits = |p: &RowPiece, base: i128| [p.low, p.high].map(|x| if x.abs() >= FAR { x } else { x + base });
    let key = |p: &RowPiece| p.base.map(|base| (p.q, limits(p, base), base));
    list.sort_by_key(|(piece, _)| key(piece));
    list.dedup_by(|(next, keys), (piece, all)| {
        let (Some((q, limits, base)), Some((next_q, next_limits, next_base))) = (key(piece), key(next)) else {
            return false;
        };
        let end = base + i128::from(all.iter().map(|run| run.count).sum::<u32>());
        let follows = (q, limits, end) == (next_q, next_limits, next_base);
        if follows {
            all.append(keys);
        }
        follows
    });
}

/// The rectangle of a piece, or `None` if it has no pair.
fn trimmed(piece: &RowPiece, keys: &[RowRun]) -> Option<Rectangle> {
    let (rows, count) = (i128::from(piece.q.count), keys.iter().map(|run| i128::from(run.count)).sum::<i128>());
    let (low, high) = (piece.low, piece.high);
    if low > high {
        return None;
    }
    // Row i has keys if i + low ≤ count − 1 and i + high ≥ 0.
    let (first, end) = ((-high).max(0), rows.min(count - low));
    if first >= end {
        return None;
    }
    // Key j has rows if it is in the band of the first row or after it, and of the last one or before it.
    let (k_first, k_end) = ((first + low).max(0), count.min(end + high));
    // From here on counted from the first row and the first key that are left.
    let (low, high) = (low + first - k_first, high + first - k_first);
    let (rows, count) = (end - first, k_end - k_first);
    let corner = count - rows;
    let base = piece.base.unwrap_or(0);
    Some(Rectangle {
        q: part(&[piece.q], first, end)[0],
        k: part(keys, k_first, k_end),
        keys: count as u32,
        left: (low > 1 - rows).then(|| (corner - low) as u32),
        right: (high < count - 1).then(|| (high - corner) as u32),
        corner: (base + (k_end - 1) - (end - 1)) as i64,
    })
}

/// Rows `begin` to `end` of some runs.
fn part(runs: &[RowRun], begin: i128, end: i128) -> Vec<RowRun> {
    let (mut found, mut at) = (Vec::new(), 0);
    for run in runs {
        let count = i128::from(run.count);
        let (a, b) = ((begin - at).max(0), (end - at).min(count));
        if a < b {
            let first = run.first + a as u64 * u64::from(run.step);
            found.push(RowRun { first, count: (b - a) as u32, step: run.step });
        }
        at += count;
    }
    found
}

/// A rectangle without a left limit as two whose limit on the right is 0 or none: the last `right` rows see all keys.
fn causal(r: Rectangle) -> [Rectangle; 2] {
    let right = r.right.expect("a limit");
    let rows = i128::from(r.q.count);
    let split = rows - i128::from(right);
    let rest = Rectangle { q: part(&[r.q], split, rows)[0], right: None, ..r.clone() };
    [Rectangle { q: part(&[r.q], 0, split)[0], right: Some(0), corner: r.corner + i64::from(right), ..r }, rest]
}
