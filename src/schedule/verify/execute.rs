// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes operations on tags, which stand for the contents of buffers: all but kernel calls (`attend`) and messages
//! (`transfer`).

use alloc::{format, vec, vec::Vec};

use super::{
    borders::NodeBorders,
    calls::AttendCalls,
    cell::{Cell, What},
    contributions::{Atom, Contributions},
    flaw::flaw,
    listed::{ListedOp, Sum},
    memory::{Memory, Piece},
    packed::RankOps,
    report::RankReport,
};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::{Plan, Wire},
    schedule::{Buf, BufferView, SINK_DIGITS, TensorId, expand::Expansion},
};

/// The flaw if calls or their ranges cannot be numbered.
pub(super) const TOO_MANY_CALLS: &str = "is one of too many calls: a proof numbers calls and ranges in 32 bits";

/// All ranks during the simulated run.
pub(super) struct Prover<'a> {
    pub plan: &'a Plan,
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
}

impl<'a> Prover<'a> {
    pub fn new(plan: &'a Plan, ranks: Vec<RankOps<'a>>, memories: Vec<Memory>, whole_rows: bool) -> Self {
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
        }
    }

    pub fn err(&self, r: usize, op: usize, text: impl Into<alloc::string::String>) -> Error {
        flaw(self.ranks[r].rank(), op, text)
    }

    /// Writes out an operation of rank `r` (an index of the group).
    pub fn list(&mut self, r: usize, op: usize) -> ListedOp {
        self.ranks[r].list(op, &mut self.expansion)
    }

    /// Executes an operation of rank `r` that involves no other rank.
    pub fn execute(&mut self, r: usize, op: usize, work: &ListedOp) -> Result<()> {
        match work {
            ListedOp::Delta { delta } => self.delta(r, op, delta),
            ListedOp::SinkGradient { delta, partial } => self.sink_gradient(r, op, delta, partial),
            ListedOp::SinkTotal(sum) => self.sink_total(r, op, sum),
            ListedOp::Sums(parts) => parts.iter().flatten().try_for_each(|s| self.sum(r, op, s)),
            ListedOp::Merges(parts) => {
                parts.iter().try_for_each(|part| part.chunks(2).try_for_each(|pair| self.merge(r, op, pair)))
            }
            ListedOp::Attend(a, met) => self.attend(r, op, a, met),
            ListedOp::Backward(b, met) => self.backward(r, op, b, met),
            ListedOp::Exchange { .. } => Ok(()),
        }
    }

    /// Contributions of a call to q heads `first..first + heads`, for each cell of a row.
    pub fn atoms(&mut self, call: u32, first: u32, heads: u32) -> Vec<u32> {
        if self.whole_rows {
            return vec![self.lists.one(Atom { call, head: first, heads })];
        }
        (first..first + heads).map(|head| self.lists.one(Atom { call, head, heads: 1 })).collect()
    }

    /// Checks that a view has the expected type.
    pub fn typed(&self, r: usize, op: usize, v: &BufferView, dtype: crate::element::Dtype, dim: usize) -> Result<()> {
        let t = self.memories[r].table(v.buf);
        if (t.dtype, t.dim as usize) != (dtype, dim) {
            return Err(self.err(
                r,
                op,
                format!("{} is {} of dim {}, not {dtype} of dim {dim}", t.name, t.dtype, t.dim),
            ));
        }
        Ok(())
    }

    /// Checks that a view is all rows and heads that the caller of rank `r` gives of q's side.
    fn whole(&self, r: usize, op: usize, v: &BufferView) -> Result<()> {
        let rows = self.plan.local_tokens(Side::Q, self.ranks[r].rank()) as u64;
        if (v.rows, v.heads as usize) != (rows, self.plan.problem().heads()) {
            return Err(self.err(r, op, format!("{v:?} is not all of the rank's {rows} rows")));
        }
        Ok(())
    }

    fn delta(&mut self, r: usize, op: usize, delta: &BufferView) -> Result<()> {
        self.whole(r, op, delta)?;
        self.typed(r, op, delta, self.plan.problem().dtype().accumulator(), 1)?;
        let o = BufferView { buf: Buf::User(TensorId::O), row: 0, head: 0, ..*delta };
        let mut pieces = Vec::new();
        for head in self.memories[r].heads(delta) {
            let mut row = 0;
            while row < delta.rows {
                let (cell, rows) = self.memories[r].at(&o, row, head);
                let rows = rows.min(delta.rows - row);
                pieces.push(Piece { head, row, cell: Cell::new(What::Delta, cell.token, head, 0) });
                row += rows;
            }
        }
        self.memories[r].write(op, delta, 0, delta.rows, &pieces)
    }

    fn sink_gradient(&mut self, r: usize, op: usize, delta: &BufferView, partial: &BufferView) -> Result<()> {
        self.whole(r, op, delta)?;
        self.typed(r, op, partial, self.plan.problem().dtype().accumulator(), self.sink_dim())?;
        if !self.plan.problem().sinks() || (partial.rows, partial.heads) != (1, delta.heads) {
            return Err(self.err(r, op, "a gradient of sinks is one row of all q heads"));
        }
        let lse = BufferView { buf: Buf::User(TensorId::Lse), row: 0, head: 0, ..*delta };
        for h in self.memories[r].heads(delta) {
            let mut row = 0;
            while row < delta.rows {
                let (cell, rows) = self.memories[r].at(&lse, row, h);
                let rows = rows.min(delta.rows - row);
                self.expect(r, op, delta, row, rows, h, Cell::new(What::Delta, cell.token, h, 0))?;
                row += rows;
            }
            self.memories[r].read(delta, 0, delta.rows, h, |_| true);
        }
        let call = self.calls.add_plain(r, op).ok_or_else(|| self.err(r, op, TOO_MANY_CALLS))?;
        let piece = |head| {
            let list = self.lists.one(Atom { call, head, heads: 1 });
            Piece { head, row: 0, cell: Cell::new(What::Sum(TensorId::Dsinks), 0, head, list) }
        };
        let pieces: Vec<Piece> = self.memories[r].heads(partial).map(piece).collect();
        self.memories[r].write(op, partial, 0, 1, &pieces)
    }

    /// An exact sum travels as digits.
    fn sink_dim(&self) -> usize {
        if self.plan.options().reproducible { SINK_DIGITS } else { 1 }
    }

    fn sink_total(&mut self, r: usize, op: usize, sum: &Sum) -> Result<()> {
        let accumulator = self.plan.problem().dtype().accumulator();
        self.typed(r, op, &sum.dst, accumulator, 1)?;
        sum.sources.iter().try_for_each(|v| self.typed(r, op, v, accumulator, SINK_DIGITS))?;
        if (sum.dst.rows, sum.dst.heads as usize) != (1, self.plan.problem().heads()) || self.sink_dim() == 1 {
            return Err(self.err(r, op, "a total of sinks is one row of all q heads, of a reproducible plan"));
        }
        self.sum(r, op, sum)
    }

    /// Checks that the rows from `row` on have the expected content (except contributions): the first `want`, and each
    /// row after it the next token.
    pub fn expect(
        &self,
        r: usize,
        op: usize,
        v: &BufferView,
        row: u64,
        rows: u64,
        head: u32,
        want: Cell,
    ) -> Result<()> {
        let end = row + rows;
        let mut at = row;
        while at < end {
            let (cell, run) = self.memories[r].at(v, at, head);
            let want = want.after(at - row);
            if (cell.what, cell.token, cell.head) != (want.what, want.token, want.head) {
                let name = self.memories[r].name(v.buf);
                let (at, head) = (v.row + at, v.head + head);
                let (holds, wanted) = (cell.describe(), want.describe());
                return Err(self.err(r, op, format!("row {at}, head {head} of {name} holds {holds}, not {wanted}")));
            }
            at += run;
        }
        Ok(())
    }

    /// `dst = Σ sources`.
    fn sum(&mut self, r: usize, op: usize, s: &Sum) -> Result<()> {
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
                        (What::Input(_) | What::Delta | What::Final(_), _) if s.sources.len() > 1 => {
                            Some("which is no gradient to sum")
                        }
                        (What::Input(_) | What::Delta, _) if from != to => Some("in another type"),
                        (a @ What::Sum(_), b @ What::Sum(_)) => {
                            let same = a == b && (cell.token, cell.head) == (sum.token, sum.head);
                            (!same).then_some("to another row's sum")
                        }
                        _ => None,
                    };
                    if let Some(wrong) = wrong {
                        let name = memory.name(v.buf);
                        let (at, head) = (v.row + row, v.head + head);
                        let text = format!("reads row {at}, head {head} of {name} ({}), {wrong}", cell.describe());
                        return Err(self.err(r, op, text));
                    }
                    let list = self.lists.join(sum.list, cell.list);
                    let rounded = sum.rounded.or(cell.rounded);
                    if n > 0 && rounded.is_some() && self.plan.options().wire != Wire::Bf16 {
                        return Err(self.err(r, op, format!("sums what was rounded ({})", cell.describe())));
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
    fn merge(&mut self, r: usize, op: usize, pair: &[Sum]) -> Result<()> {
        let p = self.plan.problem();
        let (accumulator, dims) = (p.dtype().accumulator(), [p.value_dim(), 2]);
        let [o, lse] = pair else { return Err(self.err(r, op, "merges o without its lse")) };
        if (o.dst.rows, o.dst.heads) != (lse.dst.rows, lse.dst.heads) {
            return Err(self.err(r, op, format!("{:?} and its lse {:?} differ in rows or heads", o.dst, lse.dst)));
        }
        for (sum, dim) in pair.iter().zip(dims) {
            if sum.sources.len() != 2 || sum.sources[0] != sum.dst {
                return Err(self.err(r, op, "a merge is of a running result and one other"));
            }
            sum.sources.iter().try_for_each(|v| self.typed(r, op, v, accumulator, dim))?;
        }
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&o.dst) {
            let mut row = 0;
            while row < o.dst.rows {
                let (first, mut rows) = self.memories[r].at(&o.dst, row, head);
                rows = rows.min(o.dst.rows - row);
                for v in o.sources.iter().chain(&lse.sources) {
                    rows = rows.min(self.memories[r].at(v, row, head).1);
                }
                let mut list = 0;
                for (o, lse) in o.sources.iter().zip(&lse.sources) {
                    let want = |t| Cell { what: What::Running(t), ..first };
                    self.expect(r, op, o, row, rows, head, want(TensorId::O))?;
                    self.expect(r, op, lse, row, rows, head, want(TensorId::Lse))?;
                    let [of_o, of_lse] = [o, lse].map(|v| self.memories[r].at(v, row, head).0.list);
                    if of_o != of_lse {
                        let token = first.token;
                        return Err(self.err(r, op, format!("o and lse of token {token} have met different keys")));
                    }
                    list = self.lists.join(list, of_o);
                }
                pieces.push(Piece {
                    head,
                    row,
                    cell: Cell::new(What::Running(TensorId::O), first.token, first.head, list),
                });
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
}
