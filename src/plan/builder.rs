// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts that a plan is made from, each given or chosen.
//!
//! A plan needs a problem, a mesh, a layout and options. What is not given is chosen by the rules of [`Choice`], from
//! the problem alone, so that all ranks choose alike. [`Plan::new`] and [`Plan::auto`] are the two common cases.

use alloc::{
    format,
    string::{String, ToString},
};

use super::{Choice, LoadCounter, Options, Plan, Problem, auto::best_layout, check, distribution::same_batch};
use crate::{
    error::{Error, Result},
    layout::{Layout, Shares},
    mesh::Mesh,
};

/// A plan in the making: [`Plan::builder`].
#[derive(Clone, Copy, Debug)]
#[must_use = "`build` makes the plan"]
pub struct PlanBuilder<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) world: Option<usize>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) layout: Option<Layout>,
    pub(crate) options: Options,
    pub(crate) tokens_of: Option<&'a Plan>,
}

impl<'a> PlanBuilder<'a> {
    /// The number of ranks. Without a mesh, the mesh is chosen for them.
    pub fn world(mut self, world: usize) -> Self {
        self.world = Some(world);
        self
    }

    /// The mesh.
    pub fn mesh(mut self, mesh: Mesh) -> Self {
        self.mesh = Some(mesh);
        self
    }

    /// The layout. If it is not given, the automatic one of the mesh ([`Layout::auto`]).
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// The options; without them, the default ones.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// The plan has the tokens of `base`: its mesh, its layout and, if that depends on mask area, its chunks. The
    /// problem is over the same documents (its slices may differ); heads, dims, dtype, mask, score options and the
    /// plan's options are free. For layers of several kinds on the same tokens; [`Plan::auto_for`] chooses for all.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Mask, Plan, Problem, Side};
    /// let full = Problem::new(Batch::from_lengths(&[700, 90, 410])?, 8, 2, 64, Dtype::Bf16);
    /// let windowed = full.clone().with_mask(Mask::sliding(128));
    /// let base = Plan::auto(&full, 4)?;
    /// let plan = Plan::builder(&windowed).tokens_of(&base).build()?;
    /// assert_eq!(plan.distribution(), base.distribution());
    /// assert_eq!(plan.local_tokens(Side::Q, 3).indices(), base.local_tokens(Side::Q, 3).indices());
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn tokens_of(mut self, base: &'a Plan) -> Self {
        self.tokens_of = Some(base);
        self
    }

    /// Makes the plan.
    ///
    /// # Errors
    /// None of world, mesh and [`tokens_of`](Self::tokens_of) given, or several that contradict each other;
    /// [`Error::Invalid`] or [`Error::Unsupported`] for a problem that [`Problem::check`] refuses, a mesh with a factor
    /// of 0 or with more Ulysses ranks than heads, documents other than those of `tokens_of`, and options that
    /// contradict each other, the problem or the mesh.
    pub fn build(self) -> Result<Plan> {
        let Self { problem, options, .. } = self;
        if let Some(base) = self.tokens_of {
            self.check_same_tokens(base)?;
            check(problem, base.mesh(), options)?;
            return Ok(Plan::over(problem, base.mesh(), base.shares().clone(), options));
        }
        let (mesh, layout) = match (self.mesh, self.world) {
            (Some(mesh), world) => {
                if let Some(world) = world.filter(|&world| world != mesh.world()) {
                    return Err(Error::invalid("world", world, format!("{}, the ranks of {mesh}", mesh.world())));
                }
                let layout = match self.layout {
                    Some(layout) => layout,
                    None => {
                        check(problem, mesh, options)?;
                        best_layout(&mut LoadCounter::new(problem), mesh.ring)?.layout
                    }
                };
                (mesh, layout)
            }
            (None, Some(world)) => {
                let choice = Choice::among(problem, world, Choice::BALANCE, options.ranks_per_node, self.layout)?;
                (choice.mesh, choice.layout)
            }
            (None, None) => {
                let hint = "PlanBuilder has a method for each";
                return Err(Error::invalid("world", "not given", "a world, a mesh or the tokens of a plan").hint(hint));
            }
        };
        check(problem, mesh, options)?;
        let shares = Shares::new(problem.batch(), problem.mask(), layout, mesh.ring)?;
        Ok(Plan::over(problem, mesh, shares, options))
    }

    /// Refuses what contradicts the plan whose tokens are used.
    fn check_same_tokens(&self, base: &Plan) -> Result<()> {
        let refuse = |name: &str, found: String, expected: String| {
            Err(Error::invalid(name, found, format!("{expected}, as in the plan whose tokens are used"))
                .hint("leave it out: mesh and layout come from that plan"))
        };
        let (mesh, layout) = (base.mesh(), base.layout());
        if let Some(found) = self.world.filter(|&world| world != mesh.world()) {
            return refuse("world", found.to_string(), mesh.world().to_string());
        }
        if let Some(found) = self.mesh.filter(|&found| found != mesh) {
            return refuse("mesh", found.to_string(), mesh.to_string());
        }
        if let Some(found) = self.layout.filter(|&found| found != layout) {
            return refuse("layout", found.to_string(), layout.to_string());
        }
        same_batch(self.problem.batch(), base.problem().batch())
    }
}

impl Plan {
    /// Makes a plan from parts, of which some may be left to choose.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Options, Plan, Problem};
    /// let problem = Problem::new(Batch::from_lengths(&[9000, 700])?, 8, 2, 64, Dtype::Bf16);
    /// let options = Options::new().reproducible(true);
    /// // All is given; the layout is chosen; mesh and layout are.
    /// let given = Plan::builder(&problem).mesh(Mesh::ring(4)?).layout(Layout::Zigzag).options(options).build()?;
    /// let laid_out = Plan::builder(&problem).mesh(Mesh::ring(4)?).options(options).build()?;
    /// let chosen = Plan::builder(&problem).world(4).options(options).build()?;
    /// assert_eq!([&given, &laid_out, &chosen].map(|plan| plan.mesh().world()), [4; 3]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn builder(problem: &Problem) -> PlanBuilder<'_> {
        PlanBuilder { problem, world: None, mesh: None, layout: None, options: Options::default(), tokens_of: None }
    }

    /// Makes a plan with this mesh and layout, and the default options.
    ///
    /// # Errors
    /// As [`PlanBuilder::build`].
    pub fn new(problem: &Problem, mesh: Mesh, layout: Layout) -> Result<Self> {
        Self::builder(problem).mesh(mesh).layout(layout).build()
    }

    /// Makes a plan with the mesh and the layout that [`Choice::new`] takes for `world` ranks, and the default options.
    ///
    /// # Errors
    /// As [`PlanBuilder::build`].
    pub fn auto(problem: &Problem, world: usize) -> Result<Self> {
        Self::builder(problem).world(world).build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype};
    use alloc::string::ToString;

    fn problem() -> Problem {
        Problem::new(Batch::from_lengths(&[5000, 300]).unwrap(), 4, 2, 64, Dtype::Bf16)
    }

    #[test]
    fn parts_not_given_are_chosen() {
        let p = problem();
        let choice = Choice::new(&p, 4, Choice::BALANCE, 0).unwrap();
        assert_eq!(Plan::auto(&p, 4).unwrap(), Plan::new(&p, choice.mesh, choice.layout).unwrap());
        let mesh = Mesh::ring(3).unwrap();
        let plan = Plan::builder(&p).mesh(mesh).world(3).build().unwrap();
        assert_eq!((plan.mesh(), plan.layout()), (mesh, Layout::auto(&p, 3).unwrap()));
        // With a layout, the mesh that is best with it: contiguous shares of a causal document are best cut by heads.
        for layout in Choice::LAYOUTS {
            let plan = Plan::builder(&p).world(4).layout(layout).build().unwrap();
            let [best, found] = [Mesh::ulysses(4).unwrap(), plan.mesh()].map(|mesh| {
                Choice::among(&p, 4, Choice::BALANCE, 0, Some(layout))
                    .unwrap()
                    .candidates
                    .iter()
                    .find(|c| c.mesh == mesh)
                    .unwrap()
                    .cost
            });
            assert!(plan.layout() == layout && found <= best, "{layout}");
        }
    }

    #[test]
    fn contradictions_are_named() {
        let p = problem();
        let base = Plan::new(&p, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
        let text = |b: PlanBuilder<'_>| b.build().unwrap_err().to_string();
        let b = Plan::builder(&p);
        assert!(text(b).starts_with("world is not given, expected a world, a mesh or the tokens of a plan"));
        assert!(text(b.world(3).mesh(Mesh::ring(2).unwrap())).starts_with("world is 3, expected 2, the ranks of "));
        let b = b.tokens_of(&base);
        assert!(text(b.world(3)).starts_with("world is 3, expected 2, as in the plan whose tokens are used"));
        assert!(text(b.mesh(Mesh::ulysses(2).unwrap())).starts_with("mesh is "));
        assert!(
            text(b.layout(Layout::Contiguous)).starts_with("layout is contiguous, expected zigzag, as in the plan")
        );
        assert_eq!(b.world(2).mesh(base.mesh()).layout(Layout::Zigzag).build().unwrap(), base);
    }
}
