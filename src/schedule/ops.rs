// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of a schedule: buffers, views of their rows and heads, and operations on them.

use alloc::vec::Vec;

use super::{CirculatingSide, TensorId};
use crate::{
    call::{Gradients, HeadMap},
    element::Dtype,
};

/// A buffer: the caller's tensor, or one in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buf {
    /// The caller's.
    User(TensorId),
    /// Entry of [`Schedule::buffers`](super::Schedule::buffers).
    Work(u16),
}

/// A compact `[rows, heads, dim]` buffer in the workspace. Two buffers may share bytes if their lifetimes do not
/// overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its purpose, in errors and explanations.
    pub name: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Rows.
    pub rows: u64,
    /// Heads.
    pub heads: u32,
    /// Innermost dimension.
    pub dim: u32,
    /// First byte in the workspace; a multiple of [`Schedule::ALIGNMENT`](super::Schedule::ALIGNMENT).
    pub offset: u64,
}

/// Digits of an exact sum of sinks' gradients, which does not depend on the layout.
pub(crate) const SINK_DIGITS: usize = 28;

/// Workspace buffers begin at multiples of this many bytes, and so must the workspace.
pub(crate) const ALIGNMENT: u64 = 256;

impl Buffer {
    /// The buffer's bytes, without padding.
    pub fn bytes(&self) -> u64 {
        self.rows * u64::from(self.heads) * u64::from(self.dim) * self.dtype.size() as u64
    }
}

/// Rows and heads of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferView {
    /// Which buffer.
    pub buf: Buf,
    /// First row.
    pub row: u64,
    /// Rows.
    pub rows: u64,
    /// First head.
    pub head: u32,
    /// Heads.
    pub heads: u32,
}

impl BufferView {
    /// All of a buffer with these rows and heads.
    pub const fn whole(buf: Buf, rows: u64, heads: u32) -> Self {
        Self { buf, row: 0, rows, head: 0, heads }
    }

    /// Some rows of this view. It does not check bounds: the verifier must see a wrong schedule to report it.
    #[must_use]
    pub fn slice(mut self, row: u64, rows: u64) -> Self {
        self.row = self.row.saturating_add(row);
        self.rows = rows;
        self
    }

    /// Some heads of this view.
    #[must_use]
    pub fn of_heads(mut self, head: u32, heads: u32) -> Self {
        self.head += head;
        self.heads = heads;
        self
    }
}

/// Where an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Exchanges, and sums and merges of received rows.
    Communication,
}

/// `dst = Σ sources`, as [`crate::call::Block`]; the sources are entries `sources_begin..sources_end` of
/// [`Schedule::sources`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockView {
    /// The destination.
    pub dst: BufferView,
    /// First source.
    pub sources_begin: u32,
    /// One past the last.
    pub sources_end: u32,
}

/// One message of an exchange: contiguous rows of a compact buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageView {
    /// The other rank, numbered in the world.
    pub peer: usize,
    /// The rows.
    pub view: BufferView,
    /// Whether it is sent (otherwise it is received).
    pub send: bool,
}

/// One tensor of a ring step: the owner's rows, and the slot that receives the needed rows of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepTensor {
    /// The owner's rows (of this rank's own share).
    pub own: BufferView,
    /// The slot for rows of other ranks.
    pub slot: BufferView,
}

/// The rows of one ring step that an operation moves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepRows {
    /// Index of the ring step.
    pub ring_step: u32,
    /// The side whose list of ring steps that is.
    pub side: CirculatingSide,
    /// The tensors.
    pub tensors: Vec<StepTensor>,
}

/// The purpose of a forward call of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttendPart {
    /// The rank's own q over k and v of a ring step.
    Keys,
    /// q of a ring step over the rank's own k and v: a partial result, which only its owner finishes.
    Queries,
    /// No key: the merged result of the rank's own q is finished, with the sink, in the element type.
    Finish,
}

impl AttendPart {
    /// The side whose list of ring steps the call's `ring_step` is an index of.
    pub const fn side(self) -> CirculatingSide {
        match self {
            Self::Keys => CirculatingSide::Keys,
            Self::Queries | Self::Finish => CirculatingSide::Queries,
        }
    }
}

/// A forward call of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttendOp {
    /// The purpose of the call.
    pub part: AttendPart,
    /// Index of the ring step whose rows it reads.
    pub ring_step: u32,
    /// Queries.
    pub q: BufferView,
    /// Keys, the rank's own or in a slot.
    pub k: BufferView,
    /// Values, the rank's own or in a slot.
    pub v: BufferView,
    /// Running o and its lse in two words, when there is more than one ring step.
    pub running: Option<(BufferView, BufferView)>,
    /// Final o and lse; `None` for a partial result.
    pub result: Option<(BufferView, BufferView)>,
    /// The heads of this call.
    pub heads: HeadMap,
}

/// A backward call of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackwardOp {
    /// Index of the ring step whose rows it reads.
    pub ring_step: u32,
    /// The side whose list of ring steps that is.
    pub side: CirculatingSide,
    /// Queries.
    pub q: BufferView,
    /// Keys.
    pub k: BufferView,
    /// Values.
    pub v: BufferView,
    /// Gradient of o.
    pub d_o: BufferView,
    /// Final lse.
    pub lse: BufferView,
    /// As [`ExpandedOp::Delta`](super::ExpandedOp::Delta) makes it.
    pub delta: BufferView,
    /// Gradient of q, or nothing.
    pub dq: Option<BufferView>,
    /// Gradients of k and v, or nothing.
    pub dkv: Option<(BufferView, BufferView)>,
    /// Whether to add to dk and dv, instead of overwriting them.
    pub accumulate_keys: bool,
    /// One partial of dk and dv for each q head.
    pub per_q_head: bool,
    /// The gradients to compute.
    pub gradients: Gradients,
    /// The heads of this call.
    pub heads: HeadMap,
}

/// The kind of an operation, with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum OpKind {
    /// `delta = rowsum(do ∘ o) − d_lse` of the caller's rows into a buffer; without a gradient of lse, the row sums.
    Delta {
        /// The result.
        delta: BufferView,
    },
    /// Partial gradient of the sinks over the caller's rows: `−Σ exp(sink − lse) · delta`.
    SinkGradient {
        /// As made by `Delta`.
        delta: BufferView,
        /// The result, one row.
        partial: BufferView,
    },
    /// Converts the digits of the sinks' gradients, summed over ranks, to numbers in the caller's dsinks.
    SinkTotal {
        /// One row of [`SINK_DIGITS`] for each sink of each head.
        digits: BufferView,
    },
    /// Entries `begin..end` of [`Schedule::blocks`].
    Transform {
        /// First block.
        begin: u32,
        /// One past the last.
        end: u32,
    },
    /// Entries `begin..end` of [`Schedule::messages`].
    Exchange {
        /// First message.
        begin: u32,
        /// One past the last.
        end: u32,
    },
    /// Own rows that leave in many small runs to one peer are copied end to end, so that they leave in few messages.
    /// `own` are the rank's own rows, `slot` is where they are packed. Comes right before the fetch that sends them.
    Pack(StepRows),
    /// The rows of a ring step arrive, and own rows leave.
    Fetch {
        /// The rows.
        rows: StepRows,
        /// The rows packed by the operation before, for each tensor; empty if all rows are sent in place.
        packed: Vec<BufferView>,
    },
    /// Forward attention.
    Attend(AttendOp),
    /// Backward attention.
    Backward(BackwardOp),
    /// Partial gradients or results are returned to their owner. `own`: this rank's partials for the rows it attended
    /// to (compact, like the slot). `slot` receives the partials that other ranks computed for this rank's own rows.
    Return(StepRows),
    /// Returned partials are added to the sums: `own += slot`, row by row.
    Reduce(StepRows),
    /// Partial results of several ranks are merged at once: see [`CombineOp`](super::CombineOp). The sources are
    /// entries of [`Schedule::sources`](super::Schedule::sources).
    Combine {
        /// Merged o and its parts.
        o: BlockView,
        /// Its lse and theirs.
        lse: BlockView,
        /// The first head, numbered in the problem.
        first_head: u32,
    },
    /// Returned partial results are merged into the running ones, row by row. Tensors: running o and the o that
    /// arrived; then lse likewise.
    Merge(StepRows),
    /// Segments are joined: entries `begin..end` of [`Schedule::blocks`](super::Schedule::blocks), each of two or three
    /// sources. See [`ExpandedOp::Compose`](super::ExpandedOp::Compose).
    Compose {
        /// First block.
        begin: u32,
        /// One past the last.
        end: u32,
    },
}

impl OpKind {
    /// The name in errors, traces and explanations.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Delta { .. } => "delta",
            Self::SinkGradient { .. } => "sink gradient",
            Self::SinkTotal { .. } => "sink total",
            Self::Transform { .. } => "transform",
            Self::Exchange { .. } => "exchange",
            Self::Pack(_) => "pack",
            Self::Fetch { .. } => "fetch",
            Self::Attend(_) => "attend",
            Self::Backward(_) => "attend backward",
            Self::Return(_) => "return",
            Self::Reduce(_) => "reduce",
            Self::Merge(_) => "merge",
            Self::Combine { .. } => "combine",
            Self::Compose { .. } => "compose",
        }
    }

    /// The rows of a ring step that it moves; none if it is not an operation of the ring.
    pub(crate) fn step_rows(&mut self) -> Option<&mut StepRows> {
        match self {
            Self::Pack(rows)
            | Self::Fetch { rows, .. }
            | Self::Return(rows)
            | Self::Reduce(rows)
            | Self::Merge(rows) => Some(rows),
            _ => None,
        }
    }

    /// Whether it is an exchange with other ranks.
    pub(crate) const fn is_exchange(&self) -> bool {
        matches!(self, Self::Exchange { .. } | Self::Fetch { .. } | Self::Return(_))
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Op {
    /// What it does.
    pub kind: OpKind,
    /// Where it runs.
    pub lane: Lane,
    /// The ring step it belongs to; 0 for what comes before and after the ring.
    pub step: u32,
    /// The part of the run: `"ulysses in"`, `"ring"`, `"ulysses out"`, …
    pub phase: &'static str,
    /// Index of the last operation of the other lane that must be complete.
    pub after: Option<u32>,
}
