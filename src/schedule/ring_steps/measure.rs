// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the ring steps when a plan is made: which of them exist, how many rows each moves, and the memory its lists
//! need.
//!
//! The general method lists and counts the rows of every possible step. For a zigzag over documents with one level
//! there is a faster method (`schedule::sweep`), with the same result.

use alloc::{vec, vec::Vec};

use super::{
    Hop, RingStep, RingSteps, Scattered,
    scratch::{Capacity, RangeScratch},
};
use crate::{
    batch::Side,
    call::Range,
    mask::Mask,
    plan::Form,
    schedule::{
        join::{Fragment, has_allowed_pair, near_ranges},
        sweep::Zigzag,
    },
};

impl RingSteps {
    /// As [`RingSteps::sweep`], but much faster.
    pub(super) fn sweep_zigzag(&mut self, staying: Side, mask: Mask) {
        let zigzag = Zigzag {
            batch: self.shares.batch(),
            mask: if self.circulating == Side::K { mask } else { mask.transposed() },
            circulating: self.circulating,
            staying,
            ring: self.shares.ring(),
            me: self.me,
            stationary: &self.stationary,
            own: &self.own,
            gather: self.form == Form::Gather,
        };
        let (steps, last) = zigzag.measure();
        let readers = zigzag.readers(&steps);
        let rows = self.own.iter().map(|o| u64::from(o.range.len)).sum();
        self.list.push(RingStep { rows_in: rows, meets: true, ..RingStep::default() });
        let longest = self.own.len().max(self.stationary.len());
        let fragments = steps.iter().map(|s| s.fragments_in.max(s.fragments_out)).max().unwrap_or(0).max(longest);
        let mut entry_of = vec![0; steps.len()];
        for (step, s) in steps.iter().enumerate().skip(1).filter(|(_, s)| s.rows_in + s.rows_out > 0) {
            entry_of[step] = self.list.len() as u32;
            let (rows_in, rows_out) = (s.rows_in, s.rows_out);
            self.list.push(RingStep {
                step: step as u32,
                hop: Hop::Local,
                rows_in,
                rows_out,
                meets: rows_in > 0,
                ..RingStep::default()
            });
        }
        self.last = last.into_iter().map(|step| entry_of[step as usize]).collect();
        self.scattered = readers
            .into_iter()
            .map(|(step, out)| Scattered { ring_step: entry_of[step], runs: out.runs, rows: out.rows })
            .collect();
        // A share has at most two segments of each document, so a fragment meets at most two.
        self.capacity = Capacity {
            segments: (2 * self.shares.batch().documents()).max(longest),
            fragments,
            q: fragments,
            k: fragments,
            pairs: 2 * fragments,
            bands: if self.allowed.is_by_document() { 1 } else { 2 * fragments },
            // A segment meets at most two others.
            intervals: 2,
            nodes: Default::default(),
        };
    }

    /// Measures every step: whether it is empty, its rows, the last ring step of each stationary segment, and the
    /// capacity for the longest lists.
    pub(super) fn sweep(&mut self) {
        let mut s = RangeScratch::default();
        let mut leaving: Vec<(u32, u64)> = Vec::new();
        let longest = self.own.len().max(self.stationary.len());
        let mut cap =
            Capacity { segments: longest, fragments: self.own.len(), q: longest, k: longest, ..Capacity::default() };
        s.k.extend(self.own.iter().map(|o| o.range));
        cap.pairs = self.overlapping(&s.k, |_| ());
        for split in 0..self.splits.len() as u32 {
            self.sweep_split(split, &mut s, &mut leaving, &mut cap);
        }
        cap.bands = if self.allowed.is_by_document() { 1 } else { cap.pairs };
        cap.intervals = s.intervals.capacity();
        if self.crosses() {
            cap.segments = cap.segments.max(s.segments.capacity());
            cap.nodes = s.nodes.capacity();
        }
        self.capacity = cap;
    }

    /// The part of [`RingSteps::sweep`] for the heads of some holders.
    fn sweep_split(&mut self, split: u32, s: &mut RangeScratch, leaving: &mut Vec<(u32, u64)>, cap: &mut Capacity) {
        if !self.form.holds_own() {
            let rows = self.own.iter().map(|o| u64::from(o.range.len)).sum();
            self.list.push(RingStep { split, rows_in: rows, meets: true, ..RingStep::default() });
        }
        let lasts = split as usize * self.stationary.len();
        for mut step in self.candidates(split) {
            step.rows_out = self.list_outgoing(&step, s);
            leaving.clear();
            if !matches!(step.hop, Hop::Crossed | Hop::Back) {
                leaving.extend(s.fragments.chunk_by(|a, b| a.peer == b.peer).filter_map(scattered));
            }
            cap.fragments = cap.fragments.max(s.fragments.len());
            cap.segments = cap.segments.max(s.segments.len());
            step.rows_in = self.list_incoming(&step, s);
            step.first_in = if step.attends() { 0 } else { s.fragments.first().map_or(0, |f| f.range.row as u64) };
            cap.fragments = cap.fragments.max(s.fragments.len());
            cap.segments = cap.segments.max(s.segments.len());
            if step.rows_in + step.rows_out == 0 && (step.hop != Hop::Local || !self.form.holds_own()) {
                continue;
            }
            let ring_step = self.list.len() as u32;
            self.scattered.extend(leaving.drain(..).map(|(runs, rows)| Scattered { ring_step, runs, rows }));
            if !step.attends() {
                self.list.push(step);
                continue;
            }
            cap.k = cap.k.max(s.fragments.len());
            cap.q = cap.q.max(s.fragments.len());
            self.sort(s);
            s.k.clear();
            s.k.extend(s.order.iter().map(|&f| s.fragments[f as usize].range));
            let mut last = core::mem::take(&mut self.last);
            let pairs = self.overlapping(&s.k, |i| {
                last[lasts + i] = ring_step;
                step.meets = true;
            });
            self.last = last;
            self.list.push(step);
            cap.pairs = cap.pairs.max(pairs);
        }
        // Rows without partners are finished by the call that begins them.
        let first = self.first(split) as u32;
        self.last[lasts..].iter_mut().for_each(|last| *last = first.max(*last));
    }
}

impl RingSteps {
    /// Calls `each` with the index of every own segment that meets some of `ranges`, which are in the order of their
    /// documents. Returns a number of pairs that their list does not exceed: without slices, all of a document.
    fn overlapping(&self, ranges: &[Range], mut each: impl FnMut(usize)) -> usize {
        let mut others = near_ranges(ranges);
        let (side, by_document) = (self.circulating.other(), self.allowed.is_by_document());
        let mut pairs = 0;
        for i in self.stationary_beside(ranges) {
            let (own, mut met) = (&self.stationary[i], false);
            for reach in self.allowed.of_rows(side, &own.range) {
                let others = others.of(reach.document, &own.range, &reach.limits).1;
                let meets = |r: &&Range| has_allowed_pair(&own.range, r, &reach.limits);
                let n = if by_document { others.len() } else { others.iter().filter(meets).count() };
                pairs += n;
                met |= n > 0 && (!by_document || others.iter().any(|r| meets(&r)));
            }
            if met {
                each(i);
            }
        }
        pairs
    }
}

/// The number of runs of the owner's share that the fragments of one peer form, and their rows; `None` for one run.
fn scattered(fragments: &[Fragment]) -> Option<(u32, u64)> {
    let end = |f: &Fragment| f.owner_row + i64::from(f.range.len);
    let breaks = fragments.windows(2).filter(|w| end(&w[0]) != w[1].owner_row).count() as u32;
    (breaks > 0).then(|| (breaks + 1, fragments.iter().map(|f| u64::from(f.range.len)).sum()))
}

#[cfg(test)]
mod tests {
    use super::super::Holders;
    use super::*;
    use crate::{
        batch::Batch,
        layout::{Layout, Shares},
        slices,
    };

    /// The fast method counts as the general one, and reserves at least as much capacity.
    #[test]
    fn zigzags_are_measured_alike_in_both_ways() {
        let batches = [
            Batch::from_lengths(&[7, 0, 1, 13, 3, 40]).unwrap(),
            Batch::from_lengths(&[64]).unwrap(),
            Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
            Batch::cross(&[0, 9, 31, 33], &[0, 2, 14, 50], Some(&[-4, 5, 1 << 40])).unwrap(),
        ];
        let masks = [
            Mask::full(),
            Mask::causal(),
            Mask::window(2, 0),
            Mask::window(0, 0),
            Mask::window(9, 3),
            Mask { left: Some(1), right: None },
        ];
        let mut ring_steps = 0;
        let documents = slices::documents(batches[0].cu_seqlens(Side::Q));
        let sliced = batches[0].clone().with_slices(&documents).unwrap();
        for batch in batches.iter().chain([&sliced]) {
            for mask in masks {
                for ring in [1, 2, 3, 4, 7, 16] {
                    let shares = Shares::new(batch, mask, Layout::Zigzag, ring).unwrap();
                    for (me, side, form) in (0..ring).flat_map(|me| {
                        [Side::Q, Side::K].into_iter().flat_map(move |s| [(me, s, Form::Ring), (me, s, Form::Gather)])
                    }) {
                        let allowed = batch.allowed(mask);
                        assert!(allowed.mask_of_documents().is_some());
                        let fast = RingSteps::new(&shares, allowed, side, form, (me, ring), vec![Holders::alone()]);
                        let mut slow = fast.clone();
                        slow.list.clear();
                        slow.last.fill(0);
                        slow.scattered.clear();
                        slow.sweep();
                        assert_eq!(
                            (&fast.list, &fast.last, &fast.scattered),
                            (&slow.list, &slow.last, &slow.scattered),
                            "{mask:?} {me} of {ring} {form:?}"
                        );
                        let (a, b) = (fast.capacity, slow.capacity);
                        assert!(a.segments >= b.segments && a.fragments >= b.fragments && a.q >= b.q && a.k >= b.k);
                        assert!(a.pairs >= b.pairs && a.bands >= b.bands, "{} {}", a.pairs, b.pairs);
                        ring_steps += fast.list.len();
                    }
                }
            }
        }
        assert!(ring_steps > 5_000, "{ring_steps}");
    }
}
