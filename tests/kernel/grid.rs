// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many problems in all the ways there are.

use crate::harness::*;
use crate::slow::{self, Turn};
use crate::threads::threaded;
use cpattn::call::{Attend, AttendBackward, Dropout, DropoutMask, Gradients, HeadMap, Ranges, RawTensor};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use cpattn::{Dtype, Element};
use half::{bf16, f16};

/// Runs a problem forward and backward in all the ways there are, and compares.
pub fn check<E: Element>(p: &Problem) {
    isas::<E>().for_each(|isa| check_isa::<E>(p, isa));
}

/// On one instruction set.
fn check_isa<E: Element>(p: &Problem, isa: Isa) {
    let bound = if E::Acc::DTYPE == Dtype::F64 { 1e-13 } else { 1e-6 };
    // A score is a sum of so many products, whose roundings add up like steps of a random walk.
    let bound = bound * (p.d as f64 / 256.0).sqrt().max(1.0);
    // A row whose nearest key is far has scores of this size under ALiBi, and their rounding errors.
    let bound = bound + p.largest_alibi() * E::Acc::DTYPE.unit_roundoff();
    let w = p.whole::<E>();
    let (plain, sunk) = (p.forward(&w, false), p.forward(&w, true));
    let gradient = p.backward(&w, &sunk);
    let largest = p.max_logit(&w);
    let [unread_q, unread_k] = p.unread();
    let mut random = Random::new(p.seed + 1);
    let zeros = vec![0; p.lens_k.len()];
    let q_at = place(&p.lens_q, &p.starts, p.cut, &mut random);
    let k_at = place(&p.lens_k, &zeros, p.cut, &mut random);
    let first = |lens: &[usize], starts: &[i64]| -> Vec<i64> {
        cumulative(lens).iter().zip(starts).map(|(&first, start)| i64::from(first) - start).collect()
    };
    let (q_tokens, k_tokens) = (first(&p.lens_q, &p.starts), first(&p.lens_k, &zeros));
    let mask = p.dropout.map(|probability| DropoutMask::new(probability, p.seed).unwrap());
    let dropout = mask.map(|mask| Dropout { mask, q_tokens: &q_tokens, k_tokens: &k_tokens });
    let mut scratch = threaded(Scratch::with_isa(1 + p.seed as usize % 3, isa).unwrap());
    // Of parts that are computed in tiles or vectors: by the ranges of each call, all in tiles, or some documents.
    let document = |doc: u32| match p.seed % 4 {
        0 => [0; 2],
        2 if doc % 2 == 1 => [&p.lens_q, &p.lens_k].map(|lens| lens[doc as usize] as u32),
        _ => LONG,
    };
    scratch.reserve(E::DTYPE, p.d as u32, p.dv as u32);
    let group = p.heads / p.kv_heads;
    let mut rms: [Rms; 5] = Default::default();
    let mut final_error = Rms::default();
    for share in p.shares.windows(2) {
        let heads = share[0]..share[1];
        let kv = heads.start / group..(heads.end - 1) / group + 1;
        let map = HeadMap { q_offset: heads.start as u32, kv_offset: kv.start as u32, group: group as u32 };
        let mut q = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.d);
        let mut k = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.d);
        let mut v = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.dv);
        let mut d_o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
        q.put(&w.q, p.heads, heads.clone(), &q_at.row_of);
        k.put(&w.k, p.kv_heads, kv.clone(), &k_at.row_of);
        v.put(&w.v, p.kv_heads, kv.clone(), &k_at.row_of);
        d_o.put(&w.d_o, p.heads, heads.clone(), &q_at.row_of);
        for token in &unread_q {
            [&mut q, &mut d_o].into_iter().for_each(|x| x.poison(q_at.row_of[*token]));
        }
        for token in &unread_k {
            [&mut k, &mut v].into_iter().for_each(|x| x.poison(k_at.row_of[*token]));
        }
        let mut slopes = head_numbers(&w.alibi_slopes, 0..w.alibi_slopes.len());
        let mut sinks = head_numbers(&w.sinks, heads.clone());
        let (slopes, sinks) = (p.slopes(&mut slopes, heads.clone()), per_head(&mut sinks, p.sinks));

        for finish in [false, true] {
            let mut running = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.dv);
            let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
            let mut words = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 2);
            let mut o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
            let mut max_logit = vec![f32::NEG_INFINITY; heads.len()];
            for i in 0..p.ring_steps {
                let (qs, ks, pairs, bands) = p.ring_step(&q_at.ranges, &k_at.ranges, i, finish, document);
                let call = Attend {
                    max_logit: per_head(&mut max_logit, finish),
                    running: if finish && E::DTYPE == E::Acc::DTYPE { o.raw() } else { running.raw() },
                    running_lse: words.raw(),
                    lse: if finish { lse.raw() } else { RawTensor::NONE },
                    alibi_slopes: slopes,
                    sinks,
                    dropout,
                    aligned: p.seed % 4 == 3,
                    ..Attend::new(
                        [q.raw(), k.raw(), v.raw(), if finish { o.raw() } else { RawTensor::NONE }],
                        map,
                        p.score,
                        Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &bands },
                    )
                };
                // SAFETY: the tensors are the buffers above, alive and used by no other code.
                unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
            }
            let expected = if finish { &sunk } else { &plain };
            for h in heads.clone() {
                let (found, exact) = (f64::from(max_logit[h - heads.start]), largest[h]);
                let close = found == exact || (found - exact).abs() <= (2.0 * bound + 6e-8) * (1.0 + exact.abs());
                assert!(!finish || close, "max_logit of head {h} on {isa}: {found}, expected {exact}; {p:?}");
                let found = if finish {
                    o.get(h - heads.start, &q_at.row_of)
                } else {
                    running.get(h - heads.start, &q_at.row_of)
                };
                let lses = if finish { &lse } else { &words }.get(h - heads.start, &q_at.row_of);
                for (token, (row, lse)) in found.iter().zip(&lses).enumerate() {
                    let at = token * p.heads + h;
                    if finish { &mut final_error } else { &mut rms[0] }.add(row, &expected.o[at * p.dv..][..p.dv]);
                    let (l, e) = (lse[0], expected.lse[at]);
                    let close = l == e || (l - e).abs() <= bound * 2.0 * (1.0 + e.abs());
                    assert!(close, "lse of token {token}, head {h} on {isa}: {l}, expected {e}; {p:?}");
                    if e == f64::NEG_INFINITY {
                        assert!(row.iter().all(|&x| x == 0.0));
                    }
                }
            }
            o.assert_untouched_elsewhere(&q_at.row_of, "o");
            running.assert_untouched_elsewhere(&q_at.row_of, "running");
            lse.assert_untouched_elsewhere(&q_at.row_of, "lse");
            words.assert_untouched_elsewhere(&q_at.row_of, "running_lse");
        }

        let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
        let mut delta = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
        lse.put(&sunk.lse, p.heads, heads.clone(), &q_at.row_of);
        let deltas: Vec<_> = w
            .d_o
            .chunks(p.dv)
            .zip(sunk.o.chunks(p.dv))
            .map(|(a, b)| a.iter().zip(b).map(|(x, y)| x * y).sum())
            .collect();
        delta.put(&deltas, p.heads, heads.clone(), &q_at.row_of);
        unread_q.iter().for_each(|&token| delta.poison(q_at.row_of[token]));
        for per_q_head in [false, true] {
            for (passes, aligned) in [
                (&[Gradients::All][..], false),
                (&[Gradients::Queries, Gradients::Keys][..], p.seed.is_multiple_of(2)),
                (&[Gradients::All][..], true),
            ] {
                let partials = if per_q_head { heads.clone() } else { kv.clone() };
                let mut dq = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.d);
                let mut dk = Buffer::<E::Acc>::poisoned(k_at.rows, partials.len(), p.d);
                let mut dv = Buffer::<E::Acc>::poisoned(k_at.rows, partials.len(), p.dv);
                let accumulate = p.seed % 2 == 1;
                if accumulate {
                    dk.put(&vec![0.0; w.k.len() * group], partials.end, partials.clone(), &k_at.row_of);
                    dv.put(&vec![0.0; w.v.len() * group], partials.end, partials.clone(), &k_at.row_of);
                }
                for i in 0..p.ring_steps {
                    let (qs, ks, pairs, bands) = p.ring_step(&q_at.ranges, &k_at.ranges, i, true, document);
                    for &gradients in passes {
                        let call = AttendBackward {
                            lse: lse.raw(),
                            delta: delta.raw(),
                            dq: if gradients == Gradients::Keys { RawTensor::NONE } else { dq.raw() },
                            dk: if gradients == Gradients::Queries { RawTensor::NONE } else { dk.raw() },
                            dv: if gradients == Gradients::Queries { RawTensor::NONE } else { dv.raw() },
                            accumulate_keys: accumulate,
                            per_q_head,
                            gradients,
                            alibi_slopes: slopes,
                            dropout,
                            aligned,
                            ..AttendBackward::new(
                                [q.raw(), k.raw(), v.raw(), d_o.raw()],
                                map,
                                p.score,
                                Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &bands },
                            )
                        };
                        // SAFETY: as above.
                        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
                    }
                }
                for h in heads.clone() {
                    for (token, row) in dq.get(h - heads.start, &q_at.row_of).iter().enumerate() {
                        rms[1].add(row, &gradient.dq[(token * p.heads + h) * p.d..][..p.d]);
                    }
                }
                dq.assert_untouched_elsewhere(&q_at.row_of, "dq");
                dk.assert_untouched_elsewhere(&k_at.row_of, "dk");
                dv.assert_untouched_elsewhere(&k_at.row_of, "dv");
                // A share of heads holds a part of a group: only whole groups can be compared here.
                for h in kv.clone().filter(|h| heads.start <= h * group && (h + 1) * group <= heads.end) {
                    let sum = |b: &Buffer<E::Acc>, token: usize| {
                        let row = k_at.row_of[token];
                        let mut sum = vec![0.0; b.dim];
                        let of = if per_q_head { h * group..(h + 1) * group } else { h..h + 1 };
                        for part in of {
                            let part = &b.data[b.at(row, part - partials.start)];
                            sum.iter_mut().zip(part).for_each(|(x, y)| *x += y.to_f64());
                        }
                        sum
                    };
                    for token in 0..k_at.row_of.len() {
                        let at = token * p.kv_heads + h;
                        rms[2].add(&sum(&dk, token), &gradient.dk[at * p.d..][..p.d]);
                        rms[3].add(&sum(&dv, token), &gradient.dv[at * p.dv..][..p.dv]);
                    }
                }
            }
        }
    }
    // ds is a difference, do·v − delta, which may cancel to next to nothing (a row with one key); its terms are of this
    // size, and so are their rounding errors.
    let floor = p.gain * p.score.scale * (p.dv as f64).sqrt() * mask.map_or(1.0, |mask| mask.factor());
    // Slices may leave all rows a single key: dk is then a sum of so many errors, and 0.
    let of_dk = if p.slices.is_some() { floor * (q_at.row_of.len() as f64).sqrt() } else { floor };
    // Of few numbers, one large error is most of the RMS.
    let rounding = |of: &Rms| rounding::<E>(isa) * (1.0 + 6.0 / of.count.max(1.0).sqrt());
    for (rms, (what, floor)) in rms.iter().zip([("running o", 0.0), ("dq", floor), ("dk", of_dk), ("dv", 0.0)]) {
        rms.assert_below(bound + rounding(rms), floor, &format!("{what} on {isa} of {p:?}"));
    }
    // One rounding at the end, of the element type: relative down to its smallest normal number (a large sink brings o
    // of a row there), absolute below. Only f16's is not far below all that occurs.
    let floor = if E::DTYPE == Dtype::F16 { f16::MIN_POSITIVE.to_f64() } else { 0.0 };
    let bound = bound + E::DTYPE.unit_roundoff() + rounding(&final_error);
    final_error.assert_below(bound, floor, &format!("o on {isa} of {p:?}"));
}

#[test]
fn grid_f32() {
    some_of(0..45).for_each(|seed| check::<f32>(&problem(seed)));
}

#[test]
fn grid_bf16() {
    some_of(100..120).for_each(|seed| check::<bf16>(&problem(seed)));
}

#[test]
fn grid_f16() {
    if slow::left_out(Turn::Every) {
        return;
    }
    some_of(200..220).for_each(|seed| check::<f16>(&problem(seed)));
}

/// Gradients that f16 could not hold as they are: they are large, as loss scaling makes them, or next to nothing.
#[test]
fn gradients_beyond_the_range_of_f16() {
    for (i, gain) in [4000.0, 1.0 / 4096.0].into_iter().enumerate() {
        (0..6).for_each(|seed| check::<f16>(&Problem { gain, ..problem(400 + 10 * i as u64 + seed) }));
    }
}

#[test]
fn grid_f64() {
    if slow::left_out(Turn::Every) {
        return;
    }
    some_of(300..320).for_each(|seed| check::<f64>(&problem(seed)));
}

/// Sums over twenty thousand terms keep the error of short ones, on either side.
#[test]
fn long_documents() {
    if slow::left_out(Turn::Every) {
        return;
    }
    for (len_q, len_k) in [(16, 20_000), (20_000, 16)] {
        check::<f32>(&Problem {
            lens_q: vec![len_q],
            lens_k: vec![len_k],
            starts: vec![len_k as i64 - len_q as i64],
            score: score(32, UNLIMITED, UNLIMITED),
            d: 32,
            dv: 32,
            heads: 1,
            kv_heads: 1,
            shares: vec![0, 1],
            alibi: false,
            sinks: false,
            cut: Cut::Whole,
            ring_steps: 1,
            gain: 1.0,
            seed: 42,
            slices: None,
            dropout: None,
        });
    }
}
