// SPDX-License-Identifier: MIT OR Apache-2.0
//! In which form a plan is carried out: the pass, how k and v reach the queries, and which side travels.

/// Which pass of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// o and lse.
    Forward,
    /// dq, dk, dv (and the gradients of the sinks).
    Backward,
}

/// How the circulating side arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Form {
    /// One pair of ranks at a time.
    Ring,
    /// All other shares at once.
    Gather,
    /// All shares at once, the own one too, met in the order of positions.
    Ordered,
}

/// Which of a schedule's two lists of ring steps an operation refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CirculatingSide {
    /// k and v circulate.
    Keys,
    /// The q side circulates.
    Queries,
}
