// SPDX-License-Identifier: MIT OR Apache-2.0
//! The geometry of a kernel call: the tokens that its ranges name, and the rows that meet anything.
//!
//! Windows of consecutive queries are consecutive too, so between two runs of consecutive positions the rows that meet
//! are also runs. If a k range is a stripe, queries are checked row by row.

use alloc::{format, string::String, vec, vec::Vec};

use super::{calls::NamedTokens, execute::Prover};
use crate::{
    batch::Side,
    call::{Band, Pair, Range},
    error::Result,
    schedule::expanded::CallRanges,
};

/// Rows of a range whose positions are in `low..=high`: positions ascend, so they are one run.
pub(super) fn rows_between(r: &Range, low: i64, high: i64) -> (u32, u32) {
    let first_from = |x: i64| {
        if r.is_plain() {
            return x.saturating_sub(r.pos).clamp(0, r.len.into()) as u32;
        }
        let (mut a, mut e) = (0, r.len);
        while a < e {
            let mid = a + (e - a) / 2;
            if r.position(mid) < x { a = mid + 1 } else { e = mid }
        }
        a
    };
    if high < low {
        return (0, 0);
    }
    (first_from(low), first_from(high.saturating_add(1)))
}

/// Consecutive rows of a range with consecutive tokens; either all of them meet something, or none.
#[derive(Clone, Copy, Debug)]
pub(super) struct RangePart {
    /// The first row, in the view.
    pub row: u64,
    pub rows: u64,
    /// Token of the first row.
    pub token: u32,
    pub met: bool,
}

/// A call's geometry: the tokens its ranges claim and which of them meet.
pub(super) struct Geometry {
    pub q: NamedRows,
    pub k: NamedRows,
    pub pairs: u128,
}

/// The rows that the ranges of one side name.
#[derive(Default)]
pub(super) struct NamedRows {
    /// By range.
    pub parts: Vec<Vec<RangePart>>,
    /// In ascending order.
    pub tokens: Vec<NamedTokens>,
}

/// Rows as intervals, first and end.
type Intervals = Vec<(u32, u32)>;

/// Adds rows to a list; extends the last interval if they overlap or touch it.
fn add(list: &mut Intervals, first: u32, end: u32) {
    match list.last_mut() {
        _ if first >= end => {}
        Some(last) if last.0 <= first && first <= last.1 => last.1 = last.1.max(end),
        _ => list.push((first, end)),
    }
}

/// The intervals in order, joined where they touch.
fn in_order(mut list: Intervals) -> Intervals {
    if list.windows(2).all(|w| w[0].1 < w[1].0) {
        return list;
    }
    list.sort_unstable();
    let mut joined = Vec::with_capacity(list.len());
    list.iter().for_each(|&(first, end)| add(&mut joined, first, end));
    joined
}

/// The runs of consecutive positions of a range: first row and rows.
pub(super) fn runs(r: &Range) -> impl Iterator<Item = (u32, u32)> + use<> {
    let (len, block) = (r.len, if r.is_plain() { r.len } else { r.block });
    (0..len).step_by(block as usize).map(move |first| (first, block.min(len - first)))
}

/// Adds the rows of two ranges that meet a row of the other range within `limits`, which have no shift; returns the
/// number of allowed pairs.
fn rows_that_meet(q: &Range, k: &Range, limits: &Band, q_met: &mut Intervals, k_met: &mut Intervals) -> u128 {
    let (k_begin, k_last) = (limits.k_begin, limits.k_end.saturating_sub(1));
    let mut pairs = 0;
    for (first, rows) in runs(q) {
        let run = Range { pos: q.position(first), len: rows, ..Range::plain(0, 0, 0, 0) };
        if k.is_plain() {
            // Both are runs, so the rows that meet are runs too.
            let (a, e) = rows_between(&run, limits.q_begin, limits.q_end.saturating_sub(1));
            let (b, f) = rows_between(k, k_begin, k_last);
            if a >= e || b >= f {
                continue;
            }
            let (q, k) =
                (Range { pos: run.position(a), len: e - a, ..run }, Range { pos: k.position(b), len: f - b, ..*k });
            let (from, to) = (q.pos.saturating_add(limits.low), q.last().saturating_add(limits.high));
            let (c, d) = rows_between(&k, from, to);
            add(k_met, b + c, b + d);
            let (from, to) = (k.pos.saturating_sub(limits.high), k.last().saturating_sub(limits.low));
            let (c, d) = rows_between(&q, from, to);
            add(q_met, first + a + c, first + a + d);
            pairs += u128::from(q.area_within(
                &k,
                &Band { q_begin: i64::MIN, q_end: i64::MAX, k_begin: i64::MIN, k_end: i64::MAX, ..*limits },
            ));
            continue;
        }
        for row in first..first + rows {
            let pos = q.position(row);
            let (begin, end) = limits.keys(pos, NO_WINDOW);
            let (a, e) = rows_between(k, begin, end.saturating_sub(1));
            if a < e {
                add(q_met, row, row + 1);
                add(k_met, a, e);
                pairs += u128::from(e - a);
            }
        }
    }
    pairs
}

/// No limits of distances but those of a band.
pub(super) const NO_WINDOW: (i64, i64) = (i64::MAX, i64::MAX);

impl Prover<'_> {
    /// Checks that a range names tokens of its document; returns the document's first token minus its position.
    fn claimed(&self, side: Side, range: &Range) -> Result<i64, String> {
        let batch = self.plan.problem().batch();
        let doc = range.doc as usize;
        if doc >= batch.documents() {
            return Err(format!("{range:?} is of document {doc} of {}", batch.documents()));
        }
        let (tokens, start) = (batch.document(side, doc), batch.start(side, doc));
        let (first, last) = (range.pos, range.wide_last());
        if first < start || last >= i128::from(start) + tokens.len() as i128 {
            return Err(format!("{range:?} claims positions {first}..={last} outside its document"));
        }
        Ok(tokens.start as i64 - start)
    }

    /// The window of the problem, as bands take it.
    pub(super) fn window(&self) -> (i64, i64) {
        let mask = self.plan.problem().mask();
        (mask.left_limit(), mask.right_limit())
    }

    pub(super) fn geometry(&self, met: &CallRanges) -> Result<Geometry, String> {
        let window = self.window();
        let mut q_met: Vec<Intervals> = vec![Vec::new(); met.q.len()];
        let mut k_met: Vec<Intervals> = vec![Vec::new(); met.k.len()];
        let mut pairs = 0;
        for q in &met.q {
            self.claimed(Side::Q, &q.range)?;
            let batch = self.plan.problem().batch();
            let document = [Side::Q, Side::K].map(|side| batch.document(side, q.range.doc as usize).len() as u32);
            if q.document != document {
                return Err(format!("{q:?} is of a document of {document:?} tokens of q and k"));
            }
        }
        for k in &met.k {
            self.claimed(Side::K, k)?;
        }
        for (i, query) in met.q.iter().enumerate() {
            for &Pair { k: key, band } in met.keys(i) {
                let (q, k, band) = (&query.range, &met.k[key as usize], &met.bands[band as usize]);
                if self.reaches.part(q.doc, k.doc, band).is_none() {
                    return Err(format!(
                        "q of document {} meets k of document {} in a band of no slice: {band:?}",
                        q.doc, k.doc
                    ));
                }
                let limits = band.within(window);
                pairs += rows_that_meet(q, k, &limits, &mut q_met[i], &mut k_met[key as usize]);
            }
        }
        let q = self.named(Side::Q, met.q.iter().map(|q| &q.range), q_met)?;
        Ok(Geometry { q, k: self.named(Side::K, met.k.iter(), k_met)?, pairs })
    }

    /// The rows that ranges name, and which of them meet anything. No token may be in two ranges.
    fn named<'r>(
        &self,
        side: Side,
        ranges: impl Iterator<Item = &'r Range>,
        met: Vec<Intervals>,
    ) -> Result<NamedRows, String> {
        let mut named = NamedRows::default();
        for ((range, met), number) in ranges.zip(met).zip(0..) {
            let shift = self.claimed(side, range)?;
            let met = in_order(met);
            let mut next = met.iter().copied().peekable();
            let mut parts = Vec::new();
            for (first, rows) in runs(range) {
                let token = (shift + range.position(first)) as u32;
                named.tokens.push(NamedTokens { token, tokens: rows, range: number });
                let (mut row, end) = (first, first + rows);
                while row < end {
                    while next.next_if(|m| m.1 <= row).is_some() {}
                    let (until, met) = match next.peek() {
                        Some(m) if m.0 <= row => (m.1.min(end), true),
                        Some(m) => (m.0.min(end), false),
                        None => (end, false),
                    };
                    let (at, rows, token) = (range.row as u64 + u64::from(row), until - row, token + row - first);
                    parts.push(RangePart { row: at, rows: rows.into(), token, met });
                    row = until;
                }
            }
            named.parts.push(parts);
        }
        named.tokens.sort_unstable_by_key(|n| n.token);
        match named.tokens.windows(2).find(|w| w[0].token + w[0].tokens > w[1].token) {
            Some(w) => Err(format!("token {} of side {side:?} is in two ranges of one call", w[1].token)),
            None => Ok(named),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;

    /// Random runs and stripes, compared with counting row by row.
    #[test]
    fn rows_that_meet_are_those_that_counting_gives() {
        let mut draw = fastrand::Rng::with_seed(11);
        let (mut met, mut stripes) = (0, 0);
        for _ in 0..20_000 {
            let mut range = || {
                let (block, gap) = (draw.u32(1..4), draw.u32(0..5));
                Range { row: 0, pos: draw.i64(-4..14), len: draw.u32(1..9), block, period: block + gap, doc: 0 }
            };
            let (q, k) = (range(), range());
            let mut limit = || [None, Some(0), Some(1), Some(5)][draw.usize(..4)];
            let mask = Mask { left: limit(), right: limit() };
            let mut end = |none: i64| if draw.u32(..4) > 0 { none } else { draw.i64(-6..30) };
            let (begins, ends) = ([end(i64::MIN), end(i64::MIN)], [end(i64::MAX), end(i64::MAX)]);
            let band = Band {
                q_begin: begins[0],
                q_end: ends[0],
                k_begin: begins[1],
                k_end: ends[1],
                low: end(i64::MIN),
                high: end(i64::MAX),
                shift: draw.i64(-9..9),
            };
            let limits = band.within((mask.left_limit(), mask.right_limit()));
            let (mut q_met, mut k_met) = (Vec::new(), Vec::new());
            let pairs = rows_that_meet(&q, &k, &limits, &mut q_met, &mut k_met);
            let allows = |i: u32, j: u32| {
                let (x, y) = (q.position(i), k.position(j));
                let distance = y - x + band.shift;
                (band.q_begin..band.q_end).contains(&x)
                    && (band.k_begin..band.k_end).contains(&y)
                    && (band.low..=band.high).contains(&distance)
                    && mask.allows(0, distance)
            };
            let rows = |list: Intervals| in_order(list).into_iter().flat_map(|(a, e)| a..e).collect::<Vec<_>>();
            let wanted: Vec<u32> = (0..q.len).filter(|&i| (0..k.len).any(|j| allows(i, j))).collect();
            assert_eq!(rows(q_met), wanted, "{q:?} {k:?} {mask:?}");
            let wanted: Vec<u32> = (0..k.len).filter(|&j| (0..q.len).any(|i| allows(i, j))).collect();
            assert_eq!(rows(k_met), wanted, "{q:?} {k:?} {mask:?}");
            let wanted = (0..q.len).map(|i| (0..k.len).filter(|&j| allows(i, j)).count() as u128).sum::<u128>();
            assert_eq!(pairs, wanted, "{q:?} {k:?} {mask:?}");
            met += u128::from(pairs > 0);
            stripes += u32::from(pairs > 0 && !k.is_plain() && !q.is_plain());
        }
        assert!(met > 5_000 && stripes > 1_000, "{met} {stripes}");
    }
}
