// SPDX-License-Identifier: MIT OR Apache-2.0
//! Largest absolute errors, and their bounds.
//!
//! With `u` the unit roundoff of the element type, `a` that of the accumulator, `M` the largest magnitude and `R` the
//! RMS of a reference tensor:
//!
//! - o: `2·u·M + (64 + m)·a·M`; dv: `2·u·M + (64 + e)·a·M`: one rounding of the result (at most `u·M`) and as much
//!   again for what was rounded before it, plus sums in the accumulator's type;
//! - dq, dk: as o, plus `u·(M + R) + 2·u·S + (32 + m)·a·L`: the backward reads the rounded o, so
//!   `delta = rowsum(do ∘ o)` has an error of its own, which every key of a row multiplies.
//!   `S = scale·√value_dim·RMS(do)·RMS(o)·RMS(k or q)` is the usual size of what cancels in `ds = p·(do·v − delta)`. L
//!   is the same for the largest row and element: `L = scale·max(√Σ(do·o)²)·max|k|`, and `√group·max|q|` for dk. It
//!   matters where the gradient itself is nearly 0, as for a document of one token, whose ds is the rounding of two
//!   equal sums;
//! - lse, never rounded to the element type: `128·a·max(M, 1)`;
//! - dsinks, sums of `exp(sink − lse)·delta` over n rows: `128·a·max(M, 1) + e·a·M` plus
//!   `u·(M + R) + (2·u + (32 + m)·a)·√n·√value_dim·RMS(do)·RMS(o)`.
//!
//! `e·a` is the relative error of a probability, with `e = (2 + √head_dim)·max|lse|`. A probability is `exp(s − lse)`,
//! so its relative error is the absolute error of `s − lse`. Rounding s and lse to the accumulator's type is at most
//! `a·|s|` and `a·|lse|`; the head_dim roundings inside the dot product have random signs and each is at most `a·|s|`,
//! where all terms have one sign, so that they add up to about `√head_dim·a·|s|`. And |lse| may stand for |s|: with `s
//! = lse − t` the probability is `exp(−t)`, and `exp(−t)·|s|` is at most `|lse| + 1/2`. In f32 the term is as large as
//! the others once scores reach about 10.
//!
//! `m` is the same for rows that mix values: `m = (2 + √head_dim)·max(|lse|·ρ)`, where `ρ²` is the part of the values'
//! square that a row's mean does not explain, `1 − |o|² / Σ p·|v|²`. If one key has all the weight, o is its value
//! whatever the error of its probability, and `ds = p·(do·v − delta)` is 0: ρ is 0. Activations have such rows, with
//! the largest |lse| of all. dv has the error of every probability.
//!
//! A result of several ranks must also be as close as twice the error of one rank, plus a few roundings of the largest
//! element: `2·E + (u + 4·a)·M`, with 32 roundings of the accumulator for lse and dsinks. That is far below
//! the bounds above where they cover the largest row of all. dsinks also has `2·u·P`, with `P = √Σ(p·do·o)²` of the
//! head where it is largest and `p = exp(sink − lse)`: about five times the usual error that the rounding of o makes
//! of a head's dsinks, since the error of one rank is one draw of it.
//!
//! A bf16 wire rounds every partial gradient that travels once, by `2⁻⁸` of itself: `2·2⁻⁸·M` more for dq where the q
//! side circulates, for dk and dv where k and v do or a kv head is shared by ranks.
//!
//! An accumulator in bf16 would lose `2⁻⁸·M` in a single rounding: four times the bound of o and dv for f16, about
//! twice that of dq and dk, and hundreds of times for f32.

use std::{sync::Arc, time::Duration};

use cpattn::{
    Dtype, Element, Layout, Mesh, Plan, Problem, Side,
    plan::Wire,
    schedule::{CirculatingSide, Direction},
};

use super::{
    reference::mixed_scores,
    team::{How, Inputs, Results, Team},
};

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

/// The largest `√Σ(exp(sink − lse)·do·o)²` of a head; 0 without sinks.
fn largest_sink_terms<T: Element>(p: &Problem, inputs: &Inputs<T>, want: &Results<f64>) -> f64 {
    let row = |i: usize, sink: f64| {
        let elements = i * p.value_dim()..(i + 1) * p.value_dim();
        let terms = inputs.d_o[elements.clone()].iter().zip(&want.o[elements]);
        (2.0 * (sink - want.lse[i])).exp() * terms.map(|(x, y)| (x.to_f64() * y).powi(2)).sum::<f64>()
    };
    let head = |(h, &sink): (usize, &f32)| {
        (h..want.lse.len()).step_by(p.heads()).map(|i| row(i, f64::from(sink))).sum::<f64>()
    };
    inputs.sinks.iter().flatten().enumerate().map(head).fold(0.0, f64::max).sqrt()
}

/// What the results of a problem are compared with.
pub struct Expected<'a> {
    want: &'a Results<f64>,
    /// `max(|lse|·ρ)`.
    mixed: f64,
    /// The errors of one rank.
    alone: Vec<Checked>,
}

impl<'a> Expected<'a> {
    /// The reference `want`, and the errors that one rank has against it.
    pub fn new<T: Element>(p: &Problem, inputs: &Arc<Inputs<T>>, want: &'a Results<f64>) -> Result<Self, String> {
        let mut expected = Self { want, mixed: mixed_scores(p, inputs), alone: Vec::new() };
        let one = Ok(Mesh { replicas: 1, ring: 1, ulysses: 1 }).and_then(|mesh| Plan::new(p, mesh, Layout::Contiguous));
        let one = one.map_err(|e| e.to_string())?;
        let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
        let outcome = Team::new(1, Duration::from_secs(600))?.run(&one, inputs, &how)?;
        expected.alone = check(&one, inputs, &outcome.results[0], &expected);
        Ok(expected)
    }
}

/// Every result against its reference: o, lse, dq, dk, dv, and dsinks when there are sinks.
pub fn check<T: Element>(plan: &Plan, inputs: &Inputs<T>, got: &Results<T>, expected: &Expected) -> Vec<Checked> {
    let (p, want) = (plan.problem(), expected.want);
    let (u, a) = (T::DTYPE.unit_roundoff(), T::Acc::DTYPE.unit_roundoff());
    let ring = |side| plan.mesh().ring > 1 && plan.circulates(Direction::Backward) == side;
    let wire = |travels: bool| {
        if travels && plan.options().wire == Wire::Bf16 { 2.0 * Dtype::Bf16.unit_roundoff() } else { 0.0 }
    };
    let (wire_q, wire_k) =
        (wire(ring(CirculatingSide::Queries)), wire(ring(CirculatingSide::Keys) || plan.shares_kv_heads()));
    let terms = (p.value_dim() as f64).sqrt() * rms_of(&inputs.d_o) * rms_of(&want.o);
    let largest_terms = largest_row(&inputs.d_o, &want.o, p.value_dim());
    let scale = p.score().scale.abs();
    let roundings = 2.0 + (p.head_dim() as f64).sqrt();
    let (e, m) = (roundings * max_of(&want.lse), roundings * expected.mixed);
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
        let delta = u * (max + rms) + 2.0 * u * usual + (32.0 + m) * a * largest;
        let sums = 2.0 * u + (64.0 + m) * a;
        let bound = match name {
            "lse" => 128.0 * a * max.max(1.0),
            "dsinks" => 128.0 * a * max.max(1.0) + e * a * max + delta,
            "o" => sums * max,
            "dv" => (2.0 * u + (64.0 + e) * a + wire_k) * max,
            "dk" => (sums + wire_k) * max + delta,
            _ => (sums + wire_q) * max + delta,
        };
        let alone = expected.alone.iter().find(|c| c.name == name).filter(|_| plan.mesh().group() > 1);
        let bound = alone.map_or(bound, |alone| {
            let more = match name {
                "lse" => 32.0 * a * max.max(1.0),
                "dsinks" => 32.0 * a * max.max(1.0) + 2.0 * u * largest_sink_terms(p, inputs, expected.want),
                "dq" => (u + 4.0 * a + wire_q) * max,
                "dk" | "dv" => (u + 4.0 * a + wire_k) * max,
                _ => (u + 4.0 * a) * max,
            };
            bound.min(2.0 * alone.error + more)
        });
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

#[cfg(test)]
mod tests {
    use cpattn::{Batch, Mask};
    use half::{bf16, f16};

    use super::*;
    use crate::run::{input::Random, reference::reference};

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
                let mesh = Mesh { replicas: 1, ring, ulysses };
                let plan = Plan::new(&problem, mesh, Layout::Contiguous).unwrap();
                let want = reference(&problem, &inputs, || ());
                assert!(max_of(&want.lse) > 60.0);
                let team = Team::new(mesh.world(), Duration::from_secs(600)).unwrap();
                let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
                let inputs = Arc::new(inputs);
                let outcome = team.run(&plan, &inputs, &how).unwrap();
                let expected = Expected::new(&problem, &inputs, &want).unwrap();
                for c in check(&plan, &inputs, &outcome.results[0], &expected) {
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
            let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 1, ulysses: 1 }, Layout::Contiguous).unwrap();
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
            let inputs = Arc::new(inputs);
            for c in check(&plan, &inputs, &got, &Expected::new(&problem, &inputs, &want).unwrap()) {
                // Keys that are nearly equal cancel in dq, where the error of delta in f16 is larger than that of bf16.
                assert!(!c.passes() || (T::DTYPE == Dtype::F16 && c.name == "dq"), "{}: {c:?}", T::DTYPE);
            }
        }
        of::<f32>();
        of::<f16>();
    }

    /// Where a row of one key has by far the largest score, its |lse| widens no bound but that of dv; and a result of
    /// several ranks with three times the error of one rank is over its bound, in every tensor.
    #[test]
    fn bounds_bite_where_lse_is_large() {
        let batch = Batch::from_lengths(&[24, 40]).unwrap();
        let problem = Problem::new(batch, HEADS, HEADS, 16, Dtype::F32).with_mask(Mask::causal());
        let mut random = Random::new(3);
        let mut draw = |n: usize| (0..n).map(|_| random.normal() as f32).collect::<Vec<f32>>();
        let n = 64 * HEADS * 16;
        let mut inputs = Inputs { q: draw(n), k: draw(n), v: draw(n), d_o: draw(n), sinks: None };
        // The first token of each document attends to itself alone, with a score of about 400.
        for row in [0, 24] {
            let at = row * HEADS * 16..(row + 1) * HEADS * 16;
            inputs.q[at.clone()].fill(10.0);
            inputs.k[at].fill(10.0);
        }
        let (inputs, want) = (Arc::new(inputs.clone()), reference(&problem, &inputs, || ()));
        let expected = Expected::new(&problem, &inputs, &want).unwrap();
        assert!(max_of(&want.lse) > 300.0 && expected.mixed < 60.0, "{}", expected.mixed);
        let mesh = Mesh { replicas: 1, ring: 2, ulysses: 2 };
        let plan = Plan::new(&problem, mesh, Layout::Zigzag).unwrap();
        let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
        let team = Team::new(4, Duration::from_secs(600)).unwrap();
        let right = team.run(&plan, &inputs, &how).unwrap().results.remove(0);
        for c in check(&plan, &inputs, &right, &expected) {
            assert!(c.passes(), "{c:?}");
        }
        let wrong = |got: &[f32], want: &[f64], name: &str| {
            let alone = expected.alone.iter().find(|c| c.name == name).unwrap().error;
            let mut got = got.to_vec();
            let at = (0..want.len()).max_by(|&a, &b| want[a].abs().total_cmp(&want[b].abs())).unwrap();
            got[at] = (want[at] + 3.0 * alone + 6.0 * max_of(want) * Dtype::F32.unit_roundoff()) as f32;
            got
        };
        let wrong = Results {
            o: wrong(&right.o, &want.o, "o"),
            lse: right.lse.clone(),
            dq: wrong(&right.dq, &want.dq, "dq"),
            dk: wrong(&right.dk, &want.dk, "dk"),
            dv: wrong(&right.dv, &want.dv, "dv"),
            dsinks: Vec::new(),
        };
        for c in check(&plan, &inputs, &wrong, &expected) {
            assert!(c.name == "lse" || !c.passes(), "{c:?}");
        }
    }
}
