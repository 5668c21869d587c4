// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pointers and copies: what a call has done when it returns, and what it has not.

use super::{N, Raw, event, passes, reports, stream};
use cudarc::driver::{result, sys};

pub fn case(name: &str) -> bool {
    match name {
        "pointers" => pointers(),
        "pinned" => pinned(),
        "upload alone" => upload(Order::Nothing),
        "upload and wait" => upload(Order::Wait),
        "upload and event" => upload(Order::Event),
        "upload for a blocking stream" => upload(Order::Blocking),
        "upload on the stream" => upload(Order::Stream),
        "fill alone" => fill(false),
        "fill and wait" => fill(true),
        _ => return false,
    }
    true
}

fn pointers() {
    let raw = Raw::new();
    let mut ordinal = -1i32;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the result has the attribute's type.
    unsafe {
        let p = (&raw mut ordinal).cast();
        assert_eq!(sys::cuPointerGetAttribute(p, which, raw.x + 100), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(ordinal, 0);
        let host = 0u32;
        let unknown = sys::cuPointerGetAttribute(p, which, (&raw const host) as u64);
        assert_eq!(unknown, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        let mut f = std::ptr::null_mut();
        let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        let found = sys::cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut f, 13000, 0, &mut status);
        assert_eq!(found, sys::CUresult::CUDA_SUCCESS);
        assert!(!f.is_null());
    }
}

fn pinned() {
    let raw = Raw::new();
    let s = stream();
    // SAFETY: allocations of the sizes that are copied.
    unsafe {
        let p = result::malloc_host(N as usize * 4, 0).unwrap().cast::<u32>();
        let host = std::slice::from_raw_parts_mut(p, N as usize);
        host.fill(7);
        sys::cuMemcpyHtoDAsync_v2(raw.x, p.cast(), N as usize * 4, s).result().unwrap();
        // The copy runs when something waits for it: what is written until then is what arrives.
        host.fill(8);
        result::stream::synchronize(s).unwrap();
        assert_eq!(raw.read(), [8; N as usize]);
        // From pageable memory it is the value at the call.
        let mut plain = vec![5u32; N as usize];
        sys::cuMemcpyHtoDAsync_v2(raw.x, plain.as_ptr().cast(), N as usize * 4, s).result().unwrap();
        plain.fill(6);
        result::stream::synchronize(s).unwrap();
        assert_eq!(raw.read(), [5; N as usize]);
        result::free_host(p.cast()).unwrap();
    }
}

#[derive(PartialEq)]
enum Order {
    Nothing,
    Wait,
    Event,
    Blocking,
    Stream,
}

/// An upload from pageable memory, then a kernel on a stream that may or may not be behind it.
fn upload(order: Order) {
    let raw = Raw::new();
    let kind = if order == Order::Blocking {
        result::stream::StreamKind::Default
    } else {
        result::stream::StreamKind::NonBlocking
    };
    let s = result::stream::create(kind).unwrap();
    let mut host = vec![5u32; N as usize];
    let bytes = N as usize * 4;
    // SAFETY: the allocation and the vector have that many bytes; handles that were just made; the default stream.
    unsafe {
        if order == Order::Stream {
            sys::cuMemcpyHtoDAsync_v2(raw.x, host.as_ptr().cast(), bytes, s).result().unwrap();
        } else {
            sys::cuMemcpyHtoD_v2(raw.x, host.as_ptr().cast(), bytes).result().unwrap();
        }
        // It was staged, at least.
        host.fill(6);
        match order {
            Order::Wait => result::stream::synchronize(std::ptr::null_mut()).unwrap(),
            Order::Event => {
                let e = event();
                result::event::record(e, std::ptr::null_mut()).unwrap();
                result::stream::wait_event(s, e, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
            }
            _ => {}
        }
        raw.launch(s, raw.x, N).unwrap();
        let done = result::stream::synchronize(s).and_then(|()| result::ctx::synchronize());
        assert_eq!(done.is_ok(), order != Order::Nothing);
    }
    if order != Order::Nothing {
        assert_eq!(raw.read(), [6; N as usize]);
    }
}

fn fill(wait: bool) {
    let raw = Raw::new();
    let s = stream();
    // SAFETY: the allocation has that many bytes; a stream that was just made.
    unsafe {
        result::memset_d8_sync(raw.x, 1, N as usize * 4).unwrap();
        if wait {
            result::ctx::synchronize().unwrap();
        }
        raw.launch(s, raw.x, N).unwrap();
        let done = result::stream::synchronize(s).and_then(|()| result::ctx::synchronize());
        assert_eq!(done.is_ok(), wait);
    }
}

#[test]
fn what_a_pointer_is() {
    passes("pointers");
}

#[test]
fn pinned_memory_is_read_late() {
    passes("pinned");
}

#[test]
fn an_upload_from_pageable_memory_is_still_to_come_when_the_call_returns() {
    reports("upload alone", "StreamRace in");
    for case in ["upload and wait", "upload and event", "upload for a blocking stream", "upload on the stream"] {
        passes(case);
    }
}

#[test]
fn a_fill_is_still_to_come_when_the_call_returns() {
    reports("fill alone", "StreamRace in");
    passes("fill and wait");
}
