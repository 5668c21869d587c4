// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the part of the contract about message lists that one rank can check alone.

use super::Message;
use crate::error::{Error, Result};
use std::format;

/// Refuses a list that breaks the contract, before any of its messages begins. `argument` is `sends` or `recvs`.
pub(super) fn check(rank: usize, world: usize, argument: &str, list: &[Message]) -> Result<()> {
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
