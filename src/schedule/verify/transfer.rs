// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves a message's tags from one rank's memory to another's: only finished rows may be sent, and each row that
//! crosses between nodes is counted.

use alloc::format;

use super::{
    cell::{Cell, What},
    execute::Prover,
    memory::Piece,
    report::Traffic,
};
use crate::{
    error::Result,
    schedule::{BufferView, Form, OpKind, TensorId},
};

impl Prover<'_> {
    /// For a row that an all-to-all moves from rank `r`: whether it is on its way back, and its key at the border of a
    /// node. `None` if rows of this kind are not counted there.
    fn exchanged_row(&self, r: usize, cell: Cell) -> Option<(bool, Cell)> {
        let home = match cell.what {
            What::Input(_) | What::Delta => false,
            What::Final(_) => true,
            What::Sum(TensorId::Dsinks) | What::Unset | What::Zero | What::Running(_) | What::Joined(_) => {
                return None;
            }
            What::Sum(_) => true,
        };
        if !matches!(cell.what, What::Sum(TensorId::Dk | TensorId::Dv)) || self.plan.form() != Form::Ordered {
            return Some((home, cell));
        }
        // Sums of q heads exist only with two levels, at a node that has the first q head. With one level the partial
        // of each q head crosses.
        let first = cell.head * self.plan.problem().group() as u32;
        let node = self.borders.as_ref()?.first_of_node(r);
        let two_levels = self.plan.ulysses_ranks_of_node() < self.plan.mesh().ulysses;
        let begins = two_levels && self.plan.heads_of(self.ranks[node].rank()).q.start <= first;
        let head = if begins { first } else { self.lists.get(cell.list).first()?.head };
        Some((home, Cell { head, ..cell }))
    }

    /// Moves a message, given as (index in the group, operation, rows). `strict`: as in
    /// [`ExpandedOp::Exchange`](crate::schedule::ExpandedOp).
    pub(super) fn transfer(
        &mut self,
        from: (usize, usize, BufferView),
        to: (usize, usize, BufferView),
        strict: bool,
    ) -> Result<()> {
        let (out, into) = (from.2, to.2);
        let home = matches!(self.ranks[to.0].form(to.1).kind, OpKind::Return(_));
        let exchanged = matches!(self.ranks[to.0].form(to.1).kind, OpKind::Exchange { .. });
        let apart = self.borders.as_ref().is_some_and(|b| b.cross_nodes(from.0, to.0));
        let crosses = apart && (exchanged || home || strict);
        let ulysses = self.plan.mesh().ulysses;
        let between_holders = !apart && from.0 % ulysses != to.0 % ulysses;
        let (mut way_home, mut what) = (home, What::Unset);
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[from.0].heads(&out) {
            let mut row = 0;
            while row < out.rows {
                let (cell, rows) = self.memories[from.0].at(&out, row, head);
                let rows = rows.min(out.rows - row);
                let at_border = match crosses {
                    true if exchanged => self.exchanged_row(from.0, cell),
                    true => Some((home, cell)),
                    false => None,
                };
                if let (Some((home, row)), Some(borders)) = (at_border, &mut self.borders) {
                    (way_home, what) = (home, row.what);
                    if let Some(text) = borders.cross(from.0, to.0, home, row, rows) {
                        return Err(self.err(from.0, from.1, text));
                    }
                }
                let wrong = match cell.what {
                    What::Unset => Some("which was never written"),
                    What::Running(_) if !home => Some("which is not finished"),
                    What::Sum(_) | What::Running(_) if home && cell.list == 0 => Some("to which no rank contributed"),
                    _ => None,
                };
                if let Some(wrong) = wrong {
                    let name = self.memories[from.0].name(out.buf);
                    let (at, head) = (out.row + row, out.head + head);
                    let text = format!("sends row {at}, head {head} of {name} ({}), {wrong}", cell.describe());
                    return Err(self.err(from.0, from.1, text));
                }
                if let Err(text) = self.arrives(to.0, cell, rows) {
                    return Err(self.err(from.0, from.1, text));
                }
                let crossed = strict && (crosses || (cell.crossed && between_holders));
                let cell = Cell { strict, crossed, unread: 0, ..cell };
                pieces.push(Piece { head, row, cell });
                row += rows;
            }
            // If the sender only relays a fetched row, it stays unread there, unless it came from another node and
            // stays in this node.
            let passes_on = strict && !apart;
            self.memories[from.0].read(&out, 0, out.rows, head, |c| !c.strict || (c.crossed && passes_on));
        }
        self.memories[to.0].write(to.1, &into, 0, into.rows, &pieces)?;
        self.pieces = pieces;
        let bytes = out.rows * u64::from(out.heads) * self.memories[from.0].table(out.buf).cell_bytes();
        if let (Some(borders), true) = (&mut self.borders, crosses) {
            borders.count(from.0, to.0, (way_home, !exchanged), what, bytes);
        }
        let count = |p: &mut Self, (r, op, _): (usize, usize, BufferView), sent: bool| {
            let op = p.ranks[r].form(op);
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
