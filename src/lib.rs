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
//! | [`kernel`] | attention over ranges, transforms, merges: reference, CPU, CUDA; kernels of your own |
//! | [`transport`] | communication: threads or CUDA devices of one process, processes over MPI or NCCL, your own |
//! | [`runtime`] | a [`Rank`] runs plans |
//! | `cudarc` | slices, contexts and streams of cudarc |
//! | [`report`] | what a plan costs and why, bounds, traces and timelines |
//! | [`machine`], [`simulate`], [`predict`] | a machine's figures; how long plans take there, by simulation; which mesh suits it |
//! | [`View`], [`ViewMut`], [`DeviceView`]; [`Dtype`], [`Element`]; [`Error`] | typed views, element types, errors |
//!
//! Data flows one way: plan → schedule → runtime → kernel and transport. Modules up to the schedule do not access the
//! caller's memory and are `no_std` with `alloc`; the rest needs the feature `std` (default), and attention on the CPU
//! `kernels` (default): without it runs of attention are refused. Other features: `rayon` runs CPU kernels on several
//! threads, `cuda` adds the CUDA backend, `cudarc` views of cudarc's slices, `nccl` ranks
//! over NCCL, `mpi` ranks over MPI.
//!
//! ```
//! # #[cfg(feature = "std")] {
//! use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, transport::local};
//! use std::time::Duration;
//!
//! // Two documents of 5 and 7 tokens, 4 q heads, 2 kv heads, head_dim 64; causal by default.
//! let problem = Problem::new(Batch::new(&[0, 5, 12])?, 4, 2, 64, Dtype::F32);
//! let plan = &Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag)?;
//! // Ranks as threads of one process; over MPI, NCCL or gloo each process has one.
//! let outputs = local::run(4, Duration::from_secs(10), |end| {
//!     let mut rank = Rank::new(end);
//!     let n = plan.local_tokens(Side::Q, rank.rank()).len(); // this rank's own tokens: plan.local_tokens(…).indices()
//!     let (q, k, v) = (vec![0.1f32; n * 4 * 64], vec![0.2; n * 2 * 64], vec![0.3; n * 2 * 64]);
//!     let (mut o, mut lse) = (vec![f32::NAN; n * 4 * 64], vec![f32::NAN; n * 4]);
//!     let (q, k, v) = (View::new(&q, n, 4, 64)?, View::new(&k, n, 2, 64)?, View::new(&v, n, 2, 64)?);
//!     let (out, sums) = (ViewMut::new(&mut o, n, 4, 64)?, ViewMut::head_major(&mut lse, n, 4)?);
//!     rank.forward(plan, Forward::new(q, k, v, out, sums))?;
//!     Ok(o)
//! })?;
//! assert_eq!(outputs.concat().len(), 12 * 4 * 64);
//! # }
//! # Ok::<(), cpattn::Error>(())
//! ```
//!
//! With `cudarc` the slices, contexts and streams of that crate are used as they are: module `cudarc` has a program.
//! In the repository `docs/README.md` is the index of its pages by task: C, Python, transports, several nodes, what is
//! supported where. `benches/NOTES.md` has measurements.
//!
//! ## Limits
//! - No real GPU has run the CUDA kernels or NCCL yet: stand-ins interpret the PTX and report races and bad accesses.
//! - CUDA has f16 and bf16; a call that it cannot run is refused by name before anything is touched.
//! - A pair of tokens is in one slice at most, and a mask without structure needs a slice for each run of it.
//! - Slopes of documents, listed keys and scans are on the CPU only.
//! - `Options::reproducible` plans run on the CPU only, and all ranks need the same kind of CPU.
#![warn(unreachable_pub)]
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(missing_debug_implementations)]

extern crate alloc;

/// The programs of the README and of docs/rust.md are compiled and run as tests.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/rust.md")]
struct Readme;

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
pub use error::{Cause, Error, Fault, Result, RunKind, RunName};
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
