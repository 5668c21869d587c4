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
//! Where a ring lies over several *nodes*, each row crosses from one node to another once, and is passed on inside the
//! node: see [`nodes`].
//!
//! Rows are listed when a step is executed, into a [`RangeScratch`] that was allocated when the plan was made.

use alloc::{vec, vec::Vec};

use super::{
    join::{Class, Fragment, by_document, join, meets},
    sweep::Zigzag,
};
use crate::{
    batch::Side,
    call::Range,
    layout::{Layout, Segment, Shares},
    mask::Mask,
    plan::Form,
};

mod documents;
mod nodes;
mod pairs;
mod scratch;

use documents::documents;
pub use scratch::RangeScratch;
use scratch::{Capacity, NodeCapacity};

/// One ring step, as far as planning stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStep {
    /// The ring step; 0 is the rank's own share.
    pub step: u32,
    /// What is exchanged and attended.
    pub hop: Hop,
    /// How many nodes away the owners are; 0 for the same node.
    pub node: u32,
    /// Rows that arrive (that lie in the slot, where the own share does too).
    pub rows_in: u64,
    /// Rows that leave, counted once for each reader.
    pub rows_out: u64,
    /// Whether the rank's own rows meet any of those that arrive: of a node slot, maybe only other ranks' do.
    pub meets: bool,
}

impl RingStep {
    /// Whether its rows are attended, or only received.
    pub(crate) const fn attends(&self) -> bool {
        !matches!(self.hop, Hop::Crossing { .. })
    }
}

/// What a ring step exchanges and attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Nothing is exchanged, the own share is attended.
    Own,
    /// Rows of ranks of the same node are received and attended: of their shares, or of another node's that they hold.
    Local,
    /// A part of the rows of another node is received into the node slot, or beside the own share where a slot holds that.
    /// Nothing is attended.
    Crossing {
        /// Which part.
        part: u32,
    },
    /// The rows in the node slot are attended, and their gradients, summed over the node, cross back.
    Crossed,
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
pub struct RingSteps {
    shares: Shares,
    mask: Mask,
    circulating: Side,
    form: Form,
    me: usize,
    /// Ring ranks of a node: all of them where there is one level.
    per_node: usize,
    stationary: Vec<Segment>,
    own: Vec<Segment>,
    list: Vec<RingStep>,
    last: Vec<u32>,
    /// In the order of ring steps.
    scattered: Vec<Scattered>,
    capacity: Capacity,
}

impl RingSteps {
    /// Finds every ring step of ring rank `me`. `circulating` is the side that travels, `per_node` the number of ring
    /// ranks of a node, which divides the ring.
    pub fn new(shares: &Shares, mask: Mask, circulating: Side, form: Form, me: usize, per_node: usize) -> Self {
        let (mut stationary, mut own) = (Vec::new(), Vec::new());
        let staying = circulating.other();
        shares.segments(staying, me, &mut stationary);
        shares.segments(circulating, me, &mut own);
        let mask = if circulating == Side::K { mask } else { mask.transposed() };
        let last = vec![0; stationary.len()];
        let mut v = Self {
            shares: shares.clone(),
            mask,
            circulating,
            form,
            me,
            per_node,
            stationary,
            own,
            list: Vec::new(),
            last,
            scattered: Vec::new(),
            capacity: Capacity::default(),
        };
        if shares.layout() == Layout::Zigzag && !form.holds_own() && !v.crosses() {
            v.sweep_zigzag(staying);
        } else {
            v.sweep();
        }
        v
    }

    /// As [`RingSteps::sweep`], much faster.
    fn sweep_zigzag(&mut self, staying: Side) {
        let zigzag = Zigzag {
            batch: self.shares.batch(),
            mask: self.mask,
            circulating: self.circulating,
            staying,
            ring: self.shares.ring(),
            me: self.me,
            stationary: &self.stationary,
            own: &self.own,
            gather: self.form == Form::Gather,
        };
        let (steps, last) = zigzag.measure();
        let readers = zigzag.readers(&steps);
        let rows = self.own.iter().map(|o| u64::from(o.range.len)).sum();
        self.list.push(RingStep { step: 0, hop: Hop::Own, node: 0, rows_in: rows, rows_out: 0, meets: true });
        let longest = self.own.len().max(self.stationary.len());
        let fragments = steps.iter().map(|s| s.fragments_in.max(s.fragments_out)).max().unwrap_or(0).max(longest);
        let mut entry_of = vec![0; steps.len()];
        for (step, s) in steps.iter().enumerate().skip(1).filter(|(_, s)| s.rows_in + s.rows_out > 0) {
            entry_of[step] = self.list.len() as u32;
            let (rows_in, rows_out) = (s.rows_in, s.rows_out);
            self.list.push(RingStep {
                step: step as u32,
                hop: Hop::Local,
                node: 0,
                rows_in,
                rows_out,
                meets: rows_in > 0,
            });
        }
        self.last = last.into_iter().map(|step| entry_of[step as usize]).collect();
        self.scattered = readers
            .into_iter()
            .map(|(step, out)| Scattered { ring_step: entry_of[step], runs: out.runs, rows: out.rows })
            .collect();
        // A share has at most two segments of each document, so a fragment meets at most two.
        self.capacity = Capacity {
            segments: (2 * self.shares.batch().documents()).max(longest),
            fragments,
            q: fragments,
            k: fragments,
            pairs: 2 * fragments,
            nodes: NodeCapacity::default(),
        };
    }

    /// Measures every step: which are empty, the rows of the others, the last ring step of each stationary segment, and
    /// the room that the longest lists need.
    fn sweep(&mut self) {
        let mut s = RangeScratch::default();
        let mut leaving: Vec<(u32, u64)> = Vec::new();
        let longest = self.own.len().max(self.stationary.len());
        let mut cap =
            Capacity { segments: longest, fragments: self.own.len(), q: longest, k: longest, ..Capacity::default() };
        by_document(&self.stationary, &self.own, |_, a, _, b| cap.pairs += a.len() * b.len());
        if !self.form.holds_own() {
            let rows = self.own.iter().map(|o| u64::from(o.range.len)).sum();
            self.list.push(RingStep { step: 0, hop: Hop::Own, node: 0, rows_in: rows, rows_out: 0, meets: true });
        }
        for mut step in self.candidates() {
            step.rows_out = self.list_outgoing(&step, &mut s);
            leaving.clear();
            if step.hop != Hop::Crossed {
                leaving.extend(s.fragments.chunk_by(|a, b| a.peer == b.peer).filter_map(scattered));
            }
            cap.fragments = cap.fragments.max(s.fragments.len());
            cap.segments = cap.segments.max(s.segments.len());
            step.rows_in = self.list_incoming(&step, &mut s);
            cap.fragments = cap.fragments.max(s.fragments.len());
            cap.segments = cap.segments.max(s.segments.len());
            if step.rows_in + step.rows_out == 0 && (step.hop != Hop::Local || !self.form.holds_own()) {
                continue;
            }
            let ring_step = self.list.len() as u32;
            self.scattered.extend(leaving.drain(..).map(|(runs, rows)| Scattered { ring_step, runs, rows }));
            if matches!(step.hop, Hop::Crossing { .. }) {
                self.list.push(step);
                continue;
            }
            cap.k = cap.k.max(s.fragments.len());
            cap.q = cap.q.max(s.fragments.len());
            self.sort(&mut s);
            let mut pairs = 0;
            let (last, mask) = (&mut self.last, self.mask);
            documents(&self.stationary, &s.fragments, &s.order, |first, stationary, _, order| {
                pairs += stationary.len() * order.len();
                for (i, st) in stationary.iter().enumerate() {
                    if order.iter().any(|&f| meets(&st.range, &s.fragments[f as usize].range, mask)) {
                        last[first + i] = ring_step;
                        step.meets = true;
                    }
                }
            });
            self.list.push(step);
            cap.pairs = cap.pairs.max(pairs);
        }
        if self.crosses() {
            cap.segments = cap.segments.max(s.segments.capacity());
            cap.nodes = s.nodes.capacity();
        }
        self.capacity = cap;
        // Rows that meet nothing are finished by the call that begins them.
        let first = self.first() as u32;
        self.last.iter_mut().for_each(|last| *last = first.max(*last));
    }

    /// The ring step whose call begins every row: the first one that attends.
    pub(crate) fn first(&self) -> usize {
        self.list.iter().position(RingStep::attends).unwrap_or(0)
    }

    /// Whether there are calls after the first one.
    pub(crate) fn continues(&self) -> bool {
        self.list.iter().filter(|v| v.attends()).count() > 1
    }

    /// The ring steps, in order. Entry 0 is the own share, except where the only entry holds everything.
    pub fn list(&self) -> &[RingStep] {
        &self.list
    }

    /// The form.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The ring steps that `hop` has.
    fn of_hop(&self, hop: Hop) -> impl Iterator<Item = &RingStep> {
        self.list.iter().filter(move |v| v.hop == hop)
    }

    /// Rows of the largest slot that any ring step needs.
    pub fn slot_rows(&self) -> u64 {
        self.of_hop(Hop::Local).map(|v| v.rows_in).max().unwrap_or(0)
    }

    /// How many ring steps receive rows into a slot.
    pub fn arrivals(&self) -> usize {
        self.of_hop(Hop::Local).filter(|v| v.rows_in > 0).count()
    }

    /// Rows of the largest node slot.
    pub fn node_slot_rows(&self) -> u64 {
        self.of_hop(Hop::Crossed).map(|v| v.rows_in).max().unwrap_or(0)
    }

    /// How many node slots are needed: two take turns.
    pub fn node_slots(&self) -> usize {
        self.of_hop(Hop::Crossed).map(|v| v.node as usize).max().unwrap_or(0).min(2)
    }

    /// Rows of the largest gradient that comes home from another node.
    pub fn node_return_rows(&self) -> u64 {
        self.of_hop(Hop::Crossed).map(|v| v.rows_out).max().unwrap_or(0)
    }

    /// Rows of the largest gradient that comes home from one ring step.
    pub fn return_rows(&self) -> u64 {
        self.of_hop(Hop::Local).chain(self.of_hop(Hop::Crossed)).map(|v| v.rows_out).max().unwrap_or(0)
    }

    /// The ring rank that these are the steps of.
    pub fn ring_rank(&self) -> usize {
        self.me
    }

    /// For each ring step, the rows that go to readers in so many runs that `is_packed` says so.
    pub(crate) fn packed_rows(&self, is_packed: impl Fn(usize) -> bool) -> Vec<u64> {
        let mut rows = vec![0; self.list.len()];
        for s in self.scattered.iter().filter(|s| is_packed(s.runs as usize)) {
            rows[s.ring_step as usize] += s.rows;
        }
        rows
    }

    /// Makes room in `scratch` for the lists of any of these ring steps.
    pub fn reserve(&self, scratch: &mut RangeScratch) {
        scratch.reserve(&self.capacity);
    }

    /// The most fragments that any one ring step lists.
    pub(crate) fn longest(&self) -> usize {
        self.capacity.fragments
    }

    /// `(ring rank, class)` of those of the node whose rows arrive at place `place` of the node's steps, or of those that
    /// take this rank's.
    fn others(&self, place: usize, arriving: bool) -> impl Iterator<Item = (usize, Class)> + use<> {
        let (n, form, crosses) = (self.per_node, self.form, self.crosses());
        let (first, me) = (self.me / n * n, self.me % n);
        let back = first + (me + n - place % n) % n;
        let ahead = first + (me + place) % n;
        let count = match form {
            Form::Ring if crosses => 1,
            Form::Ring => 2,
            _ => n,
        };
        (0..count).filter_map(move |i| match form {
            Form::Ring if crosses => Some((if arriving { back } else { ahead }, Class::All)),
            Form::Ring if (i == 0) == arriving => Some((back, if i == 0 { Class::Forward } else { Class::Reverse })),
            Form::Ring => Some((ahead, if i == 0 { Class::Forward } else { Class::Reverse })),
            _ => (i != me).then_some((first + i, Class::All)),
        })
    }

    fn list_incoming(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        s.fragments.clear();
        if step.node > 0 {
            return self.list_incoming_of_node(step, s);
        }
        let mut row = 0;
        if step.hop == Hop::Own || self.form.holds_own() {
            // The own share comes first and whole: every row of it needs a gradient, read or not.
            for o in &self.own {
                s.fragments.push(Fragment { peer: self.me as u32, owner_row: o.range.row, range: o.range });
                row += i64::from(o.range.len);
            }
        }
        if step.hop == Hop::Own {
            return row as u64;
        }
        let beside = self.form.holds_own() && self.crosses();
        if beside {
            // Then what crossed, whole too: it is there already, and others take from it.
            self.list_node_slot(self.me, 1, s);
            s.fragments.extend(s.nodes.union.iter().map(|f| {
                let at = row + f.range.row;
                Fragment { peer: self.me as u32, owner_row: at, range: Range { row: at, ..f.range } }
            }));
            row += s.nodes.union.iter().map(|f| i64::from(f.range.len)).sum::<i64>();
        }
        for (j, class) in self.others(self.place(step), true) {
            self.shares.segments(self.circulating, j, &mut s.segments);
            row = join(&self.stationary, &s.segments, class, self.mask, j as u32, row, &mut s.fragments);
            if beside {
                self.list_node_slot(j, 1, s);
                row = self.join_beside(&self.stationary, j, j, row, s);
            }
        }
        if self.form == Form::Ordered {
            split_stripes(&mut s.fragments);
        }
        row as u64
    }

    fn list_outgoing(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        s.fragments.clear();
        if step.node > 0 {
            return self.list_outgoing_of_node(step, s);
        }
        let mut row = 0;
        let beside = self.form.holds_own() && self.crosses();
        if beside {
            self.list_node_slot(self.me, 1, s);
        }
        for (j, class) in self.others(self.place(step), false) {
            self.shares.segments(self.circulating.other(), j, &mut s.segments);
            row = join(&s.segments, &self.own, class, self.mask, j as u32, row, &mut s.fragments);
            if beside {
                let reader = core::mem::take(&mut s.segments);
                row = self.join_beside(&reader, self.me, j, row, s);
                s.segments = reader;
            }
        }
        row as u64
    }

    /// Lists what arrives at a ring step, in slot order, into `scratch.fragments`.
    pub fn incoming(&self, ring_step: usize, scratch: &mut RangeScratch) {
        self.list_incoming(&self.list[ring_step], scratch);
    }

    /// Lists the rows that leave at a ring step, of the own share or of the node slot; `range.row` counts from the start of
    /// what comes home for them.
    pub fn outgoing(&self, ring_step: usize, scratch: &mut RangeScratch) {
        self.list_outgoing(&self.list[ring_step], scratch);
    }
}

/// How many runs of the owner's share the fragments of one peer are, and their rows; none if one.
fn scattered(fragments: &[Fragment]) -> Option<(u32, u64)> {
    let end = |f: &Fragment| f.owner_row + i64::from(f.range.len);
    let breaks = fragments.windows(2).filter(|w| end(&w[0]) != w[1].owner_row).count() as u32;
    (breaks > 0).then(|| (breaks + 1, fragments.iter().map(|f| u64::from(f.range.len)).sum()))
}

/// Cuts striped fragments into their blocks, so that a sort by position is the order of every token. From the back and
/// in place: the list takes no more room than its result, which is what room is reserved for.
fn split_stripes(fragments: &mut Vec<Fragment>) {
    let blocks = |f: &Fragment| if f.range.is_plain() { 1 } else { f.range.len.div_ceil(f.range.block) };
    let (n, total) = (fragments.len(), fragments.iter().map(|f| blocks(f) as usize).sum());
    if total == n {
        return;
    }
    fragments.resize(total, fragments[0]);
    let mut end = total;
    for i in (0..n).rev() {
        let f = fragments[i];
        if f.range.is_plain() {
            end -= 1;
            fragments[end] = f;
            continue;
        }
        for block in (0..blocks(&f)).rev() {
            let at = block * f.range.block;
            let len = f.range.block.min(f.range.len - at);
            let row = f.range.row + i64::from(at);
            let range = Range { row, pos: f.range.position(at), len, block: 1, period: 1, doc: f.range.doc };
            end -= 1;
            fragments[end] = Fragment { owner_row: f.owner_row + i64::from(at), range, ..f };
        }
    }
}

#[cfg(test)]
mod source_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;

    /// The fast way counts what the general way counts, and makes room for at least as much.
    #[test]
    fn zigzags_are_measured_alike_in_both_ways() {
        let batches = [
            Batch::from_lengths(&[7, 0, 1, 13, 3, 40]).unwrap(),
            Batch::from_lengths(&[64]).unwrap(),
            Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
            Batch::cross(&[0, 9, 31, 33], &[0, 2, 14, 50], Some(&[-4, 5, 1 << 40])).unwrap(),
        ];
        let masks = [
            Mask::full(),
            Mask::causal(),
            Mask::window(2, 0),
            Mask::window(0, 0),
            Mask::window(9, 3),
            Mask { left: Some(1), right: None },
        ];
        let mut ring_steps = 0;
        for batch in &batches {
            for mask in masks {
                for ring in [1, 2, 3, 4, 7, 16] {
                    let shares = Shares::new(batch, mask, Layout::Zigzag, ring).unwrap();
                    for (me, side, form) in (0..ring).flat_map(|me| {
                        [Side::Q, Side::K].into_iter().flat_map(move |s| [(me, s, Form::Ring), (me, s, Form::Gather)])
                    }) {
                        let fast = RingSteps::new(&shares, mask, side, form, me, ring);
                        let mut slow = fast.clone();
                        slow.list.clear();
                        slow.last.fill(0);
                        slow.scattered.clear();
                        slow.sweep();
                        assert_eq!(
                            (&fast.list, &fast.last, &fast.scattered),
                            (&slow.list, &slow.last, &slow.scattered),
                            "{mask:?} {me} of {ring} {form:?}"
                        );
                        let (a, b) = (fast.capacity, slow.capacity);
                        assert!(a.segments >= b.segments && a.fragments >= b.fragments && a.q >= b.q && a.k >= b.k);
                        assert!(a.pairs >= b.pairs, "{} {}", a.pairs, b.pairs);
                        ring_steps += fast.list.len();
                    }
                }
            }
        }
        assert!(ring_steps > 5_000, "{ring_steps}");
    }
}
