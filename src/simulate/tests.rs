// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makespans computed by hand, conservation of bytes, and equal figures in repeated simulations.

use alloc::{string::ToString, vec, vec::Vec};

use super::{engine, tasks::Task, *};
use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Problem,
    machine::{KernelRate, KernelShape, Level, LinkRate},
    plan::{Circulate, Gather},
    report::size::MessageSize,
    schedule::Direction,
};

/// Figures that are exact in binary: ports move 8 bytes a second and cards 2; latencies 0.5 and 1.
fn machine(ranks_per_node: usize, cards_per_node: usize, cores: Option<usize>) -> Machine {
    let kernel = |backward| KernelRate {
        shape: KernelShape { dtype: Dtype::F32, head_dim: 8, value_dim: 8, backward },
        rate: 1024.0,
        row: 0.125,
        key: 0.25,
        edge: 0.0625,
        call: 2.0,
    };
    Machine {
        name: "by hand".into(),
        estimate: true,
        ranks_per_node,
        cards_per_node,
        cores,
        nodes_share_cores: false,
        memory: 1e9,
        operation: 0.0,
        copy: 64.0,
        inside: LinkRate { latency: 0.5, rate: 8.0 },
        between: LinkRate { latency: 1.0, rate: 2.0 },
        between_burst: 0.0,
        between_work: 0.0,
        kernels: vec![kernel(false), kernel(true)],
    }
}

fn compute(seconds: f64, after: Option<usize>) -> Task {
    Task { lane: Lane::Compute, after, seconds, messages: vec![] }
}

fn exchange(messages: &[(usize, u64, bool)], after: Option<usize>) -> Task {
    let messages = messages.iter().map(|&(peer, bytes, send)| MessageSize { peer, bytes, send }).collect();
    Task { lane: Lane::Communication, after, seconds: 0.0, messages }
}

const SEND: bool = true;
const RECEIVE: bool = false;

fn spans(lists: &[Vec<Task>], machine: &Machine) -> Vec<Vec<(f64, f64)>> {
    engine::run(lists, machine).unwrap()
}

#[test]
fn a_message_waits_for_both_sides() {
    // Rank 1 comes at 3; then 0.5 of latency and 16 bytes at 8 a second. Rank 1 computes what arrived.
    let lists = [
        vec![exchange(&[(1, 16, SEND)], None)],
        vec![compute(3.0, None), exchange(&[(0, 16, RECEIVE)], Some(0)), compute(1.0, Some(1))],
    ];
    let s = spans(&lists, &machine(2, 1, None));
    assert_eq!(s[0], [(0.0, 5.5)]);
    assert_eq!(s[1], [(0.0, 3.0), (3.0, 5.5), (5.5, 6.5)]);
    // Between nodes: 1 of latency and 8 seconds.
    assert_eq!(spans(&lists, &machine(1, 1, None))[1][2], (12.0, 13.0));
}

#[test]
fn lanes_overlap_and_a_lane_is_serial() {
    let lists = [
        vec![
            exchange(&[(1, 8, RECEIVE)], None),
            compute(4.0, None),
            compute(2.0, Some(0)),
            exchange(&[(1, 8, SEND)], Some(2)),
        ],
        vec![exchange(&[(0, 8, SEND)], None), compute(1.0, None), exchange(&[(0, 8, RECEIVE)], None)],
    ];
    let s = spans(&lists, &machine(2, 1, None));
    assert_eq!(s[0], [(0.0, 1.5), (0.0, 4.0), (4.0, 6.0), (6.0, 7.5)]);
    // Rank 1 comes to the second exchange at 1.5 and waits.
    assert_eq!(s[1], [(0.0, 1.5), (0.0, 1.0), (1.5, 7.5)]);
}

#[test]
fn links_and_cards_are_shared() {
    // One sender, two receivers: its port is divided, 16 bytes at 4 a second.
    let both = exchange(&[(1, 16, SEND), (2, 16, SEND)], None);
    let from = |bytes| vec![exchange(&[(0, bytes, RECEIVE)], None)];
    let s = spans(&[vec![both], from(16), from(16)], &machine(4, 1, None));
    assert_eq!((s[0][0].1, s[1][0].1), (4.5, 4.5));
    // Unequal: together until the short one is over at 0.5 + 2, then 8 left at 8 a second.
    let unequal = exchange(&[(1, 8, SEND), (2, 16, SEND)], None);
    let s = spans(&[vec![unequal], from(8), from(16)], &machine(4, 1, None));
    assert_eq!((s[1][0].1, s[2][0].1), (2.5, 3.5));
    // Two ranks of a node send to two of another over one card, then over a card each.
    let lists = |bytes| {
        [
            vec![exchange(&[(2, bytes, SEND)], None)],
            vec![exchange(&[(3, bytes, SEND)], None)],
            vec![exchange(&[(0, bytes, RECEIVE)], None)],
            vec![exchange(&[(1, bytes, RECEIVE)], None)],
        ]
    };
    assert_eq!(spans(&lists(4), &machine(2, 1, None))[3][0].1, 1.0 + 4.0);
    assert_eq!(spans(&lists(4), &machine(2, 2, None))[3][0].1, 1.0 + 2.0);
}

#[test]
fn cores_are_shared_by_kernels_and_copies() {
    // Three kernels of 2 seconds on two cores.
    let lists = [vec![compute(2.0, None)], vec![compute(2.0, None)], vec![compute(2.0, None)]];
    assert_eq!(spans(&lists, &machine(4, 1, Some(2)))[0][0].1, 3.0);
    assert_eq!(spans(&lists, &machine(4, 1, None))[0][0].1, 2.0);
    // Each node has cores of its own.
    assert_eq!(spans(&lists, &machine(2, 1, Some(2)))[0][0].1, 2.0);
    // A receiver's copies come one after another: 8 bytes at 8 a second each, beside two idle cores.
    let lists = [
        vec![exchange(&[(1, 8, RECEIVE), (2, 8, RECEIVE)], None)],
        vec![exchange(&[(0, 8, SEND)], None)],
        vec![exchange(&[(0, 8, SEND)], None)],
    ];
    let s = spans(&lists, &machine(4, 1, Some(2)));
    assert_eq!((s[1][0].1, s[2][0].1, s[0][0].1), (1.5, 2.5, 2.5));
    // On one core the copy shares it with a kernel: from 0.5 on both at half speed, the copy until 2.5.
    let lists = [vec![compute(4.0, None), exchange(&[(1, 8, RECEIVE)], None)], vec![exchange(&[(0, 8, SEND)], None)]];
    let s = spans(&lists, &machine(2, 1, Some(1)));
    assert_eq!((s[0][1].1, s[0][0].1), (2.5, 5.0));
}

#[test]
fn nodes_on_one_machine_share_its_cores() {
    // Four nodes of one rank each: a core each, or two cores for all.
    let lists =
        [vec![compute(2.0, None)], vec![compute(2.0, None)], vec![compute(2.0, None)], vec![compute(2.0, None)]];
    let apart = machine(1, 1, Some(2));
    assert_eq!(spans(&lists, &apart)[3][0].1, 2.0);
    assert_eq!(spans(&lists, &Machine { nodes_share_cores: true, ..apart })[3][0].1, 4.0);
}

#[test]
fn messages_between_nodes_need_cores_at_both_ends() {
    // 16 bytes: 8 seconds on the cards, and at 1 second a byte 8 of a core at each end.
    let lists = [vec![exchange(&[(1, 16, SEND)], None)], vec![exchange(&[(0, 16, RECEIVE)], None), compute(3.0, None)]];
    let apart = Machine { between_work: 1.0, ..machine(1, 1, Some(1)) };
    // Latency until 1; the receiver's kernel has the core until then, and shares it for 4 seconds more.
    let s = spans(&lists, &apart);
    assert_eq!((s[1][1].1, s[0][0].1), (5.0, 11.0));
    // One core for both ends: 16 seconds of copies and 3 of a kernel.
    let s = spans(&lists, &Machine { nodes_share_cores: true, ..apart });
    assert_eq!(s[0][0].1, 19.0);
}

#[test]
fn a_bucket_passes_its_bytes_at_once_and_fills_again() {
    let machine = Machine { between_burst: 6.0, ..machine(1, 1, None) };
    let lists = |pause, second| {
        [
            vec![exchange(&[(1, 10, SEND)], None), compute(pause, Some(0)), exchange(&[(1, second, SEND)], Some(1))],
            vec![exchange(&[(0, 10, RECEIVE)], None), exchange(&[(0, second, RECEIVE)], None)],
        ]
    };
    // Latency 1, of 10 bytes 6 at once and 4 at 2 a second. Then a bucket of what came in the pause and the next
    // latency.
    let s = spans(&lists(0.5, 10), &machine);
    assert_eq!((s[1][0].1, s[1][1].1), (3.0, 4.5 + 7.0 / 2.0));
    // Never more than its size.
    let s = spans(&lists(100.0, 10), &machine);
    assert_eq!(s[1][1].1, 104.0 + 2.0);
    // A message of less than the bucket takes the latency alone, and leaves the rest.
    let s = spans(&lists(1.0, 4), &machine);
    assert_eq!(s[1][1].1, 5.0);
    // The receiver's bucket counts too: two senders, and 6 bytes at once for both.
    let both = [
        vec![exchange(&[(2, 6, SEND)], None)],
        vec![exchange(&[(2, 6, SEND)], None)],
        vec![exchange(&[(0, 6, RECEIVE), (1, 6, RECEIVE)], None)],
    ];
    let s = spans(&both, &machine);
    assert_eq!((s[0][0].1, s[1][0].1), (1.0, 4.0));
}

#[test]
fn what_never_meets_is_an_error() {
    let lists = [vec![exchange(&[(1, 8, SEND)], None)], vec![compute(1.0, None)]];
    let text = engine::run(&lists, &machine(2, 1, None)).unwrap_err().to_string();
    assert!(text.contains("waits forever"), "{text}");
    let lists = [vec![exchange(&[(1, 8, SEND)], None)], vec![exchange(&[(0, 9, RECEIVE)], None)]];
    let text = engine::run(&lists, &machine(2, 1, None)).unwrap_err().to_string();
    assert!(text.contains("9 bytes from 0 to 1 are 8 at the other end"), "{text}");
}

/// One document of 8 tokens, causal, over two ranks: every operation by hand.
#[test]
fn a_ring_of_two_by_hand() {
    let problem = Problem::new(Batch::from_lengths(&[8]).unwrap(), 1, 1, 8, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ring(2).unwrap(), Layout::Contiguous).unwrap();
    let m = machine(2, 1, None);
    let run = plan.simulate(Direction::Forward, &m).unwrap();
    // Own share: 10 pairs of 2 · 16 operations at 1,024 a second, 4 rows, 4 keys, 4 rows at the edge of the mask, the
    // call.
    let own = 10.0 * 32.0 / 1024.0 + 4.0 * 0.125 + 4.0 * 0.25 + 4.0 * 0.0625 + 2.0;
    let other = 16.0 * 32.0 / 1024.0 + 4.0 * 0.125 + 4.0 * 0.25 + 2.0;
    // k and v, 4 rows of 8 f32 each, from rank 0 to rank 1.
    let fetch = 0.5 + 256.0 / 8.0;
    assert_eq!(run.ranks[0].compute, own);
    assert_eq!(run.ranks[1].compute, own + other);
    assert_eq!(run.makespan, fetch + other);
    assert_eq!((run.ranks[1].communication, run.ranks[1].exposed), (fetch, fetch - own));
    assert_eq!(run.ranks[1].idle, run.makespan - own - other);
    assert_eq!((run.ranks[0].bytes_inside, run.ranks[0].bytes_between, run.ranks[1].bytes_inside), (256, 0, 0));
    assert!(run.exact_kernels);
    // One rank has nothing to wait for.
    let plan = Plan::new(&problem, Mesh::single(), Layout::Contiguous).unwrap();
    let run = plan.simulate(Direction::Forward, &m).unwrap();
    assert_eq!(run.makespan, 36.0 * 32.0 / 1024.0 + 8.0 * 0.125 + 8.0 * 0.25 + 8.0 * 0.0625 + 2.0);
    assert_eq!((run.ranks[0].idle, run.exposed()), (0.0, 0.0));
}

/// Each rank's bytes are those of its costs, at the right level, and the events are a run's.
#[test]
fn bytes_and_times_are_conserved() {
    let batch = Batch::from_lengths(&[7, 0, 1, 40, 13]).unwrap();
    let forms = [
        Options::new(),
        Options::new().gather(true),
        Options::new().gather(Gather::Together),
        Options::new().passes(2),
        Options::new().circulate(Circulate::Queries),
        Options::new().circulate_forward(Circulate::Queries),
        Options::new().reproducible(true),
    ];
    let mut between = 0;
    for mask in [Mask::causal(), Mask::full(), Mask::window(5, 0)] {
        let p = Problem::new(batch.clone(), 6, 2, 8, Dtype::F32).with_mask(mask).with_sinks(true);
        for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }] {
            for (ulysses, ring) in [(1, 1), (1, 4), (2, 3), (4, 1), (4, 2)] {
                for options in forms {
                    for m in [machine(2, 1, None), machine(3, 2, None), machine(8, 1, Some(2))] {
                        let mesh = Mesh { replicas: 1, ring, ulysses };
                        let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
                        for direction in [Direction::Forward, Direction::Backward] {
                            let run = plan.simulate(direction, &m).unwrap();
                            assert_eq!(run, plan.simulate(direction, &m).unwrap(), "the same every time");
                            for (rank, t) in run.ranks.iter().enumerate() {
                                let costs = plan.costs(rank, direction).unwrap();
                                assert_eq!(t.bytes_inside + t.bytes_between, costs.bytes_sent(), "{plan:?}");
                                assert_eq!(t.workspace, costs.workspace);
                                assert!(t.end <= run.makespan && t.exposed <= t.communication && t.compute > 0.0);
                                assert!(t.exposed <= t.idle + 1e-9 * run.makespan, "{t:?}");
                                between += t.bytes_between;
                            }
                            let count: usize = (0..mesh.world())
                                .map(|r| Schedule::new(&plan, r, direction).unwrap().operations().len())
                                .sum();
                            assert_eq!(run.events.len(), count);
                            if mesh.world() <= m.ranks_per_node {
                                assert!(run.ranks.iter().all(|t| t.bytes_between == 0));
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(between > 0);
    assert_eq!(machine(2, 1, None).level(1, 2), Level::Between);
}

#[test]
fn a_faster_machine_is_never_slower() {
    let p = Problem::new(Batch::from_lengths(&[100, 30]).unwrap(), 4, 2, 8, Dtype::F32);
    let plan = Plan::new(&p, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag).unwrap();
    let base = machine(2, 1, None);
    let before = plan.simulate(Direction::Backward, &base).unwrap().makespan;
    let mut faster = [base.clone(), base.clone(), base.clone()];
    faster[0].between.rate *= 2.0;
    faster[1].inside.latency /= 4.0;
    faster[2].kernels.iter_mut().for_each(|k| k.rate *= 2.0);
    for m in &faster {
        assert!(plan.simulate(Direction::Backward, m).unwrap().makespan <= before);
    }
}
