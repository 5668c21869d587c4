// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cp.async`: copies from global to shared memory that land at their wait.
//!
//! Landing as late as allowed is the adversarial choice: a thread that does not wait reads poison. Between the
//! instruction and the wait the destination belongs to the copy.

use super::global::global;
use super::memory::address;
use super::shared::shared_fault;
use super::{Cx, Flow, Ins, lanes};
use crate::mem::lanes::LaneAccess;
use crate::mem::shared::SharedFault;
use crate::mem::touch::Touches;
use crate::report::Fault;

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) lane: u32,
    /// Number of the lane's group that will hold it.
    pub(crate) group: u32,
    pub(crate) dst: u32,
    pub(crate) src: u64,
    pub(crate) bytes: u32,
    pub(crate) from_src: u32,
}

/// `cp.async.ca/cg`: destination access in `x`, source access in `x + 1`, row of the source size in `a` (or
/// `u32::MAX`), predicate that ignores the source in `b` (or `u32::MAX`; negated when `c` is 1).
pub(super) unsafe fn start(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let code = cx.code;
    let (to, from) = (&code.accesses[i.x as usize], &code.accesses[i.x as usize + 1]);
    let size = to.size;
    let w = cx.warp.index;
    let limit = u64::from(cx.block.shared.size());
    let ignore = match i.b {
        u32::MAX => 0,
        p => {
            if i.c == 1 {
                !cx.pred(p)
            } else {
                cx.pred(p)
            }
        }
    };
    let (mut dst, mut src, mut len) = ([0u64; 32], [0u64; 32], [0u32; 32]);
    let mut touches = Touches::new();
    let mut reads = [0u32; 17];
    for l in lanes(m) {
        dst[l] = address(cx, to, l);
        src[l] = address(cx, from, l);
        len[l] = if i.a == u32::MAX { size } else { cx.get32(i.a, l) };
        if len[l] > size {
            let what = format!("source size {} of a copy of {size} bytes", len[l]);
            return cx.fail(Fault::Illegal, Some(l as u32), what);
        }
        if ignore >> l & 1 == 1 {
            len[l] = 0;
        }
        if dst[l] % u64::from(size) != 0 || (len[l] > 0 && src[l] % u64::from(size) != 0) {
            let what = format!("copy from {:#x} to shared {:#x}: not multiples of {size}", src[l], dst[l]);
            return cx.fail(Fault::Misaligned, Some(l as u32), what);
        }
        if dst[l] + u64::from(size) > limit {
            let what = format!("{size} bytes at {} of {limit} bytes of shared memory", dst[l]);
            return cx.fail(Fault::OutOfBounds, Some(l as u32), what);
        }
        touches.add(dst[l], size);
        reads[len[l] as usize] |= 1 << l;
    }
    // The source is read some time before the wait: it has to be valid from now on.
    for (bytes, &part) in reads.iter().enumerate().skip(1).filter(|(_, p)| **p != 0) {
        if let Some(flow) = check_source(cx, &src, bytes as u32, part) {
            return flow;
        }
    }
    let eager = cx.grid.options.eager;
    let key = cx.lane_key();
    let lanes_access = LaneAccess { at: &dst, size, mask: m, write: true, collective: false, key };
    if let Err(f) = claim(cx, &touches, w, &lanes_access) {
        return shared_fault(cx, f, &dst, size, m);
    }
    for l in lanes(m) {
        let p = Pending {
            lane: l as u32,
            group: cx.warp.committed[l],
            dst: dst[l] as u32,
            src: src[l],
            bytes: size,
            from_src: len[l],
        };
        if eager {
            deliver(cx, p);
        } else {
            cx.block.shared.poison(p.dst, p.bytes);
        }
        cx.warp.pending.push(p);
    }
    cx.grid.effect(true);
    Flow::Next
}

/// Source bytes that are not a power of two are checked piece by piece.
fn check_source(cx: &mut Cx, src: &[u64; 32], bytes: u32, m: u32) -> Option<Flow> {
    let mut p = [std::ptr::null_mut(); 32];
    let mut done = 0;
    while done < bytes {
        let piece = if bytes.is_power_of_two() { bytes } else { 1 << (bytes - done).trailing_zeros().min(3) };
        let mut at = *src;
        at.iter_mut().for_each(|a| *a = a.wrapping_add(u64::from(done)));
        let piece = if at[m.trailing_zeros() as usize].is_multiple_of(u64::from(piece)) { piece } else { 1 };
        if let Some(flow) = global(cx, &at, piece, m, false, false, &mut p) {
            return Some(flow);
        }
        done += piece;
    }
    None
}

fn claim(cx: &mut Cx, touches: &Touches, w: usize, lanes_access: &LaneAccess<'_>) -> Result<(), SharedFault> {
    if cx.grid.options.shared_races {
        for (line, mask) in touches.iter() {
            let clocks = &cx.block.known[w].own;
            cx.block.shared.begin(line, mask, w, clocks, cx.pc as u32)?;
        }
        cx.block.shared.lanes(lanes_access)?;
    }
    Ok(())
}

fn deliver(cx: &mut Cx, p: Pending) {
    let to = cx.block.shared.ptr(p.dst);
    // SAFETY: source and destination were checked when the copy began; an allocation freed since then is still kept.
    unsafe {
        std::ptr::copy_nonoverlapping(p.src as *const u8, to, p.from_src as usize);
        std::ptr::write_bytes(to.add(p.from_src as usize), 0, (p.bytes - p.from_src) as usize);
    }
}

/// `cp.async.commit_group`.
pub(super) unsafe fn commit(cx: &mut Cx, _: &Ins, m: u32) -> Flow {
    for l in lanes(m) {
        cx.warp.committed[l] += 1;
    }
    Flow::Next
}

/// `cp.async.wait_group n` (n in `c`), `cp.async.wait_all` (`c` is `u32::MAX`).
pub(super) unsafe fn wait(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let w = cx.warp.index;
    let committed = cx.warp.committed;
    let mut touches = Touches::new();
    let pending = std::mem::take(&mut cx.warp.pending);
    let mut left = Vec::with_capacity(pending.len());
    let mut batch = 0;
    for p in pending {
        let l = p.lane as usize;
        let lands = m >> l & 1 == 1 && (i.c == u32::MAX || p.group + i.c < committed[l]);
        if !lands {
            left.push(p);
            continue;
        }
        if !cx.grid.options.eager {
            deliver(cx, p);
        }
        if cx.grid.options.shared_races {
            let key = cx.lane_key();
            cx.block.shared.arrived(p.dst, p.bytes, p.lane, key);
        }
        touches.add(u64::from(p.dst), p.bytes);
        batch += 1;
        if batch == 32 {
            settle(cx, &touches, w);
            touches.clear();
            batch = 0;
        }
    }
    settle(cx, &touches, w);
    cx.warp.pending = left;
    Flow::Next
}

fn settle(cx: &mut Cx, touches: &Touches, w: usize) {
    for (line, mask) in touches.iter() {
        if cx.grid.options.shared_races {
            let clocks = &cx.block.known[w].own;
            cx.block.shared.end(line, mask, w, clocks);
        }
        cx.block.shared.mark_written(line, mask);
    }
}
