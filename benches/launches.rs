// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host's cost of a run on devices: CPU seconds per operation, once the plan is prepared; and that of single calls.
//!
//! It runs on the stand-in driver with its PTX interpreter off, so that only the time of this crate and of a driver
//! that checks and counts calls is measured:
//!
//! ```sh
//! cargo build --release -p cuda-emulator
//! LD_LIBRARY_PATH=$(cargo run -q --release -p cuda-emulator --bin libdir) CPATTN_EMU_IDLE=1 \
//!   cargo bench --features cuda --bench launches [-- JSON]
//! ```
//!
//! Time is the CPU time of all threads of the process, so a rank that waits for another counts only the CPU time it
//! uses. If a file name is given the figures are written there, with machine and date from the environment variables
//! `MACHINE` and `DATE`.

use std::{
    fmt::Write as _,
    fs,
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Side,
    call::{
        Attend, AttendBackward, Band, Block, Delta, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score,
        Transform,
    },
    kernel::cuda::{Cuda, DeviceMemory, StreamKernels},
    runtime::Bindings,
    schedule::{Direction, Schedule, TensorId},
    transport::peer,
};

const RUNS: usize = 400;
const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// CPU time in nanoseconds of all living threads of the process so far.
fn cpu() -> f64 {
    let tasks = fs::read_dir("/proc/self/task").expect("Linux");
    let nanoseconds = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum()
}

/// All tensors of a rank, in memory that no kernel reads.
fn tensors(cuda: &Cuda, plan: &Plan, rank: usize) -> (Bindings, Vec<DeviceMemory>) {
    use TensorId::{DO, Dk, Dq, Dv, K, Lse, O, Q, V};
    let p = plan.problem();
    let (nq, nk) = (plan.local_tokens(Side::Q, rank).len(), plan.local_tokens(Side::K, rank).len());
    let (mut bindings, mut memory) = (Bindings::default(), Vec::new());
    for tensor in [Q, K, V, O, Lse, DO, Dq, Dk, Dv] {
        let (tokens, heads) = if matches!(tensor, K | V | Dk | Dv) { (nk, p.kv_heads()) } else { (nq, p.heads()) };
        let (dtype, dim) = if tensor == Lse { (Dtype::F32, 1) } else { (p.dtype(), p.head_dim()) };
        let m = cuda.allocate(tokens * heads * dim * dtype.size()).expect("memory");
        bindings.set(tensor, RawTensor::compact(m.ptr(), dtype, tokens as u64, heads as u32, dim as u32));
        memory.push(m);
    }
    (bindings, memory)
}

/// The number of operations of all runs, and nanoseconds per operation.
fn measure(cuda: &Arc<Cuda>, plan: &Plan) -> (usize, f64) {
    let world = plan.mesh().world();
    let ends = peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(600)).expect("a group");
    let barrier = Barrier::new(world + 1);
    let ops: usize = (0..world)
        .flat_map(|rank| DIRECTIONS.map(|d| Schedule::new(plan, rank, d).expect("a schedule").operations().len()))
        .sum::<usize>()
        * RUNS;
    thread::scope(|scope| {
        for end in ends {
            let barrier = &barrier;
            scope.spawn(move || {
                let mut rank = Rank::on_device(end).expect("a rank");
                let (bindings, _memory) = tensors(cuda, plan, rank.rank());
                let mut run = |runs: usize| {
                    for _ in 0..runs {
                        for direction in DIRECTIONS {
                            // SAFETY: the memory lives until the rank is dropped, and the default stream is the
                            // device's.
                            unsafe { rank.run(plan, direction, &bindings) }.expect("a run");
                        }
                    }
                };
                run(3);
                barrier.wait();
                barrier.wait();
                run(RUNS);
                barrier.wait();
                barrier.wait();
            });
        }
        barrier.wait();
        let begin = cpu();
        barrier.wait();
        barrier.wait();
        let spent = cpu() - begin;
        barrier.wait();
        (ops, spent / ops as f64)
    })
}

/// Single calls of each kind, and their number in each batch; the stream is waited for between batches.
const CALLS: usize = 48;
const BATCHES: usize = 200;
const TOKENS: u32 = 1024;
const HEADS: u32 = 8;
const DIM: u32 = 64;

/// The ranges of two documents, of which the first has `first` tokens.
fn documents(first: u32) -> ([QRange; 2], [Range; 2]) {
    let k = [Range::plain(0, first, 0, 0), Range::plain(first.into(), TOKENS - first, 0, 1)];
    let q =
        |i: u32| QRange { range: k[i as usize], document: [0; 2], keys_begin: i, keys_end: i + 1, mode: Mode::Only };
    ([q(0), q(1)], k)
}

/// Nanoseconds of CPU of a call, of each kind.
fn single_calls(cuda: &Arc<Cuda>) -> Vec<(&'static str, f64)> {
    let mut kernels = StreamKernels::new(Arc::clone(cuda)).expect("memory");
    kernels.reserve(Dtype::Bf16, DIM, DIM).expect("kernels");
    let stream = cuda.new_stream().expect("a stream");
    let memory: Vec<DeviceMemory> =
        (0..10).map(|_| cuda.allocate((TOKENS * HEADS * DIM * 4) as usize).expect("memory")).collect();
    let tensor = |i: usize, dtype, dim| RawTensor::compact(memory[i].ptr(), dtype, TOKENS.into(), HEADS, dim);
    let [q, k, v, o, d_o] = [0, 1, 2, 3, 4].map(|i| tensor(i, Dtype::Bf16, DIM));
    let [lse, delta] = [5, 6].map(|i| tensor(i, Dtype::F32, 1));
    let [dq, dk, dv] = [7, 8, 9].map(|i| tensor(i, Dtype::F32, DIM));
    let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
    let score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: 0 };
    let lists: Vec<_> = (0..200).map(|i| documents(100 + i)).collect();
    let pairs = [0, 1].map(Pair::of);
    let ranges = |i: usize| Ranges { q: &lists[i].0, k: &lists[i].1, pairs: &pairs, bands: &[Band::WHOLE] };
    let forward = |i| Attend { lse, ..Attend::new([q, k, v, o], heads, score, ranges(i)) };
    let backward =
        |i| AttendBackward { lse, delta, dq, dk, dv, ..AttendBackward::new([q, k, v, d_o], heads, score, ranges(i)) };
    let copies = |i: usize| {
        let rows = |t: &RawTensor| t.rows(i as u64, 100);
        ([Block { dst: rows(&d_o), sources_begin: 0, sources_end: 1 }], [rows(&o)])
    };
    let mut time = |call: &mut dyn FnMut(&mut StreamKernels, usize)| {
        let mut begin = 0.0;
        for batch in 0..=BATCHES {
            // The first batch loads what is loaded late.
            if batch == 1 {
                begin = cpu();
            }
            for i in 0..CALLS {
                call(&mut kernels, (batch * CALLS + i) % lists.len());
            }
            // SAFETY: a live stream of the device.
            unsafe { cuda.synchronize(stream.handle()) }.expect("a stream");
        }
        (cpu() - begin) / (BATCHES * CALLS) as f64
    };
    let on = stream.handle();
    // SAFETY: no kernel runs; memory and stream live until the kernels' drop, which waits.
    unsafe {
        vec![
            ("forward, the same lists", time(&mut |kernels, _| kernels.attend(&forward(0), on).expect("a call"))),
            ("forward, other lists", time(&mut |kernels, i| kernels.attend(&forward(i), on).expect("a call"))),
            (
                "backward, the same lists",
                time(&mut |kernels, _| kernels.attend_backward(&backward(0), on).expect("a call")),
            ),
            (
                "backward, other lists",
                time(&mut |kernels, i| kernels.attend_backward(&backward(i), on).expect("a call")),
            ),
            (
                "transform, other blocks",
                time(&mut |kernels, i| {
                    let (blocks, sources) = copies(i);
                    kernels.transform(&Transform { blocks: &blocks, sources: &sources }, on).expect("a call");
                }),
            ),
            ("delta", time(&mut |kernels, _| kernels.delta(&Delta::new([o, d_o, delta]), on).expect("a call"))),
        ]
    }
}

fn main() {
    if std::env::var("CPATTN_EMU_IDLE").as_deref() != Ok("1") {
        println!("not run: set CPATTN_EMU_IDLE=1 and LD_LIBRARY_PATH to the stand-in driver, see benches/launches.rs");
        return;
    }
    let cuda = Arc::new(Cuda::new(0).unwrap_or_else(|e| panic!("{e}")));
    let batch = Batch::from_lengths(&[700, 1, 60, 0, 287]).expect("a batch");
    let problem = Problem::new(batch, 8, 2, 64, Dtype::Bf16);
    let mut json = String::new();
    for (name, ulysses, ring) in
        [("one rank", 1, 1), ("Ulysses 2", 2, 1), ("ring 4", 1, 4), ("Ulysses 2 × ring 4", 2, 4)]
    {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let plan = Plan::new(&problem, mesh, Layout::Zigzag).expect("a plan");
        let (ops, each) = measure(&cuda, &plan);
        println!("{name:20} {ops:8} operations, {:6.2} µs of CPU each", each / 1e3);
        let _ = write!(
            json,
            "{}\n    {{\"plan\": \"{name}\", \"operations\": {ops}, \"cpu_us_per_operation\": {:.3}}}",
            if json.is_empty() { "" } else { "," },
            each / 1e3
        );
    }
    let mut calls = String::new();
    for (name, each) in single_calls(&cuda) {
        println!("{name:26} {:6.2} µs of CPU each", each / 1e3);
        let comma = if calls.is_empty() { "" } else { "," };
        let _ = write!(calls, "{comma}\n    {{\"call\": \"{name}\", \"cpu_us\": {:.3}}}", each / 1e3);
    }
    if let Some(file) = std::env::args().skip(1).find(|a| !a.starts_with('-')) {
        let var = |name| std::env::var(name).unwrap_or_else(|_| "not said".into());
        let text = format!(
            "{{\n  \"bench\": \"launches\",\n  \"machine\": \"{}\",\n  \"date\": \"{}\",\n  \"driver\": \"stand-in, CPATTN_EMU_IDLE=1\",\n  \"runs\": {RUNS},\n  \"plans\": [{json}\n  ],\n  \"calls\": [{calls}\n  ]\n}}\n",
            var("MACHINE"),
            var("DATE")
        );
        fs::write(&file, text).unwrap_or_else(|e| panic!("{file}: {e}"));
    }
}
