// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations of a schedule as tasks: a lane, a predecessor, and either seconds or messages.
//!
//! The simulation reads nothing else of a schedule. Sizes are those counted for the report, seconds follow from the
//! machine's figures.

use alloc::vec::Vec;

use crate::{
    error::Result,
    machine::{KernelShape, Machine},
    plan::Plan,
    report::size::{MessageSize, OpSizes},
    schedule::{Lane, Schedule},
};

/// The work of a task.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TaskWork {
    /// Works for this many seconds, on a core if the machine has cores.
    Compute(f64),
    /// Exchanges messages: one for each peer and direction.
    Exchange(Vec<MessageSize>),
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Task {
    pub lane: Lane,
    /// The task of the other lane that must have ended.
    pub after: Option<usize>,
    pub work: TaskWork,
}

impl Task {
    /// Its messages, with those to or from one peer combined.
    pub fn messages(&self) -> &[MessageSize] {
        match &self.work {
            TaskWork::Compute(_) => &[],
            TaskWork::Exchange(list) => list,
        }
    }

    /// Bytes sent and received.
    pub fn bytes(&self) -> u64 {
        self.messages().iter().map(|m| m.bytes).sum()
    }
}

/// The tasks of a schedule, and whether the machine has rates for exactly its kernels.
pub(super) fn tasks(plan: &Plan, schedule: &Schedule, machine: &Machine) -> Result<(Vec<Task>, bool)> {
    let p = plan.problem();
    let mut sizes = OpSizes::new(plan, schedule);
    let mut exact = true;
    let mut list = Vec::with_capacity(schedule.ops.len());
    for (i, op) in schedule.ops.iter().enumerate() {
        let work = if op.kind.is_exchange() {
            let mut messages: Vec<MessageSize> = Vec::new();
            for m in sizes.messages(i) {
                match messages.iter_mut().find(|n| (n.peer, n.send) == (m.peer, m.send)) {
                    Some(n) => n.bytes += m.bytes,
                    None => messages.push(m),
                }
            }
            TaskWork::Exchange(messages)
        } else if let Some(call) = sizes.call(i) {
            let shape = KernelShape {
                dtype: p.dtype(),
                head_dim: p.head_dim(),
                value_dim: p.value_dim(),
                backward: call.backward,
            };
            let (kernel, fits) = machine.kernel(shape)?;
            exact &= fits;
            let of_heads = |count: u64| call.heads as f64 * count as f64;
            let [rows, keys, edges] = [call.head.rows, call.head.keys, call.head.edges].map(of_heads);
            let flops = 2.0 * call.multiply_adds() as f64;
            TaskWork::Compute(machine.operation + kernel.seconds(flops, rows, keys, edges))
        } else {
            TaskWork::Compute(machine.operation + sizes.copied(i) as f64 / machine.copy)
        };
        list.push(Task { lane: op.lane, after: op.after.map(|i| i as usize), work });
    }
    Ok((list, exact))
}
