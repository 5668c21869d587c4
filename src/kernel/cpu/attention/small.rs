// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward of a few rows with a few keys, which occurs when a document is cut into many pieces by a ring.
//!
//! Panels and tiles of such a unit would be mostly padding, and packing them would take longer than the products. Here
//! rows are read in place: each score is a dot product, the horizontal sums of several are computed together (`Dots`),
//! and o is summed row by row. Options, masks and the softmax are those of a panel. The order of the sums differs from
//! that of panels and tiles, so aligned calls do not use this.

use super::slots::{BLOCK, Slots};
use super::stream::KeyStream;
use super::tile::{Cover, Lanes, Scores, Scoring};
use crate::call::{Attend, QRange};
use crate::element::Accumulator;
use crate::kernel::cpu::memory::arena::{KEYS, LANES, PANEL};
use crate::kernel::cpu::memory::rows::widen;
use crate::kernel::cpu::product::engine::{AttentionEngine, Dense};
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::{Real, Vector};

/// Lanes times keys up to which this is faster than panels and tiles.
const PAIRS: usize = 256;

/// Attends from some lanes to the keys of one tile of kv head `kv`. [`Small::sums`] then holds the rows of o before
/// they are normalised.
///
/// The lanes' rows and heads, the keys' rows and `kv` lie within the tensors of the call, whose memory is valid and
/// whose sums are `A`s; scores and sums are as long as their comments say, the other buffers as long as a panel.
pub(crate) struct Small<'a, 'l, A> {
    pub call: &'a Attend<'a>,
    pub scoring: &'a Scoring<A>,
    pub lanes: &'a mut Lanes<'l, A>,
    /// The keys, if there are any.
    pub keys: Option<&'a Slots<'l, A>>,
    pub kv: u32,
    /// `[lane][value_dim]`; then q, `[lane][head_dim rounded up to whole vectors]`.
    pub sums: &'a mut [A],
    /// `[key][lanes of a panel]`.
    pub s: &'a mut [A],
    pub m: &'a mut [A],
    pub l: &'a mut [A],
    pub alpha: &'a mut [A],
    /// The largest score of each lane; empty if nobody asks for it.
    pub best: &'a mut [A],
    /// A row of k or v.
    pub row: &'a mut [A],
}

/// Whether the rows of `q`, for `heads` heads, and the keys of `stream` that they attend to are few. The answer does
/// not depend on the number of workers or on how rows are cut into units.
#[inline(always)]
pub(crate) fn is_small<V: Vector>(c: &Attend, q: &QRange, heads: usize, stream: &KeyStream) -> bool {
    let lanes = q.range.len as usize * heads;
    let of = lanes * (c.q.dim as usize).next_multiple_of(V::W).max(c.v.dim as usize);
    if c.aligned || lanes > Dense::<V>::PANEL || 2 * of > LANES * c.v.dim as usize {
        return false;
    }
    stream.clone().at_most((PAIRS / lanes.max(1)).min(KEYS - 1))
}

impl<V: Vector> Routine<V> for Small<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(mut self) {
        let (n, dv) = (self.lanes.n, self.call.v.dim as usize);
        let width = n.next_multiple_of(PANEL).min(self.m.len());
        self.m[..width].fill(V::T::NEG_INFINITY);
        self.l[..width].fill(V::T::ZERO);
        self.best.fill(V::T::NEG_INFINITY);
        self.sums[..n * dv].fill(V::T::ZERO);
        if let Some(keys) = self.keys {
            // SAFETY: the contract.
            unsafe { self.attend::<V>(keys) };
        }
    }
}

impl<A: Real> Small<'_, '_, A> {
    /// # Safety
    /// As [`Routine::run`].
    #[inline(always)]
    unsafe fn attend<V: Vector<T = A>>(&mut self, keys: &Slots<A>) {
        let (c, scoring, kv) = (self.call, self.scoring, self.kv);
        let lanes = &mut *self.lanes;
        let (d, dv) = (c.q.dim as usize, c.v.dim as usize);
        let (n, ld, panel) = (lanes.n, d.next_multiple_of(V::W), Dense::<V>::PANEL);
        let width = n.next_multiple_of(V::W);
        let (o, q) = self.sums.split_at_mut(n * dv);
        let q = &mut q[..n * ld];
        q.fill(A::ZERO);
        let row = &mut self.row[..ld];
        row.fill(A::ZERO);
        let mut dots = Dots { sums: [A::ZERO; 256], columns: [A::ZERO; 256], n: 0 };
        // SAFETY: rows, heads and lengths are those of the contract; scores have room for a panel by key.
        unsafe {
            lanes.pack::<V>(&c.q, q, ld, 0..n);
            let s = self.s.as_mut_ptr();
            let at = |pair: usize| s.add(pair / n * panel + pair % n);
            let mut pairs = 0;
            for (j, &key) in keys.row[..keys.n].iter().enumerate() {
                core::slice::from_raw_parts_mut(s.add(j * panel + n), width - n).fill(A::ZERO);
                widen(&c.k, key, kv, &mut row[..d]);
                for q in q.chunks_exact(ld) {
                    let mut sum = V::splat(A::ZERO);
                    for at in (0..ld).step_by(V::W) {
                        sum = V::load(q.as_ptr().add(at)).fma(V::load(row.as_ptr().add(at)), sum);
                    }
                    if dots.push(sum) {
                        dots.take::<V>(|i, dot| at(pairs + i).write(dot));
                        pairs += V::W;
                    }
                }
            }
            dots.take::<V>(|i, dot| at(pairs + i).write(dot));
            lanes.relate::<V>(0, width, keys.base, true, scoring.alibi);
            let end = keys.n.next_multiple_of(BLOCK);
            let covers = [Cover::Some; KEYS / BLOCK];
            let scores = Scores { scoring, lanes, first: 0, keys: &keys.rel[..end], covers: &covers, careful: true };
            for lane in (0..width).step_by(V::W) {
                let (m, l) = (self.m.as_mut_ptr().add(lane), self.l.as_mut_ptr().add(lane));
                let s = self.s.as_mut_ptr();
                let best = if self.best.is_empty() { core::ptr::null_mut() } else { self.best.as_mut_ptr().add(lane) };
                scores.run::<Dense<V>>(lane, 0..keys.n, s, s, m, l, self.alpha.as_mut_ptr().add(lane), best);
            }
            let row = &mut self.row[..dv];
            for (j, &key) in keys.row[..keys.n].iter().enumerate() {
                widen(&c.v, key, kv, row);
                for (lane, o) in o.chunks_exact_mut(dv).enumerate() {
                    let p = self.s[j * panel + lane];
                    // A masked key must not contribute, even if its v is NaN.
                    if p == A::ZERO {
                        continue;
                    }
                    let whole = dv - dv % V::W;
                    for at in (0..whole).step_by(V::W) {
                        let to = o.as_mut_ptr().add(at);
                        V::splat(p).fma(V::load(row.as_ptr().add(at)), V::load(to)).store(to);
                    }
                    for (o, &v) in o[whole..].iter_mut().zip(&row[whole..]) {
                        *o = *o + p * v;
                    }
                }
            }
        }
    }
}

/// Up to [`Vector::W`] dot products whose horizontal sums are pending.
struct Dots<A> {
    /// One vector for each product, and their transpose; room for W by W.
    sums: [A; 256],
    columns: [A; 256],
    n: usize,
}

impl<A: Real> Dots<A> {
    /// Adds a product. Returns true when the buffer is full and `take` must be called.
    ///
    /// # Safety
    /// The instruction set of `V` is present, and there are fewer than [`Vector::W`].
    #[inline(always)]
    unsafe fn push<V: Vector<T = A>>(&mut self, sum: V) -> bool {
        debug_assert!(self.n < V::W);
        // SAFETY: room for W by W; the instruction set is present (the contract).
        unsafe { sum.store(self.sums.as_mut_ptr().add(self.n * V::W)) };
        self.n += 1;
        self.n == V::W
    }

    /// Computes all pending sums, each in the same order of additions, passes them to `each` and clears the buffer.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    unsafe fn take<V: Vector<T = A>>(&mut self, mut each: impl FnMut(usize, A)) {
        let mut dots = [A::ZERO; 16];
        // SAFETY: room for W by W, and W is at most 16; the instruction set is present (the contract).
        unsafe {
            V::transpose(self.sums.as_ptr(), V::W, self.columns.as_mut_ptr(), V::W);
            let mut sum = V::load(self.columns.as_ptr());
            for at in 1..V::W {
                sum = sum.add(V::load(self.columns.as_ptr().add(at * V::W)));
            }
            sum.store(dots.as_mut_ptr());
        }
        for (i, &dot) in dots[..core::mem::take(&mut self.n)].iter().enumerate() {
            each(i, dot);
        }
    }
}
