// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the same schedules on a CUDA device.
//!
//! A lane is a stream here: the caller's for compute, the transport's for communication. When a plan is prepared, its
//! schedule is converted into a [`Sequence`]: launches whose scheduler metadata is on the device, events, exchanges. A
//! run writes the addresses of its tensors into the sequence, enqueues it step by step on the two streams, and returns.
//! If an operation waits for one of the other lane, its stream waits for an event recorded after that operation. The
//! host does not wait for the device.
//!
//! The host threads of different ranks do synchronise at each exchange, because an event must be recorded before a
//! stream can wait for it (see [`peer`](crate::transport::peer)): so each rank needs its own thread.
//!
//! Before the first run of a plan in a direction, the hosts check that all ranks run the same plan
//! ([`agreement`](super::agreement)). Later runs send the check with their messages ([`tags`](super::tags)) and the
//! devices compare it; the host gets the result when it next asks ([`Disagreements`]). A [`Tracer`] records what each
//! lane does, with events around each operation.

use std::{
    boxed::Box,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{
    agreement::Agreements,
    backend::Backend,
    bind::Bindings,
    failure::{FirstFailure, abort_on_unwind},
    handle::AbortHandle,
    prepared::{Entry, PlanCache, Prepared},
    ring,
    workspace::Workspace,
};
use crate::{
    call::RawStream,
    device::{Device, driver::CudaEvent},
    error::{Cause, Result},
    kernel::{
        cpu,
        cuda::{Cuda, DeviceMemory, PageTable, sm_margin::SmMargin, tags::RunCount},
        no_isa,
    },
    plan::Plan,
    report::trace,
    schedule::{
        Purpose, Schedule, TensorId,
        run_trait::{RunTrait, refuse_clashes},
    },
    transport::{
        DeviceTransport, Transport,
        carrier::Carrier,
        ring_check::{Link, RingFault},
    },
};

mod capture;
mod disagreements;
mod memory;
mod pages;
mod prepare;
mod sequence;
mod tracer;

use disagreements::Disagreements;
use sequence::Sequence;
use tracer::Tracer;

/// A rank on a CUDA device.
pub(super) struct DeviceRank {
    transport: Arc<dyn DeviceTransport>,
    prepared: PlanCache<OnDevice>,
    workspace: Workspace<DeviceMemory>,
    /// Workspaces that graphs still use.
    retired: Vec<DeviceMemory>,
    /// The last stream that was checked to belong to the device.
    accepted: Option<RawStream>,
    marks: Marks,
    agreements: Agreements,
    /// Runs of each group of ranks.
    counts: Vec<(Range<usize>, RunCount)>,
    failure: FirstFailure,
    /// The multiprocessors that the rank asks its device to leave free.
    margin: Option<SmMargin>,
    /// Whether a run was captured and, at the last query of the driver, that capture had not ended.
    in_capture: bool,
    /// While a trace is recorded.
    tracer: Option<Box<Tracer>>,
}

/// Events at the start of a run, at the end of its communication and at its end; and the device's reports.
struct Marks {
    begin: CudaEvent,
    end: CudaEvent,
    over: CudaEvent,
    disagreements: Arc<Disagreements>,
}

impl Marks {
    fn new(cuda: &Cuda) -> Result<Self> {
        let event = || CudaEvent::new(cuda.context());
        Ok(Self { begin: event()?, end: event()?, over: event()?, disagreements: Arc::new(Disagreements::new(cuda)?) })
    }
}

// SAFETY: the only field that is not `Send` is `accepted`: a stream that is compared with others, and never used.
unsafe impl Send for DeviceRank {}

/// A schedule, and its sequence on the device.
struct OnDevice {
    prepared: Prepared,
    sequence: Sequence,
    /// Whether a graph was captured: it may use this entry for as long as the rank lives.
    captured: bool,
}

impl Entry for OnDevice {
    fn prepared(&self) -> &Prepared {
        &self.prepared
    }

    fn is_kept(&self) -> bool {
        self.captured
    }
}

impl DeviceRank {
    /// A rank at one end of a transport of device memory.
    pub(super) fn new(transport: impl DeviceTransport + 'static) -> Result<Self> {
        let marks = Marks::new(transport.device())?;
        Ok(Self {
            prepared: PlanCache::default(),
            workspace: Workspace::default(),
            retired: Vec::new(),
            accepted: None,
            failure: FirstFailure::with_device(&marks.disagreements),
            margin: None,
            marks,
            agreements: Agreements::default(),
            counts: Vec::new(),
            in_capture: false,
            tracer: None,
            transport: Arc::new(transport),
        })
    }

    /// The rank's device.
    pub(super) fn gpu(&self) -> &Arc<Cuda> {
        self.transport.device()
    }

    /// Waits on the host until nothing that this rank enqueued uses its memory any more.
    pub(super) fn wait_idle(&self) -> Result<()> {
        self.transport.synchronize()?;
        self.marks.over.wait()
    }

    /// # Safety
    /// As [`Sequence::enqueue`]; `stream` is a live stream of the device.
    unsafe fn enqueue(
        &mut self,
        at: usize,
        (tensors, pages): (&Bindings, Option<PageTable>),
        workspace: *mut u8,
        stream: RawStream,
        capturing: bool,
    ) -> Result<()> {
        let transport = Arc::clone(&self.transport);
        let cuda = transport.device();
        let _entered = cuda.context().enter()?;
        let other = transport.stream();
        let Marks { begin, end, over, .. } = &self.marks;
        if capturing { over.hold_in_replays(stream) } else { over.make_stream_wait(stream) }?;
        begin.record(stream)?;
        begin.make_stream_wait(other)?;
        let compared = self.prepared[at].prepared.compared();
        let (sequence, tracer) = (&mut self.prepared[at].sequence, self.tracer.as_deref_mut());
        if let Some(pages) = pages {
            sequence.set_pages(pages);
        }
        // SAFETY: the promise of this function; both streams wait for the rank's earlier runs (above), and the rank's
        // next run waits for both streams (below).
        unsafe { sequence.enqueue((tensors, compared), workspace, [stream, other], cuda, &*transport, tracer) }?;
        end.record(other)?;
        end.make_stream_wait(stream)?;
        if capturing { over.record_in_replays(stream) } else { over.record(stream) }
    }
}

impl Backend for DeviceRank {
    fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    fn failure(&self) -> &FirstFailure {
        &self.failure
    }

    fn handle(&self) -> AbortHandle {
        let transport: Arc<dyn Transport> = self.transport.clone();
        AbortHandle::new(&transport, &self.failure)
    }

    fn device(&self) -> Device {
        Device::Cuda(self.gpu().ordinal())
    }

    fn cuda(&self) -> Option<&Arc<Cuda>> {
        Some(self.gpu())
    }

    fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()> {
        isa.map_or(Ok(()), |isa| Err(no_isa(isa, self.gpu().ordinal())))
    }

    fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        self.margin = SmMargin::new(self.gpu(), n)?;
        Ok(())
    }

    fn check_ring(&self, bytes: usize) -> Result<Vec<Link>, RingFault> {
        self.between_runs().map_err(|error| RingFault::Failed { link: None, error })?;
        ring::checked(&*self.transport, &self.failure, || Link::check_all_on_device(&*self.transport, bytes))
    }

    fn between_runs(&self) -> Result<Carrier<'_>> {
        self.synchronize()?;
        self.transport.begin_run(None);
        Ok(Carrier::Device(&*self.transport))
    }

    fn synchronize(&self) -> Result<()> {
        self.beside_no_capture("synchronize")?;
        let waited = self.wait_idle();
        self.failure.check(&*self.transport)?;
        waited
    }

    fn record(&mut self, epoch: Instant, capacity: usize) -> Result<()> {
        if capacity > 0 {
            self.beside_no_capture("record")?;
        }
        self.tracer = None;
        if capacity > 0 {
            self.wait_idle()?;
            let (context, rank, stream) = (self.gpu().context(), self.transport.rank(), self.transport.stream());
            self.tracer = Some(Box::new(Tracer::new(context, rank, epoch, capacity, stream)?));
        }
        Ok(())
    }

    fn events(&mut self) -> Vec<trace::Event> {
        let Some(tracer) = &mut self.tracer else { return Vec::new() };
        let context = self.transport.device().context();
        // A failed query counts as not over.
        let over = context.enter().and_then(|_entered| self.marks.over.is_done()).unwrap_or(false);
        tracer.take(context, over.then(|| self.transport.stream()))
    }

    fn trace_accuracy(&self) -> Duration {
        Duration::from_nanos(self.tracer.as_ref().map_or(0, |r| r.accuracy_ns()))
    }

    fn metadata_bytes(&self) -> u64 {
        self.prepared.iter().map(|p| p.sequence.bytes() as u64).sum()
    }

    fn workspace_bytes(&mut self, plan: &Plan, run: Purpose) -> Result<u64> {
        match self.prepared.find(plan, run, false) {
            Some(i) => Ok(self.prepared[i].prepared.schedule.workspace),
            None => {
                self.check_supported(plan, run)?;
                Ok(Schedule::of(plan, self.transport.rank(), run)?.workspace)
            }
        }
    }

    unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the memory is valid for as long as it is lent (the contract of this function).
        unsafe { self.lend(ptr, bytes) }
    }

    fn take_workspace_back(&mut self) -> Result<()> {
        self.take_back()
    }

    fn prepare(&mut self, plan: &Plan, run: Purpose) -> Result<()> {
        if !self.is_ready(plan, run) {
            self.beside_no_capture("prepare")?;
        }
        let at = self.find_or_prepare(plan, run, false)?;
        self.work_at(at).map(|_| ())
    }

    unsafe fn run(&mut self, plan: &Plan, run: Purpose, tensors: &Bindings) -> Result<()> {
        let stream = tensors.stream;
        if self.accepted != Some(stream) {
            // SAFETY: a live stream, as promised.
            unsafe { self.gpu().owns(stream) }?;
            self.accepted = Some(stream);
        }
        // SAFETY: a live stream, as promised.
        let capture = unsafe { self.capture_of_run(stream) }?;
        let capturing = capture.is_some();
        let captured = capturing.then_some(RunTrait::Capture);
        let [keys, lse_base, _] = tensors.traits();
        refuse_clashes(plan, run, &[Some(RunTrait::Device), captured, keys, lse_base])?;
        if capturing {
            self.capturable(plan, run, tensors.pages().is_some())?;
        }
        let at = self.find_or_prepare(plan, run, tensors.pages().is_some())?;
        let OnDevice { prepared, sequence, .. } = &self.prepared[at];
        tensors.check(&prepared.expected)?;
        let pages = tensors.pages().map(|pages| self.page_table(&pages, sequence)).transpose()?;
        let attention = matches!(run, Purpose::Attention(_));
        for (tensor, name, raw) in prepared.expected.used(tensors) {
            // Attention reads and writes 16 bytes at a time, on every mesh. Other tensors are only copied, which needs
            // no alignment unless a tensor is huge.
            let whole = sequence.must_align(tensor)
                || attention && matches!(tensor, TensorId::Q | TensorId::K | TensorId::V | TensorId::O | TensorId::DO);
            self.gpu().accept(name, raw, if whole { 16 } else { raw.dtype.size() })?;
        }
        let workspace = self.work_at(at)?;
        let Prepared { schedule, expected, .. } = &self.prepared[at].prepared;
        let used = expected.used(tensors).map(|(_, name, raw)| (name, *raw));
        self.workspace.check_disjoint(schedule.workspace, used)?;
        self.failure.check(&*self.transport)?;
        let prepared = &mut self.prepared[at].prepared;
        prepared.dropout_seed = tensors.dropout_seed();
        if let Some(seed) = prepared.dropout_seed {
            self.marks.disagreements.begin(prepared.fingerprint(), prepared.compared(), seed);
        }
        // The device counts the runs.
        self.agreements.begin_run(&self.prepared[at].prepared, &*self.transport, &self.failure)?;
        let (transport, failure) = (Arc::clone(&self.transport), self.failure.clone());
        let outcome = abort_on_unwind(&*transport, &failure, || {
            self.prepared[at].captured |= capturing;
            self.in_capture |= capturing;
            transport.begin_run(capture);
            // SAFETY: the tensors fit the plan (checked) and are as the caller promised, the workspace is large enough,
            // and the marks order this run behind those before it.
            unsafe { self.enqueue(at, (tensors, pages), workspace, stream, capturing) }
        });
        let Prepared { run, plan, .. } = &self.prepared[at].prepared;
        let outcome = outcome.map_err(|error| error.of_run(run.name(plan)));
        if let Err(error) = &outcome {
            failure.keep(error);
            self.transport.abort(Cause::Failed);
            // A stream that is being captured has nothing to wait for.
            if !capturing {
                // Best effort: if the driver cannot even wait, the first error says more than this one would.
                let _ = self.transport.synchronize();
                // SAFETY: a live stream, as promised.
                let _ = unsafe { self.transport.device().synchronize(stream) };
            }
        }
        outcome
    }
}

impl Drop for DeviceRank {
    fn drop(&mut self) {
        // Workspace and metadata must outlive the enqueued work; a failure means that the context is gone. Captured
        // work has not begun, and the event `over` comes after all runs before it.
        let _ = match self.beside_no_capture("drop") {
            Ok(()) => self.wait_idle(),
            Err(_) => self.marks.over.wait(),
        };
    }
}
