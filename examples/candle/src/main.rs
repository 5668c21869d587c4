// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small language model trained with candle's autograd on four ranks, which are threads here, beside candle alone.
//!
//! `cargo run` in this folder. All that a program of candle's needs for context parallelism is `attention.rs`: one
//! custom operation. Each rank holds its tokens of every document, all of the weights, and sums gradients with the
//! others.

mod attention;
mod model;

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use attention::Attention;
use candle_core::{DType, Device, Result, Tensor, bail};
use cpattn::{Batch, Dtype, Layout, Mesh, Options, Plan, Problem, Rank, Side, transport::local};
use model::{DIM, HEADS, KV_HEADS, Trained, WORDS, train};

const LENGTHS: [usize; 4] = [61, 3, 97, 40];
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let batch = Batch::from_lengths(&LENGTHS).map_err(candle_core::Error::wrap)?;
    let tokens = batch.tokens(Side::Q);
    // A sequence that can be learnt: each word follows from the one before and from its position.
    let ids: Vec<u32> = (0..tokens as u32).map(|t| (t * t / 7 + 3 * t) % WORDS as u32).collect();
    let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32);
    // q, k and v are slices of one projection, which are not compact: the plan packs the part that is sent.
    let options = Options::new().pack_inputs(true);
    let plan_of = |mesh| {
        Plan::builder(&problem)
            .mesh(mesh)
            .layout(Layout::Zigzag)
            .options(options)
            .build()
            .map_err(candle_core::Error::wrap)
    };

    let single = plan_of(Mesh::single())?;
    let alone = train(&single, 0, &ids, &dense, &|own| Ok(own))?;
    let plan = plan_of(Mesh { replicas: 1, ring: 2, ulysses: 2 })?;
    let shared = on_four(&Arc::new(plan), &ids)?;

    for (step, (a, b)) in shared.losses.iter().zip(&alone.losses).enumerate() {
        println!("step {step}: loss {a:.7} on four ranks, {b:.7} alone");
    }
    let loss = difference(&shared.losses, &alone.losses);
    let gradients = difference(&shared.gradients, &alone.gradients);
    println!("relative differences: losses {loss:.1e}, gradients of the first step {gradients:.1e}");
    if !(loss < 1e-6 && gradients < 2e-6 && alone.losses[alone.losses.len() - 1] < 0.9 * alone.losses[0]) {
        bail!("four ranks and candle alone differ, or nothing was learnt");
    }
    println!("ok");
    Ok(())
}

/// The norm of a − b, relative to that of b; NaN where either has one.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let (mut apart, mut size) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        apart += (f64::from(a) - f64::from(b)).powi(2);
        size += f64::from(b).powi(2);
    }
    (apart / size).sqrt()
}

/// Each rank is a thread; a rank that fails drops its ends of all channels, so that nobody waits for it.
fn on_four(plan: &Arc<Plan>, ids: &[u32]) -> Result<Trained> {
    let world = plan.mesh().world();
    let (to_first, at_first): (Vec<_>, Vec<_>) = (0..world).map(|_| mpsc::channel()).unzip();
    let (from_first, at_others): (Vec<_>, Vec<_>) = (0..world).map(|_| mpsc::channel()).unzip();
    let (mut first, mut to_first, mut at_others) =
        (Some((at_first, from_first)), to_first.into_iter(), at_others.into_iter());
    let ends = local::group(world, LIMIT).map_err(candle_core::Error::wrap)?;
    thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(r, end)| {
                let (first, to_first, from_first) = (first.take(), to_first.next(), at_others.next());
                scope.spawn(move || {
                    let rank = Arc::new(Mutex::new(Rank::new(end)));
                    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| q.apply_op3(k, v, Attention::new(&rank, plan));
                    // The sum of all ranks, in their order, which rank 0 forms.
                    let sum = |own: Vec<f32>| -> Result<Vec<f32>> {
                        let (Some(send), Some(receive)) = (&to_first, &from_first) else {
                            bail!("rank {r} has no channels")
                        };
                        let Some((from, to)) = &first else {
                            send.send(own).map_err(candle_core::Error::wrap)?;
                            return receive.recv_timeout(LIMIT).map_err(candle_core::Error::wrap);
                        };
                        let mut total = own;
                        for from in &from[1..] {
                            let theirs: Vec<f32> = from.recv_timeout(LIMIT).map_err(candle_core::Error::wrap)?;
                            total.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x);
                        }
                        for to in &to[1..] {
                            to.send(total.clone()).map_err(candle_core::Error::wrap)?;
                        }
                        Ok(total)
                    };
                    train(plan, r, ids, &attend, &sum)
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join().expect("a rank does not panic")).collect();
        let mut trained = results.into_iter().collect::<Result<Vec<_>>>()?.into_iter();
        Ok(trained.next().expect("a group has a rank"))
    })
}

/// Candle's own operations, on all tokens.
fn dense(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let n = q.dim(0)?;
    let documents: Vec<u32> = (0..).zip(LENGTHS).flat_map(|(document, length)| vec![document; length]).collect();
    let sees = |i: usize, j: usize| if documents[i] == documents[j] && j <= i { 0f32 } else { -1e9 };
    let mask: Vec<f32> = (0..n * n).map(|at| sees(at / n, at % n)).collect();
    let mask = Tensor::from_vec(mask, (1, n, n), &Device::Cpu)?;
    let group: Vec<u32> = (0..HEADS as u32).map(|head| head * KV_HEADS as u32 / HEADS as u32).collect();
    let group = Tensor::new(group, &Device::Cpu)?;
    let [k, v] = [k, v].map(|x| x.contiguous()?.index_select(&group, 1)?.transpose(0, 1)?.contiguous());
    let q = (q.transpose(0, 1)?.contiguous()? * (1.0 / (DIM as f64).sqrt()))?;
    let scores = q.matmul(&k?.transpose(1, 2)?.contiguous()?)?.broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(2)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(2)?)?;
    weights.matmul(&v?)?.transpose(0, 1)?.contiguous()?.to_dtype(DType::F32)
}
