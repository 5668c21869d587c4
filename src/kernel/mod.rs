// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels: attention over ranges, transforms and merges, on the CPU and on CUDA devices.
//!
//! The arguments of kernels are the structures of [`call`](crate::call).
//!
//! - [`mod@reference`]: attention in f64, simple code that all other kernels are tested against;
//! - [`cpu`]: the CPU's kernels; `cuda`: the CUDA backend (feature `cuda`);
//! - `merge`, `merge_all`, `sinks`: partial results and the gradients of sinks, on the CPU; `compose`: states of a
//!   scan;
//! - [`varlen`]: kernels of others, in the place of ours;
//! - [`Kernels`]: one type for both backends, for callers that choose at run time.

mod check;
pub(crate) mod compose;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod kernels;
pub(crate) mod merge;
pub(crate) mod merge_all;
pub mod reference;
pub(crate) mod sinks;
pub mod varlen;
mod writers;

pub use kernels::Kernels;
#[cfg(feature = "cuda")]
pub(crate) use kernels::no_isa;
pub(crate) use kernels::{no_sm_margin, no_stream};
