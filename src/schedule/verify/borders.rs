// SPDX-License-Identifier: MIT OR Apache-2.0
//! The borders between nodes: that what crosses them is the least that can be, on cards that are loaded evenly.
//!
//! A row that is fetched into a node crosses its border once at most, and never into the node that owns it; a row that no
//! rank of the node reads is a flaw of its own (`execute`). So, for each Ulysses rank by itself, the rows that cross are exactly those that are needed there and
//! not held there, once each. Gradients are the same rows on the way back: each leaves a node once, and not the owner's.
//!
//! An owner must send what other nodes need of its share; where the mask makes that uneven, no choice of gateways changes it.
//! Of what crosses from one node to another no other rank carries more than the busiest owner, or than 1.1 × the mean.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::String,
    vec,
    vec::Vec,
};

use super::cell::{Cell, What};
use crate::{batch::Side, plan::Plan, schedule::TensorId};

/// A row that was fetched into a node, or whose gradient left one: content, token, head, node, Ulysses rank.
type Crossing = (What, u32, u32, usize, usize);

/// What has crossed so far.
pub(super) struct NodeBorders {
    /// Ranks of a node, and Ulysses ranks.
    ranks: usize,
    ulysses: usize,
    /// The node that holds each token of q's side, and of k's.
    homes: [Vec<u32>; 2],
    crossed: BTreeSet<Crossing>,
    /// Bytes by the owner's node, the other one, and the way; of each the owners' and the gateways', by rank.
    flows: BTreeMap<(usize, usize, bool), [BTreeMap<usize, u64>; 2]>,
}

impl NodeBorders {
    /// None where the group has one level.
    pub fn new(plan: &Plan) -> Option<Self> {
        let (mesh, ring_ranks) = (plan.mesh(), plan.ring_ranks_of_node());
        if ring_ranks == mesh.ring {
            return None;
        }
        let ranks = ring_ranks * mesh.ulysses;
        let homes = [Side::Q, Side::K].map(|side| {
            let mut of = vec![0; plan.problem().batch().tokens(side)];
            for rank in 0..mesh.group() {
                plan.for_each_token(side, rank, |token, _, _| of[token] = (rank / ranks) as u32);
            }
            of
        });
        Some(Self { ranks, ulysses: mesh.ulysses, homes, crossed: BTreeSet::new(), flows: BTreeMap::new() })
    }

    /// Whether two ranks (indices of the group) lie in different nodes.
    pub fn apart(&self, a: usize, b: usize) -> bool {
        a / self.ranks != b / self.ranks
    }

    /// A run of rows, of which `first` is the first, goes from one node to another: fetched, or a gradient on its way `home`.
    /// Returns what is wrong with that.
    pub fn cross(&mut self, from: usize, to: usize, home: bool, first: Cell, rows: u64) -> Option<String> {
        let node = if home { from } else { to } / self.ranks;
        let way = if home { "from" } else { "to" };
        let side = match first.what {
            What::Input(TensorId::K | TensorId::V) | What::Sum(TensorId::Dk | TensorId::Dv) => Side::K,
            _ => Side::Q,
        };
        (0..rows).map(|row| first.after(row)).find_map(|cell| {
            if !self.crossed.insert((cell.what, cell.token, cell.head, node, to % self.ulysses)) {
                return Some(format!("sends {} {way} node {node} again", cell.describe()));
            }
            let owner = self.homes[side as usize].get(cell.token as usize).is_some_and(|&n| n as usize == node);
            owner.then(|| format!("sends {} {way} node {node}, which holds it", cell.describe()))
        })
    }

    /// Counts the bytes of a message that crosses.
    pub fn count(&mut self, from: usize, to: usize, home: bool, bytes: u64) {
        let (owner, gateway) = if home { (to, from) } else { (from, to) };
        let [owners, gateways] = self.flows.entry((owner / self.ranks, gateway / self.ranks, home)).or_default();
        *owners.entry(owner).or_default() += bytes;
        *gateways.entry(gateway).or_default() += bytes;
    }

    /// A gateway (index of the group) that carries too much, and what is wrong with that.
    pub fn uneven(&self) -> Option<(usize, String)> {
        self.flows.iter().find_map(|((owner, node, _), [owners, gateways])| {
            let busiest = owners.values().copied().max().unwrap_or(0);
            let all: u64 = gateways.values().sum();
            let (&gateway, &most) = gateways.iter().max_by_key(|(_, bytes)| **bytes)?;
            let limit = busiest.max(11 * all / (10 * self.ranks as u64));
            let text = || {
                format!(
                    "{most} of {all} bytes between nodes {owner} and {node} are this rank's, and no owner has more than {busiest}"
                )
            };
            (most > limit).then(|| (gateway, text()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Layout, Mesh, Options, Problem};

    /// Four ring ranks in two nodes, sixteen tokens.
    fn borders() -> NodeBorders {
        let problem = Problem::new(Batch::from_lengths(&[16]).unwrap(), 2, 1, 8, Dtype::F32);
        let options = Options::new().ranks_per_node(2);
        let plan = Plan::with_options(&problem, Mesh::ring(4).unwrap(), Layout::Contiguous, options).unwrap();
        NodeBorders::new(&plan).unwrap()
    }

    #[test]
    fn what_crosses_too_often_or_needlessly() {
        let mut b = borders();
        assert!(b.apart(1, 2) && !b.apart(2, 3));
        let k = |token| Cell::new(What::Input(TensorId::K), token, 0, 0);
        // Token 3 is rank 0's.
        assert_eq!(b.cross(0, 2, false, k(3), 1), None);
        assert!(b.cross(0, 3, false, k(3), 1).unwrap().ends_with("to node 1 again"));
        assert!(b.cross(2, 1, false, k(3), 1).unwrap().ends_with("to node 0, which holds it"));
        // Its gradient leaves node 1 once, and node 0 never.
        let dk = Cell::new(What::Sum(TensorId::Dk), 3, 0, 5);
        assert_eq!(b.cross(2, 0, true, dk, 1), None);
        assert!(b.cross(3, 0, true, dk, 1).unwrap().ends_with("from node 1 again"));
        assert!(b.cross(1, 2, true, dk, 1).unwrap().ends_with("from node 0, which holds it"));
    }

    #[test]
    fn a_gateway_that_carries_too_much() {
        let mut b = borders();
        b.count(0, 2, false, 100);
        b.count(1, 3, false, 100);
        assert_eq!(b.uneven(), None);
        // The owner has no choice.
        b.count(0, 2, false, 50);
        assert_eq!(b.uneven(), None);
        // A gateway has: back to owners that are alike, one of two carries three quarters.
        for (gateway, owner, bytes) in [(2, 0, 100), (2, 1, 50), (3, 1, 50)] {
            b.count(gateway, owner, true, bytes);
        }
        let (rank, text) = b.uneven().unwrap();
        assert!(rank == 2 && text.contains("150 of 200 bytes") && text.contains("more than 100"), "{text}");
    }
}
