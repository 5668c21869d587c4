// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cpattn machine`: measures the machine that it runs on, and writes its description; with `--check` it also runs
//! cases, predicts each from that description, and prints both.
//!
//! ```text
//! cpattn machine --world 4 > mine.machine
//! cpattn machine --world 4 --check
//! mpirun -n 4 cpattn machine --transport mpi > mine.machine      built with --features mpi
//! ```
//!
//! Ranks are threads, or processes over MPI on one host or on several. Hosts that `examples/hosts` makes on one machine
//! share its cores and its clock (`--one-machine`). `benches/predictions/run` starts all of these.
//!
//! Every figure is the best of many short measurements, spread over the time that the program runs: other programs
//! only ever make a measurement slower.

mod cases;
mod check;
mod fit;
mod kernels;
mod links;
#[cfg(feature = "mpi")]
mod processes;

use std::{path::PathBuf, sync::Barrier, thread::available_parallelism};

use clap::Args;
use cpattn::{
    Dtype, Machine, Rank, Result,
    machine::{KernelRate, LinkRate},
    schedule::Direction,
    transport::local,
};

use crate::{
    json::{Json, JsonOption},
    options::{TransportOption, TransportRule, WorldOption, read_machine},
};
use {cases::Case, check::Cases, links::DEADLINE};

/// Most ranks that are threads.
const MOST_RANKS: usize = 64;

/// Measure this machine and write its description, for `cpattn mesh --machine`.
#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    world: WorldOption,
    #[command(flatten)]
    transport: TransportOption,
    /// Processes: all hosts were made on one machine, and share its cores.
    #[arg(long, help_heading = "Measurement")]
    one_machine: bool,
    /// Processes: tokens of a case.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(512..),
        help_heading = "Measurement")]
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "of processes"))]
    tokens: u32,
    /// Rounds of measurements; the best counts.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Measurement")]
    rounds: u32,
    /// Bytes of memory of one rank, which is not measured.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value_t = 4e9, help_heading = "Measurement")]
    memory: f64,
    /// Take this description instead of measuring one (with --check).
    #[arg(long, value_name = "FILE", requires = "check", help_heading = "Measurement")]
    machine: Option<PathBuf>,
    /// Run at least 14 cases, predict each, print a table of both as Markdown.
    #[arg(long, help_heading = "Measurement")]
    check: bool,
    #[command(flatten)]
    json: JsonOption,
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
    let ranks = arguments.world.world.unwrap_or(cores);
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

/// The description of `--machine`.
fn description(arguments: &Arguments) -> std::result::Result<Option<Machine>, String> {
    arguments.machine.as_deref().map(read_machine).transpose()
}

/// Prints a description, or one with the cases that were compared with it.
fn print(arguments: &Arguments, machine: &Machine, cases: Option<&Cases>) -> std::result::Result<(), String> {
    let text = |e: cpattn::Error| e.to_string();
    let page = match cases {
        Some(cases) => format!("```text\n{machine}```\n\n{}", cases.to_markdown(machine).map_err(text)?),
        None => {
            format!(
                "# Measured by `cargo run --release -- machine`. With one node, `between` repeats `inside`.\n{machine}"
            )
        }
    };
    arguments.json.text().line(page.strip_suffix('\n').unwrap_or(&page))?;
    let lines = cases.map_or(Ok(Vec::new()), |cases| cases.as_json(machine)).map_err(text)?;
    arguments.json.write(|| Json::Object(vec![("machine", Json::text(machine)), ("cases", Json::List(lines))]))
}

fn over_threads(arguments: &Arguments) -> std::result::Result<(), String> {
    let text = |e: cpattn::Error| e.to_string();
    let list = if arguments.check { cases::of_threads().map_err(text)? } else { Vec::new() };
    let mut cases = Cases::new(list);
    let machine = match description(arguments)? {
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
fn over_processes(_: &Arguments) -> std::result::Result<(), String> {
    Err(crate::options::NO_MPI.into())
}

pub fn main(arguments: &Arguments) -> std::result::Result<bool, String> {
    match (arguments.transport.transport, arguments.world.world) {
        (TransportRule::Local, _) if arguments.one_machine => {
            Err("--one-machine is given, expected with --transport mpi".into())
        }
        (TransportRule::Local, Some(world)) if !(1..=MOST_RANKS).contains(&world) => {
            Err(format!("--world is {world}, expected 1 to {MOST_RANKS}: each rank is a thread here"))
        }
        (TransportRule::Local, _) => over_threads(arguments),
        (TransportRule::Mpi, Some(_)) => {
            Err("--world is given, expected without --transport mpi: mpirun says how many".into())
        }
        (TransportRule::Mpi, None) => over_processes(arguments),
    }
    .map(|()| true)
}
