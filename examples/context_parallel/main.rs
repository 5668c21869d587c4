// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exact context-parallel attention from one command: threads as ranks, against a float64 reference.
//!
//! `cargo run --release --example context_parallel` reads real activations and runs forward and backward on 8 ranks;
//! `--help` lists the options. The exit code is 0 when every error is within its bound, 1 when one is not, 2 when the
//! input or the options are refused.
//!
//! - `options`: the command line; `input`: a file or a seed; `team`: ranks as threads (start reading there);
//! - `check`: errors and their bounds; `report`: what is printed; `suite`: every combination of options.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod check;
mod input;
mod options;
mod report;
mod suite;
mod team;

use std::{path::Path, process::ExitCode, sync::Arc};

use clap::Parser;
use cpattn::{Batch, Dtype, Element, Plan};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};

use check::Checked;
use input::{Batched, Random};
use options::Arguments;
use team::{How, Team};

fn main() -> ExitCode {
    let args = Arguments::parse();
    let outcome = if args.suite { suite::run(args.quick, args.seed) } else { job(&args) };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::from(2)
        }
    }
}

/// On standard error, and only when that is a terminal.
fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:20} [{bar:40}] {pos}/{len} {elapsed_precise}")
        .map_or_else(|_| ProgressStyle::default_bar(), |s| s.progress_chars("=> "));
    ProgressBar::new(steps as u64).with_style(style)
}

/// The default input, below the crate's folder.
const FIXTURE: &str = "tests/data/minilm_263.safetensors";

/// Reads, plans, runs, reports. Whether every error is within its bound.
fn job(args: &Arguments) -> Result<bool, String> {
    let (batched, name) = if args.is_random() {
        let lengths = args.documents.as_deref().unwrap_or(&[297, 282, 187]);
        let batch = Batch::from_lengths(lengths).map_err(|e| e.to_string())?;
        let (heads, head_dim) = (args.heads.unwrap_or(8), args.head_dim.unwrap_or(64));
        let (kv_heads, value_dim) = (args.kv_heads.unwrap_or(heads), args.value_dim.unwrap_or(head_dim));
        let name = format!("random input (seed {})", args.seed);
        (Batched::random(batch, heads, kv_heads, head_dim, value_dim, args.seed)?, name)
    } else {
        let path = args.input.clone().unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(FIXTURE));
        let name = args.input.as_ref().map_or(FIXTURE.to_owned(), |p| p.display().to_string());
        (Batched::read(&path)?, name)
    };
    let dtype = args.dtype.unwrap_or(batched.dtype);
    let b = &batched;
    let problem = args.problem(b.batch.clone(), b.heads, b.kv_heads, b.head_dim, b.value_dim, dtype)?;
    let plan = args.plan(&problem, !args.is_random() && args.input.is_none())?;
    println!("{name}, computed in {dtype}\n");
    println!("{}", plan.explain());
    match dtype {
        Dtype::F16 => run::<f16>(args, &batched, &plan),
        Dtype::Bf16 => run::<bf16>(args, &batched, &plan),
        Dtype::F32 => run::<f32>(args, &batched, &plan),
        Dtype::F64 => run::<f64>(args, &batched, &plan),
    }
}

fn run<T: Element>(args: &Arguments, batched: &Batched, plan: &Plan) -> Result<bool, String> {
    let p = plan.problem();
    let world = plan.mesh().world();
    let sinks = p.has_sinks().then(|| Random::new(!args.seed).sinks(p.heads()));
    let (inputs, exact) = batched.convert::<T>(sinks);
    let inputs = Arc::new(inputs);
    let repeat = args.repeat as usize;
    let stored = batched.reference_for(p, exact);
    let parts = if stored.is_some() { 0 } else { check::reference_parts(p) };
    let bar = progress(parts + 2 * world * repeat);

    let computed;
    let (want, against) = match stored {
        Some((mask, reference)) => (reference, format!("the file's *_{mask} references")),
        None => {
            bar.set_message("float64 reference");
            computed = check::reference(p, &inputs, || bar.inc(1));
            (&computed, "the float64 reference of the crate".to_owned())
        }
    };

    bar.set_message("forward and backward");
    let tick = {
        let bar = bar.clone();
        Arc::new(move || bar.inc(1))
    };
    let outcome = Team::new(world)?.run(plan, &inputs, &How { repeat, record: true, tick })?;
    bar.finish_and_clear();
    report::times(plan, &outcome.laps, &outcome.planning);
    report::pictures(&outcome.laps, args.trace.as_deref(), args.timeline.as_deref())?;

    let mut worst: Vec<Checked> = Vec::new();
    for results in &outcome.results {
        worst = suite::worse(worst, check::check(plan, &inputs, results, want));
    }
    report::errors(&against, &worst);
    report::summary(&worst);
    Ok(worst.iter().all(Checked::passes))
}
