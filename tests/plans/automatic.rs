// SPDX-License-Identifier: MIT OR Apache-2.0
//! The automatic mesh and layout.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{AttentionKind, Choice},
    slices,
};

fn problem(lengths: &[usize], heads: usize, kv_heads: usize) -> Problem {
    Problem::new(Batch::from_lengths(lengths).unwrap(), heads, kv_heads, 64, Dtype::Bf16)
}

#[test]
fn candidates_are_all_meshes_that_fit_the_heads() {
    let meshes = |world, heads| {
        let c = Choice::new(&problem(&[4096], heads, heads), world, Choice::BALANCE, 0).unwrap();
        c.candidates.iter().map(|c| (c.mesh.ulysses, c.mesh.ring)).collect::<Vec<_>>()
    };
    assert_eq!(meshes(12, 5), [(4, 3), (3, 4), (2, 6), (1, 12)]);
    assert_eq!(meshes(7, 6), [(1, 7)]);
    assert_eq!(meshes(1, 6), [(1, 1)]);
}

#[test]
fn uneven_heads_cost_what_the_busiest_rank_does() {
    // Bytes for nothing: five heads on four ranks cost 2·4/5 of an even share, a ring of four costs nothing extra.
    let p = problem(&[1 << 14], 5, 5);
    let c = Choice::new(&p, 4, 0, 0).unwrap();
    let of = |u: usize| *c.candidates.iter().find(|c| c.mesh.ulysses == u).unwrap();
    assert_eq!(c.mesh.ulysses, 1);
    let over = of(4).multiply_adds as f64 / (p.area() * 5 * 7 * 64 / 4) as f64;
    assert!((over - 1.6).abs() < 1e-9, "{over}");
    assert!(of(1).multiply_adds * 155 < of(4).multiply_adds * 100);
}

#[test]
fn equal_costs_go_to_the_larger_ulysses() {
    // Nothing to compute and nothing to send: all candidates cost 0.
    let c = Choice::new(&problem(&[0, 0], 6, 2), 6, Choice::BALANCE, 0).unwrap();
    assert!(c.candidates.iter().all(|c| c.cost == 0));
    assert_eq!(c.mesh.ulysses, 6);
}

#[test]
fn what_cannot_be_merged_stays_on_ulysses() {
    let p = problem(&[4096], 8, 8).with_kind(AttentionKind::Other);
    assert_eq!(Mesh::auto(&p, 4).unwrap(), Mesh::ulysses(4).unwrap());
    let text = Mesh::auto(&p, 16).unwrap_err().to_string();
    assert!(text.contains("world of 16") && text.contains("8 heads"), "{text}");
    assert!(Mesh::auto(&p, 0).is_err());
}

#[test]
fn a_kept_choice_is_the_plan_that_it_names() {
    let first = problem(&[900, 30, 0, 400], 6, 3).with_mask(Mask::sliding(64)).with_sinks(true);
    let options = Options::new().passes(2);
    let previous = Plan::builder(&first).world(6).options(options).build().unwrap();
    let second = problem(&[5, 600], 6, 3).with_mask(Mask::sliding(64)).with_sinks(true);
    let kept = previous.next(second.batch()).unwrap();
    assert_eq!(
        kept,
        Plan::builder(&second).mesh(previous.mesh()).layout(previous.layout()).options(options).build().unwrap()
    );
    assert_eq!(kept.next(first.batch()).unwrap().fingerprint(), previous.fingerprint());
}

#[test]
fn kept_choices_of_several_kinds_have_one_distribution() {
    let full = problem(&[900, 30, 0, 400], 6, 3);
    let windowed = full.clone().with_mask(Mask::sliding(16));
    let next = Batch::from_lengths(&[5, 700, 61]).unwrap();
    let alone = |p: &Problem| Plan::new(p, Mesh::ring(4).unwrap(), Layout::Balanced { chunks: 8 }).unwrap();
    let separate = [&full, &windowed].map(|p| alone(p).next(&next).unwrap().distribution());
    assert_ne!(separate[0], separate[1], "the masks deal alike: this batch shows nothing");
    // Whichever kind decides, and over several steps.
    for (base, other) in [(&full, &windowed), (&windowed, &full)] {
        let base = alone(base);
        let mut kinds = [
            base.clone(),
            Plan::builder(other).tokens_of(&base).options(Options::new().pack_inputs(true)).build().unwrap(),
        ];
        for batch in [&next, full.batch(), &next] {
            kinds = kinds.map(|plan| plan.next(batch).unwrap());
            assert_eq!(kinds[0].distribution(), kinds[1].distribution());
            assert_eq!(kinds[1].options(), Options::new().pack_inputs(true));
        }
        assert_eq!(kinds[0], base.next(&next).unwrap());
    }
}

#[test]
fn every_automatic_plan_is_a_plan() {
    for world in 1..13 {
        for (lengths, heads, kv) in [(vec![100, 3, 0, 59], 9, 3), (vec![31], 4, 1), (vec![1], 12, 12)] {
            let plan = Plan::auto(&problem(&lengths, heads, kv), world).unwrap();
            assert_eq!(plan.mesh().world(), world);
            assert_eq!(plan, Plan::auto(&problem(&lengths, heads, kv), world).unwrap());
        }
    }
}

/// Kinds of layers with different slices keep one distribution, also of the next batch.
#[test]
fn kinds_of_different_slices_have_one_distribution() {
    let problem = |lengths: &[usize], prefixes: bool| {
        let batch = Batch::from_lengths(lengths).unwrap();
        let cu = batch.cu_seqlens(Side::Q).to_vec();
        let halves: Vec<usize> = lengths.iter().map(|n| n / 2).collect();
        let list = if prefixes { slices::prefix_lm(&cu, &halves) } else { slices::chunks(&cu, 64) };
        Problem::new(batch.with_slices(&list.unwrap()).unwrap(), 8, 2, 64, Dtype::Bf16)
    };
    let (first, next) = ([4000, 96, 700, 1300], [1000, 2000, 1996, 1100]);
    let kinds = [(problem(&first, false), 3), (problem(&first, true), 9)];
    let plans = Plan::auto_for(&kinds, 8, Options::default()).unwrap();
    let chosen = plans.iter().cloned();
    let base = Plan::new(&kinds[0].0, Mesh::ring(4).unwrap(), Layout::Balanced { chunks: 4 }).unwrap();
    let other = Plan::builder(&kinds[1].0).tokens_of(&base).build().unwrap();
    for [a, b] in [chosen.collect::<Vec<_>>().try_into().unwrap(), [base, other]] {
        assert_eq!(a.distribution(), b.distribution());
        let of = |plan: &Plan, prefixes| plan.next(problem(&next, prefixes).batch()).unwrap();
        assert_eq!(of(&a, false).distribution(), of(&b, true).distribution(), "{}", a.layout());
    }
    // The mask of the problem means something else with slices and without.
    let text = plans[0].next(&Batch::from_lengths(&next).unwrap()).unwrap_err().to_string();
    assert!(text.contains("batch is without slices, expected one with slices, as in the plan before"), "{text}");
}
