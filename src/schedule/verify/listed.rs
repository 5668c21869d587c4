// SPDX-License-Identifier: MIT OR Apache-2.0
//! A schedule with all arguments of all operations listed, as the runtime passes them to kernels and transports.

use alloc::{format, string::String, vec, vec::Vec};
use core::convert::Infallible;

use super::one_rank::Lists;
use crate::{
    call::{Band, Pair, QRange, Range},
    schedule::{
        AttendOp, BackwardOp, BlockView, Buf, BufferView, MessageView, OpKind, Schedule, TensorId, expand::Expansion,
    },
};

/// One block: `dst = Σ sources`.
#[derive(Clone, Debug)]
pub(super) struct Sum {
    pub dst: BufferView,
    pub sources: Vec<BufferView>,
}

/// The ranges and pairs of a call.
#[derive(Clone, Debug, Default)]
pub(super) struct Met {
    pub q: Vec<QRange>,
    pub k: Vec<Range>,
    pub pairs: Vec<Pair>,
    pub bands: Vec<Band>,
}

impl Met {
    /// The pairs of a q range.
    pub fn keys(&self, q: usize) -> &[Pair] {
        &self.pairs[self.q[q].keys_begin as usize..self.q[q].keys_end as usize]
    }
}

/// An operation with all its arguments listed.
#[derive(Clone, Debug)]
pub(super) enum ListedOp {
    Delta {
        delta: BufferView,
    },
    SinkGradient {
        delta: BufferView,
        partial: BufferView,
    },
    /// Converts digits to numbers; for the content of rows this is a copy.
    SinkTotal(Sum),
    /// Parts run one after another; the order of blocks within a part is free.
    Sums(Vec<Vec<Sum>>),
    /// Parts run one after another; each block is the merge of its two sources, the first of which is its own
    /// destination. Blocks come in pairs: one of o, then one of its lse.
    Merges(Vec<Vec<Sum>>),
    /// `strict`: each received row must be in an allowed pair.
    Exchange {
        messages: Vec<MessageView>,
        strict: bool,
    },
    Attend(AttendOp, Met),
    Backward(BackwardOp, Met),
}

/// Lists the arguments of one operation of a schedule that passed the one-rank check.
pub(super) fn list_one(s: &Schedule, i: usize, e: &mut Expansion) -> ListedOp {
    match &s.ops[i].kind {
        OpKind::Delta { delta } => ListedOp::Delta { delta: *delta },
        OpKind::SinkGradient { delta, partial } => ListedOp::SinkGradient { delta: *delta, partial: *partial },
        OpKind::SinkTotal { digits } => {
            let dst = BufferView { buf: Buf::User(TensorId::Dsinks), row: 0, head: 0, ..*digits };
            ListedOp::SinkTotal(Sum { dst, sources: vec![*digits] })
        }
        OpKind::Transform { .. } | OpKind::Pack(_) | OpKind::Reduce(_) => ListedOp::Sums(sums(s, i, e)),
        OpKind::Merge(_) => ListedOp::Merges(sums(s, i, e)),
        kind @ (OpKind::Exchange { .. } | OpKind::Fetch { .. } | OpKind::Return(_)) => {
            let strict = matches!(kind, OpKind::Fetch { .. });
            ListedOp::Exchange { messages: e.messages(s, i).to_vec(), strict }
        }
        OpKind::Attend(op) => {
            s.attend_ranges(op, &mut e.scratch);
            ListedOp::Attend(*op, met(e))
        }
        OpKind::Backward(op) => {
            s.ring_steps(op.ring_steps).ranges(op.ring_step as usize, &mut e.scratch);
            ListedOp::Backward(*op, met(e))
        }
    }
}

fn sums(s: &Schedule, i: usize, e: &mut Expansion) -> Vec<Vec<Sum>> {
    let mut parts = Vec::new();
    let Ok(()) = e.blocks(s, i, |blocks, sources| {
        let sum = |b: &BlockView| Sum {
            dst: b.dst,
            sources: sources[b.sources_begin as usize..b.sources_end as usize].to_vec(),
        };
        parts.push(blocks.iter().map(sum).collect());
        Ok::<(), Infallible>(())
    });
    parts
}

fn met(e: &Expansion) -> Met {
    let r = e.scratch.ranges();
    Met { q: r.q.to_vec(), k: r.k.to_vec(), pairs: r.pairs.to_vec(), bands: r.bands.to_vec() }
}

/// Lists of operations whose arguments are listed already.
impl Lists for &[ListedOp] {
    fn messages(&mut self, _: &Schedule, op: usize) -> &[MessageView] {
        match &self[op] {
            ListedOp::Exchange { messages, .. } => messages,
            _ => &[],
        }
    }

    fn blocks<E>(
        &mut self,
        _: &Schedule,
        op: usize,
        mut each: impl FnMut(&[BlockView], &[BufferView]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (ListedOp::Sums(parts) | ListedOp::Merges(parts)) = &self[op] else { return Ok(()) };
        parts.iter().try_for_each(|part| {
            let mut sources = Vec::new();
            let block = |sum: &Sum| {
                let sources_begin = sources.len() as u32;
                sources.extend_from_slice(&sum.sources);
                BlockView { dst: sum.dst, sources_begin, sources_end: sources.len() as u32 }
            };
            let blocks: Vec<BlockView> = part.iter().map(block).collect();
            each(&blocks, &sources)
        })
    }
}

/// Checks that ranges lie in views of this many rows, and that pairs name ranges of one document.
pub(super) fn check_met(met: &Met, q_rows: u64, k_rows: u64) -> Result<(), String> {
    let sane = |r: &Range, rows: u64| {
        if r.len == 0 || r.block == 0 || r.period < r.block || r.row < 0 || (r.row as u64 + u64::from(r.len)) > rows {
            return Err(format!("{r:?} is not a range of a view of {rows} rows"));
        }
        Ok(())
    };
    met.k.iter().try_for_each(|k| sane(k, k_rows))?;
    for q in &met.q {
        sane(&q.range, q_rows)?;
        if q.keys_begin > q.keys_end || q.keys_end as usize > met.pairs.len() {
            return Err(format!("a q range names pairs {}..{} of {}", q.keys_begin, q.keys_end, met.pairs.len()));
        }
        for &Pair { k, band } in &met.pairs[q.keys_begin as usize..q.keys_end as usize] {
            match (met.k.get(k as usize), met.bands.get(band as usize)) {
                (None, _) => return Err(format!("a pair names k range {k} of {}", met.k.len())),
                (_, None) => return Err(format!("a pair names band {band} of {}", met.bands.len())),
                _ => {}
            }
        }
    }
    Ok(())
}
