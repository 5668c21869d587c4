// SPDX-License-Identifier: MIT OR Apache-2.0
//! What C hands in: structs that begin with their size, arrays, flags, and places for results.
//!
//! The size is what lets programs and libraries of different ages meet. A struct that is longer than ours comes from a
//! later header; it is taken when all that we do not know is zero, which is what every INIT macro writes for "as before".

use core::mem::MaybeUninit;
use std::format;

use crate::error::{Error, Result};

/// The longest struct that is believed to be one.
const LONGEST: usize = 4096;

fn check<T>(name: &'static str, ptr: *const T) -> Result<()> {
    if ptr.is_null() {
        return Err(Error::invalid(name, "NULL", "an address"));
    }
    if !ptr.is_aligned() {
        return Err(Error::invalid(name, format!("{ptr:p}"), format!("a multiple of {}", align_of::<T>())));
    }
    Ok(())
}

/// Reads a struct whose first member is its size.
///
/// # Safety
/// `ptr` is null or misaligned, or valid for reads of the size that its first word gives, as long as that is believable.
/// `T` is `repr(C)`, begins with a `usize`, and takes any bytes.
pub(super) unsafe fn sized<T: Copy>(name: &'static str, ptr: *const T) -> Result<T> {
    check(name, ptr)?;
    // SAFETY: the header makes every such struct begin with its size.
    let found = unsafe { ptr.cast::<usize>().read() };
    let ours = size_of::<T>();
    if found < ours || found > LONGEST {
        return Err(Error::invalid(format!("{name}.struct_size"), found, format!("at least {ours}"))
            .hint("initialise the struct with the INIT macro of its name"));
    }
    // SAFETY: the struct has `found` bytes, by its own word.
    let rest = unsafe { core::slice::from_raw_parts(ptr.cast::<u8>().add(ours), found - ours) };
    if rest.iter().any(|&b| b != 0) {
        return Err(Error::unsupported(
            format!("a member of {name} beyond byte {ours}"),
            "this library is older than the header",
            "update the library, or leave the new members 0",
        ));
    }
    // SAFETY: `found ≥ ours` bytes are readable, and any bytes make a T.
    Ok(unsafe { ptr.read() })
}

/// Where a struct of results goes: its size is checked, its known part is written.
///
/// # Safety
/// As [`sized`], and valid for writes.
pub(super) unsafe fn write_sized<T: Copy>(name: &'static str, ptr: *mut T, value: T) -> Result<()> {
    // SAFETY: the caller's promise.
    let given = unsafe { sized(name, ptr.cast_const()) }?;
    let size = core::mem::size_of_val(&given);
    // SAFETY: `size_of::<T>()` bytes are writable. The size word stays as the caller wrote it.
    unsafe {
        let word = ptr.cast::<usize>().read();
        core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), ptr.cast::<u8>(), size);
        ptr.cast::<usize>().write(word);
    }
    Ok(())
}

/// An array.
///
/// # Safety
/// `ptr` is null or misaligned, or `count` elements are valid for reads as long as the slice lives.
pub(super) unsafe fn array<'a, T: Copy>(name: &'static str, ptr: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(name, ptr)?;
    fits::<T>(name, count)?;
    // SAFETY: non-null, aligned, of a size that exists; the rest is the caller's promise.
    Ok(unsafe { core::slice::from_raw_parts(ptr, count) })
}

/// An array to write; what it holds is not looked at.
///
/// # Safety
/// As [`array`], for writes, by nobody else.
pub(super) unsafe fn array_mut<'a, T: Copy>(
    name: &'static str,
    ptr: *mut T,
    count: usize,
) -> Result<&'a mut [MaybeUninit<T>]> {
    if count == 0 {
        return Ok(&mut []);
    }
    check(name, ptr)?;
    fits::<T>(name, count)?;
    // SAFETY: as in `array`; MaybeUninit asks nothing of the contents.
    Ok(unsafe { core::slice::from_raw_parts_mut(ptr.cast(), count) })
}

fn fits<T>(name: &'static str, count: usize) -> Result<()> {
    let most = isize::MAX as usize / size_of::<T>();
    if count > most {
        return Err(Error::invalid(format!("length of {name}"), count, format!("at most {most}")));
    }
    Ok(())
}

/// The place of one result.
///
/// # Safety
/// `ptr` is null or misaligned, or valid for a write.
pub(super) unsafe fn result<'a, T>(name: &'static str, ptr: *mut T) -> Result<&'a mut MaybeUninit<T>> {
    check(name, ptr.cast_const())?;
    // SAFETY: non-null and aligned; MaybeUninit asks nothing of the contents; the rest is the caller's promise.
    Ok(unsafe { &mut *ptr.cast() })
}

/// 0 or 1.
pub(super) fn flag(name: &'static str, value: i32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::invalid(name, value, "0 or 1")),
    }
}

/// A member that later versions may use.
pub(super) fn reserved(name: &'static str, zero: bool) -> Result<()> {
    if zero { Ok(()) } else { Err(Error::invalid(name, "set", "0")) }
}

/// One of a list of numbers with names.
pub(super) fn one_of<T: Copy>(name: &'static str, value: i32, list: &[T]) -> Result<T> {
    usize::try_from(value)
        .ok()
        .and_then(|i| list.get(i).copied())
        .ok_or_else(|| Error::invalid(name, value, format!("0 to {}", list.len() - 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Now {
        struct_size: usize,
        value: u64,
    }

    #[test]
    fn structs_of_other_ages() {
        let read = |words: &[u64]| {
            // SAFETY: the words are as long as the first of them says, or say something unbelievable.
            unsafe { sized("options", words.as_ptr().cast::<Now>()) }.map(|n| n.value)
        };
        assert_eq!(read(&[16, 7]).unwrap(), 7);
        assert_eq!(read(&[24, 7, 0]).unwrap(), 7);
        assert!(read(&[24, 7, 1]).unwrap_err().to_string().contains("older than the header"));
        assert!(read(&[8, 7]).unwrap_err().to_string().contains("struct_size is 8, expected at least 16"));
        assert!(read(&[u64::MAX, 7]).is_err() && read(&[0, 7]).is_err());
    }
}
