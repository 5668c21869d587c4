// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists an operation's messages and blocks when it is reached.
//!
//! A visit's rows are found by [`Visits`] from the shares alone, so they are not stored. [`Expansion`] holds the lists
//! of one operation at a time; its room is set when the schedule is made, so that running a plan allocates nothing.

use alloc::vec::Vec;

use super::{BlockView, Carry, Kind, MessageView, Schedule, Scratch, View, Visits};

/// Room for the lists of one operation.
#[derive(Debug, Default)]
pub struct Expansion {
    /// Fragments and ranges of a visit.
    pub scratch: Scratch,
    /// Messages of an exchange.
    pub messages: Vec<MessageView>,
    /// Blocks of a transform or a reduce.
    pub blocks: Vec<BlockView>,
    /// Their sources.
    pub sources: Vec<View>,
    runs: Vec<Run>,
}

/// Rows that are contiguous in the owner's share and in the slot, with one peer.
#[derive(Clone, Copy, Debug)]
struct Run {
    peer: u32,
    owner_row: u64,
    slot_row: u64,
    rows: u64,
}

impl Expansion {
    /// Room for every operation of `schedule`.
    pub fn new(schedule: &Schedule) -> Self {
        let mut e = Self::default();
        e.reserve(schedule);
        e
    }

    /// Grows to hold every operation of `schedule`.
    pub fn reserve(&mut self, schedule: &Schedule) {
        let visits = || schedule.keys.iter().chain(&schedule.queries);
        for v in visits() {
            self.scratch.reserve(v);
        }
        let runs = visits().map(|v| v.longest()).max().unwrap_or(0);
        let grow = |len: usize, n: usize| n.saturating_sub(len);
        self.runs.reserve(grow(self.runs.len(), runs));
        // Four tensors travel at most, and an exchange both sends and receives.
        self.messages.clear();
        self.messages.reserve(schedule.messages.len().max(8 * runs));
        self.blocks.clear();
        self.blocks.reserve(schedule.blocks.len().max(2 * runs));
        self.sources.clear();
        self.sources.reserve(schedule.sources.len().max(4 * runs));
    }

    /// The most messages, blocks and sources of any one operation.
    pub fn capacity(&self) -> (usize, usize, usize) {
        (self.messages.capacity(), self.blocks.capacity(), self.sources.capacity())
    }

    /// Lists the messages of an exchange. Between two ranks both list them in the same order: tensor by tensor, run by
    /// run.
    pub fn messages(&mut self, schedule: &Schedule, op: usize) -> &[MessageView] {
        self.messages.clear();
        match &schedule.ops[op].kind {
            Kind::Exchange { begin, end } => {
                self.messages.extend_from_slice(&schedule.messages[*begin as usize..*end as usize]);
            }
            Kind::Fetch { visit, visits, carry } => {
                let v = schedule.visits(*visits);
                v.outgoing(*visit as usize, &mut self.scratch);
                self.list_runs(v);
                self.add(schedule, carry, true, |c, r| c.own.slice(r.owner_row, r.rows));
                v.incoming(*visit as usize, &mut self.scratch);
                self.list_runs(v);
                self.add(schedule, carry, false, |c, r| c.slot.slice(r.slot_row, r.rows));
            }
            Kind::Return { visit, visits, carry } => {
                let v = schedule.visits(*visits);
                v.incoming(*visit as usize, &mut self.scratch);
                self.list_runs(v);
                self.join_runs();
                self.add(schedule, carry, true, |c, r| c.own.slice(r.slot_row, r.rows));
                v.outgoing(*visit as usize, &mut self.scratch);
                self.list_runs(v);
                self.join_runs();
                self.add(schedule, carry, false, |c, r| c.slot.slice(r.slot_row, r.rows));
            }
            _ => {}
        }
        &self.messages
    }

    /// Lists the blocks of a transform or a reduce. What several peers return for one row is added peer by peer, so a
    /// reduce comes in parts whose blocks do not overlap: calls `each(blocks, sources)` for every part, in order.
    pub fn blocks<E>(
        &mut self,
        schedule: &Schedule,
        op: usize,
        mut each: impl FnMut(&[BlockView], &[View]) -> Result<(), E>,
    ) -> Result<(), E> {
        match &schedule.ops[op].kind {
            Kind::Transform { begin, end } => each(&schedule.blocks[*begin as usize..*end as usize], &schedule.sources),
            Kind::Reduce { visit, visits, carry } => {
                let v = schedule.visits(*visits);
                v.outgoing(*visit as usize, &mut self.scratch);
                self.list_runs(v);
                let mut at = 0;
                while at < self.runs.len() {
                    let peer = self.runs[at].peer;
                    self.blocks.clear();
                    self.sources.clear();
                    while at < self.runs.len() && self.runs[at].peer == peer {
                        let r = self.runs[at];
                        for c in carry {
                            let dst = c.own.slice(r.owner_row, r.rows);
                            let begin = self.sources.len() as u32;
                            self.sources.push(dst);
                            self.sources.push(c.slot.slice(r.slot_row, r.rows));
                            self.blocks.push(BlockView { dst, sources_begin: begin, sources_end: begin + 2 });
                        }
                        at += 1;
                    }
                    each(&self.blocks, &self.sources)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add(&mut self, schedule: &Schedule, carry: &[Carry], send: bool, view: impl Fn(&Carry, &Run) -> View) {
        for c in carry {
            for r in &self.runs {
                self.messages.push(MessageView { peer: schedule.ring_peer(r.peer), view: view(c, r), send });
            }
        }
    }

    /// The fragments in `scratch`, joined where they touch. The rank's own are left out.
    fn list_runs(&mut self, visits: &Visits) {
        self.runs.clear();
        for f in &self.scratch.fragments {
            if f.peer as usize == visits.ring_rank() {
                continue;
            }
            let (owner_row, slot_row, rows) = (f.owner_row as u64, f.range.row as u64, u64::from(f.range.len));
            match self.runs.last_mut() {
                Some(r) if r.peer == f.peer && r.owner_row + r.rows == owner_row && r.slot_row + r.rows == slot_row => {
                    r.rows += rows;
                }
                _ => self.runs.push(Run { peer: f.peer, owner_row, slot_row, rows }),
            }
        }
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
