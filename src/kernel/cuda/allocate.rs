// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of a device and the wait for a stream, for callers who have no other library for them.

use super::Cuda;
use crate::call::RawStream;
use crate::device::driver::{check, sys};
use crate::device::memory::DeviceMemory;
use crate::error::{Error, Result};

impl Cuda {
    /// Allocates `bytes` bytes (at least one), with the alignment of the driver: 256 or more.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver has no memory for it.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::new(self.context(), bytes)
    }

    /// Waits on the host until everything on the caller's stream is done.
    ///
    /// # Safety
    /// The stream is of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Device`] when something on the device failed; [`Error::Unsupported`] for a stream that is being
    /// captured.
    pub unsafe fn synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the stream is of the device's primary context (the contract of this function).
        if unsafe { self.context().is_capturing(stream) }? {
            return Err(Error::unsupported(
                "waiting for a stream that is being captured",
                "what is captured has not begun",
                "end the capture, launch its graph on a stream, and wait for that",
            ));
        }
        let _beside = self.context().enter_beside_captures()?;
        // SAFETY: the stream is of the device's primary context (the contract of this function).
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }
}
