// SPDX-License-Identifier: MIT OR Apache-2.0
//! Schedules of attention over listed keys: of k and v the rows that lists name travel, and no other.
//!
//! A rank's schedule depends on the lists of all ranks, which nobody has in one place during a run: there each rank
//! learns which of its rows the others list (`runtime::listed_rows`). Here all lists are given, to look at schedules,
//! to count their bytes and to prove them.

use alloc::{format, sync::Arc, vec::Vec};

use super::{
    CirculatingSide, Direction, RingSteps, Schedule,
    ring_steps::listed::{ListedRows, TokenSet},
    verify::Report,
};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::Plan,
};

impl Schedule {
    /// One rank's operations of an attention over listed keys. `keys` are, for each ring rank, the k tokens of the
    /// batch that the lists of its q tokens name, in any order; a token that is named twice counts once.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem};
    /// use cpattn::schedule::{Direction, Schedule};
    /// let problem = Problem::new(Batch::from_lengths(&[8])?, 4, 2, 16, Dtype::F32);
    /// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Contiguous)?;
    /// // The tokens of rank 1, which are 4 to 7, list two keys of rank 0.
    /// let keys = [vec![0, 1], vec![0, 3, 5]];
    /// let schedule = Schedule::listed(&plan, 1, Direction::Forward, &keys)?;
    /// let (forward, _backward) = Schedule::verify_listed(&plan, &keys)?;
    /// let received: u64 = forward.ranks[1].traffic.iter().map(|t| t.bytes_in).sum();
    /// assert_eq!(received, 2 * 2 * (16 + 16) * 4, "two rows of k and v");
    /// assert!(schedule.operations().len() > 0);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Schedule::new`]; a plan in which q circulates or that is reproducible; lists of another number of ring
    /// ranks, or a token that is not one of k.
    pub fn listed(plan: &Plan, rank: usize, direction: Direction, keys: &[Vec<u32>]) -> Result<Self> {
        let named = sets(plan, keys)?;
        Self::listed_of(plan, rank, direction, &named)
    }

    fn listed_of(plan: &Plan, rank: usize, direction: Direction, named: &[TokenSet]) -> Result<Self> {
        let world = plan.mesh().world();
        if rank >= world {
            return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
        }
        let me = plan.mesh().coordinates(rank).ring;
        Self::over_listed(plan, rank, direction, ListedRows::of(plan.shares(), me, named))
    }

    /// As [`Schedule::listed`], of the rows that this rank knows of.
    pub(crate) fn over_listed(plan: &Plan, rank: usize, direction: Direction, rows: ListedRows) -> Result<Self> {
        let me = plan.mesh().coordinates(rank).ring;
        let steps = RingSteps::listed(plan.shares(), plan.problem().allowed(), plan.form(), me, rows);
        Self::over_listed_steps(plan, rank, direction, Arc::new(steps))
    }

    /// As [`Schedule::listed`], with ring steps that have been made already.
    ///
    /// # Errors
    /// A plan that has no schedule over listed keys.
    pub(crate) fn over_listed_steps(
        plan: &Plan,
        rank: usize,
        direction: Direction,
        steps: Arc<RingSteps>,
    ) -> Result<Self> {
        check_plan(plan, direction)?;
        Self::with_steps(plan, rank, direction, [Some(steps), None])
    }
}

impl Schedule {
    /// Verifies the schedules of one replica's ranks over listed keys ([`Schedule::listed`]), forward and backward:
    /// every pair that the mask allows of a q token with a key of its own ring rank's share or with a key that its ring
    /// rank lists is attended once, and no other row arrives.
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found; as [`Schedule::listed`].
    pub fn verify_listed(plan: &Plan, keys: &[Vec<u32>]) -> Result<(Report, Report)> {
        let named = sets(plan, keys)?;
        let schedules = |direction| {
            let of = |rank| Schedule::listed_of(plan, rank, direction, &named);
            (0..plan.mesh().group()).map(of).collect::<Result<Vec<_>>>()
        };
        let verify = |direction| plan.verify_listed_schedules(&schedules(direction)?, keys);
        Ok((verify(Direction::Forward)?, verify(Direction::Backward)?))
    }
}

/// Refuses a plan that has no schedule over listed keys.
fn check_plan(plan: &Plan, direction: Direction) -> Result<()> {
    let limit = "the lists stay with the rank that has the tokens, and k and v come to them";
    if plan.mesh().ring > 1 && plan.circulates(direction) == CirculatingSide::Queries {
        let way_out = "plan with circulate and circulate_forward keys";
        return Err(Error::unsupported("listed keys in a ring whose q circulates", limit, way_out));
    }
    if plan.options().reproducible {
        return Err(Error::unsupported("listed keys in a reproducible plan", limit, "plan without reproducible"));
    }
    Ok(())
}

/// The tokens of each ring rank as a set.
fn sets(plan: &Plan, keys: &[Vec<u32>]) -> Result<Vec<TokenSet>> {
    let (ring, tokens) = (plan.mesh().ring, plan.problem().batch().tokens(Side::K));
    if keys.len() != ring {
        return Err(Error::invalid("keys", format!("of {} ring ranks", keys.len()), format!("of {ring}")));
    }
    let set = |(rank, list): (usize, &Vec<u32>)| {
        let mut set = TokenSet::default();
        set.clear(tokens);
        for &token in list {
            if token as usize >= tokens {
                return Err(Error::invalid(format!("keys[{rank}]"), token, format!("below the {tokens} k tokens")));
            }
            set.insert(token as usize);
        }
        Ok(set)
    };
    keys.iter().enumerate().map(set).collect()
}

#[cfg(test)]
mod tests;
