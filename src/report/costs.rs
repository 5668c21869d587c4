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
    /// `"ulysses in"`, `"ring"`, `"between nodes"` (what of the ring crosses from node to node), `"ulysses out"`,
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
    /// What they are for.
    pub name: &'static str,
    /// How many there are.
    pub count: u32,
    /// Their bytes, padding included.
    pub bytes: u64,
}

/// What one rank does in one direction.
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

/// Where a phase stands in the order of a schedule.
pub(super) fn order(phase: &str) -> usize {
    ["ulysses in", "ring", "between nodes", "ulysses out", "sinks"].iter().position(|p| *p == phase).unwrap_or(5)
}

impl Plan {
    /// What a rank does in one direction, step by step.
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
        Ok(self.costs_of(&Schedule::new(self, rank, direction)?))
    }

    /// The costs of a schedule of this plan.
    pub(super) fn costs_of(&self, schedule: &Schedule) -> Costs {
        let mut sizes = OpSizes::new(self, schedule);
        let mut steps: Vec<StepCost> = Vec::new();
        for (i, op) in schedule.ops.iter().enumerate() {
            let at = steps.iter().position(|s| (s.phase, s.step) == (op.phase, op.step)).unwrap_or_else(|| {
                steps.push(StepCost {
                    phase: op.phase,
                    step: op.step,
                    bytes_sent: 0,
                    bytes_received: 0,
                    messages: 0,
                    multiply_adds: 0,
                });
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
        let (rank, direction) = (schedule.rank, schedule.direction);
        Costs {
            rank,
            direction,
            steps,
            workspace: schedule.workspace,
            peak: peak(schedule),
            device_metadata: metadata::bound(self, schedule),
        }
    }
}

/// The buffers that stand end to end up to the end of the workspace.
fn peak(schedule: &Schedule) -> Vec<PeakBuffers> {
    let mut out: Vec<PeakBuffers> = Vec::new();
    let (mut end, mut above) = (schedule.workspace, schedule.buffers.len());
    while end > 0 {
        let ends_here = |i: &usize| {
            let b = &schedule.buffers[*i];
            b.bytes() > 0 && b.offset + b.bytes().next_multiple_of(ALIGNMENT) == end
        };
        // Buffers of one phase were made one after another, so the next below was most likely made before.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Layout, Mask, Mesh, Options, Problem, plan::Circulate, plan::Gather, plan::Wire};

    /// Every form, layout and mesh on a pack with awkward lengths.
    fn each(mut check: impl FnMut(&Plan)) {
        let batch = Batch::from_lengths(&[7, 0, 1, 40, 13]).unwrap();
        let options = [
            Options::new(),
            Options::new().gather(true),
            Options::new().gather(Gather::Together),
            Options::new().passes(2),
            Options::new().circulate(Circulate::Queries),
            Options::new().circulate_forward(Circulate::Queries),
            Options::new().circulate_forward(Circulate::Queries).ranks_per_node(2),
            Options::new().circulate(Circulate::Keys).wire(Wire::Bf16),
            Options::new().reproducible(true),
            Options::new().circulate(Circulate::Keys).ranks_per_node(2),
            Options::new().circulate(Circulate::Queries).wire(Wire::Bf16).ranks_per_node(2),
            Options::new().gather(true).ranks_per_node(2),
            Options::new().gather(Gather::Together).circulate(Circulate::Keys).wire(Wire::Bf16).ranks_per_node(2),
            Options::new().gather(Gather::Together).circulate(Circulate::Queries).ranks_per_node(2),
            Options::new().gather(Gather::Together).circulate(Circulate::Keys).passes(2).ranks_per_node(2),
            Options::new().reproducible(true).ranks_per_node(2),
        ];
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for mask in [Mask::causal(), Mask::full(), Mask::window(5, 0)] {
                let p = Problem::new(batch.clone(), 6, 2, 8, dtype).with_value_dim(4).with_mask(mask).with_sinks(true);
                for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }] {
                    for (ulysses, ring) in [(1, 1), (1, 4), (2, 3), (4, 1), (4, 2)] {
                        for o in options {
                            check(
                                &Plan::with_options(&p, Mesh { replicas: 1, ring, ulysses }, layout, o)
                                    .unwrap_or_else(|e| panic!("{e}")),
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn all_work_is_done_once_and_all_that_leaves_arrives() {
        each(|plan| {
            let p = plan.problem();
            for (direction, dims) in [(Direction::Forward, 8 + 4), (Direction::Backward, 3 * 8 + 2 * 4)] {
                let all: Vec<Costs> = (0..plan.mesh().world()).map(|r| plan.costs(r, direction).unwrap()).collect();
                let (mut work, mut sent, mut received) = (0, 0, 0);
                for c in &all {
                    work += c.multiply_adds();
                    sent += c.bytes_sent();
                    received += c.bytes_received();
                }
                let again = direction == Direction::Backward && plan.options().reproducible;
                let dims = if again { 4 * 8 + 3 * 4 } else { dims };
                assert_eq!(work, p.area() * 6 * dims, "{plan:?}");
                assert_eq!(sent, received, "{plan:?}");
            }
        });
    }

    #[test]
    fn the_peak_is_the_sum_of_its_buffers() {
        each(|plan| {
            for direction in [Direction::Forward, Direction::Backward] {
                for rank in 0..plan.mesh().world() {
                    let c = plan.costs(rank, direction).unwrap();
                    let sum: u64 = c.peak.iter().map(|p| p.bytes).sum();
                    assert_eq!(sum, c.workspace, "{:?} of {plan:?}", c.peak);
                }
            }
        });
    }

    #[test]
    fn no_workspace_is_larger_than_the_design_allows() {
        let (mut real, mut allowed) = (0, 0);
        each(|plan| {
            for direction in [Direction::Forward, Direction::Backward] {
                for rank in 0..plan.mesh().world() {
                    let (found, bound) = (
                        Schedule::new(plan, rank, direction).unwrap().workspace,
                        plan.workspace_bound(rank, direction),
                    );
                    assert!(found <= bound, "{found} of {bound} bytes, rank {rank} {direction:?} of {plan:?}");
                    real += found;
                    allowed += bound;
                }
            }
        });
        assert!(real > 0 && allowed > real);
        // Rows that are larger than the padding of all buffers together: one too few in the bound is found.
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..200 {
            let documents = random.usize(1..5);
            let lengths: Vec<usize> = (0..documents).map(|_| random.usize(0..40)).collect();
            let mask = [Mask::causal(), Mask::full(), Mask::window(9, 2)][random.usize(..3)];
            let p = Problem::new(Batch::from_lengths(&lengths).unwrap(), 16, 16, 512, Dtype::F32).with_mask(mask);
            let ring = random.usize(2..7);
            let levels = if random.bool() && ring.is_multiple_of(2) { ring / 2 } else { 0 };
            let options = [Options::new(), Options::new().gather(true), Options::new().circulate(Circulate::Queries)]
                [random.usize(..3)]
            .ranks_per_node(levels);
            for layout in crate::plan::Choice::LAYOUTS {
                let plan = Plan::with_options(&p, Mesh::ring(ring).unwrap(), layout, options).unwrap();
                for direction in [Direction::Forward, Direction::Backward] {
                    for rank in 0..ring {
                        let schedule = Schedule::new(&plan, rank, direction).unwrap();
                        let (found, bound) = (schedule.workspace, plan.workspace_bound(rank, direction));
                        assert!(found <= bound, "{found} of {bound} bytes, rank {rank} {direction:?} of {plan:?}");
                    }
                }
            }
        }
        // Where padding and rounding are small against the buffers, the bound is close.
        let p = Problem::new(Batch::from_lengths(&[1 << 14]).unwrap(), 4, 4, 64, Dtype::Bf16);
        let plan = Plan::new(&p, Mesh::ring(4).unwrap(), Layout::Zigzag).unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            let (found, bound) =
                (Schedule::new(&plan, 1, direction).unwrap().workspace, plan.workspace_bound(1, direction));
            assert!(found <= bound && bound < found + found / 4, "{found} of {bound} bytes, {direction:?}");
        }
    }
}
