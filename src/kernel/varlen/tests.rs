// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rectangles of drawn ranges and bands have every pair once, and nothing else.

use alloc::{collections::BTreeMap, vec::Vec};

use super::{pieces::RowRun, table::CallTable};
use crate::call::{Band, Mode, Pair, QRange, Range, Ranges, Score};

/// The rows of runs, one after another.
fn rows(runs: &[RowRun]) -> Vec<u64> {
    runs.iter().flat_map(|run| (0..u64::from(run.count)).map(|i| run.first + i * u64::from(run.step))).collect()
}

/// How often each pair of rows is attended, and its distance, by the definition of ranges and bands.
fn pairs_of(ranges: &Ranges<'_>, window: (i64, i64)) -> BTreeMap<(u64, u64), (u32, i64)> {
    let mut found = BTreeMap::new();
    for q in ranges.q {
        for pair in ranges.pairs_of(q) {
            let (k, band) = (&ranges.k[pair.k as usize], &ranges.bands[pair.band as usize]);
            for i in 0..q.range.len {
                let (begin, end) = band.keys(q.range.position(i), window);
                for j in (0..k.len).filter(|&j| (begin..end).contains(&k.position(j))) {
                    let at = ((q.range.row + i64::from(i)) as u64, (k.row + i64::from(j)) as u64);
                    let distance = band.distance(q.range.position(i), k.position(j));
                    found.entry(at).or_insert((0, distance)).0 += 1;
                }
            }
        }
    }
    found
}

/// The same by the rectangles of a table, which are checked: no row without a key, no key without a row.
fn pairs_of_table(table: &CallTable, slopes: bool) -> BTreeMap<(u64, u64), (u32, i64)> {
    let mut found = BTreeMap::new();
    for group in &table.groups {
        let (all_rows, all_keys) = (rows(&group.q_runs), rows(&group.k_runs));
        assert_eq!(group.cu_seqlens_q.last(), Some(&(all_rows.len() as i32)));
        assert_eq!(group.cu_seqlens_k.last(), Some(&(all_keys.len() as i32)));
        for s in 0..group.q_runs.len() {
            let [q, k] = [(&group.cu_seqlens_q, &all_rows), (&group.cu_seqlens_k, &all_keys)]
                .map(|(cu, all)| &all[cu[s] as usize..cu[s + 1] as usize]);
            assert_eq!(q, rows(&[group.q_runs[s]]));
            let corner = k.len() as i64 - q.len() as i64;
            let sees = |i: usize, j: usize| {
                let (least, most) = (i as i64 + corner, i as i64 + corner);
                group.left.is_none_or(|left| j as i64 >= least - i64::from(left))
                    && group.right.is_none_or(|right| j as i64 <= most + i64::from(right))
            };
            assert!((0..q.len()).all(|i| (0..k.len()).any(|j| sees(i, j))), "a row without a key: {group:?}");
            assert!((0..k.len()).all(|j| (0..q.len()).any(|i| sees(i, j))), "a key without a row: {group:?}");
            for (i, j) in (0..q.len()).flat_map(|i| (0..k.len()).map(move |j| (i, j))).filter(|&(i, j)| sees(i, j)) {
                let distance = if slopes {
                    group.corners[s] + (j as i64 - k.len() as i64) - (i as i64 - q.len() as i64)
                } else {
                    0
                };
                found.entry((q[i], k[j])).or_insert((0, distance)).0 += 1;
            }
        }
    }
    found
}

/// A stripe, a plain range, or blocks longer than the range.
fn any_range(r: &mut fastrand::Rng, row: i64, period: u32) -> Range {
    let block = if r.bool() { 1 } else { 1 + r.u32(..period) };
    let (block, period, len) = if r.u8(..3) == 0 { (1, 1, r.u32(..24)) } else { (block, period, r.u32(..32)) };
    Range { row, pos: r.i64(-20..40), len, block, period, doc: 0 }
}

#[test]
fn drawn_bands_are_rectangles() {
    let (mut most, mut striped) = (0, 0);
    for seed in 0..20_000 {
        let mut r = fastrand::Rng::with_seed(seed);
        let limited = r.bool();
        let near = |r: &mut fastrand::Rng| r.i64(-25..45);
        let period = 1 + r.u32(..9);
        let list = |r: &mut fastrand::Rng| {
            let mut row = 3;
            let of = |_| {
                let range = any_range(r, row, period);
                row += i64::from(range.len) + 2;
                range
            };
            (0..3).map(of).collect::<Vec<_>>()
        };
        let (q, mut k) = (list(&mut r), list(&mut r));
        if r.bool() {
            // Keys that follow each other.
            k[1] = Range { pos: k[0].position(k[0].len), block: 1, period: 1, ..k[1] };
        }
        let band = |_| {
            let (q_begin, k_begin, low) = (near(&mut r), near(&mut r), near(&mut r));
            let mut band = Band::WHOLE;
            if r.bool() {
                (band.q_begin, band.q_end) = (q_begin, q_begin + r.i64(-2..40));
            }
            if r.bool() {
                (band.k_begin, band.k_end) = (k_begin, k_begin + r.i64(-2..40));
            }
            if limited && r.bool() {
                band.low = low;
            }
            if r.bool() {
                band.high = low + r.i64(-1..30);
            }
            band.shift = if r.bool() { 0 } else { r.i64(-30..30) };
            band
        };
        let bands: Vec<Band> = (0..3).map(band).collect();
        let left = if limited && r.bool() { r.i64(..20) } else { i64::MAX };
        let right = if r.bool() { r.i64(..20) } else { i64::MAX };
        let pairs: Vec<Pair> = (0..9).map(|_| Pair { k: r.u32(..3), band: r.u32(..3) }).collect();
        let of = |(i, range): (usize, Range)| {
            let i = i as u32;
            QRange { range, document: [0; 2], keys_begin: 3 * i, keys_end: 3 * i + 3, mode: Mode::Only }
        };
        let q: Vec<QRange> = q.into_iter().enumerate().map(of).collect();
        let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &bands };
        let score = Score { scale: 1.0, softcap: 0.0, window_left: left, window_right: right };
        let expected = pairs_of(&ranges, (left, right));
        let counts = |found: &BTreeMap<(u64, u64), (u32, i64)>| {
            found.iter().map(|(&at, &(count, _))| (at, count)).collect::<Vec<_>>()
        };
        for (slopes, windows) in [(false, true), (true, true), (false, limited), (true, limited)] {
            let table = CallTable::new(&ranges, &score, slopes, windows);
            let found = pairs_of_table(&table, slopes);
            assert_eq!(counts(&found), counts(&expected), "seed {seed}: {ranges:?} {score:?}");
            // Two bands may give a pair two distances.
            let once = |(at, &(count, distance)): (&(u64, u64), &(u32, i64))| count > 1 || found[at].1 == distance;
            assert!(!slopes || expected.iter().all(once), "seed {seed}: {ranges:?} {score:?}");
            for group in table.groups.iter().filter(|_| !windows) {
                assert!(group.left.is_none() && group.right.unwrap_or(0) == 0, "seed {seed}: {group:?}");
            }
            most = most.max(table.groups.len());
            striped += usize::from(table.groups.iter().any(|g| g.q_runs.iter().any(|run| run.step > 1)));
        }
    }
    assert!(most > 5 && striped > 100, "{most} calls, {striped} tables with runs of residues");
}

/// Blocks of q have a copy of their keys each: a call has at most twice as many rows as the ranges.
#[test]
fn stripes_are_several_calls() {
    let stripe = Range { row: 0, pos: 0, len: 40_000, block: 128, period: 256, doc: 0 };
    let q = QRange { range: stripe, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only };
    let ranges = Ranges { q: &[q], k: &[stripe], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
    let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: 0 };
    let table = CallTable::new(&ranges, &score, false, true);
    let sizes: Vec<_> = table.groups.iter().map(|group| group.keys().max(group.rows())).collect();
    assert!(sizes.iter().all(|&size| size <= 160_000), "{sizes:?}");
    // Each block of q has a copy of the keys before it.
    let keys: u64 = table.groups.iter().map(super::table::CallGroup::keys).sum();
    assert!(keys > 20 * 160_000 && sizes.len() < 100, "{keys} keys in {} calls", sizes.len());
}
