// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests of whole plans share: random problems' data, one run of a plan on threads, and the error rule.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod combined;
pub mod own;
pub mod plain_kernel;
pub mod through;

use std::{sync::Mutex, time::Duration};

use cpattn::{
    Backward, Element, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, Slice, View, ViewMut,
    call::DropoutMask,
    kernel::reference,
    runtime::{KeyIndices, Keys},
    transport::local,
};

/// Numbers that look random; a seed gives the same ones everywhere.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    pub fn uniform(&mut self) -> f64 {
        self.0.f64()
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

/// The whole batch's inputs.
#[derive(Clone)]
pub struct Data<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub d_o: Vec<T>,
    pub sinks: Option<Vec<f32>>,
    /// Gradient of lse, `[tokens, heads]`, exact in the accumulator's type. Rows that attend to nothing get NaN
    /// instead.
    pub d_lse: Option<Vec<f64>>,
    /// The seed of a problem with dropout.
    pub dropout_seed: Option<u64>,
    /// The keys that each q token attends to, if they are listed.
    pub key_indices: Option<Lists>,
}

/// Lists of keys of all q tokens of a batch, `[tokens, heads, entries]`.
#[derive(Clone, Debug)]
pub struct Lists {
    pub all: Vec<i32>,
    pub heads: usize,
    pub entries: usize,
}

impl<T: Element> Data<T> {
    /// With a gradient of lse if the seed is odd.
    pub fn random(p: &Problem, seed: u64) -> Self {
        let mut r = Random::new(seed);
        let (nq, nk) = (p.batch().tokens(Side::Q), p.batch().tokens(Side::K));
        let mut fill = |n: usize| (0..n).map(|_| T::from_f64(r.normal())).collect::<Vec<T>>();
        let q = fill(nq * p.heads() * p.head_dim());
        let k = fill(nk * p.kv_heads() * p.head_dim());
        let v = fill(nk * p.kv_heads() * p.value_dim());
        let d_o = fill(nq * p.heads() * p.value_dim());
        // Large and small sinks: a forgotten one must show.
        let sinks = p.sinks().then(|| (0..p.heads() * p.sinks_per_head()).map(|_| (3.0 * r.normal()) as f32).collect());
        let number = |_| <T::Acc as Element>::from_f64(r.normal()).to_f64();
        let d_lse = (seed % 2 == 1).then(|| (0..nq * p.heads()).map(number).collect());
        let dropout_seed = p.dropout().map(|_| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { q, k, v, d_o, sinks, d_lse, dropout_seed, key_indices: None }
    }
}

/// The whole batch's results, tokens in the order of the batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Results<T: Element> {
    pub o: Vec<T>,
    pub lse: Vec<T::Acc>,
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
    pub dsinks: Vec<T::Acc>,
    /// The largest over the ranks.
    pub max_logit: Vec<f32>,
    /// [`dsinks_of_o`], in the reference alone.
    pub dsinks_of_o: Vec<f64>,
}

impl<T: Element> Results<T> {
    /// Results that are NaN: a row that nothing writes must show.
    pub fn unwritten(p: &Problem) -> Self {
        let (nq, nk) = (p.batch().tokens(Side::Q), p.batch().tokens(Side::K));
        let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
        let nan = |n: usize| vec![T::from_f64(f64::NAN); n];
        let lse = vec![<T::Acc as Element>::from_f64(f64::NAN); nq * hq];
        let (dq, dk) = (nan(nq * hq * d), nan(nk * hk * d));
        let max_logit = vec![f32::NEG_INFINITY; hq];
        let (dsinks, dsinks_of_o) = (Vec::new(), Vec::new());
        Self { o: nan(nq * hq * dv), lse, dq, dk, dv: nan(nk * hk * dv), dsinks, max_logit, dsinks_of_o }
    }
}

/// The rows of a rank's tokens.
pub fn gather<T: Copy>(all: &[T], tokens: &[usize], row: usize) -> Vec<T> {
    tokens.iter().flat_map(|&t| all[t * row..(t + 1) * row].iter().copied()).collect()
}

/// Puts the rows of a rank's tokens in their places.
pub fn scatter<T: Copy>(all: &mut [T], part: &[T], tokens: &[usize], row: usize) {
    for (i, &t) in tokens.iter().enumerate() {
        all[t * row..(t + 1) * row].copy_from_slice(&part[i * row..(i + 1) * row]);
    }
}

/// Runs forward and backward on threads of this process, one for each rank.
pub fn run<T: Element>(plan: &Plan, data: &Data<T>) -> Result<Results<T>> {
    let world = plan.mesh().world();
    let ranks = local::group(world, Duration::from_secs(60))?.into_iter().map(Rank::new).collect();
    run_on(ranks, plan, data)
}

/// As [`run`], on ranks that exist.
pub fn run_on<T: Element>(ranks: Vec<Rank>, plan: &Plan, data: &Data<T>) -> Result<Results<T>> {
    run_with(ranks, plan, data, true)
}

/// As [`run_on`], with the largest scores or without; then those of the results are −∞.
pub fn run_with<T: Element>(ranks: Vec<Rank>, plan: &Plan, data: &Data<T>, max: bool) -> Result<Results<T>> {
    let p = plan.problem();
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    // Results start as NaN: a row that nothing writes must show.
    let nan = T::from_f64(f64::NAN);
    let acc_nan = <T::Acc as Element>::from_f64(f64::NAN);
    let all = Mutex::new(Results::unwritten(p));
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                let (plan, data, all) = (plan.clone(), &data, &all);
                scope.spawn(move || -> Result<()> {
                    let r = rank.rank();
                    let (tq, tk) = (plan.local_tokens(Side::Q, r).indices(), plan.local_tokens(Side::K, r).indices());
                    let q = gather(&data.q, &tq, hq * d);
                    let k = gather(&data.k, &tk, hk * d);
                    let v = gather(&data.v, &tk, hk * dv);
                    let d_o = gather(&data.d_o, &tq, hq * dv);
                    let mut o = vec![nan; tq.len() * hq * dv];
                    let mut lse = vec![acc_nan; tq.len() * hq];
                    let q = View::new(&q, tq.len(), hq, d)?;
                    let k = View::new(&k, tk.len(), hk, d)?;
                    let v = View::new(&v, tk.len(), hk, dv)?;
                    let sinks = data.sinks.as_deref();
                    // It is written, not raised.
                    let mut max_logit = vec![if max { f32::MAX } else { f32::NEG_INFINITY }; hq];
                    let lists = data.key_indices.as_ref();
                    let own = lists.map(|lists| gather(&lists.all, &tq, lists.heads * lists.entries));
                    let keys =
                        lists.zip(own.as_deref()).map_or(Keys::All, |(&Lists { heads, entries, .. }, indices)| {
                            Keys::Listed(KeyIndices { indices, heads, entries })
                        });
                    let tensors = Forward::<T>::new(
                        q,
                        k,
                        v,
                        ViewMut::new(&mut o, tq.len(), hq, dv)?,
                        ViewMut::head_major(&mut lse, tq.len(), hq)?,
                    )
                    .sinks(sinks)
                    .max_logit(max.then_some(max_logit.as_mut_slice()))
                    .dropout_seed(data.dropout_seed);
                    rank.forward(&plan, tensors.keys(keys))?;
                    let d_lse = data.d_lse.as_ref().map(|all| d_lse_of(all, &tq, &lse, hq));
                    let mut dq = vec![nan; tq.len() * hq * d];
                    let mut dk = vec![nan; tk.len() * hk * d];
                    let mut d_v = vec![nan; tk.len() * hk * dv];
                    let mut dsinks = vec![acc_nan; sinks.map_or(0, <[f32]>::len)];
                    let tensors = Backward::<T>::new(
                        q,
                        k,
                        v,
                        View::new(&o, tq.len(), hq, dv)?,
                        View::head_major(&lse, tq.len(), hq)?,
                        View::new(&d_o, tq.len(), hq, dv)?,
                        [
                            ViewMut::new(&mut dq, tq.len(), hq, d)?,
                            ViewMut::new(&mut dk, tk.len(), hk, d)?,
                            ViewMut::new(&mut d_v, tk.len(), hk, dv)?,
                        ],
                    )
                    .sinks(sinks)
                    .d_lse(d_lse.as_ref().map(|x| View::head_major(x, tq.len(), hq)).transpose()?)
                    .dropout_seed(data.dropout_seed)
                    .dsinks(sinks.map(|_| dsinks.as_mut_slice()));
                    rank.backward(&plan, tensors.keys(keys))?;
                    let mut all = all.lock().unwrap();
                    scatter(&mut all.o, &o, &tq, hq * dv);
                    let lse: Vec<_> = (0..tq.len() * hq).map(|i| lse[i % hq * tq.len() + i / hq]).collect();
                    scatter(&mut all.lse, &lse, &tq, hq);
                    all.max_logit.iter_mut().zip(&max_logit).for_each(|(all, &own)| *all = all.max(own));
                    scatter(&mut all.dq, &dq, &tq, hq * d);
                    scatter(&mut all.dk, &dk, &tk, hk * d);
                    scatter(&mut all.dv, &d_v, &tk, hk * dv);
                    if !all.dsinks.is_empty() && plan.mesh().replicas == 1 {
                        let same = |(a, b): (&T::Acc, &T::Acc)| a == b || a.to_f64().is_nan() && b.to_f64().is_nan();
                        assert!(all.dsinks.iter().zip(&dsinks).all(same), "dsinks differ between ranks");
                    }
                    all.dsinks = dsinks;
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    outcomes.into_iter().collect::<Result<()>>()?;
    Ok(all.into_inner().unwrap())
}

/// A rank's gradient of lse, `[heads, tokens]` as its `lse`: NaN where that is −∞, which must not be read.
pub fn d_lse_of<A: Element>(all: &[f64], tokens: &[usize], lse: &[A], heads: usize) -> Vec<A> {
    let at = |i: usize| all[tokens[i % tokens.len()] * heads + i / tokens.len()];
    let lost = |i: usize| lse[i].to_f64() == f64::NEG_INFINITY;
    (0..lse.len()).map(|i| A::from_f64(if lost(i) { f64::NAN } else { at(i) })).collect()
}

/// The problem with drawn ALiBi slopes: of each head, or of each document and head.
pub fn any_slopes(r: &mut Random, p: Problem) -> Problem {
    let drawn = |r: &mut Random, n: usize| (0..n).map(|_| r.uniform() as f32).collect::<Vec<_>>();
    match r.below(2) {
        0 => {
            let slopes = drawn(r, p.heads());
            p.with_alibi_slopes(&slopes)
        }
        _ => {
            let slopes = drawn(r, p.batch().documents() * p.heads());
            p.with_alibi_slopes_per_document(&slopes)
        }
    }
}

/// The f64 reference on the very values of `data`.
pub fn reference<T: Element>(p: &Problem, data: &Data<T>) -> Results<f64> {
    let wide = |v: &[T]| v.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
    let (q, k, v, d_o) = (wide(&data.q), wide(&data.k), wide(&data.v), wide(&data.d_o));
    let starts: Vec<i64> = (0..p.batch().documents()).map(|d| p.batch().start(Side::Q, d)).collect();
    let slopes: Option<Vec<f64>> = p.alibi_slopes().map(|s| s.iter().map(|&x| f64::from(x)).collect());
    let sinks: Option<Vec<f64>> = data.sinks.as_ref().map(|s| s.iter().map(|&x| f64::from(x)).collect());
    let attention = reference::Attention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens_q: p.batch().cu_seqlens(Side::Q),
        cu_seqlens_k: p.batch().cu_seqlens(Side::K),
        q_start: &starts,
        heads: p.heads(),
        kv_heads: p.kv_heads(),
        head_dim: p.head_dim(),
        value_dim: p.value_dim(),
        score: p.score(),
        alibi_slopes: slopes.as_deref(),
        sinks: sinks.as_deref(),
        dropout: p.dropout().zip(data.dropout_seed).map(|(p, seed)| DropoutMask::new(p, seed).unwrap()),
    };
    let slices = p.batch().slices().map_or_else(|| attention.documents(), <[Slice]>::to_vec);
    let out = attention.forward_of(&slices);
    let gradient = attention.backward_of(&slices, &d_o, data.d_lse.as_deref(), &out);
    let reference::Gradient { dq, dk, dv, dsinks } = gradient;
    let max_logit = attention.max_logit_of(&slices).iter().map(|&x| x as f32).collect();
    let dsinks_of_o = dsinks_of_o(p, data, &out.lse);
    Results { o: out.o, lse: out.lse, dq, dk, dv, dsinks, max_logit, dsinks_of_o }
}

/// For each sink, the RMS error of its gradient where each number of o has an RMS error of one: dsinks is a sum of
/// `p · (o · d_o)` over rows.
pub fn dsinks_of_o<T: Element>(p: &Problem, data: &Data<T>, lse: &[f64]) -> Vec<f64> {
    let square = |row: &[T]| row.iter().map(|x| x.to_f64().powi(2)).sum::<f64>();
    let squares: Vec<f64> = data.d_o.chunks(p.value_dim()).map(square).collect();
    let of_sink = |(i, &sink): (usize, &f32)| {
        let rows = (i / p.sinks_per_head()..lse.len()).step_by(p.heads());
        rows.map(|row| (2.0 * (f64::from(sink) - lse[row])).exp() * squares[row]).sum::<f64>().sqrt()
    };
    data.sinks.iter().flatten().enumerate().map(of_sink).collect()
}

pub fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut n) = (0.0, 0);
    for x in x {
        sum += x * x;
        n += 1;
    }
    (sum / f64::max(f64::from(n), 1.0)).sqrt()
}

/// RMS error; NaN if either side has a NaN. Two equal infinities agree.
pub fn error<T: Element>(got: &[T], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    rms(got.iter().zip(want).map(|(g, &w)| if g.to_f64() == w { 0.0 } else { g.to_f64() - w }))
}

/// The error rule: RMS error against f64 at most `1.1 × the one-rank error of the same kernel + 4·2⁻²⁴ ·
/// RMS(reference)` (more where large sinks are), lse within `1e-5`, and dsinks within `1.1 × the one-rank error +
/// 1e-5 · RMS(reference)` and four times what the one-rank error of o makes of it: a form whose o is rounded otherwise
/// may be off by more than one rank happens to be.
pub fn check<T: Element>(what: &str, got: &Results<T>, one: &Results<T>, want: &Results<f64>) {
    check_within(1.0, what, got, one, want);
}

/// The rule with its floor `slack` times as high: for drawn problems of few rows, where one row's cancellation is not
/// averaged away. Sixteen times is still a five-hundredth of what a bf16 accumulator would do.
pub fn check_within<T: Element>(slack: f64, what: &str, got: &Results<T>, one: &Results<T>, want: &Results<f64>) {
    // A sink scales o by exp(lse − lse'), and lse is kept in the accumulator's type: where a sink makes it large, its
    // rounding alone is a relative error of u · |lse|.
    let largest = want.lse.iter().filter(|l| l.is_finite()).fold(0.0, |m: f64, l| m.max(l.abs()));
    let sinks = if want.dsinks.is_empty() { 1.0 } else { (largest / 4.0).max(1.0) };
    let floor = slack * 4.0 * T::Acc::DTYPE.unit_roundoff() * sinks;
    // ds is a difference, do·v − delta, and nothing is left of it where a row sees one key; dsinks is a sum over rows
    // that may nearly cancel. There the terms round, which are of the size of o and dv.
    let terms = rms(want.o.iter().copied()) * rms(want.dv.iter().copied());
    let of_terms = |scale: f64| if scale < 1e-3 * terms { terms } else { scale };
    let of_sinks = |scale: f64| if slack > 1.0 { of_terms(scale) } else { scale };
    let rule = |name: &str, got: &[T], one: &[T], want: &[f64]| {
        let (e, e1, scale) = (error(got, want), error(one, want), rms(want.iter().copied()));
        let bound = 1.1 * e1 + floor * if name == "dq" || name == "dk" { of_terms(scale) } else { scale };
        assert!(e <= bound, "{what}: RMS error of {name} is {e:e}, bound {bound:e} (one rank {e1:e}, RMS {scale:e})");
    };
    rule("o", &got.o, &one.o, &want.o);
    rule("dq", &got.dq, &one.dq, &want.dq);
    rule("dk", &got.dk, &one.dk, &want.dk);
    rule("dv", &got.dv, &one.dv, &want.dv);
    for (i, (g, &w)) in got.lse.iter().zip(&want.lse).enumerate() {
        let g = g.to_f64();
        assert!(g == w || (g - w).abs() <= 1e-5 * w.abs().max(1.0), "{what}: lse[{i}] is {g}, expected {w}");
    }
    for (h, (&g, &w)) in got.max_logit.iter().zip(&want.max_logit).enumerate() {
        assert!(g == w || (g - w).abs() <= 2e-6 * w.abs().max(1.0), "{what}: max_logit[{h}] is {g}, expected {w}");
    }
    assert_eq!(got.dsinks.len(), want.dsinks.len());
    let scale = rms(want.dsinks.iter().copied());
    for (h, (g, &w)) in got.dsinks.iter().zip(&want.dsinks).enumerate() {
        let of_o = 4.0 * error(&one.o, &want.o) * want.dsinks_of_o[h];
        let bound = 1.1 * (one.dsinks[h].to_f64() - w).abs() + of_o + slack * 1e-5 * of_sinks(scale.max(w.abs()));
        assert!((g.to_f64() - w).abs() <= bound, "{what}: dsinks[{h}] is {g:?}, expected {w}, bound {bound:e}");
    }
}

/// One rank's results: the yardstick of the error rule.
pub fn one_rank<T: Element>(p: &Problem, data: &Data<T>) -> Results<T> {
    run(&Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap(), data).unwrap()
}

/// The rule for the CUDA kernels, whose f32 sums come in another order on one rank than on several; `slack` is for a
/// bf16 wire.
pub fn check_on_device<T: Element<Acc = f32>>(
    what: &str,
    got: &Results<T>,
    one: &Results<T>,
    want: &Results<f64>,
    slack: f64,
) {
    let rule = |name: &str, got: &[T], one: &[T], want: &[f64]| {
        let (e, e1, scale) = (error(got, want), error(one, want), rms(want.iter().copied()));
        let bound = 1.1 * e1 + (4.0 * f64::from(f32::EPSILON) + slack) * scale;
        assert!(e <= bound, "{what}: RMS error of {name} is {e:e}, bound {bound:e} (one rank {e1:e}, RMS {scale:e})");
        // One rank itself: rounded operands, f32 sums.
        assert!(
            e1 <= 4.0 * T::DTYPE.unit_roundoff() * scale,
            "{what}: one rank's error of {name} is {e1:e} of {scale:e}"
        );
    };
    rule("o", &got.o, &one.o, &want.o);
    rule("dq", &got.dq, &one.dq, &want.dq);
    rule("dk", &got.dk, &one.dk, &want.dk);
    rule("dv", &got.dv, &one.dv, &want.dv);
    for (i, (&g, &w)) in got.lse.iter().zip(&want.lse).enumerate() {
        assert!(f64::from(g) == w || (f64::from(g) - w).abs() <= 2e-5 * w.abs().max(1.0), "{what}: lse[{i}] {g} {w}");
    }
    for (h, (&g, &w)) in got.max_logit.iter().zip(&want.max_logit).enumerate() {
        let close = g == w || (g - w).abs() <= 5e-6 * w.abs().max(1.0);
        assert!(close, "{what}: max_logit[{h}] is {g}, expected {w}");
    }
    assert_eq!(got.dsinks.len(), want.dsinks.len());
    let scale = rms(want.dsinks.iter().copied());
    for (h, (&g, &w)) in got.dsinks.iter().zip(&want.dsinks).enumerate() {
        assert!(
            (f64::from(g) - w).abs() <= 4.0 * T::DTYPE.unit_roundoff() * scale.max(1.0),
            "{what}: dsinks[{h}] {g} {w}"
        );
    }
}
