// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults: which rank an error names, on every transport whose ranks can be asked.
//!
//! A rank sees only that a message of its peer does not come. The peer may be waiting for a third rank, so the peer is
//! not at fault by that alone. The rules, from the first sign to the error:
//!
//! 1. *Deadline.* A call waits as long as its messages move, and for one deadline after the last that moved. Time in
//!    which the process was stopped does not count ([`Clock`]).
//! 2. *Search.* A rank whose deadline has passed asks its peer for which rank that one waits, then that rank, and so on
//!    ([`Search`]). A rank has a [`grace`] of half a deadline for its answer.
//! 3. *Verdict.* The nearest rank that does not answer, or is in no call, is at fault ([`AtFault`]). If all wait for
//!    each other it is the one that has only begun to wait; otherwise ranks whose calls differ; otherwise it is not
//!    known.
//! 4. *Error.* The first failure of a group counts for all its ranks. Each reports it from its own side
//!    ([`GroupFailure`]).
//!
//! The transports differ in how they ask. `local` reads the answers from its board, so every rank answers at once and
//! only the order of the search matters. `mpi` sends questions as notices; a rank answers when it is in a call, so one
//! that computes does not answer. `engine` puts questions and answers into a store, and every rank has a thread that
//! answers; its errors have a text instead of a cause ([`Fault::Found`](crate::Fault::Found)). NCCL has no way to ask:
//! its errors name the peers of the exchange.
//!
//! Nothing here waits, sends or takes a lock.

mod clock;
mod failure;
mod search;

pub(super) use clock::Clock;
pub(super) use failure::{AGREEMENT, GroupFailure};
pub(super) use search::{Answer, AtFault, Search};

use std::time::Duration;

/// How long a rank has for its answer: a rank that waits may need that long to get a core. `least` depends on who
/// answers: MPI's ranks look every fraction of a millisecond, a store is reached over a connection.
pub(super) fn grace(deadline: Duration, least: Duration) -> Duration {
    (deadline / 2).clamp(least, Duration::from_secs(5))
}

/// Milliseconds, as errors report them.
pub(super) fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}
