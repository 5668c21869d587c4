// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nodes of ranks: the meaning of [`Options::ranks_per_node`] for a mesh, and its refusals.
//!
//! Nodes are equal and consecutive: rank r is in node `r / ranks_per_node`. Any list of groups that a mesh can use is
//! of this kind, so a list is only a way to say the number ([`ranks_per_node`]), and racks are nodes.
//!
//! Two levels matter only if more than one rank of a node needs a row of another node. On a ring over several nodes
//! this is so if a node has several ring ranks, or ranks that hold the same kv head; in an all-to-all over several
//! nodes, if ranks of one node hold the same kv head. Otherwise plans have the schedules of one level, which send as
//! few bytes, except with `reproducible`, where the partials of all q heads cross.
//!
//! The part of a mesh's bytes that crosses between nodes ([`crossing`]) is computed here for both choices: the rules of
//! thumb, and the description of a machine.

use alloc::{collections::BTreeMap, format};

use super::{LayoutLoad, Options, Problem, area::Load};
use crate::{
    error::{Error, Result},
    heads::{HeadCounts, carried_kv, shared_kv_in},
    layout::Layout,
    mesh::Mesh,
};

/// The value of [`Options::ranks_per_node`] for ranks in these nodes. `nodes[r]` is a number of rank r's node: equal
/// for the ranks of one node, different for different nodes. A rack, or any group of ranks behind a slow link, is a
/// node too.
///
/// # Errors
/// No ranks; nodes whose ranks are not numbered one after another, or nodes of different sizes. Where sizes differ, a
/// number that divides them all may be given in place of this one: rows then cross once to each such part of a node.
///
/// ```
/// use cpattn::plan::ranks_per_node;
/// assert_eq!(ranks_per_node(&[7, 7, 7, 2, 2, 2])?, 3);
/// assert!(ranks_per_node(&[0, 1, 0, 1]).is_err() && ranks_per_node(&[0, 0, 1]).is_err());
/// # Ok::<(), cpattn::Error>(())
/// ```
pub fn ranks_per_node(nodes: &[u64]) -> Result<usize> {
    let mut first_of: BTreeMap<u64, usize> = BTreeMap::new();
    let mut first = 0;
    for node in nodes.chunk_by(|a, b| a == b) {
        if let Some(earlier) = first_of.insert(node[0], first) {
            let found = format!("{}, the node of rank {earlier}", node[0]);
            let expected = format!("{}, the node of rank {}, or a node not seen before", nodes[first - 1], first - 1);
            return Err(Error::invalid(format!("nodes[{first}]"), found, expected)
                .hint("ranks of a node must have adjacent numbers: let the launcher number the ranks node by node"));
        }
        first += node.len();
    }
    let mut sizes = nodes.chunk_by(|a, b| a == b).map(<[u64]>::len);
    let size = sizes.next().ok_or_else(|| Error::invalid("nodes", "empty", "the node of each rank"))?;
    match sizes.enumerate().find(|(_, other)| *other != size) {
        None => Ok(size),
        Some((before, other)) => {
            let argument = format!("nodes[{}]", (before + 1) * size);
            let expected = format!("a node of size {size}, as that of rank 0");
            Err(Error::invalid(argument, format!("a node of size {other}"), expected)
                .hint("start the same number of ranks on each node, or let ranks_per_node be a number that divides all of them"))
        }
    }
}

/// Whether the ranks of an all-to-all lie in one node. The automatic choice requires this, because nothing is computed
/// during an all-to-all, while ring steps overlap with kernels.
pub(super) fn holds_ulysses(ulysses: usize, world: usize, ranks_per_node: usize) -> bool {
    ranks_per_node == 0 || ranks_per_node >= world || ranks_per_node.is_multiple_of(ulysses)
}

/// A part of a whole: `of.0 / of.1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fraction {
    pub of: (u64, u64),
}

impl Fraction {
    /// This part of some bytes, rounded down.
    pub(crate) fn bytes(self, bytes: u128) -> u128 {
        bytes * u128::from(self.of.0) / u128::from(self.of.1)
    }

    /// The part as a number from 0 to 1.
    pub(crate) fn as_f64(self) -> f64 {
        self.of.0 as f64 / self.of.1 as f64
    }
}

/// The parts of a mesh's bytes that cross between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CrossingShares {
    /// Part of the bytes of the all-to-alls.
    pub exchanged: Fraction,
    /// Part of the bytes of needed rows and their gradients.
    pub rows: Fraction,
    /// Number of ranks of a node that receive such rows from other nodes.
    pub ranks: u64,
    /// Whether needed rows come from a few neighbours only.
    pub near: bool,
}

/// The traffic between nodes of `node` ranks. Rows that cross once are passed on inside the node: each of its ring
/// ranks receives its part of them from outside. If several Ulysses ranks of a node hold the same kv head, they divide
/// this part of k and v.
///
/// The model: the rows that a rank needs come evenly from all ring ranks that can have them. If a window or short
/// documents make these fewer than all, they are the neighbours in layouts of runs of the pack, so the first rank of a
/// node gets all its rows from other nodes; in other layouts they are any ranks. Crossing once divides the bytes by the
/// number of readers of a row in a node, which is small if a rank needs few rows.
pub(crate) fn crossing(
    problem: &Problem,
    mesh: Mesh,
    loads: &LayoutLoad,
    node: usize,
    NodeRanks { ring: ring_ranks, ring_holders: holders, .. }: NodeRanks,
) -> CrossingShares {
    let load = &loads.largest;
    let (ring, ulysses) = (mesh.ring as u64, mesh.ulysses as u64);
    let in_node = ((node / mesh.ulysses) as u64).clamp(1, ring);
    let readers = if ring_ranks < mesh.ring { ring_ranks as u64 } else { 1 };
    let steps = ring_steps(mesh, load);
    let near = matches!(loads.layout, Layout::Contiguous | Layout::ZigzagPack) && (1..ring - 1).contains(&steps);
    let rows = match ring {
        1 => (0, 1),
        _ if in_node == ring => (0, 1),
        // A gateway has the rows of one owner, and there are `steps` owners, all neighbours.
        _ if near => (1, readers.min(steps.max(1))),
        _ if load.needed * readers <= load.k_tokens * (ring - 1) => (ring - in_node, ring - 1),
        _ => ((ring - in_node) * load.k_tokens, load.needed * readers),
    };
    let ranks = ulysses * if near { in_node.min(steps.max(1)) } else { in_node };
    let exchanged = if ulysses > 1 { (ulysses - ulysses.min(node as u64), ulysses - 1) } else { (0, 1) };
    let rows = if holders == 1 {
        rows
    } else {
        let heads = problem.head_numbers();
        let (carried, carriers) = carried_kv(holders, mesh.ulysses, heads);
        (rows.0 * carried, rows.1 * carriers * u64::from(HeadCounts::new(mesh.ulysses, heads).kv))
    };
    CrossingShares { exchanged: Fraction { of: exchanged }, rows: Fraction { of: rows }, ranks, near }
}

/// Ring steps that bring rows.
pub(crate) fn ring_steps(mesh: Mesh, load: &Load) -> u64 {
    load.needed.div_ceil(load.k_tokens.max(1)).min(mesh.ring as u64 - 1)
}

/// The ring ranks in a node; 1 also if the node's ranks are a part of one all-to-all.
pub(super) fn ring_ranks_in_node(mesh: Mesh, options: Options) -> usize {
    (options.ranks_per_node / mesh.ulysses).max(1)
}

/// The ranks of a node that pass rows on to each other, each row of which crosses to the node once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeRanks {
    /// Ring ranks: the whole ring if its rows do not cross nodes, or if a node has one ring rank, to which each row
    /// crosses once anyway (unless `ring_holders` divide it).
    pub ring: usize,
    /// Ulysses ranks: all ranks of an all-to-all if they lie in one node, or if no rank of a node holds a kv head of
    /// another, so that each row crosses only once anyway (but in `reproducible`, where the partials of all q heads
    /// cross).
    pub ulysses: usize,
    /// Ulysses ranks that divide among them the rows of k and v that cross on the ring: 1 if the ring lies in one node,
    /// or if no two of them hold the same kv head.
    pub ring_holders: usize,
}

impl NodeRanks {
    pub(crate) fn new(problem: &Problem, mesh: Mesh, options: Options) -> Self {
        let (per_node, in_node) = (options.ranks_per_node, ring_ranks_in_node(mesh, options));
        let shared = |ranks| shared_kv_in(ranks, mesh.ulysses, problem.head_numbers());
        let ranks = per_node.min(mesh.ulysses);
        let gateways = 1 < per_node && per_node < mesh.ulysses && shared(per_node);
        let divide = 0 < per_node && per_node < mesh.group() && mesh.ring > 1 && shared(ranks);
        Self {
            ring: if in_node == 1 || in_node >= mesh.ring { mesh.ring } else { in_node },
            ulysses: if gateways { per_node } else { mesh.ulysses },
            ring_holders: if divide { ranks } else { 1 },
        }
    }
}

/// Refuses nodes that a mesh does not fit.
pub(super) fn check(mesh: Mesh, options: Options) -> Result<()> {
    let (ranks, group, ulysses) = (options.ranks_per_node, mesh.group(), mesh.ulysses);
    if ranks == 0 || ranks >= mesh.world() {
        return Ok(());
    }
    let fit = |a: usize, b: usize| a.is_multiple_of(b) || b.is_multiple_of(a);
    let (expected, hint) = if !mesh.world().is_multiple_of(ranks) {
        (
            format!("a divisor of the {} ranks of {mesh}", mesh.world()),
            "all nodes must have the same number of ranks: give a number that divides the ranks of each node",
        )
    } else if !fit(ranks, group) {
        (
            format!("a multiple or a divisor of the {group} ranks of one replica of {mesh}"),
            "the ranks that share a batch must fill whole nodes, or lie in one node",
        )
    } else if !fit(ranks, ulysses) {
        (
            format!("a multiple or a divisor of the {ulysses} Ulysses ranks of {mesh}"),
            "let ulysses be a divisor of ranks_per_node, so that the ranks of one all-to-all lie in one node",
        )
    } else {
        return Ok(());
    };
    Err(Error::invalid("options.ranks_per_node", ranks, expected).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn lists_of_groups_that_are_refused() {
        for (nodes, said) in [
            (&[][..], "nodes is empty, expected the node of each rank"),
            (&[4, 4, 9, 4], "nodes[3] is 4, the node of rank 0, expected 9, the node of rank 2, or a node not seen"),
            (&[1, 1, 1, 2], "nodes[3] is a node of size 1, expected a node of size 3, as that of rank 0"),
        ] {
            let text = ranks_per_node(nodes).unwrap_err().to_string();
            assert!(text.contains(said), "{text}");
        }
        assert_eq!(ranks_per_node(&[5]).unwrap(), 1);
        assert_eq!(ranks_per_node(&[3; 8]).unwrap(), 8);
    }
}
