// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchanges between the lanes of a warp: shuffles, votes, matches, reductions.

use super::{Cx, Flow, Ins, lanes};
use crate::report::Fault;

/// Checks the member masks of a `.sync` instruction (row `mask`): all members must be here. `Err` when they are not.
fn members(cx: &mut Cx, mask_row: u32, m: u32) -> Result<(), Flow> {
    let mut wanted = 0;
    for l in lanes(m) {
        let members = cx.get32(mask_row, l);
        if members >> l & 1 == 0 {
            let what = format!("lane {l} is not in its own member mask {members:#010x}");
            return Err(cx.fail(Fault::Illegal, Some(l as u32), what));
        }
        wanted |= members;
    }
    // Lanes that do not exist (a last, partial warp) are in the usual mask of all lanes; they take no part.
    let wanted = wanted & cx.warp.exist;
    match cx.together(m, wanted) {
        Some(flow) => Err(flow),
        None => Ok(()),
    }
}

/// `shfl.sync`: source in `a`, lane in `b`, clamp in `c`, member mask in `e`; mode and predicate in `lists[x..]`.
pub(super) unsafe fn shuffle(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Err(flow) = members(cx, i.e, m) {
        return flow;
    }
    let (mode, pred) = (cx.code.lists[i.x as usize], cx.code.lists[i.x as usize + 1]);
    let mut out = [0u32; 32];
    let mut valid = 0;
    for l in lanes(m) {
        let (b, c) = (cx.get32(i.b, l) as usize & 31, cx.get32(i.c, l) as usize);
        let (clamp, segment) = (c & 31, c >> 8 & 31);
        let max = (l & segment) | (clamp & !segment);
        let min = l & segment;
        let (from, ok) = match mode {
            0 => (l as isize - b as isize, l as isize - b as isize >= max as isize),
            1 => ((l + b) as isize, l + b <= max),
            2 => ((l ^ b) as isize, l ^ b <= max),
            _ => {
                let j = min | (b & !segment);
                (j as isize, j <= max)
            }
        };
        let from = if ok { from as usize } else { l };
        if m >> from & 1 == 0 {
            let what = format!("lane {l} reads lane {from}, which does not take part");
            return cx.fail(Fault::Divergence, Some(l as u32), what);
        }
        out[l] = cx.get32(i.a, from);
        valid |= u32::from(ok) << l;
    }
    for l in lanes(m) {
        cx.set32(i.dst, l, out[l]);
    }
    if pred != u32::MAX {
        cx.set_pred(pred, m, valid);
    }
    Flow::Next
}

/// `vote.sync`: predicate `a` (negated when `b` is 1), member mask in `e`, mode in `c`.
pub(super) unsafe fn vote(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Err(flow) = members(cx, i.e, m) {
        return flow;
    }
    let p = if i.b == 1 { !cx.pred(i.a) } else { cx.pred(i.a) };
    for l in lanes(m) {
        let who = cx.get32(i.e, l) & m;
        let v = p & who;
        match i.c {
            0 => cx.set_pred(i.dst, 1 << l, if v == who { !0 } else { 0 }),
            1 => cx.set_pred(i.dst, 1 << l, if v != 0 { !0 } else { 0 }),
            2 => cx.set_pred(i.dst, 1 << l, if v == 0 || v == who { !0 } else { 0 }),
            _ => cx.set32(i.dst, l, v),
        }
    }
    Flow::Next
}

/// `activemask`.
pub(super) unsafe fn active(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        cx.set32(i.dst, l, m);
    }
    Flow::Next
}

/// `match.any.sync`, `match.all.sync` (`c` is 1): value in `a` (`b` is 1 when wide), mask in `e`, predicate in `x`.
pub(super) unsafe fn matching(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Err(flow) = members(cx, i.e, m) {
        return flow;
    }
    for l in lanes(m) {
        let mine = cx.get(i.a, i.b == 1, l);
        let who = cx.get32(i.e, l) & m;
        let mut equal = 0;
        for o in lanes(who) {
            equal |= u32::from(cx.get(i.a, i.b == 1, o) == mine) << o;
        }
        if i.c == 1 {
            let all = equal == who;
            cx.set32(i.dst, l, if all { who } else { 0 });
            if i.x != u32::MAX {
                cx.set_pred(i.x, 1 << l, if all { !0 } else { 0 });
            }
        } else {
            cx.set32(i.dst, l, equal);
        }
    }
    Flow::Next
}

/// `redux.sync`: value in `a`, mask in `e`, operation in `c`.
pub(super) unsafe fn reduce(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Err(flow) = members(cx, i.e, m) {
        return flow;
    }
    for l in lanes(m) {
        let who = cx.get32(i.e, l) & m;
        let values = lanes(who).map(|o| cx.get32(i.a, o));
        let v = match i.c {
            0 => values.fold(0, u32::wrapping_add),
            1 => values.min().unwrap_or(0),
            2 => values.max().unwrap_or(0),
            3 => values.map(|v| v as i32).min().unwrap_or(0) as u32,
            4 => values.map(|v| v as i32).max().unwrap_or(0) as u32,
            5 => values.fold(!0, |x, y| x & y),
            6 => values.fold(0, |x, y| x | y),
            _ => values.fold(0, |x, y| x ^ y),
        };
        cx.grid.scratch[l] = v;
    }
    for l in lanes(m) {
        let v = cx.grid.scratch[l];
        cx.set32(i.dst, l, v);
    }
    Flow::Next
}

/// `elect.sync`: the leader is the lowest member; mask in `e`, predicate in `x`.
pub(super) unsafe fn elect(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Err(flow) = members(cx, i.e, m) {
        return flow;
    }
    let leader = m.trailing_zeros();
    for l in lanes(m) {
        cx.set32(i.dst, l, leader);
    }
    cx.set_pred(i.x, m, 1 << leader);
    Flow::Next
}

/// `bar.warp.sync`: member mask in `e`.
pub(super) unsafe fn warp_barrier(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    match members(cx, i.e, m) {
        Err(flow) => flow,
        Ok(()) => {
            cx.warp.syncs += 1;
            Flow::Next
        }
    }
}
