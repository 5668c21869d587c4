// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes all operations except kernel calls on tags, which stand for the contents of buffers.

use alloc::{format, vec, vec::Vec};

use super::{
    borders::NodeBorders,
    cell::{Cell, What},
    contributions::{Atom, Contributions},
    flaw::flaw,
    listed::{ListedOp, Met, Sum},
    memory::{Memory, Piece},
    report::{RankReport, Traffic},
};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::{Plan, Wire},
    schedule::{Buf, BufferView, SINK_DIGITS, Schedule, TensorId},
};

/// Tokens one after another that a range of a call names.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedTokens {
    pub token: u32,
    pub tokens: u32,
    pub range: u32,
}

/// A call of a kernel, kept until the outputs are checked.
pub(super) struct AttendCall<'a> {
    /// Index of the rank in the group.
    pub rank: usize,
    pub op: usize,
    /// Tokens of the q ranges, by token.
    pub q: Vec<NamedTokens>,
    /// Tokens of the k ranges likewise.
    pub k: Vec<NamedTokens>,
    /// The q ranges of each k range.
    pub readers: Vec<Vec<u32>>,
    /// None for the gradient of the sinks.
    pub met: Option<&'a Met>,
}

/// All ranks while they run.
pub(super) struct Prover<'a> {
    pub plan: &'a Plan,
    pub schedules: &'a [Schedule],
    pub listed: &'a [Vec<ListedOp>],
    pub memories: Vec<Memory>,
    /// Whether a cell stands for all heads of a row.
    pub whole_rows: bool,
    pub lists: Contributions,
    pub calls: Vec<AttendCall<'a>>,
    /// Allowed pairs that calls met, times their q heads: for o or dq, and for dk and dv.
    pub met_for_queries: u128,
    pub met_for_keys: u128,
    /// Room for what an operation writes.
    pub pieces: Vec<Piece>,
    traffic: Vec<RankReport>,
    /// What crosses from node to node.
    pub borders: Option<NodeBorders>,
}

impl<'a> Prover<'a> {
    pub fn new(
        plan: &'a Plan,
        schedules: &'a [Schedule],
        listed: &'a [Vec<ListedOp>],
        memories: Vec<Memory>,
        whole_rows: bool,
    ) -> Self {
        let report = |s: &Schedule| RankReport {
            rank: s.rank,
            operations: s.ops.len(),
            exchanges: s.ops.iter().filter(|op| op.kind.is_exchange()).count(),
            workspace: s.workspace,
            traffic: Vec::new(),
        };
        Self {
            plan,
            schedules,
            listed,
            memories,
            whole_rows,
            lists: Contributions::new(),
            calls: Vec::new(),
            met_for_queries: 0,
            met_for_keys: 0,
            pieces: Vec::new(),
            traffic: schedules.iter().map(report).collect(),
            borders: NodeBorders::new(plan),
        }
    }

    pub fn traffic(self) -> Vec<RankReport> {
        self.traffic
    }

    pub fn err(&self, r: usize, op: usize, text: impl Into<alloc::string::String>) -> Error {
        flaw(self.schedules[r].rank, op, text)
    }

    /// Runs an operation of rank `r` (an index of the group) that meets no other rank.
    pub fn execute(&mut self, r: usize, op: usize) -> Result<()> {
        let listed: &'a [Vec<ListedOp>] = self.listed;
        match &listed[r][op] {
            ListedOp::Delta { delta } => self.delta(r, op, delta),
            ListedOp::SinkGradient { delta, partial } => self.sink_gradient(r, op, delta, partial),
            ListedOp::SinkTotal(sum) => self.sink_total(r, op, sum),
            ListedOp::Sums(parts) => parts.iter().flatten().try_for_each(|s| self.sum(r, op, s)),
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

    /// That a view has the type of what it should hold.
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

    /// All rows and heads that the caller of rank `r` brought of q's side, or nothing.
    fn whole(&self, r: usize, op: usize, v: &BufferView) -> Result<()> {
        let rows = self.plan.local_tokens(Side::Q, self.schedules[r].rank) as u64;
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
        let call = self.calls.len() as u32;
        self.calls.push(AttendCall { rank: r, op, q: Vec::new(), k: Vec::new(), readers: Vec::new(), met: None });
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

    /// That rows from `row` on hold what they should (contributions aside): the first `want`, and each after it the next
    /// token.
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

    /// Moves a message, given as (index in the group, operation, message).
    pub fn transfer(&mut self, from: (usize, usize, usize), to: (usize, usize, usize)) -> Result<()> {
        let listed: &'a [Vec<ListedOp>] = self.listed;
        let (ListedOp::Exchange { messages: sends, .. }, ListedOp::Exchange { messages: recvs, strict }) =
            (&listed[from.0][from.1], &listed[to.0][to.1])
        else {
            return Ok(());
        };
        let (out, into) = (sends[from.2].view, recvs[to.2].view);
        let home = self.schedules[to.0].ops[to.1].kind.name() == "return";
        let apart = self.borders.as_ref().is_some_and(|b| b.apart(from.0, to.0));
        let crosses = apart && (home || *strict);
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[from.0].heads(&out) {
            let mut row = 0;
            while row < out.rows {
                let (cell, rows) = self.memories[from.0].at(&out, row, head);
                let rows = rows.min(out.rows - row);
                let borders = self.borders.as_mut().filter(|_| crosses);
                if let Some(text) = borders.and_then(|b| b.cross(from.0, to.0, home, cell, rows)) {
                    return Err(self.err(from.0, from.1, text));
                }
                let wrong = match cell.what {
                    What::Unset => Some("which was never written"),
                    What::Running(_) => Some("which is not finished"),
                    What::Sum(_) if home && cell.list == 0 => Some("to which no rank contributed"),
                    _ => None,
                };
                if let Some(wrong) = wrong {
                    let name = self.memories[from.0].name(out.buf);
                    let (at, head) = (out.row + row, out.head + head);
                    let text = format!("sends row {at}, head {head} of {name} ({}), {wrong}", cell.describe());
                    return Err(self.err(from.0, from.1, text));
                }
                let cell = Cell { strict: *strict, crossed: crosses && *strict, unread: 0, ..cell };
                pieces.push(Piece { head, row, cell });
                row += rows;
            }
            // What is fetched stays unread at a sender that only relays it, unless it came from another node and stays
            // in this one.
            let passes_on = *strict && !apart;
            self.memories[from.0].read(&out, 0, out.rows, head, |c| !c.strict || (c.crossed && passes_on));
        }
        self.memories[to.0].write(to.1, &into, 0, into.rows, &pieces)?;
        self.pieces = pieces;
        let bytes = out.rows * u64::from(out.heads) * self.memories[from.0].table(out.buf).cell_bytes();
        if let (Some(borders), true) = (&mut self.borders, crosses) {
            borders.count(from.0, to.0, home, bytes);
        }
        let count = |p: &mut Self, (r, op, _): (usize, usize, usize), sent: bool| {
            let op = &p.schedules[r].ops[op];
            let (phase, kind) = (op.phase, op.kind.name());
            let traffic = &mut p.traffic[r].traffic;
            let at = traffic.iter().position(|t| (t.phase, t.kind) == (phase, kind)).unwrap_or(traffic.len());
            if at == traffic.len() {
                traffic.push(Traffic { phase, kind, ..Traffic::default() });
            }
            if sent {
                traffic[at].messages_out += 1;
                traffic[at].bytes_out += bytes;
            } else {
                traffic[at].messages_in += 1;
                traffic[at].bytes_in += bytes;
            }
        };
        count(self, from, true);
        count(self, to, false);
        Ok(())
    }
}
