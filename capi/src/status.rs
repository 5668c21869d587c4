// SPDX-License-Identifier: MIT OR Apache-2.0
//! Statuses, the last error, and the boundary.
//!
//! [`boundary!`] is the only way out of this module's functions: it catches panics, turns errors into a status and
//! keeps their text for the thread. A panic is a bug of the library; its text says so.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CStr, CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

use cpattn::{Error, Fault};

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

/// Why a call fails: status, text, and the rank at fault.
pub(super) struct Fail {
    pub status: i32,
    pub text: String,
    pub peer: Option<usize>,
}

impl Fail {
    pub(super) fn new(status: i32, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), peer: None }
    }
}

pub(super) type Outcome<T = ()> = Result<T, Fail>;

impl From<Error> for Fail {
    fn from(error: Error) -> Self {
        Self { status: status_of(&error), text: error.to_string(), peer: error.peer() }
    }
}

thread_local! {
    /// The text of the thread's last failure and the rank that it names; `None` before the first.
    static LAST: RefCell<Option<(CString, i64)>> = const { RefCell::new(None) };
}

fn keep(text: String, peer: Option<usize>) {
    let mut bytes = text.into_bytes();
    bytes.retain(|&b| b != 0);
    // A text without a zero byte is a C string.
    let text = CString::new(bytes).unwrap_or_default();
    // While the thread ends, its last error cannot be read any more.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = Some((text, peer.map_or(-1, |rank| rank as i64)));
        }
    });
}

pub(super) fn status_of(error: &Error) -> i32 {
    match error {
        Error::Invalid { .. } => CPATTN_INVALID,
        Error::Unsupported { .. } => CPATTN_UNSUPPORTED,
        Error::Disagreement { .. } | Error::Peer { fault: Fault::Found { differ: true, .. }, .. } => {
            CPATTN_DISAGREEMENT
        }
        Error::Peer { .. } => CPATTN_PEER,
        Error::Schedule { .. } => CPATTN_SCHEDULE,
        Error::Device { .. } | Error::Kernel { .. } => CPATTN_DEVICE,
        // A new kind without a status here is a defect.
        _ => CPATTN_PANIC,
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
    // Unwind safety: a body changes only data behind a mutex whose poison is handled, and the caller's output, which
    // the header leaves undefined after a failure.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CPATTN_OK,
        Ok(Err(Fail { status, text, peer })) => {
            keep(text, peer);
            status
        }
        Err(panic) => {
            keep(format!("cpattn has a defect, please report it: {}", said(&*panic)), None);
            CPATTN_PANIC
        }
    }
}

/// The panic boundary: runs the body of an exported function, which may end early with `?` or `return`, and returns its
/// status.
macro_rules! boundary {
    ($body:block) => {
        $crate::status::guard(|| -> $crate::status::Outcome {
            let () = $body;
            Ok(())
        })
    };
}

/// Reads arguments of an exported function, each by an unsafe function: `given!(handle::borrow(plan), sized("args",
/// args))` gives both results as a tuple. The first refusal ends the body of [`boundary!`]. Their own arguments are
/// evaluated outside of the unsafe block.
macro_rules! given {
    (@call $($read:ident)::+, ($argument:expr $(, $rest:expr)*) $($value:ident)*) => {
        match $argument {
            value => given!(@call $($read)::+, ($($rest),*) $($value)* value),
        }
    };
    (@call $($read:ident)::+, () $($value:ident)*) => {
        // SAFETY: the header promises what these functions need: handles are NULL or live, structs are as long as their
        // first word says, arrays as long as their counts; results and tensors are memory of the caller's, streams are
        // the driver's.
        unsafe { $($read)::+($($value),*) }
    };
    ($($($read:ident)::+($($argument:expr),* $(,)?)),+ $(,)?) => {
        ($(given!(@call $($read)::+, ($($argument),*))?),+)
    };
}

/// The part of an exported function that needs a feature; a build without it refuses the function by its name. The
/// arguments in parentheses are those that nothing else uses.
macro_rules! with_feature {
    ($feature:literal, $function:ident, ($($unused:expr),*), $body:block) => {{
        #[cfg(feature = $feature)]
        $body
        #[cfg(not(feature = $feature))]
        {
            let _ = ($(&$unused),*);
            $crate::status::without::<()>($feature, stringify!($function))?;
        }
    }};
}

/// Refuses an option that needs a feature.
pub(super) fn without<T>(feature: &'static str, option: impl Into<String>) -> Result<T, Error> {
    let (limit, hint) = match feature {
        "cuda" => ("this build serves the CPU only", "build the library with the feature cuda: capi/build --cuda"),
        "nccl" => ("this build does not talk to NCCL", "build the library with the feature nccl: capi/build --cuda"),
        _ => ("this build has no MPI", "build the library with capi/build --features mpi"),
    };
    Err(Error::unsupported(option, limit, hint))
}

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_version() -> u32 {
    const fn number(text: &str) -> u32 {
        match u32::from_str_radix(text, 10) {
            Ok(n) => n,
            Err(_) => panic!("a version is a number"),
        }
    }
    const VERSION: u32 = number(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}

pub const CPATTN_FEATURE_KERNELS: u32 = 1;
pub const CPATTN_FEATURE_RAYON: u32 = 2;
pub const CPATTN_FEATURE_CUDA: u32 = 4;
pub const CPATTN_FEATURE_NCCL: u32 = 8;
pub const CPATTN_FEATURE_MPI: u32 = 16;

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_features() -> u32 {
    let features = [
        (cfg!(feature = "kernels"), CPATTN_FEATURE_KERNELS),
        (cfg!(feature = "rayon"), CPATTN_FEATURE_RAYON),
        (cfg!(feature = "cuda"), CPATTN_FEATURE_CUDA),
        (cfg!(feature = "nccl"), CPATTN_FEATURE_NCCL),
        (cfg!(feature = "mpi"), CPATTN_FEATURE_MPI),
    ];
    features.into_iter().filter(|feature| feature.0).map(|feature| feature.1).sum()
}

fn last<T>(part: impl FnOnce(&(CString, i64)) -> T) -> Option<T> {
    LAST.try_with(|last| last.try_borrow().ok().and_then(|last| last.as_ref().map(part))).ok().flatten()
}

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_last_error() -> *const c_char {
    last(|(text, _)| text.as_ptr()).unwrap_or(c"".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cpattn_last_error_peer() -> i64 {
    last(|&(_, peer)| peer).unwrap_or(-1)
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
