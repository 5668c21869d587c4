// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exact context-parallel attention in one low-level crate.
//!
//! One long packed batch of documents is spread over many ranks; each ends with the exact attention output and
//! gradients of its own tokens. The modules:
//!
//! | | |
//! |---|---|
//! | [`Batch`], [`Slice`] and its makers in [`slices`], [`Mask`], [`Problem`] | what is computed |
//! | [`Mesh`], [`Layout`], [`heads`] | which tokens and heads a rank holds |
//! | [`plan`] | problem × mesh × layout → [`Plan`]; explanations, shards, automatic choices |
//! | [`schedule`] | a plan as lists of operations, one for each rank; their verification |
//! | [`call`] | arguments of kernels: ranges, scores, heads, tensors |
//! | [`kernel`] | attention over ranges, transforms, merges: reference, CPU, CUDA |
//! | [`transport`] | communication: threads or CUDA devices of one process, processes over MPI or NCCL, your own |
//! | [`runtime`] | a [`Rank`] runs plans |
//! | `cudarc` | slices, contexts and streams of cudarc |
//! | [`report`] | what a plan costs and why, bounds, traces and timelines |
//! | [`machine`], [`simulate`], [`predict`] | a machine's figures; how long plans take there, by simulation; which mesh suits it |
//! | [`View`], [`ViewMut`], [`DeviceView`]; [`Dtype`], [`Element`]; [`Error`] | typed views, element types, errors |
//!
//! Data flows one way: plan → schedule → runtime → kernel and transport. Modules up to the schedule do not access the
//! caller's memory and are `no_std` with `alloc`; the rest needs the feature `std` (default). Other features: `rayon`
//! runs CPU kernels on several threads, `cuda` adds the CUDA backend, `cudarc` views of cudarc's slices, `nccl` ranks
//! over NCCL, `mpi` ranks over MPI.
#![cfg_attr(feature = "std", doc = "")]
#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(missing_debug_implementations)]

extern crate alloc;

mod batch;
pub mod call;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod device;
mod element;
mod error;
pub mod heads;
#[cfg(feature = "std")]
pub mod kernel;
mod layout;
pub mod machine;
mod mask;
mod mesh;
pub mod plan;
pub mod predict;
pub mod report;
#[cfg(feature = "std")]
pub mod runtime;
pub mod schedule;
mod side;
pub mod simulate;
mod slice;
#[cfg(feature = "std")]
mod sync;
mod tensor;
pub mod transport;

pub use batch::{Batch, Side};
pub use device::Device;
pub use element::{Accumulator, Dtype, Element};
pub use error::{Cause, Error, Result, RunKind, RunName};
pub use layout::Layout;
pub use machine::figures::Machine;
pub use mask::Mask;
pub use mesh::{Coordinates, Mesh};
pub use plan::{identity::Plan, options::Options, problem::Problem};
#[cfg(feature = "std")]
pub use runtime::{
    rank::Rank,
    tensors::{Backward, Forward},
};
pub use slice::{Slice, makers as slices};
pub use tensor::{DeviceView, DeviceViewMut, View, ViewMut, disjoint};
