// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring: each rank keeps one side of the attention and receives the other.
//!
//! While the kernel computes one ring step, the rows of the next step are received into the other of two slots; ranks
//! synchronise only in exchanges. In the backward the partial gradients of a ring step are sent directly to their owner
//! while the next step is computed, and are added to the owner's sums on the communication lane, so that the compute
//! lane does not wait for them.
//!
//! Exchanges are ordered by one rule on every rank, whatever steps it skips: round first, then the fetch of step s
//! before the fetch of step s + 1, and the return of step s just after the fetch of step s + 2 (attending step s is
//! what both wait for). The same order on all ranks prevents deadlock.
//!
//! Over several nodes ([`crate::schedule::ring_steps`]) rows of another node cross into one of two node slots, beside the
//! steps of the node before. They are attended there, and fetched from there. The partial gradients of the ranks of a node
//! are returned to the gateway, which adds them to its own; that sum crosses back after the node's last return. Only what
//! crosses is ever narrowed: inside a node partial gradients keep the accumulator's type.
//!
//! Where a slot holds the own share (the ordered form), rows of other nodes cross into the slot itself, next to the share,
//! and the other ranks of the node take from there.

use alloc::{sync::Arc, vec, vec::Vec};

use super::builder::{Builder, Life, Region};
use crate::{
    element::Dtype,
    schedule::{
        BETWEEN_NODES, BufferView, CirculatingSide, Lane, Op, OpKind, RingSteps, StepTensor,
        expand::is_fragmented,
        ring_steps::{Hop, RingStep},
    },
};

/// An operation that has no place in the list yet. It waits for items of the other lane.
struct PendingOp {
    kind: OpKind,
    step: u32,
    phase: &'static str,
    after: [Option<usize>; 2],
}

/// What runs inside a node, in reports and traces.
const LOCAL: &str = "ring";

/// Place of a fetch among the exchanges of a round.
const fn fetch_order(step: u32) -> u32 {
    4 * step
}

/// Place of a return: its step has been attended then.
const fn return_order(step: u32) -> u32 {
    4 * (step + 2) + 1
}

/// Place of the return of a node's sum, of which `last` is the last step.
const fn node_return_order(last: u32) -> u32 {
    4 * (last + 2) + 2
}

/// The ring phase while it is written: two lanes, and whose turn it is in each pair of slots.
pub(super) struct Ring {
    compute: Vec<PendingOp>,
    /// With its place among all exchanges: round, then key.
    communication: Vec<((usize, u32), PendingOp)>,
    arrivals: SlotPair,
    partials: SlotPair,
    /// The items that used the two node slots last, and those that sent the two sums of a node.
    node_slots: [Option<usize>; 2],
    node_sums: [Option<usize>; 2],
    /// The last fetch of rows into a node slot.
    crossed: Option<usize>,
    regions: Vec<[Region; 2]>,
    node_regions: Vec<[Region; 2]>,
    packed: Vec<Region>,
    homes: Vec<[Region; 2]>,
    node_homes: Vec<[Region; 2]>,
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

/// One side's travel around the ring.
pub(super) struct Travel {
    pub circulating_side: CirculatingSide,
    pub ring_steps: Arc<RingSteps>,
    /// Position among the travels of a schedule.
    pub round: usize,
    /// What travels: the rank's own share of it.
    pub own: Vec<BufferView>,
    slots: [Vec<BufferView>; 2],
    node_slots: [Vec<BufferView>; 2],
    /// Where rows are packed that would leave in too many messages, with the rows that each ring step packs. Exchanges
    /// come one after another, so one buffer serves them all.
    packed: (Vec<BufferView>, Vec<u64>),
    home: Option<Home>,
}

impl Travel {
    /// Rows of the own share that lie in the slot of a ring step beside those of others.
    fn staying(&self) -> u64 {
        if self.ring_steps.form().holds_own() { self.own[0].rows } else { 0 }
    }

    /// Rows of other nodes that lie in the slot next to the own share.
    fn beside(&self) -> u64 {
        if !self.ring_steps.form().holds_own() {
            return 0;
        }
        self.ring_steps.list().iter().filter(|v| !v.attends()).map(|v| v.rows_in).sum()
    }

    /// Whether anything is exchanged for a ring step.
    fn travels(&self, ring_step: usize) -> bool {
        let v = self.ring_steps.list()[ring_step];
        let there = if v.hop == Hop::Local { self.staying() + self.beside() } else { 0 };
        v.rows_in > there || v.rows_out > 0
    }
}

/// Which node slot, and which sum of a node, is used for rows of the node `node` before.
fn turn_of(node: u32) -> usize {
    (node as usize - 1) % 2
}

/// How the partial gradients of what travelled come home.
struct Home {
    /// The sums they are added to.
    sums: Vec<BufferView>,
    /// Sums over the ranks of a node, for the rows of a node slot.
    node_sums: [Vec<BufferView>; 2],
    /// What kernels write.
    fresh: [Vec<BufferView>; 2],
    /// What leaves: `fresh`, or a narrower copy of it.
    leaving: [Vec<BufferView>; 2],
    /// What arrives.
    arriving: Vec<BufferView>,
    /// Narrower copies of a node's sums, and what arrives of them, where what crosses is narrower.
    narrowed: Option<(Vec<BufferView>, Vec<BufferView>)>,
}

/// Where the rows of a ring step lie, and what attending them must wait for.
pub(super) struct Arrival {
    pub at: Vec<BufferView>,
    pub wait: Option<usize>,
    slot: Option<ArrivalSlot>,
}

/// A buffer that rows of others arrive in.
#[derive(Clone, Copy)]
enum ArrivalSlot {
    Ring(usize),
    Node(usize),
}

impl Ring {
    pub(super) fn new() -> Self {
        Self {
            compute: Vec::new(),
            communication: Vec::new(),
            arrivals: SlotPair::default(),
            partials: SlotPair::default(),
            node_slots: [None; 2],
            node_sums: [None; 2],
            crossed: None,
            regions: Vec::new(),
            node_regions: Vec::new(),
            packed: Vec::new(),
            homes: Vec::new(),
            node_homes: Vec::new(),
        }
    }
}

impl Builder<'_> {
    /// Two buffers for each of `like`, over the regions that earlier travels used. `slots` of the two are ever needed.
    fn two_of(
        &mut self,
        regions: &mut Vec<[Region; 2]>,
        name: &'static str,
        like: &[BufferView],
        dtype: Option<Dtype>,
        rows: u64,
        slots: usize,
    ) -> [Vec<BufferView>; 2] {
        while regions.len() < like.len() {
            let pair = [self.region(Life::Ring, 0), self.region(Life::Ring, 0)];
            regions.push(pair);
        }
        [0, 1].map(|i| {
            let rows = if i < slots { rows } else { 0 };
            like.iter()
                .zip(regions.iter())
                .map(|(&v, pair)| {
                    let (dtype, dim) = (dtype.unwrap_or_else(|| self.dtype_of(v)), self.dim_of(v));
                    self.buffer_in(pair[i], name, dtype, rows, v.heads, dim)
                })
                .collect()
        })
    }

    /// A buffer for each of `like` over the second of two regions, where the first is in use.
    fn second_of(
        &mut self,
        regions: &[[Region; 2]],
        name: &'static str,
        like: &[BufferView],
        dtype: Dtype,
        rows: u64,
    ) -> Vec<BufferView> {
        let buffer = |(&v, pair): (&BufferView, &[Region; 2])| {
            let dim = self.dim_of(v);
            self.buffer_in(pair[1], name, dtype, rows, v.heads, dim)
        };
        like.iter().zip(regions).map(buffer).collect()
    }

    /// Prepares a travel of `own`; with `sums`, partial gradients of the same shapes come home to them.
    pub(super) fn travel(
        &mut self,
        ring: &mut Ring,
        circulating_side: CirculatingSide,
        round: usize,
        own: Vec<BufferView>,
        sums: Option<(Vec<BufferView>, Dtype)>,
    ) -> Travel {
        let ring_steps = self.out.ring_steps(circulating_side).clone();
        let arrivals = ring_steps.arrivals();
        // Earlier rounds used both slots if they used any twice; turns go on across rounds.
        let slots = if round > 0 && arrivals > 0 { 2 } else { arrivals };
        let slots = if self.plan.mesh().ring == 1 { 0 } else { slots };
        let mut regions = core::mem::take(&mut ring.regions);
        let slot_views = self.two_of(&mut regions, "ring slot", &own, None, ring_steps.slot_rows(), slots);
        ring.regions = regions;
        let (node_rows, node_slots) = (ring_steps.node_slot_rows(), ring_steps.node_slots());
        let mut regions = core::mem::take(&mut ring.node_regions);
        let node_slot_views = self.two_of(&mut regions, "node slot", &own, None, node_rows, node_slots);
        ring.node_regions = regions;
        let packed = self.packed(ring, &ring_steps, &own);
        let home = sums.filter(|_| ring_steps.list().len() > 1 || ring_steps.form().holds_own()).map(|(sums, wire)| {
            let mut homes = core::mem::take(&mut ring.homes);
            let (n, rows) = (sums.len(), ring_steps.slot_rows());
            let whole = self.dtype_of(sums[0]);
            while homes.len() < 3 * n {
                homes.push([self.region(Life::Ring, 0), self.region(Life::Ring, 0)]);
            }
            let third = |b: &mut Self, i: usize, name, dtype, rows, slots| {
                let mut part = homes[i * n..(i + 1) * n].to_vec();
                b.two_of(&mut part, name, &sums, Some(dtype), rows, slots)
            };
            // Over several nodes the type of the wire is that of what crosses, and the sum of a node is whole before.
            let (crossing, wire) = (wire, if ring_steps.crosses() { whole } else { wire });
            let narrow = wire != whole;
            let fresh = third(self, 0, "partial gradient", whole, rows, if narrow { slots.min(1) } else { slots });
            let leaving = if narrow { third(self, 1, "partial to travel", wire, rows, slots) } else { fresh.clone() };
            let fresh = if narrow { [fresh[0].clone(), fresh[0].clone()] } else { fresh };
            let [arriving, _] = third(self, 2, "gradient from peer", wire, ring_steps.return_rows(), 1);
            let narrowed = (crossing != wire).then(|| {
                let [leaving, _] = third(self, 1, "sum of a node to travel", crossing, node_rows, 1);
                // The slot is the second of the region pair, since both are in use at a time.
                let rows = ring_steps.node_return_rows();
                (leaving, self.second_of(&homes[n..2 * n], "gradient from a node", &sums, crossing, rows))
            });
            ring.homes = homes;
            let mut regions = core::mem::take(&mut ring.node_homes);
            let node_sums = self.two_of(&mut regions, "sum of a node", &sums, None, node_rows, node_slots);
            ring.node_homes = regions;
            Home { sums, node_sums, fresh, leaving, arriving, narrowed }
        });
        Travel {
            circulating_side,
            ring_steps,
            round,
            own,
            slots: slot_views,
            node_slots: node_slot_views,
            packed,
            home,
        }
    }

    /// Buffers for rows that would leave in too many messages, and how many rows each ring step packs.
    fn packed(&mut self, ring: &mut Ring, ring_steps: &RingSteps, own: &[BufferView]) -> (Vec<BufferView>, Vec<u64>) {
        let rows = ring_steps.packed_rows(|runs| is_fragmented(runs, own.len()));
        let most = rows.iter().copied().max().unwrap_or(0);
        if most == 0 {
            return (Vec::new(), rows);
        }
        while ring.packed.len() < own.len() {
            ring.packed.push(self.region(Life::Ring, 0));
        }
        let buffers = own.iter().zip(ring.packed.clone()).map(|(&v, region)| {
            let (dtype, dim) = (self.dtype_of(v), self.dim_of(v));
            self.buffer_in(region, "packed for a peer", dtype, most, v.heads, dim)
        });
        (buffers.collect(), rows)
    }

    /// Adds the fetch of a ring step, if it has one. Follow it with [`Builder::attend`] where it returns something to attend.
    pub(super) fn fetch(&mut self, ring: &mut Ring, t: &Travel, ring_step: usize) -> Option<Arrival> {
        let v = t.ring_steps.list()[ring_step];
        match v.hop {
            Hop::Own => return Some(Arrival { at: t.own.clone(), wait: None, slot: None }),
            // All shares are the rank's own.
            Hop::Local if self.plan.mesh().ring == 1 => {
                return Some(Arrival { at: t.own.clone(), wait: None, slot: None });
            }
            Hop::Crossing { .. } if t.ring_steps.form().holds_own() => {
                // Into the slot that the own share is about to take its place in.
                let slot = ring.arrivals.next;
                let into: Vec<BufferView> = t.slots[slot].iter().map(|s| s.slice(t.staying(), v.rows_in)).collect();
                let exchange =
                    self.exchange_rows(ring, t, ring_step, (&t.own, &into), [ring.arrivals.used[slot], None]);
                ring.crossed = (v.rows_in > 0).then_some(exchange);
                return None;
            }
            Hop::Crossing { .. } => {
                let turn = turn_of(v.node);
                let (slot, free) = (&t.node_slots[turn], ring.node_slots[turn]);
                let exchange = self.exchange_rows(ring, t, ring_step, (&t.own, slot), [free, None]);
                if v.rows_in > 0 {
                    ring.crossed = Some(exchange);
                }
                return None;
            }
            Hop::Crossed => {
                let turn = turn_of(v.node);
                let (at, slot) = (t.node_slots[turn].clone(), (v.rows_in > 0).then_some(ArrivalSlot::Node(turn)));
                return Some(Arrival { at, wait: ring.crossed.take(), slot });
            }
            Hop::Local => {}
        }
        let slot = (v.rows_in > 0).then(|| ring.arrivals.take());
        let at = &t.slots[slot.unwrap_or(0)];
        let mut placed = None;
        if t.ring_steps.form().holds_own() && slot.is_some() {
            // The own share takes its place in the slot, so that one call meets everything.
            let kind = self.transform(t.own.iter().zip(at).map(|(&own, slot)| (slot.slice(0, own.rows), own)));
            if t.staying() > 0 {
                ring.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [None; 2] });
                placed = Some(ring.compute.len() - 1);
            }
        }
        // What others take lies in the own share, in a node slot, or in both parts of the slot.
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

    /// Adds the exchange of a ring step that sends rows of the first of two buffers and receives rows in the other, once the
    /// items `after` are done, and before it the packing of the rows that leave. Returns which of the communication lane it is.
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
        let ring_steps = t.circulating_side;
        let pairs = |to: &[BufferView]| -> Vec<StepTensor> {
            from.iter().zip(to).map(|(&own, &slot)| StepTensor { own, slot }).collect()
        };
        if !packed.is_empty() {
            let kind = OpKind::Pack { ring_step: ring_step as u32, ring_steps, tensors: pairs(&packed) };
            ring.communication.push((order, PendingOp { kind, step: v.step, phase, after: [after[1], None] }));
        }
        let kind = OpKind::Fetch { ring_step: ring_step as u32, ring_steps, tensors: pairs(into), packed };
        ring.communication.push((order, PendingOp { kind, step: v.step, phase, after }));
        ring.communication.len() - 1
    }

    /// Copies, each of a slice to another; of no rows, nothing.
    fn transform(&mut self, blocks: impl Iterator<Item = (BufferView, BufferView)>) -> OpKind {
        let begin = self.out.blocks.len() as u32;
        blocks.for_each(|(to, from)| self.block(to, &[from]));
        OpKind::Transform { begin, end: self.out.blocks.len() as u32 }
    }

    /// Adds the call that attends an arrival. `partials` of `call` are where it writes the gradients of what travels:
    /// the sums themselves for the own share.
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
        // Rows of a node slot that this rank does not need have a gradient all the same.
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
            ring.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after });
            let call = ring.compute.len() - 1;
            match arrival.slot {
                Some(ArrivalSlot::Ring(slot)) => ring.arrivals.used[slot] = Some(call),
                Some(ArrivalSlot::Node(slot)) => ring.node_slots[slot] = Some(call),
                None => {}
            }
            // The own share's do not leave.
            let (first, rows) = (t.staying(), v.rows_in - t.staying());
            if let (true, Some(home)) = (narrow && rows > 0, &t.home) {
                let blocks = home.leaving[turn].iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(to, from)| (to.slice(first, rows), from.slice(first, rows))));
                ring.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [free, None] });
            }
            attended = arrival.slot.map(|_| ring.compute.len() - 1);
            if let (true, Some(home)) = (arrival.slot.is_some() && t.staying() > 0, &t.home) {
                // The own share's begin the sums, and what comes home is added to them.
                let blocks = home.sums.iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(&sum, from)| (sum, from.slice(0, t.staying()))));
                ring.compute.push(PendingOp { kind, step: v.step, phase: LOCAL, after: [None; 2] });
                begun = Some(ring.compute.len() - 1);
            }
        }
        if let (Some(home), true) = (&t.home, v.step > 0 && t.travels(ring_step)) {
            self.come_home(ring, t, home, &v, ring_step, turn, (attended, begun));
        }
    }

    /// Adds the return of the gradients that a ring step made, from the buffers of `turn`, and the sum of what comes home for
    /// the rows that left. `made` is the operation that made them, `begun` the one that begins the sums, if that is known.
    #[allow(clippy::too_many_arguments)]
    fn come_home(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        home: &Home,
        v: &RingStep,
        ring_step: usize,
        turn: usize,
        (made, begun): (Option<usize>, Option<usize>),
    ) {
        let crossed = v.hop == Hop::Crossed;
        // A node's sum is whole after its last step, whose place is before that of the next node's first.
        let order = if crossed { node_return_order(t.ring_steps.last_of_node(v)) } else { return_order(v.step) };
        let (order, phase) = ((t.round, order), phase_of(v));
        let (mut leaving, mut arriving) =
            (if crossed { &home.node_sums[turn] } else { &home.leaving[turn] }, &home.arriving);
        if let (true, Some((narrow, arrives))) = (crossed, &home.narrowed) {
            if made.is_some() {
                let blocks =
                    narrow.iter().zip(leaving).map(|(to, from)| (to.slice(0, v.rows_in), from.slice(0, v.rows_in)));
                let kind = self.transform(blocks);
                ring.communication.push((order, PendingOp { kind, step: v.step, phase, after: [made, None] }));
            }
            (leaving, arriving) = (narrow, arrives);
        }
        let sums = if !crossed && v.node > 0 { &home.node_sums[turn_of(v.node)] } else { &home.sums };
        let pairs =
            |own: &[BufferView]| own.iter().zip(arriving).map(|(&own, &slot)| StepTensor { own, slot }).collect();
        let (ring_step, ring_steps) = (ring_step as u32, t.circulating_side);
        let kind = OpKind::Return { ring_step, ring_steps, tensors: pairs(leaving) };
        ring.communication.push((order, PendingOp { kind, step: v.step, phase, after: [made, None] }));
        if made.is_some() {
            let sent = if crossed { &mut ring.node_sums[turn] } else { &mut ring.partials.used[turn] };
            *sent = Some(ring.communication.len() - 1);
        }
        if v.rows_out > 0 {
            // The sums begin with the own share's call, or that of the node slot, the round's first that writes them.
            let begun = begun.or_else(|| ring.compute.iter().rposition(|i| writes(&i.kind, sums[0])));
            let kind = OpKind::Reduce { ring_step, ring_steps, tensors: pairs(sums) };
            ring.communication.push((order, PendingOp { kind, step: v.step, phase, after: [begun, None] }));
        }
    }

    /// Puts the two lanes into one list in which everything comes after what it waits for. `entry` is what the first
    /// operation of each lane waits for: (compute lane, communication lane).
    pub(super) fn weave(&mut self, ring: Ring, entry: (Option<u32>, Option<u32>)) {
        let Ring { compute, communication, .. } = ring;
        let mut sorted: Vec<(usize, (usize, u32), PendingOp)> =
            communication.into_iter().enumerate().map(|(i, (order, item))| (i, order, item)).collect();
        sorted.sort_by_key(|(i, order, _)| (*order, *i));
        let mut place_of = vec![0; sorted.len()];
        for (place, (i, ..)) in sorted.iter().enumerate() {
            place_of[*i] = place;
        }
        let mut compute = compute.into_iter().peekable();
        let mut communication = sorted.into_iter().peekable();
        let (mut compute_ops, mut communication_ops) = (Vec::new(), Vec::new());
        let (mut compute_entry, mut communication_entry) = entry;
        loop {
            // Exchanges first: what travels early hides behind what is computed late.
            let ready = communication.peek().map(|(_, _, i)| i.after.iter().flatten().all(|&c| c < compute_ops.len()));
            if ready == Some(true) || (ready.is_some() && compute.peek().is_none()) {
                let Some((_, _, item)) = communication.next() else { break };
                let after = item.after.iter().flatten().map(|&c| compute_ops[c]).max().or(communication_entry.take());
                communication_ops.push(self.place(item, Lane::Communication, after));
            } else if let Some(item) = compute.next() {
                let waits = item.after.iter().flatten().map(|&c| communication_ops[place_of[c]]);
                let after = waits.max().or(compute_entry.take());
                compute_ops.push(self.place(item, Lane::Compute, after));
            } else {
                break;
            }
        }
    }

    fn place(&mut self, item: PendingOp, lane: Lane, after: Option<u32>) -> u32 {
        self.out.ops.push(Op { kind: item.kind, lane, step: item.step, phase: item.phase, after });
        (self.out.ops.len() - 1) as u32
    }
}

/// The part of the run that a ring step's exchanges belong to.
fn phase_of(v: &RingStep) -> &'static str {
    if matches!(v.hop, Hop::Crossing { .. } | Hop::Crossed) { BETWEEN_NODES } else { LOCAL }
}

/// Whether a call begins the sums that `first` belongs to.
fn writes(kind: &OpKind, first: BufferView) -> bool {
    match kind {
        OpKind::Backward(op) => op.dq == Some(first) || op.dkv.is_some_and(|(dk, _)| dk == first),
        _ => false,
    }
}
