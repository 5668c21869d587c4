// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of a worker: sizes that all kernels share, and cache lines that are divided into typed slices.

use crate::kernel::cpu::vector::simd::{Real, Vector};
use bytemuck::{Pod, Zeroable};

/// Keys of a tile. Tiles of aligned calls begin at positions that are multiples of it.
pub(crate) const KEYS: usize = 128;
/// Lanes (q rows of some head) of a unit of the forward pass: k and v are packed once for all of them.
pub(crate) const LANES: usize = 256;
/// Lanes of a unit on matrix units, if there are enough units for all workers: products are so fast there that the time
/// for packing matters.
pub(crate) const MAX_LANES: usize = 512;
/// Lanes of a backward tile.
pub(crate) const LANES_BACK: usize = 64;
/// The widest panel of lanes.
pub(crate) const PANEL: usize = 32;
/// The widest vector of any instruction set, in bytes.
pub(crate) const VECTOR: usize = 64;

/// One cache line of 64 bytes. The buffers of two workers share no line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u64; 8]);

// SAFETY: eight integers without padding (64 bytes, 64-aligned); every bit pattern is a value, all zeros included.
unsafe impl Zeroable for Line {}
// SAFETY: as above; `Line` is Copy and repr(C).
unsafe impl Pod for Line {}

/// Elements from one row of a tile of k or v to the next, for `size` bytes an element: an odd number of cache lines.
///
/// Products read columns of tiles. If rows are a power of two apart, a column maps to a few sets of the L1 cache and
/// evicts itself: at 512 bytes `Vᵀ·P` was a sixteenth slower, `Kᵀ·dS` a tenth.
#[inline(always)]
pub(crate) fn row(n: usize, size: usize) -> usize {
    ((n * size).div_ceil(size_of::<Line>()) | 1) * size_of::<Line>() / size
}

/// `n` rounded up to whole vectors of `V`.
#[inline(always)]
pub(crate) fn vectors<V: Vector>(n: usize) -> usize {
    n.next_multiple_of(V::W)
}

/// Divides a worker's lines into typed slices, from the front.
pub(crate) struct Arena<'a>(pub &'a mut [Line]);

impl<'a> Arena<'a> {
    /// The next `n` elements, with their old contents.
    #[inline]
    pub(crate) fn take<T: Pod>(&mut self, n: usize) -> &'a mut [T] {
        let lines = (n * size_of::<T>()).div_ceil(size_of::<Line>());
        let (head, tail) = core::mem::take(&mut self.0).split_at_mut(lines);
        self.0 = tail;
        &mut bytemuck::cast_slice_mut(head)[..n]
    }

    /// As [`Arena::take`], filled with zeros.
    #[inline]
    pub(crate) fn zeros<A: Real>(&mut self, n: usize) -> &'a mut [A] {
        let slice = self.take(n);
        slice.fill(A::ZERO);
        slice
    }
}
