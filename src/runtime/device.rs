// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same schedules on a CUDA device.
//!
//! A lane is a stream here: the caller's for compute, the transport's for communication. The host walks the list once
//! and enqueues every operation on its lane's stream; where an operation waits for one of the other lane, its stream
//! waits for an event behind that one. No host waits for the device, and the order is the schedule's alone.
//!
//! Hosts of different ranks do meet at each exchange, to tell each other addresses (see [`peer`](crate::transport::peer)):
//! each rank therefore runs on a thread of its own.

use std::{format, sync::Arc, vec::Vec};

use super::{
    AbortHandle,
    all_to_all::Watch,
    bind::{self, Bindings},
    failure::Failure,
    measure::{Measure, dangling},
    ops::{Backend, Job, Memory, Prepared, perform},
};
use crate::{
    call::{Attend, AttendBackward, Delta, RawTensor, SinkGradient, Transform},
    element::Dtype,
    error::{Cause, Error, Result},
    kernel::cuda::{Cuda, DeviceMemory, Staging, Stream, driver::Event},
    plan::Plan,
    schedule::{ALIGNMENT, Direction, Lane, Schedule, TensorId},
    transport::{DeviceTransport, Label, Message, Transport},
};

/// How many schedules a rank remembers.
const REMEMBERED: usize = 16;

/// One rank whose tensors are on a CUDA device.
///
/// Dropping it means that the rank leaves, once what it enqueued is done. Its runs come one after another, whatever
/// streams they are put on, because they share one workspace.
///
/// Two ranks on one device, each a thread; usually each has a device of its own:
///
/// ```no_run
/// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Result, Side, transport::peer};
/// use cpattn::call::RawTensor;
/// use cpattn::kernel::cuda::Cuda;
/// use cpattn::runtime::{Bindings, DeviceRank};
/// use cpattn::schedule::{Direction, TensorId};
/// use std::{ptr::null_mut, time::Duration};
///
/// // Two documents of 5 and 7 tokens, 4 q heads, 2 kv heads, head_dim 64.
/// let problem = Problem::new(Batch::new(&[0, 5, 12])?, 4, 2, 64, Dtype::Bf16);
/// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Zigzag)?;
/// let device = Cuda::shared(0)?;
/// let ends = peer::group(&[device.clone(), device.clone()], Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     let run = |end| -> Result<()> {
///         let mut rank = DeviceRank::new(end)?;
///         let (cuda, n) = (rank.device().clone(), plan.local_tokens(Side::Q, rank.rank()) as u64);
///         let bytes = |heads: u64, dim: u64, dtype: Dtype| (n * heads * dim) as usize * dtype.size();
///         // Anybody's device memory will do; q, k and v are to be filled with this rank's tokens (Plan::shard).
///         let (q, o) = (cuda.allocate(bytes(4, 64, Dtype::Bf16))?, cuda.allocate(bytes(4, 64, Dtype::Bf16))?);
///         let (k, v) = (cuda.allocate(bytes(2, 64, Dtype::Bf16))?, cuda.allocate(bytes(2, 64, Dtype::Bf16))?);
///         let lse = cuda.allocate(bytes(4, 1, Dtype::F32))?;
///         let tensors = Bindings::default()
///             .with(TensorId::Q, RawTensor::compact(q.ptr(), Dtype::Bf16, n, 4, 64))
///             .with(TensorId::K, RawTensor::compact(k.ptr(), Dtype::Bf16, n, 2, 64))
///             .with(TensorId::V, RawTensor::compact(v.ptr(), Dtype::Bf16, n, 2, 64))
///             .with(TensorId::O, RawTensor::compact(o.ptr(), Dtype::Bf16, n, 4, 64))
///             .with(TensorId::Lse, RawTensor::compact(lse.ptr(), Dtype::F32, n, 4, 1));
///         let stream = null_mut(); // the legacy default stream, or a cudaStream_t of the caller's, cast
///         // SAFETY: the memory lives until the stream was waited for, and nobody else uses it.
///         unsafe {
///             rank.run(&plan, Direction::Forward, &tensors, stream)?;
///             cuda.synchronize(stream)?;
///         }
///         rank.poll() // whether anything failed meanwhile, on any rank
///     };
///     let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || run(end))).collect();
///     threads.into_iter().try_for_each(|thread| thread.join().unwrap())
/// })?;
/// # Ok::<(), cpattn::Error>(())
/// ```
pub struct DeviceRank {
    transport: Arc<dyn DeviceTransport>,
    prepared: Vec<Enqueueable>,
    /// A ring for each lane, and the launches in flight that both have room for.
    staging: Option<([Staging; 2], usize)>,
    workspace: Workspace,
    marks: Marks,
}

/// Where a run begins, where its communication ends, and where all of it is over.
pub(crate) struct Marks {
    begin: Event,
    end: Event,
    over: Event,
}

impl Marks {
    pub(crate) fn new(cuda: &Cuda) -> Result<Self> {
        let event = || Event::new(cuda.context());
        Ok(Self { begin: event()?, end: event()?, over: event()? })
    }
}

enum Workspace {
    Own(Option<DeviceMemory>),
    Lent(*mut u8, usize),
}

// SAFETY: lent memory is the rank's alone while it is lent (the promise of `lend_workspace`).
unsafe impl Send for DeviceRank {}

/// A schedule, an event behind each operation that the other lane waits for, and what its kernels read besides.
struct Enqueueable {
    prepared: Prepared,
    events: Vec<Option<Event>>,
    slopes: Option<DeviceMemory>,
}

/// One lane: a stream, and the ring that lists are uploaded by.
struct Device<'a> {
    cuda: &'a Cuda,
    transport: &'a dyn DeviceTransport,
    stream: Stream,
    staging: &'a mut Staging,
    slopes: RawTensor,
}

impl Backend for Device<'_> {
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuda.attend(args, RawTensor::NONE, self.staging, self.stream) }
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuda.attend_backward(args, self.staging, self.stream) }
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuda.transform(args, self.staging, self.stream) }
    }

    unsafe fn delta(&mut self, args: &Delta) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuda.delta(args, self.stream) }
    }

    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuda.sink_gradient(args, self.stream) }
    }

    unsafe fn sink_total(&mut self, _: &RawTensor, _: &RawTensor) -> Result<()> {
        unreachable!("only reproducible plans sum exactly, and prepare refuses them")
    }

    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.transport.exchange(label, sends, recvs) }
    }

    fn slopes(&self, _: &Plan) -> RawTensor {
        self.slopes
    }
}

impl DeviceRank {
    /// A rank at one end of a transport of device memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(transport: impl DeviceTransport + 'static) -> Result<Self> {
        let marks = Marks::new(transport.device())?;
        Ok(Self::with(transport, marks))
    }

    /// As [`DeviceRank::new`], with what could fail made before.
    pub(crate) fn with(transport: impl DeviceTransport + 'static, marks: Marks) -> Self {
        Self {
            prepared: Vec::with_capacity(REMEMBERED),
            staging: None,
            workspace: Workspace::Own(None),
            marks,
            transport: Arc::new(transport),
        }
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// The rank's device.
    pub fn device(&self) -> &Arc<Cuda> {
        self.transport.device()
    }

    /// For other threads.
    pub fn handle(&self) -> AbortHandle {
        let transport: Arc<dyn Transport> = self.transport.clone();
        AbortHandle::new(&transport, &Failure::default())
    }

    /// Waits on the host until nothing that this rank enqueued uses its memory any more.
    fn settle(&self) -> Result<()> {
        self.transport.synchronize()?;
        self.marks.over.wait()
    }

    /// Whether anything has failed so far, on any rank or on the device; never waits.
    pub fn poll(&self) -> Result<()> {
        self.transport.poll()
    }

    /// Ends the run on every rank.
    pub fn abort(&self) {
        self.transport.abort(Cause::Aborted);
    }

    /// Bytes of device workspace that running `plan` in `direction` takes on this rank. Allocates nothing on the device:
    /// who means to lend the workspace need not have room for two.
    ///
    /// # Errors
    /// As [`DeviceRank::prepare`], the driver's aside.
    pub fn workspace_bytes(&mut self, plan: &Plan, direction: Direction) -> Result<u64> {
        match self.known(plan, direction) {
            Some(i) => Ok(self.prepared[i].prepared.schedule.workspace),
            None => {
                self.suits(plan)?;
                Ok(Schedule::new(plan, self.rank(), direction)?.workspace)
            }
        }
    }

    /// Lends the rank device memory to work in, instead of memory of its own. Waits for what it enqueued.
    ///
    /// # Safety
    /// The `bytes` at `ptr` are memory of the rank's device, valid and untouched by others until another workspace is
    /// lent or the rank is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `ptr` is not a multiple of [`ALIGNMENT`], or the first or last byte is not memory of the
    /// rank's device.
    pub unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        if !(ptr as usize).is_multiple_of(ALIGNMENT as usize) {
            let (found, expected) = (format!("address {ptr:p}"), format!("a multiple of {ALIGNMENT} bytes"));
            return Err(Error::invalid("workspace", found, expected));
        }
        if bytes > 0 {
            self.device().accept_address("workspace", ptr)?;
            let last = ptr.wrapping_add(bytes - 1);
            self.device().accept_address("workspace", last).map_err(|_| {
                let ordinal = self.device().ordinal();
                let expected = format!("as many as are memory of device {ordinal}: the last, at {last:p}, is not");
                Error::invalid("workspace", format!("{bytes} bytes at {ptr:p}"), expected)
            })?;
        }
        self.settle()?;
        self.workspace = Workspace::Lent(ptr, bytes);
        Ok(())
    }

    /// Ends the lending: from now on the rank works in memory of its own again. Waits for what it enqueued, and prepares
    /// plans anew.
    ///
    /// # Errors
    /// The driver's.
    pub fn take_workspace_back(&mut self) -> Result<()> {
        if let Workspace::Lent(..) = self.workspace {
            self.settle()?;
            self.prepared.clear();
            self.workspace = Workspace::Own(None);
        }
        Ok(())
    }

    /// Does all that may allocate or load: schedules, kernels, events, workspace, rings. Optional; the first run of a
    /// plan does it otherwise.
    ///
    /// # Errors
    /// A plan for another world, an element type or head dim without a kernel, the driver's.
    pub fn prepare(&mut self, plan: &Plan, direction: Direction) -> Result<()> {
        let at = self.ready(plan, direction)?;
        self.room(at).map(|_| ())
    }

    /// The workspace of a prepared run.
    fn room(&self, at: usize) -> Result<*mut u8> {
        let needed = self.prepared[at].prepared.schedule.workspace;
        match &self.workspace {
            Workspace::Own(own) => Ok(own.as_ref().map_or(core::ptr::null_mut(), DeviceMemory::ptr)),
            Workspace::Lent(ptr, bytes) if *bytes as u64 >= needed => Ok(*ptr),
            Workspace::Lent(_, bytes) => Err(Error::invalid(
                "workspace",
                format!("{bytes} bytes"),
                format!("at least {needed} bytes for this plan"),
            )
            .hint("ask every plan, forward and backward, for its workspace, and lend the largest")),
        }
    }

    fn known(&self, plan: &Plan, direction: Direction) -> Option<usize> {
        self.prepared.iter().position(|e| e.prepared.is(plan, Job::Attention(direction)))
    }

    /// Refuses what no run of a plan could honour here. Found while planning, it ends nobody's run.
    fn suits(&self, plan: &Plan) -> Result<()> {
        plan.fits_world(self.transport.world())?;
        let p = plan.problem();
        if plan.options().reproducible {
            return Err(Error::unsupported(
                "reproducible on a device",
                "the CUDA kernels do not align tiles to positions",
                "run it on the CPU, or plan without it: runs still repeat bit for bit on one mesh",
            ));
        }
        self.device().accept_score(&p.score())?;
        self.device().is_prepared(p.dtype(), p.head_dim() as u32, p.value_dim() as u32).map(|_| ())
    }

    fn ready(&mut self, plan: &Plan, direction: Direction) -> Result<usize> {
        if let Some(i) = self.known(plan, direction) {
            return Ok(i);
        }
        self.suits(plan)?;
        let p = plan.problem();
        let cuda = Arc::clone(self.transport.device());
        cuda.prepare(p.dtype(), p.head_dim() as u32, p.value_dim() as u32)?;
        let mut prepared = Prepared::new(plan, self.rank(), Job::Attention(direction))?;
        let mut events: Vec<Option<Event>> = (0..prepared.schedule.ops.len()).map(|_| None).collect();
        for op in &prepared.schedule.ops {
            if let Some(after) = op.after
                && events[after as usize].is_none()
            {
                events[after as usize] = Some(Event::new(cuda.context())?);
            }
        }
        let slopes = match p.slopes() {
            Some(s) => {
                let memory = cuda.allocate(size_of_val(s))?;
                memory.upload(bytemuck::cast_slice(s))?;
                Some(memory)
            }
            None => None,
        };
        self.make_room(plan, &mut prepared)?;
        if self.prepared.len() == REMEMBERED {
            self.settle()?;
            self.prepared.remove(0);
        }
        self.prepared.push(Enqueueable { prepared, events, slopes });
        Ok(self.prepared.len() - 1)
    }

    /// Workspace and rings for one more schedule.
    fn make_room(&mut self, plan: &Plan, prepared: &mut Prepared) -> Result<()> {
        let cuda = Arc::clone(self.transport.device());
        let tensors = bind::placeholders(plan, prepared, dangling);
        let memory = Memory { tensors, workspace: core::ptr::without_provenance_mut(ALIGNMENT as usize) };
        let mut measure = Measure::new(&cuda);
        let Prepared { schedule, compute, .. } = prepared;
        for op in 0..schedule.ops.len() {
            // SAFETY: `Measure` touches no memory.
            unsafe { perform(plan, schedule, op, &memory, compute, &mut measure) }?;
        }
        self.transport.reserve(measure.messages);
        // Two runs in flight fit the ring, so that the host need not wait for the first to enqueue the second.
        let (mut bytes, mut launches) = (2 * measure.bytes + measure.largest, 2 * measure.launches + 1);
        let have = self.staging.as_ref().map_or((0, 0), |(rings, launches)| (rings[0].bytes(), *launches));
        if have.0 < bytes || have.1 < launches {
            (bytes, launches) = (bytes.max(have.0), launches.max(have.1));
            self.settle()?;
            self.staging = None;
            self.staging = Some(([cuda.staging(bytes, launches)?, cuda.staging(bytes, launches)?], launches));
        }
        let needed = schedule.workspace as usize;
        let short = |own: &Option<DeviceMemory>| needed > 0 && own.as_ref().is_none_or(|m| m.bytes() < needed);
        if matches!(&self.workspace, Workspace::Own(own) if short(own)) {
            self.settle()?;
            if let Workspace::Own(own) = &mut self.workspace {
                *own = None;
                *own = Some(cuda.allocate(needed)?);
            }
        }
        Ok(())
    }

    /// Enqueues a run behind what is on `stream` so far, and behind this rank's earlier runs; what is put on `stream` later
    /// comes after it. Returns once all of it is enqueued; only with more than two runs in flight it may wait for the
    /// oldest.
    ///
    /// All ranks of the group must call it with equal plans in the same order, each from a thread of its own.
    ///
    /// # Errors
    /// As [`Rank::run`](super::Rank::run): a tensor or stream that cannot be taken is refused before anything moves. And
    /// the driver's; after these nothing of the run is left on the device.
    ///
    /// # Safety
    /// `stream` is one of the driver's and was not destroyed. When the run gets to them, in stream order, the tensors are
    /// valid device memory for reads (inputs) or writes (outputs) that nobody else uses until the run is over.
    pub unsafe fn run(&mut self, plan: &Plan, direction: Direction, tensors: &Bindings, stream: Stream) -> Result<()> {
        let at = self.ready(plan, direction)?;
        tensors.check(plan, &self.prepared[at].prepared)?;
        for (tensor, raw) in tensors.used(direction, plan.problem().has_sinks()) {
            // What attention itself may read or write is read 16 bytes at a time, on whatever mesh; the rest is only
            // copied.
            let whole = matches!(tensor, TensorId::Q | TensorId::K | TensorId::V | TensorId::O | TensorId::DO);
            self.device().accept(tensor.name(), raw, if whole { 16 } else { raw.dtype.size() })?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.device().accept_stream(stream) }?;
        let workspace = self.room(at)?;
        if let Workspace::Lent(..) = self.workspace {
            let bytes = self.prepared[at].prepared.schedule.workspace;
            let used = tensors.used(direction, plan.problem().has_sinks());
            bind::apart_from(workspace, bytes, used.map(|(tensor, raw)| (tensor.name(), *raw)))?;
        }
        let group = self.prepared[at].prepared.schedule.group.clone();
        if group.len() > 1 {
            self.transport.agree(group, self.prepared[at].prepared.job.fingerprint(plan))?;
        }
        let memory = Memory { tensors: *tensors, workspace };
        let transport = Arc::clone(&self.transport);
        let watch = Watch(&*transport);
        // SAFETY: the caller's promise; the tensors fit the plan (checked), the workspace is large enough.
        let outcome = unsafe { self.enqueue(at, &memory, stream) };
        std::mem::forget(watch);
        if outcome.is_err() {
            self.transport.abort(Cause::Failed);
            // Best effort: if the driver cannot even wait, the first error says more than this one would.
            let _ = self.transport.synchronize();
            // SAFETY: the caller's promise.
            let _ = unsafe { self.transport.device().synchronize(stream) };
        }
        outcome
    }

    unsafe fn enqueue(&mut self, at: usize, memory: &Memory, stream: Stream) -> Result<()> {
        let Enqueueable { prepared, events, slopes } = &mut self.prepared[at];
        let Prepared { plan, schedule, compute, communication, .. } = prepared;
        let cuda = Arc::clone(self.transport.device());
        let _entered = cuda.context().enter()?;
        let Some((staging, _)) = &mut self.staging else {
            return Err(Error::invalid("staging", "missing", "made by prepare"));
        };
        let heads = plan.problem().heads() as u32;
        let slopes = slopes.as_ref().map_or(RawTensor::NONE, |m| RawTensor::compact(m.ptr(), Dtype::F32, 1, heads, 1));
        let other = self.transport.stream();
        self.marks.over.hold(stream)?;
        self.marks.begin.record(stream)?;
        self.marks.begin.hold(other)?;
        for (i, op) in schedule.ops.iter().enumerate() {
            let (lane, room) = match op.lane {
                Lane::Compute => (0, &mut *compute),
                Lane::Communication => (1, &mut *communication),
            };
            let on = [stream, other][lane];
            if let Some(event) = op.after.and_then(|after| events[after as usize].as_ref()) {
                event.hold(on)?;
            }
            let mut device =
                Device { cuda: &cuda, transport: &*self.transport, stream: on, staging: &mut staging[lane], slopes };
            // SAFETY: the caller's promise; events keep the order that the schedule asks for.
            unsafe { perform(plan, schedule, i, memory, room, &mut device) }?;
            if let Some(event) = &events[i] {
                event.record(on)?;
            }
        }
        self.marks.end.record(other)?;
        self.marks.end.hold(stream)?;
        self.marks.over.record(stream)
    }
}

impl Drop for DeviceRank {
    fn drop(&mut self) {
        // The workspace and the rings must outlive what was enqueued; a failure means that the context is gone.
        let _ = self.settle();
    }
}
