// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads and stores in every state space.
//!
//! An access is checked lane by lane (alignment, bounds), then line by line for the whole warp (written before, ordered
//! before), and only then moves data.

use super::{Access, Cx, Flow, Ins, Order, lanes};
use crate::mem::lanes::{self as lane_order, LaneAccess, LaneRace};
use crate::mem::order::{Accessor, Epoch};
use crate::mem::shared::SharedFault;
use crate::mem::touch::Touches;
use crate::mem::{LOCAL_WINDOW, Owner, PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK};
use crate::ptx::Space;
use crate::report::Fault;

/// The address of a lane.
#[inline(always)]
pub(super) fn address(cx: &Cx, a: &Access, lane: usize) -> u64 {
    if a.base_wide {
        cx.get64(a.base, lane).wrapping_add_signed(a.offset)
    } else {
        u64::from(cx.get32(a.base, lane).wrapping_add(a.offset as u32))
    }
}

/// What a generic address means.
fn resolve(address: u64) -> (Space, u64) {
    let rest = address & !WINDOW_MASK;
    match address & WINDOW_MASK {
        SHARED_WINDOW => (Space::Shared, rest),
        LOCAL_WINDOW => (Space::Local, rest),
        PARAM_WINDOW => (Space::Param, rest),
        _ => (Space::Global, address),
    }
}

#[inline(always)]
pub(super) unsafe fn peek(p: *const u8, size: u32, signed: bool) -> u64 {
    // SAFETY: the caller has checked that `size` bytes can be read.
    unsafe {
        match (size, signed) {
            (1, false) => u64::from(*p),
            (1, true) => *p.cast::<i8>() as i64 as u64,
            (2, false) => u64::from(p.cast::<u16>().read_unaligned()),
            (2, true) => p.cast::<i16>().read_unaligned() as i64 as u64,
            (4, false) => u64::from(p.cast::<u32>().read_unaligned()),
            (4, true) => p.cast::<i32>().read_unaligned() as i64 as u64,
            _ => p.cast::<u64>().read_unaligned(),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn poke(p: *mut u8, size: u32, v: u64) {
    // SAFETY: the caller has checked that `size` bytes can be written.
    unsafe {
        match size {
            1 => *p = v as u8,
            2 => p.cast::<u16>().write_unaligned(v as u16),
            4 => p.cast::<u32>().write_unaligned(v as u32),
            _ => p.cast::<u64>().write_unaligned(v),
        }
    }
}

/// Where the lanes' bytes are, once they are known to exist.
pub(super) type Pointers = [*mut u8; 32];

/// `ld` of any kind.
pub(super) unsafe fn load(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    each_space(cx, i, m, false)
}

/// `st` of any kind.
pub(super) unsafe fn store(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    each_space(cx, i, m, true)
}

fn each_space(cx: &mut Cx, i: &Ins, m: u32, write: bool) -> Flow {
    let code = cx.code;
    let a = &code.accesses[i.x as usize];
    let mut at = [0u64; 32];
    for l in lanes(m) {
        at[l] = address(cx, a, l);
    }
    if a.space != Space::Generic {
        return one_space(cx, a, a.space, &at, m, write);
    }
    let mut rest = m;
    while rest != 0 {
        let first = resolve(at[rest.trailing_zeros() as usize]).0;
        let mut part = 0;
        for l in lanes(rest) {
            if resolve(at[l]).0 == first {
                part |= 1 << l;
            }
        }
        let mut inside = at;
        for l in lanes(part) {
            inside[l] = resolve(at[l]).1;
        }
        let flow = one_space(cx, a, first, &inside, part, write);
        if flow != Flow::Next {
            return flow;
        }
        rest &= !part;
    }
    Flow::Next
}

fn one_space(cx: &mut Cx, a: &Access, space: Space, at: &[u64; 32], m: u32, write: bool) -> Flow {
    let size = a.size * a.count;
    let mut p: Pointers = [std::ptr::null_mut(); 32];
    let checked = match space {
        Space::Shared => shared(
            cx,
            at,
            size,
            m,
            How { write, strong: a.order.strong() && a.order != Order::Volatile, collective: false },
            &mut p,
        ),
        Space::Global | Space::Const | Space::Generic => global(cx, at, size, m, write, a.order.strong(), &mut p),
        Space::Local => local(cx, at, size, m, &mut p),
        Space::Param => param(cx, at, size, m, write, &mut p),
    };
    if let Some(flow) = checked {
        return flow;
    }
    for l in lanes(m) {
        for k in 0..a.count {
            // SAFETY: the checks found `size` bytes behind the pointer of every lane in the mask.
            unsafe {
                let q = p[l].add((k * a.size) as usize);
                if write {
                    let v = cx.get(a.rows[k as usize], a.wide, l);
                    poke(q, a.size, v);
                } else {
                    let v = peek(q, a.size, a.signed);
                    cx.set(a.rows[k as usize], a.wide, l, v);
                }
            }
        }
    }
    if a.order.strong() {
        for l in lanes(m) {
            let key = flag_key(cx, space, at[l]);
            if write {
                cx.publish(key, a.order, a.device_scope, false);
            } else {
                cx.observe(key, a.order);
            }
        }
    }
    if write || a.order.strong() {
        cx.grid.effect(write);
    }
    Flow::Next
}

/// Names a location that synchronises.
pub(super) fn flag_key(cx: &Cx, space: Space, at: u64) -> u64 {
    if space == Space::Shared { SHARED_WINDOW | u64::from(cx.block.number) << 24 | at } else { at }
}

fn misaligned(cx: &mut Cx, lane: usize, at: u64, size: u32) -> Flow {
    cx.fail(Fault::Misaligned, Some(lane as u32), format!("address {at:#x} is not a multiple of {size}"))
}

/// How shared memory is accessed.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) write: bool,
    /// Atomic or the like: does not race.
    pub(super) strong: bool,
    /// Every lane gets what each address holds.
    pub(super) collective: bool,
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
    let (w, How { write, strong, .. }) = (cx.warp.index, how);
    if !write && cx.grid.options.uninitialised_shared {
        cx.block.shared.check_written(touches)?;
    }
    let races = cx.grid.options.shared_races && !strong;
    for (line, mask) in touches.iter() {
        if races {
            let clocks = &cx.block.known[w].own;
            if write {
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
        SharedFault::Written { by, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            (Fault::SharedRace, at, format!("written by warp {by} at line {line} without a barrier in between"))
        }
        SharedFault::Read { by, at } => {
            (Fault::SharedRace, at, format!("read by warp {by} without a barrier in between"))
        }
        SharedFault::Pending { by, pc, at } => {
            let line = cx.code.ins[pc as usize].line;
            (
                Fault::AsyncPending,
                at,
                format!("warp {by} copies there asynchronously since line {line} and has not waited for it"),
            )
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

fn lane_race(r: &LaneRace) -> (String, &'static str) {
    let who = r.other.map_or("several lanes".to_owned(), |l| format!("lane {l}"));
    (who, if r.wrote { "written" } else { "read" })
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
            let (b, ow) = (race.other.block() - who.first_block, race.other.warp());
            let how = match race.pc {
                Some(pc) => format!("written at line {}", cx.code.ins[pc as usize].line),
                None => "read".to_owned(),
            };
            let text = format!(
                "bytes {}.. {how} by warp {ow} of block number {b} and {} by warp {w} of block number {}, unordered",
                line * 16 + mask.trailing_zeros(),
                if write { "written" } else { "read" },
                cx.block.number - who.first_block
            );
            trouble = Some((Fault::GlobalRace, text));
            break;
        }
    }
    let (fault, text) = trouble?;
    let name = cx.mem.describe(base);
    Some(cx.fail(fault, None, format!("line of byte {} of {name}: {text}", line_at * 16)))
}

fn local(cx: &mut Cx, at: &[u64; 32], size: u32, m: u32, p: &mut Pointers) -> Option<Flow> {
    let limit = u64::from(cx.code.local_bytes);
    for l in lanes(m) {
        if !at[l].is_multiple_of(u64::from(size)) {
            return Some(misaligned(cx, l, at[l], size));
        }
        if at[l] + u64::from(size) > limit {
            let what = format!("{size} bytes at {} of {limit} bytes of local memory", at[l]);
            return Some(cx.fail(Fault::OutOfBounds, Some(l as u32), what));
        }
        p[l] = cx.warp.local_ptr(l, limit as usize, at[l] as usize);
    }
    None
}

fn param(cx: &mut Cx, at: &[u64; 32], size: u32, m: u32, write: bool, p: &mut Pointers) -> Option<Flow> {
    let limit = cx.grid.params.len() as u64;
    for l in lanes(m) {
        if write {
            return Some(cx.fail(Fault::ReadOnly, Some(l as u32), "kernel parameters are read-only"));
        }
        if !at[l].is_multiple_of(u64::from(size)) {
            return Some(misaligned(cx, l, at[l], size));
        }
        if at[l] + u64::from(size) > limit {
            let what = format!("{size} bytes at {} of {limit} bytes of parameters", at[l]);
            return Some(cx.fail(Fault::OutOfBounds, Some(l as u32), what));
        }
        p[l] = cx.grid.params.as_ptr().wrapping_add(at[l] as usize).cast_mut();
    }
    None
}

impl Cx<'_> {
    /// Names this warp between two of its synchronisations.
    pub(super) fn lane_key(&self) -> u64 {
        lane_order::key(self.block.number, self.warp.index, self.warp.syncs)
    }

    /// A strong write to a flag: publishes what the warp may publish there.
    pub(super) fn publish(&mut self, key: u64, order: Order, device: bool, rmw: bool) {
        let w = self.warp.index;
        let what = if order.releases() {
            let p = self.block.known[w].publish();
            self.block.known[w].own[w] += 1;
            Some(p)
        } else if device {
            self.warp.fenced.clone()
        } else {
            self.warp.fenced_block.clone().or(self.warp.fenced.clone())
        };
        match what {
            Some(p) if rmw => self.grid.flags.entry(key).or_default().add(&p),
            Some(p) => {
                self.grid.flags.insert(key, p);
            }
            None if !rmw => {
                self.grid.flags.remove(&key);
            }
            None => {}
        }
    }

    /// A strong read of a flag: learns what was published there, now or at the next fence.
    pub(super) fn observe(&mut self, key: u64, order: Order) {
        let Some(p) = self.grid.flags.get(&key) else { return };
        if order.acquires() {
            self.block.known[self.warp.index].acquire(p);
        } else {
            self.warp.observed.add(p);
        }
    }
}
