// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes a schedule on the two lanes of a rank on the CPU.
//!
//! Each lane executes its own operations in the order of the list, and waits before an operation that names a
//! predecessor in the other lane. A rank without exchanges has no communication lane.

use super::{
    host::Host,
    lanes::{LaneThreads, Progress, Task},
    ops::{BufferAddresses, Listing, perform},
    prepared::Prepared,
};
use crate::{
    error::Result,
    kernel::cpu::Scratch,
    plan::Plan,
    report::trace,
    schedule::{Lane, Schedule},
    transport::Transport,
};

/// Whether a schedule has exchanges, and so needs the communication lane.
pub(super) fn communicates(schedule: &Schedule) -> bool {
    schedule.ops.iter().any(|op| op.lane == Lane::Communication)
}

/// Runs a schedule on both lanes.
///
/// # Safety
/// As for [`perform`], for the whole list.
pub(super) unsafe fn run(
    lanes: &mut LaneThreads,
    transport: &dyn Transport,
    prepared: &mut Prepared,
    memory: &BufferAddresses,
    scratch: &mut Scratch,
) -> Result<()> {
    let Prepared { plan, schedule, compute, communication, .. } = prepared;
    let (plan, schedule) = (&*plan, &*schedule);
    let mut other = |progress: &Progress| {
        let host = Host { scratch: None, transport };
        // SAFETY: the memory fits the proved schedule and is used by nothing else until this function returns (the contract of
        // `run`); this lane has the listing `communication` to itself.
        unsafe { walk(progress, Lane::Communication, plan, schedule, memory, communication, host) }
    };
    let other = communicates(schedule).then_some(&mut other as &mut Task<'_>);
    lanes.run(
        |progress| {
            let host = Host { scratch: Some(scratch), transport };
            // SAFETY: the memory fits the proved schedule and is used by nothing else until this function returns (the contract
            // of `run`); this lane has the listing `compute` to itself.
            unsafe { walk(progress, Lane::Compute, plan, schedule, memory, compute, host) }
        },
        other,
    )
}

/// Performs one lane's operations.
///
/// # Safety
/// As for [`perform`], for the whole list.
unsafe fn walk(
    progress: &Progress,
    lane: Lane,
    plan: &Plan,
    schedule: &Schedule,
    memory: &BufferAddresses,
    listing: &mut Listing,
    mut host: Host<'_>,
) -> Result<()> {
    let clock = progress.clock();
    for (i, op) in schedule.ops.iter().enumerate().filter(|(_, op)| op.lane == lane) {
        if let Some(after) = op.after
            && !progress.wait_for(lane, after as usize)
        {
            return Ok(());
        }
        let start = clock.map(|(epoch, _)| epoch.elapsed());
        // SAFETY: the memory fits the proved schedule and is used by nothing else (the contract of this function); the waits above
        // are the order that the schedule asks for.
        let bytes = unsafe { perform(plan, schedule, i, memory, listing, &mut host) }?;
        let event = start.zip(clock).map(|(start, (epoch, rank))| trace::Event {
            rank,
            lane,
            name: op.kind.name(),
            phase: op.phase,
            step: op.step,
            start_ns: start.as_nanos() as u64,
            end_ns: epoch.elapsed().as_nanos() as u64,
            bytes,
        });
        progress.advance(lane, i + 1, event);
    }
    Ok(())
}
