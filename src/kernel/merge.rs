// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merging two partial results of one row, and the sink.
//!
//! A partial result is `(o, lse)`: o normalised over the keys seen so far, lse their natural log-sum-exp. Two of them
//! merge exactly (up to rounding), in any order, because a softmax over a union is the mean of the softmaxes weighted
//! by `exp(lse)` (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, FlashAttention-2,
//! 2023). Three things go wrong when this is written carelessly, and are settled here once for every caller:
//!
//! - `−inf` on both sides means that neither saw a key: the result is `(0, −inf)`, not the NaN of `−inf − −inf`;
//! - a side that saw no key has no say, whatever bytes its o holds;
//! - a NaN is the caller's to see: it must come out as NaN, so nothing here compares it away.
//!
//! The weights of a row are computed in f64: it is one row's worth of work, and it keeps the error of a long chain of
//! merges at that of the rows themselves.

use crate::element::{Accumulator, Dtype};
use crate::error::{Error, Result};
use crate::kernel::RawTensor;

/// What a merge does to the two o, and the merged lse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights<A> {
    /// Multiplies the first o; `None` when it saw no key (its o is then not read).
    pub first: Option<A>,
    /// Multiplies the second o, likewise.
    pub second: Option<A>,
    /// Log-sum-exp of both.
    pub lse: A,
}

/// The weights of two partials with log-sum-exps `l1` and `l2`: `w_i = exp(l_i − m) / Σ exp(l_j − m)`, `m` their
/// maximum.
#[inline]
pub fn weights<A: Accumulator>(l1: A, l2: A) -> Weights<A> {
    match (l1 == A::NEG_INFINITY, l2 == A::NEG_INFINITY) {
        (true, true) => Weights { first: None, second: None, lse: A::NEG_INFINITY },
        (true, false) => Weights { first: None, second: Some(A::from_f64(1.0)), lse: l2 },
        (false, true) => Weights { first: Some(A::from_f64(1.0)), second: None, lse: l1 },
        (false, false) => {
            let (a, b) = (l1.to_f64(), l2.to_f64());
            // A NaN on either side fails or passes the comparison, and reaches the sum through one exp or the other.
            let m = if a > b { a } else { b };
            let (wa, wb) = ((a - m).exp(), (b - m).exp());
            let sum = wa + wb;
            Weights {
                first: Some(A::from_f64(wa / sum)),
                second: Some(A::from_f64(wb / sum)),
                lse: A::from_f64(m + sum.ln()),
            }
        }
    }
}

/// Merges `other` into `row` with the weights of [`weights`].
#[inline]
pub fn combine<A: Accumulator>(w: &Weights<A>, row: &mut [A], other: &[A]) {
    match (w.first, w.second) {
        (Some(a), Some(b)) => {
            for (x, &y) in row.iter_mut().zip(other) {
                *x = *x * a + y * b;
            }
        }
        (Some(_), None) => {}
        (None, Some(_)) => row.copy_from_slice(other),
        (None, None) => row.fill(A::ZERO),
    }
}

/// Applies a sink (a logit with no value behind it) to a row whose log-sum-exp is `lse`: the factor of its o, and the
/// new lse `logaddexp(lse, sink)`. A sink of `−inf` is none; a row that saw no key gets `(0, sink)`.
#[inline]
pub fn sink<A: Accumulator>(lse: A, sink: A) -> (A, A) {
    if sink == A::NEG_INFINITY {
        return (A::from_f64(1.0), lse);
    }
    if lse == A::NEG_INFINITY {
        return (A::ZERO, sink);
    }
    let (l, s) = (lse.to_f64(), sink.to_f64());
    let m = if l > s { l } else { s };
    let total = m + ((l - m).exp() + (s - m).exp()).ln();
    (A::from_f64((l - total).exp()), A::from_f64(total))
}

/// Merges the partial result (`other_o`, `other_lse`) into (`o`, `lse`), row by row.
///
/// o: `[tokens, heads, dim]`, lse: `[tokens, heads, 1]`, any token and head stride, all of the same accumulator's type
/// (f32 or f64). What is merged is normalised, as the running result of [`crate::kernel::Attend`] is.
///
/// # Errors
/// [`Error::Invalid`] when shapes or types differ; nothing was touched then.
///
/// # Safety
/// Every element of the four tensors must be valid for reads, those of `o` and `lse` for writes, on this thread alone;
/// `o` and `lse` overlap nothing else.
pub unsafe fn merge(o: &RawTensor, lse: &RawTensor, other_o: &RawTensor, other_lse: &RawTensor) -> Result<()> {
    let shape = |t: &RawTensor| (t.tokens, t.heads, t.dim);
    for (name, t, against, dim) in
        [("other_o", other_o, o, o.dim), ("lse", lse, o, 1), ("other_lse", other_lse, lse, 1)]
    {
        let expected = (against.tokens, against.heads, dim);
        if shape(t) != expected {
            return Err(Error::invalid(
                alloc::format!("{name} [tokens, heads, dim]"),
                alloc::format!("{:?}", shape(t)),
                alloc::format!("{expected:?}"),
            ));
        }
        if t.dtype != o.dtype {
            return Err(Error::invalid(alloc::format!("{name}.dtype"), t.dtype, o.dtype));
        }
    }
    match o.dtype {
        // SAFETY: shapes and types agree (checked above); memory is the caller's promise.
        Dtype::F32 => unsafe { rows::<f32>(o, lse, other_o, other_lse) },
        // SAFETY: as above.
        Dtype::F64 => unsafe { rows::<f64>(o, lse, other_o, other_lse) },
        other => return Err(Error::invalid("o.dtype", other, "f32 or f64: partial results are never rounded")),
    }
    Ok(())
}

/// # Safety
/// As [`merge`], with `A` the type of all four and their shapes in agreement.
unsafe fn rows<A: Accumulator>(o: &RawTensor, lse: &RawTensor, other_o: &RawTensor, other_lse: &RawTensor) {
    let dim = o.dim as usize;
    for t in 0..o.tokens {
        for h in 0..o.heads {
            // SAFETY: `[t, h]` lies within the shapes; rows are contiguous; the caller promises exclusive access to
            // `o` and `lse` and that they overlap nothing else.
            unsafe {
                let l = lse.rows(t, 1).heads(h, 1).ptr.cast::<A>();
                let w = weights(*l, *other_lse.rows(t, 1).heads(h, 1).ptr.cast::<A>());
                let row = core::slice::from_raw_parts_mut(o.rows(t, 1).heads(h, 1).ptr.cast::<A>(), dim);
                combine(&w, row, core::slice::from_raw_parts(other_o.rows(t, 1).heads(h, 1).ptr.cast::<A>(), dim));
                *l = w.lse;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEG: f32 = f32::NEG_INFINITY;

    #[test]
    fn two_halves_weigh_as_their_sums() {
        let w = weights(2f64.ln(), 6f64.ln());
        assert!((w.first.unwrap() - 0.25).abs() < 1e-15 && (w.second.unwrap() - 0.75).abs() < 1e-15);
        assert!((w.lse - 8f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn a_side_without_keys_has_no_say() {
        for (l1, l2, expected) in [(NEG, 1.5, [9.0, 8.0]), (1.5, NEG, [1.0, 2.0]), (NEG, NEG, [0.0, 0.0])] {
            let mut row = [1.0f32, 2.0];
            let w = weights(l1, l2);
            combine(&w, &mut row, &[9.0, 8.0]);
            assert_eq!(row, expected);
            assert_eq!(w.lse, if l1 == NEG { l2 } else { l1 });
        }
        let mut row = [f32::NAN];
        combine(&weights(NEG, NEG), &mut row, &[f32::NAN]);
        assert_eq!(row, [0.0]);
    }

    #[test]
    fn a_nan_stays_a_nan() {
        for (l1, l2) in [(f32::NAN, 0.0), (0.0, f32::NAN), (f32::NAN, f32::NAN), (NEG, f32::NAN), (f32::NAN, NEG)] {
            let w = weights(l1, l2);
            assert!(w.lse.is_nan(), "{l1} {l2}");
        }
        let mut row = [1.0f32];
        combine(&weights(0.0, f32::NAN), &mut row, &[1.0]);
        assert!(row[0].is_nan());
        assert!(sink(f32::NAN, 0.0).1.is_nan() && sink(0.0, f32::NAN).1.is_nan());
    }

    #[test]
    fn sinks() {
        assert_eq!(sink(3.0f32, NEG), (1.0, 3.0));
        assert_eq!(sink(NEG, NEG), (1.0, NEG));
        assert_eq!(sink(NEG, 2.0f32), (0.0, 2.0));
        assert_eq!(sink(1.0f32, 1e4), (0.0, 1e4));
        let (factor, lse) = sink(0f64, 0.0);
        assert!((factor - 0.5).abs() < 1e-15 && (lse - 2f64.ln()).abs() < 1e-15);
    }
}
