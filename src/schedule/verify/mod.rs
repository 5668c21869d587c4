// SPDX-License-Identifier: MIT OR Apache-2.0
//! Verifies schedules: all ranks of a group together, one direction at a time, before anything runs.
//!
//! The proof uses only the lists that the runtime would execute (every message, block and range, fully listed) and the
//! plan's specification: which tokens each rank holds, and which pairs the mask allows. It does not use the code that
//! made the lists. It has four parts, each of which relies on the one before:
//!
//! 1. *Shape* (`listed`, `memory`): views lie inside buffers, buffers inside the workspace, messages are contiguous,
//!    not empty, not to oneself, at most eight to one peer, and each send matches one receive of the same shape, in
//!    order (found by the run of part 3, which moves only such).
//! 2. *No race* (`races`): two operations of different lanes that are not ordered by happens-before never access the
//!    same bytes if one of them writes. Buffers are compared by bytes, because several share the same.
//! 3. *No deadlock* (`meet`): one simulated run of all ranks. Progress of one rank never disables a step of another (an
//!    exchange that may be posted stays so until it is posted, a message with both sides posted stays so until it
//!    moves), so all runs reach the same end: if one completes, all do, with any timing. And since conflicting accesses
//!    are ordered by part 2, every run leaves the same content in every buffer.
//! 4. *Content* (`execute`, `geometry`, `attend`, `outputs`): during that run every row of every head carries a tag: a copy of this
//!    token's k, a running sum of these calls' contributions. Kernels check that rows hold the tokens that their ranges
//!    claim; at the end each output holds exactly the pairs that the mask allows, each once. A write that is never
//!    read, and a received row that is in no allowed pair at its reader, are flaws too: nothing unneeded is sent.
//!    Over several nodes (`borders`), a row from another node may also be read by passing it on in its node, but no row
//!    crosses to a node twice, or to the one that holds it, and no gradient of one crosses back twice: the bytes that cross
//!    are the least that can be, counted for each Ulysses rank by itself: a kv head that several hold crosses to each. And no gateway carries more of them than 1.1 × the mean, or than the busiest owner must.
//!
//! The two separate all-to-alls ([`AllToAll`]) are verified by the same four parts; `all_to_all` specifies their inputs
//! and outputs.
//!
//! A flaw is an [`Error::Schedule`] that names rank and operation. The cost is some steps for each range of each call, for
//! each head where heads can be told apart: rows that hold the same but for their token are one entry (`column`).
//! A rank's operations are listed together while that rank is checked by itself, then kept in a small form (`packed`) and listed
//! one by one as the run comes to them.

use alloc::{format, vec::Vec};

use super::{AllToAll, Direction, Form, Lane, OpKind, Purpose, Schedule, expand::Expansion};
use crate::{
    error::{Error, Result},
    plan::Plan,
};

mod all_to_all;
mod attend;
mod borders;
mod calls;
mod cell;
mod column;
mod contributions;
mod execute;
mod flaw;
mod geometry;
mod listed;
mod meet;
mod memory;
#[cfg(test)]
mod mutations;
mod outputs;
mod packed;
mod promise;
mod races;
mod report;

use flaw::flaw;
#[cfg(feature = "std")]
pub(crate) use races::clocks;
pub use report::{RankReport, Report, Traffic};

/// Verifies the schedules of all ranks of one group, in rank order, for one direction.
///
/// # Errors
/// [`Error::Schedule`] with the first flaw found; [`Error::Invalid`] if `schedules` are not those of all ranks of one
/// group.
pub fn verify(schedules: &[Schedule], plan: &Plan) -> Result<Report> {
    let direction = group_of(schedules.iter(), plan)?;
    list_and_prove(schedules, plan, Purpose::Attention(direction))
}

/// Verifies the schedules of all ranks of one group, in rank order, for one all-to-all.
///
/// # Errors
/// As [`verify`].
pub(crate) fn verify_all_to_all(schedules: &[Schedule], plan: &Plan, all_to_all: AllToAll) -> Result<Report> {
    group_of(schedules.iter(), plan)?;
    list_and_prove(schedules, plan, Purpose::AllToAll(all_to_all))
}

fn list_and_prove(schedules: &[Schedule], plan: &Plan, purpose: Purpose) -> Result<Report> {
    let mut proof = Proof::new(plan, purpose);
    schedules.iter().try_for_each(|s| proof.add(s.clone(), None))?;
    proof.finish()
}

/// A proof while ranks are added to it, in order.
struct Proof<'a> {
    plan: &'a Plan,
    purpose: Purpose,
    ranks: Vec<packed::RankOps<'a>>,
    memories: Vec<memory::Memory>,
    /// Whether every view of every operation so far takes all heads of its buffer. Then nothing can tell the heads of a row
    /// apart, and they are proved together. Not where partials of q heads are summed to kv heads, as the ordered form does.
    whole_rows: bool,
    expansion: Expansion,
}

impl<'a> Proof<'a> {
    fn new(plan: &'a Plan, purpose: Purpose) -> Self {
        let whole_rows = matches!(purpose, Purpose::Attention(_)) && plan.form() != Form::Ordered;
        Self { plan, purpose, ranks: Vec::new(), memories: Vec::new(), whole_rows, expansion: Expansion::default() }
    }

    /// Adds the next rank: checks all that needs no other rank. What is `written` is checked and runs in place of what the
    /// operations list.
    fn add(&mut self, s: Schedule, written: Option<&'a [listed::ListedOp]>) -> Result<()> {
        check_order(&s)?;
        let own = if written.is_none() { listed::list(&s, &mut self.expansion)? } else { Vec::new() };
        let listed = written.unwrap_or(&own);
        self.whole_rows = self.whole_rows && listed.iter().all(|op| op.takes_whole_rows(&s, self.plan));
        if s.aligned != self.plan.options().reproducible {
            let text = format!("kernels break tiles by position: {}, reproducible: {}", s.aligned, !s.aligned);
            return Err(flaw(s.rank, 0, text));
        }
        let memory = self.memory(&s)?;
        listed::check_views(&s, listed, &memory)?;
        listed::check_tensors(&s, listed, &memory)?;
        races::check(&s, listed, &memory)?;
        self.memories.push(memory);
        self.ranks.push(packed::RankOps::new(s, written));
        Ok(())
    }

    fn memory(&self, s: &Schedule) -> Result<memory::Memory> {
        let tables = promise::tables(s, self.plan, self.purpose, self.whole_rows);
        memory::Memory::new(s, tables, self.whole_rows)
    }

    /// The schedules so far, without their operations.
    fn frames(&self) -> impl ExactSizeIterator<Item = &Schedule> + Clone {
        self.ranks.iter().map(packed::RankOps::frame)
    }

    /// Runs all ranks, and checks what they end with.
    fn finish(mut self) -> Result<Report> {
        if !self.whole_rows && self.memories.first().is_some_and(memory::Memory::takes_whole_rows) {
            // Those added before the first that tells heads apart have a cell for a row.
            let memories: Result<_> = self.ranks.iter().map(|ops| self.memory(ops.frame())).collect();
            self.memories = memories?;
        }
        let Self { plan, purpose, ranks, memories, whole_rows, expansion } = self;
        let mut prover = execute::Prover::new(plan, ranks, memories, whole_rows, expansion);
        if let Purpose::AllToAll(all_to_all) = purpose {
            all_to_all::bring(&mut prover, all_to_all);
        }
        meet::run(&mut prover)?;
        if let Some((rank, text)) = prover.borders.as_ref().and_then(borders::NodeBorders::uneven) {
            return Err(prover.err(rank, 0, text));
        }
        let pairs = match purpose {
            Purpose::Attention(direction) => outputs::check(&mut prover, direction)?,
            Purpose::AllToAll(all_to_all) => all_to_all::check(&mut prover, all_to_all)?,
        };
        Ok(Report { pairs, ranks: prover.traffic() })
    }
}

/// That `schedules` are one group's, whole and in order; returns their direction.
fn group_of<'s>(schedules: impl ExactSizeIterator<Item = &'s Schedule> + Clone, plan: &Plan) -> Result<Direction> {
    let first = schedules.clone().next();
    let first = first.ok_or_else(|| Error::invalid("schedules", "empty", "one for each rank of a group"))?;
    let group = first.group.clone();
    if first.rank >= plan.mesh().world() || group != plan.mesh().group_of(first.rank) || group.len() != schedules.len()
    {
        return Err(Error::invalid(
            "schedules",
            format!("{} of ranks {group:?}", schedules.len()),
            format!("one for each of the {} ranks of a group", plan.mesh().group()),
        ));
    }
    for (s, rank) in schedules.zip(group.clone()) {
        if s.rank != rank || s.group != group || s.direction != first.direction || s.ulysses != plan.mesh().ulysses {
            return Err(Error::invalid(
                format!("schedules[{}]", rank - group.start),
                format!("rank {}, {:?}, group {:?}, ulysses {}", s.rank, s.direction, s.group, s.ulysses),
                format!("rank {rank}, {:?}, group {group:?}, ulysses {}", first.direction, plan.mesh().ulysses),
            ));
        }
    }
    Ok(first.direction)
}

/// That dependencies come first, name the other lane, and that exchanges are on theirs.
fn check_order(s: &Schedule) -> Result<()> {
    for (i, op) in s.ops.iter().enumerate() {
        let wanted = match op.kind {
            OpKind::Transform { .. } => None,
            _ if op.kind.is_exchange() => Some(Lane::Communication),
            OpKind::Pack { .. } | OpKind::Reduce { .. } => Some(Lane::Communication),
            _ => Some(Lane::Compute),
        };
        if wanted.is_some_and(|w| w != op.lane) {
            return Err(flaw(s.rank, i, format!("{} is on the {:?} lane", op.kind.name(), op.lane)));
        }
        let Some(after) = op.after else { continue };
        if after as usize >= i {
            return Err(flaw(s.rank, i, format!("waits for operation {after}, which does not come before it")));
        }
        if s.ops[after as usize].lane == op.lane {
            return Err(flaw(s.rank, i, format!("waits for operation {after} of its own lane")));
        }
    }
    Ok(())
}

impl Plan {
    /// Verifies the schedules of one replica's ranks, forward and backward.
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found.
    pub fn verify(&self) -> Result<(Report, Report)> {
        // A rank's operations are made, checked, and kept in a small form before those of the next are made.
        let mut proof = Proof::new(self, Purpose::Attention(Direction::Forward));
        let mut steps = Vec::with_capacity(self.mesh().group());
        for rank in 0..self.mesh().group() {
            let forward = Schedule::new(self, rank, Direction::Forward)?;
            steps.push(forward.keys.clone());
            proof.add(forward, None)?;
        }
        group_of(proof.frames(), self)?;
        let forward = proof.finish()?;
        let mut proof = Proof::new(self, Purpose::Attention(Direction::Backward));
        for (rank, keys) in steps.into_iter().enumerate() {
            proof.add(Schedule::backward_with(self, rank, keys.as_ref())?, None)?;
        }
        group_of(proof.frames(), self)?;
        Ok((forward, proof.finish()?))
    }

    /// Verifies the schedules of one replica's ranks for the all-to-all of one tensor.
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found.
    pub fn verify_all_to_all(&self, all_to_all: AllToAll) -> Result<Report> {
        let schedules: Vec<Schedule> =
            (0..self.mesh().group()).map(|rank| Schedule::all_to_all(self, rank, all_to_all)).collect::<Result<_>>()?;
        verify_all_to_all(&schedules, self, all_to_all)
    }
}
