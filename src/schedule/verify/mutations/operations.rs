// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutants of operations: dropped, repeated and reordered operations, lost dependencies, buffers, workspaces, heads and
//! tiles other than the plan's, and incomplete groups. Mutants of the arguments of operations are in `written_out`.

use super::*;

/// Removes an operation; operations that waited for it then wait for the one before it in its lane.
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
    mutate("dropped operation", 200, |t, s, r, i, w| {
        t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |x| remove(x, i))
    });
}

#[test]
fn a_repeated_operation() {
    mutate("repeated operation", 200, |t, s, r, i, w| {
        t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |x| {
            let copy = x.ops[i].clone();
            x.ops.insert(i + 1, copy);
            for op in &mut x.ops[i + 2..] {
                op.after = op.after.map(|a| if a as usize >= i { a + 1 } else { a });
            }
        });
    });
}

/// Whether two operations of a rank race, found the slow way: every byte, and every path of the graph of dependencies.
fn races(x: &Schedule, plan: &Plan, purpose: Purpose) -> bool {
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
    let tensors = TensorId::ALL.map(|tensor| promise::form(tensor, x, plan, purpose));
    let check = ScheduleCheck::new(x, &tensors).unwrap();
    let touched: Vec<_> = check.operations(&mut Expansion::new(x)).unwrap().iter().map(|t| check.bytes_of(t)).collect();
    (0..n).any(|i| {
        (0..i).any(|j| {
            let ([r, w], [s, v]) = (&touched[i], &touched[j]);
            !before[i][j] && (!w.is_disjoint(v) || !w.is_disjoint(s) || !r.is_disjoint(v))
        })
    })
}

/// A dependency that others imply, or that protects nothing, may be removed: an independent search for races finds
/// these.
#[test]
fn a_dropped_dependency() {
    let mut harmless = 0;
    mutate("dropped dependency", 200, |t, s, r, i, w| {
        if s.schedules[r].ops[i].after.is_none() {
            return;
        }
        let mut x = s.schedules[r].clone();
        x.ops[i].after = None;
        if races(&x, &s.plan, s.purpose) {
            t.schedule(s, r, format!("rank {r} op {i} {w:?}"), |y| *y = x);
        } else {
            let mut schedules = s.schedules.clone();
            schedules[r] = x;
            s.plan.verify_schedules(&schedules).unwrap();
            harmless += 1;
        }
    });
    assert!(harmless > 0);
}

#[test]
fn dependencies_and_lanes_out_of_order() {
    mutate("dependency out of order", 300, |t, s, r, i, _| {
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

/// Whether messages of two buffers would overlap if the buffers began at the same byte. Other operations access whole
/// views.
fn share_rows(work: &ExpandedOp, a: u16, b: u16) -> bool {
    let ExpandedOp::Exchange { messages, .. } = work else { return true };
    let of = |buffer| messages.iter().map(|m| m.view).filter(move |v| v.buf == Buf::Work(buffer));
    of(a).any(|v| of(b).any(|w| v.row < w.row + w.rows && w.row < v.row + v.rows))
}

#[test]
fn buffers_that_share_bytes_with_what_one_operation_needs() {
    mutate("aliased buffers", 200, |t, s, r, i, w| {
        let mut used: Vec<u16> = Vec::new();
        let mut note = |v: &BufferView| {
            if let Buf::Work(b) = v.buf
                    && s.schedules[r].buffers[b as usize].bytes() > 0
                    // The own rows in this buffer are never used, so another buffer may share their bytes.
                    && s.schedules[r].buffers[b as usize].name != "narrowed to travel"
                    && v.rows > 0
                    && !used.contains(&b)
            {
                used.push(b);
            }
        };
        match w {
            // Ranges may miss every row of a view: then the call touches none of it.
            ExpandedOp::Attend(a, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                [a.q, a.k, a.v].iter().for_each(&mut note);
                // If only some rows have a result, other buffers may share the bytes of the rest.
                let all_rows = |has: fn(Mode) -> bool| {
                    let rows = m.q.iter().filter(|q| has(q.mode)).map(|q| u64::from(q.range.len));
                    rows.sum::<u64>() == a.q.rows
                };
                if all_rows(Mode::finishes) {
                    a.result.iter().flat_map(|(o, lse)| [o, lse]).for_each(&mut note);
                }
                if let Some((o, lse)) = a.running.filter(|_| all_rows(|mode| mode != Mode::Only)) {
                    [o, lse].iter().for_each(&mut note);
                }
            }
            ExpandedOp::Backward(b, m) if m.q.iter().any(|q| q.keys_begin < q.keys_end) => {
                [b.q, b.k, b.v, b.d_o, b.lse, b.delta].iter().chain(&b.dq).for_each(&mut note);
                b.dkv.iter().for_each(|(k, v)| {
                    note(k);
                    note(v);
                });
            }
            ExpandedOp::Exchange { messages, .. } => messages.iter().for_each(|m| note(&m.view)),
            _ => {}
        }
        for (n, &a) in used.iter().enumerate() {
            for &b in &used[n + 1..] {
                if !share_rows(w, a, b) {
                    continue;
                }
                t.schedule(s, r, format!("rank {r} op {i} buffers {a} {b}"), |x| {
                    x.buffers[b as usize].offset = x.buffers[a as usize].offset;
                    x.workspace *= 2;
                });
            }
        }
    });
}

/// The result of an attention is placed in an operand's buffer everywhere: every row still reaches its place, but the
/// kernel overwrites its input.
#[test]
fn a_result_in_the_place_of_an_operand() {
    mutate("result in the place of an operand", 10, |t, s, r, i, w| {
        let ExpandedOp::Attend(a, _) = w else { return };
        let Some((BufferView { buf: Buf::Work(result), rows, .. }, _)) = a.result else { return };
        let form = |i: u16| {
            let b = &s.schedules[r].buffers[i as usize];
            (b.rows, b.heads, b.dim, b.dtype)
        };
        for (name, read) in [("q", a.q), ("k", a.k), ("v", a.v)] {
            let Buf::Work(operand) = read.buf else { continue };
            if form(operand) != form(result) || rows == 0 {
                continue;
            }
            t.schedule(s, r, format!("rank {r} op {i} {name}"), |x| {
                let move_one = |v: &mut BufferView| {
                    if v.buf == Buf::Work(result) {
                        v.buf = Buf::Work(operand);
                    }
                };
                for op in &mut x.ops {
                    if let OpKind::Attend(a) = &mut op.kind {
                        a.result.iter_mut().chain(&mut a.running).for_each(|(o, _)| move_one(o));
                    }
                }
                x.messages.iter_mut().for_each(|m| move_one(&mut m.view));
                x.blocks.iter_mut().for_each(|b| move_one(&mut b.dst));
                x.sources.iter_mut().for_each(move_one);
            });
        }
    });
}

#[test]
fn a_workspace_too_small_or_misaligned() {
    let mut t = Trial::new("workspace");
    for s in &subjects() {
        for (r, x) in s.schedules.iter().enumerate().filter(|(_, x)| x.workspace > 0) {
            t.schedule(s, r, format!("rank {r}"), |x| x.workspace -= crate::schedule::ALIGNMENT);
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
    mutate("head map", 150, |t, s, r, i, w| {
        if !matches!(w, ExpandedOp::Attend(..) | ExpandedOp::Backward(..)) {
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

/// Kernels that break tiles at other positions than the plan compute other bits.
#[test]
fn tiles_broken_elsewhere() {
    let mut t = Trial::new("aligned");
    for s in &subjects() {
        for (r, _) in s.schedules.iter().enumerate() {
            t.schedule(s, r, format!("rank {r}"), |x| x.aligned ^= true);
        }
        let mut schedules = s.schedules.clone();
        schedules.iter_mut().for_each(|x| x.aligned ^= true);
        t.judge(s, s.plan.verify_schedules(&schedules), "all ranks".into());
    }
    t.done(100);
}

/// A run also checks the slices that stand for all rows moved, packed or summed in a ring operation, even if it has no
/// rows.
#[test]
fn tensors_of_a_ring_step_elsewhere() {
    mutate("tensor of a ring step", 300, |t, s, r, i, _| {
        let count = s.schedules[r].ops[i].kind.clone().step_rows().map_or(0, |rows| rows.tensors.len());
        for n in 0..count {
            let mut change = |what: &str, change: &dyn Fn(&mut StepTensor)| {
                t.schedule(s, r, format!("rank {r} op {i} tensor {n} {what}"), |x| {
                    change(&mut x.ops[i].kind.step_rows().unwrap().tensors[n]);
                });
            };
            change("own on no buffer", &|c| c.own.buf = Buf::Work(u16::MAX));
            change("slot on no buffer", &|c| c.slot.buf = Buf::Work(u16::MAX));
            change("own of a tensor that is not given", &|c| c.own.buf = Buf::User(TensorId::Dsinks));
            change("own beyond its end", &|c| c.own.row += 1 << 40);
            change("slot beyond its end", &|c| c.slot.row += 1 << 40);
            change("own of more heads", &|c| c.own.heads += 1);
            change("slot of more heads", &|c| c.slot.heads += 1);
        }
    });
}

#[test]
fn groups_that_are_not_whole_are_refused() {
    let all = subjects();
    let s = &all[0];
    for schedules in [vec![], s.schedules[1..].to_vec(), s.schedules.iter().rev().cloned().collect::<Vec<_>>()] {
        assert!(matches!(s.plan.verify_schedules(&schedules), Err(Error::Invalid { .. })));
    }
    let mut mixed = s.schedules.clone();
    mixed[1] = Schedule::new(&s.plan, 1, Direction::Backward).unwrap();
    assert!(matches!(s.plan.verify_schedules(&mixed), Err(Error::Invalid { .. })));
}
