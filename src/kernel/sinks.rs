// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gradient of the sinks.
//!
//! A sink is a logit without a value: it takes the probability `exp(sink_h − lse)` in every row of its head and adds
//! nothing to o. Its gradient is therefore `dsink_h = −Σ_rows exp(sink_h − lse) · delta`, and needs neither keys nor
//! scores. The sum over a rank's rows is kept in f64 for every element type, because it has as many terms as the
//! sequence has rows.

use crate::{
    call::{RawTensor, SinkGradient},
    element::{Dtype, Element},
    error::{Error, Result},
};

/// Sums over the given rows; the result is written, not added.
///
/// # Safety
/// The tensors describe memory that is valid for the call: `lse`, `delta` and `sinks` for reads, `dsinks` for writes,
/// and `dsinks` overlaps none of the others.
pub unsafe fn sink_gradient(args: &SinkGradient) -> Result<()> {
    let SinkGradient { lse, delta, sinks, dsinks } = args;
    for (name, t) in [("delta", delta), ("dsinks", dsinks)] {
        if t.dtype != lse.dtype {
            return Err(Error::invalid(
                std::format!("{name}.dtype"),
                t.dtype,
                std::format!("that of lse, {}", lse.dtype),
            ));
        }
    }
    for (name, t) in [("delta", delta), ("sinks", sinks), ("dsinks", dsinks)] {
        if t.heads != lse.heads {
            return Err(Error::invalid(
                std::format!("{name}.heads"),
                t.heads,
                std::format!("that of lse, {}", lse.heads),
            ));
        }
    }
    if delta.tokens != lse.tokens || sinks.dtype != Dtype::F32 {
        let found = std::format!("{} tokens, sinks of {}", delta.tokens, sinks.dtype);
        return Err(Error::invalid("delta, sinks", found, std::format!("{} tokens, sinks of f32", lse.tokens)));
    }
    if dsinks.dim != 1 && dsinks.dim as usize != DIGITS {
        return Err(Error::invalid("dsinks.dim", dsinks.dim, std::format!("1, or {DIGITS} for an exact sum")));
    }
    // SAFETY: the tensors are valid and dsinks apart (the contract); the two types were checked to be theirs.
    unsafe {
        match lse.dtype {
            Dtype::F32 => sum::<f32>(args),
            Dtype::F64 => sum::<f64>(args),
            other => return Err(Error::invalid("lse.dtype", other, "an accumulator's type: f32 or f64")),
        }
    }
    Ok(())
}

/// The term of one row: `−exp(sink − lse) · delta`, in f64.
fn term(sink: f64, lse: f64, delta: f64) -> f64 {
    // A row whose only probability would be an absent sink has none to give.
    if lse == f64::NEG_INFINITY { 0.0 } else { -(sink - lse).exp() * delta }
}

unsafe fn sum<A: Element>(args: &SinkGradient) {
    let SinkGradient { lse, delta, sinks, dsinks } = args;
    for h in 0..lse.heads {
        // SAFETY: `h` is a head of all four tensors, which the caller vouches for.
        let sink = f64::from(unsafe { *sinks.heads(h, 1).ptr.cast::<f32>() });
        let (lse, delta) = (lse.heads(h, 1), delta.heads(h, 1));
        let terms = (0..lse.tokens as i64).map(|t| {
            // SAFETY: `t` is a row of both tensors; strides are in elements of type A.
            let (l, d) = unsafe {
                (
                    (*lse.ptr.cast::<A>().offset((t * lse.token_stride) as isize)).to_f64(),
                    (*delta.ptr.cast::<A>().offset((t * delta.token_stride) as isize)).to_f64(),
                )
            };
            term(sink, l, d)
        });
        let out = dsinks.heads(h, 1).ptr.cast::<A>();
        if dsinks.dim == 1 {
            // SAFETY: as above, and the tensor is the call's to write.
            unsafe { *out = A::from_f64(terms.sum()) };
            continue;
        }
        for (i, digit) in digits(terms).into_iter().enumerate() {
            // SAFETY: as above; the innermost dimension holds `DIGITS` elements.
            unsafe { *out.add(i) = A::from_f64(digit) };
        }
    }
}

/// Digits of an exact sum: see [`digits`].
pub(crate) const DIGITS: usize = crate::schedule::SINK_DIGITS;

/// Bits of a digit. Sums of 4,096 of them are still exact in f32.
const BITS: u32 = 12;

/// The exact sum is counted in units of 2⁻⁷².
const UNIT: f64 = 1.0 / (1u128 << 72) as f64;

/// A sum that does not depend on the order of its terms: they are added as integers, in units of 2⁻⁷², and given as
/// digits of 12 bits, lowest first, each with the sign of the whole. Digits of several sums may be added one by one, in
/// f32 even, and [`total`] of them is the total. A term that is not finite, or 2⁵⁴ or more, makes the first digit NaN.
fn digits(terms: impl Iterator<Item = f64>) -> [f64; DIGITS] {
    let (mut sum, mut lost) = (0i128, false);
    for t in terms {
        lost |= t.is_nan() || t.abs() >= (1u64 << 54) as f64;
        // A multiple of 2⁻⁷² exactly, or cut to one: the same cut wherever the term is summed.
        sum = sum.wrapping_add((t / UNIT) as i128);
    }
    let sign = if sum < 0 { -1.0 } else { 1.0 };
    let mut out = core::array::from_fn(|i| {
        sign * ((sum.unsigned_abs() >> (BITS * i as u32).min(127)) & ((1 << BITS) - 1)) as f64
    });
    // The last digit takes what is left, so that nothing is cut at the top.
    out[DIGITS - 1] = sign * (sum.unsigned_abs() >> (BITS * (DIGITS as u32 - 1)).min(127)) as f64;
    if lost {
        out[0] = f64::NAN;
    }
    out
}

/// The number that digits stand for, rounded once.
fn total(digits: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0i128, false);
    for (i, d) in digits.enumerate() {
        lost |= d.is_nan();
        let shift = BITS * i as u32;
        sum = sum.wrapping_add(if shift < 127 { (d as i128).wrapping_shl(shift) } else { 0 });
    }
    if lost { f64::NAN } else { sum as f64 * UNIT }
}

/// `[1, heads, DIGITS]` to `[1, heads, 1]`: what digits that were summed over ranks stand for.
///
/// # Safety
/// The tensors describe memory that is valid for the call, `digits` for reads and `dsinks` for writes, without overlap.
pub(crate) unsafe fn sink_total(digits: &RawTensor, dsinks: &RawTensor) -> Result<()> {
    if digits.dim as usize != DIGITS || digits.heads != dsinks.heads || digits.dtype != dsinks.dtype {
        let found = std::format!("{} heads of {} {}", digits.heads, digits.dim, digits.dtype);
        let expected = std::format!("{} heads of {DIGITS} {}", dsinks.heads, dsinks.dtype);
        return Err(Error::invalid("digits", found, expected));
    }
    /// # Safety
    /// As [`sink_total`], of elements `A`, shapes checked.
    unsafe fn each<A: Element>(digits: &RawTensor, dsinks: &RawTensor) {
        for h in 0..digits.heads {
            let from = digits.heads(h, 1).ptr.cast::<A>();
            // SAFETY: `h` is a head of both, and its DIGITS digits are consecutive (shapes checked; memory valid by
            // the contract).
            unsafe {
                *dsinks.heads(h, 1).ptr.cast::<A>() = A::from_f64(total((0..DIGITS).map(|i| (*from.add(i)).to_f64())))
            };
        }
    }
    // SAFETY: shapes are checked above; the memory is valid and dsinks apart (the contract).
    unsafe {
        match digits.dtype {
            Dtype::F32 => each::<f32>(digits, dsinks),
            Dtype::F64 => each::<f64>(digits, dsinks),
            other => return Err(Error::invalid("digits.dtype", other, "an accumulator's type: f32 or f64")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_sum_to_the_same_bits_in_any_order_and_grouping() {
        let terms: std::vec::Vec<f64> =
            (0..1000).map(|i| f64::from(i * 7919 % 1000 - 500) * 2f64.powi(i % 60 - 40) / 3.0).collect();
        let whole = total(digits(terms.iter().copied()).into_iter());
        let near: f64 = terms.iter().sum();
        assert!((whole - near).abs() <= 1e-9 * near.abs());
        for parts in [2, 3, 7, 64] {
            let mut sum = [0f32; DIGITS];
            for part in 0..parts {
                let own = digits(terms.iter().copied().skip(part).step_by(parts));
                sum.iter_mut().zip(own).for_each(|(s, d)| *s += d as f32);
            }
            assert_eq!(total(sum.into_iter().map(f64::from)).to_bits(), whole.to_bits(), "{parts} parts");
        }
        assert!(total(digits([1.0, f64::NAN].into_iter()).into_iter()).is_nan());
        assert!(total(digits([1e30].into_iter()).into_iter()).is_nan());
    }
}
