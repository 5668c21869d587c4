// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward: online softmax over tiles of keys (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
//!
//! A unit is a block of rows of one q range with one kv head. Each row, for each q head that reads this kv head, is a
//! lane; lanes are processed in panels. The keys are packed once for all lanes, a few tiles at a time, and each panel
//! goes through these tiles, so that its sums stay in the L1 cache. Per tile and panel: scores = K·Qᵀ, their maximum,
//! `p = exp(s − m)` (`softmax.rs`), and `Oᵀ += Vᵀ·P`. Blocks of keys that no lane of the panel sees are skipped. At the
//! end the result is normalised, and, as the mode of the range says, merged into the running result and finished.
//!
//! The result of a lane does not depend on the other lanes of its panel: a tile of which it sees no key does not change
//! its bits (`exp(0)` is exactly 1, a product with p = 0 adds nothing). If tiles also begin at fixed positions (an
//! aligned call), results do not depend on how rows and keys were cut.

mod ahead;
mod result;

use super::bands::Limits;
use super::dropout::Kept;
use super::row_blocks::{RowUnit, RowUnits, readers, unit_rows};
use super::slots::{BLOCK, KeyTile};
use super::small::is_small;
use super::softmax::rescale;
use super::stream::KeyStream;
use super::tile::{Cover, Lanes, Scores, Scoring, VisibleKeys};
use crate::call::{Attend, QRange};
use crate::element::{Accumulator, Element};
use crate::kernel::cpu::choice::Documents;
use crate::kernel::cpu::job::Job;
use crate::kernel::cpu::memory::arena::{Arena, KEYS, LANES, Line, MAX_LANES};
use crate::kernel::cpu::memory::panel::to_rows;
use crate::kernel::cpu::product::engine::{AttentionEngine, Operands, Values};
#[cfg(target_arch = "x86_64")]
use crate::kernel::cpu::product::{forms::TileForm, tile_engine::TileEngine};
use crate::kernel::cpu::vector::simd::{Real, Vector};
use core::ops::Range;
use core::sync::atomic::AtomicUsize;

/// A forward call.
pub(crate) struct ForwardPass<'a> {
    pub call: &'a Attend<'a>,
    /// Where each row of the k ranges lies in k and v; empty if they are rows of k and v.
    pub table: &'a [u32],
    pub documents: Documents<'a>,
    /// Lanes of a unit and of a block; see `row_blocks::lanes`.
    pub lanes: [usize; 2],
    /// Whether few rows with few keys may be multiplied without packing (`small.rs`). The rounding of their scores then
    /// differs from the backward, which matters for types that are not rounded elsewhere.
    pub few: bool,
    /// Whether o is so large that it is written past the caches (non-temporal stores).
    pub stream: bool,
}

/// The tiles of one worker.
struct ForwardTiles<'a, T, A> {
    lanes: Lanes<'a, A>,
    keys: [KeyTile<'a, T, A>; MAX_TILES],
    /// Whether k and v of each tile are finite.
    finite: [(bool, bool); MAX_TILES],
    /// For each panel: the keys that its lanes see, whether their q is finite, and whether any keys were processed.
    panels: [(VisibleKeys, bool, bool); MAX_PANELS],
    /// Panels of q.
    q: &'a mut [T],
    /// `[panel][value_dim padded][lanes of a panel]`.
    o: &'a mut [A],
    /// `[key][lanes of a panel]`: scores.
    s: &'a mut [A],
    /// p of the current panel, if not in `s`, and p of the panel whose products are deferred.
    p: [&'a mut [T]; 2],
    /// For each lane: the reference m of `p = exp(s − m)`, and the sum of p.
    m: &'a mut [A],
    l: &'a mut [A],
    /// For each lane: the largest score; empty if the call does not ask for it.
    best: &'a mut [A],
    /// For each lane: the factor that rescales the panel's sums.
    alpha: &'a mut [A],
    /// Which pairs are not dropped.
    kept: Kept<'a>,
    /// Results of [`Vector::W`] lanes, and the running result of the same lanes.
    rows: &'a mut [A],
    others: &'a mut [A],
}

impl<T, A: Real> ForwardTiles<'_, T, A> {
    /// Sets the keys that lanes see, and those that panels of `width` lanes see.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    unsafe fn limit<V: Vector<T = A>>(&mut self, limits: &Limits, panels: usize, width: usize) {
        // SAFETY: the contract.
        unsafe {
            self.lanes.limit::<V>(limits);
            for (i, of) in self.panels[..panels].iter_mut().enumerate() {
                of.0 = self.lanes.visible_keys::<V>(i * width, width);
            }
        }
    }

    /// Whether any panel sees a key of a tile.
    #[inline(always)]
    fn is_seen(&self, tile: usize, panels: usize) -> bool {
        let blocks = &self.keys[tile].blocks;
        let sees = |sight: &VisibleKeys| blocks.iter().any(|b| sight.cover(b.min, b.max) != Cover::None);
        self.panels[..panels].iter().any(|(sight, ..)| sees(sight))
    }
}

/// Panels of the narrowest vectors.
const MAX_PANELS: usize = MAX_LANES / 8;
/// At least [`AttentionEngine::TILES`] of every engine.
pub(crate) const MAX_TILES: usize = 4;

/// A panel and a tile, with at least one key that some lane sees.
struct TilePair {
    panel: usize,
    tile: usize,
    /// How much of each block of keys the panel sees.
    covers: [Cover; KEYS / BLOCK],
    /// The keys that some lane sees.
    range: Range<usize>,
    /// Lanes, rounded up to whole vectors.
    width: usize,
    masked: bool,
    careful: bool,
    /// All of k and q is finite.
    finite: bool,
    /// A whole panel, scores without options, and all of q, k and v finite.
    simple: bool,
}

/// The deferred products, and the index of the p buffer that they do not read.
struct Deferred<E: AttentionEngine> {
    products: E::Later,
    free: usize,
}

impl Job for ForwardPass<'_> {
    #[inline(always)]
    unsafe fn work<E: AttentionEngine>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (q_len, o_len) = (E::queries_len(d), dv.next_multiple_of(E::GRAIN) * E::PANEL);
        let [lanes, _] = self.lanes;
        let panels = lanes / E::PANEL;
        let mut arena = Arena(lines);
        let mut tiles = ForwardTiles {
            lanes: Lanes::new(&mut arena, lanes),
            keys: core::array::from_fn(|i| KeyTile::new::<E>(&mut arena, d, dv, i < E::TILES)),
            finite: [(true, true); MAX_TILES],
            panels: [(VisibleKeys::default(), true, false); MAX_PANELS],
            q: arena.take(panels * q_len),
            // `small` sums in this buffer too, and `is_small` does not know the lanes of a unit.
            o: arena.take(panels.max(LANES / E::PANEL) * o_len),
            s: arena.zeros(KEYS * E::PANEL),
            p: [arena.take(E::weights_len()), arena.take(E::weights_len())],
            m: arena.zeros(lanes),
            l: arena.zeros(lanes),
            best: arena.take(if c.max_logit.is_none() { 0 } else { lanes }),
            alpha: arena.zeros(E::PANEL),
            kept: Kept::new(&mut arena, &c.dropout),
            rows: arena.zeros(E::V::W * d.max(dv)),
            others: arena.zeros(E::V::W * dv),
        };
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let [rows, block] = self.lanes.map(|lanes| unit_rows(lanes, &c.heads, c.q.heads));
        let mut units = RowUnits::new(c.ranges.q, self.documents, (rows, block), &c.k);
        // SAFETY: the instruction set is present (the contract of `Job::work`).
        unsafe { E::enter() };
        while let Some(unit) = units.next(next) {
            // SAFETY: the call's ranges and heads lie within its tensors (checked).
            unsafe { self.prefetch_next(&unit) };
            let heads = readers(&c.heads, unit.kv, c.q.heads);
            let share = (lanes as u32 / unit.rows).max(1);
            for head in heads.clone().step_by(share as usize) {
                let heads = head..heads.end.min(head + share);
                // SAFETY: unit and heads are within the call, whose shapes are checked and memory is valid.
                unsafe { self.unit::<E>(&mut tiles, &scoring, &unit, heads) };
            }
        }
        // SAFETY: as above.
        unsafe { E::leave() };
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn work_on_tiles<H: TileForm>(&self, lines: &mut [Line], next: &AtomicUsize) {
        // SAFETY: the contract.
        unsafe { self.work::<TileEngine<H>>(lines, next) }
    }
}

impl ForwardPass<'_> {
    /// One block of rows with some of the heads that read one kv head.
    ///
    /// # Safety
    /// As [`Job::work`], entered.
    #[inline(always)]
    unsafe fn unit<E: AttentionEngine>(
        &self,
        t: &mut ForwardTiles<E::T, E::Sum>,
        scoring: &Scoring<E::Sum>,
        unit: &RowUnit,
        heads: core::ops::Range<u32>,
    ) {
        let c = self.call;
        debug_assert!(E::DENSE || c.dropout.is_none(), "calls with dropout take vectors (`choice.rs`)");
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (q_len, o_len) = (E::queries_len(d), dv.next_multiple_of(E::GRAIN) * E::PANEL);
        let q = &c.ranges.q[unit.range];
        // SAFETY: slopes has a number for each head and the document (checked); rows and heads are within q.
        unsafe { t.lanes.set(&q.range, unit.first, unit.rows, heads, &c.alibi_slopes) };
        let rows = (q.range.position(unit.block.start), q.range.position(unit.block.end - 1));
        let mut stream = KeyStream::new(&c.ranges, c.ranges.pairs_of(q), &c.score, rows).through(self.table);
        let all = stream.clone();
        if !E::DENSE && self.few && is_small::<E::V>(c, q, readers(&c.heads, unit.kv, c.q.heads).len(), &all) {
            let any = stream.band().is_some();
            // SAFETY: the instruction set is present (the contract).
            unsafe { t.lanes.limit::<E::V>(&stream.limits()) };
            t.keys[0].next(&mut stream, false, false);
            // All keys must fit one tile.
            if stream.ahead(1).is_empty() {
                // SAFETY: as `Job::work`; these are all lanes of the range, and the tile has all keys that they see.
                unsafe { self.small::<E>(t, scoring, any, unit.kv, q) };
                return;
            }
            stream = all;
        }
        // SAFETY: the ranges' rows and the kv head are within k and v (checked).
        unsafe { self.prefetch(stream.ahead(E::TILES), unit.kv) };
        let panels = t.lanes.n.div_ceil(E::PANEL);
        for (i, (panel, of)) in t.q.chunks_exact_mut(q_len).zip(&mut t.panels[..panels]).enumerate() {
            let first = i * E::PANEL;
            // SAFETY: as above.
            let finite = unsafe { E::queries(&t.lanes, first, &c.q, panel, t.rows) };
            *of = (VisibleKeys::default(), finite, false);
        }
        t.o[..panels * o_len].fill(E::Sum::ZERO);
        t.m[..panels * E::PANEL].fill(E::Sum::NEG_INFINITY);
        t.l[..panels * E::PANEL].fill(E::Sum::ZERO);
        t.best.fill(E::Sum::NEG_INFINITY);
        let mut band = None;
        while let Some(next) = stream.band() {
            if band != Some(next) {
                band = Some(next);
                // SAFETY: the instruction set is present (the contract).
                unsafe { t.limit::<E::V>(&stream.limits(), panels, E::PANEL) };
            }
            let mut tiles = 0;
            // Tiles that are processed together have one band.
            while tiles < E::TILES && stream.band() == band && t.keys[tiles].next(&mut stream, c.aligned, c.aligned) {
                // SAFETY: the instruction set is present (the contract).
                unsafe { t.keys[tiles].find_blocks::<E::V>() };
                // Perhaps only other units of the block see this tile.
                if !t.is_seen(tiles, panels) {
                    continue;
                }
                // SAFETY: the ranges' rows and the kv head are within k and v (checked).
                t.finite[tiles] = unsafe { t.keys[tiles].load::<E>(&c.k, &c.v, unit.kv) };
                tiles += 1;
            }
            if tiles == 0 {
                continue;
            }
            let ahead = stream.ahead(E::TILES);
            let each = ((ahead.end - ahead.start) as usize).div_ceil(panels) as i64;
            let mut later = Deferred { products: E::Later::default(), free: 0 };
            let mut meetings = (0..panels * tiles).map(|i| (i / tiles, i % tiles));
            let mut next = meetings.find_map(|(panel, tile)| self.visible_keys::<E>(t, scoring, panel, tile));
            let mut asked = 0;
            while let Some(now) = next {
                next = meetings.find_map(|(panel, tile)| self.visible_keys::<E>(t, scoring, panel, tile));
                while asked <= now.panel as i64 {
                    let part = ahead.start + asked * each;
                    // SAFETY: the ranges' rows and the kv head are within k and v (checked).
                    unsafe { self.prefetch(part..ahead.end.min(part + each), unit.kv) };
                    asked += 1;
                }
                // SAFETY: as above; tiles and panels are packed.
                unsafe { self.panel::<E>(t, scoring, &now, next.as_ref(), (unit.kv, q), &mut later) };
            }
            // SAFETY: tiles and panels are those of the deferred products.
            unsafe { E::finish(&mut later.products) };
        }
        for first in (0..t.lanes.n).step_by(E::V::W) {
            // SAFETY: the lanes' rows and heads are within the tensors; this unit alone touches them.
            unsafe {
                let panel = &t.o[first / E::PANEL * o_len..][..o_len];
                to_rows::<E::V>(panel, E::PANEL, first % E::PANEL, t.rows, dv);
                self.finish::<E>(t, scoring, first, q);
            }
        }
    }

    /// The keys of a tile that a panel sees, or nothing.
    #[inline(always)]
    fn visible_keys<E: AttentionEngine>(
        &self,
        t: &ForwardTiles<E::T, E::Sum>,
        scoring: &Scoring<E::Sum>,
        panel: usize,
        tile: usize,
    ) -> Option<TilePair> {
        let keys = &t.keys[tile];
        let (finite_k, finite_v) = t.finite[tile];
        let (sight, finite_q, _) = t.panels[panel];
        let covers = keys.blocks.map(|b| match sight.cover(b.min, b.max) {
            Cover::All if !b.full => Cover::Some,
            cover => cover,
        });
        let begin = covers.iter().position(|&x| x != Cover::None)?;
        let end = covers.iter().rposition(|&x| x != Cover::None)? + 1;
        let mut range = begin * BLOCK..(end * BLOCK).min(keys.n.next_multiple_of(E::GRAIN));
        if covers[begin] != Cover::All || covers[end - 1] != Cover::All {
            // Narrowed to pairs of keys, or to as many as the engine computes at once.
            range = keys.seen(range, E::GRAIN.max(2), sight.span());
        }
        let width = E::PANEL.min(t.lanes.n.next_multiple_of(E::V::W) - panel * E::PANEL);
        let finite = finite_k && finite_q;
        let careful = !scoring.plain || !finite;
        let simple = width == E::PANEL && !careful && finite_v;
        let masked = covers[begin..end].iter().any(|&x| x != Cover::All);
        Some(TilePair { panel, tile, covers, range, width, masked, careful, finite, simple })
    }

    /// One panel with one tile of keys.
    ///
    /// # Safety
    /// As [`ForwardPass::unit`]. Tile and panel, the deferred products and `next` are all of the same unit.
    #[inline(always)]
    unsafe fn panel<E: AttentionEngine>(
        &self,
        t: &mut ForwardTiles<E::T, E::Sum>,
        scoring: &Scoring<E::Sum>,
        now: &TilePair,
        next: Option<&TilePair>,
        (kv, row): (u32, &QRange),
        later: &mut Deferred<E>,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (q_len, o_len) = (E::queries_len(d), dv.next_multiple_of(E::GRAIN) * E::PANEL);
        let &TilePair { panel, tile, width, ref range, .. } = now;
        let met = core::mem::replace(&mut t.panels[panel].2, true);
        let next = next.filter(|next| next.simple && t.panels[next.panel].2);
        let keys = &t.keys[tile];
        let first = panel * E::PANEL;
        // SAFETY: the instruction set is present (the contract).
        unsafe { t.lanes.relate::<E::V>(first, width, keys.base, now.masked, scoring.alibi) };
        let v = Values { tile: &*keys.v, finite: t.finite[tile].1, tensor: &c.v, head: kv, rows: &keys.row[..keys.n] };
        let scores = Scores {
            scoring,
            lanes: &t.lanes,
            first,
            keys: &keys.rel[..keys.n.next_multiple_of(BLOCK)],
            covers: &now.covers,
            careful: now.careful,
        };
        // SAFETY: tiles and panels are as long as the engine says; all are of this worker alone.
        unsafe {
            let (s, p) = (t.s.as_mut_ptr(), t.p[later.free].as_mut_ptr());
            let (q, o) = (t.q.as_ptr().add(panel * q_len), t.o.as_mut_ptr().add(panel * o_len));
            let (m, l) = (t.m.as_mut_ptr().add(first), t.l.as_mut_ptr().add(first));
            let none = t.best.is_empty();
            let best = if none { core::ptr::null_mut() } else { t.best.as_mut_ptr().add(first) };
            if E::INTERLEAVES && met && now.simple {
                let operands = |of: &TilePair| {
                    let q = t.q.as_ptr().add(of.panel * q_len);
                    Operands { k: &*t.keys[of.tile].k, q, dim: d, keys: of.range.clone() }
                };
                let (of, next) = (operands(now), next.map(operands));
                if E::interleaved(&scores, &of, next.as_ref(), s, p, (m, l, best), &mut later.products) {
                    E::defer(&v, p, o, range.clone(), &mut later.products);
                    later.free ^= 1;
                    return;
                }
            }
            E::finish(&mut later.products);
            E::scores(&*keys.k, q, d, s, range.clone(), width);
            if !now.finite {
                let k = Values { tile: &*keys.k, finite: false, tensor: &c.k, head: kv, rows: &keys.row[..keys.n] };
                E::scores_again(&t.lanes, first, &c.q, &k, s, range.clone());
            }
            let mut changed = false;
            for lane in (0..width).step_by(E::V::W) {
                let alpha = t.alpha.as_mut_ptr().add(lane);
                let best = if none { best } else { best.add(lane) };
                changed |= scores.run::<E>(lane, range.clone(), s, p, m.add(lane), l.add(lane), alpha, best);
            }
            // Before its first keys a panel's sums are zero, and need no factor.
            if changed && met {
                rescale::<E::V>(o, dv, E::PANEL, width, t.alpha.as_ptr());
            }
            if E::DENSE
                && let Some(dropout) = &c.dropout
            {
                // p is where the scores were.
                let (row, lanes) = ((row, c.heads.q_offset), (&t.lanes, first, width));
                t.kept.draw::<E::V>(dropout, &c.ranges, row, lanes, &keys.slots, range.clone());
                t.kept.apply::<E::V>(s, E::PANEL, range.clone(), width, E::Sum::from_f64(1.0));
            }
            E::weigh(&v, s, p, o, range.clone(), width);
        }
    }
}
