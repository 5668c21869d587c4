// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures all ring steps of a zigzag over documents at once.
//!
//! The general way lists both shares of every step and joins them: a pass over all documents for each of R steps. In a
//! zigzag a share is two chunks of each document, whose boundaries `⌊i·n/2R⌋` can be computed one from another by
//! addition. So this loops over the boundaries of each document: no division, no list, only counts for each step. With
//! 1,024 ranks and 1,000 documents planning would take too long without it. It must count exactly what the general way
//! counts (a test compares them); its size of lists may be too large, but never too small.

use alloc::{vec, vec::Vec};

use crate::{batch::Batch, batch::Side, layout::Segment, mask::Mask};

/// What one step moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepVolume {
    pub rows_in: u64,
    pub rows_out: u64,
    /// At least as many fragments as are listed.
    pub fragments_in: usize,
    pub fragments_out: usize,
}

/// A ring rank's part in a zigzag over documents.
pub(super) struct Zigzag<'a> {
    pub batch: &'a Batch,
    /// As the stationary side sees it.
    pub mask: Mask,
    pub circulating: Side,
    pub staying: Side,
    pub ring: usize,
    pub me: usize,
    pub stationary: &'a [Segment],
    pub own: &'a [Segment],
    /// All others arrive at step 1.
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

/// The segments of the document that begins at index `i`.
fn document(list: &[Segment], i: usize) -> &[Segment] {
    let doc = list[i].range.doc;
    &list[i..i + list[i..].iter().take_while(|s| s.range.doc == doc).count()]
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
    pub fn measure(&self) -> (Vec<StepVolume>, Vec<u32>) {
        let mut steps = vec![StepVolume::default(); if self.gather { 2 } else { self.ring.max(2) }];
        let mut last = vec![0; self.stationary.len()];
        let mut i = 0;
        while i < self.stationary.len() {
            let stationary = document(self.stationary, i);
            self.arriving(stationary, &mut steps, &mut last[i..i + stationary.len()]);
            i += stationary.len();
        }
        let mut i = 0;
        while i < self.own.len() {
            let own = document(self.own, i);
            self.leaving(own, &mut steps);
            i += own.len();
        }
        (steps, last)
    }

    /// The two limits of the mask, cut down to where they still reach over any two positions.
    fn limits(&self) -> (i64, i64) {
        const FAR: i64 = 1 << 42;
        (self.mask.left_limit().min(FAR), self.mask.right_limit().min(FAR))
    }

    /// The step at which rank `j`'s chunk comes here (or goes there, with the direction turned round).
    fn step(&self, from: usize, to: usize) -> usize {
        if self.gather {
            1
        } else if to >= from {
            to - from
        } else {
            to + self.ring - from
        }
    }

    fn arriving(&self, stationary: &[Segment], steps: &mut [StepVolume], last: &mut [u32]) {
        let doc = stationary[0].range.doc as usize;
        let (len, start) =
            (self.batch.document(self.circulating, doc).len() as i64, self.batch.start(self.circulating, doc));
        let (left, right) = self.limits();
        let needed = |s: &Segment| common((s.range.pos - left - start, s.range.last() + right + 1 - start), (0, len));
        let a = needed(&stationary[0]);
        let b = stationary.get(1).map_or((0, 0), needed);
        // Both apart, or their union and nothing.
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
        // The chunk that holds the first needed token.
        let mut c = ((first.0 + 1) * parts - 1) / len;
        let mut borders = Borders::new(len, parts, c);
        let mut low = borders.at;
        while low < end {
            let high = borders.next();
            let chunk = (low, high);
            let index = c as usize;
            (low, c) = (high, c + 1);
            if chunk.0 == chunk.1 {
                continue;
            }
            let step = if index < self.ring {
                if index == self.me {
                    continue;
                }
                self.step(index, self.me)
            } else {
                let j = 2 * self.ring - 1 - index;
                if j == self.me {
                    continue;
                }
                self.step(self.me, j)
            };
            let (m, n) = (length(common(chunk, first)), length(common(chunk, second)));
            if m + n == 0 {
                continue;
            }
            let s = &mut steps[step];
            s.rows_in += m + n;
            s.fragments_in += usize::from(m > 0) + usize::from(n > 0);
            for (l, of) in last.iter_mut().zip([a, b]) {
                if length(common(chunk, of)) > 0 {
                    *l = (*l).max(step as u32);
                }
            }
        }
    }

    fn leaving(&self, own: &[Segment], steps: &mut [StepVolume]) {
        let doc = own[0].range.doc as usize;
        let (len, start) = (self.batch.document(self.staying, doc).len() as i64, self.batch.start(self.staying, doc));
        if len == 0 {
            return;
        }
        let (left, right) = self.limits();
        let parts = 2 * self.ring as i64;
        let (mut up, mut down) = (Borders::new(len, parts, 0), Borders::new(len, parts, parts));
        let reach = |low: i64, high: i64| if low < high { (start + low - left, start + high + right) } else { (0, 0) };
        for j in 0..self.ring {
            let low = up.at;
            let front = reach(low, up.next());
            let high = down.at;
            let back = reach(down.previous(), high);
            if j == self.me {
                continue;
            }
            for v in own {
                let rows = (v.range.pos, v.range.pos + i64::from(v.range.len));
                let (a, b) = (common(rows, front), common(rows, back));
                let (m, n) = (length(a), length(b));
                if m + n == 0 {
                    continue;
                }
                let step = if v.reverse { self.step(j, self.me) } else { self.step(self.me, j) };
                let s = &mut steps[step];
                let both = if m > 0 && n > 0 { length(common(a, b)) } else { 0 };
                s.rows_out += m + n - both;
                s.fragments_out += usize::from(m > 0) + usize::from(n > 0);
            }
        }
    }
}
