// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mask area between two ranges, and the keys that a share needs, counted without listing tokens.
//!
//! The cost of a plan is needed before it runs, and must be cheap to compute, so nothing here loops over tokens. The
//! number of keys that a query reads is a piecewise linear function of its position with at most four breakpoints;
//! between two breakpoints, the sum over consecutive or striped queries has a closed form. If both ranges are striped
//! alike, the same holds for the pairs of a block as a function of its number. Only for stripes of different periods
//! the code loops over the blocks of one of them.

use alloc::vec::Vec;

use super::CirculatingSide;
use crate::{
    batch::{Batch, Side},
    call::{Band, Range},
    layout::{Segment, Shares},
    mask::Mask,
    slice::parts::{Allowed, Reach},
};

impl Range {
    /// The number of allowed (q, k) pairs of this range of q rows with a range of k rows of the same document.
    ///
    /// Closed form if either range has consecutive positions, or both have the same period; otherwise one step for each
    /// block of the range with fewer blocks. `doc` is not compared.
    ///
    /// ```
    /// use cpattn::{Mask, call::Range};
    /// let q = Range::plain(0, 4, 4, 0); // positions 4..8
    /// let k = Range::plain(0, 8, 0, 0); // positions 0..8
    /// assert_eq!(q.area(&k, Mask::causal()), 5 + 6 + 7 + 8);
    /// // Every other token of the eight: positions 0, 2, 4, 6.
    /// let striped = Range { row: 0, pos: 0, len: 4, block: 1, period: 2, doc: 0 };
    /// assert_eq!(striped.area(&k, Mask::causal()), 1 + 3 + 5 + 7);
    /// ```
    pub fn area(&self, k: &Self, mask: Mask) -> u64 {
        let q = self;
        if q.len == 0 || k.len == 0 {
            return 0;
        }
        match (q.is_plain(), k.is_plain()) {
            (_, true) => stripe_area(q, k, mask),
            (true, false) => stripe_area(k, q, mask.transposed()),
            (false, false) if q.len / q.block <= k.len / k.block => {
                both_striped(q, k, mask, |b| stripe_area(k, b, mask.transposed()))
            }
            (false, false) => both_striped(k, q, mask.transposed(), |b| stripe_area(q, b, mask)),
        }
    }

    /// The (q, k) pairs of this range of q rows with a range of k rows of the same document that lie on an edge of the
    /// mask. For each side that the mask limits this is the last key that a q row sees on that side, if the k range has
    /// that key.
    ///
    /// Kernels compute all or nearly all pairs of a tile that an edge crosses, so the cost of edges grows with these
    /// pairs.
    ///
    /// ```
    /// use cpattn::{Mask, call::Range};
    /// let (q, k) = (Range::plain(0, 4, 4, 0), Range::plain(0, 8, 0, 0)); // positions 4..8 and 0..8
    /// assert_eq!(q.edges(&k, Mask::full()), 0);
    /// assert_eq!(q.edges(&k, Mask::causal()), 4);
    /// // The left edge of the first row is before the keys.
    /// assert_eq!(q.edges(&k, Mask::window(5, 0)), 4 + 3);
    /// ```
    pub fn edges(&self, k: &Self, mask: Mask) -> u64 {
        let shifts = [mask.right.map(i64::from), mask.left.map(|left| -i64::from(left))];
        let on_edge = |shift| Self { pos: self.pos.saturating_add(shift), ..*self }.area(k, Mask::window(0, 0));
        shifts.into_iter().flatten().map(on_edge).sum()
    }
}

impl Range {
    /// Calls `each` with the rows of this range and of `k` that are inside the limits' positions, as pairs of ranges.
    fn for_each_inside(&self, k: &Self, limits: &Band, mut each: impl FnMut(&Self, &Self)) {
        let rows = self.rows_at(limits.q_begin, limits.q_end.saturating_sub(1));
        let keys = k.rows_at(limits.k_begin, limits.k_end.saturating_sub(1));
        if rows.len() == self.len as usize && keys.len() == k.len as usize {
            return each(self, k);
        }
        self.split(rows.start, rows.end, |_, q| k.split(keys.start, keys.end, |_, k| each(&q, &k)));
    }

    /// The number of (q, k) pairs of this range of q rows with a range of k rows that `limits` allow, which have no
    /// shift.
    pub(crate) fn area_within(&self, k: &Self, limits: &Band) -> u64 {
        let mut pairs = 0;
        self.for_each_inside(k, limits, |q, k| pairs += q.area_between(k, limits.low, limits.high));
        pairs
    }

    /// The pairs with `low ≤ k_pos − q_pos ≤ high`.
    fn area_between(&self, k: &Self, low: i64, high: i64) -> u64 {
        if self.len == 0 || k.len == 0 {
            return 0;
        }
        let (least, most) = (k.pos - self.last(), k.last() - self.pos);
        if low > most || high < least {
            return 0;
        }
        // A mask has its limits on both sides of the query, so the queries are moved to one limit.
        let moved = |by: i64| Self { pos: self.pos.saturating_add(by), ..*self };
        match (low <= least, high >= most) {
            (true, true) => u64::from(self.len) * u64::from(k.len),
            (true, false) => moved(high).area(k, Mask::causal()),
            (false, true) => moved(low).area(k, Mask { left: Some(0), right: None }),
            (false, false) if low > high => 0,
            (false, false) => {
                moved(high).area(k, Mask { left: u32::try_from(high.abs_diff(low)).ok(), right: Some(0) })
            }
        }
    }

    /// As [`Range::edges`], for the limits of distances.
    pub(crate) fn edges_within(&self, k: &Self, limits: &Band) -> u64 {
        let mut pairs = 0;
        self.for_each_inside(k, limits, |q, k| {
            if q.len == 0 || k.len == 0 {
                return;
            }
            // Without the edges that are out of reach, at whatever distance.
            let (least, most) = (k.pos - q.last(), k.last() - q.pos);
            for limit in [limits.low, limits.high].into_iter().filter(|limit| (least..=most).contains(limit)) {
                pairs += Self { pos: q.pos.saturating_add(limit), ..*q }.area(k, Mask::window(0, 0));
            }
        });
        pairs
    }
}

/// The blocks of a stripe as plain runs.
fn blocks(r: &Range) -> impl Iterator<Item = Range> + '_ {
    blocks_from(r, 0)
}

/// As [`blocks`], from the block that holds row `first` on.
fn blocks_from(r: &Range, first: u32) -> impl Iterator<Item = Range> + '_ {
    (first - first % r.block..r.len).step_by(r.block as usize).map(|i| Range {
        row: r.row + i64::from(i),
        pos: r.position(i),
        len: r.block.min(r.len - i),
        block: 1,
        period: 1,
        doc: r.doc,
    })
}

/// Σ of `pairs` over the blocks of `r`: its pairs with `other`, where a row of `r` at x meets positions from x − left
/// to x + right of `mask`.
fn both_striped(r: &Range, other: &Range, mask: Mask, pairs: impl Fn(&Range) -> u64) -> u64 {
    // A few blocks are sooner counted than cut into pieces.
    if r.period != other.period || r.len / r.block < 40 {
        return blocks(r).map(|b| pairs(&b)).sum();
    }
    let (left, right) = (mask.left_limit(), mask.right_limit());
    // The blocks with a row that has an end of `other` at one of its limits.
    let at = |x: i64| x.saturating_sub(r.pos).div_euclid(i64::from(r.period));
    let bends = [other.pos, other.last()].map(|end| [at(end.saturating_sub(right)), at(end.saturating_add(left))]);
    let block = |i: u32| blocks_from(r, i * r.block).next().map_or(0, |b| pairs(&b));
    piecewise_linear_sum(r.len.div_ceil(r.block), bends.as_flattened(), block)
}

/// f(0) + … + f(n − 1), where f is linear except within two steps of a bend, and at n − 1.
fn piecewise_linear_sum(n: u32, bends: &[i64], f: impl Fn(u32) -> u64) -> u64 {
    let last = n.saturating_sub(1);
    let mut cuts: Vec<u32> = bends
        .iter()
        .flat_map(|bend| [bend.saturating_sub(2), bend.saturating_add(3)])
        .map(|cut| cut.clamp(0, i64::from(last)) as u32)
        .chain([0, last])
        .collect();
    cuts.sort_unstable();
    let bent = |i: u32| bends.iter().any(|bend| bend.saturating_sub(i64::from(i)).unsigned_abs() <= 2);
    let pieces = cuts.windows(2).map(|cut| match cut[1] - cut[0] {
        0 => 0,
        few @ 1..=2 => (0..few).map(|i| f(cut[0] + i)).sum(),
        _ if bent(cut[0]) => (cut[0]..cut[1]).map(&f).sum(),
        many => u64::from(many) * (f(cut[0]) + f(cut[1] - 1)) / 2,
    });
    pieces.sum::<u64>() + if n > 0 { f(last) } else { 0 }
}

/// Queries in any stripe against a plain run of keys.
fn stripe_area(q: &Range, k: &Range, mask: Mask) -> u64 {
    let n = i64::from(k.len);
    // Positions counted from the first key: the mask only depends on differences.
    let shift = k.pos;
    if q.is_plain() {
        return mask.area(q.pos - shift, q.pos - shift + i64::from(q.len), n) as u64;
    }
    // Number of keys of a query at x: min(x + right, n − 1) − max(x − left, 0) + 1. Its breakpoints, begin and end:
    let (left, right) = (mask.left_limit(), mask.right_limit());
    let begin = 0i64.saturating_sub(right);
    let end = n.saturating_add(left);
    let mut bends = [begin, (n - 1).saturating_sub(right).max(begin), left.min(end), end];
    bends.sort_unstable();
    let mut total = 0i64;
    for piece in bends.windows(2) {
        let (i0, i1) = (q.rows_before(piece[0].saturating_add(shift)), q.rows_before(piece[1].saturating_add(shift)));
        if i0 >= i1 {
            continue;
        }
        let rows = i64::from(i1 - i0);
        let x = position_sum(q, i1) - position_sum(q, i0) - rows * shift;
        let first = q.position(i0) - shift;
        let high = if first.saturating_add(right) < n - 1 { x + rows * right } else { rows * (n - 1) };
        let low = if first >= left { x - rows * left } else { 0 };
        total += high - low + rows;
    }
    total as u64
}

/// Σ of the positions of the first `i` rows.
fn position_sum(r: &Range, i: u32) -> i64 {
    let (i, block, period) = (i64::from(i), i64::from(r.block), i64::from(r.period));
    let (whole, rest) = (i / block, i % block);
    let triangle = |n: i64| n * (n - 1) / 2;
    i * r.pos + triangle(whole) * period * block + whole * triangle(block) + rest * whole * period + triangle(rest)
}

/// Work and traffic of one ring rank under a layout, in pairs and tokens (not multiplied by heads or bytes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Allowed (q, k) pairs of its q tokens.
    pub area: u64,
    /// q tokens.
    pub q_tokens: u64,
    /// k tokens.
    pub k_tokens: u64,
    /// k tokens of other ranks that its q tokens need, each of which is received once in the forward; or q tokens, if q
    /// is sent ([`load`]).
    pub needed: u64,
}

/// The load of ring rank `r` if one side is sent round the ring. If that is q's side, the pairs are those of the rank's
/// k tokens, and `needed` are the q tokens of other ranks that read its k tokens.
///
/// `lists` has no contents; callers keep it for the next rank.
pub(super) fn load(
    shares: &Shares,
    allowed: &Allowed,
    r: usize,
    sent: CirculatingSide,
    lists: &mut [Vec<Segment>; 2],
) -> Load {
    let [q, k] = lists;
    shares.segments(Side::Q, r, q);
    shares.segments(Side::K, r, k);
    let [q_tokens, k_tokens] = [&*q, &*k].map(|list| list.iter().map(|s| u64::from(s.range.len)).sum());
    let (area, needed) = match sent {
        CirculatingSide::Keys => met(q, k, shares.batch(), allowed, Side::Q),
        CirculatingSide::Queries => met(k, q, shares.batch(), allowed, Side::K),
    };
    Load { area, q_tokens, k_tokens, needed }
}

/// The pairs of the segments of one `side` with the other side, and the number of tokens of that side that they meet,
/// without those in `held`, whose documents ascend.
fn met(mine: &[Segment], held: &[Segment], batch: &Batch, allowed: &Allowed, side: Side) -> (u64, u64) {
    let mut pairs = 0;
    // Positions of the other side that are met: document, first and end. They ascend if there are no slices.
    let mut spans: Vec<(u32, i64, i64)> = Vec::new();
    for s in mine.iter().map(|s| &s.range) {
        for Reach { document, limits, .. } in allowed.of_rows(side, s) {
            let whole = batch.whole(side.other(), document as usize);
            if whole.len == 0 {
                continue;
            }
            pairs += s.area_within(&whole, &limits);
            reach(s, &whole, &limits, |first, end| match spans.last_mut() {
                Some((doc, a, e)) if *doc == document && *a <= first && first <= *e => *e = (*e).max(end),
                _ => spans.push((document, first, end)),
            });
        }
    }
    if !spans.is_sorted() {
        spans.sort_unstable();
    }
    let (mut needed, mut from) = (0, 0);
    let mut rest = spans.iter().copied().peekable();
    while let Some((doc, a, mut e)) = rest.next() {
        while let Some((_, _, end)) = rest.next_if(|next| next.0 == doc && next.1 <= e) {
            e = e.max(end);
        }
        from += held[from..].partition_point(|s| s.range.doc < doc);
        let of_document = held[from..].iter().take_while(|s| s.range.doc == doc);
        let held: u32 = of_document.map(|s| s.range.rows_before(e) - s.range.rows_before(a)).sum();
        needed += (e - a) as u64 - u64::from(held);
    }
    (pairs, needed)
}

/// Calls `each(first, end)` for the positions of `whole` that the rows of `s` reach within the limits.
fn reach(s: &Range, whole: &Range, limits: &Band, mut each: impl FnMut(i64, i64)) {
    let begin = whole.pos.max(limits.k_begin);
    let end = (whole.pos + i64::from(whole.len)).min(limits.k_end);
    let mut run = |a: i64, e: i64| {
        let (a, e) =
            (a.saturating_add(limits.low).max(begin), e.saturating_add(limits.high).saturating_add(1).min(end));
        if a < e {
            each(a, e);
        }
    };
    let rows = s.rows_at(limits.q_begin, limits.q_end.saturating_sub(1));
    s.split(rows.start, rows.end, |_, s| {
        if s.is_plain() || i64::from(s.period - s.block) <= limits.high.saturating_sub(limits.low) {
            return run(s.pos, s.last());
        }
        // Only blocks that reach the other side: a new token meets only a few stripes of a long slot.
        let first = s.rows_before(begin.saturating_sub(limits.high));
        for b in blocks_from(&s, first) {
            if b.pos.saturating_add(limits.low) >= end {
                break;
            }
            run(b.pos, b.last());
        }
    });
}

#[cfg(test)]
mod tests;
