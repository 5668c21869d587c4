// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations of one rank, kept small until the run of all ranks comes to them.
//!
//! An operation is some hundred bytes, most of them views, and lists its arguments in kilobytes. A thousand ranks have
//! millions of operations, but few that differ in more than their ring step: slots take turns. So each form is kept
//! once, and an operation is listed when it runs.

use alloc::vec::Vec;

use super::listed::{ListedOp, list_one};
use crate::schedule::{Lane, Op, OpKind, Schedule, expand::Expansion};

/// An operation: its form, the figures in which it differs from others of that form, and those of the form that the run
/// asks for most.
#[derive(Clone, Copy)]
struct PackedOp {
    form: u32,
    ring_step: u32,
    /// [`NOTHING`], or what it waits for.
    after: u32,
    lane: Lane,
    exchange: bool,
}

/// An operation waits for nothing. No schedule has as many operations.
const NOTHING: u32 = u32::MAX;

/// How many of the last forms an operation is compared with.
const LOOKED_AT: usize = 16;

/// One rank's schedule.
pub(super) struct RankOps<'a> {
    /// The schedule, with a form for its operations; the ring step of one is that which was listed last.
    frame: Schedule,
    entries: Vec<PackedOp>,
    /// What its operations are instead of what they list (the mutants').
    written: Option<&'a [ListedOp]>,
    whole_rows: bool,
}

fn ring_step(kind: &mut OpKind) -> Option<&mut u32> {
    match kind {
        OpKind::Pack { ring_step, .. }
        | OpKind::Fetch { ring_step, .. }
        | OpKind::Return { ring_step, .. }
        | OpKind::Reduce { ring_step, .. }
        | OpKind::Merge { ring_step, .. } => Some(ring_step),
        OpKind::Attend(op) => Some(&mut op.ring_step),
        OpKind::Backward(op) => Some(&mut op.ring_step),
        OpKind::Delta { .. }
        | OpKind::SinkGradient { .. }
        | OpKind::SinkTotal { .. }
        | OpKind::Transform { .. }
        | OpKind::Exchange { .. } => None,
    }
}

impl<'a> RankOps<'a> {
    pub fn new(mut frame: Schedule, written: Option<&'a [ListedOp]>, whole_rows: bool) -> Self {
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
            entries.push(PackedOp { form, ring_step, after, lane: op.lane, exchange: op.kind.is_exchange() });
            if known.is_none() {
                forms.push(op);
            }
        }
        forms.shrink_to_fit();
        frame.ops = forms;
        Self { frame, entries, written, whole_rows }
    }

    /// The schedule, with forms in place of its operations.
    pub fn frame(&self) -> &Schedule {
        &self.frame
    }

    /// Whether every view takes all heads of its buffer.
    pub fn takes_whole_rows(&self) -> bool {
        self.whole_rows
    }

    pub fn rank(&self) -> usize {
        self.frame.rank
    }

    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The last operation, which errors about results name.
    pub fn last(&self) -> usize {
        self.len().max(1) - 1
    }

    /// An operation without its step, its ring step and what it waits for.
    pub fn form(&self, op: usize) -> &Op {
        &self.frame.ops[self.entries[op].form as usize]
    }

    /// What an operation waits for.
    pub fn after(&self, op: usize) -> Option<usize> {
        Some(self.entries[op].after).filter(|&after| after != NOTHING).map(|after| after as usize)
    }

    /// The lane of an operation.
    pub fn lane(&self, op: usize) -> Lane {
        self.entries[op].lane
    }

    /// Whether an operation is an exchange.
    pub fn is_exchange(&self, op: usize) -> bool {
        self.entries[op].exchange
    }

    /// Writes out an operation.
    pub fn list(&mut self, op: usize, expansion: &mut Expansion) -> ListedOp {
        if let Some(written) = self.written {
            return written[op].clone();
        }
        let PackedOp { form, ring_step: step, .. } = self.entries[op];
        let form = form as usize;
        if let Some(ring_step) = ring_step(&mut self.frame.ops[form].kind) {
            *ring_step = step;
        }
        list_one(&self.frame, form, expansion)
    }
}
