// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans: the verifier proves every rank's schedules in both directions; reports on plans are tested too.
//!
//! This file: a grid of layouts, masks and options over shapes with awkward sizes. `dealt`: the tokens of a layout and
//! the bytes sent, in numbers computed by hand. `drawn`: random problems, which are correct or refused. `automatic`:
//! choices of mesh and layout. `costs`, `explain`: reports. `machine`: descriptions of machines.

mod automatic;
mod costs;
mod dealt;
mod drawn;
mod explain;
mod machine;
#[path = "../common/seeds.rs"]
mod seeds;
#[path = "../common/slow.rs"]
mod slow;

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
    schedule::{Direction, Schedule, verify::Report},
};
use slow::Turn;

const LAYOUTS: [Layout; 7] = [
    Layout::Contiguous,
    Layout::Zigzag,
    Layout::ZigzagPack,
    Layout::Striped { stripe: 1 },
    Layout::Striped { stripe: 3 },
    Layout::Balanced { chunks: 1 },
    Layout::Balanced { chunks: 3 },
];

const MASKS: [Mask; 6] = [
    Mask::full(),
    Mask::causal(),
    Mask::window(3, 0),
    Mask::window(2, 4),
    Mask { left: Some(5), right: None },
    Mask { left: None, right: Some(2) },
];

fn options() -> Vec<Options> {
    let o = Options::new;
    vec![
        o(),
        o().gather(true),
        o().gather(Gather::Together),
        o().gather(Gather::Together).passes(2).wire(Wire::Bf16),
        o().gather(Gather::Together).circulate(Circulate::Queries),
        o().passes(2),
        o().passes(3).gather(true).wire(Wire::Bf16),
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Keys).wire(Wire::Bf16).pack_inputs(true),
        o().circulate(Circulate::Queries),
        o().circulate_forward(Circulate::Queries),
        o().circulate_forward(Circulate::Queries).pack_inputs(true),
        o().circulate(Circulate::Queries).gather(true),
        o().circulate(Circulate::Queries).wire(Wire::Bf16).pack_inputs(true),
        o().reproducible(true),
        o().reproducible(true).pack_inputs(true),
        o().pack_inputs(true),
    ]
}

fn verify(problem: &Problem, mesh: Mesh, layout: Layout, options: Options) -> (Report, Report) {
    let plan = Plan::builder(problem)
        .mesh(mesh)
        .layout(layout)
        .options(options)
        .build()
        .unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"));
    plan.verify().unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"))
}

/// Every layout, mask and option on one problem shape; returns how many plans were proved.
fn grid(batch: &Batch, heads: usize, kv_heads: usize, mesh: Mesh) -> usize {
    let mut proved = 0;
    for layout in LAYOUTS {
        for mask in MASKS {
            for o in options() {
                if o.passes > kv_heads {
                    continue;
                }
                let dtype = if proved % 2 == 0 { Dtype::Bf16 } else { Dtype::F32 };
                let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype)
                    .with_value_dim(4)
                    .with_mask(mask)
                    .with_sinks(proved % 3 == 0);
                let (forward, backward) = verify(&problem, mesh, layout, o);
                assert_eq!(forward.pairs, problem.area() * heads as u128);
                assert_eq!(backward.pairs, forward.pairs);
                proved += 1;
            }
        }
    }
    proved
}

fn pack() -> Batch {
    Batch::from_lengths(&[7, 0, 1, 13, 3, 22]).unwrap()
}

#[test]
fn nine_heads_on_six_ranks() {
    let mesh = Mesh::gcd(9, 6).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (3, 2));
    assert_eq!(grid(&pack(), 9, 3, mesh), 714);
}

#[test]
fn nine_heads_on_three_ranks() {
    let mesh = Mesh::gcd(9, 3).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (3, 1));
    assert_eq!(grid(&pack(), 9, 3, mesh), 714);
}

#[test]
fn nine_heads_on_four_ranks() {
    let mesh = Mesh::gcd(9, 4).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (1, 4));
    assert_eq!(grid(&pack(), 9, 3, mesh), 714);
}

#[test]
fn nine_heads_on_eight_ranks_four_by_two() {
    if slow::left_out(Turn::Every) {
        return;
    }
    let mesh = Mesh { replicas: 1, ring: 2, ulysses: 4 };
    assert_eq!((mesh.ulysses, mesh.ring), (4, 2));
    assert_eq!(grid(&pack(), 9, 3, mesh), 714);
}

#[test]
fn nine_heads_on_one_rank() {
    assert_eq!(grid(&pack(), 9, 3, Mesh::single()), 714);
}

#[test]
fn awkward_lengths_on_eight_ranks() {
    if slow::left_out(Turn::Every) {
        return;
    }
    let batches = [
        Batch::from_lengths(&[]).unwrap(),
        Batch::from_lengths(&[0, 0]).unwrap(),
        Batch::from_lengths(&[1]).unwrap(),
        Batch::from_lengths(&[2]).unwrap(),
        Batch::from_lengths(&[3]).unwrap(),
        Batch::from_lengths(&[31]).unwrap(),
        Batch::from_lengths(&[0, 1, 0, 90, 2, 0]).unwrap(),
    ];
    // The batches of one and three tokens cover the second and the fourth, which run only with `CPATTN_LONG`.
    let long = std::env::var_os("CPATTN_LONG").is_some();
    for batch in batches.iter().enumerate().filter(|&(i, _)| long || i != 1 && i != 3).map(|(_, batch)| batch) {
        for mesh in [Mesh::ring(8).unwrap(), Mesh { replicas: 1, ring: 2, ulysses: 4 }] {
            assert_eq!(grid(batch, 4, 2, mesh), 7 * 6 * 16);
        }
    }
}

#[test]
fn cross_attention_and_prefixes() {
    let batches = [
        Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
        Batch::cross(&[0, 6, 11], &[0, 2, 14], Some(&[-2, 5])).unwrap(),
        Batch::cross(&[0, 4, 9], &[0, 0, 7], Some(&[0, 1 << 40])).unwrap(),
        Batch::cross(&[0, 0, 0], &[0, 5, 9], None).unwrap(),
    ];
    for batch in &batches {
        for mesh in [Mesh::ring(5).unwrap(), Mesh { replicas: 1, ring: 2, ulysses: 3 }] {
            assert_eq!(grid(batch, 4, 2, mesh), 7 * 6 * 16);
        }
    }
}

#[test]
fn query_groups_of_every_ratio() {
    for (heads, kv_heads) in [(1, 1), (5, 1), (6, 2), (6, 3), (6, 6), (7, 7), (12, 4)] {
        for ulysses in [1, heads.min(3), heads.min(5), heads] {
            let mesh = Mesh { replicas: 1, ring: 2, ulysses };
            let problem = Problem::new(pack(), heads, kv_heads, 8, Dtype::Bf16).with_sinks(true);
            for o in options().into_iter().filter(|o| o.passes <= kv_heads) {
                verify(&problem, mesh, Layout::Zigzag, o);
            }
        }
    }
}

#[test]
fn replicas_run_the_same_lists() {
    let mesh = Mesh { replicas: 2, ring: 2, ulysses: 2 };
    let plan = Plan::new(&Problem::new(pack(), 4, 2, 8, Dtype::F32), mesh, Layout::Zigzag).unwrap();
    for direction in [Direction::Forward, Direction::Backward] {
        let of = |ranks: std::ops::Range<usize>| {
            let all: Vec<_> = ranks.map(|r| Schedule::new(&plan, r, direction).unwrap()).collect();
            plan.verify_schedules(&all).unwrap()
        };
        let (first, second) = (of(0..4), of(4..8));
        assert_eq!(first.pairs, second.pairs);
        assert_eq!(first.ranks[3].traffic, second.ranks[3].traffic);
    }
}

/// Lists that a program holds are proved for what they are for, and only together with those of the same purpose.
#[test]
fn lists_of_every_purpose_are_proved() {
    use cpattn::schedule::{AllToAll, Combine, CombineTo, Purpose};
    let problem = Problem::new(pack(), 4, 2, 8, Dtype::F32);
    let over = |ring: usize, ulysses: usize| {
        Plan::new(&problem, Mesh { replicas: 1, ring: ulysses, ulysses: ring }, Layout::Zigzag).unwrap()
    };
    let whole = over(1, 4);
    for all_to_all in AllToAll::both(cpattn::Side::Q, 8, Dtype::F32).unwrap() {
        let lists: Vec<_> = (0..4).map(|r| Schedule::all_to_all(&whole, r, all_to_all).unwrap()).collect();
        assert!(lists.iter().all(|list| list.purpose() == Purpose::AllToAll(all_to_all)));
        assert_eq!(whole.verify_schedules(&lists).unwrap(), whole.verify_purpose(all_to_all).unwrap());
        let mut mixed = lists;
        mixed[2] = Schedule::new(&whole, 2, Direction::Forward).unwrap();
        let error = whole.verify_schedules(&mixed).unwrap_err().to_string();
        assert!(error.contains("schedules[2] is rank 2, Attention(Forward)"), "{error}");
    }
    let spread = over(4, 1);
    let combine = Combine { to: CombineTo::Tokens, partial: Dtype::F32 };
    let lists: Vec<_> = (0..4).map(|r| Schedule::combine(&spread, r, combine).unwrap()).collect();
    assert_eq!(spread.verify_schedules(&lists).unwrap(), spread.verify_purpose(combine).unwrap());
}
