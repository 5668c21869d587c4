// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of the CPU or of one device, for callers that choose at run time.
//!
//! On the CPU a call returns when its work is done, and there is no stream. On a device it returns when its work is
//! enqueued on the stream. Calls allocate nothing: call [`Kernels::reserve`] and [`Kernels::reserve_metadata`] before.
//!
//! This is not a [`VarlenKernel`](super::varlen::VarlenKernel), and neither replaces the other. A caller of [`Kernels`]
//! runs a schedule itself, with our kernels: ranges and bands go in, and partial results in two words come out. A
//! `VarlenKernel` is somebody else's, is called by our runtime, and knows rectangles of host memory alone.

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

/// Refuses a margin where there are no multiprocessors.
pub(crate) fn no_sm_margin(n: u32) -> Result<()> {
    if n == 0 {
        Ok(())
    } else {
        Err(Error::invalid("multiprocessors", n, "0 on the CPU, which has no multiprocessors"))
    }
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
                scratch.reserve(dtype, head_dim, value_dim);
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
            Self::Cpu(_) => no_sm_margin(n),
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
            Self::Cuda(stream_kernels) => stream_kernels.attend_metadata(call),
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
            Self::Cuda(stream_kernels) => stream_kernels.attend_backward_metadata(call),
        }
    }
}

/// The calls, each on the CPU or on the device: its name, its arguments, and the function of the CPU.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($args:ident: $type:ty, $scratch:pat) => $cpu:expr;)*) => {
        impl Kernels {$(
            $(#[$doc])*
            ///
            /// # Errors
            /// As the function of this name for the CPU, in [`cpu`], or of [`cuda::StreamKernels`].
            ///
            /// # Safety
            /// As the function of this name, on either.
            pub unsafe fn $name(&mut self, $args: &$type, stream: RawStream) -> Result<()> {
                match self {
                    Self::Cpu($scratch) => {
                        no_stream(stream)?;
                        // SAFETY: tensors are as the function of the same name for the CPU needs them (the contract).
                        unsafe { $cpu }
                    }
                    #[cfg(feature = "cuda")]
                    // SAFETY: tensors and stream are as the call of the same name in `StreamKernels` needs them (the
                    // contract).
                    Self::Cuda(kernels) => unsafe { kernels.$name($args, stream) },
                }
            }
        )*}
    };
}

calls! {
    /// See [`Attend`].
    attend(args: Attend<'_>, scratch) => cpu::attend(args, scratch);
    /// See [`AttendBackward`].
    attend_backward(args: AttendBackward<'_>, scratch) => cpu::attend_backward(args, scratch);
    /// See [`Transform`].
    transform(args: Transform<'_>, _) => cpu::transform(args);
    /// See [`Delta`].
    delta(args: Delta, _) => cpu::delta(args);
    /// See [`Finish`].
    finish(args: Finish<'_>, _) => cpu::finish(args);
    /// See [`SinkGradient`].
    sink_gradient(args: SinkGradient, _) => sinks::sink_gradient(args);
    /// See [`Merge`].
    merge(args: Merge, _) => merge::merge(&args.o, &args.lse, &args.with_o, &args.with_lse);
}
