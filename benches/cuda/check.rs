// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention in f64 for single rows and keys: complete results of these sizes would take the host hours.
//!
//! A q row needs only the keys of its document. A key's gradient needs lse and delta of every query that reads it;
//! these are taken from the device, and are compared themselves for the sampled rows.

use crate::case::Case;
use crate::device::decode;

pub struct Inputs {
    pub q: Vec<u16>,
    pub k: Vec<u16>,
    pub v: Vec<u16>,
    pub d_o: Vec<u16>,
}

/// The results for one row of q.
pub struct Row {
    pub o: Vec<f64>,
    pub lse: f64,
    pub delta: f64,
    pub dq: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(a, b)| *a += factor * b);
}

pub fn scale(case: &Case) -> f64 {
    (case.head_dim as f64).sqrt().recip()
}

fn part(case: &Case, x: &[u16], heads: usize, dim: usize, token: usize, head: usize) -> Vec<f64> {
    x[(token * heads + head) * dim..][..dim].iter().map(|&bits| decode(case.dtype, bits)).collect()
}

impl Inputs {
    fn q(&self, case: &Case, token: usize, head: usize) -> Vec<f64> {
        part(case, &self.q, case.heads, case.head_dim, token, head)
    }

    fn k(&self, case: &Case, token: usize, head: usize) -> Vec<f64> {
        part(case, &self.k, case.kv_heads, case.head_dim, token, head)
    }

    fn v(&self, case: &Case, token: usize, head: usize) -> Vec<f64> {
        part(case, &self.v, case.kv_heads, case.value_dim, token, head)
    }

    fn d_o(&self, case: &Case, token: usize, head: usize) -> Vec<f64> {
        part(case, &self.d_o, case.heads, case.value_dim, token, head)
    }

    /// o, lse, delta and dq of one row; without a gradient of o the last two are 0.
    pub fn row(&self, case: &Case, token: usize, head: usize) -> Row {
        let (first, len) = case.document_of(token);
        let end = if case.causal { token + 1 } else { first + len };
        let kv = head / (case.heads / case.kv_heads);
        let q = self.q(case, token, head);
        let scores: Vec<f64> = (first..end).map(|j| scale(case) * dot(&q, &self.k(case, j, kv))).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        let mut o = vec![0.0; case.value_dim];
        for (j, s) in (first..end).zip(&scores) {
            add(&mut o, (s - lse).exp(), &self.v(case, j, kv));
        }
        let mut row = Row { delta: 0.0, dq: vec![0.0; case.head_dim], o, lse };
        if !self.d_o.is_empty() {
            let d_o = self.d_o(case, token, head);
            row.delta = dot(&d_o, &row.o);
            for (j, s) in (first..end).zip(&scores) {
                let ds = (s - lse).exp() * (dot(&d_o, &self.v(case, j, kv)) - row.delta);
                add(&mut row.dq, scale(case) * ds, &self.k(case, j, kv));
            }
        }
        row
    }

    /// dk and dv of one key, given `[tokens, heads]` of lse and delta.
    pub fn key(&self, case: &Case, token: usize, kv: usize, lse: &[f32], delta: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let (first, len) = case.document_of(token);
        let start = if case.causal { token } else { first };
        let group = case.heads / case.kv_heads;
        let (k, v) = (self.k(case, token, kv), self.v(case, token, kv));
        let (mut dk, mut dv) = (vec![0.0; case.head_dim], vec![0.0; case.value_dim]);
        for i in start..first + len {
            for head in kv * group..(kv + 1) * group {
                let (q, d_o) = (self.q(case, i, head), self.d_o(case, i, head));
                let at = i * case.heads + head;
                let p = (scale(case) * dot(&q, &k) - f64::from(lse[at])).exp();
                add(&mut dv, p, &d_o);
                add(&mut dk, scale(case) * p * (dot(&d_o, &v) - f64::from(delta[at])), &q);
            }
        }
        (dk, dv)
    }
}

/// A relative error over all samples of one result.
pub struct Error {
    pub name: &'static str,
    /// The largest error allowed.
    pub limit: f64,
    difference: f64,
    size: f64,
}

impl Error {
    pub fn new(name: &'static str, limit: f64) -> Self {
        Self { name, limit, difference: 0.0, size: 0.0 }
    }

    pub fn add(&mut self, found: impl IntoIterator<Item = f64>, expected: &[f64]) {
        for (found, expected) in found.into_iter().zip(expected) {
            self.difference += (found - expected).powi(2);
            self.size += expected.powi(2);
        }
    }

    /// The error divided by the limit; above 1, or NaN, is wrong.
    pub fn part(&self) -> f64 {
        (self.difference / self.size.max(f64::MIN_POSITIVE)).sqrt() / self.limit
    }
}
