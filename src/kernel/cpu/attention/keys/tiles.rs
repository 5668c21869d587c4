// SPDX-License-Identifier: MIT OR Apache-2.0
//! One worker's tiles for the backward pass of keys, and the writing of dk and dv at the end of a unit.

use crate::call::AttendBackward;
use crate::kernel::cpu::attention::bands::Reader;
use crate::kernel::cpu::attention::dropout::Kept;
use crate::kernel::cpu::attention::slots::KeyTile;
use crate::kernel::cpu::attention::tile::{Lanes, at};
use crate::kernel::cpu::memory::arena::{Arena, KEYS, LANES_BACK, Line};
use crate::kernel::cpu::product::engine::Dense;
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::ops::Range;

pub(super) struct KeyTiles<'a, A> {
    pub lanes: Lanes<'a, A>,
    /// Elements from one row of k, and of v, to the next.
    pub ldk: usize,
    pub ldv: usize,
    pub keys: KeyTile<'a, A, A>,
    /// For each key, whether the current q range reads it.
    pub valid: &'a mut [u32],
    /// `[head_dim][lanes]`, `[lanes][head_dim padded]`.
    pub qt: &'a mut [A],
    pub q: &'a mut [A],
    /// `[value_dim][lanes]`, `[lanes][value_dim padded]`.
    pub d_ot: &'a mut [A],
    pub d_o: &'a mut [A],
    /// `[lanes][head_dim padded]`.
    pub dq: &'a mut [A],
    /// `[key][lanes]`.
    pub s: &'a mut [A],
    pub dp: &'a mut [A],
    /// `[key][dim padded]`: the first stage of each sum, and the total (see `backward.rs`).
    pub dk_part: &'a mut [A],
    pub dk: &'a mut [A],
    pub dv_part: &'a mut [A],
    pub dv: &'a mut [A],
    pub lse: &'a mut [A],
    pub delta: &'a mut [A],
    /// Which pairs are not dropped.
    pub kept: Kept<'a>,
}

impl<'a, A: Real> KeyTiles<'a, A> {
    /// Tiles for a call, with vectors `V`.
    #[inline(always)]
    pub(super) fn new<V: Vector<T = A>>(lines: &'a mut [Line], c: &AttendBackward) -> Self {
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (ldk, ldv) = (Dense::<V>::row(d), Dense::<V>::row(dv));
        let mut arena = Arena(lines);
        // The padding of rows is read and never written, so it must be zero.
        Self {
            ldk,
            ldv,
            lanes: Lanes::new(&mut arena, LANES_BACK),
            keys: KeyTile::new::<Dense<V>>(&mut arena, d, dv, true),
            valid: arena.take(KEYS),
            qt: arena.take(LANES_BACK * d),
            q: arena.zeros(LANES_BACK * ldk),
            d_ot: arena.take(LANES_BACK * dv),
            d_o: arena.zeros(LANES_BACK * ldv),
            dq: arena.take(LANES_BACK * ldk),
            s: arena.take(KEYS * LANES_BACK),
            dp: arena.take(KEYS * LANES_BACK),
            dk_part: arena.take(KEYS * ldk),
            dk: arena.take(KEYS * ldk),
            dv_part: arena.take(KEYS * ldv),
            dv: arena.take(KEYS * ldv),
            lse: arena.take(LANES_BACK),
            delta: arena.take(LANES_BACK),
            kept: Kept::new(&mut arena, &c.dropout),
        }
    }

    /// Marks the keys that are of the pairs and of their band. Returns the rows that may see one of them.
    pub(super) fn mark_read(&mut self, reader: &Reader) -> Range<u32> {
        let rows = self.keys.rows_near(reader);
        if rows.is_empty() {
            return rows;
        }
        if self.keys.is_read_whole(reader) {
            self.valid[..self.keys.n].fill(1);
            return rows;
        }
        let mut any = false;
        for (valid, read) in self.valid.iter_mut().zip(self.keys.read_by(reader)) {
            *valid = read.into();
            any |= read;
        }
        if any { rows } else { 0..0 }
    }

    /// Writes the totals, or adds them, to head `head` of dk and dv.
    ///
    /// # Safety
    /// The keys' rows and the head are within dk and dv, which this unit alone touches there.
    #[inline(always)]
    pub(super) unsafe fn write(&self, c: &AttendBackward, head: u32) {
        for j in 0..self.keys.n {
            let row = self.keys.row[j];
            for (tensor, sums, ld) in [(&c.dk, &self.dk, self.ldk), (&c.dv, &self.dv, self.ldv)] {
                let dim = tensor.dim as usize;
                // SAFETY: the row and head are within the tensor and this unit's alone (the contract); rows are
                // contiguous.
                let dst = unsafe { core::slice::from_raw_parts_mut(at::<A>(tensor, row, head), dim) };
                let sums = &sums[j * ld..][..dim];
                if !c.accumulate_keys {
                    dst.copy_from_slice(sums);
                    continue;
                }
                for (x, &sum) in dst.iter_mut().zip(sums) {
                    *x = *x + sum;
                }
            }
        }
    }
}
