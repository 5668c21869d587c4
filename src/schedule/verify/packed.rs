// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations of one rank in compressed form, until the run of all ranks reaches them.
//!
//! An operation takes a few hundred bytes, mostly views, and its listed arguments take kilobytes. A thousand ranks have
//! millions of operations, but few that differ in more than their ring step, because slots take turns. So operations
//! that are equal apart from that share one form, and an operation is listed when it runs.

use alloc::vec::Vec;

use crate::schedule::{
    Lane, Op, OpKind, Schedule,
    expand::Expansion,
    expanded::{ExpandedOp, expand_with},
};

/// An operation: its form, and the fields in which operations of one form differ. A thousand ranks have millions.
#[derive(Clone, Copy)]
struct PackedOp {
    /// The number of the form, and copies of two fields of it that the run reads most often: [`EXCHANGE`] and
    /// [`COMMUNICATION`].
    form: u32,
    ring_step: u32,
    /// The operation it waits for, or [`NOTHING`].
    after: u32,
}

/// A bit of [`PackedOp::form`]: it is an exchange.
const EXCHANGE: u32 = 1 << 31;
/// A bit of [`PackedOp::form`]: its lane is that of communication.
const COMMUNICATION: u32 = 1 << 30;

impl PackedOp {
    fn form(self) -> usize {
        (self.form & !(EXCHANGE | COMMUNICATION)) as usize
    }
}

/// Value of `after` for an operation that waits for nothing. No schedule has this many operations.
const NOTHING: u32 = u32::MAX;

/// The number of recent forms that an operation is compared with.
const LOOKED_AT: usize = 16;

/// One rank's schedule.
pub(super) struct RankOps<'a> {
    /// The schedule, with forms as its operations. The ring step in a form is that of the operation listed last.
    frame: Schedule,
    entries: Vec<PackedOp>,
    /// Listed arguments that replace those of the schedule (used by the mutants).
    written: Option<&'a [ExpandedOp]>,
    whole_rows: bool,
}

fn ring_step(kind: &mut OpKind) -> Option<&mut u32> {
    match kind {
        OpKind::Attend(op) => Some(&mut op.ring_step),
        OpKind::Backward(op) => Some(&mut op.ring_step),
        _ => kind.step_rows().map(|rows| &mut rows.ring_step),
    }
}

impl<'a> RankOps<'a> {
    pub(super) fn new(mut frame: Schedule, written: Option<&'a [ExpandedOp]>, whole_rows: bool) -> Self {
        let ops = core::mem::take(&mut frame.ops);
        let mut forms: Vec<Op> = Vec::new();
        let mut entries = Vec::with_capacity(ops.len());
        for mut op in ops {
            let ring_step = ring_step(&mut op.kind).map_or(0, core::mem::take);
            op.step = 0;
            let after = op.after.take().unwrap_or(NOTHING);
            let looked_at = forms.len().saturating_sub(LOOKED_AT);
            let known = forms[looked_at..].iter().rposition(|f| *f == op).map(|i| looked_at + i);
            let form = known.unwrap_or(forms.len()) as u32;
            let exchange = if op.kind.is_exchange() { EXCHANGE } else { 0 };
            let lane = if op.lane == Lane::Communication { COMMUNICATION } else { 0 };
            entries.push(PackedOp { form: form | exchange | lane, ring_step, after });
            if known.is_none() {
                forms.push(op);
            }
        }
        forms.shrink_to_fit();
        frame.ops = forms;
        Self { frame, entries, written, whole_rows }
    }

    /// The schedule, with forms in place of its operations.
    pub(super) fn frame(&self) -> &Schedule {
        &self.frame
    }

    /// Whether every view takes all heads of its buffer.
    pub(super) fn takes_whole_rows(&self) -> bool {
        self.whole_rows
    }

    pub(super) fn rank(&self) -> usize {
        self.frame.rank
    }

    /// How many operations there are.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The last operation, which errors about results name.
    pub(super) fn last(&self) -> usize {
        self.len().max(1) - 1
    }

    /// An operation without its step, its ring step and its dependency.
    pub(super) fn form(&self, op: usize) -> &Op {
        &self.frame.ops[self.entries[op].form()]
    }

    /// The operation of the other lane that an operation waits for.
    pub(super) fn after(&self, op: usize) -> Option<usize> {
        Some(self.entries[op].after).filter(|&after| after != NOTHING).map(|after| after as usize)
    }

    /// The lane of an operation.
    pub(super) fn lane(&self, op: usize) -> Lane {
        if self.entries[op].form & COMMUNICATION > 0 { Lane::Communication } else { Lane::Compute }
    }

    /// Whether an operation is an exchange.
    pub(super) fn is_exchange(&self, op: usize) -> bool {
        self.entries[op].form & EXCHANGE > 0
    }

    /// Lists the arguments of an operation.
    pub(super) fn list(&mut self, op: usize, expansion: &mut Expansion) -> ExpandedOp {
        if let Some(written) = self.written {
            return written[op].clone();
        }
        let (form, step) = (self.entries[op].form(), self.entries[op].ring_step);
        if let Some(ring_step) = ring_step(&mut self.frame.ops[form].kind) {
            *ring_step = step;
        }
        expand_with(&self.frame, form, expansion)
    }
}
