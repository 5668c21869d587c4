// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions: what a kernel is and needs, and how many of its blocks a multiprocessor holds.

use super::codes;
use super::entry::{in_context, put};
use super::machine::{Function, Machine};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Registers a thread is said to need: PTX does not tell, and this is what big matrix kernels have.
const REGISTERS: u32 = 128;

pub(super) fn function(m: &mut Machine, f: *mut c_void) -> Result<&mut Function, i32> {
    m.functions.get_mut(&(f as u64)).ok_or(codes::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, which: c_uint, f: *mut c_void) -> i32 {
    in_context("cuFuncGetAttribute", |m, _| {
        let sm = m.config.sm;
        let f = function(m, f)?;
        let v = match which {
            0 => f.kernel.max_threads(),
            1 => f.kernel.static_shared(),
            2 => 0,
            3 => f.kernel.local_bytes(),
            4 => REGISTERS,
            5 => f.target,
            6 => sm,
            7 | 9..=16 => 0,
            8 => f.most_dynamic,
            _ => return Err(codes::INVALID_VALUE),
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(value, v as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(f: *mut c_void, which: c_uint, value: c_int) -> i32 {
    in_context("cuFuncSetAttribute", |m, _| {
        let optin = m.config.shared_optin();
        let f = function(m, f)?;
        match which {
            8 => {
                if value < 0 || value as u32 + f.kernel.static_shared() > optin {
                    return Err(codes::INVALID_VALUE);
                }
                f.most_dynamic = value as u32;
                Ok(())
            }
            9 | 14 => Ok(()),
            _ => Err(codes::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetCacheConfig(f: *mut c_void, _config: c_uint) -> i32 {
    in_context("cuFuncSetCacheConfig", |m, _| function(m, f).map(|_| ()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetName(out: *mut *const c_char, f: *mut c_void) -> i32 {
    in_context("cuFuncGetName", |m, _| {
        let p = function(m, f)?.name.as_ptr();
        // SAFETY: the caller's result pointer; the name lives as long as the function.
        unsafe { put(out, p) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetModule(out: *mut *mut c_void, f: *mut c_void) -> i32 {
    in_context("cuFuncGetModule", |m, _| {
        let module = function(m, f)?.module;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, module as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(f: *mut c_void, n: usize, offset: *mut usize, size: *mut usize) -> i32 {
    in_context("cuFuncGetParamInfo", |m, _| {
        let f = function(m, f)?;
        let p = f.kernel.params().get(n).ok_or(codes::INVALID_VALUE)?.clone();
        // SAFETY: the caller's result pointers; the size may be null.
        unsafe {
            put(offset, p.offset)?;
            if !size.is_null() {
                put(size, p.size)?;
            }
        }
        Ok(())
    })
}

/// Blocks of a multiprocessor: by threads, by shared memory, by registers.
pub(super) fn occupancy(m: &Machine, f: &Function, threads: u32, dynamic: u32) -> u32 {
    let shared = f.kernel.static_shared() + dynamic;
    if threads == 0 || threads > f.kernel.max_threads() || shared > m.config.shared_optin() {
        return 0;
    }
    let threads = threads.next_multiple_of(32);
    let by_shared = m.config.shared_total() / (shared.next_multiple_of(128) + 1024);
    let by_registers = 65536 / (threads * REGISTERS.min(65536 / threads));
    (m.config.threads_total() / threads).min(by_shared).min(by_registers).min(32)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    f: *mut c_void,
    threads: c_int,
    dynamic: usize,
) -> i32 {
    in_context("cuOccupancyMaxActiveBlocksPerMultiprocessor", |m, _| {
        let handle = f as u64;
        let f = m.functions.get(&handle).ok_or(codes::INVALID_HANDLE)?;
        if threads <= 0 {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: the caller's result pointer.
        unsafe { put(blocks, occupancy(m, f, threads as u32, dynamic.min(1 << 30) as u32) as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    f: *mut c_void,
    threads: c_int,
    dynamic: usize,
    _flags: c_uint,
) -> i32 {
    // SAFETY: passed on.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, dynamic) }
}
