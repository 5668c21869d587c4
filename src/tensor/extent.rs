// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address range of a tensor's elements: from the lowest address to the end of the highest.

use alloc::{format, string::String};
use core::ops::Range;

use crate::{
    call::RawTensor,
    error::{Error, Result},
};

/// Whether there is no element.
pub(super) const fn is_empty(t: &RawTensor) -> bool {
    t.tokens == 0 || t.heads == 0 || t.dim == 0
}

/// Bytes from the first element to the lowest one, and to the end of the highest one; `None` when the tensor is
/// larger than memory can be. Meaningless for a tensor without elements.
pub(super) fn reach(t: &RawTensor) -> Option<(i128, i128)> {
    let size = t.dtype.size() as i64;
    let mut low = 0i64;
    let mut high = i64::from(t.dim).checked_mul(size)?;
    for (count, stride) in [(t.tokens, t.token_stride), (u64::from(t.heads), t.head_stride)] {
        let steps = i64::try_from(count.saturating_sub(1)).ok()?;
        let bytes = steps.checked_mul(stride)?.checked_mul(size)?;
        if bytes < 0 {
            low = low.checked_add(bytes)?;
        } else {
            high = high.checked_add(bytes)?;
        }
    }
    high.checked_sub(low)?;
    Some((low.into(), high.into()))
}

/// The addresses from the lowest to the end of the highest element; `None` when they leave the address space.
pub(super) fn hull(t: &RawTensor) -> Option<Range<i128>> {
    if is_empty(t) {
        return Some(0..0);
    }
    let (low, high) = reach(t)?;
    let base = t.ptr.addr() as i128;
    (base + low >= 0 && base + high <= usize::MAX as i128).then_some(base + low..base + high)
}

/// `name.part`, or `part` of an argument without a name.
pub(super) fn part(name: &str, part: &str) -> String {
    if name.is_empty() { String::from(part) } else { format!("{name}.{part}") }
}

/// The dimension of a stride, in words.
pub(super) fn name_of(stride: &str) -> &'static str {
    if stride == "token_stride" { "tokens" } else { "heads" }
}

/// Refuses elements at null, and tensors that leave the address space.
pub(super) fn refuse_unaddressable(name: &str, t: &RawTensor) -> Result<()> {
    if is_empty(t) {
        return Ok(());
    }
    if t.ptr.is_null() {
        let found = format!("null with shape [{}, {}, {}]", t.tokens, t.heads, t.dim);
        return Err(Error::invalid(part(name, "ptr"), found, "the address of element [0, 0, 0]"));
    }
    if hull(t).is_none() {
        // The error names the stride that reaches further.
        let span = |count: u64, stride: i64| u128::from(count - 1) * u128::from(stride.unsigned_abs());
        let heads = u64::from(t.heads);
        let (stride_name, stride, count) = if span(heads, t.head_stride) > span(t.tokens, t.token_stride) {
            ("head_stride", t.head_stride, heads)
        } else {
            ("token_stride", t.token_stride, t.tokens)
        };
        let found = format!("{stride} for {count} {}", name_of(stride_name));
        return Err(Error::invalid(part(name, stride_name), found, "a stride that stays within the address space")
            .hint("strides are counted in elements, not in bytes"));
    }
    Ok(())
}
