// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks: of groups, peers and tables of functions that fail, and the runs they make of any plan.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use cpattn::ffi::*;

use crate::{
    bytes::{Bytes, called, size},
    plans::share_of,
    world::{Owned, World},
};

pub fn create_rank(w: &mut World, b: &mut Bytes) {
    let world = 1 + b.below(3) as u32;
    let mut transports = vec![null_mut(); world as usize];
    let asked = if b.rarely() { 0 } else { world };
    if called(unsafe { cpattn_local_group(asked, b.below(3), transports.as_mut_ptr()) }) != 0 {
        return;
    }
    for t in transports {
        let options = cpattn_rank_options {
            struct_size: size::<cpattn_rank_options>(b),
            workers: b.below(3) as u32,
            device_type: if b.rarely() { 2 } else { 1 },
            device_id: 0,
            sm_margin: u32::from(b.rarely()),
        };
        let mut rank = null_mut();
        let options = if b.byte() & 1 == 0 { null() } else { &raw const options };
        let ok = called(unsafe { cpattn_rank_create(t, options, &mut rank) }) == 0;
        w.dead.push(t.cast());
        if ok {
            w.ranks.push(rank);
        } else {
            called(unsafe { cpattn_transport_destroy(t) });
        }
        called(unsafe { cpattn_transport_destroy(t) });
    }
}

unsafe extern "C" fn fails(_: *mut c_void, _: u32, _: u32, _: u64, _: *mut u64, blame: *mut i64) -> i32 {
    unsafe { *blame = 7 };
    3
}
unsafe extern "C" fn nothing(
    _: *mut c_void,
    _: *const std::ffi::c_char,
    _: u32,
    _: *const cpattn_message,
    _: usize,
    _: *const cpattn_message,
    _: usize,
    _: *mut c_void,
    _: *mut i64,
) -> i32 {
    0
}
unsafe extern "C" fn fine(_: *mut c_void, _: *mut i64) -> i32 {
    0
}
unsafe extern "C" fn ends(_: *mut c_void) {}

pub fn create_transport(w: &mut World, b: &mut Bytes) {
    let table = cpattn_transport_table {
        struct_size: size::<cpattn_transport_table>(b),
        context: null_mut(),
        rank: b.below(4) as u32,
        world: b.number(6) as u32 & 0xffff,
        agree: if b.rarely() { None } else { Some(fails) },
        exchange: if b.rarely() { None } else { Some(nothing) },
        poll: if b.rarely() { None } else { Some(fine) },
        abort: if b.rarely() { None } else { Some(ends) },
        release: if b.byte() & 1 == 0 { None } else { Some(ends) },
    };
    let (mut transport, mut rank) = (null_mut(), null_mut());
    if called(unsafe { cpattn_transport_create(&table, &mut transport) }) == 0 {
        w.dead.push(transport.cast());
        if called(unsafe { cpattn_rank_create(transport, null(), &mut rank) }) == 0 {
            w.ranks.push(rank);
        }
    }
}

pub fn run(w: &mut World, b: &mut Bytes) {
    let (rank, plan) = (w.rank(b), w.plan(b));
    if b.rarely() {
        let (at, bytes) = (b.byte() as usize, b.byte() as usize * 8);
        let memory = w.memory.as_mut_ptr().cast::<u8>().wrapping_add(at);
        called(unsafe { cpattn_rank_lend_workspace(rank, memory.cast(), if b.rarely() { usize::MAX } else { bytes }) });
        // Tensors may lie there too: lend no more.
        if let Some(at) = w.ranks.iter().position(|&r| r == rank) {
            let rank = w.ranks.swap_remove(at);
            called(unsafe { cpattn_rank_destroy(rank) });
            w.dead.push(rank.cast());
        }
        return;
    }
    let Some((nq, nk)) = share_of(plan, b) else { return };
    let (h, hk, d, dv) = (1 + b.below(8) as i64, 1 + b.below(4) as i64, 1 + b.below(16) as i64, 1 + b.below(16) as i64);
    let bits = [16, 32, 32, 64][b.below(4) as usize];
    let acc = if bits == 64 { 64 } else { 32 };
    w.used = 0;
    let mut t: Vec<Owned> = [
        (&[nq, h, d][..], bits),
        (&[nk, hk, d], bits),
        (&[nk, hk, dv], bits),
        (&[h], 32),
        (&[nq, h, dv], bits),
        (&[h, nq], acc),
        (&[nq, h, dv], bits),
        (&[nq, h, d], bits),
        (&[nk, hk, d], bits),
        (&[nk, hk, dv], bits),
        (&[h], acc),
    ]
    .into_iter()
    .map(|(shape, bits)| w.tensor(shape, bits, b))
    .collect();
    let p: Vec<*const cpattn_tensor> = t.iter_mut().map(Owned::as_ptr).collect();
    let sinks = b.byte() & 3 == 3;
    let optional = |i: usize| if sinks { p[i] } else { null() };
    unsafe {
        if b.byte() & 1 == 0 {
            let args = cpattn_forward_args {
                struct_size: size::<cpattn_forward_args>(b),
                q: p[0],
                k: p[1],
                v: p[2],
                sinks: optional(3),
                o: p[4],
                lse: p[5],
                stream: if b.rarely() { p[0].cast_mut().cast() } else { null_mut() },
            };
            called(cpattn_forward(rank, plan, &args));
        } else {
            let args = cpattn_backward_args {
                struct_size: size::<cpattn_backward_args>(b),
                q: p[0],
                k: p[1],
                v: p[2],
                sinks: optional(3),
                o: p[4],
                lse: p[5],
                d_o: p[6],
                dq: p[7],
                dk: p[8],
                dv: p[9],
                dsinks: optional(10),
                stream: null_mut(),
            };
            called(cpattn_backward(rank, plan, &args));
        }
        called(cpattn_rank_poll(rank));
        if b.rarely() {
            called(cpattn_rank_abort(rank));
        }
        if b.rarely() {
            called(cpattn_rank_prepare(rank, plan, b.number(2) as i32));
        }
    }
}
