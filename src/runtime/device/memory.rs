// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device memory that a rank's runs work in: its own, or lent by the caller.
//!
//! Before memory is freed or given back, the host waits for the rank's enqueued work. Memory that a captured graph may
//! still use is kept for as long as the rank lives.

use std::format;

use super::DeviceRank;
use crate::{
    error::{Error, Result},
    kernel::cuda::DeviceMemory,
    runtime::workspace::{OwnMemory, Workspace},
};

impl OwnMemory for DeviceMemory {
    fn ptr(&self) -> *mut u8 {
        DeviceMemory::ptr(self)
    }

    fn bytes(&self) -> usize {
        DeviceMemory::bytes(self)
    }
}

impl DeviceRank {
    /// Lends the rank device memory to work in, instead of memory of its own. Waits for the rank's enqueued work.
    ///
    /// # Safety
    /// The `bytes` at `ptr` are memory of the rank's device, valid and untouched by others until another workspace is
    /// lent or the rank is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `ptr` is not a multiple of [`ALIGNMENT`], or the first or last byte is not memory of the
    /// rank's device.
    pub(super) unsafe fn lend(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        Workspace::<DeviceMemory>::accept(ptr)?;
        if bytes > 0 {
            self.gpu().accept_address("workspace", ptr)?;
            let last = ptr.wrapping_add(bytes - 1);
            self.gpu().accept_address("workspace", last).map_err(|_| {
                let ordinal = self.gpu().ordinal();
                let expected = format!("as many as are memory of device {ordinal}: the last, at {last:p}, is not");
                Error::invalid("workspace", format!("{bytes} bytes at {ptr:p}"), expected)
            })?;
        }
        self.beside_no_capture("lend_workspace")?;
        self.wait_idle()?;
        let own = self.workspace.lend(ptr, bytes);
        self.retire(own);
        Ok(())
    }

    /// Ends the lending: from now on the rank works in its own memory again, which `prepare`, or the next run,
    /// allocates. Waits for the rank's enqueued work.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn take_back(&mut self) -> Result<()> {
        if self.workspace.is_lent() {
            self.beside_no_capture("take_workspace_back")?;
            self.wait_idle()?;
            self.workspace.take_back();
        }
        Ok(())
    }

    /// Frees memory, unless a graph may still use it.
    fn retire(&mut self, memory: Option<DeviceMemory>) {
        if self.prepared.iter().any(|p| p.captured) {
            self.retired.extend(memory);
        }
    }

    /// The workspace of a prepared run. The rank's own memory grows to the size that the run needs.
    pub(super) fn work_at(&mut self, at: usize) -> Result<*mut u8> {
        let needed = self.prepared[at].prepared.schedule.workspace;
        if self.workspace.is_short(needed) {
            self.wait_idle()?;
            let own = self.workspace.take_own();
            self.retire(own);
            let larger = self.gpu().allocate(needed as usize)?;
            self.workspace.set_own(larger);
        }
        self.workspace.at(needed)
    }
}
