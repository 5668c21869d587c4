// SPDX-License-Identifier: MIT OR Apache-2.0
//! lse to base 2 at the border of a run: the bits of o, lse and merged parts converted once, gradients of the same
//! loss, on every mesh; and that one base taken for the other shows.

use crate::common::{Data, d_lse_of, error, gather, rms};
use crate::context_parallel::mesh;
use crate::refused::refused;
use cpattn::{
    Backward, Batch, Dtype, Element, Error, Forward, Layout, Mask, Plan, Problem, Rank, Side, View, ViewMut,
    runtime::{Bindings, CombineTensors, LseBase},
    schedule::{AllToAll, AllToAllDirection, CombineTo},
    transport::local,
};
use half::bf16;
use std::{f64::consts::LOG2_E, time::Duration};

/// GQA, sinks, a window, and rows at the start of the second document that no key precedes.
fn problem(dtype: Dtype, sinks: bool) -> Problem {
    let batch = Batch::cross(&[0, 17, 17, 30], &[0, 21, 26, 40], Some(&[2, 0, -4])).unwrap();
    Problem::new(batch, 6, 3, 8, dtype).with_sinks(sinks).with_mask(Mask { left: Some(9), right: Some(0) })
}

fn scaled<A: Element>(x: &[A], factor: f64) -> Vec<A> {
    x.iter().map(|x| A::from_f64(x.to_f64() * factor)).collect()
}

/// What a rank has of one run: o and lse, then dq, dk and dv.
type Found<T> = (Vec<T>, Vec<<T as Element>::Acc>, [Vec<T>; 3]);

/// Forward and backward of all ranks: a forward in the first base, a backward that takes lse for one of the second.
fn run<T: Element>(plan: &Plan, data: &Data<T>, [forward, backward]: [LseBase; 2]) -> Vec<Found<T>> {
    let p = plan.problem();
    let (hq, hk, d) = (p.heads(), p.kv_heads(), p.head_dim());
    local::run(plan.mesh().world(), Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        let [tq, tk] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank.rank()).indices());
        let (n, m) = (tq.len(), tk.len());
        let (q, d_o) = (gather(&data.q, &tq, hq * d), gather(&data.d_o, &tq, hq * d));
        let (k, v) = (gather(&data.k, &tk, hk * d), gather(&data.v, &tk, hk * d));
        let (q, d_o) = (View::new(&q, n, hq, d)?, View::new(&d_o, n, hq, d)?);
        let (k, v) = (View::new(&k, m, hk, d)?, View::new(&v, m, hk, d)?);
        let nan = T::from_f64(f64::NAN);
        let (mut o, mut lse) = (vec![nan; n * hq * d], vec![<T::Acc as Element>::from_f64(f64::NAN); n * hq]);
        let sinks = data.sinks.as_deref();
        let (out, sums) = (ViewMut::new(&mut o, n, hq, d)?, ViewMut::head_major(&mut lse, n, hq)?);
        rank.forward(plan, Forward::new(q, k, v, out, sums).sinks(sinks).lse_base(forward))?;
        let d_lse = data.d_lse.as_ref().map(|all| d_lse_of(all, &tq, &lse, hq));
        let d_lse = d_lse.map(|x| if backward == LseBase::Two { scaled(&x, 1.0 / LOG2_E) } else { x });
        let before = lse.clone();
        let mut gradients = [n * hq * d, m * hk * d, m * hk * d].map(|len| vec![nan; len]);
        let [dq, dk, dv] = &mut gradients;
        let written = [ViewMut::new(dq, n, hq, d)?, ViewMut::new(dk, m, hk, d)?, ViewMut::new(dv, m, hk, d)?];
        let mut dsinks = sinks.map(|sinks| vec![<T::Acc as Element>::from_f64(0.0); sinks.len()]);
        let (read, sums) = (View::new(&o, n, hq, d)?, View::head_major(&lse, n, hq)?);
        let call = Backward::new(q, k, v, read, sums, d_o, written).sinks(sinks).dsinks(dsinks.as_mut());
        let d_lse = d_lse.as_ref().map(|x| View::head_major(x, n, hq)).transpose()?;
        rank.backward(plan, call.d_lse(d_lse).lse_base(backward))?;
        let same = before.iter().zip(&lse).all(|(a, b)| a.to_f64().to_bits() == b.to_f64().to_bits());
        assert!(same, "a backward writes the caller's lse");
        Ok((o, lse, gradients))
    })
    .unwrap()
}

fn on_every_mesh<T: Element>(dtype: Dtype, bound: f64) {
    use LseBase::{Natural, Two};
    for (seed, sinks) in [(1, false), (2, true), (3, true)] {
        let p = problem(dtype, sinks);
        let data = Data::<T>::random(&p, seed);
        for (ulysses, ring) in [(1, 1), (3, 1), (1, 3), (2, 2)] {
            let plan = Plan::new(&p, mesh(ulysses, ring), Layout::Zigzag).unwrap();
            let [natural, two, wrong] =
                [[Natural, Natural], [Two, Two], [Natural, Two]].map(|bases| run(&plan, &data, bases));
            for ((natural, two), wrong) in natural.iter().zip(&two).zip(&wrong) {
                let what = format!("{dtype} seed {seed} {ulysses} x {ring}");
                assert!(natural.0 == two.0, "{what}: o");
                assert!(scaled(&natural.1, LOG2_E) == two.1, "{what}: lse");
                let all = natural.2.iter().zip(&two.2).zip(&wrong.2);
                for (i, ((natural, two), wrong)) in all.enumerate() {
                    let want: Vec<f64> = natural.iter().map(|x| x.to_f64()).collect();
                    let size = rms(want.iter().copied()).max(1e-9);
                    assert!(error(two, &want) < bound * size, "{what}: gradient {i} {}", error(two, &want) / size);
                    assert!(want.is_empty() || error(wrong, &want) > 0.05 * size, "{what}: no base shows in {i}");
                }
            }
        }
    }
}

#[test]
fn on_every_mesh_f32() {
    on_every_mesh::<f32>(Dtype::F32, 4e-6);
}

#[test]
fn on_every_mesh_bf16() {
    on_every_mesh::<bf16>(Dtype::Bf16, 4e-3);
}

#[test]
fn on_every_mesh_f64() {
    on_every_mesh::<f64>(Dtype::F64, 1e-14);
}

/// Parts whose lse is to base 2, a row without keys among them: the merged lse is too.
#[test]
fn combines() {
    let p = Problem::new(Batch::from_lengths(&[3]).unwrap(), 2, 2, 4, Dtype::F32);
    let plan = &Plan::new(&p, mesh(1, 2), Layout::Contiguous).unwrap();
    let merged = |base| {
        local::run(2, Duration::from_secs(10), |end| {
            let mut rank = Rank::new(end);
            let number = |i: usize| (((i + 7 * rank.rank()) * 37) % 19) as f32 / 9.0 - 1.0;
            let part: Vec<f32> = (0..24).map(number).collect();
            let mut lse: Vec<f32> = (0..6).map(|i| 3.0 * number(i + 5)).collect();
            lse[rank.rank()] = f32::NEG_INFINITY;
            let lse = if base == LseBase::Two { scaled(&lse, LOG2_E) } else { lse };
            let (mut o, mut sums) = ([0.0f32; 24], [0.0f32; 6]);
            let (part, lse) = (View::new(&part, 3, 2, 4)?, View::head_major(&lse, 3, 2)?);
            let (out, to) = (ViewMut::new(&mut o, 3, 2, 4)?, ViewMut::head_major(&mut sums, 3, 2)?);
            rank.combine(plan, CombineTo::All, CombineTensors::new(part, lse, out, to).lse_base(base))?;
            Ok((o, sums))
        })
        .unwrap()
    };
    for (natural, two) in merged(LseBase::Natural).into_iter().zip(merged(LseBase::Two)) {
        let near = |a: &[f32], b: Vec<f32>| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 2e-6);
        assert!(near(&two.0, natural.0.to_vec()) && near(&two.1, scaled(&natural.1, LOG2_E)), "{natural:?} {two:?}");
    }
}

#[test]
fn an_all_to_all_has_no_lse() {
    let plan = Plan::new(&problem(Dtype::F32, false), mesh(1, 1), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(10)).unwrap().remove(0));
    let to_heads = AllToAll { direction: AllToAllDirection::ToHeads, side: Side::Q, dim: 2, dtype: Dtype::F32 };
    let bindings = Bindings::default().with_lse_base(LseBase::Two);
    // SAFETY: refused before a tensor is read.
    let outcome: Result<(), Error> = unsafe { rank.run(&plan, to_heads, &bindings) };
    refused(outcome, &["lse_base 2 in an all-to-all is not supported", "leave lse_base out"]);
}
