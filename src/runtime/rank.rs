// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank, on host memory or on a device: the same plans, the same calls.
//!
//! On the CPU a rank has two threads and host memory, and a run returns when it is complete. On a device it has two
//! streams and device memory, and a run returns when it is enqueued. A call that only one of them supports is refused
//! on the other.

use std::{boxed::Box, sync::Arc, vec::Vec};

#[cfg(feature = "cuda")]
use super::device::DeviceRank;
use super::{
    backend::Backend, bind::Bindings, handle::AbortHandle, host_rank::HostRank, rank_workspace::RankWorkspace,
};
use crate::{
    device::Device,
    error::Result,
    kernel::{cpu, varlen::VarlenKernel},
    plan::Plan,
    schedule::Purpose,
    transport::{
        Transport,
        ring_check::{Link, RingFault},
    },
};
#[cfg(feature = "cuda")]
use crate::{kernel::cuda::Cuda, transport::DeviceTransport};

/// One participant of a group: runs the plans that all ranks of its group run.
///
/// Dropping a rank means that it leaves the group; peers that still need it get an error. On a device it first waits
/// for the work it enqueued. One thread at a time uses a rank; an [`AbortHandle`] is for other threads. A process that
/// was forked does not have the threads of its parent's ranks: what needs them is refused, and a new group is made
/// there.
pub struct Rank {
    pub(super) backend: Box<dyn Backend>,
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
    /// Makes a rank over a transport of host memory, with one thread for its kernels.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self::with_workers(transport, 1)
    }

    /// Makes a rank whose kernels use `workers` threads, with the feature `rayon`; without it every run of more than
    /// one is refused ([`Rank::with_executor`] needs no feature). Results do not depend on the number.
    pub fn with_workers(transport: impl Transport + 'static, workers: usize) -> Self {
        Self { backend: Box::new(HostRank::new(transport, cpu::Scratch::new(workers))) }
    }

    /// As [`Rank::with_workers`], on the caller's threads.
    pub fn with_executor(
        transport: impl Transport + 'static,
        workers: usize,
        executor: Arc<dyn cpu::Executor>,
    ) -> Self {
        let scratch = cpu::Scratch::new(workers).with_executor(executor);
        Self { backend: Box::new(HostRank::new(transport, scratch)) }
    }

    /// Makes a rank whose attention `kernel` computes; the rest is as with [`Rank::new`]. All ranks of a group need the
    /// same kernel: they compare its name and what it [honours](VarlenKernel::honours) before the first run of a plan.
    /// What it does not honour is refused before anything moves. A library without the feature `kernels` refuses all
    /// attention, this too.
    ///
    /// The first run of a plan allocates the packed tensors of the kernel's calls.
    pub fn with_kernel(transport: impl Transport + 'static, kernel: impl VarlenKernel + 'static) -> Self {
        Self { backend: Box::new(HostRank::new(transport, cpu::Scratch::new(1)).with_kernel(kernel)) }
    }

    /// Sets the instruction set of this rank's CPU kernels; `None` selects the best of the machine, or what the
    /// environment variable [`cpu::Isa::VARIABLE`] names. Use the same one for a forward and its backward. Instruction
    /// sets round differently: with [`Options::reproducible`](crate::plan::Options::reproducible) all ranks need the
    /// same one.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the machine lacks it, or the rank is on a device; nothing
    /// is changed then.
    pub fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()> {
        self.backend.set_isa(isa)
    }

    /// On a device, leaves `n` multiprocessors free of attention as long as this rank lives, so that a communicator's
    /// kernels find room beside it. The largest margin of all ranks and scratches of the process applies.
    ///
    /// # Errors
    /// On the CPU for any number but 0; a device that does not have more than `n`. Nothing is changed then.
    pub fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        self.backend.set_sm_margin(n)
    }

    /// Makes a rank over a transport of device memory; its tensors are on the transport's device. Its runs execute one
    /// after another, even on different streams, because they share one workspace.
    ///
    /// Two ranks on one device, each a thread; usually each has a device of its own:
    ///
    /// ```no_run
    /// use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, transport::peer};
    /// use cpattn::kernel::cuda::Cuda;
    /// use cpattn::{DeviceView, DeviceViewMut};
    /// use half::bf16;
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
    ///         let (at, n) = (rank.device(), plan.local_tokens(Side::Q, rank.rank()).len());
    ///         // Device memory of any allocator will do; q, k and v are to be filled with this rank's tokens (LocalTokens::shard).
    ///         let room = |heads: usize, dim: usize, bytes: usize| device.allocate(n * heads * dim * bytes);
    ///         let (q, k, v) = (room(4, 64, 2)?, room(2, 64, 2)?, room(2, 64, 2)?);
    ///         let (o, lse) = (room(4, 64, 2)?, room(4, 1, 4)?);
    ///         // SAFETY: the memory lives until the rank was waited for, and nothing else uses it.
    ///         let call = unsafe {
    ///             Forward::new(
    ///                 DeviceView::<bf16>::compact(at, q.ptr().cast(), [n, 4, 64])?,
    ///                 DeviceView::compact(at, k.ptr().cast(), [n, 2, 64])?,
    ///                 DeviceView::compact(at, v.ptr().cast(), [n, 2, 64])?,
    ///                 DeviceViewMut::compact(at, o.ptr().cast(), [n, 4, 64])?,
    ///                 DeviceViewMut::compact(at, lse.ptr().cast(), [n, 4, 1])?,
    ///             )
    ///         };
    ///         let stream = null_mut(); // the legacy default stream, or a cudaStream_t of the caller's, cast
    ///         // SAFETY: there is always a default stream.
    ///         rank.forward(&plan, unsafe { call.on(stream) })?;
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
        Ok(Self { backend: Box::new(DeviceRank::new(transport)?) })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.backend.transport().rank()
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.backend.transport().world()
    }

    /// Where its tensors are.
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// The CUDA device that its tensors are on; `None` on the CPU.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&Arc<Cuda>> {
        self.backend.cuda()
    }

    /// Whether anything has failed so far, on any rank, or on the device in what was enqueued; never waits.
    ///
    /// It can be called while graphs are being captured; captured work counts as unfinished. Calls that wait for the
    /// rank are refused while one of its runs is being captured, and the capture stays valid: [`Rank::synchronize`],
    /// [`RankTrace::record`](super::RankTrace::record), the calls that lend workspace or take it back,
    /// [`Rank::prepare`] of a plan that is not prepared, and a run on a stream that is not part of that capture.
    pub fn poll(&self) -> Result<()> {
        self.backend.failure().poll(self.backend.transport())
    }

    /// Sends test messages over every link of the ring and measures them ([`Link::check_all`]). Collective: all ranks
    /// of the group call it, between runs. On a device it waits for the work that this rank enqueued, and messages go
    /// from device to device. A failure ends the group.
    ///
    /// # Errors
    /// The errors of [`Link::check_all`]; [`RingFault::Failed`] without a link if the group has failed before, or one
    /// of this rank's runs is being captured.
    pub fn check_ring(&mut self, bytes: usize) -> Result<Vec<Link>, RingFault> {
        self.backend.check_ring(bytes)
    }

    /// A handle for other threads.
    pub fn handle(&self) -> AbortHandle {
        self.backend.handle()
    }

    /// Waits on the host until the work that this rank enqueued is complete. On the CPU a run is complete when it
    /// returns.
    ///
    /// # Errors
    /// The driver's; [`Error::Disagreement`](crate::Error::Disagreement) if a peer was found to run another plan.
    pub fn synchronize(&self) -> Result<()> {
        self.backend.synchronize()
    }

    /// The memory that its runs work in: its own, or lent by the caller.
    pub fn workspace(&mut self) -> RankWorkspace<'_> {
        RankWorkspace::new(&mut *self.backend)
    }

    /// Allocates, loads and uploads everything that a run of `plan` needs, for a direction of attention, an all-to-all
    /// ([`AllToAll::both`](crate::schedule::AllToAll::both)), a combine or a scan: the schedule, the workspace, the
    /// kernels' tiles and the communication lane's thread; on a device kernels, scheduler metadata and events. Required
    /// before a run that is captured into a CUDA graph, otherwise optional: the first run of a plan does it.
    ///
    /// A rank keeps the last 16 pairs of a plan and a purpose that it prepared or ran,
    /// by the value of the plan: equal plans share one. A run of a plan that it no longer keeps prepares it again.
    ///
    /// # Errors
    /// A plan for another world; a lent workspace that is too small; memory or a thread that the system refuses. On a
    /// device an element type or head dim without a kernel, and the driver's.
    pub fn prepare(&mut self, plan: &Plan, purpose: impl Into<Purpose>) -> Result<()> {
        self.backend.prepare(plan, purpose.into())
    }

    /// Runs a plan on untyped tensors: attention in a direction, an all-to-all (`TensorId::OwnTokens` and
    /// `TensorId::OwnHeads`) or a combine (`TensorId::PartialO`, `TensorId::PartialLse`, o, lse, and sinks if the
    /// problem has some; on the CPU).
    ///
    /// All ranks of the group must call it with equal plans in the same order, on a device each from its own thread.
    /// This is checked before any data moves when the group first runs a plan for a purpose, and in later runs with
    /// the first message between each two ranks.
    ///
    /// On a device the later check runs on the device, without synchronising hosts, and also in replays of a graph. A
    /// difference is returned by [`Rank::poll`], [`Rank::synchronize`] and the next run, and the rank stays failed. A
    /// rank with a peer that differs overwrites the data it receives with NaN, so the results that depend on it are
    /// NaN.
    ///
    /// On a device the run is enqueued on the stream of the tensors ([`Bindings::on`]) in stream order, and after this
    /// rank's earlier runs. The call returns when all of it is enqueued, and does not wait for the device.
    ///
    /// # CUDA graphs
    /// While the stream is being captured, the run becomes part of the graph: each replay reads and writes the tensors
    /// and the workspace of the captured run, after the rank's runs and replays that were enqueued before it. Call
    /// [`Rank::prepare`] before the capture begins. The rank keeps what its graphs use until it is dropped: the last
    /// replay must be complete by then, and a lent workspace must stay valid. Replays and runs of one rank must not
    /// overlap, since kernels of a plan count in memory that all of them share. The rank orders those that are launched
    /// one after the other; they must not be launched by several threads at the same time. Ranks of transport
    /// [`peer`](crate::transport::peer) are captured into one graph, all of them: the capture begins on the stream of
    /// one, and the streams of the others join it by an event and join back before it ends. A rank whose peer is in
    /// another graph, or in none, refuses the exchange with [`Error::Unsupported`](crate::Error::Unsupported), and the
    /// group has failed.
    ///
    /// # Errors
    /// | error | afterwards |
    /// |---|---|
    /// | a tensor that does not fit the plan, or shares memory with another that is written | on this rank alone: the others wait for it until their deadline, unless it calls again or aborts |
    /// | on the CPU, a stream; on a device, a capture of a plan that is not prepared, or over a transport whose exchanges cannot be captured | the same |
    /// | [`Error::Disagreement`](crate::Error::Disagreement) in the first run of a plan | the group stays usable, and the ranks may plan again |
    /// | any other error of a run that has begun: ranks that run different plans, a peer that failed, the driver's | the group stays failed, and the rank returns its first error from then on: make new ranks |
    ///
    /// On a device none of the run's work is left there after an error, and no peer still reads the tensors.
    ///
    /// # Safety
    /// The tensors describe memory that is valid for reads (inputs) or writes (outputs) and used by nothing else during
    /// the call; on a device this must hold, in stream order, from the start of the run's work to its end, and in each
    /// replay of a graph that captured it. So must a table of pages and lists of keys, and the entries of a table in
    /// device memory must be pages of k and v. The stream is null or one of the driver's that was not destroyed.
    pub unsafe fn run(&mut self, plan: &Plan, purpose: impl Into<Purpose>, tensors: &Bindings) -> Result<()> {
        // SAFETY: the tensors and their stream are as this function asks for them.
        unsafe { self.backend.run(plan, purpose.into(), tensors) }
    }
}
