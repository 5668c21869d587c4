// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-to-alls over nodes: their plans pass the proof, and the bytes between nodes are the minimum, by brute force.

use alloc::{collections::BTreeSet, format, vec::Vec};

use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Gather, Wire},
    schedule::{Buf, Direction, Form, OpKind, Schedule},
};

/// Bytes that the all-to-alls of a direction carry between two ranks: `[from][to]`, on the way in and on the way out.
fn carried(plan: &Plan, direction: Direction) -> [Vec<Vec<u64>>; 2] {
    let world = plan.mesh().world();
    let mut bytes = ["ulysses in", "ulysses out"].map(|_| alloc::vec![alloc::vec![0; world]; world]);
    for s in (0..world).map(|rank| Schedule::new(plan, rank, direction).unwrap()) {
        for op in &s.ops {
            let OpKind::Exchange { begin, end } = op.kind else { continue };
            let Some(way) = ["ulysses in", "ulysses out"].iter().position(|phase| *phase == op.phase) else { continue };
            for m in s.messages[begin as usize..end as usize].iter().filter(|m| m.send) {
                let Buf::Work(i) = m.view.buf else { panic!("the caller's own tensor is sent") };
                let b = &s.buffers[i as usize];
                let row = u64::from(m.view.heads) * u64::from(b.dim) * b.dtype.size() as u64;
                bytes[way][s.rank][m.peer] += m.view.rows * row;
            }
        }
    }
    bytes
}

/// The minimum that a node (its ranks as indices in the Ulysses group) receives of an owner's rows, and sends back:
/// bytes on the way in and on the way out, and the part of these that is k, v and their gradients.
fn least(plan: &Plan, direction: Direction, owner: usize, node: core::ops::Range<usize>) -> [[u64; 2]; 2] {
    let (p, group) = (plan.problem(), plan.problem().group() as u32);
    let rows = |side| plan.local_tokens(side, owner).len() as u64;
    let first = owner / plan.mesh().ulysses * plan.mesh().ulysses;
    let (dk, dims) = (p.head_dim() as u64, (p.head_dim() + p.value_dim()) as u64);
    let (e, a) = (p.dtype().size() as u64, p.dtype().accumulator().size() as u64);
    let q: BTreeSet<u32> = node.clone().flat_map(|u| plan.heads_of(first + u).q).collect();
    let kv: BTreeSet<u32> = node.flat_map(|u| plan.heads_of(first + u).kv).collect();
    let keys = rows(Side::K) * kv.len() as u64 * dims * e;
    let q_rows = rows(Side::Q) * q.len() as u64;
    if direction == Direction::Forward {
        return [[q_rows * dk * e + keys, q_rows * ((dims - dk) * e + a)], [keys, 0]];
    }
    let wire = if plan.options().wire == Wire::Bf16 { 2 } else { a };
    let heads_of = |g: u32| g * group..(g + 1) * group;
    let (mut sums, mut partials) = (0, 0);
    let mut complete = true;
    let one_level = plan.ulysses_ranks_of_node() == plan.mesh().ulysses;
    for &g in &kv {
        if plan.form() == Form::Ordered && (one_level || !q.contains(&(g * group))) {
            partials += heads_of(g).filter(|h| q.contains(h)).count() as u64;
        } else {
            sums += 1;
            complete &= heads_of(g).all(|h| q.contains(&h));
        }
    }
    // The wire type applies to partials only; a sum that one rank made alone is not a partial.
    let of_sum = match complete {
        true if one_level => e,
        true => e.min(wire),
        false => wire,
    };
    let back = rows(Side::K) * dims * (sums * of_sum + partials * a);
    [[q_rows * (dims * e + 2 * a) + keys, q_rows * dk * e + back], [keys, back]]
}

fn options() -> [Options; 9] {
    let o = Options::new;
    [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().gather(true).pack_inputs(true),
        o().circulate(Circulate::Keys).passes(2),
        o().gather(true).passes(2).wire(Wire::Bf16),
        o().reproducible(true),
        o().circulate(Circulate::Keys).wire(Wire::Bf16),
        o().gather(Gather::Together).circulate(Circulate::Keys),
        o().gather(Gather::Together).circulate(Circulate::Queries).wire(Wire::Bf16),
    ]
}

/// Ulysses ranks, ranks of a node, q heads, kv heads: one kv head for all, whole numbers of them for each node, one
/// over a border, uneven ones, several on a rank. In the last two cases no ranks of a node hold the same kv head, so
/// there are no gateways: in the ordered form all partials cross, several from one rank for the same kv head.
const HEADS: [(usize, usize, usize, usize); 11] = [
    (4, 2, 4, 1),
    (4, 2, 8, 2),
    (8, 4, 8, 4),
    (6, 3, 6, 1),
    (6, 2, 12, 2),
    (6, 3, 9, 3),
    (4, 2, 9, 3),
    (4, 2, 12, 6),
    (4, 2, 10, 5),
    (4, 2, 24, 4),
    (2, 1, 6, 1),
];

#[test]
fn all_to_alls_over_nodes_are_proved_and_rows_cross_once() {
    let batches = [
        Batch::from_lengths(&[7, 0, 1, 13, 3, 20]).unwrap(),
        Batch::from_lengths(&[3]).unwrap(),
        Batch::cross(&[0, 9, 31, 33], &[0, 2, 14, 50], Some(&[-4, 5, 3])).unwrap(),
    ];
    let (mut proved, mut gateways) = (0, 0);
    for (b, batch) in batches.iter().enumerate() {
        for (n, (ulysses, ranks, heads, kv_heads)) in HEADS.into_iter().enumerate() {
            for (o, option) in options().into_iter().enumerate() {
                let ring = 1 + (b + n + o) % 2;
                let dtype = [Dtype::Bf16, Dtype::F32, Dtype::F64][(n + o) % 3];
                let passes = option.passes.min(kv_heads);
                let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype).with_value_dim(4);
                let problem = problem.with_mask(Mask::causal()).with_sinks(o % 2 == 0);
                let mesh = Mesh { replicas: 1, ring, ulysses };
                let option = option.passes(passes).ranks_per_node(ranks);
                let plan = Plan::builder(&problem).mesh(mesh).layout(Layout::Zigzag).options(option).build().unwrap();
                let name = format!("{batch:?} {heads} over {kv_heads} {dtype} {mesh} by {ranks}, {option:?}");
                plan.verify().unwrap_or_else(|e| panic!("{name}: {e}"));
                let two_levels = plan.ulysses_ranks_of_node() == ranks;
                assert_eq!(two_levels, n < 9, "{name}");
                for direction in [Direction::Forward, Direction::Backward] {
                    let bytes = carried(&plan, direction);
                    let nodes: Vec<_> = (0..ulysses / ranks).map(|n| n * ranks..(n + 1) * ranks).collect();
                    for (owner, node) in (0..mesh.group()).flat_map(|o| nodes.iter().map(move |n| (o, n.clone()))) {
                        let (place, first) = (owner % ulysses, owner / ulysses * ulysses);
                        if node.contains(&place) {
                            continue;
                        }
                        let [all, keys] = least(&plan, direction, owner, node.clone());
                        let there = || node.clone().map(|u| first + u);
                        let came: u64 = there().map(|to| bytes[0][owner][to]).sum();
                        let back: u64 = there().map(|from| bytes[1][from][owner]).sum();
                        assert_eq!([came, back], all, "{name}, {direction:?}, rank {owner} and ranks {node:?}");
                        if !two_levels {
                            continue;
                        }
                        // Everything of k's side goes through one rank.
                        let gateway = first + node.start + place % ranks;
                        assert!(bytes[0][owner][gateway] >= keys[0] && bytes[1][gateway][owner] >= keys[1], "{name}");
                        gateways += u32::from(keys[0] > 0);
                    }
                }
                proved += 1;
            }
        }
    }
    assert!(proved == 297 && gateways > 1000, "{proved} {gateways}");
}

/// If no ranks of a node hold the same kv head, if a node is one rank, or if it is all ranks, schedules are those of
/// one level.
#[test]
fn one_level_where_it_is_the_same() {
    let batch = Batch::from_lengths(&[40, 9]).unwrap();
    let plan = |(ulysses, ring, ranks), (heads, kv_heads)| {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, Dtype::Bf16);
        let options = Options::new().circulate(Circulate::Keys).ranks_per_node(ranks);
        Plan::builder(&problem)
            .mesh(Mesh { replicas: 1, ring, ulysses })
            .layout(Layout::Zigzag)
            .options(options)
            .build()
            .unwrap()
    };
    let shared = (8, 2);
    for (of, heads) in [((4, 2, 1), shared), ((4, 2, 8), shared), ((4, 1, 4), shared), ((4, 2, 2), (8, 4))] {
        let (one, nodes) = (plan((of.0, of.1, 0), heads), plan(of, heads));
        assert_eq!((nodes.ulysses_ranks_of_node(), one.fingerprint()), (4, nodes.fingerprint()), "{of:?}");
        for direction in [Direction::Forward, Direction::Backward] {
            let [a, b] = [&one, &nodes].map(|plan| Schedule::new(plan, 3, direction).unwrap());
            assert!(a.ops == b.ops && a.buffers == b.buffers && a.messages == b.messages && a.blocks == b.blocks);
        }
    }
    let two = plan((4, 2, 2), shared);
    assert_eq!(two.ulysses_ranks_of_node(), 2);
    assert!(two.fingerprint() != plan((4, 2, 0), shared).fingerprint());
}
