// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations of a schedule as tasks: a lane, a predecessor, seconds of work, and messages.
//!
//! The simulation reads nothing else of a schedule. Sizes are those counted for the report, seconds follow from the
//! machine's figures.

use alloc::vec::Vec;

use crate::{
    error::Result,
    machine::{KernelRate, KernelShape, Machine},
    plan::{Plan, Problem},
    report::size::{MessageSize, OpSizes},
    schedule::{Lane, Schedule},
};

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Task {
    pub lane: Lane,
    /// The task of the other lane that must have ended.
    pub after: Option<usize>,
    /// Seconds of work, on a core if the machine has cores; messages are posted afterwards.
    pub seconds: f64,
    /// The messages of an exchange: one for each peer and direction.
    pub messages: Vec<MessageSize>,
}

/// The rate of a problem's kernel, as [`Machine::kernel`].
pub(crate) fn kernel_rate(problem: &Problem, machine: &Machine, backward: bool) -> Result<(KernelRate, bool)> {
    let (head_dim, value_dim) = (problem.head_dim(), problem.value_dim());
    machine.kernel(KernelShape { dtype: problem.dtype(), head_dim, value_dim, backward })
}

/// The tasks of a schedule, and whether the machine has rates for exactly its kernels.
pub(super) fn tasks(plan: &Plan, schedule: &Schedule, machine: &Machine) -> Result<(Vec<Task>, bool)> {
    let mut sizes = OpSizes::new(plan, schedule);
    let mut exact = true;
    let mut list = Vec::with_capacity(schedule.ops.len());
    for (i, op) in schedule.ops.iter().enumerate() {
        let mut messages: Vec<MessageSize> = Vec::new();
        for m in sizes.messages(i) {
            match messages.iter_mut().find(|n| (n.peer, n.send) == (m.peer, m.send)) {
                Some(n) => n.bytes += m.bytes,
                None => messages.push(m),
            }
        }
        let work = if let Some(call) = sizes.call(i) {
            let (kernel, fits) = kernel_rate(plan.problem(), machine, call.backward)?;
            exact &= fits;
            let of_heads = |count: u64| call.heads as f64 * count as f64;
            let [rows, keys, edges] = [call.head.rows, call.head.keys, call.head.edges].map(of_heads);
            let flops = 2.0 * call.multiply_adds() as f64;
            kernel.seconds(flops, rows, keys, edges)
        } else {
            sizes.copied(i) as f64 / machine.copy
        };
        let (after, seconds) = (op.after.map(|i| i as usize), machine.operation + work);
        list.push(Task { lane: op.lane, after, seconds, messages });
    }
    Ok((list, exact))
}
