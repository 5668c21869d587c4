// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel calls, by their contract: the tokens of the rows, the pairs that are computed, and how results are stored.

use alloc::{format, string::String, vec::Vec};
use core::ops::Range;

use super::{
    cell::{Cell, What},
    contributions::Atom,
    execute::Prover,
    flaw::Wrong,
    geometry::{Geometry, RangePart},
    listed::check_met,
    memory::Piece,
    promise,
};
use crate::{
    call::{Gradients, HeadMap, Mode},
    error::Result,
    schedule::{AttendOp, BackwardOp, BufferView, TensorId, expanded::CallRanges},
};

/// For each cell of a row of q's side: its head, and the q heads that it stands for.
fn q_cells(map: HeadMap, heads: u32, whole_rows: bool) -> impl Fn(u32) -> (u32, Range<u32>) {
    move |h| {
        let head = map.q_offset + h;
        (head, head..head + if whole_rows { heads } else { 1 })
    }
}

impl Prover<'_> {
    pub(super) fn attend(&mut self, r: usize, op: usize, a: &AttendOp, met: &CallRanges) -> Result<(), Wrong> {
        let of_q = [(&a.q, What::Input(TensorId::Q))];
        let of_k = [(&a.k, What::Input(TensorId::K)), (&a.v, What::Input(TensorId::V))];
        let (g, call) = self.operands(r, op, met, a.heads, [&of_q, &of_k], [true, false])?;
        let result = a.result.iter().map(|views| (views, [TensorId::O, TensorId::Lse].map(What::Final)));
        let running = a.running.iter().map(|views| (views, [TensorId::O, TensorId::Lse].map(What::Running)));
        for ((o, lse), [of_o, of_lse]) in result.chain(running) {
            self.shaped(r, o, of_o, (a.q.rows, a.q.heads))?;
            self.shaped(r, lse, of_lse, (a.q.rows, a.q.heads))?;
        }
        self.met_for_queries += g.pairs * u128::from(a.q.heads);
        let added = self.contributions(r, call, &a.q, q_cells(a.heads, a.q.heads, self.whole_rows));
        for (q, parts) in met.q.iter().zip(&g.q.parts) {
            parts.iter().try_for_each(|part| self.result(r, op, a, q.mode, part, &added))?;
        }
        Ok(())
    }

    pub(super) fn backward(&mut self, r: usize, op: usize, b: &BackwardOp, met: &CallRanges) -> Result<(), Wrong> {
        let of_q = [
            (&b.q, What::Input(TensorId::Q)),
            (&b.d_o, What::Input(TensorId::DO)),
            (&b.lse, What::Input(TensorId::Lse)),
            (&b.delta, What::Delta),
        ];
        let of_k = [(&b.k, What::Input(TensorId::K)), (&b.v, What::Input(TensorId::V))];
        let [for_queries, for_keys] = [b.gradients != Gradients::Keys, b.gradients != Gradients::Queries];
        let (g, call) = self.operands(r, op, met, b.heads, [&of_q, &of_k], [for_queries, for_keys])?;
        let (heads, whole_rows) = (b.q.heads, self.whole_rows);
        let pairs = g.pairs * u128::from(heads);
        if for_queries {
            let Some(dq) = &b.dq else { return Err("makes dq without a place for it".into()) };
            self.shaped(r, dq, What::Sum(TensorId::Dq), (b.q.rows, heads))?;
            self.met_for_queries += pairs;
            let added = self.contributions(r, call, dq, q_cells(b.heads, heads, whole_rows));
            for (q, parts) in met.q.iter().zip(&g.q.parts) {
                let continues = q.mode.continues();
                parts.iter().try_for_each(|p| self.accumulate(r, op, (dq, TensorId::Dq), p, continues, &added))?;
            }
        }
        if for_keys {
            let Some((dk, dv)) = &b.dkv else { return Err("makes dk and dv without a place for them".into()) };
            let shape = (b.k.rows, if b.per_q_head { heads } else { b.k.heads });
            self.shaped(r, dk, What::Sum(TensorId::Dk), shape)?;
            self.shaped(r, dv, What::Sum(TensorId::Dv), shape)?;
            self.met_for_keys += pairs;
            let HeadMap { q_offset: q0, kv_offset: kv0, group } = b.heads;
            let cells = |h: u32| match b.per_q_head {
                true => ((q0 + h) / group, q0 + h..q0 + h + 1),
                false if whole_rows => (kv0, q0..q0 + heads),
                false => (kv0 + h, ((kv0 + h) * group).max(q0)..((kv0 + h + 1) * group).min(q0 + heads)),
            };
            let added = self.contributions(r, call, dk, cells);
            for part in g.k.parts.iter().flatten() {
                for to in [(dk, TensorId::Dk), (dv, TensorId::Dv)] {
                    self.accumulate(r, op, to, part, b.accumulate_keys, &added)?;
                }
            }
        }
        Ok(())
    }

    /// Checks the operands of a call, marks the rows that it reads, and records it for the sides (q, k) that it
    /// computes results for. `sides` are the operands of each side with their content; the first gives the shape.
    fn operands(
        &mut self,
        r: usize,
        op: usize,
        met: &CallRanges,
        map: HeadMap,
        sides: [&[(&BufferView, What)]; 2],
        of: [bool; 2],
    ) -> Result<(Geometry, u32), Wrong> {
        let [q, k] = sides.map(|side| side[0].0);
        check_met(met, q.rows, k.rows)?;
        self.heads(map, q, k)?;
        for (side, like) in sides.into_iter().zip([q, k]) {
            side.iter().try_for_each(|&(v, what)| self.shaped(r, v, what, (like.rows, like.heads)))?;
        }
        let g = self.geometry(met)?;
        let call = self.calls.add(r, op, met, of[0].then_some(&g.q.tokens), of[1].then_some(&g.k.tokens))?;
        let sides = sides.into_iter().zip([(&g.q.parts, map.q_offset), (&g.k.parts, map.kv_offset)]);
        for (side, (parts, first_head)) in sides {
            for (p, &(v, what)) in parts.iter().flatten().flat_map(|p| side.iter().map(move |operand| (p, operand))) {
                for h in self.memories[r].heads(v) {
                    self.expect(r, v, (p.row, p.rows), h, Cell::new(what, p.token, first_head + h, 0))?;
                    self.memories[r].read(v, p.row, p.rows, h, |cell| p.met || !cell.strict);
                }
            }
        }
        Ok((g, call))
    }

    /// Checks the rows and heads of an operand or a result, and that its type is that of its content.
    pub(super) fn shaped(&self, r: usize, v: &BufferView, what: What, (rows, heads): (u64, u32)) -> Result<(), String> {
        if (v.rows, v.heads) != (rows, heads) {
            return Err(format!("{v:?} does not have {rows} rows and {heads} heads"));
        }
        let p = self.plan.problem();
        let accumulator = p.dtype().accumulator();
        let (dtype, dim) = match what {
            What::Input(t) | What::Final(t) => promise::element(t, p),
            What::Running(TensorId::Lse) => (accumulator, 2),
            What::Sum(TensorId::Dsinks) => (accumulator, self.sink_dim()),
            What::Running(t) | What::Sum(t) => (accumulator, promise::element(t, p).1),
            What::Delta | What::Unset | What::Zero | What::Joined(_) => (accumulator, 1),
        };
        self.typed(r, v, dtype, dim)
    }

    /// Checks that the q and kv heads of a call are those of its map.
    fn heads(&self, map: HeadMap, q: &BufferView, k: &BufferView) -> Result<(), String> {
        let p = self.plan.problem();
        let last = map.q_offset.saturating_add(q.heads);
        let low = map.q_offset.checked_div(map.group).unwrap_or(u32::MAX);
        let high = (last.max(1) - 1).checked_div(map.group).unwrap_or(u32::MAX);
        if map.group as usize != p.group()
            || last as usize > p.heads()
            || q.heads == 0
            || map.kv_offset != low
            || high - low + 1 != k.heads
        {
            return Err(format!("{map:?} does not fit {} q heads and {} kv heads", q.heads, k.heads));
        }
        Ok(())
    }

    /// For each cell of a row of `to`: its head, and the contribution of a call to it. `cells` are the head and the q
    /// heads of a cell.
    fn contributions(
        &mut self,
        r: usize,
        call: u32,
        to: &BufferView,
        cells: impl Fn(u32) -> (u32, Range<u32>),
    ) -> Vec<(u32, u32)> {
        let added = self.memories[r].heads(to).map(|h| {
            let (head, of) = cells(h);
            (head, self.lists.one(Atom { call, head: of.start, heads: of.len() as u32 }))
        });
        added.collect()
    }

    /// Rows of a forward result: they continue a running result or begin one, and are final or remain running.
    fn result(
        &mut self,
        r: usize,
        op: usize,
        a: &AttendOp,
        mode: Mode,
        part: &RangePart,
        added: &[(u32, u32)],
    ) -> Result<(), Wrong> {
        if a.running.is_none() && mode != Mode::Only {
            return Err(format!("mode {mode:?} without a running o").into());
        }
        let continued = a.running.as_ref().filter(|_| mode.continues());
        let end = part.row + part.rows;
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for h in self.memories[r].heads(&a.q) {
            let (head, contribution) = added[h as usize];
            let mut row = part.row;
            while row < end {
                let (mut list, mut rows) = (0, end - row);
                let mut cell = Cell::new(What::Final(TensorId::O), part.token, head, 0).after(row - part.row);
                if let Some((o, lse)) = continued {
                    let run;
                    (list, run) = self.running(r, (o, lse), row, h, cell)?;
                    rows = rows.min(run);
                }
                cell.list = if part.met { self.lists.join(list, contribution) } else { list };
                pieces.push(Piece { head: h, row, cell });
                row += rows;
            }
            if let Some((o, lse)) = continued {
                self.memories[r].read(o, part.row, part.rows, h, |_| true);
                self.memories[r].read(lse, part.row, part.rows, h, |_| true);
            }
        }
        let (o, lse, what): (_, _, fn(TensorId) -> What) = match (mode.finishes(), &a.running, &a.result) {
            (false, Some((o, lse)), _) => (o, lse, What::Running),
            (_, _, Some((o, lse))) => (o, lse, What::Final),
            _ => return Err(format!("mode {mode:?} without a place for o").into()),
        };
        for (v, tensor) in [(o, TensorId::O), (lse, TensorId::Lse)] {
            pieces.iter_mut().for_each(|p| p.cell.what = what(tensor));
            self.memories[r].write(op, v, part.row, part.rows, &pieces)?;
        }
        self.pieces = pieces;
        Ok(())
    }

    /// Rows of a gradient: overwritten, or added to.
    fn accumulate(
        &mut self,
        r: usize,
        op: usize,
        (to, tensor): (&BufferView, TensorId),
        part: &RangePart,
        continues: bool,
        added: &[(u32, u32)],
    ) -> Result<(), Wrong> {
        let end = part.row + part.rows;
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for h in self.memories[r].heads(to) {
            let (head, contribution) = added[h as usize];
            let mut row = part.row;
            while row < end {
                let mut new = Cell::new(What::Sum(tensor), part.token, head, 0).after(row - part.row);
                let mut rows = end - row;
                if continues {
                    let (old, run) = self.memories[r].at(to, row, h);
                    rows = rows.min(run);
                    self.holds(r, to, row, h, old, new)?;
                    (new.list, new.rounded) = (old.list, old.rounded);
                }
                if part.met {
                    new.list = self.lists.join(new.list, contribution);
                }
                pieces.push(Piece { head: h, row, cell: new });
                row += rows;
            }
            if continues {
                self.memories[r].read(to, part.row, part.rows, h, |_| true);
            }
        }
        self.memories[r].write(op, to, part.row, part.rows, &pieces)?;
        self.pieces = pieces;
        Ok(())
    }
}
