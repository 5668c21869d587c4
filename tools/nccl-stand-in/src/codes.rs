// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results and element types by their numbers in `nccl.h`, and the text of the last error.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const UNHANDLED_CUDA_ERROR: c_int = 1;
pub(crate) const SYSTEM_ERROR: c_int = 2;
pub(crate) const INVALID_ARGUMENT: c_int = 4;
pub(crate) const INVALID_USAGE: c_int = 5;
pub(crate) const REMOTE_ERROR: c_int = 6;
pub(crate) const IN_PROGRESS: c_int = 7;

/// A result with what there is to say about it.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, why: impl Into<String>) -> Self {
        Self { code, why: why.into() }
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Keeps the text of a failure for `ncclGetLastError` and gives its code.
pub(crate) fn keep(failure: &Failure) -> c_int {
    // No text of ours has a zero byte; one of a foreign path might.
    LAST.set(CString::new(failure.why.replace('\0', " ")).unwrap_or_default());
    failure.code
}

/// The last error of this thread. The pointer is good until the next one.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

pub(crate) fn describe(code: c_int) -> &'static CStr {
    match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        3 => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    /// One byte, of either kind of 8-bit float.
    F8,
}

impl Type {
    pub(crate) fn new(number: c_int) -> Outcome<Self> {
        use Type::{Bf16, F8, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, F8, F8];
        let found = usize::try_from(number).ok().and_then(|n| all.get(n).copied());
        found.ok_or_else(|| Failure::new(INVALID_ARGUMENT, format!("datatype is {number}, expected one below 12")))
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}
