// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flaws of a schedule, as errors.

use alloc::string::String;

use crate::error::Error;

/// A flaw of one operation of one rank.
pub(super) fn flaw(rank: usize, operation: usize, flaw: impl Into<String>) -> Error {
    Error::Schedule { rank, operation, flaw: flaw.into() }
}
