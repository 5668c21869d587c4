// SPDX-License-Identifier: MIT OR Apache-2.0
//! f16 and bf16 arithmetic, single and packed in pairs.
//!
//! Sums and products of two numbers of these formats round in f32 as they would at once: what f32 loses is too small to
//! make or break a tie. A fused product is exact in f64, and its sum is rounded to odd there.

use super::rows::{Bf16, F16};
use super::table::Table;
use crate::num::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, max_num, min_num, saturate};

/// Rounds an f64 to f32 so that rounding on to a shorter format cannot round twice: inexact results get an odd last
/// bit.
#[inline(always)]
pub(crate) fn to_odd(x: f64) -> f32 {
    let r = x as f32;
    if f64::from(r) == x || !r.is_finite() || r.to_bits() & 1 == 1 {
        return r;
    }
    let toward = (f64::from(r) < x) == (r >= 0.0);
    f32::from_bits(if toward { r.to_bits() + 1 } else { r.to_bits().wrapping_sub(1) })
}

/// x · y + z, so that rounding it to a shorter format cannot round twice.
#[inline(always)]
fn fused(x: f32, y: f32, z: f32) -> f32 {
    let (sum, error) = super::float::two_sum(f64::from(x) * f64::from(y), f64::from(z));
    let bits = sum.to_bits();
    if error == 0.0 || bits & 1 == 1 {
        return to_odd(sum);
    }
    // The exact sum lies between this one, which is even, and its neighbour on the side of the error.
    to_odd(f64::from_bits(if (error > 0.0) == (sum > 0.0) { bits + 1 } else { bits - 1 }))
}

macro_rules! each {
    ($t:ident, $T:ident, $up:ident, $down:ident, $n:literal) => {
        $t.rare_bin(concat!("add.", $n, " add.rn.", $n), |a: $T, b: $T| $T($down($up(a.0) + $up(b.0))));
        $t.rare_bin(concat!("sub.", $n, " sub.rn.", $n), |a: $T, b: $T| $T($down($up(a.0) - $up(b.0))));
        $t.rare_bin(concat!("mul.", $n, " mul.rn.", $n), |a: $T, b: $T| $T($down($up(a.0) * $up(b.0))));
        $t.rare_tri(concat!("fma.rn.", $n), |a: $T, b: $T, c: $T| $T($down(fused($up(a.0), $up(b.0), $up(c.0)))));
        $t.rare_tri(concat!("fma.rn.relu.", $n), |a: $T, b: $T, c: $T| {
            let r = fused($up(a.0), $up(b.0), $up(c.0));
            $T($down(if r > 0.0 || r.is_nan() { r } else { 0.0 }))
        });
        $t.rare_bin(concat!("min.", $n), |a: $T, b: $T| $T($down(min_num($up(a.0), $up(b.0)))));
        $t.rare_bin(concat!("max.", $n), |a: $T, b: $T| $T($down(max_num($up(a.0), $up(b.0)))));
        $t.rare_un(concat!("neg.", $n), |a: $T| $T(a.0 ^ 0x8000));
        $t.rare_un(concat!("abs.", $n), |a: $T| $T(a.0 & 0x7fff));
        $t.rare_bin(concat!("add.", $n, "x2 add.rn.", $n, "x2"), |a: u32, b: u32| {
            pair2(a, b, |x, y| $down($up(x) + $up(y)))
        });
        $t.rare_bin(concat!("sub.", $n, "x2 sub.rn.", $n, "x2"), |a: u32, b: u32| {
            pair2(a, b, |x, y| $down($up(x) - $up(y)))
        });
        $t.rare_bin(concat!("mul.", $n, "x2 mul.rn.", $n, "x2"), |a: u32, b: u32| {
            pair2(a, b, |x, y| $down($up(x) * $up(y)))
        });
        $t.rare_bin(concat!("min.", $n, "x2"), |a: u32, b: u32| pair2(a, b, |x, y| $down(min_num($up(x), $up(y)))));
        $t.rare_bin(concat!("max.", $n, "x2"), |a: u32, b: u32| pair2(a, b, |x, y| $down(max_num($up(x), $up(y)))));
        $t.rare_un(concat!("neg.", $n, "x2"), |a: u32| a ^ 0x8000_8000);
        $t.rare_un(concat!("abs.", $n, "x2"), |a: u32| a & 0x7fff_7fff);
        $t.rare_tri(concat!("fma.rn.", $n, "x2"), |a: u32, b: u32, c: u32| {
            let one =
                |s: u32| u32::from($down(fused($up((a >> s) as u16), $up((b >> s) as u16), $up((c >> s) as u16))));
            one(0) | one(16) << 16
        });
    };
}

#[inline(always)]
fn pair2(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

pub(super) fn fill(t: &mut Table) {
    each!(t, F16, f16_to_f32, f32_to_f16, "f16");
    each!(t, Bf16, bf16_to_f32, f32_to_bf16, "bf16");
    t.rare_bin("add.sat.f16", |a: F16, b: F16| F16(f32_to_f16(saturate(f16_to_f32(a.0) + f16_to_f32(b.0)))));
    t.rare_un("ex2.approx.f16", |a: F16| F16(f32_to_f16(crate::num::exp2(f16_to_f32(a.0)))));
    t.rare_un("tanh.approx.f16", |a: F16| F16(f32_to_f16(f16_to_f32(a.0).tanh())));
    t.rare_un("tanh.approx.bf16", |a: Bf16| Bf16(f32_to_bf16(bf16_to_f32(a.0).tanh())));
}
