// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward pass of keys on matrix units: dk, dv, and dq on the way.
//!
//! A unit is a block of up to [`SUPER`] tiles of a document's keys with one kv head. k (plain and transposed) and v are
//! packed once; then the rows are processed in blocks of [`ROWS`] lanes. For each panel of a block: `S = K·Qᵀ` and
//! `dP = V·dOᵀ`; from these p and ds in the format of their type (`forms.rs`); and `dQᵀ = Kᵀ·dS` over all keys of the
//! unit, which is added to dq. After all panels: `dV += P·dO` and `dK += dS·Q` over all lanes of the block. Blocks of
//! 32 keys by 32 lanes without an allowed pair are skipped.
//!
//! Units of one document add to the same rows of dq in the order of their keys (`dq_order.rs`), and each row of dk and
//! dv is written by one unit, so results have the same bits for any number of workers.
//!
//! ds does not contain the factor between products and scores, except for a power of 2; the factor is applied when dq
//! and dk are written. In f16 ds could overflow or underflow, so it is multiplied by a power of 2, the largest that the
//! maxima of v, do and delta allow. During a unit this power only decreases, and the sums of dk are rescaled with it. p
//! could underflow where a sink has most of a row's weight, so it is multiplied by a constant.
//!
//! `tiles` has the buffers of a worker and writes its sums, `rows` computes the products of a block of rows, and
//! `weights` computes p and ds of single blocks.

mod rows;
mod tiles;
mod weights;

pub(crate) use tiles::{SUPER, bytes};

use super::bands::{by_band, one_band, union};
use super::dq_order::DqTurn;
use super::key_units::{Group, KeyUnits};
use super::keys::KeyPass;
use super::row_blocks::readers;
use super::tile::Scoring;
use crate::kernel::cpu::memory::arena::Line;
use crate::kernel::cpu::product::amx_product::PANEL;
use crate::kernel::cpu::product::engine::AttentionEngine;
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::tile_engine::TileEngine;
use core::arch::x86_64::__m512;
use core::sync::atomic::AtomicUsize;
use tiles::MatrixTiles;
use weights::{PANELS, ROWS};

impl KeyPass<'_> {
    /// Takes units until none is left.
    ///
    /// # Safety
    /// As [`Job::work_on_tiles`](crate::kernel::cpu::job::Job::work_on_tiles).
    #[inline(always)]
    pub(crate) unsafe fn tiled<H: TileForm>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let mut t = MatrixTiles::new::<H>(lines, c);
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let mut units = KeyUnits::new(c, self.documents, SUPER, false, self.workers);
        // SAFETY: products of `H` are present (the contract).
        unsafe { TileEngine::<H>::enter() };
        while let Some(unit) = units.next(next) {
            let turn = self.order.begin(unit.index, unit.before.filter(|_| self.queries));
            let group = units.group(&unit);
            let mut stream = units.keys(&unit);
            t.n = 0;
            while t.n < SUPER && t.slots[t.n].next(&mut stream, false, false) {
                // SAFETY: AVX-512 is present (the contract).
                unsafe { t.slots[t.n].find_blocks::<__m512>() };
                t.n += 1;
            }
            // SAFETY: rows and heads are within the tensors (checked); dk and dv of these keys and this kv head are
            // this unit's alone, and dq is added to in turn.
            unsafe { self.unit::<H>(&mut t, &scoring, &group, unit.kv, &turn) };
        }
        // SAFETY: as above.
        unsafe { TileEngine::<H>::leave() };
    }

    /// Processes the current keys with all rows of their group.
    ///
    /// # Safety
    /// As [`KeyPass::tiled`], entered.
    #[inline(always)]
    unsafe fn unit<H: TileForm>(
        &self,
        t: &mut MatrixTiles,
        scoring: &Scoring<f32>,
        group: &Group,
        kv: u32,
        turn: &DqTurn,
    ) {
        let c = self.call;
        let heads = readers(&c.heads, kv, c.q.heads);
        let mut loaded = false;
        t.clear(c);
        // With few rows, as many heads as fill a block are processed together. Where heads are adjacent in memory, a
        // block is one panel of each of several heads: rows of q, do and dq are then read in longer runs.
        let total: u32 = group.iter().map(|q| q.range.len).sum();
        let beside = c.q.head_stride.unsigned_abs() < c.q.token_stride.unsigned_abs();
        let share =
            if c.per_q_head { 1 } else { (ROWS as u32 / total.max(1)).max(if beside { PANELS as u32 } else { 1 }) };
        let mut before = 0u32;
        let mut head = heads.start;
        while head < heads.end {
            let end_head = heads.end.min(head + share);
            let mut place = before;
            for q in group.iter() {
                let pairs = c.ranges.pairs_of(q);
                let one = one_band(pairs);
                let mut reader = self.reader(q, pairs);
                let core::ops::Range { start: mut first, end } = if one {
                    // SAFETY: AVX-512 is present (the contract).
                    unsafe { t.rows(&reader) }
                } else {
                    union(by_band(pairs).map(|pairs| t.rows_near(&self.reader(q, pairs))))
                };
                if first < end && !loaded {
                    // SAFETY: rows of keys and the head are within k and v.
                    unsafe { t.load::<H>(c, kv) };
                    loaded = true;
                }
                while first < end {
                    let count = (end - first).min(block_rows(end_head - head));
                    for pairs in by_band(pairs) {
                        if !one {
                            reader = self.reader(q, pairs);
                            let near = t.rows_near(&reader);
                            if near.start >= first + count || near.end <= first {
                                continue;
                            }
                            // SAFETY: AVX-512 is present (the contract).
                            if unsafe { t.rows(&reader) }.is_empty() {
                                continue;
                            }
                        }
                        // SAFETY: rows and heads are within the tensors (checked).
                        unsafe {
                            t.lanes.set(&reader.q, first, count, head..end_head, &c.alibi_slopes);
                            t.lanes.limit::<__m512>(&reader.limits);
                            self.rows_in_hand::<H>(t, scoring, turn, place + first + count);
                        }
                    }
                    first += count;
                    turn.pass(place + first);
                }
                place += q.range.len;
            }
            turn.pass(place);
            before = place;
            if c.per_q_head {
                // SAFETY: the partial of this q head is this unit's alone.
                unsafe { t.write::<H>(c, head) };
                t.clear(c);
            }
            head = end_head;
        }
        if !c.per_q_head {
            // SAFETY: dk and dv of this kv head are this unit's alone.
            unsafe { t.write::<H>(c, kv) };
        }
    }
}

/// Rows of q in a block of this many heads. If they exceed a panel they are rounded down to whole panels, so that no
/// panel has rows of two heads.
fn block_rows(heads: u32) -> u32 {
    let rows = ROWS as u32 / heads;
    if rows > PANEL as u32 { rows - rows % PANEL as u32 } else { rows }
}
