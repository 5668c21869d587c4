// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations of the two lanes while the ring phase is written, and how they become one list.
//!
//! All ranks order exchanges by one rule, whatever steps a rank skips: by round; then the fetch of step s before the
//! fetch of step s + 1, and the return of step s just after the fetch of step s + 2 (both wait for the call that
//! attends step s). The same order on all ranks prevents deadlock.

use alloc::{vec, vec::Vec};

use super::builder::{Builder, Last};
use crate::schedule::{Lane, Op, OpKind};

/// The two lanes of the ring phase, before their operations have places in the list.
#[derive(Default)]
pub(super) struct PendingLanes {
    pub compute: Vec<PendingOp>,
    /// Each with its sort key among all exchanges: round, then order in the round.
    pub communication: Vec<((usize, u32), PendingOp)>,
}

/// An operation without an index in the list yet. `after` are the items of the other lane that it waits for.
pub(super) struct PendingOp {
    pub kind: OpKind,
    pub step: u32,
    pub phase: &'static str,
    pub after: [Option<usize>; 2],
}

/// Sort key of a fetch among the exchanges of a round.
pub(super) const fn fetch_order(step: u32) -> u32 {
    4 * step
}

/// Sort key of a return: after the call that attends its step.
pub(super) const fn return_order(step: u32) -> u32 {
    4 * (step + 2) + 1
}

/// Sort key of the return of a node's sum; `last` is the node's last step.
pub(super) const fn node_return_order(last: u32) -> u32 {
    4 * (last + 2) + 2
}

impl Builder<'_> {
    /// Merges the two lanes into one list in which each operation comes after those it waits for. The first one of each
    /// lane waits for `before` of the other lane.
    pub(super) fn weave(&mut self, lanes: PendingLanes, before: Last) {
        let PendingLanes { compute, communication } = lanes;
        let mut order: Vec<usize> = (0..communication.len()).collect();
        order.sort_by_key(|&i| communication[i].0);
        let mut place_of = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &i)| place_of[i] = place);
        let mut communication: Vec<Option<PendingOp>> = communication.into_iter().map(|(_, item)| Some(item)).collect();
        let mut compute = compute.into_iter().peekable();
        let (mut compute_ops, mut communication_ops) = (Vec::new(), Vec::new());
        let (mut compute_entry, mut communication_entry) = (before.communication, before.compute);
        loop {
            // Exchanges first: an early exchange overlaps with more of the compute that follows.
            let next = order.get(communication_ops.len()).and_then(|&i| communication[i].as_ref());
            let ready = next.map(|item| item.after.iter().flatten().all(|&c| c < compute_ops.len()));
            if ready == Some(true) || (ready.is_some() && compute.peek().is_none()) {
                let next = order.get(communication_ops.len()).and_then(|&i| communication[i].take());
                let Some(item) = next else { break };
                let after = item.after.iter().flatten().map(|&c| compute_ops[c]).max().or(communication_entry.take());
                communication_ops.push(self.place(item, Lane::Communication, after));
            } else if let Some(item) = compute.next() {
                let waits = item.after.iter().flatten().map(|&c| communication_ops[place_of[c]]);
                let after = waits.max().or(compute_entry.take());
                compute_ops.push(self.place(item, Lane::Compute, after));
            } else {
                break;
            }
        }
    }

    fn place(&mut self, item: PendingOp, lane: Lane, after: Option<u32>) -> u32 {
        self.out.ops.push(Op { kind: item.kind, lane, step: item.step, phase: item.phase, after });
        (self.out.ops.len() - 1) as u32
    }
}
