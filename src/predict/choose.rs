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

use alloc::format;

use super::{forms, outlook};
use crate::{
    error::{Error, Result},
    machine::Machine,
    plan::{Options, Plan, Problem},
};

/// Candidates that the plan's explanation lists.
const LISTED: usize = 8;

impl Plan {
    /// Plans with the mesh and the layout that are predicted to take the least time for one forward and one backward on
    /// a machine; those that fit in the memory of a rank come first. [`Plan::explain`] lists the candidates.
    ///
    /// If the options have `ranks_per_node`, it is used. Otherwise the nodes are the machine's: schedules of one level
    /// and of two are rated, and a plan of two levels has the machine's `ranks_per_node` among its options. To rate one
    /// level alone, set `ranks_per_node` to the number of all ranks.
    ///
    /// It rates every mesh and layout, which takes longer than [`Plan::auto`]; [`Plan::auto_like`] keeps the choice for
    /// the next batch.
    ///
    /// # Errors
    /// As [`meshes`](super::meshes), and those of [`Plan::with_options`] if no mesh can have these options.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Machine, Options, Plan, Problem};
    /// let machine = Machine::parse(include_str!("../../machines/h100_8x400g.machine"))?;
    /// let problem = Problem::new(Batch::from_lengths(&[1 << 18, 1 << 16])?, 32, 8, 128, Dtype::Bf16);
    /// let plan = Plan::auto_on(&problem, 16, &machine, Options::default())?;
    /// assert!(plan.explain().contains(&machine.name));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn auto_on(problem: &Problem, world: usize, machine: &Machine, options: Options) -> Result<Self> {
        let forms = forms(options, machine);
        let outlook = outlook(problem, world, machine, forms)?;
        let best = outlook.candidates.first();
        let best = best.ok_or_else(|| Error::invalid("world", world, "a mesh that fits the problem"))?;
        let plan = Self::with_options(problem, best.mesh, best.layout, forms[best.levels - 1])?;
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
