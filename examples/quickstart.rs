// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over a packed batch on four ranks, which are threads here, compared with one rank.
//!
//! `cargo run --release --example quickstart`
#![allow(missing_docs, reason = "a program has no users of its items")]

use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut, transport::local};
use std::time::Duration;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

fn main() -> Result<()> {
    // Three documents end to end, no padding; causal, each for itself.
    let batch = Batch::from_lengths(&[300, 17, 195])?;
    let tokens = batch.tokens(Side::Q);
    let wave = |heads: usize, step: f32| (0..tokens * heads * DIM).map(|i| (i as f32 * step).sin()).collect();
    let inputs: [Vec<f32>; 3] = [wave(HEADS, 0.37), wave(KV_HEADS, 0.71), wave(KV_HEADS, 0.13)];

    let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32);
    let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag)?;
    println!("{}", plan.explain());

    let many = attention(&plan, &inputs)?;
    let one = attention(&Plan::new(&problem, Mesh::single(), Layout::Contiguous)?, &inputs)?;
    let apart = many.iter().zip(&one).map(|(a, b)| (a - b).abs());
    println!("largest difference between four ranks and one: {:e}", apart.clone().fold(0.0, f32::max));
    assert!(apart.into_iter().all(|x| x < 1e-5), "a wrong row, or one that nothing wrote");
    Ok(())
}

/// The output for all tokens: each rank, a thread here, computes its own.
fn attention(plan: &Plan, [q, k, v]: &[Vec<f32>; 3]) -> Result<Vec<f32>> {
    let parts = local::run(plan.mesh().world(), Duration::from_secs(60), |end| own(Rank::new(end), plan, [q, k, v]))?;
    let mut whole = vec![f32::NAN; q.len()];
    for (rank, o) in parts.iter().enumerate() {
        plan.local_tokens(Side::Q, rank).unshard_into(o, &mut whole, HEADS * DIM)?;
    }
    Ok(whole)
}

/// What one rank does with its tokens. In a program of many processes it would have no others.
fn own(mut rank: Rank, plan: &Plan, [q, k, v]: [&[f32]; 3]) -> Result<Vec<f32>> {
    let (r, n) = (rank.rank(), plan.local_tokens(Side::Q, rank.rank()).len());
    let q = plan.local_tokens(Side::Q, r).shard(q, HEADS * DIM)?;
    let (k, v) = (
        plan.local_tokens(Side::K, r).shard(k, KV_HEADS * DIM)?,
        plan.local_tokens(Side::K, r).shard(v, KV_HEADS * DIM)?,
    );
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; n * HEADS]);
    let [k, v] = [View::new(&k, n, KV_HEADS, DIM)?, View::new(&v, n, KV_HEADS, DIM)?];
    let (out, scores) = (ViewMut::new(&mut o, n, HEADS, DIM)?, ViewMut::head_major(&mut lse, n, HEADS)?);
    rank.forward(plan, Forward::new(View::new(&q, n, HEADS, DIM)?, k, v, out, scores))?;
    Ok(o)
}
