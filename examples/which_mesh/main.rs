// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which mesh for my cluster? Predicts every mesh and layout for a batch on a machine.
//!
//! ```text
//! cargo run --release --example which_mesh -- --machine machines/h100_8x400g.machine --ranks 64 \
//!     --documents 1000000 --heads 32 --kv-heads 8 --head-dim 128 --svg meshes.svg
//! cargo run --release --example which_mesh -- --scaling docs
//! ```
//!
//! Nothing runs on the machine: the figures come from its description. `--scaling` writes `scale.md` and its pictures.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod picture;
mod scaling;

use std::{path::PathBuf, process::ExitCode, time::Instant};

use clap::Parser;
use cpattn::{
    Batch, Dtype, Machine, Mask, Options, Plan, Problem, predict, predict::Effort, report::timeline::timeline_svg,
    schedule::Direction,
};

/// Predicts every mesh and layout for a batch on a machine, from the machine's description.
#[derive(Parser, Debug)]
#[command(name = "which_mesh")]
struct Arguments {
    /// The machine's description; see the folder machines.
    #[arg(long, value_name = "FILE", default_value = "machines/h100_8x400g.machine")]
    machine: PathBuf,
    /// Ranks that share the batch.
    #[arg(long, value_name = "N", default_value_t = 64)]
    ranks: usize,
    /// Lengths of the documents in tokens; N*M is N documents of M.
    #[arg(long, value_name = "N,N*M,…", value_delimiter = ',', conflicts_with = "lengths")]
    documents: Option<Vec<String>>,
    /// A file with a length on each line.
    #[arg(long, value_name = "FILE")]
    lengths: Option<PathBuf>,
    /// q heads.
    #[arg(long, value_name = "N", default_value_t = 32)]
    heads: usize,
    /// kv heads; default: as many as q heads.
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Head dim of q and k.
    #[arg(long, value_name = "N", default_value_t = 128)]
    head_dim: usize,
    /// Head dim of v; default: that of q and k.
    #[arg(long, value_name = "N")]
    value_dim: Option<usize>,
    /// Element type.
    #[arg(long, value_parser = dtype, value_name = "f32|f16|bf16|f64", default_value = "bf16")]
    dtype: Dtype,
    /// Every query reads all keys of its document; otherwise the mask is causal.
    #[arg(long, conflicts_with = "window")]
    full: bool,
    /// Causal, and no further back than N tokens, the query's own among them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    window: Option<u32>,
    /// Each head has a sink.
    #[arg(long)]
    sinks: bool,
    /// Lines of the table.
    #[arg(long, value_name = "N", default_value_t = 12)]
    lines: usize,
    /// Candidates of one level, and of two, that are simulated operation by operation: the best by the quick model.
    #[arg(long, value_name = "N", default_value_t = 4)]
    simulate: usize,
    /// Ranks up to which candidates are simulated.
    #[arg(long, value_name = "N", default_value_t = 64)]
    simulate_ranks: usize,
    /// Write a picture of the candidates.
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Write a timeline of the best candidate's backward; at most 64 ranks.
    #[arg(long, value_name = "FILE.svg")]
    timeline: Option<PathBuf>,
    /// Instead: write scale.md and its pictures, weak and strong scaling of three set-ups, into this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["ranks", "documents", "lengths", "heads", "kv_heads",
        "head_dim", "value_dim", "dtype", "full", "window", "sinks", "lines", "simulate", "simulate_ranks", "svg", "timeline"])]
    scaling: Option<PathBuf>,
}

/// Most ranks of a timeline.
const DRAWN: usize = 64;

fn dtype(text: &str) -> Result<Dtype, String> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64]
        .into_iter()
        .find(|d| d.name() == text)
        .ok_or_else(|| "expected f32, f16, bf16 or f64".into())
}

fn length(text: &str) -> Result<Vec<usize>, String> {
    let number =
        |n: &str| n.trim().parse::<usize>().map_err(|_| format!("{n:?} of {text:?} is not a number of tokens"));
    let (times, tokens) = text.split_once('*').map_or(Ok((1, text)), |(n, m)| number(n).map(|n| (n, m)))?;
    Ok(vec![number(tokens)?; times])
}

impl Arguments {
    fn batch(&self) -> Result<Batch, String> {
        let lengths = match (&self.documents, &self.lengths) {
            (Some(list), _) => list.iter().map(|l| length(l)).collect::<Result<Vec<_>, _>>()?.concat(),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
                let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                let of = |(i, line)| length(line).map_err(|e| format!("{}, line {}: {e}", file.display(), i + 1));
                lines.map(of).collect::<Result<Vec<_>, _>>()?.concat()
            }
            (None, None) => return Err("give --documents or --lengths".into()),
        };
        Batch::from_lengths(&lengths).map_err(|e| e.to_string())
    }

    fn problem(&self) -> Result<Problem, String> {
        let mask = match (self.full, self.window) {
            (true, _) => Mask::full(),
            (false, Some(window)) => Mask::sliding(window),
            (false, None) => Mask::causal(),
        };
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        Ok(Problem::new(self.batch()?, self.heads, kv_heads, self.head_dim, self.dtype)
            .with_value_dim(self.value_dim.unwrap_or(self.head_dim))
            .with_mask(mask)
            .with_sinks(self.sinks))
    }
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let file = &arguments.machine;
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let machine = Machine::parse(&text).map_err(|e| format!("{}: {e}", file.display()))?;
    let write = |file: &PathBuf, text: &str| std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()));
    if let Some(folder) = &arguments.scaling {
        let (text, svg) = scaling::pages(&machine, &file.display().to_string()).map_err(|e| e.to_string())?;
        write(&folder.join("scale.md"), &text)?;
        return write(&folder.join("scale.svg"), &svg);
    }
    let problem = arguments.problem()?;
    let start = Instant::now();
    let effort = Effort::new(arguments.simulate, arguments.simulate_ranks);
    let outlook = predict::meshes(&problem, arguments.ranks, &machine, effort).map_err(|e| e.to_string())?;
    print!("{}", outlook.to_markdown(arguments.lines));
    let auto = Plan::auto_on(&problem, arguments.ranks, &machine, Options::default()).map_err(|e| e.to_string())?;
    let levels = if auto.has_two_levels() { "two levels" } else { "one level" };
    println!("Plan::auto_on, which simulates nothing, takes {}, {}, {levels}.", auto.mesh(), auto.layout());
    eprintln!("{} candidates in {:.2} s", outlook.candidates.len(), start.elapsed().as_secs_f64());
    if let Some(file) = &arguments.svg {
        write(file, &picture::candidates(&outlook, arguments.lines))?;
    }
    if let (Some(file), Some(best)) = (&arguments.timeline, outlook.candidates.first()) {
        if arguments.ranks > DRAWN {
            return Err(format!("--timeline of {} ranks, expected at most {DRAWN}; leave it out", arguments.ranks));
        }
        let plan = Plan::with_options(&problem, best.mesh, best.layout, best.options(&machine));
        let run = plan.and_then(|p| p.simulate(Direction::Backward, &machine));
        write(file, &timeline_svg(&run.map_err(|e| e.to_string())?.events))?;
    }
    Ok(())
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
