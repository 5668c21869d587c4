// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rows that arrive and that leave at one ring step, as fragments of shares.
//!
//! Listed when the step is executed, into a [`RangeScratch`] that has room for them. Owner and reader list the same
//! rows in the same order, so messages carry no description of their rows.

use alloc::vec::Vec;

use super::{Hop, RangeScratch, RingStep, RingSteps, listed::take_listed};
use crate::{
    batch::Side,
    call::Range,
    layout::Segment,
    plan::Form,
    schedule::join::{Class, Fragment, join},
};

impl RingSteps {
    /// `(ring rank, class)` of the node's ranks whose rows arrive at place `place` of the node's steps, or of those
    /// that receive this rank's rows.
    pub(super) fn others(&self, place: usize, arriving: bool) -> impl Iterator<Item = (usize, Class)> + use<> {
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

    pub(super) fn list_incoming(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        s.fragments.clear();
        if step.node > 0 {
            return self.list_incoming_of_node(step, s);
        }
        let mut row = 0;
        if step.hop == Hop::Own || self.form.holds_own() {
            // The own share comes first, all of it: every row needs a gradient, even if no query reads it.
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
            // Then all rows that crossed: they are in the slot already, and other ranks fetch from it.
            self.list_node_slot(self.me, 1, step.split, s);
            s.fragments.extend(s.nodes.union.iter().map(|f| {
                let at = row + f.range.row;
                Fragment { peer: self.me as u32, owner_row: at, range: Range { row: at, ..f.range } }
            }));
            row += s.nodes.union.iter().map(|f| i64::from(f.range.len)).sum::<i64>();
        }
        for (j, class) in self.others(self.place(step), true) {
            if let Some(listed) = &self.listed {
                self.shares.segments(self.circulating, j, &mut s.segments);
                row = take_listed(&s.segments, &listed.incoming[j], class, j as u32, row, &mut s.fragments);
                continue;
            }
            self.segments_beside(self.circulating, j, &self.stationary, &mut s.segments);
            let circulating = (&*s.segments, self.circulating);
            let (intervals, fragments) = (&mut s.intervals, &mut s.fragments);
            row = join(&self.stationary, circulating, class, &self.allowed, j as u32, row, intervals, fragments);
            if beside {
                self.list_node_slot(j, 1, step.split, s);
                row = self.join_beside(&self.stationary, j, j, row, s);
            }
        }
        if self.form == Form::Ordered {
            split_stripes(&mut s.fragments);
        }
        row as u64
    }

    /// The segments of a ring rank that may have pairs with some of `own`.
    fn segments_beside(&self, side: Side, rank: usize, own: &[Segment], out: &mut Vec<Segment>) {
        if self.allowed.is_by_document() {
            self.shares.segments_beside(side, rank, own, out);
        } else {
            self.shares.segments(side, rank, out);
        }
    }

    pub(super) fn list_outgoing(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        s.fragments.clear();
        if step.node > 0 {
            return self.list_outgoing_of_node(step, s);
        }
        let mut row = 0;
        let beside = self.form.holds_own() && self.crosses();
        if beside {
            self.list_node_slot(self.me, 1, step.split, s);
        }
        for (j, class) in self.others(self.place(step), false) {
            if let Some(listed) = &self.listed {
                row = take_listed(&self.own, &listed.outgoing[j], class, j as u32, row, &mut s.fragments);
                continue;
            }
            if beside {
                // Rows of other ranks are looked at too.
                self.shares.segments(self.circulating.other(), j, &mut s.segments);
            } else {
                self.segments_beside(self.circulating.other(), j, &self.own, &mut s.segments);
            }
            let circulating = (&*self.own, self.circulating);
            let (intervals, fragments) = (&mut s.intervals, &mut s.fragments);
            row = join(&s.segments, circulating, class, &self.allowed, j as u32, row, intervals, fragments);
            if beside {
                let reader = core::mem::take(&mut s.segments);
                row = self.join_beside(&reader, self.me, j, row, s);
                s.segments = reader;
            }
        }
        row as u64
    }

    /// Lists the rows that arrive at a ring step, in slot order, into `scratch.fragments`.
    pub(crate) fn incoming(&self, ring_step: usize, scratch: &mut RangeScratch) {
        self.list_incoming(&self.list[ring_step], scratch);
    }

    /// Lists the rows that leave at a ring step, of the own share or of the node slot; `range.row` counts from the
    /// start of the buffer that receives their gradients.
    pub(crate) fn outgoing(&self, ring_step: usize, scratch: &mut RangeScratch) {
        self.list_outgoing(&self.list[ring_step], scratch);
    }
}

/// Cuts striped fragments into their blocks, so that sorting by position sorts every token. Works in place, from the
/// back, because capacity is reserved only for the result.
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
