// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is needed of the stand-in driver: the few functions of `cuda.h`, and its own way to take work of another
//! library.
//!
//! They are found in the library that the process has loaded as its driver. On NVIDIA's driver `cuEmuExchange` is
//! missing, and no communicator can be made.

use crate::codes::{Failure, Outcome, SYSTEM_ERROR, UNHANDLED_CUDA_ERROR};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// As the stand-in driver declares it (`driver/exchange.rs` there): bytes that work reads or writes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) ptr: u64,
    pub(crate) bytes: usize,
    pub(crate) writes: c_int,
}

/// As declared there: device memory, while the work is being asked.
#[repr(C)]
pub(crate) struct Access {
    machine: *mut c_void,
    read: unsafe extern "C" fn(*mut c_void, u64, *mut u8, usize) -> c_int,
    write: unsafe extern "C" fn(*mut c_void, u64, *const u8, usize) -> c_int,
}

impl Access {
    /// Bytes of device memory. What is not there was reported before the work was first asked.
    pub(crate) fn read(&self, ptr: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        // SAFETY: the driver's own function and machine, during its call; room for as many bytes.
        unsafe { (self.read)(self.machine, ptr, out.as_mut_ptr(), bytes) };
        out
    }

    pub(crate) fn write(&self, ptr: u64, from: &[u8]) {
        // SAFETY: as above.
        unsafe { (self.write)(self.machine, ptr, from.as_ptr(), from.len()) };
    }
}

/// As declared there.
pub(crate) const PENDING: c_int = 0;
pub(crate) const DONE: c_int = 1;
/// Any other number: ended before its time.
pub(crate) const ENDED: c_int = 2;

/// As declared there.
#[repr(C)]
pub(crate) struct Calls {
    pub(crate) queued: unsafe extern "C" fn(*mut c_void),
    pub(crate) poll: unsafe extern "C" fn(*mut c_void, *const Access) -> c_int,
    pub(crate) again: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    pub(crate) drop: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty = $symbol:literal;)*) => {
        /// The driver's functions.
        pub(crate) struct Driver { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Driver {
            unsafe fn load(library: *mut c_void) -> Option<Self> {
                Some(Self { $($name: {
                    // SAFETY: a loaded library and a name that ends in a zero byte.
                    let symbol = unsafe { dlsym(library, $symbol.as_ptr()) };
                    if symbol.is_null() {
                        return None;
                    }
                    // SAFETY: the function of that name has this signature, in `cuda.h` or in the stand-in driver.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(symbol) }
                },)* })
            }
        }
    };
}

functions! {
    init: fn(c_uint) -> c_int = c"cuInit";
    current_device: fn(*mut c_int) -> c_int = c"cuCtxGetDevice";
    retain: fn(*mut *mut c_void, c_int) -> c_int = c"cuDevicePrimaryCtxRetain";
    release: fn(c_int) -> c_int = c"cuDevicePrimaryCtxRelease_v2";
    push: fn(*mut c_void) -> c_int = c"cuCtxPushCurrent_v2";
    pop: fn(*mut *mut c_void) -> c_int = c"cuCtxPopCurrent_v2";
    bus_id: fn(*mut c_char, c_int, c_int) -> c_int = c"cuDeviceGetPCIBusId";
    create_event: fn(*mut *mut c_void, c_uint) -> c_int = c"cuEventCreate";
    destroy_event: fn(*mut c_void) -> c_int = c"cuEventDestroy_v2";
    record: fn(*mut c_void, *mut c_void) -> c_int = c"cuEventRecord";
    wait: fn(*mut c_void, *mut c_void, c_uint) -> c_int = c"cuStreamWaitEvent";
    exchange: fn(*mut c_void, *const Part, usize, *const Calls, *mut c_void, *const c_char) -> c_int = c"cuEmuExchange";
    progress: fn() -> c_int = c"cuEmuProgress";
}

/// The driver of this process.
pub(crate) fn driver() -> Outcome<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let found = DRIVER.get_or_init(|| {
        for name in [c"libcuda.so.1", c"libcuda.so"] {
            // SAFETY: a name that ends in a zero byte; RTLD_NOW. The library's initialisers are its own.
            let library = unsafe { dlopen(name.as_ptr(), 2) };
            if !library.is_null() {
                // SAFETY: it was just loaded and stays.
                return unsafe { Driver::load(library) };
            }
        }
        None
    });
    let why = "the stand-in for NCCL needs the stand-in driver: libcuda.so.1 is missing or has no cuEmuExchange";
    let found = found.as_ref().ok_or_else(|| Failure::new(SYSTEM_ERROR, why))?;
    // SAFETY: may be called again and again.
    check("cuInit", unsafe { (found.init)(0) })?;
    Ok(found)
}

pub(crate) fn check(call: &str, code: c_int) -> Outcome {
    if code == 0 {
        return Ok(());
    }
    Err(Failure::new(UNHANDLED_CUDA_ERROR, format!("{call} gives {code}")))
}

/// A device, with its primary context.
pub(crate) struct Device {
    pub(crate) ordinal: c_int,
    pub(crate) bus: String,
    context: *mut c_void,
}

// SAFETY: a context is a handle that the driver accepts on every thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// The current device of this thread; the first one when there is none, as for NCCL.
    pub(crate) fn current() -> Outcome<Self> {
        let d = driver()?;
        let mut ordinal = 0;
        // SAFETY: pointers to locals; a device that exists.
        unsafe {
            if (d.current_device)(&raw mut ordinal) != 0 {
                ordinal = 0;
            }
            let mut context = std::ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", (d.retain)(&raw mut context, ordinal))?;
            let mut bus = [0; 32];
            check("cuDeviceGetPCIBusId", (d.bus_id)(bus.as_mut_ptr(), 32, ordinal))?;
            let bus = CStr::from_ptr(bus.as_ptr()).to_string_lossy().into_owned();
            Ok(Self { ordinal, bus, context })
        }
    }

    /// Does something while the device's context is current.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Driver) -> Outcome<R>) -> Outcome<R> {
        let d = driver()?;
        // SAFETY: the context is retained while `self` lives; what is pushed here is popped here.
        unsafe {
            check("cuCtxPushCurrent", (d.push)(self.context))?;
            let done = f(d);
            let mut popped = std::ptr::null_mut();
            (d.pop)(&raw mut popped);
            done
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Ok(d) = driver() {
            // SAFETY: retained once. Nothing can be done about a failure.
            unsafe { (d.release)(self.ordinal) };
        }
    }
}
