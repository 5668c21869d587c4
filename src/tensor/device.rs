// SPDX-License-Identifier: MIT OR Apache-2.0
//! Views of `[tokens, heads, dim]` tensors in the memory of a device.
//!
//! As [`View`](super::View) and [`ViewMut`](super::ViewMut), with two differences: a view knows the device of its
//! memory, and has no access to rows, since the host cannot read them. Work on a device continues after the call that
//! enqueued it; the caller must keep the memory valid until that work is complete.

use core::marker::PhantomData;

use super::{check::describe_at, overlap};
use crate::{call::RawTensor, device::Device, element::Element, error::Result};

/// A `[tokens, heads, dim]` tensor on a device that is read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a, T> {
    raw: RawTensor,
    device: Device,
    memory: PhantomData<&'a [T]>,
}

/// A `[tokens, heads, dim]` tensor on a device that is written. No two of its (token, head) rows share an element.
#[derive(Debug)]
pub struct DeviceViewMut<'a, T> {
    raw: RawTensor,
    device: Device,
    memory: PhantomData<&'a mut [T]>,
}

/// Methods of both views.
macro_rules! accessors {
    () => {
        /// The device that its memory is on.
        pub const fn device(&self) -> Device {
            self.device
        }

        /// `[tokens, heads, dim]`.
        pub const fn shape(&self) -> [usize; 3] {
            [self.raw.tokens as usize, self.raw.heads as usize, self.raw.dim as usize]
        }

        /// Elements from one token to the next, and from one head to the next.
        pub const fn strides(&self) -> [usize; 2] {
            [self.raw.token_stride as usize, self.raw.head_stride as usize]
        }

        /// The tensor without type, device and lifetime, as kernels take it.
        pub const fn raw(&self) -> RawTensor {
            self.raw
        }
    };
}

impl<T: Element> DeviceView<'_, T> {
    accessors!();

    /// A tensor of `shape`, `[tokens, heads, dim]`, with these strides of tokens and heads, in elements; the innermost
    /// dimension is contiguous.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) when the address is null or unaligned, or the tensor leaves the
    /// address space.
    ///
    /// # Safety
    /// Until all work that uses the view is complete, every row is in one live allocation of `device`, and is not
    /// written.
    pub unsafe fn new(device: Device, ptr: *const T, shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        Ok(Self { raw: describe_at(ptr.cast_mut(), shape, strides)?, device, memory: PhantomData })
    }

    /// A compact token-major tensor.
    ///
    /// # Errors
    /// As [`DeviceView::new`].
    ///
    /// # Safety
    /// As [`DeviceView::new`].
    pub unsafe fn compact(device: Device, ptr: *const T, shape: [usize; 3]) -> Result<Self> {
        // SAFETY: as promised.
        unsafe { Self::new(device, ptr, shape, [shape[1].saturating_mul(shape[2]), shape[2]]) }
    }
}

impl<T: Element> DeviceViewMut<'_, T> {
    accessors!();

    /// As [`DeviceView::new`].
    ///
    /// # Errors
    /// As [`DeviceView::new`], and rows that share elements.
    ///
    /// # Safety
    /// Until all work that uses the view is complete, every row is in one live allocation of `device`, and its elements
    /// are accessed through this view only. Memory between the rows may be used by others.
    pub unsafe fn new(device: Device, ptr: *mut T, shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        let raw = describe_at(ptr, shape, strides)?;
        overlap::refuse_within("", &raw)?;
        Ok(Self { raw, device, memory: PhantomData })
    }

    /// A compact token-major tensor.
    ///
    /// # Errors
    /// As [`DeviceViewMut::new`].
    ///
    /// # Safety
    /// As [`DeviceViewMut::new`].
    pub unsafe fn compact(device: Device, ptr: *mut T, shape: [usize; 3]) -> Result<Self> {
        // SAFETY: as promised.
        unsafe { Self::new(device, ptr, shape, [shape[1].saturating_mul(shape[2]), shape[2]]) }
    }
}
