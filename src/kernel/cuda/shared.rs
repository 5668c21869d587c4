// SPDX-License-Identifier: MIT OR Apache-2.0
//! One [`Cuda`] for each device, for callers that name devices by number.
//!
//! Loading kernels takes a driver up to seconds and memory on the device, so ranks and scratches of one process that
//! ask for the same device get the same one. It lives as long as a caller holds it: the table keeps no device alive.

use super::Cuda;
use super::launch::check::Checker;
use crate::call::{RawStream, RawTensor, Score};
use crate::device::driver::Context;
use crate::error::{Error, Result};
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use std::sync::{Mutex, PoisonError};

static DEVICES: Mutex<Vec<Weak<Cuda>>> = Mutex::new(Vec::new());

impl Cuda {
    /// The device with this number, shared by all callers of this function.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn shared(ordinal: i32) -> Result<Arc<Self>> {
        // A panic leaves the table as it was, or longer by a device.
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.strong_count() > 0);
        if let Some(found) = devices.iter().filter_map(Weak::upgrade).find(|device| device.ordinal() == ordinal) {
            return Ok(found);
        }
        let made = Arc::new(Self::new(ordinal)?);
        devices.push(Arc::downgrade(&made));
        Ok(made)
    }

    /// Refuses a tensor that the kernels cannot take from a caller: memory of another device, rows that do not begin at
    /// multiples of `align` bytes, strides beyond 2 GiB. Does not access the memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Unsupported`], naming the
    /// tensor.
    pub fn accept(&self, name: &str, tensor: &RawTensor, align: usize) -> Result<()> {
        self.checker().memory(name, tensor, align).map(|_| ())
    }

    /// Refuses an address that is not memory of this device.
    ///
    /// # Errors
    /// As [`Cuda::accept`].
    pub fn accept_address(&self, name: &str, address: *const u8) -> Result<()> {
        self.checker().home(name, address)
    }

    /// Checks tensors of a caller's.
    fn checker(&self) -> Checker {
        Checker { ordinal: self.ordinal(), is_memory: true }
    }

    /// Refuses numbers that the kernels, which score in f32, cannot take.
    pub(crate) fn accept_score(&self, score: &Score) -> Result<()> {
        super::launch::check::score(score).map(|_| ())
    }

    /// Refuses a stream of another context, or one that is being captured into a graph: the kernels of a single call,
    /// and the scheduler metadata of calls with ranges or blocks, are kept until the call is over, and replays come
    /// later.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Unsupported`], or the driver's.
    ///
    /// # Safety
    /// The stream is one of the driver's, and was not destroyed.
    pub unsafe fn accept_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the promise of this function: a live stream.
        unsafe {
            self.owns(stream)?;
            self.refuse_capture(stream)
        }
    }

    /// Refuses a stream that is being captured into a graph.
    ///
    /// # Errors
    /// As [`Cuda::accept_stream`].
    ///
    /// # Safety
    /// The stream is of the device's primary context, and was not destroyed.
    pub(super) unsafe fn refuse_capture(&self, stream: RawStream) -> Result<()> {
        // SAFETY: a live stream (the contract).
        if unsafe { self.context().is_capturing(stream) }? {
            return Err(Error::unsupported(
                "a stream that is being captured",
                "what a single call uses is kept until the call is over, and not for replays of a graph",
                "end the capture before the call, or capture a run of a rank",
            ));
        }
        Ok(())
    }

    /// Refuses a stream of another context.
    ///
    /// # Errors
    /// As [`Cuda::accept_stream`].
    ///
    /// # Safety
    /// As [`Cuda::accept_stream`].
    pub(crate) unsafe fn owns(&self, stream: RawStream) -> Result<&Context> {
        // SAFETY: the promise of this function: a live stream.
        unsafe { self.context().accept(stream) }?;
        Ok(self.context())
    }
}
