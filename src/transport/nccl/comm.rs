// SPDX-License-Identifier: MIT OR Apache-2.0
//! A communicator: made from a unique id or taken from a framework; used by one thread at a time, aborted by any
//! thread.
//!
//! NCCL allows one thread in a communicator at a time, so all calls are made under one mutex. There is one exception: a
//! communicator of a framework's may block inside a call until other ranks come, and then only an abort from another
//! thread ends that call (frameworks' own watchdogs do the same). So a thread that aborts first sets `closed`, waits a
//! moment for the mutex, and aborts without it if the call does not return. A thread that returns from a call, or waits
//! for the library, first checks `closed`, and does not use the handle again once it is set.

use super::sys::{self, Api, RawId, SUCCESS};
use crate::device::driver::Entered;
use crate::error::{Cause, Error, Result};
use crate::kernel::cuda::Cuda;
use crate::transport::{Label, fault::millis, rules};
use std::{
    format,
    ptr::null_mut,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
    thread,
    time::{Duration, Instant},
    vec::Vec,
};

/// How long an abort waits for a call that is under way: longer than any that does not wait for other ranks.
const GRACE: Duration = Duration::from_millis(200);

/// Ranks and ids of the communicators that this process made and that are not gone.
static MADE: Mutex<Vec<([u8; 128], usize)>> = Mutex::new(Vec::new());

/// What happens to the caller's communicator when a run fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// It is aborted, so that streams become usable again. Its owner must not use it afterwards, not even to destroy
    /// it.
    Abort,
    /// It is not aborted. Errors are still reported, but the unfinished exchange stays on its stream, with everything
    /// enqueued after it, until the owner aborts the communicator: calls that wait for those streams, or free memory,
    /// wait until then.
    Leave,
}

/// A communicator.
pub(super) struct Communicator {
    api: &'static Api,
    cuda: Arc<Cuda>,
    /// For a communicator of the caller's: what happens to it when a run fails.
    borrowed: Option<OnFailure>,
    /// Held by the thread that is in a call.
    turn: Mutex<()>,
    /// Null once it is destroyed or aborted.
    handle: AtomicPtr<core::ffi::c_void>,
    /// No call is begun any more.
    closed: AtomicBool,
    /// Its entry in `MADE`.
    name: Option<([u8; 128], usize)>,
}

/// The right to make calls, and the context they need.
pub(super) struct CallRight<'a> {
    comm: &'a Communicator,
    _turn: MutexGuard<'a, ()>,
    _entered: Entered<'a>,
}

impl Communicator {
    fn new(api: &'static Api, cuda: &Arc<Cuda>, borrowed: Option<OnFailure>, handle: sys::Comm) -> Self {
        let (cuda, turn, closed) = (Arc::clone(cuda), Mutex::new(()), AtomicBool::new(false));
        Self { api, cuda, borrowed, turn, handle: AtomicPtr::new(handle), closed, name: None }
    }

    /// Makes a communicator with all other ranks, or fails at the deadline.
    pub(super) fn make(id: [u8; 128], rank: usize, world: usize, cuda: &Arc<Cuda>, deadline: Duration) -> Result<Self> {
        let api = Api::get()?;
        if id.iter().all(|&b| b == 0) {
            return Err(Error::invalid("unique_id", "all zeros", "the id that NCCL made on one of the ranks")
                .hint("make it on one rank, and send its 128 bytes to all others"));
        }
        let name = (id, rank);
        {
            let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
            if made.contains(&name) {
                let (found, expected) = (format!("{rank}, for the second time"), "each rank of an id once");
                return Err(Error::invalid("rank", found, expected).hint("a new group needs a new id"));
            }
            made.push(name);
        }
        // From here on its drop cleans up.
        let mut this = Self::new(api, cuda, None, null_mut());
        this.name = Some(name);
        let (mut handle, config) = (null_mut(), sys::Config::non_blocking());
        {
            let _entered = cuda.context().enter()?;
            // SAFETY: pointers to locals; the context of the rank's device is current; the id is what NCCL made.
            let code = unsafe {
                (api.ncclCommInitRankConfig)(&raw mut handle, world as i32, RawId(id), rank as i32, &raw const config)
            };
            this.handle.store(handle, Ordering::Release);
            api.begun("ncclCommInitRankConfig", code).map_err(|error| not_joined(error, rank, world, cuda))?;
        }
        let began = Instant::now();
        let met = this.lock_calls()?.wait_done("ncclCommInitRankConfig", deadline);
        if met.map_err(|error| not_joined(error, rank, world, cuda))? {
            return Ok(this);
        }
        let peers = (0..world).filter(|&r| r != rank).collect();
        let cause = Cause::Deadline { ms: millis(began.elapsed()), bytes: 0 };
        Err(Label::new("making the communicator", 0).error_of_one(rank, peers, cause))
    }

    /// Takes a communicator of the caller's, and checks that it is the one that was meant.
    ///
    /// # Safety
    /// It is null, or a communicator that lives, and that nothing else makes calls with while `self` lives.
    pub(super) unsafe fn take(
        handle: sys::Comm,
        on_failure: OnFailure,
        rank: usize,
        world: usize,
        cuda: &Arc<Cuda>,
    ) -> Result<Self> {
        let api = Api::get()?;
        if handle.is_null() {
            return Err(Error::invalid("comm", "null", "a communicator (ncclComm_t)"));
        }
        let ask = |call, f: unsafe extern "C" fn(sys::Comm, *mut i32) -> i32| -> Result<i32> {
            let mut value = -1;
            // SAFETY: a live communicator, as promised; a pointer to a local.
            api.check(call, unsafe { f(handle, &raw mut value) })?;
            Ok(value)
        };
        let expected = [
            ("rank", ask("ncclCommUserRank", api.ncclCommUserRank)?, rank as i64, "the rank of the communicator"),
            ("world", ask("ncclCommCount", api.ncclCommCount)?, world as i64, "the ranks of the communicator"),
            (
                "device",
                ask("ncclCommCuDevice", api.ncclCommCuDevice)?,
                cuda.ordinal().into(),
                "the device of the communicator",
            ),
        ];
        for (argument, has, found, what) in expected {
            if i64::from(has) != found {
                return Err(Error::invalid(argument, found, format!("{has}, {what}")));
            }
        }
        Ok(Self::new(api, cuda, Some(on_failure), handle))
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    /// Whether it is the caller's.
    pub(super) fn is_borrowed(&self) -> bool {
        self.borrowed.is_some()
    }

    /// Whether an abort is allowed, so that streams become usable again after a failure.
    pub(super) fn may_abort(&self) -> bool {
        self.borrowed != Some(OnFailure::Leave)
    }

    /// The error of a call on a communicator that is closed.
    pub(super) fn gone() -> Error {
        Error::invalid("communicator", "aborted", "a live one").hint("make a new group")
    }

    fn entered<'a>(&'a self, turn: MutexGuard<'a, ()>) -> Result<CallRight<'a>> {
        if self.is_closed() {
            return Err(Self::gone());
        }
        Ok(CallRight { comm: self, _turn: turn, _entered: self.cuda.context().enter()? })
    }

    /// Waits for its turn to make calls.
    ///
    /// # Errors
    /// The communicator is closed, or the driver's.
    pub(super) fn lock_calls(&self) -> Result<CallRight<'_>> {
        self.entered(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`turn`](Self::turn), or `None` while another thread is in a call.
    pub(super) fn try_lock_calls(&self) -> Option<CallRight<'_>> {
        self.entered(self.free_turn()?).ok()
    }

    /// The turn, unless another thread has it.
    fn free_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether calls have come to an end.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Refuses further calls, and ends the current one if that is allowed. May be called any number of times.
    pub(super) fn abort(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if !self.may_abort() {
            return;
        }
        let begin = Instant::now();
        let mut turn = self.free_turn();
        while turn.is_none() && begin.elapsed() <= GRACE {
            thread::sleep(Duration::from_micros(200));
            turn = self.free_turn();
        }
        let handle = self.handle.swap(null_mut(), Ordering::SeqCst);
        // Without a context there is nothing left to end.
        if !handle.is_null()
            && let Ok(_entered) = self.cuda.context().enter()
        {
            // SAFETY: the handle was live and is taken by this swap alone. Either no thread is in a call, or one call
            // does not return, and to abort from another thread is NCCL's way to end it. What it returns changes
            // nothing.
            unsafe { (self.api.ncclCommAbort)(handle) };
        }
        drop(turn);
    }

    /// Ends the communicator when all work is done: destroys it, or aborts it if that takes too long. A communicator of
    /// the caller's is left alone.
    pub(super) fn end(&self, limit: Duration) {
        if self.borrowed.is_some() || self.is_closed() {
            self.closed.store(true, Ordering::SeqCst);
            return;
        }
        if self.finalise(limit).is_err() {
            self.abort();
        }
    }

    fn finalise(&self, limit: Duration) -> Result<()> {
        let turn = self.lock_calls()?;
        let handle = turn.handle();
        // SAFETY: a live communicator; this thread alone makes calls.
        self.api.begun("ncclCommFinalize", unsafe { (self.api.ncclCommFinalize)(handle) })?;
        if !turn.wait_done("ncclCommFinalize", limit)? {
            return Err(Self::gone());
        }
        self.closed.store(true, Ordering::SeqCst);
        if self.handle.swap(null_mut(), Ordering::SeqCst).is_null() {
            return Ok(());
        }
        // SAFETY: live until now, and taken by this swap alone.
        let code = unsafe { (self.api.ncclCommDestroy)(handle) };
        // A failure needs no handling: the communicator is not used any more.
        let _ = self.api.begun("ncclCommDestroy", code);
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // A communicator that `end` has not ended has failed, or was never complete.
        if self.borrowed.is_none() {
            self.abort();
        }
        if let Some(name) = self.name {
            MADE.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| *other != name);
        }
    }
}

impl CallRight<'_> {
    pub(super) fn handle(&self) -> sys::Comm {
        self.comm.handle.load(Ordering::SeqCst)
    }

    /// The state from `ncclCommGetAsyncError`: success, in progress, or an error code.
    pub(super) fn state(&self) -> Result<i32> {
        let (api, mut state) = (self.comm.api, SUCCESS);
        // SAFETY: a live communicator, of which this thread has the turn; a pointer to a local.
        api.check("ncclCommGetAsyncError", unsafe { (api.ncclCommGetAsyncError)(self.handle(), &raw mut state) })?;
        Ok(state)
    }

    /// Waits until the library has done what `call` began; false if it takes longer than `limit`.
    pub(super) fn wait_done(&self, call: &'static str, limit: Duration) -> Result<bool> {
        let (begin, mut asked) = (Instant::now(), 0u32);
        loop {
            if self.comm.is_closed() {
                return Err(Communicator::gone());
            }
            if !self.comm.api.begun(call, self.state()?)? {
                return Ok(true);
            }
            if begin.elapsed() >= limit {
                return Ok(false);
            }
            asked += 1;
            // NCCL's thread needs some ten microseconds, or longer if a rank is late.
            if asked < 1000 {
                thread::yield_now();
            } else {
                thread::sleep(Duration::from_micros(50) * (asked / 1000).min(20));
            }
        }
    }
}

/// The error of a rank that could not join.
fn not_joined(mut error: Error, rank: usize, world: usize, cuda: &Cuda) -> Error {
    if let Error::Device { code, message, .. } = &mut error {
        let (what, way_out) = match *code {
            // Invalid argument, invalid usage.
            4 | 5 => (
                "refuses to join",
                "give each rank a device of its own, all the same world, and a new unique id for each group",
            ),
            _ => ("cannot join", "start all ranks with NCCL_DEBUG=WARN in the environment, and read what NCCL prints"),
        };
        *message = format!("rank {rank} of {world} on device {}: NCCL {what} ({message}): {way_out}", cuda.ordinal());
    }
    error
}

/// Refuses numbers that no communicator has.
pub(super) fn check_numbers(rank: usize, world: usize, deadline: Duration) -> Result<()> {
    if world == 0 || i32::try_from(world).is_err() {
        return Err(Error::invalid("world", world, "1 to 2147483647 ranks"));
    }
    if rank >= world {
        return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
    }
    rules::check_deadline(deadline)
}
