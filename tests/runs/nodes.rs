// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans over several nodes, run on threads, against the f64 reference.

use crate::context_parallel::{LAYOUTS, every_way, mesh};
use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Problem,
    plan::{Circulate, Gather},
};
use half::bf16;

/// Ring ranks of a node, several of one batch and of several; nodes beside Ulysses, and a node of replicas.
#[test]
fn several_nodes() {
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().circulate_forward(Circulate::Queries),
        o().circulate_forward(Circulate::Queries).pack_inputs(true),
        o().gather(true),
        o().circulate(Circulate::Keys).passes(2).pack_inputs(true),
        o().gather(Gather::Together).circulate(Circulate::Keys).passes(2),
        o().gather(Gather::Together).circulate(Circulate::Queries),
        o().reproducible(true),
    ];
    let base = Problem::new(batch(), 6, 2, 8, Dtype::F32).with_sinks(true);
    let problems = [
        ("causal", base.clone()),
        ("full", base.clone().with_mask(Mask::full()).with_softcap(4.0)),
        ("window", base.clone().with_mask(Mask::sliding(11)).with_alibi_slopes(&[0.5, 0.25, 0.1, 0.3, 0.2, 0.7])),
        ("cross", crossed()),
    ];
    for (what, p) in problems {
        for (mesh, ranks) in [(mesh(1, 4), 2), (mesh(1, 6), 3), (mesh(2, 4), 4), (mesh(1, 8), 2)] {
            every_way::<f32>(what, &p, &[mesh], &LAYOUTS, &forms.map(|form| form.ranks_per_node(ranks)));
        }
    }
    let two_batches = Mesh { replicas: 2, ring: 4, ulysses: 1 };
    every_way::<f32>("replicas", &base, &[two_batches], &LAYOUTS, &forms.map(|form| form.ranks_per_node(2)));
}

/// All-to-alls over several nodes: one kv head for all ranks, heads that several ranks of a node hold, heads over a
/// border, and several of them on a rank; beside a ring, and in replicas.
#[test]
fn all_to_alls_over_several_nodes() {
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries).pack_inputs(true),
        o().gather(true).passes(2),
        o().circulate(Circulate::Keys).passes(2).pack_inputs(true),
        o().gather(Gather::Together).circulate(Circulate::Keys),
        o().reproducible(true),
    ];
    let problem = |heads, kv_heads| Problem::new(batch(), heads, kv_heads, 8, Dtype::F32).with_sinks_per_head(2);
    for (what, p, meshes) in [
        ("one kv head", problem(6, 1), [(mesh(4, 1), 2), (mesh(6, 1), 3), (mesh(4, 2), 2)]),
        ("window", problem(8, 2).with_mask(Mask::sliding(11)), [(mesh(8, 1), 2), (mesh(8, 1), 4), (mesh(4, 3), 2)]),
        ("uneven", problem(9, 3).with_mask(Mask::full()), [(mesh(4, 1), 2), (mesh(6, 2), 3), (mesh(8, 1), 4)]),
        ("several", problem(12, 6), [(mesh(4, 2), 2), (mesh(8, 1), 2), (mesh(8, 1), 4)]),
        ("cross", crossed(), [(mesh(4, 2), 2), (mesh(6, 1), 2), (mesh(6, 2), 3)]),
    ] {
        on_nodes(what, &p, meshes, &forms);
    }
    let bf16_problem = Problem::new(batch(), 8, 2, 8, Dtype::Bf16);
    every_way::<bf16>("bf16", &bf16_problem, &[mesh(8, 1), mesh(4, 2)], &CHUNKS, &[o().ranks_per_node(2)]);
    let two_batches = Mesh { replicas: 2, ring: 1, ulysses: 4 };
    every_way::<f32>("replicas", &problem(4, 1), &[two_batches], &CHUNKS, &[o().ranks_per_node(2)]);
}

/// Kv heads that several Ulysses ranks of a node hold, on a ring over nodes: a node of one ring rank, of several, and
/// of a part of one; one head for all, heads that divide, and ranks with parts of two.
#[test]
fn rings_over_nodes_whose_ranks_hold_the_same_heads() {
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().circulate_forward(Circulate::Queries).circulate(Circulate::Keys),
        o().gather(true).circulate(Circulate::Keys),
        o().circulate(Circulate::Keys).passes(2).pack_inputs(true),
        o().gather(Gather::Together).circulate(Circulate::Keys).passes(2),
        o().gather(Gather::Together).circulate(Circulate::Queries),
        o().reproducible(true),
    ];
    let of = |heads, kv_heads, dtype| Problem::new(batch(), heads, kv_heads, 8, dtype).with_value_dim(12);
    let problem = |heads, kv_heads| of(heads, kv_heads, Dtype::F32).with_sinks(true);
    for (what, p, meshes) in [
        ("one kv head", problem(4, 1), [(mesh(4, 2), 4), (mesh(2, 4), 4), (mesh(4, 2), 2)]),
        ("window", problem(8, 2).with_mask(Mask::sliding(11)), [(mesh(4, 3), 4), (mesh(8, 2), 8), (mesh(4, 4), 8)]),
        ("uneven", problem(9, 3).with_mask(Mask::full()), [(mesh(4, 2), 4), (mesh(2, 4), 4), (mesh(6, 2), 3)]),
        ("several", problem(12, 6), [(mesh(4, 3), 4), (mesh(8, 2), 8), (mesh(4, 4), 8)]),
        ("cross", crossed(), [(mesh(4, 2), 4), (mesh(6, 2), 6), (mesh(3, 4), 6)]),
    ] {
        on_nodes(what, &p, meshes, &forms);
    }
    let nodes = [o().ranks_per_node(4).circulate(Circulate::Keys)];
    every_way::<bf16>("bf16", &of(8, 2, Dtype::Bf16), &[mesh(4, 2), mesh(2, 4)], &LAYOUTS, &nodes);
    every_way::<f64>("f64", &of(9, 3, Dtype::F64), &[mesh(4, 3)], &LAYOUTS, &nodes);
    let two_batches = Mesh { replicas: 2, ring: 2, ulysses: 4 };
    every_way::<f32>("replicas", &problem(4, 1), &[two_batches], &[Layout::Zigzag], &nodes);
}

/// Chunks of many tokens, and of five.
const CHUNKS: [Layout; 2] = [Layout::Zigzag, Layout::Striped { stripe: 5 }];

/// Long and short documents, and one without tokens.
fn batch() -> Batch {
    Batch::from_lengths(&[57, 0, 9, 30, 4]).unwrap()
}

/// q and k of different tokens.
fn crossed() -> Problem {
    let batch = Batch::cross(&[0, 9, 9, 50], &[0, 21, 25, 77], Some(&[3, 0, 20])).unwrap();
    Problem::new(batch, 6, 2, 8, Dtype::F32)
}

/// Every form on every mesh, with this many ranks on a node, and no more passes than kv heads.
fn on_nodes(what: &str, problem: &Problem, meshes: [(Mesh, usize); 3], forms: &[Options]) {
    for (mesh, ranks) in meshes {
        let of = |form: &Options| form.passes(form.passes.min(problem.kv_heads())).ranks_per_node(ranks);
        every_way::<f32>(what, problem, &[mesh], &CHUNKS, &forms.iter().map(of).collect::<Vec<_>>());
    }
}
