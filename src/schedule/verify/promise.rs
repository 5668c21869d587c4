// SPDX-License-Identifier: MIT OR Apache-2.0
//! The specification: the caller's input and output tensors, row by row, for an attention and for one all-to-all.
//!
//! It is separate from the code that builds schedules on purpose, so that the proof does not depend on that code.

use alloc::{vec, vec::Vec};

use super::{
    cell::{Cell, What},
    column::Column,
    combine,
    memory::{CellTable, Columns, side_of},
};
use crate::{
    batch::Side,
    element::Dtype,
    plan::{Plan, Problem},
    schedule::{AllToAll, AllToAllDirection, Decay, Direction, Purpose, Scan, Schedule, TensorForm, TensorId},
};

/// The caller's tensors of one rank, in the order of [`TensorId`]. `whole_rows`: with a cell for a row.
pub(super) fn tables(s: &Schedule, plan: &Plan, purpose: Purpose, whole_rows: bool) -> Vec<CellTable> {
    let table = |tensor: TensorId| {
        let Some(form) = form(tensor, s, plan, purpose) else {
            return CellTable::of_user(tensor, None, [].into_iter().collect());
        };
        let [rows, heads, _] = form.shape;
        let one = |token| TokenRun { token, tokens: 1 };
        let (tokens, first) = match purpose {
            _ if form.written => (Vec::new(), 0),
            Purpose::AllToAll(a) if tensor == TensorId::OwnHeads => {
                let (tokens, heads) = held(plan, s.rank, a.side);
                (tokens.into_iter().map(|token| one(token as u32)).collect(), heads.start)
            }
            Purpose::AllToAll(a) => (token_runs(plan, a.side, s.rank), 0),
            Purpose::Attention(_) | Purpose::Combine(_) if tensor == TensorId::Sinks => (vec![one(0)], 0),
            // What a combine and a scan are given is set by their `set_inputs`.
            Purpose::Combine(_) | Purpose::Scan(_) => (vec![one(0); rows], 0),
            Purpose::Attention(_) => (token_runs(plan, side_of(tensor), s.rank), 0),
        };
        let heads = first..first + if whole_rows { 1 } else { heads as u32 };
        let columns = match form.written {
            true => heads.map(|_| Column::unset(rows as u64)).collect(),
            false => given(tensor, &tokens, heads),
        };
        CellTable::of_user(tensor, Some(form), columns)
    };
    TensorId::ALL.into_iter().map(table).collect()
}

/// The form of one of the caller's tensors; `None` if it is absent.
pub(super) fn form(tensor: TensorId, s: &Schedule, plan: &Plan, purpose: Purpose) -> Option<TensorForm> {
    match purpose {
        Purpose::Attention(direction) => of_attention(tensor, s, plan, direction),
        Purpose::AllToAll(all_to_all) => of_all_to_all(tensor, s, plan, all_to_all),
        Purpose::Combine(of) => combine::form(tensor, s, plan, of),
        Purpose::Scan(of) => of_scan(tensor, s, plan, of),
    }
}

fn of_attention(tensor: TensorId, s: &Schedule, plan: &Plan, direction: Direction) -> Option<TensorForm> {
    let p = plan.problem();
    let forward = direction == Direction::Forward;
    let written = match tensor {
        TensorId::Q | TensorId::K | TensorId::V => false,
        TensorId::O | TensorId::Lse => forward,
        TensorId::MaxLogit if forward => true,
        TensorId::DO | TensorId::DLse if !forward => false,
        TensorId::Dq | TensorId::Dk | TensorId::Dv if !forward => true,
        TensorId::Sinks if p.sinks() => false,
        TensorId::Dsinks if p.sinks() && !forward => true,
        _ => return None,
    };
    let side = side_of(tensor);
    let one_row = matches!(tensor, TensorId::Sinks | TensorId::Dsinks | TensorId::MaxLogit);
    let rows = if one_row { 1 } else { plan.local_tokens(side, s.rank).len() };
    let (dtype, dim) = element(tensor, p);
    let shape = [rows, all_heads(plan, side) as usize, dim];
    Some(TensorForm { name: tensor.name(), dtype, shape, written })
}

/// The type of a tensor's elements, and its innermost dimension.
pub(super) fn element(tensor: TensorId, p: &Problem) -> (Dtype, usize) {
    let dim = match tensor {
        TensorId::Q | TensorId::K | TensorId::Dq | TensorId::Dk => p.head_dim(),
        TensorId::V | TensorId::O | TensorId::DO | TensorId::Dv | TensorId::PartialO => p.value_dim(),
        TensorId::Lse | TensorId::DLse | TensorId::MaxLogit | TensorId::PartialLse => 1,
        TensorId::Sinks | TensorId::Dsinks => p.sinks_per_head(),
        TensorId::OwnTokens | TensorId::OwnHeads | TensorId::Decay | TensorId::State | TensorId::InitialState => 0,
    };
    let dtype = match tensor {
        TensorId::Lse | TensorId::DLse | TensorId::Dsinks | TensorId::PartialLse => p.dtype().accumulator(),
        TensorId::Sinks | TensorId::MaxLogit => Dtype::F32,
        _ => p.dtype(),
    };
    (dtype, dim)
}

/// The two tensors of an all-to-all; the others are absent.
fn of_all_to_all(tensor: TensorId, s: &Schedule, plan: &Plan, all_to_all: AllToAll) -> Option<TensorForm> {
    let to_heads = all_to_all.direction == AllToAllDirection::ToHeads;
    let (rows, heads, written) = match tensor {
        TensorId::OwnHeads => {
            let (tokens, heads) = held(plan, s.rank, all_to_all.side);
            (tokens.len(), heads.len(), to_heads)
        }
        TensorId::OwnTokens => {
            let tokens = plan.local_tokens(all_to_all.side, s.rank).indices();
            (tokens.len(), all_heads(plan, all_to_all.side) as usize, !to_heads)
        }
        _ => return None,
    };
    let shape = [rows, heads, all_to_all.dim as usize];
    Some(TensorForm { name: tensor.name(), dtype: all_to_all.dtype, shape, written })
}

/// The first token and the document of each of a rank's segments, in its order.
pub(super) fn segments(plan: &Plan, rank: usize) -> Vec<(usize, usize)> {
    let batch = plan.problem().batch();
    let (mut list, mut next) = (Vec::new(), None);
    for run in token_runs(plan, Side::Q, rank) {
        let token = run.token as usize;
        let document = batch.document_of(Side::Q, token);
        if next != Some((token, document)) {
            list.push((token, document));
        }
        next = Some((token + run.tokens as usize, document));
    }
    list
}

/// The three tensors of a scan; the others are absent.
fn of_scan(tensor: TensorId, s: &Schedule, plan: &Plan, scan: Scan) -> Option<TensorForm> {
    let (key, value) = (scan.key_dim as usize, scan.value_dim as usize);
    let (dim, written) = match (tensor, scan.decay) {
        (TensorId::Decay, Decay::Diagonal) => (key, false),
        (TensorId::Decay, Decay::Matrix) => (key * key, false),
        (TensorId::State, _) => (key * value, false),
        (TensorId::InitialState, _) => (key * value, true),
        _ => return None,
    };
    let shape = [segments(plan, s.rank).len(), scan.heads as usize, dim];
    Some(TensorForm { name: tensor.name(), dtype: scan.dtype, shape, written })
}

/// The rows of these tokens as the caller's input, a column for each head.
fn given(tensor: TensorId, tokens: &[TokenRun], heads: core::ops::Range<u32>) -> Columns {
    let cell = |run: &TokenRun, h| (u64::from(run.tokens), Cell::new(What::Input(tensor), run.token, h, 0));
    heads.map(|h| Column::of(tokens.iter().map(|run| cell(run, h)))).collect()
}

/// Consecutive tokens of one document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TokenRun {
    pub token: u32,
    pub tokens: u32,
}

impl TokenRun {
    /// Without its first tokens.
    pub(super) fn from(self, tokens: u32) -> Self {
        Self { token: self.token + tokens, tokens: self.tokens - tokens }
    }
}

/// The tokens of a rank, in its order.
pub(super) fn token_runs(plan: &Plan, side: Side, rank: usize) -> Vec<TokenRun> {
    let mut runs = Vec::new();
    let mut add = |token: usize, tokens: usize| runs.push(TokenRun { token: token as u32, tokens: tokens as u32 });
    plan.local_tokens(side, rank).for_each_run(|_, token, tokens, _| add(token, tokens));
    runs
}

/// The tokens of a rank's ring share, and the rank's own heads.
pub(super) fn held(plan: &Plan, rank: usize, side: Side) -> (Vec<usize>, core::ops::Range<u32>) {
    let place = plan.mesh().coordinates(rank);
    let tokens = plan
        .mesh()
        .group_of(rank)
        .filter(|&peer| plan.mesh().coordinates(peer).ring == place.ring)
        .flat_map(|peer| plan.local_tokens(side, peer).indices())
        .collect();
    let share = plan.heads_of(rank);
    (tokens, if side == Side::Q { share.q } else { share.kv })
}

pub(super) fn all_heads(plan: &Plan, side: Side) -> u32 {
    (if side == Side::Q { plan.problem().heads() } else { plan.problem().kv_heads() }) as u32
}
