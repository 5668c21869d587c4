// SPDX-License-Identifier: MIT OR Apache-2.0
//! Verifies schedules: all ranks of a group together, one direction at a time, before anything runs.
//!
//! The proof uses only the lists that the runtime would execute (every message, block and range, fully listed) and the
//! plan's specification: which tokens each rank holds, and which pairs the mask allows. It does not use the code that
//! plans the lists. It has four parts, each of which relies on the one before:
//!
//! 1. *Shape* (`one_rank`): views lie inside buffers, buffers inside the workspace; messages are contiguous, not empty,
//!    not to the rank itself, at most eight to one peer; each send matches one receive of the same shape, in order
//!    (checked in the run of part 3, which moves only matching messages).
//! 2. *No race* (`one_rank`): two operations of different lanes that are not ordered by happens-before never access the
//!    same bytes if one of them writes. Buffers are compared by bytes, because several share the same.
//! 3. *No deadlock* (`matching`): one simulated run of all ranks. Progress of one rank never disables a step of another
//!    (an exchange that may be posted stays so until it is posted, a message with both sides posted stays so until it
//!    moves), so all runs reach the same end: if one completes, all do, with any timing. And since conflicting accesses
//!    are ordered by part 2, every run leaves the same content in every buffer.
//! 4. *Content* (`execute`, `transfer`, `geometry`, `attend`, `outputs`): during that run every row of every head
//!    carries a tag: a copy of this token's k, a running sum of these calls' contributions. Kernels check that rows
//!    hold the tokens that their ranges claim; at the end each output holds exactly the pairs that the mask allows,
//!    each once. A write that is never read, and a received row that is in no allowed pair at its reader, are flaws
//!    too: nothing unneeded is sent. Over several nodes (`borders`), a row from another node may also be read by
//!    passing it on in its node. But no row crosses to a node twice, or to the node that holds it, and no gradient of a
//!    row crosses back twice: the bytes that cross are the minimum, whichever ranks of a node hold a head. And no
//!    gateway carries more of these bytes than 1.1 × the mean, or than the busiest owner must.
//!
//! Schedules over listed keys (`listed_keys`) are verified by the same parts: there the allowed pairs are those of a
//! ring rank's q tokens with its own share and with the keys that it lists.
//!
//! The two separate all-to-alls (`AllToAll`), a `Combine` and a `Scan` are verified by the same four parts;
//! `all_to_all`, `combine` and `scan` specify their inputs and outputs.
//!
//! A flaw is an [`Error::Schedule`] that names rank and operation. The cost is a few steps for each range of each call,
//! and for each head if heads can differ: rows with equal content, except for their token, are one entry (`column`). A
//! rank's operations are packed once that rank passes its own check (`packed`), and listed one by one when the run
//! reaches them.

use alloc::{format, vec::Vec};

use super::{Direction, Form, KnownSteps, OpKind, Purpose, Schedule, TensorId, expand::Expansion};
use crate::{
    error::{Error, Result},
    plan::Plan,
    schedule::expanded::ExpandedOp,
};

mod all_to_all;
mod attend;
mod borders;
mod calls;
mod cell;
mod column;
mod combine;
mod contributions;
mod execute;
mod flaw;
mod geometry;
mod listed;
mod listed_keys;
mod matching;
mod memory;
#[cfg(test)]
mod mutations;
pub(crate) mod one_rank;
mod outputs;
mod packed;
mod parallel;
mod promise;
mod reaches;
mod report;
mod scan;
mod segments;
mod slices;
mod transfer;

use flaw::flaw;
use packed::RankOps;
pub use report::{RankReport, Report, Traffic};

/// Checks everything that involves no other rank. `written`, if given, is checked and run in place of the lists that
/// the operations make.
fn check_rank<'a>(
    s: Schedule,
    written: Option<&'a [ExpandedOp]>,
    plan: &Plan,
    purpose: Purpose,
    expansion: &mut Expansion,
) -> Result<RankOps<'a>> {
    let tensors = TensorId::ALL.map(|tensor| promise::form(tensor, &s, plan, purpose));
    let check = slices::ScheduleCheck::new(&s, &tensors)?;
    // The proof has a column for each head of a buffer.
    let heads = match purpose {
        Purpose::Scan(scan) => scan.heads as usize,
        _ => plan.problem().heads(),
    };
    if let Some(b) = s.buffers.iter().find(|b| b.heads as usize > heads) {
        let text = format!("buffer {} has {} heads, more than the problem's {heads}", b.name, b.heads);
        return Err(flaw(s.rank, 0, text));
    }
    let touched = match written {
        Some(mut listed) => check.operations(&mut listed),
        None => check.operations(expansion),
    }?;
    check.lanes(&touched)?;
    if s.aligned != plan.options().reproducible {
        let text = format!("kernels break tiles by position: {}, reproducible: {}", s.aligned, !s.aligned);
        return Err(flaw(s.rank, 0, text));
    }
    // Partials of q heads are results with other heads than their operands.
    let per_q_head = s.ops.iter().any(|op| matches!(&op.kind, OpKind::Backward(b) if b.per_q_head));
    let whole_rows = !per_q_head && touched.iter().flatten().all(|t| check.takes_whole_rows(t));
    Ok(RankOps::new(s, written, whole_rows))
}

/// A proof of ranks that each passed the one-rank check, in rank order.
struct Proof<'a> {
    plan: &'a Plan,
    purpose: Purpose,
    ranks: Vec<RankOps<'a>>,
    /// The most threads that check the outputs.
    threads: usize,
    /// For schedules over listed keys: the k tokens that each ring rank lists.
    listed: Option<&'a [Vec<u32>]>,
}

impl Proof<'_> {
    /// The schedules, with forms in place of their operations.
    fn frames(&self) -> impl ExactSizeIterator<Item = &Schedule> + Clone {
        self.ranks.iter().map(RankOps::frame)
    }

    /// Whether every view of every operation takes all heads of its buffer. Then the heads of a row cannot differ, and
    /// they are proved together. This does not hold if partials of q heads are summed to kv heads, as in the ordered
    /// form.
    fn takes_whole_rows(&self) -> bool {
        matches!(self.purpose, Purpose::Attention(_) | Purpose::Scan(_))
            && (matches!(self.purpose, Purpose::Scan(_)) || self.plan.form() != Form::Ordered)
            && self.ranks.iter().all(RankOps::takes_whole_rows)
    }

    /// Runs all ranks, and checks their outputs.
    fn finish(self) -> Result<Report> {
        let whole_rows = self.takes_whole_rows();
        let Self { plan, purpose, ranks, threads, listed } = self;
        let memory = |s| memory::Memory::new(s, promise::tables(s, plan, purpose, whole_rows), whole_rows);
        let memories = ranks.iter().map(|rank| memory(rank.frame())).collect();
        let mut prover = execute::Prover::new(plan, ranks, memories, whole_rows);
        match purpose {
            Purpose::AllToAll(all_to_all) => all_to_all::set_inputs(&mut prover, all_to_all),
            Purpose::Combine(_) => combine::set_inputs(&mut prover),
            Purpose::Scan(scan) => scan::set_inputs(&mut prover, scan),
            Purpose::Attention(_) => {}
        }
        if !matches!(purpose, Purpose::Attention(_)) {
            // Rows of an all-to-all cross from rank to rank, with a copy for every rank that holds the head; those of a
            // combine to the rank that merges them, those of a scan along documents.
            prover.borders = None;
        }
        if let Some(keys) = listed {
            let of_share = |side, ring| -> listed_keys::TokenIntervals {
                let ranks = (0..plan.mesh().group()).filter(|&rank| plan.mesh().coordinates(rank).ring == ring);
                let runs = ranks.flat_map(|rank| promise::token_runs(plan, side, rank));
                runs.map(|run| (run.token as usize, (run.token + run.tokens) as usize)).collect()
            };
            prover.listed = Some(listed_keys::ListedPairs::new(keys, of_share));
            // They go straight to each reader.
            prover.borders = None;
        }
        matching::run(&mut prover)?;
        if let Some((rank, text)) = prover.borders.as_ref().and_then(borders::NodeBorders::uneven) {
            return Err(prover.err(rank, 0, text));
        }
        let pairs = match purpose {
            Purpose::Attention(direction) => outputs::check(&prover, direction, threads)?,
            Purpose::AllToAll(all_to_all) => all_to_all::check(&prover, all_to_all)?,
            Purpose::Combine(combine) => combine::check(&prover, combine)?,
            Purpose::Scan(scan) => scan::check(&prover, scan)?,
        };
        Ok(Report { pairs, ranks: prover.traffic })
    }
}

/// Checks that `schedules` are those of one whole group, in order; returns their purpose.
fn group_of<'s>(schedules: impl ExactSizeIterator<Item = &'s Schedule> + Clone, plan: &Plan) -> Result<Purpose> {
    let first = schedules.clone().next();
    let first = first.ok_or_else(|| Error::invalid("schedules", "empty", "one for each rank of a group"))?;
    let group = first.group.clone();
    if first.rank >= plan.mesh().world() || group != plan.mesh().group_of(first.rank) || group.len() != schedules.len()
    {
        return Err(Error::invalid(
            "schedules",
            format!("of length {}, for ranks {group:?}", schedules.len()),
            format!("{}: one for each rank of a group", plan.mesh().group()),
        ));
    }
    for (s, rank) in schedules.zip(group.clone()) {
        if s.rank != rank || s.group != group || s.purpose != first.purpose || s.ulysses != plan.mesh().ulysses {
            return Err(Error::invalid(
                format!("schedules[{}]", rank - group.start),
                format!("rank {}, {:?}, group {:?}, ulysses {}", s.rank, s.purpose, s.group, s.ulysses),
                format!("rank {rank}, {:?}, group {group:?}, ulysses {}", first.purpose, plan.mesh().ulysses),
            ));
        }
    }
    Ok(first.purpose)
}

impl Plan {
    /// Verifies the schedules of one replica's ranks, forward and backward. With `std` it takes two threads or more
    /// where there are as many processors; the flaw that is reported does not depend on that.
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found.
    pub fn verify(&self) -> Result<(Report, Report)> {
        // A rank's operations are made, checked and packed before those of the next rank are made.
        let check = |direction, known: &[KnownSteps], threads| {
            let of_rank = |rank: usize, e: &mut Expansion| {
                let known = known.get(rank).cloned().unwrap_or_default();
                let schedule = Schedule::with_steps(self, rank, direction, known)?;
                check_rank(schedule, None, self, Purpose::Attention(direction), e)
            };
            parallel::each(self.mesh().group(), threads, of_rank).into_iter().collect::<Result<Vec<_>>>()
        };
        let prove = |ranks: Vec<RankOps>, direction, threads| {
            let purpose = Purpose::Attention(direction);
            let proof = Proof { plan: self, purpose, ranks, threads, listed: None };
            group_of(proof.frames(), self)?;
            proof.finish()
        };
        // The run of all ranks uses one thread, and takes twice as long backward as forward. So the backward's ranks
        // are checked first, and another thread checks the forward's ranks during the backward's run, with the same
        // ring steps as far as the same side circulates.
        let all = parallel::processors();
        let others = all.saturating_sub(1).max(1);
        let backward = check(Direction::Backward, &[], all);
        let known: Vec<KnownSteps> =
            backward.iter().flatten().map(|rank: &RankOps| rank.frame().known_steps()).collect();
        let forward =
            || check(Direction::Forward, &known, others).and_then(|ranks| prove(ranks, Direction::Forward, others));
        let backward = || backward.and_then(|ranks| prove(ranks, Direction::Backward, all));
        let (forward, backward) = parallel::two(forward, backward);
        Ok((forward?, backward?))
    }

    /// Verifies the schedules of all ranks of one group, in rank order, for what they are for ([`Schedule::purpose`]).
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found; [`Error::Invalid`] if `schedules` are not those of all ranks of
    /// one group.
    pub fn verify_schedules(&self, schedules: &[Schedule]) -> Result<Report> {
        self.verify_with(schedules, None)
    }

    /// As [`Plan::verify_schedules`], over listed keys: those of each ring rank, as tokens of the batch.
    pub(super) fn verify_listed_schedules(&self, schedules: &[Schedule], keys: &[Vec<u32>]) -> Result<Report> {
        self.verify_with(schedules, Some(keys))
    }

    fn verify_with(&self, schedules: &[Schedule], listed: Option<&[Vec<u32>]>) -> Result<Report> {
        let purpose = group_of(schedules.iter(), self)?;
        let ranks = schedules.iter().map(|s| check_rank(s.clone(), None, self, purpose, &mut Expansion::default()));
        let (ranks, threads) = (ranks.collect::<Result<_>>()?, parallel::processors());
        Proof { plan: self, purpose, ranks, threads, listed }.finish()
    }

    /// Verifies the schedules of one replica's ranks for a purpose: a direction, an all-to-all, a combine or a
    /// scan.
    ///
    /// # Errors
    /// [`Error::Schedule`] with the first flaw found; as [`Schedule::all_to_all`], [`Schedule::combine`]
    /// and [`Schedule::scan`].
    pub fn verify_purpose(&self, purpose: impl Into<Purpose>) -> Result<Report> {
        let purpose = purpose.into();
        let schedules: Vec<Schedule> =
            (0..self.mesh().group()).map(|rank| Schedule::of(self, rank, purpose)).collect::<Result<_>>()?;
        self.verify_schedules(&schedules)
    }
}
