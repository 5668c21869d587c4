// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the two all-to-alls promise, said apart from the code that schedules them.
//!
//! To heads, a rank brings all heads of its own tokens and gets its own heads of all tokens of its ring share, in the
//! order of the ranks that hold them. Back, it brings the latter, which may be a part of a sum, and gets for every head
//! of its own tokens the parts of all ranks that hold the head, each once, in rank order.

use alloc::{format, vec, vec::Vec};

use super::{
    execute::{Atom, Prover},
    memory::{Access, Cell, Table, What},
    outputs,
};
use crate::{
    batch::Side,
    error::Result,
    plan::Plan,
    schedule::{
        Buf, Schedule, Tensor, View,
        build::trade::{OWN_HEADS, OWN_TOKENS, Trade, Way},
    },
};

/// The tokens of a rank's ring share, and the heads that are its own.
fn held(plan: &Plan, rank: usize, side: Side) -> (Vec<usize>, core::ops::Range<u32>) {
    let place = plan.mesh().place(rank);
    let tokens = plan
        .mesh()
        .group_of(rank)
        .filter(|&peer| plan.mesh().place(peer).ring == place.ring)
        .flat_map(|peer| plan.token_indices(side, peer))
        .collect();
    let share = plan.heads_of(rank);
    (tokens, if side == Side::Q { share.q } else { share.kv })
}

fn all_heads(plan: &Plan, side: Side) -> u32 {
    (if side == Side::Q { plan.problem().heads() } else { plan.problem().kv_heads() }) as u32
}

/// The two tensors of a trade; the others are absent.
pub(super) fn user_table(tensor: Tensor, s: &Schedule, plan: &Plan, trade: Trade) -> Table {
    let (given, taken) = match trade.way {
        Way::ToHeads => (OWN_TOKENS, OWN_HEADS),
        Way::ToTokens => (OWN_HEADS, OWN_TOKENS),
    };
    let (tokens, heads) = if tensor == OWN_HEADS {
        held(plan, s.rank, trade.side)
    } else {
        (plan.token_indices(trade.side, s.rank), 0..all_heads(plan, trade.side))
    };
    let shape = [tokens.len() as u64, heads.len() as u64, trade.dim.into()];
    let (access, cells) = if tensor == given {
        let row = |token: usize| heads.clone().map(move |h| Cell::new(What::Input(tensor), token as u32, h, 0));
        (Access::Input, tokens.into_iter().flat_map(row).collect())
    } else if tensor == taken {
        (Access::Output, vec![Cell::UNSET; tokens.len() * heads.len()])
    } else {
        (Access::Absent, Vec::new())
    };
    Table::of_user(tensor, shape, trade.dtype, access, cells)
}

/// Marks what a rank brings on the way back as its part of a sum.
pub(super) fn bring(p: &mut Prover, trade: Trade) {
    if trade.way == Way::ToHeads {
        return;
    }
    for r in 0..p.schedules.len() {
        let (tokens, heads) = held(p.plan, p.schedules[r].rank, trade.side);
        let view = whole(OWN_HEADS, tokens.len(), heads.len());
        for (row, token) in tokens.into_iter().enumerate() {
            for (i, h) in heads.clone().enumerate() {
                let list = p.lists.one(Atom { call: r as u32, head: h, heads: 1 });
                *p.memories[r].cell(&view, row as u64, i as u32) =
                    Cell::new(What::Sum(OWN_TOKENS), token as u32, h, list);
            }
        }
    }
}

fn whole(tensor: Tensor, rows: usize, heads: usize) -> View {
    View { buf: Buf::User(tensor), row: 0, rows: rows as u64, head: 0, heads: heads as u32 }
}

/// That every rank got what was promised, all of it, and nothing moved in vain. No pairs are attended.
pub(super) fn check(p: &mut Prover, trade: Trade) -> Result<u128> {
    outputs::tokens_are_dealt_once(p)?;
    for r in 0..p.schedules.len() {
        p.memories[r].check_all_read()?;
        match trade.way {
            Way::ToHeads => heads(p, r, trade)?,
            Way::ToTokens => tokens(p, r, trade)?,
        }
    }
    Ok(0)
}

fn heads(p: &mut Prover, r: usize, trade: Trade) -> Result<()> {
    let (tokens, heads) = held(p.plan, p.schedules[r].rank, trade.side);
    let last = p.schedules[r].ops.len().max(1) - 1;
    let view = whole(OWN_HEADS, tokens.len(), heads.len());
    for (row, token) in tokens.into_iter().enumerate() {
        for (i, h) in heads.clone().enumerate() {
            let want = Cell::new(What::Input(OWN_TOKENS), token as u32, h, 0);
            p.expect(r, last, &view, row as u64, i as u32, want)?;
        }
    }
    Ok(())
}

fn tokens(p: &mut Prover, r: usize, trade: Trade) -> Result<()> {
    let rank = p.schedules[r].rank;
    let ring = p.plan.mesh().place(rank).ring;
    let holders: Vec<(usize, core::ops::Range<u32>)> = (0..p.schedules.len())
        .filter(|&i| p.plan.mesh().place(p.schedules[i].rank).ring == ring)
        .map(|i| (i, held(p.plan, p.schedules[i].rank, trade.side).1))
        .collect();
    let heads = all_heads(p.plan, trade.side);
    let last = p.schedules[r].ops.len().max(1) - 1;
    let tokens = p.plan.token_indices(trade.side, rank);
    let view = whole(OWN_TOKENS, tokens.len(), heads as usize);
    for (row, token) in tokens.into_iter().enumerate() {
        for h in 0..heads {
            p.expect(r, last, &view, row as u64, h, Cell::new(What::Sum(OWN_TOKENS), token as u32, h, 0))?;
            let list = p.memories[r].cell(&view, row as u64, h).list;
            let parts = p.lists.get(list).iter().map(|a| a.call as usize);
            let want = holders.iter().filter(|(_, own)| own.contains(&h)).map(|(i, _)| *i);
            if !parts.eq(want) {
                let text =
                    format!("token {token}, head {h} is not the sum over all ranks that hold the head, in order");
                return Err(p.err(r, last, text));
            }
        }
    }
    Ok(())
}
