// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs cases on ranks that are threads, and puts the predicted makespan beside the measured one.
//!
//! A makespan is the time from the first rank's start to the last rank's end. Cases take turns, round after round, and
//! the shortest time of each counts.

use std::{sync::Barrier, time::Instant};

use cpattn::{
    Batch, Dtype, Layout, Machine, Mask, Mesh, Options, Plan, Problem, Rank, Result,
    call::RawTensor,
    runtime::Bindings,
    schedule::{Direction, TensorId},
    transport::local,
};

use crate::links::DEADLINE;

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

struct Case {
    name: &'static str,
    plan: Plan,
}

/// Lengths, heads, kv heads, dim, type, mask, Ulysses, ring, layout, options.
type Spec = (&'static str, &'static [usize], [usize; 3], Dtype, Mask, [usize; 2], Layout, Options);

fn cases() -> Result<Vec<Case>> {
    use Layout::{Balanced, Contiguous, Striped, Zigzag, ZigzagPack};
    let (causal, full, window) = (Mask::causal(), Mask::full(), Mask::sliding(256));
    let o = Options::new;
    let (f32, bf16) = (Dtype::F32, Dtype::Bf16);
    const ONE: &[usize] = &[2048];
    const SHORT: &[usize] = &[1024];
    const MANY: &[usize] = &[700, 150, 48, 520, 300, 330];
    let specs: [Spec; 19] = [
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
    specs
        .into_iter()
        .map(|(name, lengths, [heads, kv_heads, dim], dtype, mask, [ulysses, ring], layout, options)| {
            let problem = Problem::new(Batch::from_lengths(lengths)?, heads, kv_heads, dim, dtype).with_mask(mask);
            let mesh = Mesh::explicit(ulysses * ring, ulysses, ring)?;
            Ok(Case { name, plan: Plan::with_options(&problem, mesh, layout, options)? })
        })
        .collect()
}

/// The shortest makespan of some runs.
fn makespan(plan: &Plan, direction: Direction, runs: usize) -> Result<f64> {
    let world = plan.mesh().world();
    let (barrier, epoch) = (Barrier::new(world), Instant::now());
    let spans = local::run(world, DEADLINE, |end| {
        let mut rank = Rank::new(end);
        let tensors = Tensors::new(plan, rank.rank(), direction);
        let mut spans = Vec::with_capacity(runs);
        for _ in 0..=runs {
            barrier.wait();
            let start = epoch.elapsed();
            // SAFETY: the tensors are this function's, of the plan's shapes, and live longer than the rank.
            unsafe { rank.run(plan, direction, &tensors.bindings) }?;
            spans.push((start.as_secs_f64(), epoch.elapsed().as_secs_f64()));
        }
        Ok(spans)
    })?;
    // The first run prepares the plan.
    let of = |i: usize| {
        let start = spans.iter().map(|s| s[i].0).fold(f64::INFINITY, f64::min);
        spans.iter().map(|s| s[i].1).fold(0.0, f64::max) - start
    };
    Ok((1..=runs).map(of).fold(f64::INFINITY, f64::min))
}

/// All cases, with their best makespans so far.
pub struct Cases {
    list: Vec<Case>,
    best: Vec<[f64; 2]>,
}

const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

impl Cases {
    pub fn new() -> Result<Self> {
        let list = cases()?;
        Ok(Self { best: vec![[f64::INFINITY; 2]; list.len()], list })
    }

    /// Runs every case again.
    pub fn round(&mut self) -> Result<()> {
        for (case, best) in self.list.iter().zip(&mut self.best) {
            for (direction, best) in DIRECTIONS.into_iter().zip(best) {
                *best = best.min(makespan(&case.plan, direction, 4)?);
            }
        }
        Ok(())
    }

    /// Predicts every case; prints a table as Markdown.
    pub fn print(&self, machine: &Machine) -> Result<()> {
        println!("| case | type, dim | mask | mesh | layout | direction | predicted ms | measured ms | error |");
        println!("|---|---|---|---|---|---|---|---|---|");
        let mut errors = Vec::new();
        for (case, best) in self.list.iter().zip(&self.best) {
            let p = case.plan.problem();
            let mask = if p.mask() == Mask::causal() {
                "causal".to_string()
            } else {
                p.mask().left.map_or("full".into(), |left| format!("window {}", left + 1))
            };
            for (direction, &measured) in DIRECTIONS.into_iter().zip(best) {
                let predicted = case.plan.simulate(direction, machine)?.makespan;
                let error = predicted / measured - 1.0;
                println!(
                    "| {} | {} {} | {mask} | {} | {} | {} | {:.2} | {:.2} | {:+.1} % |",
                    case.name,
                    p.dtype(),
                    p.head_dim(),
                    case.plan.mesh(),
                    case.plan.layout(),
                    format!("{direction:?}").to_lowercase(),
                    predicted * 1e3,
                    measured * 1e3,
                    100.0 * error
                );
                errors.push(error.abs());
            }
        }
        errors.sort_unstable_by(f64::total_cmp);
        println!(
            "\n{} cases: error {:.1} % in the median, {:.1} % at worst.",
            errors.len(),
            100.0 * errors[errors.len() / 2],
            100.0 * errors[errors.len() - 1]
        );
        Ok(())
    }
}
