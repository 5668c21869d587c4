// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks what the unsafe calls of a run rely on: once, when a schedule is prepared, also in release builds.
//!
//! A run turns every slice of a schedule into an address without further checks. So [`check`] goes through the whole
//! list before the first run, and refuses the schedule unless
//!
//! 1. every buffer lies in the workspace, at a multiple of the alignment;
//! 2. every slice of every operation lies inside its buffer, or inside the caller's tensor, as long as that has the given
//!    form; tensors that a direction does not have are not named, and those that it reads are not written;
//! 3. messages are contiguous, not empty, and with other ranks of the group;
//! 4. what an operation writes is apart from everything else that it touches, but for sums that begin with their own
//!    destination and a running result that lies in o itself;
//! 5. operations of the two lanes that may run at the same time do not touch the same bytes, if one of them writes.
//!
//! [`schedule::verify`](crate::schedule::verify) proves much more, over all ranks together, and needs a table of every
//! row: it is for tests. This check looks at the slices of one rank only. It assumes for 5 that an attention accesses
//! all rows of its slices. Kernels check the given ranges against their tensors in every call.

use alloc::{format, string::String, vec, vec::Vec};

use super::{
    flaw::flaw,
    races::clocks,
    slices::{ScheduleCheck, Touch, extents},
};
use crate::{
    call::Gradients,
    error::Result,
    schedule::{
        Buf, BufferView, CirculatingSide, Lane, MessageView, Op, OpKind, Schedule, TensorForm, TensorId,
        expand::{Expansion, ROWS_PER_PEER},
    },
};

/// Checks a schedule; see the module.
///
/// # Errors
/// [`Error::Schedule`](crate::Error::Schedule) with the operation and what is wrong with it.
pub(crate) fn check(
    schedule: &Schedule,
    tensors: &[Option<TensorForm>; TensorId::COUNT],
    expansion: &mut Expansion,
) -> Result<()> {
    let check = ScheduleCheck { schedule, extents: extents(schedule, tensors)? };
    let mut touched = Vec::with_capacity(schedule.ops.len());
    for op in 0..schedule.ops.len() {
        touched.push(check.operation(op, expansion).map_err(|text| flaw(schedule.rank, op, text))?);
    }
    check.lanes(&touched)
}

impl ScheduleCheck<'_> {
    /// The slices that an operation accesses, sorted by first byte, after checking that they are in bounds and do not
    /// overlap.
    fn operation(&self, i: usize, expansion: &mut Expansion) -> Result<Vec<Touch>, String> {
        let Op { kind, lane, after, .. } = &self.schedule.ops[i];
        if after.is_some_and(|a| a as usize >= i || self.schedule.ops[a as usize].lane == *lane) {
            return Err(format!("waits for operation {after:?}, which is not one before it in the other lane"));
        }
        let mut list = Vec::new();
        let mut add = |view: BufferView, write: bool| self.touch(view, write).map(|t| list.push(t));
        let user = |t: TensorId| {
            let extent = &self.extents[t as usize];
            BufferView { buf: Buf::User(t), row: 0, rows: extent.rows, head: 0, heads: extent.heads }
        };
        match kind {
            OpKind::Delta { delta } => {
                add(*delta, true)?;
                add(user(TensorId::O), false)?;
                add(user(TensorId::DO), false)?;
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
                list = self.blocks(i, expansion)?;
            }
            OpKind::Pack { ring_step, ring_steps, tensors } | OpKind::Reduce { ring_step, ring_steps, tensors } => {
                self.ring_step(*ring_steps, *ring_step)?;
                let pack = matches!(kind, OpKind::Pack { .. });
                let whole = self.whole(tensors, !pack, pack)?;
                list = self.blocks(i, expansion)?;
                self.inside(&list, &whole)?;
            }
            OpKind::Exchange { begin, end } => {
                self.entries(*begin, *end, self.schedule.messages.len())?;
                list = self.messages(expansion.messages(self.schedule, i))?;
            }
            OpKind::Fetch { ring_step, ring_steps, tensors, packed } => {
                self.ring_step(*ring_steps, *ring_step)?;
                if !packed.is_empty() && packed.len() != tensors.len() {
                    return Err(format!("packs {} of {} tensors", packed.len(), tensors.len()));
                }
                let mut whole = self.whole(tensors, false, true)?;
                for view in packed {
                    whole.push(self.touch(*view, false)?);
                }
                list = self.messages(expansion.messages(self.schedule, i))?;
                self.inside(&list, &whole)?;
            }
            OpKind::Return { ring_step, ring_steps, tensors } => {
                self.ring_step(*ring_steps, *ring_step)?;
                let whole = self.whole(tensors, false, true)?;
                list = self.messages(expansion.messages(self.schedule, i))?;
                self.inside(&list, &whole)?;
            }
            OpKind::Attend(a) => {
                self.ring_step(CirculatingSide::Keys, a.ring_step)?;
                for view in [a.q, a.k, a.v] {
                    add(view, false)?;
                }
                for view in [a.o, a.lse].into_iter().chain(a.running.map(|(o, lse)| [o, lse]).into_iter().flatten()) {
                    add(view, true)?;
                }
            }
            OpKind::Backward(b) => {
                self.ring_step(b.ring_steps, b.ring_step)?;
                for view in [b.q, b.k, b.v, b.d_o, b.lse, b.delta] {
                    add(view, false)?;
                }
                for view in b.dq.into_iter().filter(|_| b.gradients != Gradients::Keys) {
                    add(view, true)?;
                }
                let keys = b.dkv.filter(|_| b.gradients != Gradients::Queries);
                for view in keys.into_iter().flat_map(|(dk, dv)| [dk, dv]) {
                    add(view, true)?;
                }
            }
        }
        list.sort_unstable_by_key(|t| t.low);
        if matches!(kind, OpKind::Delta { .. } | OpKind::SinkGradient { .. } | OpKind::Backward(_)) {
            self.clash(&list, |_, _| false)?;
        }
        if let OpKind::Attend(a) = kind {
            // A running o may be the very slice that the result goes to; of one tensor, the same rows.
            self.clash(&list, |x, y| x.view == y.view && x.view == a.o)?;
        }
        Ok(list)
    }

    fn entries(&self, begin: u32, end: u32, len: usize) -> Result<(), String> {
        if begin > end || end as usize > len {
            return Err(format!("names entries {begin}..{end} of {len}"));
        }
        Ok(())
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

    /// Sums: of one shape, apart from each other within each part, and from their sources but the first.
    fn blocks(&self, i: usize, expansion: &mut Expansion) -> Result<Vec<Touch>, String> {
        let mut all = Vec::new();
        let mut part = Vec::new();
        expansion.blocks(self.schedule, i, |blocks, sources| -> Result<(), String> {
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
            self.clash(&part, |_, _| false)?;
            all.extend_from_slice(&part);
            Ok(())
        })?;
        Ok(all)
    }

    /// Messages: contiguous, few for each peer, and apart from each other where they arrive.
    fn messages(&self, messages: &[MessageView]) -> Result<Vec<Touch>, String> {
        let mut list = Vec::with_capacity(messages.len());
        let mut count = vec![[0usize; 2]; self.schedule.group.len()];
        for m in messages {
            if !self.schedule.group.contains(&m.peer) || m.peer == self.schedule.rank {
                return Err(format!("a message to rank {}, group {:?}", m.peer, self.schedule.group));
            }
            let n = &mut count[m.peer - self.schedule.group.start][usize::from(m.send)];
            *n += 1;
            if *n > ROWS_PER_PEER {
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
        list.sort_unstable_by_key(|t| t.low);
        self.clash(&list, |_, _| false)?;
        Ok(list)
    }

    /// Checks that operations which may run at the same time do not conflict. The order within each lane and the edges
    /// `after`, closed under both, determine which may.
    fn lanes(&self, touched: &[Vec<Touch>]) -> Result<()> {
        let s = self.schedule;
        let clocks = clocks(s);
        let of = |lane: Lane| (0..s.ops.len()).filter(move |&i| s.ops[i].lane == lane);
        let communication: Vec<usize> = of(Lane::Communication).collect();
        let (c, m) = (Lane::Compute as usize, Lane::Communication as usize);
        for a in of(Lane::Compute) {
            // Of the other lane, operations before this index are complete, and operations after the last wait for this one.
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

/// Two slices of two operations that share a byte, one of them written. Both lists are sorted by first byte.
fn hit<'a>(a: &'a [Touch], b: &'a [Touch]) -> Option<(&'a Touch, &'a Touch)> {
    let mut begin = 0;
    // Slices that end before all later ones begin are never visited again.
    let reach = |list: &[Touch]| list.iter().map(|t| t.high - t.low).max().unwrap_or(0);
    let longest = reach(b);
    for x in a.iter().filter(|x| x.low < x.high) {
        while b.get(begin).is_some_and(|y| y.low + longest <= x.low) {
            begin += 1;
        }
        for y in b[begin..].iter().take_while(|y| y.low < x.high) {
            if (x.write || y.write) && y.low < y.high && ScheduleCheck::meet(x, y) {
                return Some((x, y));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;
