// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device, streams, and the stand-in driver's counters.

use cudarc::driver::sys;
use std::{
    ffi::{CStr, CString, c_char, c_void},
    ptr::null_mut,
};

/// A driver call that must succeed.
#[macro_export]
macro_rules! ok {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: handles that this program made and has not destroyed, and pointers to its locals.
        #[allow(clippy::macro_metavars_in_unsafe, reason = "arguments are handles and pointers to locals")]
        let code = unsafe { cudarc::driver::sys::$f($($arg),*) };
        assert_eq!(code as u32, 0, "{}: {code:?}", stringify!($f));
    }};
}

/// Makes the device's primary context current on this thread, for calls of the driver's own.
pub fn enter() {
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
}

/// A stream of the device, which nothing else waits for. The context must be current.
#[derive(Clone, Copy)]
pub struct Stream(pub sys::CUstream);

// SAFETY: a handle that the driver accepts on every thread.
unsafe impl Send for Stream {}

impl Stream {
    pub fn new() -> Self {
        let mut stream = null_mut();
        ok!(cuStreamCreate(&raw mut stream, 1));
        Self(stream)
    }

    pub fn raw(self) -> *mut c_void {
        self.0.cast()
    }

    pub fn wait(self) {
        ok!(cuStreamSynchronize(self.0));
    }
}

/// A function of the stand-in driver's; none of another driver.
fn own(name: &CStr) -> Option<*mut c_void> {
    let mut device = [0u8; 256];
    ok!(cuDeviceGetName(device.as_mut_ptr().cast(), 255, 0));
    if !String::from_utf8_lossy(&device).contains("emulator") {
        return None;
    }
    let mut f = null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut f, 13000, 0, &raw mut status));
    (!f.is_null()).then_some(f)
}

/// The stand-in driver's counters.
#[derive(Clone, Copy)]
pub struct Counters {
    count: unsafe extern "C" fn(*const c_char) -> u64,
    reset: unsafe extern "C" fn(),
}

impl Counters {
    pub fn find() -> Option<Self> {
        let (count, reset) = (own(c"cuEmuCount")?, own(c"cuEmuCountReset")?);
        // SAFETY: the stand-in driver's functions of these names have these signatures.
        Some(unsafe {
            Self {
                count: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(count),
                reset: std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(reset),
            }
        })
    }

    pub fn reset(self) {
        // SAFETY: a function without arguments.
        unsafe { (self.reset)() };
    }

    pub fn get(self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: a name that ends in a zero byte.
        unsafe { (self.count)(name.as_ptr()) }
    }
}
