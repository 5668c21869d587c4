// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank whose tensors are in host memory: two lanes, the CPU kernels, a workspace.
//!
//! The calling thread is the compute lane, a thread of the rank's own the communication lane ([`lanes`](super::lanes)). A
//! run returns when it is over.

use std::{sync::Arc, time::Instant, vec::Vec};

use super::{
    agreement::Agreements,
    bind::{self, Bindings},
    failure::{Failure, Watch},
    handle::AbortHandle,
    host,
    job::Job,
    lanes::Lanes,
    ops::Memory,
    prepared::Prepared,
    walk,
    workspace::Workspace,
};
use crate::{
    error::{Cause, Result},
    kernel::cpu,
    plan::Plan,
    report::trace,
    transport::Transport,
};

/// How many schedules a rank remembers.
const REMEMBERED: usize = 16;

/// See the module, and [`Rank`](super::Rank) for what each function means.
pub(super) struct HostRank {
    transport: Arc<dyn Transport>,
    lanes: Lanes,
    prepared: Vec<Prepared>,
    scratch: cpu::Scratch,
    workspace: Workspace,
    agreements: Agreements,
    failure: Failure,
}

impl HostRank {
    pub(super) fn new(transport: impl Transport + 'static, scratch: cpu::Scratch) -> Self {
        let transport: Arc<dyn Transport> = Arc::new(transport);
        Self {
            lanes: Lanes::new(Arc::clone(&transport)),
            transport,
            prepared: Vec::with_capacity(REMEMBERED),
            scratch,
            workspace: Workspace::default(),
            agreements: Agreements::default(),
            failure: Failure::default(),
        }
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    pub(super) fn poll(&self) -> Result<()> {
        self.failure.poll(&*self.transport)
    }

    pub(super) fn handle(&self) -> AbortHandle {
        AbortHandle::new(&self.transport, &self.failure)
    }

    pub(super) fn record(&mut self, epoch: Instant, capacity: usize) {
        self.lanes.record(epoch, capacity);
    }

    pub(super) fn events(&mut self) -> Vec<trace::Event> {
        self.lanes.events()
    }

    pub(super) fn workspace_bytes(&mut self, plan: &Plan, job: Job) -> Result<u64> {
        self.ready(plan, job).map(|i| self.prepared[i].schedule.workspace)
    }

    /// # Safety
    /// As [`Rank::lend_workspace`](super::Rank::lend_workspace).
    pub(super) unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        self.workspace = Workspace::lent(ptr, bytes)?;
        Ok(())
    }

    pub(super) fn take_workspace_back(&mut self) {
        self.workspace = Workspace::default();
    }

    pub(super) fn prepare(&mut self, plan: &Plan, job: Job) -> Result<()> {
        let at = self.ready(plan, job)?;
        let schedule = &self.prepared[at].schedule;
        self.workspace.reserve(schedule.workspace)?;
        if walk::communicates(schedule) {
            self.lanes.ensure_thread()?;
        }
        Ok(())
    }

    /// Finds what a job takes, or makes it; its index in `prepared`.
    fn ready(&mut self, plan: &Plan, job: Job) -> Result<usize> {
        if let Some(i) = self.prepared.iter().position(|p| p.is(plan, job)) {
            return Ok(i);
        }
        plan.fits_world(self.transport.world())?;
        let prepared = Prepared::new(plan, self.transport.rank(), job)?.tagged();
        self.agreements.reserve(&prepared.schedule.group);
        self.scratch.reserve(&host::dims(plan));
        if self.prepared.len() == REMEMBERED {
            self.prepared.remove(0);
        }
        self.prepared.push(prepared);
        Ok(self.prepared.len() - 1)
    }

    /// # Safety
    /// As [`Rank::run`](super::Rank::run).
    pub(super) unsafe fn run(&mut self, plan: &Plan, job: Job, tensors: &Bindings) -> Result<()> {
        let at = self.ready(plan, job)?;
        tensors.check(&self.prepared[at].expected)?;
        self.apart(at, tensors)?;
        // SAFETY: the tensors are valid and nobody else's during the call (promised), and fit the plan (checked).
        unsafe { self.run_prepared(at, tensors) }
    }

    /// Refuses tensors that lie in the part of a lent workspace that a run uses.
    fn apart(&mut self, at: usize, tensors: &Bindings) -> Result<()> {
        let Some(ptr) = self.workspace.lent_at() else { return Ok(()) };
        let Prepared { schedule, expected, .. } = &self.prepared[at];
        self.workspace.reserve(schedule.workspace)?;
        bind::apart_from(ptr, schedule.workspace, expected.used(tensors).map(|(_, name, raw)| (name, *raw)))
    }

    /// # Safety
    /// As [`HostRank::run`], and the tensors were checked.
    unsafe fn run_prepared(&mut self, at: usize, tensors: &Bindings) -> Result<()> {
        let prepared = &mut self.prepared[at];
        self.workspace.reserve(prepared.schedule.workspace)?;
        self.failure.check(&*self.transport)?;
        if let Some((fingerprint, run)) = self.agreements.begin_run(prepared, &*self.transport, &self.failure)? {
            prepared.communication.tags.begin(fingerprint, run);
        }
        let watch = Watch { transport: &*self.transport, failure: &self.failure };
        let memory = Memory { tensors: *tensors, workspace: self.workspace.ptr() };
        // SAFETY: the caller's tensors fit the plan and are valid (promised); the workspace is large enough.
        let outcome = unsafe { walk::run(&mut self.lanes, &*self.transport, prepared, &memory, &mut self.scratch) };
        watch.over();
        outcome.inspect_err(|error| self.failure.keep(error))
    }

    /// Runs what the caller does between two all-to-alls. The other ranks are about to wait for what this one makes of it,
    /// and nobody else tells them when it fails or panics: whoever catches the panic may keep the rank.
    pub(super) fn watched(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        let watch = Watch { transport: &*self.transport, failure: &self.failure };
        let outcome = body();
        watch.over();
        outcome.inspect_err(|error| {
            self.failure.keep(error);
            self.transport.abort(Cause::Failed);
        })
    }
}
