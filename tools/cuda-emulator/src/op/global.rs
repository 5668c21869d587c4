// SPDX-License-Identifier: MIT OR Apache-2.0
//! Global and constant memory: may this warp touch these bytes now?
//!
//! Lane by lane for alignment and bounds, then allocation by allocation and line by line: written before, writable,
//! ordered after what other warps did there.

use super::memory::{Pointers, misaligned};
use super::shared::lane_race;
use super::{Code, Cx, Flow, lanes};
use crate::exec::clock::WARPS;
use crate::mem::Owner;
use crate::mem::lanes::LaneAccess;
use crate::mem::order::{Accessor, Epoch, Race};
use crate::mem::touch::Touches;
use crate::report::Fault;

/// Checks an access to global memory; `Some` when it faults.
#[inline]
pub(super) fn global(
    cx: &mut Cx,
    at: &[u64; 32],
    size: u32,
    m: u32,
    write: bool,
    strong: bool,
    p: &mut Pointers,
) -> Option<Flow> {
    let mut touches = Touches::new();
    let (mut current, mut inside, mut first) = (0, [0u64; 32], m);
    for l in lanes(m) {
        let o = at[l];
        if !o.is_multiple_of(u64::from(size)) {
            return Some(misaligned(cx, l, o, size));
        }
        let base = match cx.mem.locate(o, size as usize) {
            Ok(base) => base,
            Err((fault, text)) => return Some(cx.fail(fault, Some(l as u32), text)),
        };
        if base != current {
            if let Some(f) = global_lines(cx, current, &touches, write, strong) {
                return Some(f);
            }
            if current != 0 {
                first &= (1 << l) - 1;
            }
            touches.clear();
            current = base;
        }
        inside[l] = o - base;
        p[l] = o as *mut u8;
        touches.add(o - base, size);
    }
    let flow = global_lines(cx, current, &touches, write, strong);
    if flow.is_some() || strong || !cx.grid.options.global_lanes || first == 0 {
        return flow;
    }
    // Where lanes reach into several allocations, the first is checked lane by lane.
    let home = cx.mem.locate(at[first.trailing_zeros() as usize], size as usize).unwrap_or(current);
    let a = LaneAccess { at: &inside, size, mask: first, write, collective: false, key: cx.lane_key() };
    let race = cx.mem.at(home).lane_access(&a).err()?;
    let name = cx.mem.describe(home);
    let (who, what) = lane_race(&race);
    let text = format!("byte {} of {name}: {what} by {who} of this warp without `bar.warp.sync` in between", race.at);
    Some(cx.fail(Fault::GlobalRace, None, text))
}

/// Checks and records lines of one allocation.
pub(super) fn global_lines(cx: &mut Cx, base: u64, touches: &Touches, write: bool, strong: bool) -> Option<Flow> {
    if touches.is_empty() {
        return None;
    }
    let options = &cx.grid.options;
    let w = cx.warp.index;
    let known = &cx.block.known[w];
    let who = Accessor {
        epoch: Epoch::new(cx.block.number, w as u32, known.own[w], strong),
        pc: cx.pc as u32,
        first_block: cx.grid.first_block,
        knowledge: known,
        asynchronous: false,
    };
    let a = cx.mem.at(base);
    let (mut trouble, mut line_at) = (None, 0);
    for (line, mask) in touches.iter() {
        line_at = line;
        if write {
            if a.owner == Owner::Constant {
                trouble = Some((Fault::ReadOnly, "it is read-only".to_owned()));
                break;
            }
            a.written[line as usize] |= mask;
        } else if options.uninitialised_global {
            let missing = mask & !a.written[line as usize];
            if missing != 0 {
                let byte = line * 16 + missing.trailing_zeros();
                trouble = Some((Fault::Uninitialised, format!("byte {byte} was never written")));
                break;
            }
        }
        if options.footprints {
            a.note(line, mask, write);
        }
        if options.global_races
            && a.owner != Owner::Constant
            && let Err(race) = a.order.access(a.size, line, mask, write, &who)
        {
            let first = (line * 16 + mask.trailing_zeros()) as usize;
            trouble = Some(race_text(cx.code, &race, &who, first, write, w));
            break;
        }
    }
    let (fault, text) = trouble?;
    let name = cx.mem.describe(base);
    Some(cx.fail(fault, None, format!("line of byte {} of {name}: {text}", line_at * 16)))
}

/// The fault of a race at a byte that warp `w` found, and its words.
#[cold]
pub(super) fn race_text(
    code: &Code,
    race: &Race,
    who: &Accessor<'_>,
    byte: usize,
    write: bool,
    w: usize,
) -> (Fault, String) {
    let (b, ow) = (race.other.block() - who.first_block, race.other.warp());
    let by = if (ow as usize) < WARPS { format!("warp {ow}") } else { "a bulk copy".to_owned() };
    let how = match race.pc {
        Some(pc) => format!("written at line {}", code.ins[pc as usize].line),
        None => "read".to_owned(),
    };
    let mine = who.epoch.block() - who.first_block;
    let verb = if write { "written" } else { "read" };
    if race.unfenced {
        let text = format!(
            "bytes {byte}.. {how} by {by} of block number {b} and {verb} by a bulk copy without `fence.proxy.async` between"
        );
        return (Fault::ProxyFence, text);
    }
    let text = format!(
        "bytes {byte}.. {how} by {by} of block number {b} and {verb} by warp {w} of block number {mine}, unordered"
    );
    (Fault::GlobalRace, text)
}
