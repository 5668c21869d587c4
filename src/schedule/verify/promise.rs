// SPDX-License-Identifier: MIT OR Apache-2.0
//! The specification: the caller's input and output tensors, row by row, for an attention and for one all-to-all.
//!
//! It is separate from the code that builds schedules on purpose, so that the proof does not depend on that code.

use alloc::{vec, vec::Vec};

use super::{
    cell::{Cell, What},
    column::Column,
    memory::{Access, CellTable, side_of},
};
use crate::{
    batch::Side,
    element::Dtype,
    plan::Plan,
    schedule::{AllToAll, AllToAllDirection, Direction, OWN_HEADS, OWN_TOKENS, Purpose, Schedule, TensorId},
};

const TENSORS: [TensorId; TensorId::COUNT] = [
    TensorId::Q,
    TensorId::K,
    TensorId::V,
    TensorId::O,
    TensorId::Lse,
    TensorId::DO,
    TensorId::Dq,
    TensorId::Dk,
    TensorId::Dv,
    TensorId::Sinks,
    TensorId::Dsinks,
];

/// The caller's tensors of one rank, in the order of [`TensorId`]. `whole_rows`: with a cell for a row.
pub(super) fn tables(s: &Schedule, plan: &Plan, purpose: Purpose, whole_rows: bool) -> Vec<CellTable> {
    let table = |&tensor: &TensorId| match purpose {
        Purpose::Attention(_) => of_attention(tensor, s, plan, whole_rows),
        Purpose::AllToAll(all_to_all) => of_all_to_all(tensor, s, plan, all_to_all),
    };
    TENSORS.iter().map(table).collect()
}

fn of_attention(tensor: TensorId, s: &Schedule, plan: &Plan, whole_rows: bool) -> CellTable {
    let p = plan.problem();
    let forward = s.direction == Direction::Forward;
    let access = match tensor {
        TensorId::Q | TensorId::K | TensorId::V => Access::Input,
        TensorId::O | TensorId::Lse if forward => Access::Output,
        TensorId::O | TensorId::Lse | TensorId::DO if !forward => Access::Input,
        TensorId::Dq | TensorId::Dk | TensorId::Dv if !forward => Access::Output,
        TensorId::Sinks if p.sinks() => Access::Input,
        TensorId::Dsinks if p.sinks() && !forward => Access::Output,
        _ => Access::Absent,
    };
    let side = side_of(tensor);
    let one_row = matches!(tensor, TensorId::Sinks | TensorId::Dsinks);
    let rows = if one_row { 1 } else { plan.local_tokens(side, s.rank) as u64 };
    let heads = if side == Side::K { p.kv_heads() } else { p.heads() } as u32;
    let dim = match tensor {
        TensorId::Q | TensorId::K | TensorId::Dq | TensorId::Dk => p.head_dim(),
        TensorId::V | TensorId::O | TensorId::DO | TensorId::Dv => p.value_dim(),
        TensorId::Lse | TensorId::Sinks | TensorId::Dsinks => 1,
    } as u32;
    let dtype = match tensor {
        TensorId::Lse | TensorId::Dsinks => p.dtype().accumulator(),
        TensorId::Sinks => Dtype::F32,
        _ => p.dtype(),
    };
    let held = 0..if whole_rows { 1 } else { heads };
    let columns = match access {
        Access::Input if one_row => given(tensor, &[0], held),
        Access::Input => given(tensor, &plan.token_indices(side, s.rank), held),
        Access::Output => vec![Column::unset(rows); held.len()],
        _ => Vec::new(),
    };
    CellTable::of_user(tensor, [rows, heads.into(), dim.into()], dtype, access, columns)
}

/// The rows of these tokens as the caller gives them, a column for each head.
fn given(tensor: TensorId, tokens: &[usize], heads: core::ops::Range<u32>) -> Vec<Column> {
    let cells = |h| tokens.iter().map(move |&token| Cell::new(What::Input(tensor), token as u32, h, 0));
    heads.map(|h| Column::of(cells(h))).collect()
}

/// The tokens of a rank's ring share, and the heads that are its own.
pub(super) fn held(plan: &Plan, rank: usize, side: Side) -> (Vec<usize>, core::ops::Range<u32>) {
    let place = plan.mesh().coordinates(rank);
    let tokens = plan
        .mesh()
        .group_of(rank)
        .filter(|&peer| plan.mesh().coordinates(peer).ring == place.ring)
        .flat_map(|peer| plan.token_indices(side, peer))
        .collect();
    let share = plan.heads_of(rank);
    (tokens, if side == Side::Q { share.q } else { share.kv })
}

pub(super) fn all_heads(plan: &Plan, side: Side) -> u32 {
    (if side == Side::Q { plan.problem().heads() } else { plan.problem().kv_heads() }) as u32
}

/// The two tensors of an all-to-all; the others are absent.
fn of_all_to_all(tensor: TensorId, s: &Schedule, plan: &Plan, all_to_all: AllToAll) -> CellTable {
    let (brought, taken) = match all_to_all.way {
        AllToAllDirection::ToHeads => (OWN_TOKENS, OWN_HEADS),
        AllToAllDirection::ToTokens => (OWN_HEADS, OWN_TOKENS),
    };
    let (tokens, heads) = if tensor == OWN_HEADS {
        held(plan, s.rank, all_to_all.side)
    } else {
        (plan.token_indices(all_to_all.side, s.rank), 0..all_heads(plan, all_to_all.side))
    };
    let shape = [tokens.len() as u64, heads.len() as u64, all_to_all.dim.into()];
    let (access, columns) = if tensor == brought {
        (Access::Input, given(tensor, &tokens, heads))
    } else if tensor == taken {
        (Access::Output, vec![Column::unset(tokens.len() as u64); heads.len()])
    } else {
        (Access::Absent, Vec::new())
    };
    CellTable::of_user(tensor, shape, all_to_all.dtype, access, columns)
}
