// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators made by NCCL's own functions, as a framework makes them.

use std::{ffi::c_void, ptr::null_mut};

use cpattn::{kernel::cuda::Cuda, transport::nccl::UniqueId};
use cudarc::driver::sys;

/// NCCL's own functions, as a framework calls them.
pub struct Raw {
    library: libloading::Library,
    pub comm: *mut c_void,
}

// SAFETY: NCCL takes its handles on any thread, one at a time.
unsafe impl Send for Raw {}

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

impl Raw {
    pub fn make(id: UniqueId, rank: i32, world: i32, cuda: &Cuda) -> Self {
        let mut context = null_mut();
        let mut comm = null_mut();
        // SAFETY: NCCL's library and its prototype; the primary context of the device, which `cuda` retains, is
        // current.
        unsafe {
            let library = libloading::Library::new("libnccl.so.2").unwrap();
            sys::cuDevicePrimaryCtxRetain(&raw mut context, cuda.ordinal()).result().unwrap();
            sys::cuCtxSetCurrent(context).result().unwrap();
            let init =
                library.get::<unsafe extern "C" fn(*mut *mut c_void, i32, Id, i32) -> i32>("ncclCommInitRank").unwrap();
            assert_eq!(init(&raw mut comm, world, Id(id.to_bytes()), rank), 0);
            Self { library, comm }
        }
    }

    pub fn call(&self, name: &str) -> i32 {
        // SAFETY: functions of a communicator that return a code.
        unsafe { (self.library.get::<unsafe extern "C" fn(*mut c_void) -> i32>(name).unwrap())(self.comm) }
    }

    /// It was alive until now.
    pub fn destroy(self) {
        assert_eq!(self.call("ncclCommDestroy"), 0);
    }
}
