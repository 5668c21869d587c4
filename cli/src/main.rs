// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program `cpattn`: exact context-parallel attention from a shell.
//!
//! - `run`: forward and backward on ranks that are threads or processes, compared with a float64 reference;
//! - `plan`: what each rank holds, computes and sends, and the proof of it; nothing runs;
//! - `mesh`: every mesh and layout for a batch on a machine, predicted; `machine`: measures a machine for that;
//! - `ring`: checks the links between ranks.
//!
//! `options` has each option that commands share, once; `json` is what they print for other programs. The exit code is
//! 0 when all is well, 1 when an error of `run` is over its bound, 2 when the input or the options are refused.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod json;
mod machine;
mod mesh;
mod options;
mod plan;
mod progress;
mod ring;
mod run;
mod safetensors;

use std::{io::Write as _, process::ExitCode};

use clap::{Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  cpattn run                                          real activations on 8 ranks, beside results in float64
  cpattn run --documents 4000,300,50 --sinks --world 4
  cpattn plan --documents 65536 --world 8 --proof     what 8 ranks would hold and send, and the proof of it
  cpattn mesh --documents 1000000 --kv-heads 8        which of 64 ranks' meshes is the fastest, predicted
  mpirun -n 8 cpattn run --transport mpi              ranks as processes; needs a build with --features mpi";

/// Exact context-parallel attention: run it, plan it, predict it.
#[derive(Parser, Debug)]
#[command(name = "cpattn", version, after_help = EXAMPLES)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Run(run::Arguments),
    Plan(plan::Arguments),
    Mesh(mesh::Arguments),
    Machine(machine::Arguments),
    Ring(ring::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Program::parse().command {
        Command::Run(arguments) => run::main(arguments),
        Command::Plan(arguments) => plan::main(&arguments),
        Command::Mesh(arguments) => mesh::main(&arguments),
        Command::Machine(arguments) => machine::main(&arguments),
        Command::Ring(arguments) => ring::main(&arguments),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(text) => {
            say(&text);
            ExitCode::from(2)
        }
    }
}

/// An error, on standard error in one piece: several processes may write there.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("error: {text}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// What clap checks of names, defaults and conflicts when a command is first used.
    #[test]
    fn the_commands_are_consistent() {
        Program::command().debug_assert();
    }

    #[test]
    fn combinations_that_are_refused() {
        for (line, text) in [
            ("run --suite --heads 3", "'--suite' cannot be used with"),
            ("run --suite --world 3", "'--suite' cannot be used with"),
            ("run --suite --repeat 2", "'--suite' cannot be used with"),
            ("run --suite --wire bf16", "'--suite' cannot be used with"),
            ("run --suite --transport local", "'--suite' cannot be used with"),
            ("run --input x --heads 3", "cannot be used with"),
            ("plan --input x --documents 3", "cannot be used with"),
            ("run --mesh ring --ring 2", "cannot be used with"),
            ("run --documents 3 --lengths x", "cannot be used with"),
            ("mesh --scaling docs --documents 3", "cannot be used with"),
            ("mesh --scaling docs --ranks 3", "cannot be used with"),
            ("machine --machine x", "--check"),
            ("plan --timeline x", "--machine"),
            ("run --no-such", "unexpected argument '--no-such'"),
            ("ring --documents 3", "unexpected argument '--documents'"),
        ] {
            let error = Program::try_parse_from(["cpattn"].into_iter().chain(line.split(' '))).unwrap_err().to_string();
            assert!(error.contains(text), "{line}: {error}");
        }
    }

    /// `--seed` and `--json` go with the suite; old names of the number of ranks are still understood.
    #[test]
    fn combinations_that_are_accepted() {
        for line in ["run --suite --quick --seed 3 --json", "mesh --ranks 4 --documents 5", "machine --ranks 4", "run"]
        {
            Program::try_parse_from(["cpattn"].into_iter().chain(line.split(' '))).unwrap();
        }
    }
}
