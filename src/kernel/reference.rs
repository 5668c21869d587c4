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

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers between −1 and 1 that look random.
    fn numbers(n: usize, seed: u64) -> Vec<f64> {
        let mut draw = fastrand::Rng::with_seed(seed);
        (0..n).map(|_| 2.0 * draw.f64() - 1.0).collect()
    }

    #[test]
    fn one_row_by_hand() {
        let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX };
        let a = Attention {
            q: &[1.0],
            k: &[0.0, 2f64.ln()],
            v: &[3.0, 6.0],
            cu_seqlens_q: &[0, 1],
            cu_seqlens_k: &[0, 2],
            q_start: &[1],
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            value_dim: 1,
            score,
            alibi_slopes: None,
            sinks: None,
        };
        // Weights 1 and 2 of 3.
        let out = a.forward();
        assert!((out.o[0] - 5.0).abs() < 1e-14 && (out.lse[0] - 3f64.ln()).abs() < 1e-14);
        // A sink of ln 3 takes half of it.
        let sinks = [3f64.ln()];
        let out = Attention { sinks: Some(&sinks), ..a }.forward();
        assert!((out.o[0] - 2.5).abs() < 1e-14 && (out.lse[0] - 6f64.ln()).abs() < 1e-14);
        // A slope of ln 2 halves the key that is one position away: weights 1/2 and 2.
        let alibi_slopes = [2f64.ln()];
        let out = Attention { alibi_slopes: Some(&alibi_slopes), ..a }.forward();
        assert!((out.o[0] - (0.5 * 3.0 + 2.0 * 6.0) / 2.5).abs() < 1e-14);
        // One of +∞ leaves no number.
        let sinks = [f64::INFINITY];
        let out = Attention { sinks: Some(&sinks), ..a }.forward();
        assert!(out.o[0].is_nan() && out.lse[0].is_nan());
        // Nothing in the window.
        let none = Score { window_left: -1, ..score };
        let out = Attention { score: Score { window_right: -1, ..none }, ..a }.forward();
        assert_eq!((out.o[0], out.lse[0]), (0.0, f64::NEG_INFINITY));
        // A NaN in q or in k is one in the results.
        for (q, k) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
            let out = Attention { q: &[q], k: &[0.0, k], ..a }.forward();
            assert!(out.o[0].is_nan() && out.lse[0].is_nan());
        }
    }

    /// Backward against central differences of `Σ do · o`, with every option at once and each alone.
    #[test]
    fn backward_is_the_derivative_of_forward() {
        let (heads, kv_heads, d, dv) = (4, 2, 3, 2);
        let (cq, ck, start) = ([0, 3, 3, 8], [0, 4, 6, 10], [1i64, 0, -1]);
        let (tq, tk) = (8, 10);
        let (q, k) = (numbers(tq * heads * d, 1), numbers(tk * kv_heads * d, 2));
        let (v, d_o) = (numbers(tk * kv_heads * dv, 3), numbers(tq * heads * dv, 4));
        let (alibi_slopes, sinks) = ([0.5, 0.25, 0.125, 0.0625], [0.3, -1.0, f64::NEG_INFINITY, 2.0]);
        for options in 0..8 {
            for (left, right) in [(i64::MAX, i64::MAX), (i64::MAX, 0), (2, 1)] {
                let softcap = if options & 1 == 0 { 0.0 } else { 0.8 };
                let score = Score { scale: 0.9, softcap, window_left: left, window_right: right };
                let loss = |q: &[f64], k: &[f64], v: &[f64], sinks: &[f64]| {
                    let a = Attention {
                        q,
                        k,
                        v,
                        cu_seqlens_q: &cq,
                        cu_seqlens_k: &ck,
                        q_start: &start,
                        heads,
                        kv_heads,
                        head_dim: d,
                        value_dim: dv,
                        score,
                        alibi_slopes: (options & 2 != 0).then_some(&alibi_slopes),
                        sinks: (options & 4 != 0).then_some(sinks),
                    };
                    let out = a.forward();
                    (dot(&out.o, &d_o), a.backward(&d_o, &out))
                };
                let g = loss(&q, &k, &v, &sinks).1;
                let check = |x: &[f64], gradient: &[f64], f: &dyn Fn(&[f64]) -> f64| {
                    for (i, expected) in gradient.iter().enumerate() {
                        if x[i] == f64::NEG_INFINITY {
                            assert_eq!(*expected, 0.0);
                            continue;
                        }
                        let h = 1e-5;
                        let (mut up, mut down) = (x.to_vec(), x.to_vec());
                        up[i] += h;
                        down[i] -= h;
                        let slope = (f(&up) - f(&down)) / (2.0 * h);
                        assert!((slope - expected).abs() < 1e-8, "{options} {i}: {slope} {expected}");
                    }
                };
                check(&q, &g.dq, &|x| loss(x, &k, &v, &sinks).0);
                check(&k, &g.dk, &|x| loss(&q, x, &v, &sinks).0);
                check(&v, &g.dv, &|x| loss(&q, &k, x, &sinks).0);
                check(&sinks, &g.dsinks, &|x| loss(&q, &k, &v, x).0);
            }
        }
    }
}
