// SPDX-License-Identifier: MIT OR Apache-2.0
//! Key lines of explanations, and their agreement with the schedules.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};

fn minilm() -> Problem {
    Problem::new(Batch::from_lengths(&[297, 282, 187]).unwrap(), 9, 3, 64, Dtype::F32)
}

#[track_caller]
fn has(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

/// Figures by hand: nine heads over four Ulysses ranks, three documents in zigzag over two ring ranks.
#[test]
fn nine_heads_on_eight_ranks() {
    let plan = Plan::new(&minilm(), Mesh { replicas: 1, ring: 2, ulysses: 4 }, Layout::Zigzag).unwrap();
    let pairs: u64 = [297u64, 282, 187].iter().map(|n| n * (n + 1) / 2).sum();
    assert_eq!(pairs, 101_734);
    has(
        &plan.explain(),
        &[
            "mask causal, f32: 3 documents (187 to 297 tokens), 766 q tokens, 766 k tokens",
            "9 q heads, 3 kv heads, head_dim 64, value_dim 64",
            // 101,734 pairs · 9 heads · (64 + 64), and 2.5 times that.
            "each head computes 101,734 (q, k) pairs; all heads: 117,197,568 multiply-adds forward, 292,993,920 backward",
            "mesh ulysses 4 × ring 2: 8 ranks",
            "3 on the busiest Ulysses rank, 2.25 on average, imbalance 1.333; some kv heads are read by several",
            "layout zigzag over 2 ring ranks",
            "→  zigzag        1.004     1.000                 383",
            "     3     0        3        96        96          2     6..9      2..3               383",
            "backward: k and v circulate, dk and dv are returned to their owner: fewer bytes",
            // Hk · 128 · (4 + 4) and Hq · (128 · 4 + 64 · 4 + 8).
            "3,072 for each of 766 k tokens, 6,984 for each of 766 q tokens",
            "peak workspace forward: ",
            "peak workspace backward: ",
            "ring slot",
        ],
    );
}

/// Nodes of two Ulysses ranks: the rows that cross once, their cost; with one level the text does not mention them.
#[test]
fn all_to_alls_over_nodes() {
    let p = Problem::new(Batch::from_lengths(&[64]).unwrap(), 8, 2, 64, Dtype::Bf16);
    let plan = |ring, options: Options| {
        Plan::builder(&p)
            .mesh(Mesh { replicas: 1, ring, ulysses: 4 })
            .layout(Layout::Zigzag)
            .options(options)
            .build()
            .unwrap()
    };
    let o = || Options::new().circulate(Circulate::Keys);
    has(
        &plan(1, o().ranks_per_node(2)).explain(),
        &[
            "2 nodes of 2 ranks in an all-to-all: a row of k or v crosses to each other node once, to one rank, which passes it on; gradients are summed in the node before they cross back",
            // 16 rows of a head of 128, in bf16, packed for the other node; it arrives in place. Then also partials in
            // f32 from the other rank of the node, their sum, and the sum that comes back.
            "buffers for this: at most 4,096 bytes forward, 20,480 backward",
        ],
    );
    let wire = plan(2, o().ranks_per_node(2).wire(Wire::Bf16)).explain();
    has(
        &wire,
        &[
            "they are summed in each node first, in f32",
            "2 Ulysses ranks of a node share kv heads: each receives a part of the rows of a shared head from other nodes",
        ],
    );
    let one = plan(1, o().ranks_per_node(2).wire(Wire::Bf16)).explain();
    has(&one, &["those of an all-to-all are summed in each node first, in f32"]);
    // 32 rows of a head of 128, in bf16; then their gradients in f32 too.
    let shared = plan(2, o().ranks_per_node(4)).explain();
    has(&shared, &["4 Ulysses ranks of a node", "buffers for this: at most 8,192 bytes forward, 24,576 backward"]);
    let ordered = plan(1, Options::new().reproducible(true).ranks_per_node(2)).explain();
    has(&ordered, &["summed in the node of its first q head; other nodes send a partial of each q head"]);
    assert!(!plan(2, o()).explain().contains("all-to-all: a row"));
}

/// A window of 128 tokens over 64 ranks of 1,024: 127 rows of k and v from one neighbour.
#[test]
fn a_window_over_many_ranks_is_summarised() {
    let p =
        Problem::new(Batch::from_lengths(&[1024 * 64]).unwrap(), 8, 8, 64, Dtype::Bf16).with_mask(Mask::sliding(128));
    let plan = Plan::new(&p, Mesh::ring(64).unwrap(), Layout::Contiguous).unwrap();
    let text = plan.explain();
    has(
        &text,
        &[
            "mask window 127 back, 0 ahead, bf16",
            "automatic choice for 64 ranks (by rules of thumb; no machine is described): ulysses 1 × ring 64, layout contiguous\n",
            "→  contiguous    1.001     1.000                 127",
            "q tokens  1,024  1,024    1,024",
            // 127 rows of 8 heads of 64 + 64 values in bf16.
            "bytes received            0      256,032      260,096",
            // A k and a v from one neighbour, and both to the other.
            "messages                  2            4            4",
        ],
    );
    let one = plan.explain_rank(3).unwrap();
    has(&one, &["rank 3: replica 0, ring rank 3 of 64", "running o    2,097,152", "running lse     65,536", "260,096"]);
    assert!(plan.explain_rank(64).is_err());
}

/// 300 documents, each cut for four ranks: rows in many places are packed before they are sent.
#[test]
fn messages_are_counted() {
    let p = Problem::new(Batch::from_lengths(&[20; 300]).unwrap(), 8, 2, 64, Dtype::F32);
    let of = Options::new().gather(Gather::Steps);
    let plan = Plan::builder(&p).mesh(Mesh::ring(4).unwrap()).layout(Layout::Zigzag).options(of).build().unwrap();
    // k and v to one rank and from another: one or two chunks of each document, and each chunk is packed separately.
    let text = plan.explain();
    has(&text, &["messages                 6           8           8           6\n"]);
    has(&text, &["messages                16          16          16          16\n"]);
}

/// Options of scores are printed where they differ from the default, long lists of slopes with a number of all.
#[test]
fn options_of_scores_are_printed() {
    let line = |p: Problem| {
        let text = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap().explain();
        text.lines().find(|line| line.contains("kv heads, head_dim")).unwrap().to_string()
    };
    let plain = "  9 q heads, 3 kv heads, head_dim 64, value_dim 64";
    assert_eq!(line(minilm()), plain);
    assert_eq!(line(minilm().with_scale(0.125)), plain, "the default");
    let all = minilm().with_scale(0.1).with_softcap(30.0).with_sinks(true);
    assert_eq!(line(all), format!("{plain}, scale 0.1, softcap 30, sinks"));
    let few = Problem::new(Batch::from_lengths(&[7]).unwrap(), 2, 2, 64, Dtype::F32).with_alibi_slopes(&[0.5, 1e-18]);
    assert!(line(few).ends_with("value_dim 64, ALiBi slopes [0.5, 1e-18]"));
    let slopes = |fourth| line(minilm().with_alibi_slopes(&[0.5, 0.4, 0.3, fourth, 0.1, 0.1, 0.1, 0.1, 0.1]));
    let begin = format!("{plain}, ALiBi slopes 0.5 to 0.1 (fingerprint ");
    assert!(slopes(0.2).starts_with(&begin) && slopes(0.25).starts_with(&begin), "{}", slopes(0.2));
    assert_ne!(slopes(0.2), slopes(0.25));
    let two = Problem::new(Batch::from_lengths(&[7, 2]).unwrap(), 2, 2, 64, Dtype::F32);
    let each = line(two.with_alibi_slopes_per_document(&[0.5, 0.25, 1.0, 0.0]));
    assert!(each.ends_with("value_dim 64, ALiBi slopes per document [0.5, 0.25, 1.0, 0.0]"), "{each}");
}

#[test]
fn forms_tell_their_price() {
    let mesh = Mesh { replicas: 2, ring: 2, ulysses: 2 };
    let text = |o| Plan::builder(&minilm()).mesh(mesh).layout(Layout::ZigzagPack).options(o).build().unwrap().explain();
    has(
        &text(Options::new().reproducible(true)),
        &[
            "replicas run their own batches",
            "ordered (reproducible)",
            "compared with the ring form, backward, busiest rank: workspace ×",
            "k and v are gathered for dq, then the q side for dk and dv",
        ],
    );
    has(
        &text(Options::new().gather(true).passes(2).wire(Wire::Bf16)),
        &[
            "gather: k and v of all other ranks are received at once",
            "2 passes",
            "always, if k and v are gathered",
            "sent in bf16",
        ],
    );
    has(
        &text(Options::new().gather(Gather::Together)),
        &["one kernel call computes with them and the rank's own\n  compared with the ring form"],
    );
    let short = Problem::new(Batch::from_lengths(&[20; 32]).unwrap(), 4, 2, 16, Dtype::F32);
    has(
        &Plan::new(&short, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap().explain(),
        &[
            "together: k and v",
            "each of 32 documents (at least 32)",
            "5.2 keys in a ring step (fewer than 64)",
            "16,777,216 bytes",
        ],
    );
    has(&text(Options::new().circulate(Circulate::Queries)), &["dq is returned to its owner: as the options ask"]);
    let cache = Batch::cross(&[0, 1], &[0, 64], Some(&[40])).unwrap();
    let forward = |side| {
        let p = Problem::new(cache.clone(), 4, 2, 16, Dtype::F32);
        let options = Options::new().circulate_forward(side);
        Plan::builder(&p)
            .mesh(Mesh::ring(4).unwrap())
            .layout(Layout::Striped { stripe: 2 })
            .options(options)
            .build()
            .unwrap()
            .explain()
    };
    let returned = "forward: q circulates, partial o and lse are returned to its owner and merged";
    has(&forward(Circulate::Auto), &[returned, "fewer bytes: all ranks receive 7,680 with k and v, 1,632 with q"]);
    has(&forward(Circulate::Queries), &[returned, "and merged: as the options ask"]);
    assert!(!forward(Circulate::Keys).contains("forward: q"));
    let single = Plan::new(&minilm(), Mesh::single(), Layout::Contiguous).unwrap().explain();
    has(
        &single,
        &[
            "nothing circulates",
            "peak workspace forward: 0 bytes on rank 0, in addition to inputs and outputs (upper bound for this plan",
        ],
    );
}

#[test]
fn of_very_many_ranks_some_are_counted_and_named() {
    let p = Problem::new(Batch::from_lengths(&[3000, 17]).unwrap(), 4, 2, 16, Dtype::F32);
    let text = Plan::auto(&p, 96).unwrap().explain();
    has(&text, &["16 of 96 ranks were counted: [0, 6, 12, 19,", "95]"]);
}

/// A schedule takes a few steps for each document, so of many documents fewer ranks are counted.
#[test]
fn of_very_many_documents_some_ranks_are_counted() {
    let of = |documents: usize| {
        let lengths: Vec<usize> = (0..documents).map(|i| if i == 0 { 4096 } else { 0 }).collect();
        let problem = Problem::new(Batch::from_lengths(&lengths).unwrap(), 2, 2, 8, Dtype::F32);
        Plan::new(&problem, Mesh::ring(32).unwrap(), Layout::Contiguous).unwrap().explain()
    };
    has(&of((1 << 19) + 1), &["16 of 32 ranks were counted: [0, 2, 4, 6,", "31]"]);
    assert!(!of(1 << 19).contains("were counted"));
}

#[test]
fn nodes_in_the_cost_are_named() {
    let p = Problem::new(Batch::from_lengths(&[1 << 15]).unwrap(), 32, 8, 128, Dtype::Bf16);
    let text = |n| Plan::builder(&p).world(16).options(Options::new().ranks_per_node(n)).build().unwrap().explain();
    has(
        &text(8),
        &["nodes of 8 ranks: in the cost, a byte from another node counts 8 times", "from other nodes (about)"],
    );
    for alike in [0, 16] {
        assert!(!text(alike).contains("in the cost") && !text(alike).contains("from other nodes (about)"));
    }
}
