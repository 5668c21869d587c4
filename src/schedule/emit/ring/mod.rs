// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring: each rank keeps one side of the attention and receives the other.
//!
//! While the kernel computes one ring step, the rows of the next step are received into the other of two slots; ranks
//! synchronise only in exchanges. In the backward the partial gradients of a ring step are sent directly to their owner
//! while the next step is computed, and are added to the owner's sums on the communication lane, so that the compute
//! lane does not wait for them. In a forward in which q circulates, partial results take the same way and are merged.
//!
//! Over several nodes ([`crate::schedule::ring_steps`]) rows of another node cross into one of two node slots during
//! the steps of the node before. They are attended there, and the other ranks of the node fetch from there. The ranks
//! of a node return their partial gradients to the gateway, which adds them to its own; the sum crosses back after the
//! node's last return. If several ranks of a node hold the same kv head, a part of the rows crosses to each, and in one
//! more exchange they pass the parts on to each other. On the way back each of them sums one part in that exchange, and
//! the part crosses.
//!
//! Where a slot holds the own share (the ordered form and the together form), rows of other nodes cross into the slot
//! itself, next to the share, and the other ranks of the node take from there. Their partial gradients come back to the
//! same rows of the gradients of that slot.

use alloc::vec::Vec;

use super::{
    builder::Builder,
    lanes::{PendingLanes, PendingOp, fetch_order},
    travel::{Travel, TravelRegions, turn_of},
};
use crate::schedule::{
    AttendOp, BETWEEN_NODES, BufferView, OpKind,
    ring_steps::{Hop, RingStep},
};

mod home;

/// The phase of exchanges inside a node, in reports and traces.
pub(super) const LOCAL: &str = "ring";

/// The ring phase while it is built: the two lanes, and the slot of each pair that is next.
#[derive(Default)]
pub(super) struct Ring {
    pub lanes: PendingLanes,
    pub regions: TravelRegions,
    arrivals: SlotPair,
    partials: SlotPair,
    /// The last items that used the two node slots, and those that sent the two sums of a node.
    node_slots: [Option<usize>; 2],
    node_sums: [Option<usize>; 2],
    /// The last fetch of rows into a node slot.
    crossed: Option<usize>,
    /// Cache of [`Ring::begun`]: the sums asked for last, the number of calls searched, and the call found.
    begun: Option<(BufferView, usize, Option<usize>)>,
}

impl Ring {
    /// The last call that begins these sums. As long as the sums stay the same, each call is searched once.
    fn begun(&mut self, sums: BufferView) -> Option<usize> {
        let (_, looked_at, known) = self.begun.filter(|begun| begun.0 == sums).unwrap_or((sums, 0, None));
        let calls = &self.lanes.compute;
        let found = calls[looked_at..].iter().rposition(|i| writes(&i.kind, sums)).map(|i| looked_at + i);
        self.begun = Some((sums, calls.len(), found.or(known)));
        found.or(known)
    }
}

/// Two slots used in turn, and the item that used each last.
#[derive(Default)]
struct SlotPair {
    next: usize,
    used: [Option<usize>; 2],
}

impl SlotPair {
    fn take(&mut self) -> usize {
        self.next ^= 1;
        self.next ^ 1
    }
}

/// The rows of a ring step in memory, and the item that attending them waits for.
pub(super) struct Arrival {
    pub at: Vec<BufferView>,
    pub wait: Option<usize>,
    slot: Option<ArrivalSlot>,
}

/// A buffer that receives rows of other ranks.
#[derive(Clone, Copy)]
enum ArrivalSlot {
    Ring(usize),
    Node(usize),
}

impl Builder<'_> {
    /// Adds the fetch of a ring step, if it has one. If it returns an arrival, call [`Builder::attend`] next.
    pub(super) fn fetch(&mut self, ring: &mut Ring, t: &Travel, ring_step: usize) -> Option<Arrival> {
        let v = t.ring_steps.list()[ring_step];
        match v.hop {
            // The only share is the rank's own.
            Hop::Local if self.plan.mesh().ring > 1 => {}
            Hop::Own | Hop::Local => return Some(Arrival { at: t.own.clone(), wait: None, slot: None }),
            Hop::Crossing { .. } | Hop::Passed => {
                let (into, free) = if t.ring_steps.form().holds_own() {
                    // Into the slot that the own share will be copied to.
                    let slot = ring.arrivals.next;
                    let beside = t.slots[slot].iter().map(|s| s.slice(t.staying(), t.beside()));
                    (beside.collect(), ring.arrivals.used[slot])
                } else {
                    let turn = turn_of(v.node);
                    (t.node_slots[turn].clone(), ring.node_slots[turn])
                };
                let from = if v.hop == Hop::Passed { &into } else { &t.own };
                let exchange = self.exchange_rows(ring, t, ring_step, (from, &into), [free, None]);
                if v.rows_in > 0 {
                    ring.crossed = Some(exchange);
                }
                return None;
            }
            Hop::Back => return None,
            Hop::Crossed => {
                let turn = turn_of(v.node);
                let (at, slot) = (t.node_slots[turn].clone(), (v.rows_in > 0).then_some(ArrivalSlot::Node(turn)));
                return Some(Arrival { at, wait: ring.crossed.take(), slot });
            }
        }
        let slot = (v.rows_in > 0).then(|| ring.arrivals.take());
        let at = &t.slots[slot.unwrap_or(0)];
        let mut placed = None;
        if t.ring_steps.form().holds_own() && slot.is_some() {
            // The own share is copied into the slot, so that one call computes with everything.
            let kind = self.transform(t.own.iter().zip(at).map(|(&own, slot)| (slot.slice(0, own.rows), own)));
            if t.staying() > 0 {
                ring.lanes.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [None; 2] });
                placed = Some(ring.lanes.compute.len() - 1);
            }
        }
        // Other ranks fetch from the own share, from a node slot, or from both parts of the slot.
        let beside = t.beside();
        let crossed = if t.ring_steps.form().holds_own() { ring.crossed.take() } else { None };
        let there: Vec<BufferView> = at.iter().map(|s| s.slice(0, t.staying() + beside)).collect();
        let source = match v.node {
            0 if beside > 0 => &there,
            0 => &t.own,
            node => &t.node_slots[turn_of(node)],
        };
        let wait = if t.travels(ring_step) {
            let free = [slot.and_then(|s| ring.arrivals.used[s]), placed.filter(|_| beside > 0)];
            let exchange = self.exchange_rows(ring, t, ring_step, (source, at), free);
            slot.map(|_| exchange)
        } else {
            crossed
        };
        Some(Arrival { at: at.clone(), wait, slot: slot.map(ArrivalSlot::Ring) })
    }

    /// Adds the exchange of a ring step that sends rows of the first buffer and receives rows in the second, once the
    /// items `after` are done; before it, if needed, the packing of the rows that leave. Returns the exchange's index
    /// in the communication lane.
    fn exchange_rows(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        ring_step: usize,
        (from, into): (&[BufferView], &[BufferView]),
        after: [Option<usize>; 2],
    ) -> usize {
        let v = t.ring_steps.list()[ring_step];
        let (order, phase) = ((t.round, fetch_order(v.step)), phase_of(&v));
        let (buffers, rows) = &t.packed;
        let packed: Vec<BufferView> = buffers.iter().map(|b| b.slice(0, rows[ring_step])).collect();
        let packed = if rows[ring_step] > 0 { packed } else { Vec::new() };
        if !packed.is_empty() {
            let kind = OpKind::Pack(t.rows(ring_step, from, &packed));
            ring.lanes.communication.push((order, PendingOp { kind, step: v.step, phase, after: [after[1], None] }));
        }
        let kind = OpKind::Fetch { rows: t.rows(ring_step, from, into), packed };
        ring.lanes.communication.push((order, PendingOp { kind, step: v.step, phase, after }));
        ring.lanes.communication.len() - 1
    }

    /// Copies each destination from its source; skips those without rows.
    pub(super) fn transform(&mut self, blocks: impl Iterator<Item = (BufferView, BufferView)>) -> OpKind {
        let begin = self.out.blocks.len() as u32;
        blocks.for_each(|(to, from)| self.block(to, &[from]));
        OpKind::Transform { begin, end: self.out.blocks.len() as u32 }
    }

    /// Adds the call that attends an arrival. `partials` of `call` is where it writes the gradients of the circulating
    /// side: for the own share, the sums themselves.
    pub(super) fn attend(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        ring_step: usize,
        arrival: &Arrival,
        call: impl FnOnce(&[BufferView], Option<&[BufferView]>) -> OpKind,
    ) {
        let v = t.ring_steps.list()[ring_step];
        let mut after = [arrival.wait, None];
        let (mut attended, mut begun) = (None, None);
        let mut turn = 0;
        // Rows of a node slot need a gradient even if this rank does not read them.
        let needed = v.meets || (v.rows_in > 0 && t.home.is_some());
        if v.step == 0 || needed || t.ring_steps.form().holds_own() {
            let (mut partials, mut narrow) = (None, false);
            if let Some(home) = &t.home {
                partials = Some(&home.sums);
                match arrival.slot {
                    Some(ArrivalSlot::Ring(_)) => {
                        turn = ring.partials.take();
                        partials = Some(&home.fresh[turn]);
                        narrow = home.leaving[turn] != home.fresh[turn];
                        after[1] = ring.partials.used[turn];
                    }
                    Some(ArrivalSlot::Node(node)) => {
                        turn = node;
                        partials = Some(&home.node_sums[node]);
                        after[1] = ring.node_sums[node];
                    }
                    None => {}
                }
            }
            let free = if narrow { after[1].take() } else { None };
            let kind = call(&arrival.at, partials.map(Vec::as_slice));
            ring.lanes.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after });
            let call = ring.lanes.compute.len() - 1;
            match arrival.slot {
                Some(ArrivalSlot::Ring(slot)) => ring.arrivals.used[slot] = Some(call),
                Some(ArrivalSlot::Node(slot)) => ring.node_slots[slot] = Some(call),
                None => {}
            }
            // The gradients of the own share do not leave.
            let (first, rows) = (t.staying(), v.rows_in - t.staying());
            if let (true, Some(home)) = (narrow && rows > 0, &t.home) {
                let blocks = home.leaving[turn].iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(to, from)| (to.slice(first, rows), from.slice(first, rows))));
                ring.lanes.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [free, None] });
            }
            attended = arrival.slot.map(|_| ring.lanes.compute.len() - 1);
            let crosses = t.ring_steps.crosses();
            if let (true, Some(home)) = (arrival.slot.is_some() && t.staying() > 0 && !crosses, &t.home) {
                // The gradients of the own share begin the sums; those that are returned are added to them.
                let blocks = home.sums.iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(&sum, from)| (sum, from.slice(0, t.staying()))));
                ring.lanes.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [None; 2] });
                begun = Some(ring.lanes.compute.len() - 1);
            }
        }
        if let Some(home) = t.home.as_ref().filter(|_| v.step > 0) {
            self.come_home(ring, t, home, ring_step, turn, (attended, begun));
        }
    }

    /// Adds the call that finishes a running result, after the last merge into it.
    pub(super) fn finish_running(&mut self, ring: &mut Ring, finish: AttendOp) {
        let merges = ring.lanes.communication.iter().enumerate();
        let merges = merges.filter(|(_, (_, item))| matches!(item.kind, OpKind::Merge(_)));
        let last = merges.max_by_key(|(i, (order, _))| (*order, *i)).map(|(i, _)| i);
        let kind = OpKind::Attend(finish);
        ring.lanes.compute.push(PendingOp { kind, step: 0, phase: LOCAL, after: [last, None] });
    }
}

/// The part of the run that a ring step's exchanges belong to.
fn phase_of(v: &RingStep) -> &'static str {
    if matches!(v.hop, Hop::Crossing { .. } | Hop::Crossed | Hop::Back) { BETWEEN_NODES } else { LOCAL }
}

/// Whether a call begins the sums that `first` is one of.
fn writes(kind: &OpKind, first: BufferView) -> bool {
    match kind {
        OpKind::Attend(op) => op.running.is_some_and(|(o, _)| o == first),
        OpKind::Backward(op) => op.dq == Some(first) || op.dkv.is_some_and(|(dk, _)| dk == first),
        _ => false,
    }
}
