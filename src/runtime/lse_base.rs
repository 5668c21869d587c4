// SPDX-License-Identifier: MIT OR Apache-2.0
//! The base of the caller's lse. `natural_lse` converts.

/// The base of the log-sum-exp of a run: of what it reads (lse, its gradient, partial_lse) and of what it writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LseBase {
    /// Natural logarithms.
    #[default]
    Natural,
    /// Logarithms to base 2, as FlashInfer and others return them. Each conversion rounds once: a backward of a rounded
    /// lse errs by as much in the exponents of its weights.
    Two,
}
