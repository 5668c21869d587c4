// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the program has asked for, see `calls`. A program that does not link to this library finds these functions with
//! `cuGetProcAddress`.

use super::entry::call;
use std::ffi::{CStr, c_char, c_ulonglong};

/// How often: a function of the driver, a kind of work, `allocations`, `queries`, `host waits` or `calls`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuCount(name: *const c_char) -> c_ulonglong {
    let mut n = 0;
    call("cuEmuCount", |m| {
        if !name.is_null() {
            // SAFETY: not null; a name that ends in a zero byte.
            n = m.counts.get(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
        }
        Ok(())
    });
    n
}

/// Copies all counts as text into a buffer of `len` bytes, as `cuEmuLastReport` does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuCounts(buffer: *mut c_char, len: usize) -> usize {
    let mut text = String::new();
    call("cuEmuCounts", |m| {
        text = m.counts.text();
        Ok(())
    });
    // SAFETY: passed on.
    unsafe { super::api_misc::give(&text, buffer, len) }
}

/// Counts from 0 again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuCountReset() {
    call("cuEmuCountReset", |m| {
        m.counts.reset();
        Ok(())
    });
}
