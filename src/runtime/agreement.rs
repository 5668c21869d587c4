// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that the ranks of a group run the same plan: an all-gather in the first run of a plan in a direction, and
//! none later.
//!
//! Before a plan is run in a direction for the first time, the ranks of its group compare fingerprints through
//! [`Transport::agree`]. Each then remembers the fingerprint. Later runs make no all-gather; they send the check with
//! their messages ([`tags`](super::tags)).
//!
//! All ranks of a group must remember the same fingerprints, or one of them would wait in an all-gather that no other
//! rank enters. So the list depends only on the runs of that group, which all of its ranks make in the same order: a
//! fingerprint is added when its all-gather succeeds, and the oldest of [`REMEMBERED`] is removed. What a rank
//! prepares, or forgets to make room for other schedules, does not change the list. Each group has its own list and its
//! own count of runs, because replicas may run different numbers of batches between two runs of the whole world. (A
//! rank on a device counts on the device: a replayed graph begins runs that the host does not see.)
//!
//! A kernel of the caller's may refuse a plan. It refuses by the plan and by what it honours alone, so ranks compare
//! their kernels before the first run of attention of a group: then all of them refuse, or none, and nobody waits.
//!
//! A rank whose library has no kernels refuses attention after the agreement. It compares a number of its own, so that
//! ranks with kernels get a disagreement instead of waiting for it.

use std::{collections::VecDeque, format, ops::Range, string::String, vec::Vec};

use super::{
    failure::{FirstFailure, described, watched},
    prepared::Prepared,
};
use crate::{
    error::{Error, Result},
    kernel::varlen::KernelCalls,
    plan::Plan,
    schedule::Purpose,
    transport::Transport,
};

/// How many fingerprints a group remembers.
const REMEMBERED: usize = 64;

/// What ranks without kernels agree on before attention.
const PLANNER_ALONE: u64 = u64::from_be_bytes(*b"planner\0");

/// By group of ranks: the fingerprints that were agreed on, and the number of runs.
#[derive(Debug, Default)]
pub(super) struct Agreements {
    /// Whether this rank's library has no attention.
    planner_alone: bool,
    groups: Vec<GroupRuns>,
    /// The groups whose ranks have the same kernel of the caller's.
    kernels: Vec<Range<usize>>,
}

#[derive(Debug)]
struct GroupRuns {
    ranks: Range<usize>,
    runs: u64,
    agreed: VecDeque<u64>,
}

impl Agreements {
    /// Those of a rank whose library has no attention.
    pub(super) fn of_planner_alone() -> Self {
        Self { planner_alone: true, ..Self::default() }
    }

    /// Makes room for a group, so that its runs allocate nothing. A world has few groups: their sizes divide its size.
    pub(super) fn reserve(&mut self, ranks: &Range<usize>) {
        if !self.groups.iter().any(|g| g.ranks == *ranks) {
            let agreed = VecDeque::with_capacity(REMEMBERED);
            self.groups.push(GroupRuns { ranks: ranks.clone(), runs: 0, agreed });
        }
    }

    /// What this rank compares before a run in the place of `number`.
    fn compared(&self, run: Purpose, number: u64) -> u64 {
        match run {
            Purpose::Attention(_) if self.planner_alone => PLANNER_ALONE,
            _ => number,
        }
    }

    /// What is added to the run in words, where a library without kernels is what ranks disagree on.
    fn library<T>(agreed: &Result<T>) -> String {
        match agreed {
            Err(Error::Disagreement { ours: PLANNER_ALONE, .. }) => ", by a library without kernels".into(),
            Err(Error::Disagreement { peer, theirs: PLANNER_ALONE, .. }) => {
                format!(", but the library of rank {peer} has no kernels")
            }
            _ => String::new(),
        }
    }

    /// Compares the kernel of the caller's, once for a group and before anything may refuse the run.
    ///
    /// # Errors
    /// As [`Agreements::begin_run`].
    pub(super) fn on_kernel(
        &mut self,
        kernel: &KernelCalls,
        ranks: Range<usize>,
        (plan, run): (&Plan, Purpose),
        transport: &dyn Transport,
        failure: &FirstFailure,
    ) -> Result<()> {
        if ranks.len() == 1 || self.kernels.contains(&ranks) {
            return Ok(());
        }
        let name = run.name(plan);
        let compared = self.compared(run, kernel.fingerprint());
        watched(transport, failure, || {
            transport.announce(Some(name));
            let agreed = transport.agree(ranks.clone(), compared);
            transport.announce(None);
            let library = Self::library(&agreed);
            described(transport, agreed.map_err(|error| error.of_run(name)), || {
                run.describe_with(plan, None, None) + ", " + &kernel.description() + &library
            })
        })??;
        self.kernels.push(ranks);
        Ok(())
    }

    /// Begins a run of a prepared schedule on a rank that has not failed. Returns what ranks compare and the run's
    /// number, or `None` if the rank runs it alone.
    ///
    /// # Errors
    /// [`Error::Disagreement`], with the runs in words; the ranks may plan again after it, unless the transport has
    /// failed. Any other error is kept in `failure`, and the peers are notified.
    pub(super) fn begin_run(
        &mut self,
        prepared: &Prepared,
        transport: &dyn Transport,
        failure: &FirstFailure,
    ) -> Result<Option<(u64, u64)>> {
        if prepared.schedule.group.len() == 1 {
            return Ok(None);
        }
        let fingerprint = prepared.fingerprint();
        let compared = self.compared(prepared.run, prepared.compared());
        let name = || prepared.run.name(&prepared.plan);
        watched(transport, failure, || {
            transport.announce(Some(name()));
            let begun = self.begin(transport, &prepared.schedule.group, fingerprint, compared);
            transport.announce(None);
            let library = Self::library(&begun);
            let begun = begun.map(|run| Some((compared, run))).map_err(|error| error.of_run(name()));
            described(transport, begun, || prepared.describe() + &library)
        })?
    }

    /// Begins a run, with an agreement on `compared` if it is the first with its fingerprint. Returns the number of the
    /// run in the group, from 1.
    ///
    /// # Errors
    /// Those of [`Transport::agree`]; the run then does not count.
    fn begin(
        &mut self,
        transport: &dyn Transport,
        ranks: &Range<usize>,
        fingerprint: u64,
        compared: u64,
    ) -> Result<u64> {
        self.reserve(ranks);
        let group = self.groups.iter_mut().find(|g| g.ranks == *ranks).expect("reserved above");
        if !group.agreed.contains(&fingerprint) {
            transport.agree(ranks.clone(), compared)?;
            if group.agreed.len() == REMEMBERED {
                group.agreed.pop_front();
            }
            group.agreed.push_back(fingerprint);
        }
        group.runs += 1;
        Ok(group.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Cause;
    use crate::transport::{Label, Message};
    use std::sync::Mutex;

    /// Records the numbers that were agreed on; refuses odd ones.
    struct AgreementLog(Mutex<Vec<u64>>);

    impl Transport for AgreementLog {
        fn rank(&self) -> usize {
            0
        }
        fn world(&self) -> usize {
            4
        }
        fn agree(&self, _: Range<usize>, number: u64) -> Result<()> {
            self.0.lock().unwrap().push(number);
            if number % 2 == 1 { Err(Error::disagreement(0, 1, number, 0)) } else { Ok(()) }
        }
        unsafe fn exchange(&self, _: Label, _: &[Message], _: &[Message]) -> Result<()> {
            Ok(())
        }
        fn poll(&self) -> Result<()> {
            Ok(())
        }
        fn abort(&self, _: Cause) {}
    }

    #[test]
    fn the_first_run_agrees_and_the_oldest_is_forgotten() {
        let (asked, mut a) = (AgreementLog(Mutex::default()), Agreements::default());
        let begin = |a: &mut Agreements, ranks: &Range<usize>, number| a.begin(&asked, ranks, number, number);
        let taken = || std::mem::take(&mut *asked.0.lock().unwrap());
        for run in 1..=3 {
            assert_eq!(begin(&mut a, &(0..4), 2), Ok(run));
        }
        assert_eq!(taken(), [2]);
        // A smaller group agrees and counts for itself.
        assert_eq!(begin(&mut a, &(0..2), 2), Ok(1));
        assert_eq!(taken(), [2]);
        // A refused fingerprint is not remembered, and does not count as a run.
        assert!(begin(&mut a, &(0..4), 3).is_err() && begin(&mut a, &(0..4), 3).is_err());
        assert_eq!(taken(), [3, 3]);
        // A later run of a known fingerprint does not renew it; the oldest is removed.
        for other in 2..=REMEMBERED as u64 {
            assert!(begin(&mut a, &(0..4), 2 * other).is_ok() && begin(&mut a, &(0..4), 2).is_ok());
        }
        assert_eq!(taken().len(), REMEMBERED - 1);
        assert!(begin(&mut a, &(0..4), 1000).is_ok() && begin(&mut a, &(0..4), 2).is_ok());
        assert_eq!(taken(), [1000, 2]);
    }
}
