// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launch of the fused backward: one kernel for dq, dk and dv, for either family. The metadata of both families is
//! the same; only the lists of tiles of keys differ if the tiles of one have more keys.

use crate::call::AttendBackward;
use crate::error::Result;
use crate::kernel::cuda::abi::params::{BackwardParams, FusedParams as Params};
use crate::kernel::cuda::hopper::either_backward::DealtOut;
use crate::kernel::cuda::launch::recorded::LaunchRecorder;
use crate::kernel::cuda::launch::{Launch, Launches, items};
use crate::kernel::cuda::memory::dq_semaphore::{self, DqSemaphore, TilesOfKeys};
use crate::kernel::cuda::memory::metadata::TileRows;
use crate::kernel::cuda::memory::unread::{self, Pieces};
use crate::kernel::cuda::modules::{AttentionModule, Instance};
use crate::kernel::cuda::{Cuda, abi::shapes, hopper::hopper_backward};

/// Items for each block that the device runs at a time, so that the last blocks end together. With fewer items, groups
/// of q heads are split. The split must not depend on multiprocessors left free, or the bits would.
const ITEMS: u32 = 4;

/// Heads of q, and of dk and dv.
pub(in crate::kernel::cuda) fn heads(call: &AttendBackward) -> (u32, u32) {
    (call.q.heads, if call.per_q_head { call.q.heads } else { call.k.heads })
}

/// The number of parts of a group of q heads, and the heads of each part, that give `wanted` items if whole groups give
/// `items`.
fn split(group: u32, items: u32, wanted: u32) -> (u32, u32) {
    let part_heads = group.div_ceil((wanted / items.max(1)).clamp(1, group));
    (group.div_ceil(part_heads), part_heads)
}

impl shapes::Fused {
    pub(in crate::kernel::cuda) const fn tiles(self) -> TileRows {
        TileRows { queries: self.queries, keys: self.launch.rows }
    }
}

impl Cuda {
    /// The tiles of the kernel that is to run where `fused` is that for `sm_80`.
    fn fused_tiles(&self, shape: usize, fused: shapes::Fused) -> TileRows {
        self.hopper_backward(shape).unwrap_or(fused).tiles()
    }

    /// The most bytes of the metadata of [`Cuda::fused_launches`]. The call may be one that will be refused.
    pub(in crate::kernel::cuda) fn fused_bytes(
        &self,
        call: &AttendBackward,
        shape: usize,
        fused: shapes::Fused,
    ) -> usize {
        let cuts = unread::most_cuts(&call.ranges);
        let cut_bytes = if cuts == 0 { 0 } else { dq_semaphore::cut_bytes(cuts, heads(call)) };
        self.list_bytes(call, shape, fused) + cut_bytes
    }

    /// Bytes for the ranges of a call as they are.
    fn list_bytes(&self, call: &AttendBackward, shape: usize, fused: shapes::Fused) -> usize {
        dq_semaphore::bytes(&call.ranges, self.fused_tiles(shape, fused), fused.launch.rows, heads(call))
    }

    /// The launch of the fused kernel for a checked call; `params` have no metadata yet.
    pub(in crate::kernel::cuda) fn fused_launches(
        &self,
        call: &AttendBackward,
        instance: Instance,
        fused: shapes::Fused,
        mut params: BackwardParams,
        window: (i64, i64),
        recorder: &mut LaunchRecorder,
    ) -> Result<Launches> {
        let pieces = Pieces::of(&call.ranges, window);
        let ranges = pieces.as_ref().map_or(call.ranges, |pieces| pieces.ranges(call.ranges.bands));
        let call = &AttendBackward { ranges, ..*call };
        let is_hopper = self.hopper_backward(instance.index).is_some();
        let module = if is_hopper { AttentionModule::HopperBackward } else { AttentionModule::Fused };
        let kernel = self.load(module, instance)?;
        let heads = heads(call);
        let tiles = self.fused_tiles(instance.index, fused);
        let (mut writer, scratch) = recorder.begin(self.list_bytes(call, instance.index, fused))?;
        let other_keys = fused.launch.rows;
        let metadata = dq_semaphore::write(scratch, &mut writer, &call.ranges, tiles, other_keys, window, heads);
        let DqSemaphore { keys_of, query_bands, query_tiles, own, other, dq_semaphore, key_semaphore, .. } = metadata;
        // Words are counted with 32 bits.
        items(metadata.words, 1)?;
        let wanted = ITEMS * self.multiprocessors * kernel.each;
        // Without q heads dk and dv are zeros, and a launch must still write them.
        let group = if call.per_q_head { 1 } else { call.heads.group.min(call.q.heads).max(1) };
        let dealt_out = |keys: TilesOfKeys| -> Result<DealtOut> {
            let (parts, part_heads) = split(group, items(keys.tiles, heads.1)?, wanted);
            let items = items(keys.tiles * parts as usize, heads.1)?;
            Ok(DealtOut { key_tiles: keys.before, work: keys.work, items, parts, part_heads, unused: 0 })
        };
        let (own, other) = (dealt_out(own)?, dealt_out(other)?);
        params.heads.items = own.items;
        if own.items == 0 {
            return Ok(Launches::default());
        }
        (params.queries, params.keys) = (metadata.queries, metadata.keys);
        (params.partners, params.bands, params.work) = (metadata.queries_of, metadata.key_bands, own.work);
        let params = Params {
            call: params,
            keys_of,
            query_bands,
            query_tiles,
            key_tiles: own.key_tiles,
            dq_semaphore,
            key_semaphore,
            tile_counter: metadata.tile_counter,
            parts: own.parts,
            part_heads: own.part_heads,
        };
        let launch = match is_hopper {
            true => hopper_backward::launch(call, kernel, instance, params, other),
            false => Launch::tiles(kernel, own.items, true, &params),
        };
        Ok(Launches::one(writer.part(), Some(launch)))
    }
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn groups_are_split_where_tiles_are_few() {
        assert_eq!(split(8, 1000, 528), (1, 8));
        assert_eq!(split(8, 528, 528), (1, 8));
        assert_eq!(split(8, 256, 528), (2, 4));
        assert_eq!(split(8, 176, 528), (3, 3));
        assert_eq!(split(8, 100, 528), (4, 2));
        assert_eq!(split(8, 1, 528), (8, 1));
        assert_eq!(split(1, 1, 528), (1, 1));
        assert_eq!(split(7, 0, 528), (7, 1));
    }
}
