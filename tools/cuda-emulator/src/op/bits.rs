// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bit fields, funnel shifts, byte permutes and three-input logic.

use super::table::Table;

/// `prmt` in its default mode: each nibble of `sel` picks one of eight bytes, its top bit replicates the sign.
fn permute(a: u32, b: u32, sel: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    let mut out = 0;
    for i in 0..4 {
        let s = sel >> (4 * i);
        let mut byte = (bytes >> (8 * (s & 7))) as u8;
        if s & 8 != 0 {
            byte = ((byte as i8) >> 7) as u8;
        }
        out |= u32::from(byte) << (8 * i);
    }
    out
}

fn permute_by(a: u32, b: u32, sel: [u32; 4]) -> u32 {
    permute(a, b, sel[0] | sel[1] << 4 | sel[2] << 8 | sel[3] << 12)
}

fn lut(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut out = 0;
    for k in 0..8 {
        if table >> k & 1 == 1 {
            let pick = |v: u32, bit: u32| if bit == 1 { v } else { !v };
            out |= pick(a, k >> 2 & 1) & pick(b, k >> 1 & 1) & pick(c, k & 1);
        }
    }
    out
}

fn field_u64(a: u64, pos: u32, len: u32, bits: u32) -> u64 {
    let (pos, len) = (pos & 255, len & 255);
    if len == 0 || pos >= bits {
        return 0;
    }
    let v = a >> pos;
    if len >= 64 { v } else { v & ((1 << len) - 1) }
}

fn field_s64(a: i64, pos: u32, len: u32, bits: u32) -> i64 {
    let (pos, len) = (pos & 255, len & 255);
    if len == 0 {
        return 0;
    }
    // The sign comes from the top of the field or of the value, whichever is reached first.
    let top = (pos + len - 1).min(bits - 1);
    let sign = (a >> top) & 1;
    let mut out = 0i64;
    for i in 0..bits {
        let bit = if i < len && pos + i < bits { (a >> (pos + i)) & 1 } else { sign };
        out |= bit << i;
    }
    if bits == 32 { i64::from(out as i32) } else { out }
}

fn insert(a: u64, b: u64, pos: u32, len: u32, bits: u32) -> u64 {
    let (pos, len) = (pos & 255, len & 255);
    if len == 0 || pos >= bits {
        return b;
    }
    let ones = if len >= 64 { !0 } else { (1u64 << len) - 1 };
    (b & !(ones << pos)) | ((a & ones) << pos)
}

pub(super) fn fill(t: &mut Table) {
    t.rare_un("popc.b32", |a: u32| a.count_ones());
    t.rare_un("popc.b64", |a: u64| a.count_ones());
    t.rare_un("clz.b32", |a: u32| a.leading_zeros());
    t.rare_un("clz.b64", |a: u64| a.leading_zeros());
    t.rare_un("brev.b32", |a: u32| a.reverse_bits());
    t.rare_un("brev.b64", |a: u64| a.reverse_bits());
    t.rare_un("bfind.u32", |a: u32| 31u32.wrapping_sub(a.leading_zeros()));
    t.rare_un("bfind.shiftamt.u32", |a: u32| if a == 0 { u32::MAX } else { a.leading_zeros() });
    t.rare_un("bfind.u64", |a: u64| 63u32.wrapping_sub(a.leading_zeros()));
    t.rare_un("bfind.s32", |a: i32| 31u32.wrapping_sub((if a < 0 { !a } else { a }).leading_zeros()));
    t.rare_tri("bfe.u32", |a: u32, p: u32, n: u32| field_u64(u64::from(a), p, n, 32) as u32);
    t.rare_tri("bfe.u64", |a: u64, p: u32, n: u32| field_u64(a, p, n, 64));
    t.rare_tri("bfe.s32", |a: i32, p: u32, n: u32| field_s64(i64::from(a), p, n, 32) as i32);
    t.rare_tri("bfe.s64", |a: i64, p: u32, n: u32| field_s64(a, p, n, 64));
    t.rare_quad("bfi.b32", |a: u32, b: u32, p: u32, n: u32| insert(u64::from(a), u64::from(b), p, n, 32) as u32);
    t.rare_quad("bfi.b64", |a: u64, b: u64, p: u32, n: u32| insert(a, b, p, n, 64));
    t.rare_quad("lop3.b32", |a: u32, b: u32, c: u32, k: u32| lut(a, b, c, k));
    // Funnel shifts take the high word second; `clamp` stops at 32, `wrap` takes the amount modulo 32.
    t.rare_tri("shf.l.wrap.b32", |a: u32, b: u32, n: u32| {
        ((u64::from(b) << 32 | u64::from(a)) << (n & 31) >> 32) as u32
    });
    t.rare_tri("shf.l.clamp.b32", |a: u32, b: u32, n: u32| {
        let n = n.min(32);
        if n == 32 { a } else { ((u64::from(b) << 32 | u64::from(a)) << n >> 32) as u32 }
    });
    t.rare_tri("shf.r.wrap.b32", |a: u32, b: u32, n: u32| ((u64::from(b) << 32 | u64::from(a)) >> (n & 31)) as u32);
    t.rare_tri("shf.r.clamp.b32", |a: u32, b: u32, n: u32| ((u64::from(b) << 32 | u64::from(a)) >> n.min(32)) as u32);
    t.rare_tri("prmt.b32", permute);
    t.rare_tri("prmt.b32.f4e", |a: u32, b: u32, c: u32| {
        let c = c & 3;
        permute_by(a, b, [c, c + 1, c + 2, c + 3])
    });
    t.rare_tri("prmt.b32.b4e", |a: u32, b: u32, c: u32| {
        let c = c & 3;
        permute_by(a, b, [c, (c + 7) & 7, (c + 6) & 7, (c + 5) & 7])
    });
    t.rare_tri("prmt.b32.rc8", |a: u32, b: u32, c: u32| permute_by(a, b, [c & 3; 4]));
    t.rare_tri("prmt.b32.rc16", |a: u32, b: u32, c: u32| {
        let c = (c & 1) * 2;
        permute_by(a, b, [c, c + 1, c, c + 1])
    });
    t.rare_tri("prmt.b32.ecl", |a: u32, b: u32, c: u32| {
        let c = c & 3;
        permute_by(a, b, [c, c.max(1), c.max(2), 3])
    });
    t.rare_tri("prmt.b32.ecr", |a: u32, b: u32, c: u32| {
        let c = c & 3;
        permute_by(a, b, [0, c.min(1), c.min(2), c])
    });
}
