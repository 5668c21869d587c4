// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports of the tests: all calls go through to another transport, those that a test is about through its hook.
//!
//! A test writes the calls that it watches, fails or changes, and nothing else.

use cpattn::{
    Cause, Result,
    transport::{Label, Message, Transport},
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

#[cfg(feature = "cuda")]
use cpattn::{
    kernel::{RawStream, cuda::Cuda},
    transport::DeviceTransport,
};

/// What becomes of each call of a transport `T`. By default it goes through.
pub trait Hook<T: Transport>: Send + Sync {
    fn agree(&self, end: &T, group: Range<usize>, number: u64) -> Result<()> {
        end.agree(group, number)
    }

    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn exchange(&self, end: &T, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }

    fn poll(&self, end: &T) -> Result<()> {
        end.poll()
    }

    fn abort(&self, end: &T, cause: Cause) {
        end.abort(cause);
    }

    /// Whether a transport that can be captured says so.
    fn captures(&self) -> bool {
        true
    }
}

/// Counts agreements.
#[derive(Clone, Default)]
pub struct Counted(pub Arc<AtomicUsize>);

impl<T: Transport> Hook<T> for Counted {
    fn agree(&self, end: &T, group: Range<usize>, number: u64) -> Result<()> {
        self.0.fetch_add(1, SeqCst);
        end.agree(group, number)
    }
}

/// One end of a transport, behind a hook.
pub struct Through<T, H> {
    pub end: T,
    pub hook: H,
}

impl<T: Transport, H: Hook<T>> Transport for Through<T, H> {
    fn rank(&self) -> usize {
        self.end.rank()
    }

    fn world(&self) -> usize {
        self.end.world()
    }

    fn agree(&self, group: Range<usize>, number: u64) -> Result<()> {
        self.hook.agree(&self.end, group, number)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { self.hook.exchange(&self.end, label, sends, recvs) }
    }

    fn poll(&self) -> Result<()> {
        self.hook.poll(&self.end)
    }

    fn abort(&self, cause: Cause) {
        self.hook.abort(&self.end, cause);
    }
}

#[cfg(feature = "cuda")]
impl<T: DeviceTransport, H: Hook<T>> DeviceTransport for Through<T, H> {
    fn device(&self) -> &Arc<Cuda> {
        self.end.device()
    }

    fn stream(&self) -> RawStream {
        self.end.stream()
    }

    fn synchronize(&self) -> Result<()> {
        self.end.synchronize()
    }

    fn begin_run(&self, capture: Option<u64>) {
        self.end.begin_run(capture);
    }

    fn reserve(&self, messages: usize) {
        self.end.reserve(messages);
    }

    fn can_capture(&self) -> bool {
        self.hook.captures() && self.end.can_capture()
    }
}
