// SPDX-License-Identifier: MIT OR Apache-2.0
//! The automatic choice where the machine is known.
//!
//! [`Plan::auto`] uses rules of thumb, in integers. Here the candidates are those of [`meshes`](super::meshes), and the
//! first of its list is chosen: the fastest of those that fit in memory. The model is that of the busiest rank, because
//! a choice must not take longer than the run that it is made for.
//!
//! All ranks must make the same choice. The times are sums, products and quotients of f64, which IEEE 754 rounds alike
//! on every processor, so equal descriptions give equal choices. Ranks compare their plans when they run them, so
//! different plans end in an error on all ranks. A job that does not want to rely on this chooses on one rank and sends
//! mesh and layout to the other ranks.

use alloc::{format, string::ToString};

use super::{forms, outlook};
use crate::{
    error::{Error, Result},
    machine::Machine,
    plan::{Plan, PlanBuilder},
};

/// Candidates that the plan's explanation lists.
const LISTED: usize = 8;

impl PlanBuilder<'_> {
    /// Plans with the mesh and the layout that are predicted to take the least time for one forward and one backward on
    /// a machine; those that fit in the memory of a rank come first. [`Plan::explain`] lists the candidates.
    ///
    /// If the options have `ranks_per_node`, it is used. Otherwise the nodes are the machine's: schedules of one level
    /// and of two are rated, and a plan of two levels has the machine's `ranks_per_node` among its options. To rate one
    /// level alone, set `ranks_per_node` to the number of all ranks.
    ///
    /// It rates every mesh and layout, which takes longer than [`Plan::auto`]; [`Plan::next`] keeps the choice for
    /// the next batch.
    ///
    /// # Errors
    /// No world; a mesh, a layout or the tokens of a plan given: they are chosen here. Those of
    /// [`meshes`](super::meshes), and those of [`PlanBuilder::build`] if no mesh can have these options.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Machine, Plan, Problem};
    /// let machine = Machine::parse(include_str!("../../machines/h100_8x400g.machine"))?;
    /// let problem = Problem::new(Batch::from_lengths(&[1 << 18, 1 << 16])?, 32, 8, 128, Dtype::Bf16);
    /// let plan = Plan::builder(&problem).world(16).build_on(&machine)?;
    /// assert!(plan.explain().contains(&machine.name));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn build_on(self, machine: &Machine) -> Result<Plan> {
        let Self { problem, options, .. } = self;
        let given = [
            ("mesh", self.mesh.map(|mesh| mesh.to_string())),
            ("layout", self.layout.map(|layout| layout.to_string())),
            ("tokens_of", self.tokens_of.map(|plan| format!("a plan of {} over {}", plan.layout(), plan.mesh()))),
        ];
        for (name, found) in given {
            if let Some(found) = found {
                let expected = "nothing: mesh and layout are chosen for the machine";
                return Err(Error::invalid(name, found, expected).hint("make the plan with PlanBuilder's build"));
            }
        }
        let world = self.world.ok_or_else(|| Error::invalid("world", "not given", "the number of ranks"))?;
        let forms = forms(options, machine);
        let outlook = outlook(problem, world, machine, forms)?;
        let best = outlook.candidates.first();
        let best = best.ok_or_else(|| Error::invalid("world", world, "a mesh that fits the problem"))?;
        let plan =
            Plan::builder(problem).mesh(best.mesh).layout(best.layout).options(forms[best.levels - 1]).build()?;
        let (given, of_machine) = (options.ranks_per_node, machine.ranks_per_node);
        let two = outlook.candidates.iter().any(|c| c.levels == 2);
        let nodes = match given {
            0 if two => "was not given: schedules of one level and of two were rated, over".into(),
            0 => "was not given: schedules of one level were rated; no mesh has two levels over".into(),
            _ => format!("{given} was given and decided the levels; bytes between nodes are counted over"),
        };
        let nodes = format!("ranks_per_node {nodes} the machine's nodes of {of_machine} ranks.");
        Ok(plan.because(&format!("{nodes}\n{}", outlook.to_markdown(LISTED))))
    }
}
