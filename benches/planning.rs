// SPDX-License-Identifier: MIT OR Apache-2.0
//! Planning: the automatic choice, a choice that is kept, one rank's plan with both schedules, the proof of all ranks,
//! and the memory of the last two. Documents change in every training step, so all of these except the proof run in
//! every step.
//!
//! Goals on two cores, 1 M tokens: the choice over 8 ranks ≤ 1, 5 and 50 ms for 1,000, 10,000 and 100,000 documents,
//! over 1,024 ranks ≤ 20, 60 and 400 ms; kept ≤ 100 µs; a plan and both schedules ≤ 15 ms, and ≤ 64 MB with 100,000
//! documents; the proof of 64, 256 and 1,024 ranks ≤ 0.3, 2 and 15 s, the last in 1 GB.
//!
//! ```text
//! cargo bench --bench planning [-- FILTER]
//! ```
//!
//! The proof, with as many documents as ranks and with one, and the memory are measured once each, at the end; FILTER
//! `proof` or `memory` runs only these. Only FILTER `large` proves one document over 1,024 ranks: that takes half a
//! minute and 0.7 GB.

use std::{
    alloc::{GlobalAlloc, Layout as Block, System},
    hint::black_box,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Instant,
};

use cpattn::{
    Batch, Dtype, Layout, Machine, Mask, Mesh, Plan, Problem, Slice, plan::Choice, schedule::Schedule, slices,
};
use criterion::{BenchmarkId, Criterion, criterion_group};

/// The system's allocator, with the number of allocated bytes, now and at most.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts allocated bytes. The maximum is rarely written and always read, so that threads that allocate at the same
/// time seldom contend for it.
fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Block) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Block) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's block, which `alloc` above had of the system.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Block, size: usize) -> *mut u8 {
        // Both blocks count during a reallocation, even if the system moves pages.
        add(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's block, which `alloc` above had of the system, and the caller's size.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// `n` documents of `total` tokens, lengths spread by a fixed generator from 1/8 to 15/8 of the mean.
fn documents(n: usize, total: usize) -> Batch {
    let mean = total / n;
    let mut draw = fastrand::Rng::with_seed(1);
    let mut lengths: Vec<usize> = (1..n).map(|_| mean / 8 + draw.usize(..(mean * 14 / 8).max(1))).collect();
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

fn both_schedules(problem: &Problem, mesh: Mesh, layout: Layout, rank: usize) -> (Plan, [Schedule; 2]) {
    let plan = Plan::new(problem, mesh, layout).unwrap();
    let schedules = Schedule::both(&plan, rank).unwrap();
    (plan, schedules)
}

fn one_rank(problem: &Problem, mesh: Mesh, layout: Layout, rank: usize) -> usize {
    let (_, [forward, backward]) = both_schedules(problem, mesh, layout, rank);
    forward.operations().len() + backward.operations().len()
}

fn of(n: usize, tokens: usize) -> Problem {
    Problem::new(documents(n, tokens), 32, 8, 128, Dtype::Bf16).with_mask(Mask::causal())
}

fn choices(c: &mut Criterion) {
    let mut group = c.benchmark_group("choice");
    group.sample_size(10);
    for world in [8, 1024] {
        for n in [1000, 10_000, 100_000] {
            let problem = of(n, 1 << 20);
            group.bench_function(BenchmarkId::new(format!("automatic, {world} ranks"), n), |b| {
                b.iter(|| Choice::new(black_box(&problem), world, Choice::BALANCE, 0).unwrap());
            });
            let machine = Machine::parse(include_str!("../machines/h100_8x400g.machine")).unwrap();
            group.bench_function(BenchmarkId::new(format!("by a machine, {world} ranks"), n), |b| {
                b.iter(|| Plan::builder(black_box(&problem)).world(world).build_on(&machine).unwrap());
            });
            let previous = Plan::auto(&problem, world).unwrap();
            group.bench_function(BenchmarkId::new(format!("kept, {world} ranks"), n), |b| {
                b.iter(|| previous.next(black_box(problem.batch())).unwrap());
            });
        }
    }
    group.finish();
}

/// 1,000 slices in three ways, and the same number of documents without slices beside them.
fn sliced(c: &mut Criterion) {
    let tokens = 1 << 20;
    let plain = of(1000, tokens);
    let cu: Vec<i32> = plain.batch().cu_seqlens(cpattn::Side::Q).to_vec();
    let with =
        |batch: Batch, slices: Vec<Slice>| Problem::new(batch.with_slices(&slices).unwrap(), 32, 8, 128, Dtype::Bf16);
    let documents = with(plain.batch().clone(), slices::documents(&cu));
    // 31 prompts of 8,192 tokens, each with 16 answers: one slice for the prompt, two for each answer.
    let (prompts, answer) = (31, (tokens / 31 - 8192) / 16);
    let group = 8192 + 16 * answer;
    let answers = slices::shared_prefix(8192, &[answer; 16]);
    let moved = |s: &Slice, by: i32| Slice {
        q_begin: s.q_begin + by,
        q_end: s.q_end + by,
        k_begin: s.k_begin + by,
        k_end: s.k_end + by,
        ..*s
    };
    let groups: Vec<Slice> =
        (0..prompts).flat_map(|i| answers.iter().map(move |s| moved(s, (i * group) as i32))).collect();
    let groups = with(Batch::from_lengths(&vec![group; prompts]).unwrap(), groups);
    let one = with(Batch::from_lengths(&[500 * 2000 + 8192]).unwrap(), slices::shared_prefix(8192, &[2000; 500]));
    let mut bench = c.benchmark_group("slices");
    bench.sample_size(10);
    for (name, problem) in [
        ("documents without", &plain),
        ("documents", &documents),
        ("31 prompts, 16 answers each", &groups),
        ("one prompt, 500 answers", &one),
    ] {
        for world in [8, 1024] {
            bench.bench_function(BenchmarkId::new(format!("automatic, {world} ranks"), name), |b| {
                b.iter(|| Choice::new(black_box(problem), world, Choice::BALANCE, 0).unwrap());
            });
        }
        let mesh = Mesh { replicas: 1, ring: 8, ulysses: 1 };
        for layout in [Layout::Contiguous, Layout::ZigzagPack, Layout::Balanced { chunks: 8 }] {
            bench.bench_function(BenchmarkId::new(format!("8 ranks, {layout}"), name), |b| {
                b.iter(|| one_rank(black_box(problem), mesh, layout, 5));
            });
        }
        if let Some(list) = problem.batch().slices().map(<[Slice]>::to_vec) {
            let whole = Batch::new(problem.batch().cu_seqlens(cpattn::Side::Q)).unwrap();
            bench.bench_function(BenchmarkId::new("slices checked", name), |b| {
                b.iter(|| whole.clone().with_slices(black_box(&list)).unwrap());
            });
        }
    }
    bench.finish();
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
    let (small, large) = (of(64, 65_536), of(1000, 1 << 20));
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

/// The most bytes allocated at the same time during a call, without those allocated before it.
fn peak<T>(call: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = call();
    (result, PEAK.load(Relaxed) - before)
}

/// A zigzag of the pack, 1,024 tokens a rank.
fn proof(ranks: usize, documents: usize) {
    let problem = of(documents, 1024 * ranks);
    let plan = Plan::new(&problem, Mesh::ring(ranks).unwrap(), Layout::ZigzagPack).unwrap();
    let begin = Instant::now();
    let (_, bytes) = peak(|| plan.verify().unwrap());
    let (seconds, mb) = (begin.elapsed().as_secs_f64(), bytes / 1_000_000);
    println!("proof, {ranks} ranks, documents {documents}: {seconds:.2} s, at most {mb} MB");
}

fn memory() {
    let problem = of(100_000, 1 << 20);
    for layout in [Layout::Zigzag, Layout::Striped { stripe: 64 }, Layout::Balanced { chunks: 8 }, Layout::ZigzagPack] {
        let before = LIVE.load(Relaxed);
        let (kept, most) = peak(|| both_schedules(&problem, Mesh::ring(1024).unwrap(), layout, 517));
        let bytes = LIVE.load(Relaxed) - before;
        println!(
            "memory, 1024 ranks, 100000 documents, {layout}: {:.1} MB, at most {:.1} MB while they are made",
            bytes as f64 / 1e6,
            most as f64 / 1e6
        );
        drop(kept);
    }
}

criterion_group!(benches, choices, sliced, bench);

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let wanted = |name: &str| filter.as_deref().is_none_or(|f| f == name);
    if !matches!(filter.as_deref(), Some("proof" | "memory" | "large")) {
        benches();
        Criterion::default().configure_from_args().final_summary();
    }
    if wanted("memory") {
        memory();
    }
    if wanted("proof") {
        [(64, 64), (64, 1), (256, 256), (256, 1), (1024, 1024)].into_iter().for_each(|(r, d)| proof(r, d));
    }
    if filter.as_deref() == Some("large") {
        proof(1024, 1);
    }
}
