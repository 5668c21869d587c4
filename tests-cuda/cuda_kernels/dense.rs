// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over slices in f64: every pair of tokens by itself, no tiles and no ranges.

use crate::case::{Case, Numbers};
use cpattn::kernel::reference::{Gradient, Output};

/// A token's document and its position there.
fn places(documents: impl Iterator<Item = (usize, i64)>) -> Vec<(u32, i64)> {
    (0..).zip(documents).flat_map(|(doc, (len, start))| (0..len as i64).map(move |i| (doc, start + i))).collect()
}

/// For each q token, the k tokens that it attends to, with their distances. A pair is in one slice at most.
pub fn pairs(case: &Case) -> Vec<Vec<(usize, i64)>> {
    let q = places(case.documents.iter().map(|d| (d.0, d.2)));
    let k = places(case.documents.iter().map(|d| (d.1, 0)));
    let (left, right) = (case.score.window_left, case.score.window_right);
    let allowed = |(doc_q, x): (u32, i64), (doc_k, y): (u32, i64)| {
        let mut found = case.slices.iter().filter_map(|slice| {
            let b = &slice.band;
            let distance = y - x + b.shift;
            let is_in = (doc_q, doc_k) == slice.documents
                && (b.q_begin..b.q_end).contains(&x)
                && (b.k_begin..b.k_end).contains(&y)
                && (b.low..=b.high).contains(&distance)
                && (left == i64::MAX || distance >= -left)
                && distance <= right;
            is_in.then_some(distance)
        });
        let distance = found.next();
        assert_eq!(found.next(), None, "a pair in two slices: {case:?}");
        distance
    };
    q.iter().map(|&q| (0..k.len()).filter_map(|t| allowed(q, k[t]).map(|distance| (t, distance))).collect()).collect()
}

/// What the forward and the backward give for these slices, and the largest score of each head.
pub fn attention(case: &Case, n: &Numbers, d_o: &[f64]) -> (Output, Gradient, Vec<f64>) {
    let mut max_logit = vec![f64::NEG_INFINITY; case.heads];
    let (d, dv) = (case.head_dim, case.value_dim);
    let (tq, tk, group) = (case.q_tokens(), case.k_tokens(), case.heads / case.kv_heads);
    let mut out = Output { o: vec![0.0; tq * case.heads * dv], lse: vec![f64::NEG_INFINITY; tq * case.heads] };
    let mut gradient = Gradient {
        dq: vec![0.0; tq * case.heads * d],
        dk: vec![0.0; tk * case.kv_heads * d],
        dv: vec![0.0; tk * case.kv_heads * dv],
        dsinks: vec![],
    };
    let mask = case.mask();
    let kept = |t: usize, s: usize, h: usize| {
        mask.map_or(1.0, |mask| if mask.keeps(t as u32, s as u32, h as u32) { mask.factor() } else { 0.0 })
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for (t, keys) in pairs(case).iter().enumerate() {
        for (h, largest) in max_logit.iter_mut().enumerate() {
            let (row, kv) = (t * case.heads + h, h / group);
            let (q, d_o) = (&n.q[row * d..][..d], &d_o[row * dv..][..dv]);
            let key = |s: usize| (s * case.kv_heads + kv) * d..(s * case.kv_heads + kv + 1) * d;
            let value = |s: usize| (s * case.kv_heads + kv) * dv..(s * case.kv_heads + kv + 1) * dv;
            // Scores, and their slopes by q·k.
            let scores: Vec<(f64, f64)> = keys
                .iter()
                .map(|&(s, distance)| {
                    let mut x = case.score.scale * dot(q, &n.k[key(s)]);
                    let mut slope = case.score.scale;
                    if case.score.softcap > 0.0 {
                        let t = (x / case.score.softcap).tanh();
                        (x, slope) = (case.score.softcap * t, slope * (1.0 - t * t));
                    }
                    if case.alibi_slopes {
                        x -= n.alibi_slopes[h] * distance.abs() as f64;
                    }
                    (x, slope)
                })
                .collect();
            *largest = scores.iter().map(|s| s.0).fold(*largest, f64::max);
            let count = case.sinks_per_head();
            let sinks = if case.sinks { &n.sinks[h * count..][..count] } else { &[] };
            let most = scores.iter().map(|s| s.0).chain(sinks.iter().copied()).fold(f64::NEG_INFINITY, f64::max);
            if most == f64::NEG_INFINITY {
                continue;
            }
            let all = scores.iter().map(|s| s.0).chain(sinks.iter().copied());
            let sum = all.map(|s| (s - most).exp()).sum::<f64>();
            let lse = most + sum.ln();
            out.lse[row] = lse;
            let o = &mut out.o[row * dv..][..dv];
            for (&(s, _), &(x, _)) in keys.iter().zip(&scores) {
                let p = (x - lse).exp() * kept(t, s, h);
                o.iter_mut().zip(&n.v[value(s)]).for_each(|(o, v)| *o += p * v);
            }
            let delta = dot(o, d_o);
            for (&(s, _), &(x, slope)) in keys.iter().zip(&scores) {
                let p = (x - lse).exp();
                let kept = kept(t, s, h);
                let ds = p * (kept * dot(d_o, &n.v[value(s)]) - delta) * slope;
                gradient.dv[value(s)].iter_mut().zip(d_o).for_each(|(x, d_o)| *x += kept * p * d_o);
                gradient.dk[key(s)].iter_mut().zip(q).for_each(|(x, q)| *x += ds * q);
                gradient.dq[row * d..][..d].iter_mut().zip(&n.k[key(s)]).for_each(|(x, k)| *x += ds * k);
            }
        }
    }
    (out, gradient, max_logit)
}
