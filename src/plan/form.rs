// SPDX-License-Identifier: MIT OR Apache-2.0
//! The form of a plan's run: the direction, how k and v reach the queries, and which side is sent.

/// Forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// o and lse.
    Forward,
    /// dq, dk, dv (and the gradients of the sinks).
    Backward,
}

/// How a rank receives the circulating side (k and v, or q's side) and computes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Form {
    /// One pair of ranks at a time.
    Ring,
    /// All other ranks' shares at once.
    Gather,
    /// All shares at once, and one kernel call over them and the rank's own.
    Together,
    /// All shares at once, and one kernel call over them and the rank's own in the order of positions: the same bits
    /// for any number of ranks.
    Ordered,
}

impl Form {
    /// Whether the rank's own share is copied into the receive buffer.
    pub(crate) const fn holds_own(self) -> bool {
        matches!(self, Self::Together | Self::Ordered)
    }
}

/// Which of a schedule's two lists of ring steps an operation refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CirculatingSide {
    /// k and v circulate.
    Keys,
    /// The q side circulates.
    Queries,
}
