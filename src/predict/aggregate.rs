// SPDX-License-Identifier: MIT OR Apache-2.0
//! The time of a plan from the load of its busiest rank.
//!
//! Inputs: the largest mask area, rows and needed rows of any ring rank, the mean number of mask edges that a row
//! meets, the largest number of heads of any Ulysses rank, the bytes of every exchange by the level of its links, and
//! for each step one latency and one operation.
//!
//! Approximations, which make it unnecessary to build any rank's schedule:
//! - one rank has all of the largest figures; this is true or nearly true in all layouts except the contiguous one with
//!   documents;
//! - the rows that a rank needs come evenly from the ring ranks that can have them, or from neighbours ([`crossing`]);
//! - ring steps overlap perfectly: the ring takes the longer of kernels and exchanges, plus one step of the other. In
//!   zigzag layouts some ranks have more work than others in one step, though not in total, so the time is up to 16 %
//!   too short. With two levels ranks wait for one another if their rows come from a few neighbours: kernels are
//!   assumed to take up to twice as long, which is up to 51 % too long if documents begin at nodes' borders;
//! - passes over groups of kv heads do all steps for each group, and overlap as steps do: with a mask that is up to
//!   21 % too short if rows are gathered. The time of the ordered form is up to 38 % too long with a mask in the
//!   contiguous layout, where the rank with most work for dq has the least for dk and dv;
//! - every step reads every q row, or, if q circulates in the forward, every key; apart from the waits above, ranks do
//!   not wait for each other. If q and k are different tokens, the q rows that arrive and the pairs that a rank
//!   computes when q circulates are counted ([`LayoutLoad::of`]); if they are the same tokens, these are taken to
//!   be as many as those of k, which is right except for windows and documents that are cut unevenly;
//! - if ranks of a node that hold a head divide its rows, the step in which they pass their parts on is not counted:
//!   with few tokens that is up to 16 % too short. Counted without overlap it would be up to 27 % too long;
//! - on a machine with cores, kernels and exchanges do not overlap at all, and ranks that share cores share them evenly
//!   until the end; only if all ranks share them, kernels take at most the time of the total work. With a mask that is
//!   up to 1.9 times too long in the contiguous layout, where some ranks end early, and up to 1.6 times in others,
//!   where some ranks work while others wait;
//! - the bytes that the bucket of a rate limit passes at once (`between.burst`) are not counted: all bytes take the
//!   card's rate.

use alloc::vec::Vec;

use crate::{
    batch::Side,
    error::Result,
    heads::HeadCounts,
    machine::{KernelRate, Machine},
    plan::{CirculatingSide, Direction, Form, LayoutLoad, Load, NodeRanks, Plan, Problem, Wire, crossing, ring_steps},
    simulate::kernel_rate,
};

/// The kernels of a problem.
pub(super) struct ProblemKernels {
    /// Forward and backward.
    pub rates: [KernelRate; 2],
    /// Whether the rates are those of exactly these dims.
    pub exact: bool,
    /// Mean number of mask edges among the keys of a q row.
    edges: f64,
}

/// The kernels of a problem.
pub(super) fn kernels(problem: &Problem, machine: &Machine) -> Result<ProblemKernels> {
    let (forward, a) = kernel_rate(problem, machine, false)?;
    let (backward, b) = kernel_rate(problem, machine, true)?;
    let batch = problem.batch();
    let allowed = problem.allowed();
    let of_document = |d: usize| {
        let q = batch.whole(Side::Q, d);
        allowed
            .of(Side::Q, d as u32)
            .map(move |reach| q.edges_within(&batch.whole(Side::K, reach.document as usize), &reach.limits))
    };
    let edges = (0..batch.documents()).flat_map(of_document).sum::<u64>() as f64 / batch.tokens(Side::Q).max(1) as f64;
    Ok(ProblemKernels { rates: [forward, backward], exact: a && b, edges })
}

/// Prediction of one direction of a candidate: seconds, and bytes of the busiest rank or card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PassTime {
    /// From the first operation to the last.
    pub seconds: f64,
    /// The part of `seconds` in which the rank communicates and runs no kernel.
    pub exposed: f64,
    /// Bytes that a rank sends inside its node.
    pub bytes_inside: f64,
    /// Bytes that a card sends to other nodes.
    pub bytes_of_card: f64,
}

/// Bytes by the level of the links they go over.
#[derive(Clone, Copy, Default)]
struct LevelBytes {
    inside: f64,
    between: f64,
}

impl LevelBytes {
    /// The part `part` of the bytes is inside nodes.
    fn split(bytes: f64, part: f64) -> Self {
        Self { inside: bytes * part, between: bytes * (1.0 - part) }
    }

    fn times(self, by: f64) -> Self {
        Self { inside: self.inside * by, between: self.between * by }
    }

    fn plus(self, other: Self) -> Self {
        Self { inside: self.inside + other.inside, between: self.between + other.between }
    }

    fn all(self) -> f64 {
        self.inside + self.between
    }
}

/// The traffic of an all-to-all.
#[derive(Clone, Copy)]
struct AllToAllBytes {
    bytes: LevelBytes,
    /// Bytes that are packed and unpacked.
    copied: f64,
    /// Whether there is a second exchange, in which gateways pass rows on.
    twice: bool,
}

/// Forward and backward of a plan; `loads` has the load of its busiest ring rank.
pub(super) fn passes(plan: &Plan, loads: &LayoutLoad, m: &Machine, kernels: &ProblemKernels) -> [PassTime; 2] {
    let load = loads.largest;
    let (p, mesh) = (plan.problem(), plan.mesh());
    let counts = HeadCounts::new(mesh.ulysses, p.head_numbers());
    let (hq, hkv) = (f64::from(counts.q), f64::from(counts.kv));
    let [e, a, w] = element_bytes(plan);
    let (dk, dv) = (p.head_dim() as f64, p.value_dim() as f64);
    let dims = dk + dv;
    let ordered = plan.form() == Form::Ordered;
    let at_once = plan.form() != Form::Ring;

    // The links. A row of the q side has one reader in a Ulysses group; rows of k and v are divided among all holders
    // of a head.
    let crossings = [1, plan.ring_holders_of_node()].map(|ring_holders| {
        crossing(p, mesh, loads, m.ranks_per_node, NodeRanks { ring_holders, ..plan.node_ranks() })
    });
    let peers_inside = 1.0 - crossings[0].exchanged.as_f64();
    // Ranks that share a card: in all-to-alls, and for rows of other nodes.
    let sharing = m.ranks_per_card() as f64;
    let sharing = [sharing, sharing.min(crossings[1].ranks as f64)];
    // The ranks that share one pool of cores, and the factor by which that slows kernels and copies down.
    let pool = if m.nodes_share_cores { mesh.world() } else { mesh.world().min(m.ranks_per_node) };
    let slower = pool as f64 / m.ranks_at_once(pool);
    // A rank sends about as much as it receives, and each end does half of a byte's work.
    let link = |bytes: LevelBytes, sharing: f64| {
        let on_cores = bytes.inside / m.inside.rate + bytes.between * m.between_work;
        on_cores * slower + bytes.between * sharing / m.between.rate
    };
    let latency = |inside: f64| if inside < 1.0 { m.between.latency } else { m.inside.latency };
    let all_to_all = |of: AllToAllBytes| {
        if of.bytes.all() == 0.0 {
            return (0.0, 0.0);
        }
        // Packed and unpacked, and sent.
        let copies = 4.0 * of.copied / m.copy * slower + 2.0 * m.operation;
        // Between the two exchanges rows are packed or summed.
        let second = if of.twice { m.inside.latency + 2.0 * m.operation } else { 0.0 };
        (copies, link(of.bytes, sharing[0]) + latency(peers_inside) + m.operation + second)
    };
    let exchanged = all_to_alls(plan, &load, &counts, m.ranks_per_node, peers_inside);

    // The ring: the rows that arrive, and in the backward their gradients. For q, the rank with the largest traffic
    // counts: it receives the most rows, or its rows are sent to the most ranks (one new token is on one rank).
    let needed = load.needed as f64;
    let keys = needed * hkv * dims;
    let sides = [plan.circulates(Direction::Forward), plan.circulates(Direction::Backward)];
    let queries_travel = sides.map(|side| side == CirculatingSide::Queries);
    let counted = (queries_travel[0] || queries_travel[1] || ordered)
        && !(p.batch().is_self_attention() && p.batch().slices().is_none());
    let of_keys = counted.then(|| LayoutLoad::of(p, plan.shares(), CirculatingSide::Queries));
    let visits = of_keys.map_or(load.needed, |l| {
        let sent = u128::from(l.largest.q_tokens) * u128::from(l.total.needed);
        l.largest.needed.max(sent.div_ceil(u128::from(l.total.q_tokens.max(1))) as u64)
    });
    let q_rows = visits as f64 * hq;
    let queries = q_rows * (dims * e + 2.0 * a);
    // The ordered form gathers both sides, q's side during the call with k and v, and returns no gradients.
    let backward = match sides[1] {
        _ if ordered => [keys * e + queries, 0.0],
        CirculatingSide::Queries => [queries, q_rows * dk * w],
        CirculatingSide::Keys => [keys * e, keys * w],
    };
    let forward = match sides[0] {
        CirculatingSide::Queries => [q_rows * dk * e, q_rows * (dv + 2.0) * a],
        CirculatingSide::Keys => [keys * e, 0.0],
    };
    let ring_bytes = [forward, backward];

    // The kernels. If all ranks share cores, the busiest rank gets more of them when others have ended.
    let area = |l: &LayoutLoad| match l.largest.area as f64 {
        largest if pool < mesh.world() => largest,
        largest => (largest / slower).max(l.total.area as f64 / mesh.ring as f64),
    };
    // If q travels, a rank computes the pairs of its keys.
    let areas = queries_travel.map(|queries| {
        let l = of_keys.as_ref().filter(|_| queries).unwrap_or(loads);
        area(l) * hq * 2.0
    });
    // The ordered form computes scores twice, in the call for dq and in the call for dk and dv.
    let products = if ordered { 4.0 * dk + 3.0 * dv } else { 3.0 * dk + 2.0 * dv };
    let flops = [areas[0] * dims, areas[1] * products];
    // A pass over some of the kv heads does all steps for these heads; each head is in one pass.
    let rounds = (plan.options().passes as f64).min(hkv).max(1.0);
    // The first ranks of a node receive rows of neighbours at other steps than the rest of the node.
    let two_levels = plan.ring_ranks_of_node() < mesh.ring;

    let pass = |i: usize| {
        let travelling = Load { needed: visits, k_tokens: load.q_tokens, ..load };
        let ring_steps = ring_steps(mesh, if queries_travel[i] { &travelling } else { &load }) as f64;
        let steps = if at_once { 1.0 } else { ring_steps + 1.0 };
        let calls = steps * rounds;
        let (rows, read) = if i == 0 && queries_travel[0] {
            // A row is read in the call it arrives for; the keys that some row reads are read in every call.
            let pairs = of_keys.as_ref().unwrap_or(loads).largest.area;
            (load.q_tokens as f64 + visits as f64, (load.k_tokens as f64 * steps).min(pairs as f64))
        } else {
            (load.q_tokens as f64 * steps, load.k_tokens as f64 + needed)
        };
        let (rows, read) = (rows * hq, read * hq);
        // The kernels of dq and of dk and dv both meet the edges.
        let at_edges = load.q_tokens as f64 * hq * kernels.edges * if ordered && i == 1 { 2.0 } else { 1.0 };
        let rate = kernels.rates[i];
        let waits = if two_levels && crossings[1].near && !at_once { 2.0 - 1.0 / steps } else { 1.0 };
        let kernel = KernelRate { call: 0.0, ..rate }.seconds(flops[i], rows, read, at_edges);
        let kernel = (kernel + calls * (rate.call + m.operation)) * slower * waits;

        let rows_inside = 1.0 - crossings[usize::from(ordered || !queries_travel[i])].rows.as_f64();
        let rows = |bytes| link(LevelBytes::split(bytes, rows_inside), sharing[1]);
        let [fetched, returned] = ring_bytes[i];
        let step = m.operation + latency(rows_inside);
        let exchanges = rounds * if at_once { 1.0 } else { ring_steps };
        let returns = if returned > 0.0 { exchanges } else { 0.0 };
        // Adding returned gradients: two reads and a write.
        let home = rows(returned) + 3.0 * returned / m.copy * slower;
        let home = home + returns * (step + m.operation);
        let fetch = rows(fetched) + if fetched > 0.0 { exchanges * step } else { 0.0 };
        let one = |x: f64| if x > 0.0 { x / exchanges.max(1.0) } else { 0.0 };
        let ring = if m.cores.is_some() {
            fetch + kernel + home
        } else if at_once && rounds == 1.0 {
            // The ordered form receives q's side during the first of two kernels.
            let first = if ordered && i == 1 { kernel * (2.0 * dk + dv) / products } else { 0.0 };
            fetch + kernel + home - first.min(rows(queries))
        } else {
            (kernel + one(home)).max(fetch + home + kernel / calls)
        };

        let [into, out] = exchanged[i];
        let ((pack, there), (unpack, back)) = (all_to_all(into), all_to_all(out));
        let exchanged = into.bytes.plus(out.bytes);
        let rows = LevelBytes::split(fetched + returned, rows_inside);
        PassTime {
            seconds: pack + there + ring + back + unpack,
            exposed: there + back + ring - kernel,
            bytes_inside: exchanged.inside + rows.inside,
            bytes_of_card: exchanged.between * sharing[0] + rows.between * sharing[1],
        }
    };
    [pass(0), pass(1)]
}

/// Bytes of an element, of an element of the accumulator, and of an element of a partial gradient that is sent.
fn element_bytes(plan: &Plan) -> [f64; 3] {
    let dtype = plan.problem().dtype();
    let (e, a) = (dtype.size() as f64, dtype.accumulator().size() as f64);
    [e, a, if plan.options().wire == Wire::Bf16 { 2.0 } else { a }]
}

/// For each direction the two all-to-alls, there and back: bytes that the busiest rank sends of its own tokens for
/// other ranks' heads, and receives back. `node`: ranks of a node of the machine.
fn all_to_alls(
    plan: &Plan,
    load: &Load,
    counts: &HeadCounts,
    node: usize,
    peers_inside: f64,
) -> [[AllToAllBytes; 2]; 2] {
    let (p, ulysses, ranks) = (plan.problem(), plan.mesh().ulysses, plan.ulysses_ranks_of_node());
    let (h, hk) = (p.heads() as f64, p.kv_heads() as f64);
    let [hq, hkv, all_kv] = [counts.q, counts.kv, counts.all_kv].map(f64::from);
    let [e, a, w] = element_bytes(plan);
    let (dk, dv) = (p.head_dim() as f64, p.value_dim() as f64);
    let dims = dk + dv;
    let (own_q, own_k) = (load.q_tokens as f64 / ulysses as f64, load.k_tokens as f64 / ulysses as f64);
    let ordered = plan.form() == Form::Ordered;
    let q_heads = LevelBytes::split(h - hq, peers_inside);
    // Of the bytes of k's side sent inside nodes: the part that gateways pass on from or to other nodes.
    let passed_on = 1.0 - ranks as f64 / ulysses as f64;
    let [keys_there, keys_back] = if ranks < ulysses {
        heads_by_gateways(plan, node, all_kv)
    } else {
        // A gradient with one holder is rounded before it is sent; the ordered form has a partial for each q head.
        let back = if ordered { (h - hq) * a } else { (all_kv - hkv) * if all_kv > hk { w } else { e } };
        [all_kv - hkv, back].map(|heads| LevelBytes::split(heads, peers_inside))
    };
    let keys_there = keys_there.times(own_k * dims * e);
    let keys_back = keys_back.times(own_k * dims);
    let exchange = |others: LevelBytes, keys: LevelBytes, copied: f64| {
        let passed_on = keys.inside * passed_on;
        let copied = others.all() + copied * (keys.all() - passed_on);
        AllToAllBytes { bytes: others.plus(keys), copied, twice: passed_on > 0.0 }
    };
    let into = |row: f64| exchange(q_heads.times(own_q * row), keys_there, 1.0);
    // Partials of the ordered form are sent in place, and read once.
    let partials = if ordered { 0.25 } else { 1.0 };
    [
        [into(dk * e), exchange(q_heads.times(own_q * (dv * e + a)), LevelBytes::default(), 1.0)],
        [into(dims * e + 2.0 * a), exchange(q_heads.times(own_q * dk * e), keys_back, partials)],
    ]
}

/// If k and v cross by gateways: the heads of k or v that the busiest rank sends for each of its tokens, and the bytes
/// that it gets back for each of their dims; inside a node and between nodes.
fn heads_by_gateways(plan: &Plan, node: usize, all_kv: f64) -> [LevelBytes; 2] {
    let (p, ulysses, ranks) = (plan.problem(), plan.mesh().ulysses, plan.ulysses_ranks_of_node());
    let [e, a, w] = element_bytes(plan);
    let (group, ordered) = (p.group() as u32, plan.form() == Form::Ordered);
    // For each node: heads that cross to it, and bytes that cross back.
    let of_node = |n: usize| {
        let (first, last) = (plan.heads_of(n * ranks), plan.heads_of((n + 1) * ranks - 1));
        let heads = f64::from(last.kv.end - first.kv.start);
        let (begun_before, ends) = (first.q.start % group, last.q.end % group == 0);
        if !ordered {
            let sum = if begun_before == 0 && ends { e.min(w) } else { w };
            return [heads, heads * sum];
        }
        let partials = if begun_before == 0 { 0 } else { (group - begun_before).min(last.q.end - first.q.start) };
        let sums = heads - f64::from(u32::from(partials > 0));
        [heads, sums * if ends { e } else { a } + f64::from(partials) * a]
    };
    let nodes: Vec<[f64; 2]> = (0..ulysses / ranks).map(of_node).collect();
    // The busiest rank is in the node that the fewest heads cross to, or in the node that the most bytes return from.
    let heads: f64 = nodes.iter().map(|n| n[0]).sum();
    let there = heads - nodes.iter().map(|n| n[0]).fold(f64::INFINITY, f64::min);
    let back = nodes.iter().map(|n| n[1]).fold(0.0, f64::max) * (nodes.len() - 1) as f64;
    // The machine's nodes may differ from the plan's.
    let (near, far) =
        ((ranks.min(node) - 1) as f64 / (ranks - 1) as f64, node.min(ulysses).saturating_sub(ranks) as f64);
    let far = far / (ulysses - ranks) as f64;
    // A rank's own rows go to the ranks of its node, and it passes on rows of one owner of each other node.
    let inside = (ranks - 1) as f64 / ranks as f64;
    let held = if ordered { p.heads() as f64 } else { all_kv };
    let by_level = |inside: f64, between: f64| LevelBytes::split(inside, near).plus(LevelBytes::split(between, far));
    [by_level(all_kv * inside, there), by_level(held * a * inside, back)]
}
