// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory: allocation, copies, fills, questions about pointers.
//!
//! Pageable host memory is read at the call and written before the call returns. Page-locked memory is read and
//! written when the copy runs, which is late.

use super::codes;
use super::entry::{Outcome, call, context_of, in_context, put, stream_of};
use super::machine::{Machine, default_stream};
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

fn release(m: &mut Machine, base: u64, owner: Owner) -> Outcome {
    if base == 0 {
        return Ok(());
    }
    match m.mem.find(base) {
        Some((b, _, o)) if b == base && o == owner => {}
        _ => return Err(codes::INVALID_VALUE),
    }
    // The driver waits for the device before it frees.
    m.drain_all();
    m.homes.remove(&base);
    m.mem.free(base);
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    in_context(|m, _| {
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
    in_context(|m, d| {
        let base = new_allocation(m, d, len, Owner::Device)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, base) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(ptr: u64) -> i32 {
    in_context(|m, _| release(m, ptr, Owner::Device))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(out: *mut u64, len: usize, stream: *mut c_void) -> i32 {
    in_context(|m, d| {
        let s = stream_of(m, d, stream)?;
        let base = new_allocation(m, d, len, Owner::Device)?;
        m.enqueue(s, Vec::new(), None, Work::Alloc { base, len });
        // SAFETY: the caller's result pointer.
        unsafe { put(out, base) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(ptr: u64, stream: *mut c_void) -> i32 {
    in_context(|m, d| {
        let s = stream_of(m, d, stream)?;
        let Some((base, len, Owner::Device)) = m.mem.find(ptr).filter(|f| f.0 == ptr) else {
            return Err(codes::INVALID_VALUE);
        };
        m.homes.remove(&base);
        m.enqueue(s, Vec::new(), None, Work::Free { base, len });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(out: *mut *mut c_void, len: usize, _flags: c_uint) -> i32 {
    in_context(|m, d| {
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
    in_context(|m, _| release(m, ptr as u64, Owner::Host))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(out: *mut u64, ptr: *mut c_void, _flags: c_uint) -> i32 {
    in_context(|m, _| match m.mem.find(ptr as u64) {
        // SAFETY: the caller's result pointer.
        Some((_, _, Owner::Host)) => unsafe { put(out, ptr as u64) },
        _ => Err(codes::INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, ptr: u64) -> i32 {
    in_context(|m, _| {
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

/// A copy, by what the addresses are. Waits when `wait` is set, or when pageable memory is written.
fn copy(m: &mut Machine, s: u64, dst: u64, src: u64, len: usize, wait: bool) -> Outcome {
    if len == 0 {
        return Ok(());
    }
    if dst == 0 || src == 0 {
        return Err(codes::INVALID_VALUE);
    }
    let (to, from) = (m.mem.find(dst).is_some(), m.mem.find(src).is_some());
    let mut wait = wait;
    let work = match (to, from) {
        (true, true) => Work::Copy { dst, src, len },
        (true, false) => {
            let mut bytes = vec![0; len];
            // SAFETY: an address that is no memory of ours is the host's; the caller answers for `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(src as *const u8, bytes.as_mut_ptr(), len) };
            Work::Write { dst, bytes }
        }
        (false, true) => {
            wait = true;
            Work::Read { dst: dst as usize, src, len }
        }
        (false, false) => return Err(codes::INVALID_VALUE),
    };
    m.enqueue(s, Vec::new(), None, work);
    if wait {
        let last = m.streams.get(&s).map_or(0, |s| s.enqueued);
        m.drain(s, last);
    }
    Ok(())
}

/// Whether a device address lies in memory of ours.
fn known(m: &Machine, ptr: u64, len: usize) -> Outcome {
    if len == 0 || m.mem.find(ptr).is_some() { Ok(()) } else { Err(codes::INVALID_VALUE) }
}

macro_rules! copies {
    ($($now:ident, $later:ident, $to:ty, $from:ty, $check_to:literal, $check_from:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $now(dst: $to, src: $from, len: usize) -> i32 {
            in_context(|m, d| {
                if $check_to { known(m, dst as u64, len)?; }
                if $check_from { known(m, src as u64, len)?; }
                copy(m, default_stream(d), dst as u64, src as u64, len, true)
            })
        }
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $later(dst: $to, src: $from, len: usize, stream: *mut c_void) -> i32 {
            in_context(|m, d| {
                let s = stream_of(m, d, stream)?;
                if $check_to { known(m, dst as u64, len)?; }
                if $check_from { known(m, src as u64, len)?; }
                copy(m, s, dst as u64, src as u64, len, false)
            })
        }
    )*};
}

copies! {
    cuMemcpy, cuMemcpyAsync, u64, u64, false, false;
    cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, u64, *const c_void, true, false;
    cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, *mut c_void, u64, false, true;
    cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, u64, u64, true, true;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeer(dst: u64, _to: *mut c_void, src: u64, _from: *mut c_void, len: usize) -> i32 {
    // SAFETY: passed on.
    unsafe { cuMemcpyDtoD_v2(dst, src, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    dst: u64,
    _to: *mut c_void,
    src: u64,
    _from: *mut c_void,
    len: usize,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: passed on.
    unsafe { cuMemcpyDtoDAsync_v2(dst, src, len, stream) }
}

fn fill(m: &mut Machine, s: u64, dst: u64, value: u32, width: usize, count: usize, wait: bool) -> Outcome {
    if count == 0 {
        return Ok(());
    }
    if !dst.is_multiple_of(width as u64) || m.mem.find(dst).is_none() {
        return Err(codes::INVALID_VALUE);
    }
    m.enqueue(s, Vec::new(), None, Work::Fill { dst, pattern: value.to_le_bytes(), width, count });
    if wait {
        let last = m.streams.get(&s).map_or(0, |s| s.enqueued);
        m.drain(s, last);
    }
    Ok(())
}

macro_rules! fills {
    ($($now:ident, $later:ident, $t:ty;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $now(dst: u64, value: $t, count: usize) -> i32 {
            in_context(|m, d| fill(m, default_stream(d), dst, value.into(), size_of::<$t>(), count, true))
        }
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $later(dst: u64, value: $t, count: usize, stream: *mut c_void) -> i32 {
            in_context(|m, d| {
                let s = stream_of(m, d, stream)?;
                fill(m, s, dst, value.into(), size_of::<$t>(), count, false)
            })
        }
    )*};
}

fills! {
    cuMemsetD8_v2, cuMemsetD8Async, u8;
    cuMemsetD16_v2, cuMemsetD16Async, u16;
    cuMemsetD32_v2, cuMemsetD32Async, u32;
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
    call(|m| unsafe { attribute(m, data, which, ptr) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    n: c_uint,
    which: *mut c_uint,
    data: *mut *mut c_void,
    ptr: u64,
) -> i32 {
    call(|m| {
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
