// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers of a block, and fences.
//!
//! A warp arrives at a barrier as a whole. Arriving publishes what the warp knows into the barrier; leaving it learns
//! what all that arrived knew. A fence lets later relaxed writes publish what is known now, and learns what earlier
//! relaxed reads have seen. A proxy fence lets the asynchronous proxy see what is known now.
//!
//! `barrier.sync` without `.aligned` is for threads, not for warps: lanes that have parted arrive each at its own
//! instruction, and wait on their own.

use super::{Cx, Flow, Ins, lanes};
use crate::exec::clock::Fenced;
use crate::report::Fault;

/// What a barrier instruction does; kept in `c`.
pub(super) const SYNC: u32 = 0;
pub(super) const ARRIVE: u32 = 1;
pub(super) const RED_POPC: u32 = 2;
pub(super) const RED_AND: u32 = 3;
pub(super) const RED_OR: u32 = 4;

/// In `e`, of `barrier.sync` and `barrier.arrive` without `.aligned`.
pub(super) const NOT_ALIGNED: u32 = 1;

/// In the value of a release: every thread voted yes.
const ALL: u32 = 1 << 31;

/// `bar`, `barrier`: id in row `a`, count in row `b` (`u32::MAX` for the whole block), kind in `c`; for reductions the
/// predicate in `e` (negated when `lists[x]` is 1) and the result in `dst`.
/// For the others `e` is [`NOT_ALIGNED`] or 0.
pub(super) unsafe fn barrier(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(value) = cx.warp.released.take() {
        cx.warp.syncs += 1;
        match i.c {
            RED_POPC => {
                for l in lanes(m) {
                    cx.set32(i.dst, l, value & !ALL);
                }
            }
            RED_AND => cx.set_pred(i.dst, m, if value & ALL != 0 { !0 } else { 0 }),
            RED_OR => cx.set_pred(i.dst, m, if value & !ALL != 0 { !0 } else { 0 }),
            _ => {}
        }
        return Flow::Next;
    }
    let all = cx.warp.alive;
    let parted = i.e == NOT_ALIGNED && i.c <= ARRIVE && (m != all || !cx.warp.apart.is_empty());
    if !parted && let Some(flow) = cx.together(m, all) {
        return flow;
    }
    let first = m.trailing_zeros() as usize;
    let id = cx.get32(i.a, first);
    if id >= 16 {
        return cx.fail(Fault::Illegal, Some(first as u32), format!("barrier {id} of 16"));
    }
    let whole = i.b == u32::MAX;
    let count = if whole { cx.block.threads().next_multiple_of(32) } else { cx.get32(i.b, first) };
    if count == 0 || count % 32 != 0 || count > cx.block.threads().next_multiple_of(32) {
        let have = cx.block.threads();
        return cx.fail(
            Fault::Illegal,
            Some(first as u32),
            format!("a barrier of {count} threads in a block of {have}"),
        );
    }
    if parted {
        return lanes_apart(cx, i, m, id as usize, (count, whole));
    }
    let votes = match i.c {
        RED_POPC | RED_AND | RED_OR => {
            let p = cx.pred(i.e);
            (if cx.code.lists[i.x as usize] == 1 { !p } else { p }) & m
        }
        _ => 0,
    };
    let w = cx.warp.index;
    let waits = i.c != ARRIVE;
    match cx.block.arrive(id as usize, count, whole, w, waits, votes, m) {
        Err(text) => cx.fail(Fault::Illegal, None, text),
        Ok(done) => {
            cx.grid.effect(true);
            match (waits, done) {
                (false, _) => Flow::Next,
                (true, true) => unsafe {
                    // SAFETY: the same instruction with the same mask; `released` is set now, so it ends above.
                    cx.warp.released = cx.block.take_release(w);
                    barrier(cx, i, m)
                },
                (true, false) => Flow::Wait,
            }
        }
    }
}

/// Lanes of a warp that arrive without the others.
fn lanes_apart(cx: &mut Cx, i: &Ins, m: u32, id: usize, count: (u32, bool)) -> Flow {
    let w = cx.warp.index;
    let waiting = cx.warp.apart.iter().fold(0, |all, a| all | a.0);
    let fresh = m & !waiting;
    if fresh != 0 {
        // Lanes that have ended or do not exist count with the first of the others.
        let alive = cx.warp.alive;
        let absent = if fresh >> alive.trailing_zeros() & 1 == 1 { 32 - alive.count_ones() } else { 0 };
        match cx.block.arrive_lanes(id, count, w, fresh, fresh.count_ones() + absent) {
            Err(text) => return cx.fail(Fault::Illegal, None, text),
            Ok(phase) if i.c == SYNC => cx.warp.apart.push((fresh, id, phase)),
            Ok(_) => {}
        }
        cx.grid.effect(true);
        if i.c == ARRIVE {
            return Flow::Next;
        }
    }
    let mut freed = 0;
    for a in cx.warp.apart.iter_mut().filter(|a| cx.block.phase(a.1) != a.2) {
        freed |= a.0 & m;
        a.0 &= !m;
    }
    cx.warp.apart.retain(|a| a.0 != 0);
    let past = freed | cx.group & !m;
    if past == 0 {
        return Flow::Again;
    }
    cx.warp.syncs += u32::from(freed != 0);
    cx.scattered = vec![(cx.pc, m & !freed), (cx.pc + 1, past)];
    Flow::Scatter
}

/// `fence.proxy.async`: `c` has bit 0 for the block's shared memory, bit 1 for global memory, bit 2 for the shared
/// memory of all blocks of the cluster.
pub(super) unsafe fn proxy_fence(cx: &mut Cx, i: &Ins, _: u32) -> Flow {
    let w = cx.warp.index;
    for (bit, memory) in [(1, Fenced::Shared), (2, Fenced::Global)] {
        if i.c & bit != 0 {
            cx.block.known[w].fence_proxy(memory, memory == Fenced::Global || i.c & 4 != 0);
        }
    }
    cx.block.known[w].own[w] += 1;
    Flow::Next
}

/// `setmaxnreg`: `c` registers, `b` is 1 for `.inc`.
pub(super) unsafe fn registers(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let all = cx.warp.alive;
    if let Some(flow) = cx.together(m, all) {
        return flow;
    }
    let w = cx.warp.index;
    if i.b == 1 {
        return if cx.block.registers.take(w, i.c) { Flow::Next } else { Flow::Again };
    }
    match cx.block.registers.give(w, i.c) {
        Ok(()) => {
            cx.grid.effect(true);
            Flow::Next
        }
        Err(has) => cx.fail(Fault::Illegal, None, format!("`.dec` to {} registers in a warp that has {has}", i.c)),
    }
}

/// `membar`, `fence`: `c` is 1 when other blocks are ordered too.
pub(super) unsafe fn fence(cx: &mut Cx, i: &Ins, _: u32) -> Flow {
    let w = cx.warp.index;
    let observed = std::mem::take(&mut cx.warp.observed);
    cx.block.known[w].acquire(&observed);
    let p = cx.block.known[w].publish();
    if i.c == 1 {
        cx.warp.fenced = Some(p);
        cx.warp.fenced_block = None;
    } else {
        cx.warp.fenced_block = Some(p);
    }
    cx.block.known[w].own[w] += 1;
    Flow::Next
}
