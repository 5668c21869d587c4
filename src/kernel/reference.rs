// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention in f64 by its definition: the reference of all tests.
//!
//! It is slow on purpose: one loop over rows, one over keys, one over dims; no tiles, no ranges, no partial results;
//! the maximum is subtracted only to keep exp finite. Keep it obviously correct: do not add optimisations.

use crate::call::Score;
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
    /// ALiBi slopes, one per q head.
    pub alibi_slopes: Option<&'a [f64]>,
    /// Sinks, one per q head: finite, or −∞ for none. A sink of +∞ makes the results of its head NaN.
    pub sinks: Option<&'a [f64]>,
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

    /// Calls `row(q token, q position, first k token, k tokens)` for each q token.
    fn rows(&self, mut row: impl FnMut(usize, i64, usize, usize)) {
        for document in 0..self.cu_seqlens_q.len() - 1 {
            let first = self.cu_seqlens_k[document] as usize;
            let keys = self.cu_seqlens_k[document + 1] as usize - first;
            let tokens = self.cu_seqlens_q[document] as usize..self.cu_seqlens_q[document + 1] as usize;
            for (i, token) in tokens.enumerate() {
                row(token, self.q_start[document] + i as i64, first, keys);
            }
        }
    }

    /// The score of q token `i` (at position `pos`) with the `j`-th key of its document, or `None` when masked; and
    /// its derivative by `q·k`.
    fn score(&self, i: usize, pos: i64, first: usize, j: usize, head: usize) -> Option<(f64, f64)> {
        if !self.score.allows(pos, j as i64) {
            return None;
        }
        let kv = head / (self.heads / self.kv_heads);
        let mut s = self.score.scale * dot(&self.q[self.q_row(i, head)], &self.k[self.k_row(first + j, kv)]);
        let mut derivative = self.score.scale;
        if self.score.softcap != 0.0 {
            let t = (s / self.score.softcap).tanh();
            s = self.score.softcap * t;
            derivative *= 1.0 - t * t;
        }
        if let Some(alibi_slopes) = self.alibi_slopes {
            s -= alibi_slopes[head] * (pos - j as i64).abs() as f64;
        }
        Some((s, derivative))
    }

    /// o and lse of every row.
    pub fn forward(&self) -> Output {
        let tokens = self.q.len() / (self.heads * self.head_dim).max(1);
        let mut o = vec![0.0; tokens * self.heads * self.value_dim];
        let mut lse = vec![f64::NEG_INFINITY; tokens * self.heads];
        self.rows(|i, pos, first, keys| {
            for h in 0..self.heads {
                let kv = h / (self.heads / self.kv_heads);
                let scores: Vec<_> = (0..keys).map(|j| self.score(i, pos, first, j, h)).collect();
                let sink = self.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
                // NaN if one of them is, which `f64::max` would leave out.
                let larger = |m: f64, s: f64| if m.is_nan() || s <= m { m } else { s };
                let max = scores.iter().flatten().fold(sink, |m, s| larger(m, s.0));
                if max == f64::NEG_INFINITY {
                    continue;
                }
                let sum = (sink - max).exp() + scores.iter().flatten().map(|s| (s.0 - max).exp()).sum::<f64>();
                lse[i * self.heads + h] = max + sum.ln();
                for (j, s) in scores.iter().enumerate() {
                    if let Some((s, _)) = s {
                        let p = (s - max).exp() / sum;
                        let v = &self.v[self.v_row(first + j, kv)];
                        o[self.o_row(i, h)].iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
                    }
                }
            }
        });
        Output { o, lse }
    }

    /// Gradients of q, k, v and the sinks, for `d_o` of o's shape and the result of [`Attention::forward`].
    pub fn backward(&self, d_o: &[f64], out: &Output) -> Gradient {
        let mut g = Gradient {
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
            dsinks: vec![0.0; self.sinks.map_or(0, <[f64]>::len)],
        };
        self.rows(|i, pos, first, keys| {
            for h in 0..self.heads {
                let kv = h / (self.heads / self.kv_heads);
                let lse = out.lse[i * self.heads + h];
                if lse == f64::NEG_INFINITY {
                    continue;
                }
                let d_o = &d_o[self.o_row(i, h)];
                let delta = dot(d_o, &out.o[self.o_row(i, h)]);
                if let Some(sinks) = self.sinks {
                    g.dsinks[h] -= (sinks[h] - lse).exp() * delta;
                }
                for j in 0..keys {
                    let Some((s, derivative)) = self.score(i, pos, first, j, h) else { continue };
                    let (kj, vj) = (self.k_row(first + j, kv), self.v_row(first + j, kv));
                    let p = (s - lse).exp();
                    let ds = p * (dot(d_o, &self.v[vj.clone()]) - delta) * derivative;
                    g.dv[vj].iter_mut().zip(d_o).for_each(|(x, y)| *x += p * y);
                    let qi = self.q_row(i, h);
                    g.dq[qi.clone()].iter_mut().zip(&self.k[kj.clone()]).for_each(|(x, y)| *x += ds * y);
                    g.dk[kj].iter_mut().zip(&self.q[qi]).for_each(|(x, y)| *x += ds * y);
                }
            }
        });
        g
    }
}
