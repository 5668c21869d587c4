// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reasons for this mesh and this layout, next to the other candidates.

use alloc::{
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::fmt::Write;

use super::figures::{TextTable, grouped};
use crate::{
    heads,
    layout::{Layout, Shares},
    mesh::Mesh,
    plan::{Choice, LayoutLoad, LoadCounter, Plan, auto::layouts},
};

fn ranks(n: usize) -> String {
    format!("{n} {}", if n == 1 { "rank" } else { "ranks" })
}

impl Plan {
    pub(super) fn describe_mesh(&self, out: &mut String) {
        let mesh = self.mesh();
        let _ = writeln!(out, "\nmesh {mesh}: {}", ranks(mesh.world()));
        if mesh.replicas > 1 {
            let _ = writeln!(out, "  replicas run their own batches and do not communicate; this is one of them");
        }
        let heads = self.problem().heads() as u32;
        let (most, mean) = (heads.div_ceil(mesh.ulysses as u32), f64::from(heads) / mesh.ulysses as f64);
        let imbalance = heads::imbalance(mesh.ulysses, heads);
        let shared = if self.shares_kv_heads() { "; some kv heads are read by several ranks" } else { "" };
        let _ = writeln!(
            out,
            "  q heads: {most} on the busiest Ulysses rank, {mean:.2} on average, imbalance {imbalance:.3}{shared}"
        );
        if let Some(reason) = self.reason() {
            let _ = writeln!(
                out,
                "  mesh and layout were chosen by the description of a machine; the figures are those of the batch they were chosen for"
            );
            return reason.lines().filter(|l| !l.is_empty()).for_each(|line| {
                let _ = writeln!(out, "  {line}");
            });
        }
        match Choice::new(self.problem(), mesh.group(), Choice::BALANCE, self.options().ranks_per_node) {
            Ok(choice) => self.describe_choice(out, &choice),
            Err(e) => {
                let _ = writeln!(out, "  no automatic mesh: {e}");
            }
        }
    }

    fn describe_choice(&self, out: &mut String, choice: &Choice) {
        let is_own = |mesh: Mesh| (mesh.ulysses, mesh.ring) == (self.mesh().ulysses, self.mesh().ring);
        let given = if is_own(choice.mesh) { "" } else { "; this plan was given another mesh" };
        let _ = writeln!(
            out,
            "  automatic choice for {} (by rules of thumb; no machine is described): {}, layout {}{given}",
            ranks(self.mesh().group()),
            choice.mesh,
            choice.layout,
        );
        let _ = writeln!(
            out,
            "  rule: the mesh with the lowest cost; if costs are equal, the larger ulysses. cost = multiply-adds of the busiest rank + {} × (bytes it receives + {} × messages it receives), forward and backward, with the automatic layout of the mesh",
            choice.balance,
            Choice::MESSAGE_COST_BYTES
        );
        let node = self.options().ranks_per_node;
        let over_nodes = (1..self.mesh().group()).contains(&node);
        if over_nodes {
            let (node, weight) = (ranks(node), Choice::INTER_NODE_FACTOR);
            let _ = writeln!(out, "  nodes of {node}: in the cost, a byte from another node counts {weight} times");
        }
        let mut columns = vec!["", "mesh", "q heads", "layout", "multiply-adds", "bytes", "messages (about)", "cost"];
        if over_nodes {
            columns.insert(6, "from other nodes (about)");
        }
        let mut t = TextTable::new(2);
        t.row(columns);
        for c in &choice.candidates {
            let mut row = vec![
                if is_own(c.mesh) { "→".to_string() } else { String::new() },
                c.mesh.to_string(),
                format!("×{:.3}", heads::imbalance(c.mesh.ulysses, self.problem().heads() as u32)),
                c.layout.to_string(),
                grouped(c.multiply_adds),
                grouped(c.bytes),
                grouped(c.messages.into()),
                grouped(c.cost),
            ];
            if over_nodes {
                row.insert(6, grouped(c.bytes_between));
            }
            t.row(row);
        }
        t.write(out);
    }

    pub(super) fn describe_layouts(&self, out: &mut String) {
        let (ring, layout) = (self.mesh().ring, self.layout());
        let _ = writeln!(out, "\nlayout {layout} over {ring} ring ranks, distribution {}", self.distribution());
        let _ = writeln!(out, "  a tensor may be used with every plan of its distribution, and with no other plan");
        if ring == 1 {
            let _ = writeln!(out, "  one ring rank holds all tokens, so all layouts are the same");
        }
        let fresh = Shares::new(self.problem().batch(), self.problem().mask(), layout, ring);
        if fresh.is_ok_and(|fresh| fresh.deal() != self.shares().deal()) {
            let _ = writeln!(out, "  the chunks are those of another plan, and balance the work of its mask");
        }
        let _ = writeln!(
            out,
            "  work, q tokens: the most of a ring rank over the mean; k rows from others: the most that queries of a ring rank read"
        );
        let mut counter = LoadCounter::new(self.problem());
        let own = counter.load_of(self.shares());
        let others = layouts(ring).filter(|other| ring > 1 && *other != layout);
        let loads: Vec<LayoutLoad> =
            core::iter::once(own).chain(others.filter_map(|other| counter.load(other, ring).ok())).collect();
        let mut t = TextTable::new(2);
        t.row(["", "layout", "work", "q tokens", "k rows from others"]);
        for (i, d) in loads.iter().enumerate() {
            t.row([
                if i == 0 { "→" } else { "" },
                &d.layout.to_string(),
                &format!("{:.3}", d.work_imbalance()),
                &format!("{:.3}", d.token_imbalance()),
                &grouped(d.largest.needed.into()),
            ]);
        }
        t.write(out);
        if let Some(least) = loads.iter().min_by_key(|d| d.largest.needed)
            && matches!(layout, Layout::Zigzag | Layout::Striped { .. })
            && own.largest.needed > 4 * least.largest.needed
        {
            let [rows, fewer] = [own.largest.needed, least.largest.needed].map(|rows| grouped(rows.into()));
            let _ = writeln!(
                out,
                "  {layout} cuts each document for every ring rank: a rank receives up to {rows} k rows, with {} up to {fewer}. For packs of short documents, layouts that cut the pack are faster",
                least.layout
            );
        }
        if self.reason().is_some() {
            return; // the predicted time chose, not this rule
        }
        let _ = writeln!(
            out,
            "  rule: of the layouts with at most 1 % more work on the busiest rank than the best one, the one with the fewest rows from others; if these are equal, the first of {}",
            Choice::LAYOUTS.map(|l| l.to_string()).join(", ")
        );
    }
}
