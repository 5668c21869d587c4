// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports on plans and runs: costs, explanations, bounds, traces and timelines.
//!
//! This module only reads plans, schedules and recorded events. Lower modules must not depend on it.

pub(crate) mod bound;
pub(crate) mod costs;
mod explain;
pub(crate) mod metadata;
#[cfg(feature = "std")]
pub(crate) mod packed;
pub(crate) mod size;
#[cfg(feature = "std")]
pub mod timeline;
pub mod trace;

pub use costs::{Costs, PeakBuffers, StepCost};
pub use explain::ScanCosts;
