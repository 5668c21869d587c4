// SPDX-License-Identifier: MIT OR Apache-2.0
//! A block of rows with the keys of a unit: the five products, and which blocks of keys and lanes they skip.

use super::super::backward::no_row;
use super::super::dq_order::DqTurn;
use super::super::keys::KeyPass;
use super::super::slots::BLOCK;
use super::super::tile::{Cover, Scoring, VisibleKeys, at};
use super::tiles::{BLOCKS, MatrixTiles, shift, weight};
use super::weights::{GradientInputs, GradientOutputs, PANELS, not_finite_lanes, pack_pairs};
use crate::kernel::cpu::memory::arena::KEYS;
use crate::kernel::cpu::memory::panel::to_rows;
use crate::kernel::cpu::memory::rows::address;
use crate::kernel::cpu::product::amx_product::Product;
use crate::kernel::cpu::product::amx_product::{PANEL, TILE};
use crate::kernel::cpu::product::engine::{AttentionEngine, Values};
use crate::kernel::cpu::product::forms::TileForm;
use crate::kernel::cpu::product::not_finite::add_where_not_finite;
use crate::kernel::cpu::product::tile_engine::{TileEngine, prefetch_lanes};
use crate::kernel::cpu::vector::simd::Real;
use core::arch::x86_64::*;

impl KeyPass<'_> {
    /// Processes the current lanes with the current keys.
    ///
    /// # Safety
    /// As [`KeyPass::tiled`], entered.
    #[inline(always)]
    pub(crate) unsafe fn rows_in_hand<H: TileForm>(
        &self,
        t: &mut MatrixTiles,
        scoring: &Scoring<f32>,
        turn: &DqTurn,
        place: u32,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (d_pad, dv_pad) = (d.next_multiple_of(32), dv.next_multiple_of(32));
        let panels = t.lanes.n.div_ceil(PANEL);
        let whole = TILE * H::PARTS;
        let mut covers = [[Cover::None; BLOCKS]; PANELS];
        let mut any = false;
        for (panel, covers) in covers[..panels].iter_mut().enumerate() {
            // SAFETY: AVX-512 is present (the contract).
            let sight: VisibleKeys = unsafe { t.lanes.visible_keys::<__m512>(panel * PANEL, PANEL) };
            for (cover, block) in covers.iter_mut().zip(&t.blocks) {
                *cover = match sight.cover(block.min, block.max) {
                    Cover::All if !block.full => Cover::Some,
                    cover => cover,
                };
                any |= *cover != Cover::None;
            }
        }
        if !any {
            return;
        }
        // SAFETY: lanes' rows and heads are those of the tensors; all tiles are as large as their sizes say.
        unsafe {
            t.lanes.gather(&c.lse, t.lse, f32::NEG_INFINITY);
            t.lanes.gather(&c.delta, t.delta, 0.0);
            no_row(t.lse);
            let rounded = |lse: &f32| lse.is_nan() || (lse.abs() > <f32 as Real>::WHOLE && lse.is_finite());
            let mut tame =
                t.finite_k && t.finite_v && t.lse.iter().zip(&*t.delta).all(|(l, d)| !rounded(l) && d.is_finite());
            for lse in t.lse.iter_mut() {
                *lse = *lse * core::f32::consts::LOG2_E - shift::<H>() as f32;
            }
            for panel in 0..panels {
                let first = panel * PANEL;
                let (q, d_o) = (
                    &mut t.q[panel * TileEngine::<H>::queries_len(d)..],
                    &mut t.d_o[panel * TileEngine::<H>::queries_len(dv)..],
                );
                tame &= TileEngine::<H>::queries(&t.lanes, first, &c.q, q, t.rows);
                tame &= TileEngine::<H>::queries(&t.lanes, first, &c.d_o, d_o, t.rows);
            }
            let (bad_q, _) = pack_pairs::<H>(&t.lanes, &c.q, t.q_pairs);
            let (bad_d_o, largest) = pack_pairs::<H>(&t.lanes, &c.d_o, t.d_o_pairs);
            t.bring_into_range::<H>(c.score.scale, d_pad, dv, largest);
            for delta in t.delta.iter_mut() {
                *delta *= -t.factor / weight::<H>();
            }
            for (panel, covers) in covers[..panels].iter().enumerate() {
                let Some(begin) = covers.iter().position(|&x| x != Cover::None) else { continue };
                let end = covers.iter().rposition(|&x| x != Cover::None).unwrap_or(begin) + 1;
                if self.queries {
                    // Needed after the scores and one product, so there is time to fetch them from memory.
                    let lanes = panel * PANEL..t.lanes.n.min((panel + 1) * PANEL);
                    prefetch_lanes::<_MM_HINT_T1>(&c.dq, &t.lanes, lanes);
                }
                self.scores::<H>(t, scoring, panel, covers, begin..end, tame);
                if self.queries {
                    self.add_queries::<H>(t, panel, begin..end, turn, place);
                }
            }
            for (block, touched) in t.touched.iter_mut().enumerate() {
                let seen = |panel: &usize| covers[*panel][block] != Cover::None;
                let Some(begin) = (0..panels).find(seen) else { continue };
                let end = (0..panels).rev().find(seen).unwrap_or(begin) + 1;
                *touched = true;
                for panel in (begin..end).filter(|panel| !seen(panel)) {
                    for at in [2 * block, 2 * block + 1].map(|tile| (tile * PANELS + panel) * whole) {
                        t.p[at..at + whole].fill(0);
                        t.ds[at..at + whole].fill(0);
                    }
                }
                let keys = block * BLOCK;
                let sums = [
                    (&*t.p, &*t.d_o_pairs, t.dv.as_mut_ptr().add(keys * dv_pad), dv_pad, bad_d_o, &c.d_o),
                    (&*t.ds, &*t.q_pairs, t.dk.as_mut_ptr().add(keys * d_pad), d_pad, bad_q, &c.q),
                ];
                for (weights, rows, to, ld, bad, tensor) in sums {
                    let a0 = weights.as_ptr().add((2 * block * PANELS + begin) * whole);
                    for at in (0..ld).step_by(32) {
                        let b0 = rows.as_ptr().add((begin * (ld / 16) + at / 16) * whole);
                        H::product(&Product {
                            a0,
                            a1: a0.add(PANELS * whole),
                            a_step: 2 * whole,
                            b0,
                            b1: b0.add(whole),
                            b_step: ld / 16 * 2 * whole,
                            steps: end - begin,
                            c0: to.add(at),
                            c1: to.add(16 * ld + at),
                            ldc: 4 * ld,
                            add: true,
                        });
                    }
                    if bad != 0 {
                        not_finite_lanes::<H>(&t.lanes, tensor, bad, weights, block, begin..end, to, ld);
                    }
                }
            }
        }
    }

    /// p and ds of a panel with the blocks of keys `range`.
    ///
    /// # Safety
    /// As [`KeyPass::rows_in_hand`].
    #[inline(always)]
    unsafe fn scores<H: TileForm>(
        &self,
        t: &mut MatrixTiles,
        scoring: &Scoring<f32>,
        panel: usize,
        covers: &[Cover; BLOCKS],
        range: core::ops::Range<usize>,
        tame: bool,
    ) {
        let c = self.call;
        let careful = !tame || !scoring.plain;
        let whole = TILE * H::PARTS;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (k_len, v_len) = (TileEngine::<H>::keys_len(d), TileEngine::<H>::keys_len(dv));
        let first = panel * PANEL;
        // Unused lanes of the panel have q = 0, and 0 times infinity is NaN, so they are masked.
        let fills_up = careful && t.lanes.n < first + PANEL;
        const EACH: usize = KEYS / BLOCK;
        for tile in range.start / EACH..range.end.div_ceil(EACH) {
            let blocks = range.start.max(tile * EACH)..range.end.min((tile + 1) * EACH);
            let keys = (blocks.start - tile * EACH) * BLOCK..(blocks.end - tile * EACH) * BLOCK;
            let masked = fills_up || covers[blocks.clone()].contains(&Cover::Some);
            // SAFETY: AVX-512 is present (the contract).
            unsafe { t.lanes.relate::<__m512>(first, PANEL, t.slots[tile].base, masked, scoring.alibi) };
            // SAFETY: tiles and panels are as long as the engine says.
            unsafe {
                let (q, d_o) = (t.q.as_ptr().add(panel * TileEngine::<H>::queries_len(d)), t.d_o.as_ptr());
                let d_o = d_o.add(panel * TileEngine::<H>::queries_len(dv));
                let (s, dp) = (t.s.as_mut_ptr(), t.dp.as_mut_ptr());
                TileEngine::<H>::scores(&t.k[tile * k_len..][..k_len], q, d, s, keys.clone(), PANEL);
                TileEngine::<H>::scores(&t.v[tile * v_len..][..v_len], d_o, dv, dp, keys.clone(), PANEL);
                if !tame {
                    let rows = &t.slots[tile].row[..t.slots[tile].n];
                    let head = c.heads.kv(t.lanes.head[first]);
                    let k =
                        Values { tile: &t.k[tile * k_len..][..k_len], finite: t.finite_k, tensor: &c.k, head, rows };
                    TileEngine::<H>::scores_again(&t.lanes, first, &c.q, &k, s, keys.clone());
                    let v =
                        Values { tile: &t.v[tile * v_len..][..v_len], finite: t.finite_v, tensor: &c.v, head, rows };
                    TileEngine::<H>::scores_again(&t.lanes, first, &c.d_o, &v, dp, keys);
                }
                for block in blocks {
                    if covers[block] == Cover::None {
                        t.pairs[2 * block * whole..][..2 * whole].fill(0);
                        continue;
                    }
                    let at = (block - tile * EACH) * BLOCK * PANEL;
                    let out = GradientOutputs {
                        p: t.p.as_mut_ptr().add((2 * block * PANELS + panel) * whole),
                        ds: t.ds.as_mut_ptr().add((2 * block * PANELS + panel) * whole),
                        pairs: t.pairs.as_mut_ptr().add(2 * block * whole),
                    };
                    let of = GradientInputs {
                        scoring,
                        lanes: &t.lanes,
                        first,
                        rel: &t.rel[block * BLOCK..][..BLOCK],
                        s: s.add(at),
                        dp: dp.add(at),
                        lse: t.lse.as_ptr().add(first),
                        shift: shift::<H>() as f32,
                        delta: t.delta.as_ptr().add(first),
                        factor: t.factor / weight::<H>(),
                        masked: fills_up || covers[block] != Cover::All,
                    };
                    if careful {
                        of.gradients::<H, true, true>(&out);
                    } else if of.masked {
                        of.gradients::<H, false, true>(&out);
                    } else {
                        of.gradients::<H, false, false>(&out);
                    }
                }
            }
        }
    }

    /// Adds `dQᵀ = Kᵀ·dS` over the blocks of keys `range` to the rows of a panel, after the preceding unit has added to
    /// them.
    ///
    /// # Safety
    /// As [`KeyPass::rows_in_hand`].
    #[inline(always)]
    unsafe fn add_queries<H: TileForm>(
        &self,
        t: &mut MatrixTiles,
        panel: usize,
        range: core::ops::Range<usize>,
        turn: &DqTurn,
        place: u32,
    ) {
        let c = self.call;
        let d = c.q.dim as usize;
        let scale = c.score.scale as f32 / t.factor;
        let whole = TILE * H::PARTS;
        // SAFETY: tiles are as large as their sizes say; lanes' rows and heads are those of dq, which units add to in
        // turn.
        unsafe {
            let b0 = t.pairs.as_ptr().add(2 * range.start * whole);
            for at in (0..d).step_by(32) {
                let a0 = t.kt.as_ptr().add((at / 16 * BLOCKS + range.start) * whole);
                H::product(&Product {
                    a0,
                    a1: a0.add(BLOCKS * whole),
                    a_step: 2 * whole,
                    b0,
                    b1: b0.add(whole),
                    b_step: 4 * whole,
                    steps: range.len(),
                    c0: t.dq.as_mut_ptr().add(at * PANEL),
                    c1: t.dq.as_mut_ptr().add((at + 16) * PANEL),
                    ldc: 4 * PANEL,
                    add: false,
                });
            }
            if !t.finite_k {
                let kv = c.heads.kv(t.lanes.head[panel * PANEL]);
                for block in range {
                    let slots = &t.slots[block / (KEYS / BLOCK)];
                    for j in block * BLOCK..(block + 1) * BLOCK {
                        if t.rel[j] < f32::INFINITY {
                            let row = address(&c.k, slots.row[j % KEYS], kv);
                            add_where_not_finite::<H>(row, d, t.pairs.as_ptr(), j, t.dq.as_mut_ptr());
                        }
                    }
                }
            }
            turn.wait(place);
            for first in [0, 16] {
                to_rows::<__m512>(t.dq, PANEL, first, t.rows, d);
                let lane = panel * PANEL + first;
                for (lane, sums) in (lane..t.lanes.n).zip(t.rows.chunks_exact(d).take(16)) {
                    let dq = at::<f32>(&c.dq, t.lanes.row[lane], t.lanes.head[lane]);
                    for (x, &sum) in core::slice::from_raw_parts_mut(dq, d).iter_mut().zip(sums) {
                        *x += sum * scale;
                    }
                }
            }
        }
    }
}
