// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward: online softmax over tiles of keys (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022).
//!
//! A unit is a block of rows of one q range with one kv head. Its rows, of every q head that reads this kv head, are
//! the lanes; the keys stream by, packed once for all of them. Per tile and panel of lanes: scores = K·Qᵀ, their maximum,
//! `p = exp(s − m)` (`softmax.rs`), and `Oᵀ += Vᵀ·P`. Blocks of keys that no lane of the panel sees are passed over. At the
//! end the result is normalised, merged into the running one if the mode says so, and finished if the mode says that.
//!
//! Nothing a lane does depends on the other lanes of its panel: a tile that is of no use to it leaves its bits alone
//! (`exp(0)` is exactly 1, a product with p = 0 adds nothing). With tiles broken by position, that is what makes
//! results independent of how rows and keys were cut.

use super::arena::{Arena, KEYS, LANES, Line};
use super::engine::{Engine, Values};
use super::job::{Job, Machine};
use super::panel::to_rows;
use super::rows::{narrow, prefetch};
use super::simd::{Real, Vector};
use super::softmax::{Softmax, rescale};
use super::stream::{BLOCK, KeyTile, Stream};
use super::tile::{Cover, Lanes, Scoring, Sight, at};
use crate::call::{Attend, HeadMap, QRange};
use crate::kernel::merge::{self, LogSumExp};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Walks the units of a call in order, and stops at those that the counter hands out.
pub(super) struct Units<'a> {
    q: &'a [QRange],
    rows: u32,
    kv_heads: u32,
    range: usize,
    /// Units of all ranges before `range`.
    base: usize,
}

/// Some rows of one q range, with one kv head.
pub(super) struct Unit {
    pub range: usize,
    pub first: u32,
    pub rows: u32,
    pub kv: u32,
}

impl<'a> Units<'a> {
    pub(super) fn new(q: &'a [QRange], rows: usize, kv_heads: u32) -> Self {
        Self { q, rows: rows as u32, kv_heads, range: 0, base: 0 }
    }

    pub(super) fn next(&mut self, counter: &AtomicUsize) -> Option<Unit> {
        let unit = counter.fetch_add(1, Ordering::Relaxed);
        while let Some(q) = self.q.get(self.range) {
            let blocks = q.range.len.div_ceil(self.rows) as usize;
            let units = blocks * self.kv_heads as usize;
            if unit < self.base + units {
                // The last rows first: under a causal mask they have the most keys, and a long unit should not come last.
                let (kv, block) = ((unit - self.base) / blocks, blocks - 1 - (unit - self.base) % blocks);
                let first = block as u32 * self.rows;
                let rows = self.rows.min(q.range.len - first);
                return Some(Unit { range: self.range, first, rows, kv: kv as u32 });
            }
            self.base += units;
            self.range += 1;
        }
        None
    }
}

/// The q heads (of `q_heads` in the call) that read kv head `kv`.
pub(super) fn readers(map: &HeadMap, kv: u32, q_heads: u32) -> core::ops::Range<u32> {
    let first = (u64::from(kv) + u64::from(map.kv_offset)) * u64::from(map.group);
    let offset = u64::from(map.q_offset);
    let begin = first.saturating_sub(offset).min(q_heads.into()) as u32;
    let end = (first + u64::from(map.group)).saturating_sub(offset).min(q_heads.into()) as u32;
    begin..end
}

/// A forward call whose sums are `A`s.
pub(super) struct Forward<'a, A> {
    pub call: &'a Attend<'a>,
    pub sums: PhantomData<A>,
}

/// Rows of a unit that fill `lanes` lanes with all heads of a group; whole blocks, so that panels do not mix heads.
pub(super) fn unit_rows(lanes: usize, map: &HeadMap, q_heads: u32) -> usize {
    let rows = lanes / map.group.min(q_heads).max(1) as usize;
    if rows > BLOCK { rows - rows % BLOCK } else { rows.max(1) }
}

/// The tiles of one worker.
struct Tiles<'a, T, A> {
    lanes: Lanes<'a, A>,
    keys: KeyTile<'a, T, A>,
    /// By panel: what its lanes see, and whether their q is finite.
    panels: [(Sight, bool); MOST_PANELS],
    /// Panels of q.
    q: &'a mut [T],
    /// `[panel][value_dim padded][lanes of a panel]`.
    o: &'a mut [A],
    /// `[key][lanes of a panel]`: scores.
    s: &'a mut [A],
    /// The panel's p, where it is not in `s`.
    p: &'a mut [T],
    /// What p is relative to, and the sum of p, by lane.
    m: &'a mut [A],
    l: &'a mut [A],
    /// What the sums of a panel are to be multiplied by.
    alpha: &'a mut [A],
    /// Results of [`Vector::W`] lanes, and what was running.
    rows: &'a mut [A],
    others: &'a mut [A],
}

/// Panels of the narrowest vectors.
const MOST_PANELS: usize = LANES / 8;

impl<A: Machine> Job for Forward<'_, A> {
    type Acc = A;

    #[inline(always)]
    unsafe fn work<E: Engine<Sum = A>>(&self, lines: &mut [Line], next: &AtomicUsize) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (q_len, o_len) = (E::queries_len(d), dv.next_multiple_of(E::GRAIN) * E::PANEL);
        let panels = LANES / E::PANEL;
        let mut arena = Arena(lines);
        let mut tiles = Tiles {
            lanes: Lanes::new(&mut arena, LANES),
            keys: KeyTile::new::<E>(&mut arena, d, dv),
            panels: [(Sight::default(), true); MOST_PANELS],
            q: arena.take(panels * q_len),
            o: arena.zeros(panels * o_len),
            s: arena.zeros(KEYS * E::PANEL),
            p: arena.take(KEYS * E::PANEL),
            m: arena.zeros(LANES),
            l: arena.zeros(LANES),
            alpha: arena.zeros(E::PANEL),
            rows: arena.zeros(E::V::W * d.max(dv)),
            others: arena.zeros(E::V::W * dv),
        };
        let scoring = Scoring::new(&c.score, &c.alibi_slopes);
        let mut units = Units::new(c.ranges.q, unit_rows(LANES, &c.heads, c.q.heads), c.k.heads);
        // SAFETY: the instruction set is there, the caller says.
        unsafe { E::enter() };
        while let Some(unit) = units.next(next) {
            let heads = readers(&c.heads, unit.kv, c.q.heads);
            let share = (LANES as u32 / unit.rows).max(1);
            let mut h = heads.start;
            while h < heads.end {
                let end = heads.end.min(h + share);
                // SAFETY: unit and heads are within the call, whose shapes are checked and memory is valid.
                unsafe { self.unit::<E>(&mut tiles, &scoring, &unit, h..end) };
                h = end;
            }
        }
        // SAFETY: as above.
        unsafe { E::leave() };
    }
}

impl<A: Real> Forward<'_, A> {
    /// One block of rows with some of the heads that read one kv head.
    ///
    /// # Safety
    /// As [`Job::work`], entered.
    #[inline(always)]
    unsafe fn unit<E: Engine<Sum = A>>(
        &self,
        t: &mut Tiles<E::T, A>,
        scoring: &Scoring<A>,
        unit: &Unit,
        heads: core::ops::Range<u32>,
    ) {
        let c = self.call;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (q_len, o_len) = (E::queries_len(d), dv.next_multiple_of(E::GRAIN) * E::PANEL);
        let q = &c.ranges.q[unit.range];
        // SAFETY: slopes has one number per head (checked); rows and heads are within q.
        let (lo, hi) = unsafe { t.lanes.set(&q.range, unit.first, unit.rows, heads, &c.score, &c.alibi_slopes) };
        let pairs = &c.ranges.pairs[q.keys_begin as usize..q.keys_end as usize];
        let mut stream = Stream::new(c.ranges.k, pairs, lo, hi);
        // SAFETY: the ranges' rows and the kv head are within k and v (checked).
        unsafe { self.ask(stream.ahead(), unit.kv) };
        let panels = t.lanes.n.div_ceil(E::PANEL);
        for (i, (panel, of)) in t.q.chunks_exact_mut(q_len).zip(&mut t.panels[..panels]).enumerate() {
            let first = i * E::PANEL;
            // SAFETY: as above.
            *of = (t.lanes.sight(first, E::PANEL), unsafe { E::queries(&t.lanes, first, &c.q, panel, t.rows) });
        }
        t.o[..panels * o_len].fill(A::ZERO);
        t.m.fill(A::NEG_INFINITY);
        t.l.fill(A::ZERO);
        while t.keys.next(&mut stream, c.aligned, c.aligned) {
            t.keys.find_blocks();
            // SAFETY: the ranges' rows and the kv head are within k and v (checked).
            let (finite_k, finite_v) = unsafe { t.keys.load::<E>(&c.k, &c.v, unit.kv) };
            let keys = &t.keys;
            let v = Values { tile: &*keys.v, finite: finite_v, tensor: &c.v, head: unit.kv, rows: &keys.row[..keys.n] };
            let ahead = stream.ahead();
            let each = ((ahead.end - ahead.start) as usize).div_ceil(panels) as i64;
            for panel in 0..panels {
                let part = ahead.start + panel as i64 * each;
                // SAFETY: as above.
                unsafe { self.ask(part..ahead.end.min(part + each), unit.kv) };
                let (sight, finite_q) = t.panels[panel];
                let first = panel * E::PANEL;
                let covers = keys.blocks.map(|b| match sight.cover(b.min, b.max) {
                    Cover::All if !b.full => Cover::Some,
                    cover => cover,
                });
                let Some(begin) = covers.iter().position(|&x| x != Cover::None) else { continue };
                let end = covers.iter().rposition(|&x| x != Cover::None).unwrap_or(begin) + 1;
                let mut range = begin * BLOCK..(end * BLOCK).min(keys.n.next_multiple_of(E::GRAIN));
                if covers[begin] != Cover::All || covers[end - 1] != Cover::All {
                    // Down to pairs of keys, or to what the engine computes at once.
                    range = keys.seen(range, E::GRAIN.max(2), sight.span());
                }
                let width = E::PANEL.min(t.lanes.n.next_multiple_of(E::V::W) - first);
                let masked = covers[begin..end].iter().any(|&x| x != Cover::All);
                t.lanes.relate(first, width, keys.base, masked, scoring.alibi);
                let softmax = Softmax {
                    scoring,
                    lanes: &t.lanes,
                    first,
                    keys: &keys.rel[..keys.n.next_multiple_of(BLOCK)],
                    covers: &covers,
                    careful: !scoring.plain || !finite_k || !finite_q,
                };
                // SAFETY: tiles and panels are as long as the engine says; all are of this worker alone.
                unsafe {
                    let (s, p) = (t.s.as_mut_ptr(), t.p.as_mut_ptr());
                    let o = t.o.as_mut_ptr().add(panel * o_len);
                    E::scores(keys.k, t.q.as_ptr().add(panel * q_len), d, s, range.clone(), width);
                    let mut changed = false;
                    for lane in (0..width).step_by(E::V::W) {
                        let (m, l) = (t.m.as_mut_ptr().add(first + lane), t.l.as_mut_ptr().add(first + lane));
                        changed |= softmax.run::<E>(lane, range.clone(), s, p, m, l, t.alpha.as_mut_ptr().add(lane));
                    }
                    if changed {
                        rescale::<E::V>(o, dv, E::PANEL, width, t.alpha.as_ptr());
                    }
                    E::weigh(&v, s, p, o, range, width);
                }
            }
        }
        for first in (0..t.lanes.n).step_by(E::V::W) {
            // SAFETY: the lanes' rows and heads are within the tensors; this unit alone touches them.
            unsafe { self.finish::<E>(t, scoring, first, o_len, q) };
        }
    }

    /// Asks for rows of k and v, a tile before they are packed. Of many heads side by side a head's rows lie a page apart,
    /// where the hardware asks for nothing by itself.
    ///
    /// # Safety
    /// The rows and the head are within k and v.
    #[inline(always)]
    unsafe fn ask(&self, rows: Range<i64>, head: u32) {
        for row in rows {
            // SAFETY: the rows and the head are within k and v (the contract).
            unsafe {
                prefetch(&self.call.k, row, head);
                prefetch(&self.call.v, row, head);
            }
        }
    }

    /// Normalises up to [`Vector::W`] lanes from `first` on, and does what the mode of their range says.
    ///
    /// # Safety
    /// The lanes' rows and heads lie within the tensors of the call; the instruction set is present.
    #[inline(always)]
    unsafe fn finish<E: Engine<Sum = A>>(
        &self,
        t: &mut Tiles<E::T, A>,
        scoring: &Scoring<A>,
        first: usize,
        o_len: usize,
        q: &QRange,
    ) {
        let c = self.call;
        let dv = c.v.dim as usize;
        let end = t.lanes.n.min(first + E::V::W);
        if q.mode.continues() {
            for (lane, other) in (first..end).zip(t.others.chunks_exact_mut(dv)) {
                // SAFETY: running is there (checked). It may be o itself, so it is copied before anything is written.
                unsafe {
                    let running = at::<A>(&c.running, t.lanes.row[lane], t.lanes.head[lane]);
                    other.copy_from_slice(core::slice::from_raw_parts(running, dv));
                }
            }
        }
        let panel = &t.o[first / E::PANEL * o_len..][..o_len];
        // SAFETY: the instruction set is there.
        unsafe { to_rows::<E::V>(panel, E::PANEL, first % E::PANEL, t.rows, dv) };
        for (lane, (row, other)) in (first..end).zip(t.rows.chunks_exact_mut(dv).zip(t.others.chunks_exact_mut(dv))) {
            let (token, head) = (t.lanes.row[lane], t.lanes.head[lane]);
            let (m, l) = (t.m[lane], t.l[lane]);
            let mut lse = LogSumExp::NOTHING;
            if m == A::NEG_INFINITY && l == A::ZERO {
                row.fill(A::ZERO);
            } else {
                lse = LogSumExp::of(scoring.lse(m, l));
                let inverse = A::from_f64(1.0) / l;
                for x in row.iter_mut() {
                    // Adding 0 makes −0 (a product that underflowed) the 0 it would be with one more masked key.
                    *x = *x * inverse + A::ZERO;
                }
            }
            // SAFETY: tensors of modes that are used are there (checked).
            unsafe {
                if q.mode.continues() {
                    let before = LogSumExp::load(at::<A>(&c.running_lse, token, head), c.running_lse.dim);
                    let w = merge::weights(before, lse);
                    merge::combine(&w, other, row);
                    row.copy_from_slice(other);
                    lse = w.lse;
                }
                if q.mode.finishes() {
                    if !c.sinks.is_none() {
                        let sink = A::from_f64((*at::<f32>(&c.sinks, 0, head)).into());
                        let (factor, with_sink) = merge::sink(lse, sink);
                        for x in row.iter_mut() {
                            *x = *x * factor;
                        }
                        lse.lse = with_sink;
                    }
                    narrow(row, &c.o, token, head);
                    *at::<A>(&c.lse, token, head) = lse.lse;
                } else {
                    narrow(row, &c.running, token, head);
                    lse.store(at::<A>(&c.running_lse, token, head), c.running_lse.dim);
                }
            }
        }
    }
}
