// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports on plans and runs: costs, explanations, bounds, traces and timelines.
//!
//! This module only reads plans, schedules and recorded events. Lower modules must not depend on it.

mod bound;
pub(crate) mod costs;
mod explain;
pub(crate) mod metadata;
#[cfg(feature = "std")]
pub(crate) mod packed;
#[cfg(feature = "std")]
pub mod timeline;
#[cfg(feature = "std")]
pub mod trace;

pub use costs::{Costs, PeakBuffers, StepCost};
