// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tokens that are generated from a cache of k and v which is spread over ranks, as `docs/serving.md` describes:
//! prompts in chunks, then a token at a time, against one forward over all tokens.
//!
//! Each sequence has a slot of the cache, whose length is a multiple of stripe × ranks, so no cached row changes its
//! rank when sequences grow. Rows of a slot behind the last token are masked; they hold large numbers here.

use cpattn::{
    Batch, Dtype, Forward, Layout, Mesh, Options, Plan, Problem, Rank, Side, View, ViewMut, plan::Circulate,
    transport::local,
};
use std::time::Duration;

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const STRIPE: usize = 4;
/// Rows of a sequence's slot: two stripes of each of four ranks.
const SLOT: usize = 32;
const LENGTHS: [usize; 3] = [27, 9, 32];

fn problem(batch: Batch) -> Problem {
    Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::F32)
}

fn values(tokens: usize, heads: usize, step: f32) -> Vec<f32> {
    (0..tokens * heads * DIM).map(|i| 2.0 * (i as f32 * step).sin()).collect()
}

/// o of all rows of q, over the ranks of a plan. The ranks hold their own rows of q, k and v.
fn forward(plan: &Plan, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let rows = |x: &'static str, data: &[f32], heads: usize| {
        assert_eq!(data.len() % (heads * DIM), 0, "{x}");
        data.len() / (heads * DIM)
    };
    let ranks = local::run(plan.mesh().world(), Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        let r = rank.rank();
        let q = plan.local_tokens(Side::Q, r).shard(q, HEADS * DIM)?;
        let [k, v] = [k, v].map(|x| plan.local_tokens(Side::K, r).shard(x, KV_HEADS * DIM).unwrap());
        let (n, m) = (rows("q", &q, HEADS), rows("k", &k, KV_HEADS));
        let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; n * HEADS]);
        let tensors = Forward::new(
            View::new(&q, n, HEADS, DIM)?,
            View::new(&k, m, KV_HEADS, DIM)?,
            View::new(&v, m, KV_HEADS, DIM)?,
            ViewMut::new(&mut o, n, HEADS, DIM)?,
            ViewMut::head_major(&mut lse, n, HEADS)?,
        );
        rank.forward(plan, tensors)?;
        Ok(o)
    });
    let mut all = vec![f32::NAN; q.len()];
    for (rank, own) in ranks.unwrap().iter().enumerate() {
        plan.local_tokens(Side::Q, rank).unshard_into(own, &mut all, HEADS * DIM).unwrap();
    }
    all
}

/// The ends of consecutive lengths, from 0.
fn ends(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut ends = vec![0];
    lengths.for_each(|n| ends.push(ends[ends.len() - 1] + n as i32));
    ends
}

#[test]
fn a_cache_over_ranks_gives_what_one_forward_gives() {
    let tokens: usize = LENGTHS.iter().sum();
    let (q, k, v) = (values(tokens, HEADS, 0.37), values(tokens, KV_HEADS, 0.71), values(tokens, KV_HEADS, 0.13));
    let whole = Plan::new(&problem(Batch::from_lengths(&LENGTHS).unwrap()), Mesh::ring(1).unwrap(), Layout::Contiguous);
    let expected = forward(&whole.unwrap(), &q, &k, &v);
    // The first row of each sequence, in `q` and the others.
    let first = ends(LENGTHS.iter().copied());
    let rows = |x: &[f32], sequence: usize, from: usize, count: usize, heads: usize| {
        let begin = first[sequence] as usize + from;
        x[begin * heads * DIM..(begin + count) * heads * DIM].to_vec()
    };
    let mesh = Mesh::ring(4).unwrap();
    let layout = Layout::Striped { stripe: STRIPE as u32 };
    // Bytes of each step.
    let mut moved: [Vec<u64>; 3] = Default::default();
    for (side, circulate) in [Circulate::Keys, Circulate::Queries, Circulate::Auto].into_iter().enumerate() {
        let [mut cache_k, mut cache_v] = [1e6, -1e6].map(|x| vec![x; LENGTHS.len() * SLOT * KV_HEADS * DIM]);
        let mut done = [0; LENGTHS.len()];
        let mut holders: Option<Vec<Vec<usize>>> = None;
        while done != LENGTHS {
            // A chunk of a prompt that divides nothing, then a token at a time.
            let new: Vec<usize> = (0..LENGTHS.len())
                .map(|s| if done[s] == 0 { LENGTHS[s] / 2 } else { 1.min(LENGTHS[s] - done[s]) })
                .collect();
            let mut queries = Vec::new();
            for (s, &n) in new.iter().enumerate() {
                let at = (s * SLOT + done[s]) * KV_HEADS * DIM;
                for (cache, x) in [(&mut cache_k, &k), (&mut cache_v, &v)] {
                    cache[at..at + n * KV_HEADS * DIM].copy_from_slice(&rows(x, s, done[s], n, KV_HEADS));
                }
                queries.extend(rows(&q, s, done[s], n, HEADS));
            }
            let slots = ends(LENGTHS.iter().map(|_| SLOT));
            let starts: Vec<i64> = done.iter().map(|&n| n as i64).collect();
            let batch = Batch::cross(&ends(new.iter().copied()), &slots, Some(&starts)).unwrap();
            let options = Options::new().circulate_forward(circulate);
            let plan = Plan::builder(&problem(batch)).mesh(mesh).layout(layout).options(options).build().unwrap();
            let held: Vec<_> = (0..4).map(|rank| plan.local_tokens(Side::K, rank).indices()).collect();
            assert_eq!(holders.get_or_insert_with(|| held.clone()), &held, "a cached row has changed its rank");
            let (report, _) = plan.verify().unwrap();
            moved[side].push(report.ranks.iter().flat_map(|r| &r.traffic).map(|t| t.bytes_out).sum());
            let o = forward(&plan, &queries, &cache_k, &cache_v);
            let want: Vec<f32> = (0..LENGTHS.len()).flat_map(|s| rows(&expected, s, done[s], new[s], HEADS)).collect();
            for (i, (o, want)) in o.iter().zip(&want).enumerate() {
                assert!((o - want).abs() < 2e-6, "{circulate:?}, {done:?}, element {i}: {o}, expected {want}");
            }
            new.iter().zip(&mut done).for_each(|(n, done)| *done += n);
        }
    }
    let [keys, queries, auto] = &moved;
    println!("bytes that ranks sent in each step: {keys:?} with k and v circulating, {queries:?} with q");
    assert!(queries.iter().sum::<u64>() < keys.iter().sum());
    // The chunks of the prompts are of so many rows that k and v are cheaper.
    assert!(keys[0] < queries[0] && queries.last() < keys.last());
    let fewest: Vec<u64> = keys.iter().zip(queries).map(|(&k, &q)| k.min(q)).collect();
    assert_eq!(auto, &fewest, "the automatic side");
}
