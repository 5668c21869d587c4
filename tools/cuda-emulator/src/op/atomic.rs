// SPDX-License-Identifier: MIT OR Apache-2.0
//! `atom` and `red`.

use super::flags::flag_key;
use super::global::global;
use super::memory::{address, peek, poke};
use super::shared::{How, shared};
use super::{Access, Cx, Flow, Ins, lanes};
use crate::mem::{SHARED_WINDOW, WINDOW_MASK};
use crate::num::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, flush};
use crate::ptx::Space;

/// What an atomic does to a location; kept in `c` of the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Rmw {
    Add,
    Exch,
    Cas,
    And,
    Or,
    Xor,
    MinU,
    MinS,
    MaxU,
    MaxS,
    Inc,
    Dec,
    AddF32,
    AddF64,
    AddF16x2,
    AddBf16x2,
}

const ALL: [Rmw; 16] = [
    Rmw::Add,
    Rmw::Exch,
    Rmw::Cas,
    Rmw::And,
    Rmw::Or,
    Rmw::Xor,
    Rmw::MinU,
    Rmw::MinS,
    Rmw::MaxU,
    Rmw::MaxS,
    Rmw::Inc,
    Rmw::Dec,
    Rmw::AddF32,
    Rmw::AddF64,
    Rmw::AddF16x2,
    Rmw::AddBf16x2,
];

impl Rmw {
    /// The operation of a name and a type.
    pub(super) fn of(op: &str, ty: &str) -> Option<Self> {
        let signed = ty.starts_with('s');
        Some(match (op, ty) {
            ("add", "f32") => Rmw::AddF32,
            ("add", "f64") => Rmw::AddF64,
            ("add", "f16x2") => Rmw::AddF16x2,
            ("add", "bf16x2") => Rmw::AddBf16x2,
            (_, t) if t.contains('f') => return None,
            ("add", _) => Rmw::Add,
            ("exch", _) => Rmw::Exch,
            ("cas", _) => Rmw::Cas,
            ("and", _) => Rmw::And,
            ("or", _) => Rmw::Or,
            ("xor", _) => Rmw::Xor,
            ("min", _) => {
                if signed {
                    Rmw::MinS
                } else {
                    Rmw::MinU
                }
            }
            ("max", _) => {
                if signed {
                    Rmw::MaxS
                } else {
                    Rmw::MaxU
                }
            }
            ("inc", "u32") => Rmw::Inc,
            ("dec", "u32") => Rmw::Dec,
            _ => return None,
        })
    }

    /// In global memory subnormal numbers of f32 count as zeros: the old one, the operand and the sum. In shared memory
    /// they are kept.
    fn apply(self, space: Space, size: u32, old: u64, b: u64, c: u64) -> u64 {
        let signed = |v: u64| if size == 4 { i64::from(v as i32) } else { v as i64 };
        match self {
            Rmw::Add => old.wrapping_add(b),
            Rmw::Exch => b,
            Rmw::Cas => {
                if old == b {
                    c
                } else {
                    old
                }
            }
            Rmw::And => old & b,
            Rmw::Or => old | b,
            Rmw::Xor => old ^ b,
            Rmw::MinU => old.min(b),
            Rmw::MaxU => old.max(b),
            Rmw::MinS => signed(old).min(signed(b)) as u64,
            Rmw::MaxS => signed(old).max(signed(b)) as u64,
            Rmw::Inc => {
                if old >= b {
                    0
                } else {
                    old + 1
                }
            }
            Rmw::Dec => {
                if old == 0 || old > b {
                    b
                } else {
                    old - 1
                }
            }
            Rmw::AddF32 => {
                let (x, y) = (f32::from_bits(old as u32), f32::from_bits(b as u32));
                let sum = if space == Space::Shared { x + y } else { flush(flush(x) + flush(y)) };
                u64::from(sum.to_bits())
            }
            Rmw::AddF64 => (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
            Rmw::AddF16x2 => halves(old, b, |x, y| f32_to_f16(f16_to_f32(x) + f16_to_f32(y))),
            Rmw::AddBf16x2 => halves(old, b, |x, y| f32_to_bf16(bf16_to_f32(x) + bf16_to_f32(y))),
        }
    }
}

fn halves(a: u64, b: u64, f: impl Fn(u16, u16) -> u16) -> u64 {
    u64::from(f(a as u16, b as u16)) | u64::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

fn space_of(a: &Access, at: u64) -> Space {
    match a.space {
        Space::Generic if at & WINDOW_MASK == SHARED_WINDOW => Space::Shared,
        Space::Generic => Space::Global,
        s => s,
    }
}

/// `atom`, `red`: rows of b and c in the access, result (if any) in `dst` when `e` is 1, operation in `c`.
pub(super) unsafe fn atomic(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let code = cx.code;
    let a = &code.accesses[i.x as usize];
    let op = ALL[i.c as usize];
    // Lanes take turns in a seeded order: nothing else may be relied on.
    let start = cx.grid.random(32) as usize;
    let mut p = [std::ptr::null_mut(); 32];
    for k in 0..32 {
        let l = (k + start) % 32;
        if m >> l & 1 == 0 {
            continue;
        }
        let raw = address(cx, a, l);
        let space = space_of(a, raw);
        let mut at = [0u64; 32];
        at[l] = if a.space == Space::Generic && space == Space::Shared { raw & !WINDOW_MASK } else { raw };
        let checked = if space == Space::Shared {
            shared(cx, &at, a.size, 1 << l, How { write: false, strong: true, collective: false, same: false }, &mut p)
        } else {
            global(cx, &at, a.size, 1 << l, false, true, &mut p)
        };
        if let Some(flow) = checked {
            return flow;
        }
        let checked = if space == Space::Shared {
            shared(cx, &at, a.size, 1 << l, How { write: true, strong: true, collective: false, same: false }, &mut p)
        } else {
            global(cx, &at, a.size, 1 << l, true, true, &mut p)
        };
        if let Some(flow) = checked {
            return flow;
        }
        let (b, c) = (cx.get(a.rows[0], a.wide, l), cx.get(a.rows[1], a.wide, l));
        // SAFETY: the checks found `size` bytes behind the pointer.
        let old = unsafe { peek(p[l], a.size, false) };
        let new = op.apply(space, a.size, old, b, c);
        // SAFETY: as above.
        unsafe { poke(p[l], a.size, new) };
        if i.e == 1 {
            cx.set(i.dst, a.wide, l, old);
        }
        let key = flag_key(cx, space, at[l]);
        cx.observe(key, a.order);
        cx.publish(key, a.order, a.device_scope, true);
        // Polling by compare-and-swap that fails, or by adding 0, is no progress.
        cx.grid.effect(old != new);
    }
    Flow::Next
}

/// `red` of vectors of f32 in global memory, the data rows in the access. No thread can synchronise by one.
pub(super) unsafe fn vector(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    let code = cx.code;
    let a = &code.accesses[i.x as usize];
    let (op, size) = (ALL[i.c as usize], a.size * a.count);
    let (mut at, mut p) = ([0u64; 32], [std::ptr::null_mut(); 32]);
    for l in lanes(m) {
        at[l] = address(cx, a, l);
    }
    for write in [false, true] {
        if let Some(flow) = global(cx, &at, size, m, write, true, &mut p) {
            return flow;
        }
    }
    for l in lanes(m) {
        for k in 0..a.count as usize {
            // SAFETY: the checks found `size` bytes behind the pointer of every lane in the mask.
            let to = unsafe { p[l].add(k * a.size as usize) };
            // SAFETY: as above.
            let old = unsafe { peek(to, a.size, false) };
            // SAFETY: as above.
            unsafe { poke(to, a.size, op.apply(Space::Global, a.size, old, cx.get(a.rows[k], a.wide, l), 0)) };
        }
    }
    cx.grid.effect(true);
    Flow::Next
}
