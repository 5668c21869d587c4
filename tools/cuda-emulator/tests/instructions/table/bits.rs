// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bit counts, bit fields, funnel shifts, byte permutes and three-input logic.

use super::case::Case;
use super::case::Ty::{B32, B64};
use super::rows::Rows;

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("bits");
    counts(&mut t);
    fields(&mut t);
    funnels(&mut t);
    permutes(&mut t);
    // The table's bit 4a + 2b + c is the result: 0xf0 is a, 0xcc is b, 0xaa is c.
    for (table, result) in [
        ("0xf0", 0xff00_f0f0),
        ("0xcc", 0x0ff0_cccc),
        ("0xaa", 0x3c3c_aaaa),
        ("0x96", 0xcccc_9696),
        ("0xe8", 0x3f30_e8e8),
        ("0x80", 0x0c00_8080),
        ("0xfe", 0xfffc_fefe),
        ("0x1a", 0xc03c_1a1a),
        ("0x00", 0),
        ("0xff", 0xffff_ffff),
    ] {
        let text = format!("lop3.b32 $d, $0, $1, $2, {table};");
        t.written(80, &text, B32, &[B32; 3], &[(&[0xff00_f0f0, 0x0ff0_cccc, 0x3c3c_aaaa], result.into())]);
    }
    t.cases
}

fn counts(t: &mut Rows) {
    t.from("popc.b32", B32, B32, &[(0xf0f0, 8), (0, 0), (0xffff_ffff, 32)]);
    t.from("popc.b64", B32, B64, &[(u64::MAX, 64), (0x8000_0000_0000_0001, 2)]);
    t.from("clz.b32", B32, B32, &[(1, 31), (0, 32), (0x8000_0000, 0)]);
    t.from("clz.b64", B32, B64, &[(1, 63), (0, 64), (1 << 40, 23)]);
    t.one("brev.b32", B32, &[(1, 0x8000_0000), (0x1234_5678, 0x1e6a_2c48)]);
    t.one("brev.b64", B64, &[(1, 1 << 63), (0x1234_5678, 0x1e6a_2c48_0000_0000)]);
    t.from("bfind.u32", B32, B32, &[(0x100, 8), (0, 0xffff_ffff), (0xffff_ffff, 31)]);
    t.from("bfind.u64", B32, B64, &[(1 << 40, 40), (0, 0xffff_ffff)]);
    // Of a negative number, the highest bit that is not a sign.
    t.from("bfind.s32", B32, B32, &[(0x100, 8), (0xffff_ffff, 0xffff_ffff), (0xffff_fff0, 3), (0, 0xffff_ffff)]);
    t.from("bfind.shiftamt.u32", B32, B32, &[(0x100, 23), (1, 31), (0x8000_0000, 0), (0, 0xffff_ffff)]);
}

fn fields(t: &mut Rows) {
    t.triple(
        80,
        "bfe.u32",
        B32,
        [B32; 3],
        &[
            (0xabcd, 4, 8, 0xbc),
            (0xabcd, 4, 0, 0),
            (0x8000_0000, 31, 4, 1),
            (0xffff_ffff, 32, 4, 0),
            (0xffff_ffff, 0, 40, 0xffff_ffff),
            (0xabcd, 0x104, 0x108, 0xbc), // eight bits of position and length count
        ],
    );
    t.triple(
        80,
        "bfe.s32",
        B32,
        [B32; 3],
        &[
            (0xabcd, 4, 8, 0xffff_ffbc),
            (0xabcd, 4, 7, 0x3c),
            (0xabcd, 4, 0, 0),
            (0x8000_0000, 28, 8, 0xffff_fff8),
            (0x8000_0000, 40, 4, 0xffff_ffff),
            (0x7000_0000, 40, 4, 0),
        ],
    );
    t.triple(
        80,
        "bfe.u64",
        B64,
        [B64, B32, B32],
        &[
            (0xab << 40, 40, 4, 0xb),
            (u64::MAX, 63, 9, 1),
            (u64::MAX, 64, 9, 0),
            (0x1234_5678_9abc_def0, 0, 64, 0x1234_5678_9abc_def0),
        ],
    );
    t.triple(
        80,
        "bfe.s64",
        B64,
        [B64, B32, B32],
        &[(0xab << 40, 40, 4, 0xffff_ffff_ffff_fffb), (0x3b << 40, 40, 7, 0x3b), (1 << 63, 70, 3, u64::MAX)],
    );
    let four = |rows: &[(u64, u64, u64, u64, u64)]| -> (Vec<[u64; 4]>, Vec<u64>) {
        (rows.iter().map(|r| [r.0, r.1, r.2, r.3]).collect(), rows.iter().map(|r| r.4).collect())
    };
    let (given, results) = four(&[
        (0xf, 0, 8, 4, 0xf00),
        (0, 0xffff_ffff, 8, 4, 0xffff_f0ff),
        (0xff, 0x1234_5678, 28, 8, 0xf234_5678),
        (0xff, 0x1234_5678, 32, 8, 0x1234_5678),
        (0xff, 0x1234_5678, 4, 0, 0x1234_5678),
        (0xaaaa_aaaa, 0x5555_5555, 0, 32, 0xaaaa_aaaa),
    ]);
    let rows: Vec<_> = given.iter().zip(results).map(|(g, r)| (&g[..], r.into())).collect();
    t.op(80, "bfi.b32", B32, &[B32; 4], &rows);
    let (given, results) = four(&[
        (1, 2, 32, 8, 0x1_0000_0002),
        (0, u64::MAX, 60, 8, 0x0fff_ffff_ffff_ffff),
        (5, 9, 64, 8, 9),
        (u64::MAX, 0, 0, 64, u64::MAX),
    ]);
    let rows: Vec<_> = given.iter().zip(results).map(|(g, r)| (&g[..], r.into())).collect();
    t.op(80, "bfi.b64", B64, &[B64, B64, B32, B32], &rows);
}

/// The second operand is the upper word. `wrap` takes the amount modulo 32, `clamp` stops at 32.
fn funnels(t: &mut Rows) {
    let (lo, hi) = (0x8765_4321, 0xfedc_ba98);
    t.three("shf.l.wrap.b32", B32, &[(lo, hi, 4, 0xedcb_a988), (lo, hi, 32, hi), (lo, hi, 36, 0xedcb_a988)]);
    t.three("shf.l.clamp.b32", B32, &[(lo, hi, 4, 0xedcb_a988), (lo, hi, 32, lo), (lo, hi, 99, lo), (lo, hi, 0, hi)]);
    t.three("shf.r.wrap.b32", B32, &[(lo, hi, 4, 0x8876_5432), (lo, hi, 32, lo), (lo, hi, 36, 0x8876_5432)]);
    t.three("shf.r.clamp.b32", B32, &[(lo, hi, 4, 0x8876_5432), (lo, hi, 32, hi), (lo, hi, 99, hi), (lo, hi, 0, lo)]);
}

/// Bytes 0 to 3 are the first operand's, 4 to 7 the second's.
fn permutes(t: &mut Rows) {
    let (a, b) = (0x3322_1100, 0x7766_5544);
    t.three(
        "prmt.b32",
        B32,
        &[
            (a, b, 0x5410, 0x5544_1100),
            (a, b, 0x0123, 0x0011_2233),
            (a, b, 0x7777, 0x7777_7777),
            (0x0000_8000, 0x7f, 0xc981, 0x00ff_0080), // bit 3 of a selector spreads the byte's sign
            (a, b, 0xffff_5410, 0x5544_1100),
        ],
    );
    t.three(
        "prmt.b32.f4e",
        B32,
        &[(a, b, 0, 0x3322_1100), (a, b, 1, 0x4433_2211), (a, b, 2, 0x5544_3322), (a, b, 3, 0x6655_4433)],
    );
    t.three(
        "prmt.b32.b4e",
        B32,
        &[(a, b, 0, 0x5566_7700), (a, b, 1, 0x6677_0011), (a, b, 2, 0x7700_1122), (a, b, 3, 0x0011_2233)],
    );
    t.three("prmt.b32.rc8", B32, &[(a, b, 0, 0), (a, b, 1, 0x1111_1111), (a, b, 3, 0x3333_3333)]);
    t.three("prmt.b32.rc16", B32, &[(a, b, 0, 0x1100_1100), (a, b, 1, 0x3322_3322), (a, b, 2, 0x1100_1100)]);
    t.three(
        "prmt.b32.ecl",
        B32,
        &[(a, b, 0, 0x3322_1100), (a, b, 1, 0x3322_1111), (a, b, 2, 0x3322_2222), (a, b, 3, 0x3333_3333)],
    );
    t.three(
        "prmt.b32.ecr",
        B32,
        &[(a, b, 0, 0), (a, b, 1, 0x1111_1100), (a, b, 2, 0x2222_1100), (a, b, 3, 0x3322_1100)],
    );
}
