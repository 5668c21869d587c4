// SPDX-License-Identifier: MIT OR Apache-2.0
//! Integer arithmetic in 16, 32 and 64 bits.
//!
//! Division by zero and the quotient of the smallest number by −1 have no defined result and are not here.

use super::case::Case;
use super::case::Ty::{self, B16, B32, B64};
use super::rows::Rows;

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new("integers");
    for (bits, ty) in [(16, B16), (32, B32), (64, B64)] {
        both_signs(&mut t, bits, ty);
        unsigned(&mut t, bits, ty);
        signed(&mut t, bits, ty);
        logic(&mut t, bits, ty);
    }
    wide(&mut t);
    t.two(
        "add.sat.s32",
        B32,
        &[(0x7fff_ffff, 1, 0x7fff_ffff), (0x8000_0000, 0xffff_ffff, 0x8000_0000), (5, 0xffff_fffe, 3)],
    );
    t.two(
        "sub.sat.s32",
        B32,
        &[(0x8000_0000, 1, 0x8000_0000), (0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff), (5, 7, 0xffff_fffe)],
    );
    // 24 bits of each operand count: (2²⁴ − 1)² = 2⁴⁸ − 2²⁵ + 1.
    t.two("mul24.lo.u32", B32, &[(0xff_ffff, 0xff_ffff, 0xfe00_0001), (0x100_0002, 3, 6)]);
    t.two("mul24.lo.s32", B32, &[(0xff_ffff, 2, 0xffff_fffe), (0x80_0000, 2, 0xff00_0000), (0x100_0002, 3, 6)]);
    t.cases
}

/// All ones, the sign bit alone, and a small negative number, in so many bits.
fn ends(bits: u32) -> (u64, u64, impl Fn(u64) -> u64) {
    let ones = u64::MAX >> (64 - bits);
    (ones, 1 << (bits - 1), move |n| ones - n + 1)
}

fn both_signs(t: &mut Rows, bits: u32, ty: Ty) {
    let (ones, sign, _) = ends(bits);
    for s in ["u", "s"] {
        t.two(&format!("add.{s}{bits}"), ty, &[(ones, 2, 1), (sign, sign, 0), (5, 7, 12), (sign - 1, 1, sign)]);
        t.two(&format!("sub.{s}{bits}"), ty, &[(1, 2, ones), (sign, 1, sign - 1), (12, 7, 5)]);
        t.two(&format!("mul.lo.{s}{bits}"), ty, &[(ones, ones, 1), (sign, 2, 0), (0x55, 0x101, 0x5555)]);
        t.three(&format!("mad.lo.{s}{bits}"), ty, &[(3, 4, ones, 11), (sign, 2, 7, 7), (0, 9, 5, 5)]);
        t.one(&format!("mov.{s}{bits}"), ty, &[(5, 5), (ones, ones), (sign, sign)]);
    }
}

fn unsigned(t: &mut Rows, bits: u32, ty: Ty) {
    let (ones, sign, _) = ends(bits);
    let name = |op: &str| format!("{op}.u{bits}");
    t.two(&name("mul.hi"), ty, &[(ones, ones, ones - 1), (sign, 4, 2), (3, 5, 0)]);
    t.three(&name("mad.hi"), ty, &[(ones, 2, 5, 6), (ones, ones, 3, 1)]);
    t.two(&name("div"), ty, &[(ones, 2, sign - 1), (7, 3, 2), (2, 7, 0), (ones, ones, 1)]);
    t.two(&name("rem"), ty, &[(17, 5, 2), (ones, sign, sign - 1), (4, 9, 4)]);
    t.two(&name("min"), ty, &[(ones, 1, 1), (2, 3, 2)]);
    t.two(&name("max"), ty, &[(ones, 1, ones), (2, 3, 3)]);
    t.three(&name("sad"), ty, &[(3, 8, 10, 15), (8, 3, 10, 15), (ones, 1, 2, 0)]);
    t.pair(80, &name("shr"), ty, [ty, B32], &logical_right(bits));
}

fn signed(t: &mut Rows, bits: u32, ty: Ty) {
    let (ones, sign, minus) = ends(bits);
    let name = |op: &str| format!("{op}.s{bits}");
    t.two(&name("mul.hi"), ty, &[(ones, 4, ones), (sign, sign, sign >> 1), (sign, 2, ones), (ones, ones, 0)]);
    t.three(&name("mad.hi"), ty, &[(ones, 2, 5, 4), (sign, sign, 1, (sign >> 1) + 1)]);
    t.two(&name("div"), ty, &[(minus(7), 2, minus(3)), (7, minus(2), minus(3)), (minus(8), minus(2), 4)]);
    t.two(&name("rem"), ty, &[(minus(7), 2, ones), (7, minus(2), 1), (minus(8), 4, 0)]);
    t.two(&name("min"), ty, &[(ones, 1, ones), (sign, sign - 1, sign)]);
    t.two(&name("max"), ty, &[(ones, 1, 1), (sign, sign - 1, sign - 1)]);
    t.one(&name("abs"), ty, &[(ones, 1), (5, 5), (minus(9), 9)]);
    t.one(&name("neg"), ty, &[(1, ones), (minus(9), 9), (0, 0)]);
    t.three(&name("sad"), ty, &[(ones, 1, 2, 4), (minus(3), minus(8), 1, 6)]);
    let n = u64::from(bits);
    let rows = [
        (sign, n - 1, ones),
        (sign, n, ones),
        (sign, 0xffff_ffff, ones),
        (sign - 1, n, 0),
        (minus(8), 1, minus(4)),
        (minus(8), 0, minus(8)),
    ];
    t.pair(80, &name("shr"), ty, [ty, B32], &rows);
}

/// Amounts from the width on give zero.
fn logical_right(bits: u32) -> [(u64, u64, u64); 6] {
    let (ones, sign, _) = ends(bits);
    let n = u64::from(bits);
    [(sign, n - 1, 1), (sign, n, 0), (ones, n + 1, 0), (ones, 0xffff_ffff, 0), (sign, 0, sign), (12, 2, 3)]
}

fn logic(t: &mut Rows, bits: u32, ty: Ty) {
    let (ones, sign, _) = ends(bits);
    let n = u64::from(bits);
    let name = |op: &str| format!("{op}.b{bits}");
    t.two(&name("and"), ty, &[(0xff00, 0x0ff0, 0x0f00), (ones, sign, sign)]);
    t.two(&name("or"), ty, &[(0xf000, 0x000f, 0xf00f), (sign, 1, sign | 1)]);
    t.two(&name("xor"), ty, &[(ones, 0xff, ones - 0xff), (0x0ff0, 0x00ff, 0x0f0f)]);
    t.one(&name("not"), ty, &[(0xff, ones - 0xff), (ones, 0), (0, ones)]);
    t.one(&name("cnot"), ty, &[(0, 1), (5, 0), (ones, 0)]);
    t.one(&name("mov"), ty, &[(5, 5), (ones, ones), (sign, sign)]);
    let left = [
        (1, n - 1, sign),
        (3, n - 1, sign),
        (1, n, 0),
        (ones, n + 1, 0),
        (ones, 0xffff_ffff, 0),
        (5, 0, 5),
        (5, 1, 10),
    ];
    t.pair(80, &name("shl"), ty, [ty, B32], &left);
    t.pair(80, &name("shr"), ty, [ty, B32], &logical_right(bits));
}

fn wide(t: &mut Rows) {
    t.pair(80, "mul.wide.u16", B32, [B16; 2], &[(0xffff, 2, 0x1_fffe), (0xffff, 0xffff, 0xfffe_0001)]);
    t.pair(80, "mul.wide.s16", B32, [B16; 2], &[(0xffff, 2, 0xffff_fffe), (0x8000, 0x8000, 0x4000_0000)]);
    t.pair(
        80,
        "mul.wide.u32",
        B64,
        [B32; 2],
        &[(0xffff_ffff, 3, 0x2_ffff_fffd), (0xffff_ffff, 0xffff_ffff, 0xffff_fffe_0000_0001)],
    );
    t.pair(
        80,
        "mul.wide.s32",
        B64,
        [B32; 2],
        &[(0xffff_ffff, 3, 0xffff_ffff_ffff_fffd), (0x8000_0000, 0x8000_0000, 0x4000_0000_0000_0000)],
    );
    t.triple(80, "mad.wide.u16", B32, [B16, B16, B32], &[(0xffff, 0xffff, 0x2_0000, 0x1), (3, 4, 5, 17)]);
    t.triple(80, "mad.wide.s16", B32, [B16, B16, B32], &[(0xffff, 7, 3, 0xffff_fffc), (3, 4, 5, 17)]);
    t.triple(
        80,
        "mad.wide.u32",
        B64,
        [B32, B32, B64],
        &[(0xffff_ffff, 2, 1, 0x1_ffff_ffff), (0xffff_ffff, 0xffff_ffff, 0x1_ffff_ffff, 0)],
    );
    t.triple(
        80,
        "mad.wide.s32",
        B64,
        [B32, B32, B64],
        &[(0xffff_ffff, 2, 1, 0xffff_ffff_ffff_ffff), (0x8000_0000, 2, 0x1_0000_0000, 0)],
    );
}
