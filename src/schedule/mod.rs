// SPDX-License-Identifier: MIT OR Apache-2.0
//! Schedules: the operations of each rank, as data.
//!
//! A schedule is a list of one rank's operations: transform, exchange, attend, reduce, merge. Each operation has its
//! buffers, one of two lanes (compute or communication), and what it waits for. The runtime only executes the list.
//! Since it is data, it can be printed, drawn, and *verified*: [`Plan::verify`](crate::Plan::verify) checks the
//! schedules of all ranks together, under the contract of transports.
//!
//! - `join` finds the rows that one share needs of another, `ring_steps` the step and the source rank of each
//!   row;
//! - `emit` makes the lists: Ulysses exchanges tokens for heads at the beginning and back at the end, the ring runs
//!   in between;
//! - `verify` verifies them; `expand` lists an operation's blocks and messages when it is executed.
//!
//! Exchanges, and sums and merges of received rows, run on the communication lane, all other operations on the compute
//! lane. Within a lane operations run in list order. Each operation names at most one predecessor in the other lane:
//! the last one it depends on.

use alloc::{sync::Arc, vec::Vec};

use crate::element::Dtype;
pub use crate::plan::form::{CirculatingSide, Direction, Form};

mod all_to_all;
mod combine;
mod emit;
pub(crate) mod expand;
pub(crate) mod expanded;
mod join;
mod listed_keys;
mod ops;
mod purpose;
pub(crate) mod ring_steps;
#[cfg(feature = "std")]
pub(crate) mod run_trait;
mod scan;
#[cfg(test)]
mod slice_tests;
mod sweep;
mod tensor_id;
pub mod verify;

pub use all_to_all::{AllToAll, AllToAllDirection};
pub use combine::{Combine, CombineTo, CombinedShare};
pub use expanded::{CallRanges, CombineOp, ExpandedOp, SumBlock};
pub(crate) use ops::{ALIGNMENT, BlockView, Op, OpKind, SINK_DIGITS, StepRows, StepTensor};
pub use ops::{AttendOp, AttendPart, BackwardOp, Buf, Buffer, BufferView, Lane, MessageView};
pub use purpose::Purpose;
pub(crate) use purpose::TensorForm;
#[cfg(feature = "std")]
pub(crate) use ring_steps::{Hop, ListedRows};
pub(crate) use ring_steps::{RangeScratch, RingSteps};
pub use scan::{Decay, Scan, ScanForm};
pub use tensor_id::{TensorAxes, TensorId};

/// The ring steps of k's side and of q's side, if they have been computed already.
type KnownSteps = [Option<Arc<RingSteps>>; 2];

/// The phase of exchanges of the ring that go from node to node; those inside a node are "ring".
pub(crate) const BETWEEN_NODES: &str = "between nodes";

/// One rank's operations for one [`Purpose`]: a direction of attention, an all-to-all, a combine or a scan.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// This rank.
    pub(crate) rank: usize,
    /// The ranks that share the batch.
    pub(crate) group: core::ops::Range<usize>,
    /// Ranks of one Ulysses group; ring rank j's counterpart is `group.start + j · ulysses + place`.
    pub(crate) ulysses: usize,
    /// What the group runs.
    pub(crate) purpose: Purpose,
    /// Element type of the problem.
    pub(crate) dtype: Dtype,
    /// The workspace.
    pub(crate) buffers: Vec<Buffer>,
    /// Bytes of the workspace.
    pub(crate) workspace: u64,
    /// The operations; each comes after those it depends on.
    pub(crate) ops: Vec<Op>,
    /// Blocks of the transforms.
    pub(crate) blocks: Vec<BlockView>,
    /// Sources of the blocks.
    pub(crate) sources: Vec<BufferView>,
    /// Messages of the exchanges outside the ring.
    pub(crate) messages: Vec<MessageView>,
    /// Ring steps of k and v.
    pub(crate) keys: Option<Arc<RingSteps>>,
    /// Ring steps of the q side.
    pub(crate) queries: Option<Arc<RingSteps>>,
    /// Whether kernels break tiles by position.
    pub(crate) aligned: bool,
}

/// A description of one operation, for explanations, traces and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Operation {
    /// The operation's name in errors and traces: `"attend"`, `"fetch"`, …
    pub name: &'static str,
    /// The part of the run: `"ulysses in"`, `"ring"`, `"ulysses out"`, …
    pub phase: &'static str,
    /// The ring step; 0 before and after the ring.
    pub step: u32,
    /// Its lane.
    pub lane: Lane,
    /// Index of the last operation of the other lane that must be complete.
    pub after: Option<usize>,
}

impl Schedule {
    /// Buffers in the workspace begin at multiples of this many bytes, and so must a workspace that is lent.
    pub const ALIGNMENT: u64 = ALIGNMENT;

    /// Words of the gradient of a sink in a reproducible plan, until [`ExpandedOp::SinkTotal`]: digits of an exact sum,
    /// as [`sink_gradient`](crate::kernel::cpu::sink_gradient) writes them.
    pub const SINK_DIGITS: usize = SINK_DIGITS;

    /// The rank whose operations these are.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What the schedules of a group are for, the same on every rank.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Whether it is the backward of attention.
    pub(crate) fn is_backward(&self) -> bool {
        self.purpose == Purpose::Attention(Direction::Backward)
    }

    /// The size of the workspace of a run, in bytes.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }

    /// The operations, in the order of the list.
    pub fn operations(&self) -> impl ExactSizeIterator<Item = Operation> + '_ {
        self.ops.iter().map(|op| Operation {
            name: op.kind.name(),
            phase: op.phase,
            step: op.step,
            lane: op.lane,
            after: op.after.map(|i| i as usize),
        })
    }

    /// The ring steps that an operation refers to.
    ///
    /// # Panics
    /// When the schedule has none of that kind; planning never emits such an operation.
    pub(crate) fn ring_steps(&self, circulating_side: CirculatingSide) -> &Arc<RingSteps> {
        match circulating_side {
            CirculatingSide::Keys => self.keys.as_ref(),
            CirculatingSide::Queries => self.queries.as_ref(),
        }
        .expect("an operation's ring steps are part of its schedule")
    }

    /// Lists the ranges of a forward call in `s`, with its modes.
    pub(crate) fn attend_ranges(&self, a: &AttendOp, s: &mut RangeScratch) {
        self.ring_steps(a.part.side()).ranges(a.ring_step as usize, s);
        match a.part {
            AttendPart::Keys => {}
            AttendPart::Queries => s.begin_all(),
            AttendPart::Finish => s.finish_all(),
        }
    }

    /// The ring steps that it has of either side.
    fn known_steps(&self) -> KnownSteps {
        [self.keys.clone(), self.queries.clone()]
    }

    /// The rank that holds ring share `j` for the same heads.
    pub(crate) fn ring_peer(&self, j: u32) -> usize {
        self.group.start + j as usize * self.ulysses + self.rank % self.ulysses
    }

    /// The rank at a place in this rank's Ulysses group.
    pub(crate) fn ulysses_peer(&self, place: u32) -> usize {
        self.rank / self.ulysses * self.ulysses + place as usize
    }
}
