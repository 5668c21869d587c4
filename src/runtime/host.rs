// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a schedule on the CPU: its operations, on the two lanes of the rank.
//!
//! Each lane performs its own operations in the order of the list, and waits before an operation that names a
//! predecessor in the other lane. A rank without exchanges has no communication lane.

use super::{
    lanes::{LaneThreads, Progress, Task},
    ops::{BufferAddresses, Listing, Operations, perform},
    prepared::Prepared,
};
use crate::{
    call::{Attend, AttendBackward, Compose, Delta, Merge, MergeAll, RawTensor, SinkGradient, Transform},
    element::Dtype,
    error::Result,
    kernel::{
        compose,
        cpu::{
            self,
            listed::{self, KeyLists, ListScratch},
        },
        merge, merge_all, sinks,
        varlen::{CallTable, KernelCalls},
    },
    plan::Plan,
    report::trace,
    schedule::{Lane, Schedule, TensorId},
    transport::{Label, Message, Transport},
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
    keys: CallKeys<'_>,
    scratch: &mut cpu::Scratch,
    own: Option<&mut KernelCalls>,
) -> Result<()> {
    if prepared.expected.used(&memory.tensors).any(|(tensor, ..)| tensor == TensorId::MaxLogit) {
        let all = memory.tensors.get(TensorId::MaxLogit);
        for head in 0..all.heads {
            // SAFETY: a number of the head, in memory that is valid and used by nothing else (the contract).
            unsafe { *all.heads(head, 1).ptr.cast::<f32>() = f32::NEG_INFINITY };
        }
    }
    let Prepared { plan, schedule, compute, communication, kernel, .. } = prepared;
    let (plan, schedule) = (&*plan, &*schedule);
    let mut other = |progress: &Progress| {
        let operations = HostOperations { kernels: None, own: None, transport };
        // SAFETY: the memory fits the proved schedule and is used by nothing else until this function returns (the
        // contract of `run`); this lane has the listing `communication` to itself.
        unsafe { perform_lane(progress, Lane::Communication, plan, schedule, memory, communication, operations) }
    };
    let other = communicates(schedule).then_some(&mut other as &mut Task<'_>);
    lanes.run(
        |progress| {
            let own =
                own.zip(kernel.as_ref()).map(|(calls, kernel)| OwnKernel { calls, tables: &kernel.tables, op: 0 });
            let operations = HostOperations { kernels: Some((scratch, keys)), own, transport };
            // SAFETY: the memory fits the proved schedule and is used by nothing else until this function returns (the
            // contract of `run`); this lane has the listing `compute` to itself.
            unsafe { perform_lane(progress, Lane::Compute, plan, schedule, memory, compute, operations) }
        },
        other,
    )
}

/// Performs one lane's operations.
///
/// # Safety
/// As for [`perform`], for the whole list.
unsafe fn perform_lane(
    progress: &Progress,
    lane: Lane,
    plan: &Plan,
    schedule: &Schedule,
    memory: &BufferAddresses,
    listing: &mut Listing,
    mut operations: HostOperations<'_>,
) -> Result<()> {
    let clock = progress.clock();
    for (i, op) in schedule.ops.iter().enumerate().filter(|(_, op)| op.lane == lane) {
        if let Some(after) = op.after
            && !progress.wait_for(lane, after as usize)
        {
            return Ok(());
        }
        let start = clock.map(|(epoch, _)| epoch.elapsed());
        // SAFETY: the memory fits the proved schedule and is used by nothing else (the contract of this function); the
        // waits above are the order that the schedule asks for.
        let bytes = unsafe { perform(plan, schedule, i, memory, listing, &mut operations) }?;
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

/// Which rows of k and v the kernels read.
pub(super) enum CallKeys<'a> {
    /// Those of the ranges.
    Own,
    /// Those that a table names: k and v lie in pages.
    Paged(&'a [u32]),
    /// Those of the ranges that each row of q lists.
    Listed(KeyLists<'a>, &'a mut ListScratch),
}

/// The kernel of the caller's that computes the attention of a run.
struct OwnKernel<'a> {
    calls: &'a mut KernelCalls,
    tables: &'a [CallTable],
    /// The operation that is performed.
    op: usize,
}

/// Calls the CPU kernels and the transport for one lane. Only the compute lane has kernels: tiles for attention, and a
/// kernel of the caller's.
struct HostOperations<'a> {
    kernels: Option<(&'a mut cpu::Scratch, CallKeys<'a>)>,
    own: Option<OwnKernel<'a>>,
    transport: &'a dyn Transport,
}

impl<'a> HostOperations<'a> {
    fn kernels(&mut self) -> &mut (&'a mut cpu::Scratch, CallKeys<'a>) {
        self.kernels.as_mut().expect("planning puts attention on the compute lane")
    }
}

impl Operations for HostOperations<'_> {
    fn begin(&mut self, op: usize, label: Label) {
        if let Some(own) = &mut self.own {
            own.op = op;
            own.calls.begin(label);
        }
    }

    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        if let (Some(OwnKernel { calls, tables, op }), Some((scratch, _))) = (&mut self.own, &mut self.kernels) {
            // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
            // `Operations`. The table is that of the operation.
            return unsafe { calls.attend(args, &tables[*op], scratch) };
        }
        let (scratch, keys) = self.kernels();
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`. The rows of a table are those of k and v (`FoundRows::list`).
        unsafe {
            match keys {
                CallKeys::Own => cpu::attend(args, scratch),
                CallKeys::Paged(table) => cpu::attend_through(args, table, scratch),
                CallKeys::Listed(lists, room) => listed::attend_listed(args, lists, room, scratch),
            }
        }
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        if let Some(OwnKernel { calls, tables, op }) = &mut self.own {
            // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
            // `Operations`. The table is that of the operation.
            return unsafe { calls.attend_backward(args, &tables[*op]) };
        }
        let (scratch, keys) = self.kernels();
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`. k and v in pages have no backward (`check_supported`).
        unsafe {
            match keys {
                CallKeys::Own | CallKeys::Paged(_) => cpu::attend_backward(args, scratch),
                CallKeys::Listed(lists, room) => listed::attend_backward_listed(args, lists, room, scratch),
            }
        }
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe {
            match &mut self.own {
                Some(own) => own.calls.transform(args),
                None => cpu::transform(args),
            }
        }
    }

    unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe {
            match &mut self.own {
                Some(own) => own.calls.merge(args),
                None => merge::merge(&args.o, &args.lse, &args.with_o, &args.with_lse),
            }
        }
    }

    unsafe fn merge_all(&mut self, args: &MergeAll<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { merge_all::merge_all(args) }
    }

    unsafe fn compose(&mut self, args: &Compose<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { compose::compose(args) }
    }

    unsafe fn delta(&mut self, args: &Delta) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { cpu::delta(args) }
    }

    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { sinks::sink_gradient(args) }
    }

    unsafe fn sink_total(&mut self, digits: &RawTensor, dsinks: &RawTensor) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { sinks::sink_total(digits, dsinks) }
    }

    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of
        // `Operations`.
        unsafe { self.transport.exchange(label, sends, recvs) }
    }

    fn alibi_slopes(&self, plan: &Plan) -> RawTensor {
        plan.problem().alibi_slopes().map_or(RawTensor::NONE, |s| {
            let (rows, heads) = (plan.problem().alibi_rows() as u64, plan.problem().heads() as u32);
            RawTensor::compact(s.as_ptr().cast_mut().cast(), Dtype::F32, rows, heads, 1)
        })
    }
}
