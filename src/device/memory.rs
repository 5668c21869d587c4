// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams and memory of a device.

use super::RawStream;
use super::driver::{Context, call, check, check_room, sys};
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;
use core::ffi::c_uint;
use core::ptr::null_mut;

/// A stream that is destroyed with its owner, for a transport of device memory. It does not wait for the default
/// stream.
#[derive(Debug)]
pub struct OwnStream {
    context: Arc<Context>,
    handle: RawStream,
}

// SAFETY: a handle that the driver accepts on every thread.
unsafe impl Send for OwnStream {}
// SAFETY: a handle that the driver accepts on every thread.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = null_mut();
        let flags = sys::STREAM_NON_BLOCKING;
        // SAFETY: a context is current, the pointer is to a local.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The handle, which is valid as long as this lives.
    pub fn handle(&self) -> RawStream {
        self.handle
    }

    /// Whether all work on the stream is done; an error when something on the device failed. Captured work is not done.
    /// It is not queried, since a query would end the capture with an error.
    pub fn query(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive.
        if unsafe { self.context.is_capturing(self.handle) }? {
            return Ok(false);
        }
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.handle) } {
            sys::NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Waits on the host until everything on it is done. It must not be part of a capture.
    pub fn synchronize(&self) -> Result<()> {
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created once in `new`. The driver finishes what is on it.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// Memory on a device, freed when dropped. Wait for its last use before you drop it.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes (at least one), with the alignment of the driver: 256 or more.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _beside = context.enter_beside_captures()?;
        let mut address = 0;
        // SAFETY: a context is current, the pointer is to a local.
        check_room("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) }, bytes)?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// Memory that is zero for every stream. It is cleared on a stream of its own: the default stream might be ordered
    /// with one that is being captured.
    pub(crate) fn zeros(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let (memory, stream) = (Self::new(context, bytes)?, OwnStream::new(context)?);
        let _beside = context.enter_beside_captures()?;
        // SAFETY: the memory has that many bytes; the stream is waited for.
        unsafe { call!(cuMemsetD8Async(memory.address, 0, bytes, stream.handle())) }?;
        stream.synchronize()?;
        Ok(memory)
    }

    /// Its address on the device.
    pub fn ptr(&self) -> *mut u8 {
        self.address as usize as *mut u8
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn fits(&self, argument: &'static str, bytes: usize) -> Result<()> {
        if bytes > self.bytes {
            return Err(Error::invalid(argument, format!("{bytes} bytes"), format!("at most {}", self.bytes)));
        }
        Ok(())
    }

    /// Copies from the host to its beginning, and waits for the copy, so that work enqueued later on any stream sees
    /// the data.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the memory is shorter than the data, [`Error::Device`] when the driver fails;
    /// [`Error::Unsupported`] while a stream that the default stream is ordered with is being captured, because the
    /// copy is work of the default stream.
    pub fn upload(&self, from: &[u8]) -> Result<()> {
        self.fits("from", from.len())?;
        self.context.accept_default_stream()?;
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: both sides hold that many bytes.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(self.address, from.as_ptr().cast(), from.len()) })?;
        // The call above returns once the bytes are staged. The copy is then work of the default stream, which is not
        // ordered with the streams of a rank. SAFETY: the default stream of the context that is current.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(null_mut()) })
    }

    /// Copies its beginning to the host, and waits for the copy. Wait for the streams that write it before this call.
    ///
    /// # Errors
    /// As [`DeviceMemory::upload`].
    pub fn download(&self, to: &mut [u8]) -> Result<()> {
        self.fits("to", to.len())?;
        self.context.accept_default_stream()?;
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: both sides hold that many bytes.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), self.address, to.len()) })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_beside) = self.context.enter_beside_captures() {
            // SAFETY: allocated once.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Page-locked memory of the host, zeros at first, freed when dropped. Wait for its last use before you drop it.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    address: *mut u8,
}

// SAFETY: an address; those who use the memory order their accesses.
unsafe impl Send for PinnedMemory {}
// SAFETY: an address; those who use the memory order their accesses.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` bytes; `flags` are those of the driver.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize, flags: c_uint) -> Result<Self> {
        let _beside = context.enter_beside_captures()?;
        let mut address = null_mut();
        // SAFETY: a context is current, the pointer is to a local.
        check_room("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut address, bytes, flags) }, bytes)?;
        // SAFETY: the memory has that many bytes.
        unsafe { address.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), address: address.cast() })
    }

    /// Its address on the host.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.address
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(_beside) = self.context.enter_beside_captures() {
            // SAFETY: allocated once.
            unsafe { sys::cuMemFreeHost(self.address.cast()) };
        }
    }
}

/// Copies between two places of device memory, in stream order.
///
/// # Safety
/// Both are valid for `bytes` bytes when the copy runs, and nothing else writes either.
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
    // SAFETY: both are valid for `bytes` bytes when the copy runs (the contract of this function).
    check("cuMemcpyDtoDAsync", unsafe {
        sys::cuMemcpyDtoDAsync_v2(to as usize as u64, from as usize as u64, bytes, stream)
    })
}
