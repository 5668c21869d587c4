// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, and their capture into graphs.

use super::capture;
use super::codes;
use super::entry::{call, context_of, in_context, put, stream_of, waiting};
use super::machine::{Goal, Machine, stream};
use super::queue::Work;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

fn create(m: &mut Machine, device: usize, flags: c_uint, priority: c_int) -> Result<u64, i32> {
    if flags > 1 {
        return Err(codes::INVALID_VALUE);
    }
    let id = m.handle();
    m.streams.insert(id, stream(device, flags == 1, priority.clamp(-5, 0)));
    Ok(id)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, flags: c_uint) -> i32 {
    // SAFETY: passed on.
    unsafe { cuStreamCreateWithPriority(out, flags, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(out: *mut *mut c_void, flags: c_uint, priority: c_int) -> i32 {
    in_context("cuStreamCreateWithPriority", |m, d| {
        let id = create(m, d, flags, priority)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> i32 {
    in_context("cuStreamDestroy_v2", |m, d| {
        let id = stream_of(m, d, handle)?;
        if (handle as u64) <= 2 {
            return Err(codes::INVALID_HANDLE);
        }
        // Its work goes on; only the handle is gone.
        if let Some(s) = m.streams.get_mut(&id) {
            s.destroyed = true;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> i32 {
    let goal = |m: &mut Machine, d| {
        let id = stream_of(m, d, handle)?;
        m.observable(id)?;
        Ok(Goal::Stream(id, m.streams.get(&id).map_or(0, |s| s.enqueued)))
    };
    waiting("cuStreamSynchronize", goal, |_, _| Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(handle: *mut c_void) -> i32 {
    in_context("cuStreamQuery", |m, d| {
        let id = stream_of(m, d, handle)?;
        m.observable(id)?;
        // Asking makes time pass, sometimes.
        if m.below(2) == 0 {
            m.step();
        }
        let Some(s) = m.streams.get(&id) else { return Ok(()) };
        if s.done < s.enqueued {
            return Err(codes::NOT_READY);
        }
        let (done, tail) = (s.done, s.tail.clone());
        m.host_learns(id, done, &tail);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(handle: *mut c_void, event: *mut c_void, flags: c_uint) -> i32 {
    in_context("cuStreamWaitEvent", |m, d| {
        let (id, event) = (stream_of(m, d, handle)?, event as u64);
        if flags > 1 {
            return Err(codes::INVALID_VALUE);
        }
        if !m.events.contains_key(&event) {
            return Err(codes::INVALID_HANDLE);
        }
        if m.capture_wait(id, event, flags == 1)? {
            return Ok(());
        }
        // An event that was never recorded holds nothing up.
        if let Some((s, n, clock)) = m.events.get(&event).and_then(|e| e.record.clone()) {
            m.enqueue(id, vec![(s, n)], Some(&clock), Work::Wait);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(handle: *mut c_void, priority: *mut c_int) -> i32 {
    in_context("cuStreamGetPriority", |m, d| {
        let id = stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(priority, m.streams.get(&id).map_or(0, |s| s.priority)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetFlags(handle: *mut c_void, flags: *mut c_uint) -> i32 {
    in_context("cuStreamGetFlags", |m, d| {
        let id = stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(flags, m.streams.get(&id).map_or(0, |s| s.independent.into())) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> i32 {
    in_context("cuStreamGetCtx", |m, d| {
        stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(context, context_of(d) as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetId(handle: *mut c_void, out: *mut c_ulonglong) -> i32 {
    in_context("cuStreamGetId", |m, d| {
        let id = stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id) }
    })
}

/// Status and graph of the capture that a stream belongs to: 0 for none, 1 active, 2 invalid.
fn status(m: &Machine, id: u64) -> Result<(c_uint, u64, u64), i32> {
    if !m.blocked_by(id).is_empty() {
        return Err(codes::STREAM_CAPTURE_IMPLICIT);
    }
    let capture = m.streams.get(&id).and_then(|s| s.capture);
    Ok(match capture.and_then(|c| m.captures.get(&c).map(|found| (c, found))) {
        None => (0, 0, 0),
        Some((c, found)) => (if found.invalid { 2 } else { 1 }, c, found.graph),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, out: *mut c_uint) -> i32 {
    in_context("cuStreamIsCapturing", |m, d| {
        let id = stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, status(m, id)?.0) }
    })
}

/// The nodes that the next one comes behind are not told: no test edits a graph while it is captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: *mut c_void,
    out: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    count: *mut usize,
) -> i32 {
    in_context("cuStreamGetCaptureInfo", |m, d| {
        let stream = stream_of(m, d, handle)?;
        let (status, capture, g) = status(m, stream)?;
        if !dependencies.is_null() || !count.is_null() {
            return Err(codes::NOT_SUPPORTED);
        }
        // SAFETY: the caller's result pointers; all but the first may be null.
        unsafe {
            put(out, status)?;
            if status == 1 && !id.is_null() {
                put(id, capture)?;
            }
            if status == 1 && !graph.is_null() {
                put(graph, g as *mut c_void)?;
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    handle: *mut c_void,
    out: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    _edges: *mut *const c_void,
    count: *mut usize,
) -> i32 {
    // SAFETY: passed on.
    unsafe { cuStreamGetCaptureInfo_v2(handle, out, id, graph, dependencies, count) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, mode: c_uint) -> i32 {
    in_context("cuStreamBeginCapture_v2", |m, d| {
        let id = stream_of(m, d, handle)?;
        m.begin_capture(id, mode)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> i32 {
    in_context("cuStreamEndCapture", |m, d| {
        let id = stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(graph, std::ptr::null_mut())? };
        let done = m.end_capture(id)?;
        // SAFETY: as above.
        unsafe { put(graph, done as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> i32 {
    call("cuThreadExchangeStreamCaptureMode", |_| {
        if mode.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the caller's variable.
        let wanted = unsafe { mode.read() };
        if wanted > capture::RELAXED {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { put(mode, capture::exchange_mode(wanted)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    f: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> i32 {
    in_context("cuLaunchHostFunc", |m, d| {
        let id = stream_of(m, d, handle)?;
        let f = f.ok_or(codes::INVALID_VALUE)?;
        m.submit(id, Work::Host { f, data: data as usize })
    })
}
