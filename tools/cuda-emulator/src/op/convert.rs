// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cvt` between all types.
//!
//! Rust's `as` is what PTX asks for: integers are extended by the sign of the source and truncated, floats saturate.
//! The one difference is NaN where an f64 or a 64-bit integer is involved: it becomes the sign bit alone, not 0.

use super::rows::{Bf16, F16};
use super::table::Table;
use crate::num::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_bf16_rz, f32_to_f16, f32_to_f16_rz, flush, saturate};

macro_rules! ints {
    ($t:ident; $($s:ident $sn:literal),*; $d:tt) => {$( ints!(@row $t, $s, $sn; $d); )*};
    (@row $t:ident, $s:ident, $sn:literal; [$($d:ident $dn:literal),*]) => {$(
        $t.rare_un(concat!("cvt.", $dn, ".", $sn), |a: $s| a as $d);
    )*};
}

macro_rules! int_float {
    ($t:ident; $($i:ident $n:literal),*) => {$(
        $t.rare_un(concat!("cvt.rn.f32.", $n), |a: $i| a as f32);
        $t.rare_un(concat!("cvt.rn.f64.", $n), |a: $i| a as f64);
        $t.rare_un(concat!("cvt.rz.f32.", $n), |a: $i| toward_zero(a.into()));
        $t.rare_un(concat!("cvt.rn.f16.", $n), |a: $i| F16(f32_to_f16(odd(a.into()))));
    )*};
}

macro_rules! int_bf16 {
    ($t:ident; $($i:ident $n:literal),*) => {$(
        $t.rare_un(concat!("cvt.rn.bf16.", $n), |a: $i| Bf16(f32_to_bf16(odd(a.into()))));
    )*};
}

/// The f32 next to an integer in the direction of zero.
fn toward_zero(a: i128) -> f32 {
    let near = a as f32;
    if (near as i128).unsigned_abs() > a.unsigned_abs() { f32::from_bits(near.to_bits() - 1) } else { near }
}

/// The same with an odd last bit where it is inexact, so that rounding on to a shorter format cannot round twice.
fn odd(a: i128) -> f32 {
    let down = toward_zero(a);
    if down as i128 == a { down } else { f32::from_bits(down.to_bits() | 1) }
}

macro_rules! float_int {
    ($t:ident; $($i:ident $n:literal),*) => {$(
        float_int!(@round $t, $i, $n, "rni", round_ties_even);
        float_int!(@round $t, $i, $n, "rzi", trunc);
        float_int!(@round $t, $i, $n, "rmi", floor);
        float_int!(@round $t, $i, $n, "rpi", ceil);
    )*};
    (@round $t:ident, $i:ident, $n:literal, $r:literal, $f:ident) => {
        $t.rare_un(concat!("cvt.", $r, ".", $n, ".f32"), |a: f32| float_int!(@of $i, a.$f(), <$i>::BITS == 64));
        $t.rare_un(concat!("cvt.", $r, ".ftz.", $n, ".f32"), |a: f32| {
            float_int!(@of $i, flush(a).$f(), <$i>::BITS == 64)
        });
        $t.rare_un(concat!("cvt.", $r, ".", $n, ".f64"), |a: f64| float_int!(@of $i, a.$f(), true));
        $t.rare_un(concat!("cvt.", $r, ".", $n, ".f16"), |a: F16| {
            float_int!(@of $i, f16_to_f32(a.0).$f(), <$i>::BITS == 64)
        });
    };
    (@of $i:ident, $x:expr, $wide:expr) => {{
        let x = $x;
        if $wide && x.is_nan() { 1 << (<$i>::BITS - 1) } else { x as $i }
    }};
}

fn pair(hi: u16, lo: u16) -> u32 {
    u32::from(hi) << 16 | u32::from(lo)
}

fn relu(x: f32) -> f32 {
    if x > 0.0 || x.is_nan() { x } else { 0.0 }
}

pub(super) fn fill(t: &mut Table) {
    ints!(t; u8 "u8", i8 "s8", u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64";
        [u8 "u8", i8 "s8", u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64"]);
    int_float!(t; u8 "u8", i8 "s8", u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64");
    int_bf16!(t; u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64");
    float_int!(t; u8 "u8", i8 "s8", u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64");

    t.un("cvt.s64.s32", |a: i32| i64::from(a));
    t.un("cvt.u64.u32", |a: u32| u64::from(a));
    t.un("cvt.u32.u64 cvt.s32.s64 cvt.u32.s64 cvt.s32.u64", |a: u64| a as u32);
    t.un("cvt.rn.f32.s32", |a: i32| a as f32);
    t.rare_un("cvt.sat.u8.s32", |a: i32| a.clamp(0, 255) as u8);
    t.rare_un("cvt.sat.s8.s32", |a: i32| a.clamp(-128, 127) as i8);
    t.rare_un("cvt.sat.u16.s32", |a: i32| a.clamp(0, 0xffff) as u16);
    t.rare_un("cvt.sat.s16.s32", |a: i32| a.clamp(-0x8000, 0x7fff) as i16);
    t.rare_un("cvt.f64.f32", |a: f32| f64::from(a));
    t.rare_un("cvt.rn.f32.f64", |a: f64| a as f32);
    t.rare_un("cvt.f32.f32", |a: f32| a);
    t.rare_un("cvt.ftz.f32.f32", flush);
    t.rare_un("cvt.sat.f32.f32", saturate);
    t.rare_un("cvt.ftz.sat.f32.f32", saturate);
    t.rare_un("cvt.rni.f32.f32", f32::round_ties_even);
    t.rare_un("cvt.rzi.f32.f32", f32::trunc);
    t.rare_un("cvt.rmi.f32.f32", f32::floor);
    t.rare_un("cvt.rpi.f32.f32", f32::ceil);
    t.rare_un("cvt.rni.f64.f64", f64::round_ties_even);
    t.rare_un("cvt.rzi.f64.f64", f64::trunc);
    t.rare_un("cvt.rmi.f64.f64", f64::floor);
    t.rare_un("cvt.rpi.f64.f64", f64::ceil);

    t.un("cvt.f32.f16", |a: F16| f16_to_f32(a.0));
    t.un("cvt.f32.bf16", |a: Bf16| bf16_to_f32(a.0));
    t.rare_un("cvt.f64.f16", |a: F16| f64::from(f16_to_f32(a.0)));
    t.un("cvt.rn.f16.f32", |a: f32| F16(f32_to_f16(a)));
    t.rare_un("cvt.rz.f16.f32", |a: f32| F16(f32_to_f16_rz(a)));
    t.rare_un("cvt.rn.f16.f64", |a: f64| F16(f32_to_f16(super::half::to_odd(a))));
    t.un("cvt.rn.bf16.f32", |a: f32| Bf16(f32_to_bf16(a)));
    t.rare_un("cvt.rz.bf16.f32", |a: f32| Bf16(f32_to_bf16_rz(a)));
    // The first source becomes the upper half.
    t.bin("cvt.rn.f16x2.f32", |a: f32, b: f32| pair(f32_to_f16(a), f32_to_f16(b)));
    t.rare_bin("cvt.rz.f16x2.f32", |a: f32, b: f32| pair(f32_to_f16_rz(a), f32_to_f16_rz(b)));
    t.rare_bin("cvt.rn.relu.f16x2.f32", |a: f32, b: f32| pair(f32_to_f16(relu(a)), f32_to_f16(relu(b))));
    t.bin("cvt.rn.bf16x2.f32", |a: f32, b: f32| pair(f32_to_bf16(a), f32_to_bf16(b)));
    t.rare_bin("cvt.rz.bf16x2.f32", |a: f32, b: f32| pair(f32_to_bf16_rz(a), f32_to_bf16_rz(b)));
    t.rare_bin("cvt.rn.relu.bf16x2.f32", |a: f32, b: f32| pair(f32_to_bf16(relu(a)), f32_to_bf16(relu(b))));
}
