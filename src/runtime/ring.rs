// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check of a ring's links by ranks, which own their transports.

use std::vec::Vec;

use super::failure::{FirstFailure, abort, abort_on_unwind};
use crate::{
    error::{Cause, Error},
    transport::{
        Transport,
        ring_check::{Link, RingFault},
    },
};

/// Runs `check` over a rank's transport. An error that ends the group is kept, as after a run.
pub(super) fn checked(
    transport: &dyn Transport,
    failure: &FirstFailure,
    check: impl FnOnce() -> Result<Vec<Link>, RingFault>,
) -> Result<Vec<Link>, RingFault> {
    failure.check(transport).map_err(|error| RingFault::Failed { link: None, error })?;
    let outcome = abort_on_unwind(transport, failure, check);
    match &outcome {
        // A refusal: this rank has sent nothing, or its peer has refused too and ended the group.
        Ok(_) | Err(RingFault::Failed { error: Error::Invalid { .. }, .. }) => {}
        Err(RingFault::Failed { error, .. }) => {
            failure.keep(error);
            abort(transport, Cause::Failed);
        }
        // The check has aborted the transport.
        Err(RingFault::OtherBytes { .. }) => failure.ended(transport.rank(), Cause::Failed),
    }
    outcome
}
