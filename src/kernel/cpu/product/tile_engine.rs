// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine for tiles: products of 16 × 32 with 32 × 16 half-precision numbers, summed in f32, by AMX or by dot
//! products of vectors (`dots.rs`), which take the same operands.
//!
//! Stable Rust has no intrinsics for tile instructions, so they are written as assembly: one block of instructions for
//! two by two result tiles, with the whole loop over the inner dimension. Of the eight tile registers four hold
//! results, two the left and two the right operands. Each operand is used twice, so there is one load for each product.
//! Operands are tiles of 1,024 bytes one after another, with the parts of a tile (`forms.rs`) adjacent:
//!
//! ```text
//! k        [key / 16][dim / 32][16 keys][32 dims]         as it is, copied: rows of a tensor may lie far apart
//! v        [dim / 16][key / 32][16 dims][32 keys]         transposed
//! q        [lane / 16][dim / 32][16 pairs of dims][16 lanes][2]
//! p        [key / 32][lane / 16][16 pairs of keys][16 lanes][2]
//! ```
//!
//! The unit reads subnormal bf16 as 0 and flushes subnormal results. It works in parallel with the vector units;
//! `amx_interleaved.rs` uses that for scores without options. In all other cases products and softmax alternate.

use super::amx::{configure, release};
use super::amx_interleaved::{Panel, PendingProduct, put};
use super::amx_product::{PANEL, TILE, scores_of, values_of};
use super::engine::{AttentionEngine, Operands, StoreRow, Values};
use super::forms::TileForm;
use super::not_finite::{not_finite, row_by_row};
use crate::call::RawTensor;
use crate::element::Dtype;
use crate::kernel::cpu::attention::tile::{Lanes, Scores};
use crate::kernel::cpu::memory::arena::KEYS;
use crate::kernel::cpu::memory::convert::runs::sum;
use crate::kernel::cpu::memory::rows::address;
use crate::kernel::cpu::vector::x86::transpose16;
use core::arch::x86_64::*;
use core::marker::PhantomData;
use core::ops::Range;

/// The engine of tiles of `H`, on AMX where [`TileForm::MATRIX_UNIT`] says so.
pub(crate) struct TileEngine<H>(PhantomData<H>);

impl<H: TileForm> TileEngine<H> {
    /// Packs rows transposed, `[dim / 16][row / 32][16 dims][32 rows]`, into the blocks of 32 rows from `first` on, of
    /// `deep` blocks; with `CLEAN`, numbers that are not finite become 0. Returns whether all are finite.
    ///
    /// # Safety
    /// As [`AttentionEngine::values`].
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
    #[inline(never)]
    pub(crate) unsafe fn transposed<const CLEAN: bool>(
        t: &RawTensor,
        head: u32,
        rows: &[i64],
        tile: &mut [u16],
        first: usize,
        deep: usize,
    ) -> bool {
        let dim = t.dim as usize;
        // For each part: the first 16 dims, and the next 16.
        let mut pairs = Pairs([[[0.0; 256]; 2]; 3]);
        assert!(tile.len() >= dim.next_multiple_of(32) * 32 * deep * H::PARTS && rows.len() <= 32 * (deep - first));
        // SAFETY: rows are those of the tensor, the caller says; tiles are within `tile` (asserted).
        unsafe {
            let (low, high) = (_mm512_loadu_si512(LOW.as_ptr().cast()), _mm512_loadu_si512(HIGH.as_ptr().cast()));
            let mut largest = _mm512_setzero_si512();
            for (block, rows) in rows.chunks_exact(32).enumerate() {
                for at in (0..dim).step_by(32) {
                    for (i, two) in rows.chunks_exact(2).enumerate() {
                        let mut both = [[_mm512_setzero_si512(); 3]; 2];
                        for (x, &row) in both.iter_mut().zip(two) {
                            if row >= 0 {
                                *x = H::load(address(t, row, head), at, dim);
                                let size = _mm512_and_si512(x[0], _mm512_set1_epi16(0x7fff));
                                largest = _mm512_max_epu16(largest, size);
                                if CLEAN {
                                    let finite = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(H::INFINITY as i16));
                                    for x in &mut x[..H::PARTS] {
                                        *x = _mm512_maskz_mov_epi16(finite, *x);
                                    }
                                }
                            }
                        }
                        let [a, b] = both;
                        for (part, pairs) in pairs.0[..H::PARTS].iter_mut().enumerate() {
                            let to = pairs.as_mut_ptr().cast::<f32>().add(16 * i);
                            _mm512_store_si512(to.cast(), _mm512_permutex2var_epi16(a[part], low, b[part]));
                            let high = _mm512_permutex2var_epi16(a[part], high, b[part]);
                            _mm512_store_si512(to.add(256).cast(), high);
                        }
                    }
                    for (part, pairs) in pairs.0[..H::PARTS].iter().enumerate() {
                        for (half, pairs) in pairs.iter().enumerate() {
                            let to = ((at / 16 + half) * deep + first + block) * H::PARTS + part;
                            transpose16(pairs.as_ptr(), 16, tile.as_mut_ptr().add(to * TILE).cast(), 16);
                        }
                    }
                }
            }
            _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(H::INFINITY as i16)) == 0
        }
    }

    /// Packs rows as they are: [`AttentionEngine::keys`].
    ///
    /// # Safety
    /// As [`AttentionEngine::keys`].
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn pack_rows(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [u16]) -> bool {
        let dim = t.dim as usize;
        let deep = dim.div_ceil(32);
        assert!(tile.len() >= rows.len().next_multiple_of(16) * deep * 32 * H::PARTS);
        // SAFETY: rows are those of the tensor, the caller says; tiles are within `tile` (asserted).
        unsafe {
            let mut largest = _mm512_setzero_si512();
            for (slot, &row) in rows.iter().enumerate() {
                for i in 0..deep {
                    let mut x = [_mm512_setzero_si512(); 3];
                    if row >= 0 {
                        x = H::load(address(t, row, head), 32 * i, dim);
                    }
                    largest = _mm512_max_epu16(largest, _mm512_and_si512(x[0], _mm512_set1_epi16(0x7fff)));
                    for (part, x) in x[..H::PARTS].iter().enumerate() {
                        let tile_of = (slot / 16 * deep + i) * H::PARTS + part;
                        _mm512_storeu_si512(tile.as_mut_ptr().add(tile_of * TILE + slot % 16 * 32).cast(), *x);
                    }
                }
            }
            _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(H::INFINITY as i16)) == 0
        }
    }

    /// Packs rows of lanes: [`AttentionEngine::queries`].
    ///
    /// # Safety
    /// As [`AttentionEngine::queries`].
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn pack_panel(lanes: &Lanes<f32>, first: usize, t: &RawTensor, panel: &mut [u16]) -> bool {
        let dim = t.dim as usize;
        let deep = dim.div_ceil(32);
        let mut rows = Pairs([[[0.0; 256]; 2]; 3]);
        assert!(panel.len() >= PANEL * deep * 32 * H::PARTS);
        // SAFETY: rows and heads of lanes are those of the tensor, the caller says; tiles are within the panel.
        unsafe {
            let mut largest = _mm512_setzero_si512();
            for tile in 0..PANEL / 16 {
                // Prefetch the rows of the next tile, and of this one if it is the first. Packing reads a line of one
                // row after another, and would wait for each of them.
                let here = first + 16 * tile;
                let asked = if here == 0 { 0 } else { here + 16 };
                prefetch_lanes::<_MM_HINT_T0>(t, lanes, asked..(here + 32).min(lanes.n));
                for i in 0..deep {
                    for l in 0..16 {
                        let lane = here + l;
                        let mut x = [_mm512_setzero_si512(); 3];
                        if lane < lanes.n {
                            x = H::load(address(t, lanes.row[lane], lanes.head[lane]), 32 * i, dim);
                        }
                        largest = _mm512_max_epu16(largest, _mm512_and_si512(x[0], _mm512_set1_epi16(0x7fff)));
                        for (rows, x) in rows.0[..H::PARTS].iter_mut().zip(x) {
                            _mm512_store_si512(rows[0].as_mut_ptr().add(16 * l).cast(), x);
                        }
                    }
                    for (part, rows) in rows.0[..H::PARTS].iter().enumerate() {
                        let to = panel.as_mut_ptr().add(((tile * deep + i) * H::PARTS + part) * TILE);
                        transpose16(rows[0].as_ptr(), 16, to.cast(), 16);
                    }
                }
            }
            _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(H::INFINITY as i16)) == 0
        }
    }
}

#[repr(align(64))]
struct Pairs([[[f32; 256]; 2]; 3]);

/// The first, and the last, 16 elements of two vectors in pairs.
pub(crate) static LOW: [u16; 32] = pairs(0);
pub(crate) static HIGH: [u16; 32] = pairs(16);

const fn pairs(first: u16) -> [u16; 32] {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = first + i as u16;
        index[2 * i + 1] = 32 + first + i as u16;
        i += 1;
    }
    index
}

/// Prefetches the rows of some lanes: with `_MM_HINT_T0` into the L1 cache, with `_MM_HINT_T1` into the L2 cache. Not
/// inlined, since every kernel would contain a copy.
///
/// # Safety
/// Rows and heads of the lanes lie within `t`, whose memory is valid.
#[inline(never)]
pub(crate) unsafe fn prefetch_lanes<const HINT: i32>(t: &RawTensor, lanes: &Lanes<f32>, which: Range<usize>) {
    for lane in which {
        // SAFETY: row and head lie within the tensor (the contract); a prefetch may have any address.
        unsafe {
            let row = address(t, lanes.row[lane], lanes.head[lane]);
            for line in (0..t.dim as usize * t.dtype.size()).step_by(64) {
                _mm_prefetch::<HINT>(row.wrapping_add(line).cast());
            }
        }
    }
}

/// Rounds a row of results and stores it past the caches. Not inlined, since every kernel would contain a copy.
///
/// # Safety
/// AVX-512 is present, `to` is valid for writes of as many elements as `row` has, and nothing else accesses them.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
unsafe fn store_around_caches(row: &[f32], to: *mut u8, dtype: Dtype) {
    let from = (row.as_ptr().cast_mut().cast(), Dtype::F32);
    // SAFETY: the contract, and a row that is only read.
    unsafe { sum::<__m512>((to, dtype), core::iter::once(from), row.len(), true) }
}

impl<H: TileForm> AttentionEngine for TileEngine<H> {
    type Sum = f32;
    type V = __m512;
    type T = u16;
    const PANEL: usize = PANEL;
    const GRAIN: usize = 32;
    const TILES: usize = H::TILES;
    const INTERLEAVES: bool = H::MATRIX_UNIT;
    const WRITES_ALL: bool = true;
    const AROUND_CACHES: Option<StoreRow<f32>> = Some(store_around_caches);
    type Later = PendingProduct;

    fn keys_len(dim: usize) -> usize {
        KEYS * dim.next_multiple_of(32) * H::PARTS
    }

    fn queries_len(dim: usize) -> usize {
        PANEL * dim.next_multiple_of(32) * H::PARTS
    }

    fn weights_len() -> usize {
        KEYS * PANEL * H::PARTS
    }

    #[inline(always)]
    unsafe fn enter() {
        if H::MATRIX_UNIT {
            // SAFETY: AMX is present (the contract of `AttentionEngine::enter`).
            unsafe { configure() }
        }
    }

    #[inline(always)]
    unsafe fn leave() {
        // SAFETY: part of every x86-64. It makes stores past the caches visible to other threads.
        unsafe { _mm_sfence() };
        if H::MATRIX_UNIT {
            // SAFETY: AMX is present.
            unsafe { release() }
        }
    }

    #[inline(always)]
    unsafe fn keys(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [u16]) -> bool {
        // SAFETY: the contract.
        unsafe { Self::pack_rows(t, head, rows, tile) }
    }

    #[inline(always)]
    unsafe fn values(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [u16]) -> bool {
        // SAFETY: rows and head lie within `t` and the tile holds them (the contract of `AttentionEngine::values`).
        unsafe {
            let finite = Self::transposed::<false>(t, head, rows, tile, 0, KEYS / 32);
            if !finite {
                Self::transposed::<true>(t, head, rows, tile, 0, KEYS / 32);
            }
            finite
        }
    }

    #[inline(always)]
    unsafe fn queries(lanes: &Lanes<f32>, first: usize, t: &RawTensor, panel: &mut [u16], _: &mut [f32]) -> bool {
        // SAFETY: the contract.
        unsafe { Self::pack_panel(lanes, first, t, panel) }
    }

    #[inline(always)]
    unsafe fn scores(k: &[u16], q: *const u16, dim: usize, s: *mut f32, keys: Range<usize>, _: usize) {
        for key in keys.step_by(32) {
            // SAFETY: the tiles of 32 keys, of a panel of q, and of as many rows of `s`.
            unsafe { H::product(&scores_of(k.as_ptr(), q, dim, s.add(key * PANEL), key, H::PARTS)) };
        }
    }

    #[inline(always)]
    unsafe fn scores_again(
        lanes: &Lanes<f32>,
        first: usize,
        q: &RawTensor,
        k: &Values<u16>,
        s: *mut f32,
        keys: Range<usize>,
    ) {
        if H::PARTS > 1 {
            // SAFETY: the contract of `AttentionEngine::scores_again`.
            unsafe { row_by_row::<H>(lanes, first, q, k, s, keys) };
        }
    }

    #[inline(always)]
    unsafe fn put(_: *mut f32, p: *mut u16, j: usize, lane: usize, a: __m512, b: __m512) {
        // SAFETY: the pair lies within the panel's p.
        unsafe { put::<H>(p, j, lane, a, b) };
    }

    #[inline(always)]
    unsafe fn weigh(v: &Values<u16>, _: *const f32, p: *const u16, o: *mut f32, keys: Range<usize>, _: usize) {
        for d in (0..v.tensor.dim as usize).step_by(32) {
            // SAFETY: the tiles of 32 dims, of the panel's p, and of as many rows of `o`.
            unsafe { H::product(&values_of(v.tile.as_ptr(), p, o, d, &keys, H::PARTS)) };
        }
        if !v.finite {
            // SAFETY: as above.
            unsafe { not_finite::<H>(v, p, o, keys) };
        }
    }

    #[inline(always)]
    unsafe fn interleaved(
        scores: &Scores<f32>,
        of: &Operands<u16>,
        next: Option<&Operands<u16>>,
        s: *mut f32,
        p: *mut u16,
        (m, l, best): (*mut f32, *mut f32, *mut f32),
        later: &mut PendingProduct,
    ) -> bool {
        // SAFETY: the contract of `AttentionEngine::interleaved`.
        unsafe { Panel { scores, of, next, s, p, m, l, best }.run::<H>(later) }
    }

    #[inline(always)]
    unsafe fn defer(v: &Values<u16>, p: *const u16, o: *mut f32, keys: Range<usize>, later: &mut PendingProduct) {
        later.defer(v.tile.as_ptr(), p, o, keys, v.tensor.dim as usize);
    }

    #[inline(always)]
    unsafe fn finish(later: &mut PendingProduct) {
        // SAFETY: tiles and panels are as they were when it was put off (the contract).
        unsafe { later.finish::<H>() };
    }
}
