// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments from C: structs that begin with their size, arrays, flags, and pointers for results.
//!
//! The size makes programs and libraries of different versions compatible. A new member is added after all others,
//! never in former padding, and 0 gives the behaviour of earlier versions; every INIT macro writes 0. So a struct from
//! an earlier header, which is shorter than ours, is treated as if it ended with zeros. A struct from a later header,
//! which is longer, is accepted if all members that we do not know are zero.

use core::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
};

use cpattn::{Error, Result};

/// Structs with a larger size are refused.
const LONGEST: usize = 4096;

fn check<T>(name: &str, ptr: *const T) -> Result<()> {
    if ptr.is_null() {
        return Err(Error::invalid(name, "NULL", "an address"));
    }
    if !ptr.is_aligned() {
        return Err(Error::invalid(name, format!("{ptr:p}"), format!("a multiple of {}", align_of::<T>())));
    }
    Ok(())
}

/// A struct whose first member is its size.
///
/// # Safety
/// `repr(C)`, begins with a `usize`, and takes any bytes.
pub(super) unsafe trait Versioned: Copy {
    /// The size of the struct in the first header that had it.
    const FIRST: usize;
}

/// Declares such structs, each with its last member in the first header. Later members are not named here.
macro_rules! versioned {
    ($($name:ident through $last:ident;)+) => {$(
        // SAFETY: declared so, of integers, floats, pointers and optional functions, whose null is a value too.
        unsafe impl $crate::input::Versioned for $name {
            const FIRST: usize = {
                const fn size_of_member<T, M>(_: fn(&T) -> &M) -> usize {
                    size_of::<M>()
                }
                assert!(core::mem::offset_of!($name, struct_size) == 0);
                let end = core::mem::offset_of!($name, $last) + size_of_member(|x: &$name| &x.$last);
                end.next_multiple_of(align_of::<$name>())
            };
        }
    )+};
}

/// Reads a struct of this header, of an earlier or of a later one.
///
/// # Safety
/// `ptr` is null or misaligned, or valid for reads of the size that its first word gives, as long as that is
/// believable.
pub(super) unsafe fn sized<T: Versioned>(name: &str, ptr: *const T) -> Result<T> {
    check(name, ptr)?;
    // SAFETY: the struct begins with its size, which can be read.
    let found = unsafe { ptr.cast::<usize>().read() };
    let ours = size_of::<T>();
    if found < T::FIRST || found > LONGEST || !found.is_multiple_of(align_of::<T>()) {
        let expected =
            format!("a multiple of {} from {} to {LONGEST}, {ours} in this header", align_of::<T>(), T::FIRST);
        return Err(Error::invalid(format!("{name}.struct_size"), found, expected)
            .hint("initialise the struct with the INIT macro of its name"));
    }
    // SAFETY: the struct has `found` bytes, by its own word.
    let bytes = unsafe { core::slice::from_raw_parts(ptr.cast::<u8>(), found) };
    if bytes.iter().skip(ours).any(|&b| b != 0) {
        return Err(Error::unsupported(
            format!("a member of {name} beyond byte {ours}"),
            "this library is older than the header",
            "update the library, or leave the new members 0",
        ));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold the smaller number of bytes, and a value on the stack does not overlap the caller's
    // memory. Any bytes make a T, by its trait.
    Ok(unsafe {
        value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(ptr.cast(), found.min(ours));
        value.assume_init()
    })
}

/// Writes a struct of results: checks its size, and writes the members that both sides know.
///
/// # Safety
/// As [`sized`], and valid for writes.
pub(super) unsafe fn write_sized<T: Versioned>(name: &'static str, ptr: *mut T, value: T) -> Result<()> {
    // SAFETY: the contract of `sized` is part of this function's.
    unsafe { sized(name, ptr.cast_const()) }?;
    let word = size_of::<usize>();
    // SAFETY: the struct has the bytes of its first word, which `sized` has found to be at least the word itself. That
    // word stays as the caller wrote it.
    unsafe {
        let bytes = ptr.cast::<usize>().read().min(size_of::<T>());
        let (from, to) = ((&raw const value).cast::<u8>(), ptr.cast::<u8>());
        core::ptr::copy_nonoverlapping(from.add(word), to.add(word), bytes - word);
    }
    Ok(())
}

/// An array.
///
/// # Safety
/// `ptr` is null or misaligned, or `count` elements are valid for reads as long as the slice lives.
pub(super) unsafe fn array<'a, T: Copy>(name: &'static str, ptr: *const T, count: usize) -> Result<&'a [T]> {
    let ptr = elements(name, ptr, count)?;
    // SAFETY: non-null, aligned, of a size that exists (checked), so `count` elements are valid (the contract).
    Ok(unsafe { core::slice::from_raw_parts(ptr, count) })
}

/// An element of an array whose program gives the size of elements: such a struct may get members at its end.
///
/// # Safety
/// `repr(C)`, and takes any bytes.
pub(super) unsafe trait Element: Copy {
    /// The size of the element in the first header that gave its size.
    const FIRST: usize;
}

/// An array of elements of this header, of an earlier or of a later one: `size` is what its program calls the size of
/// an element, or 0 for [`Element::FIRST`]. Elements of another size are copied to `copies`.
///
/// # Safety
/// `ptr` is null or misaligned, or `count` elements of `size` bytes are valid for reads as long as the slice lives.
pub(super) unsafe fn sized_array<'a, T: Element>(
    name: &'static str, ptr: *const T, count: usize, (size_name, size): (&'static str, usize), copies: &'a mut Vec<T>,
) -> Result<&'a [T]> {
    let (ours, align) = (size_of::<T>(), align_of::<T>());
    let size = if size == 0 { T::FIRST } else { size };
    if size < T::FIRST || size > LONGEST || !size.is_multiple_of(align) {
        let expected = format!("a multiple of {align} from {} to {LONGEST}, {ours} in this header", T::FIRST);
        return Err(
            Error::invalid(size_name, size, expected).hint("initialise the struct with the INIT macro of its name")
        );
    }
    if size == ours || count == 0 {
        // SAFETY: elements of our own size; the contract of `array` is part of this function's.
        return unsafe { array(name, ptr, count) };
    }
    check(name, ptr)?;
    let most = isize::MAX as usize / size;
    if count > most {
        return Err(Error::invalid(format!("length of {name}"), count, format!("at most {most}")));
    }
    // SAFETY: not null (checked), of a size that exists (checked), so `count` elements of `size` bytes are valid (the
    // contract).
    let bytes = unsafe { core::slice::from_raw_parts(ptr.cast::<u8>(), count * size) };
    copies.clear();
    copies.reserve(count);
    for element in bytes.chunks_exact(size) {
        if element.iter().skip(ours).any(|&b| b != 0) {
            return Err(Error::unsupported(
                format!("a member of {name} beyond byte {ours}"),
                "this library is older than the header",
                "update the library, or leave the new members 0",
            ));
        }
        let mut value = MaybeUninit::<T>::zeroed();
        let known = &element[..size.min(ours)];
        // SAFETY: both sides hold the smaller number of bytes, and a value on the stack does not overlap the caller's
        // memory. Any bytes make a T, by its trait.
        copies.push(unsafe {
            value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(known.as_ptr(), known.len());
            value.assume_init()
        });
    }
    Ok(copies)
}

/// An array to write; its content is not read.
///
/// # Safety
/// As [`array`], for writes, by nothing else.
pub(super) unsafe fn array_mut<'a, T: Copy>(
    name: &'static str, ptr: *mut T, count: usize,
) -> Result<&'a mut [MaybeUninit<T>]> {
    let ptr = elements(name, ptr, count)?.cast_mut();
    // SAFETY: as in `array`; MaybeUninit asks nothing of the contents.
    Ok(unsafe { core::slice::from_raw_parts_mut(ptr.cast(), count) })
}

/// The address of an array, which an empty one need not have.
fn elements<T>(name: &'static str, ptr: *const T, count: usize) -> Result<*const T> {
    if count == 0 {
        return Ok(core::ptr::dangling());
    }
    check(name, ptr)?;
    let most = isize::MAX as usize / size_of::<T>();
    if count > most {
        return Err(Error::invalid(format!("length of {name}"), count, format!("at most {most}")));
    }
    Ok(ptr)
}

/// A text that ends with a 0.
///
/// # Safety
/// `ptr` is null, or a text that ends with a 0 and lives as long as the result.
pub(super) unsafe fn text<'a>(name: &'static str, ptr: *const c_char) -> Result<&'a str> {
    check(name, ptr)?;
    // SAFETY: not null (checked above), so a text that ends with a 0 (the contract).
    let bytes = unsafe { CStr::from_ptr(ptr) };
    bytes.to_str().map_err(|e| Error::invalid(name, format!("not UTF-8 at byte {}", e.valid_up_to()), "text in UTF-8"))
}

/// The place of one result.
///
/// # Safety
/// `ptr` is null or misaligned, or valid for a write.
pub(super) unsafe fn result<'a, T>(name: &'static str, ptr: *mut T) -> Result<&'a mut MaybeUninit<T>> {
    check(name, ptr.cast_const())?;
    // SAFETY: non-null and aligned (checked above), so valid for a write (the contract); MaybeUninit has no invalid
    // contents.
    Ok(unsafe { &mut *ptr.cast() })
}

/// Writes a text and a 0. If the room is too small, the text is cut between two characters. `needed` gets the size of
/// the whole text and its 0.
pub(super) fn write_text(said: &str, text: &mut [MaybeUninit<u8>], needed: &mut MaybeUninit<usize>) {
    needed.write(said.len() + 1);
    if let Some(room) = text.len().checked_sub(1) {
        let mut n = room.min(said.len());
        while !said.is_char_boundary(n) {
            n -= 1;
        }
        for (to, &from) in text.iter_mut().zip(&said.as_bytes()[..n]) {
            to.write(from);
        }
        text[n].write(0);
    }
}

/// The error with another name for the argument that it refuses.
pub(super) fn renamed(error: Error, new: &str) -> Error {
    renamed_by(error, |_| new.into())
}

/// The error with the argument that it refuses named as the member of a struct.
pub(super) fn member(error: Error, of: &str) -> Error {
    renamed_by(error, |argument| format!("{of}.{argument}"))
}

/// The error with the name that `new` gives to the argument that it refuses.
pub(super) fn renamed_by(mut error: Error, new: impl FnOnce(&str) -> String) -> Error {
    if let Error::Invalid { argument, .. } = &mut error {
        *argument = new(argument);
    }
    error
}

/// A flag: 0 or 1.
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

/// The value of the constant with this number. The constants are numbered from 0, in the order of `list`.
pub(super) fn one_of<T: Copy>(name: &'static str, value: i32, list: &[(&'static str, T)]) -> Result<T> {
    usize::try_from(value)
        .ok()
        .and_then(|i| list.get(i))
        .map(|&(_, value)| value)
        .ok_or_else(|| not_one_of(name, value, list.iter().map(|&(constant, _)| constant)))
}

/// The refusal of a number that is none of these constants.
pub(super) fn not_one_of(
    name: impl Into<String>, value: i32, constants: impl DoubleEndedIterator<Item = &'static str>,
) -> Error {
    let mut constants = constants.rev();
    let last = constants.next().unwrap_or("");
    let others: Vec<_> = constants.rev().collect();
    Error::invalid(name, value, format!("{} or {last}", others.join(", ")))
}

/// Asserts that two structs have the same layout, given the pairs of fields.
macro_rules! same_layout {
    ($ours:ty, $theirs:ty: $($our:ident = $their:ident),*) => {
        const _: () = {
            assert!(size_of::<$ours>() == size_of::<$theirs>() && align_of::<$ours>() == align_of::<$theirs>());
            $(assert!(core::mem::offset_of!($ours, $our) == core::mem::offset_of!($theirs, $their));)*
        };
    };
}

/// Refuses a table that lacks one of the named functions.
macro_rules! functions {
    ($table:ident: $($function:ident),+) => {
        for (name, given) in [$((concat!("table.", stringify!($function)), $table.$function.is_some())),+] {
            if !given {
                return Err(Error::invalid(name, "NULL", "a function").into());
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Now {
        struct_size: usize,
        value: u64,
        added: u64,
    }
    versioned! { Now through value; }

    #[test]
    fn structs_of_other_ages() {
        let read = |words: &[u64]| {
            // SAFETY: the words are as long as the first of them says, or say something unbelievable.
            unsafe { sized("options", words.as_ptr().cast::<Now>()) }.map(|n| (n.value, n.added))
        };
        assert_eq!(read(&[24, 7, 5]).unwrap(), (7, 5));
        // Members that an earlier header lacks are 0, whatever memory follows the struct.
        assert_eq!(read(&[16, 7, 5]).unwrap(), (7, 0));
        assert_eq!(read(&[16, 7]).unwrap(), (7, 0));
        assert_eq!(read(&[32, 7, 5, 0]).unwrap(), (7, 5));
        assert!(read(&[32, 7, 5, 1]).unwrap_err().to_string().contains("older than the header"));
        let text = read(&[8, 7]).unwrap_err().to_string();
        assert!(
            text.contains("struct_size is 8, expected a multiple of 8 from 16 to 4096, 24 in this header"),
            "{text}"
        );
        for size in [0, 15, 17, 20, 28, 4104, u64::MAX] {
            let text = read(&[size, 7]).unwrap_err().to_string();
            let rule = "expected a multiple of 8 from 16 to 4096, 24 in this header";
            assert!(text.contains(&format!("struct_size is {size}, {rule}")), "{text}");
        }
    }

    // SAFETY: three numbers, of which the first header had two.
    unsafe impl Element for Now {
        const FIRST: usize = 16;
    }

    #[test]
    fn elements_of_other_ages() {
        let read = |words: &[u64], count, size| {
            let mut copies = Vec::new();
            // SAFETY: the words are as long as all elements together.
            let list = unsafe { sized_array("list", words.as_ptr().cast::<Now>(), count, ("size", size), &mut copies) };
            list.map(|list| list.iter().map(|n| (n.struct_size, n.value, n.added)).collect::<Vec<_>>())
        };
        assert_eq!(read(&[1, 2, 3, 4, 5, 6], 2, 24).unwrap(), [(1, 2, 3), (4, 5, 6)]);
        // An earlier header's elements are shorter, and so are those of a program that gives no size.
        assert_eq!(read(&[1, 2, 3, 4, 5, 6], 3, 16).unwrap(), [(1, 2, 0), (3, 4, 0), (5, 6, 0)]);
        assert_eq!(read(&[1, 2, 3, 4], 2, 0).unwrap(), [(1, 2, 0), (3, 4, 0)]);
        assert_eq!(read(&[1, 2, 3, 0, 4, 5, 6, 0], 2, 32).unwrap(), [(1, 2, 3), (4, 5, 6)]);
        let text = read(&[1, 2, 3, 0, 4, 5, 6, 7], 2, 32).unwrap_err().to_string();
        assert!(text.contains("a member of list beyond byte 24"), "{text}");
        for size in [8, 20, 4104, usize::MAX] {
            let text = read(&[1, 2, 3], 1, size).unwrap_err().to_string();
            let rule = "expected a multiple of 8 from 16 to 4096, 24 in this header";
            assert!(text.contains(&format!("size is {size}, {rule}")), "{text}");
        }
        assert!(read(&[1, 2, 3, 4], usize::MAX, 32).unwrap_err().to_string().contains("length of list"));
        assert_eq!(read(&[], 0, 32).unwrap(), []);
    }

    #[test]
    fn results_fill_what_the_caller_knows() {
        let value = Now { struct_size: 0, value: 7, added: 5 };
        let write = |mut words: [u64; 4]| {
            // SAFETY: the words are as long as the first of them says.
            unsafe { write_sized("info", words.as_mut_ptr().cast::<Now>(), value) }.map(|()| words)
        };
        assert_eq!(write([16, 1, 2, 3]).unwrap(), [16, 7, 2, 3]);
        assert_eq!(write([24, 1, 2, 3]).unwrap(), [24, 7, 5, 3]);
        assert_eq!(write([32, 1, 2, 0]).unwrap(), [32, 7, 5, 0]);
        assert!(write([8, 1, 2, 3]).is_err());
    }
}
