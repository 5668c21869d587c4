// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions of a shared library that is opened at run time.
//!
//! A program can have only one copy of a crate that binds the CUDA driver, with one CUDA version and one way to load
//! it, and another of its crates may need other ones. So this crate has its own bindings: [`functions!`] makes a table
//! of function pointers, which `load` fills once, and a function of the library's own name for each entry. A library or
//! a function that is missing is an error that names it; nothing here panics or aborts.

use crate::error::{Error, Result};
use alloc::format;
use alloc::string::String;
use libloading::Library;

/// The result of a call when `load` has not succeeded before it.
pub(super) const NOT_INITIALIZED: i32 = 3;
/// The result of an optional function that the library does not have.
pub(crate) const NOT_SUPPORTED: i32 = 801;

/// Declares the functions of a library, one per line, as its header does; all of them return a status.
///
/// If a `required` function is missing, `load` fails with its name; a function that only some builds call has a
/// `#[cfg]`. An `optional` function may be missing: calls of it then return [`NOT_SUPPORTED`].
macro_rules! functions {
    (
        $libraries:expr, $way_out:literal;
        required { $($(#[$if:meta])* $name:ident($($arg:ident: $type:ty),* $(,)?);)* }
        optional { $($new:ident($($new_arg:ident: $new_type:ty),* $(,)?);)* }
    ) => {
        #[allow(non_snake_case, reason = "the names are the library's")]
        struct Functions {
            $($(#[$if])* $name: unsafe extern "system" fn($($type),*) -> i32,)*
            $($new: Option<unsafe extern "system" fn($($new_type),*) -> i32>,)*
            /// Keeps the functions where they are.
            _library: libloading::Library,
        }

        static TABLE: std::sync::OnceLock<Functions> = std::sync::OnceLock::new();

        /// Opens the library and finds its functions, unless that was done before.
        pub(crate) fn load() -> $crate::error::Result<()> {
            use $crate::device::driver::table::{find, open};
            if TABLE.get().is_some() {
                return Ok(());
            }
            let (file, library) = open($libraries, $way_out)?;
            let table = Functions {
                // SAFETY: each line is the prototype of the library's header; the table keeps the library open.
                $($(#[$if])* $name: unsafe { find(&library, file, stringify!($name), $way_out) }?,)*
                // SAFETY: each line is the prototype of the library's header; the table keeps the library open.
                $($new: unsafe { find(&library, file, stringify!($new), $way_out) }.ok(),)*
                _library: library,
            };
            // If two threads come at once, the second table equals the first, and its handle of the library is closed.
            let _ = TABLE.set(table);
            Ok(())
        }

        $(
            $(#[$if])*
            #[allow(non_snake_case, reason = "the library's name")]
            /// # Safety
            /// The arguments are as the library documents them.
            pub(crate) unsafe fn $name($($arg: $type),*) -> i32 {
                match TABLE.get() {
                    // SAFETY: the pointer is valid, since statics are not dropped and this one holds the library open;
                    // the arguments are as the library documents them (the contract of this function).
                    Some(table) => unsafe { (table.$name)($($arg),*) },
                    None => $crate::device::driver::table::NOT_INITIALIZED,
                }
            }
        )*
        $(
            #[allow(non_snake_case, reason = "the library's name")]
            /// # Safety
            /// The arguments are as the library documents them.
            pub(crate) unsafe fn $new($($new_arg: $new_type),*) -> i32 {
                match TABLE.get().map(|table| table.$new) {
                    // SAFETY: as of the required functions.
                    Some(Some(function)) => unsafe { function($($new_arg),*) },
                    Some(None) => $crate::device::driver::table::NOT_SUPPORTED,
                    None => $crate::device::driver::table::NOT_INITIALIZED,
                }
            }
        )*
    };
}
pub(super) use functions;

/// The first of these libraries that can be opened, and its name.
pub(super) fn open(names: &[&'static str], way_out: &'static str) -> Result<(&'static str, Library)> {
    let mut why = None;
    for &name in names {
        // SAFETY: asks the loader for a library by its fixed name; its constructors are those of the driver that the
        // administrator of the machine installed.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok((name, library)),
            // The first name is the one that should be there.
            Err(error) => _ = why.get_or_insert((name, error)),
        }
    }
    let limit = why.map_or_else(
        || String::from("there is no CUDA driver for this system"),
        |(name, error)| format!("no CUDA driver is installed where the loader looks for {name} ({error})"),
    );
    Err(Error::unsupported("device", limit, way_out))
}

/// A function of the library.
///
/// # Safety
/// `F` is the type of a pointer to that function, and the library stays open while it is used.
pub(super) unsafe fn find<F: Copy>(
    library: &Library,
    file: &'static str,
    name: &'static str,
    way_out: &'static str,
) -> Result<F> {
    // SAFETY: the symbol is a function of type `F`, which is what `functions!` reads off the line that declares it.
    unsafe { library.get::<F>(name) }.map(|symbol| *symbol).map_err(|_| {
        Error::unsupported("device", format!("the CUDA driver ({file}) has no {name}, which is called here"), way_out)
    })
}

/// The macro on the C library, since a driver is not everywhere.
#[cfg(all(test, target_os = "linux", target_env = "gnu", not(miri)))]
mod tests {
    use super::{NOT_INITIALIZED, NOT_SUPPORTED};
    use alloc::string::ToString;

    const C: &[&str] = &["libcpattn-is-not-there.so.1", "libc.so.6"];

    mod whole {
        crate::device::driver::table::functions! {
            super::C, "install it";
            required { abs(x: i32); }
            optional { toupper(c: i32); cpattn_is_not_there(x: i32); }
        }
    }

    mod lacking {
        crate::device::driver::table::functions! {
            super::C, "install a newer one";
            required { abs(x: i32); cpattn_is_not_there(x: i32); }
            optional {}
        }
    }

    mod absent {
        crate::device::driver::table::functions! {
            &["libcpattn-is-not-there.so.1"], "install it";
            required { abs(x: i32); }
            optional {}
        }
    }

    #[test]
    fn a_call_finds_its_function_or_says_that_there_is_none() {
        // SAFETY: functions of integers.
        let call = || unsafe { [whole::abs(-4), whole::toupper(97), whole::cpattn_is_not_there(1)] };
        assert_eq!(call(), [NOT_INITIALIZED; 3]);
        whole::load().unwrap();
        whole::load().unwrap();
        assert_eq!(call(), [4, 65, NOT_SUPPORTED]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = lacking::load().unwrap_err().to_string();
        assert!(error.contains("libc.so.6") && error.contains("has no cpattn_is_not_there"), "{error}");
        assert!(error.ends_with("install a newer one"), "{error}");
        let error = absent::load().unwrap_err().to_string();
        assert!(
            error.contains("no CUDA driver is installed where the loader looks for libcpattn-is-not-there.so.1"),
            "{error}"
        );
        // SAFETY: functions of integers.
        let codes = unsafe { [lacking::abs(1), lacking::cpattn_is_not_there(1), absent::abs(1)] };
        assert_eq!(codes, [NOT_INITIALIZED; 3]);
    }
}
