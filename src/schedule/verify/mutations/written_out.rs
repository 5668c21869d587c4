// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corruptions of the arguments of kernels, transports and transforms: modes, ranges, pairs, messages, blocks.

use alloc::{format, string::String, vec::Vec};

use super::{Changed, Subject, Trial, each_op, mutate, mutate_in, subjects};
use crate::{
    call::Band,
    call::{Gradients, Mode},
    schedule::{
        BackwardOp, Buf, BufferView, Form, MessageView, OpKind, Schedule,
        expanded::{CallRanges, ExpandedOp, SumBlock},
        verify::{memory::Memory, promise},
    },
};

#[test]
fn modes_changed() {
    mutate("mode", 200, |t, s, r, i, w| {
        let (ExpandedOp::Attend(_, met) | ExpandedOp::Backward(_, met)) = w else { return };
        // dk and dv alone have no mode.
        if matches!(w, ExpandedOp::Backward(b, _) if b.dq.is_none()) {
            return;
        }
        for (n, q) in met.q.iter().enumerate() {
            for mode in [Mode::First, Mode::Merge, Mode::Last, Mode::Only] {
                let backward = matches!(w, ExpandedOp::Backward(..));
                if mode == q.mode || (backward && mode.continues() == q.mode.continues()) {
                    continue;
                }
                t.listed(s, format!("rank {r} op {i} range {n} {:?} to {mode:?}", q.mode), |x| {
                    if let ExpandedOp::Attend(_, m) | ExpandedOp::Backward(_, m) = &mut x[r][i] {
                        m.q[n].mode = mode;
                    }
                });
            }
        }
    });
}

#[test]
fn ranges_and_pairs_changed() {
    mutate("range", 500, |t, s, r, i, w| {
        let (ExpandedOp::Attend(_, met) | ExpandedOp::Backward(_, met)) = w else { return };
        let mut change = |site: String, change: &dyn Fn(&mut CallRanges)| {
            t.listed(s, format!("rank {r} op {i} {site}"), |x| {
                if let ExpandedOp::Attend(_, m) | ExpandedOp::Backward(_, m) = &mut x[r][i] {
                    change(m);
                }
            });
        };
        for n in 0..met.q.len() {
            change(format!("q {n} row"), &|m| m.q[n].range.row += 1);
            change(format!("q {n} pos"), &|m| m.q[n].range.pos += 1);
            change(format!("q {n} doc"), &|m| m.q[n].range.doc ^= 1);
            change(format!("q {n} q tokens"), &|m| m.q[n].document[0] += 1);
            change(format!("q {n} k tokens"), &|m| m.q[n].document[1] += 1);
            if met.keys(n).is_empty() {
                continue;
            }
            let end = met.q[n].keys_end as usize;
            let mask = s.plan.problem().mask();
            let window = (mask.left_limit(), mask.right_limit());
            let last = met.q[n].range.last();
            let meets = met.keys(n).iter().any(|pair| {
                let k = met.k[pair.k as usize];
                let (begin, end) = met.bands[pair.band as usize].keys(last, window);
                (0..k.len).any(|i| (begin..end).contains(&k.position(i)))
            });
            // In the backward a later ring step may leave out a row without keys.
            if meets || matches!(w, ExpandedOp::Attend(..)) {
                change(format!("q {n} len"), &|m| m.q[n].range.len -= 1);
            }
            change(format!("q {n} loses a pair"), &|m| m.q[n].keys_end -= 1);
            for at in met.q[n].keys_begin as usize..end {
                let other = |band: &u32| met.bands[*band as usize] != met.bands[met.pairs[at].band as usize];
                for band in (0..met.bands.len() as u32).filter(other) {
                    change(format!("q {n} pair {at} in band {band}"), &|m| m.pairs[at].band = band);
                }
                type Limit = fn(&mut Band) -> &mut i64;
                let limits: [(&str, Limit); 7] = [
                    ("q begin", |b| &mut b.q_begin),
                    ("q end", |b| &mut b.q_end),
                    ("k begin", |b| &mut b.k_begin),
                    ("k end", |b| &mut b.k_end),
                    ("low", |b| &mut b.low),
                    ("high", |b| &mut b.high),
                    ("shift", |b| &mut b.shift),
                ];
                for (what, limit) in limits {
                    change(format!("q {n} pair {at} {what}"), &|m| {
                        let limit = limit(&mut m.bands[m.pairs[at].band as usize]);
                        *limit = if *limit == i64::MIN { *limit + 1 } else { *limit - 1 };
                    });
                }
            }
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

/// The other end of each message, by rank, operation and index.
fn other_ends(s: &Subject) -> Vec<Vec<Vec<(usize, usize, usize)>>> {
    let memories: Vec<_> =
        s.schedules.iter().map(|x| Memory::new(x, promise::tables(x, &s.plan, s.purpose, false), false)).collect();
    let messages: Vec<Vec<_>> =
        s.listed.iter().map(|ops| ops.iter().cloned().map(super::super::matching::messages).collect()).collect();
    super::super::matching::partners(0, &messages, &memories).unwrap()
}

pub(super) fn messages<'a>(listed: &'a mut Changed, r: usize, i: usize) -> &'a mut Vec<MessageView> {
    match &mut listed[r][i] {
        ExpandedOp::Exchange { messages, .. } => messages,
        _ => unreachable!("listed as an exchange"),
    }
}

#[test]
fn messages_changed() {
    let mut t = Trial::sampled("message");
    for s in &subjects() {
        let ends = other_ends(s);
        each_op(s, |r, i, w| {
            let ExpandedOp::Exchange { messages: list, .. } = w else { return };
            for (n, m) in list.iter().enumerate() {
                let site = |what| format!("rank {r} op {i} message {n} {what}");
                let (p, j, k) = ends[r][i][n];
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

/// A fetch of one row more than any rank needs, into free memory.
#[test]
fn a_fetch_widened_at_both_ends() {
    let mut t = Trial::new("wider fetch");
    for s in &subjects() {
        let ends = other_ends(s);
        each_op(s, |r, i, w| {
            let ExpandedOp::Exchange { messages: list, strict: true } = w else { return };
            for (n, m) in list.iter().enumerate().filter(|(_, m)| !m.send) {
                let (p, j, k) = ends[r][i][n];
                let ExpandedOp::Exchange { messages: there, .. } = &s.listed[p][j] else { return };
                let sent = there[k].view;
                let rows = |x: &Schedule, v: &BufferView| match v.buf {
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
    mutate_in(Trial::sampled("block"), 300, |t, s, r, i, w| {
        let (ExpandedOp::Sums(parts) | ExpandedOp::Merges(parts)) = w else { return };
        for (a, part) in parts.iter().enumerate() {
            for (b, sum) in part.iter().enumerate() {
                let mut change = |what: &str, change: &dyn Fn(&mut SumBlock)| {
                    t.listed(s, format!("rank {r} op {i} block {a}.{b} {what}"), |x| {
                        if let ExpandedOp::Sums(parts) | ExpandedOp::Merges(parts) = &mut x[r][i] {
                            change(&mut parts[a][b]);
                        }
                    });
                };
                change("to another row", &|s| s.dst.row += 1);
                change("to another head", &|s| s.dst.head += 1);
                // If rows are packed for a peer, an earlier step may have left the same row: then there is no flaw.
                if !matches!(s.schedules[r].ops[i].kind, OpKind::Pack { .. }) {
                    change("fewer rows", &|s| {
                        s.dst.rows -= 1;
                        s.sources.iter_mut().for_each(|v| v.rows -= 1);
                    });
                }
                for n in 0..sum.sources.len() {
                    change("from another row", &|s| s.sources[n].row += 1);
                    change("from another head", &|s| s.sources[n].head += 1);
                    change("a source dropped", &|s| _ = s.sources.remove(n));
                    // If the sum of these rows was returned to another holder of the head, this rank has nothing to
                    // add.
                    if s.plan.ring_holders_of_node() == 1 {
                        change("a source repeated", &|s| s.sources.push(s.sources[n]));
                    }
                }
                if !sum.sources.is_empty() {
                    change("all sources repeated", &|s| s.sources.extend_from_within(..));
                }
                if sum.sources.len() > 1 && s.plan.form() == Form::Ordered {
                    change("sources swapped", &|s| s.sources.swap(0, 1));
                }
            }
        }
    });
}

/// Merges that are left out, repeated, or made of o alone.
#[test]
fn merges_changed() {
    mutate("merge", 100, |t, s, r, i, w| {
        let ExpandedOp::Merges(parts) = w else { return };
        for a in 0..parts.len() {
            let mut change = |what: &str, change: &dyn Fn(&mut Vec<Vec<SumBlock>>)| {
                t.listed(s, format!("rank {r} op {i} part {a} {what}"), |x| {
                    if let ExpandedOp::Merges(parts) = &mut x[r][i] {
                        change(parts);
                    }
                });
            };
            change("left out", &|parts| _ = parts.remove(a));
            change("made twice", &|parts| parts.push(parts[a].clone()));
            change("lse left out", &|parts| _ = parts[a].remove(1));
            change("o left out", &|parts| _ = parts[a].remove(0));
            change("o for lse", &|parts| parts[a].swap(0, 1));
            change("own for the other", &|parts| parts[a][0].sources[1] = parts[a][0].dst);
        }
    });
}

#[test]
fn backward_calls_changed() {
    mutate("backward call", 200, |t, s, r, i, w| {
        let ExpandedOp::Backward(op, met) = w else { return };
        // A call without pairs writes zeros, whatever it reads.
        let met = !met.pairs.is_empty();
        let mut change = |what: &str, change: &dyn Fn(&mut BackwardOp)| {
            t.schedule(s, r, format!("rank {r} op {i} {what}"), |x| {
                if let OpKind::Backward(b) = &mut x.ops[i].kind {
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
        }
        if op.gradients == Gradients::All && met {
            change("keys only", &|b| b.gradients = Gradients::Keys);
        }
        change("k for v", &|b| (b.k, b.v) = (b.v, b.k));
        if !met {
            return;
        }
        change("q for do", &|b| (b.q, b.d_o) = (b.d_o, b.q));
        change("lse for delta", &|b| (b.lse, b.delta) = (b.delta, b.lse));
    });
}
