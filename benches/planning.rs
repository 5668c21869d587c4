// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's plan: `Plan::with_options` and both schedules. Documents change every step, so this cost occurs every
//! step.
//!
//! Targets: 100 µs at 8 ranks and 64 documents; 50 ms at 1,024 ranks, 1 M tokens and 1,000 documents.

use std::hint::black_box;

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Plan, Problem,
    schedule::{Direction, Schedule},
};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

/// `n` documents of `total` tokens, lengths spread by a fixed generator from 1/8 to 15/8 of the mean.
fn documents(n: usize, total: usize) -> Batch {
    let mean = total / n;
    let mut draw = fastrand::Rng::with_seed(1);
    let mut lengths: Vec<usize> = (1..n).map(|_| mean / 8 + draw.usize(..mean * 14 / 8)).collect();
    let mut used: usize = lengths.iter().sum();
    while used > total {
        for n in lengths.iter_mut().filter(|n| **n > 1) {
            let cut = (*n / 8).max(1);
            *n -= cut;
            used -= cut;
        }
    }
    lengths.push(total - used);
    Batch::from_lengths(&lengths).unwrap()
}

fn one_rank(problem: &Problem, mesh: Mesh, layout: Layout, rank: usize) -> usize {
    let plan = Plan::new(problem, mesh, layout).unwrap();
    let forward = Schedule::new(&plan, rank, Direction::Forward).unwrap();
    let backward = Schedule::new(&plan, rank, Direction::Backward).unwrap();
    forward.operations().len() + backward.operations().len()
}

fn bench(c: &mut Criterion) {
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 64 },
        Layout::Balanced { chunks: 8 },
    ];
    let mut group = c.benchmark_group("planning");
    group.sample_size(10);
    let small = Problem::new(documents(64, 65_536), 32, 8, 128, Dtype::Bf16);
    let large = Problem::new(documents(1000, 1 << 20), 32, 8, 128, Dtype::Bf16);
    for (ring, ulysses) in [(8, 1), (2, 4)] {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        for layout in layouts {
            let id = BenchmarkId::new(format!("8 ranks, 64 documents, ulysses {ulysses}"), layout);
            group.bench_function(id, |b| b.iter(|| one_rank(black_box(&small), mesh, layout, 5)));
        }
    }
    let windowed = small.clone().with_mask(Mask::sliding(512));
    group.bench_function("8 ranks, 64 documents, window 512", |b| {
        b.iter(|| one_rank(black_box(&windowed), Mesh { replicas: 1, ring: 8, ulysses: 1 }, Layout::Contiguous, 5));
    });
    for (ring, ulysses) in [(1024, 1), (128, 8)] {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        for layout in layouts {
            let id = BenchmarkId::new(format!("1024 ranks, 1000 documents, ulysses {ulysses}"), layout);
            group.bench_function(id, |b| b.iter(|| one_rank(black_box(&large), mesh, layout, 517)));
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
