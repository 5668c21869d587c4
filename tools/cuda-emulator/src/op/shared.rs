// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory: may this warp touch these bytes now, and how many passes do the banks need?
//!
//! Lane by lane for alignment and bounds, then line by line for what the warp touches together.

use super::memory::{Pointers, misaligned};
use super::{Cx, Flow, lanes};
use crate::exec::clock::{WARPS, slot};
use crate::mem::lanes::{LaneAccess, LaneRace};
use crate::mem::shared::{BARRIER_OWNER, SharedFault};
use crate::mem::touch::Touches;
use crate::report::Fault;

/// How shared memory is accessed.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) write: bool,
    /// Atomic or the like: does not race.
    pub(super) strong: bool,
    /// Every lane gets what each address holds.
    pub(super) collective: bool,
    /// The bytes are there already: another thread that wrote them as well does not race.
    pub(super) same: bool,
}

/// Checks an access to shared memory; `Some` when it faults.
#[inline]
pub(super) fn shared(cx: &mut Cx, at: &[u64; 32], size: u32, m: u32, how: How, p: &mut Pointers) -> Option<Flow> {
    let mut touches = Touches::new();
    let limit = u64::from(cx.block.shared.size());
    for l in lanes(m) {
        let o = at[l];
        if !o.is_multiple_of(u64::from(size)) {
            return Some(misaligned(cx, l, o, size));
        }
        if o + u64::from(size) > limit {
            let what = format!("{size} bytes at {o} of {limit} bytes of shared memory");
            return Some(cx.fail(Fault::OutOfBounds, Some(l as u32), what));
        }
        p[l] = cx.block.shared.ptr(o as u32);
        touches.add(o, size);
    }
    if cx.grid.options.count {
        let conflicts = bank_conflicts(at, size, m);
        cx.grid.conflicts[cx.pc] += conflicts;
    }
    let mut checked = shared_lines(cx, &touches, how);
    if checked.is_ok() && cx.grid.options.shared_races && !how.strong {
        let key = cx.lane_key();
        let a = LaneAccess { at, size, mask: m, write: how.write, collective: how.collective, key };
        checked = cx.block.shared.lanes(&a);
    }
    checked.err().map(|f| shared_fault(cx, f, at, size, m))
}

fn shared_lines(cx: &mut Cx, touches: &Touches, how: How) -> Result<(), SharedFault> {
    let (w, How { write, strong, same, .. }) = (cx.warp.index, how);
    if !write && cx.grid.options.uninitialised_shared {
        cx.block.shared.check_written(touches)?;
    }
    let races = cx.grid.options.shared_races && !strong;
    for (line, mask) in touches.iter() {
        if races {
            let clocks = &cx.block.known[w].own;
            if write && same {
                cx.block.shared.rewrite(line, mask, w, clocks, cx.pc as u32)?;
            } else if write {
                cx.block.shared.write(line, mask, w, clocks, cx.pc as u32)?;
            } else {
                cx.block.shared.read(line, mask, w, clocks)?;
            }
        }
        if write {
            cx.block.shared.mark_written(line, mask);
        }
    }
    Ok(())
}

/// Turns a fault at a byte into one of a lane.
#[cold]
pub(super) fn shared_fault(cx: &mut Cx, f: SharedFault, at: &[u64; 32], size: u32, m: u32) -> Flow {
    let (fault, byte, text) = match f {
        SharedFault::Written { by, pc, at } if by as usize >= WARPS => {
            let line = cx.code.ins[pc as usize].line;
            let text = format!("written by the bulk copy of line {line}, whose barrier this warp has not waited for");
            (Fault::SharedRace, at, text)
        }
        SharedFault::Pending { by: BARRIER_OWNER, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            (
                Fault::Barrier,
                at,
                format!("there is a barrier, made at line {line}: only its own instructions may touch it"),
            )
        }
        SharedFault::Pending { by, pc, at } if by as usize >= WARPS => {
            let line = cx.code.ins[pc as usize].line;
            (Fault::AsyncPending, at, format!("the bulk copy of line {line} has not landed there"))
        }
        SharedFault::Held { by, at } => {
            let who = match (by as usize).checked_sub(slot::PRODUCTS) {
                Some(group) => format!("an asynchronous product of warpgroup {group} reads it and"),
                None => format!("a bulk store of warp {by} reads it and"),
            };
            (Fault::AsyncPending, at, format!("{who} has not been waited for"))
        }
        SharedFault::Unfenced { by, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            let text = format!("written by warp {by} at line {line} without `fence.proxy.async` in between");
            (Fault::ProxyFence, at, text)
        }
        SharedFault::Read { by, at } if by as usize >= WARPS => {
            let group = by as usize - slot::PRODUCTS;
            let text = format!("read by a product of warpgroup {group}, whose end this warp does not know of");
            (Fault::SharedRace, at, text)
        }
        SharedFault::Pending { by, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            (
                Fault::AsyncPending,
                at,
                format!("warp {by} copies there asynchronously since line {line} and has not waited for it"),
            )
        }
        SharedFault::Written { by, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            (Fault::SharedRace, at, format!("written by warp {by} at line {line} without a barrier in between"))
        }
        SharedFault::Read { by, at } => {
            (Fault::SharedRace, at, format!("read by warp {by} without a barrier in between"))
        }
        SharedFault::Unwritten { at } => (Fault::Uninitialised, at, "never written".to_owned()),
        SharedFault::Lane(race) => {
            let (who, what) = lane_race(&race);
            (Fault::SharedRace, race.at, format!("{what} by {who} of this warp without `bar.warp.sync` in between"))
        }
    };
    let lane = lanes(m).find(|&l| (at[l]..at[l] + u64::from(size)).contains(&u64::from(byte)));
    let mine = cx.warp.index;
    cx.fail(fault, lane.map(|l| l as u32), format!("byte {byte} of shared memory, accessed by warp {mine}: {text}"))
}

/// How many extra passes the banks need: 32 banks of 4 bytes, 128 bytes a pass, equal words count once.
fn bank_conflicts(at: &[u64; 32], size: u32, m: u32) -> u64 {
    let group = (128 / size.max(4)) as usize;
    let mut extra = 0;
    for first in (0..32).step_by(group) {
        let mut words = [0u32; 32];
        let mut n = [0u8; 32];
        let mut seen: [[u32; 4]; 32] = [[u32::MAX; 4]; 32];
        for l in (first..first + group).filter(|l| m >> l & 1 == 1) {
            for w in 0..size.div_ceil(4) {
                let word = (at[l] / 4) as u32 + w;
                let bank = (word % 32) as usize;
                let known = usize::from(n[bank]).min(4);
                if seen[bank][..known].contains(&word) {
                    continue;
                }
                seen[bank][usize::from(n[bank]) % 4] = word;
                n[bank] += 1;
                words[bank] += 1;
            }
        }
        extra += u64::from(words.iter().copied().max().unwrap_or(0).saturating_sub(1));
    }
    extra
}

/// The other side of a race between lanes, and what it did.
pub(super) fn lane_race(r: &LaneRace) -> (String, &'static str) {
    let who = r.other.map_or("several lanes".to_owned(), |l| format!("lane {l}"));
    (who, if r.wrote { "written" } else { "read" })
}
