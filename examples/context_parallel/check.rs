// SPDX-License-Identifier: MIT OR Apache-2.0
//! Largest absolute errors, and their bounds.
//!
//! With `u` the unit roundoff of the element type, `a` that of the accumulator, `M` the largest magnitude and `R` the
//! RMS of a reference tensor:
//!
//! - o, dv: `2·u·M + (64 + e)·a·M`: one rounding of the result (at most `u·M`) and as much again for what was rounded
//!   before it, plus sums in the accumulator's type;
//! - dq, dk: the same plus `u·(M + R) + 2·u·S + (32 + e)·a·L`: the backward reads the rounded o, so
//!   `delta = rowsum(do ∘ o)` has an error of its own, which every key of a row multiplies.
//!   `S = scale·√value_dim·RMS(do)·RMS(o)·RMS(k or q)` is the usual size of what cancels in `ds = p·(do·v − delta)`. L
//!   is the same for the largest row and element: `L = scale·max(√Σ(do·o)²)·max|k|`, and `√group·max|q|` for dk. It
//!   matters where the gradient itself is nearly 0, as for a document of one token, whose ds is the rounding of two
//!   equal sums;
//! - lse, never rounded to the element type: `128·a·max(M, 1)`;
//! - dsinks, sums of `exp(sink − lse)·delta` over n rows: `128·a·max(M, 1) + e·a·M` plus
//!   `u·(M + R) + (2·u + (32 + e)·a)·√n·√value_dim·RMS(do)·RMS(o)`.
//!
//! `e·a` is the relative error of a probability, with `e = (2 + √head_dim)·max|lse|`. A probability is `exp(s − lse)`,
//! so its relative error is the absolute error of `s − lse`. Rounding s and lse to the accumulator's type is at most
//! `a·|s|` and `a·|lse|`; the head_dim roundings inside the dot product have random signs and each is at most `a·|s|`,
//! where all terms have one sign, so that they add up to about `√head_dim·a·|s|`. And |lse| may stand for |s|: with `s
//! = lse − t` the probability is `exp(−t)`, and `exp(−t)·|s|` is at most `|lse| + 1/2`. In f32 the term is as large as
//! the others once scores reach about 10.
//!
//! A bf16 wire rounds every partial gradient that travels once, by `2⁻⁸` of itself: `2·2⁻⁸·M` more for dq where the q
//! side circulates, for dk and dv where k and v do or a kv head is shared by ranks.
//!
//! An accumulator in bf16 would lose `2⁻⁸·M` in a single rounding: four times the bound of o and dv for f16, about
//! twice that of dq and dk, and hundreds of times for f32.

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
    let e = (2.0 + (p.head_dim() as f64).sqrt()) * max_of(&want.lse);
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
        let delta = u * (max + rms) + 2.0 * u * usual + (32.0 + e) * a * largest;
        let sums = 2.0 * u + (64.0 + e) * a;
        let bound = match name {
            "lse" => 128.0 * a * max.max(1.0),
            "dsinks" => 128.0 * a * max.max(1.0) + e * a * max + delta,
            "o" => sums * max,
            "dv" => (sums + wire_k) * max,
            "dk" => (sums + wire_k) * max + delta,
            _ => (sums + wire_q) * max + delta,
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

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use cpattn::{Batch, Layout, Mask, Mesh};
    use half::{bf16, f16};

    use super::*;
    use crate::{
        input::Random,
        team::{How, Team},
    };

    const HEADS: usize = 4;

    /// Documents of two tokens whose two scores are nearly equal and as large as 72, of dot products whose terms have
    /// one sign: the roundings of the scores decide the probabilities.
    fn large_scores<T: Element>(head_dim: usize) -> (Problem, Inputs<T>) {
        let documents = 100;
        let batch = Batch::from_lengths(&vec![2; documents]).unwrap();
        let problem = Problem::new(batch, HEADS, HEADS, head_dim, T::DTYPE).with_value_dim(32).with_mask(Mask::full());
        let mut random = Random::new(1);
        let (mut q, mut k) = (Vec::new(), Vec::new());
        for _ in 0..documents {
            let base: Vec<f64> = (0..head_dim).map(|_| random.normal()).collect();
            for _ in 0..2 * HEADS {
                q.extend(base.iter().map(|x| x + 0.02 * random.normal()).collect::<Vec<_>>());
                k.extend(base.iter().map(|x| x + 0.02 * random.normal()).collect::<Vec<_>>());
            }
        }
        let dot = |(q, k): (&[f64], &[f64])| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
        let largest = q.chunks(head_dim).zip(k.chunks(head_dim)).map(dot).fold(0.0, f64::max);
        let to = 72.0 / (largest * problem.score().scale);
        let of = |x: &[f64]| x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>();
        let q: Vec<f64> = q.iter().map(|x| x * to).collect();
        let mut signs = || (0..2 * documents * HEADS * 32).map(|_| random.normal().signum()).collect::<Vec<f64>>();
        let (v, d_o) = (signs(), signs());
        (problem, Inputs { q: of(&q), k: of(&k), v: of(&v), d_o: of(&d_o), sinks: None })
    }

    #[test]
    fn large_scores_keep_the_bounds() {
        fn of<T: Element>() {
            for (head_dim, ulysses, ring) in [(32, 1, 1), (128, 1, 1), (128, 2, 2)] {
                let (problem, inputs) = large_scores::<T>(head_dim);
                let mesh = Mesh::explicit(ulysses * ring, ulysses, ring).unwrap();
                let plan = Plan::new(&problem, mesh, Layout::Contiguous).unwrap();
                let want = reference(&problem, &inputs, || ());
                assert!(max_of(&want.lse) > 60.0);
                let team = Team::new(mesh.world(), Duration::from_secs(600)).unwrap();
                let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
                let inputs = Arc::new(inputs);
                let outcome = team.run(&plan, &inputs, &how).unwrap();
                for c in check(&plan, &inputs, &outcome.results[0], &want) {
                    assert!(c.passes(), "{}, head dim {head_dim}, {mesh}: {c:?}", T::DTYPE);
                }
            }
        }
        of::<f32>();
        of::<f64>();
    }

    /// The exact result, rounded once as an accumulator in bf16 would, is over every bound, scores as large as they may
    /// be.
    #[test]
    fn an_accumulator_in_bf16_is_over_the_bounds() {
        fn of<T: Element>() {
            let (problem, mut inputs) = large_scores::<T>(32);
            // Of signs alone, o is a sign or less than a half, where bf16 rounds less.
            let mut random = Random::new(2);
            for x in [&mut inputs.v, &mut inputs.d_o] {
                x.fill_with(|| T::from_f64(random.normal()));
            }
            let plan = Plan::new(&problem, Mesh::explicit(1, 1, 1).unwrap(), Layout::Contiguous).unwrap();
            let want = reference(&problem, &inputs, || ());
            let rounded = |x: &[f64]| x.iter().map(|&x| T::from_f64(bf16::from_f64(x).to_f64())).collect::<Vec<T>>();
            let got = Results {
                o: rounded(&want.o),
                lse: want.lse.iter().map(|&x| T::Acc::from_f64(bf16::from_f64(x).to_f64())).collect(),
                dq: rounded(&want.dq),
                dk: rounded(&want.dk),
                dv: rounded(&want.dv),
                dsinks: Vec::new(),
            };
            for c in check(&plan, &inputs, &got, &want) {
                // Keys that are nearly equal cancel in dq, where the error of delta in f16 is larger than that of bf16.
                assert!(!c.passes() || (T::DTYPE == Dtype::F16 && c.name == "dq"), "{}: {c:?}", T::DTYPE);
            }
        }
        of::<f32>();
        of::<f16>();
    }
}
