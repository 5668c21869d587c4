// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results merged over the ring: against f64, with rows that no rank has keys for and memory that must not be
//! read; the same bits for everyone; a cache spread over ranks, whose parts are attended to by any kernel.

use crate::common::Random;
use crate::context_parallel::mesh;
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Rank, View, ViewMut,
    runtime::CombineTensors,
    schedule::{Combine, CombineTo},
    transport::local,
};
use half::{bf16, f16};
use std::time::Duration;

const TO: [CombineTo; 3] = [CombineTo::All, CombineTo::Heads, CombineTo::Tokens];

/// The parts of every rank: o as `[tokens, heads, dim]` and lse as `[heads, tokens]`, each with a row or a number of
/// NaN behind what is given.
struct Parts<P: Element> {
    o: Vec<Vec<P>>,
    lse: Vec<Vec<P::Acc>>,
    sinks: Option<Vec<f32>>,
}

/// Elements from one token of o to the next, beyond its heads: NaN.
const PADDING: usize = 3;

fn parts<P: Element>(plan: &Plan, seed: u64) -> Parts<P> {
    let (p, mut r) = (plan.problem(), Random::new(seed));
    let tokens = p.batch().tokens(cpattn::Side::Q);
    let nan = P::from_f64(f64::NAN);
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for rank in 0..plan.mesh().world() {
        let heads = plan.heads_of(rank).q.len();
        let row = heads * p.value_dim() + PADDING;
        let mut of_o = vec![nan; tokens * row];
        let mut of_lse = vec![<P::Acc as Element>::from_f64(f64::NAN); tokens * heads];
        for t in 0..tokens {
            // Some tokens have keys on no rank, others on some; scores of some are far from 0.
            let none = t % 7 == 3;
            let far = [0.0, 0.0, 1000.0, -300.0][t % 4];
            for h in 0..heads {
                let keys = !none && r.below(4) > 0;
                let l = if keys { far + 3.0 * r.normal() } else { f64::NEG_INFINITY };
                of_lse[h * tokens + t] = <P::Acc as Element>::from_f64(l);
                if keys {
                    let at = t * row + h * p.value_dim();
                    of_o[at..at + p.value_dim()].fill_with(|| P::from_f64(r.normal()));
                }
            }
        }
        o.push(of_o);
        lse.push(of_lse);
    }
    let n = p.sinks_per_head();
    let sink = |i| if i / n == 1 { f32::NEG_INFINITY } else { (3.0 * r.normal()) as f32 };
    let sinks = p.sinks().then(|| (0..p.heads() * n).map(sink).collect());
    Parts { o, lse, sinks }
}

/// What each rank gets: o and lse of its share, as `[tokens, heads, dim]` and `[tokens, heads]`.
fn combined<P: Element, T: Element<Acc = P::Acc>>(
    ranks: Vec<Rank>,
    plan: &Plan,
    to: CombineTo,
    parts: &Parts<P>,
) -> Vec<(Vec<T>, Vec<T::Acc>)> {
    let (p, tokens) = (plan.problem(), plan.problem().batch().tokens(cpattn::Side::Q));
    let dim = p.value_dim();
    std::thread::scope(|scope| {
        let run = |mut rank: Rank| {
            let (r, share) = (rank.rank(), plan.combined_share(rank.rank(), to));
            let heads = plan.heads_of(r).q.len();
            let (n, h) = (share.tokens.len(), share.heads.len());
            let mut o = vec![T::from_f64(f64::NAN); n * h * dim];
            let mut lse = vec![<T::Acc as Element>::from_f64(f64::NAN); n * h];
            // Twice: a run leaves nothing behind that changes the next.
            for _ in 0..2 {
                let tensors = CombineTensors {
                    partial_o: View::strided(&parts.o[r], [tokens, heads, dim], [heads * dim + PADDING, dim]).unwrap(),
                    partial_lse: View::head_major(&parts.lse[r], tokens, heads).unwrap(),
                    sinks: parts.sinks.as_deref(),
                    o: ViewMut::new(&mut o, n, h, dim).unwrap(),
                    lse: ViewMut::new(&mut lse, n, h, 1).unwrap(),
                };
                rank.combine(plan, to, tensors).unwrap();
            }
            (o, lse)
        };
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn threads(plan: &Plan) -> Vec<Rank> {
    local::group(plan.mesh().world(), Duration::from_secs(60)).unwrap().into_iter().map(Rank::new).collect()
}

/// The merge of one row and head in f64: o and lse.
fn merged<P: Element>(plan: &Plan, parts: &Parts<P>, ranks: &[usize], t: usize, head: u32) -> (Vec<f64>, f64) {
    let (tokens, dim) = (plan.problem().batch().tokens(cpattn::Side::Q), plan.problem().value_dim());
    let n = plan.problem().sinks_per_head();
    let of_head = |s: &Vec<f32>| s[head as usize * n..][..n].iter().map(|&x| f64::from(x)).collect();
    let sinks: Vec<f64> = parts.sinks.as_ref().map_or(Vec::new(), of_head);
    let of = |r: usize| (plan.heads_of(r).q.len(), (head - plan.heads_of(r).q.start) as usize);
    let lses: Vec<f64> = ranks.iter().map(|&r| parts.lse[r][of(r).1 * tokens + t].to_f64()).collect();
    let max = lses.iter().chain(&sinks).copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (vec![0.0; dim], max);
    }
    let sum: f64 = lses.iter().chain(&sinks).map(|l| (l - max).exp()).sum();
    let mut o = vec![0.0; dim];
    for (&r, l) in ranks.iter().zip(&lses).filter(|(_, l)| **l > f64::NEG_INFINITY) {
        let (heads, h) = of(r);
        let row = &parts.o[r][t * (heads * dim + PADDING) + h * dim..][..dim];
        o.iter_mut().zip(row).for_each(|(to, x)| *to += (l - max).exp() / sum * x.to_f64());
    }
    (o, max + sum.ln())
}

/// Every rank gets what f64 says, on these meshes, and the bits do not depend on what the ranks get.
fn right<P: Element, T: Element<Acc = P::Acc>>(dtype: Dtype, epsilon: f64) {
    for (seed, (ulysses, ring)) in [(1, 1), (1, 2), (1, 3), (2, 2), (3, 4), (1, 6)].into_iter().enumerate() {
        for (heads, tokens, sinks) in [(6, 11, 0), (7, 3, 1), (4, 1, 3), (5, 0, 0)] {
            let p = Problem::new(Batch::from_lengths(&[tokens]).unwrap(), heads, heads, 16, dtype).with_value_dim(72);
            let plan = Plan::new(&p.with_sinks_per_head(sinks), mesh(ulysses, ring), Layout::Contiguous).unwrap();
            let parts = parts::<P>(&plan, seed as u64);
            let all = combined::<P, T>(threads(&plan), &plan, CombineTo::All, &parts);
            for to in TO {
                plan.verify_purpose(Combine { to, partial: P::DTYPE }).unwrap();
                let got = combined::<P, T>(threads(&plan), &plan, to, &parts);
                for (r, (o, lse)) in got.iter().enumerate() {
                    let (share, own) = (plan.combined_share(r, to), plan.heads_of(r).q);
                    let ranks: Vec<usize> = (0..ring).map(|j| j * ulysses + r % ulysses).collect();
                    let (mut row, dim) = (0, 72);
                    for t in share.tokens.clone() {
                        for h in share.heads.clone() {
                            let what = format!("{to:?} rank {r} of {ulysses} x {ring}, token {t} head {h}");
                            let (want, want_lse) = merged(&plan, &parts, &ranks, t, h);
                            let o = &o[row * dim..][..dim];
                            for (x, w) in o.iter().zip(want) {
                                let near = (x.to_f64() - w).abs() <= epsilon * (1.0 + w.abs());
                                assert!(near, "{what}: {x:?} for {w}");
                            }
                            let l = lse[row].to_f64();
                            let near = l == want_lse || (l - want_lse).abs() <= 2e-7 * (1.0 + want_lse.abs());
                            assert!(near, "{what}: lse {l} for {want_lse}");
                            // The same bits as the rank that got everything.
                            let at = t * own.len() + (h - own.start) as usize;
                            assert!(o == &all[r].0[at * dim..][..dim] && lse[row] == all[r].1[at], "{what}");
                            row += 1;
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn parts_of_f32() {
    right::<f32, f32>(Dtype::F32, 4e-7);
}

#[test]
fn parts_of_bf16_and_of_f32_for_bf16() {
    right::<bf16, bf16>(Dtype::Bf16, 5e-3);
    right::<f32, bf16>(Dtype::Bf16, 5e-3);
    right::<bf16, f32>(Dtype::F32, 4e-7);
}

#[test]
fn parts_of_f16_and_f64() {
    right::<f16, f16>(Dtype::F16, 6e-4);
    right::<f16, bf16>(Dtype::Bf16, 5e-3);
    right::<bf16, f16>(Dtype::F16, 6e-4);
    right::<f64, f64>(Dtype::F64, 1e-13);
}

/// A part that is alone in a row keeps its bits: its weight is 1.
#[test]
fn a_part_alone_keeps_its_bits() {
    let p = Problem::new(Batch::from_lengths(&[9]).unwrap(), 3, 3, 16, Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 3), Layout::Contiguous).unwrap();
    let mut parts = parts::<f32>(&plan, 5);
    for (r, lse) in parts.lse.iter_mut().enumerate() {
        lse.iter_mut().enumerate().for_each(|(i, l)| *l = if i % 3 == r { 41.7 } else { f32::NEG_INFINITY });
    }
    for o in &mut parts.o {
        o.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 / 7.0);
    }
    let got = combined::<f32, f32>(threads(&plan), &plan, CombineTo::All, &parts);
    for t in 0..9 {
        for h in 0..3 {
            let own = &parts.o[(h * 9 + t) % 3][t * (48 + PADDING) + h * 16..][..16];
            assert_eq!(&got[1].0[(t * 3 + h) * 16..][..16], own);
            assert_eq!(got[2].1[t * 3 + h], 41.7);
        }
    }
}

/// A NaN in a part is seen in its row, and in no other.
#[test]
fn a_nan_is_seen() {
    let p = Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 16, Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 2), Layout::Contiguous).unwrap();
    let mut parts = parts::<f32>(&plan, 6);
    parts.lse.iter_mut().for_each(|lse| lse.fill(1.0));
    parts.o.iter_mut().for_each(|o| o.fill(2.0));
    parts.lse[1][2] = f32::NAN;
    parts.o[0][3 * (32 + PADDING)] = f32::NAN;
    for (o, lse) in combined::<f32, f32>(threads(&plan), &plan, CombineTo::All, &parts) {
        let bad: Vec<usize> = (0..o.len()).filter(|&i| o[i].is_nan()).collect();
        // Head 0 of token 2, and one element of head 0 of token 3.
        assert_eq!(bad, (64..80).chain([96]).collect::<Vec<_>>());
        assert!(lse.iter().enumerate().all(|(i, l)| l.is_nan() == (i == 4)));
    }
}

#[test]
fn refusals() {
    let p = Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 8, Dtype::F32);
    let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank = threads(&plan).remove(0);
    let (x, l) = ([0.0f32; 64], [0.0f32; 8]);
    let mut run = |tokens: usize, lse: usize, out: usize, sinks: Option<&[f32]>| {
        let (mut o, mut out_lse) = ([0.0f32; 64], [0.0f32; 8]);
        let tensors = CombineTensors {
            partial_o: View::new(&x[..tokens * 16], tokens, 2, 8).unwrap(),
            partial_lse: View::new(&l[..lse * 2], lse, 2, 1).unwrap(),
            sinks,
            o: ViewMut::new(&mut o[..out * 16], out, 2, 8).unwrap(),
            lse: ViewMut::new(&mut out_lse, 4, 2, 1).unwrap(),
        };
        rank.combine(&plan, CombineTo::All, tensors)
    };
    run(4, 4, 4, None).unwrap();
    refused(run(3, 4, 4, None), &["partial_o.tokens is 3, expected 4", "its part of all q tokens"]);
    refused(run(4, 3, 4, None), &["partial_lse.tokens is 3, expected 4", "its part of all q tokens"]);
    refused(run(4, 4, 3, None), &["o.tokens is 3, expected 4", "combined share"]);
    refused(run(4, 4, 4, Some(&[1.0; 2])), &["sinks", "the problem has no sinks"]);
    let combine = Combine { to: CombineTo::All, partial: Dtype::F64 };
    refused(plan.verify_purpose(combine).map(|_| ()), &["partial_o.dtype is f64", "f32, f16 or bf16"]);
}
