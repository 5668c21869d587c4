// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clusters of blocks: their barrier, addresses in the shared memory of another block, and stores to it.
//!
//! What reaches into another block has to know that it has begun, and is noted there, so that the block may not end
//! without knowing of it (see [`crate::exec::cluster`]).

use super::bulk::{at_once, begin_pieces};
use super::mbarrier::place;
use super::{Cx, Flow, Ins, lanes};
use crate::exec::clock::{Published, WARPS};
use crate::exec::cluster::RANK_SHIFT;
use crate::exec::flight::{Flight, Piece, Work};
use crate::report::Fault;

/// The other block of a rank may be reached into by the warp that runs: it has begun, and has not ended.
pub(super) fn reach(cx: &mut Cx, rank: usize, lane: usize) -> Result<(), Flow> {
    let w = cx.warp.index;
    let Some(peer) = cx.peers.get(rank) else { return Ok(()) };
    let text = if peer.has_ended() {
        format!("the block of rank {rank} has ended, and its shared memory with it")
    } else if cx.block.known[w].about(peer.number).is_none() {
        format!("nothing tells this warp that the block of rank {rank} has begun: a barrier of the cluster would")
    } else {
        return Ok(());
    };
    Err(cx.fail(Fault::Cluster, Some(lane as u32), text))
}

/// `barrier.cluster.arrive` (`c` is 1 for `.relaxed`); `e` is 1 for `.aligned`.
pub(super) unsafe fn arrive(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let all = cx.warp.alive;
    if i.e == 1
        && let Some(flow) = cx.together(m, all)
    {
        return flow;
    }
    let w = cx.warp.index;
    let tells = if i.c == 1 {
        // That the block has begun, and what fences before it have published.
        let mut tells = cx.block.known[w].publish_made(0);
        for fenced in cx.warp.made.iter().chain(&cx.warp.fenced) {
            tells.add(fenced);
        }
        tells
    } else {
        let tells = cx.block.known[w].publish();
        cx.block.known[w].own[w] += 1;
        tells
    };
    let who = (cx.block.rank, w);
    cx.cluster.set_alive(who, all);
    if let Err(text) = cx.cluster.arrive(who, m, &tells) {
        return cx.fail(Fault::Illegal, None, text);
    }
    cx.grid.effect(true);
    Flow::Next
}

/// `barrier.cluster.wait`; `e` is 1 for `.aligned`.
pub(super) unsafe fn wait(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let all = cx.warp.alive;
    if i.e == 1
        && let Some(flow) = cx.together(m, all)
    {
        return flow;
    }
    let w = cx.warp.index;
    match cx.cluster.wait((cx.block.rank, w), m) {
        Err(text) => cx.fail(Fault::Illegal, None, text),
        Ok(None) => Flow::Again,
        Ok(Some(told)) => {
            cx.block.known[w].acquire(told);
            cx.warp.syncs += u32::from(m == all);
            cx.grid.effect(true);
            Flow::Next
        }
    }
}

/// `fence.mbarrier_init.release.cluster`: other blocks may know of the barriers that were made before it.
pub(super) unsafe fn made(cx: &mut Cx, _: &Ins, _: u32) -> Flow {
    let known = &cx.block.known[cx.warp.index];
    let made = known.publish_made(cx.block.mbarriers.made_before(&known.own));
    cx.warp.made.get_or_insert_with(Published::default).add(&made);
    Flow::Next
}

/// `mapa.shared::cluster`: the address of row `a` in the block whose rank is in row `b`; `c` is 1 for 64 bits.
pub(super) unsafe fn map(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let (at, rank, blocks) = (cx.get(i.a, i.c == 1, l), cx.get32(i.b, l), cx.cluster.blocks());
        if rank >= blocks {
            return cx.fail(Fault::Illegal, Some(l as u32), format!("rank {rank} in a cluster of {blocks} blocks"));
        }
        if at >> RANK_SHIFT != 0 {
            let text = format!("{at:#x} is not an address of the block's own shared memory");
            return cx.fail(Fault::Illegal, Some(l as u32), text);
        }
        cx.set(i.dst, i.c == 1, l, u64::from(rank + 1) << RANK_SHIFT | at);
    }
    Flow::Next
}

/// `getctarank.shared::cluster`: the rank of the block that the address in row `a` lies in; `c` is 1 for 64 bits.
pub(super) unsafe fn rank(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let rank = match cx.get(i.a, i.c == 1, l) >> RANK_SHIFT {
            0 => cx.block.rank as u32,
            above => above as u32 - 1,
        };
        cx.set32(i.dst, l, rank);
    }
    Flow::Next
}

/// `st.async`: to access `x`, whose rows are the values; the barrier, which is told of their bytes, in access `x + 1`.
pub(super) unsafe fn send(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        if let Err(flow) = send_lane(cx, i.x, l) {
            return flow;
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

fn send_lane(cx: &mut Cx, x: u32, l: usize) -> Result<(), Flow> {
    let code = cx.code;
    let a = &code.accesses[x as usize];
    let bytes = a.size * a.count;
    let (rank, at) = place(cx, x, l, bytes)?;
    let (barrier_rank, barrier) = place(cx, x + 1, l, 8)?;
    if rank != barrier_rank {
        let text = format!("stores to the block of rank {rank} and tells a barrier of rank {barrier_rank}");
        return Err(cx.fail(Fault::Illegal, Some(l as u32), text));
    }
    let mut filling = [0; 16];
    for k in 0..a.count {
        let from = (at % 16 + k * a.size) as usize;
        let value = cx.get(a.rows[k as usize], a.wide, l).to_le_bytes();
        filling[from..from + a.size as usize].copy_from_slice(&value[..a.size as usize]);
    }
    // It lies in one line: its address is a multiple of its size. It is no copy, so it needs no proxy fence.
    let first = at % 16;
    let piece = Piece { shared: at - first, from: first as u8, to: (first + bytes) as u8, global: 0 };
    begin_pieces(cx, (rank, barrier), l, &[piece], Some(&[u32::MAX; WARPS]))?;
    let work = Work::Send { barrier, bytes, filling };
    let flight = Flight { warp: cx.warp.index, lane: l as u32, pc: cx.pc, pieces: vec![piece], work };
    at_once(cx, rank, flight)
}
