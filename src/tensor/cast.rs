// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes of a file or of the network as elements.

use alloc::format;
use bytemuck::PodCastError;

use crate::{
    element::Element,
    error::{Error, Result},
};

/// The bytes as elements, in the host's byte order; nothing is copied.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) when the bytes are not aligned to the element's size, or not a whole
/// number of elements.
pub(super) fn cast<T: Element>(bytes: &[u8]) -> Result<&[T]> {
    let (address, count) = (bytes.as_ptr().addr(), bytes.len());
    bytemuck::try_cast_slice(bytes).map_err(|e| refuse_cast::<T>(e, address, count))
}

/// As [`cast`], to write.
///
/// # Errors
///
/// As [`cast`].
pub(super) fn cast_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let (address, count) = (bytes.as_ptr().addr(), bytes.len());
    bytemuck::try_cast_slice_mut(bytes).map_err(|e| refuse_cast::<T>(e, address, count))
}

fn refuse_cast<T: Element>(error: PodCastError, address: usize, count: usize) -> Error {
    let (size, dtype) = (size_of::<T>(), T::DTYPE);
    match error {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => {
            Error::invalid("bytes.ptr", format!("{address:#x}"), format!("a multiple of {size}, the size of {dtype}"))
                .hint("copy the bytes into aligned memory, or place the tensor at an aligned offset")
        }
        _ => Error::invalid("bytes.len", count, format!("a multiple of {size}, the size of {dtype}")),
    }
}
