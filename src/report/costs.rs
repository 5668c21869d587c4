// SPDX-License-Identifier: MIT OR Apache-2.0
//! The costs of a rank's schedule, counted from the schedule itself.
//!
//! Bytes are those of the messages that the runtime exchanges; the same code lists them. Multiply-adds are those of the
//! matrix products over exactly the allowed (q, k) pairs; a kernel that computes whole tiles does a few more. Forward:
//! `head_dim + value_dim` for each pair and q head (the score; its part of o). Backward: `3·head_dim + 2·value_dim`
//! (the score again, dq, dk; dp, dv), which for equal dims is 2.5 times the forward, the field's formula.

use alloc::vec::Vec;

use super::metadata;
use super::size::OpSizes;
use crate::plan::Plan;
use crate::{
    error::Result,
    schedule::{ALIGNMENT, Direction, Schedule},
};

/// One step of one rank. Ring steps are numbered as in the schedule; step 0 is the rank's own share. The data of a step
/// is received while the step before is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepCost {
    /// `"ulysses in"`, `"ring"`, `"between nodes"` (ring traffic that crosses between nodes), `"ulysses out"`,
    /// `"sinks"`.
    pub phase: &'static str,
    /// The ring step; 0 outside the ring.
    pub step: u32,
    /// Bytes this rank sends, to all peers.
    pub bytes_sent: u64,
    /// Bytes it receives.
    pub bytes_received: u64,
    /// Messages it sends and receives.
    pub messages: u64,
    /// Multiply-adds of its attention.
    pub multiply_adds: u128,
}

/// Buffers of one name in the peak of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeakBuffers {
    /// Their purpose.
    pub name: &'static str,
    /// How many there are.
    pub count: u32,
    /// Their bytes, padding included.
    pub bytes: u64,
}

/// The work and the messages of one rank in one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Costs {
    /// The rank.
    pub rank: usize,
    /// Forward or backward.
    pub direction: Direction,
    /// In the order of phases and steps.
    pub steps: Vec<StepCost>,
    /// Bytes of the workspace.
    pub workspace: u64,
    /// The buffers that use the workspace at its peak; their bytes sum to it. Buffers of other phases share the same
    /// bytes.
    pub peak: Vec<PeakBuffers>,
    /// The most bytes of scheduler metadata (ranges, tiles, counters) that a rank on a device keeps there while it
    /// remembers the plan in this direction.
    pub device_metadata: u64,
}

impl StepCost {
    pub(super) fn new(phase: &'static str, step: u32) -> Self {
        Self { phase, step, bytes_sent: 0, bytes_received: 0, messages: 0, multiply_adds: 0 }
    }

    /// Adds the figures of another step.
    pub(super) fn add(&mut self, other: &Self) {
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.messages += other.messages;
        self.multiply_adds += other.multiply_adds;
    }
}

impl Costs {
    /// Bytes sent in all steps.
    pub fn bytes_sent(&self) -> u64 {
        self.steps.iter().map(|s| s.bytes_sent).sum()
    }

    /// Bytes received in all steps.
    pub fn bytes_received(&self) -> u64 {
        self.steps.iter().map(|s| s.bytes_received).sum()
    }

    /// Messages sent and received in all steps.
    pub fn messages(&self) -> u64 {
        self.steps.iter().map(|s| s.messages).sum()
    }

    /// Multiply-adds of all steps.
    pub fn multiply_adds(&self) -> u128 {
        self.steps.iter().map(|s| s.multiply_adds).sum()
    }
}

/// Sort key of a phase in the order of a schedule.
pub(super) fn order(phase: &str) -> usize {
    ["ulysses in", "ring", "between nodes", "ulysses out", "sinks"].iter().position(|p| *p == phase).unwrap_or(5)
}

impl Plan {
    /// The work and the messages of a rank in one direction, step by step.
    ///
    /// # Errors
    /// A rank outside the mesh.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, schedule::Direction};
    /// let problem = Problem::new(Batch::from_lengths(&[64])?, 4, 2, 16, Dtype::F32);
    /// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Contiguous)?;
    /// let costs = plan.costs(1, Direction::Forward)?;
    /// // Rank 1 needs k and v of all 32 tokens of rank 0: 2 heads of 16 + 16 values of 4 bytes.
    /// assert_eq!(costs.bytes_received(), 32 * 2 * 32 * 4);
    /// assert_eq!(costs.steps[1].multiply_adds, 32 * 32 * 4 * 32);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn costs(&self, rank: usize, direction: Direction) -> Result<Costs> {
        Ok(self.costs_of(&Schedule::new(self, rank, direction)?, direction))
    }

    /// The costs of a schedule of this plan in that direction.
    pub(super) fn costs_of(&self, schedule: &Schedule, direction: Direction) -> Costs {
        let mut sizes = OpSizes::new(self, schedule);
        let mut steps: Vec<StepCost> = Vec::new();
        for (i, op) in schedule.ops.iter().enumerate() {
            let at = steps.iter().position(|s| (s.phase, s.step) == (op.phase, op.step)).unwrap_or_else(|| {
                steps.push(StepCost::new(op.phase, op.step));
                steps.len() - 1
            });
            let step = &mut steps[at];
            for m in sizes.messages(i) {
                step.messages += 1;
                *if m.send { &mut step.bytes_sent } else { &mut step.bytes_received } += m.bytes;
            }
            step.multiply_adds += sizes.call(i).map_or(0, |call| call.multiply_adds());
        }
        steps.sort_by_key(|s| (order(s.phase), s.step));
        Costs {
            rank: schedule.rank,
            direction,
            steps,
            workspace: schedule.workspace,
            peak: peak(schedule),
            device_metadata: metadata::bound(self, schedule),
        }
    }
}

/// The buffers of the peak: each ends where the next one begins, and the last one at the end of the workspace.
fn peak(schedule: &Schedule) -> Vec<PeakBuffers> {
    let mut out: Vec<PeakBuffers> = Vec::new();
    let (mut end, mut above) = (schedule.workspace, schedule.buffers.len());
    while end > 0 {
        let ends_here = |i: &usize| {
            let b = &schedule.buffers[*i];
            b.bytes() > 0 && b.offset + b.bytes().next_multiple_of(ALIGNMENT) == end
        };
        // Buffers of one phase were created in this order, so the next lower buffer most likely has a lower index.
        let Some(i) = (0..above).rev().find(ends_here).or_else(|| (0..schedule.buffers.len()).rev().find(ends_here))
        else {
            break;
        };
        let b = &schedule.buffers[i];
        let bytes = end - b.offset;
        match out.iter_mut().find(|p| p.name == b.name) {
            Some(p) => (p.count, p.bytes) = (p.count + 1, p.bytes + bytes),
            None => out.push(PeakBuffers { name: b.name, count: 1, bytes }),
        }
        (end, above) = (b.offset, i);
    }
    out.reverse();
    out
}
