// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers in shared memory: `mbarrier.init`, `.inval`, `.expect_tx`, `.arrive`, `.test_wait`, `.try_wait`.
//!
//! Arriving publishes what the warp knows; a wait that succeeds learns what all that arrived knew. `try_wait` may give
//! up at any time, so here it does at random.

use super::cluster::reach;
use super::memory::address;
use super::{Cx, Flow, Ins, lanes};
use crate::exec::cluster::RANK_SHIFT;
use crate::exec::mbarrier::{Arriving, MAX_ARRIVALS, Waited};
use crate::mem::{SHARED_WINDOW, WINDOW_MASK};
use crate::ptx::Space;
use crate::report::Fault;

/// The offset in the block's shared memory that a lane's address means, a multiple of `size` with so many bytes behind
/// it.
pub(super) fn offset(cx: &mut Cx, access: u32, l: usize, size: u32) -> Result<u32, Flow> {
    debug_assert!(!cx.code.accesses[access as usize].cluster);
    Ok(place(cx, access, l, size)?.1)
}

/// The same with the rank of the block, where addresses may be of any block of the cluster.
pub(super) fn place(cx: &mut Cx, access: u32, l: usize, size: u32) -> Result<(usize, u32), Flow> {
    let code = cx.code;
    let a = &code.accesses[access as usize];
    let mut at = address(cx, a, l);
    if a.space == Space::Generic && at & WINDOW_MASK == SHARED_WINDOW {
        at &= !WINDOW_MASK;
    }
    let mut rank = cx.block.rank;
    if a.cluster && at >> RANK_SHIFT != 0 {
        (rank, at) = ((at >> RANK_SHIFT) as usize - 1, at & ((1 << RANK_SHIFT) - 1));
        if rank >= cx.cluster.blocks() as usize {
            let text = format!("an address of the block of rank {rank} in a cluster of {} blocks", cx.cluster.blocks());
            return Err(cx.fail(Fault::OutOfBounds, Some(l as u32), text));
        }
    }
    let limit = u64::from(cx.block.shared.size());
    if at + u64::from(size) > limit {
        let text = format!("{size} bytes at {at:#x} of {limit} bytes of shared memory");
        return Err(cx.fail(Fault::OutOfBounds, Some(l as u32), text));
    }
    if !at.is_multiple_of(u64::from(size)) {
        return Err(super::memory::misaligned(cx, l, at, size));
    }
    Ok((rank, at as u32))
}

/// `mbarrier.init`: address in access `x`, count in row `a`, of a mutant `e` more.
pub(super) unsafe fn init(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    for l in lanes(m) {
        let at = match offset(cx, i.x, l, 8) {
            Ok(at) => at,
            Err(flow) => return flow,
        };
        let count = cx.get32(i.a, l) + i.e;
        if !(1..=MAX_ARRIVALS).contains(&count) {
            let text = format!("a barrier of {count} arrivals: 1 to {MAX_ARRIVALS}");
            return cx.fail(Fault::Illegal, Some(l as u32), text);
        }
        let clock = cx.block.known[w].own[w];
        if !cx.block.mbarriers.make(at, count, (w, clock)) {
            let text = format!("there is a barrier at {at} already: invalidate it first");
            return cx.fail(Fault::Barrier, Some(l as u32), text);
        }
        if let Err(f) = cx.block.shared.own(at, &cx.block.known[w].own, cx.pc as u32) {
            return super::shared::shared_fault(cx, f, &[u64::from(at); 32], 8, 1 << l);
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

/// `mbarrier.inval`: address in access `x`.
pub(super) unsafe fn inval(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    for l in lanes(m) {
        let at = match known(cx, i, l) {
            Ok(at) => at,
            Err(flow) => return flow,
        };
        cx.block.mbarriers.end(at);
        cx.block.shared.disown(at, w, &cx.block.known[w].own);
    }
    Flow::Next
}

/// A lane's barrier, of which its warp has to know.
fn known(cx: &mut Cx, i: &Ins, l: usize) -> Result<u32, Flow> {
    let at = offset(cx, i.x, l, 8)?;
    let w = cx.warp.index;
    match cx.block.mbarriers.find(at, &cx.block.known[w].own) {
        Ok(_) => Ok(at),
        Err(text) => Err(cx.fail(Fault::Barrier, Some(l as u32), text)),
    }
}

/// No operand.
pub(crate) const NONE: u32 = u32::MAX;

/// `mbarrier.arrive`, `.arrive.expect_tx`, `.expect_tx`: address in access `x`; bytes in row `a`, arrivals in row `b`
/// (one where `e` is 1, else none without a row); the state goes to `dst`. A mutant announces `c` bytes more.
pub(super) unsafe fn arrive(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    let whole = m == cx.warp.alive;
    let far = cx.code.accesses[i.x as usize].cluster;
    for l in lanes(m) {
        let found = if far { place(cx, i.x, l, 8) } else { known(cx, i, l).map(|at| (cx.block.rank, at)) };
        let (rank, at) = match found {
            Ok(found) => found,
            Err(flow) => return flow,
        };
        let bytes = if i.a == NONE { 0 } else { cx.get32(i.a, l).saturating_add_signed(i.c as i32) };
        let arrivals = if i.b == NONE { i.e } else { cx.get32(i.b, l) };
        if i.b != NONE && arrivals == 0 {
            return cx.fail(Fault::Illegal, Some(l as u32), "no arrival at all: the count is 0");
        }
        let arrived = if rank == cx.block.rank {
            let who = Arriving::Own(w, whole, &mut cx.block.known[w]);
            cx.block.mbarriers.arrive((cx.block.number, at), bytes, arrivals, who)
        } else {
            match arrive_elsewhere(cx, i, (rank, at), l, (bytes, arrivals)) {
                Ok(arrived) => arrived,
                Err(flow) => return flow,
            }
        };
        match arrived {
            Ok(state) if i.dst != NONE => cx.set64(i.dst, l, state.into()),
            Ok(_) => {}
            Err(text) => return cx.fail(Fault::Barrier, Some(l as u32), text),
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

/// An arrival of a lane at a barrier of another block.
fn arrive_elsewhere(
    cx: &mut Cx,
    i: &Ins,
    (rank, at): (usize, u32),
    l: usize,
    (bytes, arrivals): (u32, u32),
) -> Result<Result<u32, String>, Flow> {
    reach(cx, rank, l)?;
    let (w, pc, releases) = (cx.warp.index, cx.pc, cx.code.accesses[i.x as usize].device_scope);
    let known = &mut cx.block.known[w];
    let Some(peer) = cx.peers.get(rank) else { return Ok(Err("there is no such block".to_owned())) };
    let Some((clocks, _)) = known.about(peer.number) else { return Ok(Err("it has not begun".to_owned())) };
    let phase = match peer.mbarriers.find(at, &clocks) {
        Ok(b) => b.known_by(),
        Err(text) => return Ok(Err(text)),
    };
    peer.visits.note(known, w, phase, pc);
    let who = Arriving::Other(known.publish_ended(), releases.then(|| known.publish()));
    if releases {
        known.own[w] += 1;
    }
    Ok(peer.mbarriers.arrive((peer.number, at), bytes, arrivals, who))
}

/// `mbarrier.test_wait`, `.try_wait` (`c` is 1): address in access `x`, predicate in `dst`, parity in row `a` or state
/// in row `b`. A mutant, of which `e` is 1, asks for the other parity.
pub(super) unsafe fn wait(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    let gives_up = i.c == 1 && !cx.grid.options.eager && cx.grid.random(4) == 0;
    let cluster = cx.code.accesses[i.x as usize].device_scope;
    let (mut done, mut ordered) = (0, m == cx.warp.alive);
    for l in lanes(m) {
        let at = match known(cx, i, l) {
            Ok(at) => at,
            Err(flow) => return flow,
        };
        let (parity, state) = (if i.a == NONE { 0 } else { cx.get32(i.a, l) ^ i.e }, i.b);
        if parity > 1 {
            return cx.fail(Fault::Illegal, Some(l as u32), format!("parity {parity}: 0 or 1"));
        }
        let state = if state == NONE { 0 } else { cx.get64(state, l) };
        if gives_up {
            continue;
        }
        let know = &mut cx.block.known[w];
        // The barrier was found above; it does not go away in between.
        let Ok(b) = cx.block.mbarriers.find(at, &know.own) else { continue };
        let answer = match i.a {
            NONE => b.wait_state(state, know, cluster),
            _ => b.wait_parity(parity, know, cluster),
        };
        ordered &= b.ordered_lanes(w);
        match answer {
            Waited::Yes => done |= 1 << l,
            Waited::No => {}
            Waited::Lapped(text) => return cx.fail(Fault::Barrier, Some(l as u32), text),
        }
    }
    cx.set_pred(i.dst, m, done);
    if done != m {
        return Flow::Poll;
    }
    // Where all lanes had arrived, all of them are ordered with each other now.
    cx.warp.syncs += u32::from(ordered);
    cx.grid.effect(true);
    Flow::Next
}

/// A mutant of a wait: the answer is always yes.
pub(crate) unsafe fn passes(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    cx.set_pred(i.dst, m, !0);
    Flow::Next
}
