// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of a pair under masks of slices: the time of a forward and of a backward on one rank for each pair of
//! tokens that the mask allows, divided by the same of one causal document of as many tokens. Figures are medians of
//! ratios; the two times of a ratio are measured in turn.
//!
//! `cargo bench --bench slices [-- --rounds N]`

mod median;

use cpattn::{
    Backward, Batch, Element, Forward, Layout, Mesh, Plan, Problem, Rank, Result, View, ViewMut, slices,
    transport::local,
};
use half::bf16;
use median::median;
use std::time::{Duration, Instant};

const HEADS: usize = 4;
const KV_HEADS: usize = 1;
const DIM: usize = 64;
const TOKENS: usize = 16384;

struct Tensors<T> {
    queries: [Vec<T>; 4],
    keys: [Vec<T>; 4],
    lse: Vec<f32>,
}

impl<T: Element<Acc = f32>> Tensors<T> {
    fn new() -> Self {
        let values = |n: usize, seed: usize| {
            (0..n).map(|i| T::from_f64((((i + seed) * 2_654_435_761) % 1000) as f64 / 500.0 - 1.0)).collect()
        };
        Self {
            queries: std::array::from_fn(|i| values(TOKENS * HEADS * DIM, i)),
            keys: std::array::from_fn(|i| values(TOKENS * KV_HEADS * DIM, 4 + i)),
            lse: vec![0.0; TOKENS * HEADS],
        }
    }

    /// Seconds of a forward, and of a backward.
    fn run(&mut self, rank: &mut Rank, plan: &Plan) -> Result<[f64; 2]> {
        let Self { queries: [q, o, d_o, dq], keys: [k, v, dk, dv], lse } = self;
        let view = |x, heads| View::new(x, TOKENS, heads, DIM);
        let (q, k, v) = (view(q, HEADS)?, view(k, KV_HEADS)?, view(v, KV_HEADS)?);
        let begin = Instant::now();
        let (out, sums) = (ViewMut::new(o, TOKENS, HEADS, DIM)?, ViewMut::head_major(lse, TOKENS, HEADS)?);
        rank.forward(plan, Forward::new(q, k, v, out, sums))?;
        let forward = begin.elapsed();
        let backward = Backward::new(
            q,
            k,
            v,
            view(o, HEADS)?,
            View::head_major(lse, TOKENS, HEADS)?,
            view(d_o, HEADS)?,
            [
                ViewMut::new(dq, TOKENS, HEADS, DIM)?,
                ViewMut::new(dk, TOKENS, KV_HEADS, DIM)?,
                ViewMut::new(dv, TOKENS, KV_HEADS, DIM)?,
            ],
        );
        rank.backward(plan, backward)?;
        Ok([forward, begin.elapsed() - forward].map(|time| time.as_secs_f64()))
    }
}

fn measure<T: Element<Acc = f32>>(rounds: usize) -> Result<()> {
    let plan = |slices: Option<Vec<cpattn::Slice>>| {
        let batch = Batch::from_lengths(&[TOKENS])?;
        let batch = slices.map_or(Ok(batch.clone()), |slices| batch.with_slices(&slices))?;
        Plan::new(&Problem::new(batch, HEADS, KV_HEADS, DIM, T::DTYPE), Mesh::single(), Layout::Contiguous)
    };
    let dense = plan(None)?;
    let cu = [0, TOKENS as i32];
    let masks = [
        ("a prompt of 8,192, 16 answers of 512", slices::shared_prefix(8192, &[512; 16])),
        ("a prompt of 2,048, 112 answers of 128", slices::shared_prefix(2048, &[128; 112])),
        ("a prefix of 4,096 that sees itself", slices::prefix_lm(&cu, &[4096])?),
        ("blocks of 256, causal", slices::block_causal(&cu, 256)?),
    ];
    let mut rank = Rank::with_workers(local::group(1, Duration::from_secs(600))?.remove(0), 1);
    let mut tensors = Tensors::<T>::new();
    for (name, slices) in masks {
        let plan = plan(Some(slices))?;
        let share = plan.problem().area() as f64 / dense.problem().area() as f64;
        let mut ratios = [const { Vec::new() }; 2];
        for round in 0..=rounds {
            let [whole, masked] = [&dense, &plan].map(|plan| tensors.run(&mut rank, plan));
            let (whole, masked) = (whole?, masked?);
            // The first round prepares the plans.
            for i in (0..2).filter(|_| round > 0) {
                ratios[i].push(masked[i] / whole[i] / share);
            }
        }
        let [forward, backward] = ratios.map(median);
        println!(
            "{} {name}: {share:.3} of the pairs; a pair costs {forward:.2} forward, {backward:.2} backward",
            T::DTYPE
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let rounds = args.iter().position(|a| a == "--rounds").and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(7);
    println!("{HEADS} heads, {KV_HEADS} kv head of {DIM}, {TOKENS} tokens, one worker, beside one causal document");
    measure::<bf16>(rounds)?;
    measure::<f32>(rounds)
}
