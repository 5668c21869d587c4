// SPDX-License-Identifier: MIT OR Apache-2.0
//! The costs of a plan: its form and the price of that, bytes, messages and multiply-adds of every step, the peak of
//! the workspace.

use alloc::{
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::fmt::Write;

use super::figures::{TextTable, grouped, spread};
use super::{COLUMNS, STEPS};
use crate::{
    batch::Side,
    plan::{Circulate, FEW_KEYS, GATHERED, Gather, MANY_DOCUMENTS, Options, Plan, Wire},
    report::costs::{Costs, StepCost, order},
    schedule::{BETWEEN_NODES, Buffer, CirculatingSide, Direction, Form, Schedule},
};

impl Plan {
    pub(super) fn describe_form(&self, out: &mut String, ranks: &[usize]) {
        let (o, ring) = (self.options(), self.mesh().ring);
        let _ = writeln!(out, "\nform");
        let form = match self.form() {
            _ if ring == 1 && self.form() != Form::Ordered => "one ring rank: nothing circulates",
            Form::Ring => "ring: one ring step at a time, the next one is received into the other of two slots",
            Form::Gather => "gather: all k and v of other ranks at once",
            Form::Together => "together: all k and v at once, the own ones too, in one call of the kernel",
            Form::Ordered => {
                "ordered (reproducible): both sides are gathered and met in the order of positions, dk and dv are made head by head; the bits do not depend on the number of ranks"
            }
        };
        let _ = writeln!(out, "  {form}");
        if self.form() == Form::Together && o.gather == Gather::Auto {
            let (q, area) = (self.problem().batch().tokens(Side::Q) as u128, self.problem().area());
            let _ = writeln!(
                out,
                "    as the layout cuts each of {} documents (at least {MANY_DOCUMENTS}) for every ring rank, which leaves a q row {:.1} keys in a ring step (fewer than {FEW_KEYS}), and all k and v take at most {} bytes",
                self.problem().batch().documents(),
                area as f64 / (q.max(1) * ring as u128) as f64,
                grouped(GATHERED.into()),
            );
        }
        if o.passes > 1 {
            let _ =
                writeln!(out, "  {} passes over groups of kv heads: what is in flight shrinks by as much", o.passes);
        }
        if self.form() != Form::Ring {
            self.describe_price(out, ranks);
        }
        self.describe_nodes(out, ranks);
        self.describe_forward(out);
        let (k, q) = self.bytes_per_circulating_token();
        let b = self.problem().batch();
        let (nk, nq) = (b.tokens(Side::K) as u128, b.tokens(Side::Q) as u128);
        let side = match (self.form(), self.backward_circulates(), o.circulate) {
            _ if ring == 1 => "backward: nothing circulates on one ring rank".to_string(),
            (Form::Ordered, ..) => "backward: k and v are gathered for dq, then the q side for dk and dv".to_string(),
            (_, v, c) => {
                let what = if v == CirculatingSide::Keys {
                    "k and v circulate, dk and dv are returned to their owner"
                } else {
                    "q, do, lse and delta circulate, dq is returned to its owner"
                };
                let why = if c != Circulate::Auto {
                    "as the options ask"
                } else if o.passes > 1 || self.form() != Form::Ring {
                    "as gather and passes need"
                } else {
                    "fewer bytes"
                };
                format!("backward: {what}: {why}")
            }
        };
        let _ = writeln!(out, "  {side}");
        if ring > 1 {
            let _ = writeln!(
                out,
                "    bytes sent, there and back: {} for a k token ({} of them), {} for a q token ({} of them)",
                grouped(k),
                grouped(nk),
                grouped(q),
                grouped(nq)
            );
        }
        let accumulator = self.problem().dtype().accumulator();
        let _ = match o.wire {
            Wire::Full => writeln!(out, "  partial gradients are sent in {accumulator}: nothing is rounded on the way"),
            Wire::Bf16 if self.ring_ranks_of_node() < ring => writeln!(
                out,
                "  partial gradients are summed in each node in {accumulator}; the sums cross in bf16: half the bytes, each rounded once to 8 bits"
            ),
            Wire::Bf16 => {
                let gateways = self.ulysses_ranks_of_node() < self.mesh().ulysses;
                let summed = match (self.ring_holders_of_node() > 1, gateways) {
                    (true, _) => format!("; they are summed in each node first, in {accumulator}"),
                    (_, true) => format!("; those of an all-to-all are summed in each node first, in {accumulator}"),
                    _ => String::new(),
                };
                writeln!(
                    out,
                    "  partial gradients are sent in bf16: half the bytes, each partial rounded once to 8 bits{summed}"
                )
            }
        };
    }

    /// The side that circulates in the forward, if it is not the default: q, or the result of comparing two numbers of
    /// bytes.
    fn describe_forward(&self, out: &mut String) {
        let queries = self.forward_circulates() == CirculatingSide::Queries && self.mesh().ring > 1;
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
        let (each, ring, per_node) = (self.options().ranks_per_node, self.mesh().ring, self.ring_ranks_of_node());
        if each == 0 || each >= self.mesh().group() {
            return;
        }
        let ordered = self.form() == Form::Ordered;
        // The most bytes that buffers of these names take on a rank.
        let buffers = |names: &[&str]| {
            let of = |direction| {
                let bytes = ranks.iter().filter_map(|&rank| {
                    let buffers = Schedule::new(self, rank, direction).ok()?.buffers;
                    let of_nodes = |b: &&Buffer| names.contains(&b.name);
                    Some(buffers.iter().filter(of_nodes).map(|b| u128::from(b.bytes())).sum::<u128>())
                });
                grouped(bytes.max().unwrap_or(0))
            };
            format!("{} forward, {} backward", of(Direction::Forward), of(Direction::Backward))
        };
        let ulysses = self.mesh().ulysses;
        if self.ulysses_ranks_of_node() < ulysses {
            let _ = writeln!(
                out,
                "  {} nodes of {each} ranks in an all-to-all: a row of k or v crosses to each once, to the rank at its owner's place, which passes it on; {}",
                ulysses / each,
                if ordered {
                    "gradients of a kv head are summed in the node of its first q head, and cross for each q head from others"
                } else {
                    "gradients are summed in the node before they cross back"
                }
            );
            let names = [
                "packed for a node",
                "from another node",
                "returned to a gateway",
                "sum of a node",
                "partials to cross",
                "sum from a node",
                "partials from a node",
            ];
            let _ = writeln!(out, "    bytes of the buffers for it, at most: {}", buffers(&names));
            if ring == 1 {
                return;
            }
        }
        let back = if ordered { "" } else { "; gradients are summed in the node before they cross back" };
        let holders = self.ring_holders_of_node();
        if per_node == ring && holders == 1 {
            let _ = writeln!(
                out,
                "  nodes of {each} ranks: no two ring ranks share one, so every row of the ring goes straight to its reader and crosses once"
            );
            return;
        }
        if per_node < ring {
            let _ = writeln!(
                out,
                "  {} nodes of {per_node} ring ranks: a row that a node needs of another one crosses once, to the rank at its owner's place, which passes it on{back}",
                ring / per_node,
            );
        }
        if holders > 1 {
            let _ = writeln!(
                out,
                "  {holders} Ulysses ranks of a node hold some kv heads together: of the rows of such a head a part crosses to each of its ranks, which pass the parts on to one another{back}"
            );
        }
        let _ = match self.form() {
            Form::Ordered => {
                writeln!(out, "    rows cross into the slot that all keys are gathered in: no buffer of their own")
            }
            _ => writeln!(
                out,
                "    bytes of the node slots and of the sums for them, at most: {}",
                buffers(&["node slot", "sum of a node"])
            ),
        };
    }

    /// The costs of another form over those of the ring form with one pass.
    fn describe_price(&self, out: &mut String, ranks: &[usize]) {
        let options = Options::default().gather(Gather::Steps).ranks_per_node(self.options().ranks_per_node);
        let Ok(ring) = Self::with_tokens_of(self, self.problem(), options) else { return };
        for direction in [Direction::Forward, Direction::Backward] {
            let (Ok(ours), Ok(theirs)) = (self.costs_for(ranks, direction), ring.costs_for(ranks, direction)) else {
                continue;
            };
            let most = |c: &[Costs], f: &dyn Fn(&Costs) -> u128| c.iter().map(f).max().unwrap_or(0);
            let mut parts = Vec::new();
            for (name, f) in [
                ("workspace", &(|c: &Costs| u128::from(c.workspace)) as &dyn Fn(&Costs) -> u128),
                ("bytes received", &|c: &Costs| u128::from(c.bytes_received())),
                ("multiply-adds", &|c: &Costs| c.multiply_adds()),
            ] {
                let (a, b) = (most(&ours, f), most(&theirs, f));
                parts.push(if a == b {
                    format!("{name} the same")
                } else if b == 0 {
                    format!("{name} {} instead of 0", grouped(a))
                } else {
                    format!("{name} ×{:.2} ({} instead of {})", a as f64 / b as f64, grouped(a), grouped(b))
                });
            }
            let _ = writeln!(
                out,
                "  price over the ring form, {}, busiest rank: {}",
                if direction == Direction::Forward { "forward" } else { "backward" },
                parts.join("; ")
            );
        }
    }

    pub(super) fn describe_direction(&self, out: &mut String, direction: Direction, costs: &[Costs]) {
        let n = self.mesh().group();
        let title = if direction == Direction::Forward { "forward" } else { "backward" };
        let _ = write!(out, "\n{title}: bytes, messages (sent and received) and multiply-adds of each step");
        if costs.len() > 1 && costs.len() < n {
            let _ = write!(
                out,
                " ({} ranks counted of {n}: {:?})",
                costs.len(),
                costs.iter().map(|c| c.rank).collect::<Vec<_>>()
            );
        }
        out.push('\n');
        let mut steps: Vec<(usize, &'static str, u32)> = Vec::new();
        for c in costs {
            for s in &c.steps {
                // All bytes between nodes have one line.
                let key = (order(s.phase), s.phase, if s.phase == BETWEEN_NODES { 0 } else { s.step });
                if !steps.contains(&key) {
                    steps.push(key);
                }
            }
        }
        steps.sort_unstable();
        // If there are very many ring steps, the later ones share a line.
        let late = steps.iter().filter(|s| s.1 == "ring").nth(STEPS).map_or(u32::MAX, |s| s.2);
        let told = steps.iter().filter(|s| s.1 == "ring" && s.2 >= late).count();
        let last = steps.iter().filter(|s| s.1 == "ring").map(|s| s.2).max().unwrap_or(0);
        if told > 1 {
            steps.retain(|s| s.1 != "ring" || s.2 <= late);
        }
        let each = costs.len() <= COLUMNS;
        let mut head = vec!["step".to_string(), String::new()];
        if each {
            head.extend(costs.iter().map(|c| format!("rank {}", c.rank)));
        } else {
            head.extend(["least", "mean", "largest"].map(String::from));
        }
        let mut t = TextTable { left: 2, rows: vec![head] };
        let mut line = |step: &str, name: &str, values: Vec<u128>| {
            if values.iter().all(|&v| v == 0) {
                return false;
            }
            let cells: Vec<String> =
                if each { values.into_iter().map(grouped).collect() } else { spread(values.into_iter()).to_vec() };
            t.row([step.to_string(), name.to_string()].into_iter().chain(cells));
            true
        };
        for (_, phase, step) in steps {
            let together = phase == "ring" && step == late && told > 1;
            let mut label = match phase {
                "ring" if together => format!("ring {step} to {last} ({told} steps)"),
                "ring" => format!("ring {step}"),
                _ => phase.to_string(),
            };
            let of = |f: &dyn Fn(&StepCost) -> u128| {
                let all = phase == BETWEEN_NODES;
                let here = |s: &&StepCost| s.phase == phase && (all || s.step == step || together && s.step > step);
                costs.iter().map(|c| c.steps.iter().filter(here).map(f).sum()).collect::<Vec<u128>>()
            };
            for (name, values) in [
                ("bytes sent", of(&|s| s.bytes_sent.into())),
                ("bytes received", of(&|s| s.bytes_received.into())),
                ("messages", of(&|s| s.messages.into())),
                ("multiply-adds", of(&|s| s.multiply_adds)),
            ] {
                if line(&label, name, values) {
                    label.clear();
                }
            }
        }
        let total = |f: &dyn Fn(&Costs) -> u128| costs.iter().map(f).collect::<Vec<u128>>();
        line("all", "bytes sent", total(&|c| c.bytes_sent().into()));
        line("", "bytes received", total(&|c| c.bytes_received().into()));
        line("", "messages", total(&|c| c.messages().into()));
        line("", "multiply-adds", total(&Costs::multiply_adds));
        line("", "workspace", total(&|c| c.workspace.into()));
        t.write(out);
        self.describe_workspace(out, title, costs);
    }

    fn describe_workspace(&self, out: &mut String, title: &str, costs: &[Costs]) {
        let Some(most) = costs.iter().max_by_key(|c| (c.workspace, core::cmp::Reverse(c.rank))) else { return };
        let work: Vec<u128> = costs.iter().map(Costs::multiply_adds).collect();
        let sum: u128 = work.iter().sum();
        if sum > 0 && work.len() > 1 {
            let largest = work.iter().max().copied().unwrap_or(0);
            let _ = writeln!(
                out,
                "  work of the busiest rank over the mean, heads and layout together: {:.3}",
                largest as f64 * work.len() as f64 / sum as f64
            );
        }
        let _ = writeln!(
            out,
            "  peak workspace {title}: {} bytes on rank {}, beyond inputs and outputs (limit for this plan: {}){}",
            grouped(most.workspace.into()),
            most.rank,
            grouped(self.workspace_bound(most.rank, most.direction).into()),
            if most.workspace == 0 { "" } else { ", at its longest:" }
        );
        let mut t = TextTable { left: 1, rows: Vec::new() };
        for p in &most.peak {
            t.row([
                p.name.to_string(),
                grouped(p.bytes.into()),
                if p.count > 1 { format!("in {}", p.count) } else { String::new() },
            ]);
        }
        t.write(out);
        let metadata = costs.iter().map(|c| c.device_metadata).max().unwrap_or(0);
        let _ = writeln!(
            out,
            "  metadata kept on a device {title}: at most {} bytes, for each of the 16 plans and directions that a rank remembers",
            grouped(metadata.into())
        );
    }
}
