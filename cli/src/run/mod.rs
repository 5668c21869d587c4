// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cpattn run`, the main job: forward and backward with ranks as threads, or as processes over MPI, compared with a
//! float64 reference.
//!
//! Without options it reads real activations and runs on 8 ranks; `mpirun -n 8 cpattn run --transport mpi` (built with
//! `--features mpi`) does the same over 8 processes, and compares the bits with those of one process.
//!
//! - `input`: a file or a seed; `team`: ranks as threads (start reading there); `processes`: as processes;
//!   `tests/mpi/together.rs`: what they do after a run;
//! - `reference`: the results in f64; `check`: errors and their bounds; `report`: what is printed; `suite`: every
//!   combination of options.

mod check;
mod input;
#[cfg(feature = "mpi")]
mod processes;
mod reference;
mod report;
mod suite;
mod team;
// It has tests of its own beside those of the transport.
#[cfg(feature = "mpi")]
#[path = "../../../tests/mpi/together.rs"]
mod together;

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::Args;
use cpattn::{Dtype, Element, Plan};
use half::{bf16, f16};

use crate::{
    json::{Json, JsonOption},
    options::{DeadlineOption, PlanOptions, ProblemOptions, TransportOption, TransportRule, WorldOption},
    progress::Progress,
};
use check::{Checked, Expected};
pub use input::Batched;
use input::Random;
#[cfg(feature = "mpi")]
pub use processes::check_ring;
use team::{How, Inputs, Outcome, Team};

/// Run forward and backward on threads or processes as ranks, and compare them with a float64 reference.
///
/// Without options: real activations of five documents, on 8 ranks (Ulysses 4 × ring 2). With --documents, --heads and
/// so on: random input, whose defaults are documents of 297, 282 and 187 tokens, 8 heads, head dim 64 and f32.
#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    problem: ProblemOptions,
    /// Seed of random inputs and sinks.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Run")]
    seed: u64,
    #[command(flatten)]
    world: WorldOption,
    #[command(flatten)]
    transport: TransportOption,
    #[command(flatten)]
    deadline: DeadlineOption,
    #[command(flatten)]
    plan: PlanOptions,
    /// Run forward and backward N times; times are those of all runs, errors those of the last.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Run")]
    repeat: u32,
    /// Write Chrome trace events (open in Perfetto).
    #[arg(long, value_name = "FILE.json", help_heading = "Output")]
    trace: Option<PathBuf>,
    /// Write a picture of the lanes of all ranks.
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    timeline: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
    /// Run every combination of options on small random problems instead.
    #[arg(long, help_heading = "Instead", conflicts_with_all = ["ProblemOptions", "WorldOption", "TransportOption",
        "DeadlineOption", "PlanOptions",
        "repeat", "trace", "timeline"])]
    suite: bool,
    /// With --suite: a fixed sample of the combinations.
    #[arg(long, help_heading = "Instead")]
    quick: bool,
}

pub fn main(arguments: Arguments) -> Result<bool, String> {
    match arguments.transport.transport {
        // clap does not ask for --suite where an option is there that --suite conflicts with.
        _ if arguments.quick && !arguments.suite => {
            Err("--quick is given, expected --suite too, which it takes a sample of".into())
        }
        TransportRule::Local if arguments.suite => suite::run(arguments.quick, arguments.seed, &arguments.json),
        TransportRule::Local => {
            let world = arguments.world.threads(arguments.plan.default_world())?;
            Job::new(&arguments, world)?.run(&arguments, &mut Ranks::Threads)
        }
        TransportRule::Mpi => over_mpi(arguments),
    }
}

/// What the ranks are.
enum Ranks {
    Threads,
    #[cfg(feature = "mpi")]
    Processes(Box<processes::Processes>),
}

#[cfg(feature = "mpi")]
fn over_mpi(arguments: Arguments) -> Result<bool, String> {
    let processes = processes::Processes::new(Duration::from_secs_f64(arguments.deadline.deadline))?;
    let world = processes.world();
    let job = arguments.world.of_processes(world).and_then(|_| Job::new(&arguments, world));
    let job = processes.compared(job);
    let mut ranks = Ranks::Processes(Box::new(processes));
    let outcome = job.and_then(|job| job.run(&arguments, &mut ranks));
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
    Err(crate::options::NO_MPI.into())
}

/// What is run, and the name of its input.
struct Job {
    batched: Batched,
    name: String,
    plan: Plan,
}

impl Job {
    /// Reads and plans.
    fn new(arguments: &Arguments, world: usize) -> Result<Self, String> {
        let Arguments { problem: options, plan, .. } = arguments;
        let random = options.has_shapes();
        let (batched, name) = if random {
            let seed = arguments.seed;
            (
                Batched::random(options.batch_to_run()?, options.shapes_to_run(), seed)?,
                format!("random input (seed {seed})"),
            )
        } else {
            Batched::read(plan.input.as_deref())?
        };
        let dtype = options.dtype.unwrap_or(batched.dtype);
        let problem = options.problem(batched.batch.clone(), batched.shapes(), dtype)?;
        let plan = plan.plan(&problem, world, !random && plan.input.is_none())?;
        Ok(Self { batched, name, plan })
    }

    /// Runs and reports. Whether every error is within its bound.
    fn run(&self, arguments: &Arguments, ranks: &mut Ranks) -> Result<bool, String> {
        let dtype = self.plan.problem().dtype();
        if ranks.reports() {
            let text = arguments.json.text();
            text.line(format_args!("{}, computed in {dtype}\n", self.name))?;
            text.line(self.plan.explain())?;
        }
        match dtype {
            Dtype::F16 => self.run_in::<f16>(arguments, ranks),
            Dtype::Bf16 => self.run_in::<bf16>(arguments, ranks),
            Dtype::F32 => self.run_in::<f32>(arguments, ranks),
            Dtype::F64 => self.run_in::<f64>(arguments, ranks),
        }
    }

    fn run_in<T: Element>(&self, arguments: &Arguments, ranks: &mut Ranks) -> Result<bool, String> {
        let (p, plan, world) = (self.plan.problem(), &self.plan, self.plan.mesh().world());
        let sinks = p.sinks().then(|| Random::new(!arguments.seed).sinks(p.heads()));
        let (inputs, exact) = self.batched.convert::<T>(sinks);
        let inputs = Arc::new(inputs);
        let repeat = arguments.repeat as usize;
        if !ranks.reports() {
            let how = How { repeat, record: true, tick: Arc::new(|| ()) };
            return ranks.run(arguments, plan, &inputs, &how).map(|_| true);
        }
        // First of all the run: other processes wait in it for this one, until their deadline.
        let stored = self.batched.reference_for(p, exact);
        let parts = if stored.is_some() { 0 } else { reference::reference_parts(p) };
        let progress = Arc::new(Progress::new(parts + 2 * world * repeat, "forward and backward"));
        let tick = {
            let progress = Arc::clone(&progress);
            Arc::new(move || progress.step())
        };
        let how = How { repeat, record: true, tick };
        let outcome = ranks.run(arguments, plan, &inputs, &how)?.ok_or("rank 0 has no results")?;

        let text = arguments.json.text();
        let over_mpi = arguments.transport.transport == TransportRule::Mpi;
        if over_mpi {
            // For whoever watches the job: the other processes have sent their results.
            text.line("rank 0 compares")?;
        }
        let computed;
        let (want, against) = match stored {
            Some((mask, reference)) => (reference, format!("the file's *_{mask} references")),
            None => {
                progress.message("float64 reference");
                computed = reference::reference(p, &inputs, || progress.step());
                (&computed, "the float64 reference of the crate".to_owned())
            }
        };
        progress.message("one rank");
        let expected = Expected::new(p, &inputs, want)?;
        progress.clear();
        report::times(text, plan, &outcome.laps, &outcome.planning, arguments.transport.transport.ranks())?;
        report::pictures(text, &outcome.laps, arguments.trace.as_deref(), arguments.timeline.as_deref())?;

        let mut worst: Vec<Checked> = Vec::new();
        for results in &outcome.results {
            worst = suite::worse(worst, check::check(plan, &inputs, results, &expected));
        }
        report::errors(text, &against, &worst)?;
        report::summary(text, &worst)?;
        let mut equal = None;
        if over_mpi {
            let how = How { repeat: 1, record: false, tick: Arc::new(|| ()) };
            let one = Team::new(world, Duration::from_secs(600))?.run(plan, &inputs, &how)?;
            equal = Some(report::bits(text, &outcome.results, &one.results, world)?);
        }
        arguments.json.write(|| {
            let mut fields = vec![
                ("input", Json::text(&self.name)),
                ("dtype", Json::text(p.dtype())),
                ("mesh", crate::plan::mesh(plan.mesh())),
                ("layout", Json::text(plan.layout())),
                ("reference", Json::text(&against)),
                ("errors", report::errors_as_json(&worst)),
                ("times", report::times_as_json(&outcome.laps)),
            ];
            fields.extend(equal.map(|equal| ("bit_equal_to_threads", Json::Bool(equal))));
            Json::Object(fields)
        })?;
        Ok(equal != Some(false) && worst.iter().all(Checked::passes))
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
        arguments: &Arguments,
        plan: &Plan,
        inputs: &Arc<Inputs<T>>,
        how: &How,
    ) -> Result<Option<Outcome<T>>, String> {
        let deadline = Duration::from_secs_f64(arguments.deadline.deadline);
        match self {
            Self::Threads => Team::new(plan.mesh().world(), deadline)?.run(plan, inputs, how).map(Some),
            #[cfg(feature = "mpi")]
            Self::Processes(processes) => processes.run(plan, inputs, how),
        }
    }
}
