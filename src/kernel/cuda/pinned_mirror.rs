// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the host writes and a device reads: page-locked, and as much on the device, to which it is copied in
//! stream order. Only page-locked memory is copied without a wait of the host's.

use crate::device::driver::{Context, call, sys};
use crate::device::memory::{DeviceMemory, PinnedMemory};
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;
use core::ptr::null_mut;

/// Page-locked host memory and device memory of the same size.
#[derive(Debug)]
pub(super) struct PinnedMirror {
    context: Arc<Context>,
    host: PinnedMemory,
    device: DeviceMemory,
}

impl PinnedMirror {
    /// Allocates both, at least one byte.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1);
        let (host, device) = (PinnedMemory::new(context, bytes, 0)?, DeviceMemory::new(context, bytes)?);
        Ok(Self { context: context.clone(), host, device })
    }

    /// Refuses use while another context is current: a launch there could not read this memory.
    pub(super) fn at_home(&self) -> Result<()> {
        let mut current = null_mut();
        // SAFETY: the driver is initialised; `current` is a local.
        unsafe { call!(cuCtxGetCurrent(&raw mut current)) }?;
        if current != self.context.handle() {
            let found = format!("memory of device {}", self.context.ordinal());
            return Err(Error::invalid("staging", found, "memory of the device that launches")
                .hint("make the ring on the device that makes the call"));
        }
        Ok(())
    }

    /// Bytes of each side.
    pub(super) fn bytes(&self) -> usize {
        self.device.bytes()
    }

    /// `bytes` bytes of the host side from `offset` on.
    ///
    /// # Panics
    /// When there are fewer.
    pub(super) fn host(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        // SAFETY: `self` owns the memory, which was zeroed when it was allocated and holds the part (checked). The
        // borrow is of `self`, so nothing else on the host has it; copies to the device only read, and a writer has
        // waited for those of this part.
        unsafe { core::slice::from_raw_parts_mut(self.part(offset, bytes), bytes) }
    }

    /// The same, for reading.
    ///
    /// # Panics
    /// As [`PinnedMirror::host`].
    pub(super) fn written(&self, offset: usize, bytes: usize) -> &[u8] {
        // SAFETY: as in `host`; a writer has the only borrow of `self`.
        unsafe { core::slice::from_raw_parts(self.part(offset, bytes), bytes) }
    }

    fn part(&self, offset: usize, bytes: usize) -> *mut u8 {
        let all = self.bytes();
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= all), "{offset} and {bytes} of {all}");
        self.host.ptr().wrapping_add(offset)
    }

    /// The device address of `offset`.
    pub(super) fn device(&self, offset: usize) -> u64 {
        self.device.ptr() as usize as u64 + offset as u64
    }

    /// Copies a part to the device, in stream order. The context must be current.
    pub(super) fn upload(&self, offset: usize, bytes: usize, stream: sys::CUstream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let from = self.part(offset, bytes).cast_const().cast();
        // SAFETY: both sides have the part, and live until `self` is dropped, before which the stream is done.
        unsafe { call!(cuMemcpyHtoDAsync_v2(self.device(offset), from, bytes, stream)) }
    }

    /// Writes zeros to a part of the device side, in stream order. The context must be current.
    pub(super) fn clear(&self, offset: usize, bytes: usize, stream: sys::CUstream) -> Result<()> {
        debug_assert!(offset + bytes <= self.bytes());
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the device side has the part, and lives until `self` is dropped, before which the stream is done.
        unsafe { call!(cuMemsetD8Async(self.device(offset), 0, bytes, stream)) }
    }
}
