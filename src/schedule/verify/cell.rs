// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tags of the proof: the content of one head of one row of a buffer, and whether it has been read.

use alloc::{format, string::String};

use crate::{element::Dtype, schedule::TensorId};

/// The content of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    /// Undefined: must not be read.
    Unset,
    /// Zeros.
    Zero,
    /// The caller's input, unchanged.
    Input(TensorId),
    /// `rowsum(do ∘ o)`.
    Delta,
    /// A running o or lse.
    Running(TensorId),
    /// A final o or lse.
    Final(TensorId),
    /// A sum of contributions to a gradient.
    Sum(TensorId),
    /// A decay or a state of joined segments, from `list` to before `token`: see [`scan`](super::scan).
    Joined(TensorId),
}

/// One head of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub what: What,
    /// Token of the packed batch, on the side that `what` belongs to.
    pub token: u32,
    /// Head of the whole problem: a kv head for k, v, dk, dv.
    pub head: u32,
    /// Its contributions: a list of `Contributions`.
    pub list: u32,
    /// 1 + the operation that wrote it; 0 once it has been read.
    pub unread: u32,
    /// It was fetched: it counts as read only by an allowed pair.
    pub strict: bool,
    /// It was fetched from another node: it also counts as read when it is passed on inside this node.
    pub crossed: bool,
    /// A sum that was rounded to this type.
    pub rounded: Option<Dtype>,
}

impl Cell {
    pub(super) const UNSET: Self =
        Self { what: What::Unset, token: 0, head: 0, list: 0, unread: 0, strict: false, crossed: false, rounded: None };

    pub(super) const fn new(what: What, token: u32, head: u32, list: u32) -> Self {
        Self { what, token, head, list, ..Self::UNSET }
    }

    pub(super) fn describe(&self) -> String {
        match self.what {
            What::Unset => "nothing".into(),
            What::Zero => "zeros".into(),
            What::Input(t) => format!("{} of token {}, head {}", t.name(), self.token, self.head),
            What::Delta => format!("delta of token {}, head {}", self.token, self.head),
            What::Running(t) => format!("running {} of token {}, head {}", t.name(), self.token, self.head),
            What::Final(t) => format!("final {} of token {}, head {}", t.name(), self.token, self.head),
            What::Joined(t) => format!("{} of segments up to {}, head {}", t.name(), self.token, self.head),
            What::Sum(t) => format!("a sum of {} of token {}, head {}", t.name(), self.token, self.head),
        }
    }
    /// The content of the row `rows` after this one, in the same run.
    pub(super) fn after(self, rows: u64) -> Self {
        match self.what {
            What::Unset | What::Zero => self,
            _ => Self { token: self.token.wrapping_add(rows as u32), ..self },
        }
    }
}
