// SPDX-License-Identifier: MIT OR Apache-2.0
//! The caller's tensors: one table with name, side, heads, dim and type of each, and the direction that reads or writes
//! it. All code uses this table, except the verifier, which has its own on purpose.

use super::Direction;
use crate::{
    batch::Side,
    element::Dtype,
    plan::{Plan, Problem},
};

/// A tensor of the caller. All are `[tokens, heads, dim]`; the last dimension of lse and its gradient is 1. Those of
/// an all-to-all and the parts of a combine come last; the others are those of attention.
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
}

struct Row {
    name: &'static str,
    /// Whether its tokens and heads are those of q or those of k and v.
    side: Side,
    dim: fn(&Problem) -> usize,
    dtype: fn(&Problem) -> Dtype,
    /// Forward, backward: whether the direction writes it; `None` if it does not use it.
    written: [Option<bool>; 2],
    /// It has one row for the whole problem.
    per_head: bool,
    /// It exists only if the problem has sinks.
    sinks: bool,
    /// A run may leave it out.
    optional: bool,
}

const UNKNOWN: fn(&Problem) -> usize = |_| 0;
const ONE: fn(&Problem) -> usize = |_| 1;
const ACCUMULATOR: fn(&Problem) -> Dtype = |p| p.dtype().accumulator();
const ABSENT: Option<bool> = None;
const READ: Option<bool> = Some(false);
const WRITTEN: Option<bool> = Some(true);

const fn row(
    name: &'static str,
    side: Side,
    dim: fn(&Problem) -> usize,
    dtype: fn(&Problem) -> Dtype,
    written: [Option<bool>; 2],
) -> Row {
    Row { name, side, dim, dtype, written, per_head: false, sinks: false, optional: false }
}

const fn of_sinks(name: &'static str, dtype: fn(&Problem) -> Dtype, written: [Option<bool>; 2]) -> Row {
    Row { per_head: true, sinks: true, ..row(name, Side::Q, Problem::sinks_per_head, dtype, written) }
}

const TABLE: [Row; TensorId::COUNT] = [
    row("q", Side::Q, Problem::head_dim, Problem::dtype, [READ, READ]),
    row("k", Side::K, Problem::head_dim, Problem::dtype, [READ, READ]),
    row("v", Side::K, Problem::value_dim, Problem::dtype, [READ, READ]),
    row("o", Side::Q, Problem::value_dim, Problem::dtype, [WRITTEN, READ]),
    row("lse", Side::Q, ONE, ACCUMULATOR, [WRITTEN, READ]),
    row("d_o", Side::Q, Problem::value_dim, Problem::dtype, [ABSENT, READ]),
    row("dq", Side::Q, Problem::head_dim, Problem::dtype, [ABSENT, WRITTEN]),
    row("dk", Side::K, Problem::head_dim, Problem::dtype, [ABSENT, WRITTEN]),
    row("dv", Side::K, Problem::value_dim, Problem::dtype, [ABSENT, WRITTEN]),
    of_sinks("sinks", |_| Dtype::F32, [READ, READ]),
    of_sinks("dsinks", ACCUMULATOR, [ABSENT, WRITTEN]),
    Row { optional: true, ..row("d_lse", Side::Q, ONE, ACCUMULATOR, [ABSENT, READ]) },
    Row { optional: true, per_head: true, ..row("max_logit", Side::Q, ONE, |_| Dtype::F32, [WRITTEN, ABSENT]) },
    row("own tokens", Side::Q, UNKNOWN, Problem::dtype, [ABSENT, ABSENT]),
    row("own heads", Side::Q, UNKNOWN, Problem::dtype, [ABSENT, ABSENT]),
    row("partial_o", Side::Q, Problem::value_dim, Problem::dtype, [ABSENT, ABSENT]),
    row("partial_lse", Side::Q, ONE, ACCUMULATOR, [ABSENT, ABSENT]),
];

impl TensorId {
    /// The number of tensors.
    pub const COUNT: usize = 17;

    /// All, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = {
        use TensorId::{DLse, DO, Dk, Dq, Dsinks, Dv, K, Lse, MaxLogit, O, OwnHeads, OwnTokens, Q, Sinks, V};
        use TensorId::{PartialLse, PartialO};
        [Q, K, V, O, Lse, DO, Dq, Dk, Dv, Sinks, Dsinks, DLse, MaxLogit, OwnTokens, OwnHeads, PartialO, PartialLse]
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

    /// Whether it has one row for the whole problem, and no tokens.
    pub const fn is_per_head(self) -> bool {
        self.row().per_head
    }

    /// Whether it exists only if the problem has sinks.
    #[cfg_attr(not(feature = "std"), expect(dead_code, reason = "runs need std"))]
    pub(crate) const fn is_of_sinks(self) -> bool {
        self.row().sinks
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
        if row.sinks && !sinks { None } else { row.written[direction as usize] }
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
