// SPDX-License-Identifier: MIT OR Apache-2.0
//! The segments of a scan during its proof: their numbers over all ranks, and what each rank was sent. `scan` fills and
//! reads it.

use alloc::{collections::BTreeSet, vec::Vec};

use super::cell::What;

/// What the ranks of a group have, by number of segment.
#[derive(Default)]
pub(super) struct Segments {
    /// The number of the first segment of each segment's document.
    pub first: Vec<u32>,
    /// The numbers of each rank's segments, in its order.
    pub own: Vec<Vec<u32>>,
    /// What each rank was sent: the tensor, its segments, the head.
    pub arrived: BTreeSet<(usize, What, [u32; 3])>,
}
