// SPDX-License-Identifier: MIT OR Apache-2.0
//! Element types, and the type each one accumulates in.
//!
//! f16, bf16 and f32 accumulate in f32; f64 (on the CPU only) accumulates in f64. `lse` and partial results are always
//! in the accumulator's type, and partial gradients are sent in it unless [`Wire::Bf16`](crate::plan::Wire::Bf16) is
//! chosen, so that errors do not grow with the ring.

use bytemuck::Pod;
use half::{bf16, f16};

/// The run-time name of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE binary16.
    F16 = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// IEEE binary64; the CPU only.
    F64 = 3,
}

impl Dtype {
    /// The size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The type of sums, `lse` and partial results for this element type.
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// The name, as options and tables spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// Half the distance from 1 to the next number: the relative error of one rounding.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::F16 => 4.8828125e-4,
            Self::Bf16 => 3.90625e-3,
            Self::F32 => 5.960464477539063e-8,
            Self::F64 => 1.1102230246251565e-16,
        }
    }
}

impl core::fmt::Display for Dtype {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// An element type of q, k, v, o and their gradients: `f32`, `f64`, and of the crate `half` (version 2) `f16` and
/// `bf16`.
pub trait Element: Pod + Send + Sync + PartialEq + core::fmt::Debug + sealed::Sealed + 'static {
    /// Its run-time name.
    const DTYPE: Dtype;
    /// The type it accumulates in: f32, or f64 for f64.
    type Acc: Accumulator;
    /// Widens to the accumulator; exact.
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest even.
    fn narrow(acc: Self::Acc) -> Self;
    /// Widens to f64; exact.
    fn to_f64(self) -> f64;
    /// Rounds from f64 to nearest even (for f16 and bf16 in one rounding).
    fn from_f64(x: f64) -> Self;
}

/// A type for sums, `lse` and partial results.
pub trait Accumulator:
    Element<Acc = Self> + PartialOrd + core::ops::Add<Output = Self> + core::ops::Mul<Output = Self>
{
    /// Zero.
    const ZERO: Self;
    /// Minus infinity, the `lse` of a row that attends to nothing.
    const NEG_INFINITY: Self;
}

macro_rules! element {
    ($t:ty, $dtype:ident, $acc:ty, |$x:ident| $widen:expr, |$a:ident| $narrow:expr, |$y:ident| $to:expr, |$z:ident| $from:expr) => {
        impl Element for $t {
            const DTYPE: Dtype = Dtype::$dtype;
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                let $x = self;
                $widen
            }
            #[inline(always)]
            fn narrow($a: $acc) -> Self {
                $narrow
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                let $y = self;
                $to
            }
            #[inline(always)]
            fn from_f64($z: f64) -> Self {
                $from
            }
        }
    };
}

/// `x` as an f32, rounded to odd: exact, or the neighbour whose last bit is 1. A second rounding, to a type of fewer
/// than 23 bits, then gives the same result as rounding `x` itself, because no tie is made and none is lost (Boldo and
/// Melquiond, "Emulation of a FMA and correctly-rounded sums: proved algorithms using rounding to odd", 2008). `half`
/// drops the low half of an f64 instead, which makes ties.
fn odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    if back == x || x.is_nan() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    // `back` is the even neighbour; the odd one lies on the other side of x. A step up in the bits is a step away from
    // zero, for both signs.
    let step = if back.abs() < x.abs() { 1 } else { u32::MAX };
    f32::from_bits(nearest.to_bits().wrapping_add(step))
}

element!(f16, F16, f32, |x| x.to_f32(), |a| f16::from_f32(a), |y| y.to_f64(), |z| f16::from_f32(odd(z)));
element!(bf16, Bf16, f32, |x| x.to_f32(), |a| bf16::from_f32(a), |y| y.to_f64(), |z| bf16::from_f32(odd(z)));
element!(f32, F32, f32, |x| x, |a| a, |y| f64::from(y), |z| z as f32);
element!(f64, F64, f64, |x| x, |a| a, |y| y, |z| z);

impl Accumulator for f32 {
    const ZERO: Self = 0.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;
}

impl Accumulator for f64 {
    const ZERO: Self = 0.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that `got` is nearest, and even at a tie, by comparison with its two neighbours.
    fn nearest<T: Element>(x: f64, got: T, bits: u16, from: impl Fn(u16) -> T) {
        let error = |t: T| (t.to_f64() - x).abs();
        for other in [bits.wrapping_sub(1), bits.wrapping_add(1)].map(|b| (b, from(b))) {
            let (e, o) = (error(got), error(other.1));
            if o.is_finite() {
                assert!(e < o || e == o && bits & 1 == 0, "{x:e}: {} rather than {}", got.to_f64(), other.1.to_f64());
            }
        }
    }

    #[test]
    fn from_f64_rounds_once_and_to_even() {
        for b in (1..0x7be0).step_by(7) {
            for below in [false, true] {
                // On the middle of two neighbours, and as close to it as an f64 gets.
                let middle = (f16::from_bits(b).to_f64() + f16::from_bits(b + 1).to_f64()) / 2.0;
                let beside = f64::from_bits(if below { middle.to_bits() - 1 } else { middle.to_bits() + 1 });
                for x in [middle, beside, -middle, -beside] {
                    let got = <f16 as Element>::from_f64(x);
                    nearest(x, got, got.to_bits(), f16::from_bits);
                }
                let middle = (bf16::from_bits(b).to_f64() + bf16::from_bits(b + 1).to_f64()) / 2.0;
                let beside = f64::from_bits(if below { middle.to_bits() - 1 } else { middle.to_bits() + 1 });
                for x in [middle, beside, -middle, -beside] {
                    let got = <bf16 as Element>::from_f64(x);
                    nearest(x, got, got.to_bits(), bf16::from_bits);
                }
            }
        }
        assert!(<f16 as Element>::from_f64(f64::NAN).is_nan() && <bf16 as Element>::from_f64(f64::NAN).is_nan());
        assert_eq!(<f16 as Element>::from_f64(65519.999), f16::MAX);
        assert_eq!(<f16 as Element>::from_f64(65520.0), f16::INFINITY);
        assert_eq!(<bf16 as Element>::from_f64(1e300), bf16::INFINITY);
        assert_eq!(<bf16 as Element>::from_f64(-1e-300).to_bits(), 0x8000);
        assert_eq!(<bf16 as Element>::from_f64(f64::NEG_INFINITY), bf16::NEG_INFINITY);
    }
}
