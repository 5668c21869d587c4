// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parameter structs of the kernels: `ptx/shared/params.cuh`, field by field. Strides are in bytes, addresses are
//! device addresses. The assertions at the end are the layout that `nvcc` gives the other side.

use crate::report::metadata;
use bytemuck::{Pod, Zeroable};
use core::mem::offset_of;

/// The parameter struct of a kernel.
pub(in crate::kernel::cuda) trait Parameters: Pod {
    const ADDRESSES: Addresses;
}

/// Where a parameter struct holds addresses (byte offsets).
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct Addresses {
    /// [`Tensor`]s: an address and two strides.
    pub tensors: &'static [usize],
    /// Addresses of metadata.
    pub metadata: &'static [usize],
    /// Tables of all bases.
    pub bases: &'static [usize],
    /// Keys of Philox, which are the seed of a run.
    pub seeds: &'static [usize],
    /// Tables of pages, which are those of a run.
    pub pages: &'static [usize],
}

impl Addresses {
    pub(in crate::kernel::cuda) const NONE: Self =
        Self { tensors: &[], metadata: &[], bases: &[], seeds: &[], pages: &[] };
}

/// Implements [`Parameters`] by the names of the fields that hold addresses. Kinds that are not named are those of
/// `base`: of the struct that comes first in this one, or none.
macro_rules! addresses {
    ($($name:ident { $($kind:ident: [$($($field:ident).+),* $(,)?],)* ..$base:expr })*) => {$(
        impl Parameters for $name {
            const ADDRESSES: Addresses = Addresses {
                $($kind: &[$(core::mem::offset_of!($name, $($field).+)),*],)*
                ..$base
            };
        }
    )*};
}
pub(in crate::kernel::cuda) use addresses;

mod blocks;
pub(in crate::kernel::cuda) mod tags;

pub(in crate::kernel::cuda) use blocks::{
    CombineParams, DeltaParams, FinishParams, MergeParams, Sinks, TransformBlock, TransformParams, TransformSource,
    TransformTensor,
};

/// `Tensor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Tensor {
    pub ptr: u64,
    pub token: i64,
    pub head: i64,
}

/// `Divisor`: division by a multiplication.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Divisor {
    pub by: u32,
    pub magic: u32,
    pub shift: u32,
}

impl Divisor {
    /// The numbers for `by ≥ 1`, after Granlund and Montgomery (1994): with `l = ⌈log2 by⌉`,
    /// `magic = ⌊2³² (2^l − by) / by⌋ + 1`, shifts `min(l, 1)` and `max(l − 1, 0)`.
    pub(in crate::kernel::cuda) const fn new(by: u32) -> Self {
        let l = 32 - (by - 1).leading_zeros();
        let magic = ((1u64 << 32) * ((1u64 << l) - by as u64) / by as u64 + 1) as u32;
        let first = if l < 1 { l } else { 1 };
        Self { by, magic, shift: first | ((l - first) << 1) }
    }
}

/// `Run`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Run {
    pub row: i64,
    pub pos: i64,
    pub len: u32,
    pub begin: u32,
    pub end: u32,
    pub mode: u32,
    pub block: Divisor,
    pub period: Divisor,
}

/// `Pair`: an entry of a list of partners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Partner {
    pub run: u32,
    pub band: u32,
}

/// `Band`: a [`crate::call::Band`] with the window of a call in it, as one side sees it (`bands`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct SidedBand {
    pub own_from: i64,
    pub own_to: i64,
    pub partner_from: i64,
    pub partner_to: i64,
    pub before: i64,
    pub after: i64,
    pub shift: i64,
}

/// `Work`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Work {
    pub run: u32,
    pub first: u32,
}

/// Bits of [`ScoreParams::flags`].
pub(in crate::kernel::cuda) const SCORE_GENERAL: u32 = 1;
pub(in crate::kernel::cuda) const SCORE_SOFTCAP: u32 = 2;

/// `ScoreParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct ScoreParams {
    pub exp_scale: f32,
    pub scale_log2: f32,
    pub cap_in: f32,
    pub cap_log2: f32,
    pub scale: f32,
    pub flags: u32,
}

/// `HeadParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct HeadParams {
    pub q_heads: u32,
    pub kv_heads: u32,
    pub q_offset: u32,
    pub kv_offset: u32,
    pub group: u32,
    pub dim: u32,
    pub value: u32,
    pub items: u32,
}

/// `ForwardParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct ForwardParams {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub running: Tensor,
    pub running_lse: Tensor,
    pub o: Tensor,
    pub lse: Tensor,
    pub alibi_slopes: Tensor,
    pub sinks: Tensor,
    pub max_logit: Tensor,
    pub queries: u64,
    pub keys: u64,
    pub partners: u64,
    pub bands: u64,
    pub work: u64,
    pub score: ScoreParams,
    pub heads: HeadParams,
    pub running_lse_words: u32,
    pub sink_count: u32,
}

/// `Dropout`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct DropoutParams {
    pub q_tokens: u64,
    pub k_tokens: u64,
    pub key: [u32; 2],
    pub last_dropped: u32,
    pub factor: f32,
}

/// `DroppedForwardParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct DroppedForwardParams {
    pub call: ForwardParams,
    pub dropout: DropoutParams,
}

/// `PageRun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct PageRun {
    pub document: u32,
    pub first: u32,
}

/// `Pages` without its runs: what a run of a plan brings.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PageTable {
    pub(in crate::kernel::cuda) address: u64,
    pub(in crate::kernel::cuda) size: Divisor,
    pub(in crate::kernel::cuda) stride: u32,
    pub(in crate::kernel::cuda) per_document: u32,
    pub(in crate::kernel::cuda) unused: u32,
}

/// `Pages`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct PageParams {
    pub runs: u64,
    pub table: PageTable,
}

/// `PagedForwardParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct PagedForwardParams {
    pub call: ForwardParams,
    pub pages: PageParams,
}

/// `DroppedBackwardParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct DroppedBackwardParams {
    pub call: BackwardParams,
    pub dropout: DropoutParams,
}

/// `BackwardParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct BackwardParams {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_o: Tensor,
    pub lse: Tensor,
    pub delta: Tensor,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub alibi_slopes: Tensor,
    pub queries: u64,
    pub keys: u64,
    pub partners: u64,
    pub bands: u64,
    pub work: u64,
    pub score: ScoreParams,
    pub heads: HeadParams,
    pub per_q_head: u32,
    pub accumulate: u32,
}

/// `FusedParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct FusedParams {
    pub call: BackwardParams,
    pub keys_of: u64,
    pub query_bands: u64,
    pub query_tiles: u64,
    pub key_tiles: u64,
    pub dq_semaphore: u64,
    pub key_semaphore: u64,
    pub tile_counter: u64,
    pub parts: u32,
    pub part_heads: u32,
}

/// In [`Work::first`]: a tile of a q run that is written with zeros.
pub(in crate::kernel::cuda) const WORK_ZERO: u32 = 1 << 31;

/// Bases of a transform: plain memory, and the caller's tensors.
pub(crate) const BASES: usize = 14;

addresses! {
    ForwardParams {
        tensors: [q, k, v, running, running_lse, o, lse, alibi_slopes, sinks, max_logit],
        metadata: [queries, keys, partners, bands, work],
        ..Addresses::NONE
    }
    BackwardParams {
        tensors: [q, k, v, d_o, lse, delta, dq, dk, dv, alibi_slopes],
        metadata: [queries, keys, partners, bands, work],
        ..Addresses::NONE
    }
    DroppedForwardParams {
        metadata: [
            call.queries, call.keys, call.partners, call.bands, call.work, dropout.q_tokens, dropout.k_tokens,
        ],
        seeds: [dropout.key],
        ..ForwardParams::ADDRESSES
    }
    PagedForwardParams {
        metadata: [call.queries, call.keys, call.partners, call.bands, call.work, pages.runs],
        pages: [pages.table],
        ..ForwardParams::ADDRESSES
    }
    DroppedBackwardParams {
        metadata: [
            call.queries, call.keys, call.partners, call.bands, call.work, dropout.q_tokens, dropout.k_tokens,
        ],
        seeds: [dropout.key],
        ..BackwardParams::ADDRESSES
    }
    FusedParams {
        metadata: [
            call.queries, call.keys, call.partners, call.bands, call.work,
            keys_of, query_bands, query_tiles, key_tiles, dq_semaphore, key_semaphore, tile_counter,
        ],
        ..BackwardParams::ADDRESSES
    }
}

const _: () = {
    assert!(offset_of!(FusedParams, call) == 0 && offset_of!(PagedForwardParams, call) == 0);
    assert!(offset_of!(DroppedForwardParams, call) == 0 && offset_of!(DroppedBackwardParams, call) == 0);
    // Plans report these sizes as memory of a device.
    assert!(size_of::<Run>() as u64 == metadata::RUN && size_of::<Work>() as u64 == metadata::WORK);
    assert!(size_of::<Partner>() as u64 == metadata::PARTNER && size_of::<SidedBand>() as u64 == metadata::BAND);
    assert!(size_of::<Tensor>() == 24);
    assert!(size_of::<Run>() == 56);
    assert!(size_of::<Work>() == 8);
    assert!(size_of::<ScoreParams>() == 24);
    assert!(size_of::<HeadParams>() == 32);
    assert!(size_of::<ForwardParams>() == 344);
    assert!(size_of::<BackwardParams>() == 344);
    assert!(size_of::<FusedParams>() == 408);
    assert!(size_of::<PagedForwardParams>() == 384 && size_of::<PageTable>() == 32);
    assert!(size_of::<DroppedForwardParams>() == 376 && size_of::<DroppedBackwardParams>() == 376);
};

#[cfg(test)]
mod tests {
    use super::*;

    /// What `divide` in `ptx/shared/ranges.cuh` computes.
    fn divide(x: u32, d: &Divisor) -> u32 {
        let t = ((u64::from(x) * u64::from(d.magic)) >> 32) as u32;
        (t + ((x - t) >> (d.shift & 1))) >> (d.shift >> 1)
    }

    #[test]
    fn divisors_divide() {
        let edges = [0, 1, 2, 3, 63, 64, 65, 1000, u32::MAX / 2, u32::MAX / 2 + 1, u32::MAX - 1, u32::MAX];
        for by in (1..300).chain([1 << 16, (1 << 16) + 1, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX]) {
            let d = Divisor::new(by);
            for x in edges.into_iter().chain([by - 1, by, by.saturating_add(1), by.saturating_mul(7)]) {
                assert_eq!(divide(x, &d), x / by, "{x} / {by}");
            }
        }
    }

    #[test]
    fn sizes_are_those_of_the_ptx() {
        for (text, entry, bytes) in [
            (crate::kernel::cuda::embedded::find("forward_bf16_128"), "cpattn_forward", size_of::<ForwardParams>()),
            (
                crate::kernel::cuda::embedded::find("backward_f16_64"),
                "cpattn_backward_keys",
                size_of::<BackwardParams>(),
            ),
            (crate::kernel::cuda::embedded::find("fused_bf16_96"), "cpattn_backward_fused", size_of::<FusedParams>()),
            (
                crate::kernel::cuda::embedded::find("dropped_forward_f16_64"),
                "cpattn_dropped_forward",
                size_of::<DroppedForwardParams>(),
            ),
            (
                crate::kernel::cuda::embedded::find("paged_forward_bf16_128"),
                "cpattn_paged_forward",
                size_of::<PagedForwardParams>(),
            ),
            (
                crate::kernel::cuda::embedded::find("dropped_backward_bf16_128"),
                "cpattn_dropped_queries",
                size_of::<DroppedBackwardParams>(),
            ),
            (crate::kernel::cuda::embedded::find("transform"), "cpattn_transform", size_of::<TransformParams>()),
            (crate::kernel::cuda::embedded::find("transform"), "cpattn_delta", size_of::<DeltaParams>()),
            (crate::kernel::cuda::embedded::find("transform"), "cpattn_finish", size_of::<FinishParams>()),
            (crate::kernel::cuda::embedded::find("transform"), "cpattn_merge", size_of::<MergeParams>()),
            (crate::kernel::cuda::embedded::find("transform"), "cpattn_combine", size_of::<CombineParams>()),
            (crate::kernel::cuda::embedded::find("tags"), "cpattn_begin_run", size_of::<tags::BeginRun>()),
            (crate::kernel::cuda::embedded::find("tags"), "cpattn_arrived", size_of::<tags::Arrived>()),
        ] {
            let text = text.expect("embedded").into_string().expect("text");
            let line = alloc::format!(".b8 {entry}_param_0[{bytes}]");
            assert!(text.contains(&line), "{line}");
        }
    }
}
