// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which documents of a call run on matrix units, and which on vectors.
//!
//! For types that need several parts per number (`forms.rs`), tiles are faster in long documents only. For types of one
//! part, the backward is faster on tiles except in documents of a few rows. A pack may have documents of both kinds, so
//! the choice is made for each document. Documents share no row that is written. The units of a call are therefore two
//! lists, one on tiles and one on vectors; a worker begins the second list when the first is empty.
//!
//! The rule depends on the document alone, so that forward and backward of f32 make the same choice: on its length, if
//! the caller has given it ([`QRange::document`]), or else on the ranges of the document in the call.

use super::attention::bands::crosses;
use super::isa::Isa;
use crate::call::{Attend, AttendBackward, Gradients, QRange, Ranges, Score};

/// Rows of a document in q, times the heads of a group, from which tiles of several parts are used: they then fill
/// panels.
const FILLED: u64 = 96;
/// Keys that a row may see, times the heads of a group, from which tiles of several parts are faster than vectors: the
/// masked part of tiles of a causal document is then small enough.
const LONG: u64 = 512;
/// Rows of a q range below which the backward is faster on vectors, also for types of one part.
const FEW: u128 = 24;

/// A subset of a call's documents, and the instruction set that it runs on: one with tiles only if it is on tiles.
#[derive(Clone, Copy)]
pub(super) struct Documents<'a> {
    pub isa: Isa,
    /// The documents for which the rule has this result; without a rule, all documents.
    rule: Option<(Rule<'a>, bool)>,
    /// The last document that was looked up, and the result.
    last: Option<(u32, bool)>,
}

/// The documents of a call on tiles, if there are any, and those on vectors.
pub(super) struct EngineChoice<'a> {
    pub tiles: Option<Documents<'a>>,
    pub vectors: Option<Documents<'a>>,
}

/// The rule that decides whether a document runs on tiles.
#[derive(Clone, Copy)]
struct Rule<'a> {
    ranges: Ranges<'a>,
    by: By,
    /// One decision for all documents, if the ranges of a document need not be contiguous (then no lengths are given),
    /// or if q ranges read keys of other documents: then a row of dk has a sum over rows of several documents.
    together: Option<bool>,
}

#[derive(Clone, Copy)]
enum By {
    /// For tiles of several parts: by the lengths of the document.
    Lengths { score: Score, group: u32 },
    /// For tiles of one part, in the backward: by the rows of its ranges.
    Rows,
}

impl<'a> EngineChoice<'a> {
    /// The documents of a forward call on `isa`.
    pub(super) fn forward(call: &Attend<'a>, isa: Isa) -> Self {
        // Dropout is written for vectors.
        if !isa.has_tiles(call.q.dtype) || call.dropout.is_some() {
            return Self::vectors(isa);
        }
        if isa.has_tiles_of(call.q.dtype) {
            return Self { tiles: Some(Documents::all(isa)), vectors: None };
        }
        // The backward of an aligned call has no tiles. The scores of a document must have the same bits in forward and
        // backward, since lse contains the forward's rounding errors. For types of one part the rounding of p is larger
        // than these, and forward and backward may choose differently.
        if call.aligned {
            return Self::vectors(isa);
        }
        Self::by(call.ranges, By::Lengths { score: call.score, group: call.heads.group }, isa)
    }

    /// The documents of a backward call.
    pub(super) fn backward(call: &AttendBackward<'a>, isa: Isa) -> Self {
        let tiled = call.gradients != Gradients::Queries && !call.aligned;
        if !tiled || !isa.has_tiles(call.q.dtype) || call.dropout.is_some() {
            return Self::vectors(isa);
        }
        let by = match isa.has_tiles_of(call.q.dtype) {
            true => By::Rows,
            false => By::Lengths { score: call.score, group: call.heads.group },
        };
        Self::by(call.ranges, by, isa)
    }

    /// All documents of a call, without tiles.
    pub(super) fn vectors(isa: Isa) -> Self {
        Self { tiles: None, vectors: Some(Documents::all(isa.vectors())) }
    }

    /// The documents chosen by a rule; the rule is dropped if it gives the same result for all documents.
    fn by(ranges: Ranges<'a>, by: By, isa: Isa) -> Self {
        let mut rule = Rule { ranges, by, together: None };
        if !ranges.q.is_sorted_by_key(|q| q.range.doc) || crosses(&ranges) {
            rule.together = Some(rule.decides(ranges.q));
        }
        let some = |isa, tiles| Documents { isa, rule: Some((rule, tiles)), last: None };
        let (mut on_tiles, vectors) = (some(isa, true), some(isa.vectors(), false));
        let mut docs = ranges.q.iter().map(|q| on_tiles.has(q.range.doc));
        let first = docs.next().unwrap_or(false);
        match (docs.all(|tiles| tiles == first), first) {
            (true, false) => Self::vectors(isa),
            (true, true) => Self { tiles: Some(Documents::all(isa)), vectors: None },
            (false, _) => Self { tiles: Some(on_tiles), vectors: Some(vectors) },
        }
    }

    /// The two subsets, if not empty, in the order in which workers take their units.
    pub(super) fn each(&self) -> impl Iterator<Item = Documents<'a>> {
        [self.tiles, self.vectors].into_iter().flatten()
    }
}

impl Documents<'_> {
    /// All documents of a call.
    pub(super) fn all(isa: Isa) -> Self {
        Self { isa, rule: None, last: None }
    }

    /// Whether `doc` is in the subset.
    pub(super) fn has(&mut self, doc: u32) -> bool {
        let Some((rule, tiles)) = &self.rule else { return true };
        match self.last {
            Some((last, has)) if last == doc => has,
            _ => {
                let has = rule.tiles(doc) == *tiles;
                self.last = Some((doc, has));
                has
            }
        }
    }
}

impl Rule<'_> {
    fn tiles(&self, doc: u32) -> bool {
        if let Some(together) = self.together {
            return together;
        }
        self.decides(QRange::of_document(self.ranges.q, doc))
    }

    /// The decision for these q ranges.
    fn decides(&self, q: &[QRange]) -> bool {
        match self.by {
            By::Lengths { score, group } => {
                // Given lengths are those of other calls for the same rows too; one long document takes all along.
                if q.iter().any(|q| q.document != [0; 2]) {
                    let pays = |q: &QRange| tiles_pay(core::iter::once(q.document.map(u64::from)), &score, group);
                    return q.iter().any(pays);
                }
                let seen = |q: &QRange| {
                    let pairs = self.ranges.pairs_of(q);
                    pairs.iter().map(|pair| u64::from(self.ranges.k[pair.k as usize].len)).sum()
                };
                tiles_pay(q.iter().map(|q| [u64::from(q.range.len), seen(q)]), &score, group)
            }
            By::Rows => {
                let lengths = || q.iter().map(|q| u128::from(q.range.len));
                lengths().map(|len| len * len).sum::<u128>() >= FEW * lengths().sum::<u128>()
            }
        }
    }
}

/// Whether tiles of several parts are faster than vectors for a document of this many rows of q and k, with `group` q
/// heads per kv head. Counts the keys that `score` allows a row, as the mean over the rows of q.
fn tiles_pay(lengths: impl Iterator<Item = [u64; 2]>, score: &Score, group: u32) -> bool {
    let (mut rows, mut q_len, mut k_len) = (0, 0, 0);
    let window = score.window_left.saturating_add(score.window_right).saturating_add(1).max(0) as u64;
    let lengths = lengths.map(|[q, k]| [q, k.min(window)]);
    for [q, k] in lengths.map(|lengths| lengths.map(u128::from)) {
        (rows, q_len, k_len) = (rows + q, q_len + q * q, k_len + q * k);
    }
    let least = |mean: u64| rows * u128::from(mean.div_ceil(group.max(1).into()));
    rows > 0 && q_len >= least(FILLED) && k_len >= least(LONG)
}

impl QRange {
    /// The ranges of a document; `q` is in the order of documents.
    pub(super) fn of_document(q: &[Self], doc: u32) -> &[Self] {
        let q = &q[q.partition_point(|r| r.range.doc < doc)..];
        // Most documents have few ranges: a binary search for the end would take as long as the one above.
        &q[..q.iter().take_while(|r| r.range.doc == doc).count()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Dtype;
    use crate::kernel::cpu::attention::shapes::calls;
    use alloc::vec::Vec;

    /// The documents on tiles and those on vectors, forward and backward, for documents of these numbers of tokens.
    fn chosen(lengths: &[(u32, u32)], dtype: Dtype, aligned: bool, documents: &[[u32; 2]]) -> [[Vec<u32>; 2]; 2] {
        let list = |of: Option<Documents>| {
            let mut of = of.map_or(Vec::new(), |of| Vec::from([of]));
            of.iter_mut().flat_map(|of| lengths.iter().map(|x| x.0).filter(|&doc| of.has(doc))).collect()
        };
        calls(lengths, (dtype, 2, 1), (i64::MAX, 0), aligned, |forward, backward| {
            let given = |q: &QRange| documents.get(q.range.doc as usize).copied().unwrap_or_default();
            let q: Vec<_> = forward.ranges.q.iter().map(|q| QRange { document: given(q), ..*q }).collect();
            let ranges = Ranges { q: &q, ..forward.ranges };
            let (forward, backward) = (Attend { ranges, ..*forward }, AttendBackward { ranges, ..*backward });
            [EngineChoice::forward(&forward, Isa::Amx), EngineChoice::backward(&backward, Isa::Amx)]
                .map(|choice| [list(choice.tiles), list(choice.vectors)])
        })
    }

    #[test]
    fn each_document_by_itself() {
        let (a, b) = (&[0u32, 2][..], &[1u32, 3][..]);
        // f32: a row of a group of two needs 256 keys, and 48 rows. Forward and backward agree.
        let lengths = [(0, 300), (1, 255), (2, 256), (3, 2)];
        assert_eq!(chosen(&lengths, Dtype::F32, false, &[]), [[a, b], [a, b]]);
        let none: &[u32] = &[];
        assert_eq!(chosen(&lengths, Dtype::F32, true, &[]), [[none, &[0, 1, 2, 3]], [none, &[0, 1, 2, 3]]]);
        // bf16: all on tiles forward, those of 24 rows and more backward.
        let lengths = [(0, 24), (1, 23), (2, 500), (3, 1)];
        assert_eq!(chosen(&lengths, Dtype::Bf16, false, &[]), [[&[0, 1, 2, 3], none], [a, b]]);
        assert_eq!(chosen(&lengths, Dtype::F64, false, &[]), [[none, &[0, 1, 2, 3]], [none, &[0, 1, 2, 3]]]);
    }

    /// Given lengths decide, otherwise the ranges; the ranges of a document count together.
    #[test]
    fn lengths_of_documents_and_ranges() {
        let lengths = [(0, 10), (0, 10), (1, 900), (2, 900), (3, 10)];
        let expected = [[0, 0, 2].as_slice(), &[1, 3]];
        // A group of two needs 256 keys and 48 rows.
        assert_eq!(chosen(&lengths, Dtype::F32, false, &[[48, 256], [900, 255]]), [expected, expected]);
        assert_eq!(chosen(&lengths, Dtype::F32, false, &[[48, 256], [47, 900]]), [expected, expected]);
        // 30 rows in two ranges of 10 and 20: 17 on average.
        let lengths = [(0, 10), (0, 20), (1, 20), (1, 30)];
        assert_eq!(chosen(&lengths, Dtype::Bf16, false, &[])[1], [[1, 1].as_slice(), &[0, 0]]);
    }

    /// If the ranges of a document are not adjacent, there is one decision for all documents.
    #[test]
    fn out_of_order() {
        let lengths = [(1, 900), (0, 10), (1, 10)];
        let expected = [[1, 0, 1].as_slice(), &[]];
        assert_eq!(chosen(&lengths, Dtype::F32, false, &[]), [expected, expected]);
    }
}
