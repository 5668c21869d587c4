// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory: allocation, and questions about pointers.

use super::codes;
use super::entry::{Outcome, call, context_of, in_context, put, stream_of, waiting};
use super::machine::{Goal, Machine};
use super::queue::Work;
use crate::mem::Owner;
use std::ffi::{c_int, c_uint, c_void};

fn new_allocation(m: &mut Machine, device: usize, len: usize, owner: Owner) -> Result<u64, i32> {
    if len == 0 {
        return Err(codes::INVALID_VALUE);
    }
    if owner == Owner::Device && m.mem.live_bytes().saturating_add(len) > m.config.memory {
        return Err(codes::OUT_OF_MEMORY);
    }
    let base = m.mem.alloc_as(len, owner, "");
    if base == 0 {
        return Err(codes::OUT_OF_MEMORY);
    }
    m.homes.insert(base, device);
    Ok(base)
}

/// Frees memory once its device has nothing left to do: the driver waits for that.
fn release(name: &'static str, base: u64, owner: Owner) -> i32 {
    let goal = |m: &mut Machine, _| {
        if base == 0 {
            return Ok(Goal::Nothing);
        }
        match m.mem.find(base) {
            Some((b, _, o)) if b == base && o == owner => Ok(Goal::Device(m.home(base).0)),
            _ => Err(codes::INVALID_VALUE),
        }
    };
    waiting(name, goal, |m, _| {
        m.homes.remove(&base);
        m.mem.free(base);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    in_context("cuMemGetInfo_v2", |m, _| {
        let all = m.config.memory;
        // SAFETY: the caller's result pointers.
        unsafe {
            put(free, all.saturating_sub(m.mem.live_bytes()))?;
            put(total, all)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, len: usize) -> i32 {
    in_context("cuMemAlloc_v2", |m, d| {
        let base = new_allocation(m, d, len, Owner::Device)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, base) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(ptr: u64) -> i32 {
    release("cuMemFree_v2", ptr, Owner::Device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(out: *mut u64, len: usize, stream: *mut c_void) -> i32 {
    in_context("cuMemAllocAsync", |m, d| {
        let s = stream_of(m, d, stream)?;
        m.acceptable(s)?;
        let base = new_allocation(m, d, len, Owner::Device)?;
        m.submit(s, Work::Alloc { base, len })?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, base) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(ptr: u64, stream: *mut c_void) -> i32 {
    in_context("cuMemFreeAsync", |m, d| {
        let s = stream_of(m, d, stream)?;
        let Some((base, len, Owner::Device)) = m.mem.find(ptr).filter(|f| f.0 == ptr) else {
            return Err(codes::INVALID_VALUE);
        };
        m.submit(s, Work::Free { base, len })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(out: *mut *mut c_void, len: usize, _flags: c_uint) -> i32 {
    in_context("cuMemHostAlloc", |m, d| {
        let base = new_allocation(m, d, len, Owner::Host)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, base as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(out: *mut *mut c_void, len: usize) -> i32 {
    // SAFETY: passed on.
    unsafe { cuMemHostAlloc(out, len, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(ptr: *mut c_void) -> i32 {
    release("cuMemFreeHost", ptr as u64, Owner::Host)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(out: *mut u64, ptr: *mut c_void, _flags: c_uint) -> i32 {
    in_context("cuMemHostGetDevicePointer_v2", |m, _| match m.mem.find(ptr as u64) {
        // SAFETY: the caller's result pointer.
        Some((_, _, Owner::Host)) => unsafe { put(out, ptr as u64) },
        _ => Err(codes::INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, ptr: u64) -> i32 {
    in_context("cuMemGetAddressRange_v2", |m, _| {
        let (b, n, _) = m.mem.find(ptr).ok_or(codes::NOT_FOUND)?;
        // SAFETY: the caller's result pointers, each of which may be null.
        unsafe {
            if !base.is_null() {
                put(base, b)?;
            }
            if !size.is_null() {
                put(size, n)?;
            }
        }
        Ok(())
    })
}

unsafe fn attribute(m: &Machine, data: *mut c_void, which: c_uint, ptr: u64) -> Outcome {
    let (base, size, owner) = m.mem.find(ptr).ok_or(codes::INVALID_VALUE)?;
    let device = m.homes.get(&base).copied().unwrap_or(0);
    // SAFETY: the caller's result pointer, of the type that the attribute has.
    unsafe {
        match which {
            1 => put(data.cast(), context_of(device)),
            2 => put(data.cast::<c_uint>(), if owner == Owner::Host { 1 } else { 2 }),
            3 => put(data.cast(), ptr),
            4 if owner == Owner::Host => put(data.cast(), ptr),
            7 => put(data.cast(), base),
            8 => put(data.cast::<c_uint>(), 0),
            9 => put(data.cast::<c_int>(), device as c_int),
            11 => put(data.cast(), base),
            12 => put(data.cast(), size as u64),
            13 => put(data.cast::<u8>(), 1),
            _ => Err(codes::INVALID_VALUE),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, which: c_uint, ptr: u64) -> i32 {
    // SAFETY: passed on.
    call("cuPointerGetAttribute", |m| unsafe { attribute(m, data, which, ptr) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    n: c_uint,
    which: *mut c_uint,
    data: *mut *mut c_void,
    ptr: u64,
) -> i32 {
    call("cuPointerGetAttributes", |m| {
        for k in 0..n as usize {
            // SAFETY: the caller gives n attributes and n result pointers. Unlike the single form, this one leaves
            // what does not apply to the pointer at zero.
            unsafe {
                let (w, to) = (*which.add(k), *data.add(k));
                if attribute(m, to, w, ptr).is_err() {
                    let bytes = if matches!(w, 1 | 3 | 4 | 7 | 11 | 12) { 8 } else { 4 };
                    std::ptr::write_bytes(to.cast::<u8>(), 0, bytes);
                }
            }
        }
        Ok(())
    })
}
