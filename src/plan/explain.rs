// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan in plain text.
//!
//! Whoever wonders why a mesh was taken, what travels when, or where the memory goes, reads it here. Every figure is
//! counted from the schedules that would run ([`Plan::costs`]), never estimated; where only some ranks of many are
//! counted, the text says which. It is written for people: programs take [`Plan::costs`], [`super::choose`] and
//! [`super::dealt`].

use alloc::{
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::fmt::Write;

use super::{BALANCE, Choice, Circulate, Costs, Dealt, Kind, LAYOUTS, Options, Plan, Wire, choose, dealt};
use crate::{
    batch::Side,
    error::Result,
    heads,
    schedule::{Direction, Form, Visitors},
};

/// Up to this many ranks of a group have a column of their own.
const COLUMNS: usize = 8;
/// Up to this many ranks of a group are counted one by one; of more, [`SAMPLE`] are.
const COUNTED: usize = 64;
const SAMPLE: usize = 16;
/// Up to this many ring steps have lines of their own.
const STEPS: usize = 16;

/// 1234567 as `1,234,567`.
fn grouped(n: u128) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Rows of cells, each column as wide as its widest cell: the first `left` columns to the left, figures to the right.
struct Table {
    left: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(left: usize, head: &[&str]) -> Self {
        Self { left, rows: vec![head.iter().map(|h| h.to_string()).collect()] }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn write(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::from("  ");
            for (c, (cell, &w)) in row.iter().zip(&widths).enumerate() {
                if c < self.left {
                    let _ = write!(line, "{cell:<w$}  ");
                } else {
                    let _ = write!(line, "{cell:>w$}  ");
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
}

/// Least, mean and largest, in figures.
fn spread(values: impl Iterator<Item = u128> + Clone) -> [String; 3] {
    let n = values.clone().count().max(1) as u128;
    let (least, largest) = (values.clone().min().unwrap_or(0), values.clone().max().unwrap_or(0));
    [grouped(least), grouped(values.sum::<u128>() / n), grouped(largest)]
}

impl Plan {
    /// The plan in plain text: the problem, the mesh and why, the layout and how evenly it deals, what each rank holds,
    /// every step's bytes and multiply-adds in both directions, the form and its price, and the peak of the workspace.
    ///
    /// Counts the schedules of all ranks of a group, so it takes as long as planning all of them; of a group of more than
    /// 64 ranks it counts 16 and says so.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Plan, Problem};
    /// let problem = Problem::new(Batch::from_lengths(&[297, 282, 187])?, 9, 3, 64, Dtype::F32);
    /// let text = Plan::auto(&problem, 6)?.explain();
    /// assert!(text.contains("9 q heads, 3 kv heads"));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn explain(&self) -> String {
        let mut out = String::new();
        let ranks = self.counted();
        self.describe(&mut out);
        self.describe_mesh(&mut out);
        self.describe_layouts(&mut out);
        self.describe_holdings(&mut out);
        self.describe_form(&mut out, &ranks);
        for direction in [Direction::Forward, Direction::Backward] {
            match self.costs_for(&ranks, direction) {
                Ok(costs) => self.describe_direction(&mut out, direction, &costs),
                Err(e) => {
                    let _ = writeln!(out, "\n{direction:?} cannot be scheduled: {e}");
                }
            }
        }
        out
    }

    /// One rank in plain text: what it holds, its steps, and its workspace by buffer.
    ///
    /// # Errors
    /// A rank outside the mesh.
    pub fn explain_rank(&self, rank: usize) -> Result<String> {
        let both = [self.costs(rank, Direction::Forward)?, self.costs(rank, Direction::Backward)?];
        let mut out = String::new();
        let place = self.mesh().place(rank);
        let _ = writeln!(
            out,
            "rank {rank}: replica {}, ring rank {} of {}, ulysses rank {} of {}",
            place.replica,
            place.ring,
            self.mesh().ring,
            place.ulysses,
            self.mesh().ulysses
        );
        let _ = writeln!(out, "\nholds");
        let mut t = holdings_table();
        t.row(self.holding(rank));
        t.write(&mut out);
        for costs in &both {
            self.describe_direction(&mut out, costs.direction, core::slice::from_ref(costs));
        }
        Ok(out)
    }

    /// The ranks whose schedules are counted: all of the first group, or some of them, evenly.
    fn counted(&self) -> Vec<usize> {
        let n = self.mesh().group();
        if n <= COUNTED { (0..n).collect() } else { (0..SAMPLE).map(|i| i * (n - 1) / (SAMPLE - 1)).collect() }
    }

    fn costs_for(&self, ranks: &[usize], direction: Direction) -> Result<Vec<Costs>> {
        ranks.iter().map(|&r| self.costs(r, direction)).collect()
    }

    fn describe(&self, out: &mut String) {
        let p = self.problem();
        let b = p.batch();
        let _ = writeln!(out, "plan {:016x}", self.fingerprint());
        let mask = p.window();
        let name = match (mask.left, mask.right) {
            (None, None) => "full".to_string(),
            (None, Some(0)) => "causal".to_string(),
            (left, right) => {
                let side = |x: Option<u32>| x.map_or("open".to_string(), |n| n.to_string());
                format!("window {} back, {} ahead", side(left), side(right))
            }
        };
        let kind = if p.kind == Kind::Softmax { "attention" } else { "mixing of another kind" };
        let lengths = (0..b.documents()).map(|d| b.document(Side::Q, d).len());
        let _ = writeln!(
            out,
            "  {kind}, mask {name}, {}: {} documents ({} to {} tokens), {} q tokens, {} k tokens",
            p.dtype(),
            b.documents(),
            lengths.clone().min().unwrap_or(0),
            lengths.max().unwrap_or(0),
            grouped(b.tokens(Side::Q) as u128),
            grouped(b.tokens(Side::K) as u128)
        );
        let _ = writeln!(
            out,
            "  {} q heads, {} kv heads, head_dim {}, value_dim {}{}{}{}",
            p.heads(),
            p.kv_heads(),
            p.head_dim(),
            p.v_head_dim(),
            p.softcap.map_or(String::new(), |c| format!(", softcap {c}")),
            if p.slopes().is_some() { ", ALiBi" } else { "" },
            if p.has_sinks() { ", sinks" } else { "" }
        );
        let (h, dk, dv) = (p.heads() as u128, p.head_dim() as u128, p.v_head_dim() as u128);
        let _ = writeln!(
            out,
            "  {} (q, k) pairs count for each head: {} multiply-adds forward, {} backward",
            grouped(p.area()),
            grouped(p.area() * h * (dk + dv)),
            grouped(p.area() * h * (3 * dk + 2 * dv))
        );
    }

    fn describe_mesh(&self, out: &mut String) {
        let mesh = self.mesh();
        let _ = writeln!(out, "\nmesh {mesh}: {} ranks", mesh.world());
        if mesh.replicas > 1 {
            let _ = writeln!(out, "  replicas run batches of their own and never meet; below is one of them");
        }
        let heads = self.problem().heads() as u32;
        let mean = f64::from(heads) / mesh.ulysses as f64;
        let _ = writeln!(
            out,
            "  q heads: {} on the busiest Ulysses rank, {mean:.2} on average, imbalance {:.3}{}",
            heads.div_ceil(mesh.ulysses as u32),
            heads::imbalance(mesh.ulysses, heads),
            if self.shares_kv_heads() { "; some kv heads are read by several ranks" } else { "" }
        );
        match choose(mesh.group(), self.problem(), BALANCE) {
            Ok(choice) => self.describe_choice(out, &choice),
            Err(e) => {
                let _ = writeln!(out, "  no automatic mesh: {e}");
            }
        }
    }

    fn describe_choice(&self, out: &mut String, choice: &Choice) {
        let mesh = self.mesh();
        let given = (choice.mesh.ulysses, choice.mesh.ring) == (mesh.ulysses, mesh.ring);
        let _ = writeln!(
            out,
            "  the automatic choice for {} ranks is {}, layout {}{}",
            mesh.group(),
            choice.mesh,
            choice.layout,
            if given { "" } else { "; this plan was given another" }
        );
        let _ = writeln!(
            out,
            "  rule: least cost = multiply-adds of the busiest rank + {} for each byte it receives, forward and backward, each mesh with its automatic layout; of equals the larger ulysses",
            choice.balance
        );
        let mut t = Table::new(2, &["", "mesh", "q heads", "layout", "multiply-adds", "bytes", "cost"]);
        for c in &choice.candidates {
            let here = (c.mesh.ulysses, c.mesh.ring) == (mesh.ulysses, mesh.ring);
            t.row([
                if here { "→".to_string() } else { String::new() },
                c.mesh.to_string(),
                format!("×{:.3}", heads::imbalance(c.mesh.ulysses, self.problem().heads() as u32)),
                c.layout.to_string(),
                grouped(c.multiply_adds),
                grouped(c.bytes),
                grouped(c.cost),
            ]);
        }
        t.write(out);
    }

    fn describe_layouts(&self, out: &mut String) {
        let ring = self.mesh().ring;
        let _ = writeln!(out, "\nlayout {} over {ring} ring ranks", self.layout());
        if ring == 1 {
            let _ = writeln!(out, "  one ring rank holds every token, so all layouts deal alike");
        }
        let mut layouts = vec![self.layout()];
        if ring > 1 {
            layouts.extend(LAYOUTS.into_iter().filter(|l| *l != self.layout()));
        }
        let _ = writeln!(
            out,
            "  largest over mean; k rows from others: what the busiest ring rank receives in the forward"
        );
        let mut t = Table::new(2, &["", "layout", "work", "q tokens", "k rows from others"]);
        for (i, layout) in layouts.into_iter().enumerate() {
            // A layout that this ring is too large for is left out.
            let Ok(d): Result<Dealt> = dealt(self.problem(), layout, ring) else { continue };
            t.row([
                if i == 0 { "→".to_string() } else { String::new() },
                layout.to_string(),
                format!("{:.3}", d.work_imbalance()),
                format!("{:.3}", d.token_imbalance()),
                grouped(d.largest.needed.into()),
            ]);
        }
        t.write(out);
        let _ = writeln!(
            out,
            "  rule: at most 1 % more work on the busiest rank than the best of these, then fewest rows from others, then {}",
            LAYOUTS.map(|l| l.to_string()).join(", ")
        );
    }

    fn holding(&self, rank: usize) -> Vec<String> {
        let place = self.mesh().place(rank);
        let (mut documents, mut last) = (0, usize::MAX);
        let mut seen = Vec::new();
        self.for_each_run(Side::Q, rank, |_, _, _, doc| {
            if doc != last {
                seen.push(doc);
                last = doc;
            }
        });
        seen.sort_unstable();
        seen.dedup();
        documents += seen.len();
        let share = self.heads_of(rank);
        let span = |r: &core::ops::Range<u32>| format!("{}..{}", r.start, r.end);
        vec![
            rank.to_string(),
            place.ring.to_string(),
            place.ulysses.to_string(),
            grouped(self.local_tokens(Side::Q, rank) as u128),
            grouped(self.local_tokens(Side::K, rank) as u128),
            documents.to_string(),
            span(&share.q),
            span(&share.kv),
            grouped(self.shares().rows(Side::Q, place.ring) as u128),
        ]
    }

    fn describe_holdings(&self, out: &mut String) {
        let n = self.mesh().group();
        let _ = writeln!(out, "\nwhat each rank holds (between the all-to-alls: its heads of the share's tokens)");
        if n <= 2 * COLUMNS {
            let mut t = holdings_table();
            for rank in 0..n {
                t.row(self.holding(rank));
            }
            return t.write(out);
        }
        let mut t = Table::new(1, &["", "least", "mean", "largest"]);
        let mut line = |name: &str, values: &dyn Fn(usize) -> u128| {
            let values: Vec<u128> = (0..n).map(values).collect();
            t.row([name.to_string()].into_iter().chain(spread(values.into_iter())));
        };
        line("q tokens", &|r| self.local_tokens(Side::Q, r) as u128);
        line("k tokens", &|r| self.local_tokens(Side::K, r) as u128);
        line("q heads", &|r| self.heads_of(r).q.len() as u128);
        line("kv heads", &|r| self.heads_of(r).kv.len() as u128);
        t.write(out);
    }

    fn describe_form(&self, out: &mut String, ranks: &[usize]) {
        let (o, ring) = (self.options(), self.mesh().ring);
        let _ = writeln!(out, "\nform");
        let form = match self.form() {
            _ if ring == 1 && self.form() != Form::Ordered => "one ring rank: nothing visits",
            Form::Ring => "ring: one visit at a time, the next one travelling into the other of two slots",
            Form::Gather => "gather: all k and v of other ranks at once",
            Form::Ordered => {
                "ordered (reproducible): both sides are gathered and met in the order of positions, dk and dv are made head by head; the bits do not depend on the number of ranks"
            }
        };
        let _ = writeln!(out, "  {form}");
        if o.passes > 1 {
            let _ =
                writeln!(out, "  {} passes over groups of kv heads: what is in flight shrinks by as much", o.passes);
        }
        if self.form() != Form::Ring {
            self.describe_price(out, ranks);
        }
        let (k, q) = self.bytes_per_visiting_token();
        let b = self.problem().batch();
        let (nk, nq) = (b.tokens(Side::K) as u128, b.tokens(Side::Q) as u128);
        let side = match (self.form(), self.backward_visitors(), o.circulate) {
            _ if ring == 1 => "backward: nothing circulates on one ring rank".to_string(),
            (Form::Ordered, ..) => "backward: k and v are gathered for dq, then the q side for dk and dv".to_string(),
            (_, v, c) => {
                let what = if v == Visitors::Keys {
                    "k and v circulate, dk and dv go home"
                } else {
                    "q, do, lse and delta circulate, dq goes home"
                };
                let why = if c != Circulate::Auto {
                    "as the options ask"
                } else if o.passes > 1 || o.gather {
                    "as gather and passes need"
                } else {
                    "fewer bytes"
                };
                format!("backward: {what}: {why}")
            }
        };
        let _ = writeln!(out, "  {side}");
        let _ = writeln!(
            out,
            "    bytes of a visit there and home: {} for a k token ({} of them), {} for a q token ({} of them)",
            grouped(k),
            grouped(nk),
            grouped(q),
            grouped(nq)
        );
        let accumulator = self.problem().dtype().accumulator();
        let _ = match o.wire {
            Wire::Full => writeln!(out, "  partial gradients travel in {accumulator}: nothing is rounded on the way"),
            Wire::Bf16 => {
                writeln!(out, "  partial gradients travel in bf16: half the bytes, each partial rounded once to 8 bits")
            }
        };
    }

    /// What another form costs over the ring form with one pass.
    fn describe_price(&self, out: &mut String, ranks: &[usize]) {
        let Ok(ring) = Self::with_options(self.problem(), self.mesh(), self.layout(), Options::default()) else {
            return;
        };
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
                "  price over the default form, {}, busiest rank: {}",
                if direction == Direction::Forward { "forward" } else { "backward" },
                parts.join("; ")
            );
        }
    }

    fn describe_direction(&self, out: &mut String, direction: Direction, costs: &[Costs]) {
        let n = self.mesh().group();
        let title = if direction == Direction::Forward { "forward" } else { "backward" };
        let _ = write!(out, "\n{title}: bytes and multiply-adds of each step");
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
                let key = (super::costs::order(s.phase), s.phase, s.step);
                if !steps.contains(&key) {
                    steps.push(key);
                }
            }
        }
        steps.sort_unstable();
        // Of very many ring steps the later ones are told together.
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
        let mut t = Table { left: 2, rows: vec![head] };
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
            let of = |f: &dyn Fn(&super::StepCost) -> u128| {
                let here = |s: &&super::StepCost| s.phase == phase && (s.step == step || together && s.step > step);
                costs.iter().map(|c| c.steps.iter().filter(here).map(f).sum()).collect::<Vec<u128>>()
            };
            for (name, values) in [
                ("bytes sent", of(&|s| s.bytes_sent.into())),
                ("bytes received", of(&|s| s.bytes_received.into())),
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
            "  peak workspace {title}: {} bytes on rank {}, beyond inputs and outputs (the design allows {}){}",
            grouped(most.workspace.into()),
            most.rank,
            grouped(self.workspace_bound(most.rank, most.direction).into()),
            if most.workspace == 0 { "" } else { ", at its longest:" }
        );
        let mut t = Table { left: 1, rows: Vec::new() };
        for p in &most.peak {
            t.row([
                p.name.to_string(),
                grouped(p.bytes.into()),
                if p.count > 1 { format!("in {}", p.count) } else { String::new() },
            ]);
        }
        t.write(out);
    }
}

fn holdings_table() -> Table {
    let head =
        ["rank", "ring", "ulysses", "q tokens", "k tokens", "documents", "q heads", "kv heads", "share's q tokens"];
    Table::new(0, &head)
}

#[cfg(test)]
mod tests;
