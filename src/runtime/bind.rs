// SPDX-License-Identifier: MIT OR Apache-2.0
//! The caller's tensors, checked against the plan before a run accesses them.

use std::{format, vec::Vec};

use super::{
    keys::{Keys, RawKeyIndices, RawKeys, RawPages},
    lse_base::LseBase,
};
use crate::{
    call::{RawStream, RawTensor},
    element::Dtype,
    error::{Error, Result},
    plan::Plan,
    schedule::{ALIGNMENT, Buf, OpKind, Purpose, Schedule, TensorForm, TensorId, run_trait::RunTrait},
    tensor::{disjoint, expect},
};

/// One tensor for each name, [`RawTensor::NONE`] for those that a direction does not use; the seed of dropout, the keys
/// and the stream of a run.
///
/// Forward reads q, k, v (and sinks) and writes o and lse. Backward reads q, k, v, o, lse, do (and sinks, d_lse) and
/// writes dq, dk, dv (and dsinks). Shapes are those of the rank's own tokens, and a rank without any gives tensors of 0
/// rows.
///
/// | tensors | shape | type |
/// |---|---|---|
/// | q, dq | `[tokens, heads, head_dim]` | the problem's |
/// | k, dk | `[k tokens, kv_heads, head_dim]` | the problem's |
/// | v, dv | `[k tokens, kv_heads, value_dim]` | the problem's |
/// | o, do | `[tokens, heads, value_dim]` | the problem's |
/// | lse | `[tokens, heads, 1]` | the accumulator's: f32, or f64 for f64 |
/// | d_lse, which a backward may be given | as lse | as lse |
/// | max_logit, which a forward may be asked for | `[1, heads, 1]` | f32 |
/// | sinks | `[1, heads, n]`, `n` of each head | f32 |
/// | dsinks | `[1, heads, n]` | the accumulator's |
#[derive(Clone, Copy, Debug)]
pub struct Bindings {
    tensors: [RawTensor; PLACES],
    dropout_seed: Option<u64>,
    pub(super) keys: RawKeys,
    pub(super) lse_base: LseBase,
    pub(super) stream: RawStream,
}

// SAFETY: addresses and numbers; a run, which reads through them, is unsafe and rules out races itself.
unsafe impl Send for Bindings {}
// SAFETY: as above.
unsafe impl Sync for Bindings {}

/// The places of a run's tensors.
const PLACES: usize = TensorId::MaxLogit as usize + 1;

/// The place of a tensor. Those of other runs have places of attention's: no run has both, and what
/// kernels get of a run's tensors is as long as the tensors of attention.
pub(super) const fn place_of(tensor: TensorId) -> usize {
    match tensor {
        TensorId::OwnTokens => TensorId::Q as usize,
        TensorId::OwnHeads => TensorId::O as usize,
        TensorId::PartialO => TensorId::Q as usize,
        TensorId::PartialLse => TensorId::K as usize,
        TensorId::Decay => TensorId::Q as usize,
        TensorId::State => TensorId::K as usize,
        TensorId::InitialState => TensorId::O as usize,
        of_attention => of_attention as usize,
    }
}

impl Default for Bindings {
    fn default() -> Self {
        let tensors = [RawTensor::NONE; PLACES];
        Self {
            tensors,
            dropout_seed: None,
            keys: RawKeys::All,
            lse_base: LseBase::Natural,
            stream: core::ptr::null_mut(),
        }
    }
}

impl Bindings {
    /// Sets a tensor.
    #[must_use]
    pub fn with(mut self, tensor: TensorId, raw: RawTensor) -> Self {
        self.set(tensor, raw);
        self
    }

    /// Sets the seed of a problem with [dropout](crate::Problem::with_dropout); `None` without.
    #[must_use]
    pub fn with_dropout_seed(mut self, seed: Option<u64>) -> Self {
        self.dropout_seed = seed;
        self
    }

    /// The seed of dropout.
    pub(super) fn dropout_seed(&self) -> Option<u64> {
        self.dropout_seed
    }

    /// Sets a tensor in place.
    pub fn set(&mut self, tensor: TensorId, raw: RawTensor) {
        self.tensors[place_of(tensor)] = raw;
    }

    /// The tensor of that name.
    pub fn get(&self, tensor: TensorId) -> &RawTensor {
        &self.tensors[place_of(tensor)]
    }

    /// All tensors, in the order of their places.
    #[cfg(feature = "cuda")]
    pub(super) fn all(&self) -> &[RawTensor; PLACES] {
        &self.tensors
    }

    /// Sets the keys of a forward or a backward, and where they lie. A table of pages and lists must be valid for reads
    /// during runs with these tensors; on a device until the runs with it are complete.
    #[must_use]
    pub fn with_keys(mut self, keys: Keys<'_>) -> Self {
        self.keys = keys.into();
        self
    }

    /// Sets the base of lse, of its gradient and of partial_lse.
    #[must_use]
    pub fn with_lse_base(mut self, base: LseBase) -> Self {
        self.lse_base = base;
        self
    }

    /// Sets the stream of runs with these tensors on a device; otherwise they are in the order of the legacy default
    /// stream.
    #[must_use]
    pub fn on(mut self, stream: RawStream) -> Self {
        self.stream = stream;
        self
    }

    /// Where the rows of k and v lie, if they lie in pages.
    pub(super) fn pages(&self) -> Option<RawPages> {
        match self.keys {
            RawKeys::Pages(pages) => Some(pages),
            RawKeys::All | RawKeys::Listed(_) => None,
        }
    }

    /// The keys that each q token attends to, if they are listed.
    pub(super) fn key_indices(&self) -> Option<RawKeyIndices> {
        match self.keys {
            RawKeys::Listed(lists) => Some(lists),
            RawKeys::All | RawKeys::Pages(_) => None,
        }
    }

    /// What a run with these tensors has by its call.
    pub(super) fn traits(&self) -> [Option<RunTrait>; 3] {
        let keys = match self.keys {
            RawKeys::All => None,
            RawKeys::Pages(_) => Some(RunTrait::Pages),
            RawKeys::Listed(_) => Some(RunTrait::KeyIndices),
        };
        let max_logit = !self.get(TensorId::MaxLogit).is_none();
        [keys, (self.lse_base == LseBase::Two).then_some(RunTrait::LseBaseTwo), max_logit.then_some(RunTrait::MaxLogit)]
    }

    /// The shape that a tensor must have: k and v in pages may have any number of rows.
    pub(super) fn shape_of(&self, tensor: TensorId, raw: &RawTensor, [tokens, heads, dim]: [usize; 3]) -> [usize; 3] {
        let paged = self.pages().is_some() && matches!(tensor, TensorId::K | TensorId::V);
        [if paged { raw.tokens as usize } else { tokens }, heads, dim]
    }

    pub(super) fn check(&self, expected: &ExpectedTensors) -> Result<()> {
        expected.check_seed(self.dropout_seed)?;
        let mut list = [("", RawTensor::NONE, false); TensorId::COUNT];
        for tensor in TensorId::ALL {
            let raw = self.get(tensor);
            let Some(TensorForm { name, dtype, shape, written }) = expected.forms[tensor as usize] else {
                // A forward may be given `dsinks`, which the backward of the same problem needs.
                if tensor.is_of_sinks() && !raw.is_none() && expected.forms[TensorId::Sinks as usize].is_none() {
                    return Err(Error::invalid(tensor.name(), "given", "none, since the problem has no sinks")
                        .hint("plan a problem that has sinks"));
                }
                continue;
            };
            if *raw == RawTensor::NONE && tensor.is_optional() {
                continue;
            }
            if *raw == RawTensor::NONE {
                let (expected, hint) = if tensor.is_per_head() {
                    let (all, each) = (shape[1] * shape[2], shape[2]);
                    let each = if each == 1 { "one".into() } else { format!("{each}") };
                    (
                        format!("{all} numbers of {dtype}, {each} for each q head"),
                        "the problem of the plan has sinks; without sinks, plan a problem that has none",
                    )
                } else {
                    (format!("{dtype} of shape {shape:?}"), "a rank without tokens gives a tensor of 0 rows")
                };
                return Err(Error::invalid(name, "not given", expected).hint(hint));
            }
            let innermost = match expected.run {
                Purpose::Attention(_) | Purpose::Combine(_) => "head_dim",
                Purpose::AllToAll(_) | Purpose::Scan(_) => "dim",
            };
            let shape = self.shape_of(tensor, raw, shape);
            expect(name, raw, dtype, shape, innermost).map_err(|error| {
                if raw.dtype != dtype {
                    return error
                        .hint("the types of all tensors follow from that of the plan: convert, or plan with another");
                }
                let exchanged = [raw.tokens, raw.heads.into()] == [shape[1] as u64, shape[0] as u64];
                if exchanged && shape[0] != shape[1] && !matches!(tensor, TensorId::Lse | TensorId::DLse) {
                    return error.hint("tensors are [tokens, heads, dim], the heads of a token together");
                }
                // The usual reason is a tensor of the whole batch, or a cu_seqlens that ends elsewhere.
                if raw.tokens != shape[0] as u64 { error.hint(expected.tokens_hint(tensor)) } else { error }
            })?;
            if expected.sent.contains(&tensor) && !raw.is_compact() {
                return Err(Error::invalid(
                    format!("{name}.token_stride"),
                    format!("{} (head stride {})", raw.token_stride, raw.head_stride),
                    format!("{} (head stride {}): it is sent as it lies", shape[1] * shape[2], shape[2]),
                )
                .hint(expected.compact_hint()));
            }
            list[tensor as usize] = (name, *raw, written);
        }
        disjoint(&list)
    }
}

/// Refuses tensors that overlap a lent workspace of `bytes` bytes: a run would overwrite them.
pub(super) fn check_disjoint_from(
    workspace: *mut u8,
    bytes: u64,
    tensors: impl IntoIterator<Item = (&'static str, RawTensor)>,
) -> Result<()> {
    // The workspace as rows of `ALIGNMENT` bytes: every buffer of a schedule takes a multiple of that.
    let dim = (ALIGNMENT / 2) as u32;
    let room = RawTensor::compact(workspace, Dtype::F16, bytes.div_ceil(ALIGNMENT), 1, dim);
    tensors.into_iter().try_for_each(|(name, raw)| disjoint(&[(name, raw, false), ("workspace", room, true)]))
}

/// The shapes and types that a schedule needs of the caller's tensors.
pub(super) struct ExpectedTensors {
    run: Purpose,
    pub forms: [Option<TensorForm>; TensorId::COUNT],
    /// Tensors that are sent in place.
    sent: Vec<TensorId>,
    /// Whether the run has dropout.
    dropout: bool,
    /// Whether it may have a seed: with a probability of 0 too.
    takes_seed: bool,
}

impl ExpectedTensors {
    pub(super) fn new(plan: &Plan, run: Purpose, schedule: &Schedule) -> Self {
        let sent = match run {
            Purpose::Attention(_) => sent(schedule),
            // Also if the rank keeps all heads and sends none, so that a test on one rank already finds the error.
            Purpose::AllToAll(_) => std::vec![TensorId::OwnHeads],
            Purpose::Combine(_) => Vec::new(),
            Purpose::Scan(_) => std::vec![TensorId::Decay, TensorId::State],
        };
        let attention = matches!(run, Purpose::Attention(_));
        let dropout = attention && plan.problem().dropout().is_some();
        let takes_seed = attention && plan.problem().takes_seed();
        Self { run, forms: TensorId::ALL.map(|t| run.form(plan, schedule.rank, t)), sent, dropout, takes_seed }
    }

    /// A seed if there is dropout, and none otherwise.
    fn check_seed(&self, seed: Option<u64>) -> Result<()> {
        match seed {
            None if self.dropout => Err(Error::invalid(
                "dropout_seed",
                "not given",
                "a number for this layer and step, the same on all ranks",
            )
            .hint("the problem of the plan has dropout; without, plan a problem that has none")),
            Some(seed) if !self.takes_seed => {
                Err(Error::invalid("dropout_seed", seed, "none, since the problem has no dropout")
                    .hint("plan a problem that has dropout"))
            }
            _ => Ok(()),
        }
    }

    /// The tensors that a run reads or writes, by name.
    pub(super) fn used<'a>(
        &'a self,
        tensors: &'a Bindings,
    ) -> impl Iterator<Item = (TensorId, &'static str, &'a RawTensor)> {
        let given = |t: TensorId| Some(tensors.get(t)).filter(|&raw| *raw != RawTensor::NONE);
        let all = TensorId::ALL.into_iter().zip(&self.forms);
        all.filter_map(move |(t, form)| form.and_then(|f| given(t).map(|raw| (t, f.name, raw))))
    }

    fn tokens_hint(&self, tensor: TensorId) -> &'static str {
        match self.run {
            Purpose::Attention(_) if matches!(tensor, TensorId::Lse | TensorId::DLse) => {
                "lse is [heads, tokens] in C and Python, a head_major view in Rust; the tokens are the rank's own (cu_seqlens_q): its shard of the plan"
            }
            Purpose::Combine(_) if matches!(tensor, TensorId::PartialO | TensorId::PartialLse) => {
                "every rank gives its part of all q tokens of the plan; lse is [heads, tokens] in C and Python"
            }
            Purpose::Combine(_) => "a rank gets what the plan's combined share says: all rows, or some heads or tokens",
            Purpose::Scan(_) => "a scan has a row for each of the rank's segments: LocalTokens::segments lists them",
            Purpose::AllToAll(_) if tensor == TensorId::OwnHeads => {
                "between the all-to-alls a rank has all tokens of its ring share: the sum of those of its Ulysses ranks"
            }
            _ => {
                "a rank gives its own tokens of the planned documents (cu_seqlens_q, cu_seqlens_k): its shard of the plan"
            }
        }
    }

    fn compact_hint(&self) -> &'static str {
        match self.run {
            Purpose::Attention(_) => "plan with pack_inputs, which packs it first",
            Purpose::AllToAll(_) | Purpose::Combine(_) | Purpose::Scan(_) => "give a compact tensor",
        }
    }
}

/// Bindings of the right shapes whose memory `make` chooses; tensors that are not used have no rows.
#[cfg(feature = "cuda")]
pub(super) fn placeholders(
    expected: &ExpectedTensors,
    make: impl Fn(TensorId, Dtype, u64, u32, u32) -> RawTensor,
) -> Bindings {
    TensorId::ALL.into_iter().zip(&expected.forms).fold(Bindings::default(), |b, (tensor, form)| match form {
        Some(TensorForm { dtype, shape: [tokens, heads, dim], .. }) => {
            b.with(tensor, make(tensor, *dtype, *tokens as u64, *heads as u32, *dim as u32))
        }
        None => b,
    })
}

/// The caller's tensors that are sent in place.
fn sent(schedule: &Schedule) -> Vec<TensorId> {
    let mut list = Vec::new();
    for op in &schedule.ops {
        if let OpKind::Fetch { rows, .. } = &op.kind {
            for c in &rows.tensors {
                if let Buf::User(t) = c.own.buf
                    && !list.contains(&t)
                {
                    list.push(t);
                }
            }
        }
    }
    list
}
