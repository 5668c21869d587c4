// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of a warpgroup: `wgmma.mma_async`, its fence, groups and waits.
//!
//! D (64 × N, f32) += A (64 × 16) · B (16 × N), f16 or bf16. Each of the four warps has 16 rows of A and D in its
//! registers, in the fragments of `mma.sync`; B, and A where it is not in registers, come from shared memory by way of
//! descriptors ([`Matrix`]). What is asynchronous about it is in `exec::products`.
//!
//! Products are exact in f32 and summed in order of k by fused multiply-adds; the device's order is not documented.

use super::shared::shared_fault;
use super::{Cx, Flow, Ins};
use crate::exec::clock::{Fenced, slot};
use crate::exec::products::{Issue, Lines, Use};
use crate::mem::shared::SharedFault;
use crate::num::{bf16_to_f32, f16_to_f32};
use crate::report::Fault;
use crate::tensormap::Swizzle;

/// `wgmma.fence`.
pub(super) unsafe fn fence(cx: &mut Cx, _: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    cx.warp.guard.fence();
    Flow::Next
}

/// `wgmma.commit_group`.
pub(super) unsafe fn commit(cx: &mut Cx, _: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let w = cx.warp.index;
    if let Err((mine, other)) = cx.block.products.commit(w) {
        let text = format!(
            "this group ends with product {mine} of warp {w}, in another warp of its warpgroup with product {other}"
        );
        return cx.fail(Fault::Divergence, None, text);
    }
    cx.warp.guard.commit();
    cx.grid.effect(true);
    Flow::Next
}

/// `wgmma.wait_group`: at most `c` groups may be left.
pub(super) unsafe fn wait(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    let (w, block) = (cx.warp.index, &mut *cx.block);
    let Some((clock, newly)) = block.products.wait(w, i.c, block.known.len(), &mut block.shared) else {
        return Flow::Again;
    };
    let known = &mut block.known[w].own[slot::PRODUCTS + w / 4];
    *known = (*known).max(clock);
    cx.warp.guard.complete(newly);
    Flow::Next
}

/// Where the elements of a matrix lie in shared memory, as a descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrix {
    start: u32,
    /// Bytes between groups: the leading and the strided offset of the manual.
    leading: u32,
    strided: u32,
    swizzle: Swizzle,
    /// The dimension k is not the one that lies contiguously.
    transposed: bool,
}

impl Matrix {
    fn of(d: u64, transposed: bool) -> Result<Self, String> {
        let field = |at: u32| ((d >> at & 0x3fff) as u32) << 4;
        if d >> 49 & 7 != 0 {
            return Err(format!("descriptor {d:#x} has a base offset: begin matrices where the swizzle repeats"));
        }
        let swizzle = match d >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        Ok(Self { start: field(0), leading: field(16), strided: field(32), swizzle, transposed })
    }

    /// The address of eight contiguous elements: of row `r` from `k = 8c` on, or, transposed, of `k = r` from row 8c
    /// on.
    fn line(&self, r: u32, c: u32) -> u32 {
        let w = self.swizzle.width();
        let (group, within) = (r / 8, r % 8 * w);
        let at = if self.swizzle == Swizzle::None {
            // Blocks of eight rows of 16 bytes. In both cases the strided offset goes with the rows of the result.
            if self.transposed {
                within + group * self.leading + c * self.strided
            } else {
                within + group * self.strided + c * self.leading
            }
        } else if self.transposed {
            let (panel, inside) = (c / (w / 16), c % (w / 16) * 16);
            within + group * self.strided + panel * self.leading + inside
        } else {
            within + group * self.strided + 16 * c
        };
        self.swizzle.place(self.start.wrapping_add(at))
    }
}

/// Reads a matrix of `rows` rows (or columns, for B) from `first` on, 16 deep: `out[r][k]`. Notes the lines it reads.
fn read(cx: &mut Cx, x: Matrix, first: u32, rows: u32, lines: &mut Lines, out: &mut [[u16; 16]]) -> Result<(), Flow> {
    let (outer, inner) =
        if x.transposed { (0..16, first / 8..(first + rows) / 8) } else { (first..first + rows, 0..2) };
    for r in outer {
        for c in inner.clone() {
            let at = x.line(r, c);
            let size = cx.block.shared.size();
            if at.checked_add(16).is_none_or(|end| end > size) {
                let text = format!("a matrix reaches byte {at} of {size} bytes of shared memory");
                return Err(cx.fail(Fault::OutOfBounds, None, text));
            }
            lines.push((at / 16, 0xffff));
            // SAFETY: sixteen bytes from a multiple of 16 on, inside of shared memory.
            let eight = unsafe { cx.block.shared.ptr(at).cast::<[u16; 8]>().read_unaligned() };
            for (j, v) in eight.into_iter().enumerate() {
                if x.transposed {
                    out[(8 * c - first) as usize + j][r as usize] = v;
                } else {
                    out[(r - first) as usize][8 * c as usize + j] = v;
                }
            }
        }
    }
    Ok(())
}

/// Holds what a product reads, and checks that it may.
fn hold(cx: &mut Cx, lines: Lines) -> Option<Flow> {
    if !cx.grid.options.shared_races {
        return None;
    }
    let (w, block) = (cx.warp.index, &mut *cx.block);
    let reader = block.known.len() + w / 4;
    for &(line, mask) in &lines {
        let known = &block.known[w];
        let mut held = block.shared.hold(line, mask, reader, &known.own, &known.fenced[Fenced::Shared as usize]);
        if held.is_ok()
            && cx.grid.options.uninitialised_shared
            && let Some(at) = block.shared.never_written(line, mask)
        {
            held = Err(SharedFault::Unwritten { at });
        }
        if let Err(f) = held {
            return Some(shared_fault(cx, f, &[u64::from(16 * line); 32], 16, 0));
        }
    }
    block.products.hold(w, lines);
    None
}

/// A descriptor, which has to be the same in all lanes.
fn descriptor(cx: &mut Cx, row: u32) -> Result<u64, Flow> {
    let d = cx.get64(row, 0);
    match (1..32).find(|&l| cx.get64(row, l) != d) {
        None => Ok(d),
        Some(l) => {
            let text = format!("the descriptor is {d:#x} in lane 0 and {:#x} in lane {l}", cx.get64(row, l));
            Err(cx.fail(Fault::Illegal, Some(l as u32), text))
        }
    }
}

/// In the flags of `e`.
pub(super) const BRAIN: u32 = 1;
pub(super) const NEGATE_A: u32 = 2;
pub(super) const NEGATE_B: u32 = 4;
pub(super) const TRANSPOSE_A: u32 = 8;
pub(super) const TRANSPOSE_B: u32 = 16;
pub(super) const REGISTERS_A: u32 = 32;
pub(super) const ALWAYS_ADDS: u32 = 64;
pub(super) const NEVER_ADDS: u32 = 128;

/// `wgmma.mma_async`, N in `c`, flags in `e`; descriptors in rows `a` (unless A is in registers) and `b`, predicate of
/// `scale-d` in `dst` (unless it is known). `lists[x..]` has the rows of D, then those of A, then the numbers among
/// [`super::Code::matrix_registers`] of both.
#[inline(always)]
unsafe fn multiply(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    if let Some(flow) = cx.together(m, !0) {
        return flow;
    }
    match issue(cx, i) {
        Ok((a, b)) => {
            // SAFETY: the rows are the decoder's.
            unsafe { add(cx, i, &a, &b) };
            Flow::Next
        }
        Err(flow) => flow,
    }
}

type Factor = [[f32; 16]; 16];

/// All that comes before the numbers: registers, the other warps, shared memory. Gives A, and B by columns.
#[inline(always)]
fn issue(cx: &mut Cx, i: &Ins) -> Result<(Factor, Vec<[u16; 16]>), Flow> {
    let (w, n) = (cx.warp.index, i.c);
    if !cx.block.known.len().is_multiple_of(4) {
        let text = format!("{} warps are no whole number of warpgroups", cx.block.known.len());
        return Err(cx.fail(Fault::Illegal, None, text));
    }
    let scale = i.e & (ALWAYS_ADDS | NEVER_ADDS) != 0 || matches!(cx.pred(i.dst), 0 | u32::MAX);
    if !scale {
        return Err(cx.fail(Fault::Illegal, None, "`scale-d` differs between the lanes of a warp"));
    }
    let code = cx.code;
    let sums = n as usize / 2;
    let factors = if i.e & REGISTERS_A != 0 { 4 } else { 0 };
    let numbers = &code.lists[i.x as usize + sums + factors..][..sums + factors];
    for (k, &r) in numbers.iter().enumerate() {
        let how = if k < sums { Use::Sum(n as u16) } else { Use::Factor };
        if let Err(why) = cx.warp.guard.take(r as u16, how, cx.pc) {
            let name = &code.matrix_registers[r as usize];
            return Err(cx.fail(Fault::ProductRegisters, None, format!("register {name}: {why}")));
        }
    }
    let a = if factors == 0 { descriptor(cx, i.a)? } else { 0 };
    let b = descriptor(cx, i.b)?;
    if let Err(other) = cx.block.products.issue(w, Issue { pc: cx.pc, descriptors: [a, b] }) {
        let text = format!(
            "another warp of warpgroup {} executes the product of line {} with other descriptors or at another place here",
            w / 4,
            code.ins[other.pc].line
        );
        return Err(cx.fail(Fault::Divergence, None, text));
    }
    let mut lines = Lines::with_capacity(32 + 2 * n as usize);
    let mut halves = [[0u16; 16]; 16];
    if factors == 0 {
        let x = Matrix::of(a, i.e & TRANSPOSE_A != 0).map_err(|text| cx.fail(Fault::Illegal, None, text))?;
        read(cx, x, 16 * (w % 4) as u32, 16, &mut lines, &mut halves)?;
    } else {
        let rows = &code.lists[i.x as usize + sums..][..4];
        for l in 0..32 {
            let (g, t) = (l / 4, l % 4 * 2);
            for (k, &row) in rows.iter().enumerate() {
                let v = cx.get32(row, l);
                let (r, c) = (g + k % 2 * 8, t + k / 2 * 8);
                (halves[r][c], halves[r][c + 1]) = (v as u16, (v >> 16) as u16);
            }
        }
    }
    let mut columns = vec![[0u16; 16]; n as usize];
    let x = Matrix::of(b, i.e & TRANSPOSE_B != 0).map_err(|text| cx.fail(Fault::Illegal, None, text))?;
    read(cx, x, 0, n, &mut lines, &mut columns)?;
    if let Some(flow) = hold(cx, lines) {
        return Err(flow);
    }
    let sign = if i.e & NEGATE_A != 0 { -1.0 } else { 1.0 };
    let up = |h: u16| if i.e & BRAIN != 0 { bf16_to_f32(h) } else { f16_to_f32(h) };
    Ok((halves.map(|row| row.map(|h| sign * up(h))), columns))
}

/// D = A·B, or D + A·B, eight columns at a time.
#[inline(always)]
unsafe fn add(cx: &mut Cx, i: &Ins, a: &Factor, b: &[[u16; 16]]) {
    let adds = match i.e & (ALWAYS_ADDS | NEVER_ADDS) {
        0 => cx.pred(i.dst) != 0,
        flag => flag == ALWAYS_ADDS,
    };
    let sign = if i.e & NEGATE_B != 0 { -1.0 } else { 1.0 };
    let brain = i.e & BRAIN != 0;
    let rows = &cx.code.lists[i.x as usize..][..i.c as usize / 2];
    for (rows, columns) in rows.chunks_exact(4).zip(b.chunks_exact(8)) {
        let mut factor = [[0f32; 8]; 16];
        for (n, column) in columns.iter().enumerate() {
            for (k, &h) in column.iter().enumerate() {
                factor[k][n] = sign * if brain { bf16_to_f32(h) } else { f16_to_f32(h) };
            }
        }
        let mut c = [[0f32; 8]; 16];
        if adds {
            for l in 0..32 {
                let (g, t) = (l / 4, l % 4 * 2);
                for n in 0..4 {
                    c[g + n / 2 * 8][t + n % 2] = f32::from_bits(cx.get32(rows[n], l));
                }
            }
        }
        for (sums, a) in c.iter_mut().zip(a) {
            let mut sum = *sums;
            for k in 0..16 {
                for n in 0..8 {
                    sum[n] = a[k].mul_add(factor[k][n], sum[n]);
                }
            }
            *sums = sum;
        }
        for l in 0..32 {
            let (g, t) = (l / 4, l % 4 * 2);
            for n in 0..4 {
                // SAFETY: rows of the decoder, a lane below 32.
                unsafe { *cx.row(rows[n]).add(l) = c[g + n / 2 * 8][t + n % 2].to_bits() };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
unsafe fn multiply_v3(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    // SAFETY: passed on.
    unsafe { multiply(cx, i, m) }
}

unsafe fn multiply_plain(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
    // SAFETY: passed on.
    unsafe { multiply(cx, i, m) }
}

/// `wgmma.mma_async` for this machine.
pub(super) fn mma() -> super::OpFn {
    #[cfg(target_arch = "x86_64")]
    if super::rows::fast() {
        return multiply_v3;
    }
    multiply_plain
}
