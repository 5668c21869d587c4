// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel of one's own in plans of this crate: `kernel.rs` computes attention between packed rows in f32, and knows
//! neither ranks nor masks. Four ranks, threads of this process, run forward and backward of a packed batch with it,
//! with a window and sinks; then the same with the library's kernels. All results are compared.
//!
//!     cargo run --release --example own_kernels

mod kernel;

use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mask, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
    transport::local,
};
use kernel::Naive;
use std::time::Duration;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;

/// o, lse, dq, dk and dv of a rank's tokens, and the sinks' gradient.
fn attention(rank: &mut Rank, plan: &Plan) -> Result<[Vec<f32>; 6]> {
    let tokens = plan.local_tokens(Side::Q, rank.rank()).indices();
    let n = tokens.len();
    // Numbers by the token's place in the batch, so that every mesh has the same.
    let tensor = |heads: usize, step: f32| -> Vec<f32> {
        tokens
            .iter()
            .flat_map(|&t| (0..heads * DIM).map(move |i| ((t * heads * DIM + i) as f32 * step).sin()))
            .collect()
    };
    let (q, k, v, d_o) = (tensor(HEADS, 0.37), tensor(KV_HEADS, 0.71), tensor(KV_HEADS, 0.13), tensor(HEADS, 0.53));
    let room = |heads: usize| vec![f32::NAN; n * heads * DIM];
    let (mut o, mut lse, mut dsinks) = (room(HEADS), vec![f32::NAN; n * HEADS], vec![f32::NAN; HEADS]);
    let (mut dq, mut dk, mut dv) = (room(HEADS), room(KV_HEADS), room(KV_HEADS));
    let sinks = [0.5f32, -1.0, 2.0, 0.0];
    let (q, d_o) = (View::new(&q, n, HEADS, DIM)?, View::new(&d_o, n, HEADS, DIM)?);
    let (k, v) = (View::new(&k, n, KV_HEADS, DIM)?, View::new(&v, n, KV_HEADS, DIM)?);
    let (out, sums) = (ViewMut::new(&mut o, n, HEADS, DIM)?, ViewMut::head_major(&mut lse, n, HEADS)?);
    rank.forward(plan, Forward::new(q, k, v, out, sums).sinks(&sinks))?;
    let (of_o, of_lse) = (View::new(&o, n, HEADS, DIM)?, View::head_major(&lse, n, HEADS)?);
    let gradients = [
        ViewMut::new(&mut dq, n, HEADS, DIM)?,
        ViewMut::new(&mut dk, n, KV_HEADS, DIM)?,
        ViewMut::new(&mut dv, n, KV_HEADS, DIM)?,
    ];
    rank.backward(plan, Backward::new(q, k, v, of_o, of_lse, d_o, gradients).sinks(&sinks).dsinks(&mut dsinks))?;
    Ok([o, lse, dq, dk, dv, dsinks])
}

fn main() -> Result<()> {
    let batch = Batch::from_lengths(&[190, 23, 300])?;
    let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32).with_mask(Mask::sliding(100)).with_sinks(true);
    let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag)?;
    let deadline = Duration::from_secs(60);
    let own = local::run(4, deadline, |end| attention(&mut Rank::with_kernel(end, Naive { threads: 2 }), &plan))?;
    let library = local::run(4, deadline, |end| attention(&mut Rank::new(end), &plan))?;
    for (i, name) in ["o", "lse", "dq", "dk", "dv", "dsinks"].into_iter().enumerate() {
        let pairs = own.iter().zip(&library).flat_map(|(a, b)| a[i].iter().zip(&b[i]));
        let (apart, most) = pairs.fold((0f32, 0f32), |(apart, most), (a, b)| {
            let difference = (a - b).abs();
            // A NaN is a difference.
            (if difference <= apart { apart } else { difference }, most.max(b.abs()))
        });
        println!("{name:7} largest number {most:.2}, largest difference from the library's kernel {apart:.1e}");
        assert!(apart < 1e-5 * most.max(1.0), "{name} differs");
    }
    // A window is honoured, a softcap is not: refused on every rank, before anything moves.
    let capped = Plan::new(&problem.with_softcap(20.0), Mesh::single(), Layout::Contiguous)?;
    let refused = local::run(1, deadline, |end| attention(&mut Rank::with_kernel(end, Naive { threads: 2 }), &capped));
    println!("{}", refused.expect_err("a refusal"));
    Ok(())
}
