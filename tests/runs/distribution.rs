// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans with the tokens of another plan: every layout, meshes of 1 to 8 ranks, windows, heads and dims. Each rank
//! holds the same tokens in the same order, the schedules are proved, and runs give what one rank gives.

use crate::common::{Data, Random, check, one_rank, reference, run};
use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Choice, Gather},
};

fn layouts() -> impl Iterator<Item = Layout> {
    let more = [Layout::Balanced { chunks: 1 }, Layout::Balanced { chunks: 7 }, Layout::Striped { stripe: 3 }];
    Choice::LAYOUTS.into_iter().chain(more)
}

fn meshes() -> impl Iterator<Item = Mesh> {
    (1..=8).flat_map(|world| {
        let fits = move |u: &usize| world % u == 0 && *u <= 4;
        (1..=world)
            .filter(fits)
            .map(move |u| Mesh { replicas: 1, ring: world / u, ulysses: u }.in_world(world).unwrap())
    })
}

fn problem(batch: Batch) -> Problem {
    Problem::new(batch, 4, 2, 8, Dtype::F32)
}

/// The other kinds of layers of a model whose first kind is causal with 4 heads.
fn kinds(base: &Problem) -> Vec<(Problem, Options)> {
    let again = |heads, kv, dim| Problem::new(base.batch().clone(), heads, kv, dim, Dtype::F32);
    vec![
        (base.clone(), Options::default()),
        (base.clone().with_mask(Mask::sliding(5)), Options::default()),
        (base.clone().with_mask(Mask::full()).with_softcap(3.0), Options::default().gather(Gather::Others)),
        (again(8, 1, 8).with_value_dim(16).with_mask(Mask::window(9, 2)), Options::default()),
        (again(6, 3, 16).with_sinks(true).with_scale(0.5), Options::default().reproducible(true)),
    ]
}

fn tokens(plan: &Plan) -> Vec<[Vec<usize>; 2]> {
    (0..plan.mesh().world()).map(|r| [Side::Q, Side::K].map(|side| plan.local_tokens(side, r).indices())).collect()
}

#[test]
fn derived_plans_hold_the_same_tokens_and_are_proved() {
    let mut random = Random::new(20);
    let mut differed = 0;
    for mesh in meshes() {
        for layout in layouts() {
            let lengths: Vec<usize> = (0..1 + random.below(6)).map(|_| random.below(60)).collect();
            let base = Plan::new(&problem(Batch::from_lengths(&lengths).unwrap()), mesh, layout).unwrap();
            for (problem, options) in kinds(base.problem()) {
                let plan = Plan::builder(&problem).tokens_of(&base).options(options).build().unwrap();
                let what = format!("{mesh} {layout} {lengths:?} {:?}", problem.mask());
                assert_eq!(tokens(&plan), tokens(&base), "{what}");
                assert_eq!(plan.distribution(), base.distribution(), "{what}");
                assert_eq!((plan.mesh(), plan.layout()), (mesh, layout));
                plan.verify().unwrap_or_else(|e| panic!("{what}: {e}"));
                // A plan made by itself may deal otherwise. It is equal, and has an equal number, only where it does
                // not.
                let own = Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build().unwrap();
                let same = tokens(&own) == tokens(&plan);
                assert_eq!(own.distribution() == plan.distribution(), same, "{what}");
                assert_eq!((own == plan, own.fingerprint() == plan.fingerprint()), (same, same), "{what}");
                differed += usize::from(!same);
            }
        }
    }
    // The fault that this is about is frequent: balanced chunks go by mask area.
    assert!(differed > 20, "{differed}");
}

#[test]
fn derived_plans_run_as_one_rank_does() {
    let batch = Batch::from_lengths(&[40, 3, 0, 57, 21]).unwrap();
    for (world, ulysses) in [(4, 1), (4, 2), (6, 2)] {
        let mesh = Mesh { replicas: 1, ring: world / ulysses, ulysses }.in_world(world).unwrap();
        for layout in [Layout::Balanced { chunks: 4 }, Layout::Zigzag, Layout::Striped { stripe: 3 }] {
            let base = Plan::new(&problem(batch.clone()), mesh, layout).unwrap();
            for (problem, options) in kinds(base.problem()) {
                let plan = Plan::builder(&problem).tokens_of(&base).options(options).build().unwrap();
                let data = Data::<f32>::random(&problem, 3);
                let what = format!("{mesh} {layout} {:?}", problem.mask());
                check(&what, &run(&plan, &data).unwrap(), &one_rank(&problem, &data), &reference(&problem, &data));
            }
        }
    }
}

#[test]
fn a_distribution_is_what_the_ranks_hold_not_how_it_came_about() {
    let batch = Batch::from_lengths(&[64, 64]).unwrap();
    let p = problem(batch.clone());
    let of = |mesh, layout| Plan::new(&p, mesh, layout).unwrap().distribution();
    let (ring, ulysses) = (Mesh::ring(4).unwrap(), Mesh::ulysses(4).unwrap());
    assert_eq!(of(ring, Layout::Contiguous), of(ulysses, Layout::Zigzag));
    assert_eq!(of(ring, Layout::Contiguous), of(Mesh { replicas: 2, ring: 1, ulysses: 4 }, Layout::Contiguous));
    assert_ne!(of(ring, Layout::Contiguous), of(ring, Layout::ZigzagPack));
    assert_ne!(of(ring, Layout::Contiguous), of(Mesh::ring(2).unwrap(), Layout::Contiguous));
    // The same tokens by number, of other documents.
    let other = Plan::new(&problem(Batch::from_lengths(&[63, 65]).unwrap()), ring, Layout::Contiguous).unwrap();
    assert_ne!(of(ring, Layout::Contiguous), other.distribution());
}

#[test]
fn another_batch_and_too_few_heads_are_refused() {
    let base =
        Plan::new(&problem(Batch::from_lengths(&[9, 20]).unwrap()), Mesh::ulysses(4).unwrap(), Layout::Contiguous);
    let base = base.unwrap();
    let refused = |p: &Problem, words: &[&str]| {
        let said = Plan::builder(p).tokens_of(&base).build().unwrap_err().to_string();
        for word in words {
            assert!(said.contains(word), "{said}: {word}");
        }
    };
    let of = |lengths: &[usize]| problem(Batch::from_lengths(lengths).unwrap());
    refused(
        &of(&[10, 19]),
        &["cu_seqlens_q[1] is 10", "expected 9, as in the batch of the other plan", "same documents"],
    );
    refused(&of(&[29]), &["cu_seqlens_q is of length 2, expected 3, as in the batch of the other plan"]);
    let cross = |starts: Option<&[i64]>| problem(Batch::cross(&[0, 9, 29], &[0, 9, 29], starts).unwrap());
    refused(&cross(Some(&[0, 4])), &["q_start[1] is 4", "not given"]);
    refused(&Problem::new(base.problem().batch().clone(), 3, 3, 8, Dtype::F32), &["mesh.ulysses is 4", "heads = 3"]);
    let said = Plan::builder(base.problem())
        .tokens_of(&base)
        .options(Options::default().passes(9))
        .build()
        .unwrap_err()
        .to_string();
    assert!(said.contains("options.passes"), "{said}");
}

#[test]
fn explain_names_the_distribution_and_whose_chunks_they_are() {
    let p = problem(Batch::from_lengths(&[300, 20, 80]).unwrap());
    let base = Plan::new(&p, Mesh::ring(4).unwrap(), Layout::Balanced { chunks: 4 }).unwrap();
    let plan = Plan::builder(&p.with_mask(Mask::sliding(8))).tokens_of(&base).build().unwrap();
    let name = format!("distribution {}", base.distribution());
    assert!(base.explain().contains(&name) && plan.explain().contains(&name));
    assert!(plan.explain().contains("chunks are those of another plan") && !base.explain().contains("of another plan"));
    // Many short documents, each cut for every rank.
    let short = problem(Batch::from_lengths(&[20; 40]).unwrap());
    let zigzag = |layout| Plan::new(&short, Mesh::ring(4).unwrap(), layout).unwrap().explain();
    assert!(zigzag(Layout::Zigzag).contains("zigzag cuts each document for every ring rank"));
    assert!(!zigzag(Layout::ZigzagPack).contains("cuts each document"));
}

#[test]
fn a_choice_for_several_kinds_of_layers_weighs_all() {
    let mut random = Random::new(7);
    for world in [1, 2, 4, 6, 8] {
        let lengths: Vec<usize> = (0..12).map(|_| 1 << (3 + random.below(9))).collect();
        let full = problem(Batch::from_lengths(&lengths).unwrap());
        let alone = Plan::auto(&full, world).unwrap();
        assert_eq!(
            Plan::auto_for(&[(full.clone(), 3)], world, Options::default()).unwrap(),
            std::slice::from_ref(&alone)
        );
        let windowed = Problem::new(full.batch().clone(), 2, 2, 8, Dtype::F32).with_mask(Mask::sliding(64));
        let plans = Plan::auto_for(&[(full.clone(), 1), (windowed.clone(), 5)], world, Options::default()).unwrap();
        assert_eq!(tokens(&plans[0]), tokens(&plans[1]));
        // Two heads are the limit of every mesh of this model.
        assert!(plans[0].mesh().world() == world && plans[0].mesh().ulysses <= 2);
    }
    // One long document. Under a window any layout is even, and contiguous sends least; the count of layers decides.
    let full = problem(Batch::from_lengths(&[1 << 14]).unwrap());
    let windowed = full.clone().with_mask(Mask::sliding(16));
    let of = |a: usize, b: usize| {
        let kinds = [(full.clone(), a), (windowed.clone(), b)];
        Plan::auto_for(&kinds, 7, Options::default()).unwrap()[0].layout()
    };
    let alone = Plan::auto_for(&[(windowed.clone(), 1)], 7, Options::default()).unwrap();
    assert_eq!(alone[0].layout(), Layout::Contiguous);
    assert_ne!(of(1, 1), Layout::Contiguous);
    assert!(Plan::auto_for(&[], 4, Options::default()).is_err());
    let nothing = Plan::auto_for(&[(full.clone(), 1), (windowed.clone(), 0)], 7, Options::default()).unwrap_err();
    assert!(nothing.to_string().contains("layers is 0"), "{nothing}");
    let other = problem(Batch::from_lengths(&[5]).unwrap());
    assert!(Plan::auto_for(&[(full, 1), (other, 1)], 4, Options::default()).is_err());
}
