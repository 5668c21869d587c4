// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranges of a call as the kernels read them: runs, partners, and the tiles in the order in which they start.
//!
//! Blocks start roughly in the order of the grid, so the longest tiles come first: the idle time at the end is then
//! short. The cost of a tile is the number of partner rows it may meet, estimated from positions alone.

use super::metadata_buffer::{SortBuffers, Writer, padded};
use super::params::{Divisor, Run, Work};
use crate::call::{QRange, Range, Ranges};

/// Where the metadata lies on the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Metadata {
    pub queries: u64,
    pub keys: u64,
    /// For each q run, its k runs.
    pub keys_of: u64,
    /// For each k run, the q runs that read it.
    pub queries_of: u64,
    pub query_work: u64,
    pub query_tiles: usize,
    pub key_work: u64,
    pub key_tiles: usize,
}

/// Rows of a tile, for the kernels that own q rows and those that own keys; 0 if there is no such kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileRows {
    pub queries: u32,
    pub keys: u32,
}

fn count(lens: impl Iterator<Item = u32>, rows: u32) -> usize {
    if rows == 0 { 0 } else { lens.map(|len| len.div_ceil(rows) as usize).sum() }
}

/// Bytes of the metadata.
pub(super) fn bytes(ranges: &Ranges, tiles: TileRows) -> usize {
    let query_tiles = count(ranges.q.iter().map(|q| q.range.len), tiles.queries);
    let key_tiles = count(ranges.k.iter().map(|k| k.len), tiles.keys);
    padded(ranges.q.len() * size_of::<Run>())
        + padded(ranges.k.len() * size_of::<Run>())
        + if tiles.queries > 0 { padded(ranges.pairs.len() * 4) } else { 0 }
        + if tiles.keys > 0 { padded(inverse_len(ranges) * 4) } else { 0 }
        + padded(query_tiles * size_of::<Work>())
        + padded(key_tiles * size_of::<Work>())
}

/// Entries of the inverse list. Q ranges may share entries of `pairs`, so it can be longer.
pub(super) fn inverse_len(ranges: &Ranges) -> usize {
    ranges.q.iter().map(|q| q.keys_end.saturating_sub(q.keys_begin) as usize).sum()
}

/// A range as a run. Plain ranges get block and period 1.
pub(super) fn run(range: &Range, begin: u32, end: u32, mode: u32) -> Run {
    let (block, period) = if range.is_plain() { (1, 1) } else { (range.block, range.period) };
    Run {
        row: range.row,
        pos: range.pos,
        len: range.len,
        begin,
        end,
        mode,
        block: Divisor::new(block),
        period: Divisor::new(period),
    }
}

/// Writes all ranges as runs. Returns the address of the q runs, and the k runs with their address.
pub(super) fn runs<'a>(writer: &mut Writer<'a>, ranges: &Ranges) -> (u64, (&'a mut [Run], u64)) {
    let (queries, at) = writer.array::<Run>(ranges.q.len());
    let keys = writer.array::<Run>(ranges.k.len());
    for (out, q) in queries.iter_mut().zip(ranges.q) {
        *out = run(&q.range, q.keys_begin, q.keys_end, q.mode as u32);
    }
    for (out, k) in keys.0.iter_mut().zip(ranges.k) {
        *out = run(k, 0, 0, 0);
    }
    (at, keys)
}

/// Writes the metadata. Ranges were checked; windows are cut as [`super::check::score`] cuts them.
pub(super) fn write(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    tiles: TileRows,
    window: (i64, i64),
) -> Metadata {
    let (queries, (keys, keys_at)) = runs(writer, ranges);
    let mut metadata = Metadata { queries, keys: keys_at, ..Metadata::default() };
    if tiles.queries > 0 {
        let (pairs, at) = writer.array::<u32>(ranges.pairs.len());
        metadata.keys_of = at;
        pairs.iter_mut().zip(ranges.pairs).for_each(|(k, pair)| *k = pair.k);
        (metadata.query_work, metadata.query_tiles) = query_work(scratch, writer, ranges, tiles.queries, window);
    }
    if tiles.keys > 0 {
        let (inverse, at) = writer.array::<u32>(inverse_len(ranges));
        metadata.queries_of = at;
        invert(ranges, keys, inverse);
        scratch.tiles.clear();
        for (i, (k, run)) in ranges.k.iter().zip(keys.iter()).enumerate() {
            let readers = &inverse[run.begin as usize..run.end as usize];
            let cost = |first, last| key_cost(ranges, readers, window, first, last);
            cut(&mut scratch.tiles, i, k, 0..k.len, tiles.keys, cost);
        }
        (metadata.key_work, metadata.key_tiles) = work(&mut scratch.tiles, writer);
    }
    metadata
}

/// Writes the tiles of `rows` q rows, and returns their address and number.
pub(super) fn query_work(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    rows: u32,
    window: (i64, i64),
) -> (u64, usize) {
    let cost = |q: &QRange, first: i64, last: i64| {
        partners(ranges, q).map(|k| met(k, first.saturating_sub(window.0), last.saturating_add(window.1))).sum()
    };
    scratch.tiles.clear();
    for (i, q) in ranges.q.iter().enumerate() {
        cut(&mut scratch.tiles, i, &q.range, 0..q.range.len, rows, |first, last| cost(q, first, last));
    }
    work(&mut scratch.tiles, writer)
}

/// Bytes that [`query_work`] writes.
pub(super) fn query_work_bytes(ranges: &Ranges, rows: u32) -> usize {
    padded(count(ranges.q.iter().map(|q| q.range.len), rows) * size_of::<Work>())
}

/// How many rows of a range lie at positions `low..=high`.
pub(super) fn met(range: &Range, low: i64, high: i64) -> u64 {
    range.rows_before(high.saturating_add(1)).saturating_sub(range.rows_before(low)).into()
}

/// How many q rows a tile of keys may meet.
pub(super) fn key_cost(ranges: &Ranges, readers: &[u32], window: (i64, i64), first: i64, last: i64) -> u64 {
    let rows =
        |&q: &u32| met(&ranges.q[q as usize].range, first.saturating_sub(window.1), last.saturating_add(window.0));
    readers.iter().map(rows).sum()
}

/// The k ranges of a q range.
pub(super) fn partners<'a>(ranges: &'a Ranges, q: &QRange) -> impl Iterator<Item = &'a Range> {
    ranges.pairs_of(q).iter().map(|pair| &ranges.k[pair.k as usize])
}

/// Cuts some rows of a range into tiles, with their cost.
pub(super) fn cut(
    tiles: &mut alloc::vec::Vec<(u64, Work)>,
    i: usize,
    range: &Range,
    of: core::ops::Range<u32>,
    rows: u32,
    cost: impl Fn(i64, i64) -> u64,
) {
    let mut first = of.start;
    while first < of.end {
        let last = first + (rows - 1).min(of.end - 1 - first);
        tiles.push((cost(range.position(first), range.position(last)), Work { run: i as u32, first }));
        first = last + 1;
    }
}

/// The tiles, longest first; those of the same cost in the order of rows, so that every run of a plan starts alike.
pub(super) fn sort(tiles: &mut [(u64, Work)]) {
    tiles.sort_unstable_by_key(|(cost, w)| (core::cmp::Reverse(*cost), w.run, w.first));
}

/// Writes the tiles in their order.
pub(super) fn work(tiles: &mut [(u64, Work)], writer: &mut Writer<'_>) -> (u64, usize) {
    sort(tiles);
    let (out, at) = writer.array::<Work>(tiles.len());
    for (out, (_, work)) in out.iter_mut().zip(&*tiles) {
        *out = *work;
    }
    (at, tiles.len())
}

/// For each k range, the q ranges that read it, in their own order: the order in which dk and dv are summed. (The fused
/// backward goes through the list from the end.)
pub(super) fn invert(ranges: &Ranges, keys: &mut [Run], inverse: &mut [u32]) {
    for q in ranges.q {
        for pair in ranges.pairs_of(q) {
            keys[pair.k as usize].end += 1;
        }
    }
    let mut begin = 0;
    for key in keys.iter_mut() {
        let n = key.end;
        (key.begin, key.end) = (begin, begin);
        begin += n;
    }
    for (i, q) in ranges.q.iter().enumerate() {
        for pair in ranges.pairs_of(q) {
            let key = &mut keys[pair.k as usize];
            inverse[key.end as usize] = i as u32;
            key.end += 1;
        }
    }
}
