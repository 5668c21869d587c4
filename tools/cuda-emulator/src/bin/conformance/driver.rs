// SPDX-License-Identifier: MIT OR Apache-2.0
//! As much of the driver as a test kernel needs, from whatever `libcuda.so.1` the loader finds.
//!
//! The functions are looked up by name when the program runs, so that it can be built where there is no driver and run
//! where there is one. A call that fails is an error with the driver's own words; nothing is retried.

use crate::table::case::{Case, Map};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn _exit(status: c_int) -> !;
}

/// Ends the program, as a failure, without what drivers do at its end: they would wait for a kernel that never ends.
pub fn leave_at_once() -> ! {
    // SAFETY: it has no arguments that could be wrong, and nothing runs after it. Standard output is written by lines.
    unsafe { _exit(1) }
}

macro_rules! functions {
    ($($field:ident $name:literal ($($arg:ty),*);)*) => {
        /// The driver's functions, by what they do.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Functions {
            fn load() -> Result<Self, String> {
                // SAFETY: a name that ends in a zero byte; RTLD_NOW. The driver's initialisers are its own affair.
                let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), 2) };
                if library.is_null() {
                    return Err("there is no libcuda.so.1: install a driver, or name the emulator's in LD_LIBRARY_PATH".into());
                }
                $(
                    // SAFETY: the library is open and the name ends in a zero byte.
                    let $field = unsafe { dlsym(library, concat!($name, "\0").as_ptr().cast()) };
                    if $field.is_null() {
                        return Err(format!("libcuda.so.1 has no {}: it is too old", $name));
                    }
                )*
                // SAFETY: each is the driver's function of that name, which cuda.h declares with these arguments.
                Ok(unsafe {
                    Self { $($field: std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>($field),)* }
                })
            }
        }
    };
}

functions! {
    init "cuInit" (c_uint);
    version "cuDriverGetVersion" (*mut c_int);
    device "cuDeviceGet" (*mut c_int, c_int);
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int);
    attribute "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    reset "cuDevicePrimaryCtxReset_v2" (c_int);
    make_current "cuCtxSetCurrent" (*mut c_void);
    synchronize "cuCtxSynchronize" ();
    load_module "cuModuleLoadData" (*mut *mut c_void, *const c_void);
    unload_module "cuModuleUnload" (*mut c_void);
    function "cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    alloc "cuMemAlloc_v2" (*mut u64, usize);
    free "cuMemFree_v2" (u64);
    write "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    read "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    launch "cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void,
        *mut *mut c_void
    );
    encode_map "cuTensorMapEncodeTiled" (
        *mut c_void, c_uint, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int,
        c_int
    );
    error_name "cuGetErrorName" (c_int, *mut *const c_char);
}

/// The first device, with its primary context current.
pub struct Device {
    f: Functions,
    handle: c_int,
    pub name: String,
    /// 80 for compute capability 8.0.
    pub sm: u32,
    /// Such as `13.0`.
    pub driver: String,
}

impl Device {
    pub fn open() -> Result<Self, String> {
        let f = Functions::load()?;
        let mut d = Self { f, handle: 0, name: String::new(), sm: 0, driver: String::new() };
        let (mut handle, mut version, mut major, mut minor, mut text) = (0, 0, 0, 0, [0 as c_char; 256]);
        // SAFETY: pointers to variables of the types that each call fills; the name has room for 255 characters.
        unsafe {
            d.check("cuInit", (d.f.init)(0))?;
            d.check("cuDriverGetVersion", (d.f.version)(&mut version))?;
            d.check("cuDeviceGet", (d.f.device)(&mut handle, 0))?;
            d.handle = handle;
            d.check("cuDeviceGetName", (d.f.device_name)(text.as_mut_ptr(), 255, handle))?;
            d.check("cuDeviceGetAttribute", (d.f.attribute)(&mut major, 75, handle))?;
            d.check("cuDeviceGetAttribute", (d.f.attribute)(&mut minor, 76, handle))?;
            d.name = CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
        }
        d.sm = (10 * major + minor) as u32;
        d.driver = format!("{}.{}", version / 1000, version % 1000 / 10);
        d.enter()?;
        Ok(d)
    }

    fn enter(&self) -> Result<(), String> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the device's own handle; the context is kept as long as the process lives.
        unsafe {
            self.check("cuDevicePrimaryCtxRetain", (self.f.retain)(&mut context, self.handle))?;
            self.check("cuCtxSetCurrent", (self.f.make_current)(context))
        }
    }

    /// After a fault the context is of no more use: begins anew.
    pub fn recover(&self) -> Result<(), String> {
        // SAFETY: the device's own handle; nothing of the old context is used afterwards.
        self.check("cuDevicePrimaryCtxReset", unsafe { (self.f.reset)(self.handle) })?;
        self.enter()
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the driver sets the pointer to a string of its own, or leaves it.
        let name = unsafe {
            (self.f.error_name)(code, &mut text);
            if text.is_null() { "an unknown error".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        Err(format!("{call}: {name} ({code})"))
    }

    /// What the device reads of a tensor at an address.
    fn encode(&self, m: &Map, address: u64) -> Result<[u8; 128], String> {
        #[repr(align(64))]
        struct Aligned([u8; 128]);
        let mut out = Aligned([0; 128]);
        let (rank, ones) = (m.dims.len() as c_uint, vec![1; m.dims.len()]);
        // SAFETY: room for a map, aligned as the driver wants it, and lists of `rank` numbers, one fewer of strides;
        // the address is only written down.
        let code = unsafe {
            (self.f.encode_map)(
                (&raw mut out.0).cast(),
                m.element,
                rank,
                address as *mut c_void,
                m.dims.as_ptr(),
                m.strides.as_ptr(),
                m.shape.as_ptr(),
                ones.as_ptr(),
                0,
                m.swizzle as c_int,
                0,
                c_int::from(m.fill_nan),
            )
        };
        self.check("cuTensorMapEncodeTiled", code)?;
        Ok(out.0)
    }

    /// Runs a case over a buffer, whose address is its kernel's first parameter.
    pub fn run(&self, case: &Case, buffer: &mut [u8]) -> Result<(), String> {
        let (grid, block) = (case.blocks, case.threads);
        let ptx = CString::new(case.ptx()).map_err(|e| e.to_string())?;
        let (mut module, mut kernel, mut memory) = (std::ptr::null_mut(), std::ptr::null_mut(), 0u64);
        // SAFETY: the module's text ends in a zero byte, copies stay inside the buffer and its allocation of the same
        // length, and each parameter points to as many bytes as the kernel declares for it. What is made is given back.
        unsafe {
            self.check("cuModuleLoadData", (self.f.load_module)(&mut module, ptx.as_ptr().cast()))?;
            self.check("cuModuleGetFunction", (self.f.function)(&mut kernel, module, c"k".as_ptr()))?;
            self.check("cuMemAlloc", (self.f.alloc)(&mut memory, buffer.len()))?;
            self.check("cuMemcpyHtoD", (self.f.write)(memory, buffer.as_ptr().cast(), buffer.len()))?;
            let extra = case.parameters(memory, |m, address| self.encode(m, address))?;
            let mut params: Vec<*mut c_void> = vec![(&raw mut memory).cast()];
            params.extend(extra.iter().map(|e| e.as_ptr().cast_mut().cast::<c_void>()));
            let none = std::ptr::null_mut();
            let code = (self.f.launch)(kernel, grid, 1, 1, block, 1, 1, 0, none, params.as_mut_ptr(), none.cast());
            self.check("cuLaunchKernel", code)?;
            self.check("cuCtxSynchronize", (self.f.synchronize)())?;
            self.check("cuMemcpyDtoH", (self.f.read)(buffer.as_mut_ptr().cast(), memory, buffer.len()))?;
            self.check("cuMemFree", (self.f.free)(memory))?;
            self.check("cuModuleUnload", (self.f.unload_module)(module))
        }
    }
}
