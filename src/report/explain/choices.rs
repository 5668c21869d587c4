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
    error::Result,
    heads,
    layout::{Layout, Shares},
    plan::{
        Choice, Plan,
        layout_load::{LayoutLoad, layout_load, load_of_shares},
    },
};

fn ranks(n: usize) -> String {
    format!("{n} {}", if n == 1 { "rank" } else { "ranks" })
}

impl Plan {
    pub(super) fn describe_mesh(&self, out: &mut String) {
        let mesh = self.mesh();
        let _ = writeln!(out, "\nmesh {mesh}: {}", ranks(mesh.world()));
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
        if let Some(reason) = self.reason() {
            let _ = writeln!(
                out,
                "  mesh and layout were chosen by the description of a machine; a choice that is kept keeps these figures"
            );
            return reason.lines().filter(|l| !l.is_empty()).for_each(|line| {
                let _ = writeln!(out, "  {line}");
            });
        }
        match Choice::new(mesh.group(), self.problem(), Choice::BALANCE, self.options().ranks_per_node) {
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
            "  by rules of thumb, without the description of a machine, the automatic choice for {} is {}, layout {}{}",
            ranks(mesh.group()),
            choice.mesh,
            choice.layout,
            if given { "" } else { "; this plan was given another" }
        );
        let _ = writeln!(
            out,
            "  rule: the least cost; of equals the larger ulysses. cost = multiply-adds of the busiest rank + {} × (bytes it receives + {} × messages it receives), forward and backward, each mesh with its automatic layout",
            choice.balance,
            Choice::MESSAGE
        );
        let node = self.options().ranks_per_node;
        let over_nodes = (1..mesh.group()).contains(&node);
        if over_nodes {
            let _ = writeln!(
                out,
                "  nodes of {} were weighed: a byte from another node counts {} times",
                ranks(node),
                Choice::BETWEEN
            );
        }
        let mut columns = vec!["", "mesh", "q heads", "layout", "multiply-adds", "bytes", "messages (about)", "cost"];
        if over_nodes {
            columns.insert(6, "of other nodes (about)");
        }
        let mut t = TextTable::new(2, &columns);
        for c in &choice.candidates {
            let here = (c.mesh.ulysses, c.mesh.ring) == (mesh.ulysses, mesh.ring);
            let mut row = vec![
                if here { "→".to_string() } else { String::new() },
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
        let ring = self.mesh().ring;
        let _ =
            writeln!(out, "\nlayout {} over {ring} ring ranks, distribution {}", self.layout(), self.distribution());
        let _ = writeln!(out, "  tensors of one distribution may meet every plan of it, and none of another");
        if ring == 1 {
            let _ = writeln!(out, "  one ring rank holds every token, so all layouts deal alike");
        }
        let fresh = Shares::new(self.problem().batch(), self.problem().mask(), self.layout(), ring);
        if fresh.is_ok_and(|fresh| fresh.deal() != self.shares().deal()) {
            let _ = writeln!(out, "  the chunks are those of another plan, and were dealt by its mask area");
        }
        let mut layouts = vec![self.layout()];
        if ring > 1 {
            layouts.extend(Choice::LAYOUTS.into_iter().filter(|l| *l != self.layout()));
        }
        let _ =
            writeln!(out, "  largest over mean; k rows from others: those that queries of the busiest ring rank read");
        let mut t = TextTable::new(2, &["", "layout", "work", "q tokens", "k rows from others"]);
        let mut rows = Vec::new();
        for (i, layout) in layouts.into_iter().enumerate() {
            // Layouts that are impossible with a ring of this size are left out.
            let own = i == 0;
            let d = if own {
                Ok(load_of_shares(self.problem(), self.shares()))
            } else {
                layout_load(self.problem(), layout, ring)
            };
            let Ok(d): Result<LayoutLoad> = d else { continue };
            rows.push((d.largest.needed, layout));
            t.row([
                if own { "→".to_string() } else { String::new() },
                layout.to_string(),
                format!("{:.3}", d.work_imbalance()),
                format!("{:.3}", d.token_imbalance()),
                grouped(d.largest.needed.into()),
            ]);
        }
        t.write(out);
        if let (Some(&(own, _)), Some(&(least, layout))) = (rows.first(), rows.iter().min_by_key(|row| row.0))
            && matches!(self.layout(), Layout::Zigzag | Layout::Striped { .. })
            && own > 4 * least
        {
            let _ = writeln!(
                out,
                "  {} cuts each document for every ring rank: the busiest receives {} k rows, with {layout} it is {}. Packs of short documents are faster where the pack is cut instead",
                self.layout(),
                grouped(own.into()),
                grouped(least.into())
            );
        }
        if self.reason().is_some() {
            return; // the predicted time chose, not this rule
        }
        let _ = writeln!(
            out,
            "  rule: at most 1 % more work on the busiest rank than the best of these, then fewest rows from others, then {}",
            Choice::LAYOUTS.map(|l| l.to_string()).join(", ")
        );
    }
}
