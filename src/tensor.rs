// SPDX-License-Identifier: MIT OR Apache-2.0
//! Zero-copy views of `[tokens, heads, dim]` tensors in memory that is borrowed.
//!
//! Frameworks store tensors in different ways: q, k and v fused in one buffer, heads before tokens, padded rows.
//! Copying them into one format would cost as much as an exchange, so a view has any token stride and any head stride,
//! in elements; only the innermost dimension must be contiguous. Everything is checked when a view is made, later only
//! indices: every view is within its memory and aligned, and no product of its shape and strides overflows 64 bits.
//!
//! A [`View`] may repeat memory (a stride of 0 broadcasts). A [`ViewMut`] may not: its (token, head) rows share no
//! element, in any nesting or interleaving. To get several mutable views of one buffer, split one view
//! ([`ViewMut::split_heads`] splits a fused dq, dk, dv), or use [`ViewMut::from_raw`].
//!
//! Lower layers use [`RawTensor`], which has no type and no lifetime. [`disjoint`] finds those that share memory. This
//! module has no kernels and no copies.
//!
//! ```
//! use cpattn::{View, ViewMut, disjoint};
//!
//! // q and k of 5 tokens with 2 heads of 4, fused as [tokens, 2, heads, dim]; their gradients fused alike.
//! let fused = vec![1f32; 5 * 2 * 2 * 4];
//! let both = View::new(&fused, 5, 4, 4)?;
//! let (q, k) = (both.heads_range(0..2), both.heads_range(2..4));
//! let mut gradients = vec![0f32; fused.len()];
//! let (mut dq, dk) = ViewMut::new(&mut gradients, 5, 4, 4)?.split_heads(2);
//!
//! disjoint(&[("q", q.raw(), false), ("k", k.raw(), false), ("dq", dq.raw(), true), ("dk", dk.raw(), true)])?;
//! dq.row_mut(3, 1).copy_from_slice(k.row(3, 1));
//! assert_eq!(gradients[3 * 16 + 4..][..8], [1., 1., 1., 1., 0., 0., 0., 0.]);
//! # Ok::<(), cpattn::Error>(())
//! ```

mod check;
mod device;
mod extent;
mod overlap;

#[cfg(feature = "std")]
pub(crate) use check::expect;
pub use device::{DeviceView, DeviceViewMut};
pub use overlap::disjoint;

use crate::{call::RawTensor, element::Element, error::Result};
use check::{check_raw, compact_strides, describe, element, elements, heads, refuse_cast, rows, start};
use core::{marker::PhantomData, ops::Range};

/// A `[tokens, heads, dim]` tensor that is read.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    raw: RawTensor,
    memory: PhantomData<&'a [T]>,
}

/// A `[tokens, heads, dim]` tensor that is written. No two of its (token, head) rows share an element.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    raw: RawTensor,
    memory: PhantomData<&'a mut [T]>,
}

/// Methods of both views.
macro_rules! accessors {
    () => {
        /// Rows.
        #[inline]
        pub const fn tokens(&self) -> usize {
            self.raw.tokens as usize
        }

        /// Heads.
        #[inline]
        pub const fn heads(&self) -> usize {
            self.raw.heads as usize
        }

        /// Innermost dimension.
        #[inline]
        pub const fn dim(&self) -> usize {
            self.raw.dim as usize
        }

        /// `[tokens, heads, dim]`.
        #[inline]
        pub const fn shape(&self) -> [usize; 3] {
            [self.tokens(), self.heads(), self.dim()]
        }

        /// Elements from one token to the next.
        #[inline]
        pub const fn token_stride(&self) -> usize {
            self.raw.token_stride as usize
        }

        /// Elements from one head to the next.
        #[inline]
        pub const fn head_stride(&self) -> usize {
            self.raw.head_stride as usize
        }

        /// Whether the tensor is compact and token-major, without gaps.
        #[inline]
        pub const fn is_compact(&self) -> bool {
            self.raw.is_compact()
        }

        /// The tensor without type and lifetime, for kernels. Reading or writing through it is as unsafe as through any
        /// pointer, and must respect this view's borrow.
        #[inline]
        pub const fn raw(&self) -> RawTensor {
            self.raw
        }
    };
}

impl<'a, T: Element> View<'a, T> {
    accessors!();

    /// A compact token-major tensor: element `[t, h, d]` is `data[(t · heads + h) · dim + d]`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) when `data` does not hold exactly `tokens · heads · dim` elements, or
    /// a size exceeds its limit (see [`View::strided`]).
    pub fn new(data: &'a [T], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        Self::over(data, [tokens, heads, dim], compact_strides(heads, dim)?, true)
    }

    /// A tensor of any strides: element `[t, h, d]` is `data[t · strides[0] + h · strides[1] + d]`.
    ///
    /// A run may ask for a compact k and v: see [`Options::pack_inputs`](crate::Options::pack_inputs).
    ///
    /// ```
    /// use cpattn::View;
    /// let (tokens, heads, kv_heads, dim) = (5, 4, 2, 8);
    /// // Heads first: [heads, tokens, dim].
    /// let data = vec![0f32; heads * tokens * dim];
    /// let q = View::strided(&data, [tokens, heads, dim], [dim, tokens * dim])?;
    /// // k and v of a fused projection: [tokens, (heads + 2 · kv_heads) · dim].
    /// let width = (heads + 2 * kv_heads) * dim;
    /// let fused = vec![0f32; tokens * width];
    /// let k = View::strided(&fused[heads * dim..], [tokens, kv_heads, dim], [width, dim])?;
    /// let v = View::strided(&fused[(heads + kv_heads) * dim..], [tokens, kv_heads, dim], [width, dim])?;
    /// assert!(!q.is_compact() && !k.is_compact() && v.row(4, 1).len() == dim);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) when the last element lies beyond `data`; when heads or dim exceed 32
    /// bits; when `tokens · token_stride + heads · head_stride + dim`, or the number of elements, exceeds an i64 in
    /// bytes. Shapes without elements are legal over any data.
    pub fn strided(data: &'a [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        Self::over(data, shape, strides, false)
    }

    /// A `[heads, tokens]` buffer, the layout of lse, seen as `[tokens, heads, 1]`: element `[t, h, 0]` is
    /// `data[h · tokens + t]`.
    ///
    /// # Errors
    ///
    /// As [`View::new`].
    pub fn head_major(data: &'a [T], tokens: usize, heads: usize) -> Result<Self> {
        Self::over(data, [tokens, heads, 1], [1, tokens], true)
    }

    /// A compact token-major tensor in bytes of the host's byte order; nothing is copied.
    ///
    /// # Errors
    ///
    /// When the bytes are not aligned to the element's size, or not a whole number of elements; as [`View::new`].
    pub fn from_bytes(bytes: &'a [u8], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        let (address, count) = (bytes.as_ptr().addr(), bytes.len());
        let data = bytemuck::try_cast_slice(bytes).map_err(|e| refuse_cast::<T>(e, address, count))?;
        Self::new(data, tokens, heads, dim)
    }

    /// A tensor whose memory the caller keeps valid.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) when the dtype is not `T`'s, an address is null or unaligned, a stride
    /// is negative, or the tensor leaves the address space.
    ///
    /// # Safety
    ///
    /// For `'a`, every row of the tensor must lie in one live allocation of initialised memory, on the host, that
    /// nothing writes.
    pub unsafe fn from_raw(raw: RawTensor) -> Result<Self> {
        check_raw::<T>(&raw)?;
        Ok(Self { raw, memory: PhantomData })
    }

    fn over(data: &'a [T], shape: [usize; 3], strides: [usize; 2], exact: bool) -> Result<Self> {
        let raw = describe::<T>(data.as_ptr().cast_mut(), data.len(), shape, strides, exact)?;
        Ok(Self { raw, memory: PhantomData })
    }

    /// The tokens of `range`.
    ///
    /// # Panics
    ///
    /// When the range does not lie within the tokens, like a slice.
    #[must_use]
    pub fn rows(&self, range: Range<usize>) -> Self {
        Self { raw: rows(&self.raw, range), memory: PhantomData }
    }

    /// The heads of `range`.
    ///
    /// # Panics
    ///
    /// When the range does not lie within the heads, like a slice.
    #[must_use]
    pub fn heads_range(&self, range: Range<usize>) -> Self {
        Self { raw: heads(&self.raw, range), memory: PhantomData }
    }

    /// The `dim` elements of a token and head.
    ///
    /// # Panics
    ///
    /// When there is no such token or head, like a slice.
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> &'a [T] {
        // SAFETY: `element` checks both indices, so these `dim` elements are a row of the view. Its constructor proved
        // them inside memory that is borrowed for 'a and not written meanwhile.
        unsafe { core::slice::from_raw_parts(element::<T>(&self.raw, token, head), self.dim()) }
    }

    /// All elements as one slice, if they are contiguous.
    pub fn as_slice(&self) -> Option<&'a [T]> {
        let count = elements(&self.raw, self.is_compact())?;
        // SAFETY: a compact view's rows lie end to end from its address on, all inside memory that is borrowed for 'a.
        Some(unsafe { core::slice::from_raw_parts(start(&self.raw), count) })
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    accessors!();

    /// As [`View::new`].
    ///
    /// # Errors
    ///
    /// As [`View::new`].
    pub fn new(data: &'a mut [T], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        Self::over(data, [tokens, heads, dim], compact_strides(heads, dim)?, true)
    }

    /// As [`View::strided`], for strides with which rows do not overlap. Tokens may be nested in heads or heads in
    /// tokens, or they may interleave.
    ///
    /// # Errors
    ///
    /// As [`View::strided`]; and when two rows share an element, or (with more than 65,536 tokens and as many heads
    /// whose strides do not nest) might.
    pub fn strided(data: &'a mut [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        Self::over(data, shape, strides, false)
    }

    /// As [`View::head_major`].
    ///
    /// # Errors
    ///
    /// As [`View::new`].
    pub fn head_major(data: &'a mut [T], tokens: usize, heads: usize) -> Result<Self> {
        Self::over(data, [tokens, heads, 1], [1, tokens], true)
    }

    /// As [`View::from_bytes`].
    ///
    /// # Errors
    ///
    /// As [`View::from_bytes`].
    pub fn from_bytes(bytes: &'a mut [u8], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        let (address, count) = (bytes.as_ptr().addr(), bytes.len());
        let data = bytemuck::try_cast_slice_mut(bytes).map_err(|e| refuse_cast::<T>(e, address, count))?;
        Self::new(data, tokens, heads, dim)
    }

    /// A tensor whose memory the caller keeps valid.
    ///
    /// # Errors
    ///
    /// As [`View::from_raw`] and [`ViewMut::strided`].
    ///
    /// # Safety
    ///
    /// For `'a`, every row of the tensor must lie in one live allocation of initialised memory, on the host, and its
    /// elements may be reached through this view alone. Memory between the rows may be used by others.
    pub unsafe fn from_raw(raw: RawTensor) -> Result<Self> {
        check_raw::<T>(&raw)?;
        overlap::refuse_within("", &raw)?;
        Ok(Self { raw, memory: PhantomData })
    }

    fn over(data: &'a mut [T], shape: [usize; 3], strides: [usize; 2], exact: bool) -> Result<Self> {
        let raw = describe::<T>(data.as_mut_ptr(), data.len(), shape, strides, exact)?;
        overlap::refuse_within("", &raw)?;
        Ok(Self { raw, memory: PhantomData })
    }

    /// The same tensor, read.
    ///
    /// ```compile_fail,E0502
    /// # use cpattn::ViewMut;
    /// let mut data = [0f32; 8];
    /// let mut view = ViewMut::new(&mut data, 2, 1, 4).unwrap();
    /// let read = view.as_view();
    /// view.fill(1.0);
    /// assert_eq!(read.row(0, 0)[0], 0.0);
    /// ```
    pub const fn as_view(&self) -> View<'_, T> {
        View { raw: self.raw, memory: PhantomData }
    }

    /// The same tensor with a shorter lifetime, so that a call may consume it.
    pub const fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { raw: self.raw, memory: PhantomData }
    }

    /// The tokens of `range`.
    ///
    /// # Panics
    ///
    /// When the range does not lie within the tokens, like a slice.
    #[must_use]
    pub fn rows(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        ViewMut { raw: rows(&self.raw, range), memory: PhantomData }
    }

    /// The heads of `range`.
    ///
    /// # Panics
    ///
    /// When the range does not lie within the heads, like a slice.
    #[must_use]
    pub fn heads_range(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        ViewMut { raw: heads(&self.raw, range), memory: PhantomData }
    }

    /// The tokens before `at`, and the tokens from `at` on.
    ///
    /// # Panics
    ///
    /// When `at` exceeds the tokens, like a slice.
    #[must_use]
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        // Rows share no element, so two sets of different rows do not either.
        let (first, second) = (rows(&self.raw, 0..at), rows(&self.raw, at..self.tokens()));
        (Self { raw: first, memory: PhantomData }, Self { raw: second, memory: PhantomData })
    }

    /// The heads before `at`, and the heads from `at` on.
    ///
    /// # Panics
    ///
    /// When `at` exceeds the heads, like a slice.
    #[must_use]
    pub fn split_heads(self, at: usize) -> (Self, Self) {
        let (first, second) = (heads(&self.raw, 0..at), heads(&self.raw, at..self.heads()));
        (Self { raw: first, memory: PhantomData }, Self { raw: second, memory: PhantomData })
    }

    /// The `dim` elements of a token and head, to read.
    ///
    /// # Panics
    ///
    /// When there is no such token or head, like a slice.
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> &[T] {
        self.as_view().row(token, head)
    }

    /// The `dim` elements of a token and head, to write.
    ///
    /// # Panics
    ///
    /// When there is no such token or head, like a slice.
    #[inline]
    pub fn row_mut(&mut self, token: usize, head: usize) -> &mut [T] {
        // SAFETY: as for `View::row`; the memory is borrowed mutably for 'a, this row shares no element with another
        // one of any view (views that were split hold different rows), and `&mut self` keeps this view's own away.
        unsafe { core::slice::from_raw_parts_mut(element::<T>(&self.raw, token, head), self.dim()) }
    }

    /// All elements as one slice, if they are contiguous.
    pub fn as_mut_slice(&mut self) -> Option<&mut [T]> {
        let count = elements(&self.raw, self.is_compact())?;
        // SAFETY: as for `View::as_slice`; without gaps, the span holds elements of this view only, and `&mut self`
        // keeps its other borrows away.
        Some(unsafe { core::slice::from_raw_parts_mut(start(&self.raw), count) })
    }

    /// Sets every element; memory between the rows is not changed.
    pub fn fill(&mut self, value: T) {
        for token in 0..self.tokens() {
            for head in 0..self.heads() {
                self.row_mut(token, head).fill(value);
            }
        }
    }
}
