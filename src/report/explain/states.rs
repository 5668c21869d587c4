// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a scan costs: segments, exchanges, bytes and workspace of a rank; and in words, what the busiest rank does.
//!
//! Bytes are counted from the schedules that ranks execute, so this takes as long as planning the scan on all ranks.

use alloc::{format, string::String};

use super::figures::grouped;
use crate::{
    batch::Side,
    error::Result,
    plan::Plan,
    report::size::OpSizes,
    schedule::{Scan, ScanForm, Schedule},
};

/// What one rank of a scan does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScanCosts {
    /// Its segments.
    pub segments: usize,
    /// Exchanges.
    pub exchanges: usize,
    /// Bytes sent.
    pub bytes_out: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes of its workspace.
    pub workspace: u64,
}

impl Scan {
    /// What a rank of a plan sends, receives and holds in a scan.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, schedule::{Decay, Scan, ScanForm}};
    ///
    /// let problem = Problem::new(Batch::from_lengths(&[1 << 20])?, 32, 32, 128, Dtype::Bf16);
    /// let plan = Plan::new(&problem, Mesh::ring(8)?, Layout::Contiguous)?;
    /// let scan = Scan { form: ScanForm::Chain, ..Scan::new(Decay::Diagonal, 32, 1, 128 * 128) };
    /// let costs = scan.costs(&plan, 3)?;
    /// // One state of 2 MiB arrives, and one leaves, however long the document is.
    /// assert_eq!((costs.segments, costs.exchanges, costs.bytes_in, costs.bytes_out), (1, 2, 2 << 20, 2 << 20));
    /// assert!(scan.explain(&plan)?.contains("2,097,152 bytes sent"));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Schedule::scan`].
    pub fn costs(&self, plan: &Plan, rank: usize) -> Result<ScanCosts> {
        let schedule = Schedule::scan(plan, rank, *self)?;
        let segments = plan.local_tokens(Side::Q, rank).segments().len();
        let mut costs = ScanCosts { segments, workspace: schedule.workspace_bytes(), ..ScanCosts::default() };
        let mut sizes = OpSizes::new(plan, &schedule);
        for op in 0..schedule.ops.len() {
            let mut any = false;
            for m in sizes.messages(op) {
                any = true;
                *(if m.send { &mut costs.bytes_out } else { &mut costs.bytes_in }) += m.bytes;
            }
            costs.exchanges += usize::from(any);
        }
        Ok(costs)
    }

    /// The scan in words: its states, the form that it takes, and what the busiest rank does. [`Plan::simulate`]
    /// predicts its time on a machine.
    ///
    /// # Errors
    /// As [`Schedule::scan`].
    pub fn explain(&self, plan: &Plan) -> Result<String> {
        let words = |n: u64| format!("{} bytes", grouped(n.into()));
        let mut most = ScanCosts::default();
        let mut segments = 0;
        for rank in plan.mesh().group_of(0) {
            let c = self.costs(plan, rank)?;
            segments += c.segments;
            most.segments = most.segments.max(c.segments);
            most.exchanges = most.exchanges.max(c.exchanges);
            most.bytes_out = most.bytes_out.max(c.bytes_out);
            most.bytes_in = most.bytes_in.max(c.bytes_in);
            most.workspace = most.workspace.max(c.workspace);
        }
        let [state, decay] = [self.state_dim(), self.decay_dim()]
            .map(|dim| words(dim * u64::from(self.heads) * self.dtype.size() as u64));
        let form = match self.form {
            ScanForm::Auto => "for each document the form with the least predicted time".into(),
            form => format!("form {form:?}"),
        };
        Ok(format!(
            "scan of {segments} segments of {} documents over {} ranks, at most {} of a rank\n\
             states of {state}, decays of {decay} ({:?}), {form}\n\
             at most {} exchanges of a rank, {} sent, {} received, {} of workspace",
            plan.problem().batch().documents(),
            plan.mesh().group(),
            most.segments,
            self.decay,
            most.exchanges,
            words(most.bytes_out),
            words(most.bytes_in),
            words(most.workspace),
        ))
    }
}
