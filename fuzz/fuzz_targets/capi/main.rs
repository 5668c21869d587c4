// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C calls with arbitrary bytes, sizes and handles.
//!
//! Each input is a program: bytes choose a call and its arguments. What C cannot promise away is left to chance: flags,
//! enums, sizes, strides, offsets, types, null, handles that are dead, of another kind or no handles at all. What only
//! the caller can know is kept: memory behind a tensor is as long as its shape and strides reach, arrays as long as
//! their counts. Handles are destroyed at the end, so a leak is a leak of the library.
//!
//! Every so often the number of calls so far is printed.
#![no_main]

mod bytes;
mod single_calls;
mod plans;
mod ranks;
mod world;

use std::{ffi::CStr, ptr::null_mut};

use bytes::{Bytes, called};
use cpattn_capi::*;
use libfuzzer_sys::fuzz_target;
use single_calls::single_calls;
use plans::{ask_plan, create_plan, move_rows};
use ranks::{all_to_all, create_rank, create_transport, run, trace};
use world::World;

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let seed = b.byte();
    let mut w = World {
        memory: (0..6000u64).map(|i| (i ^ u64::from(seed)).wrapping_mul(0x3f80_0000_9e37_79b9)).collect(),
        plans: vec![],
        ranks: vec![],
        scratches: vec![],
        dead: vec![],
        used: 0,
    };
    while !b.0.is_empty() {
        match b.below(14) {
            0 | 1 if w.plans.len() < 6 => create_plan(&mut w, &mut b),
            2 => ask_plan(&mut w, &mut b),
            3 => move_rows(&mut w, &mut b),
            4 if w.ranks.len() < 4 => create_rank(&mut w, &mut b),
            5 if w.ranks.len() < 4 => create_transport(&mut w, &mut b),
            6 if w.scratches.len() < 3 => {
                let mut scratch = null_mut();
                if called(unsafe { cpattn_scratch_create(b.below(3) as u32, &mut scratch) }) == 0 {
                    w.scratches.push(scratch);
                    called(unsafe {
                        cpattn_scratch_reserve(scratch, b.number(4) as i32, b.number(32) as u32, b.number(32) as u32)
                    });
                }
            }
            7 | 8 => run(&mut w, &mut b),
            9 if b.byte() & 7 == 7 => {
                // An early end.
                if let Some(p) = w.plans.pop() {
                    called(unsafe { cpattn_plan_destroy(p) });
                    w.dead.push(p.cast());
                }
                if let Some(s) = w.scratches.pop() {
                    called(unsafe { cpattn_scratch_destroy(s) });
                    w.dead.push(s.cast());
                }
            }
            10 => {
                let others = w.strange(&mut b);
                // Dead, or of another kind: refused by all but the right function, which is not called on live ones.
                called(unsafe { cpattn_transport_destroy(others[usize::from(b.byte() & 1)].cast()) });
                let name = unsafe { CStr::from_ptr(cpattn_status_name(b.number(12) as i32)) };
                assert!(!name.is_empty() && !cpattn_last_error().is_null());
            }
            11 => all_to_all(&mut w, &mut b),
            12 => trace(&mut w, &mut b),
            _ => single_calls(&mut w, &mut b),
        }
    }
    for p in w.plans {
        assert_eq!(called(unsafe { cpattn_plan_destroy(p) }), 0);
    }
    for r in w.ranks {
        assert_eq!(called(unsafe { cpattn_rank_destroy(r) }), 0);
    }
    for s in w.scratches {
        assert_eq!(called(unsafe { cpattn_scratch_destroy(s) }), 0);
    }
});
