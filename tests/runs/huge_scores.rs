// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scores so large that a float has no digits left below 1, in whole plans: over ring steps, heads, lists of keys, with
//! sinks, slopes and a softcap, o and lse are those of the f64 reference. Products are exact, as in
//! `tests/kernel/huge_scores.rs`; gradients have no digits left there, and must be finite.

use crate::common::{Data, Lists, Random, Results, reference, run};
use crate::context_parallel::{LAYOUTS, forms, mesh};
use cpattn::{Batch, Dtype, Element, Layout, Mask, Plan, Problem, Side};
use half::bf16;

const DIM: usize = 8;

/// Rows whose dims are all equal: of q powers of 2, of k small integers times a power of 2.
fn huge<T: Element>(p: &Problem, seed: u64) -> Data<T> {
    let mut data = Data::<T>::random(p, seed);
    let mut r = Random::new(seed);
    let powers = [-14, -14, -8, 5, 11, 13, 15, 20, 30, 60];
    for row in data.q.chunks_mut(DIM) {
        row.fill(T::from_f64([1.0, -1.0][r.below(2)] * 2f64.powi(powers[r.below(powers.len())])));
    }
    for row in data.k.chunks_mut(DIM) {
        row.fill(T::from_f64(1024.0 * (r.below(15) as f64 - 7.0)));
    }
    data
}

fn check<T: Element>(what: &str, found: &Results<T>, expected: &Results<f64>) {
    let (o, lse) = (T::DTYPE.unit_roundoff().max(2f64.powi(-18)), <T::Acc as Element>::DTYPE.unit_roundoff());
    for (i, (found, expected)) in found.o.iter().zip(&expected.o).enumerate() {
        let found = found.to_f64();
        assert!((found - expected).abs() <= 16.0 * o, "{what}: o[{i}] is {found}, not {expected}");
    }
    for (i, (found, expected)) in found.lse.iter().zip(&expected.lse).enumerate() {
        let found = found.to_f64();
        let close = found == *expected || (found - expected).abs() <= 4.0 * lse * (expected.abs() + 8.0);
        assert!(close, "{what}: lse[{i}] is {found:e}, not {expected:e}");
    }
    for (name, of) in [("dq", &found.dq), ("dk", &found.dk), ("dv", &found.dv)] {
        let stray = of.iter().position(|x| !x.to_f64().is_finite());
        assert_eq!(stray, None, "{what}: {name}");
    }
}

fn problems(dtype: Dtype) -> Vec<(&'static str, Problem)> {
    let of = |lengths: &[usize]| {
        let batch = Batch::from_lengths(lengths).unwrap();
        Problem::new(batch, 4, 2, DIM, dtype).with_scale(0.25)
    };
    let p = of(&[70, 0, 3, 140]);
    let slopes = [1e18, -1e18, 2f32.powi(40), 1e18];
    vec![
        ("plain", p.clone()),
        ("causal, sinks", p.clone().with_mask(Mask::causal()).with_sinks(true)),
        ("window, softcap", p.clone().with_mask(Mask::window(40, 3)).with_softcap(8.0)),
        ("slopes", p.with_scale(2f64.powi(-90)).with_alibi_slopes(&slopes)),
    ]
}

fn every_mesh<T: Element>(dtype: Dtype) {
    for (seed, (what, p)) in problems(dtype).into_iter().enumerate() {
        let data = huge::<T>(&p, seed as u64 + 2);
        let expected = reference(&p, &data);
        for (mesh, layout) in
            [(1, 1), (1, 4), (2, 2), (4, 1)].map(|(u, r)| mesh(u, r)).into_iter().zip(LAYOUTS.into_iter().cycle())
        {
            for options in forms() {
                let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
                check(&format!("{what}, {dtype}, {mesh:?}, {layout}"), &run(&plan, &data).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn rings_and_heads() {
    every_mesh::<f32>(Dtype::F32);
    every_mesh::<bf16>(Dtype::Bf16);
    every_mesh::<f64>(Dtype::F64);
}

/// Lists of all keys of the document are the problem without lists.
#[test]
fn listed_keys() {
    for (seed, (what, p)) in problems(Dtype::F32).into_iter().enumerate().filter(|(_, (_, p))| p.mask() == Mask::full())
    {
        let mut data = huge::<f32>(&p, seed as u64 + 2);
        let expected = reference(&p, &data);
        let mut all = Vec::new();
        for token in 0..p.batch().tokens(Side::Q) {
            let keys = p.batch().document(Side::K, p.batch().document_of(Side::Q, token)).len();
            all.extend((0..140).map(|i| if i < keys { i as i32 } else { -1 }));
        }
        data.key_indices = Some(Lists { all, heads: 1, entries: 140 });
        for mesh in [mesh(1, 1), mesh(1, 3), mesh(2, 2)] {
            let plan = Plan::new(&p, mesh, Layout::Zigzag).unwrap();
            check(&format!("{what}, listed, {mesh:?}"), &run(&plan, &data).unwrap(), &expected);
        }
    }
}
