// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that no two operations that may run at the same time access the same bytes if one of them writes.
//!
//! Happens-before is the order within each lane and the edges `after`, closed under both: for every operation, how many
//! operations of each lane are surely complete when it begins. An exchange is one operation here: transports may move
//! its messages in any order, so these must not overlap either.

use alloc::{format, vec, vec::Vec};

use super::{
    flaw::flaw,
    listed::{ListedOp, Met, Sum},
    memory::{Memory, Rect, table_of},
};
use crate::{
    call::{Gradients, Mode, Range},
    error::Result,
    schedule::{AttendOp, BufferView, Lane, Schedule},
};

/// What an operation reads and writes.
#[derive(Default)]
pub(super) struct Touched {
    pub reads: Vec<Rect>,
    pub writes: Vec<Rect>,
}

fn rect(v: &BufferView) -> Rect {
    Rect { table: table_of(v.buf), row: v.row, rows: v.rows, head: v.head, heads: v.heads }
}

/// Adds rows of a view, joined to the last rectangle where they continue it.
fn add(list: &mut Vec<Rect>, v: &BufferView, r: &Range) {
    let new = Rect { row: v.row + r.row as u64, rows: u64::from(r.len), ..rect(v) };
    match list.last_mut() {
        Some(last)
            if last.table == new.table
                && (last.head, last.heads) == (new.head, new.heads)
                && last.row + last.rows == new.row =>
        {
            last.rows += new.rows;
        }
        _ => list.push(new),
    }
}

fn of_sums<'a>(sums: impl Iterator<Item = &'a Sum>) -> Touched {
    let mut t = Touched::default();
    for s in sums {
        t.writes.push(rect(&s.dst));
        t.reads.extend(s.sources.iter().map(rect));
    }
    t
}

/// k ranges that some q range reads.
fn read_keys(met: &Met) -> Vec<bool> {
    let mut read = vec![false; met.k.len()];
    (0..met.q.len()).flat_map(|q| met.keys(q)).for_each(|&k| read[k as usize] = true);
    read
}

pub(super) fn touched(work: &ListedOp, memory: &Memory) -> Touched {
    use crate::schedule::{Buf, TensorId};
    let mut t = Touched::default();
    let user = |tensor| {
        let table = memory.table(Buf::User(tensor));
        Rect { table: tensor as usize, row: 0, rows: table.rows, head: 0, heads: table.heads }
    };
    match work {
        ListedOp::Delta { delta } => {
            t.writes.push(rect(delta));
            t.reads.extend([user(TensorId::O), user(TensorId::DO)]);
        }
        ListedOp::SinkGradient { delta, partial } => {
            t.writes.push(rect(partial));
            t.reads.extend([rect(delta), user(TensorId::Lse), user(TensorId::Sinks)]);
        }
        ListedOp::SinkTotal(sum) => return of_sums(core::iter::once(sum)),
        ListedOp::Sums(parts) | ListedOp::Merges(parts) => return of_sums(parts.iter().flatten()),
        ListedOp::Exchange { messages, .. } => {
            for m in messages {
                if m.send { t.reads.push(rect(&m.view)) } else { t.writes.push(rect(&m.view)) }
            }
        }
        ListedOp::Attend(a, met) => {
            let read = read_keys(met);
            for view in [&a.k, &a.v] {
                met.k.iter().zip(&read).filter(|(_, read)| **read).for_each(|(k, _)| add(&mut t.reads, view, k));
            }
            met.q.iter().for_each(|q| add(&mut t.reads, &a.q, &q.range));
            for view in a.result.iter().flat_map(|(o, lse)| [o, lse]) {
                met.q.iter().filter(|q| q.mode.finishes()).for_each(|q| add(&mut t.writes, view, &q.range));
            }
            if let Some((o, lse)) = &a.running {
                for q in met.q.iter().filter(|q| q.mode != Mode::Only) {
                    let list = if q.mode == Mode::Last { &mut t.reads } else { &mut t.writes };
                    add(list, o, &q.range);
                    add(list, lse, &q.range);
                }
            }
        }
        ListedOp::Backward(b, met) => {
            for view in [&b.k, &b.v] {
                met.k.iter().for_each(|k| add(&mut t.reads, view, k));
            }
            for view in [&b.q, &b.d_o, &b.lse, &b.delta] {
                met.q.iter().for_each(|q| add(&mut t.reads, view, &q.range));
            }
            if let Some(dq) = b.dq.filter(|_| b.gradients != Gradients::Keys) {
                met.q.iter().for_each(|q| add(&mut t.writes, &dq, &q.range));
            }
            if let Some((dk, dv)) = b.dkv.filter(|_| b.gradients != Gradients::Queries) {
                for view in [&dk, &dv] {
                    met.k.iter().for_each(|k| add(&mut t.writes, view, k));
                }
            }
        }
    }
    t
}

/// How many operations of each lane are complete when each operation begins, and its own number in its lane.
pub(crate) fn clocks(s: &Schedule) -> Vec<([usize; 2], usize)> {
    let mut lanes = [([0usize; 2], 0usize); 2];
    let mut clocks: Vec<([usize; 2], usize)> = Vec::with_capacity(s.ops.len());
    for op in &s.ops {
        let me = op.lane as usize;
        let (mut clock, number) = lanes[me];
        clock[me] = number;
        if let Some(after) = op.after {
            let (before, n) = clocks[after as usize];
            clock[me] = clock[me].max(before[me]);
            clock[1 - me] = clock[1 - me].max(before[1 - me]).max(n + 1);
        }
        clocks.push((clock, number));
        lanes[me] = (clock, number + 1);
    }
    clocks
}

/// Proves that a rank's lanes do not race, and that no operation trips over itself.
pub(super) fn check(s: &Schedule, listed: &[ListedOp], memory: &Memory) -> Result<()> {
    let touched: Vec<Touched> = listed.iter().map(|w| touched(w, memory)).collect();
    for (i, work) in listed.iter().enumerate() {
        within(s, i, work, &touched[i], memory)?;
    }
    let clocks = clocks(s);
    let of = |lane: Lane| (0..s.ops.len()).filter(move |&i| s.ops[i].lane == lane).collect::<Vec<_>>();
    let (compute, communication) = (of(Lane::Compute), of(Lane::Communication));
    let (c, m) = (Lane::Compute as usize, Lane::Communication as usize);
    for &a in &compute {
        // Clocks grow along a lane, so the operations of the other lane that are not ordered with this one are neighbours.
        let after = communication.partition_point(|&b| clocks[b].0[c] <= clocks[a].1);
        let before = clocks[a].0[m].min(after);
        for &b in &communication[before..after] {
            let (x, y) = (&touched[a], &touched[b]);
            let clash = hit(memory, &x.writes, &y.writes)
                .or_else(|| hit(memory, &x.writes, &y.reads))
                .or_else(|| hit(memory, &x.reads, &y.writes));
            if let Some((p, q)) = clash {
                return Err(flaw(
                    s.rank,
                    a.max(b),
                    format!(
                        "races with operation {} ({}): {} against {}",
                        a.min(b),
                        s.ops[a.min(b)].kind.name(),
                        memory.describe(&p),
                        memory.describe(&q)
                    ),
                ));
            }
        }
    }
    Ok(())
}

fn hit(memory: &Memory, a: &[Rect], b: &[Rect]) -> Option<(Rect, Rect)> {
    a.iter().find_map(|x| b.iter().find(|y| memory.overlap(x, y)).map(|y| (*x, *y)))
}

/// That what an operation writes overlaps nothing else that it touches, but where its contract says so.
fn within(s: &Schedule, i: usize, work: &ListedOp, t: &Touched, memory: &Memory) -> Result<()> {
    let err = |a: &Rect, b: &Rect| {
        Err(flaw(s.rank, i, format!("touches the same bytes twice: {} and {}", memory.describe(a), memory.describe(b))))
    };
    let disjoint = |writes: &[Rect], reads: &[Rect]| {
        if let Some((a, b)) = hit(memory, writes, reads) {
            return err(&a, &b);
        }
        for (n, a) in writes.iter().enumerate() {
            if let Some(b) = writes[n + 1..].iter().find(|b| memory.overlap(a, b)) {
                return err(a, b);
            }
        }
        Ok(())
    };
    match work {
        ListedOp::Sums(parts) | ListedOp::Merges(parts) => {
            for part in parts {
                let writes: Vec<Rect> = part.iter().map(|s| rect(&s.dst)).collect();
                // The first source may be the destination itself; nothing else may meet any destination.
                let reads: Vec<Rect> = part
                    .iter()
                    .flat_map(|s| {
                        s.sources.iter().enumerate().filter(|(n, v)| *n > 0 || **v != s.dst).map(|(_, v)| rect(v))
                    })
                    .collect();
                disjoint(&writes, &reads)?;
            }
            Ok(())
        }
        ListedOp::Attend(AttendOp { running: Some((running, _)), result: Some((o, _)), .. }, _) if running == o => {
            // The running result may be the very tensor o: its rows are then read and written by the same q range.
            let at = |r: &&Rect| r.table != table_of(o.buf);
            let reads: Vec<Rect> = t.reads.iter().filter(at).copied().collect();
            hit(memory, &t.writes, &reads).map_or(Ok(()), |(a, b)| err(&a, &b))
        }
        _ => disjoint(&t.writes, &t.reads),
    }
}
