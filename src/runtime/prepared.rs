// SPDX-License-Identifier: MIT OR Apache-2.0
//! A prepared plan: the checked schedule with everything that a run needs; and which prepared plans a rank keeps.

use std::{format, string::String, vec::Vec};

use super::{bind::ExpectedTensors, ops::Listing, tags::Tags};
use crate::{
    error::Result,
    kernel::varlen::{CallTable, KernelCalls},
    plan::{Fingerprint, Plan},
    schedule::{Op, OpKind, Purpose, Schedule, expand::Expansion, verify::one_rank},
};

/// A kernel of the caller's, and its calls.
pub(super) struct PreparedKernel {
    /// Its name and what it honours, for a disagreement.
    pub description: String,
    pub fingerprint: u64,
    /// Those of each operation of the schedule; of what is not attention, none.
    pub tables: Vec<CallTable>,
}

impl PreparedKernel {
    fn new(calls: &KernelCalls, plan: &Plan, schedule: &Schedule) -> Self {
        let mut expansion = Expansion::new(schedule);
        let (score, slopes) = (plan.problem().score(), plan.problem().alibi_slopes().is_some());
        let table = |op: &Op| {
            match &op.kind {
                OpKind::Attend(a) => schedule.attend_ranges(a, &mut expansion.scratch),
                OpKind::Backward(b) => {
                    schedule.ring_steps(b.side).ranges(b.ring_step as usize, &mut expansion.scratch);
                }
                _ => return CallTable::default(),
            }
            calls.table(&expansion.scratch.ranges(), &score, slopes)
        };
        let tables = schedule.ops.iter().map(table).collect();
        Self { description: calls.description(), fingerprint: calls.fingerprint(), tables }
    }
}

/// A schedule with the memory that a run of it needs.
pub(super) struct Prepared {
    pub plan: Plan,
    pub run: Purpose,
    pub schedule: Schedule,
    pub expected: ExpectedTensors,
    pub compute: Listing,
    pub communication: Listing,
    /// The seed of dropout of the run that begins.
    pub dropout_seed: Option<u64>,
    /// Heads and entries of the lists of keys of the run that begins, if it has any.
    pub key_indices: Option<[usize; 2]>,
    /// The kernel of the caller's that computes attention, if there is one.
    pub kernel: Option<PreparedKernel>,
    /// Whether it is prepared for k and v in pages. On the CPU a run decides.
    pub over_pages: bool,
}

impl Prepared {
    pub(super) fn new(plan: &Plan, rank: usize, run: Purpose) -> Result<Self> {
        Self::of_schedule(plan, run, Schedule::of(plan, rank, run)?)
    }

    /// The same of a schedule that was made elsewhere.
    pub(super) fn of_schedule(plan: &Plan, run: Purpose, schedule: Schedule) -> Result<Self> {
        let expected = ExpectedTensors::new(plan, run, &schedule);
        one_rank::check(&schedule, &expected.forms, &mut Expansion::new(&schedule))?;
        Ok(Self {
            plan: plan.clone(),
            run,
            expected,
            compute: Listing::new(&schedule, run.name(plan)).computing(plan)?,
            communication: Listing::new(&schedule, run.name(plan)),
            schedule,
            dropout_seed: None,
            key_indices: None,
            kernel: None,
            over_pages: false,
        })
    }

    /// The same for runs whose attention a kernel of the caller's computes.
    pub(super) fn computed_by(mut self, calls: &KernelCalls) -> Self {
        if matches!(self.run, Purpose::Attention(_)) {
            self.kernel = Some(PreparedKernel::new(calls, &self.plan, &self.schedule));
        }
        self
    }

    /// The same for runs with tags.
    pub(super) fn tagged(mut self) -> Self {
        let Self { plan, run, schedule, communication, .. } = &mut self;
        communication.tag(|expansion| Tags::new(plan, *run, schedule, expansion));
        self
    }

    /// The fingerprint of the plan and the direction, of the shape of lists of keys, and of a kernel of the caller's.
    pub(super) fn fingerprint(&self) -> u64 {
        let fingerprint =
            self.run.fingerprint(&self.plan) ^ self.kernel.as_ref().map_or(0, |kernel| kernel.fingerprint);
        self.key_indices.map_or(fingerprint, |[heads, entries]| {
            let mut h = Fingerprint::new();
            [fingerprint, heads as u64, entries as u64].into_iter().for_each(|word| h.word(word));
            h.finish()
        })
    }

    /// The fingerprint that the ranks of a group compare: with the seed of dropout, if there is one.
    pub(super) fn compared(&self) -> u64 {
        let fingerprint = self.fingerprint();
        self.dropout_seed.map_or(fingerprint, |seed| {
            let mut h = Fingerprint::new();
            [fingerprint, seed].into_iter().for_each(|word| h.word(word));
            h.finish()
        })
    }

    /// Begins a run with the number that ranks compare, and the number of the run; without, the rank runs alone.
    pub(super) fn begin(&mut self, begun: Option<(u64, u64)>) {
        if let Some((fingerprint, run)) = begun {
            self.communication.begin(fingerprint);
            self.communication.tags.begin(fingerprint, run, self.dropout_seed, self.key_indices);
        }
    }

    /// The run in words, for a disagreement.
    pub(super) fn describe(&self) -> String {
        let kernel = self.kernel.as_ref().map_or(String::new(), |kernel| format!(", {}", kernel.description));
        self.run.describe_with(&self.plan, self.dropout_seed, self.key_indices) + &kernel
    }

    pub(super) fn is(&self, plan: &Plan, run: Purpose, over_pages: bool) -> bool {
        self.run == run && self.over_pages == over_pages && self.plan == *plan
    }
}

/// Schedules that a rank keeps, beside those that captured graphs may still use.
const REMEMBERED: usize = 16;

/// An entry of [`PlanCache`].
pub(super) trait Entry {
    /// The schedule.
    fn prepared(&self) -> &Prepared;

    /// Whether it must be kept for as long as the rank lives.
    fn is_kept(&self) -> bool {
        false
    }
}

/// The schedules of the plans that a rank ran or prepared last.
pub(super) struct PlanCache<E> {
    /// Each entry with the number of its last use.
    entries: Vec<(u64, E)>,
    uses: u64,
}

impl<E: Entry> Default for PlanCache<E> {
    fn default() -> Self {
        Self { entries: Vec::with_capacity(REMEMBERED), uses: 0 }
    }
}

impl<E: Entry> PlanCache<E> {
    /// Index of a run's schedule; `over_pages` as it was prepared.
    pub(super) fn find(&self, plan: &Plan, run: Purpose, over_pages: bool) -> Option<usize> {
        self.entries.iter().position(|(_, e)| e.prepared().is(plan, run, over_pages))
    }

    /// As [`find`](Self::find), and records a use.
    pub(super) fn reuse(&mut self, plan: &Plan, run: Purpose, over_pages: bool) -> Option<usize> {
        let at = self.find(plan, run, over_pages)?;
        self.uses += 1;
        self.entries[at].0 = self.uses;
        Some(at)
    }

    /// Index of the least recently used schedule that may be forgotten, if the cache is full.
    pub(super) fn least_recent(&self) -> Option<usize> {
        let forgettable = || self.entries.iter().enumerate().filter(|(_, (_, e))| !e.is_kept());
        if forgettable().count() < REMEMBERED {
            return None;
        }
        forgettable().min_by_key(|(_, (used, _))| *used).map(|(at, _)| at)
    }

    /// Forgets a schedule.
    pub(super) fn remove(&mut self, at: usize) -> E {
        self.entries.remove(at).1
    }

    /// Remembers a schedule; its index.
    pub(super) fn push(&mut self, entry: E) -> usize {
        self.uses += 1;
        self.entries.push((self.uses, entry));
        self.entries.len() - 1
    }

    /// All entries.
    #[cfg(feature = "cuda")]
    pub(super) fn iter(&self) -> impl Iterator<Item = &E> {
        self.entries.iter().map(|(_, e)| e)
    }
}

impl<E> core::ops::Index<usize> for PlanCache<E> {
    type Output = E;

    fn index(&self, at: usize) -> &E {
        &self.entries[at].1
    }
}

impl<E> core::ops::IndexMut<usize> for PlanCache<E> {
    fn index_mut(&mut self, at: usize) -> &mut E {
        &mut self.entries[at].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{batch::Batch, element::Dtype, layout::Layout, mesh::Mesh, plan::Problem, schedule::Direction};

    struct Mark {
        prepared: Prepared,
        kept: bool,
    }

    impl Entry for Mark {
        fn prepared(&self) -> &Prepared {
            &self.prepared
        }

        fn is_kept(&self) -> bool {
            self.kept
        }
    }

    /// Among the entries that need not be kept, the least recently used is forgotten.
    #[test]
    fn the_least_recently_used_goes_first() {
        let run = Purpose::Attention(Direction::Forward);
        let plan = |tokens: usize| {
            let problem = Problem::new(Batch::new(&[0, tokens as i32]).unwrap(), 1, 1, 4, Dtype::F32);
            Plan::new(&problem, Mesh::ulysses(1).unwrap(), Layout::Contiguous).unwrap()
        };
        let mark = |tokens, kept| Mark { prepared: Prepared::new(&plan(tokens), 0, run).unwrap(), kept };
        let mut all = PlanCache::default();
        for tokens in 1..=20 {
            all.push(mark(tokens, true));
        }
        for tokens in 21..=20 + REMEMBERED {
            assert_eq!(all.least_recent(), None, "{tokens}");
            all.push(mark(tokens, false));
        }
        let place = |all: &PlanCache<Mark>, tokens| all.find(&plan(tokens), run, false);
        assert_eq!(all.least_recent(), place(&all, 21));
        assert!(all.reuse(&plan(21), run, false).is_some());
        assert_eq!(all.least_recent(), place(&all, 22));
        all.remove(place(&all, 22).unwrap());
        assert_eq!((all.least_recent(), place(&all, 22)), (None, None));
    }
}
