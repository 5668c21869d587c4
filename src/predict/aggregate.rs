// SPDX-License-Identifier: MIT OR Apache-2.0
//! The time of a plan from the load of its busiest rank.
//!
//! What is counted: the largest mask area, rows and needed rows of any ring rank, the largest share of heads of any
//! Ulysses rank, the bytes of every exchange by the level of its links, one latency and one operation for each step.
//!
//! What is approximated, so that no rank's schedule is needed:
//! - the largest figures are taken to be those of one rank, which is so or nearly so in all layouts but the contiguous one
//!   with documents;
//! - the rows that a rank needs are taken to come evenly from the ring ranks they can come from, or from neighbours
//!   ([`crossing`]);
//! - ring steps overlap perfectly: the ring takes the longer of kernels and exchanges, and one step more of the other. In
//!   zigzag layouts some ranks have more work than others at a step, though not in total, so this is up to 16 % too quick,
//!   and up to 31 % with two levels and documents shorter than a node's share;
//! - passes over groups of kv heads do all steps for each group, and overlap as steps do: with a mask that is up to 21 % too quick
//!   where rows are gathered. The ordered form is rated up to 45 % too slow with a mask, 18 % without;
//! - every step reads every q row, and ranks do not wait for each other otherwise;
//! - on a machine with cores, kernels and exchanges do not overlap at all, and ranks that share cores share them evenly
//!   until the end. With a mask that is up to 2 times too slow in the contiguous layout, where some ranks end early, and up to
//!   1.6 times in others, where some ranks work while others wait;
//! - the bytes that the bucket of a rate limit passes at once (`between.burst`) are not counted: all bytes take the card's rate.

use crate::{
    batch::Side,
    error::Result,
    heads::HeadShare,
    machine::{KernelRate, KernelShape, Machine},
    plan::{CirculatingSide, Form, Load, Plan, Problem, Wire, crossing, ring_steps},
};

/// The kernels of a problem, forward and backward, and whether they are those of its dims.
pub(super) fn rates(problem: &Problem, machine: &Machine) -> Result<([KernelRate; 2], bool)> {
    let shape = |backward| KernelShape {
        dtype: problem.dtype(),
        head_dim: problem.head_dim(),
        value_dim: problem.value_dim(),
        backward,
    };
    let (forward, a) = machine.kernel(shape(false))?;
    let (backward, b) = machine.kernel(shape(true))?;
    Ok(([forward, backward], a && b))
}

/// One direction of a candidate; seconds, and bytes of the busiest rank or card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PassTime {
    /// From the first operation to the last.
    pub seconds: f64,
    /// Of these, communication that no kernel of the rank runs beside.
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

/// What both directions need of the plan.
struct Sizes<'a> {
    machine: &'a Machine,
    /// How much slower kernels and copies are because ranks share cores.
    slower: f64,
    /// Ranks that share a card.
    sharing: f64,
    /// q and k tokens of a rank.
    own: [f64; 2],
    /// Of the all-to-all's peers, the part in the rank's node.
    peers_inside: f64,
    /// Of the needed rows, the part from the rank's node.
    rows_inside: f64,
    /// Ring steps that bring rows.
    steps: f64,
}

/// Forward and backward, of a plan with this load of its busiest ring rank.
pub(super) fn passes(plan: &Plan, load: Load, machine: &Machine, rates: &[KernelRate; 2]) -> [PassTime; 2] {
    let (p, mesh) = (plan.problem(), plan.mesh());
    let (h, hk) = (p.heads() as f64, p.kv_heads() as f64);
    let (mut hq, mut hkv, mut kv_sum) = (0.0f64, 0.0f64, 0.0);
    for u in 0..mesh.ulysses {
        let share = HeadShare::new(u, mesh.ulysses, p.heads() as u32, p.kv_heads() as u32);
        hq = hq.max(share.q.len() as f64);
        hkv = hkv.max(share.kv.len() as f64);
        kv_sum += share.kv.len() as f64;
    }
    let node = machine.ranks_per_node;
    let crossing = crossing(mesh, plan.layout(), &load, node, plan.ring_ranks_of_node());
    let u = mesh.ulysses as f64;
    // The ranks of one pool of cores.
    let pool = if machine.nodes_share_cores { mesh.world() } else { mesh.world().min(node) };
    let sizes = Sizes {
        machine,
        slower: pool as f64 / machine.ranks_at_once(pool),
        sharing: machine.ranks_per_card() as f64,
        own: [load.q_tokens as f64 / u, load.k_tokens as f64 / u],
        peers_inside: 1.0 - crossing.exchanged.as_f64(),
        rows_inside: 1.0 - crossing.rows.as_f64(),
        steps: ring_steps(mesh, &load) as f64,
    };
    let (e, a) = (p.dtype().size() as f64, p.dtype().accumulator().size() as f64);
    let w = if plan.options().wire == Wire::Bf16 { 2.0 } else { a };
    let (dk, dv) = (p.head_dim() as f64, p.value_dim() as f64);
    let dims = dk + dv;
    let [own_q, own_k] = sizes.own;
    // The all-to-alls: what the busiest rank's own tokens send for the heads of others, and get back.
    let (others_q, others_kv) = (h - hq, kv_sum - hkv);
    let keys_there = own_k * others_kv * dims * e;
    let shared = if plan.shares_kv_heads() { kv_sum * a } else { hk * e };
    let keys_back = own_k * (shared - hkv * if plan.shares_kv_heads() { a } else { e }) * dims;
    let into = [own_q * others_q * dk * e + keys_there, own_q * others_q * (dims * e + 2.0 * a) + keys_there];
    let out = [own_q * others_q * (dv * e + a), own_q * others_q * dk * e + keys_back];
    // The ring: the rows that come, and in the backward their gradients.
    let needed = load.needed as f64;
    let keys = needed * hkv * dims;
    let tokens = |side| p.batch().tokens(side).max(1) as f64;
    let q_rows = needed * tokens(Side::Q) / tokens(Side::K) * hq;
    let queries = q_rows * (dims * e + 2.0 * a);
    // The ordered form gathers both sides, and sends no gradients home.
    let ordered = plan.form() == Form::Ordered;
    let backward = match plan.backward_circulates() {
        _ if ordered => [keys * e + queries, 0.0],
        CirculatingSide::Queries => [queries, q_rows * dk * w],
        CirculatingSide::Keys => [keys * e, keys * w],
    };
    let ring = [[keys * e, 0.0], backward];
    let at_once = plan.form() != Form::Ring;
    let area = load.area as f64 * hq * 2.0;
    // Two calls of the ordered form compute scores twice, for dq and for dk and dv.
    let products = if ordered { 4.0 * dk + 3.0 * dv } else { 3.0 * dk + 2.0 * dv };
    let flops = [area * dims, area * products];
    // A pass over some of the kv heads does all steps for these: each head is in one of them.
    let rounds = (plan.options().passes as f64).min(hkv).max(1.0);
    let steps = if at_once { 1.0 } else { sizes.steps + 1.0 };
    let calls = steps * rounds;
    let pass = |i: usize| {
        let rows = load.q_tokens as f64 * hq * steps;
        let read = (load.k_tokens as f64 + needed) * hq;
        let kernel = KernelRate { call: 0.0, ..rates[i] }.seconds(flops[i], rows, read);
        let kernel = (kernel + calls * (rates[i].call + machine.operation)) * sizes.slower;
        sizes.pass(kernel, [calls, rounds], into[i], out[i], ring[i], at_once)
    };
    [pass(0), pass(1)]
}

impl Sizes<'_> {
    /// Seconds of bytes over links. A rank sends about as much as it receives, and each end does half of a byte's work.
    fn link(&self, bytes: LevelBytes) -> f64 {
        let m = self.machine;
        let on_cores = bytes.inside / m.inside.rate + bytes.between * m.between_work;
        on_cores * self.slower + bytes.between * self.sharing / m.between.rate
    }

    fn pass(
        &self,
        kernel: f64,
        [calls, rounds]: [f64; 2],
        into: f64,
        out: f64,
        [fetched, returned]: [f64; 2],
        at_once: bool,
    ) -> PassTime {
        let m = self.machine;
        let split = |bytes: f64, part: f64| LevelBytes { inside: bytes * part, between: bytes * (1.0 - part) };
        let latency = |part: f64| if part < 1.0 { m.between.latency } else { m.inside.latency };
        // An all-to-all: packed, sent, unpacked.
        let all_to_all = |bytes: f64| {
            if bytes == 0.0 {
                return (0.0, 0.0);
            }
            let copies = 4.0 * bytes / m.copy * self.slower + 2.0 * m.operation;
            (copies, self.link(split(bytes, self.peers_inside)) + latency(self.peers_inside) + m.operation)
        };
        let ((pack, there), (unpack, back)) = (all_to_all(into), all_to_all(out));
        let step = m.operation + latency(self.rows_inside);
        let exchanges = rounds * if at_once { 1.0 } else { self.steps };
        let returns = if returned > 0.0 { exchanges } else { 0.0 };
        // What comes home is added: two reads and a write.
        let home = self.link(split(returned, self.rows_inside)) + 3.0 * returned / m.copy * self.slower;
        let home = home + returns * (step + m.operation);
        let fetch = self.link(split(fetched, self.rows_inside)) + if fetched > 0.0 { exchanges * step } else { 0.0 };
        let one = |x: f64| if x > 0.0 { x / exchanges.max(1.0) } else { 0.0 };
        let ring = if at_once && rounds == 1.0 || m.cores.is_some() {
            fetch + kernel + home
        } else {
            (kernel + one(home)).max(fetch + home + kernel / calls)
        };
        let seconds = pack + there + ring + back + unpack;
        let exchanged = split(into + out, self.peers_inside);
        let rows = split(fetched + returned, self.rows_inside);
        PassTime {
            seconds,
            exposed: there + back + ring - kernel,
            bytes_inside: exchanged.inside + rows.inside,
            bytes_of_card: (exchanged.between + rows.between) * self.sharing,
        }
    }
}
