// SPDX-License-Identifier: MIT OR Apache-2.0
//! How evenly a layout distributes a problem over ring ranks: the largest and the total load of a rank.
//!
//! The automatic choice ([`auto`](super::auto)) compares layouts by it, and `Plan::explain` prints it. Where q and k
//! are the same tokens, loads are counted without making the shares ([`loads`](super::loads)).

use super::{
    Problem,
    area::{Load, SegmentLists, load, load_of_keys},
    loads::Counted,
};
use crate::{
    batch::Batch,
    error::Result,
    layout::{Layout, Shares},
    mask::Mask,
};

/// How evenly a layout distributes a problem over ring ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    /// The busiest ring rank's mask area over the mean; 1 when there is no work.
    pub fn work_imbalance(&self) -> f64 {
        ratio(self.largest.area, self.total.area, self.ring)
    }

    /// The largest share of q tokens over the mean; 1 when there are none.
    pub fn token_imbalance(&self) -> f64 {
        ratio(self.largest.q_tokens, self.total.q_tokens, self.ring)
    }
}

fn ratio(largest: u64, total: u64, ring: usize) -> f64 {
    if total == 0 { 1.0 } else { largest as f64 * ring as f64 / total as f64 }
}

/// Computes how `layout` distributes the problem over `ring` ranks.
pub(crate) fn layout_load(problem: &Problem, layout: Layout, ring: usize) -> Result<LayoutLoad> {
    load_with(problem, Counted::new(problem.batch(), problem.mask()).as_ref(), layout, ring)
}

/// As [`layout_load`], for many layouts and rings of one problem, whose rows are counted once.
pub(crate) fn dealer(problem: &Problem) -> impl Fn(Layout, usize) -> Result<LayoutLoad> {
    let counted = Counted::new(problem.batch(), problem.mask());
    move |layout, ring| load_with(problem, counted.as_ref(), layout, ring)
}

pub(super) fn load_with(
    problem: &Problem,
    counted: Option<&Counted>,
    layout: Layout,
    ring: usize,
) -> Result<LayoutLoad> {
    if let Some(loads) = counted.map(|c| c.loads(layout, ring)).transpose()?.flatten() {
        return Ok(largest_and_total(layout, ring, loads.into_iter()));
    }
    Ok(load_of_shares(problem, &Shares::new(problem.batch(), problem.mask(), layout, ring)?))
}

/// The load of these shares, with any mask.
pub(crate) fn load_of_shares(problem: &Problem, shares: &Shares) -> LayoutLoad {
    of_each(problem, shares, load)
}

/// As [`load_of_shares`], if q travels ([`load_of_keys`]).
pub(crate) fn load_of_key_shares(problem: &Problem, shares: &Shares) -> LayoutLoad {
    of_each(problem, shares, load_of_keys)
}

/// The number of k rows of other ranks that each ring rank needs, computed lazily.
pub(super) fn needed_keys(problem: &Problem, shares: &Shares) -> impl Iterator<Item = u64> {
    each(problem, shares, load).map(|l| l.needed)
}

/// The number of q rows of other ranks that each ring rank needs if q travels.
pub(super) fn needed_queries(problem: &Problem, shares: &Shares) -> impl Iterator<Item = u64> {
    each(problem, shares, load_of_keys).map(|l| l.needed)
}

/// A function that counts the load of one ring rank.
type LoadOfRank = fn(&Shares, &Batch, Mask, usize, &mut SegmentLists) -> Load;

fn of_each(problem: &Problem, shares: &Shares, load: LoadOfRank) -> LayoutLoad {
    largest_and_total(shares.layout(), shares.ring(), each(problem, shares, load))
}

fn each(problem: &Problem, shares: &Shares, load: LoadOfRank) -> impl Iterator<Item = Load> {
    let mut lists = SegmentLists::default();
    (0..shares.ring()).map(move |r| load(shares, problem.batch(), problem.mask(), r, &mut lists))
}

/// The largest and the total of the ranks' loads.
fn largest_and_total(layout: Layout, ring: usize, loads: impl Iterator<Item = Load>) -> LayoutLoad {
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
    LayoutLoad { layout, largest, total, ring }
}
