// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the machine that it runs on, and writes its description; with `--check` it also runs cases, predicts each
//! from that description, and prints both.
//!
//! ```text
//! cargo run --release --example machine -- --ranks 4 > mine.machine
//! cargo run --release --example machine -- --ranks 4 --check
//! mpirun -n 4 target/release/examples/machine --transport mpi > mine.machine      built with --features mpi
//! ```
//!
//! Ranks are threads, or processes over MPI on one host or on several. Hosts that `examples/hosts` makes on one machine
//! share its cores and its clock (`--one-machine`). `benches/predictions/run` starts all of these.
//!
//! Every figure is the best of many short measurements, spread over the time that the program runs: other programs
//! only ever make a measurement slower.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod cases;
mod check;
mod fit;
mod kernels;
mod links;
#[cfg(feature = "mpi")]
mod processes;

use std::{path::PathBuf, process::ExitCode, sync::Barrier, thread::available_parallelism};

use clap::{Parser, ValueEnum};
use cpattn::{
    Dtype, Machine, Rank, Result,
    machine::{KernelRate, LinkRate},
    schedule::Direction,
    transport::local,
};

use crate::{cases::Case, check::Cases, links::DEADLINE};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RanksAre {
    /// Threads of this process.
    Local,
    /// The processes that mpirun has started; needs a build with the feature mpi.
    Mpi,
}

/// Measures this machine and writes its description.
#[derive(Parser, Debug)]
#[command(name = "machine")]
struct Arguments {
    /// What ranks are.
    #[arg(long, value_enum, default_value = "local")]
    transport: RanksAre,
    /// Threads: ranks of a node; default: the cores of this machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: Option<u16>,
    /// Processes: all hosts were made on one machine, and share its cores.
    #[arg(long)]
    one_machine: bool,
    /// Processes: tokens of a case.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(512..))]
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "of processes"))]
    tokens: u32,
    /// Rounds of measurements; the best counts.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Bytes of memory of one rank, which is not measured.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = 4e9)]
    memory: f64,
    /// Take this description instead of measuring one (with --check).
    #[arg(long, value_name = "FILE", requires = "check")]
    machine: Option<PathBuf>,
    /// Run at least 14 cases, predict each, print a table of both as Markdown.
    #[arg(long)]
    check: bool,
    /// Write the table as JSON too (with --check).
    #[arg(long, value_name = "FILE", requires = "check")]
    json: Option<PathBuf>,
}

/// Element types and head dims that are measured.
const SHAPES: [(Dtype, usize); 3] = [(Dtype::F32, 64), (Dtype::F32, 128), (Dtype::Bf16, 64)];

fn bytes(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|n: &f64| n.is_finite() && *n > 0.0);
    number.ok_or_else(|| "expected a number above 0, such as 80e9".into())
}

/// What one rank finds of the machine beside its links.
struct Host {
    kernels: kernels::Kernels,
    copy: f64,
    operation: f64,
}

impl Host {
    fn new(shapes: &[(Dtype, usize)], threads: usize) -> Self {
        Self { kernels: kernels::Kernels::new(shapes, threads), copy: 0.0, operation: f64::INFINITY }
    }

    fn round(&mut self) -> Result<()> {
        self.kernels.round()?;
        self.copy = self.copy.max(kernels::copy(40)?);
        self.operation = self.operation.min(links::operation(40)?);
        Ok(())
    }

    /// The lines of the description that it knows.
    fn lines(&self) -> String {
        let mut text = format!("operation = {:e}\ncopy = {:e}\n", self.operation, self.copy);
        for k in self.kernels.rates() {
            let KernelRate { shape, rate, row, key, edge, call } = k;
            text +=
                &format!("kernel {shape} = rate {rate:e}, row {row:e}, key {key:e}, edge {edge:e}, call {call:e}\n");
        }
        text
    }
}

/// The description of ranks that are threads, measured in rounds; `between_rounds` is called after each of them.
fn measured(arguments: &Arguments, cores: usize, mut between_rounds: impl FnMut() -> Result<()>) -> Result<Machine> {
    let ranks = arguments.ranks.map_or(cores, usize::from);
    let mut host = Host::new(&SHAPES, cores.min(ranks));
    let mut link = LinkRate { latency: f64::INFINITY, rate: 0.0 };
    for _ in 0..arguments.rounds {
        host.round()?;
        let found = links::of_threads(2)?;
        link = LinkRate { latency: link.latency.min(found.latency), rate: link.rate.max(found.rate) };
        between_rounds()?;
    }
    // A description is made from its text.
    let mut text = format!(
        "name = {cores} core{}, ranks as threads\nestimate = no\nranks_per_node = {ranks}\ncards_per_node = 1\ncores = {cores}\n\
         memory = {:e}\n",
        if cores == 1 { "" } else { "s" },
        arguments.memory
    );
    // There is no second node: its links stand in the description as those of this one.
    for level in ["inside", "between"] {
        text += &format!("{level}.latency = {:e}\n{level}.rate = {:e}\n", link.latency, link.rate);
    }
    Machine::parse(&(text + &host.lines()))
}

/// The makespan of a case on ranks that are threads.
fn of_threads(case: &Case, direction: Direction) -> Result<f64> {
    let world = case.plan.mesh().world();
    let barrier = Barrier::new(world);
    let ranks = local::run(world, DEADLINE, |end| {
        let meet = || {
            barrier.wait();
            Ok(())
        };
        cases::laps(&mut Rank::new(end), &case.plan, direction, 4, meet)
    })?;
    Ok(cases::makespan(&ranks))
}

/// The cores of this machine. Where the process is bound to some of them (`taskset`), those count.
fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// The description that was given.
fn given(arguments: &Arguments) -> Result<Option<Machine>, String> {
    let read = |file: &PathBuf| {
        let description = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
        Machine::parse(&description).map_err(|e| format!("{}: {e}", file.display()))
    };
    arguments.machine.as_ref().map(read).transpose()
}

/// Prints a description, or one with the cases that were held against it.
fn print(arguments: &Arguments, machine: &Machine, cases: Option<&Cases>) -> Result<(), String> {
    let text = |e: cpattn::Error| e.to_string();
    let Some(cases) = cases else {
        println!("# Measured by `cargo run --release --example machine`. With one node, `between` repeats `inside`.");
        print!("{machine}");
        return Ok(());
    };
    println!("```text\n{machine}```\n\n{}", cases.to_markdown(machine).map_err(text)?);
    let Some(file) = &arguments.json else { return Ok(()) };
    std::fs::write(file, cases.to_json(machine).map_err(text)?).map_err(|e| format!("{}: {e}", file.display()))
}

fn over_threads(arguments: &Arguments) -> Result<(), String> {
    let text = |e: cpattn::Error| e.to_string();
    let list = if arguments.check { cases::of_threads().map_err(text)? } else { Vec::new() };
    let mut cases = Cases::new(list);
    let machine = match given(arguments)? {
        Some(machine) => {
            (0..arguments.rounds).try_for_each(|_| cases.round(of_threads)).map_err(text)?;
            machine
        }
        None => measured(arguments, cores(), || cases.round(of_threads)).map_err(text)?,
    };
    print(arguments, &machine, arguments.check.then_some(&cases))
}

#[cfg(feature = "mpi")]
use processes::over_processes;

#[cfg(not(feature = "mpi"))]
fn over_processes(_: &Arguments) -> Result<(), String> {
    Err("--transport is mpi, which this build does not have: build with --features mpi".into())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.transport {
        RanksAre::Local if arguments.one_machine => Err("--one-machine is given, expected with --transport mpi".into()),
        RanksAre::Local => over_threads(&arguments),
        RanksAre::Mpi if arguments.ranks.is_some() => {
            Err("--ranks is given, expected without --transport mpi: mpirun says how many".into())
        }
        RanksAre::Mpi => over_processes(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
