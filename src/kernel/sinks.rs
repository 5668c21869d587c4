// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gradient of the sinks.
//!
//! A sink is a logit without a value: it takes the probability `exp(sink − lse)` in every row of its head and adds
//! nothing to o. Its gradient is therefore `dsink = −Σ_rows exp(sink − lse) · delta`, and needs neither keys nor
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
    if delta.tokens != lse.tokens {
        return Err(Error::invalid("delta.tokens", delta.tokens, std::format!("that of lse, {}", lse.tokens)));
    }
    if sinks.dtype != Dtype::F32 {
        return Err(Error::invalid("sinks.dtype", sinks.dtype, Dtype::F32));
    }
    let (found, count) = (dsinks.dim as usize, sinks.dim as usize);
    if count == 0 || found != count && found != count * DIGITS {
        let expected = std::format!("that of sinks, {count}, or {DIGITS} times as many for exact sums");
        return Err(Error::invalid("dsinks.dim", found, expected));
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
    let (count, each) = (sinks.dim as usize, (dsinks.dim / sinks.dim) as usize);
    for (h, i) in (0..lse.heads).flat_map(|h| (0..count).map(move |i| (h, i))) {
        // SAFETY: `h` is a head of all four tensors, which the caller vouches for, and sink `i` one of its sinks.
        let sink = f64::from(unsafe { *sinks.heads(h, 1).ptr.cast::<f32>().add(i) });
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
        // SAFETY: `each` numbers of this sink, consecutive, in a tensor that is the call's to write.
        let out = unsafe { dsinks.heads(h, 1).ptr.cast::<A>().add(i * each) };
        if each == 1 {
            // SAFETY: as above.
            unsafe { *out = A::from_f64(terms.sum()) };
            continue;
        }
        for (i, digit) in digits(terms, Radix::of(A::DTYPE)).into_iter().enumerate() {
            // SAFETY: as above; a sink has `DIGITS` elements.
            unsafe { *out.add(i) = A::from_f64(digit) };
        }
    }
}

/// Digits of an exact sum: see [`digits`].
pub(crate) const DIGITS: usize = crate::schedule::SINK_DIGITS;

/// The digits of an exact sum in an accumulator's type.
#[derive(Clone, Copy)]
struct Radix {
    /// Bits of a digit. Sums of 4,096 digits are still exact in the accumulator's type.
    bits: u32,
    /// The sum is counted in units of 2 to this power.
    unit: i32,
}

impl Radix {
    /// All of f32: units far below its smallest number, and room for 2³⁶ times its largest. Of f64 the magnitudes
    /// between 1e-150 and 1e157.
    const fn of(dtype: Dtype) -> Self {
        if matches!(dtype, Dtype::F64) { Self { bits: 40, unit: -560 } } else { Self { bits: 12, unit: -172 } }
    }

    /// Terms are below it.
    fn limit(self) -> f64 {
        power(self.unit + self.bits as i32 * DIGITS as i32 - 36)
    }

    /// Adds a term below the limit, cut to a multiple of the unit: the same cut wherever the term is summed.
    fn add(self, sum: &mut [i64; DIGITS], term: f64) {
        let (exponent, fraction) = ((term.to_bits() >> 52) & 0x7ff, term.to_bits() & ((1 << 52) - 1));
        let mantissa = if exponent > 0 { fraction | 1 << 52 } else { fraction };
        let at = exponent.max(1) as i32 - 1075 - self.unit;
        let cut = mantissa.checked_shr((-at).max(0) as u32).unwrap_or(0);
        let at = at.max(0) as u32;
        let mut rest = u128::from(cut) << (at % self.bits);
        for digit in &mut sum[(at / self.bits) as usize..] {
            let part = (rest & ((1 << self.bits) - 1)) as i64;
            *digit += if term < 0.0 { -part } else { part };
            rest >>= self.bits;
            if rest == 0 {
                break;
            }
        }
    }

    /// Brings all digits but the last into their range, none below 0; the last takes what is left.
    fn carry(self, sum: &mut [i64; DIGITS]) {
        for i in 0..DIGITS - 1 {
            let over = sum[i] >> self.bits;
            sum[i] -= over << self.bits;
            sum[i + 1] += over;
        }
    }

    /// Splits a sum into its magnitude and its sign.
    fn magnitude(self, sum: &mut [i64; DIGITS]) -> f64 {
        self.carry(sum);
        if sum[DIGITS - 1] >= 0 {
            return 1.0;
        }
        sum.iter_mut().for_each(|d| *d = -*d);
        self.carry(sum);
        -1.0
    }
}

/// 2 to a power within the normal numbers.
fn power(n: i32) -> f64 {
    f64::from_bits(((1023 + n) as u64) << 52)
}

/// A sum that does not depend on the order of its terms: they are added as integers, in units of [`Radix::unit`], and
/// given as digits, lowest first, each with the sign of the whole. Digits of several sums may be added one by one, in
/// the accumulator's type, and [`total`] of them is the total. A term that is not finite, or too large for the digits,
/// makes the first digit NaN.
fn digits(terms: impl Iterator<Item = f64>, radix: Radix) -> [f64; DIGITS] {
    let (mut sum, mut lost) = ([0i64; DIGITS], false);
    for (n, t) in terms.enumerate() {
        if t.abs() < radix.limit() {
            radix.add(&mut sum, t);
        } else {
            lost = true;
        }
        // A digit grows by less than 2⁴⁰ with each term.
        if n % (1 << 20) == (1 << 20) - 1 {
            radix.carry(&mut sum);
        }
    }
    let sign = radix.magnitude(&mut sum);
    let mut out = sum.map(|d| sign * d as f64);
    if lost {
        out[0] = f64::NAN;
    }
    out
}

/// The number that digits stand for, rounded once.
fn total(digits: impl Iterator<Item = f64>, radix: Radix) -> f64 {
    let (mut sum, mut lost) = ([0i64; DIGITS], false);
    for (whole, d) in sum.iter_mut().zip(digits) {
        lost |= !d.is_finite();
        *whole = d as i64;
    }
    if lost {
        return f64::NAN;
    }
    let sign = radix.magnitude(&mut sum);
    // The leading digits, more than f64 holds, and whether anything follows.
    let (mut lead, mut last, mut more) = (0u128, 0, false);
    for (i, &d) in sum.iter().enumerate().rev() {
        if lead < 1 << 64 {
            (lead, last) = (lead << radix.bits | d as u128, i);
        } else {
            more |= d != 0;
        }
    }
    sign * (lead | u128::from(more)) as f64 * power(radix.unit + radix.bits as i32 * last as i32)
}

/// The gradient of `n` sinks of each head, `dsinks` `[1, heads, n]`, from the digits of its exact sum, `digits`
/// `[1, heads, n ·` [`SINK_DIGITS`](crate::schedule::Schedule::SINK_DIGITS)`]`, both f32 or both f64. Digits come from
/// [`sink_gradient`]; those of several ranks are added element by element, in any order, and then stand for the sum of
/// all ranks' terms, rounded once.
///
/// # Errors
///
/// [`Error::Invalid`] for other shapes or types.
///
/// # Safety
/// The tensors describe memory that is valid for the call, `digits` for reads and `dsinks` for writes, without overlap.
pub unsafe fn sink_total(digits: &RawTensor, dsinks: &RawTensor) -> Result<()> {
    let dim = dsinks.dim as usize * DIGITS;
    if digits.dim as usize != dim || digits.heads != dsinks.heads || digits.dtype != dsinks.dtype {
        let found = std::format!("{} heads of {} {}", digits.heads, digits.dim, digits.dtype);
        let expected = std::format!("{} heads of {dim} {}", dsinks.heads, dsinks.dtype);
        return Err(Error::invalid("digits", found, expected));
    }
    /// # Safety
    /// As [`sink_total`], of elements `A`, shapes checked.
    unsafe fn each<A: Element>(digits: &RawTensor, dsinks: &RawTensor) {
        for (h, i) in (0..digits.heads).flat_map(|h| (0..dsinks.dim as usize).map(move |i| (h, i))) {
            let from = digits.heads(h, 1).ptr.cast::<A>();
            // SAFETY: `h` is a head of both, and the DIGITS digits of its sink `i` are consecutive (shapes checked;
            // memory valid by the contract).
            unsafe {
                let all = (i * DIGITS..(i + 1) * DIGITS).map(|at| (*from.add(at)).to_f64());
                *dsinks.heads(h, 1).ptr.cast::<A>().add(i) = A::from_f64(total(all, Radix::of(A::DTYPE)));
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
    use crate::{
        Accumulator,
        kernel::merge::{self, LogSumExp},
    };
    use std::vec;

    const TYPES: [Radix; 2] = [Radix::of(Dtype::F32), Radix::of(Dtype::F64)];

    #[test]
    fn a_sink_keeps_nan_and_its_factor_is_at_most_one() {
        fn check<A: Accumulator>(lse: f64, sink: f64) {
            let (factor, l) = merge::sink(
                LogSumExp { lse: A::from_f64(lse), rest: A::ZERO },
                LogSumExp { lse: A::from_f64(sink), rest: A::ZERO },
            );
            let nan = lse.is_nan() || sink.is_nan();
            assert_eq!(l.to_f64().is_nan(), nan, "{} lse {lse}, sink {sink}: {l:?}", A::DTYPE);
            assert!(nan || (0.0..=1.0).contains(&factor.to_f64()), "lse {lse}, sink {sink}: factor {factor:?}");
        }
        let mut random = fastrand::Rng::with_seed(1);
        let mut draw = || match random.u8(..4) {
            0 => f64::NEG_INFINITY,
            1 => f64::from(f32::from_bits(random.u32(..))),
            _ => f64::from(random.i16(..)) / 64.0,
        };
        for _ in 0..2000 {
            let (lse, sink) = (draw(), draw());
            if lse != f64::INFINITY && sink != f64::INFINITY {
                check::<f32>(lse, sink);
                check::<f64>(lse, sink);
            }
        }
    }

    #[test]
    fn digits_sum_to_the_same_bits_in_any_order_and_grouping() {
        let terms: std::vec::Vec<f64> =
            (0..1000).map(|i| f64::from(i * 7919 % 1000 - 500) * 2f64.powi(i % 60 - 40) / 3.0).collect();
        let near: f64 = terms.iter().sum();
        for radix in TYPES {
            let whole = total(digits(terms.iter().copied(), radix).into_iter(), radix);
            assert!((whole - near).abs() <= 1e-13 * near.abs());
            // An interpreter takes its time.
            for parts in if cfg!(miri) { vec![3] } else { vec![2, 3, 7, 64] } {
                let mut sum = [0f64; DIGITS];
                for part in 0..parts {
                    let own = digits(terms.iter().copied().skip(part).step_by(parts), radix);
                    // Exact in the accumulator's type.
                    assert!(radix.bits == 40 || own.iter().all(|&d| f64::from(d as f32) == d));
                    sum.iter_mut().zip(own).for_each(|(s, d)| *s += d);
                }
                assert!(radix.bits == 40 || sum.iter().all(|&d| f64::from(d as f32) == d));
                assert_eq!(total(sum.into_iter(), radix).to_bits(), whole.to_bits(), "{parts} parts");
            }
            assert!(total(digits([1.0, f64::NAN].into_iter(), radix).into_iter(), radix).is_nan());
            assert!(total(digits([f64::INFINITY].into_iter(), radix).into_iter(), radix).is_nan());
            assert!(total(digits([2.0 * radix.limit()].into_iter(), radix).into_iter(), radix).is_nan());
        }
    }

    /// Whatever the size of the gradient of o: from the smallest normal f32 to the largest, and further in f64.
    #[test]
    fn sums_of_any_size_keep_their_digits() {
        for (radix, powers) in TYPES.into_iter().zip([-126..=120, -500..=500]) {
            for n in powers.step_by(if cfg!(miri) { 123 } else { 7 }) {
                let terms = (0..999).map(|i| (f64::from(i * 7919 % 1000) - 300.25) / 1001.0 * power(n));
                let near: f64 = terms.clone().sum();
                let got = total(digits(terms, radix).into_iter(), radix);
                let error = (got - near).abs() / near.abs();
                assert!(error < if n < -120 { 1e-8 } else { 1e-13 }, "2^{n}: {got} for {near}");
            }
        }
        // Rounded once, to nearest, and terms that cancel leave what is far below them.
        for radix in TYPES {
            let of = |terms: &[f64]| total(digits(terms.iter().copied(), radix).into_iter(), radix);
            assert_eq!(of(&[1.0, power(-53), power(-100)]), 1.0 + f64::EPSILON);
            assert_eq!(of(&[1.0, power(-53), -power(-100)]), 1.0);
            assert_eq!(of(&[1e30, 1e-20, -1e30]), (1e-20 / power(radix.unit)).trunc() * power(radix.unit));
            assert_eq!(of(&[-0.75, 0.25]), -0.5);
            assert_eq!(of(&[]), 0.0);
        }
    }
}
