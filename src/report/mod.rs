// SPDX-License-Identifier: MIT OR Apache-2.0
//! What people read about plans and runs: costs, explanations, bounds, and traces drawn as timelines.
//!
//! Everything here looks at plans, schedules and recorded events from outside. Nothing below may depend on it.

mod bound;
pub(crate) mod costs;
mod explain;
pub(crate) mod metadata;
#[cfg(feature = "std")]
pub mod timeline;
#[cfg(feature = "std")]
pub mod trace;

pub use costs::{Costs, PeakBuffers, StepCost};
