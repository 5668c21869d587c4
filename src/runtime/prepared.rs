// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan as a rank remembers it: the schedule, proved, with all that running it takes; and which plans a rank remembers.

use std::vec::Vec;

use super::{bind::Expected, ops::Listing, proof, run::Run, tags::Tags};
use crate::{
    error::Result,
    plan::Plan,
    schedule::{Schedule, expand::Expansion},
};

/// A schedule with the room that running it takes.
pub(super) struct Prepared {
    pub plan: Plan,
    pub run: Run,
    pub schedule: Schedule,
    pub expected: Expected,
    pub compute: Listing,
    pub communication: Listing,
}

impl Prepared {
    pub(super) fn new(plan: &Plan, rank: usize, run: Run) -> Result<Self> {
        let schedule = run.schedule(plan, rank)?;
        proof::check(plan, run, &schedule, &mut Expansion::new(&schedule))?;
        Ok(Self {
            plan: plan.clone(),
            run,
            expected: Expected::new(plan, run, &schedule),
            compute: Listing::new(&schedule),
            communication: Listing::new(&schedule),
            schedule,
        })
    }

    /// The same with runs that carry their check along.
    pub(super) fn tagged(mut self) -> Self {
        let Self { plan, run, schedule, communication, .. } = &mut self;
        communication.tag(|expansion| Tags::new(plan, *run, schedule, expansion));
        self
    }

    /// What the ranks of a group compare.
    pub(super) fn fingerprint(&self) -> u64 {
        self.run.fingerprint(&self.plan)
    }

    pub(super) fn is(&self, plan: &Plan, run: Run) -> bool {
        self.run == run && self.plan == *plan
    }
}

/// How many schedules a rank remembers, beside those that it may not forget.
const REMEMBERED: usize = 16;

/// What a rank remembers of a schedule.
pub(super) trait Entry {
    /// The schedule.
    fn prepared(&self) -> &Prepared;

    /// Whether it must be kept for as long as the rank lives.
    fn is_kept(&self) -> bool {
        false
    }
}

impl Entry for Prepared {
    fn prepared(&self) -> &Prepared {
        self
    }
}

/// The schedules of a rank's last plans, in the order in which they came.
pub(super) struct Remembered<E>(Vec<E>);

impl<E: Entry> Default for Remembered<E> {
    fn default() -> Self {
        Self(Vec::with_capacity(REMEMBERED))
    }
}

impl<E: Entry> Remembered<E> {
    /// The number of a run's schedule.
    pub(super) fn find(&self, plan: &Plan, run: Run) -> Option<usize> {
        self.0.iter().position(|e| e.prepared().is(plan, run))
    }

    /// What has to be forgotten before another schedule comes, if anything has.
    pub(super) fn oldest(&self) -> Option<usize> {
        if self.0.len() < REMEMBERED {
            return None;
        }
        self.0.iter().position(|e| !e.is_kept())
    }

    /// Forgets a schedule.
    pub(super) fn remove(&mut self, at: usize) -> E {
        self.0.remove(at)
    }

    /// Remembers a schedule; its number.
    pub(super) fn push(&mut self, entry: E) -> usize {
        self.0.push(entry);
        self.0.len() - 1
    }

    /// All of them.
    #[cfg(feature = "cuda")]
    pub(super) fn iter(&self) -> impl Iterator<Item = &E> {
        self.0.iter()
    }
}

impl<E> core::ops::Index<usize> for Remembered<E> {
    type Output = E;

    fn index(&self, at: usize) -> &E {
        &self.0[at]
    }
}

impl<E> core::ops::IndexMut<usize> for Remembered<E> {
    fn index_mut(&mut self, at: usize) -> &mut E {
        &mut self.0[at]
    }
}
