// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts a device's record of a peer that runs another plan into the error that a rank on the CPU would return.

use std::{
    collections::VecDeque,
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
    /// The last runs with dropout.
    seeded: Mutex<VecDeque<Seeded>>,
}

/// A run with dropout: what its ranks compare, which is made of the fingerprint of its kind and of the seed.
#[derive(Clone, Copy)]
struct Seeded {
    compared: u64,
    fingerprint: u64,
    seed: u64,
}

/// Runs with dropout that are remembered. A host is seldom as many runs ahead of its device.
const SEEDED: usize = 256;

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
        let seeded = Mutex::new(VecDeque::with_capacity(SEEDED));
        Ok(Self { device: tags::NoteMemory::new(cuda)?, kinds: Mutex::default(), seeded })
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

    /// Records a run with dropout that begins. It allocates nothing.
    pub(super) fn begin(&self, fingerprint: u64, compared: u64, seed: u64) {
        let mut seeded = self.seeded.lock().unwrap_or_else(PoisonError::into_inner);
        if seeded.len() == SEEDED {
            seeded.pop_front();
        }
        seeded.push_back(Seeded { compared, fingerprint, seed });
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
        let seeded = self.seeded.lock().unwrap_or_else(PoisonError::into_inner);
        let seeded = seeded.iter().rev().find(|run| run.compared == noted.ours);
        let fingerprint = seeded.map_or(noted.ours, |run| run.fingerprint);
        let kind = kinds.iter().find(|k| k.fingerprint == fingerprint)?;
        let error = Error::Disagreement {
            rank: kind.rank,
            peer: *kind.senders.get(noted.tag.checked_sub(1)?)?,
            ours: noted.ours,
            theirs: noted.theirs,
            what: kind.run.describe_with(&kind.plan, seeded.map(|run| run.seed), None),
            runs: Some([noted.our_run, noted.their_run]),
        };
        Some((error, noted.is_tag))
    }
}
