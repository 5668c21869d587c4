// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves that are not lane-by-lane copies: packing, unpacking, predicates, clocks.

use super::{Cx, Flow, Ins, lanes};

/// `mov.b32/b64 d, {…}`: `c` parts of `e` bits each, rows in `lists[x..]`; `b` says whether d is wide.
pub(super) unsafe fn pack(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let mask = if i.e == 64 { !0 } else { (1u64 << i.e) - 1 };
    for l in lanes(m) {
        let mut v = 0;
        for k in 0..i.c {
            let row = cx.code.lists[(i.x + k) as usize];
            v |= (cx.get(row, i.e == 64, l) & mask) << (k * i.e);
        }
        cx.set(i.dst, i.b == 1, l, v);
    }
    Flow::Next
}

/// `mov.b32/b64 {…}, a`: the reverse; `b` says whether a is wide.
pub(super) unsafe fn unpack(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let mask = if i.e == 64 { !0 } else { (1u64 << i.e) - 1 };
    for l in lanes(m) {
        let v = cx.get(i.a, i.b == 1, l);
        for k in 0..i.c {
            let row = cx.code.lists[(i.x + k) as usize];
            cx.set(row, i.e == 64, l, v >> (k * i.e) & mask);
        }
    }
    Flow::Next
}

/// Logic on predicates: `e` holds the truth table of (a, b); an operand that is negated is so in the table.
pub(super) unsafe fn logic(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let (a, b) = (cx.pred(i.a), cx.pred(i.b));
    let mut v = 0;
    for k in 0..4 {
        if i.e >> k & 1 == 1 {
            v |= (if k & 1 == 1 { a } else { !a }) & (if k & 2 == 2 { b } else { !b });
        }
    }
    cx.set_pred(i.dst, m, v);
    Flow::Next
}

/// `mov.pred d, imm`.
pub(super) unsafe fn constant(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    cx.set_pred(i.dst, m, i.e);
    Flow::Next
}

/// `mov d, %clock…`: instructions executed so far stand for cycles; `b` says whether d is wide.
pub(super) unsafe fn clock(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let now = cx.grid.executed;
    for l in lanes(m) {
        cx.set(i.dst, i.b == 1, l, now);
    }
    Flow::Next
}

/// `cvta`: adds (or takes away) the window `lists[x]` in the upper half of the address; `e` is 1 for `cvta.to`.
pub(super) unsafe fn window(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let window = u64::from(cx.code.lists[i.x as usize]) << 32;
    for l in lanes(m) {
        let v = cx.get(i.a, true, l);
        let v = if i.e == 1 { v.wrapping_sub(window) } else { v.wrapping_add(window) };
        cx.set(i.dst, true, l, v);
    }
    Flow::Next
}

/// Runs `inner[x]` on the lower halves of the wide row `a`, by way of the scratch row `b`.
pub(super) unsafe fn narrow(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let v = cx.get64(i.a, l);
        cx.set32(i.b, l, v as u32);
    }
    let inner = cx.code.inner[i.x as usize];
    // SAFETY: the decoder chose a function of one operand with 32-bit slots, which row b has.
    unsafe { inner(cx, &Ins { a: i.b, ..i.clone() }, m) }
}
