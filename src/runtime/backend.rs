// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface of a rank on one kind of memory: host memory ([`host_rank`](super::host_rank)) or a CUDA device
//! (`device`).
//!
//! [`Rank`](super::Rank) holds one implementation and documents the functions. A function with a default body has a use
//! on devices only.

use std::{
    time::{Duration, Instant},
    vec::Vec,
};

use super::{bind::Bindings, failure::FirstFailure, handle::AbortHandle, listed_rows::KeyRowBytes};
#[cfg(feature = "cuda")]
use crate::kernel::cuda::Cuda;
use crate::{
    device::Device,
    error::Result,
    kernel::cpu,
    plan::Plan,
    report::trace,
    schedule::Purpose,
    transport::{
        Transport,
        carrier::Carrier,
        ring_check::{Link, RingFault},
    },
};

pub(super) trait Backend: Send {
    fn transport(&self) -> &dyn Transport;

    fn failure(&self) -> &FirstFailure;

    fn handle(&self) -> AbortHandle;

    fn device(&self) -> Device;

    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<&std::sync::Arc<Cuda>> {
        None
    }

    fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()>;

    fn set_sm_margin(&mut self, n: u32) -> Result<()>;

    fn check_ring(&self, bytes: usize) -> Result<Vec<Link>, RingFault>;

    /// The rank's end of the transport, for messages of the host between runs. On a device the call first waits for the
    /// work that the rank enqueued.
    fn between_runs(&self) -> Result<Carrier<'_>>;

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn record(&mut self, epoch: Instant, capacity: usize) -> Result<()>;

    fn events(&mut self) -> Vec<trace::Event>;

    fn trace_accuracy(&self) -> Duration {
        Duration::ZERO
    }

    fn metadata_bytes(&self) -> u64 {
        0
    }

    fn workspace_bytes(&mut self, plan: &Plan, run: Purpose) -> Result<u64>;

    /// Bytes of the last run over listed keys in a ring.
    fn key_row_bytes(&self) -> Option<KeyRowBytes> {
        None
    }

    /// # Safety
    /// As [`RankWorkspace::lend`](super::RankWorkspace::lend).
    unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()>;

    fn take_workspace_back(&mut self) -> Result<()>;

    fn prepare(&mut self, plan: &Plan, run: Purpose) -> Result<()>;

    /// # Safety
    /// As [`Rank::run`](super::Rank::run).
    unsafe fn run(&mut self, plan: &Plan, run: Purpose, tensors: &Bindings) -> Result<()>;
}
