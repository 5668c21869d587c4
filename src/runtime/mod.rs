// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs schedules.
//!
//! A [`Rank`] lives long and runs many plans, one after another. It owns a transport, a thread for its communication
//! lane, the workspace, and the schedules of the plans it has seen. Running a plan walks its list: the calling thread is
//! the compute lane, the rank's own thread the communication lane, and each operation waits for at most one of the
//! other lane. There is no barrier between steps and nothing is allocated once a plan is prepared.
//!
//! - [`front`]: the typed calls most users want, [`Rank::forward`] and [`Rank::backward`];
//! - [`bind`]: the caller's tensors, checked before anything is touched;
//! - [`lanes`]: the two lanes and how they wait for each other; [`ops`]: one operation, wherever it runs; [`host`]: the
//!   CPU; [`any`]: a rank on the CPU or on a device.

use std::{
    sync::{Arc, Weak},
    vec::Vec,
};

use crate::{
    call::RawTensor,
    error::{Cause, Error, Result},
    kernel::cpu,
    plan::Plan,
    report::trace,
    schedule::Direction,
    transport::Transport,
};

mod agreement;
mod all_to_all;
mod any;
mod bind;
#[cfg(feature = "cuda")]
mod device;
mod failure;
mod front;
mod host;
mod lanes;
mod ops;
mod proof;
mod tags;
mod workspace;

pub use any::AnyRank;
pub use bind::Bindings;
#[cfg(feature = "cuda")]
pub use device::DeviceRank;
#[cfg(all(feature = "cuda", feature = "capi"))]
pub(crate) use device::Marks;
pub use front::{Backward, Forward};

use agreement::Agreements;
use failure::{Failure, Watch};
use lanes::Lanes;
use ops::{Job, Memory, Prepared};
use workspace::Workspace;

/// How many schedules a rank remembers.
const REMEMBERED: usize = 16;

/// One rank: runs the plans that all ranks of its group run.
///
/// Dropping it means that the rank leaves; peers that still need it get an error. A rank is used by one thread at a
/// time; its [`AbortHandle`] is for others.
pub struct Rank {
    transport: Arc<dyn Transport>,
    lanes: Lanes,
    prepared: Vec<Prepared>,
    scratch: cpu::Scratch,
    workspace: Workspace,
    agreements: Agreements,
    failure: Failure,
}

/// Ends a run from another thread. It does not keep its rank alive: once the rank is dropped, [`AbortHandle::abort`] does
/// nothing and [`AbortHandle::poll`] finds nothing wrong.
#[derive(Clone)]
pub struct AbortHandle {
    transport: Weak<dyn Transport>,
    failure: Failure,
}

impl AbortHandle {
    fn new(transport: &Arc<dyn Transport>, failure: &Failure) -> Self {
        Self { transport: Arc::downgrade(transport), failure: failure.clone() }
    }

    /// Ends the run on every rank: each gets an error that says who aborted.
    pub fn abort(&self) {
        if let Some(transport) = self.transport.upgrade() {
            self.failure.ended(transport.rank(), Cause::Aborted);
            transport.abort(Cause::Aborted);
        }
    }

    /// Whether anything has failed so far; never waits.
    pub fn poll(&self) -> Result<()> {
        self.transport.upgrade().map_or(Ok(()), |transport| self.failure.poll(&*transport))
    }
}

impl Rank {
    /// A rank at one end of a transport of host memory, with one worker for its kernels.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_workers(transport, 1)
    }

    /// A rank whose kernels spread over `workers` threads (with the feature `rayon`). Results do not depend on it.
    pub fn with_workers(transport: impl Transport + 'static, workers: usize) -> Self {
        let transport: Arc<dyn Transport> = Arc::new(transport);
        Self {
            lanes: Lanes::new(Arc::clone(&transport)),
            transport,
            prepared: Vec::with_capacity(REMEMBERED),
            scratch: cpu::Scratch::new(workers),
            workspace: Workspace::default(),
            agreements: Agreements::default(),
            failure: Failure::default(),
        }
    }

    /// As [`Rank::with_workers`], on threads of the caller's.
    pub fn with_executor(
        transport: impl Transport + 'static,
        workers: usize,
        executor: Arc<dyn cpu::Executor>,
    ) -> Self {
        let mut rank = Self::with_workers(transport, workers);
        rank.scratch = rank.scratch.with_executor(executor);
        rank
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.transport.world()
    }

    /// Whether anything has failed so far; never waits.
    pub fn poll(&self) -> Result<()> {
        self.failure.poll(&*self.transport)
    }

    /// For other threads.
    pub fn handle(&self) -> AbortHandle {
        AbortHandle::new(&self.transport, &self.failure)
    }

    /// Starts to record what each lane does, for at most `capacity` operations from now on; 0 stops. Times count from
    /// `epoch`, which ranks should share.
    pub fn record(&mut self, epoch: std::time::Instant, capacity: usize) {
        self.lanes.record(epoch, capacity);
    }

    /// What was recorded since the last call, in the order in which operations ended within each lane.
    pub fn events(&mut self) -> Vec<trace::Event> {
        self.lanes.events()
    }

    /// Bytes of workspace that running `plan` in `direction` takes on this rank, the kernels' tiles aside.
    pub fn workspace_bytes(&mut self, plan: &Plan, direction: Direction) -> Result<u64> {
        self.ready(plan, Job::Attention(direction)).map(|i| self.prepared[i].schedule.workspace)
    }

    /// Lends the rank memory to work in, instead of memory of its own.
    ///
    /// # Safety
    /// The `bytes` at `ptr` must stay valid and untouched by others until another workspace is lent, this one is
    /// [taken back](Rank::take_workspace_back), or the rank is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if `ptr` is not a multiple of
    /// [`ALIGNMENT`](crate::schedule::ALIGNMENT).
    pub unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        self.workspace = Workspace::lent(ptr, bytes)?;
        Ok(())
    }

    /// Ends the lending: from now on the rank works in memory of its own again.
    pub fn take_workspace_back(&mut self) {
        self.workspace = Workspace::default();
    }

    /// Does all that may allocate: writes the schedule, grows the workspace and the kernels' tiles, starts the
    /// communication lane's thread. Optional; the first run of a plan does it otherwise.
    ///
    /// # Errors
    /// A plan for another world; a lent workspace that is too small; a machine without the memory or the thread.
    pub fn prepare(&mut self, plan: &Plan, direction: Direction) -> Result<()> {
        let at = self.ready(plan, Job::Attention(direction))?;
        let schedule = &self.prepared[at].schedule;
        self.workspace.reserve(schedule.workspace)?;
        self.lanes.prepare(schedule)
    }

    /// Finds what a job takes, or makes it; its index in `prepared`.
    fn ready(&mut self, plan: &Plan, job: Job) -> Result<usize> {
        if let Some(i) = self.prepared.iter().position(|p| p.is(plan, job)) {
            return Ok(i);
        }
        plan.fits_world(self.world())?;
        let prepared = Prepared::new(plan, self.rank(), job)?.tagged();
        self.agreements.reserve(&prepared.schedule.group);
        self.scratch.reserve(&host::dims(plan));
        if self.prepared.len() == REMEMBERED {
            self.prepared.remove(0);
        }
        self.prepared.push(prepared);
        Ok(self.prepared.len() - 1)
    }

    /// Runs a plan on tensors given without their types.
    ///
    /// All ranks of the group must call it with equal plans in the same order. That they do is checked before anything
    /// moves when the group first runs a plan in a direction, and with the first message between each two ranks in later
    /// runs.
    ///
    /// # Errors
    /// A tensor that does not fit the plan or shares memory with another that is written; ranks that run different things;
    /// a peer that failed. What is wrong with one rank's own tensors is only that rank's error: the others wait for it
    /// until their deadline, unless it calls again or aborts. [`Error::Disagreement`] in a first run is no failure: the
    /// ranks may plan again. After any other error of a run that has begun the group stays failed, and so does this rank,
    /// which repeats its first error: make new ranks.
    ///
    /// # Safety
    /// The tensors describe memory that is valid for reads (inputs) or writes (outputs) and used by nobody else during
    /// the call.
    pub unsafe fn run(&mut self, plan: &Plan, direction: Direction, tensors: &Bindings) -> Result<()> {
        let at = self.ready(plan, Job::Attention(direction))?;
        tensors.check(plan, &self.prepared[at])?;
        let used = tensors.used(direction, plan.problem().has_sinks());
        self.apart(at, used.map(|(tensor, raw)| (tensor.name(), *raw)))?;
        // SAFETY: the tensors are valid and nobody else's during the call (promised), and fit the plan (checked).
        unsafe { self.run_prepared(at, tensors) }
    }

    /// Refuses tensors that lie in the part of a lent workspace that a run uses.
    fn apart(&mut self, at: usize, tensors: impl IntoIterator<Item = (&'static str, RawTensor)>) -> Result<()> {
        let Some(ptr) = self.workspace.lent_at() else { return Ok(()) };
        let bytes = self.prepared[at].schedule.workspace;
        self.workspace.reserve(bytes)?;
        bind::apart_from(ptr, bytes, tensors)
    }

    /// # Safety
    /// As [`Rank::run`], and the tensors were checked.
    unsafe fn run_prepared(&mut self, at: usize, tensors: &Bindings) -> Result<()> {
        let prepared = &mut self.prepared[at];
        self.workspace.reserve(prepared.schedule.workspace)?;
        self.failure.check()?;
        let watch = Watch { transport: &*self.transport, failure: &self.failure };
        if prepared.schedule.group.len() > 1 {
            let fingerprint = prepared.job.fingerprint(&prepared.plan);
            match self.agreements.begin(&*self.transport, &prepared.schedule.group, fingerprint) {
                Ok(run) => prepared.communication.tags.begin(fingerprint, run),
                Err(Error::Disagreement { rank, peer, ours, theirs, runs, .. }) => {
                    watch.over();
                    let what = tags::describe(&prepared.plan, prepared.job);
                    return Err(Error::Disagreement { rank, peer, ours, theirs, what, runs });
                }
                Err(error) => {
                    self.failure.keep(&error);
                    self.transport.abort(Cause::Failed);
                    watch.over();
                    return Err(error);
                }
            }
        }
        let memory = Memory { tensors: *tensors, workspace: self.workspace.ptr() };
        // SAFETY: the caller's tensors fit the plan and are valid (promised); the workspace is large enough.
        let outcome = unsafe { self.lanes.run(prepared, &memory, &mut self.scratch) };
        watch.over();
        outcome.inspect_err(|error| self.failure.keep(error))
    }
}
