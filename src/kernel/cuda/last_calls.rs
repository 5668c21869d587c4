// SPDX-License-Identifier: MIT OR Apache-2.0
//! The last call on each stream, among calls that use no part of a ring: their kernels stay loaded until these calls
//! are done.
//!
//! One event per stream marks the end of its last call. The events are created in advance, so that no call creates one.

use super::Cuda;
use crate::device::driver::{CudaEvent, sys::CUstream};
use crate::error::Result;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Streams with calls in flight at one time; with one more, a call waits for the stream whose last call is the oldest.
const STREAMS: usize = 16;

/// The last calls of a [`StreamKernels`](super::StreamKernels); dropping it waits for them.
#[derive(Debug)]
pub(super) struct LastCalls {
    cuda: Arc<Cuda>,
    /// Oldest first.
    marks: VecDeque<LastCall>,
    unused: Vec<CudaEvent>,
}

/// Everything that was put on a stream so far.
#[derive(Debug)]
struct LastCall {
    stream: CUstream,
    event: CudaEvent,
}

// SAFETY: the stream is compared, and used for nothing else.
unsafe impl Send for LastCall {}

impl LastCalls {
    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        let unused = (0..STREAMS).map(|_| CudaEvent::new(cuda.context())).collect::<Result<_>>()?;
        Ok(Self { cuda: Arc::clone(cuda), marks: VecDeque::with_capacity(STREAMS), unused })
    }

    /// Notes that a call was put on a stream, which is not being captured.
    pub(super) fn mark(&mut self, stream: CUstream) -> Result<()> {
        let event = match self.marks.iter().position(|mark| mark.stream == stream) {
            Some(at) => self.remove(at),
            None => self.free_event()?,
        };
        // The handle may belong to a new stream by now, while work of the old stream is still in flight. The event then
        // comes after both; on the same stream the wait ends at once.
        let _entered = self.cuda.enter()?;
        let marked = event.make_stream_wait(stream).and_then(|()| event.record(stream));
        self.marks.push_back(LastCall { stream, event });
        marked
    }

    fn remove(&mut self, at: usize) -> CudaEvent {
        self.marks.remove(at).expect("a mark that was found").event
    }

    /// An event whose calls are done. Waits for the oldest if there is none.
    fn free_event(&mut self) -> Result<CudaEvent> {
        if let Some(event) = self.unused.pop() {
            return Ok(event);
        }
        for at in 0..self.marks.len() {
            if self.marks[at].event.is_done()? {
                return Ok(self.remove(at));
            }
        }
        self.marks[0].event.wait()?;
        Ok(self.remove(0))
    }
}

impl Drop for LastCalls {
    fn drop(&mut self) {
        for mark in &self.marks {
            // A failure means that the context is gone, and the kernels with it.
            let _ = mark.event.wait();
        }
    }
}
