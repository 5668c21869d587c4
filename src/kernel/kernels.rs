// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of the CPU or of one device, for callers that choose at run time.
//!
//! On the CPU a call returns when its work is done, and there is no stream. On a device it returns when its work is
//! enqueued on the stream. Calls allocate nothing: call [`Kernels::reserve`] and [`Kernels::reserve_metadata`] before.

use std::format;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{cpu, merge, sinks};
use crate::call::{Attend, AttendBackward, Delta, Finish, Merge, RawStream, SinkGradient, Transform};
use crate::{
    device::Device,
    element::Dtype,
    error::{Error, Result},
};

/// The kernels of the CPU or of one device, behind the same calls.
#[derive(Debug)]
#[non_exhaustive]
pub enum Kernels {
    /// The CPU's kernels, with the memory of their tiles.
    Cpu(cpu::Scratch),
    /// A device's kernels, with the ring buffer for scheduler metadata.
    #[cfg(feature = "cuda")]
    Cuda(cuda::StreamKernels),
}

/// Refuses a stream where there are none.
pub(crate) fn no_stream(stream: RawStream) -> Result<()> {
    if stream.is_null() {
        return Ok(());
    }
    Err(Error::unsupported(format!("stream {stream:p}"), "the CPU has no streams", "pass NULL"))
}

/// The refusal of an instruction set where there is none to choose.
#[cfg(feature = "cuda")]
pub(crate) fn no_isa(isa: cpu::Isa, ordinal: i32) -> Error {
    Error::unsupported(
        format!("instruction set {isa} on {}", Device::Cuda(ordinal)),
        "it is one of the CPU kernels",
        "leave it out: the driver compiles the kernels of a device for it",
    )
}

/// The call on the CPU, or on the device.
macro_rules! call {
    ($self:ident, $stream:ident, $scratch:pat => $cpu:expr, $stream_kernels:ident => $cuda:expr) => {
        match $self {
            Self::Cpu($scratch) => {
                no_stream($stream)?;
                // SAFETY: tensors are as the call of the same name in `cpu` needs them (the contract of each method).
                unsafe { $cpu }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda($stream_kernels) => {
                let $stream = $stream.cast();
                // SAFETY: tensors and stream are as the call of the same name in `StreamKernels` needs them (the
                // contract of each method).
                unsafe { $cuda }
            }
        }
    };
}

impl Kernels {
    /// The CPU's kernels, on `workers` threads.
    pub fn cpu(workers: usize) -> Self {
        Self::Cpu(cpu::Scratch::new(workers))
    }

    /// The kernels of a CUDA device.
    ///
    /// # Errors
    /// As [`cuda::Cuda::shared`] and [`cuda::StreamKernels::new`].
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: i32) -> Result<Self> {
        cuda::StreamKernels::new(cuda::Cuda::shared(ordinal)?).map(Self::Cuda)
    }

    /// Their device.
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => Device::Cuda(stream_kernels.device().ordinal()),
        }
    }

    /// Prepares calls with these dims: allocates memory on the CPU, loads kernels on a device.
    ///
    /// # Errors
    /// On a device, types and dims there is no kernel for, and the driver's.
    pub fn reserve(&mut self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<()> {
        match self {
            Self::Cpu(scratch) => {
                scratch.isa()?;
                scratch.reserve(&cpu::Dims { head_dim, value_dim, dtype });
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => stream_kernels.reserve(dtype, head_dim, value_dim),
        }
    }

    /// On a device, leaves `n` multiprocessors free of attention: see `cuda::StreamKernels::set_sm_margin`.
    ///
    /// # Errors
    /// On the CPU for any number but 0; a device that does not have more than `n`.
    pub fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        match self {
            Self::Cpu(_) if n == 0 => Ok(()),
            Self::Cpu(_) => Err(Error::invalid("multiprocessors", n, "0 on the CPU, which has none")),
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => stream_kernels.set_sm_margin(n),
        }
    }

    /// On the CPU, sets the instruction set of later calls: see [`cpu::Scratch::set_isa`].
    ///
    /// # Errors
    /// On a device, for any but `None`; an instruction set that the machine lacks.
    pub fn set_isa(&mut self, isa: Option<cpu::Isa>) -> Result<()> {
        match self {
            Self::Cpu(scratch) => scratch.set_isa(isa),
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => match isa {
                None => Ok(()),
                Some(isa) => Err(no_isa(isa, stream_kernels.device().ordinal())),
            },
        }
    }

    /// On a device, enlarges the ring buffer to `bytes` bytes of scheduler metadata of at most `calls` calls in flight.
    ///
    /// # Errors
    /// On the CPU, which needs no such memory; the driver's.
    pub fn reserve_metadata(&mut self, bytes: usize, calls: usize) -> Result<()> {
        match self {
            Self::Cpu(_) => {
                let _ = (bytes, calls);
                Err(Error::unsupported(
                    "scheduler metadata of the CPU",
                    "it reads ranges where they lie",
                    "leave the call out",
                ))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => stream_kernels.reserve_metadata(bytes, calls),
        }
    }

    /// Bytes of scheduler metadata that [`Kernels::attend`] uploads for this call; 0 on the CPU.
    ///
    /// # Errors
    /// On a device, types and dims there is no kernel for.
    pub fn attend_metadata(&self, call: &Attend<'_>) -> Result<usize> {
        match self {
            Self::Cpu(_) => {
                let _ = call;
                Ok(0)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => stream_kernels.device().attend_bytes(call),
        }
    }

    /// Bytes of scheduler metadata that [`Kernels::attend_backward`] uploads for this call; 0 on the CPU.
    ///
    /// # Errors
    /// As [`Kernels::attend_metadata`].
    pub fn attend_backward_metadata(&self, call: &AttendBackward<'_>) -> Result<usize> {
        match self {
            Self::Cpu(_) => {
                let _ = call;
                Ok(0)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(stream_kernels) => stream_kernels.device().attend_backward_bytes(call),
        }
    }

    /// See [`Attend`].
    ///
    /// # Errors
    /// As [`cpu::attend`], or [`cuda::Cuda::attend`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn attend(&mut self, args: &Attend<'_>, stream: RawStream) -> Result<()> {
        call!(self, stream, scratch => cpu::attend(args, scratch), stream_kernels => stream_kernels.attend(args, stream))
    }

    /// See [`AttendBackward`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>, stream: RawStream) -> Result<()> {
        call!(self, stream, scratch => cpu::attend_backward(args, scratch), stream_kernels => stream_kernels.attend_backward(args, stream))
    }

    /// See [`Transform`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn transform(&mut self, args: &Transform<'_>, stream: RawStream) -> Result<()> {
        call!(self, stream, _ => cpu::transform(args), stream_kernels => stream_kernels.transform(args, stream))
    }

    /// See [`Delta`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn delta(&mut self, args: &Delta, stream: RawStream) -> Result<()> {
        call!(self, stream, _ => cpu::delta(args), stream_kernels => stream_kernels.delta(args, stream))
    }

    /// See [`Finish`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn finish(&mut self, args: &Finish<'_>, stream: RawStream) -> Result<()> {
        call!(self, stream, _ => cpu::finish(args), stream_kernels => stream_kernels.finish(args, stream))
    }

    /// See [`SinkGradient`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn sink_gradient(&mut self, args: &SinkGradient, stream: RawStream) -> Result<()> {
        call!(self, stream, _ => sinks::sink_gradient(args), stream_kernels => stream_kernels.sink_gradient(args, stream))
    }

    /// See [`Merge`].
    ///
    /// # Errors
    /// As [`Kernels::attend`].
    ///
    /// # Safety
    /// As [`Kernels::attend`].
    pub unsafe fn merge(&mut self, args: &Merge, stream: RawStream) -> Result<()> {
        call!(self, stream, _ => merge::merge(&args.o, &args.lse, &args.with_o, &args.with_lse),
            stream_kernels => stream_kernels.merge(args, stream))
    }
}
