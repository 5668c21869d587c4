// SPDX-License-Identifier: MIT OR Apache-2.0
//! How evenly a layout distributes a problem over ring ranks: the largest and the total load of a rank.
//!
//! The automatic choice ([`auto`](super::auto)) compares layouts by it, and `Plan::explain` prints it. Where q and k
//! are the same tokens, loads are counted without making the shares ([`loads`](super::loads)).

use super::{
    CirculatingSide, Problem,
    area::{Load, load},
    loads::{CountRuns, Counted},
    slice_loads::CountedSlices,
};
use crate::{
    error::Result,
    layout::{Layout, Shares},
};

/// How evenly a layout distributes a problem over ring ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayoutLoad {
    /// The layout.
    pub layout: Layout,
    /// The largest of each figure over the ring ranks.
    pub largest: Load,
    /// The sum of each figure over the ring ranks.
    pub total: Load,
    /// Ring ranks.
    pub ring: usize,
}

impl LayoutLoad {
    /// The load of these shares, with any mask, if one side is sent round the ring.
    pub(crate) fn of(problem: &Problem, shares: &Shares, sent: CirculatingSide) -> Self {
        Self::sum(shares.layout(), shares.ring(), loads_of_ranks(problem, shares, sent))
    }

    fn sum(layout: Layout, ring: usize, loads: impl Iterator<Item = Load>) -> Self {
        let (mut largest, mut total) = (Load::default(), Load::default());
        for l in loads {
            let fold = |into: &mut Load, f: fn(u64, u64) -> u64| {
                into.area = f(into.area, l.area);
                into.q_tokens = f(into.q_tokens, l.q_tokens);
                into.k_tokens = f(into.k_tokens, l.k_tokens);
                into.needed = f(into.needed, l.needed);
            };
            fold(&mut largest, u64::max);
            fold(&mut total, |a, b| a + b);
        }
        Self { layout, largest, total, ring }
    }

    /// The busiest ring rank's mask area over the mean; 1 when there is no work.
    pub(crate) fn work_imbalance(&self) -> f64 {
        ratio(self.largest.area, self.total.area, self.ring)
    }

    /// The largest share of q tokens over the mean; 1 when there are none.
    pub(crate) fn token_imbalance(&self) -> f64 {
        ratio(self.largest.q_tokens, self.total.q_tokens, self.ring)
    }
}

fn ratio(largest: u64, total: u64, ring: usize) -> f64 {
    if total == 0 { 1.0 } else { largest as f64 * ring as f64 / total as f64 }
}

/// Counts the loads of a problem under many layouts and rings.
pub(crate) struct LoadCounter<'a> {
    problem: &'a Problem,
    /// If q and k are the same tokens: without slices, and with them.
    counted: Option<Counted<'a>>,
    sliced: Option<CountedSlices<'a>>,
}

impl<'a> LoadCounter<'a> {
    pub(crate) fn new(problem: &'a Problem) -> Self {
        let (batch, mask) = (problem.batch(), problem.mask());
        Self { problem, counted: Counted::new(batch, mask), sliced: CountedSlices::new(batch, mask) }
    }

    /// How `layout` distributes the problem over `ring` ranks.
    pub(crate) fn load(&self, layout: Layout, ring: usize) -> Result<LayoutLoad> {
        let loads = match (&self.counted, &self.sliced) {
            (Some(counted), _) => counted.loads(layout, ring)?,
            (_, Some(sliced)) => sliced.loads(layout, ring)?,
            _ => None,
        };
        if let Some(loads) = loads {
            return Ok(LayoutLoad::sum(layout, ring, loads.into_iter()));
        }
        let shares = Shares::new(self.problem.batch(), self.problem.mask(), layout, ring)?;
        Ok(LayoutLoad::of(self.problem, &shares, CirculatingSide::Keys))
    }
}

/// The load of each ring rank with these shares if one side is sent, computed lazily.
pub(super) fn loads_of_ranks(problem: &Problem, shares: &Shares, sent: CirculatingSide) -> impl Iterator<Item = Load> {
    let (mut lists, allowed) = (Default::default(), problem.allowed());
    (0..shares.ring()).map(move |r| load(shares, &allowed, r, sent, &mut lists))
}
