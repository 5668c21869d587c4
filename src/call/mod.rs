// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of kernel calls.
//!
//! A kernel does not know ranks, layouts or documents. It gets tensors, and *ranges*: consecutive rows with the
//! position of each row in its document. The mask depends only on positions, so contiguous, zigzag, striped and
//! balanced layouts, windows, prefixes and ring steps are one code path, for any lengths.
//!
//! The structures here are the contract between the planner, the runtime and every backend. They are plain data
//! (`Copy`, no lifetimes into the planner), because a device needs them as bytes.
//!
//! - [`Attend`]: forward over ranges, with the output mode of each q range;
//! - [`AttendBackward`]: dq, dk, dv over the same ranges;
//! - [`Transform`]: copies, casts and ordered sums of `[tokens, heads, dim]` blocks (pack, unpack, reduce, finish);
//! - [`RawStream`]: the stream of a call on a device;
//! - [`Delta`], [`Finish`]: the row sums before the backward, and rows that no range covers.

use crate::element::Dtype;

mod compose;
mod dropout;
mod range;

pub use compose::Compose;
pub(crate) use dropout::check_probability;
pub use dropout::{Dropout, DropoutMask};
#[cfg(feature = "std")]
pub(crate) use dropout::{MULTIPLIERS, ROUNDS, WEYL};
pub use range::{Band, Mode, Pair, QRange, Range, Ranges};

pub use crate::device::RawStream;

/// A `[tokens, heads, dim]` tensor without its type: address, dtype, shape and strides in elements. The innermost
/// dimension is contiguous. `lse` and `delta` have `dim` 1, a running lse has 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RawTensor {
    /// Address of element `[0, 0, 0]`; a device address on a device backend. Not used if the tensor has no elements.
    pub ptr: *mut u8,
    /// Elements from one token to the next.
    pub token_stride: i64,
    /// Elements from one head to the next.
    pub head_stride: i64,
    /// Rows.
    pub tokens: u64,
    /// Heads.
    pub heads: u32,
    /// Innermost dimension.
    pub dim: u32,
    /// Element type.
    pub dtype: Dtype,
}

// SAFETY: a RawTensor is an address and numbers; code that dereferences it is unsafe and rules out races itself.
unsafe impl Send for RawTensor {}
// SAFETY: as above.
unsafe impl Sync for RawTensor {}

impl RawTensor {
    /// A tensor without elements, for the optional arguments of a call.
    pub const NONE: Self = Self {
        ptr: core::ptr::null_mut(),
        token_stride: 0,
        head_stride: 0,
        tokens: 0,
        heads: 0,
        dim: 0,
        dtype: Dtype::F32,
    };

    /// A compact token-major tensor at `ptr`.
    pub const fn compact(ptr: *mut u8, dtype: Dtype, tokens: u64, heads: u32, dim: u32) -> Self {
        Self { ptr, token_stride: heads as i64 * dim as i64, head_stride: dim as i64, tokens, heads, dim, dtype }
    }

    /// Whether this is [`RawTensor::NONE`] or otherwise without memory.
    pub const fn is_none(&self) -> bool {
        self.ptr.is_null()
    }

    /// The `count` tokens from `first` on.
    #[must_use]
    pub fn rows(mut self, first: u64, count: u64) -> Self {
        debug_assert!(first + count <= self.tokens, "rows {first}+{count} of {}", self.tokens);
        self.ptr = self.ptr.wrapping_offset(first as isize * self.token_stride as isize * self.dtype.size() as isize);
        self.tokens = count;
        self
    }

    /// The `count` heads from `first` on.
    #[must_use]
    pub fn heads(mut self, first: u32, count: u32) -> Self {
        debug_assert!(first + count <= self.heads, "heads {first}+{count} of {}", self.heads);
        self.ptr = self.ptr.wrapping_offset(first as isize * self.head_stride as isize * self.dtype.size() as isize);
        self.heads = count;
        self
    }

    /// Whether the tensor is compact and token-major, so that consecutive rows are contiguous bytes.
    pub const fn is_compact(&self) -> bool {
        (self.heads <= 1 || self.head_stride == self.dim as i64)
            && (self.tokens <= 1 || self.token_stride == self.heads as i64 * self.dim as i64)
    }
}

/// How scores are computed: `s = scale · q·k`, then softcap, then ALiBi, then the mask.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Score {
    /// Multiplies q·k.
    pub scale: f64,
    /// `cap · tanh(s / cap)`; 0 when there is none.
    pub softcap: f64,
    /// A key is attended if `q_pos − k_pos ≤ window_left`: 0 to `u32::MAX`, as in a [`Mask`](crate::Mask), or
    /// `i64::MAX` for no limit. FlashAttention writes −1 for no limit; here a negative window is refused.
    pub window_left: i64,
    /// A key is attended if `k_pos − q_pos ≤ window_right`; 0 is causal; limits as for `window_left`.
    pub window_right: i64,
}

impl Score {
    /// Whether the query attends to the key.
    #[inline]
    pub const fn allows(&self, q_pos: i64, k_pos: i64) -> bool {
        q_pos - k_pos <= self.window_left && k_pos - q_pos <= self.window_right
    }
}

/// Which heads of the whole problem the tensors of a call hold: q head `h` of the call is head `q_offset + h`, and
/// reads kv head `(q_offset + h) / group − kv_offset` of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HeadMap {
    /// First q head.
    pub q_offset: u32,
    /// First kv head.
    pub kv_offset: u32,
    /// q heads per kv head of the whole problem.
    pub group: u32,
}

impl HeadMap {
    /// The kv head (of the call) that q head `h` (of the call) reads.
    #[inline]
    pub const fn kv(&self, h: u32) -> u32 {
        (self.q_offset + h) / self.group - self.kv_offset
    }
}

/// Forward attention over ranges.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// `[*, q heads, head_dim]`.
    pub q: RawTensor,
    /// `[*, kv heads, head_dim]`.
    pub k: RawTensor,
    /// `[*, kv heads, value_dim]`.
    pub v: RawTensor,
    /// Running o in the accumulator's type, normalised, `[*, q heads, value_dim]`; may be NONE if every mode is `Only`,
    /// and may be the same tensor as `o` if the types are equal.
    pub running: RawTensor,
    /// The lse of `running`, accumulator's type, `[*, q heads, 2]`: the natural log, and the rounding error of that
    /// first word, so that weights `exp(lse_i − lse)` do not lose precision as scores grow. Or `[*, q heads, 1]`,
    /// without the second word: weights then have a relative error of `|lse| · 2⁻²⁴`. NONE if `running` is; may be the
    /// same tensor as `lse`.
    pub running_lse: RawTensor,
    /// Final o in the element type; may be NONE if no mode finishes (`Last`, `Only`).
    pub o: RawTensor,
    /// Final lse (natural log), accumulator's type, `[*, q heads, 1]`; may be NONE when no mode finishes.
    pub lse: RawTensor,
    /// ALiBi slopes of the call's q heads, f32, or NONE; a positive one lowers the scores of far keys. `[1, q heads,
    /// 1]`: those of all documents. `[documents, q heads, 1]`: a row for each document, that of the document of a q
    /// range ([`Range::doc`]); CPU only.
    pub alibi_slopes: RawTensor,
    /// Sinks (logits) of the call's q heads, f32 `[1, q heads, n]`, or NONE; the softmax has all `n` of a head. Applied
    /// once, by the modes that finish (`Last`, `Only`).
    pub sinks: RawTensor,
    /// The largest score of each of the call's q heads, f32 `[1, q heads, 1]`, or NONE: after scale, softcap and ALiBi,
    /// over the pairs of this call that the mask allows, without the sinks; a NaN does not count. It is raised, not
    /// written: set it to −∞ before the first of several calls.
    pub max_logit: RawTensor,
    /// Which heads these are.
    pub heads: HeadMap,
    /// How scores are computed.
    pub score: Score,
    /// Which q rows attend to which k rows.
    pub ranges: Ranges<'a>,
    /// Which probabilities are dropped; `None` for none. lse is that of all pairs, and sinks are not dropped.
    pub dropout: Option<Dropout<'a>>,
    /// Start key tiles at positions that are multiples of the tile size, not at the start of a range. A row's bits then
    /// do not depend on how its keys are split into ranges, if the ranges are in the order of positions. CPU only.
    pub aligned: bool,
}

impl<'a> Attend<'a> {
    /// A call with these tensors and no optional ones; not aligned.
    pub const fn new([q, k, v, o]: [RawTensor; 4], heads: HeadMap, score: Score, ranges: Ranges<'a>) -> Self {
        let none = RawTensor::NONE;
        Self {
            q,
            k,
            v,
            running: none,
            running_lse: none,
            o,
            lse: none,
            alibi_slopes: none,
            sinks: none,
            max_logit: none,
            heads,
            score,
            ranges,
            dropout: None,
            aligned: false,
        }
    }
}

/// Which gradients a backward call computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// dq, dk and dv.
    All,
    /// dq only.
    Queries,
    /// dk and dv only.
    Keys,
}

/// Backward attention over ranges. `p = exp(s − lse)`, 0 where `lse = −inf`; `ds = p · (do·v − delta)`. With dropout,
/// do·v and the p of dv are 0 for a pair that is dropped, and times [`DropoutMask::factor`] for one that is kept.
#[derive(Clone, Copy, Debug)]
pub struct AttendBackward<'a> {
    /// As in [`Attend`].
    pub q: RawTensor,
    /// As in [`Attend`].
    pub k: RawTensor,
    /// As in [`Attend`].
    pub v: RawTensor,
    /// Gradient of o, `[*, q heads, value_dim]`, element type.
    pub d_o: RawTensor,
    /// Final lse (with the sink), `[*, q heads, 1]`, accumulator's type.
    pub lse: RawTensor,
    /// `rowsum(do ∘ o)`, less the gradient of lse if it has one, `[*, q heads, 1]`, accumulator's type: see [`Delta`].
    pub delta: RawTensor,
    /// `[*, q heads, head_dim]`, accumulator's type. Modes that continue add to it, others write it.
    pub dq: RawTensor,
    /// `[*, kv heads (or q heads, see per_q_head), head_dim]`, accumulator's type.
    pub dk: RawTensor,
    /// As dk, with `value_dim`.
    pub dv: RawTensor,
    /// Add to dk and dv; otherwise every row of every k range is written, with zeros where no query reads it.
    pub accumulate_keys: bool,
    /// dk and dv hold one partial gradient per q head instead of the sum over its group.
    pub per_q_head: bool,
    /// Which gradients to compute; the tensors of the others may be NONE.
    pub gradients: Gradients,
    /// As in [`Attend`].
    pub alibi_slopes: RawTensor,
    /// As in [`Attend`].
    pub heads: HeadMap,
    /// As in [`Attend`].
    pub score: Score,
    /// As in [`Attend`].
    pub ranges: Ranges<'a>,
    /// As in [`Attend`]: the forward's.
    pub dropout: Option<Dropout<'a>>,
    /// As in [`Attend`]; for dk and dv it breaks query tiles likewise. Each element is then added up band by band in
    /// the order of [`Ranges::bands`], and in each band q range by q range.
    pub aligned: bool,
}

impl<'a> AttendBackward<'a> {
    /// A call with these tensors and no optional ones, that writes all gradients; not aligned.
    pub const fn new([q, k, v, d_o]: [RawTensor; 4], heads: HeadMap, score: Score, ranges: Ranges<'a>) -> Self {
        let none = RawTensor::NONE;
        Self {
            q,
            k,
            v,
            d_o,
            lse: none,
            delta: none,
            dq: none,
            dk: none,
            dv: none,
            accumulate_keys: false,
            per_q_head: false,
            gradients: Gradients::All,
            alibi_slopes: none,
            heads,
            score,
            ranges,
            dropout: None,
            aligned: false,
        }
    }
}

/// One block of a [`Transform`]: `dst = Σ sources`, element by element, summed in the order given in the accumulator's
/// type and rounded once. With one source it is a copy or a cast. All sources have the shape of `dst`. To add to `dst`,
/// make `dst` itself the first source, with the same type and strides.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The tensor that is written.
    pub dst: RawTensor,
    /// First entry of [`Transform::sources`].
    pub sources_begin: u32,
    /// One past the last entry. Without any, the block is filled with zeros.
    pub sources_end: u32,
}

/// Copies, casts and ordered sums of blocks. Blocks of one transform do not overlap.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transform<'a> {
    /// The blocks.
    pub blocks: &'a [Block],
    /// The sources of all blocks.
    pub sources: &'a [RawTensor],
}

/// `delta[t, h] = Σ_d do[t, h, d] · o[t, h, d] − d_lse[t, h]` in the accumulator's type.
///
/// A score's gradient is `p · (do·v − Σ do ∘ o)` by o and `p · d_lse` by lse, so that one number of each row holds
/// both.
#[derive(Clone, Copy, Debug)]
pub struct Delta {
    /// Final o.
    pub o: RawTensor,
    /// Its gradient.
    pub d_o: RawTensor,
    /// The result, `dim` 1.
    pub delta: RawTensor,
    /// Final lse, of the type and shape of delta. It is read only if there is a gradient of it, and may be NONE if not.
    pub lse: RawTensor,
    /// Gradient of lse, of the type and shape of delta; NONE if there is none. It is not read where lse is −∞.
    pub d_lse: RawTensor,
}

impl Delta {
    /// A call without a gradient of lse.
    pub const fn new([o, d_o, delta]: [RawTensor; 3]) -> Self {
        Self { o, d_o, delta, lse: RawTensor::NONE, d_lse: RawTensor::NONE }
    }
}

/// Finishes rows that no pair covers: `o = 0`, `lse = −inf`, or the log-sum-exp of the sinks if there are any.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a> {
    /// Final o.
    pub o: RawTensor,
    /// Final lse.
    pub lse: RawTensor,
    /// As in [`Attend`].
    pub sinks: RawTensor,
    /// The rows.
    pub rows: &'a [Range],
}

/// Merges another partial result of the same rows into `(o, lse)`; all tensors are f32, or all f64.
///
/// Each lse has one word or two, independent of the other: see [`Attend::running_lse`].
#[derive(Clone, Copy, Debug)]
pub struct Merge {
    /// Normalised o, `[tokens, heads, value_dim]`; read and written.
    pub o: RawTensor,
    /// Its lse, `[tokens, heads, 1]` or `[tokens, heads, 2]`; read and written.
    pub lse: RawTensor,
    /// The other o.
    pub with_o: RawTensor,
    /// The lse of the other o, with one or two words.
    pub with_lse: RawTensor,
}

/// Merges partial results of the same rows, in the order given, and applies the sinks once.
#[cfg_attr(not(feature = "std"), allow(dead_code, reason = "kernels need std"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeAll<'a> {
    /// Normalised o of each part, of one element type, without sinks.
    pub o_parts: &'a [RawTensor],
    /// The lse of each part, `dim` 1.
    pub lse_parts: &'a [RawTensor],
    /// As in [`Attend`].
    pub sinks: RawTensor,
    /// The merged o; its type has the accumulator of the parts'.
    pub o: RawTensor,
    /// Its lse, `dim` 1.
    pub lse: RawTensor,
}

/// `dsink = −Σ_rows exp(sink − lse) · delta`, for each sink of each head.
#[derive(Clone, Copy, Debug)]
pub struct SinkGradient {
    /// Final lse, with the sinks, `[*, q heads, 1]`.
    pub lse: RawTensor,
    /// As [`Delta`] makes it, of the type and shape of lse.
    pub delta: RawTensor,
    /// f32 `[1, q heads, n]`.
    pub sinks: RawTensor,
    /// The result, `[1, q heads, n]`, of lse's type; or the digits of exact sums, `[1, q heads, n ·`
    /// [`SINK_DIGITS`](crate::schedule::Schedule::SINK_DIGITS)`]`, which `kernel::cpu::sink_total` reads (the CPU
    /// only).
    pub dsinks: RawTensor,
}
