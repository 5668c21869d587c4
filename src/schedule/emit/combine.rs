// SPDX-License-Identifier: MIT OR Apache-2.0
//! A combine, as a separate schedule: partial results of the same queries, one for each rank of the ring, are merged.
//!
//! Each merged row is computed by one rank, from the parts of all ring ranks in their order, so its bits do not depend
//! on who asks for it. What a rank merges is a *piece*: some heads of all tokens, or all heads of some tokens. The
//! parts of a piece are packed and sent to the rank that merges it, in one exchange. If every rank gets all rows, the
//! merged pieces are sent to all in a second exchange: `2(R−1)/R` of the rows leave each rank, not `R−1` times as many
//! as there are. On a ring of two both take the same bytes, and each rank merges everything after the first exchange.

use alloc::{format, vec::Vec};

use super::{
    builder::{Builder, Life},
    check_rank,
};
use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
    layout::cut,
    plan::Plan,
    schedule::{BlockView, Buf, BufferView, Combine, CombineTo, Lane, OpKind, Schedule, TensorId},
};

/// The phase of all operations of a combine.
const PHASE: &str = "combine";

/// Rows and heads, the latter counted within those that the rank gives.
#[derive(Clone, Copy)]
struct MergePiece {
    row: u64,
    rows: u64,
    head: u32,
    heads: u32,
}

impl MergePiece {
    fn of(self, all: BufferView) -> BufferView {
        all.slice(self.row, self.rows).of_heads(self.head, self.heads)
    }
}

/// A partial or merged o and its lse.
type Pair = [BufferView; 2];

impl Schedule {
    /// One rank's operations for a combine.
    ///
    /// # Errors
    /// A rank outside the mesh; partial results of a type with another accumulator than the problem's type.
    pub fn combine(plan: &Plan, rank: usize, combine: Combine) -> Result<Self> {
        check_rank(plan, rank)?;
        let p = plan.problem();
        if combine.partial.accumulator() != p.dtype().accumulator() {
            let expected = match p.dtype() {
                Dtype::F64 => "f64, as the problem's".into(),
                of => format!("f32, f16 or bf16: the problem is of {of}"),
            };
            return Err(Error::invalid("partial_o.dtype", combine.partial, expected));
        }
        let mut b = Builder::new(plan, rank, combine.into());
        let (ring, me) = (plan.mesh().ring, b.coordinates.ring);
        let (tokens, heads) = (p.batch().tokens(Side::Q), b.mine().q.len());
        // Who merges what. Without a wish, whatever divides the work more evenly.
        let uneven = |n: usize, other: usize| n.div_ceil(ring) as u128 * other as u128;
        let by_heads = match combine.to {
            CombineTo::Heads => true,
            CombineTo::Tokens => false,
            CombineTo::All => uneven(heads, tokens) < uneven(tokens, heads),
        };
        let gathers = combine.to == CombineTo::All && ring > 2;
        let piece = |j: usize| {
            let whole = MergePiece { row: 0, rows: tokens as u64, head: 0, heads: heads as u32 };
            if combine.to == CombineTo::All && !gathers {
                return whole;
            }
            let part = |n| (cut(j, n, ring), cut(j + 1, n, ring) - cut(j, n, ring));
            if by_heads {
                let (head, heads) = part(heads);
                MergePiece { head: head as u32, heads: heads as u32, ..whole }
            } else {
                let (row, rows) = part(tokens);
                MergePiece { row: row as u64, rows: rows as u64, ..whole }
            }
        };
        let given = [TensorId::PartialO, TensorId::PartialLse]
            .map(|t| BufferView::whole(Buf::User(t), tokens as u64, heads as u32));
        let mine = piece(me);
        let mut parts: Vec<Pair> = Vec::with_capacity(ring);
        for j in 0..ring {
            if j == me {
                parts.push(given.map(|all| mine.of(all)));
                continue;
            }
            let peer = b.out.ring_peer(j as u32);
            let theirs = piece(j);
            if theirs.rows > 0 && theirs.heads > 0 {
                let packed = b.pair(["packed o", "packed lse"], combine.partial, theirs);
                for (to, all) in packed.into_iter().zip(given) {
                    b.block(to, &[theirs.of(all)]);
                    b.message(peer, to, true);
                }
            }
            let arrived = b.pair(["arrived o", "arrived lse"], combine.partial, mine);
            arrived.into_iter().for_each(|view| b.message(peer, view, false));
            parts.push(arrived);
        }
        let packed = b.push_blocks(0, PHASE, None);
        let arrived = b.push_messages(0, PHASE, packed);
        let whole = |piece: MergePiece| {
            [TensorId::O, TensorId::Lse].map(|t| BufferView::whole(Buf::User(t), piece.rows, piece.heads))
        };
        let merged = if gathers { b.pair(["merged o", "merged lse"], p.dtype(), mine) } else { whole(mine) };
        let first_head = b.mine().q.start + mine.head;
        let done = b.push_combine(merged, &parts, first_head, arrived);
        if gathers {
            let all = whole(MergePiece { row: 0, rows: tokens as u64, head: 0, heads: heads as u32 });
            b.gather(merged, mine, all, piece, done.or(packed));
        }
        b.finish()
    }
}

impl Builder<'_> {
    /// Room for o and lse of a piece.
    fn pair(&mut self, [o, lse]: [&'static str; 2], dtype: Dtype, piece: MergePiece) -> Pair {
        let (dim, accumulator) = (self.plan.problem().value_dim(), self.accumulator());
        let mut room = |name, dtype, dim| self.buffer(Life::Throughout, name, dtype, piece.rows, piece.heads, dim);
        [room(o, dtype, dim), room(lse, accumulator, 1)]
    }

    /// Merges the parts of the rank's piece; nothing for an empty piece.
    fn push_combine(&mut self, merged: Pair, parts: &[Pair], first_head: u32, after: Option<u32>) -> Option<u32> {
        if merged[0].rows == 0 || merged[0].heads == 0 {
            return None;
        }
        let [o, lse] = [0, 1].map(|i| {
            let sources_begin = self.out.sources.len() as u32;
            self.out.sources.extend(parts.iter().map(|part| part[i]));
            BlockView { dst: merged[i], sources_begin, sources_end: self.out.sources.len() as u32 }
        });
        Some(self.push(OpKind::Combine { o, lse, first_head }, Lane::Compute, 0, PHASE, after))
    }

    /// Sends the rank's merged piece to all ranks of the ring, and puts theirs and its own into the caller's tensors.
    fn gather(
        &mut self,
        merged: Pair,
        mine: MergePiece,
        all: Pair,
        piece: impl Fn(usize) -> MergePiece,
        done: Option<u32>,
    ) {
        let (messages, blocks) = (self.out.messages.len(), self.out.blocks.len());
        for j in 0..self.plan.mesh().ring {
            if j == self.coordinates.ring {
                merged.into_iter().zip(all).for_each(|(from, to)| self.block(mine.of(to), &[from]));
                continue;
            }
            let (peer, theirs) = (self.out.ring_peer(j as u32), piece(j));
            merged.into_iter().for_each(|view| self.message(peer, view, true));
            let arrived = self.pair(["their o", "their lse"], self.element(), theirs);
            for (from, to) in arrived.into_iter().zip(all) {
                self.message(peer, from, false);
                self.block(theirs.of(to), &[from]);
            }
        }
        let arrived = self.push_messages(messages, PHASE, done);
        self.push_blocks(blocks, PHASE, arrived);
    }
}
