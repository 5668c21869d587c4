// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a call gets to the machine: one lock around everything, a current context per thread, codes for errors.

use super::codes;
use super::config::Config;
use super::machine::{Machine, default_stream};
use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

/// A driver is one per process by its nature: its interface has no handle for it.
static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// A call's outcome before it becomes a code.
pub(super) type Outcome = Result<(), i32>;

fn lock() -> MutexGuard<'static, Option<Machine>> {
    MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `cuInit`.
pub(super) fn initialise() -> i32 {
    let mut guard = lock();
    if guard.is_none() {
        let config = Config::from_env();
        if config.devices == 0 {
            return codes::NO_DEVICE;
        }
        *guard = Some(Machine::new(config));
    }
    codes::SUCCESS
}

/// Runs a call that needs no context.
pub(super) fn call(f: impl FnOnce(&mut Machine) -> Outcome) -> i32 {
    let done = catch_unwind(AssertUnwindSafe(|| match lock().as_mut() {
        None => codes::NOT_INITIALIZED,
        Some(m) => f(m).err().unwrap_or(codes::SUCCESS),
    }));
    // A defect of the emulator; 999 is CUDA's unknown error.
    done.unwrap_or(999)
}

/// Runs a call in the current context: gives its device, and its sticky error if it has one.
pub(super) fn in_context(f: impl FnOnce(&mut Machine, usize) -> Outcome) -> i32 {
    call(|m| {
        let device = device_of(m, current())?;
        if let Some(code) = m.devices[device].sticky {
            return Err(code);
        }
        f(m, device)?;
        // What ran inside the call may have failed.
        m.devices[device].sticky.map_or(Ok(()), Err)
    })
}

const FIRST_CONTEXT: u64 = 0xc0de_0000;

/// The handle of a device's primary context.
pub(super) fn context_of(device: usize) -> u64 {
    FIRST_CONTEXT + device as u64 * 16
}

/// The device of a context.
pub(super) fn device_of(m: &Machine, context: u64) -> Result<usize, i32> {
    let device = (context.wrapping_sub(FIRST_CONTEXT) / 16) as usize;
    if context < FIRST_CONTEXT || device >= m.devices.len() || m.devices[device].retained == 0 {
        return Err(codes::INVALID_CONTEXT);
    }
    Ok(device)
}

/// The current context of this thread, 0 for none.
pub(super) fn current() -> u64 {
    CONTEXTS.with_borrow(|c| c.last().copied().unwrap_or(0))
}

pub(super) fn set_current(context: u64) {
    CONTEXTS.with_borrow_mut(|c| {
        c.pop();
        if context != 0 {
            c.push(context);
        }
    });
}

pub(super) fn push(context: u64) {
    CONTEXTS.with_borrow_mut(|c| c.push(context));
}

pub(super) fn pop() -> Option<u64> {
    CONTEXTS.with_borrow_mut(Vec::pop)
}

/// Writes through a result pointer.
pub(super) unsafe fn put<T>(p: *mut T, v: T) -> Outcome {
    if p.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: not null; that it points to room for a T is the caller's part of the driver's contract.
    unsafe { p.write_unaligned(v) };
    Ok(())
}

/// The stream behind a handle: null and 1 are the default stream, 2 the thread's own, which is the default one here.
/// There are no graphs here: nothing but questions may be put to a stream that is being captured.
pub(super) fn stream_of(m: &Machine, device: usize, handle: *mut c_void) -> Result<u64, i32> {
    let id = any_stream_of(m, device, handle)?;
    match m.streams.get(&id) {
        Some(s) if s.capturing => Err(codes::STREAM_CAPTURE_UNSUPPORTED),
        _ => Ok(id),
    }
}

/// As [`stream_of`], of a stream that is being captured too.
pub(super) fn any_stream_of(m: &Machine, device: usize, handle: *mut c_void) -> Result<u64, i32> {
    match handle as u64 {
        0..=2 => Ok(default_stream(device)),
        id => match m.streams.get(&id) {
            Some(s) if !s.destroyed && s.device == device => Ok(id),
            _ => Err(codes::INVALID_HANDLE),
        },
    }
}
