// SPDX-License-Identifier: MIT OR Apache-2.0
//! The costs of a plan: its form and the price of that, bytes, messages and multiply-adds of every step, the peak of
//! the workspace.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::fmt::Write;

use super::{
    COLUMNS, STEPS,
    figures::{TextTable, grouped, spread},
    name,
};
use crate::{
    batch::Side,
    error::Result,
    mesh::Mesh,
    plan::{Circulate, GATHERED, Gather, MANY_DOCUMENTS, MIN_KEYS_PER_STEP, Options, Plan, Wire},
    report::costs::{Costs, StepCost, order},
    schedule::{BETWEEN_NODES, CirculatingSide, Direction, Form, Schedule},
};

/// A name of a figure, and the figure.
type Figure<T> = (&'static str, fn(&T) -> u128);

const STEP_FIGURES: [Figure<StepCost>; 4] = [
    ("bytes sent", |s| s.bytes_sent.into()),
    ("bytes received", |s| s.bytes_received.into()),
    ("messages", |s| s.messages.into()),
    ("multiply-adds", |s| s.multiply_adds),
];

const PRICE: [Figure<Costs>; 3] = [
    ("workspace", |c| c.workspace.into()),
    ("bytes received", |c| c.bytes_received().into()),
    ("multiply-adds", Costs::multiply_adds),
];

impl Plan {
    pub(super) fn describe_form(&self, out: &mut String, ranks: &[usize], costs: &[Result<Vec<Costs>>; 2]) {
        let (o, ring) = (self.options(), self.mesh().ring);
        let form = match self.form() {
            _ if ring == 1 && self.form() != Form::Ordered => "one ring rank: nothing circulates",
            Form::Ring => {
                "ring: one ring step at a time, while the rows of the next one are received into a second slot"
            }
            Form::Gather => "gather: k and v of all other ranks are received at once",
            Form::Together => {
                "together: k and v of all other ranks are received at once, and one kernel call computes with them and the rank's own"
            }
            Form::Ordered => {
                "ordered (reproducible): both sides are gathered, and computed in the order of positions, dk and dv head by head; the bits do not depend on the number of ranks"
            }
        };
        let _ = writeln!(out, "\nform\n  {form}");
        let batch = self.problem().batch();
        let [nq, nk] = [Side::Q, Side::K].map(|side| batch.tokens(side) as u128);
        if self.form() == Form::Together && o.gather == Gather::Auto {
            let (documents, most) = (batch.documents(), grouped(GATHERED.into()));
            let keys = self.problem().area() as f64 / (nq.max(1) * ring as u128) as f64;
            let _ = writeln!(
                out,
                "    because the layout cuts each of {documents} documents (at least {MANY_DOCUMENTS}) for every ring rank, a q row has only {keys:.1} keys in a ring step (fewer than {MIN_KEYS_PER_STEP}), and all k and v take at most {most} bytes"
            );
        }
        if o.passes > 1 {
            let _ = writeln!(
                out,
                "  {} passes over groups of kv heads: the buffers for rows in flight are smaller by this factor",
                o.passes
            );
        }
        if self.form() != Form::Ring {
            self.describe_price(out, ranks, costs);
        }
        self.describe_nodes(out, ranks);
        self.describe_forward(out);
        let moved = match self.circulates(Direction::Backward) {
            _ if ring == 1 => "nothing circulates on one ring rank",
            _ if self.form() == Form::Ordered => "k and v are gathered for dq, then the q side for dk and dv",
            CirculatingSide::Keys => "k and v circulate, dk and dv are returned to their owner",
            CirculatingSide::Queries => "q, do, lse and delta circulate, dq is returned to its owner",
        };
        let why = match o.circulate {
            _ if ring == 1 || self.form() == Form::Ordered => "",
            Circulate::Auto if o.passes > 1 || self.form() != Form::Ring => {
                ": always, if k and v are gathered or there are several passes"
            }
            Circulate::Auto => ": fewer bytes",
            Circulate::Keys | Circulate::Queries => ": as the options ask",
        };
        let _ = writeln!(out, "  backward: {moved}{why}");
        if ring > 1 {
            let (k, q) = self.bytes_per_circulating_token();
            let [k, q, nk, nq] = [k, q, nk, nq].map(grouped);
            let _ = writeln!(
                out,
                "    bytes of a token to a rank and back: {k} for each of {nk} k tokens, {q} for each of {nq} q tokens"
            );
        }
        let accumulator = self.problem().dtype().accumulator();
        let gateways = self.ulysses_ranks_of_node() < self.mesh().ulysses;
        let wire = match o.wire {
            Wire::Full => format!("sent in {accumulator}: they are not rounded"),
            Wire::Bf16 if self.ring_ranks_of_node() < ring => {
                format!(
                    "summed in each node in {accumulator}; the sums are sent to other nodes in bf16, each rounded once to 8 bits"
                )
            }
            Wire::Bf16 => {
                let summed = match (self.ring_holders_of_node() > 1, gateways) {
                    (true, _) => format!("; they are summed in each node first, in {accumulator}"),
                    (_, true) => format!("; those of an all-to-all are summed in each node first, in {accumulator}"),
                    _ => String::new(),
                };
                format!("sent in bf16, each rounded once to 8 bits{summed}")
            }
        };
        let _ = writeln!(out, "  partial gradients are {wire}");
    }

    /// The side that circulates in the forward, if it is not the default: q, or the result of comparing two numbers of
    /// bytes.
    fn describe_forward(&self, out: &mut String) {
        let queries = self.circulates(Direction::Forward) == CirculatingSide::Queries && self.mesh().ring > 1;
        let compared = self.compared_in_forward();
        if !queries && compared.is_none() {
            return;
        }
        let side = if queries {
            "q circulates, partial o and lse are returned to its owner and merged"
        } else {
            "k and v circulate"
        };
        let why = compared.map_or("as the options ask".to_string(), |[keys, queries]| {
            let than = if queries < keys { "fewer bytes" } else { "no more bytes" };
            format!("{than}: all ranks receive {} with k and v, {} with q", grouped(keys), grouped(queries))
        });
        let _ = writeln!(out, "  forward: {side}: {why}");
    }

    /// The placement of ranks in nodes, and the cost of passing rows on.
    fn describe_nodes(&self, out: &mut String, ranks: &[usize]) {
        let (Mesh { ring, ulysses, .. }, each) = (self.mesh(), self.options().ranks_per_node);
        if each == 0 || each >= self.mesh().group() {
            return;
        }
        let (ring_ranks, holders) = (self.ring_ranks_of_node(), self.ring_holders_of_node());
        let ordered = self.form() == Form::Ordered;
        let sums = if ordered { "" } else { "; gradients are summed in the node before they cross back" };
        let mut lines = Vec::new();
        if self.ulysses_ranks_of_node() < ulysses {
            let nodes = ulysses / each;
            let back = if ordered {
                "; gradients of a kv head are summed in the node of its first q head; other nodes send a partial of each q head"
            } else {
                sums
            };
            lines.push(format!(
                "{nodes} nodes of {each} ranks in an all-to-all: a row of k or v crosses to each other node once, to one rank, which passes it on{back}"
            ));
        }
        if ring_ranks < ring {
            let nodes = ring / ring_ranks;
            lines.push(format!(
                "{nodes} nodes of {ring_ranks} ring ranks: a row that another node needs crosses to it once, to one rank, which passes it on{sums}"
            ));
        }
        if holders > 1 {
            lines.push(format!(
                "{holders} Ulysses ranks of a node share kv heads: each receives a part of the rows of a shared head from other nodes, and passes it on to the others{sums}"
            ));
        }
        if lines.is_empty() {
            let _ = writeln!(
                out,
                "  nodes of {each} ranks: no two ranks of a node need the same row, so every row is sent directly to the rank that reads it, and crosses once"
            );
            return;
        }
        for line in lines {
            let _ = writeln!(out, "  {line}");
        }
        let names = [
            "packed for a node",
            "from another node",
            "returned to a gateway",
            "sum of a node",
            "partials to cross",
            "sum from a node",
            "partials from a node",
            "node slot",
        ];
        let [forward, backward] = [Direction::Forward, Direction::Backward].map(|direction| {
            let bytes = ranks.iter().filter_map(|&rank| {
                let buffers = Schedule::new(self, rank, direction).ok()?.buffers;
                let named = buffers.iter().filter(|b| names.contains(&b.name));
                Some(named.map(|b| u128::from(b.bytes())).sum::<u128>())
            });
            grouped(bytes.max().unwrap_or(0))
        });
        let _ = writeln!(out, "    buffers for this: at most {forward} bytes forward, {backward} backward");
    }

    /// The costs of another form over those of the ring form with one pass.
    fn describe_price(&self, out: &mut String, ranks: &[usize], costs: &[Result<Vec<Costs>>; 2]) {
        let options = Options::default().gather(Gather::Steps).ranks_per_node(self.options().ranks_per_node);
        let Ok(ring) = Plan::builder(self.problem()).tokens_of(self).options(options).build() else { return };
        let directions = [Direction::Forward, Direction::Backward];
        for (direction, both) in directions.into_iter().zip(costs.iter().zip(ring.costs_for(ranks))) {
            let (Ok(ours), Ok(theirs)) = both else { continue };
            let parts = PRICE.map(|(name, figure)| {
                let [a, b] = [ours, &theirs].map(|costs| costs.iter().map(figure).max().unwrap_or(0));
                let times = if b == 0 { String::new() } else { format!("×{:.2}, ", a as f64 / b as f64) };
                if a == b {
                    format!("{name} the same")
                } else {
                    format!("{name} {times}{} instead of {}", grouped(a), grouped(b))
                }
            });
            let (direction, parts) = (super::name(direction), parts.join("; "));
            let _ = writeln!(out, "  compared with the ring form, {direction}, busiest rank: {parts}");
        }
    }

    /// A table of the steps of these ranks in one direction, and their workspace.
    pub(super) fn describe_direction(&self, out: &mut String, costs: &[Costs]) {
        let Some(direction) = costs.first().map(|c| name(c.direction)) else { return };
        let n = self.mesh().group();
        let _ = write!(out, "\n{direction}: bytes, messages (sent and received) and multiply-adds of each step");
        if costs.len() > 1 && costs.len() < n {
            let ranks: Vec<usize> = costs.iter().map(|c| c.rank).collect();
            let _ = write!(out, " ({} of {n} ranks were counted: {ranks:?})", ranks.len());
        }
        out.push('\n');
        // If there are very many ring steps, those from `late` on share a line.
        let ring: BTreeSet<u32> =
            costs.iter().flat_map(|c| &c.steps).filter(|s| s.phase == "ring").map(|s| s.step).collect();
        let late = ring.iter().nth(STEPS).copied().filter(|late| ring.last() > Some(late));
        let mut lines: BTreeMap<_, Vec<StepCost>> = BTreeMap::new();
        for (i, c) in costs.iter().enumerate() {
            for step in &c.steps {
                // All bytes between nodes have one line.
                let number = match step.phase {
                    BETWEEN_NODES => 0,
                    "ring" => late.map_or(step.step, |late| late.min(step.step)),
                    _ => step.step,
                };
                for (phase, number) in [(step.phase, number), ("all", 0)] {
                    let none = || vec![StepCost::new(phase, number); costs.len()];
                    lines.entry((order(phase), phase, number)).or_insert_with(none)[i].add(step);
                }
            }
        }
        let each = costs.len() <= COLUMNS;
        let mut t = TextTable::new(2);
        let columns = ["step", ""].map(String::from).into_iter();
        if each {
            t.row(columns.chain(costs.iter().map(|c| format!("rank {}", c.rank))));
        } else {
            t.row(columns.chain(["least", "mean", "largest"].map(String::from)));
        }
        let mut line = |label: &mut String, name: &str, values: Vec<u128>| {
            if values.iter().any(|&v| v > 0) {
                let cells = if each { values.into_iter().map(grouped).collect() } else { spread(&values).to_vec() };
                t.row([core::mem::take(label), name.to_string()].into_iter().chain(cells));
            }
        };
        for ((_, phase, number), sums) in &lines {
            let mut label = match (*phase, ring.last()) {
                ("ring", Some(last)) if late == Some(*number) => {
                    format!("ring {number} to {last} ({} steps)", ring.range(number..).count())
                }
                ("ring", _) => format!("ring {number}"),
                _ => phase.to_string(),
            };
            for (name, figure) in STEP_FIGURES {
                line(&mut label, name, sums.iter().map(figure).collect());
            }
        }
        line(&mut String::new(), "workspace", costs.iter().map(|c| c.workspace.into()).collect());
        t.write(out);
        self.describe_workspace(out, direction, costs);
    }

    fn describe_workspace(&self, out: &mut String, direction: &str, costs: &[Costs]) {
        let Some(most) = costs.iter().max_by_key(|c| (c.workspace, core::cmp::Reverse(c.rank))) else { return };
        let work = || costs.iter().map(Costs::multiply_adds);
        let (largest, sum) = (work().max().unwrap_or(0), work().sum::<u128>());
        if sum > 0 && costs.len() > 1 {
            let imbalance = largest as f64 * costs.len() as f64 / sum as f64;
            let _ =
                writeln!(out, "  work of the busiest rank over the mean, heads and layout together: {imbalance:.3}");
        }
        let [bytes, bound] =
            [most.workspace, self.workspace_bound(most.rank, most.direction)].map(|n| grouped(n.into()));
        let _ = writeln!(
            out,
            "  peak workspace {direction}: {bytes} bytes on rank {}, in addition to inputs and outputs (upper bound for this plan: {bound}){}",
            most.rank,
            if most.workspace == 0 { "" } else { ", for:" }
        );
        let mut t = TextTable::new(1);
        for p in &most.peak {
            let count = if p.count > 1 { format!("in {}", p.count) } else { String::new() };
            t.row([p.name.to_string(), grouped(p.bytes.into()), count]);
        }
        t.write(out);
        let metadata = costs.iter().map(|c| c.device_metadata).max().unwrap_or(0);
        let _ = writeln!(
            out,
            "  on CUDA devices, {direction}: up to {} bytes more for each prepared plan and direction, of which a rank keeps 16",
            grouped(metadata.into())
        );
    }
}
