// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes one operation: converts rows of buffers into addresses and calls a backend.
//!
//! A [`Operations`] is the CPU or a device; the rest is the same for both. All lists use memory that was reserved when
//! the plan was prepared.

use std::vec::Vec;

use super::{bind::Bindings, tags::Tags};
use crate::{
    batch::{Batch, Side},
    call::{
        Attend, AttendBackward, Block, Compose, Delta, Dropout, DropoutMask, Merge, MergeAll, RawTensor, SinkGradient,
        Transform,
    },
    error::{Error, Result, RunName},
    plan::Plan,
    schedule::{
        AttendOp, BackwardOp, Buf, BufferView, Decay, OpKind, Purpose, Scan, Schedule, TensorId, expand::Expansion,
    },
    transport::{Label, Message},
};

/// Where operations run. Each call does, or enqueues, one; the lane that calls keeps the order.
pub(super) trait Operations {
    /// Comes before each operation, with its index and its name.
    fn begin(&mut self, _op: usize, _label: Label) {}
    /// See [`Attend`].
    ///
    /// # Safety
    /// The tensors are valid on this backend, and used by nothing else while the call runs.
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()>;
    /// See [`AttendBackward`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()>;
    /// See [`Transform`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()>;
    /// See [`Merge`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn merge(&mut self, args: &Merge) -> Result<()>;
    /// See [`MergeAll`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn merge_all(&mut self, args: &MergeAll<'_>) -> Result<()>;
    /// See [`Compose`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn compose(&mut self, args: &Compose<'_>) -> Result<()>;
    /// See [`Delta`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn delta(&mut self, args: &Delta) -> Result<()>;
    /// See [`SinkGradient`].
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()>;
    /// See [`sinks::sink_total`](crate::kernel::sinks::sink_total).
    ///
    /// # Safety
    /// As [`Operations::attend`].
    unsafe fn sink_total(&mut self, digits: &RawTensor, dsinks: &RawTensor) -> Result<()>;
    /// See [`Transport::exchange`](crate::transport::Transport::exchange).
    ///
    /// # Safety
    /// As [`Transport::exchange`](crate::transport::Transport::exchange).
    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()>;
    /// The problem's ALiBi slopes, `[1 or documents, heads, 1]` f32, where the backend can read them.
    fn alibi_slopes(&self, plan: &Plan) -> RawTensor;
}

/// The lists of one lane, filled anew for each operation.
#[derive(Default)]
pub(super) struct Listing {
    expansion: Expansion,
    blocks: Vec<Block>,
    sources: Vec<RawTensor>,
    sends: Vec<Message>,
    recvs: Vec<Message>,
    /// The tags before the first message with each peer; none if the ranks agree before every run.
    pub tags: Tags,
    /// How errors name the run.
    run: Option<RunName>,
    dropout: Option<DropoutTokens>,
}

/// The dropout of a plan: its mask without the seed, and where the tokens of documents are in the batch.
struct DropoutTokens {
    mask: DropoutMask,
    q: Vec<i64>,
    k: Vec<i64>,
}

impl DropoutTokens {
    fn new(probability: f64, batch: &Batch) -> Result<Self> {
        let of = |side| {
            let first = |d| batch.cu_seqlens(side)[d] as i64 - batch.start(side, d);
            (0..batch.documents()).map(first).collect()
        };
        Ok(Self { mask: DropoutMask::new(probability, 0)?, q: of(Side::Q), k: of(Side::K) })
    }

    fn with_seed(&self, seed: u64) -> Dropout<'_> {
        Dropout { mask: self.mask.with_seed(seed), q_tokens: &self.q, k_tokens: &self.k }
    }
}

impl Listing {
    /// Reserves the lists for every operation of a schedule.
    pub(super) fn new(schedule: &Schedule, run: RunName) -> Self {
        let expansion = Expansion::new(schedule);
        let (messages, blocks, sources) = expansion.capacity();
        Self {
            expansion,
            blocks: Vec::with_capacity(blocks),
            sources: Vec::with_capacity(sources),
            sends: Vec::with_capacity(messages),
            recvs: Vec::with_capacity(messages),
            tags: Tags::default(),
            run: Some(run),
            dropout: None,
        }
    }

    /// The same for a lane that computes attention.
    ///
    /// # Errors
    /// A probability that no problem may have.
    pub(super) fn computing(mut self, plan: &Plan) -> Result<Self> {
        let of = |probability| DropoutTokens::new(probability, plan.problem().batch());
        self.dropout = plan.problem().dropout().map(of).transpose()?;
        Ok(self)
    }

    /// The dropout of a run with this seed; a problem with dropout has one (`Bindings::check`).
    fn dropout(&self, seed: Option<u64>) -> Option<Dropout<'_>> {
        self.dropout.as_ref().zip(seed).map(|(tokens, seed)| tokens.with_seed(seed))
    }

    /// Sets the fingerprint that the ranks compare in the run that begins: transports get it with each exchange.
    pub(super) fn begin(&mut self, fingerprint: u64) {
        self.run = self.run.map(|run| run.comparing(fingerprint));
    }

    /// How errors name the run, with that fingerprint.
    pub(super) fn run(&self) -> Option<RunName> {
        self.run
    }

    /// Sets the tags, made by `tags`, and reserves room for their messages.
    pub(super) fn tag(&mut self, tags: impl FnOnce(&mut Expansion) -> Tags) {
        self.tags = tags(&mut self.expansion);
        self.sends.reserve(self.tags.most());
        self.recvs.reserve(self.tags.most());
    }
}

/// The addresses of a schedule's buffers.
#[derive(Clone, Copy)]
pub(super) struct BufferAddresses {
    pub tensors: Bindings,
    pub workspace: *mut u8,
}

// SAFETY: addresses and numbers; the two lanes that share them touch disjoint bytes at any time, which
// `verify::one_rank` checks of every schedule that is prepared.
unsafe impl Send for BufferAddresses {}
// SAFETY: addresses and numbers; the two lanes that share them touch disjoint bytes at any time, which
// `verify::one_rank` checks of every schedule that is prepared.
unsafe impl Sync for BufferAddresses {}

impl BufferAddresses {
    fn tensor(&self, schedule: &Schedule, view: BufferView) -> RawTensor {
        let whole = match view.buf {
            Buf::User(t) => *self.tensors.get(t),
            Buf::Work(i) => {
                let b = &schedule.buffers[i as usize];
                let ptr = self.workspace.wrapping_add(b.offset as usize);
                RawTensor::compact(ptr, b.dtype, b.rows, b.heads, b.dim)
            }
        };
        whole.rows(view.row, view.rows).heads(view.head, view.heads)
    }
}

/// Runs operation `op`.
///
/// # Safety
/// The schedule was proved (`Prepared::new`). The tensors have the shapes that it was proved with (`Bindings::check`)
/// and are apart where they are written, the workspace has its bytes, and all of it is valid and used by nothing else
/// but the operations that the schedule allows to run at the same time.
pub(super) unsafe fn perform(
    plan: &Plan,
    schedule: &Schedule,
    op: usize,
    memory: &BufferAddresses,
    listing: &mut Listing,
    backend: &mut impl Operations,
) -> Result<u64> {
    let at = |view: BufferView| memory.tensor(schedule, view);
    let user = |t: TensorId| *memory.tensors.get(t);
    let step = schedule.ops[op].step;
    backend.begin(op, Label { operation: schedule.ops[op].kind.name(), step, run: listing.run });
    match &schedule.ops[op].kind {
        OpKind::Delta { delta } => {
            let args = Delta {
                lse: user(TensorId::Lse),
                d_lse: user(TensorId::DLse),
                ..Delta::new([user(TensorId::O), user(TensorId::DO), at(*delta)])
            };
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.delta(&args) }?;
        }
        OpKind::SinkGradient { delta, partial } => {
            let args = SinkGradient {
                lse: user(TensorId::Lse),
                delta: at(*delta),
                sinks: user(TensorId::Sinks),
                dsinks: at(*partial),
            };
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.sink_gradient(&args) }?;
        }
        OpKind::SinkTotal { digits } => {
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.sink_total(&at(*digits), &user(TensorId::Dsinks)) }?;
        }
        OpKind::Transform { .. } | OpKind::Pack(_) | OpKind::Reduce(_) => {
            let Listing { expansion, blocks, sources, .. } = listing;
            expansion.blocks(schedule, op, |list, from| {
                blocks.clear();
                sources.clear();
                for b in list {
                    let begin = sources.len() as u32;
                    sources.extend(from[b.sources_begin as usize..b.sources_end as usize].iter().map(|&v| at(v)));
                    let sources_end = sources.len() as u32;
                    blocks.push(Block { dst: at(b.dst), sources_begin: begin, sources_end });
                }
                // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
                // proved of this schedule by `verify::one_rank`.
                unsafe { backend.transform(&Transform { blocks, sources }) }
            })?;
        }
        OpKind::Compose { begin, end } => {
            let Listing { blocks, sources, .. } = listing;
            blocks.clear();
            sources.clear();
            for b in &schedule.blocks[*begin as usize..*end as usize] {
                let begin = sources.len() as u32;
                let from = &schedule.sources[b.sources_begin as usize..b.sources_end as usize];
                sources.extend(from.iter().map(|&v| at(v)));
                blocks.push(Block { dst: at(b.dst), sources_begin: begin, sources_end: sources.len() as u32 });
            }
            let matrix = matches!(schedule.purpose, Purpose::Scan(Scan { decay: Decay::Matrix, .. }));
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.compose(&Compose { blocks, sources, matrix }) }?;
        }
        OpKind::Merge(_) => {
            listing.expansion.blocks(schedule, op, |list, from| {
                for pair in list.chunks_exact(2) {
                    let [o, lse] = [pair[0], pair[1]].map(|b| b.sources_begin as usize);
                    let args = Merge {
                        o: at(from[o]),
                        lse: at(from[lse]),
                        with_o: at(from[o + 1]),
                        with_lse: at(from[lse + 1]),
                    };
                    // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised,
                    // and proved of this schedule by `verify::one_rank`.
                    unsafe { backend.merge(&args) }?;
                }
                Ok::<(), Error>(())
            })?;
        }
        OpKind::Combine { o, lse, first_head } => {
            let sources = &mut listing.sources;
            sources.clear();
            for b in [o, lse] {
                let from = &schedule.sources[b.sources_begin as usize..b.sources_end as usize];
                sources.extend(from.iter().map(|&v| at(v)));
            }
            let (o_parts, lse_parts) = sources.split_at((o.sources_end - o.sources_begin) as usize);
            let sinks = heads_of(user(TensorId::Sinks), *first_head, o.dst.heads);
            let args = MergeAll { o_parts, lse_parts, sinks, o: at(o.dst), lse: at(lse.dst) };
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.merge_all(&args) }?;
        }
        kind @ (OpKind::Exchange { .. } | OpKind::Fetch { .. } | OpKind::Return(_)) => {
            let Listing { expansion, sends, recvs, tags, run, .. } = listing;
            sends.clear();
            recvs.clear();
            let mut moved = 0;
            for (i, m) in expansion.messages(schedule, op).iter().enumerate() {
                if let Some(tag) = tags.before(op, i) {
                    if m.send { sends.push(tag) } else { recvs.push(tag) }
                }
                let t = at(m.view);
                debug_assert!(t.is_compact(), "{:?} is not contiguous", m.view);
                let bytes = t.tokens as usize * t.heads as usize * t.dim as usize * t.dtype.size();
                moved += bytes as u64;
                let message = Message { peer: m.peer, ptr: t.ptr, bytes };
                if m.send { sends.push(message) } else { recvs.push(message) }
            }
            if moved > 0 {
                let label = Label { operation: kind.name(), step, run: *run };
                // SAFETY: the messages lie in tensors and buffers that are valid, and that no other operation which may
                // run now touches (promised); tags lie in memory of the listing's own.
                let outcome = unsafe { backend.exchange(label, sends, recvs) };
                // A peer's tag of another run explains a failure better than the failure itself.
                tags.check(op, outcome.is_err())?;
                outcome?;
            }
            return Ok(moved);
        }
        OpKind::Attend(a) => {
            schedule.attend_ranges(a, &mut listing.expansion.scratch);
            let dropout = listing.dropout(memory.tensors.dropout_seed());
            let args = attend(plan, schedule, a, &at, &user, backend.alibi_slopes(plan), listing);
            let args = Attend { dropout, ..args };
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.attend(&args) }?;
        }
        OpKind::Backward(b) => {
            schedule.ring_steps(b.side).ranges(b.ring_step as usize, &mut listing.expansion.scratch);
            let dropout = listing.dropout(memory.tensors.dropout_seed());
            let args = backward(plan, schedule, b, &at, backend.alibi_slopes(plan), listing);
            let args = AttendBackward { dropout, ..args };
            // SAFETY: the slices lie in memory that is valid and that no other operation touches now: promised, and
            // proved of this schedule by `verify::one_rank`.
            unsafe { backend.attend_backward(&args) }?;
        }
    }
    Ok(0)
}

/// The call's heads of a table of the whole problem, `[1, heads, 1]` f32, or slopes of each document.
fn heads_of(table: RawTensor, first: u32, count: u32) -> RawTensor {
    if table.is_none() { table } else { table.heads(first, count) }
}

fn attend<'a>(
    plan: &Plan,
    schedule: &Schedule,
    a: &AttendOp,
    at: &impl Fn(BufferView) -> RawTensor,
    user: &impl Fn(TensorId) -> RawTensor,
    alibi_slopes: RawTensor,
    listing: &'a Listing,
) -> Attend<'a> {
    let words = |pair: Option<(BufferView, BufferView)>| pair.map_or([RawTensor::NONE; 2], |(o, lse)| [at(o), at(lse)]);
    let ([running, running_lse], [o, lse]) = (words(a.running), words(a.result));
    Attend {
        q: at(a.q),
        k: at(a.k),
        v: at(a.v),
        running,
        running_lse,
        o,
        lse,
        alibi_slopes: heads_of(alibi_slopes, a.heads.q_offset, a.q.heads),
        sinks: heads_of(user(TensorId::Sinks), a.heads.q_offset, a.q.heads),
        max_logit: heads_of(user(TensorId::MaxLogit), a.heads.q_offset, a.q.heads),
        heads: a.heads,
        score: plan.problem().score(),
        ranges: listing.expansion.scratch.ranges(),
        dropout: None,
        aligned: schedule.aligned,
    }
}

fn backward<'a>(
    plan: &Plan,
    schedule: &Schedule,
    b: &BackwardOp,
    at: &impl Fn(BufferView) -> RawTensor,
    alibi_slopes: RawTensor,
    listing: &'a Listing,
) -> AttendBackward<'a> {
    AttendBackward {
        q: at(b.q),
        k: at(b.k),
        v: at(b.v),
        d_o: at(b.d_o),
        lse: at(b.lse),
        delta: at(b.delta),
        dq: b.dq.map_or(RawTensor::NONE, at),
        dk: b.dkv.map_or(RawTensor::NONE, |(dk, _)| at(dk)),
        dv: b.dkv.map_or(RawTensor::NONE, |(_, dv)| at(dv)),
        accumulate_keys: b.accumulate_keys,
        per_q_head: b.per_q_head,
        gradients: b.gradients,
        alibi_slopes: heads_of(alibi_slopes, b.heads.q_offset, b.q.heads),
        heads: b.heads,
        score: plan.problem().score(),
        ranges: listing.expansion.scratch.ranges(),
        dropout: None,
        aligned: schedule.aligned,
    }
}
