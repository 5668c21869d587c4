// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel calls, by their contract: the tokens of the rows, the pairs that are computed, and how results are stored.

use alloc::{format, vec::Vec};

use super::{
    calls::NamedTokens,
    cell::{Cell, What},
    contributions::Atom,
    execute::{Prover, TOO_MANY_CALLS},
    geometry::{Geometry, RangePart},
    listed::{Met, check_met},
    memory::Piece,
};
use crate::{
    call::{Gradients, HeadMap, Mode, Range},
    error::Result,
    schedule::{AttendOp, BackwardOp, BufferView, TensorId},
};

impl Prover<'_> {
    /// Records a call for the tokens of the sides (q, k) that it computes results for; no token may be in two of its
    /// ranges.
    fn remember(&mut self, r: usize, op: usize, met: &Met, g: &Geometry, [of_q, of_k]: [bool; 2]) -> Result<u32> {
        let by_token = |ranges: &[Vec<RangePart>]| {
            let named = |(i, parts)| {
                let of = move |p: &RangePart| NamedTokens { token: p.token, tokens: p.rows, range: i };
                <[RangePart]>::iter(parts).map(of)
            };
            let mut list: Vec<NamedTokens> = (0u32..).zip(ranges.iter().map(Vec::as_slice)).flat_map(named).collect();
            list.sort_unstable_by_key(|n| n.token);
            // Joins parts of a range that were split where its rows begin or end to meet anything.
            list.dedup_by(|b, a| {
                let follows = a.range == b.range && a.token + a.tokens == b.token;
                a.tokens += if follows { b.tokens } else { 0 };
                follows
            });
            list
        };
        let (q, k) = (by_token(&g.q), by_token(&g.k));
        for (list, name) in [(&q, "q"), (&k, "k")] {
            if let Some(w) = list.windows(2).find(|w| w[0].token + w[0].tokens > w[1].token) {
                return Err(self.err(r, op, format!("{name} token {} is in two ranges of one call", w[1].token)));
            }
        }
        let call = self.calls.add(r, op, met, of_q.then_some(&q), of_k.then_some(&k));
        call.ok_or_else(|| self.err(r, op, TOO_MANY_CALLS))
    }

    /// Checks that the q and kv heads of a call are those of its map.
    fn heads(&self, r: usize, op: usize, map: HeadMap, q: &BufferView, k: &BufferView) -> Result<()> {
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
            return Err(self.err(r, op, format!("{map:?} does not fit {} q heads and {} kv heads", q.heads, k.heads)));
        }
        Ok(())
    }

    fn same_shape(&self, r: usize, op: usize, like: &BufferView, others: &[&BufferView]) -> Result<()> {
        if let Some(v) = others.iter().find(|v| (v.rows, v.heads) != (like.rows, like.heads)) {
            return Err(self.err(r, op, format!("{v:?} has not the rows and heads of {like:?}")));
        }
        Ok(())
    }

    /// Checks the inputs of one side: every row that a range names holds its token, for every head. Marks the rows as
    /// read.
    fn inputs(
        &mut self,
        r: usize,
        op: usize,
        views: &[(&BufferView, What)],
        ranges: &mut dyn Iterator<Item = &Range>,
        parts: &[Vec<RangePart>],
        first_head: u32,
    ) -> Result<()> {
        for (range, parts) in ranges.zip(parts) {
            for p in parts {
                let (at, rows) = (range.row as u64 + u64::from(p.row), u64::from(p.rows));
                for &(v, what) in views {
                    for h in self.memories[r].heads(v) {
                        self.expect(r, op, v, at, rows, h, Cell::new(what, p.token, first_head + h, 0))?;
                        self.memories[r].read(v, at, rows, h, |cell| p.met || !cell.strict);
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn attend(&mut self, r: usize, op: usize, a: &AttendOp, met: &Met) -> Result<()> {
        let p = self.plan.problem();
        let (element, accumulator) = (p.dtype(), p.dtype().accumulator());
        check_met(met, a.q.rows, a.k.rows).map_err(|text| self.err(r, op, text))?;
        self.heads(r, op, a.heads, &a.q, &a.k)?;
        self.same_shape(r, op, &a.k, &[&a.v])?;
        for (v, dtype, dim) in
            [(&a.q, element, p.head_dim()), (&a.k, element, p.head_dim()), (&a.v, element, p.value_dim())]
        {
            self.typed(r, op, v, dtype, dim)?;
        }
        if let Some((o, lse)) = &a.result {
            self.same_shape(r, op, &a.q, &[o, lse])?;
            self.typed(r, op, o, element, p.value_dim())?;
            self.typed(r, op, lse, accumulator, 1)?;
        }
        if let Some((o, lse)) = &a.running {
            self.same_shape(r, op, &a.q, &[o, lse])?;
            self.typed(r, op, o, accumulator, p.value_dim())?;
            self.typed(r, op, lse, accumulator, 2)?;
        }
        let g = self.geometry(r, op, met)?;
        self.met_for_queries += g.pairs * u128::from(a.q.heads);
        let call = self.remember(r, op, met, &g, [true, false])?;
        let (q0, kv0) = (a.heads.q_offset, a.heads.kv_offset);
        let mut queries = met.q.iter().map(|q| &q.range);
        self.inputs(r, op, &[(&a.q, What::Input(TensorId::Q))], &mut queries, &g.q, q0)?;
        let views = [(&a.k, What::Input(TensorId::K)), (&a.v, What::Input(TensorId::V))];
        self.inputs(r, op, &views, &mut met.k.iter(), &g.k, kv0)?;
        let atoms = self.atoms(call, q0, a.q.heads);
        for (q, parts) in met.q.iter().zip(&g.q) {
            for p in parts {
                self.result(r, op, a, q.mode, q.range.row as u64, *p, p.met.then_some(&*atoms))?;
            }
        }
        Ok(())
    }

    /// Rows of a forward result: they continue a running result or begin one, and are final or remain running.
    #[allow(clippy::too_many_arguments)]
    fn result(
        &mut self,
        r: usize,
        op: usize,
        a: &AttendOp,
        mode: Mode,
        range_row: u64,
        part: RangePart,
        added: Option<&[u32]>,
    ) -> Result<()> {
        let first = a.heads.q_offset;
        if a.running.is_none() && mode != Mode::Only {
            return Err(self.err(r, op, format!("mode {mode:?} without a running o")));
        }
        let (begin, all) = (range_row + u64::from(part.row), u64::from(part.rows));
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&a.q) {
            let mut row = begin;
            while row < begin + all {
                let (mut list, mut rows) = (0, begin + all - row);
                let cell = |what, list| Cell::new(what, part.token, first + head, list).after(row - begin);
                if let (true, Some((o, lse))) = (mode.continues(), &a.running) {
                    let (o_cell, o_rows) = self.memories[r].at(o, row, head);
                    let (lse_cell, lse_rows) = self.memories[r].at(lse, row, head);
                    rows = rows.min(o_rows).min(lse_rows);
                    self.expect(r, op, lse, row, rows, head, cell(What::Running(TensorId::Lse), 0))?;
                    self.expect(r, op, o, row, rows, head, cell(What::Running(TensorId::O), 0))?;
                    list = lse_cell.list;
                    if o_cell.list != list {
                        let token = o_cell.token;
                        return Err(self.err(
                            r,
                            op,
                            format!("running o and lse of token {token} have met different keys"),
                        ));
                    }
                }
                let list = added.map_or(list, |atoms| self.lists.join(list, atoms[head as usize]));
                pieces.push(Piece { head, row, cell: cell(What::Final(TensorId::O), list) });
                row += rows;
            }
            if let (true, Some((o, lse))) = (mode.continues(), &a.running) {
                self.memories[r].read(o, begin, all, head, |_| true);
                self.memories[r].read(lse, begin, all, head, |_| true);
            }
        }
        let targets = match (mode.finishes(), &a.running) {
            (false, Some((o, lse))) => [(o, What::Running(TensorId::O)), (lse, What::Running(TensorId::Lse))],
            _ => {
                let Some((o, lse)) = &a.result else {
                    return Err(self.err(r, op, format!("mode {mode:?} without a place for o")));
                };
                [(o, What::Final(TensorId::O)), (lse, What::Final(TensorId::Lse))]
            }
        };
        for (v, what) in targets {
            pieces.iter_mut().for_each(|p| p.cell.what = what);
            self.memories[r].write(op, v, begin, all, &pieces)?;
        }
        self.pieces = pieces;
        Ok(())
    }

    pub(super) fn backward(&mut self, r: usize, op: usize, b: &BackwardOp, met: &Met) -> Result<()> {
        let p = self.plan.problem();
        let (element, accumulator) = (p.dtype(), p.dtype().accumulator());
        let (dk, dv) = (p.head_dim(), p.value_dim());
        check_met(met, b.q.rows, b.k.rows).map_err(|text| self.err(r, op, text))?;
        self.heads(r, op, b.heads, &b.q, &b.k)?;
        self.same_shape(r, op, &b.k, &[&b.v])?;
        self.same_shape(r, op, &b.q, &[&b.d_o, &b.lse, &b.delta])?;
        for (v, dtype, dim) in [
            (&b.q, element, dk),
            (&b.k, element, dk),
            (&b.v, element, dv),
            (&b.d_o, element, dv),
            (&b.lse, accumulator, 1),
            (&b.delta, accumulator, 1),
        ] {
            self.typed(r, op, v, dtype, dim)?;
        }
        let g = self.geometry(r, op, met)?;
        let of = [b.gradients != Gradients::Keys, b.gradients != Gradients::Queries];
        let call = self.remember(r, op, met, &g, of)?;
        let (q0, kv0) = (b.heads.q_offset, b.heads.kv_offset);
        let mut queries = met.q.iter().map(|q| &q.range);
        let views = [
            (&b.q, What::Input(TensorId::Q)),
            (&b.d_o, What::Input(TensorId::DO)),
            (&b.lse, What::Input(TensorId::Lse)),
            (&b.delta, What::Delta),
        ];
        self.inputs(r, op, &views, &mut queries, &g.q, q0)?;
        let views = [(&b.k, What::Input(TensorId::K)), (&b.v, What::Input(TensorId::V))];
        self.inputs(r, op, &views, &mut met.k.iter(), &g.k, kv0)?;
        if of[0] {
            let Some(dq) = &b.dq else { return Err(self.err(r, op, "makes dq without a place for it")) };
            self.same_shape(r, op, &b.q, &[dq])?;
            self.typed(r, op, dq, accumulator, dk)?;
            self.met_for_queries += g.pairs * u128::from(b.q.heads);
            let atoms = self.atoms(call, q0, b.q.heads);
            for (q, parts) in met.q.iter().zip(&g.q) {
                for p in parts {
                    let cell = |h| Cell::new(What::Sum(TensorId::Dq), p.token, q0 + h, 0);
                    let (at, added) = (q.range.row as u64 + u64::from(p.row), p.met.then_some(&*atoms));
                    self.accumulate(r, op, dq, (at, p.rows), q.mode.continues(), cell, added)?;
                }
            }
        }
        if of[1] {
            let Some((to_k, to_v)) = &b.dkv else {
                return Err(self.err(r, op, "makes dk and dv without a place for them"));
            };
            self.same_shape(
                r,
                op,
                if b.per_q_head { &b.q } else { &b.k },
                &[&BufferView { rows: b.rows_like(to_k), ..*to_k }],
            )?;
            self.same_shape(r, op, to_k, &[to_v])?;
            if to_k.rows != b.k.rows {
                return Err(self.err(r, op, format!("dk has {} rows, k {}", to_k.rows, b.k.rows)));
            }
            self.typed(r, op, to_k, accumulator, dk)?;
            self.typed(r, op, to_v, accumulator, dv)?;
            self.met_for_keys += g.pairs * u128::from(b.q.heads);
            let group = b.heads.group;
            // For each head of dk: the q heads that add to it, and its kv head.
            let spans: Vec<(u32, u32, u32)> = self.memories[r]
                .heads(to_k)
                .map(|h| {
                    if self.whole_rows {
                        return (kv0, q0, b.q.heads);
                    }
                    if b.per_q_head {
                        return ((q0 + h) / group, q0 + h, 1);
                    }
                    let kv = kv0 + h;
                    let (first, end) = ((kv * group).max(q0), ((kv + 1) * group).min(q0 + b.q.heads));
                    (kv, first, end - first)
                })
                .collect();
            let atoms: Vec<u32> =
                spans.iter().map(|&(_, head, heads)| self.lists.one(Atom { call, head, heads })).collect();
            for (k, parts) in met.k.iter().zip(&g.k) {
                for p in parts {
                    let (at, added) = (k.row as u64 + u64::from(p.row), p.met.then_some(&*atoms));
                    for (to, tensor) in [(to_k, TensorId::Dk), (to_v, TensorId::Dv)] {
                        let cell = |h: u32| Cell::new(What::Sum(tensor), p.token, spans[h as usize].0, 0);
                        self.accumulate(r, op, to, (at, p.rows), b.accumulate_keys, cell, added)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Rows of a gradient: overwritten, or added to.
    #[allow(clippy::too_many_arguments)]
    fn accumulate(
        &mut self,
        r: usize,
        op: usize,
        to: &BufferView,
        (begin, all): (u64, u32),
        continues: bool,
        cell: impl Fn(u32) -> Cell,
        added: Option<&[u32]>,
    ) -> Result<()> {
        let end = begin + u64::from(all);
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(to) {
            let mut row = begin;
            while row < end {
                let (mut new, mut rows) = (cell(head).after(row - begin), end - row);
                if continues {
                    let (old, run) = self.memories[r].at(to, row, head);
                    rows = rows.min(run);
                    self.expect(r, op, to, row, rows, head, new)?;
                    (new.list, new.rounded) = (old.list, old.rounded);
                }
                if let Some(atoms) = added {
                    new.list = self.lists.join(new.list, atoms[head as usize]);
                }
                pieces.push(Piece { head, row, cell: new });
                row += rows;
            }
            if continues {
                self.memories[r].read(to, begin, u64::from(all), head, |_| true);
            }
        }
        self.memories[r].write(op, to, begin, u64::from(all), &pieces)?;
        self.pieces = pieces;
        Ok(())
    }
}

impl BackwardOp {
    /// Number of rows that `same_shape` compares for dk: q's rows, if there is one partial for each q head.
    fn rows_like(&self, dk: &BufferView) -> u64 {
        if self.per_q_head { self.q.rows } else { dk.rows }
    }
}
