// SPDX-License-Identifier: MIT OR Apache-2.0
//! Points in streams.

use super::{Context, call, check, sys};
use crate::error::Result;
use alloc::sync::Arc;
use core::ptr::null_mut;

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: a handle that the driver accepts on every thread.
unsafe impl Send for CudaEvent {}
// SAFETY: a handle that the driver accepts on every thread; the driver synchronises itself.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event that was not recorded yet, without timing.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, sys::EVENT_DISABLE_TIMING)
    }

    /// An event that was not recorded yet, with timing.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, sys::EVENT_DEFAULT)
    }

    fn with_flags(context: &Arc<Context>, flags: core::ffi::c_uint) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = null_mut();
        // SAFETY: a context is current, the pointer is to a local.
        unsafe { call!(cuEventCreate(&raw mut handle, flags)) }?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Marks this point of the stream.
    pub(crate) fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event is alive; the stream is the caller's, of this context.
        unsafe { call!(cuEventRecord(self.handle, stream)) }
    }

    /// Makes all work that is put on `stream` from now on wait for the point, on the device.
    pub(crate) fn make_stream_wait(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event is alive; if it is recorded anew or destroyed, the driver still keeps the state that the
        // wait needs.
        unsafe { call!(cuStreamWaitEvent(stream, self.handle, 0)) }
    }

    /// For a stream that is being captured: makes each replay of the graph mark this point, as [`CudaEvent::record`]
    /// does elsewhere.
    pub(crate) fn record_in_replays(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: as in `record`.
        unsafe { call!(cuEventRecordWithFlags(self.handle, stream, sys::EVENT_RECORD_EXTERNAL)) }
    }

    /// For a stream that is being captured: makes each replay of the graph wait for the last mark of the point before
    /// it.
    pub(crate) fn hold_in_replays(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: as in `hold`; the graph's owner keeps the event alive (see `Rank::run`).
        unsafe { call!(cuStreamWaitEvent(stream, self.handle, sys::EVENT_WAIT_EXTERNAL)) }
    }

    /// Whether everything before the point is done.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Nanoseconds from `start` to this point, with the precision of milliseconds in f32; `None` while either point is
    /// not over. Both events have timing.
    pub(crate) fn ns_since(&self, start: &Self) -> Result<Option<i64>> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0f32;
        // SAFETY: both events are alive; the pointer is to a local.
        match unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, start.handle, self.handle) } {
            sys::NOT_READY => Ok(None),
            code => check("cuEventElapsedTime", code).map(|()| Some((f64::from(milliseconds) * 1e6) as i64)),
        }
    }

    /// Waits on the host until everything before the point is done.
    pub(crate) fn wait(&self) -> Result<()> {
        // Owners wait when they are dropped, on threads that may have no context.
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: the event is alive.
        unsafe { call!(cuEventSynchronize(self.handle)) }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created once in `new`.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
