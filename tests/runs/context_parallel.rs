// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole plans, run on threads, against the f64 reference.

use crate::common::{Data, check, one_rank, reference, run};
use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Gather},
};
use half::{bf16, f16};

pub const LAYOUTS: [Layout; 6] = [
    Layout::Contiguous,
    Layout::Zigzag,
    Layout::ZigzagPack,
    Layout::Striped { stripe: 1 },
    Layout::Striped { stripe: 5 },
    Layout::Balanced { chunks: 3 },
];

pub fn mesh(ulysses: usize, ring: usize) -> Mesh {
    Mesh { replicas: 1, ring, ulysses }
}

pub fn forms() -> [Options; 10] {
    [
        Options::new(),
        Options::new().gather(true),
        Options::new().passes(2),
        Options::new().gather(true).passes(2),
        Options::new().gather(Gather::Together),
        Options::new().gather(Gather::Together).circulate(Circulate::Queries),
        Options::new().circulate(Circulate::Queries),
        Options::new().circulate_forward(Circulate::Queries),
        Options::new().circulate(Circulate::Keys).pack_inputs(true),
        Options::new().reproducible(true),
    ]
}

/// Runs a problem on every mesh, layout and form, and holds each to the error rule.
pub fn every_way<T: Element>(what: &str, p: &Problem, meshes: &[Mesh], layouts: &[Layout], options: &[Options]) {
    let data = Data::<T>::random(p, 7);
    let (want, one) = (reference(p, &data), one_rank(p, &data));
    check(&format!("{what}, one rank"), &one, &one, &want);
    for &mesh in meshes {
        for &layout in layouts {
            for &option in options {
                let plan = Plan::builder(p).mesh(mesh).layout(layout).options(option).build().unwrap();
                let what = format!("{what}, {mesh}, {layout}, {option:?}");
                let got = run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
                check(&what, &got, &one, &want);
            }
        }
    }
}

fn nine_and_three() -> Problem {
    Problem::new(Batch::from_lengths(&[29, 18, 40]).unwrap(), 9, 3, 16, Dtype::F32)
}

fn set_up(mesh: Mesh, ulysses: usize, ring: usize) {
    assert_eq!((mesh.ulysses, mesh.ring), (ulysses, ring));
    every_way::<f32>("9 q heads, 3 kv heads", &nine_and_three(), &[mesh], &LAYOUTS, &[Options::new()]);
}

#[test]
fn nine_heads_on_six_ranks_by_gcd() {
    set_up(Mesh::gcd(9, 6).unwrap(), 3, 2);
}

#[test]
fn nine_heads_on_three_ranks_by_gcd() {
    set_up(Mesh::gcd(9, 3).unwrap(), 3, 1);
}

#[test]
fn nine_heads_on_four_ranks_by_gcd() {
    set_up(Mesh::gcd(9, 4).unwrap(), 1, 4);
}

#[test]
fn nine_heads_on_eight_ranks_by_hand() {
    set_up(Mesh { replicas: 1, ring: 2, ulysses: 4 }, 4, 2);
}

#[test]
fn nine_heads_on_one_rank() {
    set_up(Mesh::single(), 1, 1);
}

#[test]
fn every_form_in_every_layout() {
    let batch = Batch::from_lengths(&[17, 0, 1, 40, 5]).unwrap();
    for mask in [Mask::causal(), Mask::full(), Mask::window(6, 2)] {
        let p = Problem::new(batch.clone(), 6, 3, 16, Dtype::F32).with_mask(mask).with_value_dim(8);
        every_way::<f32>(&format!("{mask:?}"), &p, &[mesh(1, 4), mesh(3, 2), mesh(4, 1)], &LAYOUTS, &forms());
    }
}

#[test]
fn every_element_type() {
    fn of<T: Element>() {
        let batch = Batch::from_lengths(&[23, 42, 7]).unwrap();
        for mask in [Mask::causal(), Mask::full()] {
            let p = Problem::new(batch.clone(), 4, 2, 24, T::DTYPE).with_mask(mask);
            let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }];
            every_way::<T>(T::DTYPE.name(), &p, &[mesh(1, 3), mesh(2, 2), mesh(4, 1)], &layouts, &forms());
        }
    }
    of::<f16>();
    of::<bf16>();
    of::<f32>();
    of::<f64>();
}

#[test]
fn every_score_option() {
    let batch = Batch::from_lengths(&[31, 2, 26]).unwrap();
    let base = || Problem::new(batch.clone(), 6, 2, 16, Dtype::F32);
    let slopes = [0.5, 0.25, 0.125, 0.0625, 0.03, 0.7];
    let problems = [
        ("softcap", base().with_softcap(2.0)),
        ("ALiBi", base().with_alibi_slopes(&slopes)),
        ("sinks", base().with_sinks(true)),
        ("three sinks per head", base().with_sinks_per_head(3)),
        ("scale", base().with_scale(0.4)),
        (
            "all, in a window",
            base().with_softcap(3.0).with_alibi_slopes(&slopes).with_sinks(true).with_mask(Mask::window(9, 3)),
        ),
        (
            "all, full",
            base().with_softcap(3.0).with_alibi_slopes(&slopes).with_sinks_per_head(2).with_mask(Mask::full()),
        ),
    ];
    for (what, p) in problems {
        let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Balanced { chunks: 2 }];
        every_way::<f32>(what, &p, &[mesh(1, 3), mesh(4, 2), mesh(6, 1)], &layouts, &forms());
    }
}

#[test]
fn q_and_k_of_different_lengths() {
    let batches = [
        ("cross", Batch::cross(&[0, 9, 9, 30], &[0, 21, 25, 37], None).unwrap()),
        ("more q than k", Batch::cross(&[0, 20, 33], &[0, 7, 30], None).unwrap()),
        ("prefix", Batch::cross(&[0, 12, 20], &[0, 40, 60], Some(&[28, 4])).unwrap()),
        ("no k at all", Batch::cross(&[0, 5], &[0, 0], None).unwrap()),
    ];
    for (what, batch) in batches {
        for mask in [Mask::causal(), Mask::full(), Mask::window(5, 1)] {
            let p = Problem::new(batch.clone(), 4, 4, 8, Dtype::F32).with_mask(mask).with_sinks(true);
            let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 3 }];
            every_way::<f32>(what, &p, &[mesh(1, 4), mesh(2, 3)], &layouts, &forms());
        }
    }
}

#[test]
fn awkward_lengths_on_eight_ranks() {
    let lengths: [&[usize]; 8] = [&[1], &[2], &[3], &[31], &[0, 0], &[0, 1, 0, 2, 0], &[200, 1, 1, 3, 1], &[1; 20]];
    for lengths in lengths {
        let p = Problem::new(Batch::from_lengths(lengths).unwrap(), 8, 2, 8, Dtype::F32);
        let what = format!("documents {lengths:?}");
        let forms = [
            Options::new(),
            Options::new().gather(true),
            Options::new().gather(Gather::Together),
            Options::new().reproducible(true),
        ];
        every_way::<f32>(&what, &p, &[mesh(1, 8), mesh(4, 2), mesh(8, 1)], &LAYOUTS, &forms);
    }
}

/// A few new tokens over a cache that is spread over the ranks: q travels in the forward, and no row of k or v does.
#[test]
fn few_queries_over_a_spread_cache() {
    let o = Options::new;
    let options = [
        o().circulate_forward(Circulate::Queries),
        o().circulate_forward(Circulate::Queries).pack_inputs(true),
        o().circulate_forward(Circulate::Queries).circulate(Circulate::Keys),
    ];
    let lengths = |q: &[i32], k: &[i32], starts: &[i64]| Batch::cross(q, k, Some(starts)).unwrap();
    // One token each, none, and a chunk of a prompt.
    let batch = lengths(&[0, 1, 2, 2, 9], &[0, 64, 101, 110, 140], &[63, 36, 0, 23]);
    let base = Problem::new(batch, 6, 2, 16, Dtype::F32).with_value_dim(8);
    let slopes = [0.5, 0.25, 0.1, 0.3, 0.2, 0.7];
    let problems = [
        base.clone(),
        base.clone().with_sinks(true).with_softcap(3.0),
        base.clone().with_scale(40.0),
        base.clone().with_mask(Mask::sliding(20)).with_alibi_slopes(&slopes),
        base.with_mask(Mask::full()),
    ];
    for p in problems {
        every_way::<f32>("cache, f32", &p, &[mesh(1, 4), mesh(2, 2), mesh(3, 2)], &LAYOUTS, &options);
        every_way::<f32>("cache, nodes", &p, &[mesh(1, 4)], &LAYOUTS, &options.map(|o| o.ranks_per_node(2)));
        // Without sinks: over a dozen rows of half precision their gradients exceed the bound of `check`, whichever
        // side circulates.
        let of = |dtype| {
            let batch = p.batch().clone();
            Problem::new(batch, 6, 2, 16, dtype).with_value_dim(8).with_mask(p.mask())
        };
        every_way::<bf16>("cache, bf16", &of(Dtype::Bf16), &[mesh(1, 4)], &LAYOUTS, &options[..1]);
        every_way::<f16>("cache, f16", &of(Dtype::F16), &[mesh(2, 2)], &LAYOUTS, &options[..1]);
        every_way::<f64>("cache, f64", &of(Dtype::F64), &[mesh(1, 3)], &LAYOUTS, &options[..1]);
    }
}

/// What a forward with travelling q moves: q to each rank with keys, a partial o and its lse back.
#[test]
fn a_token_moves_q_and_partial_results() {
    let batch = Batch::cross(&[0, 1], &[0, 64], Some(&[63])).unwrap();
    let p = Problem::new(batch, 6, 2, 16, Dtype::Bf16).with_value_dim(8);
    let moved = |options| {
        let plan = Plan::builder(&p).mesh(mesh(1, 4)).layout(Layout::Contiguous).options(options).build().unwrap();
        let (forward, _) = plan.verify().unwrap();
        forward.ranks.iter().flat_map(|r| &r.traffic).map(|t| t.bytes_out).sum::<u64>()
    };
    let (q, partial) = (6 * 16 * 2, 6 * (8 + 2) * 4);
    assert_eq!(moved(Options::new().circulate_forward(Circulate::Queries)), 3 * (q + partial));
    assert_eq!(moved(Options::new().circulate_forward(Circulate::Keys)), 48 * 2 * (16 + 8) * 2);
}

#[test]
fn replicas_run_the_same_plan_on_their_own() {
    let p = nine_and_three();
    let data = Data::<f32>::random(&p, 1);
    let plan = Plan::new(&p, Mesh { replicas: 2, ring: 2, ulysses: 2 }, Layout::Zigzag).unwrap();
    assert_eq!(plan.mesh().replicas, 2);
    check("two replicas", &run(&plan, &data).unwrap(), &one_rank(&p, &data), &reference(&p, &data));
}

#[test]
fn a_run_repeats_bit_for_bit() {
    let p = nine_and_three().with_sinks(true);
    let data = Data::<f32>::random(&p, 5);
    for option in forms() {
        let plan = Plan::builder(&p).mesh(mesh(2, 3)).layout(Layout::Zigzag).options(option).build().unwrap();
        let first = run(&plan, &data).unwrap();
        for _ in 0..5 {
            assert!(run(&plan, &data).unwrap() == first, "{option:?}");
        }
    }
}

#[test]
fn one_document_does_not_touch_another() {
    let p = Problem::new(Batch::from_lengths(&[21, 30, 13]).unwrap(), 4, 2, 16, Dtype::F32).with_mask(Mask::full());
    let data = Data::<f32>::random(&p, 5);
    let mut other = Data::<f32>::random(&p, 5);
    // The first document becomes NaN throughout: the others must not change by a bit.
    for (v, row) in [(&mut other.q, 64), (&mut other.k, 32), (&mut other.v, 32), (&mut other.d_o, 64)] {
        v[..21 * row].fill(f32::NAN);
    }
    for layout in LAYOUTS {
        for option in forms() {
            let plan = Plan::builder(&p).mesh(mesh(2, 3)).layout(layout).options(option).build().unwrap();
            let (a, b) = (run(&plan, &data).unwrap(), run(&plan, &other).unwrap());
            for (a, b, row) in [(&a.o, &b.o, 64), (&a.dq, &b.dq, 64), (&a.dk, &b.dk, 32), (&a.dv, &b.dv, 32)] {
                assert!(a[21 * row..] == b[21 * row..], "{layout}, {option:?}");
                assert!(b[..row].iter().all(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn reproducible_plans_give_the_bits_of_one_rank() {
    fn of<T: Element>(p: &Problem) {
        let data = Data::<T>::random(p, 11);
        let option = Options::new().reproducible(true);
        let one = run(
            &Plan::builder(p).mesh(Mesh::single()).layout(Layout::Contiguous).options(option).build().unwrap(),
            &data,
        )
        .unwrap();
        let meshes = [
            mesh(1, 2),
            mesh(2, 1),
            mesh(1, 3),
            mesh(3, 1),
            mesh(2, 2),
            mesh(1, 4),
            mesh(3, 2),
            mesh(2, 4),
            mesh(1, 8),
        ];
        let one_level = meshes.map(|mesh| (mesh, 0));
        let ring = [(mesh(1, 4), 2), (mesh(2, 4), 4), (mesh(1, 6), 3), (mesh(1, 6), 2)];
        let ulysses = [(mesh(4, 1), 2), (mesh(4, 2), 2), (mesh(6, 1), 3), (mesh(6, 1), 2)];
        let both = [(mesh(4, 2), 4), (mesh(6, 2), 6), (mesh(4, 4), 8)];
        for (mesh, ranks) in one_level.into_iter().chain(ring).chain(ulysses).chain(both) {
            for layout in LAYOUTS {
                let got = run(
                    &Plan::builder(p).mesh(mesh).layout(layout).options(option.ranks_per_node(ranks)).build().unwrap(),
                    &data,
                )
                .unwrap();
                let what = format!("on {mesh}, {layout}, {ranks} ranks of a node");
                assert!(got.o == one.o, "o {what}");
                assert!(got.lse == one.lse, "lse {what}");
                assert!(got.dq == one.dq, "dq {what}");
                assert!(got.dk == one.dk, "dk {what}");
                assert!(got.dv == one.dv, "dv {what}");
                assert!(got.dsinks == one.dsinks, "dsinks {what}");
            }
        }
    }
    let batch = Batch::from_lengths(&[150, 1, 77]).unwrap();
    let p = |dtype| Problem::new(batch.clone(), 6, 3, 16, dtype);
    of::<f32>(&p(Dtype::F32));
    of::<f32>(&Problem::new(batch.clone(), 6, 1, 16, Dtype::F32));
    of::<bf16>(&p(Dtype::Bf16).with_mask(Mask::window(40, 7)).with_softcap(4.0).with_sinks(true));
}

#[test]
fn tokens_are_dealt_once_and_positions_follow() {
    let p = Problem::new(Batch::cross(&[0, 9, 9, 30], &[0, 21, 25, 37], None).unwrap(), 4, 2, 8, Dtype::F32);
    for layout in LAYOUTS {
        let plan = Plan::new(&p, mesh(3, 4), layout).unwrap();
        for side in [Side::Q, Side::K] {
            let mut seen = vec![0; p.batch().tokens(side)];
            for rank in 0..12 {
                let tokens = plan.local_tokens(side, rank).indices();
                assert_eq!(tokens.len(), plan.local_tokens(side, rank).len());
                for (t, pos) in tokens.iter().zip(plan.local_tokens(side, rank).positions()) {
                    seen[*t] += 1;
                    let d = p.batch().document_of(side, *t);
                    assert_eq!(pos, p.batch().start(side, d) + (*t - p.batch().document(side, d).start) as i64);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{layout}");
        }
    }
}
