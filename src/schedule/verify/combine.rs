// SPDX-License-Identifier: MIT OR Apache-2.0
//! The specification of a combine, separate from the code that schedules it.
//!
//! Every ring rank gives a part of the result of the same queries: each token of the batch, and its own q heads. For
//! each row and head that the specification gives to a rank, it gets the merge of the parts of all ranks of its ring,
//! each once, in rank order, with o and lse made of the same parts.

use alloc::{format, string::String, vec::Vec};
use core::ops::Range;

use super::{
    cell::{Cell, What},
    contributions::Atom,
    execute::Prover,
    flaw::Wrong,
    memory::Piece,
};
use crate::{
    batch::Side,
    error::Result,
    plan::Plan,
    schedule::{Buf, BufferView, Combine, CombineOp, CombineTo, Schedule, TensorForm, TensorId},
};

/// The two tensors of a partial result, and the two of the merged one.
const PARTS: [TensorId; 2] = [TensorId::PartialO, TensorId::PartialLse];
const MERGED: [TensorId; 2] = [TensorId::O, TensorId::Lse];

/// Tokens and heads that a rank gets.
fn gets(plan: &Plan, rank: usize, to: CombineTo) -> (Range<usize>, Range<u32>) {
    let (tokens, own) = (plan.problem().batch().tokens(Side::Q), plan.heads_of(rank).q);
    let (j, ring) = (plan.mesh().coordinates(rank).ring, plan.mesh().ring);
    let bound = |j: usize, n: usize| (j as u128 * n as u128 / ring as u128) as usize;
    match to {
        CombineTo::All => (0..tokens, own),
        CombineTo::Tokens => (bound(j, tokens)..bound(j + 1, tokens), own),
        CombineTo::Heads => {
            let head = |j| own.start + bound(j, own.len()) as u32;
            (0..tokens, head(j)..head(j + 1))
        }
    }
}

/// The form of one of the caller's tensors; `None` if it is absent.
pub(super) fn form(tensor: TensorId, s: &Schedule, plan: &Plan, combine: Combine) -> Option<TensorForm> {
    let p = plan.problem();
    let accumulator = p.dtype().accumulator();
    let (given, own) = (p.batch().tokens(Side::Q), plan.heads_of(s.rank).q);
    let (tokens, heads) = gets(plan, s.rank, combine.to);
    let (shape, dtype, written) = match tensor {
        TensorId::PartialO => ([given, own.len(), p.value_dim()], combine.partial, false),
        TensorId::PartialLse => ([given, own.len(), 1], accumulator, false),
        TensorId::O => ([tokens.len(), heads.len(), p.value_dim()], p.dtype(), true),
        TensorId::Lse => ([tokens.len(), heads.len(), 1], accumulator, true),
        TensorId::Sinks if p.sinks() => ([1, p.heads(), p.sinks_per_head()], crate::element::Dtype::F32, false),
        _ => return None,
    };
    Some(TensorForm { name: tensor.name(), dtype, shape, written })
}

/// Marks the partial results of each rank as that rank's.
pub(super) fn set_inputs(p: &mut Prover) {
    let tokens = p.plan.problem().batch().tokens(Side::Q);
    for r in 0..p.ranks.len() {
        let own = p.plan.heads_of(p.ranks[r].rank()).q;
        for tensor in PARTS {
            let view = BufferView::whole(Buf::User(tensor), tokens as u64, own.len() as u32);
            for (i, head) in own.clone().enumerate() {
                let list = p.lists.one(Atom { call: r as u32, head, heads: 1 });
                for token in 0..tokens {
                    let cell = Cell::new(What::Input(tensor), token as u32, head, list);
                    p.memories[r].set(&view, token as u64, i as u32, cell);
                }
            }
        }
    }
}

/// Checks that every rank got all rows of the specification, and that no message was unneeded. No pairs are attended.
pub(super) fn check(p: &Prover, combine: Combine) -> Result<u128> {
    for r in 0..p.ranks.len() {
        p.memories[r].check_all_read()?;
        merged(p, r, combine).map_err(|text| p.err(r, p.ranks[r].last(), text))?;
    }
    Ok(0)
}

fn merged(p: &Prover, r: usize, combine: Combine) -> Result<(), String> {
    let rank = p.ranks[r].rank();
    let ulysses = p.plan.mesh().coordinates(rank).ulysses;
    let of_ring = |i: &usize| p.plan.mesh().coordinates(p.ranks[*i].rank()).ulysses == ulysses;
    let ring: Vec<usize> = (0..p.ranks.len()).filter(of_ring).collect();
    let (tokens, heads) = gets(p.plan, rank, combine.to);
    for tensor in MERGED {
        let view = BufferView::whole(Buf::User(tensor), tokens.len() as u64, heads.len() as u32);
        for (row, token) in tokens.clone().enumerate() {
            for (i, h) in heads.clone().enumerate() {
                let want = Cell::new(What::Final(tensor), token as u32, h, 0);
                p.expect(r, &view, (row as u64, 1), i as u32, want)?;
                let atoms = p.lists.get(p.memories[r].at(&view, row as u64, i as u32).0.list);
                if !atoms.iter().map(|a| a.call as usize).eq(ring.iter().copied()) {
                    let name = tensor.name();
                    return Err(format!("{name} of token {token}, head {h} is not merged of all parts, in order"));
                }
            }
        }
    }
    Ok(())
}

impl Prover<'_> {
    /// Merges parts: all belong to the same row and head, and o and lse of each are of the same rank.
    pub(super) fn combine(&mut self, r: usize, op: usize, c: &CombineOp) -> Result<(), Wrong> {
        let shape = (c.o.dst.rows, c.o.dst.heads);
        if c.o.sources.is_empty() || c.o.sources.len() != c.lse.sources.len() {
            let (o, lse) = (c.o.sources.len(), c.lse.sources.len());
            return Err(format!("merges {o} parts of o with {lse} of lse").into());
        }
        let p = self.plan.problem();
        let partial = self.memories[r].table(Buf::User(TensorId::PartialO)).dtype;
        let (dim, accumulator) = (p.value_dim(), p.dtype().accumulator());
        self.shaped(r, &c.o.dst, What::Final(TensorId::O), shape)?;
        self.shaped(r, &c.lse.dst, What::Final(TensorId::Lse), shape)?;
        for (o, lse) in c.o.sources.iter().zip(&c.lse.sources) {
            self.typed(r, o, partial, dim)?;
            self.typed(r, lse, accumulator, 1)?;
        }
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&c.o.dst) {
            let mut row = 0;
            while row < shape.0 {
                let first = self.memories[r].at(&c.o.sources[0], row, head).0;
                let (mut list, mut rows) = (0, shape.0 - row);
                for (o, lse) in c.o.sources.iter().zip(&c.lse.sources) {
                    let [(in_o, o_rows), (in_lse, lse_rows)] = [o, lse].map(|v| self.memories[r].at(v, row, head));
                    let want = Cell { what: What::Input(TensorId::PartialO), head: c.first_head + head, ..first };
                    self.holds(r, o, row, head, in_o, want)?;
                    self.holds(r, lse, row, head, in_lse, Cell { what: What::Input(TensorId::PartialLse), ..want })?;
                    if in_o.list != in_lse.list {
                        return Err(format!("o and lse of token {} are of different ranks", first.token).into());
                    }
                    list = self.lists.join(list, in_o.list);
                    rows = rows.min(o_rows).min(lse_rows);
                }
                pieces.push(Piece {
                    head,
                    row,
                    cell: Cell::new(What::Final(TensorId::O), first.token, first.head, list),
                });
                row += rows;
            }
            for v in c.o.sources.iter().chain(&c.lse.sources) {
                self.memories[r].read(v, 0, shape.0, head, |_| true);
            }
        }
        for (sum, tensor) in [(&c.o, TensorId::O), (&c.lse, TensorId::Lse)] {
            pieces.iter_mut().for_each(|p| p.cell.what = What::Final(tensor));
            self.memories[r].write(op, &sum.dst, 0, sum.dst.rows, &pieces)?;
        }
        self.pieces = pieces;
        Ok(())
    }
}
