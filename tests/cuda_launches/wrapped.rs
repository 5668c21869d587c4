// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's end of transport `peer` that counts its agreements, may fail an exchange, and may not be captured.

use cpattn::{
    Cause, Error, Result,
    kernel::cuda::{self, Cuda},
    transport::{DeviceTransport, Label, Message, Transport, peer::Peer},
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

pub struct Wrapped {
    end: Peer,
    /// Agreements so far.
    pub agreements: Arc<AtomicUsize>,
    /// Exchanges until one fails with an error of the driver.
    fails_in: AtomicUsize,
    /// Whether it says that it can be captured.
    pub captures: bool,
}

impl Wrapped {
    pub fn new(end: Peer) -> Self {
        Self { end, agreements: Arc::default(), fails_in: AtomicUsize::new(usize::MAX), captures: true }
    }

    /// Fails the n-th exchange.
    pub fn failing(self, n: usize) -> Self {
        Self { fails_in: AtomicUsize::new(n), ..self }
    }
}

impl Transport for Wrapped {
    fn rank(&self) -> usize {
        self.end.rank()
    }

    fn world(&self) -> usize {
        self.end.world()
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        self.agreements.fetch_add(1, SeqCst);
        self.end.agree(group, fingerprint)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        if self.fails_in.fetch_sub(1, SeqCst) == 1 {
            return Err(Error::Device { call: "cuEventRecord", code: 999, message: "injected".into() });
        }
        // SAFETY: what the caller promises of the messages.
        unsafe { self.end.exchange(label, sends, recvs) }
    }

    fn poll(&self) -> Result<()> {
        self.end.poll()
    }

    fn abort(&self, cause: Cause) {
        self.end.abort(cause);
    }
}

impl DeviceTransport for Wrapped {
    fn device(&self) -> &Arc<Cuda> {
        self.end.device()
    }

    fn stream(&self) -> cuda::Stream {
        self.end.stream()
    }

    fn synchronize(&self) -> Result<()> {
        self.end.synchronize()
    }

    fn reserve(&self, messages: usize) {
        self.end.reserve(messages);
    }

    fn can_capture(&self) -> bool {
        self.captures && self.end.can_capture()
    }
}
