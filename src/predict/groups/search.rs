// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many passes, and how long each is.
//!
//! Passes are filled one after another from the longest documents on. For each several targets are tried, around that
//! of the pass before; the longest one is taken among those that use rank time about best: the work of its documents
//! over what all ranks could do meanwhile. As soon as all documents that are left have room in one pass, it is also
//! tried as the last one. The cheapest whole wins.

use alloc::{vec, vec::Vec};

use super::{
    cost::CostTable,
    fill::{Bin, DocumentList},
    limits::{GroupLimits, Groups, RankGroup},
};

/// Targets of a last pass, in 64ths of its work spread evenly.
const LAST: [u64; 14] = [64, 65, 66, 67, 68, 70, 72, 75, 80, 88, 100, 116, 144, 192];

/// Targets of another pass, in 64ths of that of the pass before.
const NEXT: [u64; 8] = [128, 91, 76, 64, 54, 45, 38, 32];

/// Of a thousand parts of the best use of rank time: what a longer pass may use. One after another is tried, until the
/// whole is near the bound.
const ALIKE: [u64; 4] = [992, 1000, 975, 940];

/// 256ths of the bound that are near it.
const NEAR: u64 = 265;

/// None if the documents have no room in the passes that are allowed.
pub(super) fn search(lengths: &[u64], costs: &CostTable, limits: &GroupLimits) -> Option<Groups> {
    let documents = DocumentList::new(lengths, costs, limits);
    let left = &documents.order;
    let tokens = |list: &[u32]| list.iter().map(|&d| lengths[d as usize]).sum::<u64>();
    let world = limits.world as u64;
    let room = (limits.room as u64).saturating_mul(world);
    let least_passes = tokens(left).div_ceil(room).max(u64::from(!left.is_empty()));
    let largest = left.iter().map(|&d| documents.least(d)).max().unwrap_or(0);
    let even = documents.work_of(left).div_ceil(world) + documents.least_fixed() * least_passes;
    let bound = largest.max(even);
    let mut best: Option<(u64, Vec<Vec<Bin>>)> = None;
    for alike in ALIKE {
        attempt(&documents, alike, &mut best);
        if best.as_ref().is_some_and(|(least, _)| u128::from(*least) * 256 <= u128::from(bound) * u128::from(NEAR)) {
            break;
        }
    }
    let (makespan, passes) = best?;
    let passes = passes.into_iter().map(|bins| groups_of(bins, &limits.sizes)).collect();
    Some(Groups { passes, makespan, bound })
}

/// Fills passes one after another; `best` becomes the cheapest whole.
fn attempt(documents: &DocumentList<'_>, alike: u64, best: &mut Option<(u64, Vec<Vec<Bin>>)>) {
    let limits = documents.limits;
    let room = (limits.room as u64).saturating_mul(limits.world as u64);
    let most = if limits.passes == 0 { usize::MAX } else { limits.passes };
    let mut left = documents.order.clone();
    let (mut passes, mut before, mut previous): (Vec<Vec<Bin>>, u64, Option<u64>) = (vec![], 0, None);
    // A pass more has to gain a hundredth.
    let cheaper = |makespan: u64, best: &Option<(u64, Vec<Vec<Bin>>)>, passes: usize| {
        best.as_ref()
            .is_none_or(|(least, found)| makespan + if passes > found.len() { makespan / 100 } else { 0 } < *least)
    };
    while !left.is_empty() && passes.len() < most {
        let even = documents.work_of(&left).div_ceil(limits.world as u64);
        let tokens: u64 = left.iter().map(|&d| documents.lengths[d as usize]).sum();
        if tokens <= room
            && let Some(last) = last(documents, &left, even)
        {
            let makespan = before + length(&last);
            if cheaper(makespan, best, passes.len() + 1) {
                *best = Some((makespan, passes.iter().cloned().chain([last]).collect()));
            }
        }
        let Some((bins, target)) = next(documents, &left, previous, even, alike) else { return };
        previous = Some(target);
        before += length(&bins);
        let mut placed = vec![false; documents.lengths.len()];
        bins.iter().flat_map(|bin| &bin.documents).for_each(|&d| placed[d as usize] = true);
        left.retain(|&d| !placed[d as usize]);
        passes.push(bins);
        if best.as_ref().is_some_and(|(least, _)| before >= *least) {
            return;
        }
    }
    if left.is_empty() && cheaper(before, best, passes.len()) {
        *best = Some((before, passes));
    }
}

/// The cost of a pass.
fn length(bins: &[Bin]) -> u64 {
    bins.iter().map(|bin| bin.cost).max().unwrap_or(0)
}

/// The shortest pass with all these documents.
fn last(documents: &DocumentList<'_>, left: &[u32], even: u64) -> Option<Vec<Bin>> {
    let even = even + documents.least_fixed();
    let targets = LAST.map(|part| (u128::from(even) * u128::from(part) / 64) as u64);
    let largest = left.first().map_or(0, |&d| documents.least(d));
    let tried = targets.into_iter().chain([largest]).filter_map(|target| documents.pass(left, target.max(1), true));
    tried.min_by_key(|bins| length(bins))
}

/// A pass with some of these documents, and its target.
fn next(
    documents: &DocumentList<'_>,
    left: &[u32],
    previous: Option<u64>,
    even: u64,
    alike: u64,
) -> Option<(Vec<Bin>, u64)> {
    let largest = documents.least(*left.first()?);
    let targets: Vec<u64> = match previous {
        Some(previous) => NEXT.iter().map(|part| (u128::from(previous) * u128::from(*part) / 64) as u64).collect(),
        None => (0..12)
            .map(|half| (largest << (half / 2)) + if half % 2 == 1 { (largest << (half / 2)) / 2 } else { 0 })
            .rev()
            .collect(),
    };
    let mut tried: Vec<(u64, u64, Vec<Bin>)> = vec![];
    for target in targets.into_iter().chain([largest]) {
        if target < largest || target > 2 * even.max(largest) {
            continue;
        }
        let bins = documents.pass(left, target, false)?;
        let done: u64 = bins.iter().map(|bin| documents.work_of(&bin.documents)).sum();
        let ranks = u128::from(length(&bins).max(1)) * documents.limits.world as u128;
        tried.push(((u128::from(done) * 100_000 / ranks) as u64, target, bins));
    }
    let best = tried.iter().map(|(used, ..)| *used).max()?;
    tried.into_iter().find(|(used, ..)| used * 1000 >= best * alike).map(|(_, target, bins)| (bins, target))
}

fn groups_of(mut bins: Vec<Bin>, sizes: &[usize]) -> Vec<RankGroup> {
    bins.sort_by_key(|bin| bin.first_rank);
    let group = |Bin { first_rank, size, cost, mut documents, .. }| {
        documents.sort_unstable();
        RankGroup { first_rank, ranks: sizes[size], documents, cost }
    };
    bins.into_iter().map(group).collect()
}
