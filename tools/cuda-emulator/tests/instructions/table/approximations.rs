// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions that PTX only bounds.
//!
//! The bound is the one that its manual states, taken from the exact result: a fraction of it, a distance, or units in
//! the last place. What the manual tabulates (zeros, infinities, NaN) is exact.

use super::case::Ty::{B16, B32, B64};
use super::case::{Case, Float, Want};
use super::rows::{Rows, d, f};

/// What a function may be off by.
#[derive(Clone, Copy)]
enum Bound {
    /// Of the result.
    Relative(f64),
    Absolute(f64),
    /// Units in the last place of an f32.
    Units(f64),
}

/// What the manual tabulates.
const TABULATED: Bound = Bound::Relative(0.0);

impl Bound {
    fn at(self, value: f64) -> f64 {
        match self {
            Bound::Relative(r) => r * value.abs(),
            Bound::Absolute(a) => a,
            Bound::Units(n) => {
                let exponent = value.abs().log2().floor().max(-126.0);
                n * (exponent - 23.0).exp2()
            }
        }
    }
}

/// f32 results: any NaN, exact zeros and infinities (a distance from zero stays one), else near.
fn near(value: f64, bound: Bound) -> Want {
    if value.is_nan() {
        Want::Nan(Float::F32)
    } else if value.is_infinite() || value == 0.0 && !matches!(bound, Bound::Absolute(_)) {
        Want::Bits(f(value as f32))
    } else {
        // The exact value is not an f32: the result is, and was rounded.
        Want::Near(Float::F32, value, bound.at(value) + Bound::Units(0.5).at(value))
    }
}

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("approximations");
    let mut one = |op: &str, bound: Bound, rows: &[(f32, f64)]| {
        let given: Vec<[u64; 1]> = rows.iter().map(|r| [f(r.0)]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], near(r.1, bound))).collect();
        t.op(80, op, B32, &[B32], &rows);
    };
    let (inf, tiny) = (f32::INFINITY, f32::from_bits(1));
    let ulp2 = Bound::Units(2.0);
    for op in ["ex2.approx.f32", "ex2.approx.ftz.f32"] {
        one(
            op,
            ulp2,
            &[
                (0.0, 1.0),
                (-0.0, 1.0),
                (-inf, 0.0),
                (inf, INF),
                (f32::NAN, NAN),
                (-3.0, 0.125),
                (10.0, 1024.0),
                (0.5, std::f64::consts::SQRT_2),
                (-0.5, std::f64::consts::FRAC_1_SQRT_2),
                (0.25, 1.189_207_115_002_721),
                (-100.0, 7.888_609_052_210_118e-31),
                (127.0, 1.701_411_834_604_692_3e38),
                (128.0, INF),
                (tiny, 1.0),
            ],
        );
    }
    // 2⁻¹³⁰ is subnormal.
    one("ex2.approx.f32", ulp2, &[(-130.0, 7.346_839_692_639_297e-40)]);
    one("ex2.approx.ftz.f32", ulp2, &[(-130.0, 0.0)]);
    let log = Bound::Relative(2f64.powi(-22));
    for op in ["lg2.approx.f32", "lg2.approx.ftz.f32"] {
        one(
            op,
            log,
            &[
                (0.0, -INF),
                (-0.0, -INF),
                (-1.0, NAN),
                (inf, INF),
                (f32::NAN, NAN),
                (8.0, 3.0),
                (3.0, 1.584_962_500_721_156),
                (0.1, -3.321_928_073_379_537), // of the f32 nearest to 0.1
            ],
        );
        one(
            op,
            Bound::Absolute(2f64.powi(-22)),
            &[(1.0, 0.0), (1.5, 0.584_962_500_721_156), (0.75, -0.415_037_499_278_844)],
        );
    }
    one("lg2.approx.f32", log, &[(tiny, -149.0)]);
    one("lg2.approx.ftz.f32", log, &[(tiny, -INF)]);
    for (op, unit) in [("rcp.approx.f32", true), ("rcp.approx.ftz.f32", false)] {
        one(
            op,
            Bound::Units(1.0),
            &[(4.0, 0.25), (3.0, 1.0 / 3.0), (-7.0, -1.0 / 7.0), (0.0, INF), (-0.0, -INF), (inf, 0.0)],
        );
        one(op, Bound::Units(1.0), &[(tiny, INF), (f32::MAX, if unit { 2.938_735_877_055_719e-39 } else { 0.0 })]);
    }
    for op in ["sqrt.approx.f32", "sqrt.approx.ftz.f32"] {
        one(
            op,
            Bound::Relative(2f64.powi(-23)),
            &[(9.0, 3.0), (2.0, 2f64.sqrt()), (0.0, 0.0), (-0.0, -0.0), (-1.0, NAN), (inf, INF)],
        );
    }
    for op in ["rsqrt.approx.f32", "rsqrt.approx.ftz.f32"] {
        let bound = Bound::Relative(2f64.powf(-22.9));
        one(op, bound, &[(4.0, 0.5), (2.0, 0.5f64.sqrt()), (0.0, INF), (-0.0, -INF), (-1.0, NAN), (inf, 0.0)]);
    }
    one("rsqrt.approx.ftz.f32", Bound::Units(1.0), &[(tiny, INF)]);
    let wave = Bound::Absolute(2f64.powf(-20.5));
    for op in ["sin.approx.f32", "sin.approx.ftz.f32"] {
        one(op, TABULATED, &[(0.0, 0.0), (-0.0, -0.0), (inf, NAN), (-inf, NAN)]);
        one(op, wave, &[(1.0, 0.841_470_984_807_896_5), (-2.5, -0.598_472_144_103_956_5)]);
    }
    for op in ["cos.approx.f32", "cos.approx.ftz.f32"] {
        one(op, TABULATED, &[(0.0, 1.0), (-0.0, 1.0), (inf, NAN)]);
        one(op, wave, &[(1.0, 0.540_302_305_868_139_8), (-2.5, -0.801_143_615_546_933_7)]);
    }
    let bound = Bound::Relative(2f64.powi(-11));
    one(
        "tanh.approx.f32",
        bound,
        &[(0.0, 0.0), (-0.0, -0.0), (inf, 1.0), (-inf, -1.0), (f32::NAN, NAN), (0.5, 0.462_117_157_260_009_8)],
    );
    quotients(&mut t);
    doubles(&mut t);
    halves(&mut t);
    t.cases
}

fn quotients(t: &mut Rows) {
    for op in ["div.approx.f32", "div.full.f32", "div.approx.ftz.f32", "div.full.ftz.f32"] {
        let rows = [(1.0, 3.0, 1.0 / 3.0), (6.0, 3.0, 2.0), (-7.0, 5.0, -1.4), (0.0, 5.0, 0.0), (1.0, 0.0, INF)];
        let given: Vec<[u64; 2]> = rows.iter().map(|r| [f(r.0), f(r.1)]).collect();
        let rows: Vec<(&[u64], Want)> =
            given.iter().zip(rows).map(|(g, r)| (&g[..], near(r.2, Bound::Units(2.0)))).collect();
        t.op(80, op, B32, &[B32; 2], &rows);
    }
}

/// The fast f64 forms look at the upper word of their operand and leave zeros in the lower word of the result. Their
/// error is not stated; 2⁻²⁰ is what an upper word can hold.
fn doubles(t: &mut Rows) {
    let rows = |values: &[(f64, f64)]| -> Vec<([u64; 1], Want)> {
        let want = |y: f64| match y {
            y if y.is_nan() => Want::Nan(Float::F64),
            y if y.is_infinite() || y == 0.0 => Want::Bits(d(y)),
            y => Want::Near(Float::F64, y, y.abs() * 2f64.powi(-20)),
        };
        values.iter().map(|&(x, y)| ([d(x)], want(y))).collect()
    };
    let mut put = |op: &str, values: &[(f64, f64)]| {
        let rows = rows(values);
        let rows: Vec<(&[u64], Want)> = rows.iter().map(|(g, w)| (&g[..], *w)).collect();
        t.op(80, op, B64, &[B64], &rows);
    };
    let tiny = f64::from_bits(1);
    put(
        "rcp.approx.ftz.f64",
        &[(3.0, 1.0 / 3.0), (-4.0, -0.25), (0.0, INF), (-0.0, -INF), (INF, 0.0), (NAN, NAN), (tiny, INF)],
    );
    put(
        "rsqrt.approx.ftz.f64",
        &[(3.0, 3f64.sqrt().recip()), (4.0, 0.5), (0.0, INF), (-1.0, NAN), (INF, 0.0), (-tiny, -INF)],
    );
    put("rsqrt.approx.f64", &[(3.0, 3f64.sqrt().recip()), (4.0, 0.5), (0.0, INF), (-1.0, NAN), (INF, 0.0)]);
    for op in ["rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"] {
        let text = format!("{{ .reg .b32 lo, hi; .reg .b64 x; {op} x, $0; mov.b64 {{lo, hi}}, x; mov.b32 $d0, lo; }}");
        let c = Case::new("approximations", op, 32).takes(B64, |k| d(3.0 + k as f64)).gives(B32, |_| 0);
        t.cases.push(c.body(&text));
    }
}

fn halves(t: &mut Rows) {
    let want = |float: Float, y: f64, error: f64| {
        if y.is_nan() { Want::Nan(float) } else { Want::Near(float, y, error) }
    };
    let mut put = |sm: u32, op: &str, float: Float, error: fn(f64) -> f64, values: &[(u64, f64)]| {
        let rows: Vec<([u64; 1], Want)> = values.iter().map(|&(x, y)| ([x], want(float, y, error(y)))).collect();
        let rows: Vec<(&[u64], Want)> = rows.iter().map(|(g, w)| (&g[..], *w)).collect();
        t.op(sm, op, B16, &[B16], &rows);
    };
    // 0.5, −3 and NaN. A relative 2^-9.9, an absolute 2^-10.987, a relative 2⁻⁸.
    let ex2 = [(0x3800, std::f64::consts::SQRT_2), (0xc200, 0.125), (0x0000, 1.0), (0x7e00, NAN)];
    put(80, "ex2.approx.f16", Float::F16, |y| y * 2f64.powf(-9.9), &ex2);
    let tanh = [(0x3800, 0.462_117_157_260_009_8), (0xc200, -0.995_054_753_686_730_5), (0x0000, 0.0), (0x7e00, NAN)];
    put(80, "tanh.approx.f16", Float::F16, |_| 2f64.powf(-10.987), &tanh);
    let tanh = [(0x3f00, 0.462_117_157_260_009_8), (0xc040, -0.995_054_753_686_730_5), (0x0000, 0.0), (0x7fc0, NAN)];
    put(90, "tanh.approx.bf16", Float::Bf16, |y| y.abs() * 2f64.powi(-8), &tanh);
}
