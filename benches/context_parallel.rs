// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of distribution: CPU time of a forward and backward on 8 ranks over that of one rank with the same kernel.
//!
//! Ranks are threads of this process, so the process's CPU time is the sum over all ranks, both lanes and every busy
//! wait. Unlike wall time it hardly depends on the number of cores or on other users. One rank and all meshes are
//! measured in turn, round after round, and each round gives one ratio for each mesh: a disturbance of a round affects
//! both sides of its ratios. The figure is the median of these ratios, separately for forward and backward. The cost of
//! the copies of an all-to-all alone is measured in `memory.rs`.
//!
//! `cargo bench --bench context_parallel [-- --rounds N --tokens N]`; 8,192 tokens, 8 heads, head_dim 64, causal, f32.
//! CPU time comes from `/proc`, so Linux only.

mod median;

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, schedule::Direction,
    transport::local,
};
use median::median;

/// Target of the ratio: a ring's forward merges in the kernel, and so reads running results.
fn target(mesh: &Mesh, direction: Direction) -> f64 {
    if direction == Direction::Forward && mesh.ring == mesh.world() { 1.05 } else { 1.02 }
}

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// CPU time used by the threads of this process, to a tick of the scheduler. No thread ends during a measurement.
fn cpu_time() -> Duration {
    // The first field of schedstat is nanoseconds on a CPU, of one thread.
    let mut ns = 0u64;
    let tasks = std::fs::read_dir("/proc/self/task").expect("/proc is mounted");
    for task in tasks.flatten() {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        ns += text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    }
    Duration::from_nanos(ns)
}

type Task = Box<dyn FnOnce(&mut Worker) + Send>;

/// A rank with its tensors.
struct Worker {
    rank: Rank,
    plan: Plan,
    inputs: [Vec<f32>; 4],
    outputs: [Vec<f32>; 5],
}

impl Worker {
    fn new(rank: Rank, plan: &Plan) -> Self {
        let r = rank.rank();
        let n = plan.local_tokens(Side::Q, r).len();
        let mut state = r as u64 + 1;
        let mut values = |n: usize| -> Vec<f32> {
            let next = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            (0..n).map(next).collect()
        };
        let row = HEADS * HEAD_DIM;
        let inputs = std::array::from_fn(|_| values(n * row));
        let outputs = [n * row, n * HEADS, n * row, n * row, n * row].map(|n| vec![0.0; n]);
        Self { rank, plan: plan.clone(), inputs, outputs }
    }

    fn run(&mut self, direction: Direction) -> cpattn::Result<()> {
        let n = self.plan.local_tokens(Side::Q, self.rank.rank()).len();
        let view = |x| View::new(x, n, HEADS, HEAD_DIM);
        let [q, k, v, d_o] = &self.inputs;
        let (q, k, v, d_o) = (view(q)?, view(k)?, view(v)?, view(d_o)?);
        let [o, lse, dq, dk, dv] = &mut self.outputs;
        if direction == Direction::Forward {
            let forward =
                Forward::new(q, k, v, ViewMut::new(o, n, HEADS, HEAD_DIM)?, ViewMut::head_major(lse, n, HEADS)?);
            return self.rank.forward(&self.plan, forward);
        }
        let backward = Backward::new(
            q,
            k,
            v,
            View::new(o, n, HEADS, HEAD_DIM)?,
            View::head_major(lse, n, HEADS)?,
            d_o,
            [
                ViewMut::new(dq, n, HEADS, HEAD_DIM)?,
                ViewMut::new(dk, n, HEADS, HEAD_DIM)?,
                ViewMut::new(dv, n, HEADS, HEAD_DIM)?,
            ],
        );
        self.rank.backward(&self.plan, backward)
    }
}

/// Threads that wait for work, so that starting them is not measured.
struct Team {
    tasks: Vec<mpsc::Sender<Task>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Team {
    fn new(plan: &Plan) -> Self {
        let ranks = local::group(plan.mesh().world(), Duration::from_secs(600)).expect("a group");
        let (mut tasks, mut threads) = (Vec::new(), Vec::new());
        for transport in ranks {
            let (task, queue) = mpsc::channel::<Task>();
            let plan = plan.clone();
            threads.push(std::thread::spawn(move || {
                let mut rank = Rank::new(transport);
                for direction in [Direction::Forward, Direction::Backward] {
                    rank.prepare(&plan, direction).expect("a schedule");
                }
                let mut worker = Worker::new(rank, &plan);
                queue.into_iter().for_each(|task| task(&mut worker));
            }));
            tasks.push(task);
        }
        Self { tasks, threads }
    }

    /// One forward or backward on all ranks: CPU time and wall time.
    fn run(&self, direction: Direction) -> (Duration, Duration) {
        let (done, all) = mpsc::channel();
        let (cpu, wall) = (cpu_time(), Instant::now());
        for task in &self.tasks {
            let done = done.clone();
            task.send(Box::new(move |worker: &mut Worker| {
                worker.run(direction).expect("a run");
                done.send(()).expect("the bench waits");
            }))
            .expect("the rank is there");
        }
        self.tasks.iter().for_each(|_| all.recv().expect("every rank ends"));
        (cpu_time() - cpu, wall.elapsed())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.tasks.clear();
        self.threads.drain(..).for_each(|t| t.join().expect("a rank that ended well"));
    }
}

fn distribution(tokens: usize, rounds: usize) {
    let batch = Batch::from_lengths(&[tokens]).expect("a length");
    let problem = Problem::new(batch, HEADS, HEADS, HEAD_DIM, Dtype::F32);
    let plan = |ulysses, ring, layout| {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let plan = Plan::new(&problem, mesh, layout).expect("a plan");
        (format!("{mesh}, {layout}"), mesh, Team::new(&plan))
    };
    let teams = [
        plan(1, 1, Layout::Contiguous),
        plan(8, 1, Layout::Contiguous),
        plan(4, 2, Layout::Zigzag),
        plan(1, 8, Layout::Zigzag),
    ];
    const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];
    println!("{tokens} tokens, {HEADS} heads, head_dim {HEAD_DIM}, causal, f32, {rounds} rounds");
    // Touch memory and prepare schedules before the measurement.
    for (_, _, team) in &teams {
        for direction in DIRECTIONS {
            team.run(direction);
        }
    }
    let (mut cpu, mut wall) = ([const { [const { Vec::new() }; 4] }; 2], [const { [const { Vec::new() }; 4] }; 2]);
    for _ in 0..rounds {
        for (d, direction) in DIRECTIONS.into_iter().enumerate() {
            for (i, (_, _, team)) in teams.iter().enumerate() {
                let (c, w) = team.run(direction);
                cpu[d][i].push(c.as_secs_f64());
                wall[d][i].push(w.as_secs_f64());
            }
        }
    }
    println!("{:42}{:>10}{:>10}{:>26}{:>10}", "", "CPU s", "wall s", "CPU over one rank's", "target");
    for (d, direction) in DIRECTIONS.into_iter().enumerate() {
        for (i, (name, mesh, _)) in teams.iter().enumerate() {
            let ratios: Vec<f64> = cpu[d][i].iter().zip(&cpu[d][0]).map(|(c, one)| c / one).collect();
            let (low, high) = ratios.iter().fold((f64::MAX, 0f64), |(l, h), &r| (l.min(r), h.max(r)));
            let (c, w, ratio) = (median(cpu[d][i].clone()), median(wall[d][i].clone()), median(ratios));
            let spread = format!("{ratio:.3} ({low:.3} to {high:.3})");
            let target = target(mesh, direction);
            let verdict = match i {
                0 => String::new(),
                _ => format!("{target} {}", if ratio <= target { "met" } else { "missed" }),
            };
            println!("{:42}{c:>10.3}{w:>10.3}{spread:>26}{verdict:>12}", format!("{direction:?}, {name}"));
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = args.iter().position(|a| a == name);
        at.and_then(|i| args.get(i + 1)).map_or(Ok(default), |n| n.parse())
    };
    let (Ok(rounds @ 1..), Ok(tokens @ 1..)) = (number("--rounds", 5), number("--tokens", 8192)) else {
        eprintln!("--rounds N and --tokens N take numbers above 0");
        std::process::exit(2);
    };
    distribution(tokens, rounds);
}
