// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cvt` between all types.
//!
//! Integers are extended by the sign of the source and cut to the destination; a destination narrower than its register
//! fills it. Floats become integers by one of four roundings and saturate. NaN becomes 0, except where a 64-bit integer
//! or an f64 is involved: then it is the sign bit alone.

use super::case::Ty::{self, B16, B32, B64};
use super::case::{Case, Float, Want};
use super::rows::{Rows, d, f};

/// The integer types, narrowest first: name, bits, register.
const INTEGERS: [(&str, u32, Ty); 8] = [
    ("u8", 8, B16),
    ("s8", 8, B16),
    ("u16", 16, B16),
    ("s16", 16, B16),
    ("u32", 32, B32),
    ("s32", 32, B32),
    ("u64", 64, B64),
    ("s64", 64, B64),
];

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("conversions");
    integers(&mut t);
    from_integers(&mut t);
    to_integers(&mut t);
    roundings(&mut t);
    between_floats(&mut t);
    t.cases
}

/// One source value a line, and what it becomes as u8, s8, u16, s16, u32, s32, u64, s64.
fn integers(t: &mut Rows) {
    let table: [(&str, u64, [u64; 8]); 13] = [
        ("u8", 0xff, [0xff, 0xffff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        ("u8", 0x7780, [0x80, 0xff80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80]),
        (
            "s8",
            0x80,
            [0x80, 0xff80, 0xff80, 0xff80, 0xffff_ff80, 0xffff_ff80, 0xffff_ffff_ffff_ff80, 0xffff_ffff_ffff_ff80],
        ),
        ("s8", 0x7f, [0x7f; 8]),
        ("u16", 0x8001, [1, 1, 0x8001, 0x8001, 0x8001, 0x8001, 0x8001, 0x8001]),
        (
            "s16",
            0x80fe,
            [0xfe, 0xfffe, 0x80fe, 0x80fe, 0xffff_80fe, 0xffff_80fe, 0xffff_ffff_ffff_80fe, 0xffff_ffff_ffff_80fe],
        ),
        ("s16", 0x0102, [2, 2, 0x102, 0x102, 0x102, 0x102, 0x102, 0x102]),
        ("u32", 0x8765_4321, [0x21, 0x21, 0x4321, 0x4321, 0x8765_4321, 0x8765_4321, 0x8765_4321, 0x8765_4321]),
        (
            "s32",
            0x8765_43a1,
            [0xa1, 0xffa1, 0x43a1, 0x43a1, 0x8765_43a1, 0x8765_43a1, 0xffff_ffff_8765_43a1, 0xffff_ffff_8765_43a1],
        ),
        ("s32", 5, [5; 8]),
        (
            "u64",
            0xfedc_ba98_7654_3210,
            [0x10, 0x10, 0x3210, 0x3210, 0x7654_3210, 0x7654_3210, 0xfedc_ba98_7654_3210, 0xfedc_ba98_7654_3210],
        ),
        (
            "s64",
            0xfedc_ba98_7654_b298,
            [0x98, 0xff98, 0xb298, 0xb298, 0x7654_b298, 0x7654_b298, 0xfedc_ba98_7654_b298, 0xfedc_ba98_7654_b298],
        ),
        ("s64", 0x1_0000_0007, [7, 7, 7, 7, 7, 7, 0x1_0000_0007, 0x1_0000_0007]),
    ];
    for (source, _, from) in INTEGERS {
        for (k, (target, _, to)) in INTEGERS.into_iter().enumerate() {
            let rows: Vec<(u64, u64)> = table.iter().filter(|l| l.0 == source).map(|l| (l.1, l.2[k])).collect();
            t.from(&format!("cvt.{target}.{source}"), to, from, &rows);
        }
    }
    t.from("cvt.sat.u8.s32", B16, B32, &[(300, 255), (0xffff_ffff, 0), (77, 77)]);
    t.from("cvt.sat.s8.s32", B16, B32, &[(300, 127), (0xffff_ff00, 0xff80), (0xffff_fffe, 0xfffe)]);
    t.from("cvt.sat.u16.s32", B16, B32, &[(0x1_0000, 0xffff), (0xffff_ffff, 0), (77, 77)]);
    t.from("cvt.sat.s16.s32", B16, B32, &[(0x8000, 0x7fff), (0x8000_0000, 0x8000), (0xffff_fffe, 0xfffe)]);
    // A register wider than the source type: its lower part counts.
    t.from("cvt.s64.s32", B64, B64, &[(0x5_ffff_ffff, u64::MAX), (0x5_7fff_ffff, 0x7fff_ffff)]);
    t.from("cvt.u32.u16", B32, B32, &[(0x1234_8765, 0x8765)]);
}

/// Source, value, and what it becomes: f32 to nearest, f32 towards zero, f64, f16, bf16.
fn from_integers(t: &mut Rows) {
    let table: [(&str, u64, [u64; 5]); 18] = [
        ("u8", 255, [0x437f_0000, 0x437f_0000, 0x406f_e000_0000_0000, 0x5bf8, 0x437f]),
        ("s8", 0x80, [0xc300_0000, 0xc300_0000, 0xc060_0000_0000_0000, 0xd800, 0xc300]),
        ("u16", 0xffff, [0x477f_ff00, 0x477f_ff00, 0x40ef_ffe0_0000_0000, 0x7c00, 0x4780]),
        ("u16", 65519, [0x477f_ef00, 0x477f_ef00, 0x40ef_fde0_0000_0000, 0x7bff, 0x4780]),
        ("u16", 2049, [0x4500_1000, 0x4500_1000, 0x40a0_0200_0000_0000, 0x6800, 0x4500]),
        ("u16", 2051, [0x4500_3000, 0x4500_3000, 0x40a0_0600_0000_0000, 0x6802, 0x4500]),
        ("s16", 0x8001, [0xc6ff_fe00, 0xc6ff_fe00, 0xc0df_ffc0_0000_0000, 0xf800, 0xc700]),
        ("u32", 0xffff_ffff, [0x4f80_0000, 0x4f7f_ffff, 0x41ef_ffff_ffe0_0000, 0x7c00, 0x4f80]),
        ("u32", 16_777_217, [0x4b80_0000, 0x4b80_0000, 0x4170_0000_1000_0000, 0x7c00, 0x4b80]),
        ("u32", 16_777_219, [0x4b80_0002, 0x4b80_0001, 0x4170_0000_3000_0000, 0x7c00, 0x4b80]),
        ("s32", 0x8000_0001, [0xcf00_0000, 0xceff_ffff, 0xc1df_ffff_ffc0_0000, 0xfc00, 0xcf00]),
        ("s32", 0xffff_ffff, [0xbf80_0000, 0xbf80_0000, 0xbff0_0000_0000_0000, 0xbc00, 0xbf80]),
        ("u64", u64::MAX, [0x5f80_0000, 0x5f7f_ffff, 0x43f0_0000_0000_0000, 0x7c00, 0x5f80]),
        ("u64", (1 << 53) + 1, [0x5a00_0000, 0x5a00_0000, 0x4340_0000_0000_0000, 0x7c00, 0x5a00]),
        // Half a unit of bf16 and 1: neither f32 nor f64 can hold it, and rounding twice would go down.
        ("u64", (1 << 63) + (1 << 55) + 1, [0x5f00_8000, 0x5f00_8000, 0x43e0_1000_0000_0000, 0x7c00, 0x5f01]),
        ("s64", 0x8000_0000_0000_0001, [0xdf00_0000, 0xdeff_ffff, 0xc3e0_0000_0000_0000, 0xfc00, 0xdf00]),
        ("s64", u64::MAX, [0xbf80_0000, 0xbf80_0000, 0xbff0_0000_0000_0000, 0xbc00, 0xbf80]),
        ("s64", 1 << 40, [0x5380_0000, 0x5380_0000, 0x4270_0000_0000_0000, 0x7c00, 0x5380]),
    ];
    for (source, _, from) in INTEGERS {
        let targets =
            [("rn.f32", B32, 80), ("rz.f32", B32, 80), ("rn.f64", B64, 80), ("rn.f16", B16, 80), ("rn.bf16", B16, 90)];
        for (k, (target, to, sm)) in targets.into_iter().enumerate() {
            if target == "rn.bf16" && source.ends_with('8') {
                continue; // there is no such instruction
            }
            let lines: Vec<([u64; 1], u64)> = table.iter().filter(|l| l.0 == source).map(|l| ([l.1], l.2[k])).collect();
            let rows: Vec<(&[u64], Want)> = lines.iter().map(|(g, r)| (&g[..], (*r).into())).collect();
            t.op(sm, &format!("cvt.{target}.{source}"), to, &[from], &rows);
        }
    }
}

/// (number, to nearest even, towards zero, down, up)
const ROUNDINGS: [(f64, [i64; 4]); 8] = [
    (2.5, [2, 2, 2, 3]),
    (3.5, [4, 3, 3, 4]),
    (-2.5, [-2, -2, -3, -2]),
    (-0.75, [-1, 0, -1, 0]),
    (0.25, [0, 0, 0, 1]),
    (100.0, [100, 100, 100, 100]),
    (-100.5, [-100, -100, -101, -100]),
    (99.75, [100, 99, 99, 100]),
];

const MODES: [&str; 4] = ["rni", "rzi", "rmi", "rpi"];

/// f16 bits of the numbers that are converted to integers.
fn half(x: f64) -> u64 {
    match x {
        2.5 => 0x4100,
        3.5 => 0x4300,
        -2.5 => 0xc100,
        -0.75 => 0xba00,
        0.25 => 0x3400,
        100.0 => 0x5640,
        -100.5 => 0xd648,
        99.75 => 0x563c,
        _ => unreachable!("{x} is not in the table"),
    }
}

/// Names, bits and encoding of a source format, and its ∞, −∞ and NaN.
type Source = (&'static str, Ty, fn(f64) -> u64, [u64; 3]);

fn to_integers(t: &mut Rows) {
    let single: fn(f64) -> u64 = |x| f(x as f32);
    let special32 = [0x7f80_0000, 0xff80_0000, 0x7fc0_0000];
    let sources: [Source; 4] = [
        ("f32", B32, single, special32),
        ("ftz.f32", B32, single, special32),
        ("f64", B64, d, [0x7ff0_0000_0000_0000, 0xfff0_0000_0000_0000, 0x7ff8_0000_0000_0000]),
        ("f16", B16, half, [0x7c00, 0xfc00, 0x7e00]),
    ];
    for (source, from, encode, [inf, minus_inf, nan]) in sources {
        for (target, bits, to) in INTEGERS {
            let signed = target.starts_with('s');
            let ones = u64::MAX >> (64 - bits);
            // As the register holds it: 8 signed bits fill 16.
            let (most, least) = match (signed, bits) {
                (false, _) => (ones, 0),
                (true, 8) => (0x7f, 0xff80),
                (true, _) => (ones >> 1, (ones >> 1) + 1),
            };
            let zero = source != "f64" && bits < 64;
            let of_nan = match (zero, signed, bits) {
                (true, ..) => 0,
                (false, true, 8) => 0xff80,
                (false, ..) => (ones >> 1) + 1,
            };
            let register = if bits == 8 { 0xffff } else { ones };
            for (mode, rounding) in MODES.into_iter().enumerate() {
                let mut rows = vec![(inf, most), (minus_inf, least), (nan, of_nan)];
                for (x, results) in ROUNDINGS {
                    let r = results[mode];
                    rows.push((encode(x), if r < 0 && !signed { 0 } else { r as u64 & register }));
                }
                let (ftz, source) = source.strip_prefix("ftz.").map_or(("", source), |s| (".ftz", s));
                t.from(&format!("cvt.{rounding}{ftz}.{target}.{source}"), to, from, &rows);
            }
        }
    }
    // Beyond the range, and a subnormal number that only counts upwards.
    t.from("cvt.rzi.u32.f32", B32, B32, &[(f(-5.0), 0), (f(5e9), 0xffff_ffff), (f(4e9), 4_000_000_000)]);
    t.from("cvt.rzi.s32.f32", B32, B32, &[(f(3e9), 0x7fff_ffff), (f(-3e9), 0x8000_0000)]);
    t.from("cvt.rzi.u64.f32", B64, B32, &[(f(1e19), 0x8ac7_2300_0000_0000), (f(2e19), u64::MAX), (f(-1.0), 0)]);
    t.from(
        "cvt.rzi.s64.f64",
        B64,
        B64,
        &[(d(1e19), i64::MAX as u64), (d(-1e18), (-1_000_000_000_000_000_000i64) as u64)],
    );
    t.from("cvt.rpi.s32.f32", B32, B32, &[(1, 1)]);
    t.from("cvt.rpi.ftz.s32.f32", B32, B32, &[(1, 0)]);
    t.from("cvt.rmi.ftz.s32.f32", B32, B32, &[(0x8000_0001, 0)]);
}

/// To an integer that stays a float.
fn roundings(t: &mut Rows) {
    for (mode, rounding) in MODES.into_iter().enumerate() {
        let mut single = vec![(f(f32::INFINITY), f(f32::INFINITY)), (f(-0.0), f(-0.0)), (f(1e30), f(1e30))];
        let mut double = vec![(d(f64::NEG_INFINITY), d(f64::NEG_INFINITY)), (d(-0.0), d(-0.0)), (d(1e300), d(1e300))];
        for (x, results) in ROUNDINGS {
            let r = results[mode] as f64;
            let r = if r == 0.0 && x < 0.0 { -0.0 } else { r };
            single.push((f(x as f32), f(r as f32)));
            double.push((d(x), d(r)));
        }
        t.from(&format!("cvt.{rounding}.f32.f32"), B32, B32, &single);
        t.from(&format!("cvt.{rounding}.f64.f64"), B64, B64, &double);
    }
}

fn between_floats(t: &mut Rows) {
    t.f1("cvt.f32.f32", &[(1.5, 1.5), (f32::from_bits(1), f32::from_bits(1)), (f32::NAN, f32::NAN)]);
    t.f1("cvt.ftz.f32.f32", &[(1.5, 1.5), (f32::from_bits(0x8000_0001), -0.0), (f32::NAN, f32::NAN)]);
    for op in ["cvt.sat.f32.f32", "cvt.ftz.sat.f32.f32"] {
        t.f1(op, &[(-3.5, 0.0), (3.5, 1.0), (0.25, 0.25), (f32::NAN, 0.0)]);
    }
    t.from("cvt.f64.f32", B64, B32, &[(f(0.1), 0x3fb9_9999_a000_0000), (1, 0x36a0_0000_0000_0000), (f(-0.0), d(-0.0))]);
    // 1 + 2⁻²⁴ is a tie between 1 and its successor.
    let (tie, above) = (0x3ff0_0000_1000_0000, 0x3ff0_0000_1000_0001);
    let big = 0x7e37_e43c_8800_759c; // 1e300
    t.from(
        "cvt.rn.f32.f64",
        B32,
        B64,
        &[
            (tie, 0x3f80_0000),
            (above, 0x3f80_0001),
            (0x3ff0_0000_3000_0000, 0x3f80_0002),
            (big, 0x7f80_0000),
            (d(1e-300), 0),
            (d(-1e-300), 0x8000_0000),
        ],
    );
    let minus = |x: u64| x | 1 << 63;
    t.from(
        "cvt.rz.f32.f64",
        B32,
        B64,
        &[(above, 0x3f80_0000), (minus(above), 0xbf80_0000), (big, 0x7f7f_ffff), (d(1e-300), 0)],
    );
    t.from(
        "cvt.rm.f32.f64",
        B32,
        B64,
        &[(above, 0x3f80_0000), (minus(tie), 0xbf80_0001), (big, 0x7f7f_ffff), (d(-1e-300), 0x8000_0001)],
    );
    t.from(
        "cvt.rp.f32.f64",
        B32,
        B64,
        &[(tie, 0x3f80_0001), (minus(above), 0xbf80_0000), (big, 0x7f80_0000), (d(1e-300), 1)],
    );
    halves(t);
}

fn halves(t: &mut Rows) {
    let nan = |float| Want::Nan(float);
    t.op(
        80,
        "cvt.f32.f16",
        B32,
        &[B16],
        &[
            (&[0x0001], f(2f32.powi(-24)).into()),
            (&[0x7bff], f(65504.0).into()),
            (&[0x7c00], f(f32::INFINITY).into()),
            (&[0x8000], f(-0.0).into()),
            (&[0x7e00], nan(Float::F32)),
        ],
    );
    t.op(
        80,
        "cvt.f32.bf16",
        B32,
        &[B16],
        &[
            (&[0x3fc0], f(1.5).into()),
            (&[0x0001], 0x1_0000.into()),
            (&[0xff80], f(f32::NEG_INFINITY).into()),
            (&[0x7fc0], nan(Float::F32)),
        ],
    );
    t.op(
        80,
        "cvt.f64.f16",
        B64,
        &[B16],
        &[(&[0x3e00], d(1.5).into()), (&[0x8001], d(-(2f64.powi(-24))).into()), (&[0x7e00], nan(Float::F64))],
    );
    // Ties, the last number before infinity, and subnormal halves: 33000000 is half of the smallest.
    t.op(
        80,
        "cvt.rn.f16.f32",
        B16,
        &[B32],
        &[
            (&[0x3f80_1000], 0x3c00.into()),
            (&[0x3f80_3000], 0x3c02.into()),
            (&[0x3f80_1001], 0x3c01.into()),
            (&[0x477f_efff], 0x7bff.into()),
            (&[0x477f_f000], 0x7c00.into()),
            (&[0xff80_0000], 0xfc00.into()),
            (&[0x3300_0000], 0x0000.into()),
            (&[0x3300_0001], 0x0001.into()),
            (&[0xb3c0_0000], 0x8002.into()),
            (&[0x387f_ffff], 0x0400.into()),
            (&[0x7fc0_0000], nan(Float::F16)),
        ],
    );
    t.op(
        80,
        "cvt.rz.f16.f32",
        B16,
        &[B32],
        &[
            (&[0x3f80_1fff], 0x3c00.into()),
            (&[0xbf80_3fff], 0xbc01.into()),
            (&[0x477f_f000], 0x7bff.into()),
            (&[0x7f80_0000], 0x7c00.into()),
            (&[0x33ff_ffff], 0x0001.into()),
            (&[0x7fc0_0000], nan(Float::F16)),
        ],
    );
    // By way of f32, 1 + 2⁻¹¹ + 2⁻⁴⁰ would become a tie.
    t.op(
        80,
        "cvt.rn.f16.f64",
        B16,
        &[B64],
        &[
            (&[0x3ff0_0200_0000_0000], 0x3c00.into()),
            (&[0x3ff0_0200_0000_1000], 0x3c01.into()),
            (&[0x40ef_fdff_ffff_ffff], 0x7bff.into()),
            (&[0x40ef_fe00_0000_0000], 0x7c00.into()),
            (&[0x7ff8_0000_0000_0000], nan(Float::F16)),
        ],
    );
    t.op(
        80,
        "cvt.rn.bf16.f32",
        B16,
        &[B32],
        &[
            (&[0x3f80_8000], 0x3f80.into()),
            (&[0x3f81_8000], 0x3f82.into()),
            (&[0x3f80_8001], 0x3f81.into()),
            (&[0x7f7f_7fff], 0x7f7f.into()),
            (&[0x7f7f_8000], 0x7f80.into()),
            (&[0x0000_8001], 0x0001.into()),
            (&[0x7fc0_0000], nan(Float::Bf16)),
        ],
    );
    t.op(
        80,
        "cvt.rz.bf16.f32",
        B16,
        &[B32],
        &[
            (&[0x3f80_ffff], 0x3f80.into()),
            (&[0xff7f_ffff], 0xff7f.into()),
            (&[0x7f80_0000], 0x7f80.into()),
            (&[0x7f80_0001], nan(Float::Bf16)),
        ],
    );
    // The first operand becomes the upper half.
    let (two, one) = (f(2.0), f(1.0));
    for (op, rows) in [
        ("cvt.rn.f16x2.f32", [(two, one, 0x4000_3c00), (0x3f80_3000, 0x477f_f000, 0x3c02_7c00)]),
        ("cvt.rz.f16x2.f32", [(two, one, 0x4000_3c00), (0x3f80_3000, 0x477f_f000, 0x3c01_7bff)]),
        ("cvt.rn.relu.f16x2.f32", [(f(-2.0), one, 0x0000_3c00), (0x3f80_3000, f(-1.0), 0x3c02_0000)]),
        ("cvt.rn.bf16x2.f32", [(two, one, 0x4000_3f80), (0x3f81_8000, 0x7f7f_8000, 0x3f82_7f80)]),
        ("cvt.rz.bf16x2.f32", [(two, one, 0x4000_3f80), (0x3f81_8000, 0x7f7f_8000, 0x3f81_7f7f)]),
        ("cvt.rn.relu.bf16x2.f32", [(f(-2.0), one, 0x0000_3f80), (0x3f81_8000, f(-1.0), 0x3f82_0000)]),
    ] {
        t.two(op, B32, &rows);
    }
}
