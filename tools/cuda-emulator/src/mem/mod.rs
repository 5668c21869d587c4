// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that knows what was allocated, written, freed and by whom.
//!
//! - [`global`]: allocations with red zones, poison and a bit per byte that says "written";
//! - [`order`]: who accessed which bytes of global memory last, for races inside a launch;
//! - [`shared`]: the shared memory of one block, with the same bits and epochs per warp; [`lanes`]: between its lanes;
//! - [`touch`]: folds the lanes of one instruction into runs of 16 bytes, the unit all shadows work in.

pub(crate) mod footprint;
pub(crate) mod global;
pub(crate) mod lanes;
pub(crate) mod order;
pub(crate) mod shared;
pub(crate) mod snapshot;
pub(crate) mod touch;

pub use footprint::Footprint;
pub use global::{Memory, Owner};
pub(crate) use snapshot::Snapshot;

/// Generic addresses from here on mean shared memory of the block.
pub(crate) const SHARED_WINDOW: u64 = 0x4000_0000_0000_0000;
/// Generic addresses from here on mean local memory of the thread.
pub(crate) const LOCAL_WINDOW: u64 = 0x5000_0000_0000_0000;
/// Generic addresses from here on mean the kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x6000_0000_0000_0000;
/// Which window an address is in.
pub(crate) const WINDOW_MASK: u64 = 0xf000_0000_0000_0000;
