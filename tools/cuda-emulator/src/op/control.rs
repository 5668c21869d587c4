// SPDX-License-Identifier: MIT OR Apache-2.0
//! Branches and ends.

use super::{Cx, Flow, Ins, lanes};
use crate::report::Fault;

/// `bra`: the target is in `x`.
pub(super) unsafe fn branch(cx: &mut Cx, i: &Ins, _m: u32) -> Flow {
    cx.target = i.x as usize;
    Flow::Jump
}

/// `brx.idx`: the index in row `a`, `b` targets in `lists[x..]`.
pub(super) unsafe fn branch_table(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let mut to: Vec<(usize, u32)> = vec![(cx.pc + 1, cx.group & !m)];
    for l in lanes(m) {
        let index = cx.get32(i.a, l);
        if index >= i.b {
            let text = format!("index {index} of a table of {} labels", i.b);
            return cx.fail(Fault::Illegal, Some(l as u32), text);
        }
        let pc = cx.code.lists[(i.x + index) as usize] as usize;
        match to.iter_mut().find(|t| t.0 == pc) {
            Some(t) => t.1 |= 1 << l,
            None => to.push((pc, 1 << l)),
        }
    }
    cx.scattered = to;
    Flow::Scatter
}

/// `ret`, `exit`.
pub(super) unsafe fn exit(_: &mut Cx, _: &Ins, _: u32) -> Flow {
    Flow::Exit
}

/// `trap`.
pub(super) unsafe fn trap(cx: &mut Cx, _: &Ins, m: u32) -> Flow {
    cx.fail(Fault::Illegal, Some(m.trailing_zeros()), "the kernel trapped")
}

/// Instructions without an effect that can be observed here: prefetches, hints.
pub(crate) unsafe fn nothing(_: &mut Cx, _: &Ins, _: u32) -> Flow {
    Flow::Next
}

/// `nanosleep`: lets others run.
pub(super) unsafe fn sleep(_: &mut Cx, _: &Ins, _: u32) -> Flow {
    Flow::Yield
}
