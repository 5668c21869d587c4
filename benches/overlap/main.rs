// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much of the communication of a run shows in its time: attention alone, its exchanges alone, both together.
//!
//! `benches/overlap/run` is the command; it starts this program for ranks that are threads (transport `local`) and, under
//! `mpirun`, for ranks that are processes (`--mpi`), and puts gloo beside them (`gloo.py`). Every rank measures three
//! things in turn, round after round:
//!
//! - *attention*: the run, over a transport that moves nothing (`tap.rs`);
//! - *exchanges*: the same messages, in the same batches, one batch after another, without any attention between;
//! - *both*: the run.
//!
//! What is exposed is both minus attention, in each round; its median is the figure. Wall time is that of the slowest
//! rank, between two agreements. CPU time is that of all ranks and all of their threads. Where there are fewer cores than
//! ranks, no copy can hide: it takes a core from some rank's attention. What CPU time is added is then the steadier
//! measure; it says what the transport costs, and nothing about who waits for whom.

mod case;
mod tap;

use std::{process::ExitCode, thread, time::Duration};

use cpattn::transport::local;

/// What was asked for.
#[derive(Clone, Copy)]
struct Options {
    tokens: usize,
    rounds: usize,
}

const WORLD: usize = 4;
const DEADLINE: Duration = Duration::from_secs(600);

fn number(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    let Some(at) = args.iter().position(|a| a == name) else { return default };
    match args.get(at + 1).map(|n| n.parse()) {
        Some(Ok(n @ 1..)) => n,
        found => panic!("{name} is {found:?}, expected a number above 0"),
    }
}

fn threads(options: Options) -> Vec<String> {
    let ends = local::group(WORLD, DEADLINE).expect("a group");
    thread::scope(|scope| {
        // CPU time is counted once for the process, by rank 0.
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(rank, end)| scope.spawn(move || case::all("local", end, rank == 0, options)))
            .collect();
        threads.into_iter().flat_map(|t| t.join().expect("a rank that ended well")).collect()
    })
}

#[cfg(feature = "mpi")]
fn processes(options: Options) -> Vec<String> {
    use cpattn::transport::mpi::Mpi;
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).expect("the first initialisation");
    let end = Mpi::new(&universe.world(), DEADLINE).expect("a transport of each process");
    case::all("mpi", end, true, options)
}

#[cfg(not(feature = "mpi"))]
fn processes(_: Options) -> Vec<String> {
    panic!("--mpi needs a build with the feature mpi")
}

fn main() -> ExitCode {
    if std::env::args().any(|a| a == "--test") {
        return ExitCode::SUCCESS;
    }
    let options = Options { tokens: number("--tokens", 16_384), rounds: number("--rounds", 3) };
    let lines = if std::env::args().any(|a| a == "--mpi") { processes(options) } else { threads(options) };
    // Rank 0's, one JSON object a line.
    lines.iter().for_each(|line| println!("{line}"));
    ExitCode::SUCCESS
}
