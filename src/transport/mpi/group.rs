// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a group on one rank: whether it has failed, which rank made it fail, and how long this rank waits for
//! others.
//!
//! The first failure counts: the rank that finds it notifies every rank (`notices.rs`), and from then on all calls
//! return it, each rank from its own side ([`GroupFailure::error`]).

use std::{
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    environment,
    notices::{Notice, Notices, WaitsFor},
    raw::Refused,
    wait::DeadlineState,
};
use crate::{
    error::{Cause, Error},
    transport::{Label, fault::GroupFailure},
};

/// The state of one group on this rank: its first failure, its deadline, and notices of other ranks.
pub(super) struct MpiGroup {
    pub rank: usize,
    pub world: usize,
    pub notices: Notices,
    deadline: AtomicU64,
    /// The call that this rank is in or was in last, and what the ranks compare in it.
    label: Mutex<(Label, Option<u64>)>,
    failure: OnceLock<GroupFailure>,
    questions: AtomicU64,
}

impl MpiGroup {
    pub(super) fn new(rank: usize, world: usize, notices: Notices) -> Self {
        Self {
            rank,
            world,
            notices,
            deadline: AtomicU64::new(0),
            label: Mutex::new((Label::new("start", 0), None)),
            failure: OnceLock::new(),
            questions: AtomicU64::new(0),
        }
    }

    pub(super) fn set_deadline(&self, deadline: Duration) {
        self.deadline.store(deadline.as_nanos().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The call that this rank is in, or was in last.
    pub(super) fn label(&self) -> Label {
        self.label.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// What the ranks compare in that call, if anything.
    pub(super) fn number(&self) -> Option<u64> {
        self.label.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    pub(super) fn set_label(&self, label: Label, number: Option<u64>) {
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = (label, number);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// The failure as this rank reports it.
    pub(super) fn error(&self, label: Label, failure: GroupFailure) -> Error {
        failure.error(self.rank, label, self.number())
    }

    /// Records a failure unless there is an earlier one, and notifies all ranks; the first failure.
    pub(super) fn fail(&self, failure: GroupFailure) -> GroupFailure {
        if self.failure.set(failure).is_ok() && environment::usable().is_ok() {
            for peer in (0..self.world).filter(|&peer| peer != self.rank) {
                self.notices.send(peer, Notice::Over(failure));
            }
        }
        self.failure.get().copied().unwrap_or(failure)
    }

    /// The same for a failure of which one rank alone is the cause.
    pub(super) fn fail_by(&self, peer: usize, cause: Cause) -> GroupFailure {
        self.fail(GroupFailure::of(peer, cause))
    }

    pub(super) fn fail_mpi(&self, peer: usize, Refused { call, code }: Refused) -> GroupFailure {
        self.fail_by(peer, Cause::Returned { function: call, code })
    }

    /// The first failure, found here or reported by another rank.
    pub(super) fn check(&self) -> Option<GroupFailure> {
        match self.notices.listen() {
            // The rank that failed has notified all others.
            Ok(Some(failure)) => {
                let _ = self.failure.set(failure);
            }
            Ok(None) => {}
            Err(refused) => {
                self.fail_mpi(self.rank, refused);
            }
        }
        self.failure.get().copied()
    }

    /// The deadline of a call that begins now.
    pub(super) fn deadline_state(&self) -> DeadlineState {
        DeadlineState::new(Duration::from_nanos(self.deadline.load(Ordering::Relaxed)))
    }

    /// One step of a call whose messages did not move: receives notices, searches, sleeps a little. `waiting` counts
    /// the bytes that have not moved. After a failure the caller checks its messages once more: if they are complete
    /// the call succeeds, and the next call reports the failure.
    pub(super) fn pause(
        &self,
        state: &mut DeadlineState,
        wait: WaitsFor,
        waiting: impl FnOnce() -> u64,
    ) -> Result<(), GroupFailure> {
        // Before questions are answered, so that the answer leaves out the time in which the process was stopped.
        state.runs();
        self.notices.wait_for(wait, state.since());
        if let Some(failure) = self.check() {
            return Err(failure);
        }
        // Its last messages may still be on their way.
        if self.notices.has_left(wait.on) && state.is_left_behind() {
            return Err(self.fail_by(wait.on, Cause::Left));
        }
        let Some((at_fault, ms)) = state.expired(self.rank, wait, &self.notices, &self.questions) else {
            state.sleep();
            return Ok(());
        };
        Err(self.fail(GroupFailure::of_deadline(self.rank, at_fault, ms, waiting())))
    }
}
