// SPDX-License-Identifier: MIT OR Apache-2.0
//! The driver of a test, real or emulated: its device 0, and what the stand-in driver counts.
#![allow(dead_code, reason = "each test binary uses its part")]

use cpattn::{Error, Result, kernel::cuda::Cuda};
use cudarc::driver::sys;
use std::{
    ffi::{CStr, c_char},
    mem,
    ptr::null_mut,
    sync::Arc,
};

/// Device 0, or `None` where there is no driver. `CPATTN_REQUIRE_CUDA` makes that a failure.
pub fn device() -> Option<Arc<Cuda>> {
    opened(Cuda::new(0)).map(Arc::new)
}

/// As [`device`], from the result of opening one.
pub fn opened(cuda: Result<Cuda>) -> Option<Cuda> {
    match cuda {
        Ok(cuda) => Some(cuda),
        Err(Error::Unsupported { option, limit, .. }) if std::env::var_os("CPATTN_REQUIRE_CUDA").is_none() => {
            eprintln!("not run: {option}: {limit}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// How often the stand-in driver did this, by its name; none of another driver.
pub fn emulated_count(what: &CStr) -> Option<u64> {
    let mut f = null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    // SAFETY: a name that ends in a zero byte, pointers to locals; only the stand-in driver has a function of that
    // name, with this signature.
    unsafe {
        let code = sys::cuGetProcAddress_v2(c"cuEmuCount".as_ptr(), &raw mut f, 13000, 0, &raw mut status);
        if code != sys::CUresult::CUDA_SUCCESS || f.is_null() {
            return None;
        }
        let count: unsafe extern "C" fn(*const c_char) -> u64 = mem::transmute(f);
        Some(count(what.as_ptr()))
    }
}
