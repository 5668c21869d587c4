// SPDX-License-Identifier: MIT OR Apache-2.0
//! The specification of the two all-to-alls, separate from the code that schedules them.
//!
//! To heads: a rank gives all heads of its own tokens, and gets its own heads of all tokens of its ring share, in the
//! order of the ranks that hold those tokens. To tokens: a rank gives its own heads of its ring share, which may be one
//! part of a sum; for every head of its own tokens it gets the parts of all ranks that hold the head, each once, in
//! rank order.

use alloc::{format, string::String, vec::Vec};

use super::{
    cell::{Cell, What},
    contributions::Atom,
    execute::Prover,
    outputs,
    promise::{all_heads, held},
};
use crate::{
    error::Result,
    schedule::{AllToAll, AllToAllDirection, Buf, BufferView, TensorId},
};

/// Marks the inputs of a rank on the way back as its part of a sum.
pub(super) fn set_inputs(p: &mut Prover, all_to_all: AllToAll) {
    if all_to_all.direction == AllToAllDirection::ToHeads {
        return;
    }
    for r in 0..p.ranks.len() {
        let (tokens, heads) = held(p.plan, p.ranks[r].rank(), all_to_all.side);
        let view = BufferView::whole(Buf::User(TensorId::OwnHeads), tokens.len() as u64, heads.len() as u32);
        for (row, token) in tokens.into_iter().enumerate() {
            for (i, h) in heads.clone().enumerate() {
                let list = p.lists.one(Atom { call: r as u32, head: h, heads: 1 });
                let cell = Cell::new(What::Sum(TensorId::OwnTokens), token as u32, h, list);
                p.memories[r].set(&view, row as u64, i as u32, cell);
            }
        }
    }
}

/// Checks that every rank got all rows of the specification, and that no message was unneeded. No pairs are attended.
pub(super) fn check(p: &Prover, all_to_all: AllToAll) -> Result<u128> {
    outputs::tokens_are_dealt_once(p)?;
    for r in 0..p.ranks.len() {
        p.memories[r].check_all_read()?;
        let complete = match all_to_all.direction {
            AllToAllDirection::ToHeads => heads(p, r, all_to_all),
            AllToAllDirection::ToTokens => tokens(p, r, all_to_all),
        };
        complete.map_err(|text| p.err(r, p.ranks[r].last(), text))?;
    }
    Ok(0)
}

fn heads(p: &Prover, r: usize, all_to_all: AllToAll) -> Result<(), String> {
    let (tokens, heads) = held(p.plan, p.ranks[r].rank(), all_to_all.side);
    let view = BufferView::whole(Buf::User(TensorId::OwnHeads), tokens.len() as u64, heads.len() as u32);
    for (row, token) in tokens.into_iter().enumerate() {
        for (i, h) in heads.clone().enumerate() {
            let want = Cell::new(What::Input(TensorId::OwnTokens), token as u32, h, 0);
            p.expect(r, &view, (row as u64, 1), i as u32, want)?;
        }
    }
    Ok(())
}

fn tokens(p: &Prover, r: usize, all_to_all: AllToAll) -> Result<(), String> {
    let rank = p.ranks[r].rank();
    let ring = p.plan.mesh().coordinates(rank).ring;
    let holders: Vec<(usize, core::ops::Range<u32>)> = (0..p.ranks.len())
        .filter(|&i| p.plan.mesh().coordinates(p.ranks[i].rank()).ring == ring)
        .map(|i| (i, held(p.plan, p.ranks[i].rank(), all_to_all.side).1))
        .collect();
    let heads = all_heads(p.plan, all_to_all.side);
    let tokens = p.plan.local_tokens(all_to_all.side, rank).indices();
    let view = BufferView::whole(Buf::User(TensorId::OwnTokens), tokens.len() as u64, heads);
    for (row, token) in tokens.into_iter().enumerate() {
        for h in 0..heads {
            p.expect(r, &view, (row as u64, 1), h, Cell::new(What::Sum(TensorId::OwnTokens), token as u32, h, 0))?;
            let atoms = p.lists.get(p.memories[r].at(&view, row as u64, h).0.list);
            let want = holders.iter().filter(|(_, own)| own.contains(&h)).map(|(i, _)| *i);
            if !atoms.iter().map(|a| a.call as usize).eq(want) {
                return Err(format!(
                    "token {token}, head {h} is not the sum over all ranks that hold the head, in order"
                ));
            }
        }
    }
    Ok(())
}
