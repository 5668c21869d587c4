// SPDX-License-Identifier: MIT OR Apache-2.0
//! Returns: partial gradients, or partial results of a forward in which q circulates, are sent back to the owners of
//! the rows.

use alloc::vec::Vec;

use super::{LOCAL, Ring, phase_of};
use crate::schedule::{
    BufferView, OpKind,
    emit::{
        builder::Builder,
        lanes::{PendingOp, node_return_order, return_order},
        travel::{Home, Travel, turn_of},
    },
    ring_steps::Hop,
};

impl Builder<'_> {
    /// Adds the return of a ring step's gradients, if any, from the buffers of `turn`. `made` is the operation that
    /// computed them; `begun` is the one that begins the sums, if known.
    pub(super) fn come_home(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        home: &Home,
        ring_step: usize,
        turn: usize,
        (made, begun): (Option<usize>, Option<usize>),
    ) {
        let v = t.ring_steps.list()[ring_step];
        let order = return_order(v.step);
        if t.ring_steps.form().holds_own() && t.ring_steps.crosses() {
            // The slot holds the own share and, next to it, rows of other nodes. The gradients that ranks of the node
            // return are added to both parts of the slot's gradients. Then the part of the own share begins the sums,
            // and the other part crosses back.
            let (own, beside, fresh) = (t.staying(), t.beside(), &home.fresh[turn]);
            let part = |first, rows| -> Vec<BufferView> { fresh.iter().map(|f| f.slice(first, rows)).collect() };
            if t.travels(ring_step) {
                let buffers = [&fresh[..], &home.arriving, &part(0, own + beside)];
                self.send_home(ring, t, ring_step, order, buffers, (made, made));
            }
            if own > 0 {
                let kind = self.transform(home.sums.iter().copied().zip(part(0, own)));
                let item = PendingOp { kind, step: v.step, phase: LOCAL, after: [made, None] };
                ring.lanes.communication.push(((t.round, order), item));
            }
            if let Some(crossing) = t.steps().find(|&i| !t.ring_steps.list()[i].attends()) {
                self.cross_back(ring, t, home, crossing, &part(own, beside), made);
            }
            ring.partials.used[turn] = ring.lanes.communication.len().checked_sub(1);
            return;
        }
        if !t.travels(ring_step) {
            return;
        }
        let (sent, used) = if v.hop == Hop::Crossed {
            (self.cross_back(ring, t, home, ring_step, &home.node_sums[turn], made), &mut ring.node_sums[turn])
        } else {
            let sums = if v.node > 0 { &home.node_sums[turn_of(v.node)] } else { &home.sums };
            let buffers = [&home.leaving[turn][..], &home.arriving, sums];
            let sent = self.send_home(ring, t, ring_step, order, buffers, (made, begun));
            (sent, &mut ring.partials.used[turn])
        };
        if made.is_some() {
            *used = Some(sent);
        }
    }

    /// Adds the return of a node's sums, in `of_node`, to another node. Returns its index in the communication lane.
    fn cross_back(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        home: &Home,
        ring_step: usize,
        of_node: &[BufferView],
        made: Option<usize>,
    ) -> usize {
        let v = t.ring_steps.list()[ring_step];
        // A node's sum is complete after the node's last step, which is ordered before the next node's first step.
        let order = node_return_order(t.ring_steps.last_of_node(&v));
        let mut ring_step = ring_step;
        if t.ring_steps.is_divided(&v) {
            // Each rank that holds the head sums one part of the rows; a part crosses only if it has rows.
            if let Some(passed) = t.ring_steps.beside(&v, Hop::Passed) {
                self.send_home(ring, t, passed, order, [of_node, &home.arriving, of_node], (made, made));
            }
            let back = if t.ring_steps.form().holds_own() { Hop::Crossing { part: 0 } } else { Hop::Back };
            match t.ring_steps.beside(&v, back) {
                Some(back) => ring_step = back,
                None => return ring.lanes.communication.len().saturating_sub(1),
            }
        }
        let v = t.ring_steps.list()[ring_step];
        let (mut leaving, mut arriving) = (of_node, &home.arriving);
        if let Some((narrow, arrives)) = &home.narrowed {
            if v.rows_in > 0 {
                let blocks = narrow.iter().zip(of_node);
                let (first, rows) = (v.first_in, v.rows_in);
                let kind = self.transform(blocks.map(|(to, from)| (to.slice(first, rows), from.slice(first, rows))));
                let item = PendingOp { kind, step: v.step, phase: phase_of(&v), after: [made, None] };
                ring.lanes.communication.push(((t.round, order), item));
            }
            (leaving, arriving) = (narrow, arrives);
        }
        self.send_home(ring, t, ring_step, order, [leaving, arriving, &home.sums], (made, None))
    }

    /// Adds the exchange that sends the gradients in the first of three buffers and receives, in the second, the
    /// gradients of the rows that this rank sent; then adds the second to the third. Returns the exchange's index in
    /// the communication lane.
    fn send_home(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        ring_step: usize,
        order: u32,
        [leaving, arriving, sums]: [&[BufferView]; 3],
        (made, begun): (Option<usize>, Option<usize>),
    ) -> usize {
        let v = t.ring_steps.list()[ring_step];
        let (order, phase) = ((t.round, order), phase_of(&v));
        let kind = OpKind::Return(t.rows(ring_step, leaving, arriving));
        ring.lanes.communication.push((order, PendingOp { kind, step: v.step, phase, after: [made, None] }));
        let sent = ring.lanes.communication.len() - 1;
        if v.rows_out > 0 {
            // The sums begin with the call for the own share or, for a node slot, with the round's first call that
            // writes them.
            let begun = begun.or_else(|| ring.begun(sums[0]));
            let rows = t.rows(ring_step, sums, arriving);
            let kind = if self.out.is_backward() { OpKind::Reduce(rows) } else { OpKind::Merge(rows) };
            ring.lanes.communication.push((order, PendingOp { kind, step: v.step, phase, after: [begun, None] }));
        }
        sent
    }
}
