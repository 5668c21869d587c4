// SPDX-License-Identifier: MIT OR Apache-2.0
//! Matrix instructions of one warp: `ldmatrix`, `stmatrix`, `movmatrix` and `mma.sync`.
//!
//! Fragments, for lane `4g + t`: a row-major 16×16 A holds rows g and g + 8, columns 2t, 2t + 1 and those plus 8; a
//! column-major 16×8 B holds column g and the same rows; C and D hold rows g and g + 8, columns 2t and 2t + 1.
//! Products are exact in f32 and summed in order of k by fused multiply-adds. The order on hardware is not documented:
//! no test may depend on it.

use super::shared::{How, shared};
use super::{Cx, Flow, Ins};
use crate::num::{bf16_to_f32, f16_to_f32};

/// Reads 8×8 matrices: addresses from the access `x`, rows `a` (first entry of `lists`), `c` matrices, `b` is 1 for
/// `.trans`.
pub(super) unsafe fn load_matrix(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let mut rows = [[[0u16; 8]; 8]; 4];
    if let Some(flow) = matrix_rows(cx, i, false, &mut rows) {
        return flow;
    }
    for (n, rows) in rows.iter().enumerate().take(i.c as usize) {
        let dst = cx.code.lists[i.a as usize + n];
        for l in 0..32 {
            let (g, t) = (l / 4, l % 4 * 2);
            let (x, y) = if i.b == 1 { (rows[t][g], rows[t + 1][g]) } else { (rows[g][t], rows[g][t + 1]) };
            cx.set32(dst, l, u32::from(x) | u32::from(y) << 16);
        }
    }
    Flow::Next
}

/// Writes 8×8 matrices; operands as for [`load_matrix`].
pub(super) unsafe fn store_matrix(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let mut rows = [[[0u16; 8]; 8]; 4];
    for (n, rows) in rows.iter_mut().enumerate().take(i.c as usize) {
        let src = cx.code.lists[i.a as usize + n];
        for l in 0..32 {
            let (g, t) = (l / 4, l % 4 * 2);
            let v = cx.get32(src, l);
            if i.b == 1 {
                (rows[t][g], rows[t + 1][g]) = (v as u16, (v >> 16) as u16);
            } else {
                (rows[g][t], rows[g][t + 1]) = (v as u16, (v >> 16) as u16);
            }
        }
    }
    matrix_rows(cx, i, true, &mut rows).unwrap_or(Flow::Next)
}

/// Moves whole rows of 16 bytes between shared memory and `rows`.
fn matrix_rows(cx: &mut Cx, i: &Ins, write: bool, rows: &mut [[[u16; 8]; 8]; 4]) -> Option<Flow> {
    let code = cx.code;
    let access = &code.accesses[i.x as usize];
    let mut at = [0u64; 32];
    let count = i.c as usize;
    for (l, a) in at.iter_mut().enumerate().take(8 * count) {
        *a = super::memory::address(cx, access, l) & 0xffff_ffff;
    }
    let m = if count == 4 { !0 } else { (1u32 << (8 * count)) - 1 };
    let mut p = [std::ptr::null_mut(); 32];
    if let Some(flow) = shared(cx, &at, 16, m, How { write, strong: false, collective: true, same: false }, &mut p) {
        return Some(flow);
    }
    for n in 0..count {
        for r in 0..8 {
            let q = p[8 * n + r].cast::<[u16; 8]>();
            // SAFETY: the check found 16 bytes behind each pointer.
            unsafe { if write { q.write_unaligned(rows[n][r]) } else { rows[n][r] = q.read_unaligned() } }
        }
    }
    None
}

/// `movmatrix.sync.aligned.m8n8.trans.b16`.
pub(super) unsafe fn move_matrix(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let mut x = [[0u16; 8]; 8];
    for l in 0..32 {
        let v = cx.get32(i.a, l);
        (x[l / 4][l % 4 * 2], x[l / 4][l % 4 * 2 + 1]) = (v as u16, (v >> 16) as u16);
    }
    for l in 0..32 {
        let (g, t) = (l / 4, l % 4 * 2);
        cx.set32(i.dst, l, u32::from(x[t][g]) | u32::from(x[t + 1][g]) << 16);
    }
    Flow::Next
}

/// Whether f16 (`false`) or bf16 (`true`) is multiplied, and the depth k: 8 or 16.
#[inline(always)]
unsafe fn multiply<const BRAIN: bool, const K: usize>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let up = |h: u16| if BRAIN { bf16_to_f32(h) } else { f16_to_f32(h) };
    let list = &cx.code.lists[i.x as usize..];
    let (d, rest) = list.split_at(4);
    let (ar, rest) = rest.split_at(K / 4);
    let (br, rest) = rest.split_at(K / 8);
    let mut a = [[0f32; K]; 16];
    let mut b = [[0f32; 8]; K];
    let mut c = [[0f32; 8]; 16];
    for l in 0..32 {
        let (g, t) = (l / 4, l % 4 * 2);
        for (n, &row) in ar.iter().enumerate() {
            let v = cx.get32(row, l);
            let (r, k) = (g + n % 2 * 8, t + n / 2 * 8);
            a[r][k] = up(v as u16);
            a[r][k + 1] = up((v >> 16) as u16);
        }
        for (n, &row) in br.iter().enumerate() {
            let v = cx.get32(row, l);
            b[t + n * 8][g] = up(v as u16);
            b[t + n * 8 + 1][g] = up((v >> 16) as u16);
        }
        for n in 0..4 {
            c[g + n / 2 * 8][t + n % 2] = f32::from_bits(cx.get32(rest[n], l));
        }
    }
    for r in 0..16 {
        let mut sum = c[r];
        for k in 0..K {
            for n in 0..8 {
                sum[n] = a[r][k].mul_add(b[k][n], sum[n]);
            }
        }
        c[r] = sum;
    }
    for l in 0..32 {
        let (g, t) = (l / 4, l % 4 * 2);
        for n in 0..4 {
            // SAFETY: rows of the decoder, a lane below 32.
            unsafe { *cx.row(d[n]).add(l) = c[g + n / 2 * 8][t + n % 2].to_bits() };
        }
    }
    Flow::Next
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
unsafe fn multiply_v3<const BRAIN: bool, const K: usize>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    // SAFETY: passed on.
    unsafe { multiply::<BRAIN, K>(cx, i, m) }
}

unsafe fn multiply_plain<const BRAIN: bool, const K: usize>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    // SAFETY: passed on.
    unsafe { multiply::<BRAIN, K>(cx, i, m) }
}

/// `mma.sync` m16n8k8 or m16n8k16 with f32 accumulation.
pub(super) fn mma(brain: bool, k: u32) -> super::OpFn {
    #[cfg(target_arch = "x86_64")]
    if super::rows::fast() {
        return match (brain, k) {
            (false, 8) => multiply_v3::<false, 8>,
            (false, _) => multiply_v3::<false, 16>,
            (true, 8) => multiply_v3::<true, 8>,
            (true, _) => multiply_v3::<true, 16>,
        };
    }
    match (brain, k) {
        (false, 8) => multiply_plain::<false, 8>,
        (false, _) => multiply_plain::<false, 16>,
        (true, 8) => multiply_plain::<true, 8>,
        (true, _) => multiply_plain::<true, 16>,
    }
}
