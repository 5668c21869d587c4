// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan as a value: its parts, equality, and the fingerprint by which ranks detect different plans.

use alloc::sync::Arc;

use super::{
    fingerprint::Fingerprint,
    form::{CirculatingSide, Form},
    nodes::NodeRanks,
    options::Options,
    problem::Problem,
};
use crate::{
    layout::{Layout, Shares},
    mesh::Mesh,
};

/// The computation of all ranks, and its distribution over them.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) problem: Problem,
    pub(super) mesh: Mesh,
    pub(super) options: Options,
    pub(super) node_ranks: NodeRanks,
    pub(super) form: Form,
    /// The side that circulates in the forward.
    pub(super) forward: CirculatingSide,
    pub(super) shares: Shares,
    pub(super) fingerprint: u64,
    /// The reason of the choice, if a machine's description decided. Not part of the plan's identity.
    pub(super) reason: Option<Arc<str>>,
}

impl Inner {
    /// The number that ranks compare. The same plan may have other schedules in another version of this library, so the
    /// version is part of the number.
    fn fingerprint(&self, version: &str) -> u64 {
        let mut h = Fingerprint::of_version(version);
        self.problem.hash_into(&mut h);
        // Each replica runs its own batches, so the ranks of a group do not compare the number of replicas.
        h.word(self.mesh.ring as u64);
        h.word(self.mesh.ulysses as u64);
        match self.shares.layout() {
            Layout::Contiguous => h.word(0),
            Layout::Zigzag => h.word(1),
            Layout::ZigzagPack => h.word(2),
            Layout::Striped { stripe } => h.word(3 | u64::from(stripe) << 8),
            Layout::Balanced { chunks } => h.word(4 | u64::from(chunks) << 8),
        }
        // The chunks of each rank in a balanced layout: another plan's mask may have decided them.
        self.shares
            .deal()
            .unwrap_or(&[])
            .chunks(2)
            .for_each(|c| h.word(c.iter().fold(0, |w, &c| w << 32 | u64::from(c))));
        let options = &self.options;
        h.word(options.gather as u64 | u64::from(options.reproducible) << 4 | (options.wire as u64) << 5);
        h.word(self.form as u64 | (self.forward as u64) << 4);
        let sides = (options.circulate as u64) << 32 | (options.circulate_forward as u64) << 34;
        h.word(options.passes as u64 | sides | (options.key_rows as u64) << 36);
        let NodeRanks { ring, ulysses, ring_holders } = self.node_ranks;
        [ring, ulysses, ring_holders].into_iter().for_each(|ranks| h.word(ranks as u64));
        h.finish()
    }
}

impl From<Inner> for Plan {
    fn from(mut inner: Inner) -> Self {
        inner.fingerprint = inner.fingerprint(env!("CARGO_PKG_VERSION"));
        Self { inner: Arc::new(inner) }
    }
}

impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.inner, &*other.inner);
        Arc::ptr_eq(&self.inner, &other.inner)
            || (a.fingerprint == b.fingerprint
                && a.problem == b.problem
                && a.mesh == b.mesh
                && a.shares.layout() == b.shares.layout()
                && a.shares.deal() == b.shares.deal()
                && a.options == b.options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype};

    #[test]
    fn another_version_of_the_library_runs_another_plan() {
        let problem = Problem::new(Batch::from_lengths(&[64]).unwrap(), 4, 2, 16, Dtype::F32);
        let plan = Plan::new(&problem, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
        let of = |version| plan.inner.fingerprint(version);
        assert_eq!(plan.fingerprint(), of(env!("CARGO_PKG_VERSION")));
        assert!(of("0.1.0") != of("0.1.1") && of("0.11.0") != of("1.1.0"));
    }
}
