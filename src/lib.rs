// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exact context-parallel attention, from one low-level crate.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod batch;
pub mod element;
pub mod error;
#[cfg(feature = "capi")]
pub mod ffi;
pub mod heads;
pub mod kernel;
pub mod layout;
pub mod mask;
pub mod mesh;
pub mod plan;
#[cfg(feature = "std")]
pub mod runtime;
pub mod schedule;
#[cfg(feature = "std")]
mod sync;
pub mod tensor;
pub mod transport;

pub use batch::{Batch, Side};
pub use element::{Accumulator, Dtype, Element};
pub use error::{Cause, Error, Result};
pub use layout::Layout;
pub use mask::Mask;
pub use mesh::Mesh;
pub use plan::{Options, Plan, Problem};
#[cfg(feature = "std")]
pub use runtime::{Backward, Forward, Rank};
pub use tensor::{View, ViewMut};
