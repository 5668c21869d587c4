// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merges several partial results of the same rows at once, with the sinks: see [`MergeAll`].
//!
//! The lse of a row is the merge of all in the order given, in two words ([`merge`](super::merge)); the weight of a
//! part is `exp` of its lse less this one, computed in f64. So the parts are read once, nothing is allocated, and a
//! row's bits depend only on its parts and their order. A part whose lse is −∞ is not read.

use std::format;

use super::{
    check,
    merge::{LogSumExp, sinks_of, weights},
};
use crate::{
    call::{MergeAll, RawTensor},
    element::{Accumulator, Dtype, Element},
    error::{Error, Result},
};

/// Elements of o that are summed together; their sums are on the stack.
const TOGETHER: usize = 64;

/// Merges the parts of a call on the CPU.
///
/// # Errors
/// [`Error::Invalid`] when shapes or types differ; nothing was written then.
///
/// # Safety
/// Every element of the tensors must be valid for reads, those of `o` and `lse` for writes, on this thread alone; `o`
/// and `lse` overlap nothing else.
pub(crate) unsafe fn merge_all(call: &MergeAll<'_>) -> Result<()> {
    check_parts(call)?;
    // SAFETY: shapes and types agree (checked above); the elements are valid, and o and lse apart (the contract).
    unsafe {
        match (call.o_parts[0].dtype, call.o.dtype) {
            (Dtype::F64, Dtype::F64) => rows::<f64, f64>(call),
            (Dtype::F32, Dtype::F32) => rows::<f32, f32>(call),
            (Dtype::F32, Dtype::F16) => rows::<f32, half::f16>(call),
            (Dtype::F32, Dtype::Bf16) => rows::<f32, half::bf16>(call),
            (Dtype::F16, Dtype::F32) => rows::<half::f16, f32>(call),
            (Dtype::F16, Dtype::F16) => rows::<half::f16, half::f16>(call),
            (Dtype::F16, Dtype::Bf16) => rows::<half::f16, half::bf16>(call),
            (Dtype::Bf16, Dtype::F32) => rows::<half::bf16, f32>(call),
            (Dtype::Bf16, Dtype::F16) => rows::<half::bf16, half::f16>(call),
            (Dtype::Bf16, Dtype::Bf16) => rows::<half::bf16, half::bf16>(call),
            (partial, of) => unreachable!("parts of {partial} for {of} passed"),
        }
    }
    Ok(())
}

/// Refuses a call whose shapes or types differ.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn check_parts(call: &MergeAll<'_>) -> Result<()> {
    let accumulator = call.o.dtype.accumulator();
    if call.o_parts.is_empty() || call.o_parts.len() != call.lse_parts.len() {
        let found = format!("{} of o, {} of lse", call.o_parts.len(), call.lse_parts.len());
        return Err(Error::invalid("parts", found, "as many of o as of lse, and at least 1"));
    }
    let lse = RawTensor { dim: 1, ..call.o };
    let partial = call.o_parts[0].dtype;
    let of_o = call.o_parts.iter().map(|t| ("o_parts", t, &call.o, partial));
    let of_lse = call.lse_parts.iter().map(|t| ("lse_parts", t, &lse, accumulator));
    for (name, t, like, dtype) in of_o.chain(of_lse).chain([("lse", &call.lse, &lse, accumulator)]) {
        check::same_shape(|| name.into(), t, like)?;
        if t.dtype != dtype {
            return Err(Error::invalid(format!("{name}.dtype"), t.dtype, dtype));
        }
    }
    if partial.accumulator() != accumulator {
        return Err(Error::invalid("o_parts.dtype", partial, format!("of {}'s accumulator", call.o.dtype)));
    }
    check::sinks(&call.sinks, call.o.heads)
}

/// # Safety
/// As [`merge_all`], with parts of type `P`, o of type `T`, and shapes in agreement.
unsafe fn rows<P: Element, T: Element<Acc = P::Acc>>(call: &MergeAll<'_>) {
    let at = |x: &RawTensor, t: u64, h: u32| x.rows(t, 1).heads(h, 1).ptr;
    for t in 0..call.o.tokens {
        for h in 0..call.o.heads {
            // SAFETY: `[t, h]` lies within the shapes, whose rows are contiguous (the contract).
            let load = |x: &RawTensor| unsafe { LogSumExp::load(at(x, t, h).cast::<P::Acc>(), 1) };
            let mut total = call.lse_parts.iter().fold(LogSumExp::NOTHING, |sum, part| weights(sum, load(part)).lse);
            if !call.sinks.is_none() {
                // SAFETY: a head of the sinks, which have the heads of o and are valid (the contract).
                total = weights(total, unsafe { sinks_of(&call.sinks, h) }).lse;
            }
            // SAFETY: as above, for writes.
            unsafe { total.store(at(&call.lse, t, h).cast::<P::Acc>(), 1) };
            let o = at(&call.o, t, h).cast::<T>();
            for begin in (0..call.o.dim as usize).step_by(TOGETHER) {
                let n = TOGETHER.min(call.o.dim as usize - begin);
                let mut sums = [P::Acc::ZERO; TOGETHER];
                for (part, lse) in call.o_parts.iter().zip(call.lse_parts) {
                    let Some(weight) = weight(load(lse), total) else { continue };
                    // SAFETY: as above; `begin..begin + n` lies within the row.
                    let row = unsafe { core::slice::from_raw_parts(at(part, t, h).cast::<P>().add(begin), n) };
                    for (sum, &x) in sums.iter_mut().zip(row) {
                        *sum = *sum + x.widen() * weight;
                    }
                }
                for (i, &sum) in sums[..n].iter().enumerate() {
                    // SAFETY: as above, for writes.
                    unsafe { *o.add(begin + i) = T::narrow(sum) };
                }
            }
        }
    }
}

/// The weight of a part in the total; none for a part without keys.
#[inline]
fn weight<A: Accumulator>(part: LogSumExp<A>, total: LogSumExp<A>) -> Option<A> {
    if part.lse == A::NEG_INFINITY {
        return None;
    }
    // Word by word, as in `merge`: the first difference is exact where the two are close.
    let below = (part.lse.to_f64() - total.lse.to_f64()) + (part.rest.to_f64() - total.rest.to_f64());
    Some(A::from_f64(below.exp()))
}
