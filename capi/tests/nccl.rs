// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of ranks over NCCL, called as a program in C calls them.
//!
//! As `cuda_nccl` of the crate, they run on whatever driver and NCCL the loader finds, the stand-ins of `.ci/nccl` too.

#[path = "../../tests-cuda/cuda_nccl/raw.rs"]
mod raw;

use std::{
    ffi::{CStr, c_void},
    ptr::{null, null_mut},
    sync::Arc,
};

use cpattn_capi::*;

use cpattn::{Error, kernel::cuda::Cuda, transport::nccl::UniqueId};
use raw::Raw;

/// The first device, if there is one.
fn device() -> Option<Arc<Cuda>> {
    match Cuda::shared(0) {
        Ok(cuda) => Some(cuda),
        Err(e @ (Error::Unsupported { .. } | Error::Invalid { .. }))
            if std::env::var_os("CPATTN_REQUIRE_CUDA").is_none() =>
        {
            eprintln!("not run: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn said() -> String {
    // SAFETY: a text that ends in a zero byte, until the next failure of this thread.
    unsafe { CStr::from_ptr(cpattn_last_error()) }.to_string_lossy().into_owned()
}

#[track_caller]
fn refused(status: i32, words: &str) {
    assert_eq!(status, CPATTN_INVALID, "{}", said());
    assert!(said().contains(words), "{}", said());
}

#[test]
fn arguments() {
    if device().is_none() {
        return;
    }
    let (mut id, mut out) = ([0u8; 128], null_mut());
    // SAFETY: here and below: room for an id and a handle, and addresses that are only compared with null.
    assert_eq!(unsafe { cpattn_nccl_unique_id(id.as_mut_ptr()) }, CPATTN_OK, "{}", said());
    // SAFETY: as above.
    refused(unsafe { cpattn_nccl_unique_id(null_mut()) }, "unique_id is NULL");
    let id = id.as_ptr();
    let comm = std::ptr::dangling_mut::<c_void>();
    let mut group = |id, comm, may_abort, rank, world, device, ms| {
        // SAFETY: as above.
        unsafe { cpattn_nccl_group(id, comm, may_abort, rank, world, device, ms, &raw mut out) }
    };
    refused(group(null(), null_mut(), 0, 0, 1, 0, 1000), "unique_id is NULL, and so is comm, expected one of the two");
    refused(group(id, comm, 0, 0, 1, 0, 1000), "unique_id is given, and so is comm");
    refused(group(id, null_mut(), 2, 0, 1, 0, 1000), "may_abort is 2, expected 0 or 1");
    refused(group(id, null_mut(), 1, 0, 1, 0, 1000), "may_abort is 1, expected 0 with a unique_id");
    refused(group(id, null_mut(), 0, 3, 3, 0, 1000), "rank is 3, expected below the world of 3");
    refused(group(id, null_mut(), 0, 0, 0, 0, 1000), "world is 0");
    refused(group(id, null_mut(), 0, 0, 1, 999, 1000), "device_id is 999");
    refused(group(id, null_mut(), 0, 0, 1, 0, 0), "deadline_ms is 0");
    refused(group([0u8; 128].as_ptr(), null_mut(), 0, 0, 1, 0, 1000), "unique_id is all zeros");
    // SAFETY: as above.
    let none = unsafe { cpattn_nccl_group(id, null_mut(), 0, 0, 1, 0, 1000, null_mut()) };
    refused(none, "transport is NULL");
}

/// A transport of either kind becomes a rank on its device.
#[test]
fn ranks() {
    let Some(device) = device() else { return };
    let mut id = [0u8; 128];
    // SAFETY: room for an id.
    assert_eq!(unsafe { cpattn_nccl_unique_id(id.as_mut_ptr()) }, CPATTN_OK);
    let raw = Raw::make(UniqueId::new().unwrap(), 0, 1, &device);
    for (id, comm) in [(id.as_ptr(), null_mut()), (null(), raw.comm)] {
        let (mut transport, mut rank) = (null_mut(), null_mut());
        // SAFETY: an id or a live communicator, room for handles, options or none.
        unsafe {
            assert_eq!(cpattn_nccl_group(id, comm, 0, 0, 1, 0, 240_000, &raw mut transport), CPATTN_OK, "{}", said());
            assert_eq!(cpattn_rank_create(transport, null(), &raw mut rank), CPATTN_OK, "{}", said());
            assert_eq!(cpattn_rank_poll(rank), CPATTN_OK);
            assert_eq!(cpattn_rank_abort(rank), CPATTN_OK);
            assert_eq!(cpattn_rank_poll(rank), CPATTN_PEER);
            assert!(said().contains("rank 0 aborted the run"), "{}", said());
            assert_eq!(cpattn_rank_destroy(rank), CPATTN_OK);
        }
    }
    raw.destroy();
}
