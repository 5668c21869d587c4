// SPDX-License-Identifier: MIT OR Apache-2.0
//! The slices of a batch, cut at documents, and the pairs that they allow.
//!
//! Layouts cut documents, and ranges of rows have positions in their document. So planning sees a slice as its *parts*:
//! one for each document of q and document of k that it touches, with a [`Band`] in the positions of these documents. A
//! batch without slices has one part for each document, with a band without limits, which is not stored.
//!
//! [`Allowed`] adds the window of the problem. All of planning asks it which documents and positions a token attends
//! to; no other module looks at slices or masks.

use alloc::{format, sync::Arc, vec, vec::Vec};
use core::ops::Range;

use super::{Slice, disjoint::check_disjoint};
use crate::{
    call::{self, Band},
    error::{Error, Result},
    mask::Mask,
    side::Side,
};

/// The most parts of a batch: each takes some 70 bytes, and planning looks at all of them.
const MOST: usize = 1 << 24;

/// Positions of a slice's first query are within ± this.
const FAR: u64 = 1 << 40;

/// What a slice allows between a document of q and a document of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SlicePart {
    /// The document of q and that of k.
    documents: [u32; 2],
    band: Band,
}

/// The documents of a batch.
pub(crate) struct DocumentEnds<'a> {
    /// `cu_seqlens` of q and of k.
    pub cu_seqlens: [&'a [i32]; 2],
    /// The position of a document's first q token.
    pub q_start: &'a dyn Fn(usize) -> i64,
}

impl DocumentEnds<'_> {
    fn count(&self) -> usize {
        self.cu_seqlens[0].len() - 1
    }

    fn tokens(&self, side: Side) -> i32 {
        self.cu_seqlens[side as usize].last().copied().unwrap_or(0)
    }

    /// The first token of a document, and one past the last.
    fn ends(&self, side: Side, d: usize) -> [i64; 2] {
        [d, d + 1].map(|d| i64::from(self.cu_seqlens[side as usize][d]))
    }

    /// The documents that tokens `begin..end` touch, without empty ones.
    fn touched(&self, side: Side, begin: i32, end: i32) -> impl Iterator<Item = usize> + '_ {
        let of = |token: i32| self.cu_seqlens[side as usize].partition_point(|&c| c <= token) - 1;
        (of(begin)..=of(end - 1)).filter(move |&d| self.ends(side, d)[0] < self.ends(side, d)[1])
    }
}

/// All parts of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Parts {
    /// As given.
    slices: Vec<Slice>,
    /// By document of q, then document of k, then in the order of the slices.
    list: Vec<SlicePart>,
    /// For each document of q its first part; and the end.
    of_q: Vec<u32>,
    /// The parts by document of k, then as in `list`.
    by_k: Vec<u32>,
    /// For each document of k its first entry of `by_k`; and the end.
    of_k: Vec<u32>,
    /// The least and the largest distance, if each document attends to itself alone, all within the same distances.
    of_documents: Option<(i64, i64)>,
}

impl Parts {
    /// Checks slices and cuts them at documents.
    pub(crate) fn new(documents: &DocumentEnds, slices: &[Slice]) -> Result<Self> {
        slices.iter().enumerate().try_for_each(|(i, s)| check(documents, i, s))?;
        check_disjoint(slices)?;
        let mut list = Vec::new();
        for (i, s) in slices.iter().enumerate().filter(|(_, s)| s.delta().is_some()) {
            for a in documents.touched(Side::Q, s.q_begin, s.q_end) {
                for b in documents.touched(Side::K, s.k_begin, s.k_end) {
                    if list.len() == MOST {
                        let found = format!("one of slices that are {MOST} parts or more in all");
                        let expected =
                            "slices that touch fewer documents each: a part is a document of q with one of k";
                        return Err(Error::invalid(format!("slices[{i}]"), found, expected));
                    }
                    list.push(SlicePart { documents: [a as u32, b as u32], band: s.band_between(documents, a, b) });
                }
            }
        }
        list.sort_by_key(|part| part.documents);
        let mut by_k: Vec<u32> = (0..list.len() as u32).collect();
        by_k.sort_by_key(|&i| list[i as usize].documents[1]);
        let firsts = |n: usize, document: &dyn Fn(usize) -> u32| {
            let mut firsts = vec![0u32; n + 1];
            (0..list.len()).for_each(|i| firsts[document(i) as usize + 1] += 1);
            (0..n).for_each(|d| firsts[d + 1] += firsts[d]);
            firsts
        };
        let of_q = firsts(documents.count(), &|i| list[i].documents[0]);
        let of_k = firsts(documents.count(), &|i| list[i].documents[1]);
        let of_documents = common_band(documents, &list);
        Ok(Self { slices: slices.into(), list, of_q, by_k, of_k, of_documents })
    }

    /// The slices as given.
    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// The parts of a document, as places for [`Parts::number`].
    fn of(&self, side: Side, doc: u32) -> Range<usize> {
        let firsts = if side == Side::Q { &self.of_q } else { &self.of_k };
        firsts[doc as usize] as usize..firsts[doc as usize + 1] as usize
    }

    /// The number of the part at a place.
    fn number(&self, side: Side, place: usize) -> u32 {
        match side {
            Side::Q => place as u32,
            Side::K => self.by_k[place],
        }
    }
}

/// The limits that all parts have in common, if they are the documents, each with itself and whole.
fn common_band(documents: &DocumentEnds, list: &[SlicePart]) -> Option<(i64, i64)> {
    let Band { low, high, .. } = list.first()?.band;
    let whole = Band { low, high, ..Band::WHOLE };
    let filled = (0..documents.count() as u32).filter(|&d| {
        let [begin, end] = documents.ends(Side::Q, d as usize);
        begin < end
    });
    let alike = list.iter().all(|part| part.documents[0] == part.documents[1] && part.band == whole);
    (alike && list.iter().map(|part| part.documents[0]).eq(filled)).then_some((low, high))
}

/// Tokens within the batch, a position that arithmetic can hold.
fn check(documents: &DocumentEnds, i: usize, s: &Slice) -> Result<()> {
    for (name, side, begin, end) in [("q", Side::Q, s.q_begin, s.q_end), ("k", Side::K, s.k_begin, s.k_end)] {
        let tokens = documents.tokens(side);
        if begin < 0 || begin > end {
            return Err(Error::invalid(format!("slices[{i}].{name}_begin"), begin, format!("0 to {name}_end = {end}")));
        }
        if end > tokens {
            let expected = format!("at most {tokens}, the tokens of {name}");
            return Err(Error::invalid(format!("slices[{i}].{name}_end"), end, expected));
        }
    }
    if s.q_start.unsigned_abs() > FAR {
        return Err(Error::invalid(format!("slices[{i}].q_start"), s.q_start, "a position within ±2^40"));
    }
    Ok(())
}

impl Slice {
    /// What is added to `k − q`, of tokens of the pack, for the distance of their positions.
    fn offset(&self) -> i64 {
        i64::from(self.q_begin) - i64::from(self.k_begin) - self.q_start
    }

    /// The least and the largest `k − q`, of tokens of the pack, of a pair of the slice; `None` if it has no pair.
    pub(super) fn delta(&self) -> Option<(i64, i64)> {
        let [qb, qe, kb, ke] = [self.q_begin, self.q_end, self.k_begin, self.k_end].map(i64::from);
        let low = (kb - (qe - 1)).max(self.low.saturating_sub(self.offset()));
        let high = (ke - 1 - qb).min(self.high.saturating_sub(self.offset()));
        (qb < qe && kb < ke && low <= high && self.low < i64::MAX && self.high > i64::MIN).then_some((low, high))
    }

    /// The part of the slice in document `a` of q and `b` of k, in positions of these documents.
    fn band_between(&self, documents: &DocumentEnds, a: usize, b: usize) -> Band {
        let ([q_first, q_last], [k_first, k_last]) = (documents.ends(Side::Q, a), documents.ends(Side::K, b));
        let start = (documents.q_start)(a);
        let position = |token: i64| token - q_first + start;
        let (begin, end) = (i64::from(self.q_begin), i64::from(self.q_end));
        let (k_begin, k_end) = (i64::from(self.k_begin), i64::from(self.k_end));
        let mut band = Band {
            q_begin: position(begin.max(q_first)),
            q_end: position(end.min(q_last)),
            k_begin: k_begin.max(k_first) - k_first,
            k_end: k_end.min(k_last) - k_first,
            low: self.low,
            high: self.high,
            shift: k_first + self.offset() - (q_first - start),
        };
        // Ends that are those of the document limit nothing, so that a slice that is a document is one without limits.
        if a == b {
            let open = |limited: bool, limit: i64, none: i64| if limited { limit } else { none };
            band.q_begin = open(begin > q_first, band.q_begin, i64::MIN);
            band.q_end = open(end < q_last, band.q_end, i64::MAX);
            band.k_begin = open(k_begin > k_first, band.k_begin, i64::MIN);
            band.k_end = open(k_end < k_last, band.k_end, i64::MAX);
        }
        band
    }
}

/// The pairs that a problem allows: the parts of its batch within its window.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Allowed {
    parts: Option<Arc<Parts>>,
    mask: Mask,
}

/// What a document attends to in another one, seen from one side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    /// The other side's document.
    pub document: u32,
    /// The number of the part: parts of one pair of documents ascend in the order of the slices. 0 without slices.
    pub part: u32,
    /// The band with the window folded in, and without a shift. The side that it is seen from has the place of q.
    pub limits: Band,
    /// The band as kernels take it.
    pub band: Band,
}

impl From<Mask> for Allowed {
    /// DocumentEnds under a mask.
    fn from(mask: Mask) -> Self {
        Self { parts: None, mask }
    }
}

impl Allowed {
    /// The pairs of a batch with these slices, if it has any, under a mask.
    pub(crate) fn new(parts: Option<Arc<Parts>>, mask: Mask) -> Self {
        Self { parts, mask }
    }

    /// Whether slices, if there are any, are of a batch of so many documents.
    pub(crate) fn is_of(&self, documents: usize) -> bool {
        self.parts.as_ref().is_none_or(|parts| parts.of_q.len() == documents + 1)
    }

    /// Whether each document attends to itself and nothing else. Then figures of documents need no look at slices.
    pub(crate) fn is_by_document(&self) -> bool {
        self.parts.is_none()
    }

    /// The mask of every document, if each attends to itself and nothing else, within one mask: then documents, given
    /// as slices or not, can be counted by their lengths.
    pub(crate) fn mask_of_documents(&self) -> Option<Mask> {
        let Some(parts) = &self.parts else {
            return Some(self.mask);
        };
        let (low, high) = parts.of_documents?;
        let limit = |distance: i64, window: Option<u32>| match distance {
            i64::MAX => Some(window),
            _ => u32::try_from(distance).ok().map(|limit| Some(window.map_or(limit, |window| window.min(limit)))),
        };
        let left = low.checked_neg().unwrap_or(i64::MAX);
        Some(Mask { left: limit(left, self.mask.left)?, right: limit(high, self.mask.right)? })
    }

    /// The band of a part, as kernels take it.
    pub(crate) fn band(&self, part: u32) -> Band {
        self.parts.as_ref().map_or(Band::WHOLE, |parts| parts.list[part as usize].band)
    }

    /// What a document of `side` attends to, or is attended by: in ascending order of the other documents.
    pub(crate) fn of(&self, side: Side, doc: u32) -> impl Iterator<Item = Reach> + Clone + '_ {
        self.places(side, doc).map(move |place| self.at(side, doc, place))
    }

    /// As [`Allowed::of`], for some rows of a document: without parts that none of their positions are in.
    pub(crate) fn of_rows(&self, side: Side, rows: &call::Range) -> impl Iterator<Item = Reach> + Clone + '_ {
        let doc = rows.doc;
        // Without slices there is one part, of all positions.
        let (first, last) = if self.parts.is_some() { (rows.pos, rows.last()) } else { (0, 0) };
        let within = move |place: &usize| {
            self.parts.as_deref().is_none_or(|parts| {
                let Band { q_begin, q_end, k_begin, k_end, .. } = parts.list[parts.number(side, *place) as usize].band;
                let (begin, end) = if side == Side::Q { (q_begin, q_end) } else { (k_begin, k_end) };
                begin <= last && first < end
            })
        };
        self.places(side, doc).filter(within).map(move |place| self.at(side, doc, place))
    }

    /// The places of a document's parts.
    fn places(&self, side: Side, doc: u32) -> Range<usize> {
        self.parts.as_deref().map_or(0..1, |parts| parts.of(side, doc))
    }

    /// The part at a place of a document.
    #[inline]
    fn at(&self, side: Side, doc: u32, place: usize) -> Reach {
        let (document, part, band) = match self.parts.as_deref() {
            None => (doc, 0, Band::WHOLE),
            Some(parts) => {
                let number = parts.number(side, place);
                let part = &parts.list[number as usize];
                (part.documents[usize::from(side == Side::Q)], number, part.band)
            }
        };
        let seen = band.within((self.mask.left_limit(), self.mask.right_limit()));
        Reach { document, part, band, limits: if side == Side::Q { seen } else { seen.transposed() } }
    }
}
