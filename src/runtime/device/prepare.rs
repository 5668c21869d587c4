// SPDX-License-Identifier: MIT OR Apache-2.0
//! The preparation of a plan on a device, before its first run: plans that a device cannot run are refused, kernels are
//! loaded, and the sequence of the schedule is recorded.

use std::sync::Arc;

use super::{DeviceRank, OnDevice, sequence::Sequence};
use crate::{
    element::Dtype,
    error::{Error, Result},
    kernel::cuda::tags::RunCount,
    plan::Plan,
    runtime::{backend::Backend, found_rows, ops::Listing, prepared::Prepared},
    schedule::{
        Purpose,
        run_trait::{RunTrait, refuse_clashes},
    },
};

impl DeviceRank {
    /// Whether a run of a plan needs no preparation and no larger workspace.
    pub(super) fn is_ready(&self, plan: &Plan, run: Purpose) -> bool {
        let found = self.prepared.find(plan, run, false);
        found.is_some_and(|at| !self.workspace.is_short(self.prepared[at].prepared.schedule.workspace))
    }

    /// Refuses plans that a device cannot run, before any run of them begins.
    pub(super) fn check_supported(&self, plan: &Plan, run: Purpose) -> Result<()> {
        plan.fits_world(self.transport.world())?;
        refuse_clashes(plan, run, &[Some(RunTrait::Device)])?;
        let p = plan.problem();
        let (what, dtype) = match run {
            Purpose::Attention(_) => return self.check_attention(plan),
            Purpose::AllToAll(a) => ("an all-to-all", a.dtype),
            Purpose::Combine(_) => ("a combine", p.dtype()),
            // Refused above.
            Purpose::Scan(scan) => ("a scan", scan.dtype),
        };
        if dtype == Dtype::F64 {
            let (found, limit) =
                (format!("{what} of f64 on a device"), "the CUDA kernels move and sum f16, bf16 and f32");
            return Err(Error::unsupported(found, limit, "convert, or use a rank on the CPU"));
        }
        if matches!(run, Purpose::Combine(_)) && !p.value_dim().is_multiple_of(8) {
            let found = format!("{what} of value_dim {} on a device", p.value_dim());
            return Err(Error::unsupported(found, "multiples of 8", "pad o with zeros, or use a rank on the CPU"));
        }
        Ok(())
    }

    fn check_attention(&self, plan: &Plan) -> Result<()> {
        let p = plan.problem();
        self.gpu().accept_score(&p.score())?;
        self.gpu().is_prepared(p.dtype(), p.head_dim() as u32, p.value_dim() as u32).map(|_| ())
    }

    /// The entry of a plan; `over_pages` for a forward over k and v in pages.
    pub(super) fn find_or_prepare(&mut self, plan: &Plan, run: Purpose, over_pages: bool) -> Result<usize> {
        if let Some(i) = self.prepared.reuse(plan, run, over_pages) {
            return Ok(i);
        }
        self.check_supported(plan, run)?;
        let p = plan.problem();
        let cuda = Arc::clone(self.transport.device());
        match run {
            // The kernels with dropout, and those over pages, are loaded when their launches are recorded.
            Purpose::Attention(_) if p.dropout().is_some() || over_pages => cuda.prepare_blocks()?,
            Purpose::Attention(_) => cuda.prepare(p.dtype(), p.head_dim() as u32, p.value_dim() as u32)?,
            Purpose::AllToAll(_) | Purpose::Combine(_) | Purpose::Scan(_) => cuda.prepare_blocks()?,
        }
        let mut prepared = Prepared::new(plan, self.transport.rank(), run)?;
        prepared.over_pages = over_pages;
        if over_pages {
            found_rows::check_supported(&prepared.schedule)?;
        }
        self.agreements.reserve(&prepared.schedule.group);
        let group = &prepared.schedule.group;
        if group.len() > 1 && !self.counts.iter().any(|(of, _)| of == group) {
            self.counts.push((group.clone(), RunCount::new(&cuda)?));
        }
        let count = self.counts.iter().find(|(of, _)| of == group).map(|(_, count)| count);
        let sequence = Sequence::record(&cuda, &mut prepared, count, &self.marks.disagreements)?;
        // The sequence replaces the lists.
        (prepared.compute, prepared.communication) = (Listing::default(), Listing::default());
        if let Some(oldest) = self.prepared.least_recent() {
            // Its runs may have recorded disagreements: they are read first.
            self.synchronize()?;
            let gone = self.prepared.remove(oldest).prepared.fingerprint();
            // With and without pages a plan has one fingerprint.
            if !self.prepared.iter().any(|left| left.prepared.fingerprint() == gone) {
                self.marks.disagreements.remove(gone);
            }
        }
        Ok(self.prepared.push(OnDevice { prepared, sequence, captured: false }))
    }
}
