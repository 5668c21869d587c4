// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the machine that it runs on, with ranks as threads, and writes its description; with `--check` it also runs
//! cases, predicts each from that description, and prints both.
//!
//! ```text
//! cargo run --release --example machine -- --ranks 4 > mine.machine
//! cargo run --release --example machine -- --ranks 4 --check
//! ```
//!
//! Every figure is the best of many short measurements, spread over the time that the program runs: other programs
//! only ever make a measurement slower.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod cases;
mod fit;
mod kernels;
mod links;

use std::{path::PathBuf, process::ExitCode, thread::available_parallelism};

use clap::Parser;
use cpattn::{Dtype, Machine, Result, machine::LinkRate};

/// Measures this machine, with ranks as threads, and writes its description.
#[derive(Parser, Debug)]
#[command(name = "machine")]
struct Arguments {
    /// Ranks of a node; default: the cores of this machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: Option<u16>,
    /// Rounds of measurements; the best counts.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Bytes of memory of one rank, which is not measured.
    #[arg(long, value_name = "BYTES", default_value_t = 4e9)]
    memory: f64,
    /// Take this description instead of measuring one (with --check).
    #[arg(long, value_name = "FILE", requires = "check")]
    machine: Option<PathBuf>,
    /// Run at least 24 cases on up to 4 ranks, predict each, print a table of both as Markdown.
    #[arg(long)]
    check: bool,
}

/// Element types and head dims that are measured.
const SHAPES: [(Dtype, usize); 3] = [(Dtype::F32, 64), (Dtype::F32, 128), (Dtype::Bf16, 64)];

/// The description, measured in rounds; `between_rounds` is called after each of them.
fn measured(arguments: &Arguments, cores: usize, mut between_rounds: impl FnMut() -> Result<()>) -> Result<Machine> {
    let ranks = arguments.ranks.map_or(cores, usize::from);
    let rounds = arguments.rounds as usize;
    let mut kernels = kernels::Kernels::new(&SHAPES, cores.min(ranks));
    let (mut copy, mut operation) = (0.0f64, f64::INFINITY);
    let mut link = LinkRate { latency: f64::INFINITY, rate: 0.0 };
    for _ in 0..rounds {
        kernels.round()?;
        copy = copy.max(kernels::copy(40)?);
        let found = links::link(2)?;
        link = LinkRate { latency: link.latency.min(found.latency), rate: link.rate.max(found.rate) };
        operation = operation.min(links::operation(40)?);
        between_rounds()?;
    }
    // A description is made from its text.
    let mut text = format!(
        "name = {cores} cores, ranks as threads\nestimate = no\nranks_per_node = {ranks}\ncards_per_node = 1\ncores = {cores}\n\
         memory = {:e}\noperation = {operation:e}\ncopy = {copy:e}\n",
        arguments.memory
    );
    // There is no second node: its links stand in the description as those of this one.
    for level in ["inside", "between"] {
        text += &format!("{level}.latency = {:e}\n{level}.rate = {:e}\n", link.latency, link.rate);
    }
    for k in kernels.rates() {
        text +=
            &format!("kernel {} = rate {:e}, row {:e}, key {:e}, call {:e}\n", k.shape, k.rate, k.row, k.key, k.call);
    }
    Machine::parse(&text)
}

fn run(arguments: &Arguments) -> Result<(), String> {
    // Where the process is bound to some of the machine's cores (`taskset`), those count.
    let cores = available_parallelism().map_or(1, usize::from);
    let text = |e: cpattn::Error| e.to_string();
    if !arguments.check {
        let machine = measured(arguments, cores, || Ok(())).map_err(text)?;
        println!(
            "# Measured by `cargo run --release --example machine`. `between` repeats `inside`: one host was measured."
        );
        print!("{machine}");
        return Ok(());
    }
    let mut cases = cases::Cases::new().map_err(text)?;
    let machine = match &arguments.machine {
        Some(file) => {
            let description = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
            let machine = Machine::parse(&description).map_err(|e| format!("{}: {e}", file.display()))?;
            (0..arguments.rounds).try_for_each(|_| cases.round()).map_err(text)?;
            machine
        }
        None => measured(arguments, cores, || cases.round()).map_err(text)?,
    };
    println!("```text\n{machine}```\n");
    cases.print(&machine).map_err(text)
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
