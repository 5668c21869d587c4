// SPDX-License-Identifier: MIT OR Apache-2.0
//! Element types, and the type each one accumulates in.
//!
//! f16, bf16 and f32 accumulate in f32; f64 (on the CPU only) accumulates in f64. `lse`, the partial results and the
//! travelling gradients are always in the accumulator's type: that one rule keeps errors from growing with the ring.

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
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The type that sums, `lse` and partial results of this type are kept in.
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

/// An element type of q, k, v, o and their gradients.
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

/// A type that sums are kept in.
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

element!(f16, F16, f32, |x| x.to_f32(), |a| f16::from_f32(a), |y| y.to_f64(), |z| f16::from_f64(z));
element!(bf16, Bf16, f32, |x| x.to_f32(), |a| bf16::from_f32(a), |y| y.to_f64(), |z| bf16::from_f64(z));
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
