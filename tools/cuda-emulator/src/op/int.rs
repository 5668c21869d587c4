// SPDX-License-Identifier: MIT OR Apache-2.0
//! Integer arithmetic.
//!
//! Division by zero has no defined result in PTX; here it gives all ones, as the hardware's routine does.

use super::table::Table;

macro_rules! width {
    ($t:ident, $un1:ident, $bin:ident, $tri:ident, $u:ty, $s:ty, $un:literal, $sn:literal, $bn:literal) => {
        let both = |op: &str| format!("{op}.{} {op}.{}", $un, $sn);
        $t.$bin(&both("add"), |a: $u, b: $u| a.wrapping_add(b));
        $t.$bin(&both("sub"), |a: $u, b: $u| a.wrapping_sub(b));
        $t.$bin(&both("mul.lo"), |a: $u, b: $u| a.wrapping_mul(b));
        $t.$tri(&both("mad.lo"), |a: $u, b: $u, c: $u| a.wrapping_mul(b).wrapping_add(c));
        $t.rare_bin(concat!("mul.hi.", $un), |a: $u, b: $u| ((u128::from(a) * u128::from(b)) >> <$u>::BITS) as $u);
        $t.rare_bin(concat!("mul.hi.", $sn), |a: $s, b: $s| ((i128::from(a) * i128::from(b)) >> <$u>::BITS) as $s);
        $t.rare_tri(concat!("mad.hi.", $un), |a: $u, b: $u, c: $u| {
            (((u128::from(a) * u128::from(b)) >> <$u>::BITS) as $u).wrapping_add(c)
        });
        $t.rare_tri(concat!("mad.hi.", $sn), |a: $s, b: $s, c: $s| {
            (((i128::from(a) * i128::from(b)) >> <$u>::BITS) as $s).wrapping_add(c)
        });
        $t.rare_bin(concat!("div.", $un), |a: $u, b: $u| a.checked_div(b).unwrap_or(<$u>::MAX));
        $t.rare_bin(concat!("div.", $sn), |a: $s, b: $s| if b == 0 { -1 } else { a.wrapping_div(b) });
        $t.rare_bin(concat!("rem.", $un), |a: $u, b: $u| a.checked_rem(b).unwrap_or(a));
        $t.rare_bin(concat!("rem.", $sn), |a: $s, b: $s| if b == 0 { a } else { a.wrapping_rem(b) });
        $t.$bin(concat!("min.", $un), |a: $u, b: $u| a.min(b));
        $t.$bin(concat!("min.", $sn), |a: $s, b: $s| a.min(b));
        $t.$bin(concat!("max.", $un), |a: $u, b: $u| a.max(b));
        $t.$bin(concat!("max.", $sn), |a: $s, b: $s| a.max(b));
        $t.$un1(concat!("abs.", $sn), |a: $s| a.wrapping_abs());
        $t.$un1(concat!("neg.", $sn), |a: $s| a.wrapping_neg());
        $t.$bin(concat!("and.", $bn), |a: $u, b: $u| a & b);
        $t.$bin(concat!("or.", $bn), |a: $u, b: $u| a | b);
        $t.$bin(concat!("xor.", $bn), |a: $u, b: $u| a ^ b);
        $t.$un1(concat!("not.", $bn), |a: $u| !a);
        $t.rare_un(concat!("cnot.", $bn), |a: $u| <$u>::from(a == 0));
        $t.$bin(concat!("shl.", $bn), |a: $u, n: u32| if n < <$u>::BITS { a << n } else { 0 });
        $t.$bin(concat!("shr.", $bn, " shr.", $un), |a: $u, n: u32| if n < <$u>::BITS { a >> n } else { 0 });
        $t.$bin(concat!("shr.", $sn), |a: $s, n: u32| a >> n.min(<$u>::BITS - 1));
        $t.$un1(concat!("mov.", $bn, " mov.", $un, " mov.", $sn), |a: $u| a);
        $t.rare_tri(concat!("sad.", $un), |a: $u, b: $u, c: $u| a.abs_diff(b).wrapping_add(c));
        $t.rare_tri(concat!("sad.", $sn), |a: $s, b: $s, c: $u| a.abs_diff(b).wrapping_add(c));
    };
}

pub(super) fn fill(t: &mut Table) {
    width!(t, rare_un, rare_bin, rare_tri, u16, i16, "u16", "s16", "b16");
    width!(t, un, bin, tri, u32, i32, "u32", "s32", "b32");
    width!(t, un, bin, tri, u64, i64, "u64", "s64", "b64");
    t.rare_bin("mul.wide.u16", |a: u16, b: u16| u32::from(a) * u32::from(b));
    t.rare_bin("mul.wide.s16", |a: i16, b: i16| i32::from(a) * i32::from(b));
    t.bin("mul.wide.u32", |a: u32, b: u32| u64::from(a) * u64::from(b));
    t.bin("mul.wide.s32", |a: i32, b: i32| i64::from(a) * i64::from(b));
    t.rare_tri("mad.wide.u16", |a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c));
    t.rare_tri("mad.wide.s16", |a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c));
    t.tri("mad.wide.u32", |a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c));
    t.tri("mad.wide.s32", |a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c));
    t.rare_bin("add.sat.s32", |a: i32, b: i32| a.saturating_add(b));
    t.rare_bin("sub.sat.s32", |a: i32, b: i32| a.saturating_sub(b));
    t.rare_bin("mul24.lo.u32", |a: u32, b: u32| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff));
    t.rare_bin("mul24.lo.s32", |a: i32, b: i32| ((a << 8) >> 8).wrapping_mul((b << 8) >> 8));
}
