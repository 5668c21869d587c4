// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work units of a call as a list, in the order in which workers take them: the input of a simulated schedule over
//! any number of workers. For benches and reports; the kernels iterate over the same units without a list.

use super::attention::bands::crosses;
use super::attention::key_units::KeyUnits;
use super::attention::row_blocks::{RowUnit, RowUnits, lanes, readers, unit_rows};
#[cfg(target_arch = "x86_64")]
use super::attention::tiled;
use super::choice::{Documents, EngineChoice};
use super::isa::Isa;
use super::memory::arena::KEYS;
use crate::call::{Attend, AttendBackward, Band, Pair, QRange, Range, Score};
use alloc::vec::Vec;
use core::sync::atomic::AtomicUsize;

/// A unit of work.
struct WorkUnit {
    /// (query, key) pairs that the mask leaves, over its heads.
    pairs: u64,
    /// The index of the preceding unit that adds to the same rows, if any: this unit ends after that one.
    after: Option<usize>,
}

/// Keys of `k` that a query at `pos` sees.
fn seen(score: &Score, pos: i64, k: &Range, band: &Band) -> u64 {
    let (begin, end) = band.keys(pos, (score.window_left, score.window_right));
    if begin < end { k.rows_at(begin, end - 1).len() as u64 } else { 0 }
}

impl Isa {
    /// How evenly the work of [`attend`](super::attend) is spread over `workers` workers: the number of units, and the
    /// ratio of the makespan to that of an even distribution. The makespan is simulated: each unit goes to the worker
    /// that is idle first, and takes as long as it has pairs of a query and a key that the mask allows; a unit that
    /// adds to the same rows as an earlier unit ends after it. The documents are not known beforehand.
    ///
    /// # Panics
    /// Without workers, or for a call without any such pair.
    pub fn forward_balance(self, call: &Attend, workers: usize) -> (usize, f64) {
        let units = forward_units(call, self, workers);
        (units.len(), balance(&units, workers))
    }

    /// As [`Isa::forward_balance`], of [`attend_backward`](super::attend_backward) where all gradients are made at
    /// once.
    ///
    /// # Panics
    /// As [`Isa::forward_balance`].
    pub fn backward_balance(self, call: &AttendBackward, workers: usize) -> (usize, f64) {
        let units = backward_units(call, self, workers);
        (units.len(), balance(&units, workers))
    }
}

fn forward_units(call: &Attend, isa: Isa, workers: usize) -> Vec<WorkUnit> {
    let ranges = &call.ranges;
    let work = |unit: RowUnit| {
        let q = &ranges.q[unit.range];
        let of = |pair: &Pair| (&ranges.k[pair.k as usize], &ranges.bands[pair.band as usize]);
        let keys = || ranges.pairs_of(q).iter().map(of);
        let row = |i| keys().map(|(k, band)| seen(&call.score, q.range.position(i), k, band)).sum::<u64>();
        let heads = readers(&call.heads, unit.kv, call.q.heads).len() as u64;
        WorkUnit { pairs: (unit.first..unit.first + unit.rows).map(row).sum::<u64>() * heads, after: None }
    };
    let mut list = Vec::new();
    for documents in EngineChoice::forward(call, isa).each() {
        let next = AtomicUsize::new(0);
        let [rows, block] =
            lanes(call, documents, workers.max(1)).map(|lanes| unit_rows(lanes, &call.heads, call.q.heads));
        let mut units = RowUnits::new(ranges.q, documents, (rows, block), &call.k);
        list.extend(core::iter::from_fn(|| units.next(&next)).map(work));
    }
    list
}

fn backward_units(call: &AttendBackward, isa: Isa, workers: usize) -> Vec<WorkUnit> {
    let ranges = &call.ranges;
    let together = crosses(ranges);
    // Pairs of the keys `begin..end` of a document, counted along its ranges, and a kv head.
    let pairs = |first: usize, kv: u32, begin: u64, end: u64| {
        // Rows that see the key at `pos` of k range `k`.
        let queries = |(k, pos): (u32, i64)| {
            let of = |(q, pair): (&QRange, &Pair)| {
                let window = (call.score.window_right, call.score.window_left);
                let (begin, end) = ranges.bands[pair.band as usize].transposed().keys(pos, window);
                if begin < end { q.range.rows_at(begin, end - 1).len() as u64 } else { 0 }
            };
            let all = ranges.q.iter().flat_map(|q| ranges.pairs_of(q).iter().map(move |pair| (q, pair)));
            all.filter(|(_, pair)| pair.k == k).map(of).sum::<u64>()
        };
        let of_document = |r: &Range| together || r.doc == ranges.k[first].doc;
        let keys = (0..).zip(ranges.k).skip(first).filter(|(_, r)| of_document(r));
        let keys = keys.flat_map(|(k, r)| (0..r.len).map(move |i| (k, r.position(i))));
        let some = keys.skip(begin as usize).take((end - begin) as usize);
        some.map(queries).sum::<u64>() * readers(&call.heads, kv, call.q.heads).len() as u64
    };
    let mut list = Vec::new();
    let mut add = |documents: Documents, tiles: usize| {
        let next = AtomicUsize::new(0);
        let mut units = KeyUnits::new(call, documents, tiles, call.aligned, workers);
        let (each, base) = ((tiles * KEYS) as u64, list.len());
        list.extend(core::iter::from_fn(|| units.next(&next)).map(|unit| {
            let begin = unit.block as u64 * each;
            WorkUnit { pairs: pairs(unit.first, unit.kv, begin, begin + each), after: unit.before.map(|i| base + i) }
        }));
    };
    let choice = EngineChoice::backward(call, isa);
    #[cfg(target_arch = "x86_64")]
    if let Some(documents) = choice.tiles {
        add(documents, tiled::SUPER);
    }
    if let Some(documents) = choice.vectors {
        add(documents, 1);
    }
    list
}

/// As [`Isa::forward_balance`] says.
fn balance(units: &[WorkUnit], workers: usize) -> f64 {
    let mut free = alloc::vec![0u64; workers];
    let mut ends = Vec::with_capacity(units.len());
    for unit in units {
        let worker = (0..workers).min_by_key(|&w| free[w]).expect("there are workers");
        free[worker] = (free[worker] + unit.pairs).max(unit.after.map_or(0, |i| ends[i]));
        ends.push(free[worker]);
    }
    let total: u64 = units.iter().map(|u| u.pairs).sum();
    assert!(total > 0, "no pairs");
    free.iter().max().copied().unwrap_or(0) as f64 * workers as f64 / total as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Dtype;
    use crate::kernel::cpu::attention::shapes::{calls, each};

    /// All units together have each pair of the mask exactly once.
    #[test]
    fn units_are_all_pairs() {
        let lengths = [700u32, 1, 90, 1300];
        let total = |units: Vec<WorkUnit>| units.iter().map(|u| u.pairs).sum::<u64>();
        for (window, expected) in [
            (i64::MAX, lengths.iter().map(|&n| u64::from(n) * (u64::from(n) + 1) / 2).sum::<u64>()),
            (9, lengths.iter().map(|&n| (0..u64::from(n)).map(|i| (i + 1).min(10)).sum::<u64>()).sum()),
        ] {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                calls(&each(&lengths), (dtype, 8, 2), (window, 0), false, |forward, backward| {
                    // Units on tiles are taken if there are any.
                    let vectors = |isa: &Isa| matches!(isa, Isa::Portable | Isa::Neon | Isa::Avx2 | Isa::Avx512);
                    for isa in Isa::ALL.into_iter().filter(|isa| cfg!(target_arch = "x86_64") || vectors(isa)) {
                        for workers in [1, 4, 64] {
                            assert_eq!(total(forward_units(forward, isa, workers)), 8 * expected, "{isa:?} {dtype}");
                        }
                        for workers in [1, 4, 64] {
                            let units = backward_units(backward, isa, workers);
                            assert!(units.iter().enumerate().all(|(i, u)| u.after.is_none_or(|before| before < i)));
                            assert_eq!(total(units), 8 * expected, "{isa:?} {dtype}");
                        }
                    }
                });
            }
        }
    }

    /// Sixteen and 64 workers have something to do.
    #[test]
    fn units_are_small_enough() {
        // Length, heads, right window; the upper bounds for 16 and 64 workers, forward and backward.
        let cases = [(4096, 8, i64::MAX, [1.05, 1.05, 1.05, 1.05]), (512, 16, 0, [1.1, 1.5, 1.1, 1.8])];
        for (len, heads, right, most) in cases {
            let (lengths, kv_heads) = ([len], heads);
            calls(&each(&lengths), (Dtype::F32, heads, kv_heads), (i64::MAX, right), false, |forward, backward| {
                for (i, workers) in [16, 64].into_iter().enumerate() {
                    let found = balance(&forward_units(forward, Isa::Avx512, workers), workers);
                    assert!(found <= most[i], "{lengths:?}, {workers} workers forward: {found}");
                    let found = balance(&backward_units(backward, Isa::Avx512, workers), workers);
                    assert!(found <= most[2 + i], "{lengths:?}, {workers} workers backward: {found}");
                }
            });
        }
    }
}
