// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statuses, the last error, and the boundary.
//!
//! [`boundary!`] is the only way out of this module's functions: it catches panics, turns errors into a status and keeps
//! their text for the thread. A panic is a defect of the library, and says so.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CStr, CString, c_char},
    format,
    panic::{AssertUnwindSafe, catch_unwind},
    string::String,
};

use crate::error::Error;

pub const CPATTN_OK: i32 = 0;
pub const CPATTN_INVALID: i32 = 1;
pub const CPATTN_UNSUPPORTED: i32 = 2;
pub const CPATTN_DISAGREEMENT: i32 = 3;
pub const CPATTN_PEER: i32 = 4;
pub const CPATTN_SCHEDULE: i32 = 5;
pub const CPATTN_DEVICE: i32 = 6;
pub const CPATTN_INVALID_HANDLE: i32 = 7;
pub const CPATTN_BUSY: i32 = 8;
pub const CPATTN_PANIC: i32 = 9;

/// Why a call fails.
pub(super) enum Fail {
    /// The crate's own refusal.
    Error(Error),
    /// A status, and what there is to say.
    Text(i32, String),
    /// Not a live handle of its kind.
    Handle(String),
    /// Inside a call of another thread.
    Busy(&'static str),
}

pub(super) type Outcome<T = ()> = Result<T, Fail>;

impl From<Error> for Fail {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

std::thread_local! {
    /// `None` until the thread's first failure.
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

fn keep(text: String) {
    let mut bytes = text.into_bytes();
    bytes.retain(|&b| b != 0);
    // What has no zero byte is a C string.
    let text = CString::new(bytes).unwrap_or_default();
    // While the thread ends nothing reads it any more.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = Some(text);
        }
    });
}

pub(super) fn status_of(error: &Error) -> i32 {
    match error {
        Error::Invalid { .. } => CPATTN_INVALID,
        Error::Unsupported { .. } => CPATTN_UNSUPPORTED,
        Error::Disagreement { .. } => CPATTN_DISAGREEMENT,
        Error::Peer { .. } | Error::Peers { .. } => CPATTN_PEER,
        Error::Schedule { .. } => CPATTN_SCHEDULE,
        Error::Device { .. } => CPATTN_DEVICE,
    }
}

fn said(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a text")
}

/// Runs the body of an exported function; see [`boundary!`].
pub(super) fn guard(body: impl FnOnce() -> Outcome) -> i32 {
    // Unwind safety: what a body changes is behind a mutex whose poison is handled, or is the caller's output, which the
    // header leaves undefined after a failure.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CPATTN_OK,
        Ok(Err(Fail::Error(error))) => {
            keep(format!("{error}"));
            status_of(&error)
        }
        Ok(Err(Fail::Text(status, text))) => {
            keep(text);
            status
        }
        Ok(Err(Fail::Handle(text))) => {
            keep(text);
            CPATTN_INVALID_HANDLE
        }
        Ok(Err(Fail::Busy(kind))) => {
            keep(format!("{kind} is inside a call of another thread, expected one call at a time"));
            CPATTN_BUSY
        }
        Err(panic) => {
            keep(format!("cpattn has a defect, please report it: {}", said(&*panic)));
            CPATTN_PANIC
        }
    }
}

/// The panic boundary: evaluates a body of type `Outcome` and returns its status.
macro_rules! boundary {
    ($body:block) => {
        $crate::ffi::status::guard(|| -> $crate::ffi::status::Outcome { $body })
    };
}
pub(super) use boundary;

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_version() -> u32 {
    const fn number(text: &str) -> u32 {
        let (bytes, mut i, mut n) = (text.as_bytes(), 0, 0);
        while i < bytes.len() {
            n = n * 10 + (bytes[i] - b'0') as u32;
            i += 1;
        }
        n
    }
    const VERSION: u32 = number(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.try_borrow().ok().and_then(|text| text.as_ref().map(|text| text.as_ptr())));
    text.ok().flatten().unwrap_or(c"".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_status_name(status: i32) -> *const c_char {
    let name: &'static CStr = match status {
        CPATTN_OK => c"CPATTN_OK",
        CPATTN_INVALID => c"CPATTN_INVALID",
        CPATTN_UNSUPPORTED => c"CPATTN_UNSUPPORTED",
        CPATTN_DISAGREEMENT => c"CPATTN_DISAGREEMENT",
        CPATTN_PEER => c"CPATTN_PEER",
        CPATTN_SCHEDULE => c"CPATTN_SCHEDULE",
        CPATTN_DEVICE => c"CPATTN_DEVICE",
        CPATTN_INVALID_HANDLE => c"CPATTN_INVALID_HANDLE",
        CPATTN_BUSY => c"CPATTN_BUSY",
        CPATTN_PANIC => c"CPATTN_PANIC",
        _ => c"unknown status",
    };
    name.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_a_text() {
        let status = guard(|| panic!("on purpose"));
        assert_eq!(status, CPATTN_PANIC);
        // SAFETY: a C string that lives until the next failure of this thread.
        let text = unsafe { CStr::from_ptr(cpattn_last_error()) };
        assert!(text.to_str().unwrap().ends_with("please report it: on purpose"));
    }
}
