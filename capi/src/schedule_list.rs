// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of a schedule's handle: a rank's operations with all their arguments, as the structs of the header.
//!
//! All operations are listed when the handle is made, so that it never changes and any thread may read it. The caller's
//! tensors and the buffers of the workspace are in one list here, so that a view has one number for either.

use core::ptr::null;
use std::collections::BTreeMap;

use super::{
    handle::HandleKind,
    problem::DTYPES,
    ranges::{cpattn_band, cpattn_pair, cpattn_q_range, cpattn_range, cpattn_ranges, cpattn_score},
    schedule::{cpattn_buffer, cpattn_op, cpattn_op_message, cpattn_schedule_info, cpattn_sum, cpattn_view},
    trace::name,
};
use cpattn::{
    Dtype, Error, Plan, Result, Side,
    call::{Gradients, HeadMap, QRange},
    schedule::{
        AllToAll, AllToAllDirection, AttendOp, BackwardOp, Buf, BufferView, CallRanges, Decay, Direction, ExpandedOp,
        MessageView, Operation, Purpose, Scan, Schedule, SumBlock, TensorId,
    },
};

const DELTA: i32 = 0;
const SINK_GRADIENT: i32 = 1;
const SINK_TOTAL: i32 = 2;
const SUM: i32 = 3;
const MERGE: i32 = 4;
const EXCHANGE: i32 = 5;
const ATTEND: i32 = 6;
const ATTEND_BACKWARD: i32 = 7;
const COMBINE: i32 = 8;
const COMPOSE: i32 = 9;
const COMPOSE_MATRIX: i32 = 10;

/// The views and numbers of an operation; a view of no heads is not there.
#[derive(Clone, Copy, Default)]
struct Arguments {
    kind: i32,
    q: cpattn_view,
    k: cpattn_view,
    v: cpattn_view,
    running: cpattn_view,
    running_lse: cpattn_view,
    o: cpattn_view,
    lse: cpattn_view,
    d_o: cpattn_view,
    delta: cpattn_view,
    dq: cpattn_view,
    dk: cpattn_view,
    dv: cpattn_view,
    sinks: cpattn_view,
    dsinks: cpattn_view,
    heads: Option<HeadMap>,
    accumulate_keys: bool,
    per_q_head: bool,
    gradients: i32,
}

/// What an operation has.
#[derive(Default)]
struct ListedOp {
    arguments: Arguments,
    messages: Vec<cpattn_op_message>,
    sums: Vec<cpattn_sum>,
    sources: Vec<cpattn_view>,
    q: Vec<cpattn_q_range>,
    k: Vec<cpattn_range>,
    pairs: Vec<cpattn_pair>,
    bands: Vec<cpattn_band>,
}

/// The content of a handle: a rank's operations in one direction.
pub struct ListedSchedule {
    rank: u32,
    direction: i32,
    workspace_bytes: u64,
    score: cpattn_score,
    aligned: bool,
    buffers: Vec<cpattn_buffer>,
    ops: Vec<(Operation, ListedOp)>,
}

impl HandleKind for ListedSchedule {
    const NAME: &'static str = "schedule";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatLIST");
}

/// The list of buffers: those of the caller that the direction uses, then the workspace.
struct Buffers {
    list: Vec<cpattn_buffer>,
    /// The number of a tensor, by its place in [`TensorId::ALL`].
    tensors: [u32; TensorId::COUNT],
    first_of_workspace: u32,
}

/// A tensor of the caller's: its shape, its type, and whether the schedule writes it.
pub(super) type Given = (TensorId, [usize; 3], Dtype, bool);

/// The tensors that a direction of attention uses, without those that a run may leave out.
pub(super) fn given_to_attention(plan: &Plan, rank: usize, direction: Direction) -> Vec<Given> {
    let p = plan.problem();
    let used = |tensor: TensorId| {
        let written = tensor.is_written(direction, p.sinks())?;
        Some((tensor, tensor.shape(plan, rank), tensor.dtype(p), written))
    };
    TensorId::ALL.into_iter().filter(|tensor| !tensor.is_optional()).filter_map(used).collect()
}

/// The two tensors of an all-to-all.
pub(super) fn given_to_all_to_all(plan: &Plan, rank: usize, a: AllToAll) -> Vec<Given> {
    let (p, share, dim) = (plan.problem(), plan.heads_of(rank), a.dim as usize);
    let (all, own) = match a.side {
        Side::Q => (p.heads(), share.q.len()),
        Side::K => (p.kv_heads(), share.kv.len()),
    };
    let to_heads = a.direction == AllToAllDirection::ToHeads;
    vec![
        (TensorId::OwnTokens, [plan.local_tokens(a.side, rank).len(), all, dim], a.dtype, !to_heads),
        (TensorId::OwnHeads, [plan.tokens_between_all_to_alls(a.side, rank), own, dim], a.dtype, to_heads),
    ]
}

impl Buffers {
    fn new(given: Vec<Given>, schedule: &Schedule) -> Self {
        let (mut list, mut tensors) = (Vec::new(), [u32::MAX; TensorId::COUNT]);
        for (tensor, [rows, heads, dim], dtype, written) in given {
            tensors[tensor as usize] = list.len() as u32;
            list.push(cpattn_buffer {
                name: name(if tensor == TensorId::DO { "d_o" } else { tensor.name() }),
                tensor: tensor as i32,
                dtype: dtype as i32,
                rows: rows as u64,
                heads: heads as u32,
                dim: dim as u32,
                offset: 0,
                written: written.into(),
                reserved: 0,
            });
        }
        let first_of_workspace = list.len() as u32;
        list.extend(schedule.buffers().iter().map(|b| cpattn_buffer {
            name: name(b.name),
            tensor: -1,
            dtype: b.dtype as i32,
            rows: b.rows,
            heads: b.heads,
            dim: b.dim,
            offset: b.offset,
            written: 1,
            reserved: 0,
        }));
        Self { list, tensors, first_of_workspace }
    }

    fn view(&self, v: &BufferView) -> cpattn_view {
        let buffer = match v.buf {
            Buf::User(tensor) => self.tensors[tensor as usize],
            Buf::Work(i) => self.first_of_workspace + u32::from(i),
        };
        cpattn_view { row: v.row, rows: v.rows, buffer, head: v.head, heads: v.heads, reserved: 0 }
    }

    /// All of the caller's tensor; none if the direction does not use it.
    fn whole(&self, tensor: TensorId) -> cpattn_view {
        let buffer = self.tensors[tensor as usize];
        self.list.get(buffer as usize).map_or_else(Default::default, |b| cpattn_view {
            rows: b.rows,
            buffer,
            heads: b.heads,
            ..Default::default()
        })
    }

    /// The sinks of a call's heads.
    fn sinks(&self, heads: &HeadMap, q: &BufferView) -> cpattn_view {
        match self.whole(TensorId::Sinks) {
            none if none.heads == 0 => none,
            all => cpattn_view { head: heads.q_offset, heads: q.heads, ..all },
        }
    }

    /// Bytes of a row.
    fn row_bytes(&self, buffer: u32) -> u64 {
        let b = &self.list[buffer as usize];
        let (_, dtype) = DTYPES[b.dtype as usize];
        u64::from(b.heads) * u64::from(b.dim) * dtype.size() as u64
    }
}

/// Lists the operations of a schedule.
struct Lister {
    buffers: Buffers,
    /// Messages so far, by peer and direction.
    messages: BTreeMap<(usize, bool), u32>,
    /// Whether decays of a scan are matrices.
    matrix: bool,
}

impl Lister {
    fn op(&mut self, name: &str, expanded: ExpandedOp) -> Result<ListedOp> {
        let mut op = ListedOp::default();
        let (of, a) = (&self.buffers, &mut op.arguments);
        match expanded {
            ExpandedOp::Delta { delta } => {
                a.kind = DELTA;
                (a.o, a.d_o, a.delta) = (of.whole(TensorId::O), of.whole(TensorId::DO), of.view(&delta));
            }
            ExpandedOp::SinkGradient { delta, partial } => {
                a.kind = SINK_GRADIENT;
                (a.lse, a.sinks) = (of.whole(TensorId::Lse), of.whole(TensorId::Sinks));
                (a.delta, a.dsinks) = (of.view(&delta), of.view(&partial));
            }
            ExpandedOp::SinkTotal(sum) => {
                a.kind = SINK_TOTAL;
                self.sums(&mut op, &[vec![sum]]);
            }
            ExpandedOp::Sums(parts) => {
                a.kind = SUM;
                self.sums(&mut op, &parts);
            }
            ExpandedOp::Merges(parts) => {
                a.kind = MERGE;
                self.sums(&mut op, &parts);
            }
            ExpandedOp::Combine(merge) => {
                a.kind = COMBINE;
                a.sinks = match of.whole(TensorId::Sinks) {
                    none if none.heads == 0 => none,
                    all => cpattn_view { head: merge.first_head, heads: merge.o.dst.heads, ..all },
                };
                self.sums(&mut op, &[vec![merge.o, merge.lse]]);
            }
            ExpandedOp::Compose(joins) => {
                a.kind = if self.matrix { COMPOSE_MATRIX } else { COMPOSE };
                self.sums(&mut op, &[joins]);
            }
            ExpandedOp::Exchange { messages, .. } => {
                a.kind = EXCHANGE;
                op.messages = messages.iter().map(|m| self.message(m)).collect();
            }
            ExpandedOp::Attend(call, ranges) => {
                self.attend(a, &call);
                list_ranges(&mut op, ranges);
            }
            ExpandedOp::Backward(call, ranges) => {
                self.attend_backward(a, &call);
                list_ranges(&mut op, ranges);
            }
            _ => {
                let limit = "the C interface has no number for it";
                return Err(Error::unsupported(format!("operation {name}"), limit, "use a later library"));
            }
        }
        Ok(op)
    }

    fn message(&mut self, m: &MessageView) -> cpattn_op_message {
        let count = self.messages.entry((m.peer, m.send)).or_default();
        let tag = *count;
        *count += 1;
        let view = self.buffers.view(&m.view);
        let row = self.buffers.row_bytes(view.buffer);
        let (offset, bytes) = (m.view.row * row, m.view.rows * row);
        cpattn_op_message { view, offset, bytes, peer: m.peer as u32, tag, send: m.send.into(), reserved: 0 }
    }

    fn sums(&self, op: &mut ListedOp, parts: &[Vec<SumBlock>]) {
        for (part, blocks) in parts.iter().enumerate() {
            for block in blocks {
                let sources_begin = op.sources.len() as u32;
                op.sources.extend(block.sources.iter().map(|v| self.buffers.view(v)));
                let sources_end = op.sources.len() as u32;
                let dst = self.buffers.view(&block.dst);
                op.sums.push(cpattn_sum { dst, sources_begin, sources_end, part: part as u32, reserved: 0 });
            }
        }
    }

    fn attend(&self, a: &mut Arguments, call: &AttendOp) {
        let view = |v| self.buffers.view(v);
        a.kind = ATTEND;
        (a.q, a.k, a.v) = (view(&call.q), view(&call.k), view(&call.v));
        if let Some((o, lse)) = &call.running {
            (a.running, a.running_lse) = (view(o), view(lse));
        }
        if let Some((o, lse)) = &call.result {
            (a.o, a.lse) = (view(o), view(lse));
            a.sinks = self.buffers.sinks(&call.heads, &call.q);
        }
        a.heads = Some(call.heads);
    }

    fn attend_backward(&self, a: &mut Arguments, call: &BackwardOp) {
        let view = |v| self.buffers.view(v);
        a.kind = ATTEND_BACKWARD;
        (a.q, a.k, a.v, a.d_o) = (view(&call.q), view(&call.k), view(&call.v), view(&call.d_o));
        (a.lse, a.delta) = (view(&call.lse), view(&call.delta));
        if let Some(dq) = call.dq.as_ref().filter(|_| call.gradients != Gradients::Keys) {
            a.dq = view(dq);
        }
        if let Some((dk, dv)) = call.dkv.as_ref().filter(|_| call.gradients != Gradients::Queries) {
            (a.dk, a.dv) = (view(dk), view(dv));
        }
        (a.heads, a.gradients) = (Some(call.heads), call.gradients as i32);
        (a.accumulate_keys, a.per_q_head) = (call.accumulate_keys, call.per_q_head);
    }
}

fn list_ranges(op: &mut ListedOp, r: CallRanges) {
    let q_range = |q: &QRange| cpattn_q_range {
        range: q.range,
        document: q.document,
        keys_begin: q.keys_begin,
        keys_end: q.keys_end,
        mode: q.mode as u8,
        reserved: [0; 7],
    };
    op.q = r.q.iter().map(q_range).collect();
    (op.k, op.pairs, op.bands) = (r.k, r.pairs, r.bands);
}

impl ListedSchedule {
    pub(super) fn new(plan: &Plan, given: Vec<Given>, direction: i32, schedule: &Schedule) -> Result<Self> {
        let matrix = matches!(schedule.purpose(), Purpose::Scan(Scan { decay: Decay::Matrix, .. }));
        let mut lister = Lister { buffers: Buffers::new(given, schedule), messages: BTreeMap::new(), matrix };
        let ops = schedule
            .operations()
            .enumerate()
            .map(|(i, of)| Ok((of, lister.op(of.name, schedule.expand(i))?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            rank: schedule.rank() as u32,
            direction,
            workspace_bytes: schedule.workspace_bytes(),
            score: plan.problem().score(),
            aligned: plan.options().reproducible,
            buffers: lister.buffers.list,
            ops,
        })
    }

    pub(super) fn describe(&self) -> cpattn_schedule_info {
        cpattn_schedule_info {
            struct_size: 0,
            buffers: start(&self.buffers),
            buffer_count: self.buffers.len(),
            op_count: self.ops.len(),
            workspace_bytes: self.workspace_bytes,
            rank: self.rank,
            direction: self.direction,
        }
    }

    /// An operation, with the addresses of its lists; `None` if the schedule has no operation of this number.
    pub(super) fn op(&self, index: usize) -> Option<cpattn_op> {
        let (of, op) = self.ops.get(index)?;
        let a = &op.arguments;
        Some(cpattn_op {
            struct_size: 0,
            kind: a.kind,
            lane: of.lane as i32,
            after: of.after.map_or(-1, |i| i as i64),
            name: name(of.name),
            phase: name(of.phase),
            step: of.step,
            reserved: 0,
            messages: start(&op.messages),
            message_count: op.messages.len(),
            sums: start(&op.sums),
            sum_count: op.sums.len(),
            sources: start(&op.sources),
            source_count: op.sources.len(),
            q: a.q,
            k: a.k,
            v: a.v,
            running: a.running,
            running_lse: a.running_lse,
            o: a.o,
            lse: a.lse,
            d_o: a.d_o,
            delta: a.delta,
            dq: a.dq,
            dk: a.dk,
            dv: a.dv,
            sinks: a.sinks,
            dsinks: a.dsinks,
            heads: a.heads.unwrap_or(HeadMap { q_offset: 0, kv_offset: 0, group: 1 }),
            aligned: self.aligned.into(),
            accumulate_keys: a.accumulate_keys.into(),
            per_q_head: a.per_q_head.into(),
            gradients: a.gradients,
            reserved_2: 0,
            score: self.score,
            ranges: cpattn_ranges {
                q: start(&op.q),
                q_count: op.q.len(),
                k: start(&op.k),
                k_count: op.k.len(),
                pairs: start(&op.pairs),
                pair_count: op.pairs.len(),
                bands: start(&op.bands),
                band_count: op.bands.len(),
            },
            q_range_size: size_of::<cpattn_q_range>(),
            pair_size: size_of::<cpattn_pair>(),
        })
    }
}

/// The address of a list; NULL for an empty one.
fn start<T>(list: &[T]) -> *const T {
    if list.is_empty() { null() } else { list.as_ptr() }
}
