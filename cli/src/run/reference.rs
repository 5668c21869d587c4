// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reference: the crate's f64 attention on the very values of a run, a document and a kv head at a time.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use cpattn::{Element, Problem, Side, kernel::reference::Attention};

use super::team::{Inputs, Results};

/// How many parts [`reference`] computes.
pub fn reference_parts(p: &Problem) -> usize {
    p.batch().documents() * p.kv_heads()
}

/// The crate's f64 reference on the very values of `inputs`: a document and a kv head at a time, on all cores.
pub fn reference<T: Element>(p: &Problem, inputs: &Inputs<T>, tick: impl Fn() + Sync) -> Results<f64> {
    let (nq, nk) = (p.batch().tokens(Side::Q), p.batch().tokens(Side::K));
    let (h, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let whole = Mutex::new(Results::<f64> {
        o: vec![0.0; nq * h * dv],
        lse: vec![f64::NEG_INFINITY; nq * h],
        dq: vec![0.0; nq * h * d],
        dk: vec![0.0; nk * hk * d],
        dv: vec![0.0; nk * hk * dv],
        dsinks: vec![0.0; if p.sinks() { h } else { 0 }],
    });
    each_part(p, |document, kv| {
        one_part(p, inputs, document, kv, &whole);
        tick();
    });
    whole.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work(document, kv head)` for each part of [`reference`], on all cores.
fn each_part(p: &Problem, work: impl Fn(usize, usize) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= reference_parts(p) {
                return;
            }
            work(i / p.kv_heads(), i % p.kv_heads());
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
}

/// `max(|lse|·ρ)` over the rows and heads of a problem (see [`super::check`]).
pub fn mixed_scores<T: Element>(p: &Problem, inputs: &Inputs<T>) -> f64 {
    let (largest, dv) = (Mutex::new(0.0f64), p.value_dim());
    each_part(p, |document, kv| {
        let mut part = Part::new(p, inputs, document, kv);
        // Beside each value its square: their means give the variance.
        part.v = part.v.chunks(dv).flat_map(|v| v.iter().copied().chain(v.iter().map(|x| x * x))).collect();
        let out = Attention { value_dim: 2 * dv, sinks: None, ..part.attention(p) }.forward();
        let rho = |o: &[f64]| {
            let (mean, squares) = (o[..dv].iter().map(|x| x * x).sum::<f64>(), o[dv..].iter().sum::<f64>());
            if squares > 0.0 { (1.0 - mean / squares).max(0.0).sqrt() } else { 0.0 }
        };
        let rows = out.lse.iter().zip(out.o.chunks(2 * dv)).filter(|(lse, _)| lse.is_finite());
        let found = rows.map(|(lse, o)| lse.abs() * rho(o)).fold(0.0, f64::max);
        let mut largest = largest.lock().unwrap_or_else(PoisonError::into_inner);
        *largest = largest.max(found);
    });
    largest.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// `count` of `heads` heads from `first` on, of rows `rows`.
fn cut<T: Element>(
    all: &[T],
    rows: &std::ops::Range<usize>,
    heads: usize,
    dim: usize,
    first: usize,
    count: usize,
) -> Vec<f64> {
    rows.clone()
        .flat_map(|t| &all[(t * heads + first) * dim..(t * heads + first + count) * dim])
        .map(|x| x.to_f64())
        .collect()
}

/// The inverse of [`cut`].
fn paste(
    into: &mut [f64],
    part: &[f64],
    rows: &std::ops::Range<usize>,
    heads: usize,
    dim: usize,
    first: usize,
    count: usize,
) {
    for (t, row) in rows.clone().zip(part.chunks(count * dim)) {
        into[(t * heads + first) * dim..(t * heads + first + count) * dim].copy_from_slice(row);
    }
}

/// The inputs of a document and a kv head, in f64.
struct Part {
    rows: [std::ops::Range<usize>; 2],
    cu_seqlens: [[i32; 2]; 2],
    q_start: [i64; 1],
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    slopes: Option<Vec<f64>>,
    sinks: Option<Vec<f64>>,
}

impl Part {
    fn new<T: Element>(p: &Problem, inputs: &Inputs<T>, document: usize, kv: usize) -> Self {
        let (group, first) = (p.group(), kv * p.group());
        let [rq, rk] = [Side::Q, Side::K].map(|side| p.batch().document(side, document));
        let per_head = |all: &[f32]| all[first..first + group].iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        Self {
            cu_seqlens: [[0, rq.len() as i32], [0, rk.len() as i32]],
            q_start: [p.batch().start(Side::Q, document)],
            q: cut(&inputs.q, &rq, p.heads(), p.head_dim(), first, group),
            k: cut(&inputs.k, &rk, p.kv_heads(), p.head_dim(), kv, 1),
            v: cut(&inputs.v, &rk, p.kv_heads(), p.value_dim(), kv, 1),
            slopes: p.alibi_slopes().map(|all| {
                let row = if p.alibi_rows() == 1 { 0 } else { document };
                per_head(&all[row * p.heads()..][..p.heads()])
            }),
            sinks: inputs.sinks.as_deref().map(per_head),
            rows: [rq, rk],
        }
    }

    fn attention(&self, p: &Problem) -> Attention<'_> {
        Attention {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens_q: &self.cu_seqlens[0],
            cu_seqlens_k: &self.cu_seqlens[1],
            q_start: &self.q_start,
            heads: p.group(),
            kv_heads: 1,
            head_dim: p.head_dim(),
            value_dim: p.value_dim(),
            score: p.score(),
            alibi_slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            dropout: None,
        }
    }
}

fn one_part<T: Element>(p: &Problem, inputs: &Inputs<T>, document: usize, kv: usize, whole: &Mutex<Results<f64>>) {
    let (h, hk, d, dv, group) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim(), p.group());
    let (part, first) = (Part::new(p, inputs, document, kv), kv * group);
    let ([rq, rk], attention) = (&part.rows, part.attention(p));
    let d_o = cut(&inputs.d_o, rq, h, dv, first, group);
    let out = attention.forward();
    let g = attention.backward(&d_o, &out);
    let mut whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
    let whole = &mut *whole;
    paste(&mut whole.o, &out.o, rq, h, dv, first, group);
    paste(&mut whole.lse, &out.lse, rq, h, 1, first, group);
    paste(&mut whole.dq, &g.dq, rq, h, d, first, group);
    paste(&mut whole.dk, &g.dk, rk, hk, d, kv, 1);
    paste(&mut whole.dv, &g.dv, rk, hk, dv, kv, 1);
    for (sum, x) in whole.dsinks.iter_mut().skip(first).zip(&g.dsinks) {
        *sum += x;
    }
}
