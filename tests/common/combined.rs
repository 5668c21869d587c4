// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests of combines share, on the CPU and on devices: partial results with rows that no rank has keys for and
//! memory that must not be read, their merge in f64, and the comparison.

use super::Random;
use cpattn::{
    Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Side,
    schedule::{Combine, CombineTo},
};

pub const TO: [CombineTo; 3] = [CombineTo::All, CombineTo::Heads, CombineTo::Tokens];

/// The parts of every rank: o as `[tokens, heads, dim]` and lse as `[heads, tokens]`, each with a row or a number of
/// NaN behind what is given.
pub struct Parts<P: Element> {
    pub o: Vec<Vec<P>>,
    pub lse: Vec<Vec<P::Acc>>,
    pub sinks: Option<Vec<f32>>,
}

/// Elements from one token of o to the next, beyond its heads: NaN.
pub const PADDING: usize = 8;

pub fn parts<P: Element>(plan: &Plan, seed: u64) -> Parts<P> {
    let (p, mut r) = (plan.problem(), Random::new(seed));
    let tokens = p.batch().tokens(Side::Q);
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

/// The merge of one row and head in f64: o and lse.
fn merged<P: Element>(plan: &Plan, parts: &Parts<P>, ranks: &[usize], t: usize, head: u32) -> (Vec<f64>, f64) {
    let (tokens, dim) = (plan.problem().batch().tokens(Side::Q), plan.problem().value_dim());
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

/// What each rank gets: o and lse of its share, as `[tokens, heads, dim]` and `[tokens, heads]`.
pub type Shares<T> = Vec<(Vec<T>, Vec<<T as Element>::Acc>)>;

/// Every rank gets what f64 says, on these meshes, up to these multiples of `1 + |x|` in o and lse, and the bits do not
/// depend on what the ranks get. `combined` makes a run of all ranks.
pub fn right<P: Element, T: Element<Acc = P::Acc>>(
    dtype: Dtype,
    [of_o, of_lse]: [f64; 2],
    meshes: &[(usize, usize)],
    combined: impl Fn(&Plan, CombineTo, &Parts<P>) -> Shares<T>,
) {
    for (seed, &(ulysses, ring)) in meshes.iter().enumerate() {
        // Rows of fewer and of more than 32 threads of 8 elements.
        for (heads, tokens, sinks, dim) in [(6, 11, 0, 72), (7, 3, 1, 264), (4, 1, 3, 576), (5, 0, 0, 72)] {
            let p = Problem::new(Batch::from_lengths(&[tokens]).unwrap(), heads, heads, 16, dtype).with_value_dim(dim);
            let mesh = Mesh { replicas: 1, ring, ulysses };
            let plan = Plan::new(&p.with_sinks_per_head(sinks), mesh, Layout::Contiguous).unwrap();
            let parts = parts::<P>(&plan, seed as u64);
            let all = combined(&plan, CombineTo::All, &parts);
            for to in TO {
                plan.verify_purpose(Combine { to, partial: P::DTYPE }).unwrap();
                let got = combined(&plan, to, &parts);
                for (r, (o, lse)) in got.iter().enumerate() {
                    let (share, own) = (plan.combined_share(r, to), plan.heads_of(r).q);
                    let ranks: Vec<usize> = (0..ring).map(|j| j * ulysses + r % ulysses).collect();
                    let mut row = 0;
                    for t in share.tokens.clone() {
                        for h in share.heads.clone() {
                            let what = format!("{to:?} rank {r} of {ulysses} x {ring}, token {t} head {h}");
                            let (want, want_lse) = merged(&plan, &parts, &ranks, t, h);
                            let o = &o[row * dim..][..dim];
                            for (x, w) in o.iter().zip(want) {
                                let near = (x.to_f64() - w).abs() <= of_o * (1.0 + w.abs());
                                assert!(near, "{what}: {x:?} for {w}");
                            }
                            let l = lse[row].to_f64();
                            let near = l == want_lse || (l - want_lse).abs() <= of_lse * (1.0 + want_lse.abs());
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
