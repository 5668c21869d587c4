// SPDX-License-Identifier: MIT OR Apache-2.0
//! Branches and ends.

use super::{Cx, Flow, Ins};
use crate::report::Fault;

/// `bra`: the target is in `x`.
pub(super) unsafe fn branch(cx: &mut Cx, i: &Ins, _m: u32) -> Flow {
    cx.target = i.x as usize;
    Flow::Jump
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
