// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts a device's record of a peer that runs another plan into the error that a rank on the CPU would return.

use std::{
    sync::{Mutex, PoisonError},
    vec::Vec,
};

use crate::{
    error::{Error, Result},
    kernel::cuda::{Cuda, tags},
    plan::Plan,
    runtime::failure::Found,
    schedule::Purpose,
};

/// The kinds of runs that a rank may have begun, and the device's records of peers that ran another plan.
pub(crate) struct Disagreements {
    pub(super) device: tags::NoteMemory,
    kinds: Mutex<Vec<StartedRun>>,
}

/// A kind of run that the rank may have begun.
struct StartedRun {
    rank: usize,
    fingerprint: u64,
    plan: Plan,
    run: Purpose,
    /// The sender of each tag, from tag 1 on.
    senders: Vec<usize>,
}

impl Disagreements {
    pub(super) fn new(cuda: &Cuda) -> Result<Self> {
        Ok(Self { device: tags::NoteMemory::new(cuda)?, kinds: Mutex::default() })
    }

    /// Records the meaning of the tags of a kind of run. (If the rank forgets the run and prepares it again, the
    /// meaning is the same.)
    pub(super) fn add(&self, rank: usize, plan: &Plan, run: Purpose, senders: &[usize]) {
        let fingerprint = run.fingerprint(plan);
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        if !kinds.iter().any(|k| k.fingerprint == fingerprint) {
            kinds.push(StartedRun { rank, fingerprint, plan: plan.clone(), run, senders: senders.to_vec() });
        }
    }

    /// Forgets a kind of run. All runs of this kind are over.
    pub(super) fn remove(&self, fingerprint: u64) {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner).retain(|k| k.fingerprint != fingerprint);
    }
}

impl Found for Disagreements {
    fn found(&self) -> Option<(Error, bool)> {
        let noted = self.device.read()?;
        let kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = kinds.iter().find(|k| k.fingerprint == noted.ours)?;
        let error = Error::Disagreement {
            rank: kind.rank,
            peer: *kind.senders.get(noted.tag.checked_sub(1)?)?,
            ours: noted.ours,
            theirs: noted.theirs,
            what: kind.run.describe(&kind.plan),
            runs: Some([noted.our_run, noted.their_run]),
        };
        Some((error, noted.is_tag))
    }
}
