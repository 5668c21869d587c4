// SPDX-License-Identifier: MIT OR Apache-2.0
//! The buffers of a unit of the backward pass on matrix units: packed keys, sums of dk and dv, and the factors that
//! keep f16 in range.

use super::super::bands::{Reader, union};
use super::super::slots::{BLOCK, KeyBlock, Slots};
use super::super::tile::{Lanes, at};
use super::weights::ROWS;
use crate::call::AttendBackward;
use crate::kernel::cpu::memory::arena::{Arena, KEYS, Line};
use crate::kernel::cpu::memory::convert::streams;
use crate::kernel::cpu::product::amx_product::PANEL;
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::tile_engine::TileEngine;
use core::arch::x86_64::{_mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_stream_ps};

/// Tiles of keys of a unit.
pub(crate) const SUPER: usize = 4;
/// Blocks of keys of a unit.
pub(crate) const BLOCKS: usize = SUPER * KEYS / BLOCK;
/// The power of 2 by which p is multiplied where the type is narrow. p is at most 1 and often tiny. If lse includes a
/// part of the keys only, p may be larger; up to 1,000 stays in the range of f16.
const P_SHIFT: i32 = 5;

/// The factor of p.
pub(crate) fn weight<H: TileForm>() -> f32 {
    f32::from_bits(((127 + shift::<H>()) as u32) << 23)
}

/// The logarithm to the base 2 of [`weight`].
pub(crate) fn shift<H: TileForm>() -> i32 {
    if H::NARROW { P_SHIFT } else { 0 }
}

/// Bytes of buffers of one worker; dims are padded to 32, and operands have `parts` parts.
pub(crate) const fn bytes(d: usize, dv: usize, parts: usize) -> usize {
    let keys = SUPER * KEYS;
    2 * parts * (keys * (2 * d + dv) + 2 * keys * ROWS + 2 * ROWS * (d + dv) + keys * PANEL)
        + 4 * keys * (d + dv)
        + 8 * KEYS * PANEL
        + 4 * PANEL * d
        + 64 * d
        + keys * 24
        + ROWS * 128
}

/// The buffers of one worker.
pub(crate) struct MatrixTiles<'a> {
    pub lanes: Lanes<'a, f32>,
    pub slots: [Slots<'a, f32>; SUPER],
    /// Tiles of the current unit.
    pub n: usize,
    /// Positions of the keys, infinite for keys that the current q range does not read.
    pub rel: &'a mut [f32],
    pub blocks: [KeyBlock; BLOCKS],
    /// `[tile]`, as `AttentionEngine::keys` packs them.
    pub k: &'a mut [u16],
    pub v: &'a mut [u16],
    /// `[dim / 16][block of keys][16 dims][32 keys]`, and whether all of k is finite.
    pub kt: &'a mut [u16],
    pub finite_k: bool,
    pub finite_v: bool,
    /// The bits of the largest number in v.
    pub largest_v: u16,
    /// The factor of ds and of the sums of dk; 0 before the first rows.
    pub factor: f32,
    /// `[key][dim padded]`.
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    /// Blocks of keys that some row has seen.
    pub touched: [bool; BLOCKS],
    /// Whether dk and dv are large and written once, with stores past the caches.
    pub stream: bool,
    /// `[key / 16][panel][16 keys][32 lanes]`.
    pub p: &'a mut [u16],
    pub ds: &'a mut [u16],
    /// ds of a panel, `[block of keys][lane / 16][16 pairs of keys][16 lanes][2]`.
    pub pairs: &'a mut [u16],
    /// Panels as `AttentionEngine::queries` packs them, and `[panel][dim / 16][16 pairs of lanes][16 dims][2]`.
    pub q: &'a mut [u16],
    pub d_o: &'a mut [u16],
    pub q_pairs: &'a mut [u16],
    pub d_o_pairs: &'a mut [u16],
    /// `[key][lane]` of a panel with a tile.
    pub s: &'a mut [f32],
    pub dp: &'a mut [f32],
    /// `[dim][lane]` of a panel.
    pub dq: &'a mut [f32],
    pub rows: &'a mut [f32],
    pub lse: &'a mut [f32],
    pub delta: &'a mut [f32],
}

impl<'a> MatrixTiles<'a> {
    pub(crate) fn new<H: TileForm>(lines: &'a mut [Line], c: &AttendBackward) -> Self {
        let (d, dv) = ((c.q.dim as usize).next_multiple_of(32), (c.v.dim as usize).next_multiple_of(32));
        let (keys, parts) = (SUPER * KEYS, H::PARTS);
        let mut arena = Arena(lines);
        let rows = c.ranges.k.iter().map(|k| u64::from(k.len)).sum();
        Self {
            lanes: Lanes::new(&mut arena, ROWS),
            slots: core::array::from_fn(|_| Slots::new(&mut arena, KEYS)),
            n: 0,
            rel: arena.take(keys),
            blocks: [KeyBlock::EMPTY; BLOCKS],
            k: arena.take(keys * d * parts),
            v: arena.take(keys * dv * parts),
            kt: arena.take(keys * d * parts),
            finite_k: true,
            finite_v: true,
            largest_v: 0,
            factor: 0.0,
            dk: arena.take(keys * d),
            dv: arena.take(keys * dv),
            touched: [false; BLOCKS],
            stream: !c.accumulate_keys && streams(&c.dk, rows) && streams(&c.dv, rows),
            p: arena.take(keys * ROWS * parts),
            ds: arena.take(keys * ROWS * parts),
            pairs: arena.take(keys * PANEL * parts),
            q: arena.take(ROWS * d * parts),
            d_o: arena.take(ROWS * dv * parts),
            q_pairs: arena.take(ROWS * d * parts),
            d_o_pairs: arena.take(ROWS * dv * parts),
            s: arena.take(KEYS * PANEL),
            dp: arena.take(KEYS * PANEL),
            dq: arena.take(d * PANEL),
            rows: arena.take(16 * d),
            lse: arena.take(ROWS),
            delta: arena.take(ROWS),
        }
    }

    /// Sums of 0.
    #[inline(always)]
    pub(crate) fn clear(&mut self, c: &AttendBackward) {
        let (d, dv) = ((c.q.dim as usize).next_multiple_of(32), (c.v.dim as usize).next_multiple_of(32));
        self.dk[..self.n * KEYS * d].fill(0.0);
        self.dv[..self.n * KEYS * dv].fill(0.0);
        self.touched = [false; BLOCKS];
        self.factor = 0.0;
    }

    /// Packs k and v of the current keys.
    ///
    /// # Safety
    /// As [`super::KeyPass::tiled`].
    #[inline(always)]
    pub(crate) unsafe fn load<H: TileForm>(&mut self, c: &AttendBackward, kv: u32) {
        (self.finite_k, self.finite_v) = (true, true);
        let (k_len, v_len) = (TileEngine::<H>::keys_len(c.k.dim as usize), TileEngine::<H>::keys_len(c.v.dim as usize));
        for (i, slots) in self.slots[..self.n].iter().enumerate() {
            let rows = &slots.row[..slots.n.next_multiple_of(BLOCK)];
            // SAFETY: the keys' rows lie within k and v, and the tiles hold a block of them (the contract of
            // `KeyPass::tiled`).
            unsafe {
                self.finite_k &= TileEngine::<H>::keys(&c.k, kv, rows, &mut self.k[i * k_len..][..k_len]);
                self.finite_v &= TileEngine::<H>::keys(&c.v, kv, rows, &mut self.v[i * v_len..][..v_len]);
                TileEngine::<H>::transposed::<true>(&c.k, kv, rows, self.kt, i * KEYS / BLOCK, BLOCKS);
            }
        }
        self.largest_v = 0;
        if H::NARROW {
            for bits in self.slots[..self.n]
                .iter()
                .zip(self.v.chunks(v_len))
                .flat_map(|(s, v)| &v[..v_len / KEYS * s.n.next_multiple_of(BLOCK)])
            {
                self.largest_v = self.largest_v.max(bits & 0x7fff);
            }
        }
    }

    /// The rows of a q range that may see a key of the unit, by pairs of one band, without a look at each key.
    #[inline]
    pub(crate) fn rows_near(&self, reader: &Reader) -> core::ops::Range<u32> {
        union(self.slots[..self.n].iter().map(|slots| slots.rows_near(reader)))
    }

    /// The rows of a q range that may see a key of the unit, by pairs of one band. Also sets the positions of keys for
    /// these (`rel`, `blocks`).
    ///
    /// # Safety
    /// AVX-512 is present.
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
    #[inline(never)]
    pub(crate) unsafe fn rows(&mut self, reader: &Reader) -> core::ops::Range<u32> {
        if self.rows_near(reader).is_empty() {
            return 0..0;
        }
        let (mut min, mut max) = (i64::MAX, i64::MIN);
        self.blocks = [KeyBlock::EMPTY; BLOCKS];
        for (i, slots) in self.slots[..self.n].iter().enumerate() {
            let rel = &mut self.rel[i * KEYS..][..slots.n.next_multiple_of(BLOCK)];
            if slots.rows_near(reader).is_empty() {
                rel.fill(f32::INFINITY);
                continue;
            }
            rel.copy_from_slice(&slots.rel[..rel.len()]);
            if slots.is_read_whole(reader) {
                let blocks = &slots.blocks[..rel.len() / BLOCK];
                self.blocks[i * KEYS / BLOCK..][..blocks.len()].copy_from_slice(blocks);
                (min, max) = (min.min(slots.min), max.max(slots.max));
                continue;
            }
            for (rel, read) in rel.iter_mut().zip(slots.read_by(reader)) {
                if !read {
                    *rel = f32::INFINITY;
                }
            }
            for (block, rel) in self.blocks[i * KEYS / BLOCK..].iter_mut().zip(rel.chunks(BLOCK)) {
                *block = KeyBlock::of(rel, slots.base);
                (min, max) = (min.min(block.min), max.max(block.max));
            }
        }
        reader.limits.rows(&reader.q, (min, max))
    }

    /// Lowers the factor until ds of these rows is in range, and rescales the sums of dk.
    #[inline(always)]
    pub(crate) fn bring_into_range<H: TileForm>(&mut self, scale: f64, d_pad: usize, dv: usize, largest: u16) {
        if !H::NARROW {
            // The power of 2 of the scale: a sum then overflows only if dq or dk does.
            let power = f32::from_bits((scale.abs() as f32).to_bits() & 0x7f80_0000);
            self.factor = power.clamp(1.0 / 65_536.0, 1.0);
            return;
        }
        let delta = self.delta.iter().fold(0f32, |max, x| max.max(x.abs()));
        let bound = dv as f32 * H::widen(largest) * H::widen(self.largest_v) + delta;
        let mut factor = if self.factor == 0.0 { 1.0 } else { self.factor };
        if bound > 0.0 && bound.is_finite() {
            // The largest power of 2 that keeps the bound below 2^15 for a p of up to 2^10, see `P_SHIFT`.
            let fits = f32::from_bits((127 + 4 + 127 - (bound.to_bits() >> 23)).clamp(1, 254) << 23);
            factor = if self.factor == 0.0 { fits } else { fits.min(self.factor) };
        }
        if self.factor > factor {
            let by = factor / self.factor;
            self.dk[..self.n * KEYS * d_pad].iter_mut().for_each(|x| *x *= by);
        }
        self.factor = factor;
    }

    /// Writes the sums, or adds them, to head `head` of dk and dv.
    ///
    /// # Safety
    /// The keys' rows and the head are within dk and dv, which this unit alone touches there.
    #[inline(always)]
    pub(crate) unsafe fn write<H: TileForm>(&self, c: &AttendBackward, head: u32) {
        let scale = if self.factor == 0.0 { 0.0 } else { c.score.scale as f32 / self.factor };
        for (tile, slots) in self.slots[..self.n].iter().enumerate() {
            for (j, &row) in slots.row[..slots.n].iter().enumerate() {
                let key = tile * KEYS + j;
                if c.accumulate_keys && !self.touched[key / BLOCK] {
                    continue;
                }
                for (tensor, sums, scale) in [(&c.dk, &self.dk, scale), (&c.dv, &self.dv, 1.0 / weight::<H>())] {
                    let dim = tensor.dim as usize;
                    // SAFETY: the row and head are within the tensor and this unit's alone (the contract); rows are
                    // contiguous.
                    let dst = unsafe { core::slice::from_raw_parts_mut(at::<f32>(tensor, row, head), dim) };
                    let sums = &sums[key * dim.next_multiple_of(32)..][..dim];
                    // SAFETY: AVX-512 is present (the contract of `KeyPass::tiled`); with `stream` rows are whole lines
                    // (`streams`).
                    unsafe { write_row(dst, sums, scale, c.accumulate_keys, self.stream) }
                }
            }
        }
    }
}

/// `dst = sums · scale`, or adds it; with `stream` by stores past the caches. Not inlined, since every kernel would
/// contain a copy.
///
/// # Safety
/// AVX-512 is present; with `stream`, `dst` consists of whole lines and nothing is added.
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn write_row(dst: &mut [f32], sums: &[f32], scale: f32, accumulate: bool, stream: bool) {
    if stream {
        for (x, sums) in dst.chunks_exact_mut(16).zip(sums.chunks_exact(16)) {
            // SAFETY: 16 numbers are a line of dst (the contract).
            unsafe {
                let sums = _mm512_mul_ps(_mm512_loadu_ps(sums.as_ptr()), _mm512_set1_ps(scale));
                _mm512_stream_ps(x.as_mut_ptr(), sums);
            }
        }
        return;
    }
    for (x, &sum) in dst.iter_mut().zip(sums) {
        *x = if accumulate { *x + sum * scale } else { sum * scale };
    }
}
