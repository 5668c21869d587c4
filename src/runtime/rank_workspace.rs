// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of a rank as a caller sees it: how much a run needs, and memory that is lent for it.

use super::{backend::Backend, listed_rows::KeyRowBytes};
use crate::{error::Result, plan::Plan, schedule::Purpose};

/// The memory that a rank's runs work in: [`Rank::workspace`](crate::Rank::workspace).
pub struct RankWorkspace<'a> {
    backend: &'a mut dyn Backend,
}

impl core::fmt::Debug for RankWorkspace<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RankWorkspace").field("device", &self.backend.device()).finish_non_exhaustive()
    }
}

impl<'a> RankWorkspace<'a> {
    pub(super) fn new(backend: &'a mut dyn Backend) -> Self {
        Self { backend }
    }

    /// Bytes of workspace for a run of `plan` on this rank, without the kernels' tiles: for a direction of attention,
    /// or an all-to-all or a combine. Allocates nothing on a device, so that a caller who lends the workspace does not
    /// need memory for two.
    ///
    /// # Errors
    /// As [`Rank::prepare`](crate::Rank::prepare), except those about memory and the driver.
    pub fn bytes(&mut self, plan: &Plan, purpose: impl Into<Purpose>) -> Result<u64> {
        self.backend.workspace_bytes(plan, purpose.into())
    }

    /// Lends the rank a workspace, in host memory or on the rank's device, instead of its own. On a device it waits for
    /// the work that the rank enqueued.
    ///
    /// # Safety
    /// The `bytes` at `ptr` must stay valid and not be used by anything else until another workspace is lent, this one
    /// is [taken back](RankWorkspace::take_back), or the rank is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if `ptr` is not a multiple of
    /// [`Schedule::ALIGNMENT`](crate::schedule::Schedule::ALIGNMENT), or, on a device, the first or last byte is not
    /// memory of that device.
    pub unsafe fn lend(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the memory is valid for as long as it is lent (promised).
        unsafe { self.backend.lend_workspace(ptr, bytes) }
    }

    /// Takes a lent workspace back: the rank then uses its own, which [`Rank::prepare`](crate::Rank::prepare) or the
    /// next run allocates. On a device it waits for the work that the rank enqueued.
    ///
    /// # Errors
    /// The driver's.
    pub fn take_back(&mut self) -> Result<()> {
        self.backend.take_workspace_back()
    }

    /// Bytes of scheduler metadata that the rank keeps on its device, for all plans that it keeps: its last 16 plans
    /// and directions, and all that were captured into a graph. [`Plan::explain`] prints a bound for each plan. 0 on
    /// the CPU.
    pub fn metadata_bytes(&self) -> u64 {
        self.backend.metadata_bytes()
    }

    /// Bytes that the rows of k and v, and their gradients, took in the last run over listed keys
    /// ([`Keys::Listed`](super::Keys::Listed)): of all ranks together, the numbers of listed rows included. `None`
    /// before such a run, after one without a ring, and after one with
    /// [`KeyRows::Allowed`](crate::plan::KeyRows::Allowed), where ranks count nothing.
    pub fn key_row_bytes(&self) -> Option<KeyRowBytes> {
        self.backend.key_row_bytes()
    }
}
