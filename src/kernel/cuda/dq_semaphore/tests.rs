// SPDX-License-Identifier: MIT OR Apache-2.0
//! The order of tiles against one that is found by looking at all of them.

use super::*;
use crate::call::{Band, Pair, QRange};
use crate::kernel::cuda::metadata::{run, sort};
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
    for &Pair { k: r, .. } in ranges.pairs[ranges.q[q].keys_begin as usize..ranges.q[q].keys_end as usize].iter().rev()
    {
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
            pairs.extend((0..dice.below(5)).map(|_| Pair::of(dice.below(k.len() as u64) as u32)));
            let mode = [Mode::First, Mode::Merge, Mode::Last, Mode::Only][dice.below(4) as usize];
            q.push(QRange { range: dice.range(), document: [0; 2], keys_begin, keys_end: pairs.len() as u32, mode });
        }
        let (window, ranges) = (dice.window(), Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] });

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
                        assert_eq!(found, name, "{ranges:?} {window:?} {tiles:?}: q {i} tile {tile}, k {r} tile {t}");
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
    let ranges = Ranges { q: &q, k: &k, pairs: &[0, 1, 2].map(Pair::of), bands: &[Band::WHOLE] };
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
