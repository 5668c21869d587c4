// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs of q tokens of the pack attend to, for all runs in one pass.
//!
//! Layouts cut the pack into runs of one rank each, and planning wants the mask area of every run and the k tokens
//! that it reads, for several layouts and meshes in every step of a training run. So the parts of a batch are listed
//! here by tokens of the pack instead of positions: the queries of a part that have a key are consecutive, and the
//! number of keys of a query is the difference of two functions of one bend each. The sum over any run then has a
//! closed form, and one pass over the parts in the order of their queries, beside the parts that are still open,
//! visits each pair of a run and a part that meet, and no other.

use alloc::{vec, vec::Vec};
use core::ops::Range;

use crate::{
    batch::{Batch, Side},
    mask::Mask,
    slice::parts::Reach,
};

/// Beyond the distance of any two tokens.
const FAR: i64 = 1 << 33;

/// A part of a batch under a mask, by tokens of the pack of q and of that of k.
#[derive(Clone, Copy, Debug)]
struct PackPart {
    /// The queries that have a key.
    q: [i64; 2],
    k: [i64; 2],
    /// The least and the largest k token minus q token of a pair.
    low: i64,
    high: i64,
}

impl PackPart {
    fn new(q: Range<i64>, k: Range<i64>, low: i64, high: i64) -> Self {
        let (low, high) = (low.clamp(-FAR, FAR), high.clamp(-FAR, FAR));
        let first = q.start.max(k.start - high).min(q.end);
        let any = low <= high && k.start < k.end;
        let end = if any { q.end.min(k.end - low).max(first) } else { first };
        Self { q: [first, end], k: [k.start, k.end], low, high }
    }

    fn is_empty(&self) -> bool {
        self.q[0] == self.q[1]
    }

    /// The pairs of the queries before token `x`.
    fn before(&self, x: i64) -> u64 {
        let [first, x] = [self.q[0], x.clamp(self.q[0], self.q[1])];
        let sum = |a: i64, b: i64| (b * (b - 1) - a * (a - 1)) / 2;
        // Σ min(q + high, last key) + 1 − Σ max(q + low, first key)
        let bend = (self.k[1] - 1 - self.high).clamp(first, x);
        let upper = sum(first, bend) + (bend - first) * self.high + (x - bend) * (self.k[1] - 1);
        let bend = (self.k[0] - self.low).clamp(first, x);
        let lower = (bend - first) * self.k[0] + sum(bend, x) + (x - bend) * self.low;
        (upper - lower + (x - first)) as u64
    }

    /// The tokens of its queries and keys, where these are the same tokens.
    fn extent(&self) -> [i64; 2] {
        [self.q[0].min(self.k[0]), self.q[1].max(self.k[1])]
    }
}

/// The parts of a batch with slices that have pairs, by their first query.
pub(crate) struct PackParts {
    list: Vec<PackPart>,
    /// The pairs of all parts before each, if the tokens of one part all come before those of the next.
    before: Option<Vec<u64>>,
}

impl PackParts {
    /// Of a batch under a mask.
    pub(crate) fn new(batch: &Batch, mask: Mask) -> Self {
        let list = parts_of(batch, mask);
        let apart = list.windows(2).all(|pair| pair[0].extent()[1] <= pair[1].extent()[0]);
        let before = apart.then(|| {
            let mut before = Vec::with_capacity(list.len() + 1);
            before.push(0);
            list.iter().fold(0, |sum, part| {
                before.push(sum + part.before(i64::MAX));
                before[before.len() - 1]
            });
            before
        });
        Self { list, before }
    }

    /// The number of parts.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// The pairs of the runs of q tokens that end at these tokens.
    pub(crate) fn areas(&self, ends: impl Iterator<Item = usize>) -> Vec<u64> {
        let ends: Vec<usize> = ends.collect();
        let mut areas = vec![0; ends.len()];
        self.for_each_in_runs(ends.into_iter().zip(0..), |run: usize, pairs, _| areas[run] += pairs);
        areas
    }

    /// Calls `each(run, pairs, keys)` for what each run of q tokens attends to: often, with a number of pairs and the k
    /// tokens of these, which may overlap those of other calls. They are left out (an empty range) where they are
    /// tokens of the run, if k are the same tokens as q. Runs follow each other from token 0 on, each given by its end
    /// and what it is called.
    pub(crate) fn for_each_in_runs<T: Copy, F: FnMut(T, u64, Range<i64>)>(
        &self,
        runs: impl Iterator<Item = (usize, T)>,
        mut each: F,
    ) {
        // Parts that begin before the run, and do not end before it.
        let mut open: Vec<u32> = Vec::new();
        let (mut next, mut start) = (0, 0);
        for (end, name) in runs {
            let run = start..end as i64;
            if run.is_empty() {
                continue;
            }
            // Whether the part goes on behind the run.
            let part_of_run = |part: &PackPart, each: &mut F| {
                let (a, e) = (part.q[0].max(run.start), part.q[1].min(run.end));
                let keys = (a + part.low).max(part.k[0])..(e + part.high).min(part.k[1]);
                each(name, part.before(e) - part.before(a), keys);
                part.q[1] > run.end
            };
            open.retain(|&i| part_of_run(&self.list[i as usize], &mut each));
            while let Some(part) = self.list.get(next).filter(|part| part.q[0] < run.end) {
                let [first, last] = part.extent();
                match &self.before {
                    Some(before) if run.start <= first && last <= run.end => {
                        // All parts that lie in the run.
                        let to = next + self.list[next..].partition_point(|part| part.extent()[1] <= run.end);
                        each(name, before[to] - before[next], run.start..run.start);
                        next = to;
                    }
                    _ => {
                        if part_of_run(part, &mut each) {
                            open.push(next as u32);
                        }
                        next += 1;
                    }
                }
            }
            start = run.end;
        }
    }
}

/// The parts that have pairs.
fn parts_of(batch: &Batch, mask: Mask) -> Vec<PackPart> {
    let allowed = batch.allowed(mask);
    let mut list = Vec::new();
    for d in 0..batch.documents() {
        let doc = batch.document(Side::Q, d);
        let (q_first, q_last, start) = (doc.start as i64, doc.end as i64, batch.start(Side::Q, d));
        for Reach { document, limits, .. } in allowed.of(Side::Q, d as u32) {
            let keys = batch.document(Side::K, document as usize);
            let (k_first, k_last) = (keys.start as i64, keys.end as i64);
            let token = |position: i64| position.saturating_sub(start).saturating_add(q_first);
            let key = |position: i64| position.saturating_add(k_first);
            let moved = |limit: i64| limit.saturating_add(k_first - q_first + start);
            let q = token(limits.q_begin).max(q_first)..token(limits.q_end).min(q_last);
            let k = key(limits.k_begin).max(k_first)..key(limits.k_end).min(k_last);
            list.push(PackPart::new(q, k, moved(limits.low), moved(limits.high)));
        }
    }
    list.retain(|part| !part.is_empty());
    list.sort_by_key(|part| part.q[0]);
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Slice, slices};

    /// Areas and keys of drawn runs, in batches with and without slices, equal counting token by token.
    #[test]
    fn runs_are_what_counting_gives() {
        let mut draw = fastrand::Rng::with_seed(4);
        let (mut met, mut sliced) = (0, 0);
        for trial in 0..1000 {
            let lengths = |draw: &mut fastrand::Rng, n: usize| -> Vec<i32> {
                let mut cu = vec![0];
                (0..n).for_each(|_| cu.push(cu[cu.len() - 1] + if draw.u8(..5) == 0 { 0 } else { draw.i32(0..12) }));
                cu
            };
            let n = draw.usize(1..5);
            let cu = [lengths(&mut draw, n), lengths(&mut draw, n)];
            let starts: Vec<i64> = (0..n).map(|_| draw.i64(-9..9)).collect();
            let mut batch = match trial % 3 {
                0 => Batch::new(&cu[0]).unwrap(),
                1 => Batch::cross(&cu[0], &cu[1], None).unwrap(),
                _ => Batch::cross(&cu[0], &cu[1], Some(&starts)).unwrap(),
            };
            let [q_tokens, k_tokens] = [Side::Q, Side::K].map(|side| batch.tokens(side));
            let limit = |draw: &mut fastrand::Rng| [None, Some(0), Some(1), Some(7), Some(90)][draw.usize(..5)];
            let mask = Mask { left: limit(&mut draw), right: limit(&mut draw) };
            let mut dense = vec![false; q_tokens * k_tokens];
            if draw.bool() {
                // Slices of other documents too.
                for d in dense.iter_mut() {
                    *d = draw.u8(..3) == 0;
                }
                let list: Vec<Slice> =
                    if k_tokens == 0 { vec![] } else { slices::from_dense(&dense, k_tokens).unwrap() };
                let list: Vec<Slice> = list.into_iter().map(|s| s.q_start(s.q_start + trial % 4)).collect();
                let Ok(with) = batch.clone().with_slices(&list) else { continue };
                batch = with;
                sliced += 1;
            }
            for q in 0..q_tokens {
                for k in 0..k_tokens {
                    let document = |side, t: usize| batch.document_from(side, 0, t);
                    let (a, b) = (document(Side::Q, q), document(Side::K, k));
                    let [x, y] = [(Side::Q, a, q), (Side::K, b, k)]
                        .map(|(side, d, t)| batch.start(side, d) + (t - batch.document(side, d).start) as i64);
                    dense[q * k_tokens + k] = match batch.slices() {
                        None => a == b && mask.allows(x, y),
                        Some(list) => list.iter().any(|s| {
                            s.allows(q, k) && {
                                let distance =
                                    (k as i64 - i64::from(s.k_begin)) - (s.q_start + q as i64 - i64::from(s.q_begin));
                                mask.allows(0, distance)
                            }
                        }),
                    };
                }
            }
            let mut ends: Vec<usize> = (0..draw.usize(..8)).map(|_| draw.usize(..=q_tokens)).collect();
            ends.push(q_tokens);
            ends.sort_unstable();
            let mut areas = vec![0; ends.len()];
            let mut read = vec![vec![false; k_tokens]; ends.len()];
            let parts = PackParts::new(&batch, mask);
            parts.for_each_in_runs(ends.iter().copied().zip(0..), |run: usize, pairs, keys| {
                areas[run] += pairs;
                keys.for_each(|k| read[run][k as usize] = true);
            });
            let mut start = 0;
            for (run, &end) in ends.iter().enumerate() {
                let rows = &dense[start * k_tokens..end.max(start) * k_tokens];
                assert_eq!(areas[run], rows.iter().filter(|&&one| one).count() as u64, "trial {trial} run {run}");
                for k in 0..k_tokens {
                    let want = (start..end).any(|q| dense[q * k_tokens + k]);
                    // Tokens of the run itself may be left out, where they are k tokens too.
                    let own = batch.is_self_attention() && (start..end).contains(&k);
                    if !own && batch.is_self_attention() {
                        assert_eq!(read[run][k], want, "trial {trial} run {run} key {k}");
                    } else {
                        assert!(want || !read[run][k], "trial {trial} run {run} key {k}");
                    }
                }
                met += areas[run];
                start = end;
            }
        }
        assert!(met > 20_000 && sliced > 300, "{met} {sliced}");
    }
}
