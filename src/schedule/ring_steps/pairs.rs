// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranges and pairs of one ring step, as kernels take them.
//!
//! A q range is listed once with all its k ranges, slice by slice and in the order of their positions, because its mode
//! applies to all of them; the kernel does not need to know which rank a row came from. K ranges are also listed by
//! document and position, so that those of a document are next to each other.

use super::{RangeScratch, RingSteps};
use crate::{
    batch::Side,
    call::{Band, Mode, Pair, QRange, Range},
    schedule::join::{ByDocument, document, has_allowed_pair, near_ranges},
};

impl RingSteps {
    /// `order` := the fragments by document and position.
    pub(super) fn sort(&self, s: &mut RangeScratch) {
        s.order.clear();
        s.order.extend(0..s.fragments.len() as u32);
        let f = &s.fragments;
        let key = |&i: &u32| (f[i as usize].range.doc, f[i as usize].range.pos);
        if !s.order.is_sorted_by_key(key) {
            s.order.sort_unstable_by_key(key);
        }
    }

    /// Lists the ranges and pairs of a ring step. Of q ranges, those without a key in this ring step are left out,
    /// except at the first ring step, which starts every row. `Mode`s are those of the forward; in the backward a mode
    /// that continues adds to dq.
    pub(crate) fn ranges(&self, ring_step: usize, s: &mut RangeScratch) {
        self.list_incoming(&self.list[ring_step], s);
        self.sort(s);
        s.q.clear();
        s.k.clear();
        s.pairs.clear();
        s.bands.clear();
        match self.circulating {
            Side::K => self.pairs_of_keys(ring_step, s),
            Side::Q => self.pairs_of_queries(ring_step, s),
        }
        self.number_bands(s);
    }

    /// Bands are those of the parts that pairs name, in the order of the parts: so an aligned call adds up dk and dv
    /// slice by slice.
    fn number_bands(&self, s: &mut RangeScratch) {
        let RangeScratch { pairs, bands, parts, .. } = s;
        if self.allowed.is_by_document() {
            return bands.push(Band::WHOLE);
        }
        parts.clear();
        parts.extend(pairs.iter().map(|pair| pair.band));
        parts.sort_unstable();
        parts.dedup();
        bands.extend(parts.iter().map(|&part| self.allowed.band(part)));
        // Each pair names one of the parts.
        pairs.iter_mut().for_each(|pair| pair.band = parts.partition_point(|&part| part < pair.band) as u32);
    }

    fn q_range(&self, range: Range, keys: core::ops::Range<u32>, mode: Mode) -> QRange {
        let doc = range.doc as usize;
        let document = [Side::Q, Side::K].map(|side| self.shares.batch().document(side, doc).len() as u32);
        QRange { range, document, keys_begin: keys.start, keys_end: keys.end, mode }
    }

    /// Own q rows over the keys of a ring step.
    fn pairs_of_keys(&self, ring_step: usize, s: &mut RangeScratch) {
        s.k.extend(s.order.iter().map(|&f| s.fragments[f as usize].range));
        let split = self.list[ring_step].split;
        let begins = ring_step == self.first(split);
        let last = &self.last[split as usize * self.stationary.len()..];
        let RangeScratch { q, k, pairs, .. } = s;
        let mut keys = near_ranges(k);
        // The first ring step begins every row.
        let all = if begins { 0..self.stationary.len() } else { 0..0 };
        let beside = self.stationary_beside(if begins { &[] } else { &*k });
        for i in all.chain(beside) {
            let (own, last) = (&self.stationary[i], last[i]);
            let begin = pairs.len() as u32;
            for reach in self.allowed.of_rows(Side::Q, &own.range) {
                let (first, keys) = keys.of(reach.document, &own.range, &reach.limits);
                let met =
                    keys.iter().zip(first as u32..).filter(|(k, _)| has_allowed_pair(&own.range, k, &reach.limits));
                pairs.extend(met.map(|(_, k)| Pair { k, band: reach.part }));
            }
            let end = pairs.len() as u32;
            if end > begin || begins {
                let mode = Mode::of(begins, last as usize == ring_step);
                q.push(self.q_range(own.range, begin..end, mode));
            }
        }
    }

    /// The indices of the own segments that may have pairs with `others`, which are in the order of their documents:
    /// where documents attend to themselves, the segments of these documents. In a pack of many documents these are
    /// few.
    pub(super) fn stationary_beside<'a>(&'a self, others: &'a [Range]) -> impl Iterator<Item = usize> + 'a {
        let by_document = self.allowed.is_by_document();
        let mut own = ByDocument::new(&self.stationary, document);
        let of_documents = others.chunk_by(|a, b| a.doc == b.doc).filter(move |_| by_document).flat_map(move |of| {
            let (first, segments) = own.of(of[0].doc);
            first..first + segments.len()
        });
        let all = if by_document || others.is_empty() { 0..0 } else { 0..self.stationary.len() };
        of_documents.chain(all)
    }

    /// q rows of a ring step over own keys.
    fn pairs_of_queries(&self, ring_step: usize, s: &mut RangeScratch) {
        s.k.extend(self.stationary.iter().map(|k| k.range));
        let mode = if ring_step == self.first(0) && self.continues() { Mode::First } else { Mode::Only };
        let RangeScratch { fragments, order, q, k, pairs, .. } = s;
        let mut keys = near_ranges(k);
        for &f in &*order {
            let range = fragments[f as usize].range;
            let begin = pairs.len() as u32;
            for reach in self.allowed.of_rows(Side::Q, &range) {
                let (first, keys) = keys.of(reach.document, &range, &reach.limits);
                let seen = reach.limits.transposed();
                let met = keys.iter().zip(first as u32..).filter(|(k, _)| has_allowed_pair(k, &range, &seen));
                pairs.extend(met.map(|(_, k)| Pair { k, band: reach.part }));
            }
            q.push(self.q_range(range, begin..pairs.len() as u32, mode));
        }
    }
}
