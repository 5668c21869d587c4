// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traces of ranks: which operation ran when, as plain structs.
//!
//! Rust's epoch is a moment that the caller chooses. In C it is the same for the whole process: the first call of
//! `cpattn_clock` or `cpattn_rank_record`. So ranks that are threads share it.

use core::ffi::c_char;
use std::{
    sync::{OnceLock, PoisonError},
    time::Instant,
};

use super::{
    handle::{self, Exclusive as _},
    input::{array_mut, result},
    rank::cpattn_rank,
};
use cpattn::report::trace::Event;

/// Bytes of a name, with the 0 behind it.
const NAME: usize = 32;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_event {
    pub name: [c_char; 32],
    pub phase: [c_char; 32],
    pub start_ns: u64,
    pub end_ns: u64,
    pub bytes: u64,
    pub rank: u32,
    pub step: u32,
    pub lane: i32,
    pub reserved: u32,
}

/// A name that is cut if it is too long, and ends with a 0.
pub(super) fn name(text: &str) -> [c_char; NAME] {
    let mut out = [0; NAME];
    for (to, &from) in out.iter_mut().zip(&text.as_bytes()[..text.len().min(NAME - 1)]) {
        *to = from as c_char;
    }
    out
}

impl From<Event> for cpattn_event {
    fn from(e: Event) -> Self {
        Self {
            name: name(e.name),
            phase: name(e.phase),
            start_ns: e.start_ns,
            end_ns: e.end_ns,
            bytes: e.bytes,
            rank: e.rank as u32,
            step: e.step,
            lane: e.lane as i32,
            reserved: 0,
        }
    }
}

fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_clock(ns: *mut u64) -> i32 {
    boundary!({
        given!(result("ns", ns)).write(epoch().elapsed().as_nanos() as u64);
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_record(rank: *mut cpattn_rank, capacity: u64) -> i32 {
    boundary!({
        let rank = given!(handle::borrow(rank));
        rank.claim()?.trace().record(epoch(), usize::try_from(capacity).unwrap_or(usize::MAX))?;
        rank.untaken.lock().unwrap_or_else(PoisonError::into_inner).clear();
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_trace(
    rank: *mut cpattn_rank, events: *mut cpattn_event, capacity: usize, count: *mut usize,
) -> i32 {
    boundary!({
        let (rank, events, count) =
            given!(handle::borrow(rank), array_mut("events", events, capacity), result("count", count));
        let mut locked = rank.claim()?;
        let mut untaken = rank.untaken.lock().unwrap_or_else(PoisonError::into_inner);
        // Events that do not fit stay with the rank, within its capacity; events gathered from other ranks come first.
        if untaken.is_empty() {
            untaken.extend(locked.trace().events());
        }
        count.write(untaken.len());
        let taken = untaken.len().min(events.len());
        for (to, from) in events.iter_mut().zip(untaken.drain(..taken)) {
            to.write(from.into());
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_gather_trace(rank: *mut cpattn_rank) -> i32 {
    boundary!({
        let rank = given!(handle::borrow(rank));
        let mut locked = rank.claim()?;
        locked.synchronize()?;
        let mut untaken = rank.untaken.lock().unwrap_or_else(PoisonError::into_inner);
        untaken.extend(locked.trace().events());
        // After a failure this rank still has its own events.
        *untaken = locked.trace().gather_events(epoch(), untaken.make_contiguous())?.into();
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_trace_accuracy(rank: *const cpattn_rank, ns: *mut u64) -> i32 {
    boundary!({
        let (rank, ns) = given!(handle::borrow(rank), result("ns", ns));
        ns.write(rank.claim()?.trace().accuracy().as_nanos() as u64);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::CStr;

    #[test]
    fn names_are_cut_and_end_in_zero() {
        let text = |n: [c_char; NAME]| {
            // SAFETY: `name` leaves the last byte 0.
            unsafe { CStr::from_ptr(n.as_ptr()) }.to_str().unwrap().to_owned()
        };
        let long = "an operation with a name of more than thirty-two bytes";
        assert_eq!([text(name("")), text(name("ring")), text(name(long))], ["", "ring", &long[..NAME - 1]]);
    }
}
