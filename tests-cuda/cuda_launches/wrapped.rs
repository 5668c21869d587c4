// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's end of transport `peer` that counts its agreements, may fail an exchange, and may not be captured.

use crate::through::{Counted, Hook, Through};
use cpattn::{
    Error, Result,
    transport::{Label, Message, Transport, peer::Peer},
};
use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

pub struct Watch {
    /// Agreements so far.
    pub agreements: Counted,
    /// Exchanges until one fails with an error of the driver.
    fails_in: AtomicUsize,
    /// Whether it says that it can be captured.
    pub captures: bool,
}

pub type Wrapped = Through<Peer, Watch>;

impl Wrapped {
    pub fn watched(end: Peer) -> Self {
        let hook = Watch { agreements: Counted::default(), fails_in: AtomicUsize::new(usize::MAX), captures: true };
        Self::new(end, hook)
    }

    /// Fails the n-th exchange.
    pub fn failing(self, n: usize) -> Self {
        self.hook.fails_in.store(n, SeqCst);
        self
    }
}

impl Hook<Peer> for Watch {
    fn agree(&self, end: &Peer, group: Range<usize>, number: u64) -> Result<()> {
        self.agreements.agree(end, group, number)
    }

    unsafe fn exchange(&self, end: &Peer, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        if self.fails_in.fetch_sub(1, SeqCst) == 1 {
            return Err(Error::Device { call: "cuEventRecord", code: 999, message: "injected".into() });
        }
        // SAFETY: what the caller promises of the messages.
        unsafe { end.exchange(label, sends, recvs) }
    }

    fn captures(&self) -> bool {
        self.captures
    }
}
