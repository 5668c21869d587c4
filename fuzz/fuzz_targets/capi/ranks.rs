// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks: of groups, peers and tables of functions that fail, and the runs they make of any plan.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use cpattn_capi::*;

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
            isa: if b.rarely() { b.below(9) as i32 - 1 } else { 0 },
            reserved: i32::from(b.rarely()),
            kernel: null(),
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
    let seed = b.word();
    let dropout_seed: *const u64 = if b.byte() & 3 == 3 { &seed } else { null() };
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
                max_logit: if b.rarely() { p[5] } else { core::ptr::null() },
                dropout_seed,
                // A member that comes later is 0.
                ..core::mem::zeroed()
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
                d_lse: if b.rarely() { p[5] } else { core::ptr::null() },
                dropout_seed,
                // A member that comes later is 0.
                ..core::mem::zeroed()
            };
            called(cpattn_backward(rank, plan, &args));
        }
        called(cpattn_rank_poll(rank));
        if b.rarely() {
            called(cpattn_rank_abort(rank));
        }
        if b.rarely() {
            called(cpattn_rank_prepare(rank, plan, b.number(2) as i32, core::ptr::null()));
        }
    }
}

/// The all-to-alls of any plan, on tensors of about the right shapes or of any.
pub fn all_to_all(w: &mut World, b: &mut Bytes) {
    let (rank, plan) = (w.rank(b), w.plan(b));
    let Some((nq, nk)) = share_of(plan, b) else { return };
    let (side, n) = if b.byte() & 1 == 0 { (0, nq) } else { (1, nk) };
    let (h, d, bits) = (1 + b.below(8) as i64, 1 + b.below(16) as i64, [16, 32, 32, 64][b.below(4) as usize]);
    let side = if b.rarely() { b.number(4) as i32 } else { side };
    w.used = 0;
    let mut from = w.tensor(&[n, h, d], bits, b);
    let mut to = w.tensor(&[n, h, d], bits, b);
    let (dim, dtype, at) = (b.number(32) as u32, b.number(5) as i32, b.number(4) as u32);
    let mut bytes = 0;
    let stream = if b.rarely() { w.memory.as_mut_ptr().cast() } else { null_mut() };
    unsafe {
        let call = if b.byte() & 1 == 0 { cpattn_rank_to_heads } else { cpattn_rank_to_tokens };
        called(call(rank, plan, side, from.as_ptr(), to.as_ptr(), stream));
        let out = if b.rarely() { null_mut() } else { &raw mut bytes };
        called(cpattn_plan_all_to_all_workspace(plan, at, side, dim, dtype, out));
        // What is prepared allocates its workspace, and what is verified a table of all rows.
        if dim < 64 {
            let purpose = cpattn_purpose { struct_size: size_of::<cpattn_purpose>(), side, dim, dtype, to: 0 };
            called(cpattn_rank_prepare(rank, plan, 2 + b.number(2) as i32, &raw const purpose));
            if nq < 100 && nk < 100 {
                let status = called(cpattn_plan_verify_all_to_all(plan, side, dim, dtype));
                let fine = [CPATTN_OK, CPATTN_INVALID, CPATTN_INVALID_HANDLE];
                assert!(fine.contains(&status), "an all-to-all that does not verify: {status}");
            }
        }
    }
}

/// Traces: recorded for a while, and taken a few at a time.
pub fn trace(w: &mut World, b: &mut Bytes) {
    let rank = w.rank(b);
    let capacity = if b.rarely() { u64::MAX } else { b.below(64) };
    let room = b.below(16) as usize;
    // SAFETY: plain numbers.
    let mut events: Vec<cpattn_event> = vec![unsafe { std::mem::zeroed() }; room];
    let (mut count, mut ns) = (0usize, 0u64);
    unsafe {
        match b.below(4) {
            0 => called(cpattn_rank_record(rank, capacity)),
            1 => {
                let list = if b.rarely() { null_mut() } else { events.as_mut_ptr() };
                called(cpattn_rank_trace(rank, list, room, if b.rarely() { null_mut() } else { &mut count }))
            }
            2 => called(cpattn_rank_trace_accuracy(rank, if b.rarely() { null_mut() } else { &mut ns })),
            _ => called(cpattn_clock(if b.rarely() { null_mut() } else { &mut ns })),
        }
    };
}
