// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results of large scores.
//!
//! The keys of a document come in eight calls, whose results are merged on the way or afterwards; a constant in every
//! score puts |lse| where f32 has few digits left. Whatever is merged may not err more than one call over all keys
//! does, by the error rule: RMS error at most 1.1 times as large.

use crate::harness::*;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Scratch};
use cpattn::kernel::reference::{Attention, Gradient, Output};
use cpattn::{Dtype, Element};

const ROWS: usize = 96;
const KEYS: usize = 120;
const DIM: usize = 16;
const CALLS: usize = 8;

/// q, k and v of one head. The last column of q and k adds `shift` to every score, with the sign of the row.
struct Inputs<A> {
    q: Vec<A>,
    k: Vec<A>,
    v: Vec<A>,
}

impl<A: Element> Inputs<A> {
    fn new(shift: f64) -> Self {
        let mut random = Random::new(31);
        let mut numbers = |n: usize| (0..n * DIM).map(|_| A::from_f64(random.normal())).collect::<Vec<_>>();
        let (mut q, mut k, v) = (numbers(ROWS), numbers(KEYS), numbers(KEYS));
        for (i, row) in q.chunks_mut(DIM).enumerate() {
            row[DIM - 1] = A::from_f64(if i % 2 == 0 { shift / 8.0 } else { -shift / 8.0 });
        }
        k.chunks_mut(DIM).for_each(|row| row[DIM - 1] = A::from_f64(8.0));
        Self { q, k, v }
    }

    fn reference(&self, score: Score) -> (Vec<f64>, Vec<f64>) {
        let (out, _) = self.gradients(score, &[]);
        (out.o, out.lse)
    }

    /// The result, and the gradients for a do, if there is one.
    fn gradients(&self, score: Score, d_o: &[f64]) -> (Output, Option<Gradient>) {
        let wide = |x: &[A]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let (q, k, v) = (wide(&self.q), wide(&self.k), wide(&self.v));
        let attention = Attention {
            q: &q,
            k: &k,
            v: &v,
            cu_seqlens_q: &[0, ROWS as i32],
            cu_seqlens_k: &[0, KEYS as i32],
            q_start: &[0],
            heads: 1,
            kv_heads: 1,
            head_dim: DIM,
            value_dim: DIM,
            score,
            alibi_slopes: None,
            sinks: None,
            dropout: None,
        };
        let out = attention.forward();
        let gradient = (!d_o.is_empty()).then(|| attention.backward(d_o, &out));
        (out, gradient)
    }
}

fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
    RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim) as u64, 1, dim as u32)
}

/// How results of several calls come together.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// One call over all keys.
    Once,
    /// In the calls, as a ring does.
    Running,
    /// As tensors, afterwards.
    Merged,
}

/// o, and lse with its second word.
fn results<A: Element<Acc = A>>(inputs: &mut Inputs<A>, score: Score, way: Way) -> (Vec<f64>, Vec<f64>) {
    let nan = A::from_f64(f64::NAN);
    let calls = if way == Way::Once { 1 } else { CALLS };
    let mut partials: Vec<(Vec<A>, Vec<A>)> = Vec::new();
    let (mut o, mut lse) = (vec![nan; ROWS * DIM], vec![nan; ROWS]);
    let (mut running, mut words) = (vec![nan; ROWS * DIM], vec![nan; ROWS * 2]);
    let mut scratch = Scratch::new(1);
    scratch.reserve(A::DTYPE, DIM as u32, DIM as u32);
    for i in 0..calls {
        let mode = match way {
            Way::Merged => Mode::First,
            _ => Mode::of(i == 0, i + 1 == calls),
        };
        let rows =
            [QRange { range: Range::plain(0, ROWS as u32, 0, 0), document: [0; 2], keys_begin: 0, keys_end: 1, mode }];
        let (first, end) = (KEYS * i / calls, KEYS * (i + 1) / calls);
        let keys = [Range::plain(first as i64, (end - first) as u32, first as i64, 0)];
        let call = Attend {
            running: raw(&mut running, DIM),
            running_lse: raw(&mut words, 2),
            lse: raw(&mut lse, 1),
            ..Attend::new(
                [raw(&mut inputs.q, DIM), raw(&mut inputs.k, DIM), raw(&mut inputs.v, DIM), raw(&mut o, DIM)],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                score,
                Ranges { q: &rows, k: &keys, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        // SAFETY: the tensors are the vectors above, alive and used by no other code.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        if way == Way::Merged {
            partials.push((running.clone(), words.clone()));
        }
    }
    if let Some(((o, words), others)) = partials.split_first_mut() {
        for (other_o, other_words) in others {
            // SAFETY: as above.
            unsafe {
                cpu::merge(&raw(o, DIM), &raw(words, 2), &raw(other_o, DIM), &raw(other_words, 2)).unwrap();
            }
        }
        let sums = words.chunks(2).map(|w| w[0].to_f64() + w[1].to_f64());
        return (o.iter().map(|x| x.to_f64()).collect(), sums.collect());
    }
    (o.iter().map(|x| x.to_f64()).collect(), lse.iter().map(|x| x.to_f64()).collect())
}

#[test]
fn partial_results_keep_their_digits_as_scores_grow() {
    fn of<A: Element<Acc = A>>() {
        let roundoff = A::DTYPE.unit_roundoff();
        for shift in [0.0, 72.0, 250.0, 1000.0] {
            let score = Score { scale: 1.0, ..score(DIM, UNLIMITED, UNLIMITED) };
            let mut inputs = Inputs::<A>::new(shift);
            let (o, lse) = inputs.reference(score);
            assert!(lse.iter().any(|l| l.abs() >= shift), "the largest |lse| is not {shift}");
            let mut error = |way| {
                let (found, found_lse) = results(&mut inputs, score, way);
                let mut rms = Rms::default();
                rms.add(&found, &o);
                for (found, expected) in found_lse.iter().zip(&lse) {
                    let bound = 8.0 * roundoff * (8.0 + expected.abs());
                    assert!((found - expected).abs() <= bound, "{shift}, {way:?}: lse {found}, expected {expected}");
                }
                rms.relative(0.0)
            };
            let bound = 1.1 * error(Way::Once) + 4.0 * roundoff;
            for way in [Way::Running, Way::Merged] {
                let found = error(way);
                assert!(found <= bound, "{}, {shift}, {way:?}: error {found:e}, bound {bound:e}", A::DTYPE);
            }
        }
    }
    // Differences are taken in f64, so an f64 problem's own lse is as exact as they are and no more: its partial
    // results still lose |lse| · 2⁻⁵³.
    of::<f32>();
}

/// A running lse in one word is still taken; where the final one goes, as it was before there were two.
#[test]
fn one_word_is_taken_too() {
    let score = Score { scale: 1.0, ..score(DIM, UNLIMITED, UNLIMITED) };
    let mut inputs = Inputs::<f32>::new(0.0);
    let (expected, _) = inputs.reference(score);
    let (mut o, mut lse) = (vec![f32::NAN; ROWS * DIM], vec![f32::NAN; ROWS]);
    let mut scratch = Scratch::new(1);
    scratch.reserve(Dtype::F32, DIM as u32, DIM as u32);
    for (i, mode) in [Mode::First, Mode::Merge, Mode::Last].into_iter().enumerate() {
        let rows =
            [QRange { range: Range::plain(0, ROWS as u32, 0, 0), document: [0; 2], keys_begin: 0, keys_end: 1, mode }];
        let keys = [Range::plain(40 * i as i64, 40, 40 * i as i64, 0)];
        let (running, lse) = (raw(&mut o, DIM), raw(&mut lse, 1));
        let call = Attend {
            running,
            running_lse: lse,
            lse,
            ..Attend::new(
                [raw(&mut inputs.q, DIM), raw(&mut inputs.k, DIM), raw(&mut inputs.v, DIM), running],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                score,
                Ranges { q: &rows, k: &keys, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        // SAFETY: the tensors are the vectors above, alive and used by no other code.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
    }
    let mut rms = Rms::default();
    rms.add(&o.iter().map(|&x| x.into()).collect::<Vec<_>>(), &expected);
    rms.assert_below(2e-6, 0.0, "o");
}

/// The backward gets lse in one word, and so its weights err by what that word lost: by `|lse| · 2⁻²⁴` in f32, and as
/// much again by the scores, which it computes a second time. `docs/cpu.md` has the figures that this prints.
#[test]
fn gradients_err_as_the_lse_is_rounded() {
    let score = Score { scale: 1.0, ..score(DIM, UNLIMITED, UNLIMITED) };
    let mut random = Random::new(5);
    let mut d_o: Vec<f32> = (0..ROWS * DIM).map(|_| random.normal() as f32).collect();
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    for shift in [0.0, 1e2, 1e3, 1e4, 1e5, 1e6] {
        let mut inputs = Inputs::<f32>::new(shift);
        let (_, expected) = inputs.gradients(score, &wide(&d_o));
        let expected = expected.unwrap();
        let (o, lse) = results(&mut inputs, score, Way::Once);
        let dot = |(a, b): (&[f32], &[f64])| a.iter().zip(b).map(|(&a, b)| f64::from(a) * b).sum::<f64>() as f32;
        let mut delta: Vec<f32> = d_o.chunks(DIM).zip(o.chunks(DIM)).map(dot).collect();
        let mut lse: Vec<f32> = lse.iter().map(|&x| x as f32).collect();
        let mut sums = [ROWS, KEYS, KEYS].map(|n| vec![f32::NAN; n * DIM]);
        let [dq, dk, dv] = sums.each_mut().map(|x| raw(x, DIM));
        let rows = [QRange {
            range: Range::plain(0, ROWS as u32, 0, 0),
            document: [0; 2],
            keys_begin: 0,
            keys_end: 1,
            mode: Mode::Only,
        }];
        let keys = [Range::plain(0, KEYS as u32, 0, 0)];
        let call = AttendBackward {
            lse: raw(&mut lse, 1),
            delta: raw(&mut delta, 1),
            dq,
            dk,
            dv,
            ..AttendBackward::new(
                [raw(&mut inputs.q, DIM), raw(&mut inputs.k, DIM), raw(&mut inputs.v, DIM), raw(&mut d_o, DIM)],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                score,
                Ranges { q: &rows, k: &keys, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        let mut scratch = Scratch::new(1);
        scratch.reserve(Dtype::F32, DIM as u32, DIM as u32);
        // SAFETY: the tensors are the vectors above, alive and used by no other code.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
        let mut rms = Rms::default();
        rms.add(&wide(&sums[2]), &expected.dv);
        let (found, unit) = (rms.relative(0.0), Dtype::F32.unit_roundoff());
        println!("|lse| {shift:e}: dv off by {found:.1e}, {:.2} times |lse| · 2^-24", found / unit / shift.max(1.0));
        let bound = unit * (16.0 + shift);
        assert!(found <= bound, "{shift}: error {found:e}, bound {bound:e}");
        assert!(shift < 1e3 || found >= bound / 20.0, "{shift}: error {found:e}: better than docs/cpu.md says");
    }
}
