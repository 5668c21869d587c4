// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs kernels: warps, blocks and grids, in a seeded order that CUDA allows, however unlikely.

pub(crate) mod block;
pub(crate) mod clock;
pub(crate) mod flight;
pub(crate) mod grid;
mod launch;
pub(crate) mod mbarrier;
pub(crate) mod products;
pub(crate) mod registers;
pub(crate) mod warp;

pub use launch::{Launch, Options, Stats, launch};
