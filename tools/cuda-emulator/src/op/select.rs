// SPDX-License-Identifier: MIT OR Apache-2.0
//! Comparisons and selections.

use super::rows::{Bf16, CompareFn, F16, Kind, compare};
use super::{Cx, Flow, Ins, lanes};
use crate::num::{bf16_to_f32, f16_to_f32, flush};

/// How a comparison is combined with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    None,
    And,
    Or,
    Xor,
}

/// A comparison.
#[derive(Clone, Debug)]
pub(crate) struct Compare {
    pub(crate) f: CompareFn,
    pub(crate) combine: Combine,
    /// The predicate it is combined with, and whether that is negated.
    pub(crate) with: u32,
    pub(crate) negated: bool,
    /// Second result (the negated comparison, combined), or `u32::MAX`.
    pub(crate) second: u32,
}

fn evaluate(cx: &mut Cx, i: &Ins) -> (u32, u32) {
    let c = &cx.code.compares[i.x as usize];
    // SAFETY: the decoder gave rows a and b the width that the comparison needs.
    let t = unsafe { (c.f)(cx, i) };
    let w = if c.combine == Combine::None { 0 } else { cx.pred(c.with) };
    let w = if c.negated { !w } else { w };
    match c.combine {
        Combine::None => (t, !t),
        Combine::And => (t & w, !t & w),
        Combine::Or => (t | w, !t | w),
        Combine::Xor => (t ^ w, !t ^ w),
    }
}

/// `setp`.
pub(super) unsafe fn setp(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let (p, q) = evaluate(cx, i);
    cx.set_pred(i.dst, m, p);
    let second = cx.code.compares[i.x as usize].second;
    if second != u32::MAX {
        cx.set_pred(second, m, q);
    }
    Flow::Next
}

/// `set`: writes all ones (or 1.0, in `e`) where true.
pub(super) unsafe fn set(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let (p, _) = evaluate(cx, i);
    for l in lanes(m) {
        cx.set32(i.dst, l, if p >> l & 1 == 1 { i.e } else { 0 });
    }
    Flow::Next
}

/// `selp` on 32-bit slots: predicate in `c`.
pub(super) unsafe fn selp32(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let p = cx.pred(i.c);
    for l in lanes(m) {
        let v = cx.get32(if p >> l & 1 == 1 { i.a } else { i.b }, l);
        cx.set32(i.dst, l, v);
    }
    Flow::Next
}

/// `selp` on 64-bit slots.
pub(super) unsafe fn selp64(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let p = cx.pred(i.c);
    for l in lanes(m) {
        let v = cx.get64(if p >> l & 1 == 1 { i.a } else { i.b }, l);
        cx.set64(i.dst, l, v);
    }
    Flow::Next
}

/// `slct`: a where c is not negative, else b; `e` is 1 for 64-bit a and b, `x` is 1 when c is an f32.
pub(super) unsafe fn slct(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let c = cx.get32(i.c, l);
        let first = if i.x == 1 { f32::from_bits(c) >= 0.0 } else { c as i32 >= 0 };
        let v = cx.get(if first { i.a } else { i.b }, i.e == 1, l);
        cx.set(i.dst, i.e == 1, l, v);
    }
    Flow::Next
}

macro_rules! ordered {
    ($op:ident, $t:ty) => {
        match $op {
            "eq" => compare(|a: $t, b: $t| a == b),
            "ne" => compare(|a: $t, b: $t| a != b),
            "lt" | "lo" => compare(|a: $t, b: $t| a < b),
            "le" | "ls" => compare(|a: $t, b: $t| a <= b),
            "gt" | "hi" => compare(|a: $t, b: $t| a > b),
            "ge" | "hs" => compare(|a: $t, b: $t| a >= b),
            _ => return None,
        }
    };
}

macro_rules! floats {
    ($op:ident, $t:ty, $up:expr) => {{
        match $op {
            "eq" => compare(|a: $t, b: $t| $up(a) == $up(b)),
            "ne" => compare(|a: $t, b: $t| $up(a) < $up(b) || $up(a) > $up(b)),
            "lt" => compare(|a: $t, b: $t| $up(a) < $up(b)),
            "le" => compare(|a: $t, b: $t| $up(a) <= $up(b)),
            "gt" => compare(|a: $t, b: $t| $up(a) > $up(b)),
            "ge" => compare(|a: $t, b: $t| $up(a) >= $up(b)),
            "equ" => compare(|a: $t, b: $t| !($up(a) < $up(b) || $up(a) > $up(b))),
            "neu" => compare(|a: $t, b: $t| $up(a) != $up(b)),
            "ltu" => compare(|a: $t, b: $t| !($up(a) >= $up(b))),
            "leu" => compare(|a: $t, b: $t| !($up(a) > $up(b))),
            "gtu" => compare(|a: $t, b: $t| !($up(a) <= $up(b))),
            "geu" => compare(|a: $t, b: $t| !($up(a) < $up(b))),
            "num" => compare(|a: $t, b: $t| !$up(a).is_nan() && !$up(b).is_nan()),
            "nan" => compare(|a: $t, b: $t| $up(a).is_nan() || $up(b).is_nan()),
            _ => return None,
        }
    }};
}

fn same<T>(x: T) -> T {
    x
}

fn half(x: F16) -> f32 {
    f16_to_f32(x.0)
}

fn brain(x: Bf16) -> f32 {
    bf16_to_f32(x.0)
}

/// The comparison of an operator and a type; `ftz` takes subnormal f32 for zeros.
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "the negated comparisons are what PTX defines for NaN")]
pub(super) fn comparison(op: &str, ty: &str, ftz: bool) -> Option<(CompareFn, Kind)> {
    Some(match ty {
        "f32" if ftz => (floats!(op, f32, flush), Kind::F32),
        _ if ftz => return None,
        "u16" | "b16" => (ordered!(op, u16), Kind::B16),
        "s16" => (ordered!(op, i16), Kind::B16),
        "u32" | "b32" => (ordered!(op, u32), Kind::B32),
        "s32" => (ordered!(op, i32), Kind::B32),
        "u64" | "b64" => (ordered!(op, u64), Kind::B64),
        "s64" => (ordered!(op, i64), Kind::B64),
        "f32" => (floats!(op, f32, same), Kind::F32),
        "f64" => (floats!(op, f64, same), Kind::F64),
        "f16" => (floats!(op, F16, half), Kind::B16),
        "bf16" => (floats!(op, Bf16, brain), Kind::B16),
        _ => return None,
    })
}
