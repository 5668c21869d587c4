// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rules of the contract that transports share: refusals that one rank makes alone, and the comparison of the
//! numbers of all ranks in an agreement.

use core::ops::Range;
use std::{
    format,
    sync::{Mutex, MutexGuard, TryLockError},
    time::Duration,
};

use super::{Label, Message, Transport};
use crate::error::{Cause, Error, Result};

/// Refuses lists that break the contract, before any of their messages begins.
pub(super) fn check_messages(rank: usize, world: usize, sends: &[Message], recvs: &[Message]) -> Result<()> {
    check_list(rank, world, "sends", sends)?;
    check_list(rank, world, "recvs", recvs)
}

fn check_list(rank: usize, world: usize, argument: &str, list: &[Message]) -> Result<()> {
    for (at, message) in list.iter().enumerate() {
        let argument = |field| format!("{argument}[{at}].{field}");
        if message.peer >= world {
            return Err(Error::invalid(argument("peer"), message.peer, format_args!("a rank below {world}")));
        }
        if message.peer == rank {
            return Err(
                Error::invalid(argument("peer"), message.peer, "another rank").hint("copy what a rank sends to itself")
            );
        }
        if message.bytes == 0 {
            return Err(
                Error::invalid(argument("bytes"), 0, "at least 1").hint("leave empty messages out, on both sides")
            );
        }
        if message.ptr.is_null() {
            return Err(Error::invalid(argument("ptr"), "null", "an address"));
        }
    }
    Ok(())
}

/// Refuses a group of an agreement that is not one of this rank's.
pub(super) fn check_group(rank: usize, world: usize, group: &Range<usize>) -> Result<()> {
    if group.contains(&rank) && group.end <= world {
        return Ok(());
    }
    let expected = format_args!("a range within 0..{world} that contains rank {rank}");
    Err(Error::invalid("group", format_args!("{group:?}"), expected))
}

/// The result of an agreement from the numbers of all ranks of `group`, one of which is `ours`.
pub(super) fn compare(rank: usize, group: Range<usize>, ours: u64, all: &[u64]) -> Result<()> {
    match group.zip(all).find(|&(_, &theirs)| theirs != ours) {
        Some((peer, &theirs)) => Err(Error::disagreement(rank, peer, ours, theirs)),
        None => Ok(()),
    }
}

/// Refuses a deadline of 0.
pub(super) fn check_deadline(deadline: Duration) -> Result<()> {
    if deadline.is_zero() { Err(Error::invalid("deadline", "0", "longer than 0")) } else { Ok(()) }
}

/// Takes the state of the calls of `end` that wait, for `call`. Refuses it while another call has that state; `during`
/// is that other call, if known. A call that has panicked halfway aborts the group, as its messages never move.
pub(super) fn begin_call<'a, T>(
    end: &impl Transport,
    calls: &'a Mutex<T>,
    call: Label,
    during: impl FnOnce() -> Option<Label>,
) -> Result<MutexGuard<'a, T>> {
    match calls.try_lock() {
        Ok(calls) => Ok(calls),
        Err(TryLockError::Poisoned(poisoned)) => {
            end.abort(Cause::Panicked);
            Ok(poisoned.into_inner())
        }
        Err(TryLockError::WouldBlock) => Err(not_serial(call, end.rank(), during())),
    }
}

/// The refusal of `call` on a rank that is in another call, `during` if that is known.
pub(super) fn not_serial(call: Label, rank: usize, during: Option<Label>) -> Error {
    let during =
        during.map_or("another call".into(), |Label { operation, step, .. }| format!("{operation}, step {step}"));
    Error::invalid(call.operation, format!("called on rank {rank} while it is in {during}"), "one call at a time")
        .hint("the exchanges and agreements of one rank are serial: start them from one thread")
}
