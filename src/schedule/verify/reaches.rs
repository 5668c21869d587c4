// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pairs that the mask allows, in an order in which those of a few positions are found without a look at all
//! slices: a document may have thousands, and the proof asks for them once for each run of tokens.
//!
//! Made of [`Allowed`] alone, which is the specification. Without slices a document reaches itself, and nothing is
//! stored.

use alloc::vec::Vec;

use crate::{
    batch::Side,
    call::Band,
    slice::parts::{Allowed, Reach},
};

/// A band as numbers that can be compared.
pub(super) type BandKey = [i64; 7];

pub(super) fn band_key(b: &Band) -> BandKey {
    [b.q_begin, b.q_end, b.k_begin, b.k_end, b.low, b.high, b.shift]
}

/// What one document of a side reaches, by the first position of that side, and for each entry the largest end so far.
type OfDocument = Vec<(Reach, i64)>;

pub(super) struct Reaches {
    allowed: Allowed,
    /// Document of q, document of k, band, and the number of the part; empty without slices.
    bands: Vec<(u32, u32, BandKey, u32)>,
    /// By side and document; empty without slices.
    sides: [Vec<OfDocument>; 2],
}

impl Reaches {
    pub(super) fn new(allowed: Allowed, documents: usize) -> Self {
        if allowed.is_by_document() {
            return Self { allowed, bands: Vec::new(), sides: [Vec::new(), Vec::new()] };
        }
        let documents = || 0..documents as u32;
        let of_q = |doc| allowed.of(Side::Q, doc).map(move |of| (doc, of.document, band_key(&of.band), of.part));
        let mut bands: Vec<_> = documents().flat_map(of_q).collect();
        bands.sort_unstable();
        let sides = [Side::Q, Side::K].map(|side| {
            let of = |doc| {
                let mut list: OfDocument = allowed.of(side, doc).map(|of| (of, of.limits.q_end)).collect();
                list.sort_by_key(|(of, _)| of.limits.q_begin);
                for i in 1..list.len() {
                    list[i].1 = list[i].1.max(list[i - 1].1);
                }
                list
            };
            documents().map(of).collect()
        });
        Self { allowed, bands, sides }
    }

    /// The number of the part with this band between two documents, if there is one.
    pub(super) fn part(&self, q: u32, k: u32, band: &Band) -> Option<u32> {
        if self.allowed.is_by_document() {
            return self.allowed.of(Side::Q, q).find(|of| of.document == k && of.band == *band).map(|of| of.part);
        }
        let key = (q, k, band_key(band));
        let at = self.bands.partition_point(|&(q, k, band, _)| (q, k, band) < key);
        self.bands.get(at).filter(|&&(q, k, band, _)| (q, k, band) == key).map(|found| found.3)
    }

    /// What the positions `first..=last` of a document of `side` may reach: all, and perhaps a few more.
    pub(super) fn of(&self, side: Side, doc: u32, first: i64, last: i64) -> impl Iterator<Item = Reach> + '_ {
        let stored: &[(Reach, i64)] = self.sides[side as usize].get(doc as usize).map_or(&[], |list| list);
        let begin = stored.partition_point(|(_, end)| *end <= first);
        let stored = stored[begin..].iter().map(|(of, _)| *of).take_while(move |of| of.limits.q_begin <= last);
        let only = self.allowed.is_by_document().then(|| self.allowed.of(side, doc));
        stored.chain(only.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Mask, Slice};
    use alloc::vec;

    /// Drawn slices over three documents: whatever a position may pair with is among what is found for it, and bands
    /// are found by themselves.
    #[test]
    fn what_positions_reach_is_found() {
        let mut draw = fastrand::Rng::with_seed(9);
        let (mut found, mut skipped) = (0, 0);
        for _ in 0..300 {
            let batch = Batch::from_lengths(&[9, 1, 14]).unwrap();
            let mut at = 0;
            let mut slices = vec![];
            while at < 24 {
                let end = (at + 1 + draw.usize(..6)).min(24);
                let first = draw.usize(..24);
                slices.push(Slice::new(first..first + 1 + draw.usize(..24 - first), at..end));
                at = end;
            }
            let batch = batch.with_slices(&slices).unwrap();
            let allowed = batch.allowed([Mask::full(), Mask::window(3, 5)][draw.usize(..2)]);
            let reaches = Reaches::new(allowed.clone(), 3);
            for (side, doc) in [Side::Q, Side::K].into_iter().flat_map(|side| (0..3).map(move |doc| (side, doc))) {
                let whole = batch.whole(side, doc as usize);
                let first = whole.pos + draw.i64(..i64::from(whole.len));
                let last = draw.i64(first..=whole.last());
                let near: Vec<_> = reaches.of(side, doc, first, last).map(|of| of.part).collect();
                for of in allowed.of(side, doc) {
                    let within = of.limits.q_begin <= last && of.limits.q_end > first;
                    assert!(near.contains(&of.part) || !within, "{slices:?} {side:?} {doc} {first} {last}");
                    found += usize::from(within);
                    skipped += usize::from(!near.contains(&of.part));
                    let (q, k) = if side == Side::Q { (doc, of.document) } else { (of.document, doc) };
                    assert_eq!(reaches.part(q, k, &of.band), Some(of.part));
                    assert_eq!(reaches.part(q, k, &Band { shift: of.band.shift + 1000, ..of.band }), None);
                }
            }
        }
        assert!(found > 500 && skipped > 500, "{found} {skipped}");
    }
}
