// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that MPI may hold.
//!
//! MPI cannot cancel a transfer that has begun. `MPI_Cancel` only cancels a receive that has not matched a message; if
//! the sender dies or stops in the middle of a transfer, MPI may continue to write at any later time. So MPI gets only
//! memory of this type. It can be reached only while MPI does not hold it, and it is never freed if MPI still holds it
//! when it is dropped.

use std::{
    boxed::Box,
    ffi::c_int,
    ptr::NonNull,
    time::{Duration, Instant},
};

use ::mpi::ffi::{self, MPI_Request};

use super::raw::{Comm, Refused, check};

/// How long a failed call, or a rank that leaves, waits for MPI to release memory, before it abandons that memory.
const SETTLE: Duration = Duration::from_millis(20);

/// Repeats `done` for a moment, until it returns true. Returns whether it did.
pub(super) fn poll_until(mut done: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > SETTLE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Memory, and the operation of MPI that reads or writes it, if any.
pub(super) struct MemoryInFlight<T: ?Sized> {
    memory: NonNull<T>,
    bytes: usize,
    request: MPI_Request,
    /// The function that began the operation.
    call: &'static str,
}

// SAFETY: memory of its own and a handle; MPI_THREAD_MULTIPLE allows every thread to use it, one at a time, as `&mut`
// demands.
unsafe impl<T: ?Sized + Send> Send for MemoryInFlight<T> {}

impl<T: ?Sized> MemoryInFlight<T> {
    /// Memory that MPI does not hold.
    pub(super) fn new(memory: Box<T>) -> Self {
        let (bytes, memory) = (size_of_val(&*memory), NonNull::from(Box::leak(memory)));
        // SAFETY: a constant of the library.
        Self { memory, bytes, request: unsafe { ffi::RSMPI_REQUEST_NULL }, call: "" }
    }

    /// The memory, unless MPI holds it.
    pub(super) fn get(&mut self) -> Option<&mut T> {
        if !self.is_free() {
            return None;
        }
        // SAFETY: made by Box in `new`; MPI does not hold it.
        Some(unsafe { self.memory.as_mut() })
    }

    /// The memory, if the operation is complete or there is none. Lets MPI make progress.
    pub(super) fn poll(&mut self) -> Result<Option<&mut T>, Refused> {
        let mut done = 0;
        // SAFETY: a live request, or none.
        check(self.call, unsafe { ffi::MPI_Test(&raw mut self.request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(if done == 0 { None } else { self.get() })
    }

    /// The same as a bool; a request that cannot even be tested is not complete.
    pub(super) fn is_done(&mut self) -> bool {
        matches!(self.poll(), Ok(Some(_)))
    }

    /// Asks MPI to cancel a receive, which succeeds unless a message has already matched it.
    pub(super) fn cancel(&mut self) {
        if !self.is_free() {
            // SAFETY: a live request. An error is ignored: `poll` shows whether the request is complete.
            let _ = unsafe { ffi::MPI_Cancel(&raw mut self.request) };
        }
    }

    fn is_free(&self) -> bool {
        // SAFETY: a constant of the library.
        self.request == unsafe { ffi::RSMPI_REQUEST_NULL }
    }

    fn begin(
        &mut self,
        call: &'static str,
        begin: impl FnOnce(*mut T, *mut MPI_Request) -> c_int,
    ) -> Result<(), Refused> {
        assert!(self.is_free(), "MPI holds this memory");
        let mut request = self.request;
        check(call, begin(self.memory.as_ptr(), &raw mut request))?;
        (self.request, self.call) = (request, call);
        Ok(())
    }
}

impl<T: ?Sized> Drop for MemoryInFlight<T> {
    fn drop(&mut self) {
        if self.is_free() {
            // SAFETY: made by Box in `new`; MPI does not hold it.
            drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
        }
    }
}

/// Memory of messages.
///
/// # Safety
/// Any bytes are a value of the type, and all of its bytes are initialised.
pub(super) unsafe trait Words {}

// SAFETY: integers.
unsafe impl Words for [u64] {}
// SAFETY: integers.
unsafe impl<const N: usize> Words for [u64; N] {}

impl<T: Words + ?Sized> MemoryInFlight<T> {
    /// Begins to send the first `bytes` bytes.
    pub(super) fn send(&mut self, comm: Comm, bytes: usize, to: usize, tag: c_int) -> Result<(), Refused> {
        let count = count(bytes.min(self.bytes));
        // SAFETY: a live communicator; nothing writes the memory, which has as many bytes, until the request is
        // complete.
        self.begin("MPI_Isend", |memory, request| unsafe {
            ffi::MPI_Isend(memory.cast_const().cast(), count, ffi::RSMPI_UINT8_T, to as c_int, tag, comm.0, request)
        })
    }

    /// Begins to receive at most as many bytes as it has; `None` from any rank.
    pub(super) fn receive(&mut self, comm: Comm, from: Option<usize>, tag: c_int) -> Result<(), Refused> {
        let count = count(self.bytes);
        // SAFETY: a live communicator and constants of the library; nothing touches the memory, which has as many
        // bytes, until the request is complete.
        self.begin("MPI_Irecv", |memory, request| unsafe {
            let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |peer| peer as c_int);
            ffi::MPI_Irecv(memory.cast(), count, ffi::RSMPI_UINT8_T, from, tag, comm.0, request)
        })
    }
}

/// A count for MPI. It fits, because messages travel in pieces.
fn count(bytes: usize) -> c_int {
    c_int::try_from(bytes).expect("a piece is far smaller than 2 GiB")
}

impl MemoryInFlight<Comm> {
    /// Begins to duplicate a communicator, which all of its processes have to do.
    pub(super) fn duplicate(comm: Comm) -> Result<Self, Refused> {
        let mut made = Self::new(Box::new(Comm::null()));
        // SAFETY: a live communicator; `Comm` is a handle of MPI's, which nothing touches until the request is
        // complete.
        made.begin("MPI_Comm_idup", |made, request| unsafe { ffi::MPI_Comm_idup(comm.0, made.cast(), request) })?;
        Ok(made)
    }
}
