// SPDX-License-Identifier: MIT OR Apache-2.0
//! The all-to-alls of k and v where a node has several ranks that hold the same kv head: a row crosses to a node once.
//!
//! Ulysses ranks `n · L .. (n + 1) · L` are node n. The kv heads that its ranks hold together are consecutive. The rows
//! of the owner at place i of its node cross with these heads to the rank at place i of the reading node, its
//! *gateway*. So each network card carries the rows of one owner of each other node, as on the ring
//! ([`ring_steps`](crate::schedule::ring_steps)). In a second exchange, inside the node, the gateway sends each rank
//! its heads. Rows between ranks of one node are sent directly, in the first exchange.
//!
//! Gradients are sent back the same way. The ranks of a node send their gradients to the gateway of each owner. The
//! gateway sums them in rank order, in the accumulator's type; a second exchange sends the sums to the owners. A sum is
//! rounded before it crosses if all ranks that hold its head are in the node (this changes no bit), or if the plan's
//! wire type asks for it.
//!
//! In the ordered form a sum is made q head by q head, from the first on, so that its bits do not depend on the
//! placement of heads. So a node can sum a kv head only if it has the first of its q heads. If an earlier node has
//! that, the partials cross one by one, and the owner adds them.

use alloc::vec::Vec;
use core::ops::Range;

use super::{
    builder::{Builder, Life},
    ulysses::{Heads, OwnParts},
};
use crate::{
    batch::Side,
    element::Dtype,
    schedule::{BufferView, TensorId},
};

/// One tensor of k's side on its way to the ranks that hold its heads.
pub(super) struct Crossing {
    /// The ring share's rows for the rank's own heads, by pass.
    pub held: Vec<BufferView>,
    /// The rows that crossed to this rank, with their owner; they have all kv heads of the node.
    crossed: Vec<(usize, BufferView)>,
}

/// Gradients of one tensor that have arrived from the ranks of the node, by rank.
pub(super) struct NodeParts {
    /// Gradients of this rank's own rows.
    own: Vec<BufferView>,
    /// Gradients of rows that other nodes own and that this rank is the gateway of.
    of_owners: Vec<(usize, Vec<BufferView>)>,
}

/// The gradients of k or v that a node sends to one owner.
struct NodeHeads {
    /// The kv heads whose sums cross.
    sums: Range<u32>,
    /// The q heads whose partials cross; all of them read one kv head.
    partials: Range<u32>,
    /// Whether each sum has the gradients of all ranks that hold its head.
    complete: bool,
}

impl Builder<'_> {
    /// The Ulysses ranks of a node.
    fn ranks_of(&self, node: usize) -> Range<usize> {
        node * self.ranks_of_node..(node + 1) * self.ranks_of_node
    }

    /// This rank's node, and the place in it.
    fn node_place(&self) -> (usize, usize) {
        (self.coordinates.ulysses / self.ranks_of_node, self.coordinates.ulysses % self.ranks_of_node)
    }

    /// The ranks at this rank's place in the other nodes. Each is the gateway of this rank's rows in its node, and this
    /// rank is the gateway of theirs.
    fn counterparts(&self) -> impl Iterator<Item = usize> + use<> {
        let ((node, place), ranks) = (self.node_place(), self.ranks_of_node);
        (0..self.out.ulysses / ranks).filter(move |&n| n != node).map(move |n| n * ranks + place)
    }

    /// First kv head of a node, and number of its kv heads.
    fn kv_of_node(&self, node: usize) -> (u32, u32) {
        let ranks = self.ranks_of(node);
        let (first, end) = (self.heads[ranks.start].kv.start, self.heads[ranks.end - 1].kv.end);
        (first, end - first)
    }

    /// The spans of kv heads of a rank, by pass.
    fn kv_spans(&self, u: usize) -> Vec<(u32, u32)> {
        let spans = (0..self.passes[u].len()).map(|pass| self.span(Heads::Kv(pass), u));
        spans.filter(|span| span.1 > 0).collect()
    }

    /// The first exchange of the rank's own rows of a tensor of k's side; `source` has all heads of these rows.
    pub(super) fn exchange_in_over_nodes(&mut self, name: &'static str, source: BufferView) -> Crossing {
        let (dtype, dim, me) = (self.dtype_of(source), self.dim_of(source), self.coordinates.ulysses);
        let (node, (off, rows)) = (self.node_place().0, self.part(Side::K, me));
        let spans = self.kv_spans(me);
        let held: Vec<BufferView> = spans
            .iter()
            .map(|span| self.buffer(Life::Throughout, name, dtype, self.share(Side::K), span.1, dim))
            .collect();
        for (&(first, count), &held) in spans.iter().zip(&held) {
            self.block(held.slice(off, rows), &[source.of_heads(first, count)]);
        }
        for u in self.ranks_of(node).filter(|&u| u != me) {
            for (first, count) in self.kv_spans(u) {
                self.send_packed(u, "packed for peers", source.of_heads(first, count), (dtype, dim));
            }
            let (off, rows) = self.part(Side::K, u);
            held.iter().for_each(|held| self.message(self.peer(u), held.slice(off, rows), false));
        }
        let whole = spans == [self.kv_of_node(node)];
        let crossed = self.counterparts().map(|owner| {
            let (first, count) = self.kv_of_node(owner / self.ranks_of_node);
            self.send_packed(owner, "packed for a node", source.of_heads(first, count), (dtype, dim));
            let (off, rows) = self.part(Side::K, owner);
            // If all ranks of the node hold the same heads, rows are received in their final place.
            let into = match whole {
                true => held[0].slice(off, rows),
                false => self.buffer(Life::In, "from another node", dtype, rows, self.kv_of_node(node).1, dim),
            };
            self.message(self.peer(owner), into, false);
            (owner, into)
        });
        let crossed = crossed.collect();
        Crossing { held, crossed }
    }

    /// Packs some heads of the rank's own rows, and sends them to a Ulysses rank.
    pub(super) fn send_packed(&mut self, u: usize, name: &'static str, from: BufferView, (dtype, dim): (Dtype, usize)) {
        if from.rows > 0 && from.heads > 0 {
            let leaving = self.buffer(Life::In, name, dtype, from.rows, from.heads, dim);
            self.block(leaving, &[from]);
            self.message(self.peer(u), leaving, true);
        }
    }

    /// The second exchange: rows that crossed are sent to the ranks of the node.
    pub(super) fn pass_on(&mut self, t: &Crossing) {
        let (me, node) = (self.coordinates.ulysses, self.node_place().0);
        let (of_node, spans) = (self.kv_of_node(node), self.kv_spans(me));
        let others: Vec<usize> = self.ranks_of(node).filter(|&u| u != me).collect();
        for &(owner, crossed) in t.crossed.iter().filter(|(_, crossed)| crossed.rows > 0) {
            let (dtype, dim) = (self.dtype_of(crossed), self.dim_of(crossed));
            let (off, rows) = self.part(Side::K, owner);
            let some = |(first, count): (u32, u32)| crossed.of_heads(first - of_node.0, count);
            for (&span, held) in spans.iter().zip(&t.held).filter(|(_, held)| held.buf != crossed.buf) {
                self.block(held.slice(off, rows), &[some(span)]);
            }
            // Ranks with the same heads get the same rows.
            let mut packed = Vec::from([(of_node, crossed)]);
            for &u in &others {
                for span in self.kv_spans(u) {
                    let known = packed.iter().find(|(of, _)| *of == span).map(|(_, view)| *view);
                    let leaving = known.unwrap_or_else(|| {
                        let leaving = self.buffer(Life::In, "packed for peers", dtype, rows, span.1, dim);
                        self.block(leaving, &[some(span)]);
                        packed.push((span, leaving));
                        leaving
                    });
                    self.message(self.peer(u), leaving, true);
                }
            }
        }
        for &u in &others {
            for n in (0..self.out.ulysses / self.ranks_of_node).filter(|&n| n != node) {
                let (off, rows) = self.part(Side::K, n * self.ranks_of_node + u % self.ranks_of_node);
                t.held.iter().for_each(|held| self.message(self.peer(u), held.slice(off, rows), false));
            }
        }
    }

    /// Exchanges gradients of k or v among the ranks of the node; returns those of this rank's own rows, by rank.
    /// `wire`, if any, is `held` in the type that is sent.
    pub(super) fn exchange_near(
        &mut self,
        held: BufferView,
        wire: Option<BufferView>,
        per_q_head: bool,
    ) -> Vec<BufferView> {
        let (me, sent) = (self.coordinates.ulysses, wire.unwrap_or(held));
        let element = (self.dtype_of(sent), self.dim_of(sent));
        let near = self.ranks_of(self.node_place().0).map(|u| {
            let from = if u == me { held } else { sent };
            self.exchange_back(from, Side::K, u, self.key_heads(u, per_q_head), element)
        });
        near.collect()
    }

    /// The first exchange of gradients back, inside the node: `held` has the ring share's rows for the rank's own kv
    /// heads, or a partial for each of its q heads.
    pub(super) fn gather_in_node(&mut self, held: BufferView, per_q_head: bool) -> NodeParts {
        let (me, node, dim) = (self.coordinates.ulysses, self.node_place().0, self.dim_of(held));
        let ranks = self.ranks_of(node);
        let own = self.exchange_near(held, None, per_q_head);
        for far in (0..self.out.ulysses).filter(|u| !ranks.contains(u)) {
            let gateway = ranks.start + far % self.ranks_of_node;
            if gateway != me {
                let (off, rows) = self.part(Side::K, far);
                self.message(self.peer(gateway), held.slice(off, rows), true);
            }
        }
        let accumulator = self.accumulator();
        let of_owners = self.counterparts().map(|owner| {
            let (off, rows) = self.part(Side::K, owner);
            let arrive = ranks.clone().map(|u| {
                if u == me {
                    return held.slice(off, rows);
                }
                let heads = self.key_heads(u, per_q_head);
                let from = self.buffer(Life::Out, "returned to a gateway", accumulator, rows, heads, dim);
                self.message(self.peer(u), from, false);
                from
            });
            (owner, arrive.collect())
        });
        let of_owners = of_owners.collect();
        NodeParts { own, of_owners }
    }

    fn heads_from(&self, node: usize, per_q_head: bool) -> NodeHeads {
        let (ranks, group) = (self.ranks_of(node), self.plan.problem().group() as u32);
        let (first, last) = (&self.heads[ranks.start], &self.heads[ranks.end - 1]);
        let begun_before = first.q.start % group > 0;
        let sums = first.kv.start + u32::from(per_q_head && begun_before)..last.kv.end;
        let partials = if per_q_head { first.q.start..(sums.start * group).min(last.q.end) } else { 0..0 };
        let complete = (per_q_head || !begun_before) && last.q.end % group == 0;
        NodeHeads { sums, partials, complete }
    }

    /// The type in which sums of a node cross.
    fn sum_dtype(&self, from: &NodeHeads, wire: Dtype) -> Dtype {
        let e = self.element();
        if from.complete && e.size() <= wire.size() { e } else { wire }
    }

    /// Buffers for the gradients of some owner's rows that a node sends.
    fn crossing_buffers(
        &mut self,
        [sums, partials]: [&'static str; 2],
        from: &NodeHeads,
        rows: u64,
        dim: usize,
        wire: Dtype,
    ) -> [BufferView; 2] {
        let dtype = self.sum_dtype(from, wire);
        let sums = self.buffer(Life::Out, sums, dtype, rows, from.sums.len() as u32, dim);
        let partials = match from.partials.is_empty() {
            true => sums.of_heads(0, 0),
            false => self.buffer(Life::Out, partials, self.accumulator(), rows, from.partials.len() as u32, dim),
        };
        [sums, partials]
    }

    /// Sums the gradients of other owners' rows, and sends each sum to its owner; receives the sums of this rank's
    /// rows.
    pub(super) fn exchange_sums(&mut self, parts: NodeParts, wire: Dtype, per_q_head: bool) -> OwnParts {
        let node = self.node_place().0;
        let (ranks, leaves) = (self.ranks_of(node), self.heads_from(node, per_q_head));
        let rows = self.part(Side::K, self.coordinates.ulysses).1;
        let mut far = Vec::with_capacity(parts.of_owners.len());
        let mut sources = Vec::new();
        for (owner, from) in &parts.of_owners {
            let (dim, owners_rows) = (self.dim_of(from[0]), from[0].rows);
            let leaving =
                self.crossing_buffers(["sum of a node", "partials to cross"], &leaves, owners_rows, dim, wire);
            for g in leaves.sums.clone() {
                sources.clear();
                ranks.clone().zip(from).for_each(|(u, &of)| self.add_parts(g, u, of, per_q_head, &mut sources));
                self.block(leaving[0].of_heads(g - leaves.sums.start, 1), &sources);
            }
            for (u, of) in ranks.clone().zip(from).filter(|_| !leaves.partials.is_empty()) {
                let q = self.heads[u].q.clone();
                let end = q.end.min(leaves.partials.end).max(q.start);
                let to = leaving[1].of_heads(q.start - leaves.partials.start, end - q.start);
                self.block(to, &[of.of_heads(0, end - q.start)]);
            }
            leaving.iter().for_each(|&leaving| self.message(self.peer(*owner), leaving, true));
            let there = owner / self.ranks_of_node;
            let comes = self.heads_from(there, per_q_head);
            let arriving = self.crossing_buffers(["sum from a node", "partials from a node"], &comes, rows, dim, wire);
            arriving.iter().for_each(|&arriving| self.message(self.peer(*owner), arriving, false));
            far.push((there, arriving));
        }
        OwnParts { near: parts.own, far }
    }

    /// The sums over all ranks that hold a kv head, in rank order, to the caller.
    pub(super) fn add_up(&mut self, tensor: TensorId, parts: &OwnParts, per_q_head: bool) {
        let (user, node) = (self.user(tensor), self.node_place().0);
        let group = self.plan.problem().group() as u32;
        let mut sources = Vec::new();
        for g in 0..user.heads {
            sources.clear();
            for n in 0..self.out.ulysses / self.ranks_of_node {
                let Some((_, [sums, partials])) = parts.far.iter().find(|far| far.0 == n) else {
                    let near = self.ranks_of(node).zip(&parts.near);
                    near.for_each(|(u, &of)| self.add_parts(g, u, of, per_q_head, &mut sources));
                    continue;
                };
                let from = self.heads_from(n, per_q_head);
                if from.sums.contains(&g) {
                    sources.push(sums.of_heads(g - from.sums.start, 1));
                }
                let q = from.partials.start.max(g * group)..from.partials.end.min((g + 1) * group);
                sources.extend(q.map(|h| partials.of_heads(h - from.partials.start, 1)));
            }
            self.block(user.of_heads(g, 1), &sources);
        }
    }
}
