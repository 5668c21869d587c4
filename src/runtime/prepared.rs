// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan as a rank remembers it: the schedule, proved, with all that running it takes.

use super::{bind::Expected, job::Job, ops::Room, proof, tags::Tags};
use crate::{
    error::Result,
    plan::Plan,
    schedule::{Schedule, expand::Expansion},
};

/// A schedule with the room that running it takes.
pub(super) struct Prepared {
    pub plan: Plan,
    pub job: Job,
    pub schedule: Schedule,
    pub expected: Expected,
    pub compute: Room,
    pub communication: Room,
}

impl Prepared {
    pub(super) fn new(plan: &Plan, rank: usize, job: Job) -> Result<Self> {
        let schedule = job.schedule(plan, rank)?;
        proof::check(plan, job, &schedule, &mut Expansion::new(&schedule))?;
        Ok(Self {
            plan: plan.clone(),
            job,
            expected: Expected::new(plan, job, &schedule),
            compute: Room::new(&schedule),
            communication: Room::new(&schedule),
            schedule,
        })
    }

    /// The same with runs that carry their check along.
    pub(super) fn tagged(mut self) -> Self {
        let Self { plan, job, schedule, communication, .. } = &mut self;
        communication.tag(|expansion| Tags::new(plan, *job, schedule, expansion));
        self
    }

    /// What the ranks of a group compare.
    pub(super) fn fingerprint(&self) -> u64 {
        self.job.fingerprint(&self.plan)
    }

    pub(super) fn is(&self, plan: &Plan, job: Job) -> bool {
        self.job == job && self.plan == *plan
    }
}
