// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two products of the forward pass, and the form in which each machine takes their operands.
//!
//! The algorithm exists once (`forward.rs`): lanes in panels, keys in tiles, an online softmax between `S = K·Qᵀ` and
//! `Oᵀ += Vᵀ·P`. An [`AttentionEngine`] says how a panel of q, a tile of k and a tile of v lie in memory, and multiplies them.
//! [`Dense`] keeps operands in the type of the sums and multiplies with the vectors of an instruction set; matrix
//! units (`tile_engine.rs`) keep them in the element type, in tiles. Scores and sums are the same for all: `[key][lane]` and
//! `[dim][lane]`, in the type of the sums.
//!
//! An engine may round p to its operands' type ([`crate::kernel::cpu::Isa::roundoff`] says so); it may not round anything else.

use crate::call::RawTensor;
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::attention::tile::{Lanes, Scores, at, product};
use crate::kernel::cpu::memory::arena::{KEYS, row};
use crate::kernel::cpu::memory::panel::{any_non_finite, is_zero, to_lanes};
use crate::kernel::cpu::memory::rows::{narrow, widen};
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::simd::{Real, Vector};
use bytemuck::Pod;
use core::marker::PhantomData;
use core::ops::Range;

/// How operands of the two products lie in memory, and how they are multiplied.
///
/// # Safety
/// Every method needs the instruction set to be present; all but [`AttentionEngine::enter`] need `enter` to have been called on
/// this thread. Tiles and panels are as long as [`AttentionEngine::keys_len`], [`AttentionEngine::values_len`] and [`AttentionEngine::queries_len`]
/// say, `s` is `[KEYS][PANEL]`, `p` of [`AttentionEngine::weights_len`], and `o` is `[value_dim padded to GRAIN][PANEL]`.
pub(crate) trait AttentionEngine {
    /// The type of sums.
    type Sum: Real;
    /// The vectors of the softmax.
    type V: Vector<T = Self::Sum>;
    /// What operands hold.
    type T: Pod;
    /// Lanes of a panel.
    const PANEL: usize = 2 * Self::V::W;
    /// Tiles of keys and the rows of o are padded to a multiple of this, which divides [`crate::kernel::cpu::attention::stream::BLOCK`].
    const GRAIN: usize;
    /// Tiles of keys that are packed together; each panel then meets one after the other.
    const TILES: usize = 1;
    /// [`AttentionEngine::interleaved`] can be asked for.
    const INTERLEAVES: bool = false;
    /// Packing writes all that products read; otherwise what lies between rows is read as well, and must be zeros.
    const WRITES_ALL: bool = false;
    /// Products that [`AttentionEngine::interleaved`] put off.
    type Later: Default;

    /// Elements of a tile of k.
    fn keys_len(dim: usize) -> usize;
    /// Elements of a tile of v.
    fn values_len(dim: usize) -> usize;
    /// Elements of a panel of q.
    fn queries_len(dim: usize) -> usize;

    /// Elements of p of a panel.
    fn weights_len() -> usize {
        KEYS * Self::PANEL
    }

    /// Makes this thread ready.
    unsafe fn enter() {}
    /// Undoes [`AttentionEngine::enter`].
    unsafe fn leave() {}

    /// Packs rows `rows` (negative: none, zeros) of a head of k. Whether all numbers are finite.
    unsafe fn keys(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [Self::T]) -> bool;
    /// Packs rows of a head of v, likewise.
    unsafe fn values(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [Self::T]) -> bool;
    /// Packs a panel of q, from lane `first` on, likewise. `rows` holds [`Vector::W`] rows.
    unsafe fn queries(
        lanes: &Lanes<Self::Sum>,
        first: usize,
        t: &RawTensor,
        panel: &mut [Self::T],
        rows: &mut [Self::Sum],
    ) -> bool;

    /// `s[keys][..width] = K·Qᵀ` for the keys of a range that begins, and ends unless the tile does, at a multiple of 2 and of
    /// [`AttentionEngine::GRAIN`].
    unsafe fn scores(k: &[Self::T], q: *const Self::T, dim: usize, s: *mut Self::Sum, keys: Range<usize>, width: usize);
    /// Makes those of them anew whose rows have numbers that the engine cannot multiply, among `rows` of `head` of k and the
    /// lanes from `first` on of q: asked for where [`AttentionEngine::keys`] or [`AttentionEngine::queries`] said that there are some.
    unsafe fn scores_again(
        _lanes: &Lanes<Self::Sum>,
        _first: usize,
        _q: &RawTensor,
        _k: &Values<Self::T>,
        _s: *mut Self::Sum,
        _keys: Range<usize>,
    ) {
    }
    /// Puts p of keys `j` (even) and `j + 1` with the vector of lanes at `lane` of the panel where `weigh` reads them.
    unsafe fn put(s: *mut Self::Sum, p: *mut Self::T, j: usize, lane: usize, a: Self::V, b: Self::V);
    /// `o[..dim][..width] += Vᵀ·P` for those keys. A p of 0 keeps whatever its v holds away from the sums; `finite` is
    /// what [`AttentionEngine::values`] said of the rows `rows` of `head` of `t`.
    unsafe fn weigh(
        v: &Values<Self::T>,
        s: *const Self::Sum,
        p: *const Self::T,
        o: *mut Self::Sum,
        keys: Range<usize>,
        width: usize,
    );

    /// Rounds a row of results to a row of `t`, around the caches if that is to `stream` ([`streams`](crate::kernel::cpu::memory::convert::streams)
    /// says so).
    #[inline(always)]
    unsafe fn write(row: &[Self::Sum], t: &RawTensor, token: i64, head: u32, _stream: bool) {
        // SAFETY: token and head lie within `t`, whose row is this worker's alone.
        unsafe { narrow(row, t, token, head) }
    }

    /// Scores and p of a whole panel whose scores are plain and finite with the keys of a range of whole blocks, as
    /// [`AttentionEngine::scores`] and the softmax do it, and in between the products that were put off, and the first
    /// scores of what comes next. False, with nothing changed but `s` and `p`, if the reference of some lane has to be
    /// raised.
    unsafe fn interleaved(
        _scores: &Scores<Self::Sum>,
        _of: &Operands<Self::T>,
        _next: Option<&Operands<Self::T>>,
        _s: *mut Self::Sum,
        _p: *mut Self::T,
        _sums: (*mut Self::Sum, *mut Self::Sum),
        _later: &mut Self::Later,
    ) -> bool {
        false
    }
    /// Puts off what [`AttentionEngine::weigh`] does, for a v that is finite. Nothing may have been put off before.
    unsafe fn put_off(
        _v: &Values<Self::T>,
        _p: *const Self::T,
        _o: *mut Self::Sum,
        _keys: Range<usize>,
        _later: &mut Self::Later,
    ) {
    }
    /// Does what was put off, and forgets the scores that were made ahead.
    unsafe fn finish(_later: &mut Self::Later) {}
}

/// The operands of the scores of a panel with some keys of a tile.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone use all of it"))]
pub(crate) struct Operands<'a, T> {
    pub k: &'a [T],
    pub q: *const T,
    pub dim: usize,
    pub keys: Range<usize>,
}

/// A tile of v, or of k, and where it came from.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone use all of it"))]
pub(crate) struct Values<'a, T> {
    pub tile: &'a [T],
    pub finite: bool,
    pub tensor: &'a RawTensor,
    pub head: u32,
    pub rows: &'a [i64],
}

/// Operands in the type of the sums, products of `gemm.rs`.
pub(crate) struct Dense<V>(PhantomData<V>);

impl<V: Vector> Dense<V> {
    /// Elements from one row of a tile to the next.
    #[inline(always)]
    pub(crate) fn row(dim: usize) -> usize {
        row(dim, size_of::<V::T>())
    }

    /// Rows as they are, [`Dense::row`] apart. What lies between them was zeros, and stays so.
    ///
    /// # Safety
    /// As [`AttentionEngine::keys`].
    #[inline(always)]
    unsafe fn rows(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        let (dim, ld) = (t.dim as usize, Self::row(t.dim as usize));
        if t.dtype == V::T::DTYPE && dim.is_multiple_of(4 * V::W) {
            // SAFETY: the rows are those of [`AttentionEngine::keys`], and elements are those of the sums.
            return unsafe { Self::copy(t, head, rows, tile) };
        }
        for (at, &row) in tile.chunks_exact_mut(ld).zip(rows) {
            if row < 0 {
                at.fill(V::T::ZERO);
            } else {
                // SAFETY: row and head lie within `t`, whose memory is valid (the contract of `Engine::keys`).
                unsafe { widen(t, row, head, &mut at[..dim]) };
            }
        }
        // SAFETY: rows are apart by whole vectors.
        unsafe { !any_non_finite::<V>(tile.as_ptr(), rows.len() * ld) }
    }
}

impl<V: Vector> Dense<V> {
    /// As [`Dense::rows`], of elements that need no conversion, and looks at them on the way.
    ///
    /// # Safety
    /// As [`AttentionEngine::keys`]; elements are those of the sums, and rows of four vectors or a multiple.
    #[inline(always)]
    unsafe fn copy(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        let (dim, ld) = (t.dim as usize, Self::row(t.dim as usize));
        // SAFETY: rows and elements are those of the tensor, and within the chunks of the tile.
        unsafe {
            let zero = V::splat(V::T::ZERO);
            let mut sums = [zero; 4];
            for (to, &row) in tile.chunks_exact_mut(ld).zip(rows) {
                if row < 0 {
                    to.fill(V::T::ZERO);
                    continue;
                }
                let from = at::<V::T>(t, row, head);
                let mut i = 0;
                while i < dim {
                    let mut j = 0;
                    while j < 4 {
                        let x = V::load(from.add(i + j * V::W));
                        x.store(to.as_mut_ptr().add(i + j * V::W));
                        sums[j] = x.fma(zero, sums[j]);
                        j += 1;
                    }
                    i += 4 * V::W;
                }
            }
            is_zero(sums[0].add(sums[1]).add(sums[2].add(sums[3])))
        }
    }
}

impl<V: Vector> AttentionEngine for Dense<V> {
    type Sum = V::T;
    type V = V;
    type T = V::T;
    const GRAIN: usize = 1;
    type Later = ();

    fn keys_len(dim: usize) -> usize {
        KEYS * Self::row(dim)
    }

    fn values_len(dim: usize) -> usize {
        KEYS * Self::row(dim)
    }

    fn queries_len(dim: usize) -> usize {
        dim * Self::PANEL
    }

    #[inline(always)]
    unsafe fn keys(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        // SAFETY: rows, head and tile are as `rows` needs them (the contract of `Engine::keys`), here and below.
        unsafe { Self::rows(t, head, rows, tile) }
    }

    #[inline(always)]
    unsafe fn values(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        // SAFETY: as above.
        unsafe { Self::rows(t, head, rows, tile) }
    }

    #[inline(always)]
    unsafe fn queries(lanes: &Lanes<V::T>, first: usize, t: &RawTensor, panel: &mut [V::T], rows: &mut [V::T]) -> bool {
        let dim = t.dim as usize;
        for lane in (0..Self::PANEL).step_by(V::W) {
            // SAFETY: as above.
            unsafe {
                lanes.pack(t, rows, dim, first + lane..first + lane + V::W);
                to_lanes::<V>(rows, dim, dim, panel, Self::PANEL, lane);
            }
        }
        // SAFETY: a panel is whole vectors.
        unsafe { !any_non_finite::<V>(panel.as_ptr(), dim * Self::PANEL) }
    }

    #[inline(always)]
    unsafe fn scores(k: &[V::T], q: *const V::T, dim: usize, s: *mut V::T, keys: Range<usize>, width: usize) {
        let ld = Self::row(dim);
        // SAFETY: the keys are rows of the tile, and `s` has as many.
        unsafe {
            V::gemm(&Gemm {
                a: k.as_ptr().add(keys.start * ld),
                a_row: ld,
                b: q,
                ldb: Self::PANEL,
                c: s.add(keys.start * Self::PANEL),
                ldc: Self::PANEL,
                ..product(keys.len(), width, dim)
            });
        }
    }

    #[inline(always)]
    unsafe fn put(s: *mut V::T, _: *mut V::T, j: usize, lane: usize, a: V, b: V) {
        // SAFETY: `j + 1 < KEYS`, since j is even; the lanes are within the panel.
        unsafe {
            a.store(s.add(j * Self::PANEL + lane));
            b.store(s.add((j + 1) * Self::PANEL + lane));
        }
    }

    #[inline(always)]
    unsafe fn weigh(v: &Values<V::T>, s: *const V::T, _: *const V::T, o: *mut V::T, keys: Range<usize>, width: usize) {
        let dim = v.tensor.dim as usize;
        let ld = Self::row(dim);
        // SAFETY: as for the scores; `o` has `dim` rows.
        unsafe {
            V::gemm(&Gemm {
                a: v.tile.as_ptr().add(keys.start * ld),
                a_row: 1,
                a_col: ld,
                b: s.add(keys.start * Self::PANEL),
                ldb: Self::PANEL,
                c: o,
                ldc: Self::PANEL,
                store: Store::Add,
                skip: if v.finite { Skip::None } else { Skip::B },
                ..product(dim, width, keys.len())
            });
        }
    }
}
