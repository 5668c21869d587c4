// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over ranges: the forward, the two passes of the backward, and how they are divided into units of work.
//!
//! Each algorithm exists once, generic over the vectors of `vector` and the products of `product`. Only the backward on
//! matrix units (`tiled`) is separate, since its operands have another layout in memory.

pub(crate) mod backward;
pub(crate) mod bands;
#[cfg(not(cpattn_loom))]
#[allow(unreachable_pub, reason = "public for the models of .ci/loom alone")]
pub(crate) mod dq_order;
#[cfg(cpattn_loom)]
#[allow(
    missing_docs,
    missing_debug_implementations,
    clippy::new_without_default,
    reason = "public for the models of .ci/loom alone"
)]
pub mod dq_order;
pub(crate) mod dropout;
pub(crate) mod forward;
pub(crate) mod key_units;
pub(crate) mod keys;
pub(crate) mod lane_routines;
pub(crate) mod queries;
pub(crate) mod row_blocks;
#[cfg(test)]
pub(crate) mod shapes;
pub(crate) mod slots;
pub(crate) mod small;
pub(crate) mod softmax;
pub(crate) mod stream;
pub(crate) mod tile;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiled;
