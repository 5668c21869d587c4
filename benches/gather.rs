// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring steps against one call over all keys, for documents of several lengths that are each cut for every rank: the
//! basis of the constants in `src/plan/together.rs`.
//!
//! Ranks are threads of this process, all in one forward or backward at a time; both forms in turn, round after round.
//! Figures are medians of the slowest rank's wall time. With as many cores as ranks, communication can overlap with
//! compute.
//!
//! `cargo bench --bench gather [-- --rounds N --ring N]`; about 6,000 tokens, 8 heads, 2 kv heads, head_dim 64, causal,
//! f32.

use std::{
    sync::{Barrier, Mutex},
    time::{Duration, Instant},
};

use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mesh, Options, Plan, Problem, Rank, Side, View, ViewMut, plan::Gather,
    schedule::Form, transport::local,
};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const FORMS: [Gather; 2] = [Gather::Steps, Gather::Together];

/// A rank's tensors.
struct Tensors {
    n: usize,
    /// q, o, do, dq.
    queries: [Vec<f32>; 4],
    /// k, v, dk, dv.
    keys: [Vec<f32>; 4],
    lse: Vec<f32>,
}

impl Tensors {
    fn new(n: usize) -> Self {
        let values = |n: usize, seed: usize| (0..n).map(|i| ((i * 7919 + seed) % 2003) as f32 / 1000.0 - 1.0).collect();
        Self {
            n,
            queries: std::array::from_fn(|i| values(n * HEADS * DIM, i)),
            keys: std::array::from_fn(|i| values(n * KV_HEADS * DIM, 4 + i)),
            lse: vec![0.0; n * HEADS],
        }
    }

    fn run(&mut self, rank: &mut Rank, plan: &Plan, forward: bool) -> cpattn::Result<()> {
        let Self { n, queries: [q, o, d_o, dq], keys: [k, v, dk, dv], lse } = self;
        let (n, view) = (*n, |x, heads| View::new(x, *n, heads, DIM));
        let (q, k, v) = (view(q, HEADS)?, view(k, KV_HEADS)?, view(v, KV_HEADS)?);
        if forward {
            let (o, lse) = (ViewMut::new(o, n, HEADS, DIM)?, ViewMut::head_major(lse, n, HEADS)?);
            return rank.forward(plan, Forward::new(q, k, v, o, lse));
        }
        let backward = Backward::new(
            q,
            k,
            v,
            view(o, HEADS)?,
            View::head_major(lse, n, HEADS)?,
            view(d_o, HEADS)?,
            [
                ViewMut::new(dq, n, HEADS, DIM)?,
                ViewMut::new(dk, n, KV_HEADS, DIM)?,
                ViewMut::new(dv, n, KV_HEADS, DIM)?,
            ],
        );
        rank.backward(plan, backward)
    }
}

/// Times by form and direction.
fn times(plans: &[Plan; 2], ring: usize, rounds: usize) -> [[Vec<Duration>; 2]; 2] {
    let (all, barrier) = (Mutex::new(<[[Vec<Duration>; 2]; 2]>::default()), Barrier::new(ring));
    std::thread::scope(|scope| {
        for end in local::group(ring, Duration::from_secs(600)).expect("a group") {
            let (all, barrier) = (&all, &barrier);
            scope.spawn(move || {
                let mut rank = Rank::new(end);
                let mut tensors = Tensors::new(plans[0].local_tokens(Side::Q, rank.rank()).len());
                for round in 0..=rounds {
                    for (plan, form) in plans.iter().zip(0..) {
                        for direction in 0..2 {
                            barrier.wait();
                            let start = Instant::now();
                            tensors.run(&mut rank, plan, direction == 0).expect("a run");
                            // The first round prepares the plan.
                            if barrier.wait().is_leader() && round > 0 {
                                let mut all = all.lock().expect("no rank panics");
                                let list: &mut [[Vec<Duration>; 2]; 2] = &mut all;
                                list[form][direction].push(start.elapsed());
                            }
                        }
                    }
                }
            });
        }
    });
    all.into_inner().expect("no rank panics")
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = args.iter().position(|a| a == name);
        at.and_then(|i| args.get(i + 1)).map_or(Ok(default), |n| n.parse())
    };
    let (Ok(rounds @ 1..), Ok(ring @ 2..)) = (number("--rounds", 15), number("--ring", 4)) else {
        eprintln!("--rounds N takes a number above 0, --ring N one above 1");
        std::process::exit(2);
    };
    println!("zigzag over a ring of {ring}, {rounds} rounds: ms of steps, of together, and their ratio");
    for (documents, mean) in [(300, 20), (100, 60), (60, 100), (32, 190), (12, 500)] {
        // Lengths from 1 to twice the mean, spread evenly.
        let lengths: Vec<usize> =
            (0..documents).map(|i| 1 + (i * 137 % documents) * (2 * mean - 1) / documents).collect();
        let problem = Problem::new(Batch::from_lengths(&lengths).expect("lengths"), HEADS, KV_HEADS, DIM, Dtype::F32);
        let mesh = Mesh::ring(ring).expect("a ring");
        let plan = |form| {
            Plan::builder(&problem)
                .mesh(mesh)
                .layout(Layout::Zigzag)
                .options(Options::new().gather(form))
                .build()
                .expect("a plan")
        };
        let mut times = times(&FORMS.map(plan), ring, rounds);
        let mut median = |form: usize, direction: usize| {
            let list = &mut times[form][direction];
            list.sort_unstable();
            list[list.len() / 2].as_secs_f64() * 1e3
        };
        let keys = problem.area() as f64 / (lengths.iter().sum::<usize>() * ring) as f64;
        let chosen = if plan(Gather::Auto).form() == Form::Together { "together" } else { "steps" };
        print!("{documents:4} documents of {mean:3} on average, {keys:5.1} keys a step, chosen {chosen:8}");
        for (direction, name) in ["forward", "backward"].into_iter().enumerate() {
            let (steps, together) = (median(0, direction), median(1, direction));
            print!("  {name} {steps:6.2} {together:6.2} {:.2}", steps / together);
        }
        println!();
    }
}
