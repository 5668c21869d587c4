// SPDX-License-Identifier: MIT OR Apache-2.0
//! The purpose of a schedule: a direction of attention, one all-to-all, one combine or one scan; and the tensors of
//! each.

use super::{AllToAll, AllToAllDirection, Combine, Direction, Scan, TensorId};
use crate::{batch::Side, element::Dtype, plan::Plan};

/// The purpose of a group's schedules, and of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Attention in one direction.
    Attention(Direction),
    /// An all-to-all of one tensor.
    AllToAll(AllToAll),
    /// A merge of partial results.
    Combine(Combine),
    /// States passed on along documents.
    Scan(Scan),
}

impl From<Direction> for Purpose {
    fn from(direction: Direction) -> Self {
        Self::Attention(direction)
    }
}

impl From<AllToAll> for Purpose {
    fn from(all_to_all: AllToAll) -> Self {
        Self::AllToAll(all_to_all)
    }
}

impl From<Combine> for Purpose {
    fn from(combine: Combine) -> Self {
        Self::Combine(combine)
    }
}

impl From<Scan> for Purpose {
    fn from(scan: Scan) -> Self {
        Self::Scan(scan)
    }
}

/// One of the caller's tensors, as a run uses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorForm {
    /// The argument's name.
    pub name: &'static str,
    pub dtype: Dtype,
    /// `[tokens, heads, dim]`
    pub shape: [usize; 3],
    pub written: bool,
}

impl Purpose {
    /// How a rank's run uses a tensor; `None` if it does not.
    #[cfg_attr(not(feature = "std"), expect(dead_code, reason = "runs need std"))]
    pub(crate) fn form(self, plan: &Plan, rank: usize, tensor: TensorId) -> Option<TensorForm> {
        let p = plan.problem();
        match self {
            Self::Attention(direction) => tensor.is_written(direction, p.sinks()).map(|written| TensorForm {
                name: tensor.name(),
                dtype: tensor.dtype(p),
                shape: tensor.shape(plan, rank),
                written,
            }),
            Self::AllToAll(AllToAll { direction: way, side, dim, dtype }) => {
                let (share, dim, to_heads) = (plan.heads_of(rank), dim as usize, way == AllToAllDirection::ToHeads);
                let (all, own) = match side {
                    Side::Q => (p.heads(), share.q.len()),
                    Side::K => (p.kv_heads(), share.kv.len()),
                };
                let (shape, written) = match tensor {
                    TensorId::OwnTokens => ([plan.local_tokens(side, rank).len(), all, dim], !to_heads),
                    TensorId::OwnHeads => ([plan.tokens_between_all_to_alls(side, rank), own, dim], to_heads),
                    _ => return None,
                };
                Some(TensorForm { name: if written { "to" } else { "from" }, dtype, shape, written })
            }
            Self::Combine(combine) => {
                let share = plan.combined_share(rank, combine.to);
                let given = [p.batch().tokens(Side::Q), plan.heads_of(rank).q.len(), tensor.dim(p)];
                let merged = [share.tokens.len(), share.heads.len(), tensor.dim(p)];
                let (shape, dtype, written) = match tensor {
                    TensorId::PartialO => (given, combine.partial, false),
                    TensorId::PartialLse => (given, tensor.dtype(p), false),
                    TensorId::O | TensorId::Lse => (merged, tensor.dtype(p), true),
                    TensorId::Sinks if p.sinks() => (tensor.shape(plan, rank), tensor.dtype(p), false),
                    _ => return None,
                };
                Some(TensorForm { name: tensor.name(), dtype, shape, written })
            }
            Self::Scan(scan) => {
                let segments = plan.local_tokens(Side::Q, rank).segments().len();
                let (dim, written) = match tensor {
                    TensorId::Decay => (scan.decay_dim(), false),
                    TensorId::State => (scan.state_dim(), false),
                    TensorId::InitialState => (scan.state_dim(), true),
                    _ => return None,
                };
                let shape = [segments, scan.heads as usize, dim as usize];
                Some(TensorForm { name: tensor.name(), dtype: scan.dtype, shape, written })
            }
        }
    }
}
