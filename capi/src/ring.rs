// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check of a ring's links.

use std::mem::MaybeUninit;

use super::{
    handle::{self, Exclusive as _},
    input::{array_mut, result},
    rank::cpattn_rank,
    status::{CPATTN_PEER, Fail, status_of},
    transport::cpattn_transport,
};
use cpattn::{
    Cause, Error,
    transport::ring_check::{Link, RingFault},
};

/// One link in one direction.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_link {
    pub from: u32,
    pub to: u32,
    pub latency: f64,
    pub bytes_per_second: f64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_ring_check(
    transport: *mut cpattn_transport, bytes: usize, links: *mut cpattn_link, capacity: usize, count: *mut usize,
) -> i32 {
    boundary!({
        let (given, count) = given!(handle::borrow(transport), result("count", count));
        let out = given!(room(given.end().world(), links, capacity));
        let known = given.check_ring(bytes).map_err(|fault| {
            let fail = failed(&fault);
            if fail.status == CPATTN_PEER {
                // As after the failure of a run: the other ranks of a table do not wait for this rank.
                given.end().abort(Cause::Failed);
            }
            fail
        })?;
        count.write(write(out, &known));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_ring_check(
    rank: *mut cpattn_rank, bytes: usize, links: *mut cpattn_link, capacity: usize, count: *mut usize,
) -> i32 {
    boundary!({
        let (rank, count) = given!(handle::borrow(rank), result("count", count));
        let mut rank = rank.claim()?;
        if links.is_null() && capacity == 0 {
            count.write(2 * rank.world());
            return Ok(());
        }
        let out = given!(room(rank.world(), links, capacity));
        let known = rank.check_ring(bytes).map_err(|fault| failed(&fault))?;
        count.write(write(out, &known));
    })
}

/// The caller's array, if all links fit.
///
/// # Safety
/// The header's promise about arrays.
unsafe fn room<'a>(
    world: usize, links: *mut cpattn_link, capacity: usize,
) -> cpattn::Result<&'a mut [MaybeUninit<cpattn_link>]> {
    if capacity < 2 * world {
        let expected = format!("at least {}, two for each of {world} ranks", 2 * world);
        return Err(Error::invalid("capacity", capacity, expected));
    }
    // SAFETY: the caller's promise.
    unsafe { array_mut("links", links, capacity) }
}

fn failed(fault: &RingFault) -> Fail {
    let (status, peer) = match fault {
        RingFault::Failed { error, .. } => (status_of(error), error.peer()),
        _ => (CPATTN_PEER, None),
    };
    Fail { status, text: fault.to_string(), peer }
}

/// Writes the links, and returns their number.
fn write(out: &mut [MaybeUninit<cpattn_link>], known: &[Link]) -> usize {
    for (to, link) in out.iter_mut().zip(known) {
        to.write(cpattn_link {
            from: link.from as u32,
            to: link.to as u32,
            latency: link.latency.as_secs_f64(),
            bytes_per_second: link.bytes_per_second,
        });
    }
    known.len()
}
