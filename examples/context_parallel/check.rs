// SPDX-License-Identifier: MIT OR Apache-2.0
//! Largest absolute errors, and their bounds.
//!
//! With `u` the unit roundoff of the element type, `a` that of the accumulator, `M` the largest magnitude and `R` the
//! RMS of a reference tensor:
//!
//! - o, dv: `2·u·M + 64·a·M`: one rounding of the result (at most `u·M`) and as much again for what was rounded before
//!   it, plus sums in the accumulator's type;
//! - dq, dk: the same plus `u·(M + R) + 2·u·S + 32·a·L`: the backward reads the rounded o, so `delta = rowsum(do ∘ o)`
//!   has an error of its own, which every key of a row multiplies. `S = scale·√value_dim·RMS(do)·RMS(o)·RMS(k or q)` is the
//!   usual size of what cancels in `ds = p·(do·v − delta)`. L is the same for the largest row and element:
//!   `L = scale·max(√Σ(do·o)²)·max|k|`, and `√group·max|q|` for dk. It matters where the gradient itself is nearly 0, as
//!   for a document of one token, whose ds is the rounding of two equal sums;
//! - lse, never rounded to the element type: `128·a·max(M, 1)`;
//! - dsinks, sums of `exp(sink − lse)·delta` over n rows: the same plus `u·(M + R) + 2·(u + 16·a)·√n·√value_dim·RMS(do)·RMS(o)`.
//!
//! A bf16 wire rounds every partial gradient that travels once, by `2⁻⁸` of itself: `2·2⁻⁸·M` more for dq where the q side
//! circulates, for dk and dv where k and v do or a kv head is shared by ranks.
//!
//! An accumulator in bf16 would lose `2⁻⁸·M` in a single rounding: four times the bound of o and dv for f16, about twice
//! that of dq and dk, and hundreds of times for f32.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use cpattn::{
    Dtype, Element, Plan, Problem, Side, kernel::reference::Attention, plan::Wire, schedule::CirculatingSide,
};

use crate::team::{Inputs, Results};

/// One tensor's error.
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    pub name: &'static str,
    /// Largest absolute error; NaN if the result has one.
    pub error: f64,
    pub bound: f64,
    /// RMS and largest magnitude of the reference, infinities aside.
    pub rms: f64,
    pub max: f64,
}

impl Checked {
    pub fn passes(&self) -> bool {
        self.error <= self.bound
    }

    /// Error over bound; infinite for NaN. A bound of 0 (nothing to compare) is kept by an error of 0.
    pub fn ratio(&self) -> f64 {
        match (self.error, self.bound) {
            (0.0, _) => 0.0,
            (e, b) if e.is_nan() || b == 0.0 => f64::INFINITY,
            (e, b) => e / b,
        }
    }
}

/// Largest absolute difference. Equal infinities agree; NaN agrees with nothing.
fn largest_error<T: Element>(got: &[T], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "a result and its reference have one shape");
    got.iter().zip(want).fold(0.0, |worst: f64, (g, &w)| {
        let g = g.to_f64();
        let e = if g == w { 0.0 } else { (g - w).abs() };
        if worst.is_nan() || e.is_nan() { f64::NAN } else { worst.max(e) }
    })
}

/// RMS, infinities aside; 0 of nothing.
fn rms_of<T: Element>(x: &[T]) -> f64 {
    let squares = x.iter().map(|x| x.to_f64()).filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>();
    (squares / x.len().max(1) as f64).sqrt()
}

/// Largest magnitude, infinities aside; 0 of nothing.
fn max_of<T: Element>(x: &[T]) -> f64 {
    x.iter().map(|x| x.to_f64().abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// The largest `√Σ(x·y)²` of a row of `dim` elements, rows that are not finite aside.
fn largest_row<T: Element>(x: &[T], y: &[f64], dim: usize) -> f64 {
    let squares = |(x, y): (&[T], &[f64])| x.iter().zip(y).map(|(x, y)| (x.to_f64() * y).powi(2)).sum::<f64>();
    x.chunks(dim).zip(y.chunks(dim)).map(squares).filter(|s| s.is_finite()).fold(0.0, f64::max).sqrt()
}

/// Every result against its reference: o, lse, dq, dk, dv, and dsinks when there are sinks.
pub fn check<T: Element>(plan: &Plan, inputs: &Inputs<T>, got: &Results<T>, want: &Results<f64>) -> Vec<Checked> {
    let p = plan.problem();
    let (u, a) = (T::DTYPE.unit_roundoff(), T::Acc::DTYPE.unit_roundoff());
    let ring = |side| plan.mesh().ring > 1 && plan.backward_circulates() == side;
    let wire = |travels: bool| {
        if travels && plan.options().wire == Wire::Bf16 { 2.0 * Dtype::Bf16.unit_roundoff() } else { 0.0 }
    };
    let (wire_q, wire_k) =
        (wire(ring(CirculatingSide::Queries)), wire(ring(CirculatingSide::Keys) || plan.shares_kv_heads()));
    let terms = (p.value_dim() as f64).sqrt() * rms_of(&inputs.d_o) * rms_of(&want.o);
    let largest_terms = largest_row(&inputs.d_o, &want.o, p.value_dim());
    let scale = p.score().scale.abs();
    let of = |name: &'static str, error: f64, want: &[f64]| {
        let max = max_of(want);
        let rms = rms_of(want);
        let (usual, largest) = match name {
            "dq" => (scale * terms * rms_of(&inputs.k), scale * largest_terms * max_of(&inputs.k)),
            "dk" => {
                let group = (p.group() as f64).sqrt();
                (scale * terms * rms_of(&inputs.q), scale * largest_terms * group * max_of(&inputs.q))
            }
            _ => [(p.batch().tokens(Side::Q) as f64).sqrt() * terms; 2].into(),
        };
        let delta = u * (max + rms) + 2.0 * u * usual + 32.0 * a * largest;
        let bound = match name {
            "lse" => 128.0 * a * max.max(1.0),
            "dsinks" => 128.0 * a * max.max(1.0) + delta,
            "o" => (2.0 * u + 64.0 * a) * max,
            "dv" => (2.0 * u + 64.0 * a + wire_k) * max,
            "dk" => (2.0 * u + 64.0 * a + wire_k) * max + delta,
            _ => (2.0 * u + 64.0 * a + wire_q) * max + delta,
        };
        Checked { name, error, bound, rms, max }
    };
    let mut all = vec![
        of("o", largest_error(&got.o, &want.o), &want.o),
        of("lse", largest_error(&got.lse, &want.lse), &want.lse),
        of("dq", largest_error(&got.dq, &want.dq), &want.dq),
        of("dk", largest_error(&got.dk, &want.dk), &want.dk),
        of("dv", largest_error(&got.dv, &want.dv), &want.dv),
    ];
    if !want.dsinks.is_empty() {
        all.push(of("dsinks", largest_error(&got.dsinks, &want.dsinks), &want.dsinks));
    }
    all
}

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
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= reference_parts(p) {
                return;
            }
            one_part(p, inputs, i / hk, i % hk, &whole);
            tick();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    whole.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
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

fn one_part<T: Element>(p: &Problem, inputs: &Inputs<T>, document: usize, kv: usize, whole: &Mutex<Results<f64>>) {
    let (h, hk, d, dv, group) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim(), p.group());
    let (rq, rk) = (p.batch().document(Side::Q, document), p.batch().document(Side::K, document));
    let first = kv * group;
    let (q, k) = (cut(&inputs.q, &rq, h, d, first, group), cut(&inputs.k, &rk, hk, d, kv, 1));
    let (v, d_o) = (cut(&inputs.v, &rk, hk, dv, kv, 1), cut(&inputs.d_o, &rq, h, dv, first, group));
    let per_head = |all: &[f32]| all[first..first + group].iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (slopes, sinks) = (p.alibi_slopes().map(per_head), inputs.sinks.as_deref().map(per_head));
    let attention = Attention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens_q: &[0, rq.len() as i32],
        cu_seqlens_k: &[0, rk.len() as i32],
        q_start: &[p.batch().start(Side::Q, document)],
        heads: group,
        kv_heads: 1,
        head_dim: d,
        value_dim: dv,
        score: p.score(),
        alibi_slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
    };
    let out = attention.forward();
    let g = attention.backward(&d_o, &out);
    let mut whole = whole.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let whole = &mut *whole;
    paste(&mut whole.o, &out.o, &rq, h, dv, first, group);
    paste(&mut whole.lse, &out.lse, &rq, h, 1, first, group);
    paste(&mut whole.dq, &g.dq, &rq, h, d, first, group);
    paste(&mut whole.dk, &g.dk, &rk, hk, d, kv, 1);
    paste(&mut whole.dv, &g.dv, &rk, hk, dv, kv, 1);
    for (sum, x) in whole.dsinks.iter_mut().skip(first).zip(&g.dsinks) {
        *sum += x;
    }
}
