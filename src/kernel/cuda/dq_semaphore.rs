// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler metadata of the fused backward, in which tiles of keys add to the dq of one tile of q rows one after
//! the other.
//!
//! Which tile waits for which is found on the device (`ptx/dq_semaphore.cuh`): tiles of keys add in the order of k runs
//! and of rows, each waits for the one before it that has the same q rows. The host must provide three things. *Which
//! tiles share rows* must be the same on both sides, since q tiles that nothing is added to are written with zeros, and
//! they are listed here. *The order of work* must put a tile after all tiles that it may wait for: blocks take tiles
//! one by one in that order, so the earliest unfinished tile never waits, for any number of blocks. *The semaphores*,
//! and the counter of the tiles that were taken, must be zero when the launch begins.
//!
//! Within what pairs tie together (a document, as a rule) the order of work is therefore that of waiting; between the
//! rest the longest tiles come first. That is a merge of lists by the cost of their heads, or, the same, a sort by the
//! least cost on the way to each tile.

use super::metadata::{TileRows, cut, inverse_len, invert, key_cost, run, work};
use super::metadata_buffer::{SortBuffers, Writer, padded};
use super::params::{Run, WORK_ZERO, Work};
use crate::call::{Mode, Range, Ranges};
use alloc::vec::Vec;

/// Where the metadata lies on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DqSemaphore {
    pub queries: u64,
    pub keys: u64,
    /// Of each q run, its k runs.
    pub keys_of: u64,
    /// Of each k run, the q runs that read it.
    pub queries_of: u64,
    /// Of each q run, the tiles of those before it.
    pub query_tiles: u64,
    pub own: TilesOfKeys,
    /// Those of the kernel that does the launch where tensor maps cannot describe its tensors: `own` where they have as
    /// many keys.
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
pub(super) struct TilesOfKeys {
    /// Of each k run, the tiles of those before it.
    pub before: u64,
    pub work: u64,
    /// Tiles of work.
    pub tiles: usize,
}

/// Tiles of a run.
fn tiles_of(len: u32, rows: u32) -> usize {
    len.div_ceil(rows) as usize
}

/// Bytes of the metadata and words, at most, for a call that has so many heads of q and of dk.
///
/// `other_keys` are the rows of the other kernel's tiles of keys.
pub(super) fn bytes(ranges: &Ranges, tiles: TileRows, other_keys: u32, (q_heads, key_heads): (u32, u32)) -> usize {
    let query_tiles: usize = ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)).sum();
    let key_tiles = |rows| ranges.k.iter().map(|k| tiles_of(k.len, rows)).sum::<usize>();
    let lists = |rows| padded(ranges.k.len() * 4) + padded((query_tiles + key_tiles(rows)) * size_of::<Work>());
    let other = if other_keys == tiles.keys { 0 } else { lists(other_keys) };
    padded(ranges.q.len() * size_of::<Run>())
        + padded(ranges.k.len() * size_of::<Run>())
        + padded(ranges.pairs.len() * 4)
        + padded(inverse_len(ranges) * 4)
        + padded(ranges.q.len() * 4)
        + lists(tiles.keys)
        + other
        + padded(4)
        + padded(query_tiles * q_heads as usize * 4)
        + padded(key_tiles(tiles.keys.min(other_keys)) * key_heads as usize * 4)
}

/// The tiles of `rows` rows whose last position is at least `low` and whose first is at most `high`: `tiles_met` of
/// `ptx/dq_semaphore.cuh`.
fn tiles_met(range: &Range, low: i64, high: i64, rows: u32) -> core::ops::Range<u32> {
    let (before, until) = (range.rows_before(low), range.rows_before(high + 1));
    if before >= range.len { 0..0 } else { before / rows..until.div_ceil(rows) }
}

/// Whether any key tile meets the q rows at positions `first..=last`.
fn is_met(ranges: &Ranges, pairs: &[u32], tiles: TileRows, (left, right): (i64, i64), first: i64, last: i64) -> bool {
    pairs.iter().any(|&k| !tiles_met(&ranges.k[k as usize], first - left, last + right, tiles.keys).is_empty())
}

/// Writes the metadata. Ranges were checked; windows are cut as [`super::check::score`] cuts them.
pub(super) fn write(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    tiles: TileRows,
    other_keys: u32,
    window: (i64, i64),
    (q_heads, key_heads): (u32, u32),
) -> DqSemaphore {
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
    let (inverse, queries_of) = writer.array::<u32>(inverse_len(ranges));
    invert(ranges, key_runs, inverse);
    let (before, query_tiles) = writer.array::<u32>(ranges.q.len());
    let count = number(before, ranges.q.iter().map(|q| tiles_of(q.range.len, tiles.queries)));
    let mut list = |keys| {
        let (before, at) = writer.array::<u32>(ranges.k.len());
        let count = number(before, ranges.k.iter().map(|k| tiles_of(k.len, keys)));
        let tiles = TileRows { keys, ..tiles };
        order(&mut scratch.tiles, &mut scratch.runs, ranges, (key_runs, inverse), tiles, window);
        let (work, tiles) = work(&mut scratch.tiles, writer);
        (count, TilesOfKeys { before: at, work, tiles })
    };
    let (key_count, own) = list(tiles.keys);
    let (other_count, other) = if other_keys == tiles.keys { (key_count, own) } else { list(other_keys) };
    let tile_counter = writer.words(1);
    let words = count * q_heads as usize;
    let dq_semaphore = writer.words(words);
    let key_semaphore = writer.words(key_count.max(other_count) * key_heads as usize);
    DqSemaphore {
        queries,
        keys,
        keys_of,
        queries_of,
        query_tiles,
        own,
        other,
        words,
        tile_counter,
        dq_semaphore,
        key_semaphore,
    }
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

/// Fills `list` with all work and the keys by which [`work`] sorts it.
fn order(
    list: &mut Vec<(u64, Work)>,
    components: &mut Vec<(u32, u64)>,
    ranges: &Ranges,
    (runs, inverse): (&[Run], &[u32]),
    tiles: TileRows,
    window: (i64, i64),
) {
    join(components, ranges);
    list.clear();
    for (i, (k, run)) in ranges.k.iter().zip(runs).enumerate() {
        let readers = &inverse[run.begin as usize..run.end as usize];
        let root = root(components, i as u32) as usize;
        let begin = list.len();
        cut(list, i, k, 0..k.len, tiles.keys, |first, last| key_cost(ranges, readers, window, first, last));
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
fn join(components: &mut Vec<(u32, u64)>, ranges: &Ranges) {
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
        // Halves the way for the next question.
        let next = components[components[i as usize].0 as usize].0;
        components[i as usize].0 = next;
        i = next;
    }
    i
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::QRange;
    use crate::kernel::cuda::metadata::sort;
    use alloc::vec;

    /// Numbers that look random.
    struct Dice(fastrand::Rng);

    impl Dice {
        fn below(&mut self, n: u64) -> u64 {
            self.0.u64(..n)
        }

        fn range(&mut self) -> Range {
            let block = 1 + self.below(9) as u32;
            let (block, period) =
                if self.below(3) == 0 { (1, 1) } else { (block, block + self.below(2) as u32 * self.below(90) as u32) };
            Range { row: 0, pos: self.below(200) as i64 - 60, len: self.below(100) as u32, block, period, doc: 0 }
        }

        fn window(&mut self) -> (i64, i64) {
            let mut side = || match self.below(4) {
                0 => 1 << 62,
                1 => 0,
                _ => self.below(120) as i64 - 30,
            };
            (side(), side())
        }
    }

    /// First and last positions of every tile.
    fn ends(range: &Range, rows: u32) -> Vec<(i64, i64)> {
        (0..range.len)
            .step_by(rows as usize)
            .map(|first| (range.position(first), range.position(range.len.min(first + rows) - 1)))
            .collect()
    }

    fn meets((q_low, q_high): (i64, i64), (k_low, k_high): (i64, i64), (left, right): (i64, i64)) -> bool {
        q_high >= k_low - right && q_low <= k_high + left
    }

    #[test]
    fn both_sides_agree_on_who_meets() {
        let mut dice = Dice(fastrand::Rng::with_seed(1));
        for _ in 0..20_000 {
            let (q, k, window) = (dice.range(), dice.range(), dice.window());
            let (rows_q, rows_k) = (1 + dice.below(20) as u32, 1 + dice.below(20) as u32);
            let (of_q, of_k) = (ends(&q, rows_q), ends(&k, rows_k));
            for (i, &tile) in of_q.iter().enumerate() {
                let found = tiles_met(&k, tile.0 - window.0, tile.1 + window.1, rows_k);
                for (t, &other) in of_k.iter().enumerate() {
                    let back = tiles_met(&q, other.0 - window.1, other.1 + window.0, rows_q);
                    let expected = meets(tile, other, window);
                    assert_eq!(found.contains(&(t as u32)), expected, "{q:?} tile {i}, {k:?} tile {t}, {window:?}");
                    assert_eq!(back.contains(&(i as u32)), expected, "{q:?} tile {i}, {k:?} tile {t}, {window:?}");
                    // Whatever rows meet, their tiles do.
                    let allowed = (i as u32 * rows_q..q.len.min((i as u32 + 1) * rows_q)).any(|a| {
                        (t as u32 * rows_k..k.len.min((t as u32 + 1) * rows_k)).any(|b| {
                            let distance = q.position(a) - k.position(b);
                            distance <= window.0 && -distance <= window.1
                        })
                    });
                    assert!(expected || !allowed, "{q:?} tile {i}, {k:?} tile {t}, {window:?}");
                }
            }
        }
    }

    /// What `Round::meet` and `last_before` of `ptx/dq_semaphore.cuh` find.
    fn predecessor(
        ranges: &Ranges,
        before: &[u32],
        tiles: TileRows,
        (left, right): (i64, i64),
        (q, i): (usize, u32),
        (k, t): (u32, u32),
    ) -> u32 {
        let range = &ranges.q[q].range;
        let last = range.len.min((i + 1) * tiles.queries) - 1;
        let (low, high) = (range.position(i * tiles.queries) - left, range.position(last) + right);
        if t != ranges.k[k as usize].rows_before(low) / tiles.keys {
            return before[k as usize] + t;
        }
        let (mut name, mut best) = (0, 0);
        for &r in ranges.pairs[ranges.q[q].keys_begin as usize..ranges.q[q].keys_end as usize].iter().rev() {
            if r >= k || (name != 0 && r <= best) {
                continue;
            }
            let span = tiles_met(&ranges.k[r as usize], low, high, tiles.keys);
            if !span.is_empty() {
                (name, best) = (before[r as usize] + span.end, r);
            }
        }
        name
    }

    #[test]
    fn turns_follow_one_another_and_the_order_of_work() {
        let mut dice = Dice(fastrand::Rng::with_seed(2));
        let (mut waits, mut leads, mut zeros) = (0, 0, 0);
        for _ in 0..3000 {
            let tiles = TileRows { queries: 1 + dice.below(12) as u32, keys: 1 + dice.below(12) as u32 };
            let k: Vec<Range> = (0..1 + dice.below(6)).map(|_| dice.range()).collect();
            let (mut q, mut pairs) = (vec![], vec![]);
            for _ in 0..1 + dice.below(5) {
                let keys_begin = pairs.len() as u32;
                pairs.extend((0..dice.below(5)).map(|_| dice.below(k.len() as u64) as u32));
                let mode = [Mode::First, Mode::Merge, Mode::Last, Mode::Only][dice.below(4) as usize];
                q.push(QRange {
                    range: dice.range(),
                    document: [0; 2],
                    keys_begin,
                    keys_end: pairs.len() as u32,
                    mode,
                });
            }
            let (window, ranges) = (dice.window(), Ranges { q: &q, k: &k, pairs: &pairs });

            let mut runs: Vec<Run> = k.iter().map(|k| run(k, 0, 0, 0)).collect();
            let mut inverse = vec![0; inverse_len(&ranges)];
            invert(&ranges, &mut runs, &mut inverse);
            let (mut list, mut components) = (vec![], vec![]);
            order(&mut list, &mut components, &ranges, (&runs, &inverse), tiles, window);
            sort(&mut list);
            let mut before = vec![0; k.len()];
            let all = number(&mut before, k.iter().map(|k| tiles_of(k.len, tiles.keys)));
            let place = |k: u32, t: u32| {
                list.iter().position(|(_, w)| (w.run, w.first) == (k, t * tiles.keys)).expect("every tile is listed")
            };
            let mut zero = 0;
            for (i, range) in q.iter().enumerate() {
                let mut readers = pairs[range.keys_begin as usize..range.keys_end as usize].to_vec();
                readers.sort_unstable();
                readers.dedup();
                for (tile, &rows) in ends(&range.range, tiles.queries).iter().enumerate() {
                    let (mut name, mut at) = (0, None);
                    for &r in &readers {
                        for (t, &keys) in ends(&k[r as usize], tiles.keys).iter().enumerate() {
                            if !meets(rows, keys, window) {
                                continue;
                            }
                            let found = predecessor(&ranges, &before, tiles, window, (i, tile as u32), (r, t as u32));
                            assert_eq!(
                                found, name,
                                "{ranges:?} {window:?} {tiles:?}: q {i} tile {tile}, k {r} tile {t}"
                            );
                            assert!(at < Some(place(r, t as u32)), "{ranges:?} {window:?} {tiles:?}: {list:?}");
                            waits += usize::from(name > 0);
                            leads += usize::from(name > 0 && t == 0);
                            (name, at) = (before[r as usize] + t as u32 + 1, Some(place(r, t as u32)));
                        }
                    }
                    let work = Work { run: i as u32, first: (tile as u32 * tiles.queries) | WORK_ZERO };
                    let listed = list.iter().filter(|(_, w)| (w.run, w.first) == (work.run, work.first)).count();
                    let expected = name == 0 && !range.mode.continues();
                    assert_eq!(listed, usize::from(expected), "{ranges:?} {window:?} {tiles:?}: q {i} tile {tile}");
                    zero += listed;
                }
            }
            assert_eq!(list.len(), all + zero, "nothing else is listed");
            zeros += zero;
        }
        assert!(waits > 10_000 && leads > 1000 && zeros > 100, "{waits} {leads} {zeros}");
    }

    /// Tiles that do not depend on each other start with the longest.
    #[test]
    fn documents_interleave() {
        let k = [Range::plain(0, 3, 0, 0), Range::plain(3, 2, 0, 1), Range::plain(5, 1, 0, 2)];
        let q = [(3, 0), (2, 1), (1, 2)].map(|(len, i)| QRange {
            range: Range::plain(0, len, 0, i),
            document: [0; 2],
            keys_begin: i,
            keys_end: i + 1,
            mode: Mode::Only,
        });
        let ranges = Ranges { q: &q, k: &k, pairs: &[0, 1, 2] };
        let tiles = TileRows { queries: 1, keys: 1 };
        let mut runs: Vec<Run> = k.iter().map(|k| run(k, 0, 0, 0)).collect();
        let mut inverse = vec![0; 3];
        invert(&ranges, &mut runs, &mut inverse);
        let (mut list, mut components) = (vec![], vec![]);
        order(&mut list, &mut components, &ranges, (&runs, &inverse), tiles, (1 << 62, 0));
        sort(&mut list);
        let found: Vec<_> = list.iter().map(|(_, w)| (w.run, w.first)).collect();
        assert_eq!(found, [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]);
    }
}
