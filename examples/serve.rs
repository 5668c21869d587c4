// SPDX-License-Identifier: MIT OR Apache-2.0
//! Three sequences generated from a cache of k and v that is spread over four ranks, which are threads here: prompts in
//! chunks, then a token at a time, at last compared with one forward over all tokens on one rank.
//!
//! `cargo run --release --example serve`
#![allow(missing_docs, reason = "a program has no users of its items")]

use cpattn::{
    Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
    schedule::{CirculatingSide, Direction},
    transport::local,
};
use std::time::Duration;

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const RANKS: usize = 4;
const STRIPE: usize = 16;
/// Rows of a sequence's slot in the cache: a multiple of `STRIPE · RANKS`, so that a cached row never changes its rank.
const SLOT: usize = 512;
/// Tokens of a prompt that are computed in one step.
const CHUNK: usize = 256;
const PROMPTS: [usize; 3] = [400, 90, 17];
/// New tokens of each sequence after its prompt; at most 16 more fit the slot of the longest.
const GENERATED: usize = 12;

/// q, k and v of a sequence, `[tokens, heads, head_dim]`. A model would compute those of a new token from the output of
/// the one before.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn problem(batch: Batch) -> Problem {
    Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32) // causal
}

fn main() -> Result<()> {
    let lengths = PROMPTS.map(|prompt| prompt + GENERATED);
    let wave = |n: usize, step: f32| (0..n * DIM).map(|i| 2.0 * (i as f32 * step).sin()).collect();
    let sequences = lengths.map(|n| {
        let seed = n as f32 * 1e-3;
        Sequence { q: wave(n * HEADS, 0.37 + seed), k: wave(n * KV_HEADS, 0.71 - seed), v: wave(n * KV_HEADS, 0.13) }
    });

    let rows = local::run(RANKS, Duration::from_secs(60), |end| serve(Rank::new(end), &sequences))?;

    let all = |of: fn(&Sequence) -> &Vec<f32>| sequences.iter().flat_map(|s| of(s).clone()).collect::<Vec<_>>();
    let plan = Plan::new(&problem(Batch::from_lengths(&lengths)?), Mesh::single(), Layout::Contiguous)?;
    let whole = local::run(1, Duration::from_secs(60), |end| {
        forward(&mut Rank::new(end), &plan, &all(|s| &s.q), &all(|s| &s.k), &all(|s| &s.v))
    })?;
    let (mut seen, mut apart) = (0, 0.0f32);
    for (sequence, position, o) in rows.iter().flatten() {
        let token = lengths[..*sequence].iter().sum::<usize>() + position;
        let expected = &whole[0][token * HEADS * DIM..][..HEADS * DIM];
        apart = o.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(apart, f32::max);
        seen += 1;
    }
    println!("{seen} tokens; largest difference from one forward over all of them: {apart:e}");
    assert_eq!(seen, lengths.iter().sum::<usize>(), "each token is computed once");
    assert!(apart < 1e-5, "a wrong row");
    Ok(())
}

/// What one rank does: its part of the cache, and the rows of o that it computed, with sequence and position.
fn serve(mut rank: Rank, sequences: &[Sequence; 3]) -> Result<Vec<(usize, usize, Vec<f32>)>> {
    let r = rank.rank();
    let ends = |lengths: &[usize]| {
        let end = |n: &mut i32, length: &usize| {
            *n += *length as i32;
            Some(*n)
        };
        std::iter::once(0).chain(lengths.iter().scan(0, end)).collect::<Vec<i32>>()
    };
    let mut cache: [Vec<f32>; 2] = Default::default();
    let (mut done, mut rows) = ([0; 3], Vec::new());
    loop {
        // The tokens of this step: what is left of a prompt, as far as a chunk goes, or one.
        let new: Vec<usize> = (0..3)
            .map(|s| match PROMPTS[s].saturating_sub(done[s]) {
                0 => 1.min(PROMPTS[s] + GENERATED - done[s]),
                left => left.min(CHUNK),
            })
            .collect();
        if new.iter().all(|&n| n == 0) {
            return Ok(rows);
        }
        // A plan takes microseconds. All layers of a model would run the same one, each with its own cache.
        let batch = Batch::cross(&ends(&new), &ends(&[SLOT; 3]), Some(&done.map(|n| n as i64)))?;
        let plan = Plan::new(&problem(batch), Mesh::ring(RANKS)?, Layout::Striped { stripe: STRIPE as u32 })?;
        if r == 0 && (done[0] <= PROMPTS[0] || done[0] + new[0] == PROMPTS[0] + GENERATED) {
            let side = if plan.circulates(Direction::Forward) == CirculatingSide::Queries { "q" } else { "k and v" };
            println!("cached {done:3?}, new {new:3?}, sent round the ring: {side}");
        }
        // The rank that holds a row of the cache writes it.
        let width = KV_HEADS * DIM;
        cache.iter_mut().for_each(|part| part.resize(plan.local_tokens(Side::K, r).len() * width, 0.0));
        for (row, token) in plan.local_tokens(Side::K, r).indices().into_iter().enumerate() {
            let (s, position) = (token / SLOT, token % SLOT);
            if (done[s]..done[s] + new[s]).contains(&position) {
                for (part, from) in cache.iter_mut().zip([&sequences[s].k, &sequences[s].v]) {
                    part[row * width..][..width].copy_from_slice(&from[position * width..][..width]);
                }
            }
        }
        let width = HEADS * DIM;
        let (mut q, mut tokens) = (Vec::new(), Vec::new());
        plan.local_tokens(Side::Q, r).for_each(|_, position, s| {
            q.extend_from_slice(&sequences[s].q[position as usize * width..][..width]);
            tokens.push((s, position as usize));
        });
        let o = forward(&mut rank, &plan, &q, &cache[0], &cache[1])?;
        rows.extend(tokens.into_iter().zip(o.chunks(width)).map(|((s, position), o)| (s, position, o.to_vec())));
        done.iter_mut().zip(&new).for_each(|(done, new)| *done += new);
    }
}

/// o of a rank's own rows of q.
fn forward(rank: &mut Rank, plan: &Plan, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>> {
    let [n, m] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank.rank()).len());
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; n * HEADS]);
    let [k, v] = [View::new(k, m, KV_HEADS, DIM)?, View::new(v, m, KV_HEADS, DIM)?];
    let (out, scores) = (ViewMut::new(&mut o, n, HEADS, DIM)?, ViewMut::head_major(&mut lse, n, HEADS)?);
    rank.forward(plan, Forward::new(View::new(q, n, HEADS, DIM)?, k, v, out, scores))?;
    Ok(o)
}
