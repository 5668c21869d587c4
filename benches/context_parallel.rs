// SPDX-License-Identifier: MIT OR Apache-2.0
//! What distribution costs: CPU time of a forward and backward on 8 ranks over that of one rank with the same kernel.
//!
//! Ranks are threads of this process, so the process's CPU time is the sum over all ranks, both lanes and every wait
//! that burns cycles; it hardly depends on how many cores there are or who else uses them, which wall time does. One
//! rank and all meshes are measured in turn, round after round, and each round gives one ratio for each mesh: what
//! disturbs a round disturbs both sides of its ratios. The median of them is the figure. Then the copies between
//! token-major and head-major shards that Ulysses makes on either side of its all-to-alls, in bytes per second.
//!
//! `cargo bench --bench context_parallel [-- --rounds N --tokens N]`; 8,192 tokens, 8 heads, head_dim 64, causal, f32.
//! CPU time comes from `/proc`, so Linux only.

use std::{
    hint::black_box,
    sync::mpsc,
    time::{Duration, Instant},
};

use cpattn::{
    Backward, Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut,
    kernel::{Block, RawTensor, Transform, cpu},
    schedule::Direction,
    transport::local,
};

/// Target of the ratio.
const TARGET: f64 = 1.15;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// CPU time that the threads of this process have used, to a tick of the scheduler. None ends while it is measured.
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
        let n = plan.local_tokens(Side::Q, r);
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

    fn forward_and_backward(&mut self) -> cpattn::Result<()> {
        let n = self.plan.local_tokens(Side::Q, self.rank.rank());
        let view = |x| View::new(x, n, HEADS, HEAD_DIM);
        let [q, k, v, d_o] = &self.inputs;
        let (q, k, v, d_o) = (view(q)?, view(k)?, view(v)?, view(d_o)?);
        let [o, lse, dq, dk, dv] = &mut self.outputs;
        let forward = Forward {
            q,
            k,
            v,
            sinks: None,
            o: ViewMut::new(o, n, HEADS, HEAD_DIM)?,
            lse: ViewMut::head_major(lse, n, HEADS)?,
        };
        self.rank.forward(&self.plan, forward)?;
        let backward = Backward {
            q,
            k,
            v,
            sinks: None,
            o: View::new(o, n, HEADS, HEAD_DIM)?,
            lse: View::head_major(lse, n, HEADS)?,
            d_o,
            dq: ViewMut::new(dq, n, HEADS, HEAD_DIM)?,
            dk: ViewMut::new(dk, n, HEADS, HEAD_DIM)?,
            dv: ViewMut::new(dv, n, HEADS, HEAD_DIM)?,
            dsinks: None,
        };
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

    /// One forward and backward on all ranks: CPU time and wall time.
    fn run(&self) -> (Duration, Duration) {
        let (done, all) = mpsc::channel();
        let (cpu, wall) = (cpu_time(), Instant::now());
        for task in &self.tasks {
            let done = done.clone();
            task.send(Box::new(move |worker| {
                worker.forward_and_backward().expect("a run");
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

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_unstable_by(f64::total_cmp);
    x[x.len() / 2]
}

fn distribution(tokens: usize, rounds: usize) {
    let batch = Batch::from_lengths(&[tokens]).expect("a length");
    let problem = Problem::new(batch, HEADS, HEADS, HEAD_DIM, Dtype::F32);
    let plan = |ulysses, ring, layout| {
        let mesh = Mesh::explicit(ulysses * ring, ulysses, ring).expect("a mesh");
        let plan = Plan::new(&problem, mesh, layout).expect("a plan");
        (format!("{mesh}, {layout}"), Team::new(&plan))
    };
    let teams = [
        plan(1, 1, Layout::Contiguous),
        plan(8, 1, Layout::Contiguous),
        plan(4, 2, Layout::Zigzag),
        plan(1, 8, Layout::Zigzag),
    ];
    println!("{tokens} tokens, {HEADS} heads, head_dim {HEAD_DIM}, causal, f32, forward + backward, {rounds} rounds");
    // Memory is touched and schedules are warm before anything counts.
    for (_, team) in &teams {
        team.run();
    }
    let mut cpu = vec![Vec::new(); teams.len()];
    let mut wall = vec![Vec::new(); teams.len()];
    for _ in 0..rounds {
        for (i, (_, team)) in teams.iter().enumerate() {
            let (c, w) = team.run();
            cpu[i].push(c.as_secs_f64());
            wall[i].push(w.as_secs_f64());
        }
    }
    println!("{:32}{:>10}{:>10}{:>26}{:>10}", "", "CPU s", "wall s", "CPU over one rank's", "target");
    for (i, (name, _)) in teams.iter().enumerate() {
        let ratios: Vec<f64> = cpu[i].iter().zip(&cpu[0]).map(|(c, one)| c / one).collect();
        let (low, high) = ratios.iter().fold((f64::MAX, 0f64), |(l, h), &r| (l.min(r), h.max(r)));
        let (c, w, ratio) = (median(cpu[i].clone()), median(wall[i].clone()), median(ratios));
        let spread = format!("{ratio:.3} ({low:.3} to {high:.3})");
        let target =
            if i == 0 { String::new() } else { format!("{TARGET} {}", if ratio <= TARGET { "met" } else { "missed" }) };
        println!("{name:32}{c:>10.3}{w:>10.3}{spread:>26}{target:>12}");
    }
}

/// Packing for an all-to-all: a token-major shard becomes one compact block for each peer, and back.
fn transforms(tokens: usize) {
    println!("\nlayout transforms on one thread: {HEADS} heads of {HEAD_DIM}, f32, {tokens} tokens, 8 peers");
    println!("{:32}{:>10}{:>16}", "", "ms", "GB/s written");
    let row = HEADS * HEAD_DIM;
    let (mut token_major, mut by_peer) = (vec![1f32; tokens * row], vec![0f32; tokens * row]);
    let mut token_bits = vec![half::f16::ONE; tokens * row];
    let whole = |ptr: *mut u8, dtype| RawTensor::compact(ptr, dtype, tokens as u64, HEADS as u32, HEAD_DIM as u32);
    let peers = |ptr: *mut f32| -> Vec<RawTensor> {
        (0..HEADS)
            .map(|h| {
                let block = ptr.wrapping_add(h * tokens * HEAD_DIM);
                RawTensor::compact(block.cast(), Dtype::F32, tokens as u64, 1, HEAD_DIM as u32)
            })
            .collect()
    };
    let heads = |t: RawTensor| (0..HEADS as u32).map(|h| t.heads(h, 1)).collect::<Vec<_>>();
    let all = whole(token_major.as_mut_ptr().cast(), Dtype::F32);
    let narrow = whole(token_bits.as_mut_ptr().cast(), Dtype::F16);
    let peers = peers(by_peer.as_mut_ptr());
    for (name, dst, src, size) in [
        ("pack: tokens to heads", peers.clone(), heads(all), 4),
        ("unpack: heads to tokens", heads(all), peers.clone(), 4),
        ("unpack and round to f16", heads(narrow), peers, 2),
    ] {
        let block = |(i, &dst): (usize, &RawTensor)| Block { dst, sources_begin: i as u32, sources_end: i as u32 + 1 };
        let blocks: Vec<Block> = dst.iter().enumerate().map(block).collect();
        let transform = Transform { blocks: &blocks, sources: &src };
        let times = (0..30).map(|_| {
            let began = Instant::now();
            // SAFETY: the tensors lie in vectors that outlive the call, and nothing else touches them.
            unsafe { cpu::transform(&transform) }.expect("a transform");
            black_box(began.elapsed().as_secs_f64())
        });
        let s = median(times.skip(5).collect());
        println!("{name:32}{:>10.3}{:>16.2}", s * 1e3, (tokens * row * size) as f64 / s / 1e9);
    }
    black_box((&token_major, &by_peer, &token_bits));
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
    transforms(1 << 14);
}
