// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads of all ring ranks at once, where q and k are the same tokens and slices say what attends to what.
//!
//! As for documents ([`loads`](super::loads)), every layout cuts the pack into runs of one rank each. One pass over the
//! parts of the batch gives the areas and the k tokens of all runs ([`pack`](crate::layout::pack)). A rank's own tokens
//! need no message; what its runs read of others is merged by rank, since several parts may read the same token.
//!
//! For documents alone this takes two to three times as long as counting them by sums and lengths (`cargo bench --bench
//! planning -- choice`), which is why there are two.

use alloc::{vec, vec::Vec};

use super::{area::Load, loads::CountRuns};
use crate::{
    batch::{Batch, Side},
    layout::{cut, pack::PackParts},
    mask::Mask,
};

/// The parts of a batch of self-attention with slices, prepared for counting; made once for all meshes and layouts.
pub(super) struct CountedSlices<'a> {
    cu: &'a [i32],
    parts: PackParts,
}

impl<'a> CountedSlices<'a> {
    /// None if q and k are different tokens, or without slices.
    pub(super) fn new(batch: &'a Batch, mask: Mask) -> Option<Self> {
        if !batch.is_self_attention() || batch.slices().is_none() {
            return None;
        }
        Some(Self { cu: batch.cu_seqlens(Side::Q), parts: PackParts::new(batch, mask) })
    }
}

impl CountRuns for CountedSlices<'_> {
    fn tokens(&self) -> usize {
        self.cu.last().map_or(0, |&n| n as usize)
    }

    fn listed(&self) -> usize {
        self.parts.len()
    }

    /// Each document in 2R chunks, of which a rank has one from each end.
    fn zigzag(&self, ring: usize) -> Vec<Load> {
        let chunks = self.cu.windows(2).flat_map(|w| {
            let (begin, n) = (w[0] as usize, (w[1] - w[0]) as usize);
            (0..2 * ring).map(move |c| (begin + cut(c + 1, n, 2 * ring), c.min(2 * ring - 1 - c)))
        });
        self.runs(ring, chunks)
    }

    fn areas(&self, ends: impl Iterator<Item = usize>) -> Vec<u64> {
        self.parts.areas(ends)
    }

    fn runs(&self, ring: usize, runs: impl Iterator<Item = (usize, usize)>) -> Vec<Load> {
        let mut loads = vec![Load::default(); ring];
        // By rank: its runs, and the keys that they read and do not hold all of. Both by tokens.
        let mut own: Vec<Vec<[i64; 2]>> = vec![vec![]; ring];
        let mut read: Vec<Vec<[i64; 2]>> = vec![vec![]; ring];
        let mut start = 0;
        let runs = runs.map(|(end, rank)| {
            let run = [core::mem::replace(&mut start, end) as i64, end as i64];
            if run[0] < run[1] {
                match own[rank].last_mut() {
                    Some(last) if last[1] == run[0] => last[1] = run[1],
                    _ => own[rank].push(run),
                }
            }
            (end, (rank, run))
        });
        self.parts.for_each_in_runs(runs, |(rank, run), pairs, keys| {
            loads[rank].area += pairs;
            if !keys.is_empty() && (keys.start < run[0] || keys.end > run[1]) {
                read[rank].push([keys.start, keys.end]);
            }
        });
        for ((load, own), mut read) in loads.iter_mut().zip(own).zip(read) {
            load.q_tokens = own.iter().map(|run| (run[1] - run[0]) as u64).sum();
            load.k_tokens = load.q_tokens;
            if !read.is_sorted() {
                read.sort_unstable();
            }
            load.needed = without(&read, &own);
        }
        loads
    }
}

/// The number of tokens of ascending runs, which may overlap, that are in none of the `own` runs, which do not.
fn without(read: &[[i64; 2]], own: &[[i64; 2]]) -> u64 {
    let (mut tokens, mut done, mut at) = (0, i64::MIN, 0);
    for &[first, end] in read {
        let mut token = first.max(done);
        while token < end {
            at += own[at..].iter().take_while(|run| run[1] <= token).count();
            let [a, e] = own.get(at).copied().unwrap_or([i64::MAX; 2]);
            tokens += (a.min(end) - token).max(0) as u64;
            token = if a < end { e } else { end };
        }
        done = done.max(end);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Slice,
        layout::{Layout, Shares},
        plan::{CirculatingSide, area::load},
        slices,
    };

    /// Random slices, masks and layouts: the loads of all ranks at once equal the sums over each rank's segments.
    #[test]
    fn loads_are_the_sums_over_segments() {
        let mut draw = fastrand::Rng::with_seed(9);
        let mut lists = Default::default();
        let mut compared = 0;
        for _ in 0..750 {
            let most = [1, 3, 20, 200][draw.usize(..4)];
            let lengths: Vec<usize> =
                (0..draw.usize(0..30)).map(|_| if draw.u8(..5) == 0 { 0 } else { draw.usize(..=most) }).collect();
            let batch = Batch::from_lengths(&lengths).unwrap();
            // Each document a prompt with answers, the last of which reads another document too.
            let cu = batch.cu_seqlens(Side::Q).to_vec();
            let mut list = vec![];
            for d in 0..lengths.len() {
                let [begin, n] = [cu[d], cu[d + 1] - cu[d]].map(|t| t as usize);
                let (prompt, answer) = (n / 3, n / 4);
                for s in slices::shared_prefix(prompt, &[answer, n - prompt - answer]) {
                    let moved = |t: i32| t as usize + begin;
                    let (q, k) = (moved(s.q_begin)..moved(s.q_end), moved(s.k_begin)..moved(s.k_end));
                    list.push(Slice::new(q, k).q_start(s.q_start).band(s.low, s.high));
                }
                let other = draw.usize(..lengths.len());
                if other != d {
                    list.push(Slice::new(begin + prompt..begin + n, cu[other] as usize..cu[other + 1] as usize));
                }
            }
            let batch = batch.with_slices(&list).unwrap();
            let limit = |draw: &mut fastrand::Rng| [None, Some(0), Some(1), Some(7), Some(90)][draw.usize(..5)];
            let mask = Mask { left: limit(&mut draw), right: limit(&mut draw) };
            let ring = draw.usize(1..12);
            let chunks = draw.u32(1..7);
            let stripe = draw.u32(1..9);
            for layout in [
                Layout::Contiguous,
                Layout::Zigzag,
                Layout::ZigzagPack,
                Layout::Striped { stripe },
                Layout::Balanced { chunks },
            ] {
                let shares = Shares::new(&batch, mask, layout, ring).unwrap();
                let counted = CountedSlices::new(&batch, mask).unwrap();
                let Some(all) = counted.loads(layout, ring).unwrap() else { continue };
                for (r, got) in all.iter().enumerate() {
                    let want = load(&shares, &batch.allowed(mask), r, CirculatingSide::Keys, &mut lists);
                    assert_eq!(*got, want, "{layout} {mask:?} rank {r} of {ring}: {lengths:?}");
                    compared += usize::from(want.needed > 0);
                }
            }
        }
        assert!(compared > 5_000, "{compared}");
    }
}
