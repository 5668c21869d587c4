// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole runs over a few tokens: small enough for Miri, which interprets plan, schedule, proof, lanes, transport
//! `local` and the portable kernels here, with their threads. Ranks of every kind of mesh against one rank.

use crate::common::plain_kernel::PlainKernel;
use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, transport::local,
};
use std::{thread, time::Duration};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 4;
/// Of the documents.
const LENGTHS: [usize; 4] = if cfg!(miri) { [2, 0, 1, 2] } else { [5, 0, 2, 4] };

/// q, k, v and the gradient of o, of all tokens.
fn inputs(tokens: usize) -> [Vec<f32>; 4] {
    [(HEADS, 0.37), (KV_HEADS, 0.71), (KV_HEADS, 0.13), (HEADS, 0.53)]
        .map(|(heads, step)| (0..tokens * heads * DIM).map(|i| (i as f32 * step).sin()).collect())
}

fn rows(x: &[f32], heads: usize) -> View<'_, f32> {
    View::new(x, x.len() / (heads * DIM), heads, DIM).unwrap()
}

/// o, dq, dk and dv of a rank's own tokens, after a second run of each direction, which repeats the bits of the first.
fn own(mut rank: Rank, plan: &Plan, [q, k, v, d_o]: &[Vec<f32>; 4]) -> [Vec<f32>; 4] {
    let (r, n) = (rank.rank(), plan.local_tokens(Side::Q, rank.rank()).len());
    let [q, d_o] = [q, d_o].map(|x| plan.local_tokens(Side::Q, r).shard(x, HEADS * DIM).unwrap());
    let [k, v] = [k, v].map(|x| plan.local_tokens(Side::K, r).shard(x, KV_HEADS * DIM).unwrap());
    let mut runs = (0..2).map(|_| {
        let [mut o, mut dq] = [(); 2].map(|()| vec![f32::NAN; q.len()]);
        let [mut dk, mut dv] = [(); 2].map(|()| vec![f32::NAN; k.len()]);
        let mut lse = vec![f32::NAN; n * HEADS];
        let forward = Forward::new(
            rows(&q, HEADS),
            rows(&k, KV_HEADS),
            rows(&v, KV_HEADS),
            ViewMut::new(&mut o, n, HEADS, DIM).unwrap(),
            ViewMut::head_major(&mut lse, n, HEADS).unwrap(),
        );
        rank.forward(plan, forward).unwrap();
        let backward = Backward::new(
            rows(&q, HEADS),
            rows(&k, KV_HEADS),
            rows(&v, KV_HEADS),
            rows(&o, HEADS),
            View::head_major(&lse, n, HEADS).unwrap(),
            rows(&d_o, HEADS),
            [
                ViewMut::new(&mut dq, n, HEADS, DIM).unwrap(),
                ViewMut::new(&mut dk, n, KV_HEADS, DIM).unwrap(),
                ViewMut::new(&mut dv, n, KV_HEADS, DIM).unwrap(),
            ],
        );
        rank.backward(plan, backward).unwrap();
        [o, dq, dk, dv]
    });
    let [first, second] = [(); 2].map(|()| runs.next().unwrap());
    assert!(first == second, "rank {r}: other bits in the second run");
    first
}

/// The results of all tokens.
fn whole(plan: &Plan, inputs: &[Vec<f32>; 4], rank: fn(local::Local) -> Rank) -> [Vec<f32>; 4] {
    let mut out = [0, 0, 1, 1].map(|like: usize| vec![f32::NAN; inputs[like].len()]);
    thread::scope(|scope| {
        let ends = local::group(plan.mesh().world(), Duration::from_secs(3600)).unwrap();
        let start = |end| scope.spawn(move || own(rank(end), plan, inputs));
        let ranks: Vec<_> = ends.into_iter().map(start).collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            let sides = [(Side::Q, HEADS), (Side::Q, HEADS), (Side::K, KV_HEADS), (Side::K, KV_HEADS)];
            for ((all, mine), (side, heads)) in out.iter_mut().zip(thread.join().unwrap()).zip(sides) {
                plan.local_tokens(side, rank).unshard_into(&mine, all, heads * DIM).unwrap();
            }
        }
    });
    out
}

fn check(ulysses: usize, ring: usize, layout: Layout, rank: fn(local::Local) -> Rank) {
    let batch = Batch::from_lengths(&LENGTHS).unwrap();
    let inputs = inputs(batch.tokens(Side::Q));
    let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32);
    let mesh = Mesh { replicas: 1, ring, ulysses };
    let many = whole(&Plan::new(&problem, mesh, layout).unwrap(), &inputs, rank);
    let one = whole(&Plan::new(&problem, Mesh::single(), Layout::Contiguous).unwrap(), &inputs, Rank::new);
    for ((name, many), one) in ["o", "dq", "dk", "dv"].iter().zip(&many).zip(&one) {
        let far = many.iter().zip(one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(many.iter().all(|x| x.is_finite()) && far < 1e-5, "{name}: {far} from one rank");
    }
}

#[test]
fn ulysses() {
    check(2, 1, Layout::Contiguous, Rank::new);
}

#[test]
fn ring() {
    check(1, 2, Layout::Zigzag, Rank::new);
}

#[test]
fn hybrid() {
    check(2, 2, Layout::Zigzag, Rank::new);
}

/// Packed rows and partial results of a kernel of the caller's.
#[test]
fn own_kernel() {
    check(1, 2, Layout::Striped { stripe: 1 }, |end| Rank::with_kernel(end, PlainKernel::new()));
}
