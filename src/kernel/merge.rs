// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merging two partial results of one row, and the sink.
//!
//! A partial result is `(o, lse)`: o normalised over the keys seen so far, lse their natural log-sum-exp. Two of them
//! merge exactly (up to rounding), in any order, because a softmax over a union is the mean of the softmaxes weighted
//! by `exp(lse)` (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, FlashAttention-2,
//! 2023). Three cases need care, and are handled here for every caller:
//!
//! - `−inf` on both sides means that neither part had a key: the result is `(0, −inf)`, not the NaN of `−inf − −inf`;
//! - a part without keys has weight 0, whatever its o contains;
//! - a NaN must stay a NaN in the result, so that the caller sees it: comparisons here must not remove it.
//!
//! A fourth case is precision: an lse of 1,000 in f32 has an error of 3·10⁻⁵, and every weight `exp(l1 − l2)` computed
//! from it would have the same. So the lse of a partial result has two words ([`LogSumExp`]): the rounded number, and
//! its rounding error. Differences are computed word by word, and the weights of a row in f64. This costs little, once
//! per row, and the error of a long chain of merges stays that of the rows themselves.

use crate::call::RawTensor;
use crate::element::{Accumulator, Dtype};
use crate::error::{Error, Result};
use crate::kernel::check;

/// A log-sum-exp in two words: `lse + rest`, where `rest` is what rounding lost, at most half a unit in the last place
/// of `lse`. It is 0 where `lse` is not finite, and for a number that was only kept to one word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LogSumExp<A> {
    /// The rounded number: what a final result holds.
    pub lse: A,
    /// The rounding error.
    pub rest: A,
}

impl<A: Accumulator> LogSumExp<A> {
    /// The lse of a row without keys.
    pub(crate) const NOTHING: Self = Self { lse: A::NEG_INFINITY, rest: A::ZERO };

    /// Of a number with the digits of both words; those of an f64 are one word.
    #[cfg(test)]
    fn of(x: f64) -> Self {
        Self::sum(x, 0.0)
    }

    /// `high + low`, with what is lost of `low` where `high` is large.
    #[inline]
    pub(crate) fn sum(high: f64, low: f64) -> Self {
        let lse = A::from_f64(high + low);
        let rest = (high - lse.to_f64()) + low;
        Self { lse, rest: if lse.to_f64().is_finite() { A::from_f64(rest) } else { A::ZERO } }
    }

    /// Of a tensor of one word or two.
    ///
    /// # Safety
    /// `at` is valid for reads of `words` elements.
    #[inline]
    pub(crate) unsafe fn load(at: *const A, words: u32) -> Self {
        // SAFETY: `at` is valid for reads of `words` elements: one, or two (the contract).
        unsafe { Self { lse: *at, rest: if words > 1 { *at.add(1) } else { A::ZERO } } }
    }

    /// To a tensor of one word or two.
    ///
    /// # Safety
    /// `at` is valid for writes of `words` elements.
    #[inline]
    pub(crate) unsafe fn store(self, at: *mut A, words: u32) {
        // SAFETY: as in `load`.
        unsafe {
            *at = self.lse;
            if words > 1 {
                *at.add(1) = self.rest;
            }
        }
    }
}

/// What a merge does to the two o, and the merged lse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weights<A> {
    /// Multiplies the first o; `None` when it saw no key (its o is then not read).
    pub first: Option<A>,
    /// Multiplies the second o, likewise.
    pub second: Option<A>,
    /// Log-sum-exp of both.
    pub lse: LogSumExp<A>,
}

/// The weights of two partials with log-sum-exps `l1` and `l2`: `w_i = exp(l_i − m) / Σ exp(l_j − m)`, `m` their
/// maximum.
#[inline]
pub(crate) fn weights<A: Accumulator>(l1: LogSumExp<A>, l2: LogSumExp<A>) -> Weights<A> {
    match (l1.lse == A::NEG_INFINITY, l2.lse == A::NEG_INFINITY) {
        (true, true) => Weights { first: None, second: None, lse: LogSumExp::NOTHING },
        (true, false) => Weights { first: None, second: Some(A::from_f64(1.0)), lse: l2 },
        (false, true) => Weights { first: Some(A::from_f64(1.0)), second: None, lse: l1 },
        (false, false) => {
            let (larger, wa, wb) = relative(l1, l2);
            let sum = wa + wb;
            Weights {
                first: Some(A::from_f64(wa / sum)),
                second: Some(A::from_f64(wb / sum)),
                lse: LogSumExp::sum(larger.lse.to_f64(), larger.rest.to_f64() + sum.ln()),
            }
        }
    }
}

/// The larger of the two, and `exp` of each less the larger. A NaN on either side reaches the sum of these.
#[inline]
fn relative<A: Accumulator>(l1: LogSumExp<A>, l2: LogSumExp<A>) -> (LogSumExp<A>, f64, f64) {
    // Word by word: the first difference is exact where it matters, which is where the two are close.
    let above = (l1.lse.to_f64() - l2.lse.to_f64()) + (l1.rest.to_f64() - l2.rest.to_f64());
    if above > 0.0 { (l1, 1.0, (-above).exp()) } else { (l2, above.exp(), 1.0) }
}

/// Merges `other` into `row` with the weights of [`weights`].
#[inline]
pub(crate) fn combine<A: Accumulator>(w: &Weights<A>, row: &mut [A], other: &[A]) {
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

/// The sinks of a head as one: their log-sum-exp.
///
/// # Safety
/// `head` is a head of `sinks`, whose memory is valid for reads: f32 (checked).
#[inline]
pub(crate) unsafe fn sinks_of<A: Accumulator>(sinks: &RawTensor, head: u32) -> LogSumExp<A> {
    let from = sinks.heads(head, 1).ptr.cast::<f32>();
    (0..sinks.dim as usize).fold(LogSumExp::NOTHING, |all, i| {
        // SAFETY: one of the head's `dim` numbers, which are consecutive.
        let one = A::from_f64(unsafe { *from.add(i) }.into());
        weights(all, LogSumExp { lse: one, rest: A::ZERO }).lse
    })
}

/// Applies a sink (a logit with no value behind it) to a row whose log-sum-exp is `lse`: the factor of its o, and the
/// final lse `logaddexp(lse, sink)`. A sink of `−inf` is no sink; a row without keys gets `(0, sink)`.
#[inline]
pub(crate) fn sink<A: Accumulator>(lse: LogSumExp<A>, sink: LogSumExp<A>) -> (A, A) {
    let w = weights(lse, sink);
    match (w.first, w.second) {
        (_, None) => (A::from_f64(1.0), lse.lse),
        (factor, Some(_)) => (factor.unwrap_or(A::ZERO), w.lse.lse),
    }
}

/// Merges the partial result (`other_o`, `other_lse`) into (`o`, `lse`), row by row.
///
/// o: `[tokens, heads, dim]`, lse: `[tokens, heads, 1]` or `[tokens, heads, 2]`, whatever the other's is (the
/// second word is the rounding error of the first), any token and head stride, all of the same accumulator's type (f32
/// or f64). What is merged is normalised, as the running result of [`crate::call::Attend`] is.
///
/// # Errors
/// [`Error::Invalid`] when shapes or types differ; nothing was written then.
///
/// # Safety
/// Every element of the four tensors must be valid for reads, those of `o` and `lse` for writes, on this thread alone;
/// `o` and `lse` overlap nothing else.
pub unsafe fn merge(o: &RawTensor, lse: &RawTensor, other_o: &RawTensor, other_lse: &RawTensor) -> Result<()> {
    let words = |t: &RawTensor| if t.dim == 2 { 2 } else { 1 };
    for (name, t, against, dim) in
        [("other_o", other_o, o, o.dim), ("lse", lse, o, words(lse)), ("other_lse", other_lse, lse, words(other_lse))]
    {
        check::same_shape(|| name.into(), t, &RawTensor { dim, ..*against })?;
        if t.dtype != o.dtype {
            return Err(Error::invalid(alloc::format!("{name}.dtype"), t.dtype, o.dtype));
        }
    }
    match o.dtype {
        // SAFETY: shapes and types agree (checked above); the elements are valid and `o` and `lse` apart (the
        // contract).
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
                let other = LogSumExp::load(other_lse.rows(t, 1).heads(h, 1).ptr.cast::<A>(), other_lse.dim);
                let w = weights(LogSumExp::load(l, lse.dim), other);
                let row = core::slice::from_raw_parts_mut(o.rows(t, 1).heads(h, 1).ptr.cast::<A>(), dim);
                combine(&w, row, core::slice::from_raw_parts(other_o.rows(t, 1).heads(h, 1).ptr.cast::<A>(), dim));
                w.lse.store(l, lse.dim);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEG: f32 = f32::NEG_INFINITY;

    fn word<A: Accumulator>(lse: A) -> LogSumExp<A> {
        LogSumExp { lse, rest: A::ZERO }
    }

    #[test]
    fn two_halves_weigh_as_their_sums() {
        let w = weights(word(2f64.ln()), word(6f64.ln()));
        assert!((w.first.unwrap() - 0.25).abs() < 1e-15 && (w.second.unwrap() - 0.75).abs() < 1e-15);
        assert!((w.lse.lse - 8f64.ln()).abs() < 1e-15);
    }

    /// Of three partials with the same maximum, in f32 and in f64, however far up they are.
    #[test]
    fn weights_keep_their_digits_as_scores_grow() {
        let sums = [3.7f32, 1.9, 0.77 + 1.0];
        for max in [0.0f32, 0.3, -7.1, 72.4, -72.4, 1000.3, -1000.3, 1e6] {
            let [a, b, c] = sums.map(|s| LogSumExp::<f32>::of(f64::from(max) + f64::from(s).ln()));
            let both = weights(a, b);
            let all = weights(both.lse, c);
            let total: f64 = sums.iter().map(|&s| f64::from(s)).sum();
            for (w, sum) in [(all.first, sums[0] + sums[1]), (all.second, sums[2])] {
                let (w, expected) = (f64::from(w.unwrap()), f64::from(sum) / total);
                assert!((w / expected - 1.0).abs() < 2e-7, "{max}: {w} {expected}");
            }
            let lse = f64::from(max) + total.ln();
            assert_eq!(all.lse.lse, lse as f32, "{max}");
            // One word less than the second ends in.
            let two_words = f64::from(all.lse.lse) + f64::from(all.lse.rest);
            assert!((two_words - lse).abs() <= lse.abs() * 2f64.powi(-46) + 2f64.powi(-50), "{max}: {two_words} {lse}");
        }
    }

    #[test]
    fn a_side_without_keys_has_no_say() {
        for (l1, l2, expected) in [(NEG, 1.5, [9.0, 8.0]), (1.5, NEG, [1.0, 2.0]), (NEG, NEG, [0.0, 0.0])] {
            let mut row = [1.0f32, 2.0];
            let w = weights(word(l1), word(l2));
            combine(&w, &mut row, &[9.0, 8.0]);
            assert_eq!(row, expected);
            assert_eq!(w.lse, word(if l1 == NEG { l2 } else { l1 }));
        }
        let mut row = [f32::NAN];
        combine(&weights(word(NEG), word(NEG)), &mut row, &[f32::NAN]);
        assert_eq!(row, [0.0]);
        // Whatever the second word of a row without keys is.
        let poisoned = LogSumExp { lse: NEG, rest: f32::NAN };
        assert_eq!(weights(poisoned, word(1.5)).lse, word(1.5));
        assert_eq!(weights(poisoned, poisoned).lse, word(NEG));
    }

    #[test]
    fn a_nan_stays_a_nan() {
        for (l1, l2) in [(f32::NAN, 0.0), (0.0, f32::NAN), (f32::NAN, f32::NAN), (NEG, f32::NAN), (f32::NAN, NEG)] {
            let w = weights(word(l1), word(l2));
            assert!(w.lse.lse.is_nan(), "{l1} {l2}");
        }
        assert!(weights(word(0.0), LogSumExp { lse: 0.0f32, rest: f32::NAN }).lse.lse.is_nan());
        let mut row = [1.0f32];
        combine(&weights(word(0.0), word(f32::NAN)), &mut row, &[1.0]);
        assert!(row[0].is_nan());
        assert!(sink(word(f32::NAN), word(0.0)).1.is_nan() && sink(word(0.0), word(f32::NAN)).1.is_nan());
        assert!(LogSumExp::<f32>::of(f64::NAN).lse.is_nan());
        assert_eq!(LogSumExp::<f32>::of(f64::NEG_INFINITY), word(NEG));
    }

    #[test]
    fn sinks() {
        assert_eq!(sink(word(3.0f32), word(NEG)), (1.0, 3.0));
        assert_eq!(sink(word(NEG), word(NEG)), (1.0, NEG));
        assert_eq!(sink(word(NEG), word(2.0f32)), (0.0, 2.0));
        assert_eq!(sink(word(1.0f32), word(1e4)), (0.0, 1e4));
        let (factor, lse) = sink(word(0f64), word(0.0));
        assert!((factor - 0.5).abs() < 1e-15 && (lse - 2f64.ln()).abs() < 1e-15);
        // The second word counts.
        let rest = 1000.0 * 2f32.powi(-25);
        let (factor, _) = sink(LogSumExp { lse: 1000.0, rest }, word(1000.0));
        let expected = 1.0 / (1.0 + f64::from(-rest).exp());
        assert!((f64::from(factor) - expected).abs() < 1e-7);
    }
}
