// SPDX-License-Identifier: MIT OR Apache-2.0
//! The caller's tensors: one table with name, side, heads, dim and type of each, and the direction that reads or writes
//! it. All code uses this table, except the verifier, which has its own on purpose.

use super::Direction;
use crate::{
    batch::Side,
    element::Dtype,
    plan::{Plan, Problem},
};

/// A tensor of the caller. All are `[tokens, heads, dim]`; the last dimension of lse is 1.
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
    /// Sinks, `[1, heads, 1]` f32.
    Sinks,
    /// Gradient of the sinks, `[1, heads, 1]`, accumulator's type: the sum over the group, on every rank.
    Dsinks,
}

/// Innermost dimension.
#[derive(Clone, Copy)]
enum Dim {
    Head,
    Value,
    One,
}

/// Element type.
#[derive(Clone, Copy)]
enum Type {
    Problem,
    Accumulator,
    F32,
}

/// The use of a tensor in one direction.
#[derive(Clone, Copy)]
enum Role {
    Absent,
    Read,
    Written,
}

struct Row {
    name: &'static str,
    /// Whether its tokens and heads are those of q or those of k and v.
    side: Side,
    dim: Dim,
    dtype: Type,
    /// Forward, backward.
    roles: [Role; 2],
    /// It has one row for the whole problem, and exists only if the problem has sinks.
    sinks: bool,
}

const fn row(name: &'static str, side: Side, dim: Dim, dtype: Type, roles: [Role; 2]) -> Row {
    Row { name, side, dim, dtype, roles, sinks: false }
}

const fn of_sinks(name: &'static str, dtype: Type, roles: [Role; 2]) -> Row {
    Row { name, side: Side::Q, dim: Dim::One, dtype, roles, sinks: true }
}

use Role::{Absent, Read, Written};

const TABLE: [Row; TensorId::COUNT] = [
    row("q", Side::Q, Dim::Head, Type::Problem, [Read, Read]),
    row("k", Side::K, Dim::Head, Type::Problem, [Read, Read]),
    row("v", Side::K, Dim::Value, Type::Problem, [Read, Read]),
    row("o", Side::Q, Dim::Value, Type::Problem, [Written, Read]),
    row("lse", Side::Q, Dim::One, Type::Accumulator, [Written, Read]),
    row("do", Side::Q, Dim::Value, Type::Problem, [Absent, Read]),
    row("dq", Side::Q, Dim::Head, Type::Problem, [Absent, Written]),
    row("dk", Side::K, Dim::Head, Type::Problem, [Absent, Written]),
    row("dv", Side::K, Dim::Value, Type::Problem, [Absent, Written]),
    of_sinks("sinks", Type::F32, [Read, Read]),
    of_sinks("dsinks", Type::Accumulator, [Absent, Written]),
];

impl TensorId {
    /// The number of tensors.
    pub const COUNT: usize = 11;

    /// All, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = {
        use TensorId::{DO, Dk, Dq, Dsinks, Dv, K, Lse, O, Q, Sinks, V};
        [Q, K, V, O, Lse, DO, Dq, Dk, Dv, Sinks, Dsinks]
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
        self.row().sinks
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
        match self.row().dim {
            Dim::Head => p.head_dim(),
            Dim::Value => p.value_dim(),
            Dim::One => 1,
        }
    }

    /// Element type.
    pub fn dtype(self, p: &Problem) -> Dtype {
        match self.row().dtype {
            Type::Problem => p.dtype(),
            Type::Accumulator => p.dtype().accumulator(),
            Type::F32 => Dtype::F32,
        }
    }

    /// `[tokens, heads, dim]` on a rank.
    pub fn shape(self, plan: &Plan, rank: usize) -> [usize; 3] {
        let p = plan.problem();
        let tokens = if self.is_per_head() { 1 } else { plan.local_tokens(self.side(), rank) };
        [tokens, self.heads(p), self.dim(p)]
    }

    /// Whether this direction of a problem with or without sinks writes it; `None` if the direction does not use it.
    pub const fn is_written(self, direction: Direction, sinks: bool) -> Option<bool> {
        let row = self.row();
        if row.sinks && !sinks {
            return None;
        }
        match row.roles[direction as usize] {
            Absent => None,
            Read => Some(false),
            Written => Some(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_table_are_in_the_order_of_the_numbers() {
        for (i, t) in TensorId::ALL.into_iter().enumerate() {
            assert_eq!(t as usize, i);
            assert_eq!(alloc::format!("{t:?}").to_lowercase(), t.name());
        }
    }
}
