// SPDX-License-Identifier: MIT OR Apache-2.0
//! A schedule with all arguments of all operations listed, as the runtime passes them to kernels and transports.

use alloc::{collections::BTreeMap, format, vec, vec::Vec};

use super::{
    flaw::flaw,
    memory::{Memory, side_of},
};
use crate::{
    batch::Side,
    call::{QRange, Range},
    error::Result,
    plan::Plan,
    schedule::{
        AttendOp, BackwardOp, Buf, BufferView, CirculatingSide, MessageView, OpKind, Schedule, TensorId,
        expand::{Expansion, ROWS_PER_PEER},
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
    pub pairs: Vec<u32>,
}

impl Met {
    /// The k ranges of a q range.
    pub fn keys(&self, q: usize) -> &[u32] {
        &self.pairs[self.q[q].keys_begin as usize..self.q[q].keys_end as usize]
    }
}

/// An operation, written out.
#[derive(Clone, Debug)]
pub(super) enum ListedOp {
    Delta {
        delta: BufferView,
    },
    SinkGradient {
        delta: BufferView,
        partial: BufferView,
    },
    /// To the content of rows a copy: digits become a number.
    SinkTotal(Sum),
    /// Parts run one after another; blocks of a part in any order.
    Sums(Vec<Vec<Sum>>),
    /// Parts run one after another; each block is the merge of its two sources, the first of which is its own. The block after
    /// one of o is that of its lse.
    Merges(Vec<Vec<Sum>>),
    /// `strict`: what arrives must meet an allowed pair.
    Exchange {
        messages: Vec<MessageView>,
        strict: bool,
    },
    Attend(AttendOp, Met),
    Backward(BackwardOp, Met),
}

/// Writes out every operation of a schedule.
pub(super) fn list(s: &Schedule, e: &mut Expansion) -> Result<Vec<ListedOp>> {
    e.reserve(s);
    (0..s.ops.len()).map(|i| list_one(s, i, e)).collect()
}

/// Writes out one operation.
pub(super) fn list_one(s: &Schedule, i: usize, e: &mut Expansion) -> Result<ListedOp> {
    let err = |text| flaw(s.rank, i, text);
    let ring_step_exists = |circulating_side: CirculatingSide, ring_step: u32| {
        let ring_steps = match circulating_side {
            CirculatingSide::Keys => &s.keys,
            CirculatingSide::Queries => &s.queries,
        };
        match ring_steps {
            Some(v) if (ring_step as usize) < v.list().len() => Ok(()),
            Some(v) => Err(err(format!("names ring step {ring_step} of {}", v.list().len()))),
            None => Err(err(format!("names ring steps of {circulating_side:?}, which the schedule lacks"))),
        }
    };
    let entries = |begin: u32, end: u32, len: usize| {
        if begin > end || end as usize > len {
            return Err(err(format!("names entries {begin}..{end} of {len}")));
        }
        Ok(())
    };
    Ok(match &s.ops[i].kind {
        OpKind::Delta { delta } => ListedOp::Delta { delta: *delta },
        OpKind::SinkGradient { delta, partial } => ListedOp::SinkGradient { delta: *delta, partial: *partial },
        OpKind::SinkTotal { digits } => {
            let dst = BufferView { buf: Buf::User(TensorId::Dsinks), ..*digits };
            ListedOp::SinkTotal(Sum { dst, sources: vec![*digits] })
        }
        OpKind::Transform { begin, end } => {
            entries(*begin, *end, s.blocks.len())?;
            for b in &s.blocks[*begin as usize..*end as usize] {
                entries(b.sources_begin, b.sources_end, s.sources.len())?;
            }
            ListedOp::Sums(sums(s, i, e)?)
        }
        OpKind::Pack { ring_step, ring_steps, .. } | OpKind::Reduce { ring_step, ring_steps, .. } => {
            ring_step_exists(*ring_steps, *ring_step)?;
            ListedOp::Sums(sums(s, i, e)?)
        }
        OpKind::Merge { ring_step, ring_steps, .. } => {
            ring_step_exists(*ring_steps, *ring_step)?;
            ListedOp::Merges(sums(s, i, e)?)
        }
        OpKind::Exchange { begin, end } => {
            entries(*begin, *end, s.messages.len())?;
            ListedOp::Exchange { messages: e.messages(s, i).to_vec(), strict: false }
        }
        OpKind::Fetch { ring_step, ring_steps, .. } | OpKind::Return { ring_step, ring_steps, .. } => {
            ring_step_exists(*ring_steps, *ring_step)?;
            let strict = matches!(s.ops[i].kind, OpKind::Fetch { .. });
            ListedOp::Exchange { messages: e.messages(s, i).to_vec(), strict }
        }
        OpKind::Attend(op) => {
            ring_step_exists(op.part.ring_steps(), op.ring_step)?;
            s.attend_ranges(op, &mut e.scratch);
            ListedOp::Attend(*op, met(e))
        }
        OpKind::Backward(op) => {
            ring_step_exists(op.ring_steps, op.ring_step)?;
            s.ring_steps(op.ring_steps).ranges(op.ring_step as usize, &mut e.scratch);
            ListedOp::Backward(*op, met(e))
        }
    })
}

fn sums(s: &Schedule, i: usize, e: &mut Expansion) -> Result<Vec<Vec<Sum>>> {
    let mut parts = Vec::new();
    e.blocks(s, i, |blocks, sources| -> Result<()> {
        let sum = |b: &crate::schedule::BlockView| Sum {
            dst: b.dst,
            sources: sources[b.sources_begin as usize..b.sources_end as usize].to_vec(),
        };
        parts.push(blocks.iter().map(sum).collect());
        Ok(())
    })?;
    Ok(parts)
}

fn met(e: &Expansion) -> Met {
    let r = e.scratch.ranges();
    Met { q: r.q.to_vec(), k: r.k.to_vec(), pairs: r.pairs.to_vec() }
}

impl ListedOp {
    /// Whether its views take all heads of their buffers, and its results have the heads of their operands.
    pub fn takes_whole_rows(&self, s: &Schedule, plan: &Plan) -> bool {
        let p = plan.problem();
        let whole = |v: &BufferView| {
            let heads = match v.buf {
                Buf::User(tensor) if side_of(tensor) == Side::K => Some(p.kv_heads() as u32),
                Buf::User(_) => Some(p.heads() as u32),
                Buf::Work(i) => s.buffers.get(usize::from(i)).map(|b| b.heads),
            };
            v.head == 0 && Some(v.heads) == heads
        };
        let mut all = !matches!(self, Self::Backward(b, _) if b.per_q_head);
        let listed = self.views(|v| {
            all &= whole(v);
            Ok(())
        });
        all && listed.is_ok()
    }

    /// Calls `each` for every view.
    fn views(&self, mut each: impl FnMut(&BufferView) -> Result<()>) -> Result<()> {
        match self {
            Self::Delta { delta } => each(delta),
            Self::SinkGradient { delta, partial } => {
                each(delta)?;
                each(partial)
            }
            Self::SinkTotal(s) => {
                each(&s.dst)?;
                s.sources.iter().try_for_each(each)
            }
            Self::Sums(parts) | Self::Merges(parts) => parts.iter().flatten().try_for_each(|s| {
                each(&s.dst)?;
                s.sources.iter().try_for_each(&mut each)
            }),
            Self::Exchange { messages, .. } => messages.iter().try_for_each(|m| each(&m.view)),
            Self::Attend(a, _) => {
                let results = a.running.into_iter().chain(a.result).flat_map(|(o, lse)| [o, lse]);
                [a.q, a.k, a.v].into_iter().chain(results).try_for_each(|v| each(&v))
            }
            Self::Backward(b, _) => {
                let (dk, dv) = (b.dkv.map(|d| d.0), b.dkv.map(|d| d.1));
                [Some(b.q), Some(b.k), Some(b.v), Some(b.d_o), Some(b.lse), Some(b.delta), b.dq, dk, dv]
                    .iter()
                    .flatten()
                    .try_for_each(each)
            }
        }
    }
}

/// That views lie in their buffers, blocks have one shape, messages are contiguous, and ranges lie in their views.
pub(super) fn check_views(s: &Schedule, listed: &[ListedOp], memory: &Memory) -> Result<()> {
    for (i, work) in listed.iter().enumerate() {
        let err = |text| flaw(s.rank, i, text);
        work.views(|v| memory.check_view(v).map_err(err))?;
        match work {
            ListedOp::Sums(parts) | ListedOp::Merges(parts) => {
                for sum in parts.iter().flatten() {
                    if let Some(v) = sum.sources.iter().find(|v| (v.rows, v.heads) != (sum.dst.rows, sum.dst.heads)) {
                        return Err(err(format!(
                            "a block of {} rows × {} heads reads {v:?}",
                            sum.dst.rows, sum.dst.heads
                        )));
                    }
                    let dim = memory.shape(sum.dst.buf).dim;
                    if let Some(v) = sum.sources.iter().find(|v| memory.shape(v.buf).dim != dim) {
                        return Err(err(format!("a block of dim {dim} reads {} of another", memory.name(v.buf))));
                    }
                }
            }
            ListedOp::Exchange { messages, .. } => {
                if messages.is_empty() {
                    return Err(err("an exchange without messages".into()));
                }
                let mut sent: BTreeMap<usize, usize> = BTreeMap::new();
                for m in messages.iter().filter(|m| m.send) {
                    let count = sent.entry(m.peer).or_default();
                    *count += 1;
                    if *count > ROWS_PER_PEER {
                        return Err(err(format!("more than {ROWS_PER_PEER} messages to rank {}", m.peer)));
                    }
                }
                for m in messages {
                    let shape = memory.shape(m.view.buf);
                    if !s.group.contains(&m.peer) || m.peer == s.rank {
                        return Err(err(format!("a message to rank {}, group {:?}", m.peer, s.group)));
                    }
                    if m.view.rows == 0 || m.view.heads == 0 {
                        return Err(err(format!("an empty message with rank {}", m.peer)));
                    }
                    if m.view.rows > 1 && m.view.heads != shape.heads {
                        return Err(err(format!("a message of {} is not contiguous", memory.name(m.view.buf))));
                    }
                }
            }
            ListedOp::Attend(a, met) => check_met(met, a.q.rows, a.k.rows).map_err(err)?,
            ListedOp::Backward(b, met) => check_met(met, b.q.rows, b.k.rows).map_err(err)?,
            _ => {}
        }
    }
    Ok(())
}

/// The slices that stand for all that an operation of the ring moves, packs or sums: that each lies in its buffer, also
/// where none of its rows is needed (a run refuses it otherwise), and that what is listed lies in one of them.
pub(super) fn check_tensors(s: &Schedule, listed: &[ListedOp], memory: &Memory) -> Result<()> {
    for (i, (op, work)) in s.ops.iter().zip(listed).enumerate() {
        let err = |text| flaw(s.rank, i, text);
        let (tensors, packed) = match &op.kind {
            OpKind::Fetch { tensors, packed, .. } => (tensors, packed.as_slice()),
            OpKind::Pack { tensors, .. }
            | OpKind::Return { tensors, .. }
            | OpKind::Reduce { tensors, .. }
            | OpKind::Merge { tensors, .. } => (tensors, [].as_slice()),
            _ => continue,
        };
        if !packed.is_empty() && packed.len() != tensors.len() {
            return Err(err(format!("packs {} of {} tensors", packed.len(), tensors.len())));
        }
        let whole: Vec<&BufferView> = tensors.iter().flat_map(|t| [&t.own, &t.slot]).chain(packed).collect();
        whole.iter().try_for_each(|v| memory.check_view(v).map_err(err))?;
        for t in tensors {
            let dim = |v: &BufferView| memory.shape(v.buf).dim;
            if (t.own.heads, dim(&t.own)) != (t.slot.heads, dim(&t.slot)) {
                let (own, slot) = (memory.name(t.own.buf), memory.name(t.slot.buf));
                return Err(err(format!("{own} and {slot} differ in heads or dim")));
            }
        }
        work.views(|v| match whole.iter().any(|w| holds(w, v)) {
            true => Ok(()),
            false => Err(err(format!("{v:?} is no part of what the operation names"))),
        })?;
    }
    Ok(())
}

/// Whether one view lies in another; both lie in their buffers.
fn holds(whole: &BufferView, part: &BufferView) -> bool {
    let rows = whole.row <= part.row && part.row + part.rows <= whole.row + whole.rows;
    let heads = whole.head <= part.head && part.head + part.heads <= whole.head + whole.heads;
    whole.buf == part.buf && rows && heads
}

fn check_met(met: &Met, q_rows: u64, k_rows: u64) -> Result<(), alloc::string::String> {
    let sane = |r: &Range, rows: u64| {
        if r.len == 0 || r.block == 0 || r.period < r.block || r.row < 0 || (r.row as u64 + u64::from(r.len)) > rows {
            return Err(format!("{r:?} is no range of {rows} rows"));
        }
        Ok(())
    };
    met.k.iter().try_for_each(|k| sane(k, k_rows))?;
    for q in &met.q {
        sane(&q.range, q_rows)?;
        if q.keys_begin > q.keys_end || q.keys_end as usize > met.pairs.len() {
            return Err(format!("a q range names pairs {}..{} of {}", q.keys_begin, q.keys_end, met.pairs.len()));
        }
        for &k in &met.pairs[q.keys_begin as usize..q.keys_end as usize] {
            match met.k.get(k as usize) {
                None => return Err(format!("a pair names k range {k} of {}", met.k.len())),
                Some(k) if k.doc != q.range.doc => {
                    return Err(format!("a pair joins documents {} and {}", q.range.doc, k.doc));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}
