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

use alloc::{sync::Arc, vec, vec::Vec};

use super::builder::{Builder, Life, Region};
use crate::{
    element::Dtype,
    schedule::{BufferView, CirculatingSide, Lane, Op, OpKind, RingSteps, StepTensor, expand::is_fragmented},
};

/// An operation that has no place in the list yet. It waits for items of the other lane.
struct PendingOp {
    kind: OpKind,
    step: u32,
    after: [Option<usize>; 2],
}

/// The ring phase while it is written: two lanes, and whose turn it is in each pair of slots.
pub(super) struct Ring {
    compute: Vec<PendingOp>,
    /// With its place among all exchanges: round, then key.
    communication: Vec<((usize, u32), PendingOp)>,
    arrivals: SlotPair,
    partials: SlotPair,
    regions: Vec<[Region; 2]>,
    packed: Vec<Region>,
    homes: Vec<[Region; 2]>,
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

    /// Whether anything is exchanged for a ring step.
    fn travels(&self, ring_step: usize) -> bool {
        let v = self.ring_steps.list()[ring_step];
        v.rows_in > self.staying() || v.rows_out > 0
    }
}

/// How the partial gradients of what travelled come home.
struct Home {
    /// The sums they are added to.
    sums: Vec<BufferView>,
    /// What kernels write.
    fresh: [Vec<BufferView>; 2],
    /// What leaves: `fresh`, or a narrower copy of it.
    leaving: [Vec<BufferView>; 2],
    /// What arrives.
    arriving: Vec<BufferView>,
}

/// Where the rows of a ring step lie, and what attending them must wait for.
pub(super) struct Arrival {
    pub at: Vec<BufferView>,
    pub wait: Option<usize>,
    slot: Option<usize>,
}

impl Ring {
    pub(super) fn new() -> Self {
        Self {
            compute: Vec::new(),
            communication: Vec::new(),
            arrivals: SlotPair::default(),
            partials: SlotPair::default(),
            regions: Vec::new(),
            packed: Vec::new(),
            homes: Vec::new(),
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
        let arrivals = ring_steps.list().iter().filter(|v| v.step > 0 && v.rows_in > 0).count();
        // Earlier rounds used both slots if they used any twice; turns go on across rounds.
        let slots = if round > 0 && arrivals > 0 { 2 } else { arrivals };
        let slots = if self.plan.mesh().ring == 1 { 0 } else { slots };
        let mut regions = core::mem::take(&mut ring.regions);
        let slot_views = self.two_of(&mut regions, "ring slot", &own, None, ring_steps.slot_rows(), slots);
        ring.regions = regions;
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
            let narrow = wire != whole;
            let fresh = third(self, 0, "partial gradient", whole, rows, if narrow { slots.min(1) } else { slots });
            let leaving = if narrow { third(self, 1, "partial to travel", wire, rows, slots) } else { fresh.clone() };
            let fresh = if narrow { [fresh[0].clone(), fresh[0].clone()] } else { fresh };
            let [arriving, _] = third(self, 2, "gradient from peer", wire, ring_steps.return_rows(), 1);
            ring.homes = homes;
            Home { sums, fresh, leaving, arriving }
        });
        Travel { circulating_side, ring_steps, round, own, slots: slot_views, packed, home }
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

    /// Adds the fetch of a ring step, if it has one. Follow it with [`Ring::attend`] when rows arrive.
    pub(super) fn fetch(&mut self, ring: &mut Ring, t: &Travel, ring_step: usize) -> Arrival {
        let v = t.ring_steps.list()[ring_step];
        if v.step == 0 || self.plan.mesh().ring == 1 {
            return Arrival { at: t.own.clone(), wait: None, slot: None };
        }
        let slot = (v.rows_in > 0).then(|| ring.arrivals.take());
        let at = &t.slots[slot.unwrap_or(0)];
        if t.ring_steps.form().holds_own() && slot.is_some() {
            // The own share takes its place in the slot, so that one call meets everything.
            let kind = self.transform(t.own.iter().zip(at).map(|(&own, slot)| (slot.slice(0, own.rows), own)));
            if t.staying() > 0 {
                ring.compute.push(PendingOp { kind, step: v.step, after: [None; 2] });
            }
        }
        let wait = if t.travels(ring_step) {
            let (buffers, rows) = &t.packed;
            let packed: Vec<BufferView> = buffers.iter().map(|b| b.slice(0, rows[ring_step])).collect();
            let packed = if rows[ring_step] > 0 { packed } else { Vec::new() };
            let ring_steps = t.circulating_side;
            if !packed.is_empty() {
                let tensors = t.own.iter().zip(&packed).map(|(&own, &slot)| StepTensor { own, slot }).collect();
                let kind = OpKind::Pack { ring_step: ring_step as u32, ring_steps, tensors };
                ring.communication.push(((t.round, 2 * v.step), PendingOp { kind, step: v.step, after: [None; 2] }));
            }
            let tensors = t.own.iter().zip(at).map(|(&own, &slot)| StepTensor { own, slot }).collect();
            let kind = OpKind::Fetch { ring_step: ring_step as u32, ring_steps, tensors, packed };
            let after = [slot.and_then(|s| ring.arrivals.used[s]), None];
            ring.communication.push(((t.round, 2 * v.step), PendingOp { kind, step: v.step, after }));
            slot.map(|_| ring.communication.len() - 1)
        } else {
            None
        };
        Arrival { at: at.clone(), wait, slot }
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
        let travelled = arrival.slot.is_some();
        let mut after = [arrival.wait, None];
        let (mut attended, mut begun) = (None, None);
        let mut turn = 0;
        if v.step == 0 || v.rows_in > 0 || t.ring_steps.form().holds_own() {
            let partials = t.home.as_ref().map(|h| {
                if !travelled {
                    return &h.sums;
                }
                turn = ring.partials.take();
                &h.fresh[turn]
            });
            let narrow = t.home.as_ref().is_some_and(|h| travelled && h.leaving[turn] != h.fresh[turn]);
            let free = if travelled { ring.partials.used[turn] } else { None };
            if !narrow {
                after[1] = free;
            }
            let kind = call(&arrival.at, partials.map(Vec::as_slice));
            ring.compute.push(PendingOp { kind, step: v.step, after });
            if let Some(slot) = arrival.slot {
                ring.arrivals.used[slot] = Some(ring.compute.len() - 1);
            }
            // The own share's do not leave.
            let (first, rows) = (t.staying(), v.rows_in - t.staying());
            if let (true, Some(home)) = (narrow && rows > 0, &t.home) {
                let blocks = home.leaving[turn].iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(to, from)| (to.slice(first, rows), from.slice(first, rows))));
                ring.compute.push(PendingOp { kind, step: v.step, after: [free, None] });
            }
            attended = Some(ring.compute.len() - 1);
            if let (true, Some(home)) = (travelled && t.staying() > 0, &t.home) {
                // The own share's begin the sums, and what comes home is added to them.
                let blocks = home.sums.iter().zip(&home.fresh[turn]);
                let kind = self.transform(blocks.map(|(&sum, from)| (sum, from.slice(0, t.staying()))));
                ring.compute.push(PendingOp { kind, step: v.step, after: [None; 2] });
                begun = Some(ring.compute.len() - 1);
            }
        }
        if let (Some(home), true) = (&t.home, v.step > 0) {
            self.come_home(ring, t, home, ring_step, turn, (attended.filter(|_| travelled), begun));
        }
    }

    fn come_home(
        &mut self,
        ring: &mut Ring,
        t: &Travel,
        home: &Home,
        ring_step: usize,
        turn: usize,
        (made, begun): (Option<usize>, Option<usize>),
    ) {
        if !t.travels(ring_step) {
            return;
        }
        let v = t.ring_steps.list()[ring_step];
        let order = (t.round, 2 * (v.step + 2) + 1);
        let pairs =
            |own: &[BufferView]| own.iter().zip(&home.arriving).map(|(&own, &slot)| StepTensor { own, slot }).collect();
        let kind = OpKind::Return {
            ring_step: ring_step as u32,
            ring_steps: t.circulating_side,
            tensors: pairs(&home.leaving[turn]),
        };
        ring.communication.push((order, PendingOp { kind, step: v.step, after: [made, None] }));
        if made.is_some() {
            ring.partials.used[turn] = Some(ring.communication.len() - 1);
        }
        if v.rows_out > 0 {
            // The sums begin with the own share's call, the round's first that writes them.
            let begun = begun.or_else(|| ring.compute.iter().position(|i| writes(&i.kind, home.sums[0])));
            let kind = OpKind::Reduce {
                ring_step: ring_step as u32,
                ring_steps: t.circulating_side,
                tensors: pairs(&home.sums),
            };
            ring.communication.push((order, PendingOp { kind, step: v.step, after: [begun, None] }));
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
        self.out.ops.push(Op { kind: item.kind, lane, step: item.step, phase: "ring", after });
        (self.out.ops.len() - 1) as u32
    }
}

/// Whether a call begins the sums that `first` belongs to.
fn writes(kind: &OpKind, first: BufferView) -> bool {
    match kind {
        OpKind::Backward(op) => op.dq == Some(first) || op.dkv.is_some_and(|(dk, _)| dk == first),
        _ => false,
    }
}
