// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the host writes and a device reads: page-locked, and as much on the device, to which it is copied in
//! stream order. Only page-locked memory is copied without a wait of the host's.

use crate::device::driver::{Context, call, check_room, sys};
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;
use core::ptr::null_mut;

/// Page-locked host memory and device memory of the same size.
#[derive(Debug)]
pub(super) struct PinnedMirror {
    context: Arc<Context>,
    host: *mut u8,
    device: sys::CUdeviceptr,
    bytes: usize,
}

// SAFETY: both are plain memory that `self` owns.
unsafe impl Send for PinnedMirror {}

impl PinnedMirror {
    /// Allocates both, at least one byte.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _beside = context.enter_beside_captures()?;
        let bytes = bytes.max(1);
        let (mut host, mut device) = (null_mut(), 0);
        // SAFETY: a context is current, the pointers are to locals.
        check_room("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, bytes, 0) }, bytes)?;
        // SAFETY: a context is current, the pointers are to locals.
        if let Err(error) = check_room("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut device, bytes) }, bytes) {
            // SAFETY: allocated just above, and not handed out yet.
            unsafe { sys::cuMemFreeHost(host) };
            return Err(error);
        }
        // SAFETY: `host` has `bytes` bytes; zeros make them readable.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), host: host.cast(), device, bytes })
    }

    /// Refuses use while another context is current: a launch there could not read this memory.
    pub fn at_home(&self) -> Result<()> {
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
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` bytes of the host side from `offset` on.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn host(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{offset} and {bytes} of {}",
            self.bytes
        );
        // SAFETY: `self` owns the memory, which was zeroed when it was allocated and holds the part (above). The borrow
        // is of `self`, so nothing else on the host has it; copies to the device only read, and a writer has waited for
        // those of this part.
        unsafe { core::slice::from_raw_parts_mut(self.host.add(offset), bytes) }
    }

    /// The host's bytes: `bytes` of them from `offset` on.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn written(&self, offset: usize, bytes: usize) -> &[u8] {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{offset} and {bytes} of {}",
            self.bytes
        );
        // SAFETY: as in `host`, for reading: a writer has the only borrow of `self`.
        unsafe { core::slice::from_raw_parts(self.host.add(offset), bytes) }
    }

    /// The device address of `offset`.
    pub fn device(&self, offset: usize) -> u64 {
        self.device + offset as u64
    }

    /// Copies a part to the device, in stream order. The context must be current.
    pub fn upload(&self, offset: usize, bytes: usize, stream: sys::CUstream) -> Result<()> {
        debug_assert!(offset + bytes <= self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides have the part, and live until `self` is dropped, before which the stream is done.
        unsafe {
            call!(cuMemcpyHtoDAsync_v2(
                self.device(offset),
                self.host.wrapping_add(offset).cast_const().cast(),
                bytes,
                stream
            ))
        }
    }

    /// Writes zeros to a part of the device side, in stream order. The context must be current.
    pub fn clear(&self, offset: usize, bytes: usize, stream: sys::CUstream) -> Result<()> {
        debug_assert!(offset + bytes <= self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the device side has the part, and lives until `self` is dropped, before which the stream is done.
        unsafe { call!(cuMemsetD8Async(self.device(offset), 0, bytes, stream)) }
    }
}

impl Drop for PinnedMirror {
    fn drop(&mut self) {
        if let Ok(_beside) = self.context.enter_beside_captures() {
            // SAFETY: allocated once in `new`; the owner waited for its last use.
            unsafe {
                sys::cuMemFreeHost(self.host.cast());
                sys::cuMemFree_v2(self.device);
            }
        }
    }
}
