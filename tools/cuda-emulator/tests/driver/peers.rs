// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two devices: whose memory a kernel may use, and how copies between them go.

use super::{N, Raw, child, stream};
use cudarc::driver::sys::{self, CUcontext, CUresult};
use cudarc::driver::{CudaContext, result};
use std::ffi::{CString, c_int};

pub fn case(name: &str) -> bool {
    match name {
        "no access" => kernel(false, false),
        "access the other way" => kernel(false, true),
        "access" => kernel(true, false),
        "copies" => copies(true),
        "no peers" => copies(false),
        _ => return false,
    }
    true
}

/// The two contexts; that of device 0 is current.
fn contexts() -> [CUcontext; 2] {
    let second = CudaContext::new(1).unwrap();
    let first = CudaContext::new(0).unwrap();
    first.bind_to_thread().unwrap();
    let handles = [first.cu_ctx(), second.cu_ctx()];
    // They stay until the process ends.
    std::mem::forget((first, second));
    handles
}

fn enter(context: CUcontext) {
    // SAFETY: a context that stays.
    unsafe { result::ctx::set_current(context) }.unwrap();
}

fn enable(from: CUcontext, to: CUcontext) -> CUresult {
    enter(from);
    // SAFETY: contexts that stay.
    unsafe { sys::cuCtxEnablePeerAccess(to, 0) }
}

/// A kernel of device 0 on numbers of device 1.
fn kernel(access: bool, other_way: bool) {
    let [first, second] = contexts();
    if access {
        assert_eq!(enable(first, second), CUresult::CUDA_SUCCESS);
        assert_eq!(enable(first, second), CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    }
    if other_way {
        assert_eq!(enable(second, first), CUresult::CUDA_SUCCESS);
    }
    enter(second);
    let there = Raw::new();
    enter(first);
    let here = Raw::new();
    let s = stream();
    here.launch(s, there.x, N).unwrap();
    // SAFETY: a stream that was just made.
    let done = unsafe { result::stream::synchronize(s) };
    assert_eq!(done.is_ok(), access);
}

fn copies(supported: bool) {
    let [first, second] = contexts();
    let (mut can, mut attribute): (c_int, c_int) = (-1, -1);
    let which = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    // SAFETY: pointers to locals.
    unsafe {
        sys::cuDeviceCanAccessPeer(&raw mut can, 0, 1).result().unwrap();
        sys::cuDeviceGetP2PAttribute(&raw mut attribute, which, 0, 1).result().unwrap();
    }
    assert_eq!([can, attribute], [supported.into(); 2]);
    enter(second);
    let there = Raw::new();
    enter(first);
    let here = Raw::new();
    let count = |name: &str| {
        let name = CString::new(name).unwrap();
        let (mut f, mut status) =
            (std::ptr::null_mut(), sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        // SAFETY: the signature that `cuEmuCount` has; names that end in a zero byte.
        unsafe {
            sys::cuGetProcAddress_v2(c"cuEmuCount".as_ptr(), &raw mut f, 13000, 0, &raw mut status).result().unwrap();
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(f)(
                name.as_ptr(),
            )
        }
    };
    let s = stream();
    let bytes = N as usize * 4;
    here.launch(s, here.x, N).unwrap();
    let copy = |form: bool| {
        // SAFETY: both allocations have that many bytes.
        unsafe {
            let code = if form {
                sys::cuMemcpyPeerAsync(there.x, second, here.x, first, bytes, s)
            } else {
                sys::cuMemcpyDtoDAsync_v2(there.x, here.x, bytes, s)
            };
            code.result().unwrap();
        }
    };
    copy(true);
    copy(false);
    assert_eq!([count("staged copies"), count("peer copies")], [2, 0]);
    let enabled = enable(first, second);
    if supported {
        assert_eq!(enabled, CUresult::CUDA_SUCCESS);
        copy(true);
        copy(false);
        assert_eq!([count("staged copies"), count("peer copies")], [2, 2]);
    } else {
        assert_eq!(enabled, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    // SAFETY: a stream that was just made; sides of other devices are refused.
    unsafe {
        let wrong = sys::cuMemcpyPeerAsync(there.x, first, here.x, first, bytes, s);
        assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);
        result::stream::synchronize(s).unwrap();
    }
    enter(second);
    assert_eq!(there.read(), [1; N as usize]);
}

#[test]
fn a_kernel_needs_access_to_memory_of_another_device() {
    for seed in ["0", "1", "2"] {
        for (case, reported) in [("no access", true), ("access the other way", true), ("access", false)] {
            let (ok, text) = child(case, &[("CPATTN_EMU_SEED", seed), ("CPATTN_EMU_DEVICES", "2")]);
            assert!(ok, "{case}: {text}");
            assert_eq!(text.contains("PeerAccess in `kernel `add_one``: device 0 uses"), reported, "{case}: {text}");
        }
    }
}

#[test]
fn copies_go_through_the_host_without_access() {
    for (case, peers) in [("copies", "1"), ("no peers", "0")] {
        let (ok, text) = child(case, &[("CPATTN_EMU_PEERS", peers), ("CPATTN_EMU_DEVICES", "2")]);
        assert!(ok, "{case}: {text}");
    }
}
