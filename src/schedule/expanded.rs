// SPDX-License-Identifier: MIT OR Apache-2.0
//! One operation with all its arguments: what a program needs that executes a schedule by itself.
//!
//! A schedule stores its operations briefly: the rows of a ring step follow from the plan. [`Schedule::expand`] lists
//! them, as views of buffers: messages of an exchange, sums of blocks, ranges of a kernel call. A framework can run
//! these with its own kernels, streams and communicator, `examples/execute_schedule` does it with plain loops and
//! channels, and the verifier proves schedules in this form. The runtime lists the same arguments without allocating
//! ([`super::expand`]).

use alloc::{vec, vec::Vec};
use core::convert::Infallible;

use super::{
    AttendOp, BackwardOp, BlockView, Buf, Buffer, BufferView, MessageView, OpKind, Schedule, TensorId,
    expand::Expansion,
};
use crate::call::{Band, Pair, QRange, Range, Ranges};

/// One block: `dst = Σ sources`, element by element, in the order given; the dtypes are those of the buffers.
#[derive(Clone, Debug)]
pub struct SumBlock {
    /// Where the sum goes. If it is the first source too, the others are added to it.
    pub dst: BufferView,
    /// What is summed; one source is a copy or a cast.
    pub sources: Vec<BufferView>,
}

/// Merges partial results of the same rows in the order given, applies the sink of each head once, and writes o and
/// lse.
#[derive(Clone, Debug)]
pub struct CombineOp {
    /// Merged o, and the partial ones.
    pub o: SumBlock,
    /// Its lse, and those of the partial results.
    pub lse: SumBlock,
    /// The first head, numbered in the problem: the caller's sinks have one for each head of the problem.
    pub first_head: u32,
}

/// The ranges and pairs of a kernel call. Rows count within the views of the call.
#[derive(Clone, Debug, Default)]
pub struct CallRanges {
    /// The q ranges.
    pub q: Vec<QRange>,
    /// The k ranges.
    pub k: Vec<Range>,
    /// The pairs, q range by q range.
    pub pairs: Vec<Pair>,
    /// The bands of the pairs.
    pub bands: Vec<Band>,
}

impl CallRanges {
    /// The pairs of a q range.
    pub fn keys(&self, q: usize) -> &[Pair] {
        &self.pairs[self.q[q].keys_begin as usize..self.q[q].keys_end as usize]
    }

    /// As kernels take them.
    pub fn as_ranges(&self) -> Ranges<'_> {
        Ranges { q: &self.q, k: &self.k, pairs: &self.pairs, bands: &self.bands }
    }
}

/// An operation with all its arguments.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ExpandedOp {
    /// `delta = rowsum(do ∘ o) − d_lse` of the caller's rows; a run without a gradient of lse has the row sums alone,
    /// and so do rows whose lse is −∞.
    Delta {
        /// The result.
        delta: BufferView,
    },
    /// Partial gradient of the sinks over the caller's rows: `−Σ exp(sink − lse) · delta`.
    SinkGradient {
        /// As made by `Delta`.
        delta: BufferView,
        /// The result, one row. In a reproducible plan it is the digits of an exact sum.
        partial: BufferView,
    },
    /// Converts the digits of the sinks' gradients to numbers. For the content of rows this is a copy.
    SinkTotal(SumBlock),
    /// Copies, casts and sums. Parts run one after another; the order of blocks within a part is free.
    Sums(Vec<Vec<SumBlock>>),
    /// Partial results are merged. Parts run one after another; each block is the merge of its two sources, the first
    /// of which is its own destination. Blocks come in pairs: one of o, then one of its lse, which has two words (their
    /// sum is the lse).
    Merges(Vec<Vec<SumBlock>>),
    /// Partial results of several ranks are merged at once, in order, and the sinks applied.
    Combine(CombineOp),
    /// Segments of a scan are joined. Each block is `dst = sources[0] · sources[1]`, plus `sources[2]` if there is one:
    /// the decay of the later part, applied to the state of the earlier part (plus the state of the later part), or to
    /// its decay. Blocks do not touch one another's destinations.
    Compose(Vec<SumBlock>),
    /// Sends and receives that complete together. Between two ranks both have them in the same order.
    Exchange {
        /// The messages.
        messages: Vec<MessageView>,
        /// Whether each received row is in an allowed pair of the receiver, which the proof checks; an executor has no
        /// use for it.
        strict: bool,
    },
    /// Forward attention.
    Attend(AttendOp, CallRanges),
    /// Backward attention.
    Backward(BackwardOp, CallRanges),
}

impl Schedule {
    /// The buffers of the workspace; two may share bytes if their lifetimes do not overlap.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// An operation with all its arguments.
    ///
    /// # Panics
    /// When the schedule has no operation of this number.
    pub fn expand(&self, op: usize) -> ExpandedOp {
        expand_with(self, op, &mut Expansion::new(self))
    }
}

/// As [`Schedule::expand`], with room that is kept.
pub(super) fn expand_with(s: &Schedule, i: usize, e: &mut Expansion) -> ExpandedOp {
    match &s.ops[i].kind {
        OpKind::Delta { delta } => ExpandedOp::Delta { delta: *delta },
        OpKind::SinkGradient { delta, partial } => ExpandedOp::SinkGradient { delta: *delta, partial: *partial },
        OpKind::SinkTotal { digits } => {
            let dst = BufferView { buf: Buf::User(TensorId::Dsinks), row: 0, head: 0, ..*digits };
            ExpandedOp::SinkTotal(SumBlock { dst, sources: vec![*digits] })
        }
        OpKind::Transform { .. } | OpKind::Pack(_) | OpKind::Reduce(_) => ExpandedOp::Sums(sums(s, i, e)),
        OpKind::Merge(_) => ExpandedOp::Merges(sums(s, i, e)),
        OpKind::Combine { o, lse, first_head } => {
            let [o, lse] = [o, lse].map(|b| SumBlock {
                dst: b.dst,
                sources: s.sources[b.sources_begin as usize..b.sources_end as usize].to_vec(),
            });
            ExpandedOp::Combine(CombineOp { o, lse, first_head: *first_head })
        }
        OpKind::Compose { .. } => ExpandedOp::Compose(sums(s, i, e).into_iter().flatten().collect()),
        kind @ (OpKind::Exchange { .. } | OpKind::Fetch { .. } | OpKind::Return(_)) => {
            let strict = matches!(kind, OpKind::Fetch { .. });
            ExpandedOp::Exchange { messages: e.messages(s, i).to_vec(), strict }
        }
        OpKind::Attend(op) => {
            s.attend_ranges(op, &mut e.scratch);
            ExpandedOp::Attend(*op, met(e))
        }
        OpKind::Backward(op) => {
            s.ring_steps(op.side).ranges(op.ring_step as usize, &mut e.scratch);
            ExpandedOp::Backward(*op, met(e))
        }
    }
}

fn sums(s: &Schedule, i: usize, e: &mut Expansion) -> Vec<Vec<SumBlock>> {
    let mut parts = Vec::new();
    let Ok(()) = e.blocks(s, i, |blocks, sources| {
        let sum = |b: &BlockView| SumBlock {
            dst: b.dst,
            sources: sources[b.sources_begin as usize..b.sources_end as usize].to_vec(),
        };
        parts.push(blocks.iter().map(sum).collect());
        Ok::<(), Infallible>(())
    });
    parts
}

fn met(e: &Expansion) -> CallRanges {
    let r = e.scratch.ranges();
    CallRanges { q: r.q.to_vec(), k: r.k.to_vec(), pairs: r.pairs.to_vec(), bands: r.bands.to_vec() }
}
