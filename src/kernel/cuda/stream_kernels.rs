// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single kernel calls on a stream of the caller's choice, with all resources allocated beforehand.
//!
//! [`StreamKernels`] is a device, its kernels and one ring for scheduler metadata. [`StreamKernels::new`],
//! [`StreamKernels::reserve`] and [`StreamKernels::reserve_metadata`] load and allocate everything; a call that needs
//! more is refused, with the size it needs. The host waits only while more calls are in flight than the ring buffer has
//! space for, or calls are in flight on more streams than there are events.

use super::Cuda;
use super::last_calls::LastCalls;
use super::lent_staging::LentStaging;
use super::sm_margin::SmMargin;
use crate::call::{Attend, AttendBackward, Delta, Finish, Merge, RawStream, RawTensor, SinkGradient, Transform};
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;

/// Initial bytes of the ring: about a thousand ranges for each of many calls.
const BYTES: usize = 256 << 10;
const CALLS: usize = 64;

/// The kernels of a device for single calls, with a ring for scheduler metadata. Calls allocate nothing.
///
/// Dropping it waits for its own calls, and for nothing else on the device; it does not invalidate stream captures. Its
/// calls refuse streams that are being captured. The ring buffer is kept by the [`Cuda`] for the next user, up to 16
/// MiB in all. Beyond that memory is freed, and when the last holder of the [`Cuda`] is dropped kernels are unloaded
/// too; the driver may then wait until the device is idle.
#[derive(Debug)]
pub struct StreamKernels {
    // Dropped in this order: the kernels outlive their launches.
    last_calls: LastCalls,
    staging: LentStaging,
    margin: Option<SmMargin>,
    cuda: Arc<Cuda>,
}

impl StreamKernels {
    /// Loads the kernels that do not depend on head dims, and allocates a ring buffer of 256 KiB for 64 calls in
    /// flight.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver refuses.
    pub fn new(cuda: Arc<Cuda>) -> Result<Self> {
        cuda.prepare_blocks()?;
        let (last_calls, staging) = (LastCalls::new(&cuda)?, LentStaging::new(&cuda, BYTES, CALLS)?);
        Ok(Self { last_calls, staging, margin: None, cuda })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Loads the attention kernels for an element type and head dims.
    ///
    /// # Errors
    /// As [`Cuda::prepare`].
    pub fn reserve(&mut self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<()> {
        self.cuda.prepare(dtype, head_dim, value_dim)
    }

    /// Sets a margin: as long as this object lives, attention on the device leaves at least `n` multiprocessors free;
    /// the largest of all margins applies. See [`Cuda::set_sm_margin`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when the device does not have more than `n`.
    pub fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        self.margin = SmMargin::new(&self.cuda, n)?;
        Ok(())
    }

    /// Enlarges the ring buffer to `bytes` bytes of scheduler metadata of at most `calls` calls in flight. It never
    /// shrinks; to grow, it waits for the calls that use the old one.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver has no memory for it; the old ring then stays.
    pub fn reserve_metadata(&mut self, bytes: usize, calls: usize) -> Result<()> {
        let now = (self.staging.bytes(), self.staging.launches());
        let (bytes, calls) = (bytes.max(now.0), calls.max(now.1));
        if (bytes, calls) != now {
            let ring = LentStaging::new(&self.cuda, bytes, calls)?;
            self.staging.drain()?;
            self.staging = ring;
        }
        Ok(())
    }

    fn loaded(&self, q: &RawTensor, v: &RawTensor) -> Result<()> {
        if self.cuda.is_prepared(q.dtype, q.dim, v.dim)? {
            return Ok(());
        }
        let expected = format!("reserved for {} with head_dim {} and value_dim {}", q.dtype, q.dim, v.dim);
        Err(Error::invalid("scratch", "not reserved for this call", expected).hint("reserve it when planning"))
    }

    /// See [`Cuda::attend`].
    ///
    /// # Errors
    /// As there, and kernels or metadata memory that were not reserved.
    ///
    /// # Safety
    /// As there; the stream was not destroyed.
    pub unsafe fn attend(&mut self, call: &Attend<'_>, stream: RawStream) -> Result<()> {
        self.loaded(&call.q, &call.v)?;
        // SAFETY: tensors and stream are as `Cuda::attend` needs them, and the stream was not destroyed (the contract).
        unsafe {
            self.cuda.owns(stream)?;
            self.cuda.attend(call, &mut self.staging, stream)
        }
    }

    /// See [`Cuda::attend_backward`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`].
    pub unsafe fn attend_backward(&mut self, call: &AttendBackward<'_>, stream: RawStream) -> Result<()> {
        self.loaded(&call.q, &call.v)?;
        // SAFETY: tensors and stream are as `Cuda::attend_backward` needs them (the contract).
        unsafe {
            self.cuda.owns(stream)?;
            self.cuda.attend_backward(call, &mut self.staging, stream)
        }
    }

    /// See [`Cuda::transform`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`].
    pub unsafe fn transform(&mut self, call: &Transform<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as `Cuda::transform` needs them (the contract).
        unsafe {
            self.cuda.owns(stream)?;
            self.cuda.transform(call, &mut self.staging, stream)
        }
    }

    /// See [`Cuda::finish`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`].
    pub unsafe fn finish(&mut self, call: &Finish<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as `Cuda::finish` needs them (the contract).
        unsafe {
            self.cuda.owns(stream)?;
            self.cuda.finish(call, &mut self.staging, stream)
        }
    }
}

/// Calls without metadata to upload.
macro_rules! without_metadata {
    ($($(#[$doc:meta])* $name:ident($type:ty);)*) => {
        impl StreamKernels {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// As [`StreamKernels::attend`].
            ///
            /// # Safety
            /// As [`StreamKernels::attend`].
            pub unsafe fn $name(&mut self, call: &$type, stream: RawStream) -> Result<()> {
                // SAFETY: tensors and stream are as the call of this name of `Cuda` needs them (the contract).
                unsafe {
                    self.cuda.accept_stream(stream)?;
                    self.cuda.$name(call, stream)?;
                }
                self.last_calls.mark(stream)
            }
        )*}
    };
}

without_metadata! {
    /// See [`Cuda::delta`].
    delta(Delta);
    /// See [`Cuda::sink_gradient`].
    sink_gradient(SinkGradient);
    /// See [`Cuda::merge`].
    merge(Merge);
}
