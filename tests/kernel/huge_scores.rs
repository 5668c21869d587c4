// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scores so large that a float has no digits left below 1.
//!
//! Every product here is exact in every type and in every order of sums: all dims of a row are equal and powers of 2
//! times small integers, and so is the scale. Rows of q differ in size by dozens of powers of 2, so one vector of lanes
//! has usual rows beside huge ones; keys have few different scores, so that weights of huge rows are not all 0 or 1.
//! What is left to err is the softmax alone.

use crate::harness::*;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use cpattn::kernel::reference::{Attention, Output};
use cpattn::{Dtype, Element};
use half::{bf16, f16};

/// A problem of one head.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    keys: usize,
    dim: usize,
    /// Calls that the keys are dealt to.
    calls: usize,
    /// Position of the first row; keys begin at 0.
    start: i64,
    score: Score,
    slope: Option<f32>,
    sink: Option<f32>,
}

impl Shape {
    fn new(rows: usize, keys: usize, dim: usize, calls: usize) -> Self {
        let score = Score { scale: 0.25, ..score(dim, UNLIMITED, UNLIMITED) };
        Self { rows, keys, dim, calls, start: 0, score, slope: None, sink: None }
    }
}

struct Inputs<E> {
    of: Shape,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    d_o: Vec<E>,
}

/// Powers of 2 of rows of q: the first is that of usual scores, the last are as large as the type allows.
fn powers(dtype: Dtype) -> &'static [i32] {
    match dtype {
        Dtype::F16 => &[-14, -14, -8, 0, 5, 10, 12, 15],
        Dtype::F64 => &[-14, -14, -8, 0, 20, 34, 36, 38, 39, 40, 41, 42, 45, 50, 60, 300],
        _ => &[-14, -14, -8, 0, 5, 8, 10, 11, 12, 13, 15, 17, 20, 30, 60, 90],
    }
}

impl<E: Element> Inputs<E> {
    fn new(of: Shape, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut rows = |n: usize, number: &dyn Fn(&mut Random) -> f64| {
            (0..n).flat_map(|_| vec![E::from_f64(number(&mut random)); of.dim]).collect::<Vec<_>>()
        };
        let q = rows(of.rows, &|r| r.pick(&[1.0, -1.0]) * 2f64.powi(r.pick(powers(E::DTYPE))));
        let k = rows(of.keys, &|r| 1024.0 * (r.below(15) as f64 - 7.0));
        let mut normal = |n: usize| (0..n * of.dim).map(|_| E::from_f64(random.normal())).collect();
        Self { of, q, k, v: normal(of.keys), d_o: normal(of.rows) }
    }

    fn reference(&self) -> Output {
        let wide = |x: &[E]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let of = self.of;
        let (slopes, sinks) = (of.slope.map(f64::from), of.sink.map(f64::from));
        Attention {
            q: &wide(&self.q),
            k: &wide(&self.k),
            v: &wide(&self.v),
            cu_seqlens_q: &[0, of.rows as i32],
            cu_seqlens_k: &[0, of.keys as i32],
            q_start: &[of.start],
            heads: 1,
            kv_heads: 1,
            head_dim: of.dim,
            value_dim: of.dim,
            score: of.score,
            alibi_slopes: slopes.as_ref().map(core::slice::from_ref),
            sinks: sinks.as_ref().map(core::slice::from_ref),
            dropout: None,
        }
        .forward()
    }

    /// o, lse, dq, dk and dv.
    fn found(&mut self, isa: Isa, document: [u32; 2]) -> [Vec<f64>; 5] {
        let of = self.of;
        let nan = <E::Acc as Element>::from_f64(f64::NAN);
        let (mut o, mut lse) = (vec![E::from_f64(f64::NAN); of.rows * of.dim], vec![nan; of.rows]);
        let (mut running, mut words) = (vec![nan; of.rows * of.dim], vec![nan; 2 * of.rows]);
        let mut slopes = of.slope.map_or(vec![], |slope| vec![slope]);
        let mut sinks = of.sink.map_or(vec![], |sink| vec![sink]);
        let [slopes, sinks] = [&mut slopes, &mut sinks].map(|x| match x.len() {
            0 => RawTensor::NONE,
            _ => per_head(x, true),
        });
        let mut scratch = Scratch::with_isa(1, isa).unwrap();
        scratch.reserve(E::DTYPE, of.dim as u32, of.dim as u32);
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
        let [q, k, v] = [&mut self.q, &mut self.k, &mut self.v].map(|x| raw(x, of.dim));
        let range = Range::plain(0, of.rows as u32, of.start, 0);
        let read = |mode| [QRange { range, document, keys_begin: 0, keys_end: 1, mode }];
        let (pairs, bands) = ([Pair { k: 0, band: 0 }], [Band::WHOLE]);
        for i in 0..of.calls {
            let (first, end) = (of.keys * i / of.calls, of.keys * (i + 1) / of.calls);
            let keys = [Range::plain(first as i64, (end - first) as u32, first as i64, 0)];
            let rows = read(Mode::of(i == 0, i + 1 == of.calls));
            let ranges = Ranges { q: &rows, k: &keys, pairs: &pairs, bands: &bands };
            let call = Attend {
                running: raw(&mut running, of.dim),
                running_lse: raw(&mut words, 2),
                lse: raw(&mut lse, 1),
                alibi_slopes: slopes,
                sinks,
                ..Attend::new([q, k, v, raw(&mut o, of.dim)], heads, of.score, ranges)
            };
            // SAFETY: the tensors are the vectors above, alive and used by no other code.
            unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        }
        let wide = |x: &[E::Acc]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let dot = |(a, b): (&[E], &[E])| a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
        let delta = self.d_o.chunks(of.dim).zip(o.chunks(of.dim)).map(dot);
        let mut delta: Vec<_> = delta.map(<E::Acc as Element>::from_f64).collect();
        let mut results = [of.rows, of.keys, of.keys].map(|n| vec![nan; n * of.dim]);
        let [dq, dk, dv] = results.each_mut().map(|x| raw(x, of.dim));
        let (rows, keys) = (read(Mode::Only), [Range::plain(0, of.keys as u32, 0, 0)]);
        let ranges = Ranges { q: &rows, k: &keys, pairs: &pairs, bands: &bands };
        let call = AttendBackward {
            lse: raw(&mut lse, 1),
            delta: raw(&mut delta, 1),
            dq,
            dk,
            dv,
            alibi_slopes: slopes,
            ..AttendBackward::new([q, k, v, raw(&mut self.d_o, of.dim)], heads, of.score, ranges)
        };
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
        let [dq, dk, dv] = results.each_ref().map(|x| wide(x));
        [o.iter().map(|x| x.to_f64()).collect(), wide(&lse), dq, dk, dv]
    }
}

fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
    RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim) as u64, 1, dim as u32)
}

/// Compares the forward with the reference, and says of the backward what rounding leaves: every number is finite, and
/// no weight exceeds 1.
fn check<E: Element>(of: Shape, seed: u64) {
    let mut inputs = Inputs::<E>::new(of, seed);
    let expected = inputs.reference();
    let roundoff = <E::Acc as Element>::DTYPE.unit_roundoff();
    for isa in isas::<E>() {
        for document in [LONG, [of.rows as u32, of.keys as u32]] {
            let what = format!("{}, {isa}, {document:?}, {of:?}, {seed}", E::DTYPE);
            let [o, lse, dq, dk, dv] = inputs.found(isa, document);
            let bound = 8.0 * (isa.roundoff(E::DTYPE).max(E::DTYPE.unit_roundoff()) + 64.0 * roundoff);
            for (i, (found, expected)) in o.iter().zip(&expected.o).enumerate() {
                let (row, d) = (i / of.dim, i % of.dim);
                let q = inputs.q[row * of.dim].to_f64();
                assert!((found - expected).abs() <= bound, "{what}: o[{row}][{d}] (q {q:e}): {found}, not {expected}");
            }
            for (row, (found, expected)) in lse.iter().zip(&expected.lse).enumerate() {
                let bound = 4.0 * roundoff * (expected.abs() + 8.0);
                let close = found == expected || (found - expected).abs() <= bound;
                assert!(close, "{what}: lse[{row}]: {found:e}, not {expected:e}");
            }
            for (name, of) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
                let stray = of.iter().position(|x| !x.is_finite());
                assert_eq!(stray, None, "{what}: {name} has {:?}", stray.map(|i| of[i]));
            }
            let most: f64 = inputs.d_o.iter().map(|x| x.to_f64().abs()).sum();
            assert!(dv.iter().all(|x| x.abs() <= most), "{what}: a weight of the backward exceeds 1");
        }
    }
}

fn of_every_type(of: impl Fn(u64) -> Shape) {
    for seed in some_of(0..24) {
        let of = of(seed);
        check::<f32>(of, seed);
        check::<bf16>(of, seed);
        check::<f16>(of, seed);
        check::<f64>(of, seed);
    }
}

#[test]
fn weights_of_huge_scores() {
    let sizes = [(1, 1), (3, 5), (70, 150), (16, 300), (130, 40), (1, 700)];
    of_every_type(|seed| {
        let (rows, keys) = sizes[seed as usize % 6];
        Shape::new(rows, keys, [8, 64][seed as usize / 6 % 2], [1, 3][seed as usize / 12 % 2].min(keys))
    });
}

#[test]
fn windows_and_sinks() {
    let sinks = [None, Some(0.5), Some(-3e8), Some(5e9), Some(-1e30), Some(1e30), Some(f32::NEG_INFINITY)];
    of_every_type(|seed| {
        let mut of = Shape::new(70, 170, 8, [1, 4][seed as usize % 2]);
        (of.score.window_left, of.score.window_right) = [(20, 0), (3, 60), (UNLIMITED, 0)][seed as usize % 3];
        Shape { sink: sinks[seed as usize % 7], ..of }
    });
}

/// Rows whose own token is no key have scores of −1e18 and below, or of 1e18 and above.
#[test]
fn slopes_and_softcaps() {
    of_every_type(|seed| {
        let mut of = Shape::new(60, 140, 8, [1, 4][seed as usize % 2]);
        (of.score.window_left, of.score.window_right) = [(5, 7), (UNLIMITED, UNLIMITED), (90, 0)][seed as usize % 3];
        of.start = [0, 20, 130][seed as usize / 2 % 3];
        of.score.softcap = if seed % 2 == 0 { 8.0 } else { 0.0 };
        // Products would be lost beside such a slope in one sum or the other: they are smaller than half of its unit.
        of.score.scale = 2f64.powi(-140);
        Shape { slope: Some([1e18, 2f32.powi(40), -1e18][seed as usize % 3]), ..of }
    });
}

/// One query with one key: o = v and lse = s, whatever s is. The numbers are those of a report, not powers of 2.
#[test]
fn one_query_with_one_key() {
    fn of<E: Element>(size: f64, softcap: f64) {
        let of = Shape::new(1, 1, 5, 1);
        let mut inputs = Inputs::<E>::new(of, 1);
        inputs.of.score.softcap = softcap;
        inputs.of.score.scale = 1.0 / 5f64.sqrt();
        for (i, (q, k)) in inputs.q.iter_mut().zip(&mut inputs.k).enumerate() {
            (*q, *k) = [E::from_f64(size * (1.0 + i as f64 / 10.0)); 2].into();
        }
        let expected = inputs.reference();
        for isa in isas::<E>() {
            for document in [LONG, [1, 1]] {
                let [o, lse, dq, dk, _] = inputs.found(isa, document);
                let v: Vec<_> = inputs.v.iter().map(|x| x.to_f64()).collect();
                let what = format!("{}, {isa}, {size:e}, softcap {softcap:e}", E::DTYPE);
                let unit = 4.0 * <E::Acc as Element>::DTYPE.unit_roundoff();
                let close = o.iter().zip(&v).all(|(o, v)| (o - v).abs() <= unit * v.abs());
                assert!(close, "{what}: {o:?}, not {v:?}");
                let (found, expected) = (lse[0], expected.lse[0]);
                let bound = 16.0 * <E::Acc as Element>::DTYPE.unit_roundoff() * expected.abs();
                assert!((found - expected).abs() <= bound, "{what}: lse {found:e}, not {expected:e}");
                assert!(dq.iter().chain(&dk).all(|x| x.is_finite()), "{what}: {dq:?} {dk:?}");
            }
        }
    }
    for size in [1e3, 1e4, 6e4, 1e5, 3e5, 1e6, 1e8, 1e12, 1e18] {
        for softcap in [0.0, 30.0, 1e10] {
            of::<f32>(size, softcap);
            of::<bf16>(size, softcap);
            of::<f64>(size, softcap);
            if size < 4e4 {
                of::<f16>(size, softcap);
            }
        }
    }
}
