// SPDX-License-Identifier: MIT OR Apache-2.0
//! One layer of attention between an embedding and its transpose, on a rank's tokens. It does not know how attention is
//! computed: the caller gives it, and how values are summed over ranks.

use candle_core::{Device, Result, Tensor, Var};
use cpattn::{Plan, Side};

pub const WORDS: usize = 23;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 8;
const WIDTH: usize = HEADS * DIM;
const LONGEST: usize = 97;
const STEPS: usize = 8;
const RATE: f64 = 0.05;

pub struct Trained {
    pub losses: Vec<f32>,
    /// Of all weights, in the first step.
    pub gradients: Vec<f32>,
}

type Attend<'a> = dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor> + 'a;
type Sum<'a> = dyn Fn(Vec<f32>) -> Result<Vec<f32>> + 'a;

/// Weights that are the same on every rank.
fn weights(rows: usize, columns: usize, seed: f32) -> Result<Var> {
    let values: Vec<f32> = (0..rows * columns).map(|i| 0.5 * (seed + i as f32 * 12.9898).sin()).collect();
    Var::from_vec(values, (rows, columns), &Device::Cpu)
}

/// Trains on this rank's tokens of `ids`.
pub fn train(plan: &Plan, rank: usize, ids: &[u32], attend: &Attend<'_>, sum: &Sum<'_>) -> Result<Trained> {
    let wrap = candle_core::Error::wrap;
    let own = plan.local_tokens(Side::Q, rank).shard(ids, 1).map_err(wrap)?;
    // The word after each token; WORDS where its document ends, which counts for nothing.
    let next = plan.local_tokens(Side::Q, rank).shift(ids, WORDS as u32, 1).map_err(wrap)?;
    let places: Vec<u32> =
        plan.local_tokens(Side::Q, rank).positions().into_iter().map(|position| position as u32).collect();
    let counted = ids.len() - plan.problem().batch().documents();
    let marks: Vec<f32> =
        next.iter().flat_map(|&word| (0..WORDS as u32).map(move |w| f32::from(u8::from(w == word)))).collect();
    let (n, device) = (own.len(), &Device::Cpu);
    let (own, places) = (Tensor::new(own, device)?, Tensor::new(places, device)?);
    let marks = Tensor::from_vec(marks, (n, WORDS), device)?;

    let embedding = weights(WORDS, WIDTH, 0.1)?;
    let positions = weights(LONGEST, WIDTH, 0.2)?;
    let qkv = weights(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, 0.3)?;
    let back = weights(WIDTH, WIDTH, 0.4)?;
    let all = [&embedding, &positions, &qkv, &back];
    let mut trained = Trained { losses: Vec::new(), gradients: Vec::new() };
    for step in 0..STEPS {
        let x = (embedding.index_select(&own, 0)? + positions.index_select(&places, 0)?)?;
        // Views of one tensor, not compact.
        let heads = x.matmul(&qkv)?.reshape((n, HEADS + 2 * KV_HEADS, DIM))?;
        let part = |from, count| heads.narrow(1, from, count);
        let o = attend(&part(0, HEADS)?, &part(HEADS, KV_HEADS)?, &part(HEADS + KV_HEADS, KV_HEADS)?)?;
        let y = (x + o.reshape((n, WIDTH))?.matmul(&back)?)?;
        let logits = y.matmul(&embedding.t()?)?;
        let logits = logits.broadcast_sub(&logits.max_keepdim(1)?.detach())?;
        let log = logits.broadcast_sub(&logits.exp()?.sum_keepdim(1)?.log()?)?;
        let loss = ((log * &marks)?.sum_all()? * (-1.0 / counted as f64))?;
        let gradients = loss.backward()?;

        let mut values = vec![loss.to_scalar::<f32>()?];
        for weight in all {
            let gradient = gradients.get(weight).map_or_else(|| weight.zeros_like(), |g| Ok(g.clone()))?;
            values.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        let values = sum(values)?;
        trained.losses.push(values[0]);
        let mut at = 1;
        for weight in all {
            let gradient = Tensor::new(&values[at..at + weight.elem_count()], device)?.reshape(weight.shape())?;
            weight.set(&(weight.as_tensor() - (gradient * RATE)?)?)?;
            at += weight.elem_count();
        }
        if step == 0 {
            trained.gradients = values[1..].to_vec();
        }
    }
    Ok(trained)
}
