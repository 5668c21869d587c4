// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs kernels: warps, blocks and grids, in a seeded order that CUDA allows, however unlikely.

pub(crate) mod block;
pub(crate) mod clock;
pub(crate) mod cluster;
pub(crate) mod flight;
pub(crate) mod grid;
mod launch;
pub(crate) mod mbarrier;
pub(crate) mod products;
pub(crate) mod registers;
mod resident;
pub(crate) mod warp;

pub(crate) use cluster::MAX_BLOCKS;
pub use launch::{Launch, Options, Stats, launch};
