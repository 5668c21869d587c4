// SPDX-License-Identifier: MIT OR Apache-2.0
//! f32 and f64 arithmetic.
//!
//! The approximate functions give a correctly rounded or nearly so result: tests must not depend on the error of an
//! approximation. `.ftz` flushes subnormal inputs and results; `.sat` clamps to [0, 1].

use super::table::Table;
use crate::num::{exp2, flush, max_num, min_num, saturate};

fn max_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::from_bits(0x7fff_ffff) } else { max_num(a, b) }
}

fn min_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::from_bits(0x7fff_ffff) } else { min_num(a, b) }
}

fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() || (!b.is_nan() && (b < a || (b == a && b.is_sign_negative()))) { b } else { a }
}

fn max64(a: f64, b: f64) -> f64 {
    if a.is_nan() || (!b.is_nan() && (b > a || (b == a && b.is_sign_positive()))) { b } else { a }
}

/// Rounds the exact sum of `sum` and its error term to f32: down (`-1`), up (`1`) or towards zero (`0`).
fn directed(sum: f64, error: f64, to: i32) -> f32 {
    let near = sum as f32;
    let rest = (sum - f64::from(near)) + error;
    let down = to < 0 || to == 0 && near > 0.0;
    let up = to > 0 || to == 0 && near < 0.0;
    if rest < 0.0 && down {
        near.next_down()
    } else if rest > 0.0 && up {
        near.next_up()
    } else {
        near
    }
}

/// The f64 sum and its rounding error, exactly (0 where the sum is not finite).
#[inline(always)]
pub(super) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let back = sum - a;
    let error = (a - (sum - back)) + (b - back);
    (sum, if error.is_nan() { 0.0 } else { error })
}

/// The fast f64 functions: they see the upper word of the operand, and leave zeros in the lower word of the result.
fn upper_word(a: f64, f: impl Fn(f64) -> f64) -> f64 {
    let cut = |x: f64| f64::from_bits(x.to_bits() & 0xffff_ffff_0000_0000);
    let flush = |x: f64| if x.is_subnormal() { 0f64.copysign(x) } else { x };
    if a.is_nan() { f64::from_bits(0x7fff_ffff_0000_0000) } else { cut(flush(f(flush(cut(a))))) }
}

/// 1/√a, with the sign of a zero.
fn rsqrt64(a: f64) -> f64 {
    if a == 0.0 { 1.0 / a } else { 1.0 / a.sqrt() }
}

/// a · b + c rounded once, in a direction: the product is exact in f64, the sum is carried with its error.
fn fma_to(a: f32, b: f32, c: f32, to: i32) -> f32 {
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let (sum, error) = two_sum(p, c);
    // Numbers that cancel leave +0, but −0 when rounding down; zeros of one sign keep it.
    if sum == 0.0 && to < 0 && (p != 0.0 || p.is_sign_negative() != c.is_sign_negative()) {
        return -0.0;
    }
    directed(sum, error, to)
}

macro_rules! directions {
    ($t:ident; $($n:literal $to:expr),*) => {$(
        $t.rare_tri(concat!("fma.", $n, ".f32"), |a: f32, b: f32, c: f32| fma_to(a, b, c, $to));
        $t.rare_bin(concat!("add.", $n, ".f32"), |a: f32, b: f32| fma_to(a, 1.0, b, $to));
        $t.rare_bin(concat!("sub.", $n, ".f32"), |a: f32, b: f32| fma_to(b, -1.0, a, $to));
        $t.rare_bin(concat!("mul.", $n, ".f32"), |a: f32, b: f32| directed(f64::from(a) * f64::from(b), 0.0, $to));
        $t.rare_un(concat!("cvt.", $n, ".f32.f64"), |a: f64| directed(a, 0.0, $to));
    )*};
}

macro_rules! un_all {
    ($t:ident, $names:literal, $ftz:literal, $f:expr) => {
        $t.rare_un($names, |a: f32| {
            let f: fn(f32) -> f32 = $f;
            f(a)
        });
        $t.rare_un($ftz, |a: f32| {
            let f: fn(f32) -> f32 = $f;
            flush(f(flush(a)))
        });
    };
}

pub(super) fn fill(t: &mut Table) {
    directions!(t; "rm" -1, "rp" 1, "rz" 0);
    t.un("mov.f32", |a: f32| a);
    t.un("mov.f64", |a: f64| a);

    t.bin("add.f32 add.rn.f32", |a: f32, b: f32| a + b);
    t.bin("add.ftz.f32 add.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) + flush(b)));
    t.rare_bin("add.sat.f32 add.rn.sat.f32", |a: f32, b: f32| saturate(a + b));
    t.bin("sub.f32 sub.rn.f32", |a: f32, b: f32| a - b);
    t.rare_bin("sub.ftz.f32 sub.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) - flush(b)));
    t.rare_bin("sub.sat.f32", |a: f32, b: f32| saturate(a - b));
    t.bin("mul.f32 mul.rn.f32", |a: f32, b: f32| a * b);
    t.bin("mul.ftz.f32 mul.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) * flush(b)));
    t.rare_bin("mul.sat.f32", |a: f32, b: f32| saturate(a * b));
    t.tri("fma.rn.f32 mad.rn.f32", |a: f32, b: f32, c: f32| a.mul_add(b, c));
    t.tri("fma.rn.ftz.f32", |a: f32, b: f32, c: f32| flush(flush(a).mul_add(flush(b), flush(c))));
    t.rare_tri("fma.rn.sat.f32", |a: f32, b: f32, c: f32| saturate(a.mul_add(b, c)));
    t.bin("div.rn.f32 div.approx.f32 div.full.f32", |a: f32, b: f32| a / b);
    t.rare_bin("div.rn.ftz.f32 div.approx.ftz.f32 div.full.ftz.f32", |a: f32, b: f32| flush(flush(a) / flush(b)));
    t.bin("min.f32", min_num);
    t.bin("max.f32", max_num);
    t.rare_bin("min.ftz.f32", |a: f32, b: f32| min_num(flush(a), flush(b)));
    t.rare_bin("max.ftz.f32", |a: f32, b: f32| max_num(flush(a), flush(b)));
    t.rare_bin("min.NaN.f32", min_nan);
    t.rare_bin("max.NaN.f32", max_nan);
    t.rare_bin("copysign.f32", |a: f32, b: f32| b.copysign(a));
    t.un("neg.f32", |a: f32| -a);
    t.rare_un("neg.ftz.f32", |a: f32| flush(-a));
    un_all!(t, "abs.f32", "abs.ftz.f32", f32::abs);
    un_all!(t, "sqrt.rn.f32 sqrt.approx.f32", "sqrt.rn.ftz.f32 sqrt.approx.ftz.f32", f32::sqrt);
    un_all!(t, "rcp.rn.f32 rcp.approx.f32", "rcp.rn.ftz.f32 rcp.approx.ftz.f32", |a| 1.0 / a);
    un_all!(t, "rsqrt.approx.f32", "rsqrt.approx.ftz.f32", |a| (1.0 / f64::from(a).sqrt()) as f32);
    un_all!(t, "lg2.approx.f32", "lg2.approx.ftz.f32", |a| f64::from(a).log2() as f32);
    un_all!(t, "sin.approx.f32", "sin.approx.ftz.f32", |a| f64::from(a).sin() as f32);
    un_all!(t, "cos.approx.f32", "cos.approx.ftz.f32", |a| f64::from(a).cos() as f32);
    t.un("ex2.approx.f32", exp2);
    t.un("ex2.approx.ftz.f32", |a: f32| flush(exp2(flush(a))));
    t.rare_un("tanh.approx.f32", |a: f32| f64::from(a).tanh() as f32);

    t.rare_bin("add.f64 add.rn.f64", |a: f64, b: f64| a + b);
    t.rare_bin("sub.f64 sub.rn.f64", |a: f64, b: f64| a - b);
    t.rare_bin("mul.f64 mul.rn.f64", |a: f64, b: f64| a * b);
    t.rare_tri("fma.rn.f64 mad.rn.f64", |a: f64, b: f64, c: f64| a.mul_add(b, c));
    t.rare_bin("div.rn.f64", |a: f64, b: f64| a / b);
    t.rare_bin("min.f64", min64);
    t.rare_bin("max.f64", max64);
    t.rare_un("neg.f64", |a: f64| -a);
    t.rare_un("abs.f64", f64::abs);
    t.rare_un("sqrt.rn.f64", f64::sqrt);
    t.rare_un("rcp.rn.f64", |a: f64| 1.0 / a);
    t.rare_un("rcp.approx.ftz.f64", |a: f64| upper_word(a, |a| 1.0 / a));
    t.rare_un("rsqrt.approx.f64", rsqrt64);
    t.rare_un("rsqrt.approx.ftz.f64", |a: f64| upper_word(a, rsqrt64));
}
