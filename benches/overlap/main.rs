// SPDX-License-Identifier: MIT OR Apache-2.0
//! The part of a run's communication that its time exposes: attention alone, its exchanges alone, and both together.
//!
//! `benches/overlap/run` is the command; it starts this program for ranks that are threads (transport `local`) and,
//! under `mpirun`, for ranks that are processes (`--mpi`), and puts gloo beside them (`gloo.py`). Every rank measures
//! three things in turn, round after round:
//!
//! - *attention*: the run, over a transport that moves nothing (`tap.rs`);
//! - *exchanges*: the same messages, in the same batches, one batch after another, without any attention between;
//! - *both*: the run.
//!
//! The exposed communication is both minus attention, in each round; its median is the figure. Wall time is that of the
//! slowest rank, between two agreements. CPU time is that of all ranks and all of their threads. With fewer cores than
//! ranks no copy can overlap: it takes a core from some rank's attention. Then the CPU time added is the steadier
//! measure; it shows the cost of the transport, but not the waits between ranks.
//!
//! With `--operations RUNS` it measures instead the cost of an operation without its copy and its kernel
//! (`operations.rs`).

mod case;
#[path = "../median/mod.rs"]
mod median;
mod operations;
mod tap;
#[allow(dead_code, reason = "each program uses its part")]
#[path = "../../tests/common/through.rs"]
mod through;

use std::{process::ExitCode, thread, time::Duration};

use cpattn::transport::{Transport, local};

/// Command-line options.
#[derive(Clone, Copy)]
struct Options {
    tokens: usize,
    rounds: usize,
    /// Number of ranks as threads; for processes, `mpirun` gives the number.
    ranks: usize,
    /// Number of runs of a few tokens for measuring operations; replaces all other measurements.
    operations: Option<usize>,
}

const DEADLINE: Duration = Duration::from_secs(600);

fn number(name: &str) -> Option<usize> {
    let args: Vec<String> = std::env::args().collect();
    let at = args.iter().position(|a| a == name)?;
    match args.get(at + 1).map(|n| n.parse()) {
        Some(Ok(n @ 1..)) => Some(n),
        found => panic!("{name} is {found:?}, expected a number above 0"),
    }
}

/// Runs the requested measurement on one rank; `counts`: whether this rank reports the process's CPU time.
fn measure<T: Transport + 'static>(name: &str, end: T, counts: bool, options: Options) -> Vec<String> {
    match options.operations {
        Some(runs) => operations::all(name, end, counts, runs),
        None => case::all(name, end, counts, options),
    }
}

fn threads(options: Options) -> Vec<String> {
    let ends = local::group(options.ranks, DEADLINE).expect("a group");
    thread::scope(|scope| {
        // Rank 0 reports the process's CPU time.
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(rank, end)| scope.spawn(move || measure("local", end, rank == 0, options)))
            .collect();
        threads.into_iter().flat_map(|t| t.join().expect("a rank that ended well")).collect()
    })
}

#[cfg(feature = "mpi")]
fn processes(options: Options) -> Vec<String> {
    use cpattn::transport::mpi::Mpi;
    use mpi::traits::Communicator;
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).expect("the first initialisation");
    let world = universe.world();
    // A panic would drop `universe`, which calls MPI_Finalize: that may wait for a process that is stopped or dead.
    let end = Mpi::new(&world, DEADLINE).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        world.abort(2)
    });
    measure("mpi", end, true, options)
}

#[cfg(not(feature = "mpi"))]
fn processes(_: Options) -> Vec<String> {
    panic!("--mpi needs a build with the feature mpi")
}

fn main() -> ExitCode {
    if std::env::args().any(|a| a == "--test") {
        return ExitCode::SUCCESS;
    }
    let options = Options {
        tokens: number("--tokens").unwrap_or(16_384),
        rounds: number("--rounds").unwrap_or(3),
        ranks: number("--ranks").unwrap_or(4),
        operations: number("--operations"),
    };
    let lines = if std::env::args().any(|a| a == "--mpi") { processes(options) } else { threads(options) };
    // Lines of rank 0, one JSON object each.
    lines.iter().for_each(|line| println!("{line}"));
    ExitCode::SUCCESS
}
