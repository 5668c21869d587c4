// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much each operation of a schedule computes, copies and sends.
//!
//! Costs and simulations read operations only through this module, so that a new kind of operation is counted in one
//! place. For most kinds the lists that the runtime uses suffice: exchanges have messages, and operations that neither
//! exchange nor attend read and write the rows of blocks. Only attention is distinguished by kind.

use alloc::vec::Vec;

use crate::{
    call::Gradients,
    plan::Plan,
    report::bound::ShareSizes,
    schedule::{AttendPart, Buf, BufferView, CirculatingSide, OpKind, Purpose, Schedule, TensorId, expand::Expansion},
};

/// The pairs and rows of one head of an attention call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeadSize {
    /// Allowed (q, k) pairs.
    pub pairs: u128,
    /// q rows that have keys.
    pub rows: u64,
    /// k rows, each once.
    pub keys: u64,
    /// Allowed pairs on an edge of the mask.
    pub edges: u64,
}

/// An attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallSize {
    /// One head's part.
    pub head: HeadSize,
    /// q heads.
    pub heads: u64,
    /// Multiply-adds of a pair and a head.
    pub dims: u64,
    /// The backward's kernel.
    pub backward: bool,
}

impl CallSize {
    /// Multiply-adds of all heads.
    pub(crate) fn multiply_adds(&self) -> u128 {
        self.head.pairs * u128::from(self.heads) * u128::from(self.dims)
    }
}

/// A message of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageSize {
    pub peer: usize,
    pub bytes: u64,
    pub send: bool,
}

/// Sizes of the operations of one schedule. Sizes of ring steps are cached.
pub(crate) struct OpSizes<'a> {
    plan: &'a Plan,
    schedule: &'a Schedule,
    expansion: Expansion,
    known: Vec<(CirculatingSide, u32, HeadSize)>,
}

impl<'a> OpSizes<'a> {
    pub(crate) fn new(plan: &'a Plan, schedule: &'a Schedule) -> Self {
        Self { plan, schedule, expansion: Expansion::new(schedule), known: Vec::new() }
    }

    /// The messages of an operation; none unless it is an exchange.
    pub(crate) fn messages(&mut self, op: usize) -> impl Iterator<Item = MessageSize> + '_ {
        let (plan, schedule) = (self.plan, self.schedule);
        let list = self.expansion.messages(schedule, op).iter();
        list.map(move |m| MessageSize { peer: m.peer, bytes: bytes(plan, schedule, &m.view), send: m.send })
    }

    /// The attention of an operation; none unless it calls the kernel.
    pub(crate) fn call(&mut self, op: usize) -> Option<CallSize> {
        let schedule = self.schedule;
        let (dk, dv) = (self.plan.problem().head_dim() as u64, self.plan.problem().value_dim() as u64);
        let (side, ring_step, heads, dims, backward) = match &schedule.ops[op].kind {
            OpKind::Attend(a) if a.part == AttendPart::Finish => return None,
            OpKind::Attend(a) => (a.part.side(), a.ring_step, a.q.heads, dk + dv, false),
            OpKind::Backward(b) => {
                let dims = match b.gradients {
                    Gradients::All => 3 * dk + 2 * dv,
                    Gradients::Queries => 2 * dk + dv,
                    Gradients::Keys => 2 * dk + 2 * dv,
                };
                (b.side, b.ring_step, b.q.heads, dims, true)
            }
            _ => return None,
        };
        Some(CallSize { head: self.head(side, ring_step), heads: heads.into(), dims, backward })
    }

    fn head(&mut self, side: CirculatingSide, ring_step: u32) -> HeadSize {
        // Several passes use the same ring step.
        if let Some(&(.., n)) = self.known.iter().find(|k| (k.0, k.1) == (side, ring_step)) {
            return n;
        }
        let mask = self.plan.problem().mask();
        let window = (mask.left_limit(), mask.right_limit());
        self.schedule.ring_steps(side).ranges(ring_step as usize, &mut self.expansion.scratch);
        let r = self.expansion.scratch.ranges();
        let mut head = HeadSize { keys: r.k.iter().map(|k| u64::from(k.len)).sum(), ..HeadSize::default() };
        for q in r.q {
            let keys = &r.pairs[q.keys_begin as usize..q.keys_end as usize];
            for pair in keys {
                let (k, limits) = (&r.k[pair.k as usize], r.bands[pair.band as usize].within(window));
                head.pairs += u128::from(q.range.area_within(k, &limits));
                head.edges += q.range.edges_within(k, &limits);
            }
            head.rows += if keys.is_empty() { 0 } else { u64::from(q.range.len) };
        }
        self.known.push((side, ring_step, head));
        head
    }

    /// Bytes that an operation reads and writes if it neither attends nor exchanges.
    pub(crate) fn copied(&mut self, op: usize) -> u64 {
        let (plan, schedule) = (self.plan, self.schedule);
        let of = |view: &BufferView| bytes(plan, schedule, view);
        let user = |tensor: TensorId| {
            let [tokens, heads, dim] = tensor.shape(plan, schedule.rank);
            (tokens * heads * dim * tensor.dtype(plan.problem()).size()) as u64
        };
        match &schedule.ops[op].kind {
            OpKind::Attend(a) if a.part == AttendPart::Finish => {
                a.running.iter().chain(&a.result).map(|(o, lse)| of(o) + of(lse)).sum()
            }
            OpKind::Attend(_) | OpKind::Backward(_) => 0,
            kind if kind.is_exchange() => 0,
            OpKind::Delta { delta } => user(TensorId::O) + user(TensorId::DO) + of(delta),
            OpKind::SinkGradient { delta, partial } => user(TensorId::Lse) + of(delta) + of(partial),
            OpKind::SinkTotal { digits } => of(digits),
            _ => {
                let mut total = 0;
                let Ok(()) = self.expansion.blocks(schedule, op, |blocks, sources| {
                    for b in blocks {
                        let from = &sources[b.sources_begin as usize..b.sources_end as usize];
                        total += of(&b.dst) + from.iter().map(of).sum::<u64>();
                    }
                    Ok::<(), core::convert::Infallible>(())
                });
                total
            }
        }
    }
}

/// Bytes of some rows and heads of a buffer.
fn bytes(plan: &Plan, schedule: &Schedule, view: &BufferView) -> u64 {
    let p = plan.problem();
    let element = match view.buf {
        Buf::Work(i) => {
            let b = &schedule.buffers[i as usize];
            u64::from(b.dim) * b.dtype.size() as u64
        }
        Buf::User(tensor) => match (schedule.purpose, tensor) {
            (Purpose::AllToAll(of), _) => u64::from(of.dim) * of.dtype.size() as u64,
            (Purpose::Combine(of), TensorId::PartialO) => (tensor.dim(p) * of.partial.size()) as u64,
            (Purpose::Scan(of), TensorId::Decay) => of.decay_dim() * of.dtype.size() as u64,
            (Purpose::Scan(of), _) => of.state_dim() * of.dtype.size() as u64,
            _ => (tensor.dim(p) * tensor.dtype(p).size()) as u64,
        },
    };
    view.rows * u64::from(view.heads) * element
}

/// Bytes of the caller's tensors of one rank: all that the direction reads or writes.
pub(crate) fn tensor_bytes(plan: &Plan, sizes: &ShareSizes, direction: crate::schedule::Direction) -> u64 {
    let used = |t: &TensorId| t.is_written(direction, plan.problem().sinks()).is_some();
    let bytes = |t: TensorId| {
        let p = plan.problem();
        let tokens = if t.is_per_head() { 1 } else { sizes.own[t.side() as usize] };
        (tokens * t.heads(p) * t.dim(p) * t.dtype(p).size()) as u64
    };
    TensorId::ALL.into_iter().filter(used).map(bytes).sum()
}
