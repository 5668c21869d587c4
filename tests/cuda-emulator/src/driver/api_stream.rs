// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams and events.

use super::codes;
use super::entry::{Outcome, any_stream_of, context_of, in_context, put, stream_of};
use super::machine::{Machine, stream};
use super::queue::{Event, Work};
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
    in_context(|m, d| {
        let id = create(m, d, flags, priority)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> i32 {
    in_context(|m, d| {
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
    in_context(|m, d| {
        let id = stream_of(m, d, handle)?;
        let last = m.streams.get(&id).map_or(0, |s| s.enqueued);
        m.drain(id, last);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(handle: *mut c_void) -> i32 {
    in_context(|m, d| {
        let id = stream_of(m, d, handle)?;
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
pub unsafe extern "C" fn cuStreamWaitEvent(handle: *mut c_void, event: *mut c_void, _flags: c_uint) -> i32 {
    in_context(|m, d| {
        let id = stream_of(m, d, handle)?;
        let e = m.events.get(&(event as u64)).ok_or(codes::INVALID_HANDLE)?;
        // An event that was never recorded holds nothing up.
        if let Some((s, n, clock)) = e.record.clone() {
            m.enqueue(id, vec![(s, n)], Some(&clock), Work::Wait);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetPriority(handle: *mut c_void, priority: *mut c_int) -> i32 {
    in_context(|m, d| {
        let id = any_stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(priority, m.streams.get(&id).map_or(0, |s| s.priority)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetFlags(handle: *mut c_void, flags: *mut c_uint) -> i32 {
    in_context(|m, d| {
        let id = any_stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(flags, m.streams.get(&id).map_or(0, |s| s.independent.into())) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(handle: *mut c_void, context: *mut *mut c_void) -> i32 {
    in_context(|m, d| {
        any_stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(context, context_of(d) as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetId(handle: *mut c_void, out: *mut c_ulonglong) -> i32 {
    in_context(|m, d| {
        let id = any_stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_uint) -> i32 {
    in_context(|m, d| {
        let id = any_stream_of(m, d, handle)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(status, m.streams.get(&id).is_some_and(|s| s.capturing).into()) }
    })
}

fn capture(handle: *mut c_void, begin: bool) -> i32 {
    in_context(|m, d| {
        let id = any_stream_of(m, d, handle)?;
        match m.streams.get_mut(&id) {
            // The default stream cannot be captured.
            Some(s) if (handle as u64) > 2 && s.capturing != begin => {
                s.capturing = begin;
                Ok(())
            }
            _ => Err(codes::STREAM_CAPTURE_UNSUPPORTED),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, _mode: c_uint) -> i32 {
    capture(handle, true)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> i32 {
    match capture(handle, false) {
        // SAFETY: the caller's result pointer. Nothing was captured.
        codes::SUCCESS => unsafe { put(graph, std::ptr::null_mut()) }.err().unwrap_or(codes::SUCCESS),
        code => code,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    f: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> i32 {
    in_context(|m, d| {
        let id = stream_of(m, d, handle)?;
        let f = f.ok_or(codes::INVALID_VALUE)?;
        m.enqueue(id, Vec::new(), None, Work::Host { f, data: data as usize });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> i32 {
    in_context(|m, _| {
        let id = m.handle();
        m.events.insert(id, Event { timed: flags & 2 == 0, ..Event::default() });
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> i32 {
    in_context(|m, _| m.events.remove(&(event as u64)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, handle: *mut c_void) -> i32 {
    in_context(|m, d| {
        let id = stream_of(m, d, handle)?;
        let e = m.events.get_mut(&(event as u64)).ok_or(codes::INVALID_HANDLE)?;
        e.version += 1;
        let version = e.version;
        m.enqueue(id, Vec::new(), None, Work::Record { event: event as u64, version });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecordWithFlags(event: *mut c_void, handle: *mut c_void, _flags: c_uint) -> i32 {
    // SAFETY: passed on.
    unsafe { cuEventRecord(event, handle) }
}

fn finished(m: &Machine, event: u64) -> Result<bool, i32> {
    let e = m.events.get(&event).ok_or(codes::INVALID_HANDLE)?;
    Ok(match &e.record {
        None => true,
        Some((s, n, _)) => m.streams.get(s).is_none_or(|s| s.done >= *n),
    })
}

fn learn(m: &mut Machine, event: u64) -> Outcome {
    let record = m.events.get(&event).and_then(|e| e.record.clone());
    if let Some((stream, number, clock)) = record {
        m.host_learns(stream, number, &clock);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> i32 {
    in_context(|m, _| {
        if m.below(2) == 0 {
            m.step();
        }
        if !finished(m, event as u64)? {
            return Err(codes::NOT_READY);
        }
        learn(m, event as u64)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: *mut c_void) -> i32 {
    in_context(|m, _| {
        let e = m.events.get(&(event as u64)).ok_or(codes::INVALID_HANDLE)?;
        if let Some((s, n, _)) = e.record.clone() {
            m.drain(s, n);
        }
        learn(m, event as u64)
    })
}

/// Milliseconds between two events: a million instructions count as one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: *mut c_void, end: *mut c_void) -> i32 {
    in_context(|m, _| {
        let mut times = [0; 2];
        for (t, id) in times.iter_mut().zip([start as u64, end as u64]) {
            let e = m.events.get(&id).ok_or(codes::INVALID_HANDLE)?;
            if !e.timed || e.record.is_none() {
                return Err(codes::INVALID_HANDLE);
            }
            match e.ran {
                Some((version, time)) if version == e.version => *t = time,
                _ => return Err(codes::NOT_READY),
            }
        }
        // SAFETY: the caller's result pointer.
        unsafe { put(out, (times[1] as f64 - times[0] as f64) as f32 * 1e-6) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(out: *mut f32, start: *mut c_void, end: *mut c_void) -> i32 {
    // SAFETY: passed on.
    unsafe { cuEventElapsedTime(out, start, end) }
}
