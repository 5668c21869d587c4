// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists an operation's messages and blocks when it is executed.
//!
//! The rows of a ring step are found by [`RingSteps`] from the shares alone, so they are not stored. [`Expansion`]
//! holds the lists of one operation at a time; its memory is allocated when the schedule is made, so that running a
//! plan allocates nothing.

use alloc::vec::Vec;

use super::{BlockView, BufferView, MessageView, OpKind, RangeScratch, RingSteps, Schedule, StepRows, StepTensor};

/// The most messages between two ranks, one way, in one exchange. One of them may be the tag that precedes the first
/// message of a run.
pub(crate) const MESSAGES_PER_PEER: usize = 8;

/// The most of these messages that carry rows, as schedules list them. Rows that would take more are packed first.
pub(crate) const ROWS_PER_PEER: usize = MESSAGES_PER_PEER - 1;

/// Room for the lists of one operation.
#[derive(Debug, Default)]
pub(crate) struct Expansion {
    /// Fragments and ranges of a ring step.
    pub scratch: RangeScratch,
    /// Messages of an exchange.
    pub messages: Vec<MessageView>,
    /// Blocks of a transform or a reduce.
    pub blocks: Vec<BlockView>,
    /// Their sources.
    pub sources: Vec<BufferView>,
    runs: Vec<MessageRun>,
}

/// Rows that are contiguous in the owner's share and in the slot, with one peer.
#[derive(Clone, Copy, Debug)]
struct MessageRun {
    /// Numbered in the world.
    peer: usize,
    owner_row: u64,
    slot_row: u64,
    rows: u64,
    /// First row in the packed buffer, if the rows are packed.
    packed: Option<u64>,
}

/// Whether these runs of one peer, times the tensors sent, are too many messages to send in place.
pub(super) const fn is_fragmented(runs: usize, tensors: usize) -> bool {
    runs > 1 && runs * tensors > ROWS_PER_PEER
}

impl Expansion {
    /// Room for every operation of `schedule`.
    pub(crate) fn new(schedule: &Schedule) -> Self {
        let mut e = Self::default();
        e.reserve(schedule);
        e
    }

    /// Grows to hold every operation of `schedule`.
    pub(crate) fn reserve(&mut self, schedule: &Schedule) {
        let ring_steps = || schedule.keys.iter().chain(&schedule.queries);
        for v in ring_steps() {
            v.reserve(&mut self.scratch);
        }
        let runs = ring_steps().map(|v| v.longest()).max().unwrap_or(0);
        let grow = |len: usize, n: usize| n.saturating_sub(len);
        self.runs.reserve(grow(self.runs.len(), runs));
        // Four tensors travel at most, and an exchange both sends and receives.
        self.messages.clear();
        self.messages.reserve(schedule.messages.len().max(8 * runs));
        self.clear_blocks();
        self.blocks.reserve(schedule.blocks.len().max(4 * runs));
        self.sources.reserve(schedule.sources.len().max(4 * runs));
    }

    /// The most messages, blocks and sources of any one operation.
    #[cfg(feature = "std")]
    pub(crate) fn capacity(&self) -> (usize, usize, usize) {
        (self.messages.capacity(), self.blocks.capacity(), self.sources.capacity())
    }

    /// Lists the messages of an exchange. Between two ranks both list them in the same order: tensor by tensor, run by
    /// run.
    pub(crate) fn messages(&mut self, schedule: &Schedule, op: usize) -> &[MessageView] {
        self.messages.clear();
        match &schedule.ops[op].kind {
            OpKind::Exchange { begin, end } => {
                self.messages.extend_from_slice(&schedule.messages[*begin as usize..*end as usize]);
            }
            OpKind::Fetch { rows, packed } => {
                self.list_runs(schedule, rows, RingSteps::outgoing);
                self.pack_runs(rows.tensors.len());
                for (i, c) in rows.tensors.iter().enumerate() {
                    for r in &self.runs {
                        let view = match (r.packed, packed.get(i)) {
                            (Some(row), Some(packed)) => packed.slice(row, r.rows),
                            _ => c.own.slice(r.owner_row, r.rows),
                        };
                        self.messages.push(MessageView { peer: r.peer, view, send: true });
                    }
                }
                self.list_runs(schedule, rows, RingSteps::incoming);
                self.pack_runs(rows.tensors.len());
                self.add(rows, false, |c, r| c.slot.slice(r.slot_row, r.rows));
            }
            OpKind::Return(rows) => {
                self.list_runs(schedule, rows, RingSteps::incoming);
                self.join_runs();
                self.add(rows, true, |c, r| c.own.slice(r.slot_row, r.rows));
                self.list_runs(schedule, rows, RingSteps::outgoing);
                self.join_runs();
                self.add(rows, false, |c, r| c.slot.slice(r.slot_row, r.rows));
            }
            _ => {}
        }
        &self.messages
    }

    /// Lists the blocks of a transform or a reduce: calls `each(blocks, sources)` for every part, in order. Blocks of
    /// one part do not overlap: contributions of several peers to one row are added peer by peer, in separate parts. A
    /// merge is listed like a reduce; its blocks come in pairs, of o and of lse.
    pub(crate) fn blocks<E>(
        &mut self,
        schedule: &Schedule,
        op: usize,
        mut each: impl FnMut(&[BlockView], &[BufferView]) -> Result<(), E>,
    ) -> Result<(), E> {
        match &schedule.ops[op].kind {
            OpKind::Transform { begin, end } | OpKind::Compose { begin, end } => {
                each(&schedule.blocks[*begin as usize..*end as usize], &schedule.sources)
            }
            OpKind::Combine { o, lse, .. } => each(&[*o, *lse], &schedule.sources),
            OpKind::Pack(rows) => {
                self.list_runs(schedule, rows, RingSteps::outgoing);
                self.clear_blocks();
                let (mut at, mut row) = (0, 0);
                while at < self.runs.len() {
                    let n = self.runs_of_peer(at);
                    for i in (at..at + n).filter(|_| is_fragmented(n, rows.tensors.len())) {
                        let r = self.runs[i];
                        for c in &rows.tensors {
                            self.block(c.slot.slice(row, r.rows), &[c.own.slice(r.owner_row, r.rows)]);
                        }
                        row += r.rows;
                    }
                    at += n;
                }
                each(&self.blocks, &self.sources)
            }
            OpKind::Reduce(rows) | OpKind::Merge(rows) => {
                self.list_runs(schedule, rows, RingSteps::outgoing);
                let mut at = 0;
                while at < self.runs.len() {
                    self.clear_blocks();
                    let n = self.runs_of_peer(at);
                    for i in at..at + n {
                        let r = self.runs[i];
                        for c in &rows.tensors {
                            let own = c.own.slice(r.owner_row, r.rows);
                            self.block(own, &[own, c.slot.slice(r.slot_row, r.rows)]);
                        }
                    }
                    each(&self.blocks, &self.sources)?;
                    at += n;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn clear_blocks(&mut self) {
        self.blocks.clear();
        self.sources.clear();
    }

    /// Adds a block: `dst = Σ sources`.
    fn block(&mut self, dst: BufferView, sources: &[BufferView]) {
        let sources_begin = self.sources.len() as u32;
        self.sources.extend_from_slice(sources);
        self.blocks.push(BlockView { dst, sources_begin, sources_end: self.sources.len() as u32 });
    }

    /// Adds the messages of every run of each tensor.
    fn add(&mut self, rows: &StepRows, send: bool, view: impl Fn(&StepTensor, &MessageRun) -> BufferView) {
        for c in &rows.tensors {
            for r in &self.runs {
                self.messages.push(MessageView { peer: r.peer, view: view(c, r), send });
            }
        }
    }

    /// The rows that arrive or leave at a ring step, as `list` finds them, joined where they touch. The rank's own are
    /// left out.
    fn list_runs(&mut self, schedule: &Schedule, rows: &StepRows, list: fn(&RingSteps, usize, &mut RangeScratch)) {
        let (ring_steps, ring_step) = (schedule.ring_steps(rows.side), rows.ring_step as usize);
        list(ring_steps, ring_step, &mut self.scratch);
        let between_holders = ring_steps.is_between_holders(ring_step);
        self.runs.clear();
        for f in &self.scratch.fragments {
            let peer = if between_holders { schedule.ulysses_peer(f.peer) } else { schedule.ring_peer(f.peer) };
            if peer == schedule.rank {
                continue;
            }
            let (owner_row, slot_row, rows) = (f.owner_row as u64, f.range.row as u64, u64::from(f.range.len));
            match self.runs.last_mut() {
                Some(r) if r.peer == peer && r.owner_row + r.rows == owner_row && r.slot_row + r.rows == slot_row => {
                    r.rows += rows;
                }
                _ => self.runs.push(MessageRun { peer, owner_row, slot_row, rows, packed: None }),
            }
        }
    }

    /// The number of runs from `at` on that have the same peer.
    fn runs_of_peer(&self, at: usize) -> usize {
        self.runs[at..].iter().take_while(|r| r.peer == self.runs[at].peer).count()
    }

    /// Joins the runs of each peer that has too many: the owner packs them, and they are contiguous in the slot anyway.
    /// Both ends of a message count the same runs, so both join them.
    fn pack_runs(&mut self, tensors: usize) {
        let (mut at, mut kept, mut row) = (0, 0, 0);
        while at < self.runs.len() {
            let n = self.runs_of_peer(at);
            if is_fragmented(n, tensors) {
                let rows = self.runs[at..at + n].iter().map(|r| r.rows).sum();
                self.runs[kept] = MessageRun { rows, packed: Some(row), ..self.runs[at] };
                row += rows;
                kept += 1;
            } else {
                self.runs.copy_within(at..at + n, kept);
                kept += n;
            }
            at += n;
        }
        self.runs.truncate(kept);
    }

    /// Joins the runs of one peer: in the slot they are contiguous anyway.
    fn join_runs(&mut self) {
        self.runs.dedup_by(|b, a| {
            let same = a.peer == b.peer && a.slot_row + a.rows == b.slot_row;
            if same {
                a.rows += b.rows;
            }
            same
        });
    }
}
