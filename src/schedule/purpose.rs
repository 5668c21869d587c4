// SPDX-License-Identifier: MIT OR Apache-2.0
//! The purpose of a schedule: a direction of attention, or one all-to-all; and the tensors of each.

use super::{AllToAll, AllToAllDirection, Direction, TensorId};
use crate::{batch::Side, element::Dtype, plan::Plan};

/// The purpose of a group's schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Attention(Direction),
    AllToAll(AllToAll),
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
                    TensorId::OwnTokens => ([plan.local_tokens(side, rank), all, dim], !to_heads),
                    TensorId::OwnHeads => ([plan.tokens_between_all_to_alls(side, rank), own, dim], to_heads),
                    _ => return None,
                };
                Some(TensorForm { name: if written { "to" } else { "from" }, dtype, shape, written })
            }
        }
    }
}
