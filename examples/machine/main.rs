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
use cpattn::{Dtype, Machine, Result};

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

fn measured(arguments: &Arguments, cores: usize) -> Result<Machine> {
    let ranks = arguments.ranks.map_or(cores, usize::from);
    let rounds = arguments.rounds as usize;
    let kernels = kernels::measure(&SHAPES, cores.min(ranks), rounds)?;
    let copy = kernels::copy(rounds)?;
    let (link, operation) = (links::link(rounds)?, links::operation(rounds)?);
    let mut text = format!(
        "name = {} cores, ranks as threads\nestimate = no\nranks_per_node = {ranks}\ncards_per_node = 1\ncores = {cores}\n\
         memory = {:e}\noperation = {operation:e}\ncopy = {copy:e}\n",
        cores, arguments.memory
    );
    // There is no second node: its links stand in the description as those of this one.
    for level in ["inside", "between"] {
        text += &format!("{level}.latency = {:e}\n{level}.rate = {:e}\n", link.latency, link.rate);
    }
    for k in kernels {
        text +=
            &format!("kernel {} = rate {:e}, row {:e}, key {:e}, call {:e}\n", k.shape, k.rate, k.row, k.key, k.call);
    }
    Machine::parse(&text)
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let cores = available_parallelism().map_or(1, usize::from);
    let machine = match &arguments.machine {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
            Machine::parse(&text).map_err(|e| format!("{}: {e}", file.display()))?
        }
        None => measured(arguments, cores).map_err(|e| e.to_string())?,
    };
    if !arguments.check {
        println!(
            "# Measured by `cargo run --release --example machine`. `between` repeats `inside`: one host was measured."
        );
        print!("{machine}");
        return Ok(());
    }
    println!("```text\n{machine}```\n");
    cases::check(&machine, arguments.rounds as usize).map_err(|e| e.to_string())
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
