// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events.

use super::codes;
use super::entry::{Outcome, in_context, put, stream_of, waiting};
use super::machine::{Goal, Machine};
use super::queue::{Event, Work};
use std::ffi::{c_uint, c_void};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> i32 {
    in_context("cuEventCreate", |m, _| {
        let id = m.handle();
        m.events.insert(id, Event { timed: flags & 2 == 0, ..Event::default() });
        // SAFETY: the caller's result pointer.
        unsafe { put(out, id as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> i32 {
    in_context("cuEventDestroy_v2", |m, _| m.events.remove(&(event as u64)).map(|_| ()).ok_or(codes::INVALID_HANDLE))
}

fn record(m: &mut Machine, device: usize, event: u64, handle: *mut c_void, external: bool) -> Outcome {
    let id = stream_of(m, device, handle)?;
    if !m.events.contains_key(&event) {
        return Err(codes::INVALID_HANDLE);
    }
    if m.capture_record(id, event, external)? {
        return Ok(());
    }
    let e = m.events.get_mut(&event).ok_or(codes::INVALID_HANDLE)?;
    e.version += 1;
    let version = e.version;
    m.enqueue(id, Vec::new(), None, Work::Record { event, version });
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, handle: *mut c_void) -> i32 {
    in_context("cuEventRecord", |m, d| record(m, d, event as u64, handle, false))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecordWithFlags(event: *mut c_void, handle: *mut c_void, flags: c_uint) -> i32 {
    in_context("cuEventRecord", |m, d| {
        if flags > 1 {
            return Err(codes::INVALID_VALUE);
        }
        record(m, d, event as u64, handle, flags == 1)
    })
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
    in_context("cuEventQuery", |m, _| {
        m.event_observable(event as u64)?;
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
    let goal = |m: &mut Machine, _| {
        m.event_observable(event as u64)?;
        let e = m.events.get(&(event as u64)).ok_or(codes::INVALID_HANDLE)?;
        Ok(e.record.as_ref().map_or(Goal::Nothing, |(s, n, _)| Goal::Stream(*s, *n)))
    };
    waiting("cuEventSynchronize", goal, |m, _| learn(m, event as u64))
}

/// Milliseconds between two events: a million instructions count as one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: *mut c_void, end: *mut c_void) -> i32 {
    in_context("cuEventElapsedTime", |m, _| {
        let (mut times, events) = ([0; 2], [start as u64, end as u64]);
        // What no wait would help against comes first.
        for id in events {
            m.event_observable(id)?;
            if !m.events.get(&id).is_some_and(|e| e.timed && e.record.is_some()) {
                return Err(codes::INVALID_HANDLE);
            }
        }
        for (t, id) in times.iter_mut().zip(events) {
            let e = &m.events[&id];
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
