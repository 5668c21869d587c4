// SPDX-License-Identifier: MIT OR Apache-2.0
//! Elements in memory: copies, casts and sums over whole tensors, and the layouts in which the algorithms hold rows.
//!
//! Nothing here knows scores or masks.

pub(crate) mod arena;
pub(crate) mod convert;
pub(crate) mod delta;
pub(crate) mod panel;
pub(crate) mod rows;
pub(crate) mod transform;
