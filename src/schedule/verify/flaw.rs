// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flaws of a schedule, as errors.

use alloc::string::String;

use crate::error::Error;

/// A flaw of one operation of one rank.
pub(super) fn flaw(rank: usize, operation: usize, flaw: impl Into<String>) -> Error {
    Error::Schedule { rank, operation, flaw: flaw.into() }
}

/// A flaw that shows when an operation is executed.
pub(super) enum Wrong {
    /// Of this operation.
    Here(String),
    /// Of another one, which the error names.
    There(Error),
}

impl<T: Into<String>> From<T> for Wrong {
    fn from(text: T) -> Self {
        Self::Here(text.into())
    }
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        Self::There(error)
    }
}
