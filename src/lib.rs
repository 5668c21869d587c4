// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exact context-parallel attention, from one low-level crate.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod element;
pub mod error;
pub mod kernel;
#[cfg(feature = "std")]
mod sync;
pub mod tensor;
pub mod transport;

pub use element::{Accumulator, Dtype, Element};
pub use error::{Cause, Error, Result};
pub use tensor::{View, ViewMut};
