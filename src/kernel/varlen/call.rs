// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of a kernel: rectangles of packed rows, and tensors as slices of their element type.
//!
//! Slices, so that a kernel on the CPU needs no `unsafe`. A tensor's shape follows from the rectangles.

use half::{bf16, f16};

use crate::{
    element::{Dtype, Element},
    error::{Error, Result},
};

/// One call: sequences of packed rows, all with one pair of limits. Sequence `i` has rows `cu_seqlens_q[i]` to
/// `cu_seqlens_q[i + 1]` and keys `cu_seqlens_k[i]` to `cu_seqlens_k[i + 1]`, at least one of each.
///
/// With `sq` rows and `sk` keys, row `r` sees key `j` if `r + (sk − sq) − window_left ≤ j ≤ r + (sk − sq) +
/// window_right`; `None` is no limit. Causal is `(None, Some(0))`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rectangles<'a> {
    /// Where the rows of each sequence begin, and the number of all rows.
    pub cu_seqlens_q: &'a [i32],
    /// Where the keys of each sequence begin, and the number of all keys.
    pub cu_seqlens_k: &'a [i32],
    /// Keys that a row sees before the diagonal; `None` unless [`Honours::windows`](super::Honours::windows).
    pub window_left: Option<u32>,
    /// Keys that a row sees after the diagonal; 0 or `None` unless [`Honours::windows`](super::Honours::windows).
    pub window_right: Option<u32>,
    /// Multiplies q·k.
    pub scale: f64,
    /// `cap · tanh(s / cap)`; 0 for none.
    pub softcap: f64,
    /// ALiBi slopes, `[sequences, heads]`; empty for none. `slope · |distance|` is subtracted from a score.
    pub alibi_slopes: &'a [f32],
    /// With slopes, the distance `k_pos − q_pos` of the last key of each sequence from its last row; that of key `j`
    /// from row `r` is `corners[i] + (j − sk) − (r − sq)`. Empty without slopes.
    pub corners: &'a [i64],
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v; a divisor of `heads`.
    pub kv_heads: usize,
    /// Dim of q and k.
    pub head_dim: usize,
    /// Dim of v and o.
    pub value_dim: usize,
    /// Element type of q, k, v and d_o.
    pub dtype: Dtype,
}

impl Rectangles<'_> {
    /// The sequences.
    pub const fn len(&self) -> usize {
        self.cu_seqlens_q.len() - 1
    }

    /// Whether there is no sequence: never in a call.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows and the keys of a sequence.
    pub fn sequence(&self, i: usize) -> [core::ops::Range<usize>; 2] {
        [self.cu_seqlens_q, self.cu_seqlens_k].map(|cu| cu[i] as usize..cu[i + 1] as usize)
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "named as their element types")]
pub enum Elements<'a> {
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
    F64(&'a [f64]),
}

/// A tensor that is written.
#[derive(Debug)]
#[allow(missing_docs, reason = "named as their element types")]
pub enum ElementsMut<'a> {
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
}

/// The refusal of another type.
fn other(found: Dtype, wanted: Dtype) -> Error {
    Error::invalid("the type of a tensor", found, wanted)
}

impl<'a> Elements<'a> {
    /// The elements.
    ///
    /// # Errors
    /// Those of another type.
    pub fn slice<T: Element>(self) -> Result<&'a [T]> {
        if self.dtype() != T::DTYPE {
            return Err(other(self.dtype(), T::DTYPE));
        }
        Ok(match self {
            Self::F16(x) => bytemuck::cast_slice(x),
            Self::Bf16(x) => bytemuck::cast_slice(x),
            Self::F32(x) => bytemuck::cast_slice(x),
            Self::F64(x) => bytemuck::cast_slice(x),
        })
    }

    const fn dtype(&self) -> Dtype {
        match self {
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
        }
    }

    /// An element.
    pub(super) fn get(&self, i: usize) -> f64 {
        match self {
            Self::F16(x) => x[i].into(),
            Self::Bf16(x) => x[i].into(),
            Self::F32(x) => x[i].into(),
            Self::F64(x) => x[i],
        }
    }
}

impl<'a> ElementsMut<'a> {
    /// The elements.
    ///
    /// # Errors
    /// Those of another type.
    pub fn slice<T: Element>(self) -> Result<&'a mut [T]> {
        let dtype = match self {
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
        };
        if dtype != T::DTYPE {
            return Err(other(dtype, T::DTYPE));
        }
        Ok(match self {
            Self::F16(x) => bytemuck::cast_slice_mut(x),
            Self::Bf16(x) => bytemuck::cast_slice_mut(x),
            Self::F32(x) => bytemuck::cast_slice_mut(x),
            Self::F64(x) => bytemuck::cast_slice_mut(x),
        })
    }
}
