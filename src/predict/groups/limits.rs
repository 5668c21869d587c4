// SPDX-License-Identifier: MIT OR Apache-2.0
//! What groups may be, and what they are.

use alloc::{format, vec::Vec};

use crate::error::{Error, Result};

/// What the groups of [`groups`](super::groups) may be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GroupLimits {
    /// The number of ranks.
    pub world: usize,
    /// The allowed numbers of ranks of a group: ascending, each a multiple of the one before; the largest divides
    /// `world`.
    pub sizes: Vec<usize>,
    /// The tokens that a rank has room for in a pass. A group of n ranks has room for n times as many.
    pub room: usize,
    /// The most passes; 0: as many as the tokens need.
    pub passes: usize,
    /// Floating-point operations of a token outside of attention in one layer's forward, such as twice the parameters
    /// of a layer. Without them short documents count for almost nothing.
    pub token_flops: u64,
    /// Ranks of a node where no machine says it; 0: all links are alike.
    pub ranks_per_node: usize,
}

impl GroupLimits {
    /// Groups of these sizes over `world` ranks, with room for so many tokens on each rank.
    pub fn new(world: usize, sizes: &[usize], room: usize) -> Self {
        Self { world, sizes: sizes.to_vec(), room, passes: 0, token_flops: 0, ranks_per_node: 0 }
    }

    /// At most so many passes.
    pub fn passes(self, passes: usize) -> Self {
        Self { passes, ..self }
    }

    /// The work of a token outside of attention.
    pub fn token_flops(self, token_flops: u64) -> Self {
        Self { token_flops, ..self }
    }

    /// Nodes of so many ranks.
    pub fn ranks_per_node(self, ranks_per_node: usize) -> Self {
        Self { ranks_per_node, ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Self { world, sizes, room, .. } = self;
        let listed = || format!("{sizes:?}");
        if sizes.first().is_none_or(|&n| n == 0) || sizes.windows(2).any(|w| w[0] >= w[1] || w[1] % w[0] > 0) {
            let expected = "numbers of ranks from 1 on that ascend, each a multiple of the one before";
            return Err(Error::invalid("sizes", listed(), expected));
        }
        let largest = sizes[sizes.len() - 1];
        if *world == 0 || *world > 1 << 24 || world % largest > 0 {
            let expected = format!("a multiple of the largest of the sizes, {largest}, up to {}", 1 << 24);
            return Err(Error::invalid("world", world, expected));
        }
        if *room == 0 {
            return Err(Error::invalid("room", 0, "at least 1 token of a rank"));
        }
        Ok(())
    }
}

/// A group of ranks in a pass, and its documents.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RankGroup {
    /// The first of its consecutive ranks, a multiple of their number.
    pub first_rank: usize,
    /// Its ranks.
    pub ranks: usize,
    /// Indices of its documents, ascending.
    pub documents: Vec<u32>,
    /// The cost of its documents, in the unit of [`Groups`].
    pub cost: u64,
}

/// The passes of a step, each with its groups.
///
/// Costs are picoseconds of one layer's forward and backward if a machine was given. Otherwise they are multiply-adds
/// by the rules of [`Choice`](crate::plan::Choice), divided by 1,024. Both are sums over documents, each rated alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Groups {
    /// For each pass the groups that have documents, by their first rank. No rank is in two of them; the ranks in none
    /// have nothing to do.
    pub passes: Vec<Vec<RankGroup>>,
    /// The cost of all passes, each as long as its most expensive group: passes begin together, as collectives over
    /// all ranks inside of a pass (FSDP, ZeRO) make them.
    pub makespan: u64,
    /// No dealing of these documents costs less than this: all work spread evenly, each document on the size of groups
    /// that takes the least rank time; and the most expensive document alone.
    pub bound: u64,
}
