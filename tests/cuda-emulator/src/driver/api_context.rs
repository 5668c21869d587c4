// SPDX-License-Identifier: MIT OR Apache-2.0
//! Primary contexts and the current context of a thread.

use super::codes;
use super::entry::{self, call, context_of, device_of, in_context, put};
use std::ffi::{c_int, c_uint, c_void};

fn ordinal(m: &super::machine::Machine, device: c_int) -> Result<usize, i32> {
    usize::try_from(device).ok().filter(|d| *d < m.devices.len()).ok_or(codes::INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> i32 {
    call(|m| {
        let d = ordinal(m, device)?;
        m.devices[d].retained += 1;
        // SAFETY: the caller's result pointer.
        unsafe { put(context, context_of(d) as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> i32 {
    call(|m| {
        let d = ordinal(m, device)?;
        if m.devices[d].retained == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        m.devices[d].retained -= 1;
        if m.devices[d].retained == 0 {
            m.reset(d);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> i32 {
    call(|m| {
        let d = ordinal(m, device)?;
        m.reset(d);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> i32 {
    call(|m| {
        let d = ordinal(m, device)?;
        // SAFETY: the caller's result pointers.
        unsafe {
            put(flags, m.devices[d].flags)?;
            put(active, (m.devices[d].retained > 0).into())
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) -> i32 {
    call(|m| {
        let d = ordinal(m, device)?;
        m.devices[d].flags = flags;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> i32 {
    call(|m| {
        if !context.is_null() {
            device_of(m, context as u64)?;
        }
        entry::set_current(context as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> i32 {
    // SAFETY: the caller's result pointer.
    call(|_| unsafe { put(context, entry::current() as *mut c_void) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> i32 {
    call(|m| {
        device_of(m, context as u64)?;
        entry::push(context as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> i32 {
    call(|_| {
        let popped = entry::pop().ok_or(codes::INVALID_CONTEXT)?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's result pointer.
        unsafe { put(context, popped as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> i32 {
    call(|m| {
        let d = device_of(m, entry::current())?;
        // SAFETY: the caller's result pointer.
        unsafe { put(device, d as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> i32 {
    in_context(|m, _| {
        m.drain_all();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetApiVersion(_: *mut c_void, version: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    call(|_| unsafe { put(version, 3020) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> i32 {
    in_context(|_, _| {
        for (p, v) in [(least, 0), (greatest, -5)] {
            if !p.is_null() {
                // SAFETY: the caller's result pointers.
                unsafe { put(p, v)? };
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetFlags(flags: c_uint) -> i32 {
    in_context(|m, d| {
        m.devices[d].flags = flags;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetFlags(flags: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context(|m, d| unsafe { put(flags, m.devices[d].flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, _limit: c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context(|_, _| unsafe { put(value, 1024) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetLimit(_limit: c_uint, _value: usize) -> i32 {
    in_context(|_, _| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCacheConfig(config: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context(|_, _| unsafe { put(config, 0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCacheConfig(_config: c_uint) -> i32 {
    in_context(|_, _| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) -> i32 {
    in_context(|m, _| {
        device_of(m, peer as u64)?;
        if flags != 0 { Err(codes::INVALID_VALUE) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDisablePeerAccess(peer: *mut c_void) -> i32 {
    in_context(|m, _| device_of(m, peer as u64).map(|_| ()))
}
