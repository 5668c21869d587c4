// SPDX-License-Identifier: MIT OR Apache-2.0
//! The borders between nodes: the bytes that cross are the minimum, and network cards are loaded evenly.
//!
//! A row crosses into a node at most once, and never into the node that owns it; a row that no rank of the node reads
//! is a separate flaw (`execute`). So the rows that cross are exactly those that the node needs and does not hold, once
//! each, whichever ranks of the node hold a head. Gradients are the same rows on the way back: each leaves a node once,
//! except at the owner's node. This holds for the ring and for all-to-alls.
//!
//! In the ordered form a gradient of k or v is a sum over q heads, from the first on. If an all-to-all has gateways, a
//! node that has the first q head sends one sum; from other nodes, and without gateways, each partial crosses once. A
//! partial without contributions does not identify its q head, and is not checked.
//!
//! Rows are stored as runs of tokens, as operations move them: the cost of a run does not depend on its length.
//!
//! An owner must send the rows of its share that other nodes need; if the mask makes that uneven, no choice of gateways
//! changes it. Of the bytes from one node to another no other rank carries more than the busiest owner, or than 1.1 ×
//! the mean. On the ring an owner is a share: all ranks of its Ulysses group that hold a head can send it, and its part
//! is the minimum load of the busiest of them, rounded to whole rows.

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};

use core::ops::Range;

use super::cell::{Cell, What};
use crate::{batch::Side, plan::Plan, schedule::TensorId};

/// Rows that crossed into a node, or whose gradients left it: content, head, node, and the first token of a run.
type Crossing = (What, u32, usize, u32);

/// Consecutive tokens that one node holds: first, end, node.
type Home = (u32, u32, usize);

/// Whether the content is k, v or a gradient of k or v.
fn is_of_keys(what: What) -> bool {
    matches!(what, What::Input(TensorId::K | TensorId::V) | What::Sum(TensorId::Dk | TensorId::Dv))
}

/// The rows of one kind from one node to another, or their gradients on the way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Flow {
    owner: usize,
    other: usize,
    home: bool,
    /// On the ring, not in an all-to-all.
    on_ring: bool,
    of_keys: bool,
}

/// The rows and bytes that have crossed so far.
pub(super) struct NodeBorders {
    /// Ranks of a node.
    ranks: usize,
    /// Whether all-to-alls have gateways.
    gateways: bool,
    /// q and kv heads of each Ulysses rank, and bytes of k and v for one head at most.
    heads: Vec<[Range<u32>; 2]>,
    row: u64,
    /// Who holds the tokens of q's side, and of k's, in ascending order.
    homes: [Vec<Home>; 2],
    /// The end of each run; runs with the same content, head and node neither overlap nor touch.
    crossed: BTreeMap<Crossing, u32>,
    /// Bytes by owner (a rank, or on the ring a share), and by gateway (a rank).
    flows: BTreeMap<Flow, [BTreeMap<usize, u64>; 2]>,
}

impl NodeBorders {
    /// `None` if the group lies in one node, or if each rank is a node.
    pub(super) fn new(plan: &Plan) -> Option<Self> {
        let (mesh, ranks, p) = (plan.mesh(), plan.options().ranks_per_node, plan.problem());
        if ranks < 2 || ranks >= mesh.group() {
            return None;
        }
        let homes = [Side::Q, Side::K].map(|side| {
            let mut homes: Vec<Home> = Vec::new();
            for rank in 0..mesh.group() {
                let node = rank / ranks;
                plan.local_tokens(side, rank).for_each_run(|_, token, tokens, _| {
                    let (token, end) = (token as u32, (token + tokens) as u32);
                    match homes.last_mut() {
                        Some(last) if (last.1, last.2) == (token, node) => last.1 = end,
                        _ => homes.push((token, end, node)),
                    }
                });
            }
            homes.sort_unstable();
            homes.dedup_by(|b, a| {
                let follows = a.1 == b.0 && a.2 == b.2;
                a.1 = if follows { b.1 } else { a.1 };
                follows
            });
            homes
        });
        let heads = (0..mesh.ulysses).map(|u| plan.heads_of(u)).map(|share| [share.q, share.kv]).collect();
        let gateways = plan.ulysses_ranks_of_node() < mesh.ulysses;
        let row = ((p.head_dim() + p.value_dim()) * p.dtype().accumulator().size()) as u64;
        Some(Self { ranks, gateways, heads, row, homes, crossed: BTreeMap::new(), flows: BTreeMap::new() })
    }

    /// Whether two ranks (indices of the group) lie in different nodes.
    pub(super) fn cross_nodes(&self, a: usize, b: usize) -> bool {
        a / self.ranks != b / self.ranks
    }

    /// The first rank of a rank's node (both are indices of the group).
    pub(super) fn first_of_node(&self, rank: usize) -> usize {
        rank / self.ranks * self.ranks
    }

    /// Records a run of rows that crosses from one node to another; `first` is its first row. Either the rows were
    /// fetched, or they are gradients on their way `home`. Returns the flaw, if there is one.
    pub(super) fn cross(&mut self, from: usize, to: usize, home: bool, first: Cell, rows: u64) -> Option<String> {
        let node = if home { from } else { to } / self.ranks;
        let way = if home { "from" } else { "to" };
        let side = if is_of_keys(first.what) { Side::K } else { Side::Q };
        let (what, head) = (first.what, first.head);
        let key = move |token| (what, head, node, token);
        // Rows without a token are all alike: the second row of a run is the first again.
        let alike = first.after(1) == first;
        let tokens = first.token..first.token + if alike { 1 } else { rows as u32 };
        let again = self.crossed_before(key, &tokens).or((alike && rows > 1).then_some(tokens.end));
        let held = self.held(side, node, &tokens);
        // The first wrong row is reported; if it is wrong in both ways, as a second crossing.
        if let Some(token) = again.filter(|&again| held.is_none_or(|held| again <= held)) {
            let row = Cell { token: if alike { first.token } else { token }, ..first };
            return Some(format!("sends {} {way} node {node} again", row.describe()));
        }
        if let Some(token) = held {
            let row = Cell { token, ..first };
            return Some(format!("sends {} {way} node {node}, which holds it", row.describe()));
        }
        self.remember(key, tokens);
        None
    }

    /// The first of these tokens whose row crossed before.
    fn crossed_before(&self, key: impl Fn(u32) -> Crossing, tokens: &Range<u32>) -> Option<u32> {
        let before = self.crossed.range(key(0)..=key(tokens.start)).next_back();
        if before.is_some_and(|(_, &end)| end > tokens.start) {
            return Some(tokens.start);
        }
        self.crossed.range(key(tokens.start)..key(tokens.end)).next().map(|(run, _)| run.3)
    }

    /// Adds tokens that did not cross before, joined to the runs they touch.
    fn remember(&mut self, key: impl Fn(u32) -> Crossing, tokens: Range<u32>) {
        let after = self.crossed.remove(&key(tokens.end));
        let end = after.unwrap_or(tokens.end);
        let before = self.crossed.range_mut(key(0)..key(tokens.start)).next_back();
        match before.filter(|(_, before)| **before == tokens.start) {
            Some((_, before)) => *before = end,
            None => _ = self.crossed.insert(key(tokens.start), end),
        }
    }

    /// The first of these tokens that a node holds.
    fn held(&self, side: Side, node: usize, tokens: &Range<u32>) -> Option<u32> {
        let homes = &self.homes[side as usize];
        let from = homes.partition_point(|home| home.1 <= tokens.start);
        let mut met = homes[from..].iter().take_while(|home| home.0 < tokens.end);
        met.find(|home| home.2 == node).map(|home| home.0.max(tokens.start))
    }

    /// Counts the bytes of a message that crosses, on the ring or by gateways of an all-to-all.
    pub(super) fn count(&mut self, from: usize, to: usize, (home, on_ring): (bool, bool), what: What, bytes: u64) {
        let of_keys = is_of_keys(what);
        if !(on_ring || self.gateways && of_keys) {
            return;
        }
        let (owner, gateway) = if home { (to, from) } else { (from, to) };
        let flow = Flow { owner: owner / self.ranks, other: gateway / self.ranks, home, on_ring, of_keys };
        let [owners, gateways] = self.flows.entry(flow).or_default();
        *owners.entry(if on_ring { owner / self.heads.len() } else { owner }).or_default() += bytes;
        *gateways.entry(gateway).or_default() += bytes;
    }

    /// The least part of a share's rows that the busiest rank of a node can carry, and the extra bytes allowed because
    /// rows are not divided.
    fn least_part(&self, node: usize, of_keys: bool) -> (f64, u64) {
        let first = node * self.ranks % self.heads.len();
        let held: Vec<&Range<u32>> =
            self.heads[first..].iter().take(self.ranks).map(|share| &share[usize::from(of_keys)]).collect();
        let all = held[0].start..held[held.len() - 1].end;
        let mut most = 0.0f64;
        for (a, e) in (0..held.len()).flat_map(|a| (a + 1..=held.len()).map(move |e| (a, e))) {
            // Heads that no other rank holds.
            let start = held[..a].last().map_or(all.start, |before| before.end).max(held[a].start);
            let end = held.get(e).map_or(all.end, |after| after.start).min(held[e - 1].end);
            most = most.max(f64::from(end.saturating_sub(start)) / (e - a) as f64);
        }
        let shared = held.windows(2).any(|pair| pair[0].end > pair[1].start);
        // A rank has at most two heads that others hold too.
        (most / f64::from(all.end - all.start), if shared { 2 * self.row } else { 0 })
    }

    /// A gateway (index of the group) that carries too much, and the flaw.
    pub(super) fn uneven(&self) -> Option<(usize, String)> {
        let mut parts = BTreeMap::new();
        self.flows.iter().find_map(|(flow, [owners, gateways])| {
            let (part, whole_rows) = if flow.on_ring {
                let node = flow.other * self.ranks % self.heads.len() / self.ranks;
                *parts.entry((node, flow.of_keys)).or_insert_with(|| self.least_part(node, flow.of_keys))
            } else {
                (1.0, 0)
            };
            let busiest = owners.values().copied().max().unwrap_or(0);
            // Rounded to whole bytes.
            let busiest = (busiest as f64 * part + 0.5) as u64 + whole_rows;
            let all: u64 = gateways.values().sum();
            let (&gateway, &most) = gateways.iter().max_by_key(|(_, bytes)| **bytes)?;
            let limit = busiest.max(11 * all / (10 * self.ranks as u64));
            let Flow { owner, other, .. } = flow;
            let text = || {
                format!(
                    "{most} of {all} bytes between nodes {owner} and {other} are this rank's, and no owner has more than {busiest}"
                )
            };
            (most > limit).then(|| (gateway, text()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    use crate::{Batch, Dtype, Layout, Mesh, Options, Problem};

    /// Four ring ranks in two nodes, sixteen tokens.
    fn borders() -> NodeBorders {
        let problem = Problem::new(Batch::from_lengths(&[16]).unwrap(), 2, 1, 8, Dtype::F32);
        let options = Options::new().ranks_per_node(2);
        let plan = Plan::builder(&problem)
            .mesh(Mesh::ring(4).unwrap())
            .layout(Layout::Contiguous)
            .options(options)
            .build()
            .unwrap();
        NodeBorders::new(&plan).unwrap()
    }

    #[test]
    fn what_crosses_too_often_or_needlessly() {
        let mut b = borders();
        assert!(b.cross_nodes(1, 2) && !b.cross_nodes(2, 3));
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

    /// Four Ulysses ranks in two nodes: any rank of a node may receive a row, and q rows have no gateway.
    #[test]
    fn what_an_all_to_all_carries() {
        let batch = Batch::from_lengths(&[16]).unwrap();
        let plan = |heads: (usize, usize), ranks| {
            let problem = Problem::new(batch.clone(), heads.0, heads.1, 8, Dtype::F32);
            let options = Options::new().ranks_per_node(ranks);
            Plan::builder(&problem)
                .mesh(Mesh::ulysses(4).unwrap())
                .layout(Layout::Contiguous)
                .options(options)
                .build()
                .unwrap()
        };
        let mut b = NodeBorders::new(&plan((4, 1), 2)).unwrap();
        assert_eq!(b.first_of_node(3), 2);
        let k = Cell::new(What::Input(TensorId::K), 3, 0, 0);
        assert_eq!(b.cross(0, 2, false, k, 1), None);
        assert!(b.cross(0, 3, false, k, 1).unwrap().ends_with("to node 1 again"));
        b.count(0, 2, (false, false), What::Input(TensorId::Q), 100);
        assert_eq!(b.uneven(), None);
        for (owner, gateway) in [(0, 2), (1, 2)] {
            b.count(owner, gateway, (false, false), What::Input(TensorId::K), 100);
        }
        assert!(b.uneven().unwrap().1.contains("200 of 200 bytes"));
        // If heads are not shared, there are no gateways.
        assert!(!NodeBorders::new(&plan((4, 4), 2)).unwrap().gateways);
        assert!([0, 1, 4].iter().all(|&ranks| NodeBorders::new(&plan((4, 1), ranks)).is_none()));
    }

    /// Random runs, against a set of rows.
    #[test]
    fn runs_cross_as_their_rows_do() {
        let mut draw = fastrand::Rng::with_seed(3);
        let (mut crossed, mut again, mut held) = (0, 0, 0);
        for _ in 0..4000 {
            let mut b = borders();
            let mut rows_crossed = BTreeSet::new();
            loop {
                let what = [
                    What::Input(TensorId::K),
                    What::Sum(TensorId::Dk),
                    What::Input(TensorId::Q),
                    What::Delta,
                    What::Unset,
                    What::Zero,
                ][draw.usize(..6)];
                let home = matches!(what, What::Sum(_));
                let token = if matches!(what, What::Unset | What::Zero) { 0 } else { draw.u32(..16) };
                let first = Cell::new(what, token, draw.u32(..2), 0);
                let rows = draw.u64(1..=(16 - u64::from(token)).min(3));
                let (from, to) = [(0, 2), (3, 1)][draw.usize(..2)];
                let node = if home { from } else { to } / 2;
                let way = if home { "from" } else { "to" };
                let wrong = (0..rows).find_map(|row| {
                    let cell = first.after(row);
                    let text = format!("sends {} {way} node {node}", cell.describe());
                    if !rows_crossed.insert((what, cell.token, cell.head, node)) {
                        return Some(format!("{text} again"));
                    }
                    // Four ranks of four tokens each, two ranks in a node.
                    (cell.token as usize / 8 == node).then(|| format!("{text}, which holds it"))
                });
                assert_eq!(b.cross(from, to, home, first, rows), wrong, "{first:?} {rows}");
                match wrong {
                    None => crossed += rows,
                    Some(text) => {
                        *(if text.ends_with("again") { &mut again } else { &mut held }) += 1;
                        break;
                    }
                }
            }
        }
        assert!(crossed > 1000 && again > 500 && held > 500, "{crossed} {again} {held}");
    }

    #[test]
    fn a_gateway_that_carries_too_much() {
        let (mut b, k) = (borders(), What::Input(TensorId::K));
        b.count(0, 2, (false, true), k, 100);
        b.count(1, 3, (false, true), k, 100);
        assert_eq!(b.uneven(), None);
        // Sent by the owner: there is no choice.
        b.count(0, 2, (false, true), k, 50);
        assert_eq!(b.uneven(), None);
        // A gateway is a choice: on the way back to owners with equal loads, one of two gateways carries three
        // quarters.
        for (gateway, owner, bytes) in [(2, 0, 100), (2, 1, 50), (3, 1, 50)] {
            b.count(gateway, owner, (true, true), What::Sum(TensorId::Dk), bytes);
        }
        let (rank, text) = b.uneven().unwrap();
        assert!(rank == 2 && text.contains("150 of 200 bytes") && text.contains("more than 100"), "{text}");
    }
}
