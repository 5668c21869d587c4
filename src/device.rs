// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device of tensors and of work.

use core::fmt;

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
