// SPDX-License-Identifier: MIT OR Apache-2.0
//! The caller's tensors: one table with name, side, axes, dim and type of each, the direction that reads or writes it,
//! and its place in the C structs of both directions. All code uses this table, except the verifier, which has its own
//! on purpose: runs check tensors by it, the C interface reads its structs by it, and tests compare the header with it.
//! What does not go together with what is in `run_trait`.

use super::Direction;
use crate::{
    batch::Side,
    element::Dtype,
    plan::{Plan, Problem},
};

/// A tensor of the caller. All are `[tokens, heads, dim]`; the last dimension of lse and its gradient is 1. Those of
/// an all-to-all, the parts of a combine and the states of a scan come last; the others are those of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TensorId {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output: written by the forward, read by the backward.
    O,
    /// Log-sum-exp: written by the forward, read by the backward.
    Lse,
    /// Gradient of the output.
    DO,
    /// Gradient of the queries.
    Dq,
    /// Gradient of the keys.
    Dk,
    /// Gradient of the values.
    Dv,
    /// Sinks, `[1, heads, n]` f32: the `n` of each head.
    Sinks,
    /// Gradient of the sinks, `[1, heads, n]`, accumulator's type: the sum over the group, on every rank.
    Dsinks,
    /// Gradient of lse, which a backward may be given.
    DLse,
    /// The largest score of each head, `[1, heads, 1]` f32, which a forward may be asked for: of the pairs that this
    /// rank computed.
    MaxLogit,
    /// Of an all-to-all: `[own tokens, all heads, dim]`. Heads, dim and type are those of its
    /// [`AllToAll`](super::AllToAll), which the methods here do not know: their dim is 0.
    OwnTokens,
    /// Of an all-to-all: `[tokens of the ring share, own heads, dim]`, compact. As [`TensorId::OwnTokens`].
    OwnHeads,
    /// Of a combine: this rank's part of o, `[all q tokens, own heads, value_dim]`, of the type that the
    /// [`Combine`](super::Combine) says.
    PartialO,
    /// Of a combine: the lse of this rank's part, `[all q tokens, own heads, 1]`.
    PartialLse,
    /// Of a scan: the decay of each of this rank's segments. Heads, dim and type of the tensors of a scan are those of
    /// its [`Scan`](super::Scan), which the methods here do not know: their dim is 0.
    Decay,
    /// Of a scan: the end state of each of this rank's segments, run from a zero state.
    State,
    /// Of a scan: the state before each of this rank's segments.
    InitialState,
}

/// What the dimensions of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorAxes {
    /// `[tokens, heads, dim]`.
    Rows,
    /// One number for each token and head, `[tokens, heads, 1]`; in C and Python `[heads, tokens]`.
    RowNumbers,
    /// One number for each head of the problem, `[1, heads, 1]`; in C and Python `[heads]`.
    HeadNumbers,
    /// The sinks of each head, `[1, heads, n]`; in C and Python `[heads, n]`, or `[heads]` for one.
    HeadSinks,
}

struct Row {
    name: &'static str,
    /// Whether its tokens and heads are those of q or those of k and v.
    side: Side,
    axes: TensorAxes,
    dim: fn(&Problem) -> usize,
    dtype: fn(&Problem) -> Dtype,
    /// Forward, backward: whether the direction writes it; `None` if it does not use it.
    written: [Option<bool>; 2],
    /// Forward, backward: its place among the members of the C struct, each a word; 0 if it has none.
    member: [u8; 2],
    /// A run may leave it out.
    optional: bool,
}

const UNKNOWN: fn(&Problem) -> usize = |_| 0;
const ONE: fn(&Problem) -> usize = |_| 1;
const ACCUMULATOR: fn(&Problem) -> Dtype = |p| p.dtype().accumulator();
const FLOAT: fn(&Problem) -> Dtype = |_| Dtype::F32;
const ABSENT: Option<bool> = None;
const READ: Option<bool> = Some(false);
const WRITTEN: Option<bool> = Some(true);

const fn rows(
    name: &'static str,
    side: Side,
    dim: fn(&Problem) -> usize,
    written: [Option<bool>; 2],
    member: [u8; 2],
) -> Row {
    Row { name, side, axes: TensorAxes::Rows, dim, dtype: Problem::dtype, written, member, optional: false }
}

/// Numbers of q's rows or heads.
const fn numbers(
    name: &'static str,
    axes: TensorAxes,
    dtype: fn(&Problem) -> Dtype,
    written: [Option<bool>; 2],
    member: [u8; 2],
) -> Row {
    let dim = if matches!(axes, TensorAxes::HeadSinks) { Problem::sinks_per_head } else { ONE };
    Row { axes, dtype, ..rows(name, Side::Q, dim, written, member) }
}

const fn optional(row: Row) -> Row {
    Row { optional: true, ..row }
}

const TABLE: [Row; TensorId::COUNT] = {
    use TensorAxes::{HeadNumbers, HeadSinks, RowNumbers};
    let (key_dim, value_dim) = (Problem::head_dim, Problem::value_dim);
    [
        rows("q", Side::Q, key_dim, [READ, READ], [1, 1]),
        rows("k", Side::K, key_dim, [READ, READ], [2, 2]),
        rows("v", Side::K, value_dim, [READ, READ], [3, 3]),
        rows("o", Side::Q, value_dim, [WRITTEN, READ], [5, 5]),
        numbers("lse", RowNumbers, ACCUMULATOR, [WRITTEN, READ], [6, 6]),
        rows("d_o", Side::Q, value_dim, [ABSENT, READ], [0, 7]),
        rows("dq", Side::Q, key_dim, [ABSENT, WRITTEN], [0, 8]),
        rows("dk", Side::K, key_dim, [ABSENT, WRITTEN], [0, 9]),
        rows("dv", Side::K, value_dim, [ABSENT, WRITTEN], [0, 10]),
        numbers("sinks", HeadSinks, FLOAT, [READ, READ], [4, 4]),
        numbers("dsinks", HeadSinks, ACCUMULATOR, [ABSENT, WRITTEN], [0, 11]),
        optional(numbers("d_lse", RowNumbers, ACCUMULATOR, [ABSENT, READ], [0, 13])),
        optional(numbers("max_logit", HeadNumbers, FLOAT, [WRITTEN, ABSENT], [8, 0])),
        rows("own tokens", Side::Q, UNKNOWN, [ABSENT, ABSENT], [0, 0]),
        rows("own heads", Side::Q, UNKNOWN, [ABSENT, ABSENT], [0, 0]),
        rows("partial_o", Side::Q, value_dim, [ABSENT, ABSENT], [0, 0]),
        numbers("partial_lse", RowNumbers, ACCUMULATOR, [ABSENT, ABSENT], [0, 0]),
        rows("decay", Side::Q, UNKNOWN, [ABSENT, ABSENT], [0, 0]),
        rows("state", Side::Q, UNKNOWN, [ABSENT, ABSENT], [0, 0]),
        rows("initial_state", Side::Q, UNKNOWN, [ABSENT, ABSENT], [0, 0]),
    ]
};

impl TensorId {
    /// The number of tensors.
    pub const COUNT: usize = 20;

    /// All, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = {
        use TensorId::{DLse, DO, Dk, Dq, Dsinks, Dv, K, Lse, MaxLogit, O, OwnHeads, OwnTokens, Q, Sinks, V};
        use TensorId::{Decay, InitialState, PartialLse, PartialO, State};
        [
            Q,
            K,
            V,
            O,
            Lse,
            DO,
            Dq,
            Dk,
            Dv,
            Sinks,
            Dsinks,
            DLse,
            MaxLogit,
            OwnTokens,
            OwnHeads,
            PartialO,
            PartialLse,
            Decay,
            State,
            InitialState,
        ]
    };

    const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The name in error messages.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The side whose tokens and heads the tensor has.
    pub const fn side(self) -> Side {
        self.row().side
    }

    /// What its dimensions are.
    pub const fn axes(self) -> TensorAxes {
        self.row().axes
    }

    /// Whether it has one row for the whole problem, and no tokens.
    pub const fn is_per_head(self) -> bool {
        matches!(self.axes(), TensorAxes::HeadNumbers | TensorAxes::HeadSinks)
    }

    /// Its place among the members of the C interface's struct of a direction, each of them a word; `None` if it has
    /// none.
    pub const fn member(self, direction: Direction) -> Option<usize> {
        match self.row().member[direction as usize] {
            0 => None,
            place => Some(place as usize),
        }
    }

    /// Whether it exists only if the problem has sinks.
    pub const fn is_of_sinks(self) -> bool {
        matches!(self.axes(), TensorAxes::HeadSinks)
    }

    /// Whether a run may leave it out, on each rank by itself.
    pub const fn is_optional(self) -> bool {
        self.row().optional
    }

    /// Heads of the whole problem.
    pub fn heads(self, p: &Problem) -> usize {
        match self.side() {
            Side::Q => p.heads(),
            Side::K => p.kv_heads(),
        }
    }

    /// Innermost dimension.
    pub fn dim(self, p: &Problem) -> usize {
        (self.row().dim)(p)
    }

    /// Element type.
    pub fn dtype(self, p: &Problem) -> Dtype {
        (self.row().dtype)(p)
    }

    /// `[tokens, heads, dim]` on a rank.
    pub fn shape(self, plan: &Plan, rank: usize) -> [usize; 3] {
        let p = plan.problem();
        let tokens = if self.is_per_head() { 1 } else { plan.local_tokens(self.side(), rank).len() };
        [tokens, self.heads(p), self.dim(p)]
    }

    /// Whether this direction of attention writes it, in a problem with or without sinks; `None` if the direction does
    /// not use it.
    pub const fn is_written(self, direction: Direction, sinks: bool) -> Option<bool> {
        let row = self.row();
        if self.is_of_sinks() && !sinks { None } else { row.written[direction as usize] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_table_are_in_the_order_of_the_numbers() {
        for (i, t) in TensorId::ALL.into_iter().enumerate() {
            assert_eq!(t as usize, i);
            assert_eq!(alloc::format!("{t:?}").to_lowercase(), t.name().replace([' ', '_'], ""));
        }
    }
}
