// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies: `cp.async.bulk`, `cp.reduce.async.bulk`, their groups and waits.
//!
//! Each lane that executes one issues a copy of its own. What a copy will touch is checked when it is issued: bounds,
//! the order after every thread that touched those bytes before, and the proxy fence after what was written through the
//! generic proxy. From then on the destination of a load belongs to the copy, and the source of a store may not be
//! written.
//!
//! A source in global memory that nothing has written is no fault: boxes reach into rows that are masked later. Those
//! bytes arrive as bytes that nothing has written.

use super::cluster::reach;
use super::mbarrier::place;
use super::memory::{address, misaligned};
use super::shared::shared_fault;
use super::{Cx, Flow, Ins, lanes};
use crate::exec::clock::{Fenced, WarpClocks, slot};
use crate::exec::flight::{Flight, Piece, Store, Work};
use crate::mem::order::{Accessor, Epoch};
use crate::mem::shared::SharedFault;
use crate::mem::{Owner, WINDOW_MASK};
use crate::report::Fault;

/// What a lane asks for, with addresses resolved.
pub(super) struct Request {
    pub(super) lane: usize,
    pub(super) pieces: Vec<Piece>,
    /// Runs of global memory.
    pub(super) runs: Vec<(u64, u32)>,
}

/// How a store changes memory; kept in `c`.
pub(super) const STORE: u32 = 0;
pub(super) const ADD: u32 = 1;

/// A copy of a run of bytes, cut into pieces.
fn run(lane: usize, shared: u32, global: u64, bytes: u32) -> Request {
    let piece = |k: u32| Piece { shared: shared + 16 * k, from: 0, to: 16, global: global + u64::from(16 * k) };
    Request { lane, pieces: (0..bytes / 16).map(piece).collect(), runs: vec![(global, bytes)] }
}

/// Rank of the block, both addresses and the size of a lane's copy: access `x` in shared memory, access `x + 1` in
/// global memory, bytes in row `a`.
fn operands(cx: &mut Cx, i: &Ins, l: usize) -> Result<(usize, u32, u64, u32), Flow> {
    let bytes = cx.get32(i.a, l);
    if bytes == 0 || !bytes.is_multiple_of(16) {
        return Err(cx.fail(
            Fault::Misaligned,
            Some(l as u32),
            format!("{bytes} bytes: a bulk copy moves multiples of 16"),
        ));
    }
    let (rank, shared) = place(cx, i.x, l, 16)?;
    let limit = cx.block.shared.size();
    if shared.checked_add(bytes).is_none_or(|end| end > limit) {
        let text = format!("{bytes} bytes at {shared} of {limit} bytes of shared memory");
        return Err(cx.fail(Fault::OutOfBounds, Some(l as u32), text));
    }
    let code = cx.code;
    let global = address(cx, &code.accesses[i.x as usize + 1], l);
    if !global.is_multiple_of(16) {
        return Err(misaligned(cx, l, global, 16));
    }
    Ok((rank, shared, global, bytes))
}

/// `cp.async.bulk.shared.global`: operands as above, the barrier in access `x + 2`; of a multicast the row of the mask
/// is `b` and `c` is 1.
pub(super) unsafe fn load(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let mask = (i.c == 1).then_some(i.b);
    for l in lanes(m) {
        let issued = operands(cx, i, l).and_then(|(rank, shared, global, bytes)| {
            begin_load(cx, (rank, run(l, shared, global, bytes)), (i.x + 2, mask), bytes, [0; 16])
        });
        if let Err(flow) = issued {
            return flow;
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

/// `cp.async.bulk.global.shared`, `cp.reduce.async.bulk` (`c` is [`ADD`]).
pub(super) unsafe fn store(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let issued = operands(cx, i, l)
            .and_then(|(_, shared, global, bytes)| begin_store(cx, run(l, shared, global, bytes), i.c == ADD));
        if let Err(flow) = issued {
            return flow;
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

/// Issues a load to the block of a rank, which tells the barrier of access `barrier` of `bytes` bytes. With a row of
/// masks it is a multicast: to the same offset in each block of the mask, whose barrier at the same offset is told.
pub(super) fn begin_load(
    cx: &mut Cx,
    (rank, r): (usize, Request),
    (barrier, mask): (u32, Option<u32>),
    bytes: u32,
    filling: [u8; 16],
) -> Result<(), Flow> {
    let l = r.lane;
    let (barrier_rank, barrier) = place(cx, barrier, l, 8)?;
    let ranks = match mask {
        None if rank != barrier_rank => {
            let text = format!("copies to the block of rank {rank} and tells a barrier of rank {barrier_rank}");
            return Err(cx.fail(Fault::Illegal, Some(l as u32), text));
        }
        None => 1 << rank,
        Some(row) => {
            let (mask, blocks) = (cx.get32(row, l) & 0xffff, cx.cluster.blocks());
            if mask == 0 || mask >> blocks != 0 {
                let text = format!("mask {mask:#06x} of blocks in a cluster of {blocks}");
                return Err(cx.fail(Fault::Illegal, Some(l as u32), text));
            }
            mask
        }
    };
    for rank in lanes(ranks) {
        let known_by = begin_pieces(cx, (rank, barrier), l, &r.pieces, None)?;
        for &(at, len) in &r.runs {
            global_run(cx, l, (at, len), Touch::Read, (rank, known_by))?;
        }
        let work = Work::Load { barrier, bytes, filling };
        let flight = Flight { warp: cx.warp.index, lane: l as u32, pc: cx.pc, pieces: r.pieces.clone(), work };
        at_once(cx, rank, flight)?;
    }
    Ok(())
}

/// The bytes of the pieces, in the shared memory of the block of a rank, belong to a copy from now on that tells a
/// barrier there. `fences` are what the asynchronous proxy sees of that block, where that does not follow from what the
/// warp knows. The slot and clock by which the copy is known to have landed.
pub(super) fn begin_pieces(
    cx: &mut Cx,
    (rank, barrier): (usize, u32),
    l: usize,
    pieces: &[Piece],
    fences: Option<&WarpClocks>,
) -> Result<(u32, u32), Flow> {
    reach(cx, rank, l)?;
    let (w, pc, eager) = (cx.warp.index, cx.pc, cx.grid.options.eager);
    let number = cx.member(rank).number;
    let Some((clocks, fenced)) = cx.block.known[w].about(number) else { return Ok((0, 0)) };
    let found = cx.member(rank).mbarriers.find(barrier, &clocks).map(|b| b.known_by());
    let known_by = match found {
        Ok(known_by) => known_by,
        Err(text) => return Err(cx.fail(Fault::Barrier, Some(l as u32), text)),
    };
    if let Some(peer) = cx.peers.get(rank) {
        peer.visits.note(&cx.block.known[w], w, known_by, pc);
    }
    for p in pieces {
        // A piece of a load that lies partly outside of its tensor is written whole.
        let mask = if fences.is_some() { p.mask() } else { 0xffff };
        let line = p.shared / 16;
        let shared = &mut cx.member(rank).shared;
        if let Err(f) = shared.begin_async(line, mask, &clocks, fences.unwrap_or(&fenced), pc as u32) {
            return Err(at_piece(cx, f, p, l));
        }
        shared.set_written(line, shared.written(line) & !mask);
        if !eager {
            let (from, len) = if fences.is_some() { (p.from, p.to - p.from) } else { (0, 16) };
            shared.poison(p.shared + u32::from(from), len.into());
        }
    }
    Ok(known_by)
}

/// Issues a store, or an addition of f32.
pub(super) fn begin_store(cx: &mut Cx, r: Request, adds: bool) -> Result<(), Flow> {
    let w = cx.warp.index;
    let k = w % slot::STORE_COUNT;
    cx.block.flights.tickets[k] += 1;
    let ticket = cx.block.flights.tickets[k];
    for &(at, len) in &r.runs {
        let touch = if adds { Touch::Add } else { Touch::Write };
        global_run(cx, r.lane, (at, len), touch, (cx.block.rank, ((slot::STORES + k) as u32, ticket)))?;
    }
    for p in &r.pieces {
        let known = &cx.block.known[w];
        let fences = &known.fenced[Fenced::Shared as usize];
        let mut held = cx.block.shared.hold(p.shared / 16, 0xffff, w, &known.own, fences);
        if held.is_ok()
            && cx.grid.options.uninitialised_shared
            && let Some(at) = cx.block.shared.never_written(p.shared / 16, p.mask())
        {
            held = Err(SharedFault::Unwritten { at });
        }
        if let Err(f) = held {
            return Err(at_piece(cx, f, p, r.lane));
        }
    }
    let work = Work::Store(Store::new(cx.warp.bulk_committed[r.lane], adds, ticket));
    let flight = Flight { warp: w, lane: r.lane as u32, pc: cx.pc, pieces: r.pieces, work };
    at_once(cx, cx.block.rank, flight)
}

/// The copy is under way, to or from the shared memory of the block of a rank. On a friendly machine it is done.
pub(super) fn at_once(cx: &mut Cx, rank: usize, flight: Flight) -> Result<(), Flow> {
    let eager = cx.grid.options.eager;
    let block = match cx.peers.get(rank) {
        Some(peer) => peer,
        None => &mut *cx.block,
    };
    block.flights.list.push(flight);
    if !eager {
        return Ok(());
    }
    let k = block.flights.list.len() - 1;
    let mem = &mut *cx.mem;
    let store = matches!(block.flights.list[k].work, Work::Store(_));
    let done = if store { block.write_store(mem, k) } else { block.advance(mem, k) };
    done.map_err(|(fault, text, _)| cx.fail(fault, None, text))
}

fn at_piece(cx: &mut Cx, f: SharedFault, p: &Piece, lane: usize) -> Flow {
    shared_fault(cx, f, &[u64::from(p.shared); 32], 16, 1 << lane)
}

/// What a copy does to global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    Add,
}

/// Checks and records what a copy will do to a run of global memory. `known_by` is the block, and the slot whose clock
/// tells others that it is done, 0 for the warp itself.
fn global_run(
    cx: &mut Cx,
    lane: usize,
    run: (u64, u32),
    touch: Touch,
    (rank, known_by): (usize, (u32, u32)),
) -> Result<(), Flow> {
    let (at, len) = (run.0, run.1 as usize);
    let base = match cx.mem.locate(at, len) {
        _ if at & WINDOW_MASK != 0 => {
            let text = format!("address {at:#x} is not in global memory");
            return Err(cx.fail(Fault::OutOfBounds, Some(lane as u32), text));
        }
        Ok(base) => base,
        Err((fault, text)) => return Err(cx.fail(fault, Some(lane as u32), text)),
    };
    let w = cx.warp.index;
    let number = cx.member(rank).number;
    let known = &cx.block.known[w];
    let (number, by, clock) = match known_by {
        (0, _) => (cx.block.number, w as u32, known.own[w]),
        (slot, clock) => (number, slot, clock),
    };
    let who = Accessor {
        epoch: Epoch::new(number, by, clock, touch == Touch::Add),
        pc: cx.pc as u32,
        first_block: cx.grid.first_block,
        knowledge: known,
        asynchronous: true,
    };
    let a = cx.mem.at(base);
    let (first, end) = ((at - base) as usize, (at - base) as usize + len);
    let write = touch != Touch::Read;
    let mut trouble = None;
    if write && a.owner == Owner::Constant {
        trouble = Some((Fault::ReadOnly, "it is read-only".to_owned()));
    } else if touch == Touch::Add
        && cx.grid.options.uninitialised_global
        && let Some(byte) = a.first_unwritten(first, len)
    {
        trouble = Some((Fault::Uninitialised, format!("byte {byte}, which is added to, was never written")));
    }
    for line in first / 16..end.div_ceil(16) {
        if trouble.is_some() {
            break;
        }
        let (lo, hi) = (first.max(16 * line) - 16 * line, end.min(16 * line + 16) - 16 * line);
        let mask = (((1u32 << hi) - 1) & !((1u32 << lo) - 1)) as u16;
        if cx.grid.options.footprints {
            a.note(line as u32, mask, write);
        }
        if cx.grid.options.global_races
            && a.owner != Owner::Constant
            && let Err(race) = a.order.access(a.size, line as u32, mask, write, &who)
        {
            trouble = Some(super::global::race_text(cx.code, &race, &who, 16 * line + lo, write, w));
        }
    }
    let Some((fault, text)) = trouble else { return Ok(()) };
    let name = cx.mem.describe(base);
    Err(cx.fail(fault, Some(lane as u32), format!("{name}: {text}")))
}

/// `cp.async.bulk.commit_group`.
pub(super) unsafe fn commit(cx: &mut Cx, _: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        cx.warp.bulk_committed[l] += 1;
    }
    Flow::Next
}

/// `cp.async.bulk.wait_group`: at most `c` groups may be left; `b` is 1 for `.read`, which waits for shared memory
/// only.
pub(super) unsafe fn wait(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    let committed = cx.warp.bulk_committed;
    let mine = |f: &Flight| {
        let l = f.lane as usize;
        let over = |s: &Store| u64::from(s.group) + u64::from(i.c) < u64::from(committed[l]);
        f.warp == w && m >> l & 1 == 1 && matches!(&f.work, Work::Store(s) if over(s))
    };
    for k in 0..cx.block.flights.list.len() {
        if !mine(&cx.block.flights.list[k]) {
            continue;
        }
        cx.block.read_store(k);
        if i.b == 0
            && let Err((fault, text, _)) = cx.block.write_store(cx.mem, k)
        {
            return cx.fail(fault, None, text);
        }
        let clock = cx.block.known[w].own[w];
        let Flight { pieces, work: Work::Store(s), .. } = &mut cx.block.flights.list[k] else { continue };
        if std::mem::take(&mut s.held) {
            for p in pieces.iter() {
                cx.block.shared.release(p.shared / 16, 0xffff, w, clock);
            }
        }
        if i.b == 0 {
            let known = &mut cx.block.known[w].own[slot::STORES + w % slot::STORE_COUNT];
            *known = (*known).max(s.ticket);
        }
    }
    if i.b == 0 {
        cx.block.flights.list.retain(|f| !mine(f));
    }
    cx.grid.effect(true);
    Flow::Next
}
