// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a document costs a group of each size.
//!
//! The planner rates a document alone on a group, zigzag, on the best mesh of so many ranks: by the busiest rank's time
//! on a machine, or by the rule of the automatic choice. It does so for two lengths in each octave. Between two of them
//! the cost grows as the pairs do, which is exact for attention and within 2 % for what grows with tokens. What even a
//! document of one token costs is the group's own cost, once for a pass: latencies.
//!
//! Costs of a pack are sums over its documents. That is right for what computes, and too much where messages of
//! several documents travel together; short documents are on small groups anyway.

use alloc::{vec, vec::Vec};

use super::limits::GroupLimits;
use crate::{
    batch::Batch,
    error::Result,
    layout::Layout,
    machine::Machine,
    mask::Mask,
    plan::{Choice, LoadCounter, Options, Problem, auto::meshes},
    predict::{aggregate, forms, rate},
};

/// The costs of documents, by size of groups.
pub(super) struct CostTable {
    /// What a group of each size costs in a pass, beside its documents.
    pub fixed: Vec<u64>,
    /// For each document and size the cost beyond `fixed`: entry `document · sizes + size`.
    pub of_documents: Vec<u64>,
}

/// A unit of cost: multiply-adds. So sums stay below 2⁶³.
const UNIT: u128 = 1 << 10;

/// The unit on a machine, in seconds.
const PICOSECOND: f64 = 1e-12;

impl CostTable {
    pub(super) fn new(
        problem: &Problem,
        limits: &GroupLimits,
        machine: Option<&Machine>,
        lengths: &[u64],
    ) -> Result<Self> {
        let sizes = limits.sizes.len();
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let knots = knots(longest);
        let mut rating = Rating::new(problem, limits, machine);
        let mut table = vec![0; knots.len() * sizes];
        for (row, &n) in table.chunks_exact_mut(sizes).zip(&knots) {
            rating.document(n, row)?;
        }
        let fixed = table[..sizes].to_vec();
        table.chunks_exact_mut(sizes).for_each(|row| row.iter_mut().zip(&fixed).for_each(|(c, f)| *c -= (*f).min(*c)));
        // A longer document costs no less.
        for at in sizes..table.len() {
            table[at] = table[at].max(table[at - sizes]);
        }
        let areas: Vec<u64> = knots.iter().map(|&n| area(problem.mask(), n)).collect();
        let mut of_documents = vec![0; lengths.len() * sizes];
        for (out, &n) in of_documents.chunks_exact_mut(sizes).zip(lengths) {
            if n == 0 {
                continue;
            }
            let upper = knots.partition_point(|&knot| knot < n);
            let lower = upper.saturating_sub(1);
            let (least, most) = (areas[lower], areas[upper]);
            let (part, whole) = (area(problem.mask(), n) - least, (most - least).max(1));
            for (s, out) in out.iter_mut().enumerate() {
                let (a, b) = (table[lower * sizes + s], table[upper * sizes + s]);
                // At least 1, so that documents are spread even where they cost nothing.
                *out = (a + (u128::from(b - a) * u128::from(part) / u128::from(whole)) as u64).max(1);
            }
        }
        Ok(Self { fixed, of_documents })
    }
}

/// Lengths from 1 on, two in each octave, the last one `longest`.
fn knots(longest: u64) -> Vec<u64> {
    let octaves = (0..40).map(|k| 1u64 << k).flat_map(|n| [n, n + n / 2]);
    let mut knots: Vec<u64> = octaves.take_while(|&n| n < longest).chain([longest]).collect();
    knots.dedup();
    knots
}

/// The pairs of a document.
fn area(mask: Mask, n: u64) -> u64 {
    mask.area(0, n as i64, n as i64) as u64
}

/// The planner's model, for documents alone.
struct Rating<'a> {
    problem: &'a Problem,
    limits: &'a GroupLimits,
    machine: Option<&'a Machine>,
}

impl<'a> Rating<'a> {
    const fn new(problem: &'a Problem, limits: &'a GroupLimits, machine: Option<&'a Machine>) -> Self {
        Self { problem, limits, machine }
    }

    /// The cost of a document of `n` tokens on each size of groups.
    fn document(&mut self, n: u64, out: &mut [u64]) -> Result<()> {
        let p = self.problem;
        let batch = Batch::from_lengths(&[n as usize])?;
        let alone = Problem::new(batch, p.heads(), p.kv_heads(), p.head_dim(), p.dtype())
            .with_value_dim(p.value_dim())
            .with_mask(p.mask())
            .with_kind(p.kind());
        for (&ranks, out) in self.limits.sizes.iter().zip(out) {
            let tokens = n.div_ceil(ranks as u64);
            *out = match self.machine {
                Some(machine) => on(&alone, ranks, tokens, self.limits, machine)?,
                None => by_rule(&alone, ranks, tokens, self.limits)?,
            };
        }
        Ok(())
    }
}

/// By the rule of the automatic choice.
fn by_rule(alone: &Problem, ranks: usize, tokens: u64, limits: &GroupLimits) -> Result<u64> {
    let nodes = if ranks <= limits.ranks_per_node { 0 } else { limits.ranks_per_node };
    let choice = Choice::among(alone, ranks, Choice::BALANCE, nodes, Some(layout(ranks)))?;
    let attention = choice.candidates.iter().map(|c| c.cost).min().unwrap_or(0);
    // Two operations for a multiply-add; a backward has twice the products of a forward.
    let others = u128::from(tokens) * u128::from(limits.token_flops) * 3 / 2;
    Ok(u64::try_from((attention + others) / UNIT).unwrap_or(u64::MAX >> 1))
}

/// On a machine: the best mesh by the busiest rank's time.
fn on(alone: &Problem, ranks: usize, tokens: u64, limits: &GroupLimits, machine: &Machine) -> Result<u64> {
    let kernels = aggregate::kernels(alone, machine)?;
    let whole = alone.kind() == crate::plan::AttentionKind::Other;
    let (mut counter, mut best) = (LoadCounter::new(alone), f64::INFINITY);
    for mesh in meshes(ranks, alone.heads(), whole, 0)? {
        let loads = counter.load(layout(mesh.ring), mesh.ring)?;
        for found in rate(alone, mesh, &loads, machine, &kernels, forms(Options::new(), machine))? {
            best = best.min(found.seconds());
        }
    }
    let others = tokens as f64 * limits.token_flops as f64 * 3.0 / kernels.rates[0].rate;
    Ok(((best + others) / PICOSECOND).min((u64::MAX >> 1) as f64) as u64)
}

/// The layout that cuts a document evenly.
const fn layout(ranks: usize) -> Layout {
    if ranks == 1 { Layout::Contiguous } else { Layout::Zigzag }
}
