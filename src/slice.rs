// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slices: which queries of a batch attend to which keys.
//!
//! A slice is a run of q tokens, a run of k tokens, and a band: limits of the distance `k_pos − q_pos` between the
//! positions of a query and of a key in the slice. Every mask that is trained is a set of slices: a document is one,
//! and shared prefixes, trees, prefixes that are seen in both directions, spans and chunks are a few. A token may be in
//! several slices, a (query, key) pair in one at most.

use core::ops::Range;

mod dense;
mod disjoint;
pub mod makers;
pub(crate) mod parts;

/// A run of q tokens, a run of k tokens and the distances at which they attend.
///
/// Its positions: the first k token is at 0, the first q token at `q_start`. A query attends to a key if
/// `low ≤ k_pos − q_pos ≤ high`, and if the mask of the [`Problem`](crate::Problem) allows that distance too.
///
/// ```
/// use cpattn::Slice;
/// // Two answers of 3 and 4 tokens after a prompt of 5: each sees the prompt and itself.
/// let slices = [
///     Slice::new(0..5, 0..5).causal(),
///     Slice::new(5..8, 0..5).q_start(5),
///     Slice::new(5..8, 5..8).causal(),
///     Slice::new(8..12, 0..5).q_start(5),
///     Slice::new(8..12, 8..12).causal(),
/// ];
/// assert!(slices[1].allows(7, 0) && !slices[2].allows(5, 6));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Slice {
    /// First q token of the pack.
    pub q_begin: i32,
    /// One past the last q token.
    pub q_end: i32,
    /// First k token of the pack.
    pub k_begin: i32,
    /// One past the last k token.
    pub k_end: i32,
    /// The position of the first q token among the slice's k tokens, which count from 0. Within ±2^40.
    pub q_start: i64,
    /// The least `k_pos − q_pos`; `i64::MIN` for no limit.
    pub low: i64,
    /// The largest `k_pos − q_pos`; `i64::MAX` for no limit. Causal is 0.
    pub high: i64,
}

/// A number of tokens as `cu_seqlens` holds it; what does not fit is the largest one.
fn token(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl Slice {
    /// All queries of `q` with all keys of `k`. The last query is at the position of the last key, as in a document:
    /// `q_start` is `len_k − len_q`.
    pub fn new(q: Range<usize>, k: Range<usize>) -> Self {
        let (q_begin, q_end, k_begin, k_end) = (token(q.start), token(q.end), token(k.start), token(k.end));
        let q_start = i64::from(k_end) - i64::from(k_begin) - (i64::from(q_end) - i64::from(q_begin));
        Self { q_begin, q_end, k_begin, k_end, q_start, low: i64::MIN, high: i64::MAX }
    }

    /// The position of the first q token.
    #[must_use]
    pub const fn q_start(self, q_start: i64) -> Self {
        Self { q_start, ..self }
    }

    /// Keys at or before the query.
    #[must_use]
    pub const fn causal(self) -> Self {
        Self { high: 0, ..self }
    }

    /// Keys at distances `low ≤ k_pos − q_pos ≤ high`; `i64::MIN` and `i64::MAX` for no limit.
    #[must_use]
    pub const fn band(self, low: i64, high: i64) -> Self {
        Self { low, high, ..self }
    }

    /// Whether a q token of the pack attends to a k token of it, by this slice alone. Accepts any numbers.
    pub const fn allows(&self, q: usize, k: usize) -> bool {
        let (q, k) = (q as i128, k as i128);
        let (q_begin, k_begin) = (self.q_begin as i128, self.k_begin as i128);
        if q < q_begin || q >= self.q_end as i128 || k < k_begin || k >= self.k_end as i128 {
            return false;
        }
        let distance = (k - k_begin) - (q - q_begin + self.q_start as i128);
        self.low as i128 <= distance && distance <= self.high as i128
    }
}
