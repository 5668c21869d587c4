// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cpattn plan`: what each rank would hold, compute and send. Nothing runs, so that a plan of many tokens takes a
//! moment; the options are those of `cpattn run`.
//!
//! Without a choice of pages it prints the plan in words. Pages are printed in the order of the options below.

use std::path::PathBuf;

use clap::Args;
use cpattn::{
    Mesh, Plan,
    report::timeline::timeline_svg,
    schedule::{Direction, Schedule, verify::Report},
};

use crate::{
    json::{Json, JsonOption, Text},
    options::{PlanOptions, ProblemOptions, WorldOption, read_machine},
    run::Batched,
};

/// Both, in the order in which a step of training runs them.
const DIRECTIONS: [(&str, Direction); 2] = [("forward", Direction::Forward), ("backward", Direction::Backward)];

/// Explain how a batch is spread over ranks: who holds, computes and sends what; nothing runs.
///
/// Takes the options of `cpattn run`, with the same defaults, and prints the plan in words unless other pages are
/// chosen.
#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    problem: ProblemOptions,
    #[command(flatten)]
    world: WorldOption,
    #[command(flatten)]
    plan: PlanOptions,
    /// Print the plan in words: the mesh and why, the layout, and each step. The default.
    #[arg(long, help_heading = "Pages")]
    explain: bool,
    /// Print what each rank sends, receives, computes and needs, as a table.
    #[arg(long, help_heading = "Pages")]
    costs: bool,
    /// Prove the schedules of all ranks, and print what the proof has counted.
    #[arg(long, help_heading = "Pages")]
    proof: bool,
    /// Print which key each query reads, as a picture; at most 64 tokens.
    #[arg(long, help_heading = "Pages")]
    picture: bool,
    /// Print the operations of rank R, and what it holds.
    #[arg(long, value_name = "R", help_heading = "Pages")]
    list: Option<usize>,
    /// Write a timeline of all ranks, simulated on --machine.
    #[arg(long, value_name = "FILE.svg", requires = "machine", help_heading = "Output")]
    timeline: Option<PathBuf>,
    /// The description of a machine, for --timeline; see the folder machines.
    #[arg(long, value_name = "FILE", requires = "timeline", help_heading = "Output")]
    machine: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
}

impl Arguments {
    fn plan(&self) -> Result<Plan, String> {
        let (options, random) = (&self.problem, self.problem.has_shapes());
        let problem = if random {
            let dtype = options.dtype.unwrap_or(cpattn::Dtype::F32);
            options.problem(options.batch_to_run()?, options.shapes_to_run(), dtype)?
        } else {
            let (batched, _) = Batched::read(self.plan.input.as_deref())?;
            options.problem(batched.batch.clone(), batched.shapes(), options.dtype.unwrap_or(batched.dtype))?
        };
        let world = self.world.world.unwrap_or(self.plan.default_world());
        self.plan.plan(&problem, world, !random && self.plan.input.is_none())
    }
}

pub fn main(arguments: &Arguments) -> Result<bool, String> {
    let words = |e: cpattn::Error| e.to_string();
    let plan = arguments.plan()?;
    let text = arguments.json.text();
    let Arguments { explain, costs, proof, picture, list, .. } = *arguments;
    if explain || !(costs || proof || picture || list.is_some()) {
        text.line(plan.explain())?;
    }
    if costs {
        print_costs(text, &plan)?;
    }
    // A proof takes as long as planning, so that it is made only where it is printed.
    let proof = if proof { Some(plan.verify().map_err(words)?) } else { None };
    if let Some((forward, backward)) = &proof {
        print_proof(text, &plan, [forward, backward])?;
    }
    if picture {
        let tokens = plan.problem().batch().tokens(cpattn::Side::Q);
        let rows = plan.problem().picture().ok_or_else(|| {
            format!("--picture is of {tokens} tokens, expected at most 64; give fewer --documents, or leave it out")
        })?;
        text.line(format_args!("a row for each query: # is a key that it reads\n{rows}\n"))?;
    }
    if let Some(rank) = list {
        text.line(plan.explain_rank(rank).map_err(words)?)?;
        print_list(text, &plan, rank)?;
    }
    if let (Some(file), Some(machine)) = (&arguments.timeline, &arguments.machine) {
        let machine = read_machine(machine)?;
        let mut events = Vec::new();
        for (_, direction) in DIRECTIONS {
            // The backward begins where the forward of the last rank has ended.
            let begin = events.iter().map(|e: &cpattn::report::trace::Event| e.end_ns).max().unwrap_or(0);
            let simulated = plan.simulate(direction, &machine).map_err(words)?.events;
            events.extend(simulated.into_iter().map(|mut e| {
                (e.start_ns, e.end_ns) = (e.start_ns + begin, e.end_ns + begin);
                e
            }));
        }
        std::fs::write(file, timeline_svg(&events)).map_err(|e| format!("{}: {e}", file.display()))?;
        text.line(format_args!("timeline written to {}", file.display()))?;
    }
    // Costs of every rank take time.
    if arguments.json.is_asked() {
        let json = as_json(&plan, proof.as_ref()).map_err(words)?;
        arguments.json.write(|| json)?;
    }
    Ok(true)
}

fn print_costs(text: Text, plan: &Plan) -> Result<(), String> {
    for (name, direction) in DIRECTIONS {
        let head = ["bytes sent", "bytes received", "messages", "multiply-adds", "workspace"];
        text.line(format_args!("{name:8}{}", head.map(|cell| format!("{cell:>18}")).concat()))?;
        for rank in 0..plan.mesh().group() {
            let costs = plan.costs(rank, direction).map_err(|e| e.to_string())?;
            let cells = [costs.bytes_sent(), costs.bytes_received(), costs.messages()].map(u128::from);
            let cells = cells.into_iter().chain([costs.multiply_adds(), costs.workspace.into()]);
            text.line(format_args!("{rank:<8}{}", cells.map(|cell| format!("{cell:>18}")).collect::<String>()))?;
        }
        text.line("")?;
    }
    Ok(())
}

fn print_proof(text: Text, plan: &Plan, reports: [&Report; 2]) -> Result<(), String> {
    for ((name, _), report) in DIRECTIONS.into_iter().zip(reports) {
        let of = |count: &dyn Fn(&cpattn::schedule::verify::RankReport) -> usize| {
            report.ranks.iter().map(count).sum::<usize>()
        };
        text.line(format_args!(
            "{name}: the schedules of {} ranks are proved. {} operations, {} exchanges; {} pairs of tokens and q heads, each \
             attended once: as many as the mask allows ({}).",
            report.ranks.len(),
            of(&|rank| rank.operations),
            of(&|rank| rank.exchanges),
            report.pairs,
            plan.problem().area() * plan.problem().heads() as u128,
        ))?;
    }
    text.line("")
}

/// The operations of a rank: lane by lane they run in this order, each after the one of the other lane that it names.
fn print_list(text: Text, plan: &Plan, rank: usize) -> Result<(), String> {
    for (name, direction) in DIRECTIONS {
        let schedule = Schedule::new(plan, rank, direction).map_err(|e| e.to_string())?;
        text.line(format_args!(
            "{name}\n{:>6}  {:14}{:>5}  {:15}{:18}{:>6}",
            "", "phase", "step", "lane", "operation", "after"
        ))?;
        for (i, op) in schedule.operations().enumerate() {
            let after = op.after.map_or(String::new(), |i| i.to_string());
            let lane = format!("{:?}", op.lane).to_lowercase();
            text.line(format_args!("{i:>6}  {:14}{:>5}  {lane:15}{:18}{after:>6}", op.phase, op.step, op.name))?;
        }
        text.line("")?;
    }
    Ok(())
}

/// A mesh, for other commands too.
pub fn mesh(mesh: Mesh) -> Json {
    Json::Object(vec![
        ("replicas", Json::count(mesh.replicas)),
        ("ring", Json::count(mesh.ring)),
        ("ulysses", Json::count(mesh.ulysses)),
    ])
}

fn as_json(plan: &Plan, proof: Option<&(Report, Report)>) -> cpattn::Result<Json> {
    let mut costs = Vec::new();
    for (name, direction) in DIRECTIONS {
        for rank in 0..plan.mesh().group() {
            let of = plan.costs(rank, direction)?;
            costs.push(Json::Object(vec![
                ("rank", Json::count(rank)),
                ("direction", Json::text(name)),
                ("bytes_sent", Json::Integer(of.bytes_sent().into())),
                ("bytes_received", Json::Integer(of.bytes_received().into())),
                ("messages", Json::Integer(of.messages().into())),
                ("multiply_adds", Json::Integer(of.multiply_adds())),
                ("workspace_bytes", Json::Integer(of.workspace.into())),
            ]));
        }
    }
    let mut fields = vec![
        ("fingerprint", Json::Text(format!("{:016x}", plan.fingerprint()))),
        ("mesh", mesh(plan.mesh())),
        ("layout", Json::text(plan.layout())),
        ("costs", Json::List(costs)),
    ];
    if let Some((forward, backward)) = proof {
        let pairs =
            [("forward_pairs", Json::Integer(forward.pairs)), ("backward_pairs", Json::Integer(backward.pairs))];
        fields.push(("proof", Json::Object(pairs.into())));
    }
    Ok(Json::Object(fields))
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

    fn arguments(line: &str) -> Arguments {
        Line::parse_from(["plan"].into_iter().chain(line.split_whitespace())).arguments
    }

    /// The defaults are those of `cpattn run`: the real activations, and their mesh.
    #[test]
    fn the_default_plan_is_the_main_jobs() {
        let plan = arguments("").plan().unwrap();
        assert_eq!((plan.mesh().ulysses, plan.mesh().ring, plan.problem().heads()), (4, 2, 12));
        let plan = arguments("--documents 2*30,5 --heads 6 --kv-heads 3 --ring 3 --ulysses 2").plan().unwrap();
        assert_eq!((plan.mesh().world(), plan.problem().batch().documents()), (6, 3));
    }

    #[test]
    fn pages_that_are_refused() {
        for (line, text) in [
            ("--picture", "--picture is of 263 tokens, expected at most 64"),
            ("--list 8", "rank is 8"),
            ("--documents 5 --heads 3 --kv-heads 2", "heads is 3, expected a multiple"),
        ] {
            let error = main(&arguments(line)).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
    }

    /// What the pages count for other programs is what the plan counts.
    #[test]
    fn costs_and_proof_as_json() {
        let plan = arguments("--documents 40,7 --world 4").plan().unwrap();
        let proof = plan.verify().unwrap();
        let text = as_json(&plan, Some(&proof)).unwrap().to_string();
        assert!(text.contains(&format!("\"forward_pairs\": {}", proof.0.pairs)), "{text}");
        assert_eq!(text.matches("\"rank\": 3").count(), 2);
        let sent = plan.costs(3, Direction::Backward).unwrap().bytes_sent();
        assert!(text.contains(&format!("\"rank\": 3, \"direction\": \"backward\", \"bytes_sent\": {sent}")), "{text}");
    }
}
