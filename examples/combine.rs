// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decode over a cache that is spread over four ranks, with an attention of one's own: each rank attends to its part of
//! the keys, in pages, with plain loops that return o and lse, and [`Rank::combine`] merges the parts by heads, as
//! tensor parallelism goes on with them. Compared with one rank that has all keys.
//!
//! `cargo run --release --example combine`
#![allow(missing_docs, reason = "a program has no users of its items")]

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Result, View, ViewMut, runtime::CombineTensors,
    schedule::CombineTo, transport::local,
};
use std::time::Duration;

const HEADS: usize = 8;
const DIM: usize = 32;
const RANKS: usize = 4;
/// Cached tokens of each sequence, of which one has fewer than there are ranks.
const CACHED: [usize; 3] = [1000, 77, 2];
/// Tokens of a page. Page p of a sequence is on rank p mod `RANKS`, as vLLM interleaves them.
const PAGE: usize = 16;

/// A number of a sequence, a token, a head and an element, from 0 to 1.
fn value(kind: usize, at: [usize; 4]) -> f32 {
    let mixed =
        at.iter().fold(kind as u64 + 1, |x, &n| (x ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    (mixed >> 40) as f32 / (1u64 << 24) as f32
}

/// "Any kernel": o and lse of one query and head over the tokens of a sequence that `held` lets through.
fn attend(sequence: usize, head: usize, held: impl Fn(usize) -> bool) -> (Vec<f32>, f32) {
    let q: Vec<f32> = (0..DIM).map(|d| 2.0 * value(0, [sequence, 0, head, d]) - 1.0).collect();
    let (mut max, mut sum, mut o) = (f32::NEG_INFINITY, 0.0, vec![0.0; DIM]);
    for t in (0..CACHED[sequence]).filter(|&t| held(t)) {
        let score: f32 = (0..DIM).map(|d| q[d] * (2.0 * value(1, [sequence, t, head, d]) - 1.0)).sum();
        let larger = score.max(max);
        let (scale, weight) = ((max - larger).exp(), (score - larger).exp());
        (max, sum) = (larger, sum * scale + weight);
        o.iter_mut().enumerate().for_each(|(d, x)| *x = *x * scale + weight * value(2, [sequence, t, head, d]));
    }
    o.iter_mut().for_each(|x| *x /= if sum > 0.0 { sum } else { 1.0 });
    // Without keys the lse is −∞, and o is not read.
    (o, max + sum.ln())
}

fn main() -> Result<()> {
    let tokens = CACHED.len();
    // A plan says how many queries there are, and of what shape; it takes microseconds. Its ring has the parts of keys.
    let problem = Problem::new(Batch::from_lengths(&[tokens])?, HEADS, HEADS, DIM, Dtype::F32);
    let plan = &Plan::new(&problem, Mesh::ring(RANKS)?, Layout::Contiguous)?;
    let shares = local::run(RANKS, Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for sequence in 0..tokens {
            for head in 0..HEADS {
                let (row, l) = attend(sequence, head, |t| t / PAGE % RANKS == rank.rank());
                o.extend(row);
                lse.push(l);
            }
        }
        let heads = plan.combined_share(rank.rank(), CombineTo::Heads).heads;
        let (mut merged, mut merged_lse) =
            (vec![0.0f32; tokens * heads.len() * DIM], vec![0.0f32; tokens * heads.len()]);
        let tensors = CombineTensors::new(
            View::new(&o, tokens, HEADS, DIM)?,
            View::new(&lse, tokens, HEADS, 1)?,
            ViewMut::new(&mut merged, tokens, heads.len(), DIM)?,
            ViewMut::new(&mut merged_lse, tokens, heads.len(), 1)?,
        );
        rank.combine(plan, CombineTo::Heads, tensors)?;
        Ok((heads, merged, merged_lse))
    })?;
    let mut apart = 0.0f32;
    for (heads, o, lse) in shares {
        let own = heads.len();
        for sequence in 0..tokens {
            for (i, head) in heads.clone().enumerate() {
                let (expected, l) = attend(sequence, head as usize, |_| true);
                let at = sequence * own + i;
                apart = apart.max((lse[at] - l).abs());
                apart = o[at * DIM..][..DIM].iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(apart, f32::max);
            }
        }
    }
    println!("{tokens} queries over {RANKS} ranks; largest difference from one rank with all keys: {apart:e}");
    assert!(apart < 1e-5, "a wrong row");
    Ok(())
}
