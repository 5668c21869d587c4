// SPDX-License-Identifier: MIT OR Apache-2.0
//! The all-to-all of one tensor, as a separate schedule.
//!
//! Any kernel that mixes tokens separately for each head (linear attention, state space models, convolutions) can run
//! between two all-to-alls: to heads, where a rank holds every token of its ring share for some heads, and back to
//! tokens. A kv head that several ranks hold is sent to each of them; on the way back the copies are summed in rank
//! order. The second direction is the transpose of the first, so the same two work for values and gradients. Both have
//! one level: over several nodes a row is sent to each rank that holds its head, and each copy is sent back.

use alloc::{format, vec::Vec};

use super::{builder::Builder, check_rank};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::Plan,
    schedule::{AllToAll, AllToAllDirection, Buf, BufferView, Schedule, TensorId},
};

impl Schedule {
    /// One rank's operations for the all-to-all of one tensor.
    ///
    /// # Errors
    /// A rank outside the mesh; a tensor without an innermost dimension, or with one so large that a machine could not
    /// address the tensors.
    pub fn all_to_all(plan: &Plan, rank: usize, all_to_all: AllToAll) -> Result<Self> {
        check_rank(plan, rank)?;
        if all_to_all.dim == 0 {
            return Err(Error::invalid("dim", 0, "at least 1"));
        }
        let (p, side) = (plan.problem(), all_to_all.side);
        let heads = if side == Side::Q { p.heads() } else { p.kv_heads() };
        let most = largest_dim(p.batch().tokens(side), heads, plan.mesh().ulysses);
        if u64::from(all_to_all.dim) > most {
            let expected = format!("at most {most}, for {} tokens of {heads} heads", p.batch().tokens(side));
            return Err(Error::invalid("dim", all_to_all.dim, expected));
        }
        let mut b = Builder::new(plan, rank, all_to_all.into());
        b.out.dtype = all_to_all.dtype;
        let me = b.coordinates.ulysses;
        let tokens = BufferView::whole(Buf::User(TensorId::OwnTokens), b.part(side, me).1, heads as u32);
        let held = BufferView::whole(Buf::User(TensorId::OwnHeads), b.share(side), span(&b, side, me).1);
        match all_to_all.direction {
            AllToAllDirection::ToHeads => to_heads(&mut b, all_to_all, tokens, held),
            AllToAllDirection::ToTokens => to_tokens(&mut b, all_to_all, tokens, held),
        }
        b.finish()
    }
}

/// The largest innermost dimension for which all tensors and buffers of a rank together have fewer than 2^63 bytes: the
/// two tensors and the buffers for packing and sums, eight bytes an element, each head on every Ulysses rank.
fn largest_dim(tokens: usize, heads: usize, ulysses: usize) -> u64 {
    let rows = tokens as u128 * heads as u128 * ulysses as u128;
    (i64::MAX as u128 / (rows * 4 * 8).max(1)).try_into().unwrap_or(u64::MAX)
}

/// First head and number of heads of Ulysses rank `u`.
fn span(b: &Builder<'_>, side: Side, u: usize) -> (u32, u32) {
    let share = &b.heads[u];
    let heads = if side == Side::Q { &share.q } else { &share.kv };
    (heads.start, heads.len() as u32)
}

fn to_heads(b: &mut Builder<'_>, all_to_all: AllToAll, tokens: BufferView, held: BufferView) {
    let me = b.coordinates.ulysses;
    for u in 0..b.out.ulysses {
        let (first, count) = span(b, all_to_all.side, u);
        let (off, rows) = b.part(all_to_all.side, u);
        let theirs = tokens.of_heads(first, count);
        if u == me {
            b.block(held.slice(off, rows), &[theirs]);
            continue;
        }
        b.send_packed(u, "packed for peers", theirs, (all_to_all.dtype, all_to_all.dim as usize));
        b.message(b.peer(u), held.slice(off, rows), false);
    }
    let packed = b.push_blocks(0, "all-to-all", None);
    b.push_messages(0, "all-to-all", packed);
}

fn to_tokens(b: &mut Builder<'_>, all_to_all: AllToAll, tokens: BufferView, held: BufferView) {
    let element = (all_to_all.dtype, all_to_all.dim as usize);
    let arrived: Vec<BufferView> = (0..b.out.ulysses)
        .map(|u| b.exchange_back(held, all_to_all.side, u, span(b, all_to_all.side, u).1, element))
        .collect();
    let mut sources = Vec::new();
    for h in 0..tokens.heads {
        sources.clear();
        for (u, from) in arrived.iter().enumerate() {
            let (first, count) = span(b, all_to_all.side, u);
            if (first..first + count).contains(&h) {
                sources.push(from.of_heads(h - first, 1));
            }
        }
        b.block(tokens.of_heads(h, 1), &sources);
    }
    let moved = b.push_messages(0, "all-to-all", None);
    b.push_blocks(0, "all-to-all", moved);
}
