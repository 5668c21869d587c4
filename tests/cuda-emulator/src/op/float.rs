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

/// One step towards zero when `rounded` lies beyond `exact`'s truncation.
fn toward_zero(rounded: f32, exact: f64) -> f32 {
    if f64::from(rounded).abs() > exact.abs() && rounded.is_finite() {
        f32::from_bits(rounded.to_bits() - 1)
    } else {
        rounded
    }
}

macro_rules! un_all {
    ($t:ident, $names:literal, $ftz:literal, $f:expr) => {
        $t.un($names, |a: f32| {
            let f: fn(f32) -> f32 = $f;
            f(a)
        });
        $t.un($ftz, |a: f32| {
            let f: fn(f32) -> f32 = $f;
            flush(f(flush(a)))
        });
    };
}

pub(super) fn fill(t: &mut Table) {
    t.un("mov.f32", |a: f32| a);
    t.un("mov.f64", |a: f64| a);

    t.bin("add.f32 add.rn.f32", |a: f32, b: f32| a + b);
    t.bin("add.ftz.f32 add.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) + flush(b)));
    t.bin("add.sat.f32 add.rn.sat.f32", |a: f32, b: f32| saturate(a + b));
    t.bin("add.rz.f32", |a: f32, b: f32| toward_zero(a + b, f64::from(a) + f64::from(b)));
    t.bin("sub.f32 sub.rn.f32", |a: f32, b: f32| a - b);
    t.bin("sub.ftz.f32 sub.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) - flush(b)));
    t.bin("sub.sat.f32", |a: f32, b: f32| saturate(a - b));
    t.bin("mul.f32 mul.rn.f32", |a: f32, b: f32| a * b);
    t.bin("mul.ftz.f32 mul.rn.ftz.f32", |a: f32, b: f32| flush(flush(a) * flush(b)));
    t.bin("mul.sat.f32", |a: f32, b: f32| saturate(a * b));
    t.bin("mul.rz.f32", |a: f32, b: f32| toward_zero(a * b, f64::from(a) * f64::from(b)));
    t.tri("fma.rn.f32 mad.rn.f32", |a: f32, b: f32, c: f32| a.mul_add(b, c));
    t.tri("fma.rn.ftz.f32", |a: f32, b: f32, c: f32| flush(flush(a).mul_add(flush(b), flush(c))));
    t.tri("fma.rn.sat.f32", |a: f32, b: f32, c: f32| saturate(a.mul_add(b, c)));
    t.bin("div.rn.f32 div.approx.f32 div.full.f32", |a: f32, b: f32| a / b);
    t.bin("div.rn.ftz.f32 div.approx.ftz.f32 div.full.ftz.f32", |a: f32, b: f32| flush(flush(a) / flush(b)));
    t.bin("min.f32", min_num);
    t.bin("max.f32", max_num);
    t.bin("min.ftz.f32", |a: f32, b: f32| min_num(flush(a), flush(b)));
    t.bin("max.ftz.f32", |a: f32, b: f32| max_num(flush(a), flush(b)));
    t.bin("min.NaN.f32", min_nan);
    t.bin("max.NaN.f32", max_nan);
    t.bin("copysign.f32", |a: f32, b: f32| b.copysign(a));
    un_all!(t, "neg.f32", "neg.ftz.f32", |a| -a);
    un_all!(t, "abs.f32", "abs.ftz.f32", f32::abs);
    un_all!(t, "sqrt.rn.f32 sqrt.approx.f32", "sqrt.rn.ftz.f32 sqrt.approx.ftz.f32", f32::sqrt);
    un_all!(t, "rcp.rn.f32 rcp.approx.f32", "rcp.rn.ftz.f32 rcp.approx.ftz.f32", |a| 1.0 / a);
    un_all!(t, "rsqrt.approx.f32", "rsqrt.approx.ftz.f32", |a| (1.0 / f64::from(a).sqrt()) as f32);
    un_all!(t, "lg2.approx.f32", "lg2.approx.ftz.f32", |a| f64::from(a).log2() as f32);
    un_all!(t, "sin.approx.f32", "sin.approx.ftz.f32", |a| f64::from(a).sin() as f32);
    un_all!(t, "cos.approx.f32", "cos.approx.ftz.f32", |a| f64::from(a).cos() as f32);
    un_all!(t, "ex2.approx.f32", "ex2.approx.ftz.f32", exp2);
    t.un("tanh.approx.f32", |a: f32| f64::from(a).tanh() as f32);

    t.bin("add.f64 add.rn.f64", |a: f64, b: f64| a + b);
    t.bin("sub.f64 sub.rn.f64", |a: f64, b: f64| a - b);
    t.bin("mul.f64 mul.rn.f64", |a: f64, b: f64| a * b);
    t.tri("fma.rn.f64 mad.rn.f64", |a: f64, b: f64, c: f64| a.mul_add(b, c));
    t.bin("div.rn.f64", |a: f64, b: f64| a / b);
    t.bin("min.f64", min64);
    t.bin("max.f64", max64);
    t.un("neg.f64", |a: f64| -a);
    t.un("abs.f64", f64::abs);
    t.un("sqrt.rn.f64", f64::sqrt);
    t.un("rcp.rn.f64 rcp.approx.ftz.f64", |a: f64| 1.0 / a);
    t.un("rsqrt.approx.f64 rsqrt.approx.ftz.f64", |a: f64| 1.0 / a.sqrt());
}
