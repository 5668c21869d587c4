// SPDX-License-Identifier: MIT OR Apache-2.0
//! How evenly a layout distributes a problem over ring ranks: the largest and the total load of a rank.
//!
//! The automatic choice ([`auto`](super::auto)) compares layouts by it, and `Plan::explain` prints it.
//! [`loads`](super::loads) counts it for many layouts; here it is counted rank by rank, for any shares.

use super::{
    CirculatingSide, Problem,
    area::{Load, load},
};
use crate::layout::{Layout, Shares};

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

    pub(super) fn sum(layout: Layout, ring: usize, loads: impl Iterator<Item = Load>) -> Self {
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

/// The load of each ring rank with these shares if one side is sent, computed lazily.
pub(super) fn loads_of_ranks(problem: &Problem, shares: &Shares, sent: CirculatingSide) -> impl Iterator<Item = Load> {
    let (mut lists, allowed) = (Default::default(), problem.allowed());
    (0..shares.ring()).map(move |r| load(shares, &allowed, r, sent, &mut lists))
}
