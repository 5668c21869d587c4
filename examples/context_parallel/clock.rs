// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clocks of processes, compared over their transport.
//!
//! Rank 0 asks each rank in turn for the time, several times. The answer of the quickest round trip lies within half that
//! round trip of the middle of it (Cristian, 1989), which on one machine or one rack is some ten microseconds: enough for a
//! picture of operations that take milliseconds.

use std::time::Instant;

use cpattn::{
    Result,
    transport::{Label, Message, Transport},
};

const ROUNDS: u32 = 32;

/// What to add to this rank's nanoseconds since its `epoch` for those of rank 0 since its own.
pub fn offset(end: &impl Transport, epoch: Instant) -> Result<i64> {
    let now = || epoch.elapsed().as_nanos() as u64;
    for rank in 1..end.world() {
        if end.rank() == 0 {
            // The quickest round trip, and the offset that it shows.
            let mut best = (u64::MAX, 0_i64);
            for step in 0..ROUNDS {
                let (sent, mut there) = (now(), 0_u64);
                one(end, step, rank, &mut 0, true)?;
                one(end, step, rank, &mut there, false)?;
                let trip = now() - sent;
                if trip < best.0 {
                    best = (trip, (sent + trip / 2) as i64 - there as i64);
                }
            }
            one(end, ROUNDS, rank, &mut (best.1 as u64), true)?;
        } else if end.rank() == rank {
            for step in 0..ROUNDS {
                one(end, step, 0, &mut 0, false)?;
                one(end, step, 0, &mut now(), true)?;
            }
            let mut offset = 0;
            one(end, ROUNDS, 0, &mut offset, false)?;
            return Ok(offset as i64);
        }
    }
    Ok(0)
}

/// Sends a number to `peer`, or receives one.
fn one(end: &impl Transport, step: u32, peer: usize, number: &mut u64, send: bool) -> Result<()> {
    let message = [Message { peer, ptr: std::ptr::from_mut(number).cast(), bytes: 8 }];
    let (sends, recvs): (&[_], &[_]) = if send { (&message, &[]) } else { (&[], &message) };
    // SAFETY: the number is borrowed alone until the call returns.
    unsafe { end.exchange(Label::new("clock", step), sends, recvs) }
}
