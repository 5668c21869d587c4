// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks over NCCL: one process or thread for each GPU, on one host or many.
//!
//! An exchange is one group of `ncclSend` and `ncclRecv` on the transport's own stream: bytes (`ncclUint8`, 64-bit
//! counts), in the order of the lists, so that messages between two ranks match in that order. One communicator serves
//! every mesh. `exchange` enqueues and returns; nothing waits on the host for other ranks, except for the first
//! exchange of two ranks with each other, because NCCL connects them then. [`Transport::agree`] is a group of sends and
//! receives of 8 bytes between all ranks of a plan, which the host does wait for: so they are connected before the
//! first run of a plan enqueues anything.
//!
//! A communicator that this transport makes ([`Nccl::new`]) is non-blocking: NCCL waits in a thread of its own, and the
//! host polls until that is done, at most for the deadline. (Newer versions use such a thread for every group, even if
//! nothing has to wait: 2.28 does, 2.14 does not. `exchange` then includes the time to start a thread.) A framework's
//! communicator ([`Nccl::from_raw`]) is used as it is.
//!
//! # Failures
//! A watchdog thread (`watch.rs`) checks the oldest unfinished exchange and the communicator. When that exchange has
//! taken longer than the deadline, NCCL reports an error, or [`Transport::abort`] is called, it aborts the
//! communicator: NCCL's kernels end, streams continue, and data that did not arrive is missing, so the results of the
//! run are wrong. `poll`, `synchronize` and every later call then return the first failure, which names rank,
//! operation, step, peers, bytes and time. NCCL does not say which of several peers did not answer, so all peers of the
//! exchange are named. A rank that failed stays failed; a new group, with a new id, works on the same devices and
//! streams.
//!
//! The other ranks are not notified, since there is no channel beside NCCL. They notice the failure through NCCL, which
//! reports lost peers over sockets and InfiniBand, or by their own deadline. Over NVLink and shared memory NCCL reports
//! nothing, so only the deadline remains. So give every rank the same deadline, longer than a peer's kernels between
//! two exchanges may take.
//!
//! ```no_run
//! use cpattn::{Rank, kernel::cuda::Cuda, transport::nccl::{Nccl, UniqueId}};
//! use std::time::Duration;
//!
//! # fn broadcast(_: Option<[u8; 128]>) -> [u8; 128] { [0; 128] }
//! # let (rank, world) = (0, 1);
//! // One rank makes the id; MPI, a file, or a store of the framework's brings its bytes to the others.
//! let id = if rank == 0 { Some(UniqueId::new()?.to_bytes()) } else { None };
//! let id = UniqueId::from_bytes(broadcast(id));
//! let device = Cuda::shared(0)?; // this process's GPU
//! let transport = Nccl::new(&id, rank, world, &device, Duration::from_secs(60))?;
//! let mut rank = Rank::on_device(transport)?; // runs any plan for `world` ranks
//! # Ok::<(), cpattn::Error>(())
//! ```

mod comm;
mod sys;
mod unique_id;
mod watch;

pub use comm::OnFailure;
pub use unique_id::UniqueId;

use super::{DeviceTransport, Label, Message, Transport, rules};
use crate::{
    call::RawStream,
    device::{
        driver::{check, sys as driver},
        memory::OwnStream,
    },
    error::{Cause, Error, Result},
    kernel::cuda::{Cuda, DeviceMemory},
};
use comm::{CallRight, Communicator};
use core::{ffi::c_void, mem::ManuallyDrop, ops::Range};
use std::{
    format,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
    vec::Vec,
};
use watch::Watchdog;

/// One rank's transport over NCCL. Dropping it means that the rank leaves the group; this waits for enqueued work.
pub struct Nccl {
    rank: usize,
    world: usize,
    watch: Arc<Watchdog>,
    watchdog: Option<JoinHandle<()>>,
    stream: OwnStream,
    cuda: Arc<Cuda>,
    numbers: Mutex<Numbers>,
}

/// Memory of `agree` for the numbers of all ranks and this rank's own.
struct Numbers {
    device: ManuallyDrop<DeviceMemory>,
    host: Vec<u64>,
}

impl core::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Nccl").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Connects to the `world` ranks that have the same id, and makes a communicator with them. All of them call this,
    /// each with its own device.
    ///
    /// `deadline` is the timeout for the ranks to connect here, and later the longest time that an exchange may take.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL 2.14 or later; [`Error::Invalid`] for a rank that is not below `world`, an
    /// id of zeros, or a rank of this id that the process already has; [`Error::Peer`] when a rank does not connect
    /// before the deadline; [`Error::Device`] for what NCCL refuses, such as two ranks with the same number or the same
    /// device.
    pub fn new(id: &UniqueId, rank: usize, world: usize, device: &Arc<Cuda>, deadline: Duration) -> Result<Self> {
        comm::check_numbers(rank, world, deadline)?;
        let comm = Communicator::make(id.to_bytes(), rank, world, device, deadline)?;
        Self::with(comm, rank, world, device, deadline)
    }

    /// Uses a framework's communicator (`ncclComm_t`). The framework still owns it: dropping the transport does not
    /// free it. `rank`, `world` and `device` must be those of the communicator.
    ///
    /// # Errors
    /// As [`Nccl::new`], and [`Error::Invalid`] when the communicator is null, or of another rank, another world or
    /// another device.
    ///
    /// # Safety
    /// `comm` is null, or a communicator that lives until the transport is dropped. Nothing else makes calls with it
    /// while a run is being enqueued, and all its ranks enqueue their runs, and their other operations on it, in the
    /// same order.
    pub unsafe fn from_raw(
        comm: *mut c_void,
        rank: usize,
        world: usize,
        device: &Arc<Cuda>,
        deadline: Duration,
        on_failure: OnFailure,
    ) -> Result<Self> {
        comm::check_numbers(rank, world, deadline)?;
        // SAFETY: `comm` is null, or alive for as long as the transport, with no other call at the same time (the
        // contract).
        let comm = unsafe { Communicator::take(comm, on_failure, rank, world, device) }?;
        Self::with(comm, rank, world, device, deadline)
    }

    fn with(comm: Communicator, rank: usize, world: usize, cuda: &Arc<Cuda>, deadline: Duration) -> Result<Self> {
        let stream = OwnStream::new(cuda.context())?;
        let device = cuda.allocate(size_of::<u64>() * (world + 1))?;
        let watch = Arc::new(Watchdog::new(comm, cuda, rank, deadline)?);
        let thread = thread::Builder::new().name(format!("cpattn-nccl-{rank}"));
        let watchdog = thread.spawn({
            let watch = Arc::clone(&watch);
            move || watch.run()
        });
        let watchdog = watchdog.map_err(|error| Error::of_thread("a transport that watches its exchanges", &error))?;
        let numbers = Mutex::new(Numbers { device: ManuallyDrop::new(device), host: Vec::with_capacity(world) });
        let (cuda, watchdog) = (Arc::clone(cuda), Some(watchdog));
        Ok(Self { rank, world, watch, watchdog, stream, cuda, numbers })
    }

    /// Replaces this rank's deadline, also for the exchange in progress. Use it if ranks start at different times and
    /// need a longer timeout to connect than for later exchanges.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is 0.
    pub fn set_deadline(&self, deadline: Duration) -> Result<()> {
        rules::check_deadline(deadline)?;
        self.watch.set_deadline(deadline);
        Ok(())
    }

    /// Records the error of a call of this rank, ends the communicator, and returns the failure that counts. If the
    /// engine had failed before, the engine's error counts, whichever is noticed first.
    fn failed(&self, error: Error) -> Error {
        let of_engine = || self.watch.engines_report().unwrap_or(error);
        self.watch.verdict().err().unwrap_or_else(|| self.watch.fail(of_engine()))
    }

    /// Enqueues a group, and returns its number in the watchdog.
    ///
    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn enqueue(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<u64> {
        let turn = self.watch.comm.lock_calls()?;
        let stream = self.stream.handle();
        let number = self.watch.begin(label, [sends, recvs], stream)?;
        // SAFETY: the messages' bytes are valid until the exchange is over (the contract); the stream is the
        // transport's own.
        unsafe { self.group(&turn, sends, recvs) }?;
        self.watch.issued(stream)?;
        Ok(number)
    }

    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn group(&self, turn: &CallRight<'_>, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let (api, comm, stream) = (self.watch.comm.api(), turn.handle(), self.stream.handle().cast());
        // SAFETY: a call without conditions; the group ends below whatever happens in between.
        api.check("ncclGroupStart", unsafe { (api.ncclGroupStart)() })?;
        let mut outcome = Ok(());
        for m in sends {
            // SAFETY: a live communicator of which this thread has the turn, a stream of its device, and memory that
            // the caller promised to be valid for reads until the exchange is over.
            let code = unsafe { (api.ncclSend)(m.ptr.cast(), m.bytes, sys::UINT8, m.peer as i32, comm, stream) };
            outcome = outcome.and_then(|()| api.begun("ncclSend", code).map(|_| ()));
        }
        for m in recvs {
            // SAFETY: a live communicator of which this thread has the turn, a stream of its device, and memory that
            // the caller promised to be valid for writes until the exchange is over.
            let code = unsafe { (api.ncclRecv)(m.ptr.cast(), m.bytes, sys::UINT8, m.peer as i32, comm, stream) };
            outcome = outcome.and_then(|()| api.begun("ncclRecv", code).map(|_| ()));
        }
        // SAFETY: the group was begun above, on this thread.
        let code = unsafe { (api.ncclGroupEnd)() };
        if self.watch.comm.is_closed() {
            return Err(Communicator::gone());
        }
        outcome?;
        if api.begun("ncclGroupEnd", code)? {
            // The library puts the group into its stream, which waits for other ranks only if the group is the first
            // with one of them. The watchdog ends the wait.
            turn.wait_done("ncclGroupEnd", Duration::MAX)?;
        }
        Ok(())
    }

    /// Waits on the host until an exchange is over.
    fn wait_for(&self, number: u64) -> Result<()> {
        let _entered = self.cuda.context().enter()?;
        let mut asked = 0u32;
        while !self.watch.is_over(number)? {
            self.watch.verdict()?;
            asked += 1;
            if asked < 100 {
                thread::yield_now();
            } else {
                thread::sleep(Duration::from_micros(100));
            }
        }
        self.watch.verdict()
    }

    /// The all-gather of [`Transport::agree`]: `numbers.host` then holds those of the group.
    fn gather(&self, numbers: &mut Numbers, group: Range<usize>, own: u64) -> Result<()> {
        const SIZE: usize = size_of::<u64>();
        let stream = self.stream.handle();
        let at = |place: usize| numbers.device.ptr().wrapping_add(place * SIZE);
        // This rank's number is stored after the numbers of all ranks.
        let out = at(self.world);
        {
            let _entered = self.cuda.context().enter()?;
            // SAFETY: 8 bytes of both sides; the driver has copied those of the host when it returns, since they are
            // not page-locked.
            check("cuMemcpyHtoDAsync", unsafe {
                driver::cuMemcpyHtoDAsync_v2(out as u64, (&raw const own).cast(), SIZE, stream)
            })?;
        }
        let others = || group.clone().filter(|&peer| peer != self.rank);
        let sends: Vec<Message> = others().map(|peer| Message { peer, ptr: out, bytes: SIZE }).collect();
        let recvs: Vec<Message> = others().map(|peer| Message { peer, ptr: at(peer), bytes: SIZE }).collect();
        // SAFETY: room for the numbers of all ranks, which `self` keeps until its stream is done, and nothing else
        // uses: the mutex is held.
        let number = unsafe { self.enqueue(AGREE, &sends, &recvs) }?;
        self.wait_for(number)?;
        numbers.host.clear();
        numbers.host.resize(group.len(), 0);
        let _entered = self.cuda.context().enter()?;
        // SAFETY: the numbers of the group, on both sides; the copy is over when the call returns, because the memory
        // of the host is not page-locked.
        check("cuMemcpyDtoHAsync", unsafe {
            let to = numbers.host.as_mut_ptr().cast();
            driver::cuMemcpyDtoHAsync_v2(to, at(group.start) as u64, group.len() * SIZE, stream)
        })?;
        numbers.host[self.rank - group.start] = own;
        Ok(())
    }
}

const AGREE: Label = Label::new("agree", 0);

impl Transport for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let rank = self.rank;
        rules::check_group(rank, self.world, &group)?;
        self.watch.verdict()?;
        if group.len() == 1 {
            return Ok(());
        }
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        self.gather(&mut numbers, group.clone(), fingerprint).map_err(|error| self.failed(error))?;
        rules::compare(rank, group, fingerprint, &numbers.host)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        rules::check_messages(self.rank, self.world, sends, recvs)?;
        self.watch.verdict()?;
        if sends.is_empty() && recvs.is_empty() {
            return Ok(());
        }
        // SAFETY: the bytes are valid, and used by nothing else, until the exchange is over (the contract of
        // `Transport::exchange`).
        unsafe { self.enqueue(label, sends, recvs) }.map(|_| ()).map_err(|error| self.failed(error))
    }

    fn poll(&self) -> Result<()> {
        self.watch.verdict()?;
        self.stream.query().map(|_| ())
    }

    /// Ends the communicator on this rank. The others learn of it from NCCL, or at their deadlines.
    fn abort(&self, cause: Cause) {
        self.watch.abort(cause);
    }
}

impl DeviceTransport for Nccl {
    fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    fn stream(&self) -> RawStream {
        self.stream.handle()
    }

    /// # Errors
    /// The driver's, or the failure of the group. After a failure the stream is done all the same, unless the
    /// communicator is the caller's and [left alone](OnFailure::Leave).
    fn synchronize(&self) -> Result<()> {
        if self.watch.comm.may_abort() {
            // The watchdog ends work that does not end by itself.
            self.stream.synchronize()?;
        } else {
            while !self.stream.query()? {
                self.watch.verdict()?;
                thread::sleep(Duration::from_micros(100));
            }
        }
        self.watch.verdict()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort(Cause::Panicked);
        }
        // Waits for the enqueued work, unless the watchdog ends it. A failure was reported before, or no rank needs the
        // report.
        let done = self.synchronize().is_ok();
        self.watch.leave();
        if let Some(watchdog) = self.watchdog.take() {
            // It does not panic; if it did, there would be nothing to add.
            let _ = watchdog.join();
        }
        if done || self.watch.comm.may_abort() {
            let numbers = self.numbers.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: dropped here alone, and not used afterwards. If work is still stuck in a stream this is not
            // reached: to free the memory would wait for that work.
            unsafe { ManuallyDrop::drop(&mut numbers.device) };
        }
        if done {
            self.watch.comm.end(self.watch.deadline());
        }
    }
}
