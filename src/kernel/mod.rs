// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels: attention over ranges, transforms and merges, on the CPU and on CUDA devices.
//!
//! What a kernel is told stands in [`call`](crate::call); a kernel gets nothing else.
//!
//! - [`mod@reference`]: attention in f64, written to be read, which everything else is tested against;
//! - [`cpu`]: the CPU's kernels; `cuda`: the CUDA backend (feature `cuda`);
//! - [`merge`], [`sinks`]: partial results and the gradients of sinks, on the CPU;
//! - [`Kernels`]: either backend behind one type, for callers that choose it at run time.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod kernels;
pub mod merge;
pub mod reference;
pub mod sinks;
mod writers;

pub use crate::call::RawStream;
pub use kernels::Kernels;
#[cfg(feature = "cuda")]
pub(crate) use kernels::no_isa;
pub(crate) use kernels::no_stream;
