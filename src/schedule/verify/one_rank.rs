// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks one rank's schedule alone: everything that depends neither on another rank nor on the content of rows.
//!
//! It goes through the whole list, and refuses the schedule unless
//!
//! 1. every buffer lies in the workspace, at a multiple of the alignment;
//! 2. every slice of every operation lies inside its buffer, or inside the caller's tensor, as long as that has the
//!    given form; tensors that a direction does not have are not named, and those that it reads are not written;
//! 3. messages are contiguous, not empty, and with other ranks of the group;
//! 4. each slice that an operation writes is disjoint from all other slices that it accesses, except for sums that
//!    begin with their own destination, and a running result that is o itself;
//! 5. operations of the two lanes that may run at the same time do not touch the same bytes, if one of them writes.
//!    Happens-before is the order within each lane and the edges `after`, closed under both. An exchange is one
//!    operation here: transports may move its messages in any order, so these must not overlap either.
//!
//! A run turns every slice of a schedule into an address without further checks, so each schedule is checked when it is
//! prepared, also in release builds. The proof of all ranks begins with the same check, and its other parts rely on it.
//! An attention counts as accessing all rows of its slices. Kernels check ranges against their tensors in every call.

use alloc::{format, string::String, vec, vec::Vec};

use super::{
    flaw::flaw,
    slices::{ScheduleCheck, Touch},
};
use crate::{
    call::Gradients,
    error::Result,
    schedule::{
        BlockView, Buf, BufferView, CirculatingSide, Lane, MessageView, Op, OpKind, Purpose, Schedule, StepRows,
        TensorForm, TensorId,
        expand::{Expansion, ROWS_PER_PEER},
    },
};

/// The source of the messages and blocks of operations.
pub(super) trait Lists {
    /// The messages of an exchange.
    fn messages(&mut self, schedule: &Schedule, op: usize) -> &[MessageView];

    /// Calls `each(blocks, sources)` for every part of a transform, of what is packed or of a reduce.
    fn blocks<E>(
        &mut self,
        schedule: &Schedule,
        op: usize,
        each: impl FnMut(&[BlockView], &[BufferView]) -> Result<(), E>,
    ) -> Result<(), E>;
}

impl Lists for Expansion {
    fn messages(&mut self, schedule: &Schedule, op: usize) -> &[MessageView] {
        self.messages(schedule, op)
    }

    fn blocks<E>(
        &mut self,
        schedule: &Schedule,
        op: usize,
        each: impl FnMut(&[BlockView], &[BufferView]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.blocks(schedule, op, each)
    }
}

/// Checks a schedule (see the module) for caller's tensors of these forms.
///
/// # Errors
/// [`Error::Schedule`](crate::Error::Schedule) with the operation and what is wrong with it.
#[cfg_attr(not(feature = "std"), expect(dead_code, reason = "runs need std"))]
pub(crate) fn check(
    schedule: &Schedule,
    tensors: &[Option<TensorForm>; TensorId::COUNT],
    expansion: &mut Expansion,
) -> Result<()> {
    let check = ScheduleCheck::new(schedule, tensors)?;
    check.lanes(&check.operations(expansion)?)
}

impl ScheduleCheck<'_> {
    /// The slices that each operation accesses, after checking each operation by itself.
    pub(super) fn operations(&self, lists: &mut impl Lists) -> Result<Vec<Vec<Touch>>> {
        let mut counts = vec![[0; 2]; self.schedule.group.len()];
        let operation = |op| {
            let touched = self.operation(op, lists, &mut counts);
            touched.map_err(|text| flaw(self.schedule.rank, op, text))
        };
        (0..self.schedule.ops.len()).map(operation).collect()
    }

    /// The slices that an operation accesses, sorted by first byte, after checking that they are in bounds and do not
    /// overlap. `counts`: room for [`ScheduleCheck::messages`].
    fn operation(&self, i: usize, lists: &mut impl Lists, counts: &mut [[u8; 2]]) -> Result<Vec<Touch>, String> {
        let Op { kind, lane, after, .. } = &self.schedule.ops[i];
        if after.is_some_and(|a| a as usize >= i || self.schedule.ops[a as usize].lane == *lane) {
            return Err(format!("waits for operation {after:?}, which is not one before it in the other lane"));
        }
        let communicates = kind.is_exchange() || matches!(kind, OpKind::Pack(_) | OpKind::Reduce(_) | OpKind::Merge(_));
        if !matches!(kind, OpKind::Transform { .. }) && communicates != (*lane == Lane::Communication) {
            return Err(format!("{} is on the {lane:?} lane", kind.name()));
        }
        let mut list = Vec::new();
        let mut add = |view: BufferView, write: bool| self.touch(view, write).map(|t| list.push(t));
        let user = |t: TensorId| {
            let extent = &self.extents[t as usize];
            BufferView::whole(Buf::User(t), extent.rows, extent.heads)
        };
        match kind {
            OpKind::Delta { delta } => {
                add(*delta, true)?;
                add(user(TensorId::O), false)?;
                add(user(TensorId::DO), false)?;
                add(user(TensorId::Lse), false)?;
                add(user(TensorId::DLse), false)?;
            }
            OpKind::SinkGradient { delta, partial } => {
                add(*partial, true)?;
                add(*delta, false)?;
                add(user(TensorId::Lse), false)?;
                add(user(TensorId::Sinks), false)?;
            }
            OpKind::SinkTotal { digits } => {
                add(user(TensorId::Dsinks), true)?;
                add(*digits, false)?;
            }
            OpKind::Transform { begin, end } => {
                self.entries(*begin, *end, self.schedule.blocks.len())?;
                let blocks = &self.schedule.blocks[*begin as usize..*end as usize];
                for b in blocks {
                    self.entries(b.sources_begin, b.sources_end, self.schedule.sources.len())?;
                }
                list = self.blocks(i, lists)?;
            }
            OpKind::Pack(rows) | OpKind::Reduce(rows) | OpKind::Merge(rows) => {
                if matches!(kind, OpKind::Merge(_)) && rows.tensors.len() != 2 {
                    return Err(format!("merges {} tensors, not o and its lse", rows.tensors.len()));
                }
                let pack = matches!(kind, OpKind::Pack(_));
                let whole = self.step_rows(rows, !pack, pack)?;
                list = self.blocks(i, lists)?;
                self.inside(&list, &whole)?;
            }
            OpKind::Combine { o, lse, first_head } => {
                for b in [o, lse] {
                    self.entries(b.sources_begin, b.sources_end, self.schedule.sources.len())?;
                }
                list = self.blocks(i, lists)?;
                let sinks = user(TensorId::Sinks);
                if sinks.heads > 0 {
                    list.push(self.touch(sinks.of_heads(*first_head, o.dst.heads), false)?);
                }
            }
            OpKind::Compose { begin, end } => {
                self.entries(*begin, *end, self.schedule.blocks.len())?;
                for b in &self.schedule.blocks[*begin as usize..*end as usize] {
                    self.entries(b.sources_begin, b.sources_end, self.schedule.sources.len())?;
                }
                list = self.joins(i, lists)?;
            }
            OpKind::Exchange { begin, end } => {
                self.entries(*begin, *end, self.schedule.messages.len())?;
                list = self.messages(lists.messages(self.schedule, i), counts)?;
            }
            OpKind::Fetch { rows, .. } | OpKind::Return(rows) => {
                let mut whole = self.step_rows(rows, false, true)?;
                if let OpKind::Fetch { packed, .. } = kind {
                    if !packed.is_empty() && packed.len() != rows.tensors.len() {
                        return Err(format!("packs {} of {} tensors", packed.len(), rows.tensors.len()));
                    }
                    for view in packed {
                        whole.push(self.touch(*view, false)?);
                    }
                }
                list = self.messages(lists.messages(self.schedule, i), counts)?;
                self.inside(&list, &whole)?;
            }
            OpKind::Attend(a) => {
                self.ring_step(a.part.side(), a.ring_step)?;
                for view in [a.q, a.k, a.v] {
                    add(view, false)?;
                }
                add(user(TensorId::MaxLogit), true)?;
                let written = a.result.into_iter().flat_map(|(o, lse)| [o, lse]);
                for view in written.chain(a.running.map(|(_, lse)| lse)) {
                    add(view, true)?;
                }
                // A running o may be the same slice as the result.
                if let Some((o, _)) = a.running.filter(|(o, _)| a.result.is_none_or(|(final_o, _)| *o != final_o)) {
                    add(o, true)?;
                }
            }
            OpKind::Backward(b) => {
                self.ring_step(b.side, b.ring_step)?;
                for view in [b.q, b.k, b.v, b.d_o, b.lse, b.delta] {
                    add(view, false)?;
                }
                let (dk, dv) = b.dkv.unzip();
                for (view, unless) in [(b.dq, Gradients::Keys), (dk, Gradients::Queries), (dv, Gradients::Queries)] {
                    let touch = view.map(|view| self.touch(view, true)).transpose()?;
                    list.extend(touch.filter(|_| b.gradients != unless));
                }
            }
        }
        list.sort_unstable_by_key(|t| t.low);
        if matches!(
            kind,
            OpKind::Delta { .. }
                | OpKind::SinkGradient { .. }
                | OpKind::SinkTotal { .. }
                | OpKind::Attend(_)
                | OpKind::Backward(_)
        ) {
            self.clash(&list)?;
        }
        Ok(list)
    }

    fn entries(&self, begin: u32, end: u32, len: usize) -> Result<(), String> {
        if begin > end || end as usize > len {
            return Err(format!("names entries {begin}..{end} of {len}"));
        }
        Ok(())
    }

    /// All rows of the tensors that an operation of the ring sends, packs or sums.
    fn step_rows(&self, rows: &StepRows, own: bool, slot: bool) -> Result<Vec<Touch>, String> {
        self.ring_step(rows.side, rows.ring_step)?;
        let mut list = Vec::with_capacity(2 * rows.tensors.len());
        for c in &rows.tensors {
            list.extend([self.touch(c.own, own)?, self.touch(c.slot, slot)?]);
            let (from, to) = (self.extent(c.own.buf)?, self.extent(c.slot.buf)?);
            if (c.own.heads, from.dim) != (c.slot.heads, to.dim) {
                return Err(format!("{} and {} differ in heads or dim", from.name, to.name));
            }
        }
        Ok(list)
    }

    fn ring_step(&self, side: CirculatingSide, step: u32) -> Result<(), String> {
        let steps = match side {
            CirculatingSide::Keys => &self.schedule.keys,
            CirculatingSide::Queries => &self.schedule.queries,
        };
        match steps {
            Some(s) if (step as usize) < s.list().len() => Ok(()),
            Some(s) => Err(format!("names ring step {step} of {}", s.list().len())),
            None => Err(format!("names ring steps of {side:?}, which the schedule lacks")),
        }
    }

    /// Blocks of a sum: equal shapes, disjoint within each part, and disjoint from their sources except the first.
    fn blocks(&self, i: usize, lists: &mut impl Lists) -> Result<Vec<Touch>, String> {
        let mut all = Vec::new();
        let mut part = Vec::new();
        lists.blocks(self.schedule, i, |blocks, sources| -> Result<(), String> {
            part.clear();
            for b in blocks {
                self.entries(b.sources_begin, b.sources_end, sources.len())?;
                part.push(self.touch(b.dst, true)?);
                let dim = self.extent(b.dst.buf)?.dim;
                for (n, source) in sources[b.sources_begin as usize..b.sources_end as usize].iter().enumerate() {
                    let same = (source.rows, source.heads) == (b.dst.rows, b.dst.heads);
                    if !same || self.extent(source.buf)?.dim != dim {
                        return Err(format!(
                            "a block of {} rows × {} heads × {dim} reads {source:?}",
                            b.dst.rows, b.dst.heads
                        ));
                    }
                    let touch = self.touch(*source, false)?;
                    if n > 0 || *source != b.dst {
                        part.push(touch);
                    }
                }
            }
            part.sort_unstable_by_key(|t| t.low);
            self.clash(&part)?;
            all.extend_from_slice(&part);
            Ok(())
        })?;
        Ok(all)
    }

    /// Joins of segments: a decay and what it is applied to, whose shape is that of the result; all apart from results.
    fn joins(&self, i: usize, lists: &mut impl Lists) -> Result<Vec<Touch>, String> {
        let Purpose::Scan(scan) = self.schedule.purpose else { return Err("joins segments, but is not a scan".into()) };
        let mut all = Vec::new();
        lists.blocks(self.schedule, i, |blocks, sources| -> Result<(), String> {
            for b in blocks {
                self.entries(b.sources_begin, b.sources_end, sources.len())?;
                let sources = &sources[b.sources_begin as usize..b.sources_end as usize];
                if !matches!(sources.len(), 2 | 3) {
                    return Err(format!("joins {} tensors, not 2 or 3", sources.len()));
                }
                all.push(self.touch(b.dst, true)?);
                let dim = u64::from(self.extent(b.dst.buf)?.dim);
                let whole = if sources.len() == 2 { scan.decay_dim() } else { scan.state_dim() };
                for (n, source) in sources.iter().enumerate() {
                    let needed = if n == 0 { scan.decay_dim() } else { whole };
                    let same = (source.rows, source.heads) == (b.dst.rows, b.dst.heads);
                    if !same || dim != whole || u64::from(self.extent(source.buf)?.dim) != needed {
                        return Err(format!("a join into {:?} of dim {dim} reads {source:?}", b.dst));
                    }
                    all.push(self.touch(*source, false)?);
                }
            }
            Ok(())
        })?;
        all.sort_unstable_by_key(|t| t.low);
        self.clash(&all)?;
        Ok(all)
    }

    /// Messages: contiguous, few for each peer, and disjoint where they arrive. `counts` (by peer and direction) must
    /// be 0 before the call and is 0 after it.
    fn messages(&self, messages: &[MessageView], counts: &mut [[u8; 2]]) -> Result<Vec<Touch>, String> {
        let mut list = Vec::with_capacity(messages.len());
        for m in messages {
            if !self.schedule.group.contains(&m.peer) || m.peer == self.schedule.rank {
                return Err(format!("a message to rank {}, group {:?}", m.peer, self.schedule.group));
            }
            let n = &mut counts[m.peer - self.schedule.group.start][usize::from(m.send)];
            *n += 1;
            if usize::from(*n) > ROWS_PER_PEER {
                return Err(format!("more than {ROWS_PER_PEER} messages with rank {}, one way", m.peer));
            }
            let t = self.extent(m.view.buf)?;
            if m.view.rows == 0 || m.view.heads == 0 {
                return Err(format!("an empty message with rank {}", m.peer));
            }
            if m.view.rows > 1 && m.view.heads != t.heads {
                return Err(format!("a message of {} is not contiguous", t.name));
            }
            list.push(self.touch(m.view, !m.send)?);
        }
        messages.iter().for_each(|m| counts[m.peer - self.schedule.group.start] = [0; 2]);
        list.sort_unstable_by_key(|t| t.low);
        self.clash(&list)?;
        Ok(list)
    }

    /// Checks that operations which may run at the same time do not conflict. The order within each lane and the edges
    /// `after`, closed under both, determine which may.
    pub(super) fn lanes(&self, touched: &[Vec<Touch>]) -> Result<()> {
        let s = self.schedule;
        let clocks = clocks(s);
        let of = |lane: Lane| (0..s.ops.len()).filter(move |&i| s.ops[i].lane == lane);
        let communication: Vec<usize> = of(Lane::Communication).collect();
        let (c, m) = (Lane::Compute as usize, Lane::Communication as usize);
        for a in of(Lane::Compute) {
            // Operations of the other lane before this index are complete; those after the last one checked wait for
            // `a`.
            for &b in communication.iter().skip(clocks[a].0[m]) {
                if clocks[b].0[c] > clocks[a].1 {
                    break;
                }
                if let Some((x, y)) = hit(&touched[a], &touched[b]) {
                    let (first, last) = (a.min(b), a.max(b));
                    let text = format!(
                        "may run at the same time as operation {first} ({}): {} against {}",
                        s.ops[first].kind.name(),
                        self.describe(x),
                        self.describe(y)
                    );
                    return Err(flaw(s.rank, last, text));
                }
            }
        }
        Ok(())
    }
}

/// For each operation: how many operations of each lane are complete when it begins, and its index in its lane.
fn clocks(s: &Schedule) -> Vec<([usize; 2], usize)> {
    let mut lanes = [([0usize; 2], 0usize); 2];
    let mut clocks: Vec<([usize; 2], usize)> = Vec::with_capacity(s.ops.len());
    for op in &s.ops {
        let me = op.lane as usize;
        let (mut clock, number) = lanes[me];
        clock[me] = number;
        if let Some(after) = op.after {
            let (before, n) = clocks[after as usize];
            clock[me] = clock[me].max(before[me]);
            clock[1 - me] = clock[1 - me].max(before[1 - me]).max(n + 1);
        }
        clocks.push((clock, number));
        lanes[me] = (clock, number + 1);
    }
    clocks
}

/// Two slices of two operations that share a byte, at least one of them written. Both lists are sorted by first byte.
fn hit<'a>(a: &'a [Touch], b: &'a [Touch]) -> Option<(&'a Touch, &'a Touch)> {
    let mut begin = 0;
    // Slices that end before all later slices begin are not compared again.
    let reach = |list: &[Touch]| list.iter().map(|t| t.high - t.low).max().unwrap_or(0);
    let longest = reach(b);
    for x in a.iter().filter(|x| x.low < x.high) {
        while b.get(begin).is_some_and(|y| y.low + longest <= x.low) {
            begin += 1;
        }
        for y in b[begin..].iter().take_while(|y| y.low < x.high) {
            if (x.write || y.write) && y.low < y.high && ScheduleCheck::overlap(x, y) {
                return Some((x, y));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;
