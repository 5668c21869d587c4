// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes operations on tags, which stand for the contents of buffers: all but kernel calls (`attend`) and messages
//! (`transfer`).

use alloc::{format, string::String, vec::Vec};

use super::{
    borders::NodeBorders,
    calls::AttendCalls,
    cell::{Cell, What},
    contributions::{Atom, Contributions},
    flaw::{Wrong, flaw},
    listed_keys::ListedPairs,
    memory::{Memory, Piece},
    packed::RankOps,
    reaches::Reaches,
    report::RankReport,
    segments::Segments,
};
use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
    plan::{Plan, Wire},
    schedule::{
        Buf, BufferView, SINK_DIGITS, TensorId,
        expand::Expansion,
        expanded::{CallRanges, ExpandedOp, SumBlock},
    },
};

/// All ranks during the simulated run.
pub(super) struct Prover<'a> {
    pub plan: &'a Plan,
    /// The pairs that the mask allows.
    pub reaches: Reaches,
    /// The schedules.
    pub ranks: Vec<RankOps<'a>>,
    pub memories: Vec<Memory>,
    /// Whether a cell stands for all heads of a row.
    pub whole_rows: bool,
    pub lists: Contributions,
    pub calls: AttendCalls,
    /// Allowed pairs that calls met, times their q heads: for o or dq, and for dk and dv.
    pub met_for_queries: u128,
    pub met_for_keys: u128,
    /// Scratch for the rows that an operation writes.
    pub pieces: Vec<Piece>,
    /// Scratch for the lists of an operation.
    expansion: Expansion,
    pub traffic: Vec<RankReport>,
    /// The rows that cross from node to node.
    pub borders: Option<NodeBorders>,
    /// The pairs of schedules over listed keys, of those that the mask allows; `None` for all.
    pub listed: Option<ListedPairs>,
    /// The segments of a scan.
    pub segments: Segments,
}

impl<'a> Prover<'a> {
    pub(super) fn new(plan: &'a Plan, ranks: Vec<RankOps<'a>>, memories: Vec<Memory>, whole_rows: bool) -> Self {
        let report = |ops: &RankOps| RankReport {
            rank: ops.rank(),
            operations: ops.len(),
            exchanges: (0..ops.len()).filter(|&i| ops.is_exchange(i)).count(),
            workspace: ops.frame().workspace,
            traffic: Vec::new(),
        };
        let traffic = ranks.iter().map(report).collect();
        Self {
            plan,
            reaches: Reaches::new(plan.problem().allowed(), plan.problem().batch().documents()),
            ranks,
            memories,
            whole_rows,
            lists: Contributions::new(),
            calls: AttendCalls::default(),
            met_for_queries: 0,
            met_for_keys: 0,
            pieces: Vec::new(),
            expansion: Expansion::default(),
            traffic,
            borders: NodeBorders::new(plan),
            listed: None,
            segments: Segments::default(),
        }
    }

    pub(super) fn err(&self, r: usize, op: usize, text: impl Into<String>) -> Error {
        flaw(self.ranks[r].rank(), op, text)
    }

    /// Writes out an operation of rank `r` (an index of the group).
    pub(super) fn list(&mut self, r: usize, op: usize) -> ExpandedOp {
        self.ranks[r].list(op, &mut self.expansion)
    }

    /// Executes an operation of rank `r` that involves no other rank.
    pub(super) fn execute(&mut self, r: usize, op: usize, work: &ExpandedOp) -> Result<()> {
        let done: Result<(), Wrong> = match work {
            ExpandedOp::Delta { delta } => self.delta(r, op, delta),
            ExpandedOp::SinkGradient { delta, partial } => self.sink_gradient(r, op, delta, partial),
            ExpandedOp::SinkTotal(sum) => self.sink_total(r, op, sum),
            ExpandedOp::Sums(parts) => parts.iter().flatten().try_for_each(|s| self.sum(r, op, s)),
            ExpandedOp::Merges(parts) => {
                parts.iter().try_for_each(|part| part.chunks(2).try_for_each(|pair| self.merge(r, op, pair)))
            }
            ExpandedOp::Combine(c) => self.combine(r, op, c),
            ExpandedOp::Compose(joins) => joins.iter().try_for_each(|s| self.compose(r, op, s)),
            ExpandedOp::Attend(a, met) => self.attend(r, op, a, met),
            ExpandedOp::Backward(b, met) => self.backward(r, op, b, met),
            ExpandedOp::Exchange { .. } => Ok(()),
        };
        done.map_err(|wrong| match wrong {
            Wrong::Here(text) => self.err(r, op, text),
            Wrong::There(error) => error,
        })
    }

    /// Checks that a view has the expected type.
    pub(super) fn typed(&self, r: usize, v: &BufferView, dtype: Dtype, dim: usize) -> Result<(), String> {
        let t = self.memories[r].table(v.buf);
        if (t.dtype, t.dim as usize) != (dtype, dim) {
            return Err(format!("{} is {} of dim {}, not {dtype} of dim {dim}", t.name, t.dtype, t.dim));
        }
        Ok(())
    }

    /// Rows and heads that the caller of rank `r` gives of q's side.
    fn given(&self, r: usize) -> (u64, u32) {
        (self.plan.local_tokens(Side::Q, self.ranks[r].rank()).len() as u64, self.plan.problem().heads() as u32)
    }

    fn delta(&mut self, r: usize, op: usize, delta: &BufferView) -> Result<(), Wrong> {
        self.shaped(r, delta, What::Delta, self.given(r))?;
        let o = BufferView { buf: Buf::User(TensorId::O), row: 0, head: 0, ..*delta };
        let mut pieces = Vec::new();
        for head in self.memories[r].heads(delta) {
            let piece = |(row, _, cell): (u64, u64, Cell)| {
                let cell = Cell::new(What::Delta, cell.token, head, 0);
                Piece { head, row, cell }
            };
            pieces.extend(self.memories[r].runs(&o, 0, delta.rows, head).map(piece));
        }
        Ok(self.memories[r].write(op, delta, 0, delta.rows, &pieces)?)
    }

    fn sink_gradient(&mut self, r: usize, op: usize, delta: &BufferView, partial: &BufferView) -> Result<(), Wrong> {
        if !self.plan.problem().sinks() {
            return Err("the problem has no sinks".into());
        }
        self.shaped(r, delta, What::Delta, self.given(r))?;
        self.shaped(r, partial, What::Sum(TensorId::Dsinks), (1, delta.heads))?;
        let lse = BufferView { buf: Buf::User(TensorId::Lse), row: 0, head: 0, ..*delta };
        for h in self.memories[r].heads(delta) {
            for (row, rows, cell) in self.memories[r].runs(&lse, 0, delta.rows, h) {
                self.expect(r, delta, (row, rows), h, Cell::new(What::Delta, cell.token, h, 0))?;
            }
            self.memories[r].read(delta, 0, delta.rows, h, |_| true);
        }
        let call = self.calls.add(r, op, &CallRanges::default(), None, None)?;
        let piece = |head| {
            let list = self.lists.one(Atom { call, head, heads: 1 });
            Piece { head, row: 0, cell: Cell::new(What::Sum(TensorId::Dsinks), 0, head, list) }
        };
        let pieces: Vec<Piece> = self.memories[r].heads(partial).map(piece).collect();
        Ok(self.memories[r].write(op, partial, 0, 1, &pieces)?)
    }

    /// An exact sum travels as digits.
    pub(super) fn sink_dim(&self) -> usize {
        self.plan.problem().sinks_per_head() * if self.plan.options().reproducible { SINK_DIGITS } else { 1 }
    }

    fn sink_total(&mut self, r: usize, op: usize, sum: &SumBlock) -> Result<(), Wrong> {
        if !self.plan.options().reproducible {
            return Err("only a reproducible plan has digits of sinks' gradients".into());
        }
        let shape = (1, self.given(r).1);
        sum.sources.iter().try_for_each(|v| self.shaped(r, v, What::Sum(TensorId::Dsinks), shape))?;
        if (sum.dst.rows, sum.dst.heads) != shape {
            return Err("a gradient of sinks has one row of all q heads".into());
        }
        let p = self.plan.problem();
        self.typed(r, &sum.dst, p.dtype().accumulator(), p.sinks_per_head())?;
        self.sum(r, op, sum)
    }

    /// Checks that the rows from `row` on have the expected content (except contributions): the first `want`, and each
    /// row after it the next token.
    pub(super) fn expect(
        &self,
        r: usize,
        v: &BufferView,
        (row, rows): (u64, u64),
        head: u32,
        want: Cell,
    ) -> Result<(), String> {
        let mut runs = self.memories[r].runs(v, row, rows, head);
        runs.try_for_each(|(at, _, cell)| self.holds(r, v, at, head, cell, want.after(at - row)))
    }

    /// Checks the content of one row, except contributions.
    pub(super) fn holds(
        &self,
        r: usize,
        v: &BufferView,
        row: u64,
        head: u32,
        cell: Cell,
        want: Cell,
    ) -> Result<(), String> {
        if (cell.what, cell.token, cell.head) == (want.what, want.token, want.head) {
            return Ok(());
        }
        let (at, head, name) = (v.row + row, v.head + head, self.memories[r].name(v.buf));
        Err(format!("row {at}, head {head} of {name} holds {}, not {}", cell.describe(), want.describe()))
    }

    /// `dst = Σ sources`.
    fn sum(&mut self, r: usize, op: usize, s: &SumBlock) -> Result<(), Wrong> {
        let accumulator = self.plan.problem().dtype().accumulator();
        let to = self.memories[r].table(s.dst.buf).dtype;
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&s.dst) {
            let mut row = 0;
            while row < s.dst.rows {
                let mut rows = s.dst.rows - row;
                let mut sum = Cell::new(What::Zero, 0, 0, 0);
                for (n, v) in s.sources.iter().enumerate() {
                    let memory = &self.memories[r];
                    let from = memory.table(v.buf).dtype;
                    let (cell, run) = memory.at(v, row, head);
                    rows = rows.min(run);
                    let wrong = match (cell.what, sum.what) {
                        (What::Unset, _) => Some("which was never written"),
                        (What::Running(_), _) => Some("which is not finished"),
                        (What::Input(_) | What::Delta | What::Final(_) | What::Joined(_), _) if s.sources.len() > 1 => {
                            Some("which is not a gradient")
                        }
                        (What::Input(_) | What::Delta | What::Joined(_), _) if from != to => Some("in another type"),
                        (a @ What::Sum(_), b @ What::Sum(_)) => {
                            let same = a == b && (cell.token, cell.head) == (sum.token, sum.head);
                            (!same).then_some("to another row's sum")
                        }
                        _ => None,
                    };
                    if let Some(wrong) = wrong {
                        let (at, head, name) = (v.row + row, v.head + head, memory.name(v.buf));
                        return Err(
                            format!("reads row {at}, head {head} of {name} ({}), {wrong}", cell.describe()).into()
                        );
                    }
                    let list = self.lists.join(sum.list, cell.list);
                    let rounded = sum.rounded.or(cell.rounded);
                    if n > 0 && rounded.is_some() && self.plan.options().wire != Wire::Bf16 {
                        return Err(format!("sums what was rounded ({})", cell.describe()).into());
                    }
                    if cell.what != What::Zero {
                        sum = cell;
                    }
                    (sum.list, sum.rounded) = (list, rounded);
                }
                (sum.unread, sum.strict) = (0, false);
                if matches!(sum.what, What::Sum(_)) && to.size() < accumulator.size() {
                    sum.rounded = Some(to);
                }
                pieces.push(Piece { head, row, cell: sum });
                row += rows;
            }
            for v in &s.sources {
                self.memories[r].read(v, 0, s.dst.rows, head, |_| true);
            }
        }
        self.memories[r].write(op, &s.dst, 0, s.dst.rows, &pieces)?;
        self.pieces = pieces;
        Ok(())
    }

    /// Merges a partial o and its lse into running ones: all four belong to one row, o and lse of each pair have the
    /// same calls, and no call is in both pairs (`outputs` would find that only at the end).
    fn merge(&mut self, r: usize, op: usize, pair: &[SumBlock]) -> Result<(), Wrong> {
        let [o, lse] = pair else { return Err("merges o without its lse".into()) };
        for (sum, tensor) in [(o, TensorId::O), (lse, TensorId::Lse)] {
            if sum.sources.len() != 2 || sum.sources[0] != sum.dst {
                return Err("a merge is of a running result and one other".into());
            }
            let shape = (o.dst.rows, o.dst.heads);
            sum.sources.iter().try_for_each(|v| self.shaped(r, v, What::Running(tensor), shape))?;
        }
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&o.dst) {
            let mut row = 0;
            while row < o.dst.rows {
                let (first, _) = self.memories[r].at(&o.dst, row, head);
                let (mut list, mut rows) = (0, o.dst.rows - row);
                for pair in o.sources.iter().zip(&lse.sources) {
                    let (of_pair, run) = self.running(r, pair, row, head, first)?;
                    list = self.lists.join(list, of_pair);
                    rows = rows.min(run);
                }
                let cell = Cell::new(What::Running(TensorId::O), first.token, first.head, list);
                pieces.push(Piece { head, row, cell });
                row += rows;
            }
            for v in o.sources.iter().chain(&lse.sources) {
                self.memories[r].read(v, 0, o.dst.rows, head, |_| true);
            }
        }
        for (sum, tensor) in pair.iter().zip([TensorId::O, TensorId::Lse]) {
            pieces.iter_mut().for_each(|p| p.cell.what = What::Running(tensor));
            self.memories[r].write(op, &sum.dst, 0, sum.dst.rows, &pieces)?;
        }
        self.pieces = pieces;
        Ok(())
    }

    /// The contributions to one row of a running o and its lse, which must be those of `of`'s row, and the number of
    /// rows from it on that have the same.
    pub(super) fn running(
        &self,
        r: usize,
        (o, lse): (&BufferView, &BufferView),
        row: u64,
        head: u32,
        of: Cell,
    ) -> Result<(u32, u64), String> {
        let [(in_o, o_rows), (in_lse, lse_rows)] = [o, lse].map(|v| self.memories[r].at(v, row, head));
        self.holds(r, o, row, head, in_o, Cell { what: What::Running(TensorId::O), ..of })?;
        self.holds(r, lse, row, head, in_lse, Cell { what: What::Running(TensorId::Lse), ..of })?;
        if in_o.list != in_lse.list {
            return Err(format!("running o and lse of token {} have met different keys", of.token));
        }
        Ok((in_o.list, o_rows.min(lse_rows)))
    }
}
