// SPDX-License-Identifier: MIT OR Apache-2.0
//! The checks of every view when it is made, and of every tensor argument of a public call.
//!
//! A tensor by itself can have two faults: it reaches beyond its memory, or its numbers do not fit. Both are found
//! here, once, so that later code need not check offsets: one past the end of every dimension, in bytes, fits an i64.
//! This also holds for tensors without elements, because they have sub-views like any other.
//!
//! A name is empty in the constructors of views, where the arguments are the parameters themselves, and an argument of
//! the call (`k`) in [`expect`]. The memory itself is not accessed here.

use super::extent::{is_empty, name_of, part, refuse_unaddressable};
use crate::{
    call::RawTensor,
    element::{Dtype, Element},
    error::{Error, Result},
};
use alloc::format;
use bytemuck::PodCastError;
use core::ops::Range;

/// Checks an argument of a call: dtype, shape, an address that is neither null nor unaligned when there are elements,
/// and strides that stay within the address space. `innermost` is the word for the last dimension. Strides are not
/// otherwise restricted; for written tensors, [`disjoint`](super::disjoint) refuses strides that make a tensor overlap
/// itself.
///
/// # Errors
/// [`Error::Invalid`] naming the part (`k.dtype`, `k.tokens`, `k.heads`, `k.head_dim`, …), its value and the one
/// expected.
#[cfg_attr(not(feature = "std"), allow(dead_code, reason = "shifts and runs need std"))]
pub(crate) fn expect(
    name: &'static str,
    t: &RawTensor,
    dtype: Dtype,
    shape: [usize; 3],
    innermost: &'static str,
) -> Result<()> {
    if t.dtype != dtype {
        return Err(Error::invalid(part(name, "dtype"), t.dtype, dtype));
    }
    let found = [t.tokens, u64::from(t.heads), u64::from(t.dim)];
    for ((what, found), expected) in ["tokens", "heads", innermost].into_iter().zip(found).zip(shape) {
        if found != expected as u64 {
            return Err(Error::invalid(part(name, what), found, expected));
        }
    }
    refuse_unaddressable(name, t)?;
    refuse_unaligned(name, t)
}

/// Describes a tensor over `len` elements at `ptr`, or refuses it with an error.
pub(super) fn describe<T: Element>(
    ptr: *mut T,
    len: usize,
    shape: [usize; 3],
    strides: [usize; 2],
    exact: bool,
) -> Result<RawTensor> {
    let [tokens, heads, dim] = shape;
    let [token_stride, head_stride] = strides;
    let narrow = |name: &str, value: usize| {
        u32::try_from(value).map_err(|_| Error::invalid(name, value, format!("at most {}", u32::MAX)))
    };
    let (raw_heads, raw_dim) = (narrow("heads", heads)?, narrow("dim", dim)?);

    // One past the end in every dimension must be expressible in bytes: sub-views and kernels may then compute any
    // offset without a check.
    let limit = i64::MAX as usize / size_of::<T>();
    let span = |count: usize, stride: usize| count.checked_mul(stride).filter(|&s| s <= limit);
    let refuse = |name: &str, count: usize, stride: usize| {
        Error::invalid(name, format!("{stride} for {count} {}", name_of(name)), format!("a span of at most {limit}"))
            .hint("strides are counted in elements, not in bytes")
    };
    let by_token = span(tokens, token_stride).ok_or_else(|| refuse("token_stride", tokens, token_stride))?;
    let by_head = span(heads, head_stride).ok_or_else(|| refuse("head_stride", heads, head_stride))?;
    by_token
        .checked_add(by_head)
        .and_then(|s| s.checked_add(dim))
        .filter(|&s| s <= limit)
        .ok_or_else(|| refuse("token_stride", tokens, token_stride))?;
    let empty = tokens == 0 || heads == 0 || dim == 0;
    let count = if empty { Some(0) } else { span(tokens, heads).and_then(|c| span(c, dim)) };
    let Some(count) = count else {
        let expected = format!("at most {limit} elements with {heads} heads of {dim}");
        return Err(Error::invalid("tokens", tokens, expected));
    };

    if exact && len != count {
        return Err(Error::invalid(
            "data.len",
            len,
            format!("tokens × heads × dim = {tokens} × {heads} × {dim} = {count}"),
        ));
    }
    // Not larger than the sums above, so it cannot overflow.
    let needed = if empty { 0 } else { (tokens - 1) * token_stride + (heads - 1) * head_stride + dim };
    if needed > len {
        let expected = format!("at least {needed} for shape {shape:?} with strides {strides:?}");
        return Err(Error::invalid("data.len", len, expected));
    }
    Ok(RawTensor {
        ptr: ptr.cast(),
        token_stride: token_stride as i64,
        head_stride: head_stride as i64,
        tokens: tokens as u64,
        heads: raw_heads,
        dim: raw_dim,
        dtype: T::DTYPE,
    })
}

/// Bytes that are not a slice of elements.
pub(super) fn refuse_cast<T: Element>(error: PodCastError, address: usize, count: usize) -> Error {
    let (size, dtype) = (size_of::<T>(), T::DTYPE);
    match error {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => {
            Error::invalid("bytes.ptr", format!("{address:#x}"), format!("a multiple of {size}, the size of {dtype}"))
                .hint("copy the bytes into aligned memory, or place the tensor at an aligned offset")
        }
        _ => Error::invalid("bytes.len", count, format!("a multiple of {size}, the size of {dtype}")),
    }
}

pub(super) fn compact_strides(heads: usize, dim: usize) -> Result<[usize; 2]> {
    let token_stride = heads
        .checked_mul(dim)
        .ok_or_else(|| Error::invalid("heads", heads, format!("at most {}", usize::MAX / dim.max(1))))?;
    Ok([token_stride, dim])
}

/// Describes a tensor at an address that the caller vouches for, or refuses it with an error.
pub(super) fn describe_at<T: Element>(ptr: *mut T, shape: [usize; 3], strides: [usize; 2]) -> Result<RawTensor> {
    let raw = describe::<T>(ptr, usize::MAX, shape, strides, false)?;
    refuse_unaddressable("", &raw)?;
    refuse_unaligned("", &raw)?;
    Ok(raw)
}

/// Checks a tensor description from outside for the properties that `describe` guarantees.
pub(super) fn check_raw<T: Element>(t: &RawTensor) -> Result<()> {
    if t.dtype != T::DTYPE {
        return Err(Error::invalid("dtype", t.dtype, T::DTYPE));
    }
    for (name, stride) in [("token_stride", t.token_stride), ("head_stride", t.head_stride)] {
        if stride < 0 {
            return Err(Error::invalid(name, stride, "at least 0").hint("reverse the order of the rows when copying"));
        }
    }
    // On a 32-bit host a broadcast could count further than an index can.
    let tokens =
        usize::try_from(t.tokens).map_err(|_| Error::invalid("tokens", t.tokens, format!("at most {}", usize::MAX)))?;
    let shape = [tokens, t.heads as usize, t.dim as usize];
    let strides = [t.token_stride as usize, t.head_stride as usize];
    describe_at::<T>(t.ptr.cast(), shape, strides).map(drop)
}

fn refuse_unaligned(name: &str, t: &RawTensor) -> Result<()> {
    let (address, size) = (t.ptr.addr(), t.dtype.size());
    if is_empty(t) || address.is_multiple_of(size) {
        return Ok(());
    }
    let expected = format!("a multiple of {size}, the size of {}", t.dtype);
    Err(Error::invalid(part(name, "ptr"), format!("{address:#x}"), expected).hint("copy into aligned memory"))
}

pub(super) fn rows(t: &RawTensor, range: Range<usize>) -> RawTensor {
    let all = t.tokens as usize;
    assert!(range.start <= range.end && range.end <= all, "rows {range:?} of {all}");
    t.rows(range.start as u64, (range.end - range.start) as u64)
}

pub(super) fn heads(t: &RawTensor, range: Range<usize>) -> RawTensor {
    let all = t.heads as usize;
    assert!(range.start <= range.end && range.end <= all, "heads {range:?} of {all}");
    t.heads(range.start as u32, (range.end - range.start) as u32)
}

/// The address of element `[token, head, 0]`; any aligned address when rows are empty.
#[inline]
pub(super) fn element<T>(t: &RawTensor, token: usize, head: usize) -> *mut T {
    assert!((token as u64) < t.tokens, "token {token} of {}", t.tokens);
    assert!((head as u64) < u64::from(t.heads), "head {head} of {}", t.heads);
    if t.dim == 0 {
        return core::ptr::dangling_mut();
    }
    t.ptr.cast::<T>().wrapping_add(token * t.token_stride as usize + head * t.head_stride as usize)
}

/// The address of the first element; any aligned address when there is none.
pub(super) fn start<T>(t: &RawTensor) -> *mut T {
    if is_empty(t) { core::ptr::dangling_mut() } else { t.ptr.cast() }
}

/// Elements of a compact tensor.
pub(super) fn elements(t: &RawTensor, compact: bool) -> Option<usize> {
    let count = if is_empty(t) { 0 } else { t.tokens as usize * t.heads as usize * t.dim as usize };
    compact.then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::View;
    use alloc::string::ToString;

    #[test]
    fn expectations_name_the_part() {
        let data = [0f32; 24];
        let raw = View::new(&data, 2, 3, 4).unwrap().raw();
        let check = |raw: &RawTensor, dtype, shape| expect("k", raw, dtype, shape, "head_dim");
        assert_eq!(check(&raw, Dtype::F32, [2, 3, 4]), Ok(()));
        let refuses = |raw: &RawTensor, dtype, shape, texts: [&str; 3]| {
            let text = check(raw, dtype, shape).unwrap_err().to_string();
            assert!(texts.iter().all(|part| text.contains(part)), "{text}");
        };
        refuses(&raw, Dtype::Bf16, [2, 3, 4], ["k.dtype", "f32", "bf16"]);
        refuses(&raw, Dtype::F32, [5, 3, 4], ["k.tokens", "2", "5"]);
        refuses(&raw, Dtype::F32, [2, 9, 4], ["k.heads", "3", "9"]);
        refuses(&raw, Dtype::F32, [2, 3, 8], ["k.head_dim", "4", "8"]);
        let here = |raw: RawTensor, texts| refuses(&raw, Dtype::F32, [2, 3, 4], texts);
        here(RawTensor { ptr: core::ptr::null_mut(), ..raw }, ["k.ptr", "null with shape [2, 3, 4]", "address"]);
        here(RawTensor { ptr: raw.ptr.wrapping_add(1), ..raw }, ["k.ptr", "0x", "a multiple of 4, the size of f32"]);
        let far = ["k.head_stride", "for 3 heads", "address space"];
        here(RawTensor { head_stride: i64::MIN, ..raw }, far);
        let far = ["k.token_stride", "for 2 tokens", "address space"];
        here(RawTensor { token_stride: -(raw.ptr.addr() as i64), ..raw }, far);
        assert_eq!(check(&RawTensor::NONE, Dtype::F32, [0, 0, 0]), Ok(()));
    }
}
