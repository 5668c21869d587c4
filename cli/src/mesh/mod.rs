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

use std::{
    io::{ErrorKind, Write},
    path::PathBuf,
    process::ExitCode,
    time::Instant,
};

use clap::Parser;
use cpattn::{
    Batch, Dtype, Machine, Mask, Plan, Problem, predict, predict::Effort, report::timeline::timeline_svg,
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
    /// A file with a length on each line, or N*M.
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
/// Most documents of one N*M, so that a typing error does not ask for all memory.
const MOST_DOCUMENTS: usize = 1 << 26;

fn dtype(text: &str) -> Result<Dtype, String> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64]
        .into_iter()
        .find(|d| d.name() == text)
        .ok_or_else(|| "expected f32, f16, bf16 or f64".into())
}

fn length(text: &str) -> Result<Vec<usize>, String> {
    let number =
        |n: &str| n.trim().parse::<usize>().map_err(|_| format!("{text:?}, expected a number of tokens, or N*M"));
    let (times, tokens) = text.split_once('*').map_or(Ok((1, text)), |(n, m)| number(n).map(|n| (n, m)))?;
    if times > MOST_DOCUMENTS {
        return Err(format!("{text:?} is {times} documents, expected at most {MOST_DOCUMENTS}"));
    }
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
                let lengths = lines.map(of).collect::<Result<Vec<_>, _>>()?.concat();
                if lengths.is_empty() {
                    return Err(format!("{}: no length, expected one on each line", file.display()));
                }
                lengths
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
    if arguments.timeline.is_some() && arguments.ranks > DRAWN {
        return Err(format!("--timeline of {} ranks, expected at most {DRAWN}; leave it out", arguments.ranks));
    }
    let problem = arguments.problem()?;
    let start = Instant::now();
    let effort = Effort::new(arguments.simulate, arguments.simulate_ranks);
    let outlook = predict::meshes(&problem, arguments.ranks, &machine, effort).map_err(|e| e.to_string())?;
    let auto = Plan::builder(&problem).world(arguments.ranks).build_on(&machine).map_err(|e| e.to_string())?;
    let levels = if auto.has_two_levels() { "two levels" } else { "one level" };
    let table = outlook.to_markdown(arguments.lines);
    let taken = format!("build_on, which simulates nothing, takes {}, {}, {levels}.", auto.mesh(), auto.layout());
    if let Err(error) = writeln!(std::io::stdout(), "{table}{taken}") {
        // A reader such as `head` may close the pipe when it has enough.
        if error.kind() != ErrorKind::BrokenPipe {
            return Err(format!("standard output: {error}"));
        }
    }
    eprintln!("{} candidates in {:.2} s", outlook.candidates.len(), start.elapsed().as_secs_f64());
    if let Some(file) = &arguments.svg {
        write(file, &picture::candidates(&outlook, arguments.lines))?;
    }
    if let (Some(file), Some(best)) = (&arguments.timeline, outlook.candidates.first()) {
        let plan = Plan::builder(&problem).mesh(best.mesh).layout(best.layout).options(best.options(&machine)).build();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(more: &[&str]) -> String {
        let machine = concat!(env!("CARGO_MANIFEST_DIR"), "/machines/h100_8x400g.machine");
        run(&Arguments::parse_from(["which_mesh", "--machine", machine].iter().chain(more))).unwrap_err()
    }

    #[test]
    fn lengths_are_numbers_or_products() {
        assert_eq!(length("7"), Ok(vec![7]));
        assert_eq!(length(" 3 * 50 "), Ok(vec![50; 3]));
        for (documents, said) in [
            ("5,,6", "\"\", expected a number of tokens, or N*M"),
            ("2*x", "\"2*x\", expected a number of tokens, or N*M"),
            ("99999999999999*1", "\"99999999999999*1\" is 99999999999999 documents, expected at most 67108864"),
            ("3000000000", "lengths[0] is 3000000000, expected a total of at most"),
        ] {
            let text = refusal(&["--documents", documents]);
            assert!(text.starts_with(said), "{text}");
        }
    }

    #[test]
    fn files_of_lengths_that_are_refused() {
        let file = std::env::temp_dir().join(format!("which_mesh_lengths_{}", std::process::id()));
        let name = file.to_str().unwrap();
        for (text, said) in [
            ("\n \n", ": no length, expected one on each line"),
            ("10\n\n5 7\n", ", line 3: \"5 7\", expected a number of tokens, or N*M"),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(refusal(&["--lengths", name]), format!("{name}{said}"));
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn a_timeline_of_many_ranks_is_refused_before_anything_is_rated() {
        let text = refusal(&["--documents", "1000000", "--ranks", "65", "--timeline", "unwritten.svg"]);
        assert_eq!(text, "--timeline of 65 ranks, expected at most 64; leave it out");
    }
}
