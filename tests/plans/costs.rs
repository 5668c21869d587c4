// SPDX-License-Identifier: MIT OR Apache-2.0
//! The costs of schedules: all work is done once, all bytes sent are received, and no workspace exceeds its bound.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Choice, Circulate, Gather, Wire},
    report::Costs,
    schedule::{Direction, Schedule},
};

/// Every form, layout and mesh on a pack with awkward lengths.
fn each(mut check: impl FnMut(&Plan)) {
    let batch = Batch::from_lengths(&[7, 0, 1, 40, 13]).unwrap();
    let options = [
        Options::new(),
        Options::new().gather(true),
        Options::new().gather(Gather::Together),
        Options::new().passes(2),
        Options::new().circulate(Circulate::Queries),
        Options::new().circulate_forward(Circulate::Queries),
        Options::new().circulate_forward(Circulate::Queries).ranks_per_node(2),
        Options::new().circulate(Circulate::Keys).wire(Wire::Bf16),
        Options::new().reproducible(true),
        Options::new().circulate(Circulate::Keys).ranks_per_node(2),
        Options::new().circulate(Circulate::Queries).wire(Wire::Bf16).ranks_per_node(2),
        Options::new().gather(true).ranks_per_node(2),
        Options::new().gather(Gather::Together).circulate(Circulate::Keys).wire(Wire::Bf16).ranks_per_node(2),
        Options::new().gather(Gather::Together).circulate(Circulate::Queries).ranks_per_node(2),
        Options::new().gather(Gather::Together).circulate(Circulate::Keys).passes(2).ranks_per_node(2),
        Options::new().reproducible(true).ranks_per_node(2),
    ];
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for mask in [Mask::causal(), Mask::full(), Mask::window(5, 0)] {
            let p = Problem::new(batch.clone(), 6, 2, 8, dtype).with_value_dim(4).with_mask(mask).with_sinks(true);
            for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }] {
                for (ulysses, ring) in [(1, 1), (1, 4), (2, 3), (4, 1), (4, 2)] {
                    for o in options {
                        check(
                            &Plan::builder(&p)
                                .mesh(Mesh { replicas: 1, ring, ulysses })
                                .layout(layout)
                                .options(o)
                                .build()
                                .unwrap_or_else(|e| panic!("{e}")),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn all_work_is_done_once_and_all_that_leaves_arrives() {
    each(|plan| {
        let p = plan.problem();
        for (direction, dims) in [(Direction::Forward, 8 + 4), (Direction::Backward, 3 * 8 + 2 * 4)] {
            let all: Vec<Costs> = (0..plan.mesh().world()).map(|r| plan.costs(r, direction).unwrap()).collect();
            let (mut work, mut sent, mut received) = (0, 0, 0);
            for c in &all {
                work += c.multiply_adds();
                sent += c.bytes_sent();
                received += c.bytes_received();
            }
            let again = direction == Direction::Backward && plan.options().reproducible;
            let dims = if again { 4 * 8 + 3 * 4 } else { dims };
            assert_eq!(work, p.area() * 6 * dims, "{plan:?}");
            assert_eq!(sent, received, "{plan:?}");
        }
    });
}

#[test]
fn the_peak_is_the_sum_of_its_buffers() {
    each(|plan| {
        for direction in [Direction::Forward, Direction::Backward] {
            for rank in 0..plan.mesh().world() {
                let c = plan.costs(rank, direction).unwrap();
                let sum: u64 = c.peak.iter().map(|p| p.bytes).sum();
                assert_eq!(sum, c.workspace, "{:?} of {plan:?}", c.peak);
            }
        }
    });
}

#[test]
fn no_workspace_is_larger_than_the_design_allows() {
    let (mut real, mut allowed) = (0, 0);
    each(|plan| {
        for direction in [Direction::Forward, Direction::Backward] {
            for rank in 0..plan.mesh().world() {
                let (found, bound) = (
                    Schedule::new(plan, rank, direction).unwrap().workspace_bytes(),
                    plan.workspace_bound(rank, direction),
                );
                assert!(found <= bound, "{found} of {bound} bytes, rank {rank} {direction:?} of {plan:?}");
                real += found;
                allowed += bound;
            }
        }
    });
    assert!(real > 0 && allowed > real);
    // Rows larger than the padding of all buffers together: a bound that is one row too small is found.
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..200 {
        let documents = random.usize(1..5);
        let lengths: Vec<usize> = (0..documents).map(|_| random.usize(0..40)).collect();
        let mask = [Mask::causal(), Mask::full(), Mask::window(9, 2)][random.usize(..3)];
        let p = Problem::new(Batch::from_lengths(&lengths).unwrap(), 16, 16, 512, Dtype::F32).with_mask(mask);
        let ring = random.usize(2..7);
        let levels = if random.bool() && ring.is_multiple_of(2) { ring / 2 } else { 0 };
        let options = [Options::new(), Options::new().gather(true), Options::new().circulate(Circulate::Queries)]
            [random.usize(..3)]
        .ranks_per_node(levels);
        for layout in Choice::LAYOUTS {
            let plan =
                Plan::builder(&p).mesh(Mesh::ring(ring).unwrap()).layout(layout).options(options).build().unwrap();
            for direction in [Direction::Forward, Direction::Backward] {
                for rank in 0..ring {
                    let schedule = Schedule::new(&plan, rank, direction).unwrap();
                    let (found, bound) = (schedule.workspace_bytes(), plan.workspace_bound(rank, direction));
                    assert!(found <= bound, "{found} of {bound} bytes, rank {rank} {direction:?} of {plan:?}");
                }
            }
        }
    }
    // If padding and rounding are small compared with the buffers, the bound is close.
    let p = Problem::new(Batch::from_lengths(&[1 << 14]).unwrap(), 4, 4, 64, Dtype::Bf16);
    let plan = Plan::new(&p, Mesh::ring(4).unwrap(), Layout::Zigzag).unwrap();
    for direction in [Direction::Forward, Direction::Backward] {
        let (found, bound) =
            (Schedule::new(&plan, 1, direction).unwrap().workspace_bytes(), plan.workspace_bound(1, direction));
        assert!(found <= bound && bound < found + found / 4, "{found} of {bound} bytes, {direction:?}");
    }
}
