// SPDX-License-Identifier: MIT OR Apache-2.0
//! Matches sends with receives, and simulates one run of all ranks under the contract of transports.
//!
//! Between two ranks, sends and receives match in the order in which each rank lists them. An exchange is posted when
//! the one before it on its rank is complete and what it waits for is done; a message moves when both of its ends are
//! posted; an exchange is complete when all of its messages have moved. Nothing is buffered. Kernels take no time here:
//! only order counts.

use alloc::{
    collections::{BTreeMap, VecDeque},
    format, vec,
    vec::Vec,
};

use super::{execute::Prover, flaw::flaw, listed::ListedOp, memory::Memory};
use crate::{
    error::Result,
    schedule::{Lane, MessageView, Schedule},
};

/// Where a message's other end is: (index in the group, operation, message).
pub(super) type Partners = Vec<Vec<Vec<(usize, usize, usize)>>>;

type Ends = Vec<(usize, usize)>;

/// Matches all messages.
pub(super) fn partners(schedules: &[Schedule], listed: &[Vec<ListedOp>], memories: &[Memory]) -> Result<Partners> {
    let start = schedules[0].group.start;
    let mut pairs: BTreeMap<(usize, usize), (Ends, Ends)> = BTreeMap::new();
    let mut partners: Partners = Vec::with_capacity(listed.len());
    for (r, ops) in listed.iter().enumerate() {
        let mut of_rank = Vec::with_capacity(ops.len());
        for (i, work) in ops.iter().enumerate() {
            let mut of_op = Vec::new();
            if let ListedOp::Exchange { messages, .. } = work {
                if messages.is_empty() {
                    return Err(flaw(schedules[r].rank, i, "an exchange without messages"));
                }
                of_op.resize(messages.len(), (0, 0, 0));
                for (n, m) in messages.iter().enumerate() {
                    let peer = m.peer - start;
                    if m.send {
                        pairs.entry((r, peer)).or_default().0.push((i, n));
                    } else {
                        pairs.entry((peer, r)).or_default().1.push((i, n));
                    }
                }
            }
            of_rank.push(of_op);
        }
        partners.push(of_rank);
    }
    let message = |r: usize, (i, n): (usize, usize)| -> &MessageView {
        match &listed[r][i] {
            ListedOp::Exchange { messages, .. } => &messages[n],
            _ => unreachable!("only exchanges have messages"),
        }
    };
    for ((from, to), (sends, recvs)) in pairs {
        let (a, b) = (schedules[from].rank, schedules[to].rank);
        for (&s, &t) in sends.iter().zip(&recvs) {
            let (x, y) = (message(from, s), message(to, t));
            let (p, q) = (memories[from].table(x.view.buf), memories[to].table(y.view.buf));
            let shape = |m: &MessageView, dim: u32, dtype| (m.view.rows, m.view.heads, dim, dtype);
            let (sent, taken) = (shape(x, p.dim, p.dtype), shape(y, q.dim, q.dtype));
            if sent != taken {
                let text = format!("expects {taken:?} of rank {a}, whose operation {} sends {sent:?}", s.0);
                return Err(flaw(b, t.0, text));
            }
            partners[from][s.0][s.1] = (to, t.0, t.1);
            partners[to][t.0][t.1] = (from, s.0, s.1);
        }
        if let Some(&(i, _)) = sends.get(recvs.len()) {
            return Err(flaw(a, i, format!("a message to rank {b} that it does not receive")));
        }
        if let Some(&(i, _)) = recvs.get(sends.len()) {
            return Err(flaw(b, i, format!("expects a message that rank {a} does not send")));
        }
    }
    Ok(partners)
}

/// A rank's progress.
struct RankProgress {
    lanes: [Vec<usize>; 2],
    next: [usize; 2],
    done: Vec<bool>,
    posted: Vec<bool>,
    /// Messages of the posted exchange that have not moved.
    left: usize,
}

/// Runs all ranks to the end, tags and all.
pub(super) fn run(prover: &mut Prover, partners: &Partners) -> Result<()> {
    let schedules = prover.schedules;
    let lane = |s: &Schedule, lane| (0..s.ops.len()).filter(|&i| s.ops[i].lane == lane).collect();
    let mut ranks: Vec<RankProgress> = schedules
        .iter()
        .map(|s| RankProgress {
            lanes: [lane(s, Lane::Compute), lane(s, Lane::Communication)],
            next: [0; 2],
            done: vec![false; s.ops.len()],
            posted: vec![false; s.ops.len()],
            left: 0,
        })
        .collect();
    let mut queue: VecDeque<usize> = (0..ranks.len()).collect();
    while let Some(r) = queue.pop_front() {
        let mut moved = true;
        while moved {
            moved = false;
            for l in 0..2 {
                while let Some(&i) = ranks[r].lanes[l].get(ranks[r].next[l]) {
                    let waits = schedules[r].ops[i].after.is_some_and(|a| !ranks[r].done[a as usize]);
                    if waits {
                        break;
                    }
                    if let ListedOp::Exchange { .. } = &prover.listed[r][i] {
                        if !ranks[r].posted[i] {
                            ranks[r].posted[i] = true;
                            ranks[r].left = partners[r][i].len();
                            post(prover, partners, &mut ranks, r, i, &mut queue)?;
                            moved = true;
                        }
                        if ranks[r].left > 0 {
                            break;
                        }
                    } else {
                        prover.execute(r, i)?;
                    }
                    ranks[r].done[i] = true;
                    ranks[r].next[l] += 1;
                    moved = true;
                }
            }
        }
    }
    for (r, p) in ranks.iter().enumerate() {
        // A stuck exchange explains a stuck kernel, not the other way round.
        for l in [1, 0] {
            if let Some(&i) = p.lanes[l].get(p.next[l]) {
                return Err(stuck(schedules, partners, &ranks, r, i));
            }
        }
    }
    Ok(())
}

/// Moves every message of a newly posted exchange whose other end is posted.
fn post(
    prover: &mut Prover,
    partners: &Partners,
    ranks: &mut [RankProgress],
    r: usize,
    i: usize,
    queue: &mut VecDeque<usize>,
) -> Result<()> {
    for (n, &(peer, j, m)) in partners[r][i].iter().enumerate() {
        if !ranks[peer].posted[j] {
            continue;
        }
        let sends = matches!(&prover.listed[r][i], ListedOp::Exchange { messages, .. } if messages[n].send);
        if sends {
            prover.transfer((r, i, n), (peer, j, m))?;
        } else {
            prover.transfer((peer, j, m), (r, i, n))?;
        }
        ranks[r].left -= 1;
        ranks[peer].left -= 1;
        if ranks[peer].left == 0 {
            queue.push_back(peer);
        }
    }
    Ok(())
}

fn stuck(
    schedules: &[Schedule],
    partners: &Partners,
    ranks: &[RankProgress],
    r: usize,
    i: usize,
) -> crate::error::Error {
    let absent = partners[r][i].iter().find(|&&(peer, j, _)| !ranks[peer].posted[j]);
    let text = match absent {
        Some(&(peer, j, _)) if ranks[r].posted[i] => {
            format!("waits for ever: rank {} never reaches operation {j}", schedules[peer].rank)
        }
        _ => "is never reached: ranks wait for one another".into(),
    };
    flaw(schedules[r].rank, i, text)
}
