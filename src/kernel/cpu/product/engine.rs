// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two products of the forward pass, and the layout of their operands on each kind of machine.
//!
//! The algorithm exists once (`forward.rs`): lanes in panels, keys in tiles, an online softmax between `S = K·Qᵀ` and
//! `Oᵀ += Vᵀ·P`. An [`AttentionEngine`] defines the memory layout of a panel of q and of tiles of k and v, and
//! multiplies them. [`Dense`] holds operands in the type of the sums and multiplies with the vectors of an instruction
//! set; matrix units (`tile_engine.rs`) hold them in the element type, in tiles. Scores and sums have the same layout
//! for all: `[key][lane]` and `[dim][lane]`, in the type of the sums.
//!
//! An engine may round p to its operands' type ([`crate::kernel::cpu::Isa::roundoff`] says so); it may not round
//! anything else.

use crate::call::RawTensor;
use crate::element::{Accumulator, Dtype, Element};
use crate::kernel::cpu::attention::tile::{Lanes, Scores, at, product};
use crate::kernel::cpu::memory::arena::{KEYS, row};
use crate::kernel::cpu::memory::panel::{any_non_finite, is_zero, to_lanes};
use crate::kernel::cpu::memory::rows::widen;
use crate::kernel::cpu::product::{Gemm, Skip, Store};
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use bytemuck::Pod;
use core::marker::PhantomData;
use core::ops::Range;

/// The layout of the operands of the two products, and their multiplication.
///
/// # Safety
/// Every method needs the instruction set to be present; all but [`AttentionEngine::enter`] need `enter` to have been
/// called on this thread. Tiles and panels have the lengths [`AttentionEngine::keys_len`] and
/// [`AttentionEngine::queries_len`], `s` is `[KEYS][PANEL]`, `p` has
/// [`AttentionEngine::weights_len`] elements, and `o` is `[value_dim padded to GRAIN][PANEL]`.
pub(crate) trait AttentionEngine {
    /// The type of sums.
    type Sum: Real;
    /// The vectors of the softmax.
    type V: Vector<T = Self::Sum>;
    /// The element type of operands.
    type T: Pod;
    /// Lanes of a panel.
    const PANEL: usize = 2 * Self::V::W;
    /// Tiles of keys and the rows of o are padded to a multiple of this, which divides
    /// [`crate::kernel::cpu::attention::slots::BLOCK`].
    const GRAIN: usize;
    /// Whether operands are in the type of the sums. Only such an engine runs calls with dropout, and it never takes
    /// few rows without packing (`small.rs`).
    const DENSE: bool = false;
    /// Tiles of keys that are packed together; each panel then goes through them.
    const TILES: usize = 1;
    /// Whether [`AttentionEngine::interleaved`] is implemented.
    const INTERLEAVES: bool = false;
    /// Whether packing writes everything that products read. If not, products also read the padding between rows, which
    /// must be zero.
    const WRITES_ALL: bool = false;
    /// The deferred products of [`AttentionEngine::interleaved`].
    type Later: Default;

    /// Elements of a tile of k or of v.
    fn keys_len(dim: usize) -> usize;
    /// Elements of a panel of q.
    fn queries_len(dim: usize) -> usize;

    /// Elements of p of a panel.
    fn weights_len() -> usize {
        KEYS * Self::PANEL
    }

    /// Prepares this thread.
    unsafe fn enter() {}
    /// Undoes [`AttentionEngine::enter`].
    unsafe fn leave() {}

    /// Packs rows `rows` of a head of k; a negative row means zeros. Returns whether all numbers are finite.
    unsafe fn keys(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [Self::T]) -> bool;
    /// The same for v.
    unsafe fn values(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [Self::T]) -> bool;
    /// The same for a panel of q, from lane `first` on. `rows` holds [`Vector::W`] rows.
    unsafe fn queries(
        lanes: &Lanes<Self::Sum>,
        first: usize,
        t: &RawTensor,
        panel: &mut [Self::T],
        rows: &mut [Self::Sum],
    ) -> bool;

    /// `s[keys][..width] = K·Qᵀ` for a range of keys. It begins at a multiple of 2 and of [`AttentionEngine::GRAIN`],
    /// and ends at one too, or at the end of the tile.
    unsafe fn scores(k: &[Self::T], q: *const Self::T, dim: usize, s: *mut Self::Sum, keys: Range<usize>, width: usize);
    /// Recomputes the scores of keys (`rows` of `head` of k) and lanes (from `first` on) whose rows have numbers that
    /// the engine cannot multiply. Called if [`AttentionEngine::keys`] or [`AttentionEngine::queries`] returned false.
    unsafe fn scores_again(
        _lanes: &Lanes<Self::Sum>,
        _first: usize,
        _q: &RawTensor,
        _k: &Values<Self::T>,
        _s: *mut Self::Sum,
        _keys: Range<usize>,
    ) {
    }
    /// Stores p of keys `j` (even) and `j + 1`, for the vector of lanes at `lane` of the panel, as an operand of
    /// `weigh`.
    unsafe fn put(s: *mut Self::Sum, p: *mut Self::T, j: usize, lane: usize, a: Self::V, b: Self::V);
    /// `o[..dim][..width] += Vᵀ·P` for those keys. A key with p = 0 adds nothing, even if its v is NaN. `finite` is the
    /// result of [`AttentionEngine::values`] for the rows `rows` of `head` of `t`.
    unsafe fn weigh(
        v: &Values<Self::T>,
        s: *const Self::Sum,
        p: *const Self::T,
        o: *mut Self::Sum,
        keys: Range<usize>,
        width: usize,
    );

    /// Rounds a row of results and stores it past the caches, if the engine does that (when it pays, see
    /// [`streams`](crate::kernel::cpu::memory::convert::streams)).
    const AROUND_CACHES: Option<StoreRow<Self::Sum>> = None;

    /// Computes scores and p of a whole panel with the keys of a range of whole blocks, with the bits of
    /// [`AttentionEngine::scores`] and the softmax, interleaved with the deferred products and the first scores of
    /// `next`. Scores must be plain and finite. Returns false if the reference of some lane is large or has to be
    /// raised; then only `s` and `p` have changed.
    unsafe fn interleaved(
        _scores: &Scores<Self::Sum>,
        _of: &Operands<Self::T>,
        _next: Option<&Operands<Self::T>>,
        _s: *mut Self::Sum,
        _p: *mut Self::T,
        _sums: (*mut Self::Sum, *mut Self::Sum, *mut Self::Sum),
        _later: &mut Self::Later,
    ) -> bool {
        false
    }
    /// Defers the product of [`AttentionEngine::weigh`], for a finite v. No other product may be deferred.
    unsafe fn defer(
        _v: &Values<Self::T>,
        _p: *const Self::T,
        _o: *mut Self::Sum,
        _keys: Range<usize>,
        _later: &mut Self::Later,
    ) {
    }
    /// Computes the deferred products, and discards the scores that were computed ahead.
    unsafe fn finish(_later: &mut Self::Later) {}
}

/// Rounds a row to elements of a type at an address. The instruction set of the engine is present, and nothing else
/// accesses them.
pub(crate) type StoreRow<A> = unsafe fn(&[A], *mut u8, Dtype);

/// The operands of the scores of a panel with some keys of a tile.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "matrix units alone use all of it"))]
pub(crate) struct Operands<'a, T> {
    pub k: &'a [T],
    pub q: *const T,
    pub dim: usize,
    pub keys: Range<usize>,
}

/// A tile of v, or of k, and the rows that it was packed from.
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

    /// Copies rows, [`Dense::row`] elements apart. The padding between them is zero and is not written.
    ///
    /// # Safety
    /// As [`AttentionEngine::keys`].
    #[inline(always)]
    unsafe fn rows(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        // SAFETY: the contract.
        unsafe { V::call(PackRows { t, head, rows, tile }) }
    }

    /// [`Dense::rows`], inlined.
    ///
    /// # Safety
    /// As [`AttentionEngine::keys`].
    #[inline(always)]
    unsafe fn rows_here(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        let (dim, ld) = (t.dim as usize, Self::row(t.dim as usize));
        if t.dtype == V::T::DTYPE && dim.is_multiple_of(4 * V::W) {
            // SAFETY: the rows are those of [`AttentionEngine::keys`], and elements are those of the sums.
            return unsafe { Self::copy(t, head, rows, tile) };
        }
        for (at, &row) in tile.chunks_exact_mut(ld).zip(rows) {
            if row < 0 {
                at.fill(V::T::ZERO);
            } else {
                // SAFETY: row and head lie within `t`, whose memory is valid (the contract of `AttentionEngine::keys`).
                unsafe { widen(t, row, head, &mut at[..dim]) };
            }
        }
        // SAFETY: rows are apart by whole vectors.
        unsafe { !any_non_finite::<V>(tile.as_ptr(), rows.len() * ld) }
    }
}

/// [`Dense::rows`].
struct PackRows<'a, T> {
    t: &'a RawTensor,
    head: u32,
    rows: &'a [i64],
    tile: &'a mut [T],
}

impl<V: Vector> Routine<V> for PackRows<'_, V::T> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run(self) -> bool {
        // SAFETY: the contract of `Dense::rows`.
        unsafe { Dense::<V>::rows_here(self.t, self.head, self.rows, self.tile) }
    }
}

impl<V: Vector> Dense<V> {
    /// As [`Dense::rows`], for elements that need no conversion; checks whether they are finite.
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
    const DENSE: bool = true;
    type Later = ();

    fn keys_len(dim: usize) -> usize {
        KEYS * Self::row(dim)
    }

    fn queries_len(dim: usize) -> usize {
        dim * Self::PANEL
    }

    #[inline(always)]
    unsafe fn keys(t: &RawTensor, head: u32, rows: &[i64], tile: &mut [V::T]) -> bool {
        // SAFETY: rows, head and tile are as `rows` needs them (the contract of `AttentionEngine::keys`), here and
        // below.
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
                lanes.pack::<V>(t, rows, dim, first + lane..first + lane + V::W);
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
