// SPDX-License-Identifier: MIT OR Apache-2.0
//! The softmax of a panel, interleaved with products of the matrix unit.
//!
//! If products and softmax of a tile run one after the other, the matrix unit is idle during the softmax, and the
//! vector units are idle while products wait for operands from the L2 cache. Here the scores of a panel are computed a
//! block of 32 keys at a time. While the vector units compute p of one block, the matrix unit computes the scores of
//! the next block and adds `Vᵀ·P` of the previous panel: one step of a product (four tile products) after every few
//! vectors, close enough for the processor to execute both at once. The scores of a block take 8 KiB and stay in the L1
//! cache.
//!
//! The maximum score of a lane is known only after all blocks. p is therefore computed with the lane's current
//! reference, and discarded in the rare case that the reference has to be raised (`softmax.rs` says when). An accepted
//! tile has the same operations in the same order as without interleaving, and so the same bits. Lanes with a reference
//! so large that scores are subtracted from it first are left to the softmax without interleaving.

use super::amx_product::{Apart, PANEL, Product, TILE, begin, end, scores_of, values_of};
use super::engine::Operands;
use super::forms::TileForm;
use crate::kernel::cpu::attention::slots::BLOCK;
use crate::kernel::cpu::attention::softmax::{SLACK, near_whole};
use crate::kernel::cpu::attention::tile::{Cover, Scores, Scoring};
use crate::kernel::cpu::vector::simd::Vector;
use core::arch::x86_64::{__m512, _mm512_storeu_si512};
use core::marker::PhantomData;
use core::ops::Range;

/// The deferred products, and the scores that were computed ahead.
pub(crate) struct PendingProduct {
    /// The deferred products `o += Vᵀ·P`; those of the dims from `d` on remain.
    v: *const u16,
    p: *const u16,
    o: *mut f32,
    keys: Range<usize>,
    d: usize,
    dim: usize,
    /// The half of `s` that holds the next scores, or will hold them.
    half: usize,
    /// Whether the scores of the next panel's first block are computed.
    ahead: bool,
}

impl Default for PendingProduct {
    fn default() -> Self {
        let (v, p, o) = (core::ptr::null(), core::ptr::null(), core::ptr::null_mut());
        Self { v, p, o, keys: 0..0, d: 0, dim: 0, half: 0, ahead: false }
    }
}

impl PendingProduct {
    /// Defers the products of a panel's p over the keys `keys`, for `dim` dims.
    pub(crate) fn defer(&mut self, v: *const u16, p: *const u16, o: *mut f32, keys: Range<usize>, dim: usize) {
        debug_assert_eq!(self.left(), 0);
        *self = Self { v, p, o, keys, d: 0, dim, ..*self };
    }

    fn left(&self) -> usize {
        self.dim.saturating_sub(self.d).div_ceil(32)
    }

    /// # Safety
    /// There is one left; v, p and o are as [`values_of`] says.
    #[inline(always)]
    unsafe fn next<H: TileForm>(&mut self) -> Product {
        // SAFETY: the dims from `d` on are those of v and o (the contract).
        let product = unsafe { values_of(self.v, self.p, self.o, self.d, &self.keys, H::PARTS) };
        self.d += 32;
        product
    }

    /// Computes all deferred products, and discards the scores that were computed ahead.
    ///
    /// # Safety
    /// AMX is entered; v, p and o are as [`values_of`] says.
    #[inline(always)]
    pub(crate) unsafe fn finish<H: TileForm>(&mut self) {
        if self.d < self.dim {
            // SAFETY: the contract.
            unsafe { self.rest::<H>() };
        }
        self.ahead = false;
    }

    /// # Safety
    /// As [`PendingProduct::finish`].
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn rest<H: TileForm>(&mut self) {
        while self.d < self.dim {
            // SAFETY: one is left, and the rest is the contract.
            unsafe { H::product(&self.next::<H>()) };
        }
    }
}

/// The products that run during one block of the softmax, a step at a time.
struct Steps<'a, H> {
    product: Product,
    /// The number of products of `later` that follow.
    quota: usize,
    later: &'a mut PendingProduct,
    half: PhantomData<H>,
}

impl<H: TileForm> Steps<'_, H> {
    /// # Safety
    /// There is a step left; the operands of all products are as their sizes say.
    #[inline(always)]
    unsafe fn one(&mut self) {
        // SAFETY: as the contract; a product ends before the next begins.
        unsafe {
            H::step(&self.product);
            // After the last step there may be no further tile.
            let p = &mut self.product;
            (p.a0, p.a1) = (p.a0.wrapping_byte_add(p.a_step), p.a1.wrapping_byte_add(p.a_step));
            (p.b0, p.b1) = (p.b0.wrapping_byte_add(p.b_step), p.b1.wrapping_byte_add(p.b_step));
            p.steps -= 1;
            if p.steps == 0 {
                if H::PARTS > 1 && p.add {
                    let mut apart = Apart::new();
                    end(&apart.instead(p));
                    apart.add_to(p);
                } else {
                    end(p);
                }
                if self.quota > 0 {
                    self.quota -= 1;
                    *p = self.later.next::<H>();
                    begin(p, H::PARTS);
                }
            }
        }
    }
}

/// A panel of q, and its results.
pub(crate) struct Panel<'a> {
    pub scores: &'a Scores<'a, f32>,
    pub of: &'a Operands<'a, u16>,
    /// The operands of the next panel, if it is interleaved too.
    pub next: Option<&'a Operands<'a, u16>>,
    /// `[2][BLOCK][PANEL]` scores.
    pub s: *mut f32,
    pub p: *mut u16,
    /// References and sums of the panel's lanes.
    pub m: *mut f32,
    pub l: *mut f32,
    /// The largest scores of the lanes; null if nobody asks for them.
    pub best: *mut f32,
}

/// Stores p of keys `j` (even) and `j + 1` with 16 lanes as an operand of products.
///
/// # Safety
/// The instruction set is present; the keys are within the tile and the lanes within the panel.
#[inline(always)]
pub(crate) unsafe fn put<H: TileForm>(p: *mut u16, j: usize, lane: usize, a: __m512, b: __m512) {
    // SAFETY: the pair lies within the panel's p (the contract).
    unsafe {
        let to = p.add((j / 32 * (PANEL / 16) + lane / 16) * TILE * H::PARTS + j % 32 * 16);
        let parts = H::pairs(a, b);
        let mut part = 0;
        while part < H::PARTS {
            _mm512_storeu_si512(to.add(part * TILE).cast(), parts[part]);
            part += 1;
        }
    }
}

/// The state of a panel's vectors from block to block.
struct Running {
    shift: [__m512; 2],
    max: [__m512; 2],
    even: [__m512; 2],
    odd: [__m512; 2],
}

impl Panel<'_> {
    /// Computes p of the panel with the keys, and the lanes' sums, while products of `later` run. Returns false if the
    /// reference of some lane is large or has to be raised; then only `s` and `p` have changed.
    ///
    /// # Safety
    /// AMX with products of `H` is entered; tiles and panels are as long as the engine says; `keys` are whole blocks.
    #[inline(always)]
    pub(crate) unsafe fn run<H: TileForm>(&self, later: &mut PendingProduct) -> bool {
        // SAFETY: the instruction set is present, keys are within the tile and lanes within the panel (the contract).
        unsafe {
            let zero = __m512::splat(0.0);
            let never = __m512::splat(f32::NEG_INFINITY);
            let log2 = __m512::splat(self.scores.scoring.log2);
            let mut r = Running { shift: [zero; 2], max: [never; 2], even: [zero; 2], odd: [zero; 2] };
            let mut limit = [zero; 2];
            let mut w = 0;
            while w < 2 {
                let m = __m512::load(self.m.add(16 * w));
                limit[w] = m.mul(log2).add(__m512::splat(SLACK as f32));
                r.shift[w] = zero.sub(__m512::gt(m, never, m.mul(log2), zero));
                let size = __m512::max(r.shift[w], zero.sub(r.shift[w]));
                if __m512::any_gt(size, __m512::splat(near_whole())) {
                    return false;
                }
                w += 1;
            }
            let blocks = self.of.keys.len() / BLOCK;
            if !later.ahead {
                H::product(&self.product::<H>(self.of, self.of.keys.start, later.half));
            }
            for block in 0..blocks {
                let key = self.of.keys.start + block * BLOCK;
                let s = self.s.add(later.half * BLOCK * PANEL);
                later.half ^= 1;
                let next = match self.next {
                    _ if block + 1 < blocks => Some(self.product::<H>(self.of, key + BLOCK, later.half)),
                    Some(next) => Some(self.product::<H>(next, next.keys.start, later.half)),
                    None => None,
                };
                let mut quota = later.left().div_ceil(blocks - block);
                let mut steps = quota * (later.keys.len() / 32);
                let product = match next {
                    Some(product) => {
                        steps += product.steps;
                        product
                    }
                    None if quota > 0 => {
                        quota -= 1;
                        later.next::<H>()
                    }
                    // No step of this product is due.
                    None => self.product::<H>(self.of, key, later.half),
                };
                let mut queue = Steps::<H> { product, quota, later, half: PhantomData };
                if steps > 0 {
                    begin(&queue.product, H::PARTS);
                }
                if self.scores.covers[key / BLOCK] == Cover::All {
                    self.block::<H, false>(key, s, log2, &mut r, &mut queue, steps);
                } else {
                    self.block::<H, true>(key, s, log2, &mut r, &mut queue, steps);
                }
            }
            later.ahead = self.next.is_some();
            let mut w = 0;
            let mut raise = false;
            while w < 2 {
                raise |= __m512::any_gt(r.max[w].mul(log2), limit[w]);
                w += 1;
            }
            if raise {
                return false;
            }
            w = 0;
            while w < 2 {
                let l = self.l.add(16 * w);
                __m512::load(l).add(r.even[w].add(r.odd[w])).store(l);
                if !self.best.is_null() {
                    let best = self.best.add(16 * w);
                    __m512::max(r.max[w], __m512::load(best)).store(best);
                }
                w += 1;
            }
            true
        }
    }

    /// Computes the scores of the block at `key`, into half `half` of the scores.
    ///
    /// # Safety
    /// As [`Panel::run`], of these operands.
    #[inline(always)]
    unsafe fn product<H: TileForm>(&self, of: &Operands<u16>, key: usize, half: usize) -> Product {
        // SAFETY: the key is within the tile, and each half has room for a block (the contract).
        unsafe { scores_of(of.k.as_ptr(), of.q, of.dim, self.s.add(half * BLOCK * PANEL), key, H::PARTS) }
    }

    /// Computes p of the block at `key`, with `steps` steps of products spread over its vectors.
    ///
    /// # Safety
    /// As [`Panel::run`]; `s` are the block's scores, and the queue has as many steps.
    #[inline(always)]
    unsafe fn block<H: TileForm, const MASKED: bool>(
        &self,
        key: usize,
        s: *mut f32,
        log2: __m512,
        r: &mut Running,
        queue: &mut Steps<H>,
        steps: usize,
    ) {
        let (scoring, first) = (self.scores.scoring, self.scores.first);
        debug_assert!(scoring.plain);
        let mut due = 0;
        let mut j = 0;
        while j < BLOCK {
            due += steps;
            while due >= BLOCK / 2 {
                due -= BLOCK / 2;
                // SAFETY: a step is left, since the steps due add up to the steps of the queue.
                unsafe { queue.one() };
            }
            let mut w = 0;
            while w < 2 {
                // SAFETY: keys are within the block and lanes within the panel, as are those of the masks.
                unsafe {
                    let at = s.add(j * PANEL + 16 * w);
                    let mut a = <__m512 as Vector>::load(at);
                    let mut b = <__m512 as Vector>::load(at.add(PANEL));
                    if MASKED {
                        a = Scoring::mask(a, self.scores.lanes, first + 16 * w, self.scores.keys[key + j]);
                        b = Scoring::mask(b, self.scores.lanes, first + 16 * w, self.scores.keys[key + j + 1]);
                    }
                    r.max[w] = __m512::max(b, __m512::max(a, r.max[w]));
                    let a = a.fma(log2, r.shift[w]).exp2();
                    let b = b.fma(log2, r.shift[w]).exp2();
                    (r.even[w], r.odd[w]) = (r.even[w].add(a), r.odd[w].add(b));
                    put::<H>(self.p, key + j, 16 * w, a, b);
                }
                w += 1;
            }
            j += 2;
        }
    }
}
