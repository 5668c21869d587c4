// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel calls, by their contract: the tokens of the rows, the pairs that are computed, and how results are stored.

use alloc::{format, vec, vec::Vec};

use super::{
    execute::{Atom, AttendCall, Prover},
    listed::Met,
    memory::{Cell, What},
};
use crate::{
    batch::Side,
    call::{Gradients, HeadMap, Mode, Range},
    error::Result,
    schedule::{AttendOp, BackwardOp, BufferView, TensorId},
};

/// Rows of a range whose positions are in `low..=high`: positions ascend, so they are one run.
pub(super) fn rows_between(r: &Range, low: i64, high: i64) -> (u32, u32) {
    let first_from = |x: i64| {
        let (mut a, mut e) = (0, r.len);
        while a < e {
            let mid = a + (e - a) / 2;
            if r.position(mid) < x { a = mid + 1 } else { e = mid }
        }
        a
    };
    if high < low {
        return (0, 0);
    }
    (first_from(low), first_from(high.saturating_add(1)))
}

/// A call's geometry: the tokens its ranges claim and which of them meet.
struct Geometry {
    q: Vec<Vec<u32>>,
    k: Vec<Vec<u32>>,
    /// By q range: rows that meet some key.
    q_met: Vec<Vec<bool>>,
    /// By k range: rows that meet some query.
    k_met: Vec<Vec<bool>>,
    pairs: u128,
}

impl<'a> Prover<'a> {
    /// The tokens that a range claims to hold.
    fn claimed(&self, r: usize, op: usize, side: Side, range: &Range) -> Result<Vec<u32>> {
        let batch = self.plan.problem().batch();
        let doc = range.doc as usize;
        if doc >= batch.documents() {
            return Err(self.err(r, op, format!("{range:?} is of document {doc} of {}", batch.documents())));
        }
        let (tokens, start) = (batch.document(side, doc), batch.start(side, doc));
        let (first, last) = (range.pos, range.last());
        if first < start || last >= start + tokens.len() as i64 {
            return Err(self.err(r, op, format!("{range:?} claims positions {first}..={last} outside its document")));
        }
        Ok((0..range.len).map(|i| (tokens.start as i64 + range.position(i) - start) as u32).collect())
    }

    fn geometry(&self, r: usize, op: usize, met: &Met) -> Result<Geometry> {
        let mask = self.plan.problem().mask();
        let of = |side, ranges: &mut dyn Iterator<Item = &Range>| -> Result<Vec<Vec<u32>>> {
            ranges.map(|x| self.claimed(r, op, side, x)).collect()
        };
        let q = of(Side::Q, &mut met.q.iter().map(|q| &q.range))?;
        let k = of(Side::K, &mut met.k.iter())?;
        let mut q_met: Vec<Vec<bool>> = q.iter().map(|q| vec![false; q.len()]).collect();
        let mut starts: Vec<Vec<i32>> = k.iter().map(|k| vec![0; k.len() + 1]).collect();
        let mut pairs = 0;
        for (i, query) in met.q.iter().enumerate() {
            for &key in met.keys(i) {
                for row in 0..query.range.len {
                    let pos = query.range.position(row);
                    let low = pos.saturating_sub(mask.left_limit());
                    let high = pos.saturating_add(mask.right_limit());
                    let (a, e) = rows_between(&met.k[key as usize], low, high);
                    if a < e {
                        q_met[i][row as usize] = true;
                        starts[key as usize][a as usize] += 1;
                        starts[key as usize][e as usize] -= 1;
                        pairs += u128::from(e - a);
                    }
                }
            }
        }
        let k_met = starts
            .into_iter()
            .map(|s| {
                let mut open = 0;
                let rows = s.len() - 1;
                s[..rows]
                    .iter()
                    .map(|d| {
                        open += d;
                        open > 0
                    })
                    .collect()
            })
            .collect();
        Ok(Geometry { q, k, q_met, k_met, pairs })
    }

    /// Remembers a call; no token may be in two of its ranges.
    fn remember(&mut self, r: usize, op: usize, met: &'a Met, g: &Geometry) -> Result<u32> {
        let by_token = |ranges: &[Vec<u32>]| {
            let mut list: Vec<(u32, u32)> =
                ranges.iter().enumerate().flat_map(|(i, tokens)| tokens.iter().map(move |&t| (t, i as u32))).collect();
            list.sort_unstable();
            list
        };
        let (q, k) = (by_token(&g.q), by_token(&g.k));
        for (list, name) in [(&q, "q"), (&k, "k")] {
            if let Some(w) = list.windows(2).find(|w| w[0].0 == w[1].0) {
                return Err(self.err(r, op, format!("{name} token {} is in two ranges of one call", w[0].0)));
            }
        }
        let mut readers = vec![Vec::new(); met.k.len()];
        for i in 0..met.q.len() {
            met.keys(i).iter().for_each(|&k| readers[k as usize].push(i as u32));
        }
        self.calls.push(AttendCall { rank: r, op, q, k, readers, met: Some(met) });
        Ok(self.calls.len() as u32 - 1)
    }

    /// That the heads of a call are those its map says, each read; `(first q head, q heads, first kv head, kv heads)`.
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

    /// Checks inputs of one side: that every row that a range names holds its token, for every head; marks it read.
    #[allow(clippy::too_many_arguments)]
    fn inputs(
        &mut self,
        r: usize,
        op: usize,
        views: &[(&BufferView, What)],
        ranges: &mut dyn Iterator<Item = &'a Range>,
        tokens: &[Vec<u32>],
        met: &[Vec<bool>],
        first_head: u32,
    ) -> Result<()> {
        for (i, range) in ranges.enumerate() {
            for row in 0..range.len {
                let (token, met) = (tokens[i][row as usize], met[i][row as usize]);
                for &(v, what) in views {
                    for h in self.memories[r].heads(v) {
                        let at = range.row as u64 + u64::from(row);
                        self.expect(r, op, v, at, h, Cell::new(what, token, first_head + h, 0))?;
                        let cell = self.memories[r].cell(v, at, h);
                        if met || !cell.strict {
                            cell.unread = 0;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn attend(&mut self, r: usize, op: usize, a: &AttendOp, met: &'a Met) -> Result<()> {
        let p = self.plan.problem();
        let (element, accumulator) = (p.dtype(), p.dtype().accumulator());
        self.heads(r, op, a.heads, &a.q, &a.k)?;
        self.same_shape(r, op, &a.k, &[&a.v])?;
        self.same_shape(r, op, &a.q, &[&a.o, &a.lse])?;
        for (v, dtype, dim) in [
            (&a.q, element, p.head_dim()),
            (&a.k, element, p.head_dim()),
            (&a.v, element, p.value_dim()),
            (&a.o, element, p.value_dim()),
            (&a.lse, accumulator, 1),
        ] {
            self.typed(r, op, v, dtype, dim)?;
        }
        if let Some((o, lse)) = &a.running {
            self.same_shape(r, op, &a.q, &[o, lse])?;
            self.typed(r, op, o, accumulator, p.value_dim())?;
            self.typed(r, op, lse, accumulator, 2)?;
        }
        let g = self.geometry(r, op, met)?;
        self.met_for_queries += g.pairs * u128::from(a.q.heads);
        let call = self.remember(r, op, met, &g)?;
        let (q0, kv0) = (a.heads.q_offset, a.heads.kv_offset);
        let mut queries = met.q.iter().map(|q| &q.range);
        self.inputs(r, op, &[(&a.q, What::Input(TensorId::Q))], &mut queries, &g.q, &g.q_met, q0)?;
        let views = [(&a.k, What::Input(TensorId::K)), (&a.v, What::Input(TensorId::V))];
        self.inputs(r, op, &views, &mut met.k.iter(), &g.k, &g.k_met, kv0)?;
        let atoms = self.atoms(call, q0, a.q.heads);
        for (i, q) in met.q.iter().enumerate() {
            for row in 0..q.range.len {
                let at = q.range.row as u64 + u64::from(row);
                let added = g.q_met[i][row as usize];
                self.result(r, op, a, q.mode, at, g.q[i][row as usize], added.then_some(&*atoms))?;
            }
        }
        Ok(())
    }

    /// One row of a forward result: from a running one or from nothing, to a running one or to the end.
    #[allow(clippy::too_many_arguments)]
    fn result(
        &mut self,
        r: usize,
        op: usize,
        a: &AttendOp,
        mode: Mode,
        row: u64,
        token: u32,
        added: Option<&[u32]>,
    ) -> Result<()> {
        let first = a.heads.q_offset;
        if a.running.is_none() && mode != Mode::Only {
            return Err(self.err(r, op, format!("mode {mode:?} without a running o")));
        }
        let mut cells = core::mem::take(&mut self.cells);
        cells.clear();
        for h in self.memories[r].heads(&a.q) {
            let mut list = 0;
            if let (true, Some((o, lse))) = (mode.continues(), &a.running) {
                self.expect(r, op, lse, row, h, Cell::new(What::Running(TensorId::Lse), token, first + h, 0))?;
                self.expect(r, op, o, row, h, Cell::new(What::Running(TensorId::O), token, first + h, 0))?;
                list = self.memories[r].cell(lse, row, h).list;
                if self.memories[r].cell(o, row, h).list != list {
                    return Err(self.err(r, op, format!("running o and lse of token {token} have met different keys")));
                }
                self.memories[r].cell(o, row, h).unread = 0;
                self.memories[r].cell(lse, row, h).unread = 0;
            }
            let list = added.map_or(list, |atoms| self.lists.join(list, atoms[h as usize]));
            cells.push(Cell::new(What::Unset, token, first + h, list));
        }
        let memory = &mut self.memories[r];
        let cell = |what, h: u32| Cell { what, ..cells[h as usize] };
        match (mode.finishes(), &a.running) {
            (false, Some((o, lse))) => {
                memory.write_row(op, o, row, |h| cell(What::Running(TensorId::O), h))?;
                memory.write_row(op, lse, row, |h| cell(What::Running(TensorId::Lse), h))?;
            }
            _ => {
                memory.write_row(op, &a.o, row, |h| cell(What::Final(TensorId::O), h))?;
                memory.write_row(op, &a.lse, row, |h| cell(What::Final(TensorId::Lse), h))?;
            }
        }
        self.cells = cells;
        Ok(())
    }

    pub(super) fn backward(&mut self, r: usize, op: usize, b: &BackwardOp, met: &'a Met) -> Result<()> {
        let p = self.plan.problem();
        let (element, accumulator) = (p.dtype(), p.dtype().accumulator());
        let (dk, dv) = (p.head_dim(), p.value_dim());
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
        let call = self.remember(r, op, met, &g)?;
        let (q0, kv0) = (b.heads.q_offset, b.heads.kv_offset);
        let mut queries = met.q.iter().map(|q| &q.range);
        let views = [
            (&b.q, What::Input(TensorId::Q)),
            (&b.d_o, What::Input(TensorId::DO)),
            (&b.lse, What::Input(TensorId::Lse)),
            (&b.delta, What::Delta),
        ];
        self.inputs(r, op, &views, &mut queries, &g.q, &g.q_met, q0)?;
        let views = [(&b.k, What::Input(TensorId::K)), (&b.v, What::Input(TensorId::V))];
        self.inputs(r, op, &views, &mut met.k.iter(), &g.k, &g.k_met, kv0)?;
        if b.gradients != Gradients::Keys {
            let Some(dq) = &b.dq else { return Err(self.err(r, op, "makes dq without a place for it")) };
            self.same_shape(r, op, &b.q, &[dq])?;
            self.typed(r, op, dq, accumulator, dk)?;
            self.met_for_queries += g.pairs * u128::from(b.q.heads);
            let atoms = self.atoms(call, q0, b.q.heads);
            for (i, q) in met.q.iter().enumerate() {
                for row in 0..q.range.len {
                    let at = q.range.row as u64 + u64::from(row);
                    let added = g.q_met[i][row as usize].then_some(&*atoms);
                    let cell = |h| Cell::new(What::Sum(TensorId::Dq), g.q[i][row as usize], q0 + h, 0);
                    self.accumulate(r, op, dq, at, q.mode.continues(), cell, added)?;
                }
            }
        }
        if b.gradients != Gradients::Queries {
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
            // The q heads that add to each head of dk, and the kv head that it belongs to.
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
            for (i, k) in met.k.iter().enumerate() {
                for row in 0..k.len {
                    let at = k.row as u64 + u64::from(row);
                    let added = g.k_met[i][row as usize].then_some(&*atoms);
                    for (to, tensor) in [(to_k, TensorId::Dk), (to_v, TensorId::Dv)] {
                        let cell = |h: u32| Cell::new(What::Sum(tensor), g.k[i][row as usize], spans[h as usize].0, 0);
                        self.accumulate(r, op, to, at, b.accumulate_keys, cell, added)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// One row of a gradient: written, or added to.
    #[allow(clippy::too_many_arguments)]
    fn accumulate(
        &mut self,
        r: usize,
        op: usize,
        to: &BufferView,
        row: u64,
        continues: bool,
        cell: impl Fn(u32) -> Cell,
        added: Option<&[u32]>,
    ) -> Result<()> {
        let mut cells = core::mem::take(&mut self.cells);
        cells.clear();
        for h in self.memories[r].heads(to) {
            let mut new = cell(h);
            if continues {
                self.expect(r, op, to, row, h, new)?;
                let old = self.memories[r].cell(to, row, h);
                old.unread = 0;
                (new.list, new.rounded) = (old.list, old.rounded);
            }
            if let Some(atoms) = added {
                new.list = self.lists.join(new.list, atoms[h as usize]);
            }
            cells.push(new);
        }
        self.memories[r].write_row(op, to, row, |h| cells[h as usize])?;
        self.cells = cells;
        Ok(())
    }
}

impl BackwardOp {
    /// Rows that `same_shape` should compare for dk: q's where there is one partial for each q head.
    fn rows_like(&self, dk: &BufferView) -> u64 {
        if self.per_q_head { self.q.rows } else { dk.rows }
    }
}
