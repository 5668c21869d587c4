// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tokens a ring rank holds.
//!
//! A [`Layout`] distributes the tokens of a packed batch over `R` ring ranks. Every boundary is `⌊i·n/m⌋`, so any
//! lengths work. A ring rank's *share* is a list of [`Segment`]s in layout order: consecutive rows of one document,
//! each with the positions of its tokens. The share is then split over its Ulysses ranks at `⌊u·n/U⌋` rows.
//!
//! Shares are computed on request and never stored for all ranks: with a thousand ranks and a thousand documents the
//! whole table would be larger than the batch.
//!
//! Every layout lists the documents of a share in ascending order; [`crate::schedule`] relies on that to join two
//! shares in one pass.

use alloc::{
    collections::{BTreeSet, BinaryHeap, binary_heap::PeekMut},
    format,
    sync::Arc,
    vec,
    vec::Vec,
};
use core::cmp::Reverse;

use crate::{
    batch::{Batch, Side},
    call::Range,
    error::{Error, Result},
    mask::Mask,
};

/// How tokens are distributed over ring ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// Rank r holds tokens `⌊r·n/R⌋ .. ⌊(r+1)·n/R⌋` of the pack.
    Contiguous,
    /// Each document is cut into 2R chunks; rank r holds chunk r, then chunk 2R−1−r, document by document. Slow for packs of short
    /// documents, which are cut for every rank: `ZigzagPack` or an automatic choice is faster there.
    Zigzag,
    /// The whole pack is cut into 2R chunks; rank r holds chunk r, then chunk 2R−1−r.
    ZigzagPack,
    /// Token t of the pack belongs to rank `(t / stripe) mod R`.
    Striped {
        /// Consecutive tokens of one rank; at least 1.
        stripe: u32,
    },
    /// The pack is cut into R × chunks chunks of equal token count, assigned so that ranks have about the same number
    /// of tokens and the same mask area.
    Balanced {
        /// Chunks for each rank; at least 1. More chunks balance better and fragment more.
        chunks: u32,
    },
}

impl core::fmt::Display for Layout {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Contiguous => f.write_str("contiguous"),
            Self::Zigzag => f.write_str("zigzag"),
            Self::ZigzagPack => f.write_str("zigzag-pack"),
            Self::Striped { stripe } => write!(f, "striped({stripe})"),
            Self::Balanced { chunks } => write!(f, "balanced({chunks})"),
        }
    }
}

/// Consecutive rows of one document inside a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct Segment {
    /// Rows of the share (`row` counts from the share's start), positions, document.
    pub range: Range,
    /// Sent in the reverse ring direction: the back chunks of a zigzag.
    pub reverse: bool,
}

/// A layout bound to a batch and a number of ring ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    batch: Batch,
    layout: Layout,
    ring: usize,
    /// Balanced only: the chunks of rank r are `deal[r·chunks .. (r+1)·chunks]`, ascending.
    deal: Option<Arc<[u32]>>,
}

/// `⌊i·n/parts⌋`.
pub(crate) fn cut(i: usize, n: usize, parts: usize) -> usize {
    (i as u64 * n as u64 / parts as u64) as usize
}

impl Shares {
    /// Binds a layout. The mask steers the balanced layout only.
    pub fn new(batch: &Batch, mask: Mask, layout: Layout, ring: usize) -> Result<Self> {
        let deal = match layout {
            Layout::Striped { stripe: 0 } => return Err(Error::invalid("layout.stripe", 0, "at least 1")),
            Layout::Balanced { chunks } => {
                chunk_limit(chunks, ring)?;
                Some(deal(&chunk_areas(batch, mask, ring * chunks as usize), ring, chunks as usize).into())
            }
            _ => None,
        };
        Ok(Self { batch: batch.clone(), layout, ring, deal })
    }

    /// How many ring ranks share the batch.
    pub fn ring(&self) -> usize {
        self.ring
    }

    /// Tokens of a ring rank's share.
    pub fn rows(&self, side: Side, r: usize) -> usize {
        let n = self.batch.tokens(side);
        let ring = self.ring;
        let part = |i: usize, n: usize, parts: usize| cut(i + 1, n, parts) - cut(i, n, parts);
        match self.layout {
            Layout::Contiguous => part(r, n, ring),
            Layout::ZigzagPack => part(r, n, 2 * ring) + part(2 * ring - 1 - r, n, 2 * ring),
            Layout::Zigzag => self
                .batch
                .cu_seqlens(side)
                .windows(2)
                .map(|w| (w[1] - w[0]) as usize)
                .map(|n| part(r, n, 2 * ring) + part(2 * ring - 1 - r, n, 2 * ring))
                .sum(),
            Layout::Striped { stripe } => {
                let (stripe, period) = (stripe as usize, stripe as usize * ring);
                n / period * stripe + (n % period).saturating_sub(r * stripe).min(stripe)
            }
            Layout::Balanced { chunks } => self.chunks_of(r).map(|c| part(c, n, ring * chunks as usize)).sum(),
        }
    }

    fn chunks_of(&self, r: usize) -> impl Iterator<Item = usize> + '_ {
        let deal = self.deal.as_deref().unwrap_or(&[]);
        let per = deal.len() / self.ring;
        deal[r * per..(r + 1) * per].iter().map(|&c| c as usize)
    }

    /// The segments of a ring rank's share, in layout order, into `out` (cleared first).
    pub fn segments(&self, side: Side, r: usize, out: &mut Vec<Segment>) {
        out.clear();
        let n = self.batch.tokens(side);
        let ring = self.ring;
        let mut b = SegmentWriter { batch: &self.batch, side, doc: 0, row: 0, out };
        match self.layout {
            Layout::Contiguous => b.run(cut(r, n, ring), cut(r + 1, n, ring), false),
            Layout::ZigzagPack => {
                b.run(cut(r, n, 2 * ring), cut(r + 1, n, 2 * ring), false);
                b.run(cut(2 * ring - 1 - r, n, 2 * ring), cut(2 * ring - r, n, 2 * ring), true);
            }
            Layout::Zigzag => {
                for d in 0..self.batch.documents() {
                    let doc = self.batch.document(side, d);
                    let len = doc.len();
                    let (a, e) = (cut(r, len, 2 * ring), cut(r + 1, len, 2 * ring));
                    b.push(d, a, e - a, 1, 1, false);
                    let (a, e) = (cut(2 * ring - 1 - r, len, 2 * ring), cut(2 * ring - r, len, 2 * ring));
                    b.push(d, a, e - a, 1, 1, true);
                }
            }
            Layout::Striped { stripe } => b.stripes(r, ring, stripe as usize),
            Layout::Balanced { chunks } => {
                let parts = ring * chunks as usize;
                for c in self.chunks_of(r) {
                    b.run(cut(c, n, parts), cut(c + 1, n, parts), false);
                }
            }
        }
    }

    /// The batch.
    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What a balanced layout gave to whom: the chunks of rank r at `[r·chunks .. (r+1)·chunks]`. The tokens of other layouts
    /// follow from the batch and the ring.
    pub(crate) fn deal(&self) -> Option<&[u32]> {
        self.deal.as_deref()
    }
}

struct SegmentWriter<'a> {
    batch: &'a Batch,
    side: Side,
    /// The document of the last run: runs ascend, so the next is near.
    doc: usize,
    row: i64,
    out: &'a mut Vec<Segment>,
}

impl SegmentWriter<'_> {
    /// `len` tokens of document `d` from its token `offset` on. Joined to the segment before when they are one run.
    fn push(&mut self, d: usize, offset: usize, len: usize, block: u32, period: u32, reverse: bool) {
        if len == 0 {
            return;
        }
        let pos = self.batch.start(self.side, d) + offset as i64;
        let len = len as u32;
        if let Some(last) = self.out.last_mut()
            && last.range.doc == d as u32
            && last.range.is_plain()
            && last.reverse == reverse
            && block == period
            && last.range.last() + 1 == pos
        {
            last.range.len += len;
            (last.range.block, last.range.period) = (1, 1);
        } else {
            self.out.push(Segment { range: Range { row: self.row, pos, len, block, period, doc: d as u32 }, reverse });
        }
        self.row += i64::from(len);
    }

    /// Tokens `a..e` of the pack, cut at documents.
    fn run(&mut self, a: usize, e: usize, reverse: bool) {
        let mut t = a;
        while t < e {
            let d = self.batch.document_from(self.side, self.doc, t);
            self.doc = d;
            let doc = self.batch.document(self.side, d);
            let end = e.min(doc.end);
            self.push(d, t - doc.start, end - t, 1, 1, reverse);
            t = end;
        }
    }

    /// Stripes over the pack, cut at documents: a document that begins inside one of the rank's stripes gives a short
    /// plain run, then one striped run.
    fn stripes(&mut self, r: usize, ring: usize, stripe: usize) {
        if ring == 1 {
            return self.run(0, self.batch.tokens(self.side), false);
        }
        let period = stripe * ring;
        // How many of the pack's first `t` tokens are the rank's.
        let owned = |t: usize| t / period * stripe + (t % period).saturating_sub(r * stripe).min(stripe);
        // The rank's first token that no document before has had: most documents of a large ring hold none.
        let mut next = r * stripe;
        let tokens = self.batch.tokens(self.side);
        let mut d = 0;
        while next < tokens {
            d = self.batch.document_from(self.side, d, next);
            let doc = self.batch.document(self.side, d);
            let total = owned(doc.end) - owned(doc.start);
            let phase = next % period - r * stripe;
            let mut first = next;
            if phase > 0 {
                // The document begins inside one of the rank's stripes.
                let head = (stripe - phase).min(total);
                self.push(d, next - doc.start, head, 1, 1, false);
                first = next - phase + period;
                if total > head {
                    self.push(d, first - doc.start, total - head, stripe as u32, period as u32, false);
                }
            } else {
                self.push(d, first - doc.start, total, stripe as u32, period as u32, false);
            }
            // Where the next document begins, or the rank's first token after it.
            let phase = doc.end % period;
            next = if phase < r * stripe {
                doc.end - phase + r * stripe
            } else if phase < (r + 1) * stripe {
                doc.end
            } else {
                doc.end - phase + period + r * stripe
            };
        }
    }
}

/// Refuses a number of chunks that is none, or too many.
pub(crate) fn chunk_limit(chunks: u32, ring: usize) -> Result<()> {
    if chunks == 0 || chunks as usize * ring > 1 << 20 {
        return Err(Error::invalid("layout.chunks", chunks, format!("1 to {}", (1 << 20) / ring)));
    }
    Ok(())
}

/// The mask areas of the pack's q tokens in `parts` chunks.
fn chunk_areas(batch: &Batch, mask: Mask, parts: usize) -> Vec<u64> {
    let n = batch.tokens(Side::Q);
    let mut d = 0;
    let chunk = |c| {
        let (mut t, end) = (cut(c, n, parts), cut(c + 1, n, parts));
        let mut area = 0;
        while t < end {
            while batch.document(Side::Q, d).end <= t {
                d += 1;
            }
            let doc = batch.document(Side::Q, d);
            let next = end.min(doc.end);
            let base = batch.start(Side::Q, d) - doc.start as i64;
            area += mask.area(base + t as i64, base + next as i64, batch.document(Side::K, d).len() as i64) as u64;
            t = next;
        }
        area
    };
    (0..parts).map(chunk).collect()
}

/// An area with an index in one number, so that neither a sort nor a heap looks anything up.
trait AreaKey: Copy + Ord {
    fn new(area: u64, index: u32) -> Self;
    fn index(self) -> u32;
    fn plus(self, area: u64) -> Self;
}

/// Bits of an index: there are at most 2²⁰ chunks ([`chunk_limit`]).
const INDEX_BITS: u32 = 20;

/// The largest index, by which indices are turned round.
const LAST_INDEX: u32 = (1 << INDEX_BITS) - 1;

impl AreaKey for u64 {
    fn new(area: u64, index: u32) -> Self {
        area << INDEX_BITS | Self::from(index)
    }

    fn index(self) -> u32 {
        self as u32 & LAST_INDEX
    }

    fn plus(self, area: u64) -> Self {
        self + (area << INDEX_BITS)
    }
}

impl AreaKey for u128 {
    fn new(area: u64, index: u32) -> Self {
        Self::from(area) << 32 | Self::from(index)
    }

    fn index(self) -> u32 {
        self as u32
    }

    fn plus(self, area: u64) -> Self {
        self + (Self::from(area) << 32)
    }
}

/// Deals `ring × per` chunks of equal token count and the given mask areas, so that every rank gets `per` of them and
/// about the same area: largest area first, each to the least loaded rank that still has room (the
/// longest-processing-time rule, with a limit on the count), then exchanges between the most and the least loaded while
/// they help. The chunks of rank r are entries `r·per .. (r+1)·per` of the result.
pub(crate) fn deal(areas: &[u64], ring: usize, per: usize) -> Vec<u32> {
    let total = areas.iter().fold(0u64, |sum, &area| sum.saturating_add(area));
    let narrow = total >> (u64::BITS - INDEX_BITS) == 0;
    let mut mine =
        if narrow { largest_first::<u64>(areas, ring, per) } else { largest_first::<u128>(areas, ring, per) };
    even_out(&mut mine, areas, per);
    // Each rank's in ascending order.
    let mut owner = vec![0; mine.len()];
    for (r, chunks) in mine.chunks_exact(per).enumerate() {
        chunks.iter().for_each(|&c| owner[c as usize] = r);
    }
    let mut next = starts(ring, per);
    for (c, &r) in (0u32..).zip(&owner) {
        mine[next[r]] = c;
        next[r] += 1;
    }
    mine
}

/// Where the chunks of each rank begin.
fn starts(ring: usize, per: usize) -> Vec<usize> {
    (0..ring).map(|r| r * per).collect()
}

fn largest_first<K: AreaKey>(areas: &[u64], ring: usize, per: usize) -> Vec<u32> {
    // Largest area first; of equal ones the first chunk.
    let keys = areas.iter().zip(0u32..).map(|(&area, c)| Reverse(K::new(area, LAST_INDEX - c)));
    let mut order: Vec<Reverse<K>> = keys.collect();
    order.sort_unstable();
    let mut heap: BinaryHeap<Reverse<K>> = (0..ring as u32).map(|r| Reverse(K::new(0, r))).collect();
    let (mut mine, mut next) = (vec![0; ring * per], starts(ring, per));
    for Reverse(key) in order {
        let c = LAST_INDEX - key.index();
        // Full ranks never come back, so the heap always holds one with room.
        if let Some(mut least) = heap.peek_mut() {
            let Reverse(load) = &mut *least;
            let r = load.index() as usize;
            mine[next[r]] = c;
            next[r] += 1;
            if next[r] < (r + 1) * per {
                *load = load.plus(areas[c as usize]);
            } else {
                PeekMut::pop(least);
            }
        }
    }
    mine
}

/// Swaps single chunks between the most and the least loaded rank while that lowers the larger of the two loads. Each
/// rank's chunks come, and are kept, in descending order of area, so that the best partner of a chunk is found by
/// bisection: ranks may have many chunks.
fn even_out(mine: &mut [u32], areas: &[u64], per: usize) {
    let area = |c: u32| areas[c as usize];
    let mut loads: Vec<u64> = mine.chunks_exact(per).map(|chunks| chunks.iter().map(|&c| area(c)).sum()).collect();
    // Made for the second swap: mostly there is none.
    let mut by_load: BTreeSet<(u64, usize)> = BTreeSet::new();
    for _ in 0..4 * loads.len() {
        // Of equally loaded ranks the first, at either end.
        let (lo, hi) = if let (Some(&(most, _)), Some(&(_, lo))) = (by_load.last(), by_load.first()) {
            (lo, by_load.range((most, 0)..).next().map_or(lo, |&(_, hi)| hi))
        } else {
            let ranks = || loads.iter().enumerate();
            let least = ranks().min_by_key(|(r, load)| (**load, *r));
            let most = ranks().min_by_key(|(r, load)| (Reverse(**load), *r));
            (least.map_or(0, |(r, _)| r), most.map_or(0, |(r, _)| r))
        };
        let gap = loads[hi] - loads[lo];
        let of = |r: usize| r * per..(r + 1) * per;
        let (of_hi, of_lo) = (&mine[of(hi)], &mine[of(lo)]);
        // The swap that comes closest to moving half the gap.
        let mut best = (gap, None);
        for (i, &a) in of_hi.iter().enumerate() {
            // What is left of the gap is least where b is nearest to a − gap / 2, from either side.
            let at = of_lo.partition_point(|&b| 2 * area(b) + gap > 2 * area(a));
            let nearest = at.saturating_sub(1);
            for (j, &b) in of_lo.iter().enumerate().skip(nearest).take(at + 1 - nearest) {
                let (a, b) = (area(a), area(b));
                if a > b && a - b < gap {
                    let rest = (2 * (a - b)).abs_diff(gap);
                    if rest < best.0 {
                        best = (rest, Some((i, j)));
                    }
                }
            }
        }
        let Some((i, j)) = best.1 else { return };
        let (a, b) = (of_hi[i], of_lo[j]);
        if by_load.is_empty() {
            by_load = loads.iter().enumerate().map(|(r, &load)| (load, r)).collect();
        }
        let moved = area(a) - area(b);
        for (r, place, chunk, load) in [(hi, i, b, loads[hi] - moved), (lo, j, a, loads[lo] + moved)] {
            let chunks = &mut mine[of(r)];
            chunks[place] = chunk;
            put_in_order(chunks, place, |c| (Reverse(area(c)), c));
            by_load.remove(&(loads[r], r));
            by_load.insert((load, r));
            loads[r] = load;
        }
    }
}

/// Moves the one entry of a list that is not in ascending order.
fn put_in_order<K: Ord>(list: &mut [u32], at: usize, key: impl Fn(u32) -> K) {
    let (before, rest) = list.split_at(at);
    let wanted = key(rest[0]);
    let to = before.partition_point(|&c| key(c) < wanted);
    if to < at {
        return list[to..=at].rotate_right(1);
    }
    let to = at + rest[1..].partition_point(|&c| key(c) < wanted);
    list[at..=to].rotate_left(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule as it reads: every rank looked at for every chunk, and every pair of chunks for every swap. Also how many
    /// swaps there were.
    fn deal_slowly(areas: &[u64], ring: usize, per: usize) -> (Vec<u32>, usize) {
        let area = |c: u32| areas[c as usize];
        let load = |chunks: &Vec<u32>| chunks.iter().map(|&c| area(c)).sum::<u64>();
        let mut order: Vec<u32> = (0..areas.len() as u32).collect();
        order.sort_by_key(|&c| (Reverse(area(c)), c));
        let mut mine: Vec<Vec<u32>> = vec![Vec::new(); ring];
        for c in order {
            let with_room = (0..ring).filter(|&r| mine[r].len() < per);
            let least = with_room.min_by_key(|&r| (load(&mine[r]), r)).unwrap();
            mine[least].push(c);
        }
        let mut swaps = 0;
        for _ in 0..4 * ring {
            let lo = (0..ring).min_by_key(|&r| (load(&mine[r]), r)).unwrap();
            let hi = (0..ring).min_by_key(|&r| (Reverse(load(&mine[r])), r)).unwrap();
            let gap = load(&mine[hi]) - load(&mine[lo]);
            let pairs = (0..per).flat_map(|i| (0..per).map(move |j| (i, j)));
            let moved = |(i, j): (usize, usize)| area(mine[hi][i]).checked_sub(area(mine[lo][j]));
            let helps = pairs.filter(|&p| moved(p).is_some_and(|m| 0 < m && m < gap));
            let Some((i, j)) = helps.min_by_key(|&p| (2 * moved(p).unwrap()).abs_diff(gap)) else { break };
            (mine[hi][i], mine[lo][j]) = (mine[lo][j], mine[hi][i]);
            mine.iter_mut().for_each(|chunks| chunks.sort_by_key(|&c| (Reverse(area(c)), c)));
            swaps += 1;
        }
        mine.iter_mut().for_each(|chunks| chunks.sort_unstable());
        (mine.concat(), swaps)
    }

    /// Random areas, alike, steep, narrow and too large for one word with their index.
    #[test]
    fn chunks_are_dealt_by_the_rule() {
        let mut draw = fastrand::Rng::with_seed(2);
        let (mut swapped, mut wide) = (0, 0);
        for n in 0..3000 {
            let (ring, per) = (draw.usize(1..14), draw.usize(1..9));
            let area = |i: usize, draw: &mut fastrand::Rng| match n % 6 {
                0 => draw.u64(..10),
                1 => draw.u64(..1 << 30),
                2 => 1 << draw.u32(..30),
                3 => 1000 * i as u64 + draw.u64(..3),
                4 => draw.u64(1 << 50..1 << 56),
                _ => 7,
            };
            let areas: Vec<u64> = (0..ring * per).map(|i| area(i, &mut draw)).collect();
            let (got, (want, swaps)) = (deal(&areas, ring, per), deal_slowly(&areas, ring, per));
            // Of chunks of equal area any may be swapped.
            let by_rank = |dealt: &[u32]| {
                let sorted = |chunks: &[u32]| {
                    let mut of_rank: Vec<u64> = chunks.iter().map(|&c| areas[c as usize]).collect();
                    of_rank.sort_unstable();
                    of_rank
                };
                dealt.chunks(per).map(sorted).collect::<Vec<_>>()
            };
            assert_eq!(by_rank(&got), by_rank(&want), "{ring} {per} {areas:?}");
            assert!(swaps > 0 || got == want, "{ring} {per} {areas:?}");
            swapped += usize::from(swaps > 0);
            wide += usize::from(areas.iter().sum::<u64>() >> 44 > 0);
        }
        assert!(swapped > 100 && wide > 100, "{swapped} {wide}");
    }

    /// A million chunks are dealt, and evened out, in well under a minute even unoptimised.
    #[test]
    fn many_chunks_are_dealt_in_bounded_time() {
        let lengths: Vec<usize> = (0..3000).map(|i| 1 + i * 7919 % 613).collect();
        let batch = Batch::from_lengths(&lengths).unwrap();
        for (ring, chunks) in [(1, 1 << 20), (2, 1 << 19), (8, 1 << 12)] {
            let shares = Shares::new(&batch, Mask::causal(), Layout::Balanced { chunks }, ring).unwrap();
            let tokens: usize = (0..ring).map(|r| shares.rows(Side::Q, r)).sum();
            assert_eq!(tokens, batch.tokens(Side::Q));
        }
    }
}
