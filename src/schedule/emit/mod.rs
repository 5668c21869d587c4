// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds schedules.
//!
//! A schedule has three phases: tokens are exchanged for heads ([`ulysses`]), k and v (or q) are sent round the ring
//! ([`ring`]), heads are exchanged for tokens again. With one Ulysses rank the first and last phases are empty, and
//! kernels work on the caller's tensors directly.

use alloc::{format, sync::Arc};

use super::{CirculatingSide, Direction, KnownSteps, Purpose, RingSteps, Schedule, ring_steps::Holders};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::{AttentionKind, Plan},
};
use builder::Builder;

mod all_to_all;
mod builder;
mod combine;
#[cfg(test)]
mod gateway_tests;
mod gateways;
mod lanes;
#[cfg(test)]
mod option_tests;
mod passes;
mod ring;
mod scan;
mod travel;
mod ulysses;

/// Refuses a rank outside the mesh.
fn check_rank(plan: &Plan, rank: usize) -> Result<()> {
    let world = plan.mesh().world();
    if rank >= world {
        return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
    }
    Ok(())
}

impl Schedule {
    /// One rank's operations of an attention.
    ///
    /// # Errors
    /// A rank outside the mesh; a problem of another kind than softmax attention.
    pub fn new(plan: &Plan, rank: usize, direction: Direction) -> Result<Self> {
        Self::with_steps(plan, rank, direction, KnownSteps::default())
    }

    /// One rank's operations for a purpose.
    ///
    /// # Errors
    /// Those of [`Schedule::new`], [`Schedule::all_to_all`], [`Schedule::combine`] or [`Schedule::scan`].
    pub(crate) fn of(plan: &Plan, rank: usize, purpose: Purpose) -> Result<Self> {
        match purpose {
            Purpose::Attention(direction) => Self::new(plan, rank, direction),
            Purpose::AllToAll(all_to_all) => Self::all_to_all(plan, rank, all_to_all),
            Purpose::Combine(combine) => Self::combine(plan, rank, combine),
            Purpose::Scan(scan) => Self::scan(plan, rank, scan),
        }
    }

    /// One rank's operations forward and backward. If the same side circulates in both, its ring steps are computed
    /// once: about half the work of two calls of [`Schedule::new`], with the same result.
    ///
    /// # Errors
    /// As [`Schedule::new`].
    pub fn both(plan: &Plan, rank: usize) -> Result<[Self; 2]> {
        Self::both_after(plan, rank, None)
    }

    /// As [`Schedule::both`], after those of another rank: ranks of one Ulysses group have the same ring steps, unless
    /// ranks of a node divide the rows of a head.
    pub(crate) fn both_after(plan: &Plan, rank: usize, before: Option<&[Self; 2]>) -> Result<[Self; 2]> {
        let ring = |rank| plan.mesh().coordinates(rank).ring;
        let alike = |before: &&[Self; 2]| {
            plan.ring_holders_of_node() == 1 && rank < plan.mesh().world() && ring(before[0].rank) == ring(rank)
        };
        let [keys, queries] = before.filter(alike).map(|both| both[1].known_steps()).unwrap_or_default();
        let of_forward = before.filter(alike).map(|both| both[0].known_steps()).unwrap_or_default();
        let forward = Self::with_steps(plan, rank, Direction::Forward, of_forward)?;
        let [of_keys, of_queries] = forward.known_steps();
        let known = [of_keys.or(keys), of_queries.or(queries)];
        let backward = Self::with_steps(plan, rank, Direction::Backward, known)?;
        Ok([forward, backward])
    }

    /// As [`Schedule::new`], with ring steps that have been computed already.
    pub(super) fn with_steps(
        plan: &Plan,
        rank: usize,
        direction: Direction,
        [keys, queries]: KnownSteps,
    ) -> Result<Self> {
        check_rank(plan, rank)?;
        if plan.problem().kind == AttentionKind::Other {
            return Err(Error::unsupported(
                "attention of kind other",
                "the kernels here are those of softmax attention",
                "run your own between the two all-to-alls of a Ulysses rank",
            ));
        }
        let mut b = Builder::new(plan, rank, direction.into());
        let (at, p) = (b.coordinates, plan.problem());
        let per_node = plan.ring_ranks_of_node();
        let ring_steps = |side, per_node: usize, splits| {
            let of = (at.ring, per_node);
            Arc::new(RingSteps::new(plan.shares(), p.allowed(), side, plan.form(), of, splits))
        };
        let backward = direction == Direction::Backward;
        let both = backward && plan.options().reproducible;
        let side = plan.circulates(direction);
        let queries_travel = side == CirculatingSide::Queries && (backward || plan.mesh().ring > 1);
        if let Some(listed) = keys.as_ref().filter(|keys| keys.is_listed()) {
            // Listed rows go straight to their readers.
            b.out.keys = Some(listed.clone());
        } else if both || !queries_travel {
            b.divide_rows();
            let splits = b.splits();
            // Rows that several ranks hold cross through node slots even if a node has one ring rank.
            let divided = splits != [Holders::alone()];
            let per_node = if divided { plan.ring_ranks_in_node() } else { per_node };
            b.out.keys = keys.or_else(|| Some(ring_steps(Side::K, per_node, splits)));
        }
        if both || queries_travel {
            b.out.queries = queries.or_else(|| Some(ring_steps(Side::Q, per_node, alloc::vec![Holders::alone()])));
        }
        match direction {
            Direction::Forward => b.forward(),
            Direction::Backward => b.backward(),
        }
        b.finish()
    }
}
