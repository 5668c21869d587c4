// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts: the tokens of each ring rank.
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

mod deal;
pub(crate) mod pack;

use alloc::{format, sync::Arc, vec::Vec};

use crate::{
    batch::{Batch, Side},
    call::Range,
    error::{Error, Result},
    mask::Mask,
};

pub(crate) use deal::deal;
use pack::PackParts;

/// How tokens are distributed over ring ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// Rank r holds tokens `⌊r·n/R⌋ .. ⌊(r+1)·n/R⌋` of the pack.
    Contiguous,
    /// Each document is cut into 2R chunks; rank r holds chunk r, then chunk 2R−1−r, document by document. Slow for
    /// packs of short documents, because each is cut for every rank: `ZigzagPack` or an automatic choice is faster
    /// there.
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
    /// Whether the rows are sent in the reverse ring direction: the back chunks of a zigzag.
    pub reverse: bool,
}

/// A layout bound to a batch and a number of ring ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    batch: Batch,
    layout: Layout,
    ring: usize,
    /// The mask whose work the balanced layout deals out evenly.
    mask: Mask,
    /// Balanced only: the chunks of rank r are `deal[r·chunks .. (r+1)·chunks]`, ascending.
    deal: Option<Arc<[u32]>>,
}

/// `⌊i·n/parts⌋`, the begin of part `i`.
pub(crate) fn cut(i: usize, n: usize, parts: usize) -> usize {
    (i as u64 * n as u64 / parts as u64) as usize
}

/// The ends of all parts of [`cut`], without a division for each.
pub(crate) fn cuts(n: usize, parts: usize) -> impl Iterator<Item = usize> + Clone {
    let (whole, rest) = (n / parts, n % parts);
    let (mut end, mut carry) = (0, 0);
    (0..parts).map(move |_| {
        carry += rest;
        let more = carry >= parts;
        carry -= if more { parts } else { 0 };
        end += whole + usize::from(more);
        end
    })
}

impl Shares {
    /// Binds a layout to a batch. Only the balanced layout depends on the mask.
    pub(crate) fn new(batch: &Batch, mask: Mask, layout: Layout, ring: usize) -> Result<Self> {
        let deal = match layout {
            Layout::Striped { stripe: 0 } => return Err(Error::invalid("layout.stripe", 0, "at least 1")),
            Layout::Balanced { chunks } => {
                chunk_limit(chunks, ring)?;
                let ends = cuts(batch.tokens(Side::Q), ring * chunks as usize);
                Some(deal(&PackParts::new(batch, mask).areas(ends), ring, chunks as usize).into())
            }
            _ => None,
        };
        Ok(Self { batch: batch.clone(), layout, ring, mask, deal })
    }

    /// The number of ring ranks that share the batch.
    pub(crate) fn ring(&self) -> usize {
        self.ring
    }

    /// The same layout of another batch, for the work of the same mask in each document.
    pub(crate) fn of_batch(&self, batch: &Batch) -> Result<Self> {
        Self::new(&batch.without_slices(), self.mask, self.layout, self.ring)
    }

    /// Tokens of a ring rank's share.
    pub(crate) fn rows(&self, side: Side, r: usize) -> usize {
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
    pub(crate) fn segments(&self, side: Side, r: usize, out: &mut Vec<Segment>) {
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

    /// As [`Shares::segments`], without segments of documents that no segment of `others` is of, as far as a look at
    /// each document is saved by that: in a pack of many documents two ranks share those at the borders of their runs.
    pub(crate) fn segments_beside(&self, side: Side, r: usize, others: &[Segment], out: &mut Vec<Segment>) {
        let (n, ring) = (self.batch.tokens(side), self.ring);
        out.clear();
        let mut b = SegmentWriter { batch: &self.batch, side, doc: 0, row: 0, out };
        let part = |i: usize, parts: usize| (cut(i, n, parts), cut(i + 1, n, parts));
        match self.layout {
            Layout::Contiguous => b.run_beside(part(r, ring), false, others),
            Layout::ZigzagPack => {
                b.run_beside(part(r, 2 * ring), false, others);
                b.run_beside(part(2 * ring - 1 - r, 2 * ring), true, others);
            }
            Layout::Balanced { chunks } => {
                self.chunks_of(r).for_each(|c| b.run_beside(part(c, ring * chunks as usize), false, others));
            }
            Layout::Striped { stripe } if ring > 1 => b.stripes_beside(r, ring, stripe as usize, others),
            Layout::Zigzag | Layout::Striped { .. } => self.segments(side, r, out),
        }
    }

    /// The batch.
    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// The layout.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The chunks of a balanced layout by rank: those of rank r are entries `r·chunks .. (r+1)·chunks`. `None` for
    /// other layouts, whose tokens follow from the batch and the ring.
    pub(crate) fn deal(&self) -> Option<&[u32]> {
        self.deal.as_deref()
    }
}

struct SegmentWriter<'a> {
    batch: &'a Batch,
    side: Side,
    /// The document of the last run. Runs ascend, so the document of the next run is near.
    doc: usize,
    row: i64,
    out: &'a mut Vec<Segment>,
}

impl SegmentWriter<'_> {
    /// Adds `len` tokens of document `d` from its token `offset` on. If they continue the segment before, they are
    /// joined to it.
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

    /// As [`SegmentWriter::run`], of documents that a segment of `others` is of; these are in the order of documents.
    fn run_beside(&mut self, (a, e): (usize, usize), reverse: bool, others: &[Segment]) {
        if a == e {
            return;
        }
        let (row, batch, side) = (self.row, self.batch, self.side);
        let [first, last] = [a, e - 1].map(|token| batch.document_of(side, token) as u32);
        let mut from = others.partition_point(|s| s.range.doc < first);
        while let Some(doc) = others.get(from).map(|s| s.range.doc).filter(|&doc| doc <= last) {
            let tokens = batch.document(side, doc as usize);
            let (begin, end) = (a.max(tokens.start), e.min(tokens.end));
            self.row = row + begin.saturating_sub(a) as i64;
            self.push(doc as usize, begin.saturating_sub(tokens.start), end.saturating_sub(begin), 1, 1, reverse);
            from += others[from..].iter().take_while(|s| s.range.doc == doc).count();
        }
        self.row = row + (e - a) as i64;
    }

    /// Stripes over the pack, cut at documents.
    fn stripes(&mut self, r: usize, ring: usize, stripe: usize) {
        let tokens = self.batch.tokens(self.side);
        if ring == 1 {
            return self.run(0, tokens, false);
        }
        let stripes = Stripes { first: r * stripe, stripe, period: ring * stripe };
        // The rank's first token after the documents so far: in a large ring most documents have none.
        let mut next = stripes.next(0);
        while next < tokens {
            self.doc = self.batch.document_from(self.side, self.doc, next);
            let end = self.batch.document(self.side, self.doc).end;
            self.stripes_of_document(&stripes, self.doc, next);
            next = stripes.next(end);
        }
    }

    /// As [`SegmentWriter::stripes`], of documents that a segment of `others` is of; these are in the order of
    /// documents.
    fn stripes_beside(&mut self, r: usize, ring: usize, stripe: usize, others: &[Segment]) {
        let stripes = Stripes { first: r * stripe, stripe, period: ring * stripe };
        let mut last = None;
        for doc in others.iter().map(|s| s.range.doc) {
            if last.replace(doc) == Some(doc) {
                continue;
            }
            let tokens = self.batch.document(self.side, doc as usize);
            let next = stripes.next(tokens.start);
            if next < tokens.end {
                self.row = stripes.before(next) as i64;
                self.stripes_of_document(&stripes, doc as usize, next);
            }
        }
    }

    /// The stripes of one document, of which the rank's first token is `next`: if it begins inside a stripe, a short
    /// plain run, then one striped run.
    fn stripes_of_document(&mut self, stripes: &Stripes, d: usize, next: usize) {
        let doc = self.batch.document(self.side, d);
        let (block, period) = (stripes.stripe as u32, stripes.period as u32);
        let total = stripes.before(doc.end) - stripes.before(doc.start);
        let phase = next % stripes.period - stripes.first;
        if phase == 0 {
            return self.push(d, next - doc.start, total, block, period, false);
        }
        // The document begins inside one of the rank's stripes.
        let head = (stripes.stripe - phase).min(total);
        self.push(d, next - doc.start, head, 1, 1, false);
        if total > head {
            self.push(d, next - phase + stripes.period - doc.start, total - head, block, period, false);
        }
    }
}

/// The tokens `first..first + stripe` of every `period` tokens of the pack: those of one rank.
struct Stripes {
    first: usize,
    stripe: usize,
    period: usize,
}

impl Stripes {
    /// How many of them are before token `t`.
    fn before(&self, t: usize) -> usize {
        t / self.period * self.stripe + (t % self.period).saturating_sub(self.first).min(self.stripe)
    }

    /// The first of them from token `t` on.
    fn next(&self, t: usize) -> usize {
        let phase = t % self.period;
        if phase < self.first {
            t - phase + self.first
        } else if phase < self.first + self.stripe {
            t
        } else {
            t - phase + self.period + self.first
        }
    }
}

/// Refuses a number of chunks that is 0 or too large.
pub(crate) fn chunk_limit(chunks: u32, ring: usize) -> Result<()> {
    if chunks == 0 || chunks as usize * ring > 1 << 20 {
        return Err(Error::invalid("layout.chunks", chunks, format!("1 to {}", (1 << 20) / ring)));
    }
    Ok(())
}
