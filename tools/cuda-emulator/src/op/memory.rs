// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads and stores in every state space.
//!
//! An access is checked lane by lane (alignment, bounds), then line by line for the whole warp (written before, ordered
//! before), and only then moves data.

use super::flags::flag_key;
use super::global::global;
use super::shared::{How, shared};
use super::{Access, Cx, Flow, Ins, Order, lanes};
use crate::mem::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_MASK};
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
            How { write, strong: a.order.strong() && a.order != Order::Volatile, collective: false, same: false },
            &mut p,
        ),
        Space::Global | Space::Const | Space::Generic => global(cx, at, size, m, write, a.order.strong(), &mut p),
        Space::Local => local(cx, at, size, m, &mut p),
        Space::Param => param(cx, at, size, m, write, &mut p),
    };
    if let Some(flow) = checked {
        // Warps that store the same bytes do not race with each other.
        let race = space == Space::Shared && write && cx.fault.as_ref().is_some_and(|t| t.fault == Fault::SharedRace);
        if !race || !unchanged(cx, a, m, &p) {
            return flow;
        }
        cx.fault = None;
        let how = How { write, strong: false, collective: false, same: true };
        if let Some(flow) = shared(cx, at, size, m, how, &mut p) {
            return flow;
        }
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

/// Whether a store would change nothing.
#[cold]
fn unchanged(cx: &Cx, a: &Access, m: u32, p: &Pointers) -> bool {
    lanes(m).all(|l| {
        (0..a.count).all(|k| {
            let v = cx.get(a.rows[k as usize], a.wide, l);
            // SAFETY: `shared` found the bytes of every lane before it found a race.
            let there = unsafe { peek(p[l].add((k * a.size) as usize), a.size, false) };
            there == v & (u64::MAX >> (64 - 8 * a.size))
        })
    })
}

pub(super) fn misaligned(cx: &mut Cx, lane: usize, at: u64, size: u32) -> Flow {
    cx.fail(Fault::Misaligned, Some(lane as u32), format!("address {at:#x} is not a multiple of {size}"))
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
