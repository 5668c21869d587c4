// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention in f64 by its definition: the reference of all tests.
//!
//! It is slow on purpose: one loop over rows, one over keys, one over dims; no tiles, no ranges, no partial results;
//! the maximum is subtracted only to keep exp finite. Keep it obviously correct: do not add optimisations.
//!
//! The mask is a list of [slices](Slice); without one, each document is a slice.

use crate::call::{DropoutMask, Score};
use crate::slice::Slice;
use alloc::{vec, vec::Vec};

/// A whole problem: packed documents, compact `[tokens, heads, dim]` tensors.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[q tokens, heads, head_dim]`.
    pub q: &'a [f64],
    /// `[k tokens, kv_heads, head_dim]`.
    pub k: &'a [f64],
    /// `[k tokens, kv_heads, value_dim]`.
    pub v: &'a [f64],
    /// Where the documents begin in q, and one past the last: `documents + 1` entries.
    pub cu_seqlens_q: &'a [i32],
    /// As `cu_seqlens_q`, for k and v.
    pub cu_seqlens_k: &'a [i32],
    /// The position of each document's first q token; keys begin at 0.
    pub q_start: &'a [i64],
    /// q heads.
    pub heads: usize,
    /// k and v heads; `heads` is a multiple.
    pub kv_heads: usize,
    /// Head dim of q and k.
    pub head_dim: usize,
    /// Head dim of v and o.
    pub value_dim: usize,
    /// Scale, softcap, window.
    pub score: Score,
    /// ALiBi slopes, one per q head, or `[documents, heads]`: those of the q token's document by `cu_seqlens_q`.
    pub alibi_slopes: Option<&'a [f64]>,
    /// Sinks, `[heads, n]`: as many for each q head, finite, or −∞ for none. A sink of +∞ makes the results of its head
    /// NaN.
    pub sinks: Option<&'a [f64]>,
    /// Which probabilities are dropped: tokens are those of q, k and v here.
    pub dropout: Option<DropoutMask>,
}

/// The result of [`Attention::forward`].
#[derive(Clone, Debug)]
pub struct Output {
    /// `[q tokens, heads, value_dim]`.
    pub o: Vec<f64>,
    /// `[q tokens, heads]`.
    pub lse: Vec<f64>,
}

/// The result of [`Attention::backward`].
#[derive(Clone, Debug)]
pub struct Gradient {
    /// As q.
    pub dq: Vec<f64>,
    /// As k.
    pub dk: Vec<f64>,
    /// As v.
    pub dv: Vec<f64>,
    /// One per q head; empty without sinks.
    pub dsinks: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

impl Attention<'_> {
    fn q_row(&self, token: usize, head: usize) -> core::ops::Range<usize> {
        let at = (token * self.heads + head) * self.head_dim;
        at..at + self.head_dim
    }

    fn k_row(&self, token: usize, head: usize) -> core::ops::Range<usize> {
        let at = (token * self.kv_heads + head) * self.head_dim;
        at..at + self.head_dim
    }

    fn v_row(&self, token: usize, head: usize) -> core::ops::Range<usize> {
        let at = (token * self.kv_heads + head) * self.value_dim;
        at..at + self.value_dim
    }

    fn o_row(&self, token: usize, head: usize) -> core::ops::Range<usize> {
        let at = (token * self.heads + head) * self.value_dim;
        at..at + self.value_dim
    }

    /// The documents as slices: all their queries with all their keys.
    pub fn documents(&self) -> Vec<Slice> {
        let document = |i: usize| Slice {
            q_begin: self.cu_seqlens_q[i],
            q_end: self.cu_seqlens_q[i + 1],
            k_begin: self.cu_seqlens_k[i],
            k_end: self.cu_seqlens_k[i + 1],
            q_start: self.q_start[i],
            low: i64::MIN,
            high: i64::MAX,
        };
        (0..self.q_start.len()).map(document).collect()
    }

    /// The keys of q token `i`, with the distance `k_pos − q_pos` of each. Its slices say which; the window too, by the
    /// positions in the slice.
    fn keys(&self, slices: &[Slice], i: usize) -> Vec<(usize, i64)> {
        let mut keys = Vec::new();
        for slice in slices {
            for j in slice.k_begin.max(0) as usize..slice.k_end.max(0) as usize {
                let k_pos = j as i64 - i64::from(slice.k_begin);
                let q_pos = i as i64 - i64::from(slice.q_begin) + slice.q_start;
                if slice.allows(i, j) && self.score.allows(q_pos, k_pos) {
                    keys.push((j, k_pos - q_pos));
                }
            }
        }
        keys
    }

    /// The score of q token `i` with k token `j` at this distance, and its derivative by `q·k`.
    fn score(&self, i: usize, (j, distance): (usize, i64), head: usize) -> (f64, f64) {
        let kv = head / (self.heads / self.kv_heads);
        let mut s = self.score.scale * dot(&self.q[self.q_row(i, head)], &self.k[self.k_row(j, kv)]);
        let mut derivative = self.score.scale;
        if self.score.softcap != 0.0 {
            let t = (s / self.score.softcap).tanh();
            s = self.score.softcap * t;
            derivative *= 1.0 - t * t;
        }
        if let Some(alibi_slopes) = self.alibi_slopes {
            s -= self.slope(alibi_slopes, i, head) * distance.abs() as f64;
        }
        (s, derivative)
    }

    /// The slope of q token `i` and a head.
    fn slope(&self, slopes: &[f64], i: usize, head: usize) -> f64 {
        if slopes.len() == self.heads {
            return slopes[head];
        }
        let document = self.cu_seqlens_q[1..].iter().position(|&end| i < end as usize);
        slopes[document.expect("every token has a document") * self.heads + head]
    }

    /// The largest of some scores and sinks, and the sum of all exponentials above it. Nothing if there is none.
    fn total(scores: &[f64], sinks: &[f64]) -> Option<(f64, f64)> {
        // NaN if one of them is, which `f64::max` would leave out.
        let larger = |m: f64, &s: &f64| if m.is_nan() || s <= m { m } else { s };
        let max = scores.iter().chain(sinks).fold(f64::NEG_INFINITY, larger);
        (max != f64::NEG_INFINITY).then(|| (max, sinks.iter().chain(scores).map(|s| (s - max).exp()).sum()))
    }

    /// The factor of a probability: 0 if it is dropped.
    fn kept(&self, i: usize, j: usize, head: usize) -> f64 {
        let factor = |mask: DropoutMask| if mask.keeps(i as u32, j as u32, head as u32) { mask.factor() } else { 0.0 };
        self.dropout.map_or(1.0, factor)
    }

    /// The sinks of a head.
    fn sinks_of(&self, head: usize) -> &[f64] {
        self.sinks.map_or(&[], |all| &all[all.len() / self.heads * head..][..all.len() / self.heads])
    }

    fn tokens(&self) -> usize {
        self.q.len() / (self.heads * self.head_dim).max(1)
    }

    /// o and lse of every row.
    pub fn forward(&self) -> Output {
        self.forward_of(&self.documents())
    }

    /// As [`Attention::forward`], with these slices in the place of the documents' own: `cu_seqlens` and `q_start` are
    /// not read, except for slopes of documents. A pair of tokens is in one slice at most; rows of q in no slice have
    /// an o of 0 and an lse of −∞ (or that of the sinks), and no other rows of k and v are read than those that a slice
    /// lets a query see.
    pub fn forward_of(&self, slices: &[Slice]) -> Output {
        let mut o = vec![0.0; self.tokens() * self.heads * self.value_dim];
        let mut lse = vec![f64::NEG_INFINITY; self.tokens() * self.heads];
        for i in 0..self.tokens() {
            let keys = self.keys(slices, i);
            for h in 0..self.heads {
                let kv = h / (self.heads / self.kv_heads);
                let scores: Vec<f64> = keys.iter().map(|&key| self.score(i, key, h).0).collect();
                let sinks = self.sinks_of(h);
                let Some((max, sum)) = Self::total(&scores, sinks) else { continue };
                lse[i * self.heads + h] = max + sum.ln();
                for (&(j, _), s) in keys.iter().zip(&scores) {
                    let p = (s - max).exp() / sum * self.kept(i, j, h);
                    let v = &self.v[self.v_row(j, kv)];
                    o[self.o_row(i, h)].iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
                }
            }
        }
        Output { o, lse }
    }

    /// The largest score of each q head over the pairs that the [documents](Attention::documents) or other slices
    /// allow; −∞ where there is none. Sinks are no scores.
    pub fn max_logit_of(&self, slices: &[Slice]) -> Vec<f64> {
        let mut largest = vec![f64::NEG_INFINITY; self.heads];
        for i in 0..self.tokens() {
            for key in self.keys(slices, i) {
                largest.iter_mut().enumerate().for_each(|(h, m)| *m = m.max(self.score(i, key, h).0));
            }
        }
        largest
    }

    /// Gradients of q, k, v and the sinks, for `d_o` of o's shape and the result of [`Attention::forward`].
    pub fn backward(&self, d_o: &[f64], out: &Output) -> Gradient {
        self.backward_of(&self.documents(), d_o, None, out)
    }

    /// As [`Attention::backward`], with the slices and the result of [`Attention::forward_of`], and for a `d_lse` of
    /// lse's shape if lse was used too. It is not read where lse is −∞.
    pub fn backward_of(&self, slices: &[Slice], d_o: &[f64], d_lse: Option<&[f64]>, out: &Output) -> Gradient {
        let mut g = Gradient {
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
            dsinks: vec![0.0; self.sinks.map_or(0, <[f64]>::len)],
        };
        for i in 0..self.tokens() {
            let keys = self.keys(slices, i);
            for h in 0..self.heads {
                let kv = h / (self.heads / self.kv_heads);
                let scores: Vec<_> = keys.iter().map(|&key| self.score(i, key, h)).collect();
                let sinks = self.sinks_of(h);
                let only: Vec<f64> = scores.iter().map(|s| s.0).collect();
                // Not by lse, which is a rounded number: what it lost of the sum would be a factor of every
                // probability.
                let Some((max, sum)) = Self::total(&only, sinks) else { continue };
                let d_o = &d_o[self.o_row(i, h)];
                let delta = dot(d_o, &out.o[self.o_row(i, h)]);
                // A score changes lse by its probability.
                let d_lse = d_lse.map_or(0.0, |d_lse| d_lse[i * self.heads + h]);
                for (i, sink) in sinks.iter().enumerate() {
                    g.dsinks[h * sinks.len() + i] += (sink - max).exp() / sum * (d_lse - delta);
                }
                for (&(j, _), (s, derivative)) in keys.iter().zip(scores) {
                    let (kj, vj) = (self.k_row(j, kv), self.v_row(j, kv));
                    let p = (s - max).exp() / sum;
                    let kept = self.kept(i, j, h);
                    let ds = p * (kept * dot(d_o, &self.v[vj.clone()]) - delta + d_lse) * derivative;
                    g.dv[vj].iter_mut().zip(d_o).for_each(|(x, y)| *x += kept * p * y);
                    let qi = self.q_row(i, h);
                    g.dq[qi.clone()].iter_mut().zip(&self.k[kj.clone()]).for_each(|(x, y)| *x += ds * y);
                    g.dk[kj].iter_mut().zip(&self.q[qi]).for_each(|(x, y)| *x += ds * y);
                }
            }
        }
        g
    }
}
