// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward pass of keys on matrix units: dk, dv, and dq on the way.
//!
//! A unit is a block of up to [`SUPER`] tiles of a document's keys with one kv head. Their k (as it is and transposed) and v
//! are packed once; the rows pass by in blocks of [`ROWS`] lanes. Of these, panel by panel: `S = K·Qᵀ` and `dP = V·dOᵀ`, from
//! them p and ds in half precision, `dQᵀ = Kᵀ·dS` over all keys of the unit, which is added to dq; and when the panels are
//! done, `dV += P·dO` and `dK += dS·Q` over all lanes of the block. What no row sees is passed over in blocks of 32 keys by
//! 32 lanes.
//!
//! Units of one document add to the same rows of dq in the order of their keys (`turns.rs`), and dk and dv belong to one
//! unit each, so results have the same bits for any number of workers.
//!
//! The factor between products and scores is left out of ds, and put back when dq and dk are written. In f16 ds would
//! overflow, or vanish: it is multiplied by a power of 2, as large as the largest numbers of v, do and delta allow. The
//! factor of a unit only ever becomes smaller, its dk with it. p would vanish where a sink takes most of a row: it is
//! multiplied by a constant.

use super::amx::{Amx, PANEL, TILE, add_where_not_finite, row_of};
use super::amx_product::Product;
use super::arena::{Arena, KEYS, Line};
use super::backward::no_row;
use super::engine::Engine;
use super::forward::readers;
use super::halves::Half;
use super::stream::{BLOCK, Block, Slots, Stream};
use super::tile::{Cover, Lanes, Scoring, Sight, at, to_rows};
use super::tiled_weights::{Of, Out, PANELS, ROWS, not_finite_lanes, pack_pairs};
use super::turns::{Turn, Turns};
use crate::call::{AttendBackward, QRange, Range};
use core::arch::x86_64::*;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Tiles of keys of a unit.
pub(super) const SUPER: usize = 4;
/// What p is multiplied by where the type is narrow, as a power of 2: p is at most 1, and often next to nothing. An lse
/// that is not that of these keys gives a larger p; there is room for one of 1,000, as long as it is a number in f16.
const P_SHIFT: i32 = 5;
/// Blocks of keys of a unit.
const BLOCKS: usize = SUPER * KEYS / BLOCK;

/// A backward call on half-precision tiles.
pub(super) struct Tiled<'a> {
    pub call: &'a AttendBackward<'a>,
    /// Add to dq as well, which holds a value in every row.
    pub queries: bool,
}

/// What a worker of such a call needs, in bytes: dims are padded to 32.
pub(super) const fn bytes(d: usize, dv: usize) -> usize {
    let keys = SUPER * KEYS;
    2 * keys * (2 * d + dv)
        + 4 * keys * (d + dv)
        + 4 * keys * ROWS
        + 4 * ROWS * (d + dv)
        + 8 * KEYS * PANEL
        + 2 * keys * PANEL
        + 4 * PANEL * d
        + 64 * d
        + keys * 24
        + ROWS * 128
}

struct Tiles<'a> {
    lanes: Lanes<'a, f32>,
    slots: [Slots<'a, f32>; SUPER],
    /// Tiles in hand.
    n: usize,
    /// Positions as the q range in hand sees them: infinite where it does not read the key.
    rel: &'a mut [f32],
    blocks: [Block; BLOCKS],
    /// `[tile]`, as `Engine::keys` packs them.
    k: &'a mut [u16],
    v: &'a mut [u16],
    /// `[dim / 16][block of keys][16 dims][32 keys]`, and whether all of k is finite.
    kt: &'a mut [u16],
    finite_k: bool,
    finite_v: bool,
    /// The bits of the largest number in v.
    largest_v: u16,
    /// What ds, and dk so far, are multiplied by; 0 before the first rows.
    factor: f32,
    /// `[key][dim padded]`.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Blocks of keys that some row has seen.
    touched: [bool; BLOCKS],
    /// `[key / 16][panel][16 keys][32 lanes]`.
    p: &'a mut [u16],
    ds: &'a mut [u16],
    /// ds of a panel, `[block of keys][lane / 16][16 pairs of keys][16 lanes][2]`.
    pairs: &'a mut [u16],
    /// Panels as `Engine::queries` packs them, and `[panel][dim / 16][16 pairs of lanes][16 dims][2]`.
    q: &'a mut [u16],
    d_o: &'a mut [u16],
    q_pairs: &'a mut [u16],
    d_o_pairs: &'a mut [u16],
    /// `[key][lane]` of a panel with a tile.
    s: &'a mut [f32],
    dp: &'a mut [f32],
    /// `[dim][lane]` of a panel.
    dq: &'a mut [f32],
    rows: &'a mut [f32],
    lse: &'a mut [f32],
    delta: &'a mut [f32],
}

/// Walks the units: blocks of keys, times kv heads, times documents.
pub(super) struct Units<'a> {
    k: &'a [Range],
    kv_heads: usize,
    sorted: bool,
    /// The k range in hand, and the blocks of its document if it is the first of that.
    at: usize,
    blocks: Option<usize>,
    base: usize,
}

pub(super) struct Unit {
    index: usize,
    /// The first k range of the document.
    pub first: usize,
    pub kv: u32,
    pub block: usize,
}

impl<'a> Units<'a> {
    pub(super) fn new(k: &'a [Range], kv_heads: usize) -> Self {
        Self { k, kv_heads, sorted: k.is_sorted_by_key(|r| r.doc), at: 0, blocks: None, base: 0 }
    }

    pub(super) fn next(&mut self, counter: &AtomicUsize) -> Option<Unit> {
        let index = counter.fetch_add(1, Ordering::Relaxed);
        while let Some(range) = self.k.get(self.at) {
            let (k, at, sorted) = (self.k, self.at, self.sorted);
            let blocks = *self.blocks.get_or_insert_with(|| {
                let before = &k[..at];
                let seen = match before.last() {
                    Some(last) if last.doc == range.doc => true,
                    _ => !sorted && before.iter().any(|r| r.doc == range.doc),
                };
                if seen { 0 } else { Stream::document(k, at).count(false).div_ceil(SUPER) }
            });
            let local = index - self.base;
            if local < blocks * self.kv_heads {
                return Some(Unit { index, first: at, kv: (local / blocks) as u32, block: local % blocks });
            }
            self.base += blocks * self.kv_heads;
            self.at += 1;
            self.blocks = None;
        }
        None
    }
}

impl Tiled<'_> {
    /// Does units until none is left.
    ///
    /// # Safety
    /// AMX with products of `H` is present, the tensors of the call are valid, and each unit is taken once.
    #[inline(always)]
    pub(super) unsafe fn work<H: Half>(&self, lines: &mut [Line], next: &AtomicUsize, turns: &Turns) {
        let c = self.call;
        let (d, dv) = ((c.q.dim as usize).next_multiple_of(32), (c.v.dim as usize).next_multiple_of(32));
        let keys = SUPER * KEYS;
        let mut arena = Arena(lines);
        let mut t = Tiles {
            lanes: Lanes::new(&mut arena, ROWS),
            slots: core::array::from_fn(|_| Slots::new(&mut arena)),
            n: 0,
            rel: arena.take(keys),
            blocks: [Block::EMPTY; BLOCKS],
            k: arena.take(keys * d),
            v: arena.take(keys * dv),
            kt: arena.take(keys * d),
            finite_k: true,
            finite_v: true,
            largest_v: 0,
            factor: 0.0,
            dk: arena.take(keys * d),
            dv: arena.take(keys * dv),
            touched: [false; BLOCKS],
            p: arena.take(keys * ROWS),
            ds: arena.take(keys * ROWS),
            pairs: arena.take(keys * PANEL),
            q: arena.take(ROWS * d),
            d_o: arena.take(ROWS * dv),
            q_pairs: arena.take(ROWS * d),
            d_o_pairs: arena.take(ROWS * dv),
            s: arena.take(KEYS * PANEL),
            dp: arena.take(KEYS * PANEL),
            dq: arena.take(d * PANEL),
            rows: arena.take(16 * d),
            lse: arena.take(ROWS),
            delta: arena.take(ROWS),
        };
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let k = c.ranges.k;
        let q_sorted = c.ranges.q.is_sorted_by_key(|r| r.range.doc);
        let mut units = Units::new(k, c.k.heads as usize);
        // SAFETY: AMX is present.
        unsafe { Amx::<H>::enter() };
        while let Some(unit) = units.next(next) {
            let turn = turns.begin(unit.index, unit.block > 0 && self.queries);
            let doc = k[unit.first].doc;
            let q = if q_sorted {
                let begin = c.ranges.q.partition_point(|r| r.range.doc < doc);
                &c.ranges.q[begin..begin + c.ranges.q[begin..].partition_point(|r| r.range.doc == doc)]
            } else {
                c.ranges.q
            };
            let mut stream = Stream::document(k, unit.first);
            for _ in 0..unit.block * SUPER {
                stream.fill(false, |_| ());
            }
            t.n = 0;
            while t.n < SUPER && t.slots[t.n].next(&mut stream, false, false) {
                t.n += 1;
            }
            // SAFETY: rows and heads are within the tensors (checked); dk and dv of these keys and this kv head are this
            // unit's alone, and dq is added to in turn.
            unsafe { self.unit::<H>(&mut t, &scoring, q, doc, unit.kv, &turn) };
        }
        // SAFETY: as above.
        unsafe { Amx::<H>::leave() };
    }

    /// The keys in hand, with all rows of their document.
    ///
    /// # Safety
    /// As [`Tiled::work`], entered.
    #[inline(always)]
    unsafe fn unit<H: Half>(
        &self,
        t: &mut Tiles,
        scoring: &Scoring<f32>,
        ranges: &[QRange],
        doc: u32,
        kv: u32,
        turn: &Turn,
    ) {
        let c = self.call;
        let ranges = || ranges.iter().filter(|q| q.range.doc == doc);
        let heads = readers(&c.heads, kv, c.q.heads);
        let mut loaded = false;
        Self::clear(t, c);
        // Few rows: as many heads as fill a block pass together.
        let total: u32 = ranges().map(|q| q.range.len).sum();
        let share = if c.per_q_head { 1 } else { (ROWS as u32 / total.max(1)).max(1) };
        let mut before = 0u32;
        let mut head = heads.start;
        while head < heads.end {
            let end_head = heads.end.min(head + share);
            let mut place = before;
            for q in ranges() {
                let rows = Self::rows(t, c, q);
                let (mut first, end) = (rows.start, rows.end);
                if first < end && !loaded {
                    // SAFETY: rows of keys and the head are within k and v.
                    unsafe { Self::load::<H>(t, c, kv) };
                    loaded = true;
                }
                while first < end {
                    let count = (end - first).min(ROWS as u32 / (end_head - head));
                    // SAFETY: rows and heads are within the tensors (checked).
                    unsafe {
                        t.lanes.set(&q.range, first, count, head..end_head, &c.score, &c.alibi_slopes);
                        self.rows_in_hand::<H>(t, scoring, turn, place + first + count);
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
                unsafe { self.write::<H>(t, head) };
                Self::clear(t, c);
            }
            head = end_head;
        }
        if !c.per_q_head {
            // SAFETY: dk and dv of this kv head are this unit's alone.
            unsafe { self.write::<H>(t, kv) };
        }
    }

    /// Sums of 0.
    #[inline(always)]
    fn clear(t: &mut Tiles, c: &AttendBackward) {
        let (d, dv) = ((c.q.dim as usize).next_multiple_of(32), (c.v.dim as usize).next_multiple_of(32));
        t.dk[..t.n * KEYS * d].fill(0.0);
        t.dv[..t.n * KEYS * dv].fill(0.0);
        t.touched = [false; BLOCKS];
        t.factor = 0.0;
    }

    /// Packs k and v of the keys in hand.
    ///
    /// # Safety
    /// As [`Tiled::work`].
    #[inline(always)]
    unsafe fn load<H: Half>(t: &mut Tiles, c: &AttendBackward, kv: u32) {
        (t.finite_k, t.finite_v) = (true, true);
        let (k_len, v_len) = (Amx::<H>::keys_len(c.k.dim as usize), Amx::<H>::keys_len(c.v.dim as usize));
        for (i, slots) in t.slots[..t.n].iter().enumerate() {
            let rows = &slots.row[..slots.n.next_multiple_of(BLOCK)];
            // SAFETY: the keys' rows lie within k and v, and the tiles hold a block of them (the contract of
            // `Tiled::work`).
            unsafe {
                t.finite_k &= Amx::<H>::keys(&c.k, kv, rows, &mut t.k[i * k_len..][..k_len]);
                t.finite_v &= Amx::<H>::keys(&c.v, kv, rows, &mut t.v[i * v_len..][..v_len]);
                Amx::<H>::transposed::<true>(&c.k, kv, rows, t.kt, i * KEYS / BLOCK, BLOCKS);
            }
        }
        t.largest_v = 0;
        if H::NARROW {
            for bits in t.slots[..t.n]
                .iter()
                .zip(t.v.chunks(v_len))
                .flat_map(|(s, v)| &v[..v_len / KEYS * s.n.next_multiple_of(BLOCK)])
            {
                t.largest_v = t.largest_v.max(bits & 0x7fff);
            }
        }
    }

    /// The rows of a q range that may see a key in hand; makes the keys' positions those that the range sees.
    #[inline(always)]
    fn rows(t: &mut Tiles, c: &AttendBackward, q: &QRange) -> core::ops::Range<u32> {
        let pairs = &c.ranges.pairs[q.keys_begin as usize..q.keys_end as usize];
        let (mut min, mut max) = (i64::MAX, i64::MIN);
        t.blocks = [Block::EMPTY; BLOCKS];
        for (i, slots) in t.slots[..t.n].iter().enumerate() {
            let rel = &mut t.rel[i * KEYS..][..slots.n.next_multiple_of(BLOCK)];
            rel.copy_from_slice(&slots.rel[..rel.len()]);
            let mut last = None;
            for (rel, &index) in rel.iter_mut().zip(&slots.index[..slots.n]) {
                let read = match last {
                    Some((i, read)) if i == index => read,
                    _ => pairs.contains(&index),
                };
                last = Some((index, read));
                if !read {
                    *rel = f32::INFINITY;
                }
            }
            for (block, rel) in t.blocks[i * KEYS / BLOCK..].iter_mut().zip(rel.chunks(BLOCK)) {
                *block = Block::of(rel, slots.base);
                (min, max) = (min.min(block.min), max.max(block.max));
            }
        }
        if min > max {
            return 0..0;
        }
        let first = q.range.rows_before(min.saturating_sub(c.score.window_right));
        let last = max.saturating_add(c.score.window_left);
        first..if last == i64::MAX { q.range.len } else { q.range.rows_before(last + 1) }
    }

    /// The lanes in hand with the keys in hand.
    ///
    /// # Safety
    /// As [`Tiled::work`], entered.
    #[inline(always)]
    unsafe fn rows_in_hand<H: Half>(&self, t: &mut Tiles, scoring: &Scoring<f32>, turn: &Turn, place: u32) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (d_pad, dv_pad) = (d.next_multiple_of(32), dv.next_multiple_of(32));
        let panels = t.lanes.n.div_ceil(PANEL);
        let mut covers = [[Cover::None; BLOCKS]; PANELS];
        let mut any = false;
        for (panel, covers) in covers[..panels].iter_mut().enumerate() {
            let sight: Sight = t.lanes.sight(panel * PANEL, PANEL);
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
            let mut tame =
                t.finite_k && t.finite_v && t.lse.iter().zip(&*t.delta).all(|(l, d)| !l.is_nan() && d.is_finite());
            for lse in t.lse.iter_mut() {
                *lse = *lse * core::f32::consts::LOG2_E - Self::shift::<H>() as f32;
            }
            for panel in 0..panels {
                let first = panel * PANEL;
                let (q, d_o) =
                    (&mut t.q[first * d_pad..][..PANEL * d_pad], &mut t.d_o[first * dv_pad..][..PANEL * dv_pad]);
                tame &= Amx::<H>::queries(&t.lanes, first, &c.q, q, t.rows);
                tame &= Amx::<H>::queries(&t.lanes, first, &c.d_o, d_o, t.rows);
            }
            let (bad_q, _) = pack_pairs::<H>(&t.lanes, &c.q, t.q_pairs);
            let (bad_d_o, largest) = pack_pairs::<H>(&t.lanes, &c.d_o, t.d_o_pairs);
            Self::bring_into_range::<H>(t, d_pad, dv, largest);
            for delta in t.delta.iter_mut() {
                *delta *= -t.factor / Self::weight::<H>();
            }
            for (panel, covers) in covers[..panels].iter().enumerate() {
                let Some(begin) = covers.iter().position(|&x| x != Cover::None) else { continue };
                let end = covers.iter().rposition(|&x| x != Cover::None).unwrap_or(begin) + 1;
                self.scores::<H>(t, scoring, panel, covers, begin..end, !tame || !scoring.plain);
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
                    for at in [2 * block, 2 * block + 1].map(|tile| (tile * PANELS + panel) * TILE) {
                        t.p[at..at + TILE].fill(0);
                        t.ds[at..at + TILE].fill(0);
                    }
                }
                let keys = block * BLOCK;
                let sums = [
                    (&*t.p, &*t.d_o_pairs, t.dv.as_mut_ptr().add(keys * dv_pad), dv_pad, bad_d_o, &c.d_o),
                    (&*t.ds, &*t.q_pairs, t.dk.as_mut_ptr().add(keys * d_pad), d_pad, bad_q, &c.q),
                ];
                for (weights, rows, to, ld, bad, tensor) in sums {
                    let a0 = weights.as_ptr().add((2 * block * PANELS + begin) * TILE);
                    for at in (0..ld).step_by(32) {
                        let b0 = rows.as_ptr().add((begin * (ld / 16) + at / 16) * TILE);
                        H::product(&Product {
                            a0,
                            a1: a0.add(PANELS * TILE),
                            a_step: 2 * TILE,
                            b0,
                            b1: b0.add(TILE),
                            b_step: ld / 16 * 2 * TILE,
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

    /// What p is multiplied by, and its logarithm to the base 2.
    fn weight<H: Half>() -> f32 {
        f32::from_bits(((127 + Self::shift::<H>()) as u32) << 23)
    }

    fn shift<H: Half>() -> i32 {
        if H::NARROW { P_SHIFT } else { 0 }
    }

    /// Makes the factor small enough for these rows, and the sums so far with it.
    #[inline(always)]
    fn bring_into_range<H: Half>(t: &mut Tiles, d_pad: usize, dv: usize, largest: u16) {
        if !H::NARROW {
            t.factor = 1.0;
            return;
        }
        let delta = t.delta.iter().fold(0f32, |max, x| max.max(x.abs()));
        let bound = dv as f32 * H::widen(largest) * H::widen(t.largest_v) + delta;
        let mut factor = if t.factor == 0.0 { 1.0 } else { t.factor };
        if bound > 0.0 && bound.is_finite() {
            // The largest power of 2 that keeps the bound below 2^15 for a p of up to 2^10, see `P_SHIFT`.
            let fits = f32::from_bits((127 + 4 + 127 - (bound.to_bits() >> 23)).clamp(1, 254) << 23);
            factor = if t.factor == 0.0 { fits } else { fits.min(t.factor) };
        }
        if t.factor > factor {
            let by = factor / t.factor;
            t.dk[..t.n * KEYS * d_pad].iter_mut().for_each(|x| *x *= by);
        }
        t.factor = factor;
    }

    /// p and ds of a panel with the blocks of keys `range`.
    ///
    /// # Safety
    /// As [`Tiled::rows_in_hand`].
    #[inline(always)]
    unsafe fn scores<H: Half>(
        &self,
        t: &mut Tiles,
        scoring: &Scoring<f32>,
        panel: usize,
        covers: &[Cover; BLOCKS],
        range: core::ops::Range<usize>,
        careful: bool,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (k_len, v_len) = (Amx::<H>::keys_len(d), Amx::<H>::keys_len(dv));
        let first = panel * PANEL;
        const EACH: usize = KEYS / BLOCK;
        for tile in range.start / EACH..range.end.div_ceil(EACH) {
            let blocks = range.start.max(tile * EACH)..range.end.min((tile + 1) * EACH);
            let keys = (blocks.start - tile * EACH) * BLOCK..(blocks.end - tile * EACH) * BLOCK;
            let masked = covers[blocks.clone()].contains(&Cover::Some);
            t.lanes.relate(first, PANEL, t.slots[tile].base, masked, scoring.alibi);
            // SAFETY: tiles and panels are as long as the engine says.
            unsafe {
                let (q, d_o) = (t.q.as_ptr().add(panel * Amx::<H>::queries_len(d)), t.d_o.as_ptr());
                let d_o = d_o.add(panel * Amx::<H>::queries_len(dv));
                let (s, dp) = (t.s.as_mut_ptr(), t.dp.as_mut_ptr());
                Amx::<H>::scores(&t.k[tile * k_len..][..k_len], q, d, s, keys.clone(), PANEL);
                Amx::<H>::scores(&t.v[tile * v_len..][..v_len], d_o, dv, dp, keys, PANEL);
                for block in blocks {
                    if covers[block] == Cover::None {
                        t.pairs[2 * block * TILE..][..2 * TILE].fill(0);
                        continue;
                    }
                    let at = (block - tile * EACH) * BLOCK * PANEL;
                    let out = Out {
                        p: t.p.as_mut_ptr().add((2 * block * PANELS + panel) * TILE),
                        ds: t.ds.as_mut_ptr().add((2 * block * PANELS + panel) * TILE),
                        pairs: t.pairs.as_mut_ptr().add(2 * block * TILE),
                    };
                    let of = Of {
                        scoring,
                        lanes: &t.lanes,
                        first,
                        rel: &t.rel[block * BLOCK..][..BLOCK],
                        s: s.add(at),
                        dp: dp.add(at),
                        lse: t.lse.as_ptr().add(first),
                        delta: t.delta.as_ptr().add(first),
                        factor: t.factor / Self::weight::<H>(),
                        masked: covers[block] != Cover::All,
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

    /// Adds `dQᵀ = Kᵀ·dS` over the blocks of keys `range` to the rows of a panel, when it is their turn.
    ///
    /// # Safety
    /// As [`Tiled::rows_in_hand`].
    #[inline(always)]
    unsafe fn add_queries<H: Half>(
        &self,
        t: &mut Tiles,
        panel: usize,
        range: core::ops::Range<usize>,
        turn: &Turn,
        place: u32,
    ) {
        let c = self.call;
        let d = c.q.dim as usize;
        let scale = c.score.scale as f32 / t.factor;
        // SAFETY: tiles are as large as their sizes say; lanes' rows and heads are those of dq, which units add to in turn.
        unsafe {
            let b0 = t.pairs.as_ptr().add(2 * range.start * TILE);
            for at in (0..d).step_by(32) {
                let a0 = t.kt.as_ptr().add((at / 16 * BLOCKS + range.start) * TILE);
                H::product(&Product {
                    a0,
                    a1: a0.add(BLOCKS * TILE),
                    a_step: 2 * TILE,
                    b0,
                    b1: b0.add(TILE),
                    b_step: 4 * TILE,
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
                            let row = row_of(&c.k, slots.row[j % KEYS], kv);
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

    /// Writes the sums, or adds them, to head `head` of dk and dv.
    ///
    /// # Safety
    /// The keys' rows and the head are within dk and dv, which this unit alone touches there.
    #[inline(always)]
    unsafe fn write<H: Half>(&self, t: &Tiles, head: u32) {
        let c = self.call;
        let scale = if t.factor == 0.0 { 0.0 } else { c.score.scale as f32 / t.factor };
        for (tile, slots) in t.slots[..t.n].iter().enumerate() {
            for (j, &row) in slots.row[..slots.n].iter().enumerate() {
                let key = tile * KEYS + j;
                if c.accumulate_keys && !t.touched[key / BLOCK] {
                    continue;
                }
                for (tensor, sums, scale) in [(&c.dk, &t.dk, scale), (&c.dv, &t.dv, 1.0 / Self::weight::<H>())] {
                    let dim = tensor.dim as usize;
                    // SAFETY: the row and head are within the tensor and this unit's alone (the contract); rows are
                    // contiguous.
                    let dst = unsafe { core::slice::from_raw_parts_mut(at::<f32>(tensor, row, head), dim) };
                    let sums = &sums[key * dim.next_multiple_of(32)..][..dim];
                    for (x, &sum) in dst.iter_mut().zip(sums) {
                        *x = if c.accumulate_keys { *x + sum * scale } else { sum * scale };
                    }
                }
            }
        }
    }
}
