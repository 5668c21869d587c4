// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group on threads, and exchanges written as lists of peers and bytes.
//!
//! Deadlines are short where one is meant to expire, and long where none is: a test that hangs fails by its deadline.

use cpattn::transport::{Label, Message, Transport, local, local::Local};
use cpattn::{Cause, Error, Fault, Result};
use std::thread;
use std::time::Duration;

pub const LONG: Duration = Duration::from_secs(20);

pub const SHORT: Duration = Duration::from_millis(400);

pub fn label(operation: &'static str, step: u32) -> Label {
    Label::new(operation, step)
}

pub fn send(peer: usize, bytes: &[u8]) -> Message {
    Message { peer, ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
}

pub fn recv(peer: usize, bytes: &mut [u8]) -> Message {
    Message { peer, ptr: bytes.as_mut_ptr(), bytes: bytes.len() }
}

/// A result whose expired deadline, if it has one, took between [`SHORT`] and three times that, as [`SHORT`].
pub fn timed(mut result: Result<()>) -> Result<()> {
    if let Err(Error::Peer { fault: Fault::One { cause: Cause::Deadline { ms, .. }, .. }, .. }) = &mut result {
        let short = SHORT.as_millis() as u64;
        assert!((short..3 * short).contains(ms), "a deadline of {short} ms expired after {ms} ms");
        *ms = short;
    }
    result
}

/// Exchanges lists of (peer, bytes) and (peer, buffer).
pub fn exchange(rank: &Local, label: Label, sends: &[(usize, &[u8])], recvs: &mut [(usize, &mut [u8])]) -> Result<()> {
    let sends: Vec<_> = sends.iter().map(|(peer, bytes)| send(*peer, bytes)).collect();
    let recvs: Vec<_> = recvs.iter_mut().map(|(peer, bytes)| recv(*peer, bytes)).collect();
    // SAFETY: the ranges are borrowed, the receives mutably, until the call returns.
    unsafe { rank.exchange(label, &sends, &recvs) }
}

/// Runs `body` on a thread per rank; what it returns, by rank.
pub fn run<T: Send>(world: usize, deadline: Duration, body: impl Fn(Local) -> T + Sync) -> Vec<T> {
    let ranks = local::group(world, deadline).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
