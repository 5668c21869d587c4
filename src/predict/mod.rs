// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predicted times of every mesh and layout on a machine.
//!
//! There are two models. `aggregate` computes the load of the busiest rank and converts it to seconds with a few sums;
//! it is fast for any number of ranks, and ignores single messages. [`Plan::simulate`] executes every operation.
//! [`meshes`] rates all candidates by the first model. If the group is small enough, it replaces the figures of the
//! best candidates by those of the second; each line names its model. [`groups`] deals documents over groups of ranks
//! of several sizes, by the first model.
//!
//! ```
//! use cpattn::{Batch, Dtype, Machine, Problem, predict};
//! let machine = Machine::parse(include_str!("../../machines/h100_8x400g.machine"))?;
//! let problem = Problem::new(Batch::from_lengths(&[1 << 20])?, 32, 8, 128, Dtype::Bf16);
//! let outlook = predict::meshes(&problem, 4096, &machine, predict::Effort::default())?;
//! let best = &outlook.candidates[0];
//! assert!(best.mesh.world() == 4096 && best.seconds() > 0.0);
//! # Ok::<(), cpattn::Error>(())
//! ```

mod aggregate;
mod choose;
mod groups;
mod table;

pub use aggregate::PassTime;
pub use groups::{GroupLimits, Groups, RankGroup, groups};

use alloc::{string::String, vec, vec::Vec};

use crate::{
    element::Dtype,
    error::Result,
    layout::Layout,
    machine::Machine,
    mesh::Mesh,
    plan::{
        AttentionKind, LayoutLoad, LoadCounter, Options, Plan, Problem,
        auto::{layouts, meshes as candidate_meshes},
    },
    report::{bound::ShareSizes, size::tensor_bytes},
    schedule::Direction,
};

/// The model of a candidate's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Model {
    /// The load of the busiest rank.
    Aggregate,
    /// [`Plan::simulate`] of all ranks.
    Simulation,
}

/// Limits on the work of a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Effort {
    /// The number of candidates simulated with one level, and with two: the best by the aggregate model.
    pub simulated: usize,
    /// The largest number of ranks that is simulated.
    pub most_ranks: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self { simulated: 4, most_ranks: 64 }
    }
}

impl Effort {
    /// Simulates at most `simulated` candidates with one level and as many with two, with at most `most_ranks` ranks.
    pub const fn new(simulated: usize, most_ranks: usize) -> Self {
        Self { simulated, most_ranks }
    }
}

/// A mesh with a layout, and its prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeshTime {
    /// The mesh.
    pub mesh: Mesh,
    /// The layout.
    pub layout: Layout,
    /// Levels of the schedule: 2 if rows cross from node to node once, on the ring or in all-to-alls
    /// ([`Options::ranks_per_node`]), 1 if not.
    pub levels: usize,
    /// The forward.
    pub forward: PassTime,
    /// The backward.
    pub backward: PassTime,
    /// Bytes of memory of the largest rank examined: its tensors of the backward, plus the larger of its two workspaces
    /// (upper bound).
    pub memory: u64,
    /// The model of the times.
    pub model: Model,
}

impl MeshTime {
    /// Seconds of one forward and one backward.
    pub fn seconds(&self) -> f64 {
        self.forward.seconds + self.backward.seconds
    }

    /// The options of this candidate's plan on the machine.
    pub fn options(&self, machine: &Machine) -> Options {
        Options::new().ranks_per_node(if self.levels == 2 { machine.ranks_per_node } else { 0 })
    }

    /// Seconds of exposed communication in forward and backward.
    pub fn exposed(&self) -> f64 {
        self.forward.exposed + self.backward.exposed
    }
}

/// All candidates for a problem on some ranks of a machine.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outlook {
    /// The ranks that share the batch.
    pub world: usize,
    /// Seconds of one forward and one backward if work were even and nothing else took time.
    pub ideal: f64,
    /// Whether the machine has rates for the kernels of exactly this type and these dims; otherwise the nearest
    /// kernels' rates were used.
    pub exact_kernels: bool,
    /// Where the machine has no kernels of the problem's type: that type, and the one that rates were derived from
    /// ([`Machine::kernel`]).
    pub derived_kernels: Option<(Dtype, Dtype)>,
    /// The machine's name.
    pub machine: String,
    /// Whether the machine's figures are estimates.
    pub estimate: bool,
    /// Whether the machine's ranks compute and copy on the cores of their node.
    pub on_cores: bool,
    /// Bytes of memory of a rank of the machine.
    pub memory: f64,
    /// The candidates: first those that were simulated, then the rest by the aggregate model; in each group those that
    /// fit in memory first, by time. Do not compare times of the two groups:
    ///
    /// | the aggregate time, beside the simulated one | at worst |
    /// |---|---|
    /// | zigzag layouts | 16 % too short |
    /// | two levels, and rows of a few neighbours | 51 % too long |
    /// | on cores, with a mask | 1.9 times |
    pub candidates: Vec<MeshTime>,
}

/// Rates every mesh `ulysses × ring = world` with every layout of
/// [`Choice::LAYOUTS`](crate::plan::Choice::LAYOUTS).
///
/// # Errors
/// A problem that [`Problem::check`] refuses, a world of 0, and a machine without a kernel of one direction, or with a
/// field that no description has, such as a rate of 0.
pub fn meshes(problem: &Problem, world: usize, machine: &Machine, effort: Effort) -> Result<Outlook> {
    let mut outlook = outlook(problem, world, machine, forms(Options::new(), machine))?;
    if world <= effort.most_ranks {
        let mut left = [effort.simulated; 2];
        let (mut simulated, others): (Vec<_>, Vec<_>) = outlook.candidates.into_iter().partition(|c| {
            let left = &mut left[c.levels - 1];
            let first = *left > 0;
            *left = left.saturating_sub(1);
            first
        });
        for c in &mut simulated {
            simulate(problem, c, machine)?;
        }
        // The best candidates are ordered by one model, the rest by the other.
        sort(&mut simulated, machine);
        simulated.extend(others);
        outlook.candidates = simulated;
    }
    Ok(outlook)
}

/// The options for plans of one level and of two: with the machine's nodes, unless nodes are given.
fn forms(options: Options, machine: &Machine) -> [Options; 2] {
    let each = if options.ranks_per_node > 0 { options.ranks_per_node } else { machine.ranks_per_node };
    [options, options.ranks_per_node(each)]
}

/// The candidates by the aggregate model: plans with the first options, and with the second if only those give two
/// levels.
fn outlook(problem: &Problem, world: usize, machine: &Machine, forms: [Options; 2]) -> Result<Outlook> {
    problem.check()?;
    machine.check()?;
    let whole = problem.kind == AttentionKind::Other;
    let meshes = candidate_meshes(world, problem.heads(), whole, 0)?;
    let kernels = aggregate::kernels(problem, machine)?;
    let (mut candidates, mut refused) = (Vec::new(), None);
    let mut counter = LoadCounter::new(problem);
    for mesh in meshes {
        for layout in layouts(mesh.ring) {
            // A mesh that an option excludes is not a candidate.
            let loads = counter.load(layout, mesh.ring);
            match loads.and_then(|loads| rate(problem, mesh, &loads, machine, &kernels, forms)) {
                Ok(levels) => candidates.extend(levels),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
    }
    if let (true, Some(error)) = (candidates.is_empty(), refused) {
        return Err(error);
    }
    sort(&mut candidates, machine);
    let flops = 2.0 * problem.area() as f64 * problem.heads() as f64;
    let dims = (problem.head_dim() as f64, problem.value_dim() as f64);
    let ideal =
        flops * ((dims.0 + dims.1) / kernels.rates[0].rate + (3.0 * dims.0 + 2.0 * dims.1) / kernels.rates[1].rate);
    Ok(Outlook {
        world,
        ideal: ideal / machine.ranks_at_once(world),
        exact_kernels: kernels.exact,
        derived_kernels: Some((problem.dtype(), kernels.rates[0].shape.dtype)).filter(|(own, other)| own != other),
        machine: machine.name.clone(),
        estimate: machine.estimate,
        on_cores: machine.cores.is_some(),
        memory: machine.memory,
        candidates,
    })
}

fn sort(list: &mut [MeshTime], machine: &Machine) {
    list.sort_by(|a, b| {
        let key = |c: &MeshTime| c.memory as f64 > machine.memory;
        key(a).cmp(&key(b)).then(a.seconds().total_cmp(&b.seconds()))
    });
}

/// The candidates of a mesh and a layout, by the aggregate model.
fn rate(
    problem: &Problem,
    mesh: Mesh,
    loads: &LayoutLoad,
    machine: &Machine,
    kernels: &aggregate::ProblemKernels,
    forms: [Options; 2],
) -> Result<Vec<MeshTime>> {
    let layout = loads.layout;
    let first = Plan::builder(problem).mesh(mesh).layout(layout).options(forms[0]).build()?;
    let candidate = |plan: &Plan| {
        let [forward, backward] = aggregate::passes(plan, loads, machine, kernels);
        let of = |rank| {
            let sizes = ShareSizes::new(plan, rank, [loads.largest.q_tokens, loads.largest.k_tokens]);
            let work = [Direction::Forward, Direction::Backward].map(|d| plan.workspace_bound_of(&sizes, d));
            tensor_bytes(plan, &sizes, Direction::Backward) + work[0].max(work[1])
        };
        let memory = of(0).max(of(mesh.world() - 1));
        let levels = if plan.has_two_levels() { 2 } else { 1 };
        MeshTime { mesh, layout, levels, forward, backward, memory, model: Model::Aggregate }
    };
    let mut levels = vec![candidate(&first)];
    if levels[0].levels == 1
        && forms[0] != forms[1]
        && let Ok(plan) = Plan::builder(problem).tokens_of(&first).options(forms[1]).build()
        && plan.has_two_levels()
    {
        levels.push(candidate(&plan));
    }
    Ok(levels)
}

/// Replaces a candidate's figures by those of the simulation.
fn simulate(problem: &Problem, candidate: &mut MeshTime, machine: &Machine) -> Result<()> {
    let plan = Plan::builder(problem)
        .mesh(candidate.mesh)
        .layout(candidate.layout)
        .options(candidate.options(machine))
        .build()?;
    let pass = |direction| {
        plan.simulate(direction, machine).map(|run| PassTime {
            seconds: run.makespan,
            exposed: run.exposed(),
            bytes_inside: run.ranks.iter().map(|r| r.bytes_inside).max().unwrap_or(0) as f64,
            bytes_of_card: run.bytes_of_card(machine) as f64,
        })
    };
    candidate.forward = pass(Direction::Forward)?;
    candidate.backward = pass(Direction::Backward)?;
    candidate.model = Model::Simulation;
    Ok(())
}

#[cfg(test)]
mod tests;
