// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that all ranks make together outside of runs: gather a trace, shift rows.
//!
//! These calls are not covered by the comparison of plans, so the ranks compare each of them before any data moves. A
//! rank that makes a different call is found in this way, and the group stays usable. A later failure ends the group,
//! as in a run.

use std::{ops::Range, string::String};

use super::failure::{FirstFailure, described, watched};
use crate::{error::Result, plan::Fingerprint, transport::Transport};

/// A number that identifies a call with these parameters.
pub(super) fn number(parts: &[u64]) -> u64 {
    let mut fingerprint = Fingerprint::new();
    parts.iter().for_each(|&part| fingerprint.word(part));
    fingerprint.finish()
}

/// Agrees with `group` on `number`, then calls `work`. The error of a disagreement names the call by `what`.
///
/// # Errors
/// [`Error::Disagreement`] on all ranks of the group, which stays usable. Any other error is kept, and ends the group.
pub(super) fn agreed<R>(
    transport: &dyn Transport,
    failure: &FirstFailure,
    group: Range<usize>,
    number: u64,
    what: impl FnOnce() -> String,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    failure.check(transport)?;
    watched(transport, failure, || {
        let agreed = if group.len() > 1 { transport.agree(group, number) } else { Ok(()) };
        match described(transport, agreed, what)? {
            Ok(()) => work().map(Ok),
            Err(disagreement) => Ok(Err(disagreement)),
        }
    })?
}
