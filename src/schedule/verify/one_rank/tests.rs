// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check accepts every schedule that planning makes, and refuses each slice that is moved out of its place.

use std::{println, time::Instant, vec::Vec};

use super::*;
use crate::{
    batch::{Batch, Side},
    element::Dtype,
    error::Error,
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{AttentionKind, Circulate, Gather, Options, Plan, Problem, Wire},
    schedule::{AllToAll, AllToAllDirection, AttendOp, Direction, Purpose},
};

fn checked(plan: &Plan, run: Purpose, schedule: &Schedule, expansion: &mut Expansion) -> Result<()> {
    check(schedule, &TensorId::ALL.map(|t| run.form(plan, schedule.rank, t)), expansion)
}

struct Case {
    plan: Plan,
    run: Purpose,
    schedule: Schedule,
}

impl Case {
    fn check(&self) -> Result<()> {
        checked(&self.plan, self.run, &self.schedule, &mut Expansion::new(&self.schedule))
    }

    /// Checks that one change is refused, with an error that names an operation.
    fn refused(&mut self, what: &str, change: impl FnOnce(&mut Schedule)) {
        let whole = self.schedule.clone();
        change(&mut self.schedule);
        let outcome = self.check();
        assert!(matches!(outcome, Err(Error::Schedule { .. })), "{what} of {:?} passed", self.run);
        self.schedule = whole;
    }
}

fn plans() -> Vec<Plan> {
    let batch = Batch::from_lengths(&[11, 0, 6, 14]).unwrap();
    let cross = Batch::cross(&[0, 6, 13, 20], &[0, 9, 14, 15], None).unwrap();
    let o = Options::new;
    let mut plans = Vec::new();
    for (batch, mask) in [(&batch, Mask::causal()), (&batch, Mask::sliding(4)), (&cross, Mask::full())] {
        for (ulysses, ring) in [(1, 1), (3, 1), (1, 4), (2, 3)] {
            for layout in [
                Layout::Contiguous,
                Layout::Zigzag,
                Layout::ZigzagPack,
                Layout::Striped { stripe: 1 },
                Layout::Balanced { chunks: 3 },
            ] {
                for options in [
                    o().circulate(Circulate::Keys),
                    o().circulate(Circulate::Queries).wire(Wire::Bf16),
                    o().circulate_forward(Circulate::Queries),
                    o().gather(true),
                    o().gather(Gather::Together).circulate(Circulate::Keys),
                    o().passes(2).pack_inputs(true),
                    o().reproducible(true),
                ] {
                    let p = Problem::new(batch.clone(), 6, 2, 4, Dtype::Bf16).with_mask(mask).with_sinks(ring == 3);
                    let mesh = Mesh { replicas: 1, ring, ulysses };
                    plans.extend(Plan::builder(&p).mesh(mesh).layout(layout).options(options).build());
                }
            }
        }
    }
    plans
}

fn cases(plans: &[Plan]) -> Vec<Case> {
    let mut cases = Vec::new();
    for plan in plans {
        for rank in 0..plan.mesh().world() {
            for direction in [Direction::Forward, Direction::Backward] {
                let schedule = Schedule::new(plan, rank, direction).unwrap();
                cases.push(Case { plan: plan.clone(), run: Purpose::Attention(direction), schedule });
            }
        }
    }
    let p = Problem::new(Batch::from_lengths(&[5, 9]).unwrap(), 5, 5, 4, Dtype::F32).with_kind(AttentionKind::Other);
    let plan = Plan::new(&p, Mesh::ulysses(3).unwrap(), Layout::Contiguous).unwrap();
    for (rank, way, side) in [
        (0, AllToAllDirection::ToHeads, Side::Q),
        (1, AllToAllDirection::ToTokens, Side::Q),
        (2, AllToAllDirection::ToHeads, Side::K),
        (1, AllToAllDirection::ToTokens, Side::K),
    ] {
        let a = AllToAll { direction: way, side, dim: 7, dtype: Dtype::F32 };
        let schedule = Schedule::all_to_all(&plan, rank, a).unwrap();
        cases.push(Case { plan: plan.clone(), run: Purpose::AllToAll(a), schedule });
    }
    cases
}

#[test]
fn every_schedule_of_planning_passes() {
    let plans = plans();
    assert!(plans.len() > 200, "{}", plans.len());
    for case in cases(&plans) {
        case.check().unwrap_or_else(|e| panic!("{:?} of {:?}: {e}", case.run, case.plan.options()));
    }
}

/// Calls `each` with every slice that an operation names by itself.
fn slices(kind: &mut OpKind, mut each: impl FnMut(usize, &mut BufferView)) {
    let views: Vec<&mut BufferView> = match kind {
        OpKind::Delta { delta } => vec![delta],
        OpKind::SinkGradient { delta, partial } => vec![delta, partial],
        OpKind::SinkTotal { digits } => vec![digits],
        OpKind::Transform { .. } | OpKind::Compose { .. } | OpKind::Exchange { .. } => Vec::new(),
        OpKind::Combine { o, lse, .. } => vec![&mut o.dst, &mut lse.dst],
        OpKind::Pack(rows) | OpKind::Return(rows) | OpKind::Reduce(rows) | OpKind::Merge(rows) => {
            rows.tensors.iter_mut().flat_map(|c| [&mut c.own, &mut c.slot]).collect()
        }
        OpKind::Fetch { rows, packed } => {
            rows.tensors.iter_mut().flat_map(|c| [&mut c.own, &mut c.slot]).chain(packed).collect()
        }
        OpKind::Attend(a) => {
            let results = a.result.iter_mut().chain(&mut a.running).flat_map(|(o, lse)| [o, lse]);
            [&mut a.q, &mut a.k, &mut a.v].into_iter().chain(results).collect()
        }
        OpKind::Backward(b) => {
            let keys = b.dkv.iter_mut().flat_map(|(dk, dv)| [dk, dv]);
            [&mut b.q, &mut b.k, &mut b.v, &mut b.d_o, &mut b.lse, &mut b.delta]
                .into_iter()
                .chain(b.dq.iter_mut())
                .chain(keys)
                .collect()
        }
    };
    views.into_iter().enumerate().for_each(|(i, v)| each(i, v));
}

/// A change that makes any slice invalid.
type Wrong = fn(&mut BufferView);

#[test]
fn each_wrong_slice_is_refused() {
    let plans: Vec<Plan> = plans().into_iter().step_by(7).collect();
    let mut changed = 0;
    for case in &mut cases(&plans).into_iter().step_by(3).collect::<Vec<_>>() {
        let wrongs: [(&str, Wrong); 4] = [
            ("rows beyond the end", |v| v.rows += 1 << 40),
            ("a first row beyond the end", |v| v.row = u64::MAX),
            ("a head too many", |v| v.heads += 64),
            ("another buffer", |v| v.buf = Buf::Work(60_000)),
        ];
        for op in 0..case.schedule.ops.len() {
            let mut n = 0;
            slices(&mut case.schedule.ops[op].kind.clone(), |_, _| n += 1);
            for at in 0..n {
                for (what, wrong) in wrongs {
                    case.refused(what, |s| {
                        slices(&mut s.ops[op].kind, |i, v| {
                            if i == at {
                                wrong(v)
                            }
                        })
                    });
                    changed += 1;
                }
            }
        }
        for b in 0..case.schedule.blocks.len() {
            for (what, wrong) in wrongs {
                case.refused(what, |s| wrong(&mut s.blocks[b].dst));
            }
            case.refused("sources that are none", |s| s.blocks[b].sources_end = u32::MAX);
        }
        for b in 0..case.schedule.sources.len() {
            for (what, wrong) in wrongs {
                case.refused(what, |s| wrong(&mut s.sources[b]));
            }
        }
        for m in 0..case.schedule.messages.len() {
            for (what, wrong) in wrongs {
                case.refused(what, |s| wrong(&mut s.messages[m].view));
            }
            case.refused("no rows", |s| s.messages[m].view.rows = 0);
            case.refused("itself", |s| s.messages[m].peer = s.rank);
            case.refused("another group", |s| s.messages[m].peer = s.group.end);
            if let Purpose::Attention(_) = case.run {
                case.refused("an input that arrives", |s| {
                    s.messages[m].view.buf = Buf::User(TensorId::K);
                    s.messages[m].send = false;
                });
            }
            changed += 4;
        }
        for b in 0..case.schedule.buffers.len() {
            if case.schedule.buffers[b].bytes() > 0 {
                case.refused("a buffer behind the workspace", |s| s.buffers[b].offset = s.workspace);
                case.refused("a workspace too small", |s| s.workspace = s.buffers[b].bytes() - 1);
            }
            case.refused("an offset between alignments", |s| s.buffers[b].offset += 8);
        }
    }
    assert!(changed > 3000, "{changed}");
}

/// A kernel writes o while it still reads q, k and v, so o is none of them, also not where their shapes agree.
#[test]
fn an_attention_that_writes_what_it_reads_is_refused() {
    let mut changed = 0;
    for case in &mut cases(&plans().into_iter().step_by(3).collect::<Vec<_>>()) {
        for op in 0..case.schedule.ops.len() {
            let OpKind::Attend(AttendOp { result, running, .. }) = case.schedule.ops[op].kind else { continue };
            let written = result.into_iter().chain(running).map(|(o, _)| o).filter(|o| o.rows > 0 && o.heads > 0);
            for (written, read) in written.flat_map(|o| (0..3).map(move |read| (o, read))) {
                case.refused("an operand that is the result", |s| {
                    let OpKind::Attend(a) = &mut s.ops[op].kind else { unreachable!("it is one") };
                    *[&mut a.q, &mut a.k, &mut a.v][read] = written;
                });
                changed += 1;
            }
        }
    }
    assert!(changed > 1000, "{changed}");
}

/// If the waits between lanes are removed, a schedule has operations that conflict and may run at the same time.
#[test]
fn a_missing_wait_is_refused() {
    let mut found = [0; 2];
    for case in &mut cases(&plans().into_iter().step_by(5).collect::<Vec<_>>()) {
        for op in 0..case.schedule.ops.len() {
            if case.schedule.ops[op].after.is_none() {
                continue;
            }
            let mut without = case.schedule.clone();
            without.ops[op].after = None;
            let outcome = checked(&case.plan, case.run, &without, &mut Expansion::new(&without));
            found[usize::from(outcome.is_err())] += 1;
        }
    }
    // Some waits are implied by others, or do not protect any byte.
    assert!(found[1] > 2 * found[0] && found[1] > 500, "{found:?}");
}

/// What it costs: `cargo test --release --lib one_rank -- --nocapture`.
#[test]
fn the_cost_on_big_plans() {
    let lengths: Vec<usize> = (0..300).map(|i| 700 + i * 37 % 900).collect();
    let p = Problem::new(Batch::from_lengths(&lengths).unwrap(), 32, 8, 128, Dtype::Bf16);
    for (mesh, layout) in [
        (Mesh::ring(64).unwrap(), Layout::Zigzag),
        (Mesh { replicas: 1, ring: 8, ulysses: 8 }, Layout::Zigzag),
        (Mesh::ring(64).unwrap(), Layout::Striped { stripe: 64 }),
    ] {
        let plan = Plan::new(&p, mesh, layout).unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            let start = Instant::now();
            let schedule = Schedule::new(&plan, 5, direction).unwrap();
            let mut expansion = Expansion::new(&schedule);
            let written = start.elapsed();
            checked(&plan, Purpose::Attention(direction), &schedule, &mut expansion).unwrap();
            let proved = start.elapsed() - written;
            println!(
                "{mesh}, {layout}, {direction:?}: {} ops, written in {written:?}, proved in {proved:?}",
                schedule.ops.len()
            );
        }
    }
}
