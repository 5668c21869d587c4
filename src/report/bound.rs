// SPDX-License-Identifier: MIT OR Apache-2.0
//! An upper bound on the size of a workspace.
//!
//! The bound is computed from the sizes of shares alone, without a schedule. Tests compare every schedule with it, to
//! find forgotten buffers. It counts:
//!
//! - *Ring, forward*: two slots for k and v of other ranks; o, with two words of lse a row, in the accumulator's type.
//!   If q circulates, two slots for q and for the partial results of the same rows.
//! - *Ring, backward*: the two slots; for the gradients that travel two buffers that leave, one that arrives, and the
//!   sum; dq; delta.
//! - *Packing*: if documents or stripes leave a share in many pieces, the rows that one ring step sends may be packed
//!   first, once for each reader.
//! - *Several nodes*: two node slots; for gradients two sums of the same rows, each of an owner's share, or in the
//!   gather form one of an owner's share of each other node.
//! - *Ulysses*: the share itself for the rank's heads, and the buffers of the all-to-alls, going in and coming out,
//!   over the bytes that the ring uses in between. With gateways these buffers also have rows of one owner of each
//!   other node.

use crate::plan::{Options, Plan, Wire};
use crate::{
    batch::Side,
    heads::HeadCounts,
    layout::{Layout, cut},
    schedule::{ALIGNMENT, CirculatingSide, Direction, Form, SINK_DIGITS},
};

/// The sizes of shares, counted once, because a zigzag needs a pass over all documents.
pub(crate) struct ShareSizes {
    rank: usize,
    /// Rows of its ring rank's share of q's side, and of k's.
    share: [usize; 2],
    /// Rows of the rank's own tokens.
    pub own: [usize; 2],
    /// Rows of the largest share of any ring rank.
    largest: [u64; 2],
}

impl ShareSizes {
    /// The sizes of a rank of the mesh; `largest` is computed once for all ranks.
    pub(crate) fn new(plan: &Plan, rank: usize, largest: [u64; 2]) -> Self {
        let (mesh, at) = (plan.mesh(), plan.mesh().coordinates(rank));
        let q = plan.shares().rows(Side::Q, at.ring);
        let alike = plan.problem().batch().is_self_attention();
        let share = [q, if alike { q } else { plan.shares().rows(Side::K, at.ring) }];
        let own = share.map(|rows| cut(at.ulysses + 1, rows, mesh.ulysses) - cut(at.ulysses, rows, mesh.ulysses));
        Self { rank, share, own, largest }
    }
}

/// Rows × heads of k's side in the buffers of a rank whose all-to-alls cross by gateways.
struct GatewayRows {
    /// Upper bounds on the rank's own rows, and on the rows of all owners that it is the gateway of.
    own: u64,
    of_owners: u64,
    /// q and kv heads of the other ranks of the node; kv heads of the node; kv heads of all other nodes; number of
    /// these.
    others: [u64; 2],
    of_node: u64,
    of_other_nodes: u64,
    other_nodes: u64,
}

impl GatewayRows {
    /// `None` for a plan without gateways.
    fn of(plan: &Plan, sizes: &ShareSizes) -> Option<Self> {
        let (ranks, ulysses) = (plan.ulysses_ranks_of_node(), plan.mesh().ulysses);
        if ranks == ulysses {
            return None;
        }
        let place = plan.mesh().coordinates(sizes.rank).ulysses;
        let first = sizes.rank - place;
        let kv = |node: usize| {
            let (a, e) = (plan.heads_of(first + node * ranks), plan.heads_of(first + (node + 1) * ranks - 1));
            u64::from(e.kv.end - a.kv.start)
        };
        let (node, nodes) = (place / ranks, ulysses / ranks);
        let beside = (node * ranks..(node + 1) * ranks).filter(|&u| u != place).map(|u| plan.heads_of(first + u));
        let others = beside.fold([0, 0], |[q, kv], s| [q + s.q.len() as u64, kv + s.kv.len() as u64]);
        let part = sizes.share[1].div_ceil(ulysses);
        Some(Self {
            own: sizes.own[1] as u64,
            of_owners: (part * (nodes - 1)) as u64,
            others,
            of_node: kv(node),
            of_other_nodes: (0..nodes).filter(|&n| n != node).map(kv).sum(),
            other_nodes: nodes as u64 - 1,
        })
    }

    /// Rows packed for ranks and for nodes, rows that crossed, and these packed again for ranks.
    fn on_the_way_in(&self) -> u64 {
        self.own * (self.others[1] + self.of_other_nodes) + self.of_owners * (self.of_node + self.others[1])
    }

    /// Rows that ranks of the node return, for this rank and for owners, and rows that cross. In the ordered form also
    /// partials of one kv head (`group` q heads read a kv head).
    fn on_the_way_out(&self, group: Option<u64>) -> u64 {
        let (returned, partials) = (self.others[usize::from(group.is_none())], group.unwrap_or(0));
        self.own * (returned + self.of_other_nodes + self.other_nodes * partials)
            + self.of_owners * (returned + self.of_node + partials)
    }
}

impl Plan {
    /// An upper bound on a rank's workspace in bytes, from the sizes of shares and heads alone. [`Plan::costs`] returns
    /// the exact size.
    ///
    /// # Panics
    /// When the rank is outside the mesh.
    pub fn workspace_bound(&self, rank: usize, direction: Direction) -> u64 {
        assert!(rank < self.mesh().world(), "rank {rank} of a world of {}", self.mesh().world());
        let rows = |side| (0..self.mesh().ring).map(|r| self.shares().rows(side, r) as u64).max().unwrap_or(0);
        self.workspace_bound_of(&ShareSizes::new(self, rank, [rows(Side::Q), rows(Side::K)]), direction)
    }

    /// As [`Plan::workspace_bound`], of a rank whose sizes are known.
    pub(crate) fn workspace_bound_of(&self, sizes: &ShareSizes, direction: Direction) -> u64 {
        let (p, mesh, rank) = (self.problem(), self.mesh(), sizes.rank);
        let Options { passes, pack_inputs, wire, .. } = self.options();
        let n = |x: usize| x as u64;
        let (e, a) = (n(p.dtype().size()), n(p.dtype().accumulator().size()));
        let w = if wire == Wire::Bf16 { 2 } else { a };
        let (dk, dv) = (n(p.head_dim()), n(p.value_dim()));
        let dims = dk + dv;
        let share = self.heads_of(rank);
        let (hq, hkv) = (n(share.q.len()), n(share.kv.len()));
        let ([nq, nk], [lq, lk]) = (sizes.share.map(n), sizes.own.map(n));
        let others_q = n(p.heads()) - hq;
        let others_kv = u64::from(HeadCounts::new(mesh.ulysses, p.head_numbers()).all_kv) - hkv;
        let (exchanging, ringed) = (mesh.ulysses > 1, mesh.ring > 1);
        let form = self.form();
        // The rows of one ring step: one share; but in a zigzag, front and back chunks come from two owners.
        let ring_step = |side| {
            let (batch, all) = (p.batch(), n(p.batch().tokens(side)));
            let chunk = |rows: usize| n(rows.div_ceil(2 * mesh.ring));
            let largest = match self.layout() {
                _ if form != Form::Ring => all,
                Layout::Zigzag => (0..batch.documents()).map(|d| 2 * chunk(batch.document(side, d).len())).sum(),
                Layout::ZigzagPack => 2 * chunk(batch.tokens(side)),
                _ => sizes.largest[side as usize],
            };
            all.min(largest)
        };
        let pass = hkv.div_ceil(n(passes));
        // If ranks of a node divide rows of k's side, a node of one ring rank has node slots too.
        let divided = self.ring_holders_of_node() > 1;
        let crosses = divided || self.ring_ranks_of_node() < mesh.ring;
        let ring_ranks = if divided { self.ring_ranks_in_node() } else { self.ring_ranks_of_node() };
        let slots = if form == Form::Ring || passes > 1 || crosses { 2 } else { 1 };
        // Rows of a node slot, and number of node slots; none if rows cross into a slot that holds all shares.
        let node_slot = |side| {
            if !crosses {
                return (0, 0);
            }
            let others = mesh.ring / ring_ranks - 1;
            let largest = sizes.largest[side as usize];
            match form {
                Form::Ring => (largest, n(others.min(2))),
                Form::Gather => (largest * n(others), 1),
                Form::Together | Form::Ordered => (0, 0),
            }
        };
        let on_ring = |bytes: u64| if ringed { bytes } else { 0 };
        let packs_keys = |queries: bool| ringed && !queries && (pack_inputs || passes > 1);
        let held_keys = |queries| if exchanging || packs_keys(queries) { nk * hkv * dims * e } else { 0 };
        let exchanged = |bytes: u64| if exchanging { bytes } else { 0 };
        let readers = if form == Form::Ring { 1 } else { n(mesh.ring) - 1 };
        let pieces = p.batch().documents() > 1
            || p.batch().slices().is_some()
            || matches!(self.layout(), Layout::Striped { .. } | Layout::Balanced { .. });
        let leaving_packed = |bytes: u64| if pieces { readers * bytes } else { 0 };
        let nodes = GatewayRows::of(self, sizes);
        let keys_in = nodes.as_ref().map_or(lk * others_kv, GatewayRows::on_the_way_in) * dims * e;
        let (throughout, phases) = if direction == Direction::Forward {
            let queries = self.circulates(Direction::Forward) == CirculatingSide::Queries;
            let pack_q = queries && ringed && self.packs_forward_queries();
            let held_q = if pack_q && !exchanging { nq * hq * dk * e } else { 0 };
            let share = held_keys(queries) + exchanged(nq * hq * (dims * e + a)) + held_q;
            let ring = if queries {
                // As in the backward: q in two slots, partials that leave, and what comes home for the own share.
                let (node_rows, node_slots) = node_slot(Side::Q);
                let (row, partial, most) = (hq * dk * e, hq * (dv + 2) * a, nq.max(node_rows));
                let travelling = (slots * ring_step(Side::Q) + node_slots * node_rows) * (row + partial);
                on_ring(nq * partial + travelling + readers * most * partial + leaving_packed(most * row))
            } else {
                let (rows, node_slots) = node_slot(Side::K);
                let packed = leaving_packed(nk.max(rows) * pass * dims * e);
                let all = slots * ring_step(Side::K) + node_slots * rows;
                on_ring(nq * hq * (dv + 2) * a + all * pass * dims * e + packed)
            };
            (share, [exchanged(lq * others_q * dk * e + keys_in), ring, exchanged(lq * others_q * (dv * e + a))])
        } else {
            let ordered = form == Form::Ordered;
            let queries = self.circulates(Direction::Backward) == CirculatingSide::Queries;
            let held_q = nq * hq * (dims * e + 2 * a);
            let share = held_keys(queries && !ordered)
                + if exchanging || ringed && (pack_inputs || queries || ordered) { held_q } else { 0 };
            let key_heads = if ordered { hq } else { hkv };
            let sums = nq * hq * dk * a + nk * key_heads * dims * a;
            let digits = if self.options().reproducible { n(SINK_DIGITS) } else { 1 };
            let sinks = (n(mesh.group()) + 1) * n(p.heads() * p.sinks_per_head()) * digits * a;
            let q_row = hq * (dims * e + 2 * a);
            let ring = if ordered {
                let packed = leaving_packed(nq * q_row + nk * hkv * dims * e) * if crosses { n(mesh.ring) } else { 1 };
                let whole = if divided { nk * hkv * dims * e } else { 0 };
                2 * (ring_step(Side::Q) * q_row + ring_step(Side::K) * hkv * dims * e) + packed + whole
            } else {
                let (rows, own, row, gradient) = if queries {
                    (ring_step(Side::Q), nq, q_row, hq * dk)
                } else {
                    (ring_step(Side::K), nk, pass * dims * e, pass * dims)
                };
                // Two buffers that leave, or one that kernels write and two narrow ones that leave; the rows that
                // arrive are the own share, once for each reader of a ring step.
                let inside = if crosses { a } else { w };
                let leaving = if inside == a { slots * a } else { a + slots * w };
                let (node_rows, node_slots) = node_slot(if queries { Side::Q } else { Side::K });
                let most = own.max(node_rows);
                let mut ring = rows * (slots * row + leaving * gradient) + readers * most * gradient * inside;
                ring += node_slots * node_rows * (row + gradient * a);
                if crosses && w != a {
                    // If a slot holds all shares, its rows next to the own share cross back.
                    let leaving = if form == Form::Together { rows } else { node_rows };
                    ring += (leaving + most * n(mesh.ring)) * gradient * w;
                }
                ring + leaving_packed(most * row)
            };
            let back_heads = if ordered { others_q } else { others_kv };
            let back = if ordered || self.shares_kv_heads() { a } else { e };
            let keys_out = match &nodes {
                Some(nodes) => nodes.on_the_way_out(ordered.then_some(n(p.group()))) * dims * a,
                None => (nk * key_heads * e.max(w) + lk * back_heads * back) * dims,
            };
            let out = nq * hq * dk * e + lq * others_q * dk * e + keys_out;
            let into = lq * others_q * (dims * e + 2 * a) + keys_in;
            (lq * n(p.heads()) * a + share + sums + sinks, [exchanged(into), on_ring(ring), exchanged(out)])
        };
        // Each buffer is padded; there are a few for each pass and peer.
        let buffers = 24 + 16 * (n(passes) + if divided { 2 } else { 0 }) * n(mesh.ulysses) + n(mesh.group());
        throughout + phases.into_iter().max().unwrap_or(0) + buffers * ALIGNMENT
    }
}
