// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of a join of states: what recurrent layers pass on along documents.

use super::{Block, RawTensor};

/// Joins segments: each block is `dst = sources[0] · sources[1]`, plus `sources[2]` if there is one. Blocks touch no
/// destination of another.
///
/// `sources[0]` is a decay. `sources[1]`, `sources[2]` and `dst` have one shape and the heads of the decay. Without
/// `matrix` their dim is a multiple of the decay's dim, and number `i` of the decay scales the `i`th of equal parts.
/// With `matrix` a decay is square, rows together, and theirs are matrices with as many rows.
#[derive(Clone, Copy, Debug)]
pub struct Compose<'a> {
    /// The blocks.
    pub blocks: &'a [Block],
    /// The sources of all blocks.
    pub sources: &'a [RawTensor],
    /// Whether decays are matrices.
    pub matrix: bool,
}
