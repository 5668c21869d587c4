// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank, on host memory or on a device: the same plans, the same calls.
//!
//! What differs behind it: on the CPU two threads and host memory, where a run returns when it is over; on
//! a device two streams and device memory, where a run returns when it is enqueued. What only one of them can do is
//! refused on the other, by name.

use std::{
    boxed::Box,
    sync::Arc,
    time::{Duration, Instant},
    vec::Vec,
};

#[cfg(feature = "cuda")]
use super::device::{DeviceRank, Marks};
use super::{bind::Bindings, handle::AbortHandle, host_rank::HostRank, run::Purpose};
use crate::{
    call::RawStream,
    device::Device,
    error::{Error, Result},
    kernel::{cpu, no_stream},
    plan::Plan,
    report::trace,
    schedule::Direction,
    transport::{
        Transport,
        ring_check::{Link, Trouble},
    },
};
#[cfg(feature = "cuda")]
use crate::{
    kernel::{cuda::Cuda, no_isa},
    transport::DeviceTransport,
};

/// Operations that a rank records at most until they are taken: each has memory, and on a device two events, from the start.
const MOST_RECORDED: usize = 1 << 24;

/// One rank: runs the plans that all ranks of its group run.
///
/// Dropping it means that the rank leaves; peers that still need it get an error. On a device it first waits for what it
/// enqueued. A rank is used by one thread at a time; its [`AbortHandle`] is for others.
pub struct Rank {
    inner: Inner,
}

enum Inner {
    Host(Box<HostRank>),
    #[cfg(feature = "cuda")]
    Device(Box<DeviceRank>),
}

impl core::fmt::Debug for Rank {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (rank, world, device) = (self.rank(), self.world(), self.device());
        f.debug_struct("Rank")
            .field("rank", &rank)
            .field("world", &world)
            .field("device", &device)
            .finish_non_exhaustive()
    }
}

impl Rank {
    /// A rank at one end of a transport of host memory, with one worker for its kernels.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_workers(transport, 1)
    }

    /// A rank whose kernels spread over `workers` threads (with the feature `rayon`). Results do not depend on it.
    pub fn with_workers(transport: impl Transport + 'static, workers: usize) -> Self {
        Self { inner: Inner::Host(Box::new(HostRank::new(transport, cpu::Scratch::new(workers)))) }
    }

    /// As [`Rank::with_workers`], on threads of the caller's.
    pub fn with_executor(
        transport: impl Transport + 'static,
        workers: usize,
        executor: Arc<dyn cpu::Executor>,
    ) -> Self {
        let scratch = cpu::Scratch::new(workers).with_executor(executor);
        Self { inner: Inner::Host(Box::new(HostRank::new(transport, scratch))) }
    }

    /// From now on the CPU kernels of this rank run on this instruction set; for `None` on the best of the machine, or what
    /// the environment variable [`cpu::Isa::VARIABLE`] names. Keep it between a forward and its backward. Instruction sets
    /// round differently: with [`Options::reproducible`](crate::plan::Options::reproducible) all ranks need the same one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the machine lacks it, or the rank is on a device; nothing has changed then.
    pub fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()> {
        match &mut self.inner {
            Inner::Host(rank) => rank.set_isa(isa),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => isa.map_or(Ok(()), |isa| Err(no_isa(isa, rank.device().ordinal()))),
        }
    }

    /// A rank at one end of a transport of device memory: its tensors are on the transport's device. Its runs come one
    /// after another, whatever streams they are put on, because they share one workspace.
    ///
    /// Two ranks on one device, each a thread; usually each has a device of its own:
    ///
    /// ```no_run
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Result, Side, transport::peer};
    /// use cpattn::call::RawTensor;
    /// use cpattn::kernel::cuda::Cuda;
    /// use cpattn::runtime::Bindings;
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
    ///         let mut rank = Rank::on_device(end)?;
    ///         let (cuda, n) = (&device, plan.local_tokens(Side::Q, rank.rank()) as u64);
    ///         let bytes = |heads: u64, dim: u64, dtype: Dtype| (n * heads * dim) as usize * dtype.size();
    ///         // Device memory of any allocator will do; q, k and v are to be filled with this rank's tokens (Plan::shard).
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
    ///         // SAFETY: the memory lives until the stream was waited for, and nothing else uses it.
    ///         unsafe { rank.run_on(&plan, Direction::Forward, &tensors, stream) }?;
    ///         rank.synchronize()?;
    ///         rank.poll() // whether anything failed meanwhile, on any rank
    ///     };
    ///     let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || run(end))).collect();
    ///     threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    /// })?;
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// The driver's.
    #[cfg(feature = "cuda")]
    pub fn on_device(transport: impl DeviceTransport + 'static) -> Result<Self> {
        let marks = Marks::new(transport.device())?;
        Ok(Self::on_device_with(transport, marks))
    }

    /// As [`Rank::on_device`], with what could fail made before.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device_with(transport: impl DeviceTransport + 'static, marks: Marks) -> Self {
        Self { inner: Inner::Device(Box::new(DeviceRank::with(transport, marks))) }
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        match &self.inner {
            Inner::Host(rank) => rank.transport().rank(),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.rank(),
        }
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        match &self.inner {
            Inner::Host(rank) => rank.transport().world(),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.world(),
        }
    }

    /// Where its tensors are.
    pub fn device(&self) -> Device {
        match &self.inner {
            Inner::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => Device::Cuda(rank.device().ordinal()),
        }
    }

    /// The CUDA device that its tensors are on; `None` on the CPU.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&Arc<Cuda>> {
        match &self.inner {
            Inner::Host(_) => None,
            Inner::Device(rank) => Some(rank.device()),
        }
    }

    /// Whether anything has failed so far, on any rank, or on the device in what was enqueued; never waits.
    ///
    /// Also while graphs are being captured, in which case what is captured counts as not over. What waits for the rank is
    /// refused while one of its runs is being captured, and leaves the capture as it was: [`Rank::synchronize`],
    /// [`Rank::record`], the calls that lend workspace or take it back, [`Rank::prepare`] of what is not prepared, and a run on
    /// a stream that is not part of that capture.
    pub fn poll(&self) -> Result<()> {
        match &self.inner {
            Inner::Host(rank) => rank.poll(),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.poll(),
        }
    }

    /// As [`ring_check::check`](crate::transport::ring_check::check), by ranks: between runs, all ranks of the group alike. On a
    /// device it waits for what this rank enqueued, and messages go from device to device. A failure ends the group.
    ///
    /// # Errors
    /// As there; [`Trouble::Failed`] without a link if the group has failed before, or one of this rank's runs is being captured.
    pub fn check_ring(&mut self, bytes: usize) -> Result<Vec<Link>, Trouble> {
        match &self.inner {
            Inner::Host(rank) => rank.check_ring(bytes),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.check_ring(bytes),
        }
    }

    /// For other threads.
    pub fn handle(&self) -> AbortHandle {
        match &self.inner {
            Inner::Host(rank) => rank.handle(),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.handle(),
        }
    }

    /// Waits on the host until what this rank enqueued is over. On the CPU a run is over when it returns.
    ///
    /// # Errors
    /// The driver's; [`Error::Disagreement`](crate::Error::Disagreement) where a peer was found to run something else.
    pub fn synchronize(&self) -> Result<()> {
        match &self.inner {
            Inner::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.synchronize(),
        }
    }

    /// Starts to record what each lane does, for at most `capacity` operations from now on, and as many again whenever
    /// [`Rank::events`] has taken them; 0 stops. Times count from `epoch`, which ranks should share.
    ///
    /// On a device an operation lies between two events with timing on the stream of its lane, which are made now: that of
    /// an exchange includes the wait for its peers. The device's clock is tied to `epoch`'s now, when the call has waited for
    /// what the rank enqueued, and anew when [`Rank::events`] has taken all there was:
    /// [`Rank::trace_accuracy`] says how well. Durations are as exact as the driver's events, half a microsecond. A run that
    /// records puts two more events on a stream for each operation, and waits no more than others do. It cannot be captured
    /// into a graph, and replays of graphs are not recorded.
    ///
    /// # Errors
    /// A capacity above 2^24; an epoch that has not come yet; the driver's.
    pub fn record(&mut self, epoch: Instant, capacity: usize) -> Result<()> {
        if capacity > MOST_RECORDED {
            return Err(Error::invalid("capacity", capacity, std::format!("at most {MOST_RECORDED} operations")));
        }
        if let Some(ahead) = epoch.checked_duration_since(Instant::now()).filter(|a| capacity > 0 && !a.is_zero()) {
            let found = std::format!("{ahead:?} from now");
            return Err(Error::invalid("epoch", found, "a moment that has passed, since times count from it"));
        }
        match &mut self.inner {
            Inner::Host(rank) => {
                rank.record(epoch, capacity);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.record(epoch, capacity),
        }
    }

    /// What was recorded since the last call, in the order in which operations ended within each lane.
    ///
    /// On a device: of operations that are over by now, without a wait for others, which a later call tells. Call
    /// [`Rank::synchronize`] first to have them all. Of a device that failed, [`Rank::poll`] says why nothing comes.
    pub fn events(&mut self) -> Vec<trace::Event> {
        match &mut self.inner {
            Inner::Host(rank) => rank.events(),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.events(),
        }
    }

    /// By how much the times of recorded events may be off on the clock of `epoch`, beside the resolution of half a
    /// microsecond and f32 milliseconds (of which a step is a microsecond from 8 s after [`Rank::record`], or the last
    /// [`Rank::events`] that took all, on): half the shortest time that the host took to record an event on the idle
    /// stream and to see it done. 0 on the CPU, and while nothing is recorded.
    pub fn trace_accuracy(&self) -> Duration {
        match &self.inner {
            Inner::Host(_) => Duration::ZERO,
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.trace_accuracy(),
        }
    }

    /// Bytes of workspace that running `plan` in `direction` takes on this rank, the kernels' tiles aside. Allocates nothing
    /// on a device: a caller that means to lend the workspace need not have room for two.
    ///
    /// # Errors
    /// As [`Rank::prepare`], memory and driver aside.
    pub fn workspace_bytes(&mut self, plan: &Plan, direction: Direction) -> Result<u64> {
        self.workspace_of(plan, Purpose::Attention(direction))
    }

    /// As [`Rank::workspace_bytes`], of a run of any kind.
    pub(super) fn workspace_of(&mut self, plan: &Plan, run: Purpose) -> Result<u64> {
        match &mut self.inner {
            Inner::Host(rank) => rank.workspace_bytes(plan, run),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.workspace_bytes(plan, run),
        }
    }

    /// Lends the rank memory to work in, where its tensors lie, instead of memory of its own. On a device it waits
    /// for what the rank enqueued.
    ///
    /// # Safety
    /// The `bytes` at `ptr` must stay valid and untouched by others until another workspace is lent, this one is
    /// [taken back](Rank::take_workspace_back), or the rank is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if `ptr` is not a multiple of
    /// [`ALIGNMENT`](crate::schedule::ALIGNMENT), or, on a device, the first or last byte is not memory of that device.
    pub unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        match &mut self.inner {
            // SAFETY: the memory is valid for as long as it is lent (promised).
            Inner::Host(rank) => unsafe { rank.lend_workspace(ptr, bytes) },
            #[cfg(feature = "cuda")]
            // SAFETY: the memory is valid for as long as it is lent (promised).
            Inner::Device(rank) => unsafe { rank.lend_workspace(ptr, bytes) },
        }
    }

    /// Ends the lending: from now on the rank works in memory of its own again. On a device it waits for what the rank
    /// enqueued; memory of its own is allocated by [`Rank::prepare`] or the next run.
    ///
    /// # Errors
    /// The driver's.
    pub fn take_workspace_back(&mut self) -> Result<()> {
        match &mut self.inner {
            Inner::Host(rank) => {
                rank.take_workspace_back();
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.take_workspace_back(),
        }
    }

    /// Bytes of scheduler metadata that the rank keeps on its device, for all plans that it remembers: its last 16 plans and directions,
    /// and all that were captured into a graph. [`Plan::explain`] bounds them for each plan. 0 on the CPU.
    pub fn metadata_bytes(&self) -> u64 {
        match &self.inner {
            Inner::Host(_) => 0,
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.metadata_bytes(),
        }
    }

    /// Does all that may allocate, load or upload: the schedule, the workspace, the kernels' tiles and the communication
    /// lane's thread; on a device kernels, scheduler metadata and events. Optional, but for a run that is captured into a CUDA graph;
    /// the first run of a plan does it otherwise.
    ///
    /// # Errors
    /// A plan for another world; a lent workspace that is too small; a machine without the memory or the thread. On a
    /// device an element type or head dim without a kernel, and the driver's.
    pub fn prepare(&mut self, plan: &Plan, direction: Direction) -> Result<()> {
        self.prepare_run(plan, Purpose::Attention(direction))
    }

    /// As [`Rank::prepare`], for a run of any kind.
    pub(super) fn prepare_run(&mut self, plan: &Plan, run: Purpose) -> Result<()> {
        match &mut self.inner {
            Inner::Host(rank) => rank.prepare(plan, run),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => rank.prepare(plan, run),
        }
    }

    /// Runs a plan on tensors given without their types: [`Rank::run_on`] with no stream, which on a device is the legacy
    /// default stream.
    ///
    /// # Errors
    /// As [`Rank::run_on`].
    ///
    /// # Safety
    /// As [`Rank::run_on`].
    pub unsafe fn run(&mut self, plan: &Plan, direction: Direction, tensors: &Bindings) -> Result<()> {
        // SAFETY: the tensors are as promised, and there is always a default stream.
        unsafe { self.run_on(plan, direction, tensors, core::ptr::null_mut()) }
    }

    /// Runs a plan on tensors given without their types.
    ///
    /// All ranks of the group must call it with equal plans in the same order, on a device each from a thread of its own.
    /// That they do is checked before anything moves when the group first runs a plan in a direction, and in later runs with
    /// the first message between each two ranks.
    ///
    /// On a device the later check is the device's: hosts do not meet for it, and a graph that is replayed makes it too. What
    /// is found is returned by [`Rank::poll`], [`Rank::synchronize`] and the next run, and the rank stays failed. Whatever
    /// arrives at a rank that met one which differs is overwritten with NaN, so the results that depend on it are NaN.
    ///
    /// On a device the run is enqueued behind what is on `stream` so far, and behind this rank's earlier runs; what is put on
    /// `stream` later comes after it. The call returns once all of it is enqueued, and never waits for the device.
    ///
    /// # CUDA graphs
    /// While `stream` is being captured, the run becomes part of the graph: each replay reads and writes the tensors and the
    /// workspace that were given now, behind the rank's runs and replays that were enqueued before it. Call
    /// [`Rank::prepare`] before the capture begins. The rank keeps what its graphs use until it is dropped: the graphs
    /// must have done their last replay by then, and a lent workspace must stay theirs. Replays and runs of one rank come
    /// from one thread, or from threads that take turns. Ranks of transport [`peer`](crate::transport::peer) are captured
    /// into one graph, all of them: the capture begins on the stream of one, and the streams of the others join it by an
    /// event and join back before it ends. A rank whose peer is in another graph, or in none, refuses the exchange with
    /// [`Error::Unsupported`](crate::Error::Unsupported), and the group has failed.
    ///
    /// # Errors
    /// A tensor that does not fit the plan or shares memory with another that is written; ranks that run different things;
    /// a peer that failed; on the CPU, a stream; on a device, a capture of a plan that is not prepared or over a transport
    /// whose exchanges cannot be captured, and the driver's: after these nothing of the run is left on the device, nor does a
    /// peer still read the tensors. What is
    /// wrong with one rank's own tensors is only that rank's error: the others wait for it until their deadline, unless it
    /// calls again or aborts. [`Error::Disagreement`](crate::Error::Disagreement) in a first run is no failure: the ranks
    /// may plan again. After any other error of a run that has begun the group stays failed, and so does the rank, which
    /// repeats its first error: make new ranks.
    ///
    /// # Safety
    /// The tensors describe memory that is valid for reads (inputs) or writes (outputs) and used by nothing else during
    /// the call; on a device, when the run gets to them, in stream order, and until it is over; the same holds for each replay of a
    /// graph that it was captured into. `stream` is null or one of the driver's that was not destroyed.
    pub unsafe fn run_on(
        &mut self,
        plan: &Plan,
        direction: Direction,
        tensors: &Bindings,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the tensors and the stream are as this function asks for them.
        unsafe { self.run_any(plan, Purpose::Attention(direction), tensors, stream) }
    }

    /// As [`Rank::run_on`], a run of any kind.
    ///
    /// # Safety
    /// As [`Rank::run_on`].
    pub(super) unsafe fn run_any(
        &mut self,
        plan: &Plan,
        run: Purpose,
        tensors: &Bindings,
        stream: RawStream,
    ) -> Result<()> {
        match &mut self.inner {
            Inner::Host(rank) => {
                no_stream(stream)?;
                // SAFETY: the tensors are valid and used by nothing else during the call (the contract of this function).
                unsafe { rank.run(plan, run, tensors) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: tensors and stream are as the contract of this function has them.
            Inner::Device(rank) => unsafe { rank.run(plan, run, tensors, stream.cast()) },
        }
    }

    /// The rank where it is on the CPU, for what needs host memory; else a refusal with the way out.
    pub(super) fn on_host_for(&mut self, what: &'static str, way_out: &'static str) -> Result<&mut HostRank> {
        // Without devices there is nothing to refuse.
        let _ = (what, way_out);
        match &mut self.inner {
            Inner::Host(rank) => Ok(rank),
            #[cfg(feature = "cuda")]
            Inner::Device(rank) => Err(crate::Error::unsupported(
                std::format!("{what} of a rank on {}", Device::Cuda(rank.device().ordinal())),
                "it works on host memory",
                way_out,
            )),
        }
    }
}
