// SPDX-License-Identifier: MIT OR Apache-2.0
//! The number by which the ranks of a group find each other.

use super::sys::{Api, RawId};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// Identifies a group. One rank makes it, and every rank needs a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl core::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The id contains an address that any process could connect to.
        f.write_str("UniqueId(…)")
    }
}

impl UniqueId {
    /// Makes a new id (`ncclGetUniqueId`); each group needs its own. The process that makes it must live until all
    /// ranks are connected.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL 2.14 or later, [`Error::Device`] when NCCL fails.
    pub fn new() -> Result<Self> {
        let api = Api::get()?;
        let mut id = RawId([0; 128]);
        // SAFETY: a pointer to a local.
        api.check("ncclGetUniqueId", unsafe { (api.ncclGetUniqueId)(&raw mut id) })?;
        Ok(Self(id.0))
    }

    /// The bytes that [`to_bytes`](Self::to_bytes) gave on another rank.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }

    /// Its bytes, to send to the other ranks.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0
    }
}
