// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rings over nodes in which several ranks hold the same kv head: their plans pass the proof, and the bytes between
//! nodes are the minimum and evenly spread, by brute force.

use alloc::{collections::BTreeSet, format, vec, vec::Vec};

use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    heads::HeadShare,
    plan::{Circulate, Gather, Wire},
    schedule::{Buf, CirculatingSide, Direction, OpKind, Schedule, expand::Expansion},
};

/// Bytes that the ring carries from rank to rank, fetched and returned.
fn carried(plan: &Plan, direction: Direction) -> [Vec<Vec<u64>>; 2] {
    let group = plan.mesh().group();
    let mut bytes = [0; 2].map(|_| vec![vec![0; group]; group]);
    for s in (0..group).map(|rank| Schedule::new(plan, rank, direction).unwrap()) {
        let mut e = Expansion::new(&s);
        for (i, op) in s.ops.iter().enumerate() {
            let way = match op.kind {
                OpKind::Fetch { .. } => 0,
                OpKind::Return { .. } => 1,
                _ => continue,
            };
            for m in e.messages(&s, i).iter().filter(|m| m.send) {
                let Buf::Work(b) = m.view.buf else { panic!("the caller's own tensor is sent") };
                let b = &s.buffers[b as usize];
                let row = u64::from(m.view.heads) * u64::from(b.dim) * b.dtype.size() as u64;
                bytes[way][s.rank][m.peer] += m.view.rows * row;
            }
        }
    }
    bytes
}

/// Rows of a ring share that some of a node's ranks need.
fn needed(plan: &Plan, circulating: Side, share: usize, node: &core::ops::Range<usize>) -> u64 {
    let (mesh, batch, mask) = (plan.mesh(), plan.problem().batch(), plan.problem().mask());
    let place = |side, token| {
        let doc = batch.document_of(side, token);
        (doc, token as i64 - batch.document(side, doc).start as i64 + batch.start(side, doc))
    };
    let tokens = |side, ring: usize| -> BTreeSet<usize> {
        (ring * mesh.ulysses..(ring + 1) * mesh.ulysses)
            .flat_map(|rank| plan.local_tokens(side, rank).indices())
            .collect()
    };
    let shares = node.start / mesh.ulysses..node.end.div_ceil(mesh.ulysses);
    let there: Vec<_> = shares.flat_map(|ring| tokens(circulating.other(), ring)).collect();
    let there: Vec<_> = there.into_iter().map(|token| place(circulating.other(), token)).collect();
    let is_needed = |&token: &usize| {
        let (doc, pos) = place(circulating, token);
        let meets = |p| if circulating == Side::K { mask.allows(p, pos) } else { mask.allows(pos, p) };
        there.iter().any(|&(d, p)| d == doc && meets(p))
    };
    tokens(circulating, share).iter().filter(|token| is_needed(token)).count() as u64
}

fn options() -> [Options; 10] {
    let o = Options::new;
    [
        o().gather(false).circulate(Circulate::Keys),
        o().gather(false).circulate(Circulate::Queries),
        o().gather(true),
        o().gather(false).circulate(Circulate::Keys).passes(2),
        o().reproducible(true),
        o().gather(false).circulate(Circulate::Keys).wire(Wire::Bf16),
        o().gather(true).circulate(Circulate::Keys).passes(2).wire(Wire::Bf16),
        o().gather(Gather::Together).circulate(Circulate::Keys),
        o().gather(Gather::Together).circulate(Circulate::Keys).passes(2).wire(Wire::Bf16),
        o().circulate_forward(Circulate::Queries).circulate(Circulate::Keys).gather(false),
    ]
}

/// Ulysses and ring ranks, ranks of a node: one ring rank in a node, several, and a part of one.
const MESHES: [(usize, usize, usize); 8] =
    [(4, 2, 4), (4, 3, 4), (2, 4, 2), (2, 4, 4), (4, 4, 8), (3, 4, 3), (4, 2, 2), (8, 2, 8)];
/// q and kv heads: one kv head for all, whole numbers of ranks per head, and ranks that hold parts of two heads.
const HEADS: [(usize, usize); 6] = [(8, 1), (8, 2), (9, 3), (12, 6), (8, 4), (10, 5)];

#[test]
fn rows_cross_once_for_all_that_hold_a_head() {
    let batches = [
        Batch::from_lengths(&[7, 0, 1, 13, 3, 40]).unwrap(),
        Batch::from_lengths(&[150]).unwrap(),
        Batch::cross(&[0, 9, 31, 33], &[0, 2, 14, 50], Some(&[-4, 5, 3])).unwrap(),
    ];
    let masks = [Mask::causal(), Mask::full(), Mask::window(9, 3), Mask::window(2, 0)];
    let layouts = [
        Layout::Zigzag,
        Layout::Contiguous,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 3 },
    ];
    let (mut divided, mut crossed, mut even, mut draw) = (0, 0, 0, 0);
    let long = std::env::var_os("CPATTN_LONG").is_some();
    for (b, batch) in batches.iter().enumerate() {
        for (m, (ulysses, ring, ranks)) in MESHES.into_iter().enumerate() {
            for (h, (heads, kv_heads)) in HEADS.into_iter().enumerate() {
                for (o, option) in options().into_iter().enumerate() {
                    draw += 1;
                    if draw % 2 == b % 2 && !long {
                        continue;
                    }
                    let (mask, layout) = (masks[(draw + b) % masks.len()], layouts[(draw + m + h) % layouts.len()]);
                    let dtype = [Dtype::Bf16, Dtype::F32, Dtype::F64][(draw + o) % 3];
                    let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype).with_value_dim(4);
                    let problem = problem.with_mask(mask).with_sinks(draw % 2 == 0);
                    let option = option.passes(option.passes.min(kv_heads)).ranks_per_node(ranks);
                    let mesh = Mesh { replicas: 1, ring, ulysses };
                    let plan = Plan::builder(&problem).mesh(mesh).layout(layout).options(option).build().unwrap();
                    let name =
                        format!("{batch:?} {heads}/{kv_heads} {dtype} {mask:?} {layout} {mesh} by {ranks}, {option:?}");
                    plan.verify().unwrap_or_else(|e| panic!("{name}: {e}"));
                    divided += usize::from(plan.ring_holders_of_node() > 1);
                    let nodes = (0..mesh.group() / ranks).map(|n| n * ranks..(n + 1) * ranks);
                    let nodes: Vec<_> = nodes
                        .map(|node| {
                            let own = node.start / ulysses..node.end.div_ceil(ulysses);
                            let rows = [Side::K, Side::Q].map(|side| -> u64 {
                                let others = (0..ring).filter(|share| !own.contains(share));
                                others.map(|share| needed(&plan, side, share, &node)).sum()
                            });
                            (node, rows)
                        })
                        .collect();
                    for direction in [Direction::Forward, Direction::Backward] {
                        let bytes = carried(&plan, direction);
                        for (node, [rows_k, rows_q]) in nodes.clone() {
                            let held = |of: fn(&HeadShare) -> core::ops::Range<u32>| -> u64 {
                                let heads: BTreeSet<u32> =
                                    node.clone().flat_map(|rank| of(&plan.heads_of(rank))).collect();
                                heads.len() as u64
                            };
                            let (q, kv) = (held(|share| share.q.clone()), held(|share| share.kv.clone()));
                            let (e, a) = (dtype.size() as u64, dtype.accumulator().size() as u64);
                            let wire = if option.wire == Wire::Bf16 { 2 } else { a };
                            let forward = direction == Direction::Forward;
                            let side = plan.circulates(direction);
                            let of_q = rows_q * q * (12 * e + 2 * a);
                            let want = match side {
                                _ if option.reproducible && forward => [rows_k * kv * 12 * e, 0],
                                _ if option.reproducible => [rows_k * kv * 12 * e + of_q, 0],
                                CirculatingSide::Keys if forward => [rows_k * kv * 12 * e, 0],
                                CirculatingSide::Keys => [rows_k * kv * 12 * e, rows_k * kv * 12 * wire],
                                CirculatingSide::Queries if forward => [rows_q * q * 8 * e, rows_q * q * 6 * a],
                                CirculatingSide::Queries => [of_q, rows_q * q * 8 * wire],
                            };
                            let ranks_there = 0..mesh.group();
                            let outside = || ranks_there.clone().filter(|rank| !node.contains(rank));
                            // Shares of which the node has a part are exchanged, not sent round the ring.
                            let card = |rank: usize| {
                                [0, 1].map(|way| -> u64 {
                                    outside()
                                        .map(|o| if way == 0 { bytes[0][o][rank] } else { bytes[1][rank][o] })
                                        .sum()
                                })
                            };
                            let cards: Vec<[u64; 2]> = node.clone().map(card).collect();
                            let sum = [0, 1].map(|way| cards.iter().map(|c| c[way]).sum::<u64>());
                            assert_eq!(sum, want, "{name}, {direction:?}, ranks {node:?}");
                            crossed += sum[0];
                            // One ring rank per node, heads with as many holders: the loads of all cards differ by one
                            // row of each owner at most.
                            if ranks <= ulysses
                                && ranks.is_multiple_of(kv as usize)
                                && side == CirculatingSide::Keys
                                && !option.reproducible
                                && heads.is_multiple_of(ulysses)
                            {
                                let row = 12 * e.max(wire) * ring as u64;
                                for way in [0, 1] {
                                    let card = |c: &[u64; 2]| c[way];
                                    let (low, high) = (cards.iter().map(card).min(), cards.iter().map(card).max());
                                    assert!(high.unwrap() - low.unwrap() <= row, "{name}, {direction:?}: {cards:?}");
                                    even += usize::from(high > Some(row * 4));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(divided > 250 && crossed > 500_000 && even > 100, "{divided} {crossed} {even}");
}

/// If no two ranks of a node hold the same kv head, or if the ring lies in one node, schedules are those of one level,
/// or of nodes of several ring ranks.
#[test]
fn nothing_is_divided_where_no_head_is_held_twice() {
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
    for (of, heads) in
        [((4, 2, 1), (8, 2)), ((4, 2, 8), (8, 2)), ((4, 2, 4), (8, 4)), ((2, 3, 2), (12, 6)), ((1, 4, 1), (4, 1))]
    {
        let (one, nodes) = (plan((of.0, of.1, 0), heads), plan(of, heads));
        assert!(!nodes.has_two_levels() && nodes.ring_holders_of_node() == 1, "{of:?}");
        assert_eq!(one.fingerprint(), nodes.fingerprint());
        for (rank, direction) in (0..of.0 * of.1).flat_map(|r| [(r, Direction::Forward), (r, Direction::Backward)]) {
            let [a, b] = [&one, &nodes].map(|plan| Schedule::new(plan, rank, direction).unwrap());
            assert!(a.ops == b.ops && a.buffers == b.buffers && a.messages == b.messages && a.blocks == b.blocks);
        }
    }
    let two = plan((4, 2, 4), (8, 2));
    assert!(two.has_two_levels() && two.ring_holders_of_node() == 4);
    assert!(two.fingerprint() != plan((4, 2, 0), (8, 2)).fingerprint());
}
