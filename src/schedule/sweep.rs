// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures all ring steps of a zigzag over documents at once.
//!
//! The general method lists and joins both shares of every step: a pass over all documents for each of R steps. In a
//! zigzag a share is two chunks of each document, whose boundaries `⌊i·n/2R⌋` can be computed one from another by
//! addition. So this method loops over the boundaries of each document: no division, no list, only counts for each
//! step. Without it, planning 1,024 ranks and 1,000 documents would take too long. Its counts must equal those of the
//! general method (a test compares them); its capacity of lists may be too large, but never too small.

use alloc::{vec, vec::Vec};

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

/// Borders of the `parts` chunks of `len` tokens, one after another in either direction.
struct Borders {
    at: i64,
    carry: i64,
    whole: i64,
    rest: i64,
    parts: i64,
}

impl Borders {
    /// At border `i`.
    fn new(len: i64, parts: i64, i: i64) -> Self {
        Self { at: i * len / parts, carry: i * len % parts, whole: len / parts, rest: len % parts, parts }
    }

    fn next(&mut self) -> i64 {
        self.at += self.whole;
        self.carry += self.rest;
        if self.carry >= self.parts {
            self.carry -= self.parts;
            self.at += 1;
        }
        self.at
    }

    fn previous(&mut self) -> i64 {
        self.at -= self.whole;
        self.carry -= self.rest;
        if self.carry < 0 {
            self.carry += self.parts;
            self.at -= 1;
        }
        self.at
    }
}

/// Tokens common to two half-open runs.
fn common(a: (i64, i64), b: (i64, i64)) -> (i64, i64) {
    (a.0.max(b.0), a.1.min(b.1))
}

fn length(a: (i64, i64)) -> u64 {
    (a.1 - a.0).max(0) as u64
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
        for own in self.own.chunk_by(same_document) {
            if self.mask.left.is_none() {
                self.leaving::<true>(own, &mut steps);
            } else {
                self.leaving::<false>(own, &mut steps);
            }
        }
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

    fn arriving(&self, stationary: &[Segment], steps: &mut [StepVolume], last: &mut [u32]) {
        let doc = stationary[0].range.doc as usize;
        let (len, start) =
            (self.batch.document(self.circulating, doc).len() as i64, self.batch.start(self.circulating, doc));
        let (left, right) = self.limits();
        let needed = |s: &Segment| common((s.range.pos - left - start, s.range.last() + right + 1 - start), (0, len));
        let a = needed(&stationary[0]);
        let b = stationary.get(1).map_or((0, 0), needed);
        // If they are disjoint both; otherwise their union and an empty interval.
        let (first, second) = match (length(a), length(b)) {
            (0, _) => (b, (0, 0)),
            (_, 0) => (a, (0, 0)),
            _ if b.0 <= a.1 => ((a.0.min(b.0), a.1.max(b.1)), (0, 0)),
            _ => (a, b),
        };
        let end = first.1.max(second.1);
        if length(first) == 0 {
            return;
        }
        let parts = 2 * self.ring as i64;
        let (me, ring) = (self.me as i64, self.ring as i64);
        // Front chunks come in ring direction, back chunks in reverse.
        let step_of = |chunk: i64| {
            let distance = if chunk < ring { me - chunk } else { parts - 1 - chunk - me };
            (distance + if distance < 0 { ring } else { 0 }) as usize
        };
        if len < parts {
            // All tokens between two of these bounds are needed by the same segments.
            let mut bounds = [a.0, a.1, b.0, b.1];
            bounds.sort_unstable();
            for piece in bounds.windows(2) {
                let needs = [a, b].map(|of| of.0 <= piece[0] && piece[1] <= of.1);
                if piece[0] == piece[1] || needs == [false; 2] {
                    continue;
                }
                let mut latest = 0;
                self.lone_tokens(len, piece[0]..piece[1], |chunk| {
                    let step = step_of(chunk);
                    if step > 0 {
                        let s = &mut steps[if self.gather { 1 } else { step }];
                        s.rows_in += 1;
                        s.fragments_in += 1;
                        latest = latest.max(step as u32);
                    }
                });
                let latest = if self.gather { latest.min(1) } else { latest };
                last.iter_mut().zip(needs).filter(|(_, n)| *n).for_each(|(l, _)| *l = (*l).max(latest));
            }
            return;
        }
        // The chunk that holds the first needed token.
        let c = ((first.0 + 1) * parts - 1) / len;
        let mut borders = Borders::new(len, parts, c);
        let mut low = borders.at;
        for c in c..parts {
            if low >= end {
                break;
            }
            let high = borders.next();
            let chunk = (low, high);
            low = high;
            let (m, n) = (length(common(chunk, first)), length(common(chunk, second)));
            let step = step_of(c);
            if step == 0 || m + n == 0 {
                continue;
            }
            let step = if self.gather { 1 } else { step };
            let s = &mut steps[step];
            s.rows_in += m + n;
            s.fragments_in += usize::from(m > 0) + usize::from(n > 0);
            for (l, of) in last.iter_mut().zip([a, b]) {
                if chunk.0 < of.1 && of.0 < chunk.1 {
                    *l = (*l).max(step as u32);
                }
            }
        }
    }

    /// Calls `each` with the chunk of each of these tokens, in a document of `len` tokens with at most one token per
    /// chunk.
    fn lone_tokens(&self, len: i64, tokens: core::ops::Range<i64>, mut each: impl FnMut(i64)) {
        let parts = 2 * self.ring as i64;
        let (whole, rest) = (parts / len, parts % len);
        let at = (tokens.start + 1) * parts - 1;
        let (mut chunk, mut carry) = (at / len, at % len);
        for _ in tokens {
            each(chunk);
            let more = i64::from(carry + rest >= len);
            carry += rest - len * more;
            chunk += whole + more;
        }
    }

    /// [`Zigzag::leaving`] for documents with at most one token per chunk.
    fn lone_leaving(&self, own: &[Segment], len: i64, start: i64, steps: &mut [StepVolume]) {
        let (left, right) = self.limits();
        let (me, ring) = (self.me, self.ring);
        for v in own {
            let first = v.range.pos - right - start;
            let readers = first.max(0)..(v.range.pos + left + 1 - start).min(len);
            let (row, class) = (v.range.row, usize::from(v.reverse && !self.gather));
            self.lone_tokens(len, readers, |chunk| {
                let chunk = chunk as usize;
                let j = chunk.min(2 * ring - 1 - chunk);
                if j == me {
                    return;
                }
                let ahead = if j > me { j - me } else { j + ring - me };
                let step = match (self.gather, v.reverse) {
                    (true, _) => 1,
                    (_, true) => ring - ahead,
                    _ => ahead,
                };
                steps[step].fragments_out += 1;
                // A reader with two tokens that read the row receives it once.
                let leaving = &mut steps[if self.gather { j } else { step }].leaving[class];
                if leaving.end != row + 1 {
                    leaving.add(row, row + 1);
                    steps[step].rows_out += 1;
                }
            });
        }
    }

    /// `WHOLE`: stationary rows reach back without limit, so they need the beginning of a run.
    fn leaving<const WHOLE: bool>(&self, own: &[Segment], steps: &mut [StepVolume]) {
        let doc = own[0].range.doc as usize;
        let (len, start) = (self.batch.document(self.staying, doc).len() as i64, self.batch.start(self.staying, doc));
        if len == 0 {
            return;
        }
        let (left, right) = self.limits();
        let parts = 2 * self.ring as i64;
        if len < parts && own.iter().all(|v| v.range.len == 1) {
            return self.lone_leaving(own, len, start, steps);
        }
        let (mut up, mut down) = (Borders::new(len, parts, 0), Borders::new(len, parts, parts));
        let reach = |low: i64, high: i64| {
            if low == high {
                (i64::MAX, i64::MIN)
            } else {
                (if WHOLE { i64::MIN } else { start + low - left }, start + high + right)
            }
        };
        for j in 0..self.ring {
            let low = up.at;
            let front = reach(low, up.next());
            let high = down.at;
            let back = reach(down.previous(), high);
            if j == self.me {
                continue;
            }
            let ahead = if j > self.me { j - self.me } else { j + self.ring - self.me };
            for v in own {
                let (row, rows) = (v.range.row - v.range.pos, (v.range.pos, v.range.pos + i64::from(v.range.len)));
                let (a, b) = (common(rows, front), common(rows, back));
                let (m, n) = (a.0 < a.1, b.0 < b.1);
                if !(m || n) {
                    continue;
                }
                let step = if self.gather {
                    1
                } else if v.reverse {
                    self.ring - ahead
                } else {
                    ahead
                };
                let (reader, class) = if self.gather { (j, 0) } else { (step, usize::from(v.reverse)) };
                let leaving = &mut steps[reader].leaving[class];
                let before = leaving.rows;
                if WHOLE {
                    leaving.add(row + rows.0, row + a.1.max(b.1).min(rows.1));
                } else if m && n && b.0 <= a.1 {
                    leaving.add(row + a.0.min(b.0), row + a.1.max(b.1));
                } else {
                    [(m, a), (n, b)].iter().filter(|x| x.0).for_each(|(_, x)| leaving.add(row + x.0, row + x.1));
                }
                let added = leaving.rows - before;
                let s = &mut steps[step];
                s.rows_out += added;
                s.fragments_out += usize::from(m) + usize::from(n);
            }
        }
    }
}
