// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of errors, addresses of functions, and the emulator's own: the last report.

use super::codes;
use super::entry::{call, put};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, out: *mut *const c_char) -> i32 {
    match codes::describe(code) {
        // SAFETY: the caller's result pointer; the texts are static and end in a zero byte.
        Some((name, _)) => unsafe { put(out, name.as_ptr().cast()) }.err().unwrap_or(codes::SUCCESS),
        None => codes::INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, out: *mut *const c_char) -> i32 {
    match codes::describe(code) {
        // SAFETY: as above.
        Some((_, text)) => unsafe { put(out, text.as_ptr().cast()) }.err().unwrap_or(codes::SUCCESS),
        None => codes::INVALID_VALUE,
    }
}

/// Copies a text into a buffer, cut short if need be, with a zero byte at its end; gives the bytes that it has without.
pub(super) unsafe fn give(text: &str, buffer: *mut c_char, len: usize) -> usize {
    if !buffer.is_null() && len > 0 {
        let n = text.len().min(len - 1);
        // SAFETY: the caller's buffer of `len` bytes; n + 1 ≤ len.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, n);
            buffer.add(n).write(0);
        }
    }
    text.len()
}

/// Copies the last report into a buffer of `len` bytes (cut short, with a zero byte at its end) and returns how many
/// bytes it has without that; 0 when there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuLastReport(buffer: *mut c_char, len: usize) -> usize {
    let mut size = 0;
    call("cuEmuLastReport", |m| {
        // SAFETY: passed on.
        size = unsafe { give(&m.last_report, buffer, len) };
        Ok(())
    });
    size
}

/// Forgets the last report.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuClearReport() {
    call("cuEmuClearReport", |m| {
        m.last_report.clear();
        Ok(())
    });
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
}

#[repr(C)]
struct DlInfo {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

/// Finds an exported function by the name `cuda.h` gives it: the newest version of it that exists here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    out: *mut *mut c_void,
    _version: c_int,
    _flags: c_ulonglong,
    status: *mut c_uint,
) -> i32 {
    if symbol.is_null() {
        return codes::INVALID_VALUE;
    }
    // SAFETY: not null; a name that ends in a zero byte.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    let mut found = std::ptr::null_mut();
    // SAFETY: asks the loader for this very library and looks names up in it; all strings end in a zero byte.
    unsafe {
        let mut info = DlInfo {
            file: std::ptr::null(),
            base: std::ptr::null_mut(),
            symbol: std::ptr::null(),
            address: std::ptr::null_mut(),
        };
        if dladdr(cuGetErrorName as *const c_void, &mut info) != 0 && !info.file.is_null() {
            // RTLD_LAZY | RTLD_NOLOAD: it is loaded already.
            let library = dlopen(info.file, 1 | 4);
            for suffix in ["_v3\0", "_v2\0", "\0"] {
                let full = [name, suffix.as_bytes()].concat();
                found = dlsym(library, full.as_ptr().cast());
                if !found.is_null() {
                    break;
                }
            }
        }
        if !status.is_null() && put(status, if found.is_null() { 1 } else { 0 }).is_err() {
            return codes::INVALID_VALUE;
        }
        if let Err(code) = put(out, found) {
            return code;
        }
    }
    if found.is_null() { codes::NOT_FOUND } else { codes::SUCCESS }
}
