// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank whose tensors are in host memory: two lanes, the CPU kernels, a workspace.
//!
//! The calling thread is the compute lane, a thread of the rank is the communication lane ([`lanes`](super::lanes)). A
//! run returns when it is complete.

use std::{boxed::Box, collections::VecDeque, sync::Arc, time::Instant, vec::Vec};

use super::{
    agreement::Agreements,
    backend::Backend,
    bind::Bindings,
    failure::{FirstFailure, abort_on_unwind, watched},
    found_rows::{FoundRows, check_supported},
    handle::AbortHandle,
    host::{self, CallKeys},
    key_lists::{self, RankLists},
    keys::RawKeys,
    lanes::LaneThreads,
    listed_rows::{KeyRowBytes, ListedRun, ListedRuns},
    natural_lse::{self, NaturalLse},
    ops::BufferAddresses,
    prepared::{Entry, PlanCache, Prepared},
    ring,
    workspace::{HostMemory, OwnMemory, Workspace},
};
use crate::{
    device::Device,
    error::Result,
    kernel::{
        cpu::{self, has_kernels},
        no_sm_margin, no_stream,
        varlen::{KernelCalls, VarlenKernel},
    },
    plan::Plan,
    report::trace,
    schedule::{
        Direction, Purpose,
        run_trait::{RunTrait, refuse_clashes},
    },
    transport::{
        Transport,
        carrier::Carrier,
        ring_check::{Link, RingFault},
    },
};

/// A rank on host memory.
pub(super) struct HostRank {
    transport: Arc<dyn Transport>,
    lanes: LaneThreads,
    prepared: PlanCache<Prepared>,
    scratch: cpu::Scratch,
    workspace: Workspace<HostMemory>,
    agreements: Agreements,
    failure: FirstFailure,
    found_rows: FoundRows,
    lists: RankLists,
    listed: ListedRuns,
    /// Plans of runs over lists where those are others than the caller's: the caller's, the direction, the run's.
    listed_plans: VecDeque<(Plan, Direction, Option<Plan>)>,
    natural_lse: NaturalLse,
    /// A kernel of the caller's for attention.
    kernel: Option<KernelCalls>,
}

impl Entry for Prepared {
    fn prepared(&self) -> &Prepared {
        self
    }
}

impl HostRank {
    pub(super) fn new(transport: impl Transport + 'static, scratch: cpu::Scratch) -> Self {
        let transport: Arc<dyn Transport> = Arc::new(transport);
        Self {
            lanes: LaneThreads::new(Arc::clone(&transport)),
            transport,
            prepared: PlanCache::default(),
            scratch,
            workspace: Workspace::default(),
            agreements: Agreements::default(),
            failure: FirstFailure::default(),
            found_rows: FoundRows::default(),
            lists: RankLists::default(),
            listed: ListedRuns::default(),
            listed_plans: VecDeque::new(),
            natural_lse: NaturalLse::default(),
            kernel: None,
        }
    }

    /// The same with a kernel of the caller's for attention.
    pub(super) fn with_kernel(mut self, kernel: impl VarlenKernel + 'static) -> Self {
        self.kernel = Some(KernelCalls::new(Box::new(kernel), self.transport.rank()));
        self
    }

    /// The index in `prepared` of a run's schedule, which is prepared first if it is not there.
    ///
    /// # Errors
    /// Those of planning; an instruction set that the CPU lacks, so that no run begins with it.
    fn find_or_prepare(&mut self, plan: &Plan, run: Purpose) -> Result<usize> {
        if let Purpose::Attention(_) = run {
            has_kernels()?;
        }
        self.scratch.isa()?;
        if let Some(i) = self.prepared.reuse(plan, run, false) {
            return Ok(i);
        }
        plan.fits_world(self.transport.world())?;
        let mut prepared = Prepared::new(plan, self.transport.rank(), run)?.tagged();
        if let Some(kernel) = &self.kernel {
            kernel.check(plan, run)?;
            prepared = prepared.computed_by(kernel);
        }
        self.agreements.reserve(&prepared.schedule.group);
        let p = plan.problem();
        self.scratch.reserve(p.dtype(), p.head_dim() as u32, p.value_dim() as u32);
        if let Some(oldest) = self.prepared.least_recent() {
            self.prepared.remove(oldest);
        }
        Ok(self.prepared.push(prepared))
    }

    /// Starts the threads of a run that are not there yet.
    fn start_threads(&mut self, at: usize) -> Result<()> {
        self.scratch.start_threads()?;
        if host::communicates(&self.prepared[at].schedule) { self.lanes.ensure_thread() } else { Ok(()) }
    }

    /// The workspace of a prepared run. The rank's own memory grows to the size that the run needs.
    fn work_at(&mut self, at: usize) -> Result<*mut u8> {
        grown(&mut self.workspace, self.prepared[at].schedule.workspace)
    }

    /// The plan of a run over lists, if it is another than the caller's. The last ones are kept.
    fn listed_plan(&mut self, plan: &Plan, direction: Direction) -> Option<Plan> {
        let known = self.listed_plans.iter().find(|(base, of, _)| *of == direction && base == plan);
        if let Some((.., derived)) = known {
            return derived.clone();
        }
        let derived = plan.for_listed_keys(direction);
        if self.listed_plans.len() == LISTED_PLANS {
            self.listed_plans.pop_front();
        }
        self.listed_plans.push_back((plan.clone(), direction, derived.clone()));
        derived
    }
}

/// Plans of runs over lists that a rank keeps.
const LISTED_PLANS: usize = 8;

/// The workspace, for a schedule that needs so many bytes; the rank's own grows.
fn grown(workspace: &mut Workspace<HostMemory>, needed: u64) -> Result<*mut u8> {
    if workspace.is_short(needed) {
        // Freed first, so that the rank never holds both.
        let before = workspace.take_own().map_or(0, |own| own.bytes() as u64);
        // A sequence that grows needs a little more memory in each step, and new memory costs more than planning.
        // So allocate spare memory, except after a large step, such as from a forward to its backward.
        let room = if before >= needed - needed / 4 { needed.saturating_add(needed / 4) } else { needed };
        workspace.set_own(HostMemory::new(room).or_else(|_| HostMemory::new(needed))?);
    }
    workspace.at(needed)
}

impl Backend for HostRank {
    fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    fn failure(&self) -> &FirstFailure {
        &self.failure
    }

    fn handle(&self) -> AbortHandle {
        AbortHandle::new(&self.transport, &self.failure)
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()> {
        self.scratch.set_isa(isa)
    }

    fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        no_sm_margin(n)
    }

    fn check_ring(&self, bytes: usize) -> Result<Vec<Link>, RingFault> {
        ring::checked(&*self.transport, &self.failure, || Link::check_all(&*self.transport, bytes))
    }

    fn between_runs(&self) -> Result<Carrier<'_>> {
        self.lanes.check_process()?;
        Ok(Carrier::Host(&*self.transport))
    }

    fn record(&mut self, epoch: Instant, capacity: usize) -> Result<()> {
        self.lanes.record(epoch, capacity);
        Ok(())
    }

    fn events(&mut self) -> Vec<trace::Event> {
        self.lanes.events()
    }

    fn workspace_bytes(&mut self, plan: &Plan, run: Purpose) -> Result<u64> {
        self.find_or_prepare(plan, run).map(|i| self.prepared[i].schedule.workspace)
    }

    unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        Workspace::<HostMemory>::accept(ptr)?;
        // No run is under way: the rank's own memory goes.
        drop(self.workspace.lend(ptr, bytes));
        Ok(())
    }

    fn key_row_bytes(&self) -> Option<KeyRowBytes> {
        self.listed.bytes()
    }

    fn take_workspace_back(&mut self) -> Result<()> {
        self.workspace.take_back();
        Ok(())
    }

    fn prepare(&mut self, plan: &Plan, run: Purpose) -> Result<()> {
        self.lanes.check_process()?;
        let at = self.find_or_prepare(plan, run)?;
        self.work_at(at)?;
        self.start_threads(at)
    }

    unsafe fn run(&mut self, plan: &Plan, run: Purpose, tensors: &Bindings) -> Result<()> {
        no_stream(tensors.stream)?;
        self.lanes.check_process()?;
        if let (Some(kernel), Purpose::Attention(_)) = (&self.kernel, run)
            && plan.fits_world(self.transport.world()).is_ok()
        {
            self.failure.check(&*self.transport)?;
            let ranks = plan.mesh().group_of(self.transport.rank());
            self.agreements.on_kernel(kernel, ranks, (plan, run), &*self.transport, &self.failure)?;
        }
        let own_kernel = self.kernel.is_some().then_some(RunTrait::OwnKernel);
        let [keys, base, max_logit] = tensors.traits();
        refuse_clashes(plan, run, &[keys, base, max_logit, own_kernel])?;
        // The lists stay with their tokens, so k and v come to them wherever the plan leaves the choice to itself.
        let base = plan;
        let listed = match (tensors.key_indices(), run) {
            (Some(_), Purpose::Attention(direction)) => self.listed_plan(plan, direction),
            _ => None,
        };
        let plan = listed.as_ref().unwrap_or(plan);
        let at = self.find_or_prepare(plan, run)?;
        if tensors.pages().is_some() {
            check_supported(&self.prepared[at].schedule)?;
        }
        if tensors.key_indices().is_some() {
            key_lists::check_supported(run, plan, &self.prepared[at].schedule)?;
        }
        tensors.check(&self.prepared[at].expected)?;
        if let Some(given) = tensors.key_indices() {
            // SAFETY: the lists are valid (promised to `Bindings::with_keys`).
            unsafe { self.lists.check(plan, self.transport.rank(), given) }?;
        }
        if let Some(pages) = tensors.pages() {
            // SAFETY: the table is valid (promised to `Bindings::with_keys`).
            unsafe { self.found_rows.list(plan, self.transport.rank(), tensors, pages) }?;
        }
        let workspace = self.work_at(at)?;
        let prepared = &mut self.prepared[at];
        let used = prepared.expected.used(tensors).map(|(_, name, raw)| (name, *raw));
        self.workspace.check_disjoint(prepared.schedule.workspace, used)?;
        self.failure.check(&*self.transport)?;
        match self.start_threads(at) {
            // The other ranks come, and must not wait for this one.
            Err(error) if self.prepared[at].schedule.group.len() > 1 => {
                return watched(&*self.transport, &self.failure, || Err(error));
            }
            threads => threads?,
        }
        let prepared = &mut self.prepared[at];
        prepared.dropout_seed = tensors.dropout_seed();
        prepared.key_indices = tensors.key_indices().map(|given| given.shape());
        let begun = self.agreements.begin_run(prepared, &*self.transport, &self.failure)?;
        prepared.begin(begun);
        // SAFETY: the caller's tensors fit the plan (checked above) and are valid (the contract of this function).
        let natural = unsafe { self.natural_lse.read(run, tensors) };
        let run_name = prepared.communication.run();
        let transport = &*self.transport;
        let outcome: Result<()> = abort_on_unwind(transport, &self.failure, || {
            let (mut prepared, mut workspace) = (&mut *prepared, workspace);
            let keys = match tensors.keys {
                RawKeys::Listed(given) => {
                    // SAFETY: the lists are valid (promised to `Bindings::with_keys`), and were checked above.
                    let exchanged = unsafe { self.lists.exchange(plan, run_name, transport, given) };
                    let exchanged = exchanged.map_err(|error| error.described(|| prepared.describe()));
                    watched(transport, &self.failure, || exchanged)?;
                    // SAFETY: the lists are valid (promised to `Bindings::with_keys`).
                    let (lists, scratch) = unsafe { self.lists.of_calls(plan, transport.rank(), given) };
                    if let Purpose::Attention(direction) = run {
                        let lent = self.workspace.is_lent();
                        let allowed = &prepared.schedule;
                        let of_run = ListedRun {
                            base,
                            plan,
                            direction,
                            name: run_name,
                            allowed,
                            tensors,
                            lent,
                            begun,
                            shape: prepared.key_indices,
                            seed: prepared.dropout_seed,
                        };
                        let chosen = watched(transport, &self.failure, || {
                            // What is kept of a failure is what the run returns.
                            let chosen = self.listed.choose(&of_run, &lists, transport);
                            let chosen = chosen.map_err(|error| error.described(|| prepared.describe()))?;
                            let Some(listed) = chosen else { return Ok(None) };
                            let needed = listed.schedule.workspace;
                            let place = grown(&mut self.workspace, needed)?;
                            let used = listed.expected.used(tensors).map(|(_, name, raw)| (name, *raw));
                            self.workspace.check_disjoint(needed, used)?;
                            Ok(Some((listed, place)))
                        })?;
                        if let Some((listed, place)) = chosen {
                            (listed.dropout_seed, listed.key_indices) = (prepared.dropout_seed, prepared.key_indices);
                            listed.begin(begun);
                            (prepared, workspace) = (listed, place);
                        }
                    }
                    CallKeys::Listed(lists, scratch)
                }
                RawKeys::Pages(_) => CallKeys::Paged(self.found_rows.rows()),
                RawKeys::All => CallKeys::Own,
            };
            let memory = BufferAddresses { tensors: natural, workspace };
            // SAFETY: the caller's tensors fit the plan (checked above), are valid and used by nothing else during the
            // call (the contract of this function); the workspace is as large as the schedule needs (`grown`).
            unsafe {
                host::run(
                    &mut self.lanes,
                    transport,
                    prepared,
                    &memory,
                    keys,
                    &mut self.scratch,
                    self.kernel.as_mut(),
                )?;
                natural_lse::write(run, tensors);
            }
            Ok(())
        });
        let prepared = &self.prepared[at];
        outcome
            .map_err(|error| error.of_run(prepared.run.name(&prepared.plan)).described(|| prepared.describe()))
            .inspect_err(|e| self.failure.keep(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Layout, Mesh, Options, Problem, plan::Circulate, schedule::Direction, transport::local};
    use std::time::Duration;

    /// The steps of a growing sequence need ever more workspace, and rarely new memory.
    #[test]
    fn memory_that_grows_again_has_room_to_spare() {
        let end = local::group(2, Duration::from_secs(10)).unwrap().remove(0);
        let mut rank = HostRank::new(end, cpu::Scratch::new(1));
        let run = Purpose::Attention(Direction::Forward);
        let (mut needed, mut grown) = (Vec::new(), 0);
        for start in (64..512).step_by(8) {
            let batch = Batch::cross(&[0, 8], &[0, 520], Some(&[start])).unwrap();
            let problem = Problem::new(batch, 2, 2, 16, Dtype::F32);
            let options = Options::new().circulate_forward(Circulate::Keys);
            let plan = Plan::builder(&problem)
                .mesh(Mesh::ring(2).unwrap())
                .layout(Layout::Striped { stripe: 4 })
                .options(options)
                .build()
                .unwrap();
            let at = rank.find_or_prepare(&plan, run).unwrap();
            let bytes = rank.prepared[at].schedule.workspace;
            grown += usize::from(rank.workspace.is_short(bytes));
            rank.prepare(&plan, run).unwrap();
            assert!(!rank.workspace.is_short(bytes) && rank.workspace.is_short(2 * bytes));
            if needed.is_empty() {
                assert!(rank.workspace.is_short(bytes + 1), "the first has what it needs");
            }
            needed.push(bytes);
        }
        needed.dedup();
        assert!(needed.is_sorted() && needed.len() > 40, "{needed:?}");
        assert!((2..=12).contains(&grown), "{grown}");
        // A plan that needs much more, such as a backward, gets exactly the bytes that it needs.
        let batch = Batch::from_lengths(&[4096]).unwrap();
        let plan =
            Plan::new(&Problem::new(batch, 2, 2, 16, Dtype::F32), Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
        let at = rank.find_or_prepare(&plan, run).unwrap();
        let bytes = rank.prepared[at].schedule.workspace;
        assert!(bytes > 2 * needed.last().unwrap());
        rank.prepare(&plan, run).unwrap();
        assert!(!rank.workspace.is_short(bytes) && rank.workspace.is_short(bytes + 1));
    }
}
