// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor copies: `cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor`, boxes of tensors of one to five dimensions.
//!
//! The map says where the box lies; from there on it is a bulk copy whose pieces of 16 bytes lie as the swizzle says.
//! A barrier is told of the whole box, whatever part of it lies in the tensor.

use super::bulk::{ADD, Request, begin_load, begin_store};
use super::mbarrier::place;
use super::memory::{address, misaligned};
use super::{Cx, Flow, Ins, lanes};
use crate::exec::flight::Piece;
use crate::mem::{PARAM_WINDOW, WINDOW_MASK};
use crate::report::Fault;
use crate::tensormap::{Swizzle, TensorMap};

/// A lane's map, from access `x`.
fn map(cx: &mut Cx, x: u32, l: usize) -> Result<TensorMap, Flow> {
    let code = cx.code;
    let at = address(cx, &code.accesses[x as usize], l);
    if !at.is_multiple_of(64) {
        return Err(misaligned(cx, l, at, 64));
    }
    let mut bytes = [0; 128];
    if at & WINDOW_MASK == PARAM_WINDOW {
        let from = (at & !WINDOW_MASK) as usize;
        let Some(b) = cx.grid.params.get(from..from + 128) else {
            let text = format!("a map at {from} of {} bytes of parameters", cx.grid.params.len());
            return Err(cx.fail(Fault::OutOfBounds, Some(l as u32), text));
        };
        bytes.copy_from_slice(b);
    } else {
        match cx.mem.read(at, 128) {
            Ok(b) => bytes.copy_from_slice(&b),
            Err((fault, text)) => return Err(cx.fail(fault, Some(l as u32), text)),
        }
    }
    TensorMap::decode(&bytes).ok_or_else(|| {
        let text = "these 128 bytes are no tensor map that this driver has encoded";
        cx.fail(Fault::Illegal, Some(l as u32), text)
    })
}

/// The same, which a copy of `rank` dimensions uses.
fn map_of_rank(cx: &mut Cx, x: u32, l: usize, rank: usize) -> Result<TensorMap, Flow> {
    let map = map(cx, x, l)?;
    if map.dims.len() != rank {
        let text = format!("the map is of a tensor of {} dimensions, the copy of {rank}", map.dims.len());
        return Err(cx.fail(Fault::Illegal, Some(l as u32), text));
    }
    Ok(map)
}

/// What a lane's copy moves, and the rank of the block. Access `x` is shared memory, `x + 1` the map; `lists[a..]` has
/// `b` rows of coordinates.
fn request(cx: &mut Cx, i: &Ins, l: usize) -> Result<(usize, Request, TensorMap), Flow> {
    let map = map_of_rank(cx, i.x + 1, l, i.b as usize)?;
    // A swizzle repeats after eight rows of its width; without one, 128 bytes are asked for.
    let repeat = if map.swizzle == Swizzle::None { 128 } else { 8 * map.swizzle.width() };
    let (rank, start) = place(cx, i.x, l, repeat)?;
    let limit = cx.block.shared.size();
    if start + map.bytes() > limit {
        let text = format!("a box of {} bytes at {start} of {limit} bytes of shared memory", map.bytes());
        return Err(cx.fail(Fault::OutOfBounds, Some(l as u32), text));
    }
    let at: Vec<i32> = (0..i.b).map(|k| cx.get32(cx.code.lists[(i.a + k) as usize], l) as i32).collect();
    let inner = map.shape[0] * map.element;
    let mut r = Request { lane: l, pieces: Vec::with_capacity(map.bytes() as usize / 16), runs: Vec::new() };
    map.rows(&at, |row, first, inside| {
        if !inside.is_empty() {
            r.runs.push((first.wrapping_add(inside.start.into()), inside.len() as u32));
        }
        for piece in 0..inner / 16 {
            let (from, to) =
                (inside.start.clamp(16 * piece, 16 * piece + 16), inside.end.clamp(16 * piece, 16 * piece + 16));
            r.pieces.push(Piece {
                shared: map.swizzle.place(start + row * inner + 16 * piece),
                from: (from - 16 * piece) as u8,
                to: (to.max(from) - 16 * piece) as u8,
                global: first.wrapping_add((16 * piece).into()),
            });
        }
    });
    Ok((rank, r, map))
}

/// `cp.async.bulk.tensor.Nd.shared.global`: the barrier is access `x + 2`; of a multicast the row of the mask is `c`
/// and `e` is 1.
pub(super) unsafe fn load(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let mask = (i.e == 1).then_some(i.c);
    for l in lanes(m) {
        let issued = request(cx, i, l)
            .and_then(|(rank, r, map)| begin_load(cx, (rank, r), (i.x + 2, mask), map.bytes(), map.filling()));
        if let Err(flow) = issued {
            return flow;
        }
        cx.grid.boxes += 1;
    }
    cx.grid.effect(true);
    Flow::Next
}

/// `cp.async.bulk.tensor.Nd.global.shared`, `cp.reduce.async.bulk.tensor` (`c` is [`ADD`]).
pub(super) unsafe fn store(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        let issued = request(cx, i, l).and_then(|(_, r, map)| {
            if i.c == ADD && !map.f32 {
                return Err(cx.fail(Fault::Illegal, Some(l as u32), "only f32 is added: this map has other elements"));
            }
            begin_store(cx, r, i.c == ADD)
        });
        if let Err(flow) = issued {
            return flow;
        }
    }
    cx.grid.effect(true);
    Flow::Next
}

/// `cp.async.bulk.prefetch.tensor`: nothing moves, but the map has to be one.
pub(super) unsafe fn prefetch(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        if let Err(flow) = map_of_rank(cx, i.x, l, i.b as usize) {
            return flow;
        }
    }
    Flow::Next
}

/// `prefetch.tensormap`: as little, of a map that copies of any rank may use.
pub(super) unsafe fn prefetch_map(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        if let Err(flow) = map(cx, i.x, l) {
            return flow;
        }
    }
    Flow::Next
}
