// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that have shapes and no memory, for tests of decisions that are taken before memory is read.

use crate::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use crate::element::Dtype;
use alloc::{vec, vec::Vec};

/// Documents of these lengths, a range each.
pub(crate) fn each(lengths: &[u32]) -> Vec<(u32, u32)> {
    (0..).zip(lengths.iter().copied()).collect()
}

/// Applies `f` to a forward and a backward call over ranges of these documents and lengths.
pub(crate) fn calls<T>(
    ranges: &[(u32, u32)],
    (dtype, q_heads, kv_heads): (Dtype, u32, u32),
    (left, right): (i64, i64),
    aligned: bool,
    f: impl FnOnce(&Attend, &AttendBackward) -> T,
) -> T {
    let (mut k, mut row) = (vec![], 0);
    for &(doc, len) in ranges {
        k.push(Range::plain(row, len, 0, doc));
        row += i64::from(len);
    }
    let q: Vec<QRange> = (0..)
        .zip(&k)
        .map(|(i, &range)| QRange { range, document: [0; 2], keys_begin: i, keys_end: i + 1, mode: Mode::Only })
        .collect();
    let pairs: Vec<Pair> = (0..k.len() as u32).map(Pair::of).collect();
    let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] };
    let tensor = |heads| RawTensor::compact(core::ptr::null_mut(), dtype, row as u64, heads, 64);
    let heads = HeadMap { q_offset: 0, kv_offset: 0, group: q_heads / kv_heads };
    let score = Score { scale: 1.0, softcap: 0.0, window_left: left, window_right: right };
    let (q, k) = (tensor(q_heads), tensor(kv_heads));
    let forward = Attend { aligned, ..Attend::new([q, k, k, q], heads, score, ranges) };
    let backward = AttendBackward { aligned, ..AttendBackward::new([q, k, k, q], heads, score, ranges) };
    f(&forward, &backward)
}
