// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cases that predictions are held against, and the laps of one rank over one of them.
//!
//! Threads take problems of 1 to 4 ranks. Processes take problems of all their ranks; over several nodes those with
//! rows that cross between nodes once are beside the same without.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result,
    call::RawTensor,
    runtime::Bindings,
    schedule::{Direction, TensorId},
};

/// Memory of at least `count` finite numbers of a type. For half precision each f32 is two equal ones.
pub fn finite(random: &mut fastrand::Rng, count: usize, dtype: Dtype) -> Vec<f32> {
    let number = |_| match dtype {
        Dtype::F32 => random.f32() - 0.5,
        _ => f32::from_bits(u32::from(half::bf16::from_f32(random.f32() - 0.5).to_bits()) * 0x1_0001),
    };
    (0..count).map(number).collect()
}

/// A rank's tensors for one direction.
pub struct Tensors {
    pub bindings: Bindings,
    /// What the bindings point to.
    #[allow(dead_code, reason = "kept alive")]
    memory: Vec<Vec<f32>>,
}

impl Tensors {
    pub fn new(plan: &Plan, rank: usize, direction: Direction) -> Self {
        let (mut bindings, mut memory) = (Bindings::default(), Vec::new());
        let mut random = fastrand::Rng::with_seed(rank as u64);
        for t in TensorId::ALL.into_iter().filter(|t| t.is_written(direction, plan.problem().sinks()).is_some()) {
            let [tokens, heads, dim] = t.shape(plan, rank);
            let dtype = t.dtype(plan.problem());
            let mut values = finite(&mut random, tokens * heads * dim, dtype);
            let ptr = values.as_mut_ptr().cast();
            bindings.set(t, RawTensor::compact(ptr, dtype, tokens as u64, heads as u32, dim as u32));
            memory.push(values);
        }
        Self { bindings, memory }
    }
}

/// A plan to run in both directions.
pub struct Case {
    pub name: &'static str,
    pub plan: Plan,
}

/// Lengths, heads, kv heads, dim, type, mask, Ulysses, ring, layout, options.
type Spec<'a> = (&'static str, &'a [usize], [usize; 3], Dtype, Mask, [usize; 2], Layout, Options);

/// The cases of ranks that are threads.
pub fn of_threads() -> Result<Vec<Case>> {
    use Layout::{Balanced, Contiguous, Striped, Zigzag, ZigzagPack};
    let (causal, full, window) = (Mask::causal(), Mask::full(), Mask::sliding(256));
    let o = Options::new;
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    const ONE: &[usize] = &[2048];
    const SHORT: &[usize] = &[1024];
    const MANY: &[usize] = &[700, 150, 48, 520, 300, 330];
    let specs: [Spec<'_>; 19] = [
        ("one document", SHORT, [4, 4, 64], f32, causal, [1, 1], Contiguous, o()),
        ("one document", SHORT, [4, 2, 64], f32, full, [1, 1], Contiguous, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [1, 2], Zigzag, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [1, 2], Contiguous, o()),
        ("one document", SHORT, [4, 2, 64], f32, full, [1, 2], Contiguous, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [2, 1], Contiguous, o()),
        ("one document", ONE, [4, 4, 64], f32, window, [1, 2], Contiguous, o()),
        ("6 documents", MANY, [4, 4, 64], f32, causal, [1, 2], Balanced { chunks: 4 }, o()),
        ("one document", SHORT, [4, 4, 128], f32, causal, [1, 2], Zigzag, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [1, 3], Zigzag, o()),
        ("6 documents", MANY, [4, 2, 64], f32, causal, [1, 3], Zigzag, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [1, 4], Zigzag, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [2, 2], Zigzag, o()),
        ("one document", ONE, [4, 4, 64], f32, causal, [4, 1], Contiguous, o()),
        ("one document", SHORT, [4, 4, 64], f32, full, [2, 2], Contiguous, o()),
        ("one document", ONE, [4, 2, 64], f32, causal, [1, 4], Striped { stripe: 128 }, o()),
        ("6 documents", MANY, [4, 4, 64], f32, causal, [1, 4], ZigzagPack, o()),
        ("one document, gather", ONE, [4, 4, 64], f32, causal, [1, 4], Zigzag, o().gather(true)),
        ("one document", ONE, [4, 4, 64], bf16, causal, [2, 2], Zigzag, o()),
    ];
    specs.into_iter().map(case).collect()
}

/// The cases of `world` ranks that are processes, `node` of them on each node.
#[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "of processes"))]
pub fn of_processes(world: usize, node: usize, tokens: usize) -> Result<Vec<Case>> {
    use Layout::{Balanced, Contiguous, Striped, Zigzag};
    let (causal, full, window) = (Mask::causal(), Mask::full(), Mask::sliding(tokens as u32 / 8));
    let (o, twice) = (Options::new, if node < world { 2 } else { 1 });
    let levels = |number: usize| if number == 2 { o().ranks_per_node(node) } else { o() };
    let (f32, one) = (Dtype::F32, [tokens]);
    let many = [4, 1, 3].map(|part| tokens * part / 8);
    let (all, pairs) = ([1, world], [2, world / 2]);
    let mut specs: Vec<Spec<'_>> = Vec::new();
    for number in 1..=twice {
        specs.push(("one document", &one, [4, 4, 64], f32, causal, all, Zigzag, levels(number)));
        specs.push(("one document", &one, [4, 4, 64], f32, full, all, Contiguous, levels(number)));
        specs.push(("3 documents", &many, [8, 2, 64], f32, causal, all, Balanced { chunks: 4 }, levels(number)));
    }
    specs.push(("one document", &one, [4, 4, 64], f32, window, all, Contiguous, o()));
    specs.push(("one document", &one, [4, 4, 64], f32, causal, pairs, Zigzag, o()));
    specs.push(("one document", &one, [4, 4, 64], f32, causal, [4, world / 4], Contiguous, o()));
    specs.push(("one document", &one, [4, 4, 64], f32, causal, all, Striped { stripe: 64 }, o()));
    specs.push(("one document, gather", &one, [4, 2, 64], f32, causal, all, Zigzag, o().gather(true)));
    specs.into_iter().map(case).collect()
}

fn case(
    (name, lengths, [heads, kv_heads, dim], dtype, mask, [ulysses, ring], layout, options): Spec<'_>,
) -> Result<Case> {
    let problem = Problem::new(Batch::from_lengths(lengths)?, heads, kv_heads, dim, dtype).with_mask(mask);
    let mesh = Mesh { replicas: 1, ring, ulysses };
    Ok(Case { name, plan: Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build()? })
}

/// Nanoseconds of a clock that is never set, and that all ranks share: processes of one machine read the same.
#[cfg(feature = "mpi")]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the struct, which is this function's.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    assert_eq!(code, 0, "CLOCK_MONOTONIC is there on all systems that have MPI");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds of a clock that is never set, and that all threads share.
#[cfg(not(feature = "mpi"))]
pub fn now() -> u64 {
    use std::{sync::OnceLock, time::Instant};
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    EPOCH.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Begin and end of some runs of one rank; `meet` waits for the others before each. One more run, the first, prepares
/// the plan.
pub fn laps(
    rank: &mut Rank,
    plan: &Plan,
    direction: Direction,
    runs: usize,
    mut meet: impl FnMut() -> Result<()>,
) -> Result<Vec<[u64; 2]>> {
    let tensors = Tensors::new(plan, rank.rank(), direction);
    let mut laps = Vec::with_capacity(runs);
    for lap in 0..=runs {
        meet()?;
        let begin = now();
        // SAFETY: the tensors are this function's, of the plan's shapes, and live longer than the run.
        unsafe { rank.run(plan, direction, &tensors.bindings) }?;
        if lap > 0 {
            laps.push([begin, now()]);
        }
    }
    Ok(laps)
}

/// The shortest time from the first rank's begin to the last rank's end, in seconds, of the laps of all ranks.
/// A lap shorter than a tick of the clock does not count; infinite where none counts.
pub fn makespan(ranks: &[Vec<[u64; 2]>]) -> f64 {
    let of = |lap: usize| {
        let begin = ranks.iter().map(|laps| laps[lap][0]).min().unwrap_or(0);
        ranks.iter().map(|laps| laps[lap][1]).max().unwrap_or(0).saturating_sub(begin)
    };
    (0..ranks[0].len()).map(of).filter(|&ns| ns > 0).min().map_or(f64::INFINITY, |ns| ns as f64 * 1e-9)
}
