// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans over several nodes: they pass the proof, and the bytes between nodes are the minimum, by brute force.

use alloc::{collections::BTreeSet, vec::Vec};

use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Gather, Wire, form::Direction},
    schedule::{CirculatingSide, Lane, Schedule},
};

fn batches() -> [Batch; 4] {
    [
        Batch::from_lengths(&[7, 0, 1, 13, 3, 40]).unwrap(),
        Batch::from_lengths(&[64]).unwrap(),
        Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
        Batch::cross(&[0, 9, 31, 33], &[0, 2, 14, 50], Some(&[-4, 5, 3])).unwrap(),
    ]
}

/// Rows of the circulating side that a node needs and does not hold, counted once for each node.
fn rows_that_cross(plan: &Plan, circulating: Side) -> u64 {
    let (mesh, batch) = (plan.mesh(), plan.problem().batch());
    let mask = plan.problem().mask();
    let ranks_of_node = plan.ring_ranks_of_node() * mesh.ulysses;
    let place = |side, token| {
        let doc = batch.document_of(side, token);
        (doc, token as i64 - batch.document(side, doc).start as i64 + batch.start(side, doc))
    };
    let tokens = |side, node: usize| -> BTreeSet<usize> {
        let ranks = node * ranks_of_node..(node + 1) * ranks_of_node;
        ranks.flat_map(|rank| plan.local_tokens(side, rank).indices()).collect()
    };
    let mut rows = 0;
    for node in 0..mesh.group() / ranks_of_node {
        let (held, staying) = (tokens(circulating, node), tokens(circulating.other(), node));
        let needed = |token: usize| {
            let (doc, pos) = place(circulating, token);
            staying.iter().any(|&other| {
                let (d, p) = place(circulating.other(), other);
                d == doc && if circulating == Side::K { mask.allows(p, pos) } else { mask.allows(pos, p) }
            })
        };
        rows += (0..batch.tokens(circulating)).filter(|t| !held.contains(t) && needed(*t)).count() as u64;
    }
    rows
}

#[test]
fn plans_over_nodes_are_proved_and_rows_cross_once() {
    let masks = [Mask::full(), Mask::causal(), Mask::window(9, 3), Mask::window(2, 0)];
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 1 },
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 3 },
    ];
    // ulysses, ring, ranks of a node.
    let meshes = [(1, 4, 2), (1, 6, 3), (1, 6, 2), (2, 4, 4), (1, 8, 4)];
    let options = [
        Options::new().gather(false).circulate(Circulate::Keys),
        Options::new().gather(false).circulate(Circulate::Queries),
        Options::new().gather(true),
        Options::new().gather(false).circulate(Circulate::Keys).passes(2),
        Options::new().reproducible(true),
        Options::new().circulate(Circulate::Keys).wire(Wire::Bf16),
        Options::new().gather(false).circulate(Circulate::Queries).wire(Wire::Bf16),
        Options::new().gather(Gather::Together).circulate(Circulate::Keys),
        Options::new().gather(Gather::Together).circulate(Circulate::Queries),
        Options::new().gather(Gather::Together).circulate(Circulate::Keys).passes(2),
        Options::new().gather(Gather::Together).wire(Wire::Bf16),
    ];
    let (mut proved, mut crossed) = (0, 0);
    for (b, batch) in batches().iter().enumerate() {
        for (m, &mask) in masks.iter().enumerate() {
            for (l, layout) in layouts.into_iter().enumerate() {
                for (n, &(ulysses, ring, ranks)) in meshes.iter().enumerate() {
                    let (heads, kv_heads) = (4, 2);
                    let problem = Problem::new(batch.clone(), heads, kv_heads, 8, Dtype::F32).with_mask(mask);
                    let mesh = Mesh { replicas: 1, ring, ulysses };
                    // Options rotate, so that each set of options meets each value of the other dimensions.
                    let options = options[(b + m + l + n) % options.len()].ranks_per_node(ranks);
                    let plan = Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build().unwrap();
                    let name = alloc::format!("{batch:?} {mask:?} {layout} {mesh} by {ranks}, {options:?}");
                    let (forward, backward) = plan.verify().unwrap_or_else(|e| panic!("{name}: {e}"));
                    let between = |report: &crate::schedule::verify::Report, kind| -> u64 {
                        let of = |r: &crate::schedule::verify::RankReport| -> u64 {
                            r.traffic
                                .iter()
                                .filter(|t| (t.phase, t.kind) == ("between nodes", kind))
                                .map(|t| t.bytes_in)
                                .sum()
                        };
                        report.ranks.iter().map(of).sum()
                    };
                    let (keys, queries) = (rows_that_cross(&plan, Side::K), rows_that_cross(&plan, Side::Q));
                    let (kv, row) = (kv_heads as u64 * 8 * 4, heads as u64 * 8 * 4);
                    let wire = if options.wire == Wire::Bf16 { 2 } else { 1 };
                    assert_eq!(between(&forward, "fetch"), keys * 2 * kv, "{name}");
                    // q and do; lse and delta.
                    let query_side = queries * (2 * row + 2 * heads as u64 * 4);
                    let (fetched, returned) = match plan.circulates(Direction::Backward) {
                        _ if options.reproducible => (keys * 2 * kv + query_side, 0),
                        CirculatingSide::Keys => (keys * 2 * kv, keys * 2 * kv / wire),
                        CirculatingSide::Queries => (query_side, queries * row / wire),
                    };
                    assert_eq!(between(&backward, "fetch"), fetched, "{name}");
                    assert_eq!(between(&backward, "return"), returned, "{name}");
                    proved += 1;
                    crossed += keys + queries;
                }
            }
        }
    }
    assert!(proved == 480 && crossed > 10_000, "{proved} {crossed}");
}

/// If every owner's rows are needed alike, no card carries more than 1.1 × the mean of its node's cards, in each
/// direction.
#[test]
fn cards_are_loaded_evenly() {
    let batch = Batch::from_lengths(&[960]).unwrap();
    let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 4 }, Layout::Balanced { chunks: 4 }];
    for (layout, mask) in layouts.into_iter().flat_map(|l| [(l, Mask::full()), (l, Mask::causal())]) {
        let problem = Problem::new(batch.clone(), 2, 1, 8, Dtype::Bf16).with_mask(mask);
        let together = Options::new().gather(Gather::Together);
        for options in [Options::new().circulate(Circulate::Keys), Options::new().gather(true), together] {
            let mesh = Mesh::ring(12).unwrap();
            let plan =
                Plan::builder(&problem).mesh(mesh).layout(layout).options(options.ranks_per_node(4)).build().unwrap();
            let (forward, backward) = plan.verify().unwrap();
            for node in [forward, backward].iter().flat_map(|r| r.ranks.chunks(4)) {
                let of = |bytes: fn(&crate::schedule::verify::Traffic) -> u64| -> Vec<u64> {
                    let far = |t: &&crate::schedule::verify::Traffic| t.phase == "between nodes";
                    node.iter().map(|r| r.traffic.iter().filter(far).map(bytes).sum()).collect()
                };
                for cards in [of(|t| t.bytes_in), of(|t| t.bytes_out)] {
                    let (most, all) = (cards.iter().max().unwrap(), cards.iter().sum::<u64>());
                    assert!(10 * 4 * most <= 11 * all, "{layout} {mask:?} {options:?}: {cards:?}");
                }
            }
        }
    }
}

/// Rows from other nodes are fetched before a node's own steps make the compute lane wait: the first part of the next
/// node's rows is the first exchange, and each local step has a part before it.
#[test]
fn rows_cross_beside_the_steps_of_a_node() {
    let batch = Batch::from_lengths(&[240]).unwrap();
    let problem = Problem::new(batch, 2, 1, 8, Dtype::Bf16).with_mask(Mask::full());
    let mesh = Mesh::ring(12).unwrap();
    let options = Options::new().gather(false).ranks_per_node(4);
    let plan = Plan::builder(&problem).mesh(mesh).layout(Layout::Contiguous).options(options).build().unwrap();
    let schedule = Schedule::new(&plan, 5, Direction::Forward).unwrap();
    let exchanges: Vec<&str> =
        schedule.operations().filter(|op| op.lane == Lane::Communication).map(|op| op.phase).collect();
    let (far, near) = ("between nodes", "ring");
    // Three nodes: two of them cross, each in three parts; three local steps for each of three nodes.
    let pair = [far, near];
    let want: Vec<&str> = pair.iter().copied().cycle().take(12).chain([near; 3]).collect();
    assert_eq!(exchanges, want);
    // One level: the same schedule as without nodes.
    let one = |ranks| {
        let options = Options::new().gather(false).ranks_per_node(ranks);
        Plan::builder(&problem).mesh(mesh).layout(Layout::Contiguous).options(options).build().unwrap()
    };
    for ranks in [1, 12, 16] {
        let (a, b) =
            (Schedule::new(&one(0), 5, Direction::Backward), Schedule::new(&one(ranks), 5, Direction::Backward));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert!(a.ops == b.ops && a.buffers == b.buffers && a.messages == b.messages);
        assert_eq!(one(0).fingerprint(), one(ranks).fingerprint());
    }
    assert!(one(0).fingerprint() != one(4).fingerprint() && one(4).fingerprint() != one(6).fingerprint());
}

#[test]
fn nodes_that_do_not_fit_are_refused() {
    let problem = Problem::new(Batch::from_lengths(&[64]).unwrap(), 8, 4, 8, Dtype::Bf16);
    let refused = |mesh, options| {
        Plan::builder(&problem)
            .mesh(mesh)
            .layout(Layout::Contiguous)
            .options(options)
            .build()
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    use alloc::string::ToString;
    let o = || Options::new().ranks_per_node(4);
    let group = |replicas, ring, ulysses| Mesh { replicas, ring, ulysses };
    for (mesh, options, said) in [
        (group(1, 6, 1), o(), "options.ranks_per_node is 4, expected a divisor of the 6 ranks of"),
        (group(3, 3, 1), o(), "options.ranks_per_node is 4, expected a divisor of the 9 ranks of"),
        (group(1, 4, 3), o(), "options.ranks_per_node is 4, expected a multiple or a divisor of the 3 Ulysses ranks"),
        (group(3, 2, 1), o(), "options.ranks_per_node is 4, expected a divisor of the 6 ranks of 3 replicas of"),
    ] {
        let text = refused(mesh, options);
        assert!(text.contains(said), "{mesh}: {text}");
    }
    // Ulysses ranks over whole nodes; one node; a node that is one ring rank; a node of replicas.
    for (mesh, options) in [
        (group(1, 2, 8), o()),
        (group(1, 4, 1), o().gather(Gather::Together)),
        (group(1, 2, 4), o().gather(Gather::Together)),
        (group(2, 4, 2), o()),
    ] {
        Plan::builder(&problem).mesh(mesh).layout(Layout::Contiguous).options(options).build().unwrap();
    }
}
