// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cpattn mesh`: which mesh for my cluster? Predicts every mesh and layout for a batch on a machine.
//!
//! ```text
//! cpattn mesh --machine machines/h100_8x400g.machine --world 64 --documents 1000000 --heads 32 --kv-heads 8 \
//!     --head-dim 128 --svg meshes.svg
//! cpattn mesh --scaling docs
//! ```
//!
//! Nothing runs on the machine: the figures come from its description. `--scaling` writes `scale.md` and its pictures.

mod picture;
mod scaling;

use std::{path::PathBuf, time::Instant};

use clap::Args;
use cpattn::{
    Dtype, Machine, Plan, Problem, predict,
    predict::{Effort, Model, Outlook},
    report::timeline::timeline_svg,
    schedule::Direction,
};

use crate::{
    json::{Json, JsonOption},
    options::{ProblemOptions, WorldOption, read_machine},
};

/// Predict every mesh and layout for a batch on a machine, from the machine's description; nothing runs.
///
/// Needs --documents or --lengths. Defaults of shapes: 32 heads, head dim 128, bf16.
#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    problem: ProblemOptions,
    #[command(flatten)]
    world: WorldOption,
    /// The machine's description; see the folder machines. Default: machines/h100_8x400g.machine, which is in the
    /// program.
    #[arg(long, value_name = "FILE", help_heading = "Prediction")]
    machine: Option<PathBuf>,
    /// Lines of the table.
    #[arg(long, value_name = "N", default_value_t = 12, help_heading = "Prediction")]
    lines: usize,
    /// Candidates of one level, and of two, that are simulated operation by operation: the best by the quick model.
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Prediction")]
    simulate: usize,
    /// Ranks up to which candidates are simulated.
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Prediction")]
    simulate_ranks: usize,
    /// Write a picture of the candidates.
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Write a timeline of the best candidate's backward; at most 64 ranks.
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    timeline: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
    /// Write scale.md and its pictures, weak and strong scaling of three set-ups, into this folder.
    #[arg(long, value_name = "FOLDER", help_heading = "Instead", conflicts_with_all = ["ProblemOptions", "WorldOption", "JsonOption",
        "lines", "simulate", "simulate_ranks", "svg", "timeline"])]
    scaling: Option<PathBuf>,
}

/// Ranks unless they are given.
const WORLD: usize = 64;
/// Most ranks of a timeline.
const DRAWN: usize = 64;
/// The default machine, and the name of its description.
const MACHINE: &str = include_str!("../../../machines/h100_8x400g.machine");
const MACHINE_NAME: &str = "machines/h100_8x400g.machine";

impl Arguments {
    fn problem(&self) -> Result<Problem, String> {
        let batch = self.problem.batch()?.ok_or("give --documents or --lengths")?;
        self.problem.problem(batch, self.problem.shapes(32, 128), self.problem.dtype.unwrap_or(Dtype::Bf16))
    }

    fn machine(&self) -> Result<(Machine, String), String> {
        match &self.machine {
            Some(file) => Ok((read_machine(file)?, file.display().to_string())),
            None => Ok((Machine::parse(MACHINE).map_err(|e| format!("{MACHINE_NAME}: {e}"))?, MACHINE_NAME.to_owned())),
        }
    }
}

pub fn main(arguments: &Arguments) -> Result<bool, String> {
    let (machine, file) = arguments.machine()?;
    let world = arguments.world.world.unwrap_or(WORLD);
    let write = |file: &PathBuf, text: &str| std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()));
    if let Some(folder) = &arguments.scaling {
        let (text, svg) = scaling::pages(&machine, &file).map_err(|e| e.to_string())?;
        write(&folder.join("scale.md"), &text)?;
        write(&folder.join("scale.svg"), &svg)?;
        return Ok(true);
    }
    if arguments.timeline.is_some() && world > DRAWN {
        return Err(format!("--timeline of {world} ranks, expected at most {DRAWN}; leave it out"));
    }
    let problem = arguments.problem()?;
    let start = Instant::now();
    let effort = Effort::new(arguments.simulate, arguments.simulate_ranks);
    let outlook = predict::meshes(&problem, world, &machine, effort).map_err(|e| e.to_string())?;
    let auto = Plan::builder(&problem).world(world).build_on(&machine).map_err(|e| e.to_string())?;
    let levels = if auto.has_two_levels() { "two levels" } else { "one level" };
    let table = outlook.to_markdown(arguments.lines);
    arguments.json.text().line(format_args!(
        "{table}build_on, which simulates nothing, takes {}, {}, {levels}.",
        auto.mesh(),
        auto.layout()
    ))?;
    arguments.json.write(|| as_json(&outlook))?;
    eprintln!("{} candidates in {:.2} s", outlook.candidates.len(), start.elapsed().as_secs_f64());
    if let Some(file) = &arguments.svg {
        write(file, &picture::candidates(&outlook, arguments.lines))?;
    }
    if let (Some(file), Some(best)) = (&arguments.timeline, outlook.candidates.first()) {
        let plan = Plan::builder(&problem).mesh(best.mesh).layout(best.layout).options(best.options(&machine)).build();
        let run = plan.and_then(|p| p.simulate(Direction::Backward, &machine));
        write(file, &timeline_svg(&run.map_err(|e| e.to_string())?.events))?;
    }
    Ok(true)
}

fn as_json(outlook: &Outlook) -> Json {
    let candidate = |c: &predict::MeshTime| {
        Json::Object(vec![
            ("mesh", crate::plan::mesh(c.mesh)),
            ("layout", Json::text(c.layout)),
            ("levels", Json::count(c.levels)),
            ("forward_seconds", Json::Number(c.forward.seconds)),
            ("backward_seconds", Json::Number(c.backward.seconds)),
            ("exposed_seconds", Json::Number(c.exposed())),
            ("memory_bytes", Json::Integer(c.memory.into())),
            ("fits", Json::Bool(outlook.fits(c))),
            ("simulated", Json::Bool(c.model == Model::Simulation)),
        ])
    };
    Json::Object(vec![
        ("machine", Json::text(&outlook.machine)),
        ("estimate", Json::Bool(outlook.estimate)),
        ("world", Json::count(outlook.world)),
        ("ideal_seconds", Json::Number(outlook.ideal)),
        ("candidates", Json::list(outlook.candidates.iter().map(candidate))),
    ])
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn refusal(more: &[&str]) -> String {
        main(&Line::parse_from(["mesh"].iter().chain(more)).arguments).unwrap_err()
    }

    #[test]
    fn a_mesh_without_documents_is_refused() {
        assert_eq!(refusal(&[]), "give --documents or --lengths");
        assert!(refusal(&["--documents", "5,,6"]).starts_with("\"\", expected a number of tokens"));
        assert!(refusal(&["--documents", "5", "--world", "0"]).contains('0'));
    }

    #[test]
    fn a_timeline_of_many_ranks_is_refused_before_anything_is_rated() {
        let text = refusal(&["--documents", "1000000", "--ranks", "65", "--timeline", "unwritten.svg"]);
        assert_eq!(text, "--timeline of 65 ranks, expected at most 64; leave it out");
    }
}
