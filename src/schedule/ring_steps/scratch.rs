// SPDX-License-Identifier: MIT OR Apache-2.0
//! Room for the lists of one ring step, so that listing rows while a schedule runs allocates nothing.
//!
//! [`Capacity`] is measured when ring steps are planned; [`RangeScratch`] is made once with that room and reused for
//! every step.

use alloc::vec::Vec;

use crate::{
    call::{Band, Mode, Pair, QRange, Range, Ranges},
    layout::Segment,
    schedule::join::Fragment,
};

/// Clears `list` and makes room for `n` entries.
fn grow<T>(list: &mut Vec<T>, n: usize) {
    list.clear();
    list.reserve(n);
}

/// The length of the longest list of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Capacity {
    pub segments: usize,
    pub fragments: usize,
    pub q: usize,
    pub k: usize,
    pub pairs: usize,
    pub bands: usize,
    /// Rows that are needed of a segment.
    pub intervals: usize,
    /// In the order of the fields of [`NodeScratch`].
    pub nodes: [usize; 6],
}

/// Room for the lists of any one ring step. Made once; never grows afterwards.
#[derive(Debug, Default)]
pub(crate) struct RangeScratch {
    pub(super) segments: Vec<Segment>,
    /// Rows that arrive or leave at the ring step that was listed last.
    pub fragments: Vec<Fragment>,
    pub(super) nodes: NodeScratch,
    /// The rows of a segment that others need.
    pub(super) intervals: Vec<(u32, u32)>,
    pub(super) order: Vec<u32>,
    pub(super) q: Vec<QRange>,
    pub(super) k: Vec<Range>,
    pub(super) pairs: Vec<Pair>,
    /// The bands of the pairs, and the parts that these are of, in the order of the parts.
    pub(super) bands: Vec<Band>,
    pub(super) parts: Vec<u32>,
}

impl RangeScratch {
    /// The ranges of the ring step that was listed last.
    pub(crate) fn ranges(&self) -> Ranges<'_> {
        Ranges { q: &self.q, k: &self.k, pairs: &self.pairs, bands: &self.bands }
    }

    /// Sets the mode of every q range: begin the running result, do not finish it.
    pub(crate) fn begin_all(&mut self) {
        self.q.iter_mut().for_each(|q| q.mode = Mode::First);
    }

    /// Sets the mode of every q range: finish it, without any keys.
    pub(crate) fn finish_all(&mut self) {
        self.k.clear();
        self.pairs.clear();
        self.q.iter_mut().for_each(|q| (q.mode, q.keys_begin, q.keys_end) = (Mode::Last, 0, 0));
    }

    /// Makes room for lists of these lengths.
    pub(super) fn reserve(&mut self, c: &Capacity) {
        grow(&mut self.segments, c.segments);
        grow(&mut self.fragments, c.fragments);
        grow(&mut self.order, c.fragments.max(c.q).max(c.k));
        grow(&mut self.q, c.q);
        grow(&mut self.k, c.k);
        grow(&mut self.pairs, c.pairs);
        grow(&mut self.bands, c.bands);
        grow(&mut self.parts, c.bands);
        grow(&mut self.intervals, c.intervals);
        self.nodes.reserve(c.nodes);
    }
}

/// Lists that only several nodes need.
#[derive(Debug, Default)]
pub(super) struct NodeScratch {
    /// Rows of a node slot, owner by owner.
    pub union: Vec<Fragment>,
    /// Segments of an owner's share, or of a node slot.
    pub held: Vec<Segment>,
    /// The rows that one reader needs.
    pub needed: Vec<Fragment>,
    /// Rows that readers need: first and end.
    pub intervals: Vec<(i64, i64)>,
    /// The union, holder by holder, while it is divided.
    pub parts: Vec<Fragment>,
    /// The first row of each holder's part of the node slot, and the end of the last.
    pub bounds: Vec<i64>,
}

impl NodeScratch {
    /// The capacity of each list.
    pub(super) fn capacity(&self) -> [usize; 6] {
        // `parts` and `union` are swapped, so both need the larger capacity.
        let union = self.union.capacity().max(self.parts.capacity());
        let [held, needed] = [self.held.capacity(), self.needed.capacity()];
        [union, held, needed, self.intervals.capacity(), union, self.bounds.capacity()]
    }

    /// Replaces `union` by `parts`.
    pub(super) fn take_parts(&mut self) {
        core::mem::swap(&mut self.union, &mut self.parts);
        self.parts.clear();
    }

    fn reserve(&mut self, [union, held, needed, intervals, parts, bounds]: [usize; 6]) {
        grow(&mut self.union, union);
        grow(&mut self.held, held);
        grow(&mut self.needed, needed);
        grow(&mut self.intervals, intervals);
        grow(&mut self.parts, parts);
        grow(&mut self.bounds, bounds);
    }
}
