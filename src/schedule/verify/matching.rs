// SPDX-License-Identifier: MIT OR Apache-2.0
//! Matches sends with receives, and simulates one run of all ranks under the contract of transports.
//!
//! Between two ranks, sends and receives match in the order in which each rank lists them. An exchange is posted when
//! the exchange before it on its rank is complete and the operation it waits for is done; a message moves when both of
//! its ends are posted; an exchange is complete when all of its messages have moved. Nothing is buffered. Kernels take
//! no time here: only order counts.

use alloc::{
    collections::{BTreeMap, VecDeque},
    format, vec,
    vec::Vec,
};

use super::{execute::Prover, flaw::flaw, memory::Memory};
use crate::{
    error::{Error, Result},
    schedule::{BufferView, Lane, MessageView, expanded::ExpandedOp},
};

/// The other end of each message, as (index in the group, operation, message).
type Partners = Vec<Vec<Vec<(usize, usize, usize)>>>;

type Ends = Vec<(usize, usize)>;

/// The messages of an operation; empty unless it is an exchange.
pub(super) fn messages(work: ExpandedOp) -> Vec<MessageView> {
    match work {
        ExpandedOp::Exchange { messages, .. } => messages,
        _ => Vec::new(),
    }
}

/// One end of a message: rank, operation, rows, and the memory that they lie in.
type End<'a> = (usize, usize, &'a BufferView, &'a Memory);

/// Checks that a send and its receive have the same shape and type.
fn fits(send: End, recv: End) -> Result<()> {
    let shape = |(_, _, v, memory): End| {
        let t = memory.table(v.buf);
        (v.rows, v.heads, t.dim, t.dtype)
    };
    let (sent, taken) = (shape(send), shape(recv));
    if sent == taken {
        return Ok(());
    }
    let text = format!("expects {taken:?} of rank {}, whose operation {} sends {sent:?}", send.0, send.1);
    Err(flaw(recv.0, recv.1, text))
}

/// Matches all messages, given by rank and operation. The first rank of the group is `start`.
pub(super) fn partners(start: usize, messages: &[Vec<Vec<MessageView>>], memories: &[Memory]) -> Result<Partners> {
    let mut pairs: BTreeMap<(usize, usize), (Ends, Ends)> = BTreeMap::new();
    let mut partners: Partners = Vec::with_capacity(messages.len());
    for (r, ops) in messages.iter().enumerate() {
        for (i, of_op) in ops.iter().enumerate() {
            for (n, m) in of_op.iter().enumerate() {
                let peer = m.peer - start;
                if m.send {
                    pairs.entry((r, peer)).or_default().0.push((i, n));
                } else {
                    pairs.entry((peer, r)).or_default().1.push((i, n));
                }
            }
        }
        partners.push(ops.iter().map(|of_op| vec![(0, 0, 0); of_op.len()]).collect());
    }
    for ((from, to), (sends, recvs)) in pairs {
        let (a, b) = (start + from, start + to);
        for (&s, &t) in sends.iter().zip(&recvs) {
            let (x, y) = (&messages[from][s.0][s.1].view, &messages[to][t.0][t.1].view);
            fits((a, s.0, x, &memories[from]), (b, t.0, y, &memories[to]))?;
            partners[from][s.0][s.1] = (to, t.0, t.1);
            partners[to][t.0][t.1] = (from, s.0, s.1);
        }
        if let Some(&(i, _)) = sends.get(recvs.len()) {
            return Err(flaw(a, i, format!("sends rank {b} a message that rank {b} does not receive")));
        }
        if let Some(&(i, _)) = recvs.get(sends.len()) {
            return Err(flaw(b, i, format!("expects a message of rank {a} that rank {a} does not send")));
        }
    }
    Ok(partners)
}

/// A posted exchange.
struct Posted {
    op: usize,
    messages: Vec<MessageView>,
    strict: bool,
    /// Indices of messages, sorted by peer and direction, then in list order. Next to the first message of each peer
    /// and direction: how many of these messages have moved.
    order: Vec<(u32, u32)>,
    left: usize,
}

impl Posted {
    fn new(op: usize, messages: Vec<MessageView>, strict: bool) -> Self {
        let mut order: Vec<(u32, u32)> = (0..messages.len() as u32).map(|i| (i, 0)).collect();
        order.sort_unstable_by_key(|&(i, _)| (messages[i as usize].peer, messages[i as usize].send, i));
        Self { op, left: messages.len(), messages, strict, order }
    }

    /// The rows of the next message between this rank and `peer` in one direction.
    fn take(&mut self, peer: usize, send: bool) -> Option<BufferView> {
        let key = |i: u32| (self.messages[i as usize].peer, self.messages[i as usize].send);
        let first = self.order.partition_point(|&(i, _)| key(i) < (peer, send));
        let next = first + self.order.get(first)?.1 as usize;
        let message = self.order.get(next).filter(|&&(i, _)| key(i) == (peer, send))?.0;
        self.order[first].1 += 1;
        self.left -= 1;
        Some(self.messages[message as usize].view)
    }
}

/// A rank's progress. Operations of a lane run in order, so all before the lane's next one are complete.
struct RankProgress {
    /// The next operation of each lane; the number of operations if there is none.
    next: [usize; 2],
    posted: Option<Posted>,
}

impl RankProgress {
    fn has_posted(&self, exchange: usize) -> bool {
        exchange < self.next[Lane::Communication as usize] || self.posted.as_ref().is_some_and(|p| p.op == exchange)
    }
}

/// Runs all ranks to the end, with the tags of rows.
///
/// Between two ranks the next message sent is the next received; this is right if all messages match. If a run fails,
/// all messages are matched, because a mismatch may be the reason.
pub(super) fn run(prover: &mut Prover) -> Result<()> {
    let next = |prover: &Prover, r: usize| [0, 1].map(|lane| next_of(prover, r, lane, 0));
    let mut ranks: Vec<RankProgress> =
        (0..prover.ranks.len()).map(|r| RankProgress { next: next(prover, r), posted: None }).collect();
    let result = run_all(prover, &mut ranks);
    let complete = |(r, p): (usize, &RankProgress)| p.next == [prover.ranks[r].len(); 2];
    if result.is_ok() && ranks.iter().enumerate().all(complete) {
        return Ok(());
    }
    let mut listed = Vec::with_capacity(ranks.len());
    for r in 0..ranks.len() {
        listed.push((0..prover.ranks[r].len()).map(|i| messages(prover.list(r, i))).collect::<Vec<_>>());
    }
    let partners = partners(prover.ranks[0].rank(), &listed, &prover.memories)?;
    result?;
    for (r, p) in ranks.iter().enumerate() {
        // A stuck exchange is the reason for a stuck kernel, not the other way round, so it is reported first.
        if let Some(&i) = [p.next[1], p.next[0]].iter().find(|&&i| i < prover.ranks[r].len()) {
            return Err(stuck(prover, &partners, &ranks, r, i));
        }
    }
    Ok(())
}

/// The first operation of a lane from index `from` on, or the number of operations if there is none.
fn next_of(prover: &Prover, r: usize, lane: usize, from: usize) -> usize {
    let ops = &prover.ranks[r];
    (from..ops.len()).find(|&i| ops.lane(i) as usize == lane).unwrap_or(ops.len())
}

fn run_all(prover: &mut Prover, ranks: &mut [RankProgress]) -> Result<()> {
    let mut queue: VecDeque<usize> = (0..ranks.len()).collect();
    while let Some(r) = queue.pop_front() {
        let mut moved = true;
        while moved {
            moved = false;
            for l in 0..2 {
                while ranks[r].next[l] < prover.ranks[r].len() {
                    let i = ranks[r].next[l];
                    let done = |a: usize| a < ranks[r].next[prover.ranks[r].lane(a) as usize];
                    if prover.ranks[r].after(i).is_some_and(|a| !done(a)) {
                        break;
                    }
                    if prover.ranks[r].is_exchange(i) {
                        if ranks[r].posted.is_none() {
                            post(prover, ranks, r, i, &mut queue)?;
                            moved = true;
                        }
                        if ranks[r].posted.as_ref().is_some_and(|p| p.left > 0) {
                            break;
                        }
                        ranks[r].posted = None;
                    } else {
                        let work = prover.list(r, i);
                        prover.execute(r, i, &work)?;
                    }
                    ranks[r].next[l] = next_of(prover, r, l, i + 1);
                    moved = true;
                }
            }
        }
    }
    Ok(())
}

/// Posts an exchange, and moves its messages whose other end is posted.
fn post(
    prover: &mut Prover,
    ranks: &mut [RankProgress],
    r: usize,
    i: usize,
    queue: &mut VecDeque<usize>,
) -> Result<()> {
    let ExpandedOp::Exchange { messages, strict } = prover.list(r, i) else {
        return Err(prover.err(r, i, "is not an exchange"));
    };
    if messages.is_empty() {
        return Err(prover.err(r, i, "is an exchange without messages"));
    }
    let (me, start) = (prover.ranks[r].rank(), prover.ranks[0].rank());
    let mut own = Posted::new(i, messages, strict);
    for n in 0..own.messages.len() {
        let MessageView { peer, send, .. } = own.messages[n];
        let there = peer - start;
        let Some(other) = &mut ranks[there].posted else { continue };
        let Some(theirs) = other.take(me, !send) else { continue };
        let Some(mine) = own.take(peer, send) else { continue };
        let (op, left) = (other.op, other.left);
        let ends = [(r, i, mine), (there, op, theirs)];
        let ([from, to], strict) = if send { (ends, other.strict) } else { ([ends[1], ends[0]], own.strict) };
        let [sent, taken] = [&from, &to].map(|end| (start + end.0, end.1, &end.2, &prover.memories[end.0]));
        fits(sent, taken)?;
        prover.transfer(from, to, strict)?;
        if left == 0 {
            queue.push_back(there);
        }
    }
    ranks[r].posted = Some(own);
    Ok(())
}

fn stuck(prover: &Prover, partners: &Partners, ranks: &[RankProgress], r: usize, i: usize) -> Error {
    let absent = partners[r][i].iter().find(|&&(peer, j, _)| !ranks[peer].has_posted(j));
    let text = match absent {
        Some(&(peer, j, _)) if ranks[r].has_posted(i) => {
            format!("waits forever: rank {} never reaches operation {j}", prover.ranks[peer].rank())
        }
        _ => "is never reached: ranks wait for one another".into(),
    };
    prover.err(r, i, text)
}
