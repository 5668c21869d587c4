// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lists of the fused backward, in which tiles of keys add to the dq of one tile of q rows in turn.
//!
//! The turns themselves are found on the device (`ptx/turns.cuh`): tiles of keys add in the order of k runs and of rows, each
//! waits for the one before it that meets the same q rows. The host owes it three things. *Who meets whom* must be the same
//! for both, since q tiles that nobody adds to are written with zeros, and they are listed here. *The order of work* must put
//! a tile behind all that it may wait for: blocks take tiles one by one in that order, so the earliest unfinished one
//! never waits, however few blocks run. *The words* in which turns are passed on, and the one that counts what was taken,
//! must be zero when the launch begins.
//!
//! Within what pairs tie together (a document, as a rule) the order of work is therefore that of the turns; between the rest
//! the longest tiles come first. That is a merge of lists by the cost of their heads, or, the same, a sort by the least
//! cost on the way to each tile.

use super::lists::{Tiles, cut, invert, key_cost, rows_before, run, visits, work};
use super::params::{Run, WORK_ZERO, Work};
use super::staging::{Staging, Writer, padded};
use crate::kernel::{Mode, Range, Ranges};

/// Where the lists lie on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    pub queries: u64,
    pub keys: u64,
    /// Of each q run, its k runs.
    pub keys_of: u64,
    /// Of each k run, the q runs that read it.
    pub queries_of: u64,
    /// Of each q run, the tiles of those before it; of each k run too.
    pub query_tiles: u64,
    pub key_tiles: u64,
    pub work: u64,
    /// Tiles of work.
    pub tiles: usize,
    /// Tiles of q rows times q heads.
    pub words: usize,
    pub ticket: u64,
    pub turns: u64,
}

/// Tiles of a run.
fn tiles_of(len: u32, rows: u32) -> usize {
    len.div_ceil(rows) as usize
}

/// Bytes of the lists and words, at most.
pub(super) fn bytes(ranges: &Ranges, tiles: Tiles, q_heads: u32) -> usize {
    let query_tiles: usize = ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)).sum();
    let key_tiles: usize = ranges.k.iter().map(|k| tiles_of(k.len, tiles.keys)).sum();
    padded(ranges.q.len() * size_of::<Run>())
        + padded(ranges.k.len() * size_of::<Run>())
        + padded(ranges.pairs.len() * 4)
        + padded(visits(ranges) * 4)
        + padded(ranges.q.len() * 4)
        + padded(ranges.k.len() * 4)
        + padded((query_tiles + key_tiles) * size_of::<Work>())
        + padded(4)
        + padded(query_tiles * q_heads as usize * 4)
}

/// The tiles of `rows` rows whose last position is at least `low` and whose first is at most `high`: `tiles_met` of
/// `ptx/turns.cuh`.
fn tiles_met(range: &Range, low: i64, high: i64, rows: u32) -> core::ops::Range<u32> {
    let (before, until) = (rows_before(range, low) as u32, rows_before(range, high + 1) as u32);
    if before >= range.len { 0..0 } else { before / rows..until.div_ceil(rows) }
}

/// Whether any key tile meets the q rows at positions `first..=last`.
fn is_met(ranges: &Ranges, pairs: &[u32], tiles: Tiles, (left, right): (i64, i64), first: i64, last: i64) -> bool {
    pairs.iter().any(|&k| !tiles_met(&ranges.k[k as usize], first - left, last + right, tiles.keys).is_empty())
}

/// Writes the lists. Ranges were checked; windows are cut as [`super::check::score`] cuts them.
pub(super) fn write(
    staging: &mut Staging,
    writer: &mut Writer,
    ranges: &Ranges,
    tiles: Tiles,
    window: (i64, i64),
    q_heads: u32,
) -> Turns {
    let (query_runs, queries) = writer.array::<Run>(ranges.q.len());
    let (key_runs, keys) = writer.array::<Run>(ranges.k.len());
    for (out, q) in query_runs.iter_mut().zip(ranges.q) {
        *out = run(&q.range, q.keys_begin, q.keys_end, q.mode as u32);
    }
    for (out, k) in key_runs.iter_mut().zip(ranges.k) {
        *out = run(k, 0, 0, 0);
    }
    let (pairs, keys_of) = writer.array::<u32>(ranges.pairs.len());
    pairs.copy_from_slice(ranges.pairs);
    let (inverse, queries_of) = writer.array::<u32>(visits(ranges));
    invert(ranges, key_runs, inverse);
    let (before, query_tiles) = writer.array::<u32>(ranges.q.len());
    let count = number(before, ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)));
    let (before, key_tiles) = writer.array::<u32>(ranges.k.len());
    number(before, ranges.k.iter().map(|k| tiles_of(k.len, tiles.keys)));
    order(staging, ranges, key_runs, inverse, tiles, window);
    let (work, items) = work(staging, writer);
    let ticket = writer.words(1);
    let words = count * q_heads as usize;
    let turns = writer.words(words);
    Turns { queries, keys, keys_of, queries_of, query_tiles, key_tiles, work, tiles: items, words, ticket, turns }
}

/// How many tiles lie before each run; returns how many there are.
fn number(out: &mut [u32], tiles: impl Iterator<Item = usize>) -> usize {
    let mut before = 0;
    for (out, tiles) in out.iter_mut().zip(tiles) {
        *out = before as u32;
        before += tiles;
    }
    before
}

/// Fills `staging.tiles` with all work and the keys by which [`work`] sorts it.
fn order(staging: &mut Staging, ranges: &Ranges, runs: &[Run], inverse: &[u32], tiles: Tiles, window: (i64, i64)) {
    let Staging { tiles: list, runs: components, .. } = staging;
    join(components, ranges);
    list.clear();
    for (i, (k, run)) in ranges.k.iter().zip(runs).enumerate() {
        let readers = &inverse[run.begin as usize..run.end as usize];
        let root = root(components, i as u32) as usize;
        let begin = list.len();
        cut(list, i, k, tiles.keys, |first, last| key_cost(ranges, readers, window, first, last));
        for (cost, _) in &mut list[begin..] {
            components[root].1 = components[root].1.min(*cost);
            *cost = components[root].1;
        }
    }
    for (i, q) in ranges.q.iter().enumerate() {
        if matches!(q.mode, Mode::Merge | Mode::Last) {
            continue;
        }
        let pairs = &ranges.pairs[q.keys_begin as usize..q.keys_end as usize];
        for first in (0..q.range.len).step_by(tiles.queries as usize) {
            let last = first + (tiles.queries - 1).min(q.range.len - 1 - first);
            if !is_met(ranges, pairs, tiles, window, q.range.position(first), q.range.position(last)) {
                list.push((0, Work { run: i as u32, first: first | WORK_ZERO }));
            }
        }
    }
}

/// Joins k runs that are read by the same q run.
fn join(components: &mut alloc::vec::Vec<(u32, u64)>, ranges: &Ranges) {
    components.clear();
    components.extend((0..ranges.k.len() as u32).map(|i| (i, u64::MAX)));
    for q in ranges.q {
        let pairs = &ranges.pairs[q.keys_begin as usize..q.keys_end as usize];
        for pair in pairs.windows(2) {
            let (a, b) = (root(components, pair[0]), root(components, pair[1]));
            components[a.max(b) as usize].0 = a.min(b);
        }
    }
}

/// The first run of the component.
fn root(components: &mut [(u32, u64)], mut i: u32) -> u32 {
    while components[i as usize].0 != i {
        // Halves the way for whoever asks next.
        let next = components[components[i as usize].0 as usize].0;
        components[i as usize].0 = next;
        i = next;
    }
    i
}
