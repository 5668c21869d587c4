// SPDX-License-Identifier: MIT OR Apache-2.0
//! Choosing one mesh and one distribution of tokens for a model whose layers are of several kinds.
//!
//! A window gives all ranks equal work under any layout, full causal attention does not, and both kinds of layers must
//! hold the same tokens. The rules are those of [`auto`](super::auto), but each figure of a choice (work, rows from
//! other ranks, cost) is a sum over kinds: the figure of the kind times the number of its layers. The balanced layouts
//! are tried with the chunks of each kind's mask. For one kind the choice is that of [`Plan::auto`].

use alloc::{format, vec::Vec};

use super::{
    AttentionKind, Choice, LayoutLoad, LoadCounter, Options, Plan, Problem,
    auto::{best, judge, layouts, meshes},
};
use crate::{
    error::{Error, Result},
    layout::{Layout, Shares},
    mesh::Mesh,
};

/// One distribution of the tokens, and the load of each kind of layer under it.
struct Deal {
    shares: Shares,
    loads: Vec<LayoutLoad>,
}

impl Deal {
    fn new(counters: &mut [LoadCounter], shares: Shares) -> Self {
        let loads = counters.iter_mut().map(|counter| counter.load_of(&shares)).collect();
        Self { shares, loads }
    }

    /// A figure of each kind times its number of layers, added up.
    fn sum(&self, kinds: &[(Problem, usize)], figure: impl Fn(&Problem, &LayoutLoad) -> u128) -> u128 {
        kinds.iter().zip(&self.loads).map(|((problem, layers), d)| *layers as u128 * figure(problem, d)).sum()
    }
}

/// The best distribution of the tokens to `ring` ranks.
fn best_deal(kinds: &[(Problem, usize)], counters: &mut [LoadCounter], ring: usize) -> Result<Deal> {
    let mut deals: Vec<Deal> = Vec::new();
    for layout in layouts(ring) {
        let by_mask = matches!(layout, Layout::Balanced { .. });
        // Other layouts do not depend on the mask, so the first kind stands for all.
        for (problem, _) in kinds.iter().take(if by_mask { kinds.len() } else { 1 }) {
            let shares = Shares::new(problem.batch(), problem.mask(), layout, ring)?;
            if !deals.iter().any(|d| d.shares.layout() == layout && d.shares.deal() == shares.deal()) {
                deals.push(Deal::new(counters, shares));
            }
        }
    }
    let width = |p: &Problem| (p.head_dim() + p.value_dim()) as u128;
    let work = |p: &Problem, d: &LayoutLoad| u128::from(d.largest.area) * p.heads() as u128 * width(p);
    let rows = |p: &Problem, d: &LayoutLoad| {
        u128::from(d.largest.needed) * p.kv_heads() as u128 * width(p) * p.dtype().size() as u128
    };
    Ok(best(deals, |d| d.sum(kinds, work), |d| d.sum(kinds, rows)))
}

/// The refusal of one of several kinds, with its index.
fn of_kind(mut error: Error, i: usize, kinds: usize) -> Error {
    if let (Error::Invalid { argument: name, .. } | Error::Unsupported { option: name, .. }, true) =
        (&mut error, kinds > 1)
    {
        *name = format!("{name} of kinds[{i}]");
    }
    error
}

impl Plan {
    /// The plans of a model whose layers are of several kinds: each kind as a problem and the number of its layers. All
    /// of them have the mesh and the tokens that cost all layers together the least, so they have one
    /// [`distribution`](Plan::distribution). Plans come in the order of the kinds.
    ///
    /// # Errors
    /// No kinds, a kind of no layers, kinds over different documents, and those of [`Choice::new`] and
    /// [`PlanBuilder::tokens_of`](super::PlanBuilder::tokens_of).
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Mask, Options, Plan, Problem};
    /// let full = Problem::new(Batch::from_lengths(&[9000, 700, 2500])?, 8, 8, 64, Dtype::Bf16);
    /// let windowed = full.clone().with_mask(Mask::sliding(512));
    /// // Five windowed layers for each full one, as Gemma 3 has.
    /// let plans = Plan::auto_for(&[(full, 8), (windowed, 40)], 4, Options::default())?;
    /// assert_eq!(plans[0].distribution(), plans[1].distribution());
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn auto_for(kinds: &[(Problem, usize)], world: usize, options: Options) -> Result<Vec<Self>> {
        let Some((first, _)) = kinds.first() else {
            return Err(Error::invalid("kinds", "none", "at least one problem and its number of layers"));
        };
        for (i, (problem, layers)) in kinds.iter().enumerate() {
            problem.check().map_err(|error| of_kind(error, i, kinds.len()))?;
            if !(1..=u32::MAX as usize).contains(layers) {
                return Err(Error::invalid("layers", layers, format!("1 to {}", u32::MAX)));
            }
            super::distribution::same_batch(problem.batch(), first.batch())?;
        }
        let heads = kinds.iter().map(|(p, _)| p.heads()).min().unwrap_or(1);
        let whole = kinds.iter().any(|(p, _)| p.kind == AttentionKind::Other);
        let mut counters: Vec<LoadCounter> = kinds.iter().map(|(problem, _)| LoadCounter::new(problem)).collect();
        let mut best: Option<(u128, Mesh, Deal)> = None;
        for mesh in meshes(world, heads, whole, options.ranks_per_node)? {
            let deal = best_deal(kinds, &mut counters, mesh.ring)?;
            let cost = deal.sum(kinds, |p, d| judge(p, mesh, d, Choice::BALANCE, options.ranks_per_node).cost);
            if best.as_ref().is_none_or(|b| cost < b.0) {
                best = Some((cost, mesh, deal));
            }
        }
        let (_, mesh, deal) = best.ok_or_else(|| Error::invalid("world", world, "a mesh that fits the problems"))?;
        kinds
            .iter()
            .enumerate()
            .map(|(i, (problem, _))| {
                super::check(problem, mesh, options).map_err(|error| of_kind(error, i, kinds.len()))?;
                Ok(Self::over(problem, mesh, deal.shares.clone(), options))
            })
            .collect()
    }
}
