// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steps over a cache of k and v that is spread over four ranks: one new token, and chunks of a prompt, with k and v
//! circulating and with q.
//!
//! ```text
//! cargo bench --bench serving [-- --cache 4096,16384,65536] [--new 1,64,512] [--sequences 1] [--workers 1]
//! mpirun -n 4 target/release/deps/serving-… --mpi [the same]      built with --features mpi
//! ```
//!
//! 32 q heads over 8 kv heads, head_dim 128, bf16, striped by 64: the layout of `docs/serving.md`. Each sequence has a
//! slot of `--cache` rows divided by `--sequences`, and grows by `--new` tokens in each step until it is full. A model
//! makes one plan for a step and runs it in each of its layers, so these times are separate:
//!
//! - *plan*: building the plan, and *prepare*: the schedule, its checks and lists (`Rank::prepare`), of the slowest
//!   rank; once for a step;
//! - *first*: the first run, in which the ranks agree on the plan;
//! - *run*: each of the next ten runs, one after another without a pause, like the layers of a model.
//!
//! *merge* is the time that rank 0 spends in a run on merging partial results, *exchange* the time on exchanges, both
//! on the communication lane; much of the latter is waiting for other ranks. All figures are medians over the steps.

#[path = "median/mod.rs"]
mod median;

use std::{
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Batch, Dtype, Layout, Mesh, Options, Plan, Problem, Rank, Result, Side,
    call::RawTensor,
    plan::Circulate,
    runtime::Bindings,
    schedule::{Direction, TensorId},
    transport::{Label, Message, Transport, local},
};
use half::bf16;
use median::median;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const STRIPE: u32 = 64;
const RANKS: usize = 4;
const STEPS: usize = 5;
/// Runs of a step after the first.
const RUNS: usize = 10;
const DEADLINE: Duration = Duration::from_secs(300);

/// Command-line options.
struct Asked {
    cache: Vec<usize>,
    new: Vec<usize>,
    sequences: usize,
    workers: usize,
}

/// Times of one step, in microseconds.
#[derive(Clone, Copy, Default)]
struct StepTimes {
    plan: f64,
    prepare: f64,
    first: f64,
    run: f64,
    merge: f64,
    exchange: f64,
}

/// The plan of the step in which each sequence has `done` tokens in its slot and adds `new` tokens.
fn plan(slot: usize, done: usize, new: usize, sequences: usize, circulate: Circulate) -> Result<Plan> {
    let ends = |each: usize| (0..=sequences).map(|s| (s * each) as i32).collect::<Vec<_>>();
    let batch = Batch::cross(&ends(new), &ends(slot), Some(&vec![done as i64; sequences]))?;
    let problem = Problem::new(batch, HEADS, KV_HEADS, DIM, Dtype::Bf16);
    let options = Options::new().circulate_forward(circulate);
    Plan::builder(&problem).mesh(Mesh::ring(RANKS)?).layout(Layout::Striped { stripe: STRIPE }).options(options).build()
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// The maximum of all ranks' numbers, on every rank.
fn largest(side: &impl Transport, mine: f64) -> Result<f64> {
    let mut all = [mine; RANKS];
    let message = |peer, x: &mut f64| Message { peer, ptr: std::ptr::from_mut(x).cast(), bytes: 8 };
    let mut own = mine;
    let others = || (0..RANKS).filter(|&peer| peer != side.rank());
    let sends: Vec<_> = others().map(|peer| message(peer, &mut own)).collect();
    let recvs: Vec<_> = others().map(|peer| message(peer, &mut all[peer])).collect();
    // SAFETY: the numbers live in this function, and those that are received are apart.
    unsafe { side.exchange(Label::new("times", 0), &sends, &recvs) }?;
    Ok(all.into_iter().fold(0.0, f64::max))
}

/// Tensors of one rank, large enough for the largest step, filled once.
struct Memory {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    o: Vec<bf16>,
    lse: Vec<f32>,
}

impl Memory {
    fn new(q_rows: usize, k_rows: usize, seed: u64) -> Self {
        let mut draw = fastrand::Rng::with_seed(seed);
        let mut numbers = |n: usize| (0..n).map(|_| bf16::from_f32(draw.f32() - 0.5)).collect::<Vec<_>>();
        let [q, k, v] = [q_rows * HEADS, k_rows * KV_HEADS, k_rows * KV_HEADS].map(|rows| numbers(rows * DIM));
        Self { o: vec![bf16::ZERO; q.len()], lse: vec![0.0; q_rows * HEADS], q, k, v }
    }

    fn bind(&mut self, plan: &Plan, rank: usize) -> Bindings {
        let [n, m] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank).len() as u64);
        let (heads, kv_heads, dim) = (HEADS as u32, KV_HEADS as u32, DIM as u32);
        let of = |p: *mut bf16, rows, heads| RawTensor::compact(p.cast(), Dtype::Bf16, rows, heads, dim);
        let mut tensors = Bindings::default();
        tensors.set(TensorId::Q, of(self.q.as_mut_ptr(), n, heads));
        tensors.set(TensorId::K, of(self.k.as_mut_ptr(), m, kv_heads));
        tensors.set(TensorId::V, of(self.v.as_mut_ptr(), m, kv_heads));
        tensors.set(TensorId::O, of(self.o.as_mut_ptr(), n, heads));
        tensors.set(TensorId::Lse, RawTensor::compact(self.lse.as_mut_ptr().cast(), Dtype::F32, n, heads, 1));
        tensors
    }
}

/// One step on one rank.
fn step(
    rank: &mut Rank,
    side: &impl Transport,
    memory: &mut Memory,
    made: impl Fn() -> Result<Plan>,
) -> Result<StepTimes> {
    let together = |number| side.agree(0..RANKS, number);
    together(1)?;
    let begin = Instant::now();
    let plan = made()?;
    let planned = micros(begin);
    let begin = Instant::now();
    rank.prepare(&plan, Direction::Forward)?;
    let prepared = micros(begin);
    let tensors = memory.bind(&plan, rank.rank());
    together(2)?;
    let begin = Instant::now();
    // SAFETY: the tensors are `memory`'s, of the plan's shapes, and live longer than the runs.
    unsafe { rank.run(&plan, Direction::Forward, &tensors) }?;
    let first = micros(begin);
    together(3)?;
    let begin = Instant::now();
    for _ in 0..RUNS {
        // SAFETY: as above.
        unsafe { rank.run(&plan, Direction::Forward, &tensors) }?;
    }
    let run = micros(begin) / RUNS as f64;
    // One further run for the parts, because recording makes a run slower.
    rank.trace().record(Instant::now(), 256)?;
    // SAFETY: as above.
    unsafe { rank.run(&plan, Direction::Forward, &tensors) }?;
    let events = rank.trace().events();
    rank.trace().record(Instant::now(), 0)?;
    let part = |name: &[&str]| -> f64 {
        let of = events.iter().filter(|e| name.contains(&e.name));
        of.map(|e| (e.end_ns - e.start_ns) as f64 / 1e3).fold(0.0, |sum, x| sum + x)
    };
    let (merge, exchange) = (part(&["merge"]), part(&["fetch", "return"]));
    let [plan, prepare, first, run] = [planned, prepared, first, run].map(|t| largest(side, t));
    Ok(StepTimes { plan: plan?, prepare: prepare?, first: first?, run: run?, merge, exchange })
}

/// Runs all requested measurements on one rank; rank 0 prints them. `side` is for communication between the runs.
fn measure(end: impl Transport + 'static, side: &impl Transport, asked: &Asked) -> Result<()> {
    let mut rank = Rank::with_workers(end, asked.workers);
    let prints = side.rank() == 0;
    if prints {
        let name = cpattn::kernel::cpu::Isa::chosen()?;
        println!(
            "{} sequences, {} workers a rank, {name}; microseconds, medians of {STEPS} steps",
            asked.sequences, asked.workers
        );
        println!("| cached | new | circulates | plan | prepare | first | run | exchange | merge |");
        println!("|---|---|---|---|---|---|---|---|---|");
    }
    for &cache in &asked.cache {
        let slot = cache / asked.sequences;
        for &new in &asked.new {
            for (name, circulate) in [("k and v", Circulate::Keys), ("q", Circulate::Queries)] {
                let Some(before) = slot.checked_sub(STEPS * new) else { continue };
                let of = |s: usize| plan(slot, before + s * new, new, asked.sequences, circulate);
                let first = of(0)?;
                let [n, m] =
                    [Side::Q, Side::K].map(|side| first.local_tokens(side, rank.rank()).len() + 64 * asked.sequences);
                let mut memory = Memory::new(n, m, rank.rank() as u64);
                let times: Vec<_> =
                    (0..STEPS).map(|s| step(&mut rank, side, &mut memory, || of(s))).collect::<Result<_>>()?;
                let of = |f: fn(&StepTimes) -> f64| median(times.iter().map(f).collect());
                if prints {
                    println!(
                        "| {slot} | {new} | {name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} |",
                        of(|t| t.plan),
                        of(|t| t.prepare),
                        of(|t| t.first),
                        of(|t| t.run),
                        of(|t| t.exchange),
                        of(|t| t.merge)
                    );
                }
            }
        }
    }
    Ok(())
}

fn threads(asked: &Asked) -> Result<()> {
    let (ends, sides) = (local::group(RANKS, DEADLINE)?, local::group(RANKS, DEADLINE)?);
    thread::scope(|scope| {
        let ranks: Vec<_> =
            ends.into_iter().zip(&sides).map(|(end, side)| scope.spawn(move || measure(end, side, asked))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank that does not panic"))
    })
}

#[cfg(feature = "mpi")]
fn processes(asked: &Asked) -> Result<()> {
    use cpattn::transport::mpi::Mpi;
    use mpi::traits::Communicator;
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).expect("the first initialisation");
    let world = universe.world();
    // An error would drop `universe`, which calls MPI_Finalize: that may wait for a process that is stopped or dead.
    let made = || Mpi::new(&world, DEADLINE);
    made().and_then(|end| measure(end, &made()?, asked)).or_else(|error| {
        eprintln!("error: {error}");
        world.abort(2)
    })
}

#[cfg(not(feature = "mpi"))]
fn processes(_: &Asked) -> Result<()> {
    panic!("--mpi needs a build with the feature mpi")
}

/// The numbers after an option, or the default.
fn numbers(name: &str, otherwise: &[usize]) -> Vec<usize> {
    let args: Vec<String> = std::env::args().collect();
    let Some(at) = args.iter().position(|a| a == name) else { return otherwise.to_vec() };
    let given = args.get(at + 1).map_or("", String::as_str);
    let read = given.split(',').map(|n| n.parse().ok().filter(|&n| n > 0)).collect::<Option<_>>();
    read.unwrap_or_else(|| panic!("{name} is {given:?}, expected numbers above 0, with commas between"))
}

fn main() -> ExitCode {
    if std::env::args().any(|a| a == "--test") {
        return ExitCode::SUCCESS;
    }
    let asked = Asked {
        cache: numbers("--cache", &[4096, 16_384, 65_536]),
        new: numbers("--new", &[1, 64, 512]),
        sequences: numbers("--sequences", &[1])[0],
        workers: numbers("--workers", &[1])[0],
    };
    let outcome = if std::env::args().any(|a| a == "--mpi") { processes(&asked) } else { threads(&asked) };
    outcome.map_or_else(
        |error| {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}
