// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plan as plain text.
//!
//! The text says why the mesh was chosen, what is sent in each step, and what uses memory. Every figure is counted from
//! the plan's schedules ([`Plan::costs`]), never estimated; if only some of many ranks are counted, the text says
//! which. Programs should not parse the text but use [`Plan::costs`] and [`Choice::new`](crate::plan::Choice::new).
//!
//! `choices` prints the reasons for mesh and layout, `costs` the steps and the memory, `figures` formats numbers.

mod choices;
mod costs;
mod figures;

use alloc::{
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::fmt::Write;

use figures::{TextTable, grouped, spread};

use super::Costs;
use crate::plan::{AttentionKind, Plan};
use crate::{batch::Side, error::Result, schedule::Direction};

/// Up to this many ranks of a group have a column of their own.
const COLUMNS: usize = 8;
/// Up to this many ranks of a group are counted one by one; of more, [`SAMPLE`] are.
const COUNTED: usize = 64;
const SAMPLE: usize = 16;
/// Up to this many ring steps have lines of their own.
const STEPS: usize = 16;

impl Plan {
    /// The plan in plain text: the problem, the mesh and the reason for it, the layout and its balance, what each rank
    /// holds, every step's bytes, messages and multiply-adds in both directions, the form and its cost, and the peak of
    /// the workspace.
    ///
    /// Counts the schedules of all ranks of a group, so it takes as long as planning all of them; of a group of more
    /// than 64 ranks it counts 16 and says so.
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
        let at = self.mesh().coordinates(rank);
        let _ = writeln!(
            out,
            "rank {rank}: replica {}, ring rank {} of {}, ulysses rank {} of {}",
            at.replica,
            at.ring,
            self.mesh().ring,
            at.ulysses,
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
        let mask = p.mask();
        let name = match (mask.left, mask.right) {
            (None, None) => "full".to_string(),
            (None, Some(0)) => "causal".to_string(),
            (left, right) => {
                let side = |x: Option<u32>| x.map_or("open".to_string(), |n| n.to_string());
                format!("window {} back, {} ahead", side(left), side(right))
            }
        };
        let kind = if p.kind == AttentionKind::Softmax { "attention" } else { "mixing of another kind" };
        let lengths = (0..b.documents()).map(|d| b.document(Side::Q, d).len());
        let _ = writeln!(
            out,
            "  {kind}, mask {name}, {}: {}, {} q tokens, {} k tokens",
            p.dtype(),
            match b.documents() {
                1 => "1 document".to_string(),
                n => {
                    let (shortest, longest) = (lengths.clone().min().unwrap_or(0), lengths.max().unwrap_or(0));
                    format!("{n} documents ({shortest} to {longest} tokens)")
                }
            },
            grouped(b.tokens(Side::Q) as u128),
            grouped(b.tokens(Side::K) as u128)
        );
        let _ = writeln!(
            out,
            "  {} q heads, {} kv heads, head_dim {}, value_dim {}{}{}{}",
            p.heads(),
            p.kv_heads(),
            p.head_dim(),
            p.value_dim(),
            p.softcap.map_or(String::new(), |c| format!(", softcap {c}")),
            if p.alibi_slopes().is_some() { ", ALiBi" } else { "" },
            if p.sinks() { ", sinks" } else { "" }
        );
        let (h, dk, dv) = (p.heads() as u128, p.head_dim() as u128, p.value_dim() as u128);
        let _ = writeln!(
            out,
            "  {} (q, k) pairs count for each head: {} multiply-adds forward, {} backward",
            grouped(p.area()),
            grouped(p.area() * h * (dk + dv)),
            grouped(p.area() * h * (3 * dk + 2 * dv))
        );
    }

    fn holding(&self, rank: usize) -> Vec<String> {
        let at = self.mesh().coordinates(rank);
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
            at.ring.to_string(),
            at.ulysses.to_string(),
            grouped(self.local_tokens(Side::Q, rank) as u128),
            grouped(self.local_tokens(Side::K, rank) as u128),
            documents.to_string(),
            span(&share.q),
            span(&share.kv),
            grouped(self.shares().rows(Side::Q, at.ring) as u128),
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
        let mut t = TextTable::new(1, &["", "least", "mean", "largest"]);
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
}

fn holdings_table() -> TextTable {
    let head =
        ["rank", "ring", "ulysses", "q tokens", "k tokens", "documents", "q heads", "kv heads", "share's q tokens"];
    TextTable::new(0, &head)
}
