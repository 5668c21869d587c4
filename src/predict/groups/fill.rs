// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fills the groups of a pass with documents.
//!
//! For a target cost of the pass each document needs a smallest size of groups: one that has room for it, and whose
//! cost is below the target. The largest sizes come first. A document goes to a group that is there already and stays
//! below the target with it, else it opens one on ranks that are free. Sizes divide each other and are opened in
//! descending order, so ranks that are free never have gaps, and first ranks are multiples of sizes.
//!
//! A long document costs much for each of its tokens, and a pack of short ones that fills the room of a rank costs
//! little. So passes differ: the first ones have the longest documents, and short ones only to fill them up. How long
//! a pass is follows from how well its ranks are used: several targets are tried for it. `search` decides that.

use alloc::{collections::BinaryHeap, vec, vec::Vec};
use core::cmp::Reverse;

use super::{cost::CostTable, limits::GroupLimits};

/// A group of a pass.
#[derive(Clone, Debug)]
pub(super) struct Bin {
    pub first_rank: usize,
    /// Its place among the sizes.
    pub size: usize,
    pub cost: u64,
    tokens: u64,
    pub documents: Vec<u32>,
}

/// How full a bin is: of its tokens or of its target, whichever is more, in 2⁻²⁰; and its index.
type Fullness = Reverse<(u64, usize)>;

pub(super) struct DocumentList<'a> {
    pub lengths: &'a [u64],
    costs: &'a CostTable,
    pub limits: &'a GroupLimits,
    /// Indices of documents, the longest first.
    pub order: Vec<u32>,
}

impl<'a> DocumentList<'a> {
    pub(super) fn new(lengths: &'a [u64], costs: &'a CostTable, limits: &'a GroupLimits) -> Self {
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        order.sort_by_key(|&d| (Reverse(lengths[d as usize]), d));
        Self { lengths, costs, limits, order }
    }

    fn cost(&self, document: u32, size: usize) -> u64 {
        self.costs.of_documents[document as usize * self.limits.sizes.len() + size]
    }

    /// Tokens of a group.
    fn room(&self, size: usize) -> u64 {
        (self.limits.sizes[size] as u64).saturating_mul(self.limits.room as u64)
    }

    /// The sizes that have room for a document.
    fn sizes(&self, document: u32) -> impl Iterator<Item = usize> + '_ {
        let n = self.lengths[document as usize];
        (0..self.limits.sizes.len()).filter(move |&size| self.room(size) >= n)
    }

    pub(super) fn least_fixed(&self) -> u64 {
        self.costs.fixed.iter().copied().min().unwrap_or(0)
    }

    /// The least rank time of a document on any size of groups.
    pub(super) fn work(&self, document: u32) -> u64 {
        let times = self.sizes(document).map(|s| self.cost(document, s).saturating_mul(self.limits.sizes[s] as u64));
        times.min().unwrap_or(0)
    }

    /// That of all these documents.
    pub(super) fn work_of(&self, list: &[u32]) -> u64 {
        list.iter().map(|&d| self.work(d)).fold(0, u64::saturating_add)
    }

    /// The least cost of a document alone.
    pub(super) fn least(&self, document: u32) -> u64 {
        self.sizes(document).map(|s| self.cost(document, s) + self.costs.fixed[s]).min().unwrap_or(0)
    }

    /// The smallest size with a cost of at most `target`; with `all`, else the one with the least cost.
    fn class(&self, document: u32, target: u64, all: bool) -> Option<usize> {
        let cost = |&size: &usize| self.cost(document, size) + self.costs.fixed[size];
        let small = self.sizes(document).find(|size| cost(size) <= target);
        small.or_else(|| self.sizes(document).min_by_key(cost).filter(|_| all))
    }

    /// Fills one pass with documents of `order`, the longest first. With `all` those without room below the target
    /// raise it, and None is returned if one finds no room.
    pub(super) fn pass(&self, order: &[u32], target: u64, all: bool) -> Option<Vec<Bin>> {
        let sizes = self.limits.sizes.len();
        let mut classes: Vec<Vec<u32>> = vec![vec![]; sizes];
        let mut previous: Option<(u64, Option<usize>)> = None;
        for &d in order {
            let n = self.lengths[d as usize];
            let class = match previous {
                Some((length, class)) if length == n => class,
                _ => self.class(d, target, all),
            };
            previous = Some((n, class));
            if let Some(class) = class {
                classes[class].push(d);
            }
        }
        let mut filling = Filling {
            documents: self,
            target,
            bins: vec![],
            heaps: vec![BinaryHeap::new(); sizes],
            used: 0,
            tokens: 0,
        };
        let room = (self.limits.room as u64).saturating_mul(self.limits.world as u64);
        for (class, list) in classes.iter().enumerate().rev() {
            if class == 0 {
                // All ranks that are left work, each group with about as much.
                while filling.open(0).is_some() {}
            }
            for &d in list {
                let placed = filling.place(d, class, all);
                if all && !placed {
                    return None;
                }
                // What has no room in the last few tokens waits for the next pass.
                if !all && (room - filling.tokens) * 512 < room {
                    break;
                }
            }
        }
        filling.bins.retain(|bin| !bin.documents.is_empty());
        Some(filling.bins)
    }
}

struct Filling<'a> {
    documents: &'a DocumentList<'a>,
    /// The cost that groups may reach.
    target: u64,
    bins: Vec<Bin>,
    /// For each size the bins, the least full first.
    heaps: Vec<BinaryHeap<Fullness>>,
    /// Ranks that have groups.
    used: usize,
    /// Tokens of all documents in groups.
    tokens: u64,
}

impl Filling<'_> {
    /// A new group.
    fn open(&mut self, size: usize) -> Option<usize> {
        let ranks = self.documents.limits.sizes[size];
        if self.used + ranks > self.documents.limits.world {
            return None;
        }
        let cost = self.documents.costs.fixed[size];
        self.bins.push(Bin { first_rank: self.used, size, cost, tokens: 0, documents: vec![] });
        self.used += ranks;
        let bin = self.bins.len() - 1;
        let fullness = self.fullness(bin);
        self.heaps[size].push(Reverse((fullness, bin)));
        Some(bin)
    }

    fn fullness(&self, bin: usize) -> u64 {
        let one = &self.bins[bin];
        let part = |of: u64, all: u64| (u128::from(of) << 20).div_euclid(u128::from(all.max(1))) as u64;
        part(one.cost, self.target).max(part(one.tokens, self.documents.room(one.size)))
    }

    fn has_room(&self, bin: usize, n: u64) -> bool {
        self.bins[bin].tokens + n <= self.documents.room(self.bins[bin].size)
    }

    /// Whether a group took the document.
    fn place(&mut self, document: u32, class: usize, all: bool) -> bool {
        let n = self.documents.lengths[document as usize];
        let after = |this: &Self, bin: usize| this.bins[bin].cost + this.documents.cost(document, this.bins[bin].size);
        // The least full group of each size.
        let least = |this: &Self, size: usize| this.heaps[size].peek().map(|Reverse((_, bin))| *bin);
        let fits = |this: &Self, bin: usize| this.has_room(bin, n) && after(this, bin) <= this.target;
        let sizes = class..self.heaps.len();
        let there = sizes.clone().filter_map(|size| least(self, size)).find(|&bin| fits(self, bin));
        let mut bin = there.or_else(|| self.open(class));
        if all && bin.is_none() {
            let with_room = |bin: &usize| self.bins[*bin].size >= class && self.has_room(*bin, n);
            let tops = sizes.filter_map(|size| least(self, size)).filter(with_room);
            let key = |bin: &usize| (after(self, *bin), *bin);
            bin = tops.min_by_key(key).or_else(|| (0..self.bins.len()).filter(with_room).min_by_key(key));
        }
        let Some(bin) = bin else { return false };
        let size = self.bins[bin].size;
        self.bins[bin].cost = after(self, bin);
        self.bins[bin].tokens += n;
        self.bins[bin].documents.push(document);
        self.tokens += n;
        self.lift(size, bin);
        true
    }

    /// Puts a bin that became fuller to its place in the heap.
    fn lift(&mut self, size: usize, bin: usize) {
        let fullness = self.fullness(bin);
        let heap = &mut self.heaps[size];
        if heap.peek().is_some_and(|Reverse((_, top))| *top == bin) {
            if let Some(mut top) = heap.peek_mut() {
                *top = Reverse((fullness, bin));
            }
        } else {
            heap.retain(|Reverse((_, other))| *other != bin);
            heap.push(Reverse((fullness, bin)));
        }
    }
}
