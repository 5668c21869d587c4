// SPDX-License-Identifier: MIT OR Apache-2.0
//! The part of NCCL that this crate calls: types, numbers and functions as `nccl.h` declares them.
//!
//! The library is opened when the first communicator is made or taken, by the name that its package and PyTorch's
//! wheels give it. If a framework of the same process has loaded it already, the loader returns that library. Codes are
//! integers, because a newer library may answer with one that no enumeration here would know.
//!
//! The functions are those of version 2.14, the first with `ncclCommInitRankConfig`, `ncclCommFinalize` and
//! communicators that do not block (NCCL's release notes; `ncclSend` and `ncclRecv` are older). The configuration also
//! has the layout of 2.14, and says so in its `size` and `version`; later libraries add defaults for members that it
//! lacks.

use crate::error::{Error, Result};
use core::ffi::{CStr, c_char, c_int, c_void};
use libloading::Library;
use std::{
    format,
    string::{String, ToString},
    sync::OnceLock,
    vec::Vec,
};

/// A communicator's handle.
pub(super) type Comm = *mut c_void;
/// A stream's handle, which is the driver's.
pub(super) type RawStream = *mut c_void;

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;
pub(super) const UINT8: c_int = 1;

/// The oldest version that has all of this, as `ncclGetVersion` gives it.
const NEEDED: c_int = 21400;
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawId(pub(super) [u8; 128]);

/// `ncclConfig_t` of 2.14.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// The configuration of a communicator whose calls never wait for other ranks.
    pub(super) fn non_blocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: NEEDED as u32, blocking: 0 }
    }
}

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        /// The library and its functions.
        #[allow(non_snake_case, reason = "the names are the library's")]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($arg: $type),*) -> $result,)*
            /// Keeps the functions where they are.
            _library: Library,
        }

        #[allow(non_snake_case, reason = "the names are the library's")]
        fn find(file: &'static str, library: Library) -> Result<Api> {
            $(
                // SAFETY: each line of the list is the prototype of `nccl.h`; the table keeps the library open.
                let $name = *unsafe { library.get(stringify!($name)) }.map_err(|_| lacks(file, stringify!($name)))?;
            )*
            Ok(Api { $($name,)* _library: library })
        }
    };
}

functions! {
    ncclGetVersion(version: *mut c_int) -> c_int;
    ncclGetUniqueId(id: *mut RawId) -> c_int;
    ncclCommInitRankConfig(comm: *mut Comm, world: c_int, id: RawId, rank: c_int, config: *const Config) -> c_int;
    ncclCommCount(comm: Comm, count: *mut c_int) -> c_int;
    ncclCommUserRank(comm: Comm, rank: *mut c_int) -> c_int;
    ncclCommCuDevice(comm: Comm, device: *mut c_int) -> c_int;
    ncclCommGetAsyncError(comm: Comm, state: *mut c_int) -> c_int;
    ncclCommFinalize(comm: Comm) -> c_int;
    ncclCommDestroy(comm: Comm) -> c_int;
    ncclCommAbort(comm: Comm) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
    ncclSend(from: *const c_void, count: usize, element: c_int, peer: c_int, comm: Comm, stream: RawStream) -> c_int;
    ncclRecv(to: *mut c_void, count: usize, element: c_int, peer: c_int, comm: Comm, stream: RawStream) -> c_int;
    ncclGetLastError(comm: Comm) -> *const c_char;
}

fn lacks(file: &str, name: &str) -> Error {
    Error::unsupported("nccl", format!("{file} has no {name}, which is called here"), NEWER)
}

fn open(names: &[&'static str]) -> Result<Api> {
    let mut tried = Vec::new();
    for &name in names {
        // SAFETY: asks the loader for NCCL by its fixed name; its constructors are NCCL's own.
        match unsafe { Library::new(name) } {
            Ok(library) => return checked(name, find(name, library)?),
            Err(error) => tried.push(format!("{name} ({error})")),
        }
    }
    let limit = format!("the loader does not find NCCL; tried {}", tried.join(" and "));
    Err(Error::unsupported("nccl", limit, "install NCCL 2.14 or later where the loader looks, or use transport peer"))
}

fn checked(file: &str, api: Api) -> Result<Api> {
    let mut version = 0;
    // SAFETY: a pointer to a local.
    api.check("ncclGetVersion", unsafe { (api.ncclGetVersion)(&raw mut version) })?;
    if version < NEEDED {
        let limit = format!("{file} is version {}, and 2.14 or later is needed", readable(version));
        return Err(Error::unsupported("nccl", limit, NEWER));
    }
    Ok(api)
}

const NEWER: &str = "install NCCL 2.14 or later, the first with communicators that do not block";

/// A version in dotted form. The code has the major version times 1,000 before 2.9, and times 10,000 since.
fn readable(version: c_int) -> String {
    let (major, rest) =
        if version < 10_000 { (version / 1000, version % 1000) } else { (version / 10_000, version % 10_000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// The meaning of a code, in the words of `nccl.h`.
pub(super) fn describe(code: c_int) -> &'static str {
    match code {
        0 => "no error",
        1 => "a CUDA call failed",
        2 => "a call to the system failed",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "a remote process exited, or a network error",
        7 => "in progress",
        _ => "a code this crate does not know",
    }
}

impl Api {
    /// The library of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there is none, or it is older than 2.14: with the names that were tried, or the
    /// version that was found and the required one.
    pub(super) fn get() -> Result<&'static Self> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let api = open(NAMES)?;
        // If two threads come at once, the second table equals the first, and its handle of the library is closed.
        Ok(API.get_or_init(|| api))
    }

    /// An error unless the library said success.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// As [`check`](Self::check), for a call that may continue in the background. Returns whether it does.
    pub(super) fn begun(&self, call: &'static str, code: c_int) -> Result<bool> {
        if code == IN_PROGRESS { Ok(true) } else { self.check(call, code).map(|()| false) }
    }

    /// The error of a call that failed, with the library's own words.
    pub(super) fn error(&self, call: &'static str, code: c_int) -> Error {
        // SAFETY: the argument is not used by the library, which says so; the text is its own and ends in a zero byte.
        let text = unsafe {
            let text = (self.ncclGetLastError)(core::ptr::null_mut());
            if text.is_null() { "".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        let message = match text.trim() {
            "" => describe(code).to_string(),
            more => format!("{}: {more}", describe(code)),
        };
        Error::Device { call, code: i64::from(code), message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_write_them() {
        assert_eq!(readable(2804), "2.8.4");
        assert_eq!(readable(21304), "2.13.4");
        assert_eq!(readable(22809), "2.28.9");
    }

    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    #[test]
    fn what_is_missing_is_named() {
        let text = |names| open(names).err().unwrap().to_string();
        let absent = text(&["libcpattn-is-not-there.so.2", "libcpattn-nor-this.so"]);
        for part in ["libcpattn-is-not-there.so.2 (", "libcpattn-nor-this.so (", "2.14"] {
            assert!(absent.contains(part), "{absent}");
        }
        let other = text(&["libc.so.6"]);
        assert!(other.contains("libc.so.6 has no ncclGetVersion"), "{other}");
    }
}
