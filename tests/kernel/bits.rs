// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which bits depend on what: aligned calls, and NaN that must not spread.

use crate::harness::*;
use crate::slow::{self, Turn};
use crate::threads::threaded;
use cpattn::Element;
use cpattn::call::{Attend, AttendBackward, Band, Delta, Gradients, HeadMap, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use half::{bf16, f16};

/// Outputs of a call as bits, by token.
#[derive(Default, PartialEq, Debug)]
struct Bits {
    o: Vec<Vec<u64>>,
    lse: Vec<Vec<u64>>,
    dq: Vec<Vec<u64>>,
    dk: Vec<Vec<u64>>,
    dv: Vec<Vec<u64>>,
}

/// How one run of [`aligned_bits`] is cut.
struct Way {
    q_cut: Cut,
    k_cut: Cut,
    /// One call for each q range (for dk, dv: each k range), with no more keys (queries) than it needs.
    apart: bool,
    workers: usize,
    isa: Isa,
    heads: std::ops::Range<usize>,
}

/// Runs a problem of one document in aligned mode, in the given way.
fn aligned_bits<E: Element>(p: &Problem, w: &Whole, way: &Way, seed: u64) -> Bits {
    let mut random = Random::new(seed);
    let q_at = place(&p.lens_q, &p.starts, way.q_cut, &mut random);
    let k_at = place(&p.lens_k, &[0], way.k_cut, &mut random);
    let group = p.heads / p.kv_heads;
    let heads = way.heads.clone();
    let kv = heads.start / group..(heads.end - 1) / group + 1;
    let mut q = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.d);
    let mut k = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.d);
    let mut v = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.dv);
    let mut d_o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
    let mut o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
    let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
    let mut delta = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
    let mut dq = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.d);
    let mut dk = Buffer::<E::Acc>::poisoned(k_at.rows, heads.len(), p.d);
    let mut dv = Buffer::<E::Acc>::poisoned(k_at.rows, heads.len(), p.dv);
    q.put(&w.q, p.heads, heads.clone(), &q_at.row_of);
    k.put(&w.k, p.kv_heads, kv.clone(), &k_at.row_of);
    v.put(&w.v, p.kv_heads, kv.clone(), &k_at.row_of);
    d_o.put(&w.d_o, p.heads, heads.clone(), &q_at.row_of);
    let mut slopes = head_numbers(&w.alibi_slopes, 0..w.alibi_slopes.len());
    let slopes = p.slopes(&mut slopes, heads.clone());
    let map = HeadMap { q_offset: heads.start as u32, kv_offset: kv.start as u32, group: group as u32 };
    let mut scratch = threaded(Scratch::with_isa(way.workers, way.isa).unwrap());
    scratch.reserve(E::DTYPE, p.d as u32, p.dv as u32);
    // Calls as lists of q and k ranges.
    let s = p.score;
    let needs = |q: &Range, k: &Range| {
        (0..q.len).any(|i| {
            let pos = q.position(i);
            k.pos <= pos.saturating_add(s.window_right) && k.last() >= pos.saturating_sub(s.window_left)
        })
    };
    let all = (q_at.ranges.clone(), k_at.ranges.clone());
    let by_q: Vec<_> = q_at
        .ranges
        .iter()
        .map(|q| (vec![*q], k_at.ranges.iter().filter(|k| needs(q, k)).copied().collect::<Vec<_>>()))
        .collect();
    let by_k: Vec<_> = k_at
        .ranges
        .iter()
        .map(|k| (q_at.ranges.iter().filter(|q| needs(q, k)).copied().collect::<Vec<_>>(), vec![*k]))
        .collect();
    for (qs, ks) in if way.apart { by_q } else { vec![all.clone()] } {
        let (qs, ks, pairs) = ring_step(&qs, &ks, 0, 1, true, |_| LONG);
        let ranges = Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &[Band::WHOLE] };
        let call = Attend {
            lse: lse.raw(),
            alibi_slopes: slopes,
            aligned: true,
            ..Attend::new([q.raw(), k.raw(), v.raw(), o.raw()], map, p.score, ranges)
        };
        // SAFETY: the tensors are the buffers above, alive and used by no other code; here and below.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        // SAFETY: as above. Rows in no range are NaN, and give NaN that no row reads.
        unsafe { cpu::delta(&Delta::new([o.raw(), d_o.raw(), delta.raw()])) }.unwrap();
        let call = backward_call(
            &call,
            d_o.raw(),
            delta.raw(),
            Gradients::Queries,
            [dq.raw(), RawTensor::NONE, RawTensor::NONE],
        );
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
    }
    for (qs, ks) in if way.apart { by_k } else { vec![all] } {
        let (qs, ks, pairs) = ring_step(&qs, &ks, 0, 1, true, |_| LONG);
        let ranges = Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &[Band::WHOLE] };
        let call = Attend {
            lse: lse.raw(),
            alibi_slopes: slopes,
            aligned: true,
            ..Attend::new([q.raw(), k.raw(), v.raw(), o.raw()], map, p.score, ranges)
        };
        let call = backward_call(&call, d_o.raw(), delta.raw(), Gradients::Keys, [RawTensor::NONE, dk.raw(), dv.raw()]);
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
    }
    fn bits<T: Element>(b: &Buffer<T>, row_of: &[usize]) -> Vec<Vec<u64>> {
        (0..b.heads).map(|h| b.get(h, row_of).iter().flatten().map(|x| x.to_bits()).collect()).collect()
    }
    Bits {
        o: bits(&o, &q_at.row_of),
        lse: bits(&lse, &q_at.row_of),
        dq: bits(&dq, &q_at.row_of),
        dk: bits(&dk, &k_at.row_of),
        dv: bits(&dv, &k_at.row_of),
    }
}

/// The backward of a forward call, aligned, with a partial for each q head.
pub fn backward_call<'a>(
    forward: &Attend<'a>,
    d_o: RawTensor,
    delta: RawTensor,
    gradients: Gradients,
    [dq, dk, dv]: [RawTensor; 3],
) -> AttendBackward<'a> {
    AttendBackward {
        lse: forward.lse,
        delta,
        dq,
        dk,
        dv,
        per_q_head: true,
        gradients,
        alibi_slopes: forward.alibi_slopes,
        aligned: forward.aligned,
        ..AttendBackward::new([forward.q, forward.k, forward.v, d_o], forward.heads, forward.score, forward.ranges)
    }
}

/// In aligned mode the bits of a row do not depend on how q, k or heads were cut, on trimmed keys, or on workers.
fn check_aligned<E: Element>(window: (i64, i64), alibi: bool, softcap: f64) {
    // Without optimisation the portable vectors are slow: they take the f64 turn.
    let all = isas::<E>().filter(|isa| *isa != Isa::Portable || E::DTYPE == cpattn::Dtype::F64);
    all.for_each(|isa| check_aligned_isa::<E>(window, alibi, softcap, isa));
}

fn check_aligned_isa<E: Element>(window: (i64, i64), alibi: bool, softcap: f64, isa: Isa) {
    let p = Problem {
        seed: 7,
        lens_q: vec![700],
        lens_k: vec![700],
        starts: vec![0],
        heads: 4,
        kv_heads: 2,
        d: 40,
        dv: 24,
        score: Score { softcap, ..score(40, window.0, window.1) },
        alibi,
        sinks: false,
        cut: Cut::Whole,
        shares: vec![0, 4],
        ring_steps: 1,
        gain: 1.0,
        slices: None,
        dropout: None,
    };
    let w = p.whole::<E>();
    let whole = Way { q_cut: Cut::Whole, k_cut: Cut::Whole, apart: false, workers: 1, isa, heads: 0..4 };
    let expected = aligned_bits::<E>(&p, &w, &whole, 1);
    let ways = [
        Way { q_cut: Cut::Pieces(90), k_cut: Cut::Pieces(200), heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(9), k_cut: Cut::Pieces(3), workers: 3, heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(300), k_cut: Cut::Pieces(70), apart: true, heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(40), k_cut: Cut::Pieces(40), apart: true, heads: 1..4, ..whole },
        Way { q_cut: Cut::Whole, k_cut: Cut::Pieces(130), workers: 2, heads: 3..4, ..whole },
    ];
    for (i, way) in ways.iter().enumerate() {
        let found = aligned_bits::<E>(&p, &w, way, i as u64 + 2);
        let part = |x: &Vec<Vec<u64>>| x[way.heads.clone()].to_vec();
        assert!(found.o == part(&expected.o), "o, way {i}, {isa}");
        assert!(found.lse == part(&expected.lse), "lse, way {i}, {isa}");
        assert!(found.dq == part(&expected.dq), "dq, way {i}, {isa}");
        assert!(found.dk == part(&expected.dk), "dk, way {i}, {isa}");
        assert!(found.dv == part(&expected.dv), "dv, way {i}, {isa}");
    }
    // Striped queries: dk and dv need them in the order of positions, o and dq do not.
    let striped =
        Way { q_cut: Cut::Stripes(16, 3), k_cut: Cut::Pieces(90), apart: false, workers: 1, isa, heads: 0..4 };
    let found = aligned_bits::<E>(&p, &w, &striped, 9);
    assert!(found.o == expected.o && found.lse == expected.lse && found.dq == expected.dq, "striped queries");
}

#[test]
fn aligned_bits_do_not_depend_on_the_cut() {
    if slow::left_out(Turn::Every) {
        return;
    }
    check_aligned::<f32>((UNLIMITED, 0), false, 0.0);
    check_aligned::<f32>((150, 20), true, 5.0);
    check_aligned::<bf16>((UNLIMITED, UNLIMITED), true, 0.0);
    check_aligned::<bf16>((150, 0), false, 0.0);
    check_aligned::<f16>((90, 40), false, 0.0);
    check_aligned::<f64>((64, 0), false, 0.0);
}

/// A NaN in a key, a value or a query reaches those that see it, and no others.
#[test]
fn a_masked_nan_reaches_nobody() {
    isas::<f32>().for_each(a_masked_nan::<f32>);
    isas::<bf16>().for_each(a_masked_nan::<bf16>);
    isas::<f16>().for_each(a_masked_nan::<f16>);
}

fn a_masked_nan<E: Element>(isa: Isa) {
    let p = Problem { lens_q: vec![300], lens_k: vec![300], starts: vec![0], alibi: false, ..problem(4) };
    let p = Problem { heads: 2, kv_heads: 2, d: 16, dv: 16, score: score(16, 100, 0), ring_steps: 1, ..p };
    let at = 150; // seen by rows 150 to 250; sees keys 50 to 150
    let way = || Way { q_cut: Cut::Whole, k_cut: Cut::Whole, apart: false, workers: 1, isa, heads: 0..2 };
    let clean = aligned_bits::<E>(&p, &p.whole::<E>(), &way(), 1);
    let nan = |x: u64| f64::from_bits(x).is_nan();
    for bad in 0..4 {
        let mut w = p.whole::<E>();
        let poisoned = [&mut w.q, &mut w.k, &mut w.v, &mut w.d_o].into_iter().nth(bad).unwrap();
        poisoned[at * 2 * 16] = if bad == 2 { f64::INFINITY } else { f64::NAN };
        let found = aligned_bits::<E>(&p, &w, &way(), 1);
        let mut reached = [0; 5];
        for token in 0..300 {
            let keys = [1, 2].contains(&bad);
            let row = if keys { (150..=250).contains(&token) } else { token == at };
            let key = if keys { (50..=250).contains(&token) } else { (50..=150).contains(&token) };
            let all = [
                (&found.o, &clean.o, 16, row),
                (&found.lse, &clean.lse, 1, row),
                (&found.dq, &clean.dq, 16, row),
                (&found.dk, &clean.dk, 16, key),
                (&found.dv, &clean.dv, 16, key),
            ];
            for (i, (found, clean, dim, sees)) in all.into_iter().enumerate() {
                let part = token * dim..(token + 1) * dim;
                reached[i] +=
                    found[0][part.clone()].iter().filter(|x| nan(**x) || f64::from_bits(**x).is_infinite()).count();
                assert!(
                    sees || found[0][part.clone()] == clean[0][part.clone()],
                    "tensor {bad} reached {i} of {token}"
                );
                assert!(found[1][part.clone()] == clean[1][part], "tensor {bad} reached {i} of {token}, other head");
            }
        }
        // Those that see it are told.
        assert!(reached[2] >= 16 && reached[3] >= 16, "{bad}: {reached:?}");
    }
}
