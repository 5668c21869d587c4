// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parameters of the kernels around attention: `ptx/shared/transform.cu` and `ptx/shared/sinks.cu`.

use super::{Addresses, BASES, Divisor, Parameters, Tensor};
use crate::report::metadata;
use bytemuck::{Pod, Zeroable};

/// `TransformTensor`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct TransformTensor {
    pub row: i64,
    pub token: i64,
    pub head: i64,
    pub first_head: u32,
    pub base: u32,
}

/// `TransformBlock`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct TransformBlock {
    pub dst: TransformTensor,
    pub rows: u64,
    pub first_tile: u64,
    pub heads: Divisor,
    pub units: Divisor,
    pub dim: Divisor,
    pub eights: u32,
    pub dtype: u32,
    pub sources_begin: u32,
    pub sources_end: u32,
    pub unused: u32,
}

/// `TransformSource`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct TransformSource {
    pub src: TransformTensor,
    pub dtype: u32,
    pub unused: u32,
}

/// `TransformParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct TransformParams {
    pub blocks: u64,
    pub sources: u64,
    pub tiles: u64,
    pub block_count: u32,
    pub unused: u32,
    pub bases: [Tensor; BASES],
}

/// `DeltaParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct DeltaParams {
    pub o: Tensor,
    pub d_o: Tensor,
    pub delta: Tensor,
    pub lse: Tensor,
    pub d_lse: Tensor,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    pub dtype: u32,
    pub lanes: u32,
}

/// `FinishParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct FinishParams {
    pub o: Tensor,
    pub lse: Tensor,
    pub sinks: Tensor,
    pub runs: u64,
    pub work: u64,
    pub items: u32,
    pub heads: u32,
    pub dim: u32,
    pub rows: u32,
    pub sink_count: u32,
    pub unused: u32,
}

/// `MergeParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct MergeParams {
    pub o: Tensor,
    pub lse: Tensor,
    pub with_o: Tensor,
    pub with_lse: Tensor,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    pub lse_words: u32,
    pub with_lse_words: u32,
}

/// `CombineParams`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct CombineParams {
    pub o: Tensor,
    pub lse: Tensor,
    pub sinks: Tensor,
    pub parts: u64,
    pub rows: u64,
    pub part_count: u32,
    pub heads: u32,
    pub dim: u32,
    pub dtype: u32,
    pub lanes: u32,
    pub sink_count: u32,
    pub bases: [Tensor; BASES],
}

/// `SinkParams` of `ptx/shared/sinks.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct Sinks {
    pub lse: Tensor,
    pub delta: Tensor,
    pub sinks: Tensor,
    pub dsinks: Tensor,
    pub rows: u64,
    pub count: u32,
    pub unused: u32,
}

addresses! {
    TransformParams { metadata: [blocks, sources], bases: [bases], ..Addresses::NONE }
    DeltaParams { tensors: [o, d_o, delta, lse, d_lse], ..Addresses::NONE }
    FinishParams { tensors: [o, lse, sinks], metadata: [runs, work], ..Addresses::NONE }
    MergeParams { tensors: [o, lse, with_o, with_lse], ..Addresses::NONE }
    CombineParams { tensors: [o, lse, sinks], metadata: [parts], bases: [bases], ..Addresses::NONE }
    Sinks { tensors: [lse, delta, sinks, dsinks], ..Addresses::NONE }
}

const _: () = {
    // Plans report these sizes as memory of a device.
    assert!(
        size_of::<TransformBlock>() as u64 == metadata::BLOCK
            && size_of::<TransformSource>() as u64 == metadata::SOURCE
    );
    assert!(size_of::<TransformTensor>() == 32);
    assert!(size_of::<TransformBlock>() == 104);
    assert!(size_of::<TransformSource>() == 40);
    assert!(size_of::<TransformParams>() == 368);
    assert!(size_of::<DeltaParams>() == 144);
    assert!(size_of::<FinishParams>() == 112);
    assert!(size_of::<MergeParams>() == 120);
    assert!(size_of::<CombineParams>() == 448);
    assert!(size_of::<Sinks>() == 112);
};
