// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parameters of a backward launch for two kernels: the one for `sm_90a` and the fused one for `sm_80`. Which of them
//! runs is known only when the launch is put on a stream, since that depends on strides.
//!
//! Both read the same struct, but divide their tiles of keys over blocks differently. A launch stores those fields for
//! both kernels; for the kernel for `sm_80` they replace the other's.

use crate::kernel::cuda::abi::params::{Addresses, FusedParams, Parameters, addresses};
use bytemuck::{Pod, Zeroable};

/// `HopperBackwardParams`. It begins with the parameters of the kernel for `sm_80`, which can be launched with it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct HopperBackwardParams {
    pub call: FusedParams,
    pub q_span: u32,
    pub k_span: u32,
}

/// How the tiles of keys are divided over blocks: the fields of [`FusedParams`] that depend on the number of keys of a
/// tile.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct DealtOut {
    pub key_tiles: u64,
    pub work: u64,
    pub items: u32,
    pub parts: u32,
    pub part_heads: u32,
    pub unused: u32,
}

/// The parameters of a launch: the kernel's own, and those that differ for the kernel of `sm_80`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct EitherParams {
    pub hopper: HopperBackwardParams,
    pub other: DealtOut,
}

addresses! {
    EitherParams {
        metadata: [
            hopper.call.call.queries, hopper.call.call.keys, hopper.call.call.partners,
            hopper.call.call.bands, hopper.call.call.work, hopper.call.keys_of, hopper.call.query_bands,
            hopper.call.query_tiles, hopper.call.key_tiles, hopper.call.dq_semaphore,
            hopper.call.key_semaphore, hopper.call.tile_counter, other.key_tiles, other.work,
        ],
        ..FusedParams::ADDRESSES
    }
}

/// Changes the parameters of a launch into those for the kernel for `sm_80`.
pub(in crate::kernel::cuda) fn use_sm80_params(params: &mut [u64]) {
    let params: &mut EitherParams = &mut bytemuck::cast_slice_mut(&mut params[..size_of::<EitherParams>() / 8])[0];
    let (own, other) = (&mut params.hopper.call, params.other);
    (own.key_tiles, own.call.work) = (other.key_tiles, other.work);
    (own.call.heads.items, own.parts, own.part_heads) = (other.items, other.parts, other.part_heads);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::cuda::abi::params::{BackwardParams, HeadParams};
    use core::mem::offset_of;

    #[test]
    fn the_other_kernel_reads_its_own_tiles() {
        let mut params = [u64::MAX; size_of::<EitherParams>() / 8];
        let other = DealtOut { key_tiles: 1, work: 2, items: 3, parts: 4, part_heads: 5, unused: 0 };
        params[offset_of!(EitherParams, other) / 8..].copy_from_slice(bytemuck::cast_slice(&[other]));
        use_sm80_params(&mut params);
        let words: &[u32] = bytemuck::cast_slice(&params[..size_of::<FusedParams>() / 8]);
        let changed: alloc::vec::Vec<_> = words.iter().enumerate().filter(|(_, w)| **w != u32::MAX).collect();
        let (work, items) =
            (offset_of!(BackwardParams, work), offset_of!(BackwardParams, heads) + offset_of!(HeadParams, items));
        let tiles = offset_of!(FusedParams, key_tiles);
        let parts = offset_of!(FusedParams, parts);
        let expected = [(work, 2), (work + 4, 0), (items, 3), (tiles, 1), (tiles + 4, 0), (parts, 4), (parts + 4, 5)];
        assert_eq!(changed, expected.each_ref().map(|(at, value)| (at / 4, value)));
    }
}
