// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs of q tokens of the pack attend to, for all runs in one pass: the counter behind the choice of a layout.
//!
//! Layouts cut the pack into runs of one rank each, and planning wants the mask area of every run and the k tokens
//! that it reads, for several layouts and meshes in every step of a training run. So the parts of a batch are listed
//! here by tokens of the pack instead of positions: the queries of a part that have a key are consecutive, and the
//! number of keys of a query is the difference of two functions of one bend each. The sum over any run then has a
//! closed form, and one pass over the parts in the order of their queries, beside the parts that are still open,
//! visits each pair of a run and a part that meet, and no other.
//!
//! Documents that attend to themselves, given as slices or not, need no list: each is two entries of `cu_seqlens`.

use alloc::vec::Vec;
use core::ops::Range;

use crate::{
    batch::{Batch, Side, document_from},
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

    /// The pairs of queries `a..b`, which are of the part.
    #[inline]
    fn pairs(&self, a: i64, b: i64) -> u64 {
        let sum = |a: i64, b: i64| (b * (b - 1) - a * (a - 1)) / 2;
        // Σ min(q + high, last key) + 1 − Σ max(q + low, first key)
        let bend = (self.k[1] - 1 - self.high).clamp(a, b);
        let upper = sum(a, bend) + (bend - a) * self.high + (b - bend) * (self.k[1] - 1);
        let bend = (self.k[0] - self.low).clamp(a, b);
        let lower = (bend - a) * self.k[0] + sum(bend, b) + (b - bend) * self.low;
        (upper - lower + (b - a)) as u64
    }

    /// The tokens of its queries and keys, where these are the same tokens.
    fn extent(&self) -> [i64; 2] {
        [self.q[0].min(self.k[0]), self.q[1].max(self.k[1])]
    }
}

/// The parts of a batch.
#[derive(Debug)]
enum PartList<'a> {
    /// Each document with itself, in a band that has 0.
    Documents { cu: &'a [i32], band: [i64; 2] },
    /// By their first query; without those that have no pair.
    Parts(Vec<PackPart>),
}

/// The parts of a batch under a mask.
#[derive(Debug)]
pub(crate) struct PackParts<'a> {
    list: PartList<'a>,
    /// The pairs of all parts before each, and of all.
    before: Vec<u64>,
    /// Whether q and k are the same tokens, and those of one part all come before those of the next.
    apart: bool,
}

impl<'a> PackParts<'a> {
    /// Of a batch under a mask.
    pub(crate) fn new(batch: &'a Batch, mask: Mask) -> Self {
        let (cu, itself) = (batch.cu_seqlens(Side::Q), batch.is_self_attention());
        let list = match batch.allowed(mask).mask_of_documents().filter(|_| itself) {
            Some(mask) => PartList::Documents { cu, band: [-mask.left_limit().min(FAR), mask.right_limit().min(FAR)] },
            None => PartList::Parts(parts_of(batch, mask)),
        };
        let (mut before, mut sum) = (Vec::with_capacity(batch.documents() + 1), 0);
        before.push(0);
        let mut add = |pairs: u64| {
            sum += pairs;
            before.push(sum);
        };
        let apart = match &list {
            PartList::Documents { cu, band } => {
                cu.windows(2).for_each(|w| {
                    let n = (w[1] - w[0]).into();
                    add(pairs_of_document(n, n, *band));
                });
                true
            }
            PartList::Parts(list) => {
                list.iter().for_each(|part| add(part.pairs(part.q[0], part.q[1])));
                itself && list.windows(2).all(|pair| pair[0].extent()[1] <= pair[1].extent()[0])
            }
        };
        Self { list, before, apart }
    }

    /// The number of parts.
    pub(crate) fn len(&self) -> usize {
        match &self.list {
            PartList::Documents { cu, .. } => cu.len() - 1,
            PartList::Parts(list) => list.len(),
        }
    }

    /// The band of every document, if each attends to itself, in one band that has 0, and to nothing else.
    pub(crate) fn band_of_documents(&self) -> Option<[i64; 2]> {
        match &self.list {
            PartList::Documents { band, .. } => Some(*band),
            PartList::Parts(_) => None,
        }
    }

    /// The pairs of the runs of q tokens that end at these tokens.
    pub(crate) fn areas(&self, ends: impl Iterator<Item = usize>) -> Vec<u64> {
        let mut areas = Vec::with_capacity(ends.size_hint().0);
        self.for_each_run(ends.map(|end| (end, ())), |(), _, pairs, _| areas.push(pairs));
        areas
    }

    /// Calls `each(name, run, pairs, keys)` for every run of q tokens: the number of its pairs, and the k tokens of
    /// these as runs that may overlap. If q and k are the same tokens, keys that are tokens of the run may be left out.
    /// Runs follow each other from token 0 on, each given by its end and what it is called.
    pub(crate) fn for_each_run<T>(
        &self,
        runs: impl Iterator<Item = (usize, T)>,
        each: impl FnMut(T, [i64; 2], u64, &[[i64; 2]]),
    ) {
        match &self.list {
            PartList::Documents { cu, band } => self.runs_of_documents(cu, *band, runs, each),
            PartList::Parts(list) => self.runs_of_parts(list, runs, each),
        }
    }

    /// Only the first and the last document of a run can be cut by it.
    fn runs_of_documents<T>(
        &self,
        cu: &[i32],
        band: [i64; 2],
        runs: impl Iterator<Item = (usize, T)>,
        mut each: impl FnMut(T, [i64; 2], u64, &[[i64; 2]]),
    ) {
        let ends = |d: usize| [i64::from(cu[d]), i64::from(cu[d + 1])];
        // The document of the first token, and all pairs before that token.
        let (mut first, mut before, mut start) = (0, 0, 0);
        for (end, name) in runs {
            let end = end as i64;
            let (mut keys, mut cuts, mut pairs) = ([[0; 2]; 2], 0, 0);
            if start < end {
                while ends(first)[1] <= start {
                    first += 1;
                }
                let last = document_from(cu, first, end - 1);
                let mut cut = |d: usize| {
                    let [a, e] = ends(d);
                    if a < start || end < e {
                        keys[cuts] = [(a.max(start) + band[0]).max(a), (e.min(end) + band[1]).min(e)];
                        cuts += 1;
                    }
                };
                cut(first);
                if last != first {
                    cut(last);
                }
                let [a, e] = ends(last);
                let all = self.before[last] + pairs_of_document(end - a, e - a, band);
                pairs = all - before;
                (first, before) = (last, all);
            }
            each(name, [start, end], pairs, &keys[..cuts]);
            start = end;
        }
    }

    fn runs_of_parts<T>(
        &self,
        list: &[PackPart],
        runs: impl Iterator<Item = (usize, T)>,
        mut each: impl FnMut(T, [i64; 2], u64, &[[i64; 2]]),
    ) {
        // Parts that begin before the run and do not end before it, with the pairs that are left of them.
        let mut open: Vec<(PackPart, u64)> = Vec::new();
        let mut keys: Vec<[i64; 2]> = Vec::new();
        let (mut next, mut start) = (0, 0);
        for (end, name) in runs {
            let end = end as i64;
            let (mut pairs, mut whole) = (0, 0);
            keys.clear();
            // Whether the part goes on behind the run.
            let mut add = |(part, left): &mut (PackPart, u64)| {
                let (a, e) = (part.q[0].max(start), part.q[1].min(end));
                let read = [(a + part.low).max(part.k[0]), (e + part.high).min(part.k[1])];
                if read[0] < read[1] {
                    keys.push(read);
                }
                let goes_on = part.q[1] > end;
                let now = if goes_on { part.pairs(a, e) } else { *left };
                (pairs, *left) = (pairs + now, *left - now);
                goes_on
            };
            if start < end {
                open.retain_mut(&mut add);
            }
            while let Some(part) = list.get(next).filter(|part| part.q[0] < end) {
                let [first, last] = part.extent();
                if self.apart && start <= first && last <= end {
                    // All parts that lie in the run.
                    let to = next + list[next..].partition_point(|part| part.extent()[1] <= end);
                    whole += self.before[to] - self.before[next];
                    next = to;
                } else {
                    let mut part = (*part, self.before[next + 1] - self.before[next]);
                    if add(&mut part) {
                        open.push(part);
                    }
                    next += 1;
                }
            }
            each(name, [start, end], pairs + whole, &keys);
            start = end;
        }
    }
}

/// The pairs of the first `x` queries of a document of `n` tokens.
#[inline]
pub(crate) fn pairs_of_document(x: i64, n: i64, [low, high]: [i64; 2]) -> u64 {
    let triangle = |rows: i64| rows.max(0) * (rows.max(0) + 1) / 2;
    // Without those beyond the last key of a query, and before the first.
    let beyond = triangle(n - 1 - high) - triangle(n - 1 - high - x);
    (x * n - beyond - triangle(x - 1 + low)) as u64
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
    use alloc::vec;

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
            parts.for_each_run(ends.iter().copied().zip(0..), |run: usize, [first, end], pairs, keys| {
                assert_eq!(end as usize, ends[run]);
                assert_eq!(first as usize, if run > 0 { ends[run - 1] } else { 0 });
                areas[run] = pairs;
                keys.iter().for_each(|k| (k[0]..k[1]).for_each(|k| read[run][k as usize] = true));
            });
            let mut start = 0;
            for (run, &end) in ends.iter().enumerate() {
                let rows = &dense[start * k_tokens..end.max(start) * k_tokens];
                assert_eq!(areas[run], rows.iter().filter(|&&one| one).count() as u64, "trial {trial} run {run}");
                for k in 0..k_tokens {
                    let want = (start..end).any(|q| dense[q * k_tokens + k]);
                    // Tokens of the run itself may be left out, where they are k tokens too.
                    let own = batch.is_self_attention() && (start..end).contains(&k);
                    if !own {
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
