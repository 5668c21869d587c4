// SPDX-License-Identifier: MIT OR Apache-2.0
//! The order of tiles against one that is found by looking at all of them.

use super::*;
use crate::call::{Band, Pair, QRange};
use crate::kernel::cuda::memory::metadata::{run, sort};
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

    /// Of every sort: limits on some sides, none, or nothing between them.
    fn band(&mut self) -> Band {
        let mut limit = |none: i64, from: i64| match self.below(3) {
            0 => none,
            _ => self.below(260) as i64 + from,
        };
        let (q_begin, q_end) = (limit(i64::MIN, -80), limit(i64::MAX, 0));
        let (k_begin, k_end) = (limit(i64::MIN, -80), limit(i64::MAX, 0));
        let (low, high) = (limit(i64::MIN, -160), limit(i64::MAX, -60));
        Band { q_begin, q_end, k_begin, k_end, low, high, shift: limit(0, -130) }
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

/// Whether tiles meet: as much of either as the band has rows for, by first and last positions.
fn meets((q_low, q_high): (i64, i64), (k_low, k_high): (i64, i64), band: &Band, window: (i64, i64)) -> bool {
    let (low, high) = band.distances(window);
    let (q_first, q_last) = (q_low.max(band.q_begin), q_high.min(band.q_end.saturating_sub(1)));
    let (k_first, k_last) = (k_low.max(band.k_begin), k_high.min(band.k_end.saturating_sub(1)));
    let reaches = band.distance(q_first, k_last) >= low && band.distance(q_last, k_first) <= high;
    q_first <= q_last && k_first <= k_last && low <= high && reaches
}

#[test]
fn both_sides_agree_on_who_meets() {
    let mut dice = Dice(fastrand::Rng::with_seed(1));
    for _ in 0..30_000 {
        let (q, k, window, band) = (dice.range(), dice.range(), dice.window(), dice.band());
        let (rows_q, rows_k) = (1 + dice.below(20) as u32, 1 + dice.below(20) as u32);
        let (of_q, of_k) = (ends(&q, rows_q), ends(&k, rows_k));
        let of_queries = SidedBand::of_queries(&band, window);
        let of_keys = of_queries.transposed();
        for (i, &tile) in of_q.iter().enumerate() {
            let found = tiles_met(&k, &of_queries, tile.0, tile.1, rows_k);
            for (t, &other) in of_k.iter().enumerate() {
                let back = tiles_met(&q, &of_keys, other.0, other.1, rows_q);
                let expected = meets(tile, other, &band, window);
                assert_eq!(
                    found.contains(&(t as u32)),
                    expected,
                    "{q:?} tile {i}, {k:?} tile {t}, {band:?} {window:?}"
                );
                assert_eq!(back.contains(&(i as u32)), expected, "{q:?} tile {i}, {k:?} tile {t}, {band:?} {window:?}");
                // Whatever rows meet, their tiles do.
                let allowed = (i as u32 * rows_q..q.len.min((i as u32 + 1) * rows_q)).any(|a| {
                    let (begin, end) = band.keys(q.position(a), window);
                    (t as u32 * rows_k..k.len.min((t as u32 + 1) * rows_k))
                        .any(|b| (begin..end).contains(&k.position(b)))
                });
                assert!(expected || !allowed, "{q:?} tile {i}, {k:?} tile {t}, {band:?} {window:?}");
            }
        }
    }
}

/// Bands far from 0 and at the ends of i64 allow what [`Band::keys`] says.
#[test]
fn limits_far_away() {
    let far = 1 << 61;
    let limits = [i64::MIN, 1 - far, -(1 << 43), -1, 0, 1, 1 << 43, far - 1, i64::MAX];
    let mut dice = Dice(fastrand::Rng::with_seed(3));
    for _ in 0..200_000 {
        let mut one = || limits[dice.below(9) as usize];
        let band =
            Band { q_begin: one(), q_end: one(), k_begin: one(), k_end: one(), low: one(), high: one(), shift: 0 };
        let shift = (dice.below(3) as i64 - 1) << 42;
        let band = Band { shift, ..band };
        let window = [(i64::MAX, i64::MAX), (far, 0), (7, -7), (0, i64::MAX)][dice.below(4) as usize];
        let near = |dice: &mut Dice| {
            let position = limits[1 + dice.below(7) as usize] + dice.below(3) as i64 - 1;
            position.clamp(1 - far, far - 1)
        };
        let (q, k) = (near(&mut dice), near(&mut dice));
        let (begin, end) = band.keys(q, window);
        let sided = SidedBand::of_queries(&band, window);
        let (found, back) = (sided.reach(q, q), sided.transposed().reach(k, k));
        let expected = begin <= k && k < end;
        let within = |reach: Option<(i64, i64)>, x| reach.is_some_and(|(first, last)| first <= x && x <= last);
        assert_eq!(within(found, k), expected, "{band:?} {window:?} {q} {k}");
        assert_eq!(within(back, q), expected, "{band:?} {window:?} {q} {k}");
    }
}

/// A step of a tile of keys at one tile of q rows: whether it has added to it before, whether it lets the successor go
/// on, and the number that it waits for otherwise. What `Round::meet` and `last_before` of `ptx/dq_semaphore.cuh` find.
#[derive(Debug, PartialEq)]
struct Visit {
    again: bool,
    passes: bool,
    after: u32,
}

/// `entry` is the pair of the q range by which the two meet.
fn visit(
    ranges: &Ranges,
    before: &[u32],
    tiles: TileRows,
    bands: &[SidedBand],
    (q, i): (usize, u32),
    t: u32,
    entry: usize,
) -> Visit {
    let (range, pairs) = (&ranges.q[q].range, ranges.pairs_of(&ranges.q[q]));
    let Pair { k, band } = pairs[entry];
    let own = &ranges.k[k as usize];
    let (lowest, highest) =
        (range.position(i * tiles.queries), range.position(range.len.min((i + 1) * tiles.queries) - 1));
    let keys = (own.position(t * tiles.keys), own.position(own.len.min((t + 1) * tiles.keys) - 1));
    let (mut again, mut passes, mut alone) = (false, true, true);
    for (at, other) in pairs.iter().enumerate().filter(|(at, other)| *at != entry && other.k == k) {
        alone = false;
        let reach = bands[other.band as usize].transposed().reach(keys.0, keys.1);
        if reach.is_some_and(|(first, last)| first <= highest && lowest <= last) {
            (again, passes) = if at > entry { (true, passes) } else { (again, false) };
        }
    }
    if again {
        return Visit { again, passes, after: 0 };
    }
    let (first, _) = bands[band as usize].reach(lowest, highest).expect("they meet");
    if t != own.rows_before(first) / tiles.keys {
        return Visit { again, passes, after: before[k as usize] + t };
    }
    let (mut after, mut best) = (0, 0);
    for &Pair { k: r, band } in pairs.iter().rev() {
        if r > k || (r == k && (alone || t == 0)) || (after != 0 && r < best) {
            continue;
        }
        let span = tiles_met(&ranges.k[r as usize], &bands[band as usize], lowest, highest, tiles.keys);
        let last = if r == k { t.min(span.end) } else { span.end };
        if span.start < last {
            (after, best) = (after.max(before[r as usize] + last), r);
        }
    }
    Visit { again, passes, after }
}

#[test]
fn turns_follow_one_another_and_the_order_of_work() {
    let mut dice = Dice(fastrand::Rng::with_seed(2));
    let (mut waits, mut leads, mut zeros, mut repeats, mut gaps) = (0, 0, 0, 0, 0);
    for round in 0..5000 {
        let tiles = TileRows { queries: 1 + dice.below(12) as u32, keys: 1 + dice.below(12) as u32 };
        let k: Vec<Range> = (0..1 + dice.below(6)).map(|_| dice.range()).collect();
        let mut bands = vec![Band::WHOLE];
        if round % 3 > 0 {
            bands.extend((0..dice.below(6)).map(|_| dice.band()));
        }
        let (mut q, mut pairs) = (vec![], vec![]);
        for _ in 0..1 + dice.below(5) {
            let keys_begin = pairs.len() as u32;
            let mut pair =
                || Pair { k: dice.below(k.len() as u64) as u32, band: dice.below(bands.len() as u64) as u32 };
            let first: Vec<Pair> = (0..5).map(|_| pair()).collect();
            pairs.extend(&first[..dice.below(6) as usize]);
            let mode = [Mode::First, Mode::Merge, Mode::Last, Mode::Only][dice.below(4) as usize];
            q.push(QRange { range: dice.range(), document: [0; 2], keys_begin, keys_end: pairs.len() as u32, mode });
        }
        let (window, ranges) = (dice.window(), Ranges { q: &q, k: &k, pairs: &pairs, bands: &bands });
        let of_queries: Vec<SidedBand> = bands::of_queries(&ranges, window).collect();
        let of_keys: Vec<SidedBand> = of_queries.iter().map(SidedBand::transposed).collect();

        let mut runs: Vec<Run> = k.iter().map(|k| run(k, 0, 0, 0)).collect();
        let mut inverse = vec![Partner { run: 0, band: 0 }; inverse_len(&ranges)];
        invert(&ranges, &mut runs, &mut inverse);
        let (mut list, mut components) = (vec![], vec![]);
        order(&mut list, &mut components, &ranges, (&runs, &inverse), tiles, (&of_queries, &of_keys));
        sort(&mut list);
        let mut before = vec![0; k.len()];
        let all = number(&mut before, k.iter().map(|k| tiles_of(k.len, tiles.keys)));
        let place = |k: u32, t: u32| {
            list.iter().position(|(_, w)| (w.run, w.first) == (k, t * tiles.keys)).expect("every tile is listed")
        };
        let mut zero = 0;
        for (i, range) in q.iter().enumerate() {
            let entries = ranges.pairs_of(range);
            for (tile, &rows) in ends(&range.range, tiles.queries).iter().enumerate() {
                let (mut name, mut at) = (0, None);
                for (r, key) in k.iter().enumerate() {
                    for (t, &keys) in ends(key, tiles.keys).iter().enumerate() {
                        let meets =
                            |pair: &Pair| pair.k == r as u32 && meets(rows, keys, &bands[pair.band as usize], window);
                        // From the last to the first, as the device goes through the list.
                        let met: Vec<usize> = (0..entries.len()).rev().filter(|&e| meets(&entries[e])).collect();
                        for (n, &entry) in met.iter().enumerate() {
                            let found = visit(&ranges, &before, tiles, &of_queries, (i, tile as u32), t as u32, entry);
                            let expected =
                                Visit { again: n > 0, passes: n + 1 == met.len(), after: if n > 0 { 0 } else { name } };
                            assert_eq!(
                                found, expected,
                                "{ranges:?} {window:?} {tiles:?}: q {i} tile {tile}, k {r} tile {t} entry {entry}"
                            );
                        }
                        if met.is_empty() {
                            continue;
                        }
                        assert!(at < Some(place(r as u32, t as u32)), "{ranges:?} {window:?} {tiles:?}: {list:?}");
                        waits += usize::from(name > 0);
                        leads += usize::from(name > 0 && t == 0);
                        repeats += usize::from(met.len() > 1);
                        gaps += usize::from(name > before[r] && name < before[r] + t as u32);
                        (name, at) = (before[r] + t as u32 + 1, Some(place(r as u32, t as u32)));
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
    let seen = [waits, leads, zeros, repeats, gaps];
    assert!(seen.iter().zip([10_000, 1000, 100, 1000, 30]).all(|(&n, least)| n > least), "{seen:?}");
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
    let ranges = Ranges { q: &q, k: &k, pairs: &[0, 1, 2].map(Pair::of), bands: &[Band::WHOLE] };
    let tiles = TileRows { queries: 1, keys: 1 };
    let mut runs: Vec<Run> = k.iter().map(|k| run(k, 0, 0, 0)).collect();
    let mut inverse = vec![Partner { run: 0, band: 0 }; 3];
    invert(&ranges, &mut runs, &mut inverse);
    let (mut list, mut components) = (vec![], vec![]);
    let of_queries: Vec<SidedBand> = bands::of_queries(&ranges, (1 << 62, 0)).collect();
    let of_keys: Vec<SidedBand> = of_queries.iter().map(SidedBand::transposed).collect();
    order(&mut list, &mut components, &ranges, (&runs, &inverse), tiles, (&of_queries, &of_keys));
    sort(&mut list);
    let found: Vec<_> = list.iter().map(|(_, w)| (w.run, w.first)).collect();
    assert_eq!(found, [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]);
}
