// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts of what a program asks for, and a device that does nothing.

use super::{N, Raw, child, event, passes, stream};
use cudarc::driver::{result, sys};
use std::ffi::{CString, c_char, c_void};

pub fn case(name: &str) -> bool {
    match name {
        "counts" => counts(),
        "idle" => idle(),
        _ => return false,
    }
    true
}

/// A function of the emulator's own, as a program finds it that does not link to it.
fn own(name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    let (mut f, mut status) =
        (std::ptr::null_mut(), sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    // SAFETY: a name that ends in a zero byte, pointers to locals.
    let code = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &raw mut f, 13000, 0, &raw mut status) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    f
}

fn count(name: &str) -> u64 {
    // SAFETY: the signature that `cuEmuCount` has.
    let f: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { std::mem::transmute(own("cuEmuCount")) };
    let name = CString::new(name).unwrap();
    // SAFETY: a name that ends in a zero byte.
    unsafe { f(name.as_ptr()) }
}

fn reset() {
    // SAFETY: the signature that `cuEmuCountReset` has.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(own("cuEmuCountReset"))() };
}

fn work(raw: &Raw) {
    let (s, e) = (stream(), event());
    let bytes = N as usize * 4;
    let host = vec![1u32; N as usize];
    // SAFETY: memory and handles that were just made, of the sizes that are copied.
    unsafe {
        let pinned = result::malloc_host(bytes, 0).unwrap();
        pinned.cast::<u8>().write_bytes(0, bytes);
        let other = result::malloc_sync(bytes).unwrap();
        sys::cuMemcpyHtoDAsync_v2(raw.x, host.as_ptr().cast(), bytes, s).result().unwrap();
        sys::cuMemcpyHtoDAsync_v2(raw.x, pinned, bytes, s).result().unwrap();
        sys::cuMemcpyDtoDAsync_v2(other, raw.x, bytes, s).result().unwrap();
        raw.launch(s, raw.x, N).unwrap();
        result::event::record(e, s).unwrap();
        result::stream::wait_event(s, e, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        let mut capturing = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        sys::cuStreamIsCapturing(s, &raw mut capturing).result().unwrap();
        result::stream::synchronize(s).unwrap();
    }
}

fn counts() {
    let raw = Raw::new();
    reset();
    work(&raw);
    let expected = [
        ("host-to-device copies", 2),
        ("device copies", 1),
        ("device-to-host copies", 0),
        ("launches", 1),
        ("allocations", 2),
        ("queries", 1),
        ("event records", 1),
        ("event waits", 1),
        ("host waits", 1),
        ("cuStreamSynchronize", 1),
        ("cuMemcpyHtoDAsync_v2", 2),
    ];
    for (name, n) in expected {
        assert_eq!(count(name), n, "{name}");
    }
    // A copy to pageable memory is one and waits; a capture is no work, and its replay is.
    raw.read();
    assert_eq!([count("device-to-host copies"), count("host waits")], [1, 2]);
    reset();
    let s = stream();
    // SAFETY: handles that were just made.
    unsafe {
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        sys::cuStreamBeginCapture_v2(s, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).result().unwrap();
        raw.launch(s, raw.x, N).unwrap();
        raw.launch(s, raw.x, N).unwrap();
        sys::cuStreamEndCapture(s, &raw mut graph).result().unwrap();
        sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0).result().unwrap();
        assert_eq!([count("launches"), count("cuLaunchKernel")], [0, 2]);
        sys::cuGraphLaunch(exec, s).result().unwrap();
        sys::cuGraphLaunch(exec, s).result().unwrap();
    }
    assert_eq!([count("launches"), count("graph launches"), count("host waits")], [4, 2, 0]);
}

/// Calls are checked and counted, and nothing is computed.
fn idle() {
    let raw = Raw::new();
    reset();
    work(&raw);
    assert_eq!([count("launches"), count("host-to-device copies"), count("host waits")], [1, 2, 1]);
    assert!(raw.launch(stream(), raw.x, N).is_ok());
    let e = event();
    // SAFETY: an event that was just made.
    unsafe {
        result::event::record(e, std::ptr::null_mut()).unwrap();
        assert_eq!(sys::cuEventQuery(e), sys::CUresult::CUDA_SUCCESS);
    }
    assert_ne!(raw.read(), [1; N as usize]);
}

#[test]
fn calls_and_work_are_counted() {
    passes("counts");
}

#[test]
fn counts_are_kept_in_a_file() {
    let path = std::env::temp_dir().join(format!("cuda-emulator-calls-{}", std::process::id()));
    let (ok, text) = child("idle", &[("CPATTN_EMU_CALLS", path.to_str().unwrap()), ("CPATTN_EMU_IDLE", "1")]);
    assert!(ok, "{text}");
    let kept = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    for line in ["launches\t2\n", "host-to-device copies\t2\n", "cuMemcpyHtoDAsync_v2\t2\n", "cuEventRecord\t2\n"] {
        assert!(kept.contains(line), "{line:?} is not in {kept}");
    }
}
