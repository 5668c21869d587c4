// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring steps of one ring rank: which rows are received from which rank, and which are sent.
//!
//! A ring rank keeps one side of the attention and receives the other side from the other ranks. Entry 0 of its ring
//! steps is its own share. In step `s` of the *ring* form it exchanges with the ranks `s` before and after it: rows
//! that are sent in ring direction are received from `r − s`, rows in the reverse direction (the back chunks of a
//! zigzag) from `r + s`. Every message goes directly from its owner to its reader, with exactly the rows that the
//! reader needs. So a window or a document boundary shortens the message, and a step without needed rows is left out.
//! Relaying through neighbours would move the same bytes if every rank needs all rows, and more otherwise.
//!
//! In the *gather* form all other shares are received at once. In the *together* form the rank's own share is stored
//! beside them, so that one call computes with everything. The *ordered* form does the same and lists keys by position,
//! the order in which a single rank would use them.
//!
//! Over listed keys the rows that travel are those that lists name: see [`listed`].
//!
//! If a ring spans several *nodes*, each row crosses from one node to another once, and is passed on inside that node:
//! see [`nodes`].
//!
//! Rows are listed when a step is executed, into a [`RangeScratch`] that was allocated when the plan was made.

use alloc::{sync::Arc, vec, vec::Vec};

use crate::{
    batch::Side,
    layout::{Layout, Segment, Shares},
    plan::Form,
    slice::parts::Allowed,
};

mod check;
mod holders;
pub(crate) mod listed;
mod measure;
mod nodes;
mod pairs;
mod rows;
mod scratch;

pub(crate) use holders::Holders;
pub(crate) use listed::ListedRows;
use scratch::Capacity;
pub(crate) use scratch::RangeScratch;

/// One ring step, as far as planning stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingStep {
    /// The ring step; 0 is the rank's own share.
    pub step: u32,
    /// What is exchanged and attended.
    pub hop: Hop,
    /// How many nodes away the owners are; 0 for the same node.
    pub node: u32,
    /// Index of the holders of its heads.
    pub split: u32,
    /// The first row of the slot that arrives.
    pub first_in: u64,
    /// Rows that arrive; if the slot holds the own share too, that is included.
    pub rows_in: u64,
    /// Rows that leave, counted once for each reader.
    pub rows_out: u64,
    /// Whether the rank's own rows meet any row that arrives. Rows of a node slot may meet only other ranks' rows.
    pub meets: bool,
}

impl RingStep {
    /// Whether its rows are attended, or only received.
    pub(crate) const fn attends(&self) -> bool {
        matches!(self.hop, Hop::Own | Hop::Local | Hop::Crossed)
    }
}

/// What a ring step exchanges and attends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Hop {
    /// Nothing is exchanged, the own share is attended.
    #[default]
    Own,
    /// Rows of ranks of the same node are received and attended: their own shares, or another node's rows that they
    /// hold.
    Local,
    /// A part of another node's rows is received, into the node slot or, if a slot holds the own share, next to that.
    /// Nothing is attended.
    Crossing {
        /// Which part.
        part: u32,
    },
    /// Ranks that hold the same kv head pass on to each other the part that each received. Nothing is attended.
    Passed,
    /// The rows in the node slot are attended, and their gradients, summed over the node, cross back.
    Crossed,
    /// If each holder sums one part of these gradients: that part crosses back. Nothing is attended.
    Back,
}

/// Rows that leave at a ring step to one reader, in more than one run of the own share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scattered {
    ring_step: u32,
    runs: u32,
    rows: u64,
}

/// The ring steps of one ring rank: what arrives there, and what it sends meanwhile.
#[derive(Clone, Debug)]
pub(crate) struct RingSteps {
    shares: Shares,
    allowed: Allowed,
    circulating: Side,
    form: Form,
    me: usize,
    /// Ring ranks of a node; all ring ranks if there is one level.
    per_node: usize,
    stationary: Vec<Segment>,
    own: Vec<Segment>,
    /// The holders of the heads that travel. Every ring step is listed once for each entry.
    splits: Vec<Holders>,
    /// The rows that lists name, if they are the rows that travel; otherwise those that the mask allows.
    listed: Option<Arc<ListedRows>>,
    list: Vec<RingStep>,
    /// For each split and each stationary segment: its last ring step.
    last: Vec<u32>,
    /// In the order of ring steps.
    scattered: Vec<Scattered>,
    capacity: Capacity,
}

impl RingSteps {
    /// Finds every ring step of ring rank `me`. `circulating` is the side that travels, `per_node` the number of ring
    /// ranks of a node, which divides the ring. `splits` are the holders of the heads that travel, one at least.
    pub(crate) fn new(
        shares: &Shares,
        allowed: impl Into<Allowed>,
        circulating: Side,
        form: Form,
        (me, per_node): (usize, usize),
        splits: Vec<Holders>,
    ) -> Self {
        let mut v = Self::empty(shares, allowed.into(), circulating, form, (me, per_node), splits);
        let zigzag = shares.layout() == Layout::Zigzag && !form.holds_own() && !v.crosses();
        match v.allowed.mask_of_documents().filter(|_| zigzag) {
            Some(mask) => v.sweep_zigzag(circulating.other(), mask),
            None => v.sweep(),
        }
        v
    }

    /// Ring steps that are not listed yet.
    fn empty(
        shares: &Shares,
        allowed: Allowed,
        circulating: Side,
        form: Form,
        (me, per_node): (usize, usize),
        splits: Vec<Holders>,
    ) -> Self {
        let (mut stationary, mut own) = (Vec::new(), Vec::new());
        let staying = circulating.other();
        shares.segments(staying, me, &mut stationary);
        shares.segments(circulating, me, &mut own);
        let last = vec![0; stationary.len() * splits.len()];
        Self {
            shares: shares.clone(),
            allowed,
            circulating,
            form,
            me,
            per_node,
            stationary,
            own,
            splits,
            listed: None,
            list: Vec::new(),
            last,
            scattered: Vec::new(),
            capacity: Capacity::default(),
        }
    }

    /// The first attending ring step of a split. Its call begins every row.
    pub(crate) fn first(&self, split: u32) -> usize {
        self.list.iter().position(|v| v.split == split && v.attends()).unwrap_or(0)
    }

    /// Whether there are calls after the first one.
    pub(crate) fn continues(&self) -> bool {
        self.list.iter().filter(|v| v.split == 0 && v.attends()).count() > 1
    }

    /// The ring steps of a split.
    pub(crate) fn of_split(&self, split: u32) -> core::ops::Range<usize> {
        self.list.partition_point(|v| v.split < split)..self.list.partition_point(|v| v.split <= split)
    }

    /// The ring step of kind `hop` for the same rows and heads as another.
    pub(crate) fn beside(&self, step: &RingStep, hop: Hop) -> Option<usize> {
        self.list.iter().position(|v| (v.hop, v.node, v.split) == (hop, step.node, step.split))
    }

    /// Whether several ranks of the node hold the heads of a ring step.
    pub(crate) fn is_divided(&self, step: &RingStep) -> bool {
        !self.splits[step.split as usize].is_alone()
    }

    /// Whether a ring step is between Ulysses ranks; its lists then name ranks by their place in the Ulysses group.
    pub(crate) fn is_between_holders(&self, ring_step: usize) -> bool {
        self.list[ring_step].hop == Hop::Passed
    }

    /// The ring steps, in order. Entry 0 is the own share, unless the only entry holds all shares.
    pub(crate) fn list(&self) -> &[RingStep] {
        &self.list
    }

    /// Rows of the own share of the side that travels.
    #[cfg(feature = "std")]
    pub(crate) fn own_rows(&self) -> u64 {
        self.own.iter().map(|own| u64::from(own.range.len)).sum()
    }

    /// The form.
    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// The ring steps of kind `hop`.
    fn of_hop(&self, hop: Hop) -> impl Iterator<Item = &RingStep> {
        self.list.iter().filter(move |v| v.hop == hop)
    }

    /// Rows of the largest slot that any ring step needs.
    pub(crate) fn slot_rows(&self) -> u64 {
        self.of_hop(Hop::Local).map(|v| v.rows_in).max().unwrap_or(0)
    }

    /// How many ring steps receive rows into a slot.
    pub(crate) fn arrivals(&self) -> usize {
        self.of_hop(Hop::Local).filter(|v| v.split == 0 && v.rows_in > 0).count()
    }

    /// Rows of the largest node slot.
    pub(crate) fn node_slot_rows(&self) -> u64 {
        self.of_hop(Hop::Crossed).map(|v| v.rows_in).max().unwrap_or(0)
    }

    /// The number of node slots needed, at most two, which take turns.
    pub(crate) fn node_slots(&self) -> usize {
        self.of_hop(Hop::Crossed).map(|v| v.node as usize).max().unwrap_or(0).min(2)
    }

    /// The ring steps whose gradients, summed over a node, go back over its border.
    fn crossing_back(&self) -> impl Iterator<Item = &RingStep> {
        let (beside, splits) = (self.form.holds_own(), &self.splits);
        self.list.iter().filter(move |v| match v.hop {
            Hop::Crossing { .. } => beside,
            Hop::Crossed => splits[v.split as usize].is_alone(),
            Hop::Back => true,
            Hop::Own | Hop::Local | Hop::Passed => false,
        })
    }

    /// Number of rows that a buffer needs for the largest sum of a node that crosses back.
    pub(crate) fn node_sum_rows(&self) -> u64 {
        self.crossing_back().map(|v| v.first_in + v.rows_in).max().unwrap_or(0)
    }

    /// Rows of the largest gradient that is returned from another node.
    pub(crate) fn node_return_rows(&self) -> u64 {
        self.crossing_back().map(|v| v.rows_out).max().unwrap_or(0)
    }

    /// Rows of the largest gradient that is returned in one ring step.
    pub(crate) fn return_rows(&self) -> u64 {
        let inside = self.of_hop(Hop::Local).chain(self.of_hop(Hop::Passed));
        inside.chain(self.crossing_back()).map(|v| v.rows_out).max().unwrap_or(0)
    }

    /// For each ring step, the number of rows for readers whose number of runs `is_packed` accepts.
    pub(crate) fn packed_rows(&self, is_packed: impl Fn(usize) -> bool) -> Vec<u64> {
        let mut rows = vec![0; self.list.len()];
        for s in self.scattered.iter().filter(|s| is_packed(s.runs as usize)) {
            rows[s.ring_step as usize] += s.rows;
        }
        rows
    }

    /// Makes room in `scratch` for the lists of any of these ring steps.
    pub(crate) fn reserve(&self, scratch: &mut RangeScratch) {
        scratch.reserve(&self.capacity);
    }

    /// The most fragments that any one ring step lists.
    pub(crate) fn longest(&self) -> usize {
        self.capacity.fragments
    }
}

#[cfg(test)]
mod mutants;
#[cfg(test)]
mod source_tests;
