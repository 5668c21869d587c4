// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exact context-parallel attention in one command: ranks as threads, or as processes over MPI, compared with a float64
//! reference.
//!
//! `cargo run --release --example context_parallel` reads real activations and runs forward and backward on 8 ranks;
//! `mpirun -n 8 context_parallel --transport mpi` (built with `--features mpi`) does the same over 8 processes, and
//! compares the bits with those of one process. `--help` lists the options. The exit code is 0 when every error is
//! within its bound, 1 when one is not, 2 when the input or the options are refused.
//!
//! - `options`: the command line; `input`: a file or a seed; `team`: ranks as threads (start reading there);
//!   `processes`: as processes; `together`: what they do after a run; `ring`: the check of their links;
//! - `reference`: the results in f64; `check`: errors and their bounds; `report`: what is printed; `suite`: every
//!   combination of options.
#![allow(missing_docs, reason = "a program has no users of its items")]

mod check;
mod input;
mod options;
#[cfg(feature = "mpi")]
mod processes;
mod reference;
mod report;
mod ring;
mod suite;
mod team;
#[cfg(feature = "mpi")]
mod together;

use std::{io::Write as _, path::Path, process::ExitCode, sync::Arc, time::Duration};

use clap::Parser;
use cpattn::{Batch, Dtype, Element, Plan};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};

use check::{Checked, Expected};
use input::{Batched, Random};
use options::{Arguments, TransportRule};
use team::{How, Inputs, Outcome, Team};

fn main() -> ExitCode {
    let args = Arguments::parse();
    let outcome = match args.transport {
        // An option that --suite conflicts with keeps clap from asking for --suite.
        _ if args.quick && !args.suite => {
            Err("--quick is given, expected --suite too, which it takes a sample of".into())
        }
        TransportRule::Local if args.suite => suite::run(args.quick, args.seed),
        TransportRule::Local if args.check_ring => {
            args.threads().and_then(|world| ring::threads(world, Duration::from_secs_f64(args.deadline)))
        }
        TransportRule::Local => Job::new(&args).and_then(|job| job.run(&args, &mut Ranks::Threads)),
        TransportRule::Mpi => over_mpi(args),
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

/// What the ranks are.
enum Ranks {
    Threads,
    #[cfg(feature = "mpi")]
    Processes(Box<processes::Processes>),
}

#[cfg(feature = "mpi")]
fn over_mpi(mut args: Arguments) -> Result<bool, String> {
    if args.check_ring {
        return processes::check_ring(Duration::from_secs_f64(args.deadline), args.world);
    }
    let processes = processes::Processes::new(Duration::from_secs_f64(args.deadline))?;
    let job = args.started_as(processes.world()).and_then(|()| Job::new(&args));
    let job = processes.compared(job);
    let mut ranks = Ranks::Processes(Box::new(processes));
    let outcome = job.and_then(|job| job.run(&args, &mut ranks));
    match (outcome, ranks) {
        // A process that is alone with its error must not leave the others waiting for MPI's end.
        (Err(text), Ranks::Processes(processes)) => processes.give_up(&text),
        (Ok(right), Ranks::Processes(mut processes)) => match processes.meet() {
            Ok(()) => Ok(right),
            Err(text) => processes.give_up(&text),
        },
        (outcome, _) => outcome,
    }
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: Arguments) -> Result<bool, String> {
    Err("--transport is mpi, which this build does not have: build with --features mpi".into())
}

/// On standard error, and only when that is a terminal.
fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:20} [{bar:40}] {pos}/{len} {elapsed_precise}")
        .map_or_else(|_| ProgressStyle::default_bar(), |s| s.progress_chars("=> "));
    ProgressBar::new(steps as u64).with_style(style)
}

/// The default input, below the crate's folder.
const FIXTURE: &str = "tests/data/minilm_263.safetensors";

/// What is run, and the name of its input.
struct Job {
    batched: Batched,
    name: String,
    plan: Plan,
}

impl Job {
    /// Reads and plans.
    fn new(args: &Arguments) -> Result<Self, String> {
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
        Ok(Self { batched, name, plan })
    }

    /// Runs and reports. Whether every error is within its bound.
    fn run(&self, args: &Arguments, ranks: &mut Ranks) -> Result<bool, String> {
        let Self { batched, name, plan } = self;
        let dtype = plan.problem().dtype();
        if ranks.reports() {
            println!("{name}, computed in {dtype}\n");
            println!("{}", plan.explain());
        }
        match dtype {
            Dtype::F16 => run::<f16>(args, ranks, batched, plan),
            Dtype::Bf16 => run::<bf16>(args, ranks, batched, plan),
            Dtype::F32 => run::<f32>(args, ranks, batched, plan),
            Dtype::F64 => run::<f64>(args, ranks, batched, plan),
        }
    }
}

impl Ranks {
    /// Whether this process prints what comes out.
    fn reports(&self) -> bool {
        match self {
            Self::Threads => true,
            #[cfg(feature = "mpi")]
            Self::Processes(processes) => processes.rank() == 0,
        }
    }

    /// The whole results and the times, where they are reported.
    fn run<T: Element>(
        &mut self,
        args: &Arguments,
        plan: &Plan,
        inputs: &Arc<Inputs<T>>,
        how: &How,
    ) -> Result<Option<Outcome<T>>, String> {
        let deadline = Duration::from_secs_f64(args.deadline);
        match self {
            Self::Threads => Team::new(plan.mesh().world(), deadline)?.run(plan, inputs, how).map(Some),
            #[cfg(feature = "mpi")]
            Self::Processes(processes) => processes.run(plan, inputs, how),
        }
    }
}

fn run<T: Element>(args: &Arguments, ranks: &mut Ranks, batched: &Batched, plan: &Plan) -> Result<bool, String> {
    let p = plan.problem();
    let world = plan.mesh().world();
    let sinks = p.sinks().then(|| Random::new(!args.seed).sinks(p.heads()));
    let (inputs, exact) = batched.convert::<T>(sinks);
    let inputs = Arc::new(inputs);
    let repeat = args.repeat as usize;
    if !ranks.reports() {
        let how = How { repeat, record: true, tick: Arc::new(|| ()) };
        return ranks.run(args, plan, &inputs, &how).map(|_| true);
    }
    // First of all the run: other processes wait in it for this one, until their deadline.
    let stored = batched.reference_for(p, exact);
    let parts = if stored.is_some() { 0 } else { reference::reference_parts(p) };
    let bar = progress(parts + 2 * world * repeat);

    bar.set_message("forward and backward");
    let tick = {
        let bar = bar.clone();
        Arc::new(move || bar.inc(1))
    };
    let how = How { repeat, record: true, tick };
    let outcome = ranks.run(args, plan, &inputs, &how)?.ok_or("rank 0 has no results")?;

    if args.transport == TransportRule::Mpi {
        // For whoever watches the job: the other processes have sent their results.
        println!("rank 0 compares");
    }
    let computed;
    let (want, against) = match stored {
        Some((mask, reference)) => (reference, format!("the file's *_{mask} references")),
        None => {
            bar.set_message("float64 reference");
            computed = reference::reference(p, &inputs, || bar.inc(1));
            (&computed, "the float64 reference of the crate".to_owned())
        }
    };
    bar.set_message("one rank");
    let expected = Expected::new(p, &inputs, want)?;
    bar.finish_and_clear();
    report::times(plan, &outcome.laps, &outcome.planning, args.transport.ranks());
    report::pictures(&outcome.laps, args.trace.as_deref(), args.timeline.as_deref())?;

    let mut worst: Vec<Checked> = Vec::new();
    for results in &outcome.results {
        worst = suite::worse(worst, check::check(plan, &inputs, results, &expected));
    }
    report::errors(&against, &worst);
    report::summary(&worst);
    let mut equal = true;
    if args.transport == TransportRule::Mpi {
        let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
        let one = Team::new(world, Duration::from_secs(600))?.run(plan, &inputs, &how)?;
        equal = report::bits(&outcome.results, &one.results, world);
    }
    Ok(equal && worst.iter().all(Checked::passes))
}
