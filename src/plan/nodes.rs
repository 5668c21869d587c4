// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranks of a group lie in nodes: what [`Options::ranks_per_node`] means for a mesh, and what it refuses.

use alloc::format;

use super::{Gather, Options, Wire};
use crate::{
    error::{Error, Result},
    mesh::Mesh,
};

/// The ring ranks of a node: all of the ring where its rows do not cross from node to node, or cross once anyway.
pub(super) fn ring_ranks_of_node(mesh: Mesh, options: Options) -> usize {
    let per_node = options.ranks_per_node / mesh.ulysses;
    if per_node <= 1 || per_node >= mesh.ring { mesh.ring } else { per_node }
}

/// Refuses nodes that a mesh does not fit, and options that several nodes do not have.
pub(super) fn check(mesh: Mesh, options: Options) -> Result<()> {
    let (ranks, group) = (options.ranks_per_node, mesh.group());
    if ranks == 0 || ranks >= mesh.world() {
        return Ok(());
    }
    if !ranks.is_multiple_of(group) && !group.is_multiple_of(ranks) {
        return Err(Error::invalid(
            "options.ranks_per_node",
            ranks,
            format!("a multiple or a divisor of the {group} ranks of {mesh}"),
        )
        .hint("ranks that share a batch fill whole nodes, or lie in one"));
    }
    if ranks < group && !ranks.is_multiple_of(mesh.ulysses) {
        return Err(Error::invalid(
            "options.ranks_per_node",
            ranks,
            format!("a multiple of the {} Ulysses ranks of {mesh}", mesh.ulysses),
        )
        .hint("the ranks of one all-to-all lie in one node: give ulysses a divisor of ranks_per_node"));
    }
    if ring_ranks_of_node(mesh, options) == mesh.ring {
        return Ok(());
    }
    let refuse = |option: &'static str, why: &'static str| {
        Err(Error::unsupported(option, why, "leave it out, or leave out ranks_per_node"))
    };
    if options.reproducible {
        return refuse("reproducible over several nodes", "a node's rows do not lie in the order of positions");
    }
    if options.gather == Gather::Together {
        return refuse("gather together over several nodes", "the rows of other nodes have a buffer of their own");
    }
    if options.wire == Wire::Bf16 {
        return refuse("wire bf16 over several nodes", "a node's sum of gradients would be rounded before it is whole");
    }
    Ok(())
}
