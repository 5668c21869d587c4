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
    vec::Vec,
};
use core::fmt::Write;

use figures::{TextTable, grouped, spread};

use super::Costs;
use crate::plan::{AttentionKind, Plan};
use crate::{
    batch::Side,
    error::Result,
    mesh::Mesh,
    schedule::{Direction, Schedule},
};

/// Up to this many ranks of a group have a column of their own.
const COLUMNS: usize = 8;
/// Up to this many ranks of a group are counted one by one; of more, [`SAMPLE`] are.
const COUNTED: usize = 64;
const SAMPLE: usize = 16;
/// Up to this many ring steps have lines of their own.
const STEPS: usize = 16;

const fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Forward => "forward",
        Direction::Backward => "backward",
    }
}

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
        let costs = self.costs_for(&ranks);
        self.describe_form(&mut out, &ranks, &costs);
        for (direction, costs) in [Direction::Forward, Direction::Backward].into_iter().zip(&costs) {
            match costs {
                Ok(costs) => self.describe_direction(&mut out, costs),
                Err(e) => {
                    let _ = writeln!(out, "\n{} has no schedule: {e}", name(direction));
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
        let Mesh { ring, ulysses, .. } = self.mesh();
        let _ = writeln!(
            out,
            "rank {rank}: replica {}, ring rank {} of {ring}, ulysses rank {} of {ulysses}",
            at.replica, at.ring, at.ulysses
        );
        let _ = writeln!(out, "\ntokens and heads");
        self.table_of_holdings(&mut out, rank..rank + 1);
        for costs in &both {
            self.describe_direction(&mut out, core::slice::from_ref(costs));
        }
        Ok(out)
    }

    /// The ranks whose schedules are counted: all of the first group, or some of them, evenly.
    fn counted(&self) -> Vec<usize> {
        let n = self.mesh().group();
        if n <= COUNTED { (0..n).collect() } else { (0..SAMPLE).map(|i| i * (n - 1) / (SAMPLE - 1)).collect() }
    }

    /// The costs of these ranks, forward and backward.
    fn costs_for(&self, ranks: &[usize]) -> [Result<Vec<Costs>>; 2] {
        let both = [Direction::Forward, Direction::Backward];
        let (mut last, mut costs) = (None, [Vec::new(), Vec::new()]);
        for &rank in ranks {
            let Ok(schedules) = Schedule::both_after(self, rank, last.as_ref()) else {
                // The errors of both directions.
                return both.map(|direction| ranks.iter().map(|&r| self.costs(r, direction)).collect());
            };
            for (i, direction) in both.into_iter().enumerate() {
                costs[i].push(self.costs_of(&schedules[i], direction));
            }
            last = Some(schedules);
        }
        costs.map(Ok)
    }

    fn describe(&self, out: &mut String) {
        let (p, b) = (self.problem(), self.problem().batch());
        let kind = if p.kind == AttentionKind::Softmax { "attention" } else { "mixing of another kind" };
        let lengths = (0..b.documents()).map(|d| b.document(Side::Q, d).len());
        let documents = match (b.documents(), lengths.clone().min(), lengths.max()) {
            (n, Some(shortest), Some(longest)) if n > 1 => format!("{n} documents ({shortest} to {longest} tokens)"),
            (n, ..) => format!("{n} document{}", if n == 1 { "" } else { "s" }),
        };
        let [q, k] = [Side::Q, Side::K].map(|side| grouped(b.tokens(side) as u128));
        let _ = writeln!(out, "plan {:016x}", self.fingerprint());
        let slices = match b.slices().map(<[_]>::len) {
            None => String::new(),
            Some(1) => ", 1 slice".into(),
            Some(n) => format!(", {n} slices"),
        };
        let _ = writeln!(
            out,
            "  {kind}, mask {}, {}: {documents}{slices}, {q} q tokens, {k} k tokens",
            p.mask_words(),
            p.dtype()
        );
        let (heads, kv_heads, head_dim, value_dim) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
        let _ = writeln!(
            out,
            "  {heads} q heads, {kv_heads} kv heads, head_dim {head_dim}, value_dim {value_dim}{}",
            p.score_words()
        );
        let (dk, dv) = (head_dim as u128, value_dim as u128);
        let [forward, backward] = [dk + dv, 3 * dk + 2 * dv].map(|dims| grouped(p.area() * heads as u128 * dims));
        let _ = writeln!(
            out,
            "  each head computes {} (q, k) pairs; all heads: {forward} multiply-adds forward, {backward} backward",
            grouped(p.area())
        );
        if b.slices().is_some()
            && let Some(picture) = p.picture()
        {
            let _ = writeln!(out, "\nwhich keys (columns) each query (row) attends to\n{picture}");
        }
    }

    fn holding(&self, rank: usize) -> [String; 9] {
        let at = self.mesh().coordinates(rank);
        let (mut documents, mut last) = (0, None);
        self.local_tokens(Side::Q, rank).for_each_run(|_, _, _, doc| {
            documents += usize::from(last != Some(doc));
            last = Some(doc);
        });
        let share = self.heads_of(rank);
        let span = |r: core::ops::Range<u32>| format!("{}..{}", r.start, r.end);
        [
            rank.to_string(),
            at.ring.to_string(),
            at.ulysses.to_string(),
            grouped(self.local_tokens(Side::Q, rank).len() as u128),
            grouped(self.local_tokens(Side::K, rank).len() as u128),
            documents.to_string(),
            span(share.q),
            span(share.kv),
            grouped(self.shares().rows(Side::Q, at.ring) as u128),
        ]
    }

    fn describe_holdings(&self, out: &mut String) {
        let n = self.mesh().group();
        let _ = writeln!(
            out,
            "\ntokens and heads of each rank (between the all-to-alls: its heads, of all tokens of the ring rank's share)"
        );
        if n <= 2 * COLUMNS {
            return self.table_of_holdings(out, 0..n);
        }
        let mut t = TextTable::new(1);
        t.row(["", "least", "mean", "largest"]);
        let mut line = |name: &str, values: &dyn Fn(usize) -> usize| {
            let values: Vec<u128> = (0..n).map(|rank| values(rank) as u128).collect();
            t.row([name.to_string()].into_iter().chain(spread(&values)));
        };
        line("q tokens", &|r| self.local_tokens(Side::Q, r).len());
        line("k tokens", &|r| self.local_tokens(Side::K, r).len());
        line("q heads", &|r| self.heads_of(r).q.len());
        line("kv heads", &|r| self.heads_of(r).kv.len());
        t.write(out);
    }

    fn table_of_holdings(&self, out: &mut String, ranks: core::ops::Range<usize>) {
        let mut t = TextTable::new(0);
        t.row([
            "rank",
            "ring",
            "ulysses",
            "q tokens",
            "k tokens",
            "documents",
            "q heads",
            "kv heads",
            "share's q tokens",
        ]);
        ranks.for_each(|rank| t.row(self.holding(rank)));
        t.write(out);
    }
}
