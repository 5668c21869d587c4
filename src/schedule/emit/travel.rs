// SPDX-License-Identifier: MIT OR Apache-2.0
//! One side's travel around the ring: the buffers of its rows and of their partials (gradients, or the results of a
//! forward in which q circulates).
//!
//! Rows arrive in two slots that take turns, rows of other nodes in two node slots. The travels of one schedule (one
//! for each pass over heads) come one after another, so they share the memory of these buffers. Over several nodes only
//! what crosses is narrowed to the type of the wire: inside a node partials keep the accumulator's type.

use alloc::{sync::Arc, vec::Vec};
use core::ops::Range;

use super::builder::{Builder, Life, Region};
use crate::{
    element::Dtype,
    schedule::{BufferView, CirculatingSide, RingSteps, StepRows, StepTensor, expand::is_fragmented, ring_steps::Hop},
};

/// The regions of the workspace that the travels of a schedule share.
#[derive(Default)]
pub(super) struct TravelRegions {
    slots: Vec<[Region; 2]>,
    node_slots: Vec<[Region; 2]>,
    packed: Vec<Region>,
    homes: Vec<[Region; 2]>,
    node_homes: Vec<[Region; 2]>,
}

/// One side's travel around the ring.
pub(super) struct Travel {
    pub circulating_side: CirculatingSide,
    pub ring_steps: Arc<RingSteps>,
    /// Position among the travels of a schedule.
    pub round: usize,
    /// The split of the heads that travel: it selects their ring steps.
    split: u32,
    /// The rank's own share of the tensors that travel.
    pub own: Vec<BufferView>,
    pub slots: [Vec<BufferView>; 2],
    pub node_slots: [Vec<BufferView>; 2],
    /// Buffers for packing rows that would leave in too many messages, and the number of rows that each ring step
    /// packs. Exchanges run one after another, so one buffer per tensor serves all of them.
    pub packed: (Vec<BufferView>, Vec<u64>),
    pub home: Option<Home>,
}

impl Travel {
    /// Its ring steps.
    pub(super) fn steps(&self) -> Range<usize> {
        self.ring_steps.of_split(self.split)
    }

    /// Rows of the own share in the slot of a ring step, next to rows of other ranks.
    pub(super) fn staying(&self) -> u64 {
        if self.ring_steps.form().holds_own() { self.own[0].rows } else { 0 }
    }

    /// Rows of other nodes in the slot, next to the own share.
    pub(super) fn beside(&self) -> u64 {
        if !self.ring_steps.form().holds_own() {
            return 0;
        }
        self.ring_steps.list()[self.steps()].iter().filter(|v| !v.attends()).map(|v| v.rows_in).sum()
    }

    /// The rows of a ring step in buffers of this rank's own rows and in slots.
    pub(super) fn rows(&self, ring_step: usize, own: &[BufferView], slots: &[BufferView]) -> StepRows {
        let tensors = own.iter().zip(slots).map(|(&own, &slot)| StepTensor { own, slot }).collect();
        StepRows { ring_step: ring_step as u32, side: self.circulating_side, tensors }
    }

    /// Whether anything is exchanged for a ring step.
    pub(super) fn travels(&self, ring_step: usize) -> bool {
        let v = self.ring_steps.list()[ring_step];
        let there = if v.hop == Hop::Local { self.staying() + self.beside() } else { 0 };
        v.rows_in > there || v.rows_out > 0
    }
}

/// Index of the node slot, and of the node's sum, for rows of the node `node` places before.
pub(super) fn turn_of(node: u32) -> usize {
    (node as usize - 1) % 2
}

/// Buffers for returning the partials of rows that travelled.
pub(super) struct Home {
    /// The sums that partials are added to.
    pub sums: Vec<BufferView>,
    /// Sums over the ranks of a node, for the rows of a node slot.
    pub node_sums: [Vec<BufferView>; 2],
    /// Partials as kernels write them.
    pub fresh: [Vec<BufferView>; 2],
    /// Partials as they are sent: `fresh`, or a narrower copy of it.
    pub leaving: [Vec<BufferView>; 2],
    /// Partials that arrive.
    pub arriving: Vec<BufferView>,
    /// If the wire type is narrower: copies of a node's sums in it, and the sums that arrive in it.
    pub narrowed: Option<(Vec<BufferView>, Vec<BufferView>)>,
}

impl Builder<'_> {
    /// A buffer for each of `like`, over these regions; in the type of `like`, unless another is given.
    fn over(
        &mut self,
        regions: impl Iterator<Item = Region>,
        name: &'static str,
        like: &[BufferView],
        dtype: Option<Dtype>,
        rows: u64,
    ) -> Vec<BufferView> {
        let buffer = |(&v, region): (&BufferView, Region)| {
            let (dtype, dim) = (dtype.unwrap_or_else(|| self.dtype_of(v)), self.dim_of(v));
            self.buffer_in(region, name, dtype, rows, v.heads, dim)
        };
        like.iter().zip(regions).map(buffer).collect()
    }

    /// Two buffers for each of `like`, over the regions that earlier travels used; only the first `slots` of the two
    /// get bytes.
    fn two_of(
        &mut self,
        regions: &mut Vec<[Region; 2]>,
        name: &'static str,
        like: &[BufferView],
        dtype: Option<Dtype>,
        rows: u64,
        slots: usize,
    ) -> [Vec<BufferView>; 2] {
        self.grow(regions, like.len());
        [0, 1].map(|i| {
            let rows = if i < slots { rows } else { 0 };
            self.over(regions.iter().map(|pair| pair[i]), name, like, dtype, rows)
        })
    }

    /// Adds pairs of regions until there are `n`.
    fn grow(&mut self, regions: &mut Vec<[Region; 2]>, n: usize) {
        while regions.len() < n {
            regions.push([0, 1].map(|_| self.region(Life::Ring, 0)));
        }
    }

    /// Prepares a travel of `own`; with `sums`, partials of the same shapes come home to them.
    pub(super) fn travel(
        &mut self,
        regions: &mut TravelRegions,
        circulating_side: CirculatingSide,
        (round, split): (usize, u32),
        own: Vec<BufferView>,
        sums: Option<(Vec<BufferView>, Dtype)>,
    ) -> Travel {
        let ring_steps = self.out.ring_steps(circulating_side).clone();
        let arrivals = ring_steps.arrivals();
        // If earlier rounds used a slot, they may have used both, because turns continue across rounds.
        let slots = if round > 0 && arrivals > 0 { 2 } else { arrivals };
        let slots = if self.plan.mesh().ring == 1 { 0 } else { slots };
        let slot_views = self.two_of(&mut regions.slots, "ring slot", &own, None, ring_steps.slot_rows(), slots);
        let (node_rows, node_slots) = (ring_steps.node_slot_rows(), ring_steps.node_slots());
        let node_slot_views = self.two_of(&mut regions.node_slots, "node slot", &own, None, node_rows, node_slots);
        let packed = self.packed(&mut regions.packed, &ring_steps, &own);
        let home = sums.filter(|_| ring_steps.of_split(split).len() > 1 || ring_steps.form().holds_own()).map(
            |(sums, wire)| {
                let homes = &mut regions.homes;
                let (n, rows) = (sums.len(), ring_steps.slot_rows());
                let whole = self.dtype_of(sums[0]);
                self.grow(homes, 3 * n);
                let third = |b: &mut Self, i: usize, name, dtype, rows, slots| {
                    let mut part = homes[i * n..(i + 1) * n].to_vec();
                    b.two_of(&mut part, name, &sums, Some(dtype), rows, slots)
                };
                // Over several nodes only the sum that crosses has the wire type; until then it has the type of the
                // sums.
                let (crossing, wire) = (wire, if ring_steps.crosses() { whole } else { wire });
                let narrow = wire != whole;
                let fresh = third(self, 0, "partial", whole, rows, if narrow { slots.min(1) } else { slots });
                let leaving =
                    if narrow { third(self, 1, "partial to travel", wire, rows, slots) } else { fresh.clone() };
                let fresh = if narrow { [fresh[0].clone(), fresh[0].clone()] } else { fresh };
                let [arriving, _] = third(self, 2, "partial from peer", wire, ring_steps.return_rows(), 1);
                let narrowed = (crossing != wire).then(|| {
                    let [leaving, _] =
                        third(self, 1, "sum of a node to travel", crossing, ring_steps.node_sum_rows(), 1);
                    // The slot is the second of the region pair, since both are in use at a time.
                    let (rows, second) = (ring_steps.node_return_rows(), homes[n..2 * n].iter().map(|pair| pair[1]));
                    (leaving, self.over(second, "partial from a node", &sums, Some(crossing), rows))
                });
                let node_homes = &mut regions.node_homes;
                let node_sums = self.two_of(node_homes, "sum of a node", &sums, None, node_rows, node_slots);
                Home { sums, node_sums, fresh, leaving, arriving, narrowed }
            },
        );
        Travel {
            circulating_side,
            ring_steps,
            round,
            split,
            own,
            slots: slot_views,
            node_slots: node_slot_views,
            packed,
            home,
        }
    }

    /// Buffers for packing rows that would leave in too many messages, and the number of rows that each ring step
    /// packs.
    fn packed(
        &mut self,
        regions: &mut Vec<Region>,
        ring_steps: &RingSteps,
        own: &[BufferView],
    ) -> (Vec<BufferView>, Vec<u64>) {
        let rows = ring_steps.packed_rows(|runs| is_fragmented(runs, own.len()));
        let most = rows.iter().copied().max().unwrap_or(0);
        if most == 0 {
            return (Vec::new(), rows);
        }
        while regions.len() < own.len() {
            regions.push(self.region(Life::Ring, 0));
        }
        (self.over(regions.iter().copied(), "packed for a peer", own, None, most), rows)
    }
}
