// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of a combine: partial results `(o, lse)` of the ring ranks are merged, and each rank gets all merged
//! rows, those of its heads, or those of its tokens.

use core::ops::Range;

use crate::{batch::Side, element::Dtype, layout::cut, plan::Plan};

/// The rows that each rank gets of the merged result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CombineTo {
    /// All rows, on every rank of the ring, with the same bits.
    All,
    /// All tokens of some heads: ring rank j of R gets heads `[⌊jH/R⌋, ⌊(j+1)H/R⌋)` of the H heads that it gave.
    Heads,
    /// All heads of some tokens: ring rank j of R gets tokens `[⌊jT/R⌋, ⌊(j+1)T/R⌋)` of T.
    Tokens,
}

/// A combine over the ring of a plan's mesh. Every rank of the ring gives a partial result of the same queries: all q
/// tokens of the batch, and the q heads that [`Plan::heads_of`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Combine {
    /// What each rank gets.
    pub to: CombineTo,
    /// Element type of the partial o. It has the accumulator of the problem's type, in which the merged o is written.
    pub partial: Dtype,
}

/// The part of the merged result that a rank gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CombinedShare {
    /// Tokens of the batch.
    pub tokens: Range<usize>,
    /// q heads, numbered in the problem.
    pub heads: Range<u32>,
}

impl Plan {
    /// The part of a merged result that [`Rank::combine`](crate::Rank::combine) writes on a rank.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, schedule::CombineTo};
    ///
    /// let problem = Problem::new(Batch::from_lengths(&[5])?, 8, 8, 64, Dtype::Bf16);
    /// let plan = Plan::new(&problem, Mesh::ring(4)?, Layout::Contiguous)?;
    /// assert_eq!(plan.combined_share(1, CombineTo::Heads).heads, 2..4);
    /// assert_eq!(plan.combined_share(1, CombineTo::Tokens).tokens, 1..2);
    /// assert_eq!(plan.combined_share(1, CombineTo::All).tokens, 0..5);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Panics
    /// If `rank` is not in the mesh.
    pub fn combined_share(&self, rank: usize, to: CombineTo) -> CombinedShare {
        let (all, heads) = (self.problem().batch().tokens(Side::Q), self.heads_of(rank).q);
        let (j, ring) = (self.mesh().coordinates(rank).ring, self.mesh().ring);
        let of = |n: usize| cut(j, n, ring)..cut(j + 1, n, ring);
        match to {
            CombineTo::All => CombinedShare { tokens: 0..all, heads },
            CombineTo::Tokens => CombinedShare { tokens: of(all), heads },
            CombineTo::Heads => {
                let part = of(heads.len());
                let heads = heads.start + part.start as u32..heads.start + part.end as u32;
                CombinedShare { tokens: 0..all, heads }
            }
        }
    }
}
