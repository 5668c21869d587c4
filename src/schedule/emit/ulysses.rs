// SPDX-License-Identifier: MIT OR Apache-2.0
//! The all-to-alls: tokens are exchanged for heads, and back (DeepSpeed-Ulysses, Jacobs et al., 2023).
//!
//! In the first all-to-all each rank keeps the rows of its own heads and sends the rows of other heads to their ranks.
//! Rows are received in their final place, because a token-major buffer of few heads is contiguous in tokens; only the
//! sender packs. In the second all-to-all rows are sent in place, and the receiver unpacks. The gradients of a kv head
//! that several ranks read are received from each of them and summed in rank order. If such ranks share a node and
//! others are in another node, k, v and their gradients cross by [`gateways`](super::gateways).

use alloc::vec::Vec;

use super::builder::{Builder, Last, Life};
use crate::{
    batch::Side,
    element::Dtype,
    plan::Wire,
    schedule::{Buf, BufferView, Lane, OpKind, SINK_DIGITS, TensorId},
};

/// The rank's ring share for its own heads: the caller's tensors if there is one Ulysses rank, otherwise buffers.
pub(super) struct Held {
    pub q: BufferView,
    /// By pass.
    pub k: Vec<BufferView>,
    /// By pass.
    pub v: Vec<BufferView>,
    /// Backward only.
    pub row: Option<RowSide>,
    /// Backward only: delta of the rank's own rows, all heads.
    pub local_delta: Option<BufferView>,
    /// The last transform on the compute lane, and the exchange on the other.
    pub last: Last,
}

/// Tensors of q's side that the backward reads.
#[derive(Clone, Copy)]
pub(super) struct RowSide {
    pub d_o: BufferView,
    pub lse: BufferView,
    pub delta: BufferView,
}

/// Which heads of a tensor a Ulysses rank holds.
#[derive(Clone, Copy)]
pub(super) enum Heads {
    Q,
    Kv(usize),
}

/// All gradients of this rank's own rows of one tensor.
pub(super) struct OwnParts {
    /// From the ranks of the node.
    pub near: Vec<BufferView>,
    /// From each other node: the sums, and the partials of q heads.
    pub far: Vec<(usize, [BufferView; 2])>,
}

impl Builder<'_> {
    pub(super) fn span(&self, heads: Heads, u: usize) -> (u32, u32) {
        let share = &self.heads[u];
        match heads {
            Heads::Q => (share.q.start, share.q.len() as u32),
            Heads::Kv(pass) => {
                let kv = self.passes[u].get(pass).map_or((0, 0), |of| of.kv);
                (share.kv.start + kv.0, kv.1)
            }
        }
    }

    pub(super) fn dim_of(&self, view: BufferView) -> usize {
        match view.buf {
            Buf::Work(i) => self.out.buffers[i as usize].dim as usize,
            Buf::User(tensor) => tensor.dim(self.plan.problem()),
        }
    }

    pub(super) fn dtype_of(&self, view: BufferView) -> Dtype {
        match view.buf {
            Buf::Work(i) => self.out.buffers[i as usize].dtype,
            Buf::User(tensor) => tensor.dtype(self.plan.problem()),
        }
    }

    /// Brings `source` (this rank's rows, all heads) to the ring share's rows for the rank's own heads. `compact`: with
    /// one Ulysses rank, copy the caller's tensor too, because its strides may not be compact.
    fn exchange_in(
        &mut self,
        name: &'static str,
        source: BufferView,
        side: Side,
        heads: Heads,
        compact: bool,
    ) -> BufferView {
        let (dtype, dim) = (self.dtype_of(source), self.dim_of(source));
        let me = self.coordinates.ulysses;
        let (first, count) = self.span(heads, me);
        let (off, rows) = self.part(side, me);
        if self.out.ulysses == 1 && !compact {
            return source.of_heads(first, count);
        }
        let held = self.buffer(Life::Throughout, name, dtype, self.share(side), count, dim);
        self.block(held.slice(off, rows), &[source.of_heads(first, count)]);
        for u in (0..self.out.ulysses).filter(|&u| u != me) {
            let (first, count) = self.span(heads, u);
            self.send_packed(u, "packed for peers", source.of_heads(first, count), (dtype, dim));
            let (off, rows) = self.part(side, u);
            self.message(self.peer(u), held.slice(off, rows), false);
        }
        held
    }

    pub(super) fn peer(&self, u: usize) -> usize {
        self.rank - self.coordinates.ulysses + u
    }

    /// Everything the ring needs, in place.
    pub(super) fn all_to_all_in(&mut self) -> Held {
        let (blocks, messages) = (self.out.blocks.len(), self.out.messages.len());
        let options = self.plan.options();
        let ringed = self.plan.mesh().ring > 1;
        let backward = self.out.is_backward();
        let queries_travel = self.out.queries.is_some() && ringed;
        let packs_q = if backward { options.pack_inputs } else { self.plan.packs_forward_queries() };
        let pack_q = queries_travel && packs_q;
        let pack_k = self.out.keys.is_some() && ringed && (options.pack_inputs || options.passes > 1);
        let row_source = backward.then(|| {
            let (heads, rows) = (self.plan.problem().heads() as u32, self.user(TensorId::Q).rows);
            let delta = self.buffer(Life::Throughout, "delta", self.accumulator(), rows, heads, 1);
            self.push(OpKind::Delta { delta }, Lane::Compute, 0, "ulysses in", None);
            delta
        });
        let q = self.exchange_in("q", self.user(TensorId::Q), Side::Q, Heads::Q, pack_q);
        let row = row_source.map(|delta| RowSide {
            d_o: self.exchange_in("d_o", self.user(TensorId::DO), Side::Q, Heads::Q, pack_q),
            lse: self.exchange_in("lse", self.user(TensorId::Lse), Side::Q, Heads::Q, queries_travel),
            delta: self.exchange_in("delta of the share", delta, Side::Q, Heads::Q, false),
        });
        let (mut k, mut v) = (Vec::new(), Vec::new());
        let crossing = self.ranks_of_node < self.out.ulysses;
        let most = self.passes.iter().map(Vec::len).max().unwrap_or(0);
        for pass in 0..if crossing { 0 } else { most } {
            let brought = (
                self.exchange_in("k", self.user(TensorId::K), Side::K, Heads::Kv(pass), pack_k),
                self.exchange_in("v", self.user(TensorId::V), Side::K, Heads::Kv(pass), pack_k),
            );
            if brought.0.heads > 0 {
                k.push(brought.0);
                v.push(brought.1);
            }
        }
        let crossed = crossing.then(|| {
            [("k", TensorId::K), ("v", TensorId::V)]
                .map(|(name, tensor)| self.exchange_in_over_nodes(name, self.user(tensor)))
        });
        self.push_blocks(blocks, "ulysses in", None);
        let mut compute = self.last().compute;
        let mut communication = self.push_messages(messages, "ulysses in", compute);
        if let Some(tensors) = crossed {
            let (blocks, messages) = (self.out.blocks.len(), self.out.messages.len());
            tensors.iter().for_each(|t| self.pass_on(t));
            compute = self.push_blocks(blocks, "ulysses in", communication).or(compute);
            communication = self.push_messages(messages, "ulysses in", compute).or(communication);
            [k, v] = tensors.map(|t| t.held);
        }
        Held { q, k, v, row, local_delta: row_source, last: Last { compute, communication } }
    }

    /// Returns rows of `held` (the ring share for the rank's own q heads) to the ranks that sent them.
    fn exchange_out(&mut self, tensor: TensorId, held: BufferView) {
        for (to, arrived) in self.exchange_all_back(tensor, held) {
            self.block(to, &[arrived]);
        }
    }

    /// Sends rows of `held` back; returns the buffers of the rows that arrive, each with its place in the caller's
    /// `tensor`.
    fn exchange_all_back(&mut self, tensor: TensorId, held: BufferView) -> Vec<(BufferView, BufferView)> {
        let user = self.user(tensor);
        if held.buf == user.buf {
            return Vec::new();
        }
        let element = (self.dtype_of(held), self.dim_of(held));
        let back = (0..self.out.ulysses).map(|u| {
            let (first, count) = self.span(Heads::Q, u);
            (user.of_heads(first, count), self.exchange_back(held, Side::Q, u, count, element))
        });
        back.collect()
    }

    /// Sends rank `u` its rows of `held`; returns the buffer that receives the rows of its `count` heads, or this
    /// rank's own rows.
    pub(super) fn exchange_back(
        &mut self,
        held: BufferView,
        side: Side,
        u: usize,
        count: u32,
        (dtype, dim): (Dtype, usize),
    ) -> BufferView {
        let (me, (off, rows)) = (self.coordinates.ulysses, self.part(side, u));
        if u == me {
            return held.slice(off, rows);
        }
        self.message(self.peer(u), held.slice(off, rows), true);
        let rows = self.part(side, me).1;
        let arrived = self.buffer(Life::Out, "returned by peers", dtype, rows, count, dim);
        self.message(self.peer(u), arrived, false);
        arrived
    }

    /// Returns gradients of k or v: `held` has the rank's own kv heads, or one partial for each of its q heads. `wire`,
    /// if any, is `held` in the type that is sent.
    fn exchange_keys_out(&mut self, tensor: TensorId, held: BufferView, wire: Option<BufferView>, per_q_head: bool) {
        let user = self.user(tensor);
        if held.buf == user.buf {
            return;
        }
        let near = self.exchange_near(held, wire, per_q_head);
        if per_q_head || self.plan.shares_kv_heads() {
            return self.add_up(tensor, &OwnParts { near, far: Vec::new() }, per_q_head);
        }
        for (u, &arrived) in near.iter().enumerate() {
            let kv = self.heads[u].kv.clone();
            self.block(user.of_heads(kv.start, kv.len() as u32), &[arrived]);
        }
    }

    /// Heads of a gradient of k or v that rank `u` holds.
    pub(super) fn key_heads(&self, u: usize, per_q_head: bool) -> u32 {
        let share = &self.heads[u];
        (if per_q_head { share.q.len() } else { share.kv.len() }) as u32
    }

    /// Appends the buffers of rank `u`'s gradients, `of_rank`, for kv head `g`: one sum, or a partial for each q head.
    pub(super) fn add_parts(
        &self,
        g: u32,
        u: usize,
        of_rank: BufferView,
        per_q_head: bool,
        parts: &mut Vec<BufferView>,
    ) {
        let (share, group) = (&self.heads[u], self.plan.problem().group() as u32);
        if per_q_head {
            let (a, e) = (share.q.start.max(g * group), share.q.end.min((g + 1) * group));
            parts.extend((a..e).map(|h| of_rank.of_heads(h - share.q.start, 1)));
        } else if share.kv.contains(&g) {
            parts.push(of_rank.of_heads(g - share.kv.start, 1));
        }
    }

    /// A copy of `held` in `dtype`, for sending. The rows `own` stay on this rank and are left out.
    fn narrowed(&mut self, held: BufferView, dtype: Dtype, own: Option<(u64, u64)>) -> BufferView {
        let dim = self.dim_of(held);
        let copy = self.buffer(Life::Out, "narrowed to travel", dtype, held.rows, held.heads, dim);
        let (first, rows) = own.unwrap_or((held.rows, 0));
        for (row, rows) in [(0, first), (first + rows, held.rows - first - rows)] {
            self.block(copy.slice(row, rows), &[held.slice(row, rows)]);
        }
        copy
    }

    /// o and lse to the caller.
    pub(super) fn all_to_all_out_forward(&mut self, o: BufferView, lse: BufferView) {
        let (blocks, messages) = (self.out.blocks.len(), self.out.messages.len());
        self.exchange_out(TensorId::O, o);
        self.exchange_out(TensorId::Lse, lse);
        let arrived = self.push_messages(messages, "ulysses out", self.last().compute);
        self.push_blocks(blocks, "ulysses out", arrived);
    }

    /// dq, dk, dv (sums in the accumulator's type) to the caller.
    ///
    /// A gradient with one holder is rounded before it is sent, which changes no bit and halves the bytes. A gradient
    /// with several holders is sent in the plan's wire type and rounded after the sum.
    pub(super) fn all_to_all_out_backward(&mut self, dq: BufferView, dkv: (BufferView, BufferView), per_q_head: bool) {
        let last = self.last();
        let blocks = self.out.blocks.len();
        let (e, a) = (self.element(), self.accumulator());
        let exchanging = self.out.ulysses > 1;
        let summed = per_q_head || self.plan.shares_kv_heads();
        let wire = match (summed, self.plan.options().wire) {
            (false, _) => e,
            (true, Wire::Full) => a,
            (true, Wire::Bf16) => Dtype::Bf16,
        };
        let dq_out = if exchanging && e != a { self.narrowed(dq, e, None) } else { dq };
        let own = self.part(Side::K, self.coordinates.ulysses);
        let crossing = self.ranks_of_node < self.out.ulysses;
        let narrow = |b: &mut Self, held: BufferView| {
            (exchanging && !crossing && wire != a).then(|| b.narrowed(held, wire, Some(own)))
        };
        let (dk_wire, dv_wire) = (narrow(self, dkv.0), narrow(self, dkv.1));
        let cast = self.push_blocks(blocks, "ulysses out", last.communication);
        let (blocks, messages) = (self.out.blocks.len(), self.out.messages.len());
        if crossing {
            let rows = self.exchange_all_back(TensorId::Dq, dq_out);
            let keys = [(TensorId::Dk, dkv.0), (TensorId::Dv, dkv.1)]
                .map(|(tensor, held)| (tensor, self.gather_in_node(held, per_q_head)));
            let arrived = self.push_messages(messages, "ulysses out", cast.or(last.compute));
            let messages = self.out.messages.len();
            let keys = keys.map(|(tensor, parts)| (tensor, self.exchange_sums(parts, wire, per_q_head)));
            let summed = self.push_blocks(blocks, "ulysses out", arrived.or(last.communication));
            let arrived = self.push_messages(messages, "ulysses out", summed.or(cast).or(last.compute)).or(arrived);
            let blocks = self.out.blocks.len();
            rows.into_iter().for_each(|(to, from)| self.block(to, &[from]));
            keys.iter().for_each(|(tensor, parts)| self.add_up(*tensor, parts, per_q_head));
            self.push_blocks(blocks, "ulysses out", arrived.or(last.communication));
            return;
        }
        self.exchange_out(TensorId::Dq, dq_out);
        self.exchange_keys_out(TensorId::Dk, dkv.0, dk_wire, per_q_head);
        self.exchange_keys_out(TensorId::Dv, dkv.1, dv_wire, per_q_head);
        let arrived = self.push_messages(messages, "ulysses out", cast.or(last.compute));
        self.push_blocks(blocks, "ulysses out", arrived.or(last.communication));
    }

    /// The sinks' gradient: each rank's partial is sent to all ranks of the group, and each rank sums them in rank
    /// order.
    pub(super) fn sink_gradient(&mut self, delta: BufferView) -> BufferView {
        let heads = self.plan.problem().heads() as u32;
        let digits = if self.plan.options().reproducible { SINK_DIGITS } else { 1 };
        let dim = self.plan.problem().sinks_per_head() * digits;
        let partial = self.buffer(Life::Throughout, "sink gradient", self.accumulator(), 1, heads, dim);
        self.push(OpKind::SinkGradient { delta, partial }, Lane::Compute, 0, "sinks", None);
        partial
    }

    pub(super) fn all_gather_sink_gradients(&mut self, partial: BufferView) {
        let (blocks, messages) = (self.out.blocks.len(), self.out.messages.len());
        let mut sources = Vec::new();
        for peer in self.out.group.clone() {
            if peer == self.rank {
                sources.push(partial);
                continue;
            }
            self.message(peer, partial, true);
            let (acc, dim) = (self.accumulator(), self.dim_of(partial));
            let arrived = self.buffer(Life::Throughout, "peer's sink gradient", acc, 1, partial.heads, dim);
            self.message(peer, arrived, false);
            sources.push(arrived);
        }
        let exact = self.plan.options().reproducible;
        let sum = if exact {
            let dim = self.dim_of(partial);
            self.buffer(Life::Throughout, "sum of sink gradients", self.accumulator(), 1, partial.heads, dim)
        } else {
            self.user(TensorId::Dsinks)
        };
        self.block(sum, &sources);
        let arrived = self.push_messages(messages, "sinks", self.last().compute);
        self.push_blocks(blocks, "sinks", arrived);
        if exact {
            self.push(OpKind::SinkTotal { digits: sum }, Lane::Compute, 0, "sinks", None);
        }
    }
}
