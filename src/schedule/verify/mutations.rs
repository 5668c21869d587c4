// SPDX-License-Identifier: MIT OR Apache-2.0
//! The verifier verified: right schedules are corrupted at every site that a kind of mistake can be made at, and each
//! time the proof must fail. A site where the change would make no difference is left out, with the reason.

use alloc::{collections::BTreeSet, format, string::String, vec, vec::Vec};

use super::{
    check_order,
    listed::{Work, list},
    prove,
};
use crate::{
    batch::Batch,
    element::Dtype,
    error::{Error, Result},
    kernel::Mode,
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{Circulate, Options, Plan, Problem, Wire},
    schedule::{Buf, Direction, Kind, Lane, MessageView, Schedule, View},
};

/// A group's right schedules, and the same written out.
struct Subject {
    name: String,
    plan: Plan,
    direction: Direction,
    schedules: Vec<Schedule>,
    listed: Vec<Vec<Work>>,
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
        ("ordered", &packed, mesh(2, 2), Layout::Striped { stripe: 1 }, Mask::causal(), 4, 2, Dtype::F32, {
            o().reproducible(true)
        }),
    ];
    let mut subjects = Vec::new();
    for (name, batch, mesh, layout, mask, heads, kv_heads, dtype, options) in cases {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype).mask(mask).sinks(true);
        let plan = Plan::with_options(&problem, mesh, layout, options).unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            let schedules: Vec<Schedule> = (0..mesh.group()).map(|r| plan.schedule(r, direction).unwrap()).collect();
            let listed = schedules.iter().map(|s| list(s).unwrap()).collect();
            subjects.push(Subject {
                name: format!("{name}, {direction:?}"),
                plan: plan.clone(),
                direction,
                schedules,
                listed,
            });
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
        self.judge(subject, super::verify(&schedules, &subject.plan), site);
    }

    /// Corrupts what was written out and proves anew.
    fn listed(&mut self, subject: &Subject, site: String, change: impl FnOnce(&mut Vec<Vec<Work>>)) {
        let mut listed = subject.listed.clone();
        change(&mut listed);
        self.judge(subject, prove(&subject.schedules, &listed, &subject.plan, subject.direction), site);
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
fn each_op(s: &Subject, mut each: impl FnMut(usize, usize, &Work)) {
    for (r, ops) in s.listed.iter().enumerate() {
        ops.iter().enumerate().for_each(|(i, w)| each(r, i, w));
    }
}

#[test]
fn right_schedules_are_proved() {
    for s in subjects() {
        s.schedules.iter().for_each(|x| check_order(x).unwrap());
        prove(&s.schedules, &s.listed, &s.plan, s.direction).unwrap();
    }
}

/// Removes an operation; who waited for it waits for the one before it in its lane.
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
fn races(x: &Schedule, work: &[Work], memory: &super::memory::Memory) -> bool {
    let n = x.ops.len();
    let mut before = vec![vec![false; n]; n];
    for i in 0..n {
        let previous = (0..i).rev().find(|&j| x.ops[j].lane == x.ops[i].lane);
        for j in previous.into_iter().chain(x.ops[i].after.map(|a| a as usize)) {
            before[i][j] = true;
            for k in 0..j {
                before[i][k] |= before[j][k];
            }
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
            let memory = super::memory::Memory::new(&x, &s.plan).unwrap();
            if races(&x, &s.listed[r], &memory) {
                t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |y| *y = x);
            } else {
                let mut schedules = s.schedules.clone();
                schedules[r] = x;
                super::verify(&schedules, &s.plan).unwrap();
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
            if !matches!(ops[i].kind, Kind::Transform { .. }) {
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
            let mut note = |v: &View| {
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
                Work::Attend(a, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                    [a.q, a.k, a.v, a.o, a.lse]
                        .iter()
                        .filter(|v| v.buf != a.o.buf || m.q.iter().any(|q| q.mode.finishes()))
                        .for_each(&mut note);
                }
                Work::Backward(b, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                    [b.q, b.k, b.v, b.d_o, b.lse, b.delta].iter().chain(&b.dq).for_each(&mut note);
                    b.dkv.iter().for_each(|(k, v)| {
                        note(k);
                        note(v);
                    });
                }
                Work::Exchange { messages, .. } => messages.iter().for_each(|m| note(&m.view)),
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
            if !matches!(w, Work::Attend(..) | Work::Backward(..)) {
                return;
            }
            for field in 0..3 {
                t.schedule(s, r, format!("rank {r} op {i} field {field}"), |x| {
                    let map = match &mut x.ops[i].kind {
                        Kind::Attend(a) => &mut a.heads,
                        Kind::Backward(b) => &mut b.heads,
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
fn modes_changed() {
    let mut t = Trial::new("mode");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let (Work::Attend(_, met) | Work::Backward(_, met)) = w else { return };
            // dk and dv alone know no mode.
            if matches!(w, Work::Backward(b, _) if b.dq.is_none()) {
                return;
            }
            for (n, q) in met.q.iter().enumerate() {
                for mode in [Mode::First, Mode::Merge, Mode::Last, Mode::Only] {
                    let backward = matches!(w, Work::Backward(..));
                    if mode == q.mode || (backward && mode.continues() == q.mode.continues()) {
                        continue;
                    }
                    t.listed(s, format!("rank {r} op {i} range {n} {:?} to {mode:?}", q.mode), |x| {
                        if let Work::Attend(_, m) | Work::Backward(_, m) = &mut x[r][i] {
                            m.q[n].mode = mode;
                        }
                    });
                }
            }
        });
    }
    t.done(200);
}

#[test]
fn ranges_and_pairs_changed() {
    let mut t = Trial::new("range");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let (Work::Attend(_, met) | Work::Backward(_, met)) = w else { return };
            let mut change = |site: String, change: &dyn Fn(&mut super::listed::Met)| {
                t.listed(s, format!("rank {r} op {i} {site}"), |x| {
                    if let Work::Attend(_, m) | Work::Backward(_, m) = &mut x[r][i] {
                        change(m);
                    }
                });
            };
            for n in 0..met.q.len() {
                change(format!("q {n} row"), &|m| m.q[n].range.row += 1);
                change(format!("q {n} pos"), &|m| m.q[n].range.pos += 1);
                change(format!("q {n} doc"), &|m| m.q[n].range.doc ^= 1);
                if met.keys(n).is_empty() {
                    continue;
                }
                let end = met.q[n].keys_end as usize;
                let mask = s.plan.problem().window();
                let last = met.q[n].range.last();
                let meets = met.keys(n).iter().any(|&k| {
                    let k = met.k[k as usize];
                    (0..k.len).any(|i| mask.allows(last, k.position(i)))
                });
                // In the backward a later visit may leave out a row that meets nothing.
                if meets || matches!(w, Work::Attend(..)) {
                    change(format!("q {n} len"), &|m| m.q[n].range.len -= 1);
                }
                change(format!("q {n} loses a pair"), &|m| m.q[n].keys_end -= 1);
                change(format!("q {n} repeats a pair"), &|m| {
                    let again = m.pairs[end - 1];
                    m.pairs.insert(end, again);
                    for (j, q) in m.q.iter_mut().enumerate() {
                        q.keys_begin += u32::from(q.keys_begin as usize >= end && j != n);
                        q.keys_end += u32::from(j == n || q.keys_end as usize > end);
                    }
                });
            }
            for n in 0..met.k.len() {
                change(format!("k {n} row"), &|m| m.k[n].row += 1);
                change(format!("k {n} pos"), &|m| m.k[n].pos += 1);
            }
        });
    }
    t.done(500);
}

/// The other end of a message: (rank, operation, index).
fn other_end(s: &Subject, r: usize, i: usize, n: usize) -> (usize, usize, usize) {
    let memories: Vec<_> = s.schedules.iter().map(|x| super::memory::Memory::new(x, &s.plan).unwrap()).collect();
    super::meet::partners(&s.schedules, &s.listed, &memories).unwrap()[r][i][n]
}

fn messages(listed: &mut [Vec<Work>], r: usize, i: usize) -> &mut Vec<MessageView> {
    match &mut listed[r][i] {
        Work::Exchange { messages, .. } => messages,
        _ => unreachable!("listed as an exchange"),
    }
}

#[test]
fn messages_changed() {
    let mut t = Trial::new("message");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let Work::Exchange { messages: list, .. } = w else { return };
            for (n, m) in list.iter().enumerate() {
                let site = |what| format!("rank {r} op {i} message {n} {what}");
                let (p, j, k) = other_end(s, r, i, n);
                t.listed(s, site("row"), |x| messages(x, r, i)[n].view.row += 1);
                t.listed(s, site("rows"), |x| messages(x, r, i)[n].view.rows -= 1);
                t.listed(s, site("dropped"), |x| _ = messages(x, r, i).remove(n));
                t.listed(s, site("to itself"), |x| messages(x, r, i)[n].peer = s.schedules[r].rank);
                t.listed(s, site("direction"), |x| messages(x, r, i)[n].send ^= true);
                if s.schedules.len() > 2 {
                    let third = (0..s.schedules.len()).find(|&x| x != r && x != p).unwrap_or(0);
                    t.listed(s, site("peer"), |x| messages(x, r, i)[n].peer = s.schedules[third].rank);
                }
                if m.send {
                    continue;
                }
                t.listed(s, site("rows at both ends"), |x| {
                    messages(x, r, i)[n].view.rows -= 1;
                    messages(x, p, j)[k].view.rows -= 1;
                });
                t.listed(s, site("repeated at both ends"), |x| {
                    let again = messages(x, r, i)[n];
                    messages(x, r, i).push(again);
                    let again = messages(x, p, j)[k];
                    messages(x, p, j).push(again);
                });
            }
            for n in 1..list.len() {
                let (a, b) = (list[n - 1], list[n]);
                if (a.peer, a.send) == (b.peer, b.send) {
                    t.listed(s, format!("rank {r} op {i} messages {n} and before swapped"), |x| {
                        messages(x, r, i).swap(n - 1, n);
                    });
                }
            }
        });
    }
    t.done(500);
}

/// A fetch that brings one row more than anybody needs, into room that is free.
#[test]
fn a_fetch_widened_at_both_ends() {
    let mut t = Trial::new("wider fetch");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let Work::Exchange { messages: list, strict: true } = w else { return };
            for (n, m) in list.iter().enumerate().filter(|(_, m)| !m.send) {
                let (p, j, k) = other_end(s, r, i, n);
                let Work::Exchange { messages: there, .. } = &s.listed[p][j] else { return };
                let sent = there[k].view;
                let rows = |x: &Schedule, v: &View| match v.buf {
                    Buf::Work(b) => x.buffers[b as usize].rows,
                    Buf::User(_) => v.row + v.rows,
                };
                let room = m.view.row + m.view.rows < rows(&s.schedules[r], &m.view);
                if !room || sent.row == 0 {
                    continue;
                }
                t.listed(s, format!("rank {r} op {i} message {n}"), |x| {
                    messages(x, r, i)[n].view.rows += 1;
                    let from = &mut messages(x, p, j)[k].view;
                    (from.row, from.rows) = (from.row - 1, from.rows + 1);
                });
            }
        });
    }
    t.done(10);
}

#[test]
fn blocks_changed() {
    let mut t = Trial::new("block");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let Work::Sums(parts) = w else { return };
            for (a, part) in parts.iter().enumerate() {
                for (b, sum) in part.iter().enumerate() {
                    let mut change = |what: &str, change: &dyn Fn(&mut super::listed::Sum)| {
                        t.listed(s, format!("rank {r} op {i} block {a}.{b} {what}"), |x| {
                            if let Work::Sums(parts) = &mut x[r][i] {
                                change(&mut parts[a][b]);
                            }
                        });
                    };
                    change("to another row", &|s| s.dst.row += 1);
                    change("to another head", &|s| s.dst.head += 1);
                    change("fewer rows", &|s| {
                        s.dst.rows -= 1;
                        s.sources.iter_mut().for_each(|v| v.rows -= 1);
                    });
                    for n in 0..sum.sources.len() {
                        change("from another row", &|s| s.sources[n].row += 1);
                        change("from another head", &|s| s.sources[n].head += 1);
                        change("a source dropped", &|s| _ = s.sources.remove(n));
                        change("a source repeated", &|s| s.sources.push(s.sources[n]));
                    }
                    if sum.sources.len() > 1 && s.name.starts_with("ordered") {
                        change("sources swapped", &|s| s.sources.swap(0, 1));
                    }
                }
            }
        });
    }
    t.done(300);
}

#[test]
fn backward_calls_changed() {
    use crate::kernel::Gradients;
    let mut t = Trial::new("backward call");
    for s in &subjects() {
        each_op(s, |r, i, w| {
            let Work::Backward(op, _) = w else { return };
            let mut change = |what: &str, change: &dyn Fn(&mut crate::schedule::BackwardOp)| {
                t.listed(s, format!("rank {r} op {i} {what}"), |x| {
                    if let Work::Backward(b, _) = &mut x[r][i] {
                        change(b);
                    }
                });
            };
            if op.gradients != Gradients::Queries {
                change("accumulate", &|b| b.accumulate_keys ^= true);
                change("dk for dv", &|b| b.dkv = b.dkv.map(|(k, v)| (v, k)));
                change("dkv nowhere", &|b| b.dkv = None);
            }
            if op.gradients != Gradients::Keys {
                change("dq nowhere", &|b| b.dq = None);
            }
            if op.gradients == Gradients::All {
                change("queries only", &|b| b.gradients = Gradients::Queries);
                change("keys only", &|b| b.gradients = Gradients::Keys);
            }
            change("k for v", &|b| (b.k, b.v) = (b.v, b.k));
            change("q for do", &|b| (b.q, b.d_o) = (b.d_o, b.q));
            change("lse for delta", &|b| (b.lse, b.delta) = (b.delta, b.lse));
        });
    }
    t.done(200);
}

#[test]
fn groups_that_are_not_whole_are_refused() {
    let all = subjects();
    let s = &all[0];
    for schedules in [vec![], s.schedules[1..].to_vec(), s.schedules.iter().rev().cloned().collect::<Vec<_>>()] {
        assert!(matches!(super::verify(&schedules, &s.plan), Err(Error::Invalid { .. })));
    }
    let mut mixed = s.schedules.clone();
    mixed[1] = s.plan.schedule(1, Direction::Backward).unwrap();
    assert!(matches!(super::verify(&mixed, &s.plan), Err(Error::Invalid { .. })));
}
