// SPDX-License-Identifier: MIT OR Apache-2.0
//! Primary contexts and the current context of a thread.

use super::codes;
use super::entry::{self, call, context_of, device_of, in_context, put, reach, waiting};
use super::machine::Goal;
use std::ffi::{c_int, c_uint, c_void};

fn ordinal(m: &super::machine::Machine, device: c_int) -> Result<usize, i32> {
    usize::try_from(device).ok().filter(|d| *d < m.devices.len()).ok_or(codes::INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> i32 {
    call("cuDevicePrimaryCtxRetain", |m| {
        let d = ordinal(m, device)?;
        m.devices[d].retained += 1;
        // SAFETY: the caller's result pointer.
        unsafe { put(context, context_of(d) as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> i32 {
    let mut last = false;
    let code = call("cuDevicePrimaryCtxRelease_v2", |m| {
        let d = ordinal(m, device)?;
        if m.devices[d].retained == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        last = m.devices[d].retained == 1;
        if !last {
            m.devices[d].retained -= 1;
        }
        Ok(())
    });
    if code == codes::SUCCESS && last { finish(device, |m, d| m.devices[d].retained -= 1) } else { code }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> i32 {
    let code = call("cuDevicePrimaryCtxReset_v2", |m| ordinal(m, device).map(|_| ()));
    if code == codes::SUCCESS { finish(device, |_, _| ()) } else { code }
}

/// Lets a device finish its work, whatever came of it, and forgets its error.
fn finish(device: c_int, then: impl FnOnce(&mut super::machine::Machine, usize)) -> i32 {
    let d = device as usize;
    reach(Goal::Device(d));
    call("cuEmuReset", |m| {
        then(m, d);
        m.reset(d);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) -> i32 {
    call("cuDevicePrimaryCtxGetState", |m| {
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
    call("cuDevicePrimaryCtxSetFlags_v2", |m| {
        let d = ordinal(m, device)?;
        m.devices[d].flags = flags;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> i32 {
    call("cuCtxSetCurrent", |m| {
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
    call("cuCtxGetCurrent", |_| unsafe { put(context, entry::current() as *mut c_void) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> i32 {
    call("cuCtxPushCurrent_v2", |m| {
        device_of(m, context as u64)?;
        entry::push(context as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> i32 {
    call("cuCtxPopCurrent_v2", |_| {
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
    call("cuCtxGetDevice", |m| {
        let d = device_of(m, entry::current())?;
        // SAFETY: the caller's result pointer.
        unsafe { put(device, d as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> i32 {
    let goal = |m: &mut super::machine::Machine, d| {
        m.device_observable(d)?;
        Ok(Goal::Device(d))
    };
    waiting("cuCtxSynchronize", goal, |_, _| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetApiVersion(_: *mut c_void, version: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    call("cuCtxGetApiVersion", |_| unsafe { put(version, 3020) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> i32 {
    in_context("cuCtxGetStreamPriorityRange", |_, _| {
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
    in_context("cuCtxSetFlags", |m, d| {
        m.devices[d].flags = flags;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetFlags(flags: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context("cuCtxGetFlags", |m, d| unsafe { put(flags, m.devices[d].flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, _limit: c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context("cuCtxGetLimit", |_, _| unsafe { put(value, 1024) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetLimit(_limit: c_uint, _value: usize) -> i32 {
    in_context("cuCtxSetLimit", |_, _| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCacheConfig(config: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    in_context("cuCtxGetCacheConfig", |_, _| unsafe { put(config, 0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCacheConfig(_config: c_uint) -> i32 {
    in_context("cuCtxSetCacheConfig", |_, _| Ok(()))
}

/// Lets kernels of the current context's device use memory of another device, in this direction only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) -> i32 {
    in_context("cuCtxEnablePeerAccess", |m, d| {
        let other = device_of(m, peer as u64)?;
        if flags != 0 {
            return Err(codes::INVALID_VALUE);
        }
        if other == d || !m.config.peers {
            return Err(codes::PEER_ACCESS_UNSUPPORTED);
        }
        if m.devices[d].peers.insert(other) { Ok(()) } else { Err(codes::PEER_ACCESS_ALREADY_ENABLED) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDisablePeerAccess(peer: *mut c_void) -> i32 {
    in_context("cuCtxDisablePeerAccess", |m, d| {
        let other = device_of(m, peer as u64)?;
        if m.devices[d].peers.remove(&other) { Ok(()) } else { Err(codes::PEER_ACCESS_NOT_ENABLED) }
    })
}
