// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two sides of attention: queries and keys.

/// The tokens of q or those of k, where the two may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// q, o, lse and their gradients.
    Q,
    /// k, v and their gradients.
    K,
}

impl Side {
    /// The other side.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Q => Self::K,
            Self::K => Self::Q,
        }
    }
}
