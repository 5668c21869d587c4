// SPDX-License-Identifier: MIT OR Apache-2.0
//! The specification of a scan, separate from the code that schedules it.
//!
//! Segments are numbered over all ranks by their first tokens (from the last one, in a reverse scan), so those of a
//! document are consecutive. A row holds the decay or the state of segments `begin..end`, joined. Two are joined only
//! if the earlier ends where the later begins, in one document, with the decay of the later part on the left. At the
//! end each segment has the state of all segments of its document before it, or zeros if there is none, and no rank
//! was sent what it had already.

use alloc::{format, string::String, vec::Vec};

use super::{
    cell::{Cell, What},
    execute::Prover,
    flaw::Wrong,
    memory::Piece,
    outputs,
    promise::segments,
    segments::Segments,
};
use crate::{
    error::Result,
    schedule::{Buf, BufferView, Scan, TensorId, expanded::SumBlock},
};

/// A decay or a state of segments `begin..end`. A run of rows in a table counts `end` up.
const fn joined(tensor: TensorId, begin: u32, end: u32, head: u32) -> Cell {
    Cell::new(What::Joined(tensor), end, head, begin)
}

/// Numbers the segments, and marks the caller's decays and states.
pub(super) fn set_inputs(p: &mut Prover, scan: Scan) {
    let mut all = Vec::new();
    for r in 0..p.ranks.len() {
        let own = segments(p.plan, p.ranks[r].rank());
        all.extend(own.into_iter().enumerate().map(|(row, (token, document))| (token, document, r, row)));
    }
    all.sort_unstable();
    if scan.reverse {
        all.reverse();
    }
    let mut of = Segments { own: p.ranks.iter().map(|_| Vec::new()).collect(), ..Segments::default() };
    let mut last = None;
    for (number, (_, document, r, row)) in all.into_iter().enumerate() {
        let first = if last == Some(document) { of.first[number - 1] } else { number as u32 };
        of.first.push(first);
        last = Some(document);
        let own = &mut of.own[r];
        own.resize(own.len().max(row + 1), 0);
        own[row] = number as u32;
    }
    for (r, own) in of.own.iter().enumerate() {
        for tensor in [TensorId::Decay, TensorId::State] {
            let view = BufferView::whole(Buf::User(tensor), own.len() as u64, scan.heads);
            for head in p.memories[r].heads(&view) {
                for (row, &number) in own.iter().enumerate() {
                    p.memories[r].set(&view, row as u64, head, joined(tensor, number, number + 1, head));
                }
            }
        }
    }
    p.segments = of;
}

/// Checks that every segment has its initial state, and that no message was unneeded. No pairs are attended.
pub(super) fn check(p: &Prover, scan: Scan) -> Result<u128> {
    outputs::tokens_are_dealt_once(p)?;
    for r in 0..p.ranks.len() {
        p.memories[r].check_all_read()?;
        initial_states(p, r, scan).map_err(|text| p.err(r, p.ranks[r].last(), text))?;
    }
    Ok(0)
}

fn initial_states(p: &Prover, r: usize, scan: Scan) -> Result<(), String> {
    let own = &p.segments.own[r];
    let view = BufferView::whole(Buf::User(TensorId::InitialState), own.len() as u64, scan.heads);
    for head in p.memories[r].heads(&view) {
        for (row, &number) in own.iter().enumerate() {
            let first = p.segments.first[number as usize];
            let cell = p.memories[r].at(&view, row as u64, head).0;
            let (zero, before) = (Cell::new(What::Zero, 0, 0, 0), joined(TensorId::State, first, number, head));
            let want = if first == number { zero } else { before };
            let is_zero = first == number && cell.what == What::Zero;
            if !is_zero
                && (cell.what, cell.token, cell.head, cell.list) != (want.what, want.token, want.head, want.list)
            {
                return Err(format!(
                    "initial_state of segment {row}, head {head} holds {}, not {}",
                    words(cell),
                    words(want)
                ));
            }
        }
    }
    Ok(())
}

/// A cell in words, with both ends of its segments.
fn words(cell: Cell) -> String {
    match cell.what {
        What::Joined(t) => format!("{} of segments {}..{}", t.name(), cell.list, cell.token),
        _ => cell.describe(),
    }
}

impl Prover<'_> {
    /// Notes rows that a message brings: a rank gets nothing that it has.
    pub(super) fn arrives(&mut self, r: usize, cell: Cell, rows: u64) -> Result<(), String> {
        let What::Joined(_) = cell.what else { return Ok(()) };
        for row in 0..rows {
            let Cell { token: end, head, list: begin, .. } = cell.after(row);
            let own = end == begin + 1 && self.segments.own[r].contains(&begin);
            if own || !self.segments.arrived.insert((r, cell.what, [begin, end, head])) {
                return Err(format!("sends {} to a rank that has it", words(cell.after(row))));
            }
        }
        Ok(())
    }

    /// `dst = decay · of (+ add)`.
    pub(super) fn compose(&mut self, r: usize, op: usize, s: &SumBlock) -> Result<(), Wrong> {
        let (decay, of, add) = match s.sources[..] {
            [decay, of] => (decay, of, None),
            [decay, of, add] => (decay, of, Some(add)),
            _ => return Err(format!("joins {} tensors, not 2 or 3", s.sources.len()).into()),
        };
        let mut pieces = core::mem::take(&mut self.pieces);
        pieces.clear();
        for head in self.memories[r].heads(&s.dst) {
            for row in 0..s.dst.rows {
                let at = |v: &BufferView| self.memories[r].at(v, row, head).0;
                let (by, of) = (at(&decay), at(&of));
                let tensor = if add.is_some() { TensorId::State } else { TensorId::Decay };
                let later = add.map_or(by, |add| at(&add));
                let heads = [by.head, of.head, later.head] == [s.dst.head + head; 3];
                let kinds = [by.what, of.what, later.what]
                    == [What::Joined(TensorId::Decay), What::Joined(tensor), What::Joined(tensor)];
                // The later part begins where the earlier ends, and both its tensors are of the same segments.
                let meet = of.token == by.list && (later.list, later.token) == (by.list, by.token);
                let document = |segment: u32| self.segments.first.get(segment as usize);
                if !heads || !kinds || !meet || document(of.list) != document(by.token.wrapping_sub(1)) {
                    let add = add.map_or(String::new(), |_| format!(" + {}", words(later)));
                    return Err(format!("joins {} · {}{add}", words(by), words(of)).into());
                }
                pieces.push(Piece { head, row, cell: joined(tensor, of.list, by.token, s.dst.head + head) });
            }
            for v in &s.sources {
                self.memories[r].read(v, 0, s.dst.rows, head, |_| true);
            }
        }
        self.memories[r].write(op, &s.dst, 0, s.dst.rows, &pieces)?;
        self.pieces = pieces;
        Ok(())
    }
}
