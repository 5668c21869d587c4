// SPDX-License-Identifier: MIT OR Apache-2.0
//! `setp`, `set`, `selp`, `slct` and logic on predicates.

use super::case::Ty::{self, B16, B32, B64, Pred};
use super::case::{Case, Want};
use super::rows::{Rows, f};

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("compare");
    integers(&mut t);
    floats(&mut t);
    combined(&mut t);
    sets(&mut t);
    selections(&mut t);
    predicates(&mut t);
    t.cases
}

/// One comparison over pairs; `results` has a digit a pair.
fn compare(t: &mut Rows, sm: u32, op: &str, ty: Ty, pairs: &[(u64, u64)], results: &str) {
    let given: Vec<[u64; 2]> = pairs.iter().map(|p| [p.0, p.1]).collect();
    let bit = |c: char| Want::Bits(u64::from(c == '1'));
    assert_eq!(pairs.len(), results.len(), "{op}");
    let rows: Vec<(&[u64], Want)> = given.iter().zip(results.chars()).map(|(g, c)| (&g[..], bit(c))).collect();
    t.op(sm, &format!("setp.{op}"), Pred, &[ty; 2], &rows);
}

fn integers(t: &mut Rows) {
    for (bits, ty) in [(16, B16), (32, B32), (64, B64)] {
        let ones = u64::MAX >> (64 - bits);
        let pairs = [(1, 2), (2, 2), (3, 2), (ones, 1), (1, ones)];
        for (op, signed, unsigned) in [
            ("eq", "01000", "01000"),
            ("ne", "10111", "10111"),
            ("lt", "10010", "10001"),
            ("le", "11010", "11001"),
            ("gt", "00101", "00110"),
            ("ge", "01101", "01110"),
        ] {
            compare(t, 80, &format!("{op}.s{bits}"), ty, &pairs, signed);
            compare(t, 80, &format!("{op}.u{bits}"), ty, &pairs, unsigned);
        }
        for (op, unsigned) in [("lo", "10001"), ("ls", "11001"), ("hi", "00110"), ("hs", "01110")] {
            compare(t, 80, &format!("{op}.u{bits}"), ty, &pairs, unsigned);
        }
        compare(t, 80, &format!("eq.b{bits}"), ty, &pairs, "01000");
        compare(t, 80, &format!("ne.b{bits}"), ty, &pairs, "10111");
    }
}

fn floats(t: &mut Rows) {
    for (name, ty, sm, [one, two, three, nan, zero, minus_zero, inf, minus_inf]) in [
        (
            "f32",
            B32,
            80,
            [0x3f80_0000, 0x4000_0000, 0x4040_0000, 0x7fc0_0000, 0, 0x8000_0000, 0x7f80_0000, 0xff80_0000],
        ),
        ("f64", B64, 80, [0x3ff << 52, 0x4 << 60, 0x4008 << 48, 0x7ff8 << 48, 0, 1 << 63, 0x7ff << 52, 0xfff << 52]),
        ("f16", B16, 80, [0x3c00, 0x4000, 0x4200, 0x7e00, 0, 0x8000, 0x7c00, 0xfc00]),
        ("bf16", B16, 90, [0x3f80, 0x4000, 0x4040, 0x7fc0, 0, 0x8000, 0x7f80, 0xff80]),
    ] {
        let pairs =
            [(one, two), (two, two), (three, two), (nan, one), (one, nan), (zero, minus_zero), (minus_inf, inf)];
        for (op, results) in [
            ("eq", "0100010"),
            ("ne", "1010001"),
            ("lt", "1000001"),
            ("le", "1100011"),
            ("gt", "0010000"),
            ("ge", "0110010"),
            ("equ", "0101110"),
            ("neu", "1011101"),
            ("ltu", "1001101"),
            ("leu", "1101111"),
            ("gtu", "0011100"),
            ("geu", "0111110"),
            ("num", "1110011"),
            ("nan", "0001100"),
        ] {
            compare(t, sm, &format!("{op}.{name}"), ty, &pairs, results);
        }
    }
    // Flushed, the smallest subnormal equals zero.
    let pairs = [(1, 0), (0x8000_0001, 1), (f(1.0), 1)];
    compare(t, 80, "eq.f32", B32, &pairs, "000");
    compare(t, 80, "eq.ftz.f32", B32, &pairs, "110");
    compare(t, 80, "gt.ftz.f32", B32, &pairs, "001");
    compare(t, 80, "ltu.ftz.f32", B32, &[(0, 1), (0x7fc0_0000, 1)], "01");
}

/// A comparison joined with a predicate, and its complement joined with it.
fn combined(t: &mut Rows) {
    for (op, first, second) in
        [("and", [0, 0, 0, 1], [0, 0, 1, 0]), ("or", [0, 1, 1, 1], [1, 0, 1, 1]), ("xor", [0, 1, 1, 0], [1, 0, 0, 1])]
    {
        let given: [[u64; 3]; 4] = [[2, 1, 0], [1, 2, 0], [2, 1, 1], [1, 2, 1]];
        let rows =
            |r: [u64; 4]| -> Vec<(&[u64], Want)> { given.iter().zip(r).map(|(g, r)| (&g[..], r.into())).collect() };
        t.written(80, &format!("setp.lt.{op}.s32 $d, $0, $1, $2;"), Pred, &[B32, B32, Pred], &rows(first));
        t.written(80, &format!("setp.lt.{op}.s32 %p0|$d, $0, $1, $2;"), Pred, &[B32, B32, Pred], &rows(second));
        let swapped = [first[2], first[3], first[0], first[1]];
        t.written(80, &format!("setp.lt.{op}.s32 $d, $0, $1, !$2;"), Pred, &[B32, B32, Pred], &rows(swapped));
    }
    let rows: &[(&[u64], Want)] = &[(&[1, 2], 0.into()), (&[2, 2], 1.into())];
    t.written(80, "setp.lt.s32 %p0|$d, $0, $1;", Pred, &[B32; 2], rows);
}

fn sets(t: &mut Rows) {
    let (yes, one) = (0xffff_ffff, 0x3f80_0000);
    for (out, truth) in [("u32", yes), ("s32", yes), ("f32", one)] {
        t.two(&format!("set.gt.{out}.s32"), B32, &[(2, 1, truth), (1, 2, 0), (0, yes, truth)]);
        t.two(&format!("set.gt.{out}.u32"), B32, &[(2, 1, truth), (1, 2, 0), (0, yes, 0)]);
        t.two(
            &format!("set.ltu.{out}.f32"),
            B32,
            &[(f(1.0), f(2.0), truth), (f(2.0), f(1.0), 0), (0x7fc0_0000, 0, truth)],
        );
        t.pair(80, &format!("set.eq.{out}.u64"), B32, [B64; 2], &[(1 << 40, 1 << 40, truth), (1 << 40, 0, 0)]);
    }
    t.two("set.eq.ftz.u32.f32", B32, &[(1, 0, yes), (f(1.0), 0, 0)]);
    let rows: &[(&[u64], Want)] = &[(&[2, 1, 1], yes.into()), (&[2, 1, 0], 0.into()), (&[1, 2, 1], 0.into())];
    t.written(80, "set.gt.and.u32.s32 $d, $0, $1, $2;", B32, &[B32, B32, Pred], rows);
}

fn selections(t: &mut Rows) {
    for (ty, names) in
        [(B16, &["b16", "u16", "s16"][..]), (B32, &["b32", "u32", "s32", "f32"]), (B64, &["b64", "u64", "s64", "f64"])]
    {
        let big = if ty == B64 { 1 << 40 } else { 0 };
        for name in names {
            let rows: [(&[u64], Want); 2] =
                [(&[big + 5, 6, 1], (big + 5).into()), (&[5, big + 6, 0], (big + 6).into())];
            t.op(80, &format!("selp.{name}"), ty, &[ty, ty, Pred], &rows);
            let rows: [(&[u64], Want); 3] = [
                (&[big + 5, 6, 0], (big + 5).into()),
                (&[5, big + 6, 0xffff_ffff], (big + 6).into()),
                (&[5, big + 6, 0x8000_0000], (big + 6).into()),
            ];
            t.op(80, &format!("slct.{name}.s32"), ty, &[ty, ty, B32], &rows);
            let rows: [(&[u64], Want); 4] = [
                (&[5, big + 6, f(1.0)], 5.into()),
                (&[5, big + 6, f(-0.0)], 5.into()),
                (&[5, big + 6, f(-1.0)], (big + 6).into()),
                (&[5, big + 6, f(f32::NAN)], (big + 6).into()),
            ];
            t.op(80, &format!("slct.{name}.f32"), ty, &[ty, ty, B32], &rows);
        }
    }
    t.written(80, "selp.f32 $d, $0, 0f40000000, $1;", B32, &[B32, Pred], &[(&[f(5.0), 0], f(2.0).into())]);
}

fn predicates(t: &mut Rows) {
    for (op, results) in [("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])] {
        let rows: [(&[u64], Want); 4] = [
            (&[0, 0], Want::Bits(results[0])),
            (&[0, 1], Want::Bits(results[1])),
            (&[1, 0], Want::Bits(results[2])),
            (&[1, 1], Want::Bits(results[3])),
        ];
        t.op(80, &format!("{op}.pred"), Pred, &[Pred; 2], &rows);
    }
    t.op(80, "not.pred", Pred, &[Pred], &[(&[0], 1.into()), (&[1], 0.into())]);
    // A number as the second of two: 0, or anything else.
    t.written(80, "xor.pred $d, $0, -1;", Pred, &[Pred], &[(&[0], 1.into()), (&[1], 0.into())]);
    t.written(80, "xor.pred $d, !$0, 0;", Pred, &[Pred], &[(&[0], 1.into()), (&[1], 0.into())]);
    t.written(80, "and.pred $d, $0, 0;", Pred, &[Pred], &[(&[0], 0.into()), (&[1], 0.into())]);
    t.written(80, "or.pred $d, !$0, 1;", Pred, &[Pred], &[(&[0], 1.into()), (&[1], 1.into())]);
    t.op(80, "mov.pred", Pred, &[Pred], &[(&[0], 0.into()), (&[1], 1.into())]);
    t.written(80, "mov.pred $d, 1;", Pred, &[], &[(&[], 1.into())]);
    t.written(80, "mov.pred $d, 0;", Pred, &[], &[(&[], 0.into())]);
}
