// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel calls of each direction, between the two all-to-alls.
//!
//! Where the accumulator is the element type and there is one Ulysses rank, sums are kept in the caller's own tensors.

use alloc::{vec, vec::Vec};

use super::{
    builder::{Builder, Life, Pass},
    lanes::PendingOp,
    ring::{LOCAL, Ring},
    travel::Travel,
    ulysses::{Held, RowSide},
};
use crate::{
    batch::Side,
    call::{Gradients, HeadMap},
    element::Dtype,
    plan::Wire,
    schedule::{AttendOp, AttendPart, BackwardOp, BufferView, CirculatingSide, Form, OpKind, TensorId},
};

/// The round of a travel after those of all passes.
const AFTER_ALL: usize = usize::MAX;

impl Builder<'_> {
    fn head_map(&self, pass: Pass) -> HeadMap {
        let share = self.mine();
        HeadMap {
            q_offset: share.q.start + pass.q.0,
            kv_offset: share.kv.start + pass.kv.0,
            group: self.plan.problem().group() as u32,
        }
    }

    pub(super) fn forward(&mut self) {
        let held = self.all_to_all_in();
        let (o, lse) = if self.out.ulysses > 1 {
            let (rows, heads, dim) = (self.share(Side::Q), self.mine().q.len() as u32, self.plan.problem().value_dim());
            (
                self.buffer(Life::Throughout, "o", self.element(), rows, heads, dim),
                self.buffer(Life::Throughout, "lse of the share", self.accumulator(), rows, heads, 1),
            )
        } else {
            (self.user(TensorId::O), self.user(TensorId::Lse))
        };
        if self.out.queries.is_some() {
            self.forward_queries(&held, (o, lse));
            self.all_to_all_out_forward(o, lse);
            return;
        }
        let many = self.out.ring_steps(CirculatingSide::Keys).continues();
        let running = many.then(|| self.running(o));
        let mut ring = Ring::default();
        for (round, pass) in self.own_passes().into_iter().enumerate() {
            let own = vec![held.k[round], held.v[round]];
            let at = (pass.round, pass.split);
            let t = self.travel(&mut ring.regions, CirculatingSide::Keys, at, own, None);
            let of_pass = |v: BufferView| v.of_heads(pass.q.0, pass.q.1);
            let heads = self.head_map(pass);
            for ring_step in t.steps() {
                let Some(arrival) = self.fetch(&mut ring, &t, ring_step) else { continue };
                self.attend(&mut ring, &t, ring_step, &arrival, |at, _| {
                    OpKind::Attend(AttendOp {
                        part: AttendPart::Keys,
                        ring_step: ring_step as u32,
                        q: of_pass(held.q),
                        k: at[0],
                        v: at[1],
                        running: running.map(|(o, lse)| (of_pass(o), of_pass(lse))),
                        result: Some((of_pass(o), of_pass(lse))),
                        heads,
                    })
                });
            }
        }
        self.weave(ring.lanes, held.last);
        self.all_to_all_out_forward(o, lse);
    }

    /// The running o and its lse. The running o is `o` itself if that has the accumulator's type.
    fn running(&mut self, o: BufferView) -> (BufferView, BufferView) {
        let (accumulator, dim) = (self.accumulator(), self.plan.problem().value_dim());
        let running = if self.element() == accumulator {
            o
        } else {
            self.buffer(Life::Ring, "running o", accumulator, o.rows, o.heads, dim)
        };
        (running, self.buffer(Life::Ring, "running lse", accumulator, o.rows, o.heads, 2))
    }

    /// q circulates. The call for the own share begins the running result; the partial results of other ranks are
    /// returned and merged into it; at the end it is finished.
    fn forward_queries(&mut self, held: &Held, result: (BufferView, BufferView)) {
        let running = self.running(result.0);
        let mut ring = Ring::default();
        let home = (vec![running.0, running.1], self.accumulator());
        let t = self.travel(&mut ring.regions, CirculatingSide::Queries, (0, 0), vec![held.q], Some(home));
        let heads = self.mine().map(self.plan.problem().group() as u32);
        let (k, v) = (held.k[0], held.v[0]);
        for ring_step in t.steps() {
            let Some(arrival) = self.fetch(&mut ring, &t, ring_step) else { continue };
            self.attend(&mut ring, &t, ring_step, &arrival, |at, partials| {
                let to = partials.map_or(running, |p| (p[0], p[1]));
                let (part, ring_step) = (AttendPart::Queries, ring_step as u32);
                OpKind::Attend(AttendOp { part, ring_step, q: at[0], k, v, running: Some(to), result: None, heads })
            });
        }
        self.finish_running(
            &mut ring,
            AttendOp {
                part: AttendPart::Finish,
                ring_step: t.ring_steps.first(0) as u32,
                q: held.q,
                k,
                v,
                running: Some(running),
                result: Some(result),
                heads,
            },
        );
        self.weave(ring.lanes, held.last);
    }

    /// A sum in the accumulator's type. With `own` and one Ulysses rank it is the caller's tensor, if that has this
    /// type.
    fn sum(
        &mut self,
        name: &'static str,
        tensor: TensorId,
        side: Side,
        heads: u32,
        dim: usize,
        own: bool,
    ) -> BufferView {
        if own && self.out.ulysses == 1 && self.element() == self.accumulator() {
            self.user(tensor)
        } else {
            self.buffer(Life::Throughout, name, self.accumulator(), self.share(side), heads, dim)
        }
    }

    pub(super) fn backward(&mut self) {
        let held = self.all_to_all_in();
        let Some(row) = held.row else { return };
        let sinks = held.local_delta.filter(|_| self.plan.problem().sinks()).map(|d| self.sink_gradient(d));
        let p = self.plan.problem();
        let (dk, dv, ordered) = (p.head_dim(), p.value_dim(), self.plan.form() == Form::Ordered);
        let (q_heads, kv_heads) = (self.mine().q.len() as u32, self.mine().kv.len() as u32);
        let key_heads = if ordered { q_heads } else { kv_heads };
        let dq = self.sum("sum of dq", TensorId::Dq, Side::Q, q_heads, dk, true);
        let dkv = (
            self.sum("sum of dk", TensorId::Dk, Side::K, key_heads, dk, !ordered),
            self.sum("sum of dv", TensorId::Dv, Side::K, key_heads, dv, !ordered),
        );
        let mut ring = Ring::default();
        let of = BackwardOperands { held: &held, row, dq, dkv };
        if ordered {
            self.backward_ordered(&mut ring, &of);
        } else if self.out.keys.is_some() {
            self.backward_keys(&mut ring, &of);
        } else {
            self.backward_queries(&mut ring, &of);
        }
        self.weave(ring.lanes, held.last);
        self.all_to_all_out_backward(dq, dkv, ordered);
        if let Some(partial) = sinks {
            self.all_gather_sink_gradients(partial);
        }
    }

    fn wire(&self) -> Dtype {
        match self.plan.options().wire {
            Wire::Full => self.accumulator(),
            Wire::Bf16 => Dtype::Bf16,
        }
    }

    /// k and v circulate; dk and dv are returned to their owner.
    fn backward_keys(&mut self, ring: &mut Ring, of: &BackwardOperands) {
        for (round, pass) in self.own_passes().into_iter().enumerate() {
            let sums = [of.dkv.0, of.dkv.1].map(|sum| sum.of_heads(pass.kv.0, pass.kv.1));
            let (own, at) = (vec![of.held.k[round], of.held.v[round]], (pass.round, pass.split));
            let home = Some((sums.to_vec(), self.wire()));
            let t = self.travel(&mut ring.regions, CirculatingSide::Keys, at, own, home);
            self.attend_keys(ring, of, &t, pass, Some(&sums));
        }
    }

    /// The calls of a pass: they make dq and, if there are sums for them, dk and dv.
    fn attend_keys(
        &mut self,
        ring: &mut Ring,
        of: &BackwardOperands,
        t: &Travel,
        pass: Pass,
        sums: Option<&[BufferView]>,
    ) {
        let of_pass = |v: BufferView| v.of_heads(pass.q.0, pass.q.1);
        let heads = self.head_map(pass);
        for ring_step in t.steps() {
            let Some(arrival) = self.fetch(ring, t, ring_step) else { continue };
            self.attend(ring, t, ring_step, &arrival, |at, partials| {
                OpKind::Backward(BackwardOp {
                    ring_step: ring_step as u32,
                    side: CirculatingSide::Keys,
                    q: of_pass(of.held.q),
                    k: at[0],
                    v: at[1],
                    d_o: of_pass(of.row.d_o),
                    lse: of_pass(of.row.lse),
                    delta: of_pass(of.row.delta),
                    dq: Some(of_pass(of.dq)),
                    dkv: partials.or(sums).map(|to| (to[0], to[1])),
                    accumulate_keys: false,
                    per_q_head: false,
                    gradients: if sums.is_some() { Gradients::All } else { Gradients::Queries },
                    heads,
                })
            });
        }
    }

    /// The q side circulates; dq is returned to its owner.
    fn backward_queries(&mut self, ring: &mut Ring, of: &BackwardOperands) {
        let home = Some((vec![of.dq], self.wire()));
        let t = self.travel(&mut ring.regions, CirculatingSide::Queries, (0, 0), of.row_side(), home);
        self.attend_queries(ring, (of.held.k[0], of.held.v[0]), &t, Some(of.dq), of.dkv);
    }

    fn attend_queries(
        &mut self,
        ring: &mut Ring,
        (k, v): (BufferView, BufferView),
        t: &Travel,
        dq: Option<BufferView>,
        dkv: (BufferView, BufferView),
    ) {
        let heads = self.mine().map(self.plan.problem().group() as u32);
        for ring_step in t.steps() {
            let Some(arrival) = self.fetch(ring, t, ring_step) else { continue };
            self.attend(ring, t, ring_step, &arrival, |at, partials| {
                OpKind::Backward(BackwardOp {
                    ring_step: ring_step as u32,
                    side: CirculatingSide::Queries,
                    q: at[0],
                    k,
                    v,
                    d_o: at[1],
                    lse: at[2],
                    delta: at[3],
                    dq: dq.map(|sum| partials.map_or(sum, |p| p[0])),
                    dkv: Some(dkv),
                    accumulate_keys: ring_step > t.ring_steps.first(0),
                    per_q_head: dq.is_none(),
                    gradients: if dq.is_some() { Gradients::All } else { Gradients::Keys },
                    heads,
                })
            });
        }
    }

    /// Both sides are gathered in turn: k and v for dq, then the q side for dk and dv, one partial for each q head.
    fn backward_ordered(&mut self, ring: &mut Ring, of: &BackwardOperands) {
        let held = of.held;
        let passes = self.own_passes();
        let mut keys = (held.k[0], held.v[0]);
        if passes.len() > 1 {
            // Passes fetched these heads one after another into one buffer.
            let heads = self.mine().kv.len() as u32;
            let mut whole = |name, of: &[BufferView]| {
                let (dtype, dim) = (self.dtype_of(of[0]), self.dim_of(of[0]));
                self.buffer(Life::Ring, name, dtype, of[0].rows, heads, dim)
            };
            keys = (whole("k of all heads", &held.k), whole("v of all heads", &held.v));
            let blocks = [(keys.0, &held.k), (keys.1, &held.v)].into_iter().flat_map(|(whole, held)| {
                passes.iter().zip(held).map(move |(pass, &held)| (whole.of_heads(pass.kv.0, pass.kv.1), held))
            });
            let kind = self.transform(blocks);
            ring.lanes.compute.push(PendingOp { kind, step: 0, phase: LOCAL, after: [None; 2] });
        }
        for (round, &pass) in passes.iter().enumerate() {
            let (own, at) = (vec![held.k[round], held.v[round]], (pass.round, pass.split));
            let t = self.travel(&mut ring.regions, CirculatingSide::Keys, at, own, None);
            self.attend_keys(ring, of, &t, pass, None);
        }
        let t = self.travel(&mut ring.regions, CirculatingSide::Queries, (AFTER_ALL, 0), of.row_side(), None);
        self.attend_queries(ring, keys, &t, None, of.dkv);
    }
}

/// The operands of the backward's calls, and the sums of the gradients that they make.
struct BackwardOperands<'a> {
    held: &'a Held,
    row: RowSide,
    dq: BufferView,
    dkv: (BufferView, BufferView),
}

impl BackwardOperands<'_> {
    /// The tensors that travel if the q side circulates.
    fn row_side(&self) -> Vec<BufferView> {
        vec![self.held.q, self.row.d_o, self.row.lse, self.row.delta]
    }
}
