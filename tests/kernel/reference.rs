// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reference itself: a row by hand, and its backward against differences of its forward.

use cpattn::{Slice, call::Score, kernel::reference::Attention};

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Numbers between −1 and 1 that look random.
fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut draw = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| 2.0 * draw.f64() - 1.0).collect()
}

#[test]
fn one_row_by_hand() {
    let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX };
    let a = Attention {
        q: &[1.0],
        k: &[0.0, 2f64.ln()],
        v: &[3.0, 6.0],
        cu_seqlens_q: &[0, 1],
        cu_seqlens_k: &[0, 2],
        q_start: &[1],
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        value_dim: 1,
        score,
        alibi_slopes: None,
        sinks: None,
        dropout: None,
    };
    // Weights 1 and 2 of 3.
    let out = a.forward();
    assert!((out.o[0] - 5.0).abs() < 1e-14 && (out.lse[0] - 3f64.ln()).abs() < 1e-14);
    // A sink of ln 3 takes half of it.
    let sinks = [3f64.ln()];
    let out = Attention { sinks: Some(&sinks), ..a }.forward();
    assert!((out.o[0] - 2.5).abs() < 1e-14 && (out.lse[0] - 6f64.ln()).abs() < 1e-14);
    // A slope of ln 2 halves the key that is one position away: weights 1/2 and 2.
    let alibi_slopes = [2f64.ln()];
    let out = Attention { alibi_slopes: Some(&alibi_slopes), ..a }.forward();
    assert!((out.o[0] - (0.5 * 3.0 + 2.0 * 6.0) / 2.5).abs() < 1e-14);
    // One of +∞ leaves no number.
    let sinks = [f64::INFINITY];
    let out = Attention { sinks: Some(&sinks), ..a }.forward();
    assert!(out.o[0].is_nan() && out.lse[0].is_nan());
    // Nothing in the window.
    let none = Score { window_left: -1, ..score };
    let out = Attention { score: Score { window_right: -1, ..none }, ..a }.forward();
    assert_eq!((out.o[0], out.lse[0]), (0.0, f64::NEG_INFINITY));
    // A NaN in q or in k is one in the results.
    for (q, k) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
        let out = Attention { q: &[q], k: &[0.0, k], ..a }.forward();
        assert!(out.o[0].is_nan() && out.lse[0].is_nan());
    }
}

/// Backward against central differences of `Σ do · o + Σ d_lse · lse` (or of the first sum alone), with every option at
/// once and each alone.
#[test]
fn backward_is_the_derivative_of_forward() {
    let (heads, kv_heads, d, dv) = (4, 2, 3, 2);
    let (cq, ck, start) = ([0, 3, 3, 8], [0, 4, 6, 10], [1i64, 0, -1]);
    let (tq, tk) = (8, 10);
    let (q, k) = (numbers(tq * heads * d, 1), numbers(tk * kv_heads * d, 2));
    let (v, d_o) = (numbers(tk * kv_heads * dv, 3), numbers(tq * heads * dv, 4));
    let d_lse = numbers(tq * heads, 5);
    let (alibi_slopes, sinks) = ([0.5, 0.25, 0.125, 0.0625], [0.3, -1.0, f64::NEG_INFINITY, 2.0]);
    for options in 0..16 {
        for (left, right) in [(i64::MAX, i64::MAX), (i64::MAX, 0), (2, 1)] {
            let softcap = if options & 1 == 0 { 0.0 } else { 0.8 };
            let score = Score { scale: 0.9, softcap, window_left: left, window_right: right };
            let loss = |q: &[f64], k: &[f64], v: &[f64], sinks: &[f64]| {
                let a = Attention {
                    q,
                    k,
                    v,
                    cu_seqlens_q: &cq,
                    cu_seqlens_k: &ck,
                    q_start: &start,
                    heads,
                    kv_heads,
                    head_dim: d,
                    value_dim: dv,
                    score,
                    alibi_slopes: (options & 2 != 0).then_some(&alibi_slopes),
                    sinks: (options & 4 != 0).then_some(sinks),
                    dropout: None,
                };
                let out = a.forward();
                if options & 8 != 0 {
                    return (dot(&out.o, &d_o), a.backward(&d_o, &out));
                }
                // A row without keys has an lse that nothing changes.
                let of_lse = out.lse.iter().zip(&d_lse).filter(|(l, _)| l.is_finite()).map(|(l, x)| l * x);
                let gradient = a.backward_of(&a.documents(), &d_o, Some(&d_lse), &out);
                (dot(&out.o, &d_o) + of_lse.sum::<f64>(), gradient)
            };
            let g = loss(&q, &k, &v, &sinks).1;
            let check = |x: &[f64], gradient: &[f64], f: &dyn Fn(&[f64]) -> f64| {
                for (i, expected) in gradient.iter().enumerate() {
                    if x[i] == f64::NEG_INFINITY {
                        assert_eq!(*expected, 0.0);
                        continue;
                    }
                    let h = 1e-5;
                    let (mut up, mut down) = (x.to_vec(), x.to_vec());
                    up[i] += h;
                    down[i] -= h;
                    let slope = (f(&up) - f(&down)) / (2.0 * h);
                    assert!((slope - expected).abs() < 1e-8, "{options} {i}: {slope} {expected}");
                }
            };
            check(&q, &g.dq, &|x| loss(x, &k, &v, &sinks).0);
            check(&k, &g.dk, &|x| loss(&q, x, &v, &sinks).0);
            check(&v, &g.dv, &|x| loss(&q, &k, x, &sinks).0);
            check(&sinks, &g.dsinks, &|x| loss(&q, &k, &v, x).0);
        }
    }
}

/// Slices by hand: two answers after a prompt of two tokens, each of one token, beside each answer alone after it; and
/// documents as slices.
#[test]
fn slices() {
    let (q, k) = (numbers(4, 1), numbers(4, 2));
    let (v, slopes) = (numbers(4, 3), [0.25]);
    let score = Score { scale: 1.0, softcap: 0.0, window_left: 2, window_right: i64::MAX };
    let a = Attention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens_q: &[0, 4],
        cu_seqlens_k: &[0, 4],
        q_start: &[0],
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        value_dim: 1,
        score,
        alibi_slopes: Some(&slopes),
        sinks: None,
        dropout: None,
    };
    let slices = [
        Slice::new(0..2, 0..2).causal(),
        Slice::new(2..3, 0..2).q_start(2),
        Slice::new(2..3, 2..3).causal(),
        Slice::new(3..4, 0..2).q_start(2),
        Slice::new(3..4, 3..4).causal(),
    ];
    let together = a.forward_of(&slices);
    for answer in [2, 3] {
        let of = |x: &[f64]| [x[0], x[1], x[answer]];
        let (q, k, v) = (of(&q), of(&k), of(&v));
        let causal = Score { window_right: 0, ..score };
        let alone = Attention { q: &q, k: &k, v: &v, cu_seqlens_q: &[0, 3], cu_seqlens_k: &[0, 3], score: causal, ..a }
            .forward();
        assert_eq!(
            (of(&together.o), of(&together.lse)),
            ([0, 1, 2].map(|i| alone.o[i]), [0, 1, 2].map(|i| alone.lse[i]))
        );
    }
    // A row in no slice.
    let none = a.forward_of(&slices[..3]);
    assert_eq!((none.o[3], none.lse[3]), (0.0, f64::NEG_INFINITY));
}
