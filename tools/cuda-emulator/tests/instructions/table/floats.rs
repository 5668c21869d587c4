// SPDX-License-Identifier: MIT OR Apache-2.0
//! f32 and f64 arithmetic whose result PTX defines to the last bit.
//!
//! Every rounding has rows that only it gets right: ties, both sides of a tie, results that vanish, overflow, and zeros
//! whose sign depends on the direction. A NaN that comes out may have any payload.

use super::case::Case;
use super::rows::{Rows, d};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const MAX: f32 = f32::MAX;
/// The smallest normal number, 2⁻¹²⁶.
const NORMAL: f32 = f32::MIN_POSITIVE;

/// f32 by its bits.
fn x(bits: u32) -> f32 {
    f32::from_bits(bits)
}

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("floats");
    sums(&mut t);
    products(&mut t);
    fused(&mut t);
    directed(&mut t);
    quotients(&mut t);
    signs(&mut t);
    extremes(&mut t);
    doubles(&mut t);
    t.cases
}

fn sums(t: &mut Rows) {
    // Half a unit of 1 is 0x33800000 (2⁻²⁴); 0x3f800001 is 1 + 2⁻²³; 1 is the smallest subnormal.
    for op in ["add.f32", "add.rn.f32"] {
        t.f2(
            op,
            &[
                (1.5, 2.25, 3.75),
                (1.0, x(0x3380_0000), 1.0),
                (x(0x3f80_0001), x(0x3380_0000), x(0x3f80_0002)),
                (1.0, x(0x3380_0001), x(0x3f80_0001)),
                (INF, -INF, NAN),
                (MAX, MAX, INF),
                (x(1), x(1), x(2)),
                (x(0x80_0000), x(0x8000_0001), x(0x7f_ffff)),
                (-0.0, -0.0, -0.0),
                (1.0, -1.0, 0.0),
                (NAN, 1.0, NAN),
            ],
        );
    }
    for op in ["sub.f32", "sub.rn.f32"] {
        t.f2(op, &[(1.5, 2.25, -0.75), (1.0, x(0x3280_0000), 1.0), (INF, INF, NAN), (0.0, 0.0, 0.0), (1.0, NAN, NAN)]);
    }
    // The inputs are flushed, and so is the difference of two normal numbers that is not one.
    let (one_and_half, small) = (x(0x00c0_0000), x(0x0080_0000));
    for op in ["add.ftz.f32", "add.rn.ftz.f32"] {
        t.f2(
            op,
            &[
                (x(1), 0.0, 0.0),
                (x(1), 1.0, 1.0),
                (one_and_half, -small, 0.0),
                (x(0x8000_0001), -0.0, -0.0),
                (one_and_half, small, x(0x0120_0000)),
            ],
        );
    }
    for op in ["sub.ftz.f32", "sub.rn.ftz.f32"] {
        t.f2(op, &[(x(1), 0.0, 0.0), (one_and_half, small, 0.0), (2.0, x(5), 2.0)]);
    }
    for op in ["add.sat.f32", "add.rn.sat.f32"] {
        t.f2(op, &[(1.0, 2.0, 1.0), (-1.0, 0.5, 0.0), (0.25, 0.5, 0.75), (NAN, 1.0, 0.0)]);
    }
    t.f2("sub.sat.f32", &[(3.0, 1.0, 1.0), (0.5, 1.0, 0.0), (0.75, 0.5, 0.25), (NAN, 1.0, 0.0)]);
}

fn products(t: &mut Rows) {
    for op in ["mul.f32", "mul.rn.f32"] {
        t.f2(
            op,
            &[
                (1.5, -2.0, -3.0),
                (NORMAL, 0.5, x(0x40_0000)),
                (x(1), 0.5, 0.0),
                (x(1), 0.75, x(1)),
                (x(3), 0.5, x(2)),
                (0.0, INF, NAN),
                (MAX, 2.0, INF),
                (x(0x3f80_0001), x(0x3f80_0001), x(0x3f80_0002)),
                (-0.0, 5.0, -0.0),
            ],
        );
    }
    for op in ["mul.ftz.f32", "mul.rn.ftz.f32"] {
        t.f2(op, &[(NORMAL, 0.5, 0.0), (x(1), 1.0, 0.0), (NORMAL, -0.5, -0.0), (3.0, 0.5, 1.5)]);
    }
    t.f2("mul.sat.f32", &[(2.0, 3.0, 1.0), (-1.0, 1.0, 0.0), (0.5, 0.5, 0.25), (NAN, 1.0, 0.0)]);
}

fn fused(t: &mut Rows) {
    let e = f32::EPSILON;
    for op in ["fma.rn.f32", "mad.rn.f32"] {
        t.f3(
            op,
            &[
                (2.0, 3.0, 4.0, 10.0),
                // (1 + e)(1 − e) − 1 = −e²: with two roundings it would be 0.
                (1.0 + e, 1.0 - e, -1.0, x(0xa880_0000)),
                (MAX, 2.0, -MAX, MAX),
                (0.0, INF, 1.0, NAN),
                (1.0, 1.0, x(0x3380_0000), 1.0),
                (-0.0, 1.0, -0.0, -0.0),
                (x(1), 0.5, x(1), x(2)),
            ],
        );
    }
    t.f3("fma.rn.ftz.f32", &[(NORMAL, 0.5, 0.0, 0.0), (x(1), 1.0, 1.0, 1.0), (NORMAL, 1.0, x(7), NORMAL)]);
    t.f3("fma.rn.sat.f32", &[(2.0, 3.0, 4.0, 1.0), (2.0, -3.0, 4.0, 0.0), (0.5, 0.5, 0.25, 0.5), (NAN, 1.0, 1.0, 0.0)]);
}

/// Towards zero, down and up. 1e-20 is far below half a unit of 1.
fn directed(t: &mut Rows) {
    let (below, above) = (x(0x3f7f_ffff), x(0x3f80_0001));
    for (r, up, down, minus, zero, big, tiny) in [
        ("rz", 1.0, below, x(0xbf7f_ffff), 0.0, MAX, 0.0),
        ("rm", 1.0, below, -1.0, -0.0, MAX, 0.0),
        ("rp", above, 1.0, x(0xbf7f_ffff), 0.0, INF, x(1)),
    ] {
        t.f2(
            &format!("add.{r}.f32"),
            &[
                (1.0, 1e-20, up),
                (1.0, -1e-20, down),
                (-1.0, 1e-20, minus),
                (1.0, -1.0, zero),
                (MAX, MAX, big),
                (1.5, 2.25, 3.75),
            ],
        );
        t.f2(
            &format!("sub.{r}.f32"),
            &[(1.0, -1e-20, up), (1.0, 1e-20, down), (-1.0, -1e-20, minus), (1.0, 1.0, zero), (MAX, -MAX, big)],
        );
        // (1 + 2⁻²³)² = 1 + 2⁻²² + 2⁻⁴⁶: only upwards does the last term count.
        let square = if r == "rp" { x(0x3f80_0003) } else { x(0x3f80_0002) };
        t.f2(&format!("mul.{r}.f32"), &[(above, above, square), (MAX, 2.0, big), (x(1), 0.5, tiny), (3.0, 0.5, 1.5)]);
        t.f3(
            &format!("fma.{r}.f32"),
            &[
                (1.0, 1.0, 1e-20, up),
                (1.0, 1.0, -1e-20, down),
                (-1.0, 1.0, 1e-20, minus),
                (1.0, 1.0, -1.0, zero),
                (above, above, 0.0, square),
                (MAX, 2.0, 0.0, big),
                (1e-20, 1e-20, 1.0, up),
            ],
        );
    }
}

fn quotients(t: &mut Rows) {
    t.f2(
        "div.rn.f32",
        &[
            (1.0, 3.0, x(0x3eaa_aaab)),
            (2.0, 3.0, x(0x3f2a_aaab)),
            (1.0, 0.0, INF),
            (-1.0, 0.0, -INF),
            (0.0, 0.0, NAN),
            (1.0, INF, 0.0),
            (NORMAL, 2.0, x(0x40_0000)),
            (MAX, 0.5, INF),
        ],
    );
    t.f2("div.rn.ftz.f32", &[(NORMAL, 2.0, 0.0), (x(1), x(1), NAN), (1.0, 3.0, x(0x3eaa_aaab)), (1.0, x(1), INF)]);
    t.f1("rcp.rn.f32", &[(3.0, x(0x3eaa_aaab)), (0.0, INF), (-0.0, -INF), (INF, 0.0), (-4.0, -0.25), (NAN, NAN)]);
    t.f1("rcp.rn.ftz.f32", &[(3.0, x(0x3eaa_aaab)), (x(1), INF), (x(0x8000_0001), -INF), (x(0x7e80_0001), 0.0)]);
    t.f1(
        "sqrt.rn.f32",
        &[(2.0, x(0x3fb5_04f3)), (9.0, 3.0), (-0.0, -0.0), (-1.0, NAN), (INF, INF), (x(1), x(0x1a35_04f3))],
    );
    t.f1("sqrt.rn.ftz.f32", &[(2.0, x(0x3fb5_04f3)), (x(1), 0.0), (x(0x8000_0001), -0.0)]);
}

fn signs(t: &mut Rows) {
    t.f1("neg.f32", &[(2.0, -2.0), (-0.0, 0.0), (x(1), x(0x8000_0001)), (NAN, NAN)]);
    t.f1("neg.ftz.f32", &[(2.0, -2.0), (x(1), -0.0)]);
    t.f1("abs.f32", &[(-2.0, 2.0), (-0.0, 0.0), (x(0x8000_0001), x(1)), (-INF, INF), (NAN, NAN)]);
    t.f1("abs.ftz.f32", &[(-2.0, 2.0), (x(0x8000_0001), 0.0)]);
    // The sign is the first operand's.
    t.f2("copysign.f32", &[(-1.0, 3.0, -3.0), (1.0, -3.0, 3.0), (-0.0, 5.0, -5.0)]);
    t.f1("mov.f32", &[(-2.0, -2.0), (x(1), x(1))]);
}

/// A number wins against NaN, and −0 is less than +0.
fn extremes(t: &mut Rows) {
    t.f2(
        "min.f32",
        &[
            (NAN, 2.0, 2.0),
            (2.0, NAN, 2.0),
            (NAN, NAN, x(0x7fff_ffff)),
            (0.0, -0.0, -0.0),
            (-0.0, 0.0, -0.0),
            (-INF, 3.0, -INF),
            (x(1), 0.0, 0.0),
            (1.0, 2.0, 1.0),
        ],
    );
    t.f2(
        "max.f32",
        &[
            (NAN, 2.0, 2.0),
            (2.0, NAN, 2.0),
            (NAN, NAN, x(0x7fff_ffff)),
            (0.0, -0.0, 0.0),
            (-0.0, 0.0, 0.0),
            (-INF, 3.0, 3.0),
            (x(1), 0.0, x(1)),
            (1.0, 2.0, 2.0),
        ],
    );
    t.f2("min.ftz.f32", &[(x(1), 5.0, 0.0), (x(0x8000_0001), 5.0, -0.0), (NAN, 2.0, 2.0), (3.0, 2.0, 2.0)]);
    t.f2("max.ftz.f32", &[(x(1), -5.0, 0.0), (NAN, 2.0, 2.0), (3.0, 2.0, 3.0)]);
    t.f2("min.NaN.f32", &[(NAN, 2.0, NAN), (2.0, NAN, NAN), (3.0, 2.0, 2.0), (0.0, -0.0, -0.0)]);
    t.f2("max.NaN.f32", &[(NAN, 2.0, NAN), (2.0, NAN, NAN), (3.0, 2.0, 3.0), (0.0, -0.0, 0.0)]);
}

fn doubles(t: &mut Rows) {
    let (nan, inf, e) = (f64::NAN, f64::INFINITY, f64::EPSILON);
    let bits = f64::from_bits;
    for op in ["add.f64", "add.rn.f64"] {
        t.double(op, &[(&[0.1, 0.2], bits(0x3fd3_3333_3333_3334)), (&[1.0, e / 2.0], 1.0), (&[inf, -inf], nan)]);
    }
    for op in ["sub.f64", "sub.rn.f64"] {
        t.double(op, &[(&[0.3, 0.1], bits(0x3fc9_9999_9999_9999)), (&[1.0, 1.0], 0.0)]);
    }
    for op in ["mul.f64", "mul.rn.f64"] {
        t.double(op, &[(&[0.1, 3.0], bits(0x3fd3_3333_3333_3334)), (&[1e300, 1e10], inf), (&[0.0, inf], nan)]);
    }
    for op in ["fma.rn.f64", "mad.rn.f64"] {
        t.double(op, &[(&[3.0, 4.0, 5.0], 17.0), (&[1.0 + e, 1.0 - e, -1.0], bits(0xb970_0000_0000_0000))]);
    }
    t.double("div.rn.f64", &[(&[1.0, 3.0], bits(0x3fd5_5555_5555_5555)), (&[1.0, 0.0], inf), (&[0.0, 0.0], nan)]);
    t.double(
        "min.f64",
        &[(&[nan, 1.0], 1.0), (&[1.0, nan], 1.0), (&[0.0, -0.0], -0.0), (&[2.0, 1.0], 1.0), (&[nan, nan], nan)],
    );
    t.double(
        "max.f64",
        &[(&[nan, 1.0], 1.0), (&[1.0, nan], 1.0), (&[-0.0, 0.0], 0.0), (&[2.0, 1.0], 2.0), (&[nan, nan], nan)],
    );
    t.double("neg.f64", &[(&[2.0], -2.0), (&[0.0], -0.0)]);
    t.double("abs.f64", &[(&[-2.0], 2.0), (&[-0.0], 0.0)]);
    t.double("sqrt.rn.f64", &[(&[2.0], bits(0x3ff6_a09e_667f_3bcd)), (&[-1.0], nan), (&[-0.0], -0.0)]);
    t.double("rcp.rn.f64", &[(&[3.0], bits(0x3fd5_5555_5555_5555)), (&[-0.0], -inf)]);
    t.double("mov.f64", &[(&[0.1], 0.1), (&[bits(1)], bits(1))]);
    debug_assert_eq!(d(0.1), 0x3fb9_9999_9999_999a);
}
