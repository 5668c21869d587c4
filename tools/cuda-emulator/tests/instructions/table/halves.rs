// SPDX-License-Identifier: MIT OR Apache-2.0
//! f16 and bf16 arithmetic, single and packed in pairs.
//!
//! In f16 1 is 3c00, 1.5 3e00, 2 4000, the largest 7bff, infinity 7c00, and 1000 is half a unit of 1. In bf16 they are
//! 3f80, 3fc0, 4000, 7f7f, 7f80 and 3b80.

use super::case::Ty::{B16, B32};
use super::case::{Case, Float, Want};
use super::rows::Rows;

/// Operands and result of one instruction; a result of `None` is NaN.
type Row = (&'static [u64], Option<u64>);

struct Format {
    name: &'static str,
    float: Float,
    /// What sums and products need.
    sm: u32,
    add: &'static [Row],
    sub: &'static [Row],
    mul: &'static [Row],
    fma: &'static [Row],
    min: &'static [Row],
    max: &'static [Row],
    neg: &'static [Row],
    abs: &'static [Row],
}

const F16: Format = Format {
    name: "f16",
    float: Float::F16,
    sm: 80,
    add: &[
        (&[0x3e00, 0x3e00], Some(0x4200)),
        (&[0x3c00, 0x1000], Some(0x3c00)), // a tie goes to the even one
        (&[0x3c01, 0x1000], Some(0x3c02)),
        (&[0x3c00, 0x1001], Some(0x3c01)),
        (&[0x7bff, 0x7bff], Some(0x7c00)),
        (&[0x0001, 0x0001], Some(0x0002)),
        (&[0x7c00, 0xfc00], None),
    ],
    sub: &[(&[0x3c00, 0x3e00], Some(0xb800)), (&[0x0400, 0x0001], Some(0x03ff)), (&[0x3c00, 0x3c00], Some(0))],
    mul: &[
        (&[0x3e00, 0x3e00], Some(0x4080)),
        (&[0x0400, 0x3800], Some(0x0200)),
        (&[0x7bff, 0x4000], Some(0x7c00)),
        (&[0x0001, 0x3800], Some(0x0000)),
        (&[0x0003, 0xb800], Some(0x8002)),
    ],
    fma: &[
        (&[0x3e00, 0x4000, 0x3c00], Some(0x4400)),
        // (1 + u)² − (1 + 2u) = u² = 2⁻²⁰.
        (&[0x3c01, 0x3c01, 0xbc02], Some(0x0010)),
        (&[0x7bff, 0x4000, 0xfbff], Some(0x7bff)),
        (&[0x0000, 0x7c00, 0x3c00], None),
    ],
    min: &[
        (&[0x3c00, 0x7e00], Some(0x3c00)),
        (&[0x8000, 0x0000], Some(0x8000)),
        (&[0xc000, 0x3c00], Some(0xc000)),
        (&[0x7e00, 0x7e00], None),
    ],
    max: &[(&[0x7e00, 0x3c00], Some(0x3c00)), (&[0x8000, 0x0000], Some(0x0000)), (&[0xc000, 0x3c00], Some(0x3c00))],
    neg: &[(&[0x3c00], Some(0xbc00)), (&[0x8000], Some(0x0000))],
    abs: &[(&[0xbc00], Some(0x3c00)), (&[0xfc00], Some(0x7c00))],
};

const BF16: Format = Format {
    name: "bf16",
    float: Float::Bf16,
    sm: 90,
    add: &[
        (&[0x3fc0, 0x3fc0], Some(0x4040)),
        (&[0x3f80, 0x3b80], Some(0x3f80)),
        (&[0x3f81, 0x3b80], Some(0x3f82)),
        (&[0x3f80, 0x3b81], Some(0x3f81)),
        (&[0x7f7f, 0x7f7f], Some(0x7f80)),
        (&[0x7f80, 0xff80], None),
    ],
    sub: &[(&[0x3f80, 0x3fc0], Some(0xbf00)), (&[0x0080, 0x0001], Some(0x007f)), (&[0x3f80, 0x3f80], Some(0))],
    mul: &[(&[0x3fc0, 0x3fc0], Some(0x4010)), (&[0x0080, 0x3f00], Some(0x0040)), (&[0x7f7f, 0x4000], Some(0x7f80))],
    fma: &[
        (&[0x3fc0, 0x4000, 0x3f80], Some(0x4080)),
        (&[0x3f81, 0x3f81, 0xbf82], Some(0x3880)),
        // 1.0078125 · 1.5 is a tie between 3fc1 and 3fc2, and ±2⁻¹⁰⁰ decides it.
        (&[0x3f81, 0x3fc0, 0x0000], Some(0x3fc2)),
        (&[0x3f81, 0x3fc0, 0x0d80], Some(0x3fc2)),
        (&[0x3f81, 0x3fc0, 0x8d80], Some(0x3fc1)),
        (&[0x0000, 0x7f80, 0x3f80], None),
    ],
    min: &[
        (&[0x3f80, 0x7fc0], Some(0x3f80)),
        (&[0x8000, 0x0000], Some(0x8000)),
        (&[0xc000, 0x3f80], Some(0xc000)),
        (&[0x7fc0, 0x7fc0], None),
    ],
    max: &[(&[0x7fc0, 0x3f80], Some(0x3f80)), (&[0x8000, 0x0000], Some(0x0000)), (&[0xc000, 0x3f80], Some(0x3f80))],
    neg: &[(&[0x3f80], Some(0xbf80)), (&[0x8000], Some(0x0000))],
    abs: &[(&[0xbf80], Some(0x3f80)), (&[0xff80], Some(0x7f80))],
};

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("halves");
    for format in [F16, BF16] {
        let n = format.name;
        for (op, sm, rows) in [
            ("add", format.sm, format.add),
            ("add.rn", format.sm, format.add),
            ("sub", format.sm, format.sub),
            ("sub.rn", format.sm, format.sub),
            ("mul", format.sm, format.mul),
            ("mul.rn", format.sm, format.mul),
            ("fma.rn", 80, format.fma),
            ("min", 80, format.min),
            ("max", 80, format.max),
            ("neg", 80, format.neg),
            ("abs", 80, format.abs),
        ] {
            single(&mut t, sm, &format!("{op}.{n}"), format.float, rows);
            packed(&mut t, sm, &format!("{op}.{n}x2"), rows);
        }
    }
    single(
        &mut t,
        80,
        "add.sat.f16",
        Float::F16,
        &[
            (&[0x3e00, 0x3e00], Some(0x3c00)),
            (&[0xbc00, 0x3800], Some(0x0000)),
            (&[0x3400, 0x3800], Some(0x3a00)),
            (&[0x7e00, 0x3800], Some(0x0000)),
        ],
    );
    let relu: &[Row] =
        &[(&[0xbc00, 0x3c00, 0x0000], Some(0)), (&[0x3c00, 0x3c00, 0x3c00], Some(0x4000)), (&[0x7e00, 0, 0], None)];
    single(&mut t, 80, "fma.rn.relu.f16", Float::F16, relu);
    let relu: &[Row] =
        &[(&[0xbf80, 0x3f80, 0x0000], Some(0)), (&[0x3f80, 0x3f80, 0x3f80], Some(0x4000)), (&[0x7fc0, 0, 0], None)];
    single(&mut t, 80, "fma.rn.relu.bf16", Float::Bf16, relu);
    t.cases
}

fn single(t: &mut Rows, sm: u32, op: &str, float: Float, rows: &[Row]) {
    let rows: Vec<(&[u64], Want)> = rows.iter().map(|r| (r.0, r.1.map_or(Want::Nan(float), Want::Bits))).collect();
    t.op(sm, op, B16, &vec![B16; rows[0].0.len()], &rows);
}

/// Two rows at a time, one in each half. NaN has a payload here as in every half: the canonical one, 7fff.
fn packed(t: &mut Rows, sm: u32, op: &str, rows: &[Row]) {
    let n = rows.len();
    let both = |k: usize| {
        let (low, high) = (rows[k], rows[(k + 1) % n]);
        let operands: Vec<u64> = low.0.iter().zip(high.0).map(|(l, h)| l | h << 16).collect();
        (operands, low.1.unwrap_or(0x7fff) | high.1.unwrap_or(0x7fff) << 16)
    };
    let made: Vec<(Vec<u64>, u64)> = (0..n).map(both).collect();
    let rows: Vec<(&[u64], Want)> = made.iter().map(|(o, r)| (&o[..], (*r).into())).collect();
    t.op(sm, op, B32, &vec![B32; made[0].0.len()], &rows);
}
