// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads of all ring ranks at once, where q and k are the same tokens.
//!
//! The automatic choice compares six layouts for every mesh, at every step of a training run, so it may not list the
//! segments of every rank. Two observations make it short:
//!
//! - Every layout except the zigzag of documents cuts the *pack* into runs of one rank each. The mask area of the
//!   pack's first `t` tokens is a prefix sum over documents, so the area of a run takes two look-ups, however many
//!   documents lie in it. A document inside one run needs no row of another rank; only the two documents that a run
//!   cuts do.
//! - A zigzag cuts documents of the same length alike, so each length is counted once, times its documents.
//!
//! A query always attends to its own position, so a rank's own rows are among those it needs; the rows needed of others
//! are the union of the rows in reach, without its own. All figures are integers, and equal to the sum over
//! [`load`](super::area::load) (a test compares them), which is used for batches with different q and k.

use alloc::{vec, vec::Vec};

use super::area::Load;
use crate::{
    batch::{Batch, Side},
    error::Result,
    layout::{Layout, chunk_limit, cut, deal},
    mask::Mask,
};

/// Counts consecutive runs of the pack's tokens, each of one ring rank. What layouts have to do with it is here.
pub(super) trait CountRuns {
    /// The tokens of the pack.
    fn tokens(&self) -> usize;

    /// How much is listed: documents, or parts of slices.
    fn listed(&self) -> usize;

    /// The loads of a zigzag of each document.
    fn zigzag(&self, ring: usize) -> Vec<Load>;

    /// The mask areas of the runs that end at these tokens.
    fn areas(&self, ends: impl Iterator<Item = usize>) -> Vec<u64>;

    /// The loads of ranks whose runs are given by their ends and ranks.
    fn runs(&self, ring: usize, runs: impl Iterator<Item = (usize, usize)>) -> Vec<Load>;

    /// The load of every ring rank under a layout; `None` if the layout has so many runs that counting rank by rank is
    /// faster.
    fn loads(&self, layout: Layout, ring: usize) -> Result<Option<Vec<Load>>> {
        let n = self.tokens();
        let runs = |parts: usize| (1..=parts).map(move |i| cut(i, n, parts));
        Ok(Some(match layout {
            Layout::Zigzag => self.zigzag(ring),
            Layout::Contiguous => self.runs(ring, runs(ring).zip(0..ring)),
            Layout::ZigzagPack => self.runs(ring, runs(2 * ring).zip((0..ring).chain((0..ring).rev()))),
            Layout::Striped { stripe } if stripe > 0 && n / stripe as usize <= 16 * ring * (1 + self.listed()) => {
                let ends = (1..).map(|i| n.min(i * stripe as usize));
                self.runs(ring, ends.zip((0..ring).cycle()).take(n.div_ceil(stripe as usize)))
            }
            Layout::Striped { .. } => return Ok(None),
            Layout::Balanced { chunks } => {
                chunk_limit(chunks, ring)?;
                let (per, parts) = (chunks as usize, ring * chunks as usize);
                let mut owner = vec![0; parts];
                let dealt = deal(&self.areas(runs(parts)), ring, per);
                dealt.iter().enumerate().for_each(|(i, &c)| owner[c as usize] = i / per);
                self.runs(ring, runs(parts).zip(owner))
            }
        }))
    }
}

/// The documents of a batch of self-attention, prepared for counting; made once for all meshes and layouts.
pub(super) struct Counted<'a> {
    batch: &'a Batch,
    cu: &'a [i32],
    mask: Mask,
    /// The mask area of all documents before each.
    before: Vec<u64>,
    /// Each length with the number of its documents.
    lengths: Vec<(u32, u32)>,
}

impl<'a> Counted<'a> {
    /// None if q and k are different tokens, or if there are slices.
    pub(super) fn new(batch: &'a Batch, mask: Mask) -> Option<Self> {
        if !batch.is_self_attention() || batch.slices().is_some() {
            return None;
        }
        let cu = batch.cu_seqlens(Side::Q);
        let mut sum = 0;
        let mut before = Vec::with_capacity(cu.len());
        before.push(0);
        let mut all: Vec<u32> = Vec::with_capacity(cu.len());
        for w in cu.windows(2) {
            let n = w[1] - w[0];
            sum += pairs(mask, n.into(), n.into());
            before.push(sum);
            all.push(n as u32);
        }
        all.sort_unstable();
        let lengths = all.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)).collect();
        Some(Self { batch, cu, mask, before, lengths })
    }

    fn length(&self, doc: usize) -> i64 {
        (self.cu[doc + 1] - self.cu[doc]).into()
    }

    /// The mask area of the first `t` tokens of the pack; `at` advances to the document of the last of these tokens.
    fn prefix(&self, at: &mut usize, t: usize) -> u64 {
        if t == 0 {
            return 0;
        }
        *at = self.batch.document_from(Side::Q, *at, t - 1);
        let inside = t as i64 - i64::from(self.cu[*at]);
        self.before[*at] + pairs(self.mask, inside, self.length(*at))
    }
}

impl CountRuns for Counted<'_> {
    fn tokens(&self) -> usize {
        self.cu.last().map_or(0, |&n| n as usize)
    }

    fn listed(&self) -> usize {
        self.cu.len() - 1
    }

    fn areas(&self, ends: impl Iterator<Item = usize>) -> Vec<u64> {
        let (mut at, mut low) = (0, 0);
        let area = |end| {
            let high = self.prefix(&mut at, end);
            high - core::mem::replace(&mut low, high)
        };
        ends.map(area).collect()
    }

    /// Loads of consecutive runs of the pack, each given by its end and its rank.
    fn runs(&self, ring: usize, runs: impl Iterator<Item = (usize, usize)>) -> Vec<Load> {
        let (left, right) = (self.mask.left_limit(), self.mask.right_limit());
        let mut loads = vec![Load::default(); ring];
        // By rank: the document whose rows it needs, and the end of the rows needed so far.
        let mut open = vec![(usize::MAX, 0i64); ring];
        let mut at = 0;
        let (mut start, mut low) = (0, 0);
        for (end, rank) in runs {
            if start == end {
                continue;
            }
            at = self.batch.document_from(Side::Q, at, start);
            let first = at;
            let high = self.prefix(&mut at, end);
            let load = &mut loads[rank];
            load.area += high - low;
            load.q_tokens += (end - start) as u64;
            let open = &mut open[rank];
            let mut part = |doc: usize| {
                let (begin, length) = (i64::from(self.cu[doc]), self.length(doc));
                let (a, e) = ((start as i64 - begin).max(0), (end as i64 - begin).min(length));
                if e - a == length {
                    return;
                }
                let (mut from, to) = (a.saturating_sub(left).max(0), e.saturating_add(right).min(length));
                if open.0 == doc {
                    from = from.max(open.1);
                }
                *open = (doc, if open.0 == doc { open.1.max(to) } else { to });
                load.needed = load.needed + (to - from).max(0) as u64 - (e - a) as u64;
            };
            part(first);
            if at != first {
                part(at);
            }
            (start, low) = (end, high);
        }
        loads.iter_mut().for_each(|l| l.k_tokens = l.q_tokens);
        loads
    }

    /// Each document in 2R chunks, from both ends at once.
    fn zigzag(&self, ring: usize) -> Vec<Load> {
        let (left, right) = (self.mask.left_limit(), self.mask.right_limit());
        let mut loads = vec![Load::default(); ring];
        let parts = 2 * ring as i64;
        for &(length, documents) in &self.lengths {
            let (n, times) = (i64::from(length), u64::from(documents));
            let (whole, rest) = (n / parts, n % parts);
            // Chunk r ends at ⌊(r + 1)·n / 2R⌋, and the chunk opposite to it begins at n − ⌈(r + 1)·n / 2R⌉.
            let (mut a, mut d, mut carry) = (0, n, 0);
            let (mut front, mut back) = (0, pairs(self.mask, n, n));
            for load in &mut loads {
                carry += rest;
                let more = i64::from(carry >= parts);
                carry -= parts * more;
                let b = a + whole + more;
                let c = n - b - i64::from(carry > 0);
                let own = b - a + d - c;
                if own == 0 {
                    continue;
                }
                let (up, down) = (pairs(self.mask, b, n), pairs(self.mask, c, n));
                let to = if a < b { b.saturating_add(right).min(n) } else { 0 };
                let lower = if a < b { to - (a.saturating_sub(left)).max(0) } else { 0 };
                let from = c.saturating_sub(left).max(to);
                let upper = if c < d { (d.saturating_add(right).min(n) - from).max(0) } else { 0 };
                load.area += times * (up - front + back - down);
                load.q_tokens += times * own as u64;
                load.needed += times * (lower + upper - own) as u64;
                (a, d, front, back) = (b, c, up, down);
            }
        }
        loads.iter_mut().for_each(|l| l.k_tokens = l.q_tokens);
        loads
    }
}

/// How many keys the first `x` queries of a document of `n` tokens read together.
fn pairs(mask: Mask, x: i64, n: i64) -> u64 {
    // Σ min(q + right + 1, n) − Σ max(q − left, 0)
    let high = match mask.right {
        Some(right) if i64::from(right) < n => {
            let (right, b) = (i64::from(right), x.min(n - i64::from(right)));
            b * (b - 1) / 2 + b * (right + 1) + (x - b) * n
        }
        _ => x * n,
    };
    let low = match mask.left {
        Some(left) if i64::from(left) < x => (x - i64::from(left)) * (x - i64::from(left) - 1) / 2,
        _ => 0,
    };
    (high - low) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Shares;
    use crate::plan::{CirculatingSide, area::load};

    /// Random documents, masks and layouts: the loads of all ranks at once equal the sums over each rank's segments.
    #[test]
    fn loads_are_the_sums_over_segments() {
        let mut draw = fastrand::Rng::with_seed(9);
        let mut lists = Default::default();
        let mut compared = 0;
        for _ in 0..1500 {
            let most = [1, 3, 20, 200][draw.usize(..4)];
            let lengths: Vec<usize> =
                (0..draw.usize(0..30)).map(|_| if draw.u8(..5) == 0 { 0 } else { draw.usize(..=most) }).collect();
            let batch = Batch::from_lengths(&lengths).unwrap();
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
                let counted = Counted::new(&batch, mask).unwrap();
                let Some(all) = counted.loads(layout, ring).unwrap() else { continue };
                for (r, got) in all.iter().enumerate() {
                    let want = load(&shares, &mask.into(), r, CirculatingSide::Keys, &mut lists);
                    assert_eq!(*got, want, "{layout} {mask:?} rank {r} of {ring}: {lengths:?}");
                    compared += usize::from(want.needed > 0);
                }
            }
        }
        assert!(compared > 5_000, "{compared}");
    }

    #[test]
    fn limits_of_the_layouts_are_kept() {
        let batch = Batch::from_lengths(&[7]).unwrap();
        let counted = Counted::new(&batch, Mask::causal()).unwrap();
        for layout in [Layout::Balanced { chunks: 0 }, Layout::Balanced { chunks: u32::MAX }] {
            let text = |e: crate::error::Error| alloc::string::ToString::to_string(&e);
            assert_eq!(
                text(counted.loads(layout, 2).unwrap_err()),
                text(Shares::new(&batch, Mask::causal(), layout, 2).unwrap_err())
            );
        }
    }
}
