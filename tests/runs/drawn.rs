// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problems and ways to run them that are drawn at random, against the f64 reference.

use crate::common::{Data, Random, any_slopes, check_within, one_rank, reference, run};
use crate::context_parallel::{forms, mesh};
use crate::seeds::each_seed;
use cpattn::{Batch, Dtype, Layout, Mask, Plan, Problem};
use fastrand::Rng;

/// Draws a whole problem and a way to run it.
fn any_case(draw: &mut Rng) -> (Problem, Plan, u64) {
    let seed = draw.u64(..);
    let mut r = Random::new(seed);
    let documents = 1 + r.below(4);
    let lengths = |r: &mut Random| (0..documents).map(|_| r.below(3) * r.below(20)).collect::<Vec<_>>();
    let (q, k) = (lengths(&mut r), lengths(&mut r));
    let cu = |l: &[usize]| {
        l.iter().fold(vec![0i32], |mut c, &n| {
            c.push(c.last().unwrap() + n as i32);
            c
        })
    };
    let batch = match r.below(3) {
        0 => Batch::cross(&cu(&q), &cu(&k), None).unwrap(),
        1 => {
            let starts: Vec<i64> = (0..documents).map(|_| r.below(30) as i64 - 10).collect();
            Batch::cross(&cu(&q), &cu(&k), Some(&starts)).unwrap()
        }
        _ => Batch::new(&cu(&q)).unwrap(),
    };
    let kv_heads = 1 + r.below(3);
    let heads = kv_heads * (1 + r.below(3));
    // Now and then those of MLA in its latent form.
    let [d, dv] = if r.below(12) == 0 { [576, 512] } else { [(); 2].map(|()| 1 + r.below(24)) };
    let mut p = Problem::new(batch, heads, kv_heads, d, Dtype::F32).with_value_dim(dv);
    p = p.with_mask(match r.below(4) {
        0 => Mask::full(),
        1 => Mask::causal(),
        2 => Mask::sliding(1 + r.below(9) as u32),
        _ => Mask::window(r.below(9) as u32, r.below(9) as u32),
    });
    if r.below(3) == 0 {
        p = p.with_softcap(1.0 + r.uniform());
    }
    if r.below(3) == 0 {
        p = any_slopes(&mut r, p);
    }
    p = p.with_sinks_per_head([0, 1, 0, 3, 0, 2][r.below(6)]);
    if r.below(3) == 0 {
        p = p.with_dropout(0.9 * r.uniform());
    }
    let (nodes, per_node) = if r.below(3) == 0 { (2 + r.below(2), 1 + r.below(3)) } else { (1, 1 + r.below(5)) };
    let mesh = mesh(1 + r.below(heads), nodes * per_node);
    let layout = match r.below(5) {
        0 => Layout::Contiguous,
        1 => Layout::Zigzag,
        2 => Layout::ZigzagPack,
        3 => Layout::Striped { stripe: 1 + r.below(6) as u32 },
        _ => Layout::Balanced { chunks: 1 + r.below(5) as u32 },
    };
    let option = forms()[r.below(8)];
    let option = if kv_heads < option.passes { option.passes(1) } else { option };
    let option = match nodes {
        // As many Ulysses ranks as lie in a node.
        1 => option.ranks_per_node((1..=mesh.ulysses).filter(|n| mesh.ulysses.is_multiple_of(*n)).nth(1).unwrap_or(0)),
        _ => option.ranks_per_node(per_node * mesh.ulysses),
    };
    let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(option).build().unwrap();
    (p, plan, seed)
}

#[test]
fn any_problem_on_any_mesh() {
    each_seed(300, |draw| {
        let (p, plan, seed) = any_case(draw);
        let data = Data::<f32>::random(&p, seed);
        check_within(16.0, "drawn", &run(&plan, &data).unwrap(), &one_rank(&p, &data), &reference(&p, &data));
    });
}
