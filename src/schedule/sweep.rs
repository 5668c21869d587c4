// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures all ring steps of a zigzag over documents at once.
//!
//! The general method lists and joins both shares of every step: a pass over all documents for each of R steps. In a
//! zigzag a share is two chunks of each document, whose boundaries `⌊i·n/2R⌋` can be computed one from another by
//! addition. So this method loops over the boundaries of each document: no division, no list, only counts for each
//! step. Without it, planning 1,024 ranks and 1,000 documents would take too long. Its counts must equal those of the
//! general method (a test compares them); its capacity of lists may be too large, but never too small.

use alloc::{vec, vec::Vec};
use core::ops::Range;

use crate::{batch::Batch, batch::Side, layout::Segment, mask::Mask};

/// The rows and lists of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepVolume {
    pub rows_in: u64,
    pub rows_out: u64,
    /// Upper bound on the number of fragments listed.
    pub fragments_in: usize,
    pub fragments_out: usize,
    /// The rows that leave, by class: in ring direction, in reverse. For the gather form, see [`Zigzag::measure`].
    leaving: [Leaving; 2],
}

/// Own rows for one reader, counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Leaving {
    /// Runs of the own share.
    pub runs: u32,
    pub rows: u64,
    first: i64,
    end: i64,
}

impl Leaving {
    /// Adds rows `a..e` of the own share; they come after all rows before.
    fn add(&mut self, a: i64, e: i64) {
        if self.runs == 0 {
            self.first = a;
        }
        self.runs += u32::from(self.runs == 0 || self.end != a);
        self.end = e;
        self.rows += (e - a) as u64;
    }

    /// The sum of two counts, `after` following `self`.
    fn then(self, after: Self) -> Self {
        if self.runs == 0 || after.runs == 0 {
            return if self.runs == 0 { after } else { self };
        }
        let runs = self.runs + after.runs - u32::from(self.end == after.first);
        Self { runs, rows: self.rows + after.rows, first: self.first, end: after.end }
    }
}

/// A ring rank's part in a zigzag over documents.
pub(super) struct Zigzag<'a> {
    pub batch: &'a Batch,
    /// The mask as the stationary side sees it.
    pub mask: Mask,
    pub circulating: Side,
    pub staying: Side,
    pub ring: usize,
    pub me: usize,
    pub stationary: &'a [Segment],
    pub own: &'a [Segment],
    /// Whether all other shares arrive at step 1.
    pub gather: bool,
}

/// Calls `each` with every chunk that has some of these tokens, of the `parts` chunks of a document of `len` tokens,
/// and with the tokens of the chunk.
#[inline]
fn for_each_chunk(len: i64, parts: i64, tokens: Range<i64>, mut each: impl FnMut(i64, Range<i64>)) {
    if tokens.is_empty() {
        return;
    }
    // The chunk of the first token. From there on by addition.
    let at = (tokens.start + 1) * parts - 1;
    let mut chunk = at / len;
    if len < parts {
        // At most one token in each chunk.
        let (whole, rest) = (parts / len, parts % len);
        let mut carry = at % len;
        for t in tokens {
            each(chunk, t..t + 1);
            let more = i64::from(carry + rest >= len);
            carry += rest - len * more;
            chunk += whole + more;
        }
        return;
    }
    let (whole, rest) = (len / parts, len % parts);
    let (mut low, mut carry) = (chunk * len / parts, chunk * len % parts);
    while low < tokens.end {
        let more = i64::from(carry + rest >= parts);
        let high = low + whole + more;
        carry += rest - parts * more;
        each(chunk, low..high);
        (low, chunk) = (high, chunk + 1);
    }
}

impl Zigzag<'_> {
    /// Counts by step (entry 0 is unused), and the last step at which each stationary segment meets anything, or 0.
    ///
    /// In the gather form all is counted at step 1, except the rows for rank j, which are counted at entry j.
    pub(super) fn measure(&self) -> (Vec<StepVolume>, Vec<u32>) {
        let mut steps = vec![StepVolume::default(); self.ring.max(2)];
        let mut last = vec![0; self.stationary.len()];
        let same_document = |a: &Segment, b: &Segment| a.range.doc == b.range.doc;
        let mut i = 0;
        for stationary in self.stationary.chunk_by(same_document) {
            self.arriving(stationary, &mut steps, &mut last[i..i + stationary.len()]);
            i += stationary.len();
        }
        self.own.iter().for_each(|own| self.leaving(own, &mut steps));
        (steps, last)
    }

    /// The rows that leave in more than one run, by step and reader, from the counts of [`Zigzag::measure`].
    pub(super) fn readers(&self, steps: &[StepVolume]) -> Vec<(usize, Leaving)> {
        let mut readers = Vec::new();
        for (i, s) in steps.iter().enumerate() {
            let [forward, reverse] = s.leaving;
            if self.gather {
                readers.push((1, forward));
            } else if 2 * i == self.ring {
                // The rank ahead and the rank behind are the same.
                readers.push((i, forward.then(reverse)));
            } else {
                readers.extend([(i, forward), (i, reverse)]);
            }
        }
        readers.retain(|(_, l)| l.runs > 1);
        readers
    }

    /// The two limits of the mask, clamped to a number above any distance between two positions.
    fn limits(&self) -> (i64, i64) {
        const FAR: i64 = 1 << 42;
        (self.mask.left_limit().min(FAR), self.mask.right_limit().min(FAR))
    }

    /// The rows that segments of one document need.
    fn arriving(&self, stationary: &[Segment], steps: &mut [StepVolume], last: &mut [u32]) {
        let doc = stationary[0].range.doc as usize;
        let (len, start) =
            (self.batch.document(self.circulating, doc).len() as i64, self.batch.start(self.circulating, doc));
        let (left, right) = self.limits();
        let needed = |s: &Segment| {
            let first = (s.range.pos - left - start).max(0);
            first..(s.range.last() + right + 1 - start).min(len).max(first)
        };
        let needed = [needed(&stationary[0]), stationary.get(1).map_or(0..0, needed)];
        let (parts, me, ring) = (2 * self.ring as i64, self.me as i64, self.ring as i64);
        // Front chunks come in ring direction, back chunks in reverse.
        let step_of = |chunk: i64| {
            let distance = if chunk < ring { me - chunk } else { parts - 1 - chunk - me };
            (distance + if distance < 0 { ring } else { 0 }) as usize
        };
        // All tokens between two of these bounds are needed by the same segments.
        let mut bounds = [needed[0].start, needed[0].end, needed[1].start, needed[1].end];
        bounds.sort_unstable();
        for piece in bounds.windows(2) {
            let needs = needed.each_ref().map(|of| of.start <= piece[0] && piece[1] <= of.end);
            if piece[0] == piece[1] || needs == [false; 2] {
                continue;
            }
            let mut latest = 0;
            for_each_chunk(len, parts, piece[0]..piece[1], |chunk, tokens| {
                let step = step_of(chunk);
                if step > 0 {
                    let step = if self.gather { 1 } else { step };
                    let s = &mut steps[step];
                    s.rows_in += (tokens.end.min(piece[1]) - tokens.start.max(piece[0])) as u64;
                    s.fragments_in += 1;
                    latest = latest.max(step as u32);
                }
            });
            last.iter_mut().zip(needs).filter(|(_, n)| *n).for_each(|(l, _)| *l = (*l).max(latest));
        }
    }

    /// The rows of a segment that others need.
    fn leaving(&self, own: &Segment, steps: &mut [StepVolume]) {
        let (doc, v) = (own.range.doc as usize, &own.range);
        let (len, start) = (self.batch.document(self.staying, doc).len() as i64, self.batch.start(self.staying, doc));
        let (left, right) = self.limits();
        let (me, ring, row) = (self.me, self.ring, v.row - v.pos);
        let end = v.pos + i64::from(v.len);
        let readers = (v.pos - right - start).max(0)..(end + left - start).min(len);
        for_each_chunk(len, 2 * ring as i64, readers, |chunk, tokens| {
            let chunk = chunk as usize;
            let j = chunk.min(2 * ring - 1 - chunk);
            if j == me {
                return;
            }
            let ahead = if j > me { j - me } else { j + ring - me };
            let step = match (self.gather, own.reverse) {
                (true, _) => 1,
                (_, true) => ring - ahead,
                _ => ahead,
            };
            steps[step].fragments_out += 1;
            let (reader, class) = if self.gather { (j, 0) } else { (step, usize::from(own.reverse)) };
            let leaving = &mut steps[reader].leaving[class];
            // A reader with two chunks that read a row receives it once; rows ascend from chunk to chunk.
            let first = (row + v.pos.max(start + tokens.start - left)).max(leaving.end);
            let end = row + end.min(start + tokens.end + right);
            if first < end {
                leaving.add(first, end);
                steps[step].rows_out += (end - first) as u64;
            }
        });
    }
}
