// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of the all-to-all of one tensor: direction, side, innermost dimension, element type.

use alloc::format;

use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
};

/// The direction of an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllToAllDirection {
    /// From the rank's own tokens and all heads to the ring share's tokens and the rank's own heads.
    ToHeads,
    /// From the ring share's tokens and the rank's own heads back to the rank's own tokens and all heads.
    ToTokens,
}

/// The all-to-all of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllToAll {
    /// The direction.
    pub direction: AllToAllDirection,
    /// `Q`: a row for each q token and the q heads; `K`: a row for each k token and the kv heads.
    pub side: Side,
    /// Innermost dimension.
    pub dim: u32,
    /// Element type.
    pub dtype: Dtype,
}

impl AllToAll {
    /// To heads, and back to tokens: both all-to-alls of tensors of this side, innermost dimension and element type.
    ///
    /// # Errors
    /// A `dim` above the largest u32.
    pub fn both(side: Side, dim: usize, dtype: Dtype) -> Result<[Self; 2]> {
        let dim = u32::try_from(dim).map_err(|_| Error::invalid("dim", dim, format!("at most {}", u32::MAX)))?;
        Ok([AllToAllDirection::ToHeads, AllToAllDirection::ToTokens].map(|direction| Self {
            direction,
            side,
            dim,
            dtype,
        }))
    }
}
