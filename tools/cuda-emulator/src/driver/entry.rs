// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a call gets to the machine: one lock around everything, a current context per thread, codes for errors.

use super::calls::{Piece, kind};
use super::codes;
use super::config::Config;
use super::machine::{Goal, Machine, default_stream};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

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

unsafe extern "C" {
    fn atexit(f: extern "C" fn()) -> i32;
}

/// At the end of the program: what it asked for, if it is to be kept.
extern "C" fn write_counts() {
    let guard = lock();
    if let Some(m) = guard.as_ref()
        && let Some(path) = &m.config.calls
        && let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(path)
    {
        // No caller is left to be told that it failed.
        let _ = f.write_all(m.counts.text().as_bytes());
    }
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
        // SAFETY: a function without arguments that is never unloaded: the driver stays until the process ends.
        unsafe { atexit(write_counts) };
    }
    codes::SUCCESS
}

thread_local! {
    /// Whether this thread is inside a host function of a stream, where the driver may not be called.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the host, or one that an exchange is told of, in which calls of the driver are refused.
pub(super) fn inside<R>(f: impl FnOnce() -> R) -> R {
    INSIDE.set(true);
    let out = f();
    INSIDE.set(false);
    out
}

fn locked(f: impl FnOnce(&mut Machine) -> Outcome) -> i32 {
    if INSIDE.get() {
        return codes::NOT_PERMITTED;
    }
    let done = catch_unwind(AssertUnwindSafe(|| match lock().as_mut() {
        None => codes::NOT_INITIALIZED,
        Some(m) => f(m).err().unwrap_or(codes::SUCCESS),
    }));
    // A defect of the emulator; 999 is CUDA's unknown error.
    done.unwrap_or(999)
}

/// Runs a call that needs no context, and counts it.
pub(super) fn call(name: &'static str, f: impl FnOnce(&mut Machine) -> Outcome) -> i32 {
    locked(|m| {
        m.counts.call(name);
        f(m)
    })
}

fn checked(m: &mut Machine, f: impl FnOnce(&mut Machine, usize) -> Outcome) -> Outcome {
    let device = device_of(m, current())?;
    if let Some(code) = m.devices[device].sticky {
        return Err(code);
    }
    f(m, device)?;
    // What ran inside the call may have failed.
    m.devices[device].sticky.map_or(Ok(()), Err)
}

/// Runs a call in the current context: gives its device, and its sticky error if it has one. Calls that are unsafe
/// while a stream is being captured end here when one is.
pub(super) fn in_context(name: &'static str, f: impl FnOnce(&mut Machine, usize) -> Outcome) -> i32 {
    call(name, |m| {
        checked(m, |m, device| {
            if m.is_capturing() && kind(name).1 {
                m.refuse_unsafe()?;
            }
            f(m, device)
        })
    })
}

/// Runs a call that waits: `goal` says for what, `then` comes after it. Between two looks the machine is free for the
/// calls of other threads, which may have to put in what this one waits for.
pub(super) fn waiting(
    name: &'static str,
    goal: impl FnOnce(&mut Machine, usize) -> Result<Goal, i32>,
    then: impl FnOnce(&mut Machine, usize) -> Outcome,
) -> i32 {
    let mut wanted = Goal::Nothing;
    let code = in_context(name, |m, d| {
        wanted = goal(m, d)?;
        if wanted != Goal::Nothing {
            m.counts.piece(Piece::HostWait);
        }
        Ok(())
    });
    if code != codes::SUCCESS {
        return code;
    }
    let code = reach(wanted);
    if code != codes::SUCCESS {
        return code;
    }
    locked(|m| checked(m, then))
}

/// Lets the machine work until a goal is reached, in the current context if there is one.
pub(super) fn reach(goal: Goal) -> i32 {
    let begin = Instant::now();
    loop {
        let mut reached = false;
        let code = locked(|m| {
            reached = m.toward(goal);
            if !reached && begin.elapsed() > m.config.patience {
                m.give_up(goal);
            }
            device_of(m, current()).ok().and_then(|d| m.devices[d].sticky).map_or(Ok(()), Err)
        });
        if code != codes::SUCCESS || reached {
            return code;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
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
pub(super) fn stream_of(m: &Machine, device: usize, handle: *mut c_void) -> Result<u64, i32> {
    match handle as u64 {
        0..=2 => Ok(default_stream(device)),
        id => match m.streams.get(&id) {
            Some(s) if !s.destroyed && s.device == device => Ok(id),
            _ => Err(codes::INVALID_HANDLE),
        },
    }
}
