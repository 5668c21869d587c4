// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device of tensors and of work; with the feature `cuda`, the CUDA driver: contexts, modules, events (`driver`),
//! streams and memory (`memory`). Kernels and transports stand on it, and it knows neither.

use core::fmt;

#[cfg(feature = "cuda")]
pub(crate) mod driver;
#[cfg(feature = "cuda")]
pub(crate) mod memory;

/// A stream of a device (`CUstream`, `cudaStream_t`); null on the CPU, and the legacy default stream on a device.
pub type RawStream = *mut core::ffi::c_void;

/// The CPU, or one CUDA device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    Cpu,
    /// The CUDA device with this number.
    Cuda(i32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("the CPU"),
            Self::Cuda(ordinal) => write!(f, "CUDA device {ordinal}"),
        }
    }
}
