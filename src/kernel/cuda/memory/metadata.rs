// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranges of a call as the kernels read them: runs, partners, and the tiles in the order in which they start.
//!
//! Blocks start roughly in the order of the grid, so the longest tiles come first: the idle time at the end is then
//! short. The cost of a tile is the number of partner rows it may meet, estimated from positions alone.

use crate::call::{Gradients, QRange, Range, Ranges};
use crate::kernel::cuda::abi::params::{Divisor, Partner, Run, SidedBand, Work};
use crate::kernel::cuda::memory::bands;
use crate::kernel::cuda::memory::metadata_writer::{SortBuffers, Writer, padded};

/// Where the metadata lies on the device.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernel::cuda) struct Metadata<'a> {
    pub queries: u64,
    pub keys: u64,
    /// For each q run, its k runs.
    pub keys_of: u64,
    /// For each k run, the q runs that read it.
    pub queries_of: u64,
    /// Bands as q rows see them, where they were written and where they lie on the device; and as k rows do.
    pub of_queries: &'a [SidedBand],
    pub query_bands: u64,
    pub key_bands: u64,
    pub query_work: u64,
    pub query_tiles: usize,
    pub key_work: u64,
    pub key_tiles: usize,
}

/// Rows of a tile, for the kernels that own q rows and those that own keys; 0 if there is no such kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct TileRows {
    pub queries: u32,
    pub keys: u32,
}

impl TileRows {
    /// Those of the kernels for dq and for dk and dv that make some gradients.
    pub(in crate::kernel::cuda) fn of(gradients: Gradients, queries: u32, keys: u32) -> Self {
        Self {
            queries: if gradients == Gradients::Keys { 0 } else { queries },
            keys: if gradients == Gradients::Queries { 0 } else { keys },
        }
    }
}

fn count(lens: impl Iterator<Item = u32>, rows: u32) -> usize {
    if rows == 0 { 0 } else { lens.map(|len| len.div_ceil(rows) as usize).sum() }
}

/// Bytes of the metadata.
pub(in crate::kernel::cuda) fn bytes(ranges: &Ranges, tiles: TileRows) -> usize {
    let query_tiles = count(ranges.q.iter().map(|q| q.range.len), tiles.queries);
    let key_tiles = count(ranges.k.iter().map(|k| k.len), tiles.keys);
    padded(ranges.q.len() * size_of::<Run>())
        + padded(ranges.k.len() * size_of::<Run>())
        + if tiles.queries > 0 { padded(size_of_val(ranges.pairs)) + bands_bytes(ranges) } else { 0 }
        + if tiles.keys > 0 { padded(inverse_len(ranges) * size_of::<Partner>()) + bands_bytes(ranges) } else { 0 }
        + padded(query_tiles * size_of::<Work>())
        + padded(key_tiles * size_of::<Work>())
}

/// Bytes of a table of bands.
pub(in crate::kernel::cuda) fn bands_bytes(ranges: &Ranges) -> usize {
    padded(ranges.bands.len() * size_of::<SidedBand>())
}

/// Entries of the inverse list. Q ranges may share entries of `pairs`, so it can be longer.
pub(in crate::kernel::cuda) fn inverse_len(ranges: &Ranges) -> usize {
    ranges.q.iter().map(|q| q.keys_end.saturating_sub(q.keys_begin) as usize).sum()
}

/// A range as a run. Plain ranges get block and period 1.
pub(in crate::kernel::cuda) fn run(range: &Range, begin: u32, end: u32, mode: u32) -> Run {
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
pub(in crate::kernel::cuda) fn runs<'a>(writer: &mut Writer<'a>, ranges: &Ranges) -> (u64, (&'a mut [Run], u64)) {
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

/// Writes the metadata. Ranges were checked.
pub(in crate::kernel::cuda) fn write<'a>(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'a>,
    ranges: &Ranges,
    tiles: TileRows,
    window: (i64, i64),
) -> Metadata<'a> {
    let (queries, (keys, keys_at)) = runs(writer, ranges);
    let mut metadata = Metadata { queries, keys: keys_at, ..Metadata::default() };
    if tiles.queries > 0 {
        metadata.keys_of = keys_of(writer, ranges);
        (metadata.of_queries, metadata.query_bands) = bands::write(writer, ranges, bands::of_queries(ranges, window));
        (metadata.query_work, metadata.query_tiles) =
            query_work(scratch, writer, ranges, tiles.queries, metadata.of_queries);
    }
    if tiles.keys > 0 {
        let (inverse, at) = writer.array::<Partner>(inverse_len(ranges));
        metadata.queries_of = at;
        invert(ranges, keys, inverse);
        let bands;
        (bands, metadata.key_bands) =
            bands::write(writer, ranges, bands::of_queries(ranges, window).map(|b| b.transposed()));
        scratch.tiles.clear();
        for (i, (k, run)) in ranges.k.iter().zip(keys.iter()).enumerate() {
            let readers = &inverse[run.begin as usize..run.end as usize];
            let cost = |first, last| key_cost(ranges, readers, bands, first, last);
            cut(&mut scratch.tiles, i, k, 0..k.len, tiles.keys, cost);
        }
        (metadata.key_work, metadata.key_tiles) = work(&mut scratch.tiles, writer);
    }
    metadata
}

/// Writes the list of pairs, by q run, and returns its address.
pub(in crate::kernel::cuda) fn keys_of(writer: &mut Writer<'_>, ranges: &Ranges) -> u64 {
    let (list, at) = writer.array::<Partner>(ranges.pairs.len());
    for (out, pair) in list.iter_mut().zip(ranges.pairs) {
        *out = Partner { run: pair.k, band: pair.band };
    }
    at
}

/// Writes the tiles of `rows` q rows, and returns their address and number. `bands` are those of q rows.
pub(in crate::kernel::cuda) fn query_work(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    rows: u32,
    bands: &[SidedBand],
) -> (u64, usize) {
    let cost = |q: &QRange, first: i64, last: i64| met(ranges, bands, q, first, last).sum();
    scratch.tiles.clear();
    for (i, q) in ranges.q.iter().enumerate() {
        cut(&mut scratch.tiles, i, &q.range, 0..q.range.len, rows, |first, last| cost(q, first, last));
    }
    work(&mut scratch.tiles, writer)
}

/// Bytes that [`query_work`] writes.
pub(in crate::kernel::cuda) fn query_work_bytes(ranges: &Ranges, rows: u32) -> usize {
    padded(count(ranges.q.iter().map(|q| q.range.len), rows) * size_of::<Work>())
}

/// For each pair of a q range, how many keys its rows at positions `first..=last` may meet.
pub(in crate::kernel::cuda) fn met(
    ranges: &Ranges,
    bands: &[SidedBand],
    q: &QRange,
    first: i64,
    last: i64,
) -> impl Iterator<Item = u64> {
    let rows = move |k: u32, band: u32| bands[band as usize].rows_met(&ranges.k[k as usize], first, last);
    ranges.pairs_of(q).iter().map(move |pair| rows(pair.k, pair.band))
}

/// How many q rows a tile of keys may meet. `bands` are those of k rows.
pub(in crate::kernel::cuda) fn key_cost(
    ranges: &Ranges,
    readers: &[Partner],
    bands: &[SidedBand],
    first: i64,
    last: i64,
) -> u64 {
    let rows = |p: &Partner| bands[p.band as usize].rows_met(&ranges.q[p.run as usize].range, first, last);
    readers.iter().map(rows).sum()
}

/// Cuts some rows of a range into tiles, with their cost.
pub(in crate::kernel::cuda) fn cut(
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
pub(in crate::kernel::cuda) fn sort(tiles: &mut [(u64, Work)]) {
    tiles.sort_unstable_by_key(|(cost, w)| (core::cmp::Reverse(*cost), w.run, w.first));
}

/// Writes the tiles in their order.
pub(in crate::kernel::cuda) fn work(tiles: &mut [(u64, Work)], writer: &mut Writer<'_>) -> (u64, usize) {
    sort(tiles);
    let (out, at) = writer.array::<Work>(tiles.len());
    for (out, (_, work)) in out.iter_mut().zip(&*tiles) {
        *out = *work;
    }
    (at, tiles.len())
}

/// For each k range, the q ranges that read it, in their own order: the order in which dk and dv are summed. (The fused
/// backward goes through the list from the end.)
pub(in crate::kernel::cuda) fn invert(ranges: &Ranges, keys: &mut [Run], inverse: &mut [Partner]) {
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
            inverse[key.end as usize] = Partner { run: i as u32, band: pair.band };
            key.end += 1;
        }
    }
}
