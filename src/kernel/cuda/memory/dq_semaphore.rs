// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler metadata of the fused backward, in which tiles of keys add to the dq of one tile of q rows one after
//! the other.
//!
//! The device finds which tile waits for which (`ptx/shared/dq_semaphore.cuh`): tiles of keys add in the order of k
//! runs and of rows, and each waits for the preceding tile with the same q rows. The host must provide three things.
//! *Which tiles share rows* must be the same on both sides, since q tiles that nothing is added to are written with
//! zeros, and the host lists those. *The order of work* must put a tile after all tiles that it may wait for: blocks
//! take tiles one by one in that order, so the earliest unfinished tile never waits, for any number of blocks. *The
//! semaphores*, and the counter of the tiles that were taken, must be zero when the launch begins.
//!
//! Tiles that pairs connect (usually those of a document) are therefore in the order in which they wait; among
//! unconnected tiles the longest come first. This is a merge of lists by the cost of their first entries, which equals
//! a sort by the least cost of a tile and all tiles before it in its list.

use crate::call::{Mode, Pair, Range, Ranges};
use crate::kernel::cuda::abi::params::{Partner, Run, SidedBand, WORK_ZERO, Work};
use crate::kernel::cuda::memory::bands;
use crate::kernel::cuda::memory::metadata::{
    TileRows, bands_bytes, cut, inverse_len, invert, key_cost, keys_of, runs, work,
};
use crate::kernel::cuda::memory::metadata_writer::{SortBuffers, Writer, padded};
use alloc::vec::Vec;

/// Where the metadata lies on the device.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct DqSemaphore {
    pub queries: u64,
    pub keys: u64,
    /// For each q run, its k runs.
    pub keys_of: u64,
    /// For each k run, the q runs that read it.
    pub queries_of: u64,
    /// Bands as q rows see them, and as k rows do.
    pub query_bands: u64,
    pub key_bands: u64,
    /// For each q run, the number of tiles before it.
    pub query_tiles: u64,
    pub own: TilesOfKeys,
    /// The tiles of keys for the other kernel, which does the launch if tensor maps cannot describe its tensors. The
    /// same as `own` if the tiles of both kernels have the same number of keys.
    pub other: TilesOfKeys,
    /// Tiles of q rows times q heads.
    pub words: usize,
    pub tile_counter: u64,
    pub dq_semaphore: u64,
    /// A word for each tile of keys and head of dk.
    pub key_semaphore: u64,
}

/// Tiles of keys, and where their lists lie.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct TilesOfKeys {
    /// For each k run, the number of tiles before it.
    pub before: u64,
    pub work: u64,
    /// Tiles of work.
    pub tiles: usize,
}

/// Tiles of a run.
fn tiles_of(len: u32, rows: u32) -> usize {
    len.div_ceil(rows) as usize
}

/// An upper bound of the bytes of metadata and words, for a call with these numbers of heads of q and of dk.
///
/// `other_keys` are the rows of the other kernel's tiles of keys.
pub(in crate::kernel::cuda) fn bytes(
    ranges: &Ranges,
    tiles: TileRows,
    other_keys: u32,
    (q_heads, key_heads): (u32, u32),
) -> usize {
    let query_tiles: usize = ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)).sum();
    let key_tiles = |rows| ranges.k.iter().map(|k| tiles_of(k.len, rows)).sum::<usize>();
    let lists = |rows| padded(ranges.k.len() * 4) + padded((query_tiles + key_tiles(rows)) * size_of::<Work>());
    let other = if other_keys == tiles.keys { 0 } else { lists(other_keys) };
    padded(ranges.q.len() * size_of::<Run>())
        + padded(ranges.k.len() * size_of::<Run>())
        + padded(size_of_val(ranges.pairs))
        + padded(inverse_len(ranges) * size_of::<Partner>())
        + 2 * bands_bytes(ranges)
        + padded(ranges.q.len() * 4)
        + lists(tiles.keys)
        + other
        + padded(4)
        + padded(query_tiles * q_heads as usize * 4)
        + padded(key_tiles(tiles.keys.min(other_keys)) * key_heads as usize * 4)
}

/// The most bytes that so many cuts of ranges of q, and as many of k, add to [`bytes`]: each is a run more, with a tile
/// more in either list.
pub(in crate::kernel::cuda) fn cut_bytes(cuts: usize, (q_heads, key_heads): (u32, u32)) -> usize {
    let of_lists = 2 * (2 * size_of::<Work>() + 4);
    let words = 4 * (q_heads as usize + key_heads as usize);
    // Ranges that share entries of pairs have their own when cut.
    cuts * (2 * size_of::<Run>() + 4 + of_lists + words + size_of::<Partner>()) + padded(1) * 16
}

/// The tiles of `rows` rows of a partner that an own tile at positions `lowest..=highest` meets: `tiles_met` of
/// `ptx/shared/dq_semaphore.cuh`. A tile counts too if the positions in reach lie in a gap between two of its rows.
fn tiles_met(partner: &Range, band: &SidedBand, lowest: i64, highest: i64, rows: u32) -> core::ops::Range<u32> {
    let Some((first, last)) = band.reach(lowest, highest) else { return 0..0 };
    let (before, until) = (partner.rows_before(first), partner.rows_before(last + 1));
    if before >= partner.len { 0..0 } else { before / rows..until.div_ceil(rows) }
}

/// Whether any key tile meets the q rows at positions `first..=last`. `bands` are those of q rows.
fn is_met(ranges: &Ranges, pairs: &[Pair], tiles: TileRows, bands: &[SidedBand], first: i64, last: i64) -> bool {
    let span = |pair: &Pair| tiles_met(&ranges.k[pair.k as usize], &bands[pair.band as usize], first, last, tiles.keys);
    pairs.iter().any(|pair| !span(pair).is_empty())
}

/// Writes the metadata. Ranges were checked.
pub(in crate::kernel::cuda) fn write(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    tiles: TileRows,
    other_keys: u32,
    window: (i64, i64),
    (q_heads, key_heads): (u32, u32),
) -> DqSemaphore {
    let (queries, (key_runs, keys)) = runs(writer, ranges);
    let keys_of = keys_of(writer, ranges);
    let (inverse, queries_of) = writer.array::<Partner>(inverse_len(ranges));
    invert(ranges, key_runs, inverse);
    let (of_queries, query_bands) = bands::write(writer, ranges, bands::of_queries(ranges, window));
    let (of_keys, key_bands) = bands::write(writer, ranges, of_queries.iter().map(SidedBand::transposed));
    let (before, query_tiles) = writer.array::<u32>(ranges.q.len());
    let count = number(before, ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)));
    let mut list = |keys| {
        let (before, at) = writer.array::<u32>(ranges.k.len());
        let count = number(before, ranges.k.iter().map(|k| tiles_of(k.len, keys)));
        let tiles = TileRows { keys, ..tiles };
        order(&mut scratch.tiles, &mut scratch.runs, ranges, (key_runs, inverse), tiles, (of_queries, of_keys));
        let (work, tiles) = work(&mut scratch.tiles, writer);
        (count, TilesOfKeys { before: at, work, tiles })
    };
    let (key_count, own) = list(tiles.keys);
    let (other_count, other) = if other_keys == tiles.keys { (key_count, own) } else { list(other_keys) };
    let tile_counter = writer.counters(1);
    let words = count * q_heads as usize;
    let dq_semaphore = writer.counters(words);
    let key_semaphore = writer.counters(key_count.max(other_count) * key_heads as usize);
    DqSemaphore {
        queries,
        keys,
        keys_of,
        queries_of,
        query_bands,
        key_bands,
        query_tiles,
        own,
        other,
        words,
        tile_counter,
        dq_semaphore,
        key_semaphore,
    }
}

/// Writes the number of tiles before each run, and returns the number of all tiles.
fn number(out: &mut [u32], tiles: impl Iterator<Item = usize>) -> usize {
    let mut before = 0;
    for (out, tiles) in out.iter_mut().zip(tiles) {
        *out = before as u32;
        before += tiles;
    }
    before
}

/// Fills `list` with all work and the keys by which [`work`] sorts it.
fn order(
    list: &mut Vec<(u64, Work)>,
    components: &mut Vec<(u32, u64)>,
    ranges: &Ranges,
    (runs, inverse): (&[Run], &[Partner]),
    tiles: TileRows,
    (of_queries, of_keys): (&[SidedBand], &[SidedBand]),
) {
    join(components, ranges);
    list.clear();
    for (i, (k, run)) in ranges.k.iter().zip(runs).enumerate() {
        let readers = &inverse[run.begin as usize..run.end as usize];
        let root = root(components, i as u32) as usize;
        let begin = list.len();
        cut(list, i, k, 0..k.len, tiles.keys, |first, last| key_cost(ranges, readers, of_keys, first, last));
        for (cost, _) in &mut list[begin..] {
            components[root].1 = components[root].1.min(*cost);
            *cost = components[root].1;
        }
    }
    for (i, q) in ranges.q.iter().enumerate() {
        if matches!(q.mode, Mode::Merge | Mode::Last) {
            continue;
        }
        let pairs = ranges.pairs_of(q);
        for first in (0..q.range.len).step_by(tiles.queries as usize) {
            let last = first + (tiles.queries - 1).min(q.range.len - 1 - first);
            if !is_met(ranges, pairs, tiles, of_queries, q.range.position(first), q.range.position(last)) {
                list.push((0, Work { run: i as u32, first: first | WORK_ZERO }));
            }
        }
    }
}

/// Joins k runs that are read by the same q run.
fn join(components: &mut Vec<(u32, u64)>, ranges: &Ranges) {
    components.clear();
    components.extend((0..ranges.k.len() as u32).map(|i| (i, u64::MAX)));
    for q in ranges.q {
        let pairs = ranges.pairs_of(q);
        for pair in pairs.windows(2) {
            let (a, b) = (root(components, pair[0].k), root(components, pair[1].k));
            components[a.max(b) as usize].0 = a.min(b);
        }
    }
}

/// The first run of the component.
fn root(components: &mut [(u32, u64)], mut i: u32) -> u32 {
    while components[i as usize].0 != i {
        // Path halving: later searches of the root are shorter.
        let next = components[components[i as usize].0 as usize].0;
        components[i as usize].0 = next;
        i = next;
    }
    i
}

#[cfg(test)]
mod tests;
