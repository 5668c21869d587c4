// SPDX-License-Identifier: MIT OR Apache-2.0
//! Documents over groups of ranks that change size.
//!
//! A group that is as large as the longest document needs is too large for all others: their rows travel for nothing.
//! Here each pass of a step divides the ranks into groups of several sizes. Short documents are packed for small
//! groups, which work apart, and long ones for groups of many ranks. Groups of one pass take about the same time.
//!
//! `cost` says what a document costs a group, from a table of lengths; `fill` fills a pass, `search` says how many
//! there are. All ranks compute this alone and must get the same result: decisions compare integers, and ties go to the
//! lower index.

mod cost;
mod fill;
mod limits;
mod search;

pub use limits::{GroupLimits, Groups, RankGroup};

use alloc::{format, string::ToString, vec::Vec};

use crate::{
    batch::Side,
    error::{Error, Result},
    machine::Machine,
    plan::{AttentionKind, Problem},
};

/// Deals the documents of a problem over groups of ranks, in as few passes as their tokens need, or in a few more if
/// that is cheaper.
///
/// The result is within a few per cent of its [bound](Groups::bound) where there are several documents for each rank,
/// and is the same on all ranks.
///
/// # Errors
/// Limits as [`GroupLimits`] excludes them; slices, and q and k of different tokens; a document without room on the
/// largest group; documents without room in [`GroupLimits::passes`] passes; a machine as for [`meshes`](super::meshes).
///
/// ```
/// use cpattn::{Batch, Dtype, Problem, predict::{GroupLimits, groups}};
/// let lengths = [900, 60_000, 3_000, 150, 7_000, 500, 2_000, 15_000];
/// let problem = Problem::new(Batch::from_lengths(&lengths)?, 32, 8, 128, Dtype::Bf16);
/// let dealt = groups(&problem, &GroupLimits::new(16, &[1, 2, 4, 8], 8192), None)?;
/// let long = dealt.passes.iter().flatten().find(|group| group.documents.contains(&1)).unwrap();
/// assert_eq!((long.ranks, long.first_rank % 8), (8, 0));
/// assert!(dealt.bound <= dealt.makespan);
/// # Ok::<(), cpattn::Error>(())
/// ```
pub fn groups(problem: &Problem, limits: &GroupLimits, machine: Option<&Machine>) -> Result<Groups> {
    problem.check()?;
    limits.check()?;
    if let Some(machine) = machine {
        machine.check()?;
    }
    let batch = problem.batch();
    if batch.slices().is_some() || !batch.is_self_attention() {
        let found = if batch.slices().is_some() { "slices" } else { "q and k of different tokens" };
        let (limit, hint) = ("documents are dealt whole, each attending to itself", "give documents alone");
        return Err(Error::unsupported(format!("a batch with {found}"), limit, hint));
    }
    let largest = limits.sizes[limits.sizes.len() - 1];
    if problem.kind() == AttentionKind::Other && largest > problem.heads() {
        let expected = format!("at most the {} heads, for kind other", problem.heads());
        return Err(Error::invalid("sizes", largest, expected));
    }
    let lengths: Vec<u64> = batch.cu_seqlens(Side::Q).windows(2).map(|w| (w[1] - w[0]) as u64).collect();
    let most = (largest as u64).saturating_mul(limits.room as u64);
    if let Some((d, n)) = lengths.iter().enumerate().find(|(_, n)| **n > most) {
        let found = format!("{} tokens of a rank, {most} of a group of {largest}", limits.room);
        return Err(Error::invalid("room", found, format!("room for the {n} tokens of document {d}"))
            .hint("allow larger groups, more tokens of a rank, or cut the document"));
    }
    let costs = cost::CostTable::new(problem, limits, machine, &lengths)?;
    search::search(&lengths, &costs, limits).ok_or_else(|| {
        let tokens: u64 = lengths.iter().sum();
        let room = (limits.room as u64).saturating_mul(limits.world as u64);
        let passes = limits.passes.to_string();
        let expected = format!("enough passes for {tokens} tokens: the ranks have room for {room} in each");
        Error::invalid("passes", passes, expected).hint("give fewer documents at once, or allow more tokens of a rank")
    })
}

#[cfg(test)]
mod tests;
