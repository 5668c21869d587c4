// SPDX-License-Identifier: MIT OR Apache-2.0
//! The verifier verified: right schedules are corrupted at every site that a kind of mistake can be made at, and each
//! time the proof must fail. A site where the change would make no difference is left out, with the reason.

use alloc::{collections::BTreeSet, format, string::String, vec, vec::Vec};

use super::{
    Promise, check_order, list_and_prove,
    listed::{ListedOp, list},
    prove,
};
use crate::{
    batch::{Batch, Side},
    call::Mode,
    element::Dtype,
    error::{Error, Result},
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{Circulate, Gather, Options, Plan, Problem, Wire},
    schedule::{AllToAll, Buf, BufferView, Direction, Lane, OpKind, Schedule, Way},
};

mod written_out;

/// A group's right schedules, and the same written out.
struct Subject {
    name: String,
    plan: Plan,
    promise: Promise,
    schedules: Vec<Schedule>,
    listed: Vec<Vec<ListedOp>>,
}

fn subjects() -> Vec<Subject> {
    let o = Options::new;
    let mesh = |ulysses, ring| Mesh { replicas: 1, ring, ulysses };
    let packed = Batch::from_lengths(&[5, 0, 9, 3]).unwrap();
    let crossed = Batch::cross(&[0, 6, 13], &[0, 4, 14], Some(&[-2, 3])).unwrap();
    let cases = [
        ("ring", &packed, mesh(1, 3), Layout::Contiguous, Mask::full(), 2, 1, Dtype::F32, o()),
        (
            "zigzag",
            &packed,
            mesh(1, 3),
            Layout::Zigzag,
            Mask::causal(),
            2,
            2,
            Dtype::Bf16,
            o().circulate(Circulate::Keys),
        ),
        ("window", &packed, mesh(1, 4), Layout::Contiguous, Mask::window(2, 0), 2, 1, Dtype::Bf16, o().passes(1)),
        ("queries", &packed, mesh(1, 3), Layout::Striped { stripe: 2 }, Mask::causal(), 2, 2, Dtype::Bf16, {
            o().circulate(Circulate::Queries).wire(Wire::Bf16).pack_inputs(true)
        }),
        ("hybrid", &crossed, mesh(2, 2), Layout::ZigzagPack, Mask::causal(), 4, 2, Dtype::Bf16, o().passes(2)),
        (
            "uneven heads",
            &packed,
            mesh(4, 1),
            Layout::Contiguous,
            Mask::full(),
            9,
            3,
            Dtype::Bf16,
            o().wire(Wire::Bf16),
        ),
        (
            "gather",
            &packed,
            mesh(1, 3),
            Layout::Balanced { chunks: 2 },
            Mask::causal(),
            2,
            1,
            Dtype::F32,
            o().gather(true),
        ),
        ("together", &packed, mesh(1, 3), Layout::Zigzag, Mask::causal(), 2, 1, Dtype::Bf16, {
            o().gather(Gather::Together)
        }),
        ("ordered", &packed, mesh(2, 2), Layout::Striped { stripe: 1 }, Mask::causal(), 4, 2, Dtype::F32, {
            o().reproducible(true)
        }),
    ];
    let mut subjects = Vec::new();
    for (name, batch, mesh, layout, mask, heads, kv_heads, dtype, options) in cases {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype).with_mask(mask).with_sinks(true);
        let plan = Plan::with_options(&problem, mesh, layout, options).unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            let schedules: Vec<Schedule> =
                (0..mesh.group()).map(|r| Schedule::new(&plan, r, direction).unwrap()).collect();
            let listed = schedules.iter().map(|s| list(s).unwrap()).collect();
            subjects.push(Subject {
                name: format!("{name}, {direction:?}"),
                plan: plan.clone(),
                promise: Promise::Attention(direction),
                schedules,
                listed,
            });
        }
    }
    subjects.extend(all_to_alls());
    subjects
}

/// Both ways of both sides, with kv heads that several ranks hold, with uneven heads, and beside a ring.
fn all_to_alls() -> Vec<Subject> {
    let batch = Batch::cross(&[0, 6, 6, 13], &[0, 4, 5, 14], Some(&[-2, 0, 3])).unwrap();
    let mut subjects = Vec::new();
    for (mesh, heads, kv_heads) in [
        (Mesh { replicas: 1, ring: 1, ulysses: 4 }, 9, 3),
        (Mesh { replicas: 1, ring: 2, ulysses: 2 }, 4, 1),
        (Mesh { replicas: 1, ring: 1, ulysses: 3 }, 7, 7),
    ] {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, Dtype::F32);
        let plan = Plan::new(&problem, mesh, Layout::Contiguous).unwrap();
        for way in [Way::ToHeads, Way::ToTokens] {
            for (side, dtype) in [(Side::Q, Dtype::Bf16), (Side::K, Dtype::F32)] {
                let all_to_all = AllToAll { way, side, dim: 5, dtype };
                let schedules: Vec<Schedule> =
                    (0..mesh.group()).map(|r| Schedule::all_to_all(&plan, r, all_to_all).unwrap()).collect();
                let listed = schedules.iter().map(|s| list(s).unwrap()).collect();
                subjects.push(Subject {
                    name: format!("{all_to_all:?} over {mesh:?}"),
                    plan: plan.clone(),
                    promise: Promise::AllToAll(all_to_all),
                    schedules,
                    listed,
                });
            }
        }
    }
    subjects
}

/// What became of a kind of corruption.
struct Trial {
    kind: &'static str,
    caught: usize,
    missed: Vec<String>,
}

impl Trial {
    fn new(kind: &'static str) -> Self {
        Self { kind, caught: 0, missed: Vec::new() }
    }

    fn judge(&mut self, subject: &Subject, result: Result<super::Report>, site: String) {
        match result {
            Err(Error::Schedule { .. }) => self.caught += 1,
            other => self.missed.push(format!("{}: {site}: {:?}", subject.name, other.map(|r| r.pairs))),
        }
    }

    /// Corrupts one rank's schedule and proves anew.
    fn schedule(&mut self, subject: &Subject, rank: usize, site: String, change: impl FnOnce(&mut Schedule)) {
        let mut schedules = subject.schedules.clone();
        change(&mut schedules[rank]);
        self.judge(subject, list_and_prove(&schedules, &subject.plan, subject.promise), site);
    }

    /// Corrupts what was written out and proves anew.
    fn listed(&mut self, subject: &Subject, site: String, change: impl FnOnce(&mut Vec<Vec<ListedOp>>)) {
        let mut listed = subject.listed.clone();
        change(&mut listed);
        self.judge(subject, prove(&subject.schedules, &listed, &subject.plan, subject.promise), site);
    }

    fn done(self, at_least: usize) {
        assert!(
            self.missed.is_empty(),
            "{}: {} missed of {}, first {:#?}",
            self.kind,
            self.missed.len(),
            self.caught + self.missed.len(),
            &self.missed[..self.missed.len().min(12)]
        );
        assert!(self.caught >= at_least, "{}: only {} sites", self.kind, self.caught);
    }
}

/// Calls `each(rank, operation, its list)` for every operation of a subject.
fn each_op(s: &Subject, mut each: impl FnMut(usize, usize, &ListedOp)) {
    for (r, ops) in s.listed.iter().enumerate() {
        ops.iter().enumerate().for_each(|(i, w)| each(r, i, w));
    }
}

#[test]
fn right_schedules_are_proved() {
    for s in subjects() {
        s.schedules.iter().for_each(|x| check_order(x).unwrap());
        prove(&s.schedules, &s.listed, &s.plan, s.promise).unwrap();
    }
}

/// Removes an operation; what waited for it waits for the one before it in its lane.
fn remove(s: &mut Schedule, i: usize) {
    let lane = s.ops[i].lane;
    let before = (0..i).rev().find(|&j| s.ops[j].lane == lane).map(|j| j as u32);
    s.ops.remove(i);
    for op in &mut s.ops {
        op.after = match op.after {
            Some(a) if a as usize == i => before,
            Some(a) if a as usize > i => Some(a - 1),
            a => a,
        };
    }
}

#[test]
fn a_dropped_operation() {
    let mut t = Trial::new("dropped operation");
    for s in &subjects() {
        each_op(s, |r, i, w| t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |x| remove(x, i)));
    }
    t.done(200);
}

#[test]
fn a_repeated_operation() {
    let mut t = Trial::new("repeated operation");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |x| {
                let copy = x.ops[i].clone();
                x.ops.insert(i + 1, copy);
                for op in &mut x.ops[i + 2..] {
                    op.after = op.after.map(|a| if a as usize >= i { a + 1 } else { a });
                }
            });
        });
    }
    t.done(200);
}

/// Whether two operations of a rank race, found the slow way: every byte, and every path of the graph of dependencies.
fn races(x: &Schedule, work: &[ListedOp], memory: &super::memory::Memory) -> bool {
    let n = x.ops.len();
    let mut before = vec![vec![false; n]; n];
    for i in 0..n {
        let previous = (0..i).rev().find(|&j| x.ops[j].lane == x.ops[i].lane);
        for j in previous.into_iter().chain(x.ops[i].after.map(|a| a as usize)) {
            let known = before[j].clone();
            before[i].iter_mut().zip(known).for_each(|(x, y)| *x |= y);
            before[i][j] = true;
        }
    }
    let bytes = |rects: &[super::memory::Rect]| -> BTreeSet<(usize, u64)> {
        let mut set = BTreeSet::new();
        for r in rects {
            for row in r.row..r.row + r.rows {
                for head in r.head..r.head + r.heads {
                    memory.bytes_of(r.table, row, head, |space, byte| {
                        set.insert((space, byte));
                    });
                }
            }
        }
        set
    };
    let touched: Vec<_> = work
        .iter()
        .map(|w| {
            let t = super::races::touched(w, memory);
            (bytes(&t.reads), bytes(&t.writes))
        })
        .collect();
    (0..n).any(|i| {
        (0..i).any(|j| {
            let ((r, w), (s, v)) = (&touched[i], &touched[j]);
            !before[i][j] && (!w.is_disjoint(v) || !w.is_disjoint(s) || !r.is_disjoint(v))
        })
    })
}

/// A dependency that others imply, or that protects nothing, may go: an independent search for races says which.
#[test]
fn a_dropped_dependency() {
    let mut t = Trial::new("dropped dependency");
    let mut harmless = 0;
    for s in &subjects() {
        each_op(s, |r, i, w| {
            if s.schedules[r].ops[i].after.is_none() {
                return;
            }
            let mut x = s.schedules[r].clone();
            x.ops[i].after = None;
            let memory = super::memory::Memory::new(&x, super::promise::tables(&x, &s.plan, s.promise)).unwrap();
            if races(&x, &s.listed[r], &memory) {
                t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |y| *y = x);
            } else {
                let mut schedules = s.schedules.clone();
                schedules[r] = x;
                list_and_prove(&schedules, &s.plan, s.promise).unwrap();
                harmless += 1;
            }
        });
    }
    assert!(harmless > 0);
    t.done(200);
}

#[test]
fn dependencies_and_lanes_out_of_order() {
    let mut t = Trial::new("dependency out of order");
    for s in &subjects() {
        each_op(s, |r, i, _| {
            let ops = &s.schedules[r].ops;
            t.schedule(s, r, format!("rank {r} op {i} on itself"), |x| x.ops[i].after = Some(i as u32));
            if let Some(j) = (0..i).find(|&j| ops[j].lane == ops[i].lane) {
                t.schedule(s, r, format!("rank {r} op {i} on its lane"), |x| x.ops[i].after = Some(j as u32));
            }
            if !matches!(ops[i].kind, OpKind::Transform { .. }) {
                t.schedule(s, r, format!("rank {r} op {i} lane"), |x| {
                    let other = if x.ops[i].lane == Lane::Compute { Lane::Communication } else { Lane::Compute };
                    x.ops[i].lane = other;
                });
            }
        });
    }
    t.done(300);
}

#[test]
fn exchanges_swapped_on_one_rank() {
    let mut t = Trial::new("swapped exchanges");
    for s in subjects().iter().filter(|s| s.name.starts_with("ring,")) {
        for (r, x) in s.schedules.iter().enumerate() {
            let meet: Vec<usize> = (0..x.ops.len()).filter(|&i| x.ops[i].kind.is_exchange()).collect();
            for w in meet.windows(2) {
                t.schedule(s, r, format!("rank {r} ops {w:?}"), |x| {
                    let (a, b) = (x.ops[w[0]].clone(), x.ops[w[1]].clone());
                    (x.ops[w[0]].kind, x.ops[w[1]].kind) = (b.kind, a.kind);
                });
            }
        }
    }
    t.done(9);
}

#[test]
fn buffers_that_share_bytes_with_what_one_operation_needs() {
    let mut t = Trial::new("aliased buffers");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let mut used: Vec<u16> = Vec::new();
            let mut note = |v: &BufferView| {
                if let Buf::Work(b) = v.buf
                    && s.schedules[r].buffers[b as usize].bytes() > 0
                    // The own rows of this one are never used, so another may lie over them.
                    && s.schedules[r].buffers[b as usize].name != "narrowed to travel"
                    && v.rows > 0
                    && !used.contains(&b)
                {
                    used.push(b);
                }
            };
            match w {
                // Ranges may miss every row of a view: then the call touches none of it.
                ListedOp::Attend(a, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                    [a.q, a.k, a.v].iter().for_each(&mut note);
                    // Of a result that only some rows have, others may lie over the rest.
                    let all_rows = |has: fn(Mode) -> bool| {
                        let rows = m.q.iter().filter(|q| has(q.mode)).map(|q| u64::from(q.range.len));
                        rows.sum::<u64>() == a.q.rows
                    };
                    if all_rows(Mode::finishes) {
                        [a.o, a.lse].iter().for_each(&mut note);
                    }
                    if let Some((o, lse)) = a.running.filter(|_| all_rows(|mode| mode != Mode::Only)) {
                        [o, lse].iter().for_each(&mut note);
                    }
                }
                ListedOp::Backward(b, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                    [b.q, b.k, b.v, b.d_o, b.lse, b.delta].iter().chain(&b.dq).for_each(&mut note);
                    b.dkv.iter().for_each(|(k, v)| {
                        note(k);
                        note(v);
                    });
                }
                ListedOp::Exchange { messages, .. } => messages.iter().for_each(|m| note(&m.view)),
                _ => {}
            }
            for (n, &a) in used.iter().enumerate() {
                for &b in &used[n + 1..] {
                    t.schedule(s, r, format!("rank {r} op {i} buffers {a} {b}"), |x| {
                        x.buffers[b as usize].offset = x.buffers[a as usize].offset;
                        x.workspace *= 2;
                    });
                }
            }
        });
    }
    t.done(200);
}

#[test]
fn a_workspace_too_small_or_misaligned() {
    let mut t = Trial::new("workspace");
    for s in &subjects() {
        for (r, x) in s.schedules.iter().enumerate().filter(|(_, x)| x.workspace > 0) {
            t.schedule(s, r, format!("rank {r}"), |x| x.workspace -= super::super::ALIGNMENT);
            for b in 0..x.buffers.len() {
                t.schedule(s, r, format!("rank {r} buffer {b}"), |x| {
                    x.buffers[b].offset += 8;
                    x.workspace += 8;
                });
            }
        }
    }
    t.done(100);
}

#[test]
fn heads_mapped_wrong() {
    let mut t = Trial::new("head map");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            if !matches!(w, ListedOp::Attend(..) | ListedOp::Backward(..)) {
                return;
            }
            for field in 0..3 {
                t.schedule(s, r, format!("rank {r} op {i} field {field}"), |x| {
                    let map = match &mut x.ops[i].kind {
                        OpKind::Attend(a) => &mut a.heads,
                        OpKind::Backward(b) => &mut b.heads,
                        _ => unreachable!("listed as a kernel"),
                    };
                    *[&mut map.q_offset, &mut map.kv_offset, &mut map.group][field] += 1;
                });
            }
        });
    }
    t.done(150);
}

#[test]
fn groups_that_are_not_whole_are_refused() {
    let all = subjects();
    let s = &all[0];
    for schedules in [vec![], s.schedules[1..].to_vec(), s.schedules.iter().rev().cloned().collect::<Vec<_>>()] {
        assert!(matches!(super::verify(&schedules, &s.plan), Err(Error::Invalid { .. })));
    }
    let mut mixed = s.schedules.clone();
    mixed[1] = Schedule::new(&s.plan, 1, Direction::Backward).unwrap();
    assert!(matches!(super::verify(&mixed, &s.plan), Err(Error::Invalid { .. })));
}
