// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring steps over several nodes: a row crosses from one node to another once.
//!
//! Ring ranks `n · per_node .. (n + 1) · per_node` are node n. The rows that a node needs of another one are the union
//! of what its ranks need. Those of the owner at place i of its node cross to the rank at place i of the reading node,
//! its *gateway*, into a buffer there: the *node slot*. Every rank is the gateway of one owner of each other node, so
//! each network card carries the rows of one share. From the node slot each rank of the node fetches the rows it needs,
//! as it fetches those of the node's own shares.
//!
//! With N nodes of L ranks, in the ring form, the ring steps of a rank are, in this order:
//!
//! ```text
//! own share │ L − 1 local steps │ node slot of node −1 │ L − 1 local steps from the node slots │ node slot of node −2 │ …
//! ```
//!
//! During each local step a part of the next node's rows crosses, one of L − 1 parts. So the network is busy while the
//! node's own steps are computed, and two node slots suffice. In the gather form there are two rounds: the own node at
//! once while the rows of all other nodes cross, then the node slots at once. If a slot holds the own share too, the
//! rows of all other nodes cross into that slot, next to the own share; then each rank of the node fetches the rows it
//! needs from both parts.
//!
//! In the backward the gateway sums the gradients of its node slot over the node, and the sum crosses back once.
//!
//! If several Ulysses ranks of a node hold the same kv head ([`holders`](super::holders)), each of them has the same
//! node slot, and a part of its rows crosses to each. Before the slot is attended, the holders pass their parts on to
//! each other; before the sum of the gradients crosses back, each holder sums its part. This also applies with L = 1;
//! then rows cross during the call for the node slot before. In a node slot, rows of several owners are stored holder
//! by holder.
//!
//! The union is merged from what every rank of the node needs by [`join`]. Owner and gateway both do so, with the same
//! result.

use alloc::vec::Vec;

use super::{
    Holders, Hop, RingStep, RingSteps,
    scratch::{NodeScratch, RangeScratch},
};
use crate::{
    call::Range,
    layout::{Segment, cut},
    plan::Form,
    schedule::join::{Class, Fragment, join, unite},
};

impl RingSteps {
    /// Whether rows cross from node to node once. With one ring rank per node this saves bytes only if several ranks of
    /// the node hold the same kv head; otherwise the ring steps are those of one level.
    pub(crate) fn crosses(&self) -> bool {
        let passes_on = 1 < self.per_node || self.splits.iter().any(|holders| !holders.is_alone());
        passes_on && self.per_node < self.shares.ring()
    }

    /// Ring steps of one node: the own share and each other share, or all other shares at once.
    fn places(&self) -> usize {
        match self.form {
            Form::Ring => self.per_node,
            Form::Gather => self.per_node.min(2),
            Form::Together | Form::Ordered => 2,
        }
    }

    /// The place of a ring step among those of its node.
    pub(super) fn place(&self, step: &RingStep) -> usize {
        step.step as usize % self.places()
    }

    /// The last step of a ring step's node.
    pub(crate) fn last_of_node(&self, step: &RingStep) -> u32 {
        (step.step as usize / self.places() * self.places() + self.places() - 1) as u32
    }

    /// The number of parts in which the rows of a node cross to one rank.
    pub(super) fn parts(&self) -> usize {
        (self.places() - 1).max(1)
    }

    /// All possible ring steps of a split after the own share, in order.
    pub(super) fn candidates(&self, split: u32) -> Vec<RingStep> {
        let places = self.places();
        let nodes = match self.form {
            _ if !self.crosses() => 1,
            Form::Gather => 2,
            _ => self.shares.ring() / self.per_node,
        };
        let divided = !self.splits[split as usize].is_alone();
        let mut list = Vec::new();
        let mut push = |at: usize, hop, node: usize| {
            list.push(RingStep { step: at as u32, hop, node: node as u32, split, ..RingStep::default() });
        };
        if self.form.holds_own() {
            if self.crosses() {
                push(1, Hop::Crossing { part: 0 }, 1);
            }
            if self.crosses() && divided {
                push(1, Hop::Passed, 1);
            }
            push(1, Hop::Local, 0);
            return list;
        }
        for at in 0..nodes * places {
            let (node, place) = (at / places, at % places);
            if place == 0 && node > 0 {
                if divided {
                    push(at, Hop::Passed, node);
                }
                push(at, Hop::Crossed, node);
                if divided {
                    push(at, Hop::Back, node);
                }
            }
            // During the local steps, or during the call for the node slot if a node has no local steps.
            if node + 1 < nodes && (place > 0 || places == 1) {
                push(at, Hop::Crossing { part: place.max(1) as u32 - 1 }, node + 1);
            }
            if place > 0 {
                push(at, Hop::Local, node);
            }
        }
        list
    }

    /// The ring ranks of other nodes at the place of `rank`: those `node` nodes before it whose rows cross to it
    /// (`arriving`), or those as many after it that its rows cross to; in the gather form those of all other nodes.
    fn counterparts(&self, rank: usize, node: u32, arriving: bool) -> impl Iterator<Item = usize> + use<> {
        let (ring, form) = (self.shares.ring(), self.form);
        let (nodes, distance) = (ring / self.per_node, node as usize * self.per_node);
        let (per_node, here) = (self.per_node, rank / self.per_node);
        let count = if form == Form::Ring { 1 } else { nodes };
        (0..count).filter_map(move |n| match form {
            Form::Ring if arriving => Some((rank + ring - distance) % ring),
            Form::Ring => Some((rank + distance) % ring),
            _ => (n != here).then_some(n * per_node + rank % per_node),
        })
    }

    /// Appends the rows of `owner` that a rank of the node of `gateway` needs to `s.nodes.union`, from slot row `row`
    /// on, as rows of `peer`; returns the row after them.
    fn add_union(&self, owner: usize, gateway: usize, peer: usize, mut row: i64, s: &mut RangeScratch) -> i64 {
        let NodeScratch { union, held, needed, intervals, .. } = &mut s.nodes;
        self.shares.segments(self.circulating, owner, held);
        intervals.clear();
        let first = gateway / self.per_node * self.per_node;
        for reader in first..first + self.per_node {
            self.shares.segments(self.circulating.other(), reader, &mut s.segments);
            needed.clear();
            let circulating = (&**held, self.circulating);
            join(&s.segments, circulating, Class::All, &self.allowed, 0, 0, &mut s.intervals, needed);
            intervals.extend(needed.iter().map(|f| (f.owner_row, f.owner_row + i64::from(f.range.len))));
        }
        unite(intervals);
        let mut first_interval = 0;
        for v in held.iter().map(|v| &v.range) {
            let end = v.row + i64::from(v.len);
            first_interval += intervals[first_interval..].iter().take_while(|i| i.1 <= v.row).count();
            for i in intervals[first_interval..].iter().take_while(|i| i.0 < end) {
                let (i0, i1) = ((i.0.max(v.row) - v.row) as u32, (i.1.min(end) - v.row) as u32);
                v.split(i0, i1, |i, piece| {
                    let owner_row = v.row + i64::from(i);
                    union.push(Fragment { peer: peer as u32, owner_row, range: Range { row, ..piece } });
                    row += i64::from(piece.len);
                });
            }
        }
        row
    }

    /// `s.nodes.union` := the rows of the node slot of `gateway`, holder by holder; returns how many there are.
    pub(super) fn list_node_slot(&self, gateway: usize, node: u32, split: u32, s: &mut RangeScratch) -> i64 {
        s.nodes.union.clear();
        let owners = self.counterparts(gateway, node, true);
        let rows = owners.fold(0, |row, owner| self.add_union(owner, gateway, owner, row, s));
        let holders = &self.splits[split as usize];
        s.nodes.bounds.clear();
        s.nodes.bounds.push(0);
        if holders.is_alone() {
            s.nodes.bounds.push(rows);
            return rows;
        }
        (0..holders.places().len()).for_each(|holder| add_part(holders, holder, &mut s.nodes));
        s.nodes.take_parts();
        rows
    }

    /// Appends what `stationary` needs of the node slot in `s.nodes.union`.
    fn join_node_slot(&self, stationary: &[Segment], peer: usize, mut row: i64, s: &mut RangeScratch) -> i64 {
        let NodeScratch { union, held, .. } = &mut s.nodes;
        for of_owner in union.chunk_by(|a, b| a.peer == b.peer) {
            held.clear();
            held.extend(of_owner.iter().map(|f| Segment { range: f.range, reverse: false }));
            let circulating = (&**held, self.circulating);
            let (intervals, fragments) = (&mut s.intervals, &mut s.fragments);
            row = join(stationary, circulating, Class::All, &self.allowed, peer as u32, row, intervals, fragments);
        }
        row
    }

    /// Appends the rows in `s.nodes.union`, stored next to the share of `gateway`, that `stationary` needs.
    pub(super) fn join_beside(
        &self,
        stationary: &[Segment],
        gateway: usize,
        peer: usize,
        row: i64,
        s: &mut RangeScratch,
    ) -> i64 {
        let (at, share) = (s.fragments.len(), self.shares.rows(self.circulating, gateway) as i64);
        let end = self.join_node_slot(stationary, peer, row, s);
        s.fragments[at..].iter_mut().for_each(|f| f.owner_row += share);
        end
    }

    /// As `list_incoming`, for rows of another node.
    pub(super) fn list_incoming_of_node(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        if step.hop == Hop::Local {
            return self.others(self.place(step), true).fold(0, |row, (gateway, _)| {
                self.list_node_slot(gateway, step.node, step.split, s);
                self.join_node_slot(&self.stationary, gateway, row, s)
            }) as u64;
        }
        let rows = self.list_node_slot(self.me, step.node, step.split, s);
        let holders = &self.splits[step.split as usize];
        let (first, end) = (s.nodes.bounds[holders.me()], s.nodes.bounds[holders.me() + 1]);
        match step.hop {
            Hop::Passed => {
                for (holder, place) in holders.others() {
                    let row = s.nodes.bounds[holder];
                    s.fragments.extend(passed(place, row, row, s.nodes.bounds[holder + 1] - row));
                }
                (rows - (end - first)) as u64
            }
            Hop::Crossed => self.take_part(step.hop, (0, rows), s),
            _ => self.take_part(step.hop, (first, end), s),
        }
    }

    /// As `list_outgoing`, for rows to or of another node.
    pub(super) fn list_outgoing_of_node(&self, step: &RingStep, s: &mut RangeScratch) -> u64 {
        let holders = &self.splits[step.split as usize];
        if step.hop == Hop::Passed {
            self.list_node_slot(self.me, step.node, step.split, s);
            let (first, mut row) = (s.nodes.bounds[holders.me()], 0);
            let rows = s.nodes.bounds[holders.me() + 1] - first;
            for (_, place) in holders.others() {
                s.fragments.extend(passed(place, first, row, rows));
                row += rows;
            }
            return row as u64;
        }
        if step.hop != Hop::Local {
            s.nodes.union.clear();
            let gateways = self.counterparts(self.me, step.node, false);
            let mut rows = gateways.fold(0, |row, gateway| self.add_union(self.me, gateway, gateway, row, s));
            if step.hop != Hop::Crossed && !holders.is_alone() {
                s.nodes.bounds.clear();
                add_part(holders, holders.me(), &mut s.nodes);
                rows = s.nodes.bounds[0];
                s.nodes.take_parts();
            }
            return self.take_part(step.hop, (0, rows), s);
        }
        self.list_node_slot(self.me, step.node, step.split, s);
        let mut readers = core::mem::take(&mut s.segments);
        let rows = self.others(self.place(step), false).fold(0, |row, (reader, _)| {
            self.shares.segments(self.circulating.other(), reader, &mut readers);
            self.join_node_slot(&readers, reader, row, s)
        });
        s.segments = readers;
        rows as u64
    }

    /// `s.fragments` := the rows `first..end` of `s.nodes.union`; if they are about to cross, only the part that
    /// crosses. The sizes of parts differ by one row at most.
    fn take_part(&self, hop: Hop, (mut first, mut end): (i64, i64), s: &mut RangeScratch) -> u64 {
        if let Hop::Crossing { part } = hop {
            let at = |i: usize| first + cut(i, (end - first) as usize, self.parts()) as i64;
            (first, end) = (at(part as usize), at(part as usize + 1));
        }
        take_rows(&s.nodes.union, (first, end), 0, &mut s.fragments) as u64
    }
}

/// Appends a holder's part of the rows of each owner, or for each reader, in the union to `parts`.
fn add_part(holders: &Holders, holder: usize, s: &mut NodeScratch) {
    let NodeScratch { union, parts, bounds, .. } = s;
    let mut row = bounds.last().copied().unwrap_or(0);
    for of_peer in union.chunk_by(|a, b| a.peer == b.peer) {
        let first = of_peer[0].range.row;
        let (a, e) = holders.part(holder, of_peer.iter().map(|f| i64::from(f.range.len)).sum());
        row += take_rows(of_peer, (first + a, first + e), row - first - a, parts);
    }
    bounds.push(row);
}

/// Appends the rows `first..end` of some fragments, with `by` added to their row numbers; returns their number.
fn take_rows(from: &[Fragment], (first, end): (i64, i64), by: i64, into: &mut Vec<Fragment>) -> i64 {
    for f in from {
        let (row, last) = (f.range.row, f.range.row + i64::from(f.range.len));
        let (i0, i1) = ((first.max(row) - row), (end.min(last) - row));
        if i0 < i1 {
            f.range.split(i0 as u32, i1 as u32, |i, piece| {
                let range = Range { row: row + i64::from(i) + by, ..piece };
                into.push(Fragment { peer: f.peer, owner_row: f.owner_row + i64::from(i), range });
            });
        }
    }
    end - first
}

/// Rows of a node slot that are passed on to or from the Ulysses rank at `place`, without regard to their tokens.
fn passed(place: u32, owner_row: i64, row: i64, rows: i64) -> Option<Fragment> {
    let range = Range { row, pos: 0, len: rows as u32, block: 1, period: 1, doc: 0 };
    (rows > 0).then_some(Fragment { peer: place, owner_row, range })
}

#[cfg(test)]
mod holder_tests;
#[cfg(test)]
mod tests;
