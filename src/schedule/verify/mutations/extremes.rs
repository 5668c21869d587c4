// SPDX-License-Identifier: MIT OR Apache-2.0
//! Schedules with any number in any field: the verifier reports a flaw or finds that nothing changed, and never panics.
//! A schedule may come from outside, so no field is known to fit the others.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::{
    call::{Gradients, HeadMap},
    schedule::{AttendPart, CirculatingSide, MessageView, StepRows},
};

/// What became of the mutants.
#[derive(Default)]
struct Outcome {
    sample: Sample,
    refused: usize,
    harmless: usize,
    panics: Vec<String>,
}

impl Outcome {
    /// Verifies a subject's schedules with one rank's changed.
    fn of(&mut self, s: &Subject, rank: usize, site: impl FnOnce() -> String, change: impl FnOnce(&mut Schedule)) {
        if !self.sample.takes_next() {
            return;
        }
        let mut schedules = s.schedules.clone();
        change(&mut schedules[rank]);
        match catch_unwind(AssertUnwindSafe(|| s.plan.verify_schedules(&schedules))) {
            Ok(Err(Error::Schedule { .. } | Error::Invalid { .. })) => self.refused += 1,
            Ok(Ok(_)) => self.harmless += 1,
            Ok(Err(other)) => self.panics.push(format!("{}: rank {rank} {}: {other}", s.name, site())),
            Err(_) => self.panics.push(format!("{}: rank {rank} {}", s.name, site())),
        }
    }

    fn done(self, refused: usize) {
        let n = self.panics.len();
        assert!(n == 0, "{n} panics beside {} refused: {:#?}", self.refused, &self.panics[..n.min(12)]);
        assert!(self.refused >= Sample::least(refused), "{} refused, {} harmless", self.refused, self.harmless);
    }
}

/// Every field of the ring steps of one rank, set to what does not fit.
#[test]
fn ring_steps_that_contradict_themselves() {
    let mut outcome = Outcome::default();
    for s in &subjects() {
        let rank = s.schedules.len() - 1;
        let schedule = &s.schedules[rank];
        for (side, steps) in [&schedule.keys, &schedule.queries].into_iter().enumerate() {
            for (name, mutant) in steps.iter().flat_map(|steps| steps.mutants()) {
                outcome.of(s, rank, || name, |x| *[&mut x.keys, &mut x.queries][side] = Some(mutant.into()));
            }
        }
    }
    outcome.done(10_000);
}

const LARGE: [u64; 4] = [1, 1 << 40, u64::MAX / 2, u64::MAX];

type ViewChange = (String, alloc::boxed::Box<dyn Fn(&mut BufferView)>);

/// Values of a view's fields.
fn view_changes() -> Vec<ViewChange> {
    let mut list: Vec<ViewChange> = Vec::new();
    for x in LARGE.into_iter().chain([0]) {
        list.push((format!("row {x}"), alloc::boxed::Box::new(move |v| v.row = x)));
        list.push((format!("rows {x}"), alloc::boxed::Box::new(move |v| v.rows = x)));
        list.push((format!("head {x}"), alloc::boxed::Box::new(move |v| v.head = x as u32)));
        list.push((format!("heads {x}"), alloc::boxed::Box::new(move |v| v.heads = x as u32)));
        list.push((format!("row and rows {x}"), alloc::boxed::Box::new(move |v| (v.row, v.rows) = (x, x))));
    }
    for buf in [Buf::Work(0), Buf::Work(1), Buf::Work(u16::MAX)].into_iter().chain(TensorId::ALL.map(Buf::User)) {
        list.push((format!("{buf:?}"), alloc::boxed::Box::new(move |v| v.buf = buf)));
    }
    list
}

/// The views of an operation.
fn views(kind: &mut OpKind) -> Vec<&mut BufferView> {
    fn pair(p: &mut Option<(BufferView, BufferView)>) -> impl Iterator<Item = &mut BufferView> {
        p.iter_mut().flat_map(|(a, b)| [a, b])
    }
    match kind {
        OpKind::Delta { delta } => vec![delta],
        OpKind::SinkGradient { delta, partial } => vec![delta, partial],
        OpKind::SinkTotal { digits } => vec![digits],
        OpKind::Transform { .. } | OpKind::Compose { .. } | OpKind::Exchange { .. } => vec![],
        OpKind::Combine { o, lse, .. } => vec![&mut o.dst, &mut lse.dst],
        OpKind::Fetch { rows, packed } => {
            rows.tensors.iter_mut().flat_map(|t| [&mut t.own, &mut t.slot]).chain(packed).collect()
        }
        OpKind::Pack(rows) | OpKind::Return(rows) | OpKind::Reduce(rows) | OpKind::Merge(rows) => {
            rows.tensors.iter_mut().flat_map(|t| [&mut t.own, &mut t.slot]).collect()
        }
        OpKind::Attend(a) => {
            let mut list = vec![&mut a.q, &mut a.k, &mut a.v];
            list.extend(pair(&mut a.running));
            list.extend(pair(&mut a.result));
            list
        }
        OpKind::Backward(b) => {
            let mut list = vec![&mut b.q, &mut b.k, &mut b.v, &mut b.d_o, &mut b.lse, &mut b.delta];
            list.extend(&mut b.dq);
            list.extend(pair(&mut b.dkv));
            list
        }
    }
}

/// Every number of every view, of every fourth operation of each subject.
#[test]
fn views_with_any_numbers() {
    let (mut outcome, changes, mut turn) = (Outcome::default(), view_changes(), 0);
    for s in &subjects() {
        let rank = s.schedules.len() - 1;
        for i in 0..s.schedules[rank].ops.len() {
            turn += 1;
            if turn % 4 > 0 {
                continue;
            }
            for n in 0..views(&mut s.schedules[rank].ops[i].kind.clone()).len() {
                for (name, change) in &changes {
                    let site = || format!("op {i} view {n} {name}");
                    outcome.of(s, rank, site, |x| change(views(&mut x.ops[i].kind)[n]));
                }
            }
        }
        for (name, change) in &changes {
            outcome.of(
                s,
                rank,
                || format!("messages {name}"),
                |x| {
                    x.messages.iter_mut().for_each(|m| change(&mut m.view));
                },
            );
            outcome.of(
                s,
                rank,
                || format!("destinations {name}"),
                |x| {
                    x.blocks.iter_mut().for_each(|b| change(&mut b.dst));
                },
            );
            outcome.of(s, rank, || format!("sources {name}"), |x| x.sources.iter_mut().for_each(change));
        }
    }
    outcome.done(10_000);
}

/// Buffers, the workspace, indices, heads, lanes and all else that is not a view; of every third operation and every
/// second buffer.
#[test]
fn other_fields_with_any_values() {
    let mut outcome = Outcome::default();
    for (n, s) in subjects().iter().enumerate() {
        let rank = s.schedules.len() - 1;
        let mut of = |site: &str, change: &dyn Fn(&mut Schedule)| outcome.of(s, rank, || site.into(), change);
        for x in LARGE.into_iter().chain([0]) {
            of("workspace", &|s| s.workspace = x);
            of("rank", &|s| s.rank = x as usize);
            of("ulysses", &|s| s.ulysses = x as usize);
            of("begin of the group", &|s| s.group.start = x as usize);
            of("end of the group", &|s| s.group.end = x as usize);
            for b in (0..s.schedules[rank].buffers.len()).skip(n % 2).step_by(2) {
                let mut buffer = |site: &str, change: &dyn Fn(&mut crate::schedule::Buffer)| {
                    of(&format!("buffer {b} {site} {x}"), &|s| change(&mut s.buffers[b]));
                    of(&format!("buffer {b} {site} {x} in any workspace"), &|s| {
                        change(&mut s.buffers[b]);
                        s.workspace = 1 << 62;
                    });
                };
                buffer("rows", &|b| b.rows = x);
                buffer("heads", &|b| b.heads = x as u32);
                buffer("heads without rows", &|b| (b.rows, b.heads) = (0, x as u32));
                buffer("rows without heads", &|b| (b.rows, b.heads) = (x, 0));
                buffer("dim", &|b| b.dim = x as u32);
                buffer("offset", &|b| b.offset = x & !255);
                buffer("dtype", &|b| b.dtype = Dtype::F16);
            }
            of("messages to", &|s| s.messages.iter_mut().for_each(|m| m.peer = x as usize));
            of("first sources", &|s| s.blocks.iter_mut().for_each(|b| b.sources_begin = x as u32));
            of("last sources", &|s| s.blocks.iter_mut().for_each(|b| b.sources_end = x as u32));
        }
        of("directions of messages", &|s| s.messages.iter_mut().for_each(|m: &mut MessageView| m.send ^= true));
        of("no messages", &|s| s.messages.clear());
        of("no blocks", &|s| s.blocks.clear());
        of("no sources", &|s| s.sources.clear());
        of("no buffers", &|s| s.buffers.clear());
        of("no operations", &|s| s.ops.clear());
        of("no ring steps", &|s| (s.keys, s.queries) = (None, None));
        of("ring steps of the other side", &|s| core::mem::swap(&mut s.keys, &mut s.queries));
        of("direction", &|s| s.purpose = Direction::Forward.into());
        for i in (0..s.schedules[rank].ops.len()).skip(n % 3).step_by(3) {
            for x in [0, 1, 2, u32::MAX] {
                of(&format!("op {i} after {x}"), &|s| s.ops[i].after = Some(x));
                of(&format!("op {i} number {x}"), &|s| numbers(&mut s.ops[i].kind, x));
                for part in [AttendPart::Keys, AttendPart::Queries, AttendPart::Finish] {
                    of(&format!("op {i} {part:?} {x}"), &|s| {
                        if let OpKind::Attend(a) = &mut s.ops[i].kind {
                            (a.part, a.ring_step) = (part, x);
                        }
                    });
                }
                for field in 0..3 {
                    of(&format!("op {i} heads {field} {x}"), &|s| {
                        if let OpKind::Attend(crate::schedule::AttendOp { heads, .. })
                        | OpKind::Backward(crate::schedule::BackwardOp { heads, .. }) = &mut s.ops[i].kind
                        {
                            let HeadMap { q_offset, kv_offset, group } = heads;
                            *[q_offset, kv_offset, group][field] = x;
                        }
                    });
                }
            }
            of(&format!("op {i} other lane"), &|s| {
                s.ops[i].lane = [Lane::Communication, Lane::Compute][s.ops[i].lane as usize];
            });
            of(&format!("op {i} other side"), &|s| match &mut s.ops[i].kind {
                OpKind::Backward(b) => b.side = opposite(b.side),
                kind => kind.step_rows().into_iter().for_each(|rows| rows.side = opposite(rows.side)),
            });
            of(&format!("op {i} no tensors"), &|s| {
                s.ops[i].kind.step_rows().into_iter().for_each(|rows: &mut StepRows| rows.tensors.clear());
            });
            of(&format!("op {i} tensors twice"), &|s| {
                s.ops[i].kind.step_rows().into_iter().for_each(|rows| rows.tensors.extend_from_within(..));
            });
            of(&format!("op {i} nothing optional"), &|s| match &mut s.ops[i].kind {
                OpKind::Attend(a) => (a.running, a.result) = (None, None),
                OpKind::Backward(b) => (b.dq, b.dkv) = (None, None),
                OpKind::Fetch { packed, .. } => packed.clear(),
                _ => {}
            });
            for gradients in [Gradients::All, Gradients::Queries, Gradients::Keys] {
                for (per_q_head, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
                    of(&format!("op {i} {gradients:?} {per_q_head} {accumulate}"), &|s| {
                        if let OpKind::Backward(b) = &mut s.ops[i].kind {
                            (b.gradients, b.per_q_head, b.accumulate_keys) = (gradients, per_q_head, accumulate);
                        }
                    });
                }
            }
        }
    }
    outcome.done(10_000);
}

/// Sets the first numbers of an operation that is not made of views.
fn numbers(kind: &mut OpKind, x: u32) {
    match kind {
        OpKind::Transform { begin, end } | OpKind::Exchange { begin, end } => (*begin, *end) = (x.min(*end), x),
        OpKind::Attend(a) => a.ring_step = x,
        OpKind::Backward(b) => b.ring_step = x,
        kind => kind.step_rows().into_iter().for_each(|rows| rows.ring_step = x),
    }
}

fn opposite(side: CirculatingSide) -> CirculatingSide {
    match side {
        CirculatingSide::Keys => CirculatingSide::Queries,
        CirculatingSide::Queries => CirculatingSide::Keys,
    }
}

/// Right schedules, of another plan with as many ranks.
#[test]
fn schedules_of_another_plan() {
    let (mut outcome, all) = (Outcome::default(), subjects());
    for s in &all {
        for other in all.iter().filter(|other| other.schedules.len() == s.schedules.len()) {
            for rank in 0..s.schedules.len() {
                outcome.of(s, rank, || other.name.clone(), |x| *x = other.schedules[rank].clone());
            }
        }
    }
    outcome.done(1_000);
}
