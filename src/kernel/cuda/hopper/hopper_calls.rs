// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of the kernels for `sm_90a`: loading them, and the parts of a launch.

use crate::call::{Attend, Range};
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::params::{ForwardParams, SidedBand};
use crate::kernel::cuda::hopper::maps::{MapShape, span};
use crate::kernel::cuda::hopper::shared_tiles::{HopperTiles, Sharing};
use crate::kernel::cuda::hopper::{
    Hopper, HopperParams, HopperShape, Sm80Fallback, find_kernel, kernel_of, other_rows, section,
};
use crate::kernel::cuda::memory::metadata_writer::{SortBuffers, Writer};
use crate::kernel::cuda::modules::{AttentionModule, Instance, LoadedKernel};
use crate::kernel::cuda::{hopper::clusters, hopper::shared_tiles, memory::metadata};

/// Bytes of the own list of tiles of the kernel for a shape, 0 if it uses the other kernel's list, of tiles of `rows`
/// rows.
pub(in crate::kernel::cuda) fn work_bytes(call: &Attend, shape: usize, rows: u32) -> usize {
    let own = kernel_of(shape).launch.rows;
    if Sharing::of(call.q.heads, &call.heads, own).is_some() {
        return shared_tiles::bytes(&call.ranges, own);
    }
    other_rows(shape, rows).map_or(0, |rows| metadata::query_work_bytes(&call.ranges, rows))
}

/// Writes the tiles of a call under bands of q rows. The other kernel has `tiles` of `rows` rows at `work`, which may
/// be the same.
pub(in crate::kernel::cuda) fn split(
    call: &Attend,
    shape: usize,
    (work, tiles, rows): (u64, usize, u32),
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    bands: &[SidedBand],
) -> HopperTiles {
    let other = other_rows(shape, rows);
    let same = other.is_none().then(|| HopperTiles { work, tiles, ..HopperTiles::default() });
    let tile = kernel_of(shape).tile();
    if let Some(sharing) = Sharing::of(call.q.heads, &call.heads, tile.queries) {
        return shared_tiles::write(scratch, writer, &call.ranges, (&sharing, call.q.heads), bands, tile, same);
    }
    same.unwrap_or_else(|| {
        let (work, tiles) = metadata::query_work(scratch, writer, &call.ranges, other.unwrap_or(rows), bands);
        HopperTiles { work, tiles, ..HopperTiles::default() }
    })
}

/// Rows of a part of maps for some ranges.
pub(in crate::kernel::cuda) fn span_of<'a>(ranges: impl Iterator<Item = &'a Range>) -> u32 {
    span(ranges.map(|r| r.len).max().unwrap_or(0))
}

impl Cuda {
    /// The kernel for a shape, if there is one and the device is to run it.
    pub(in crate::kernel::cuda) fn hopper_shape(&self, shape: usize) -> Option<HopperShape> {
        let runs = |s: &HopperShape| s.launch.shared <= self.shared_limit && (s.is_taken || self.every_hopper);
        find_kernel(shape).filter(|s| self.hopper && runs(s))
    }

    /// Whether calls of a shape run in clusters if they can.
    pub(in crate::kernel::cuda) fn has_clusters(&self, shape: usize) -> bool {
        self.clusters && clusters::HAS_KERNEL[shape] && self.hopper_shape(shape).is_some()
    }

    /// The parameters of a call for both kernels, with `params` as those of the kernel for `sm_80`; and the tensors of
    /// the maps. `split` holds the tiles of the kernel for `sm_90a`.
    pub(in crate::kernel::cuda) fn hopper_params(
        &self,
        call: &Attend,
        (kernel, cluster): (LoadedKernel, Option<LoadedKernel>),
        instance: Instance,
        params: ForwardParams,
        split: HopperTiles,
        tile_counter: u64,
    ) -> (HopperParams, Hopper) {
        let (q_span, k_span) = (span_of(call.ranges.q.iter().map(|q| &q.range)), span_of(call.ranges.k.iter()));
        let keys = kernel_of(instance.index).keys;
        let of = MapShape::new;
        let tensors = [of(&call.q, q_span, kernel.launch.rows), of(&call.k, k_span, keys), of(&call.v, k_span, keys)];
        let HopperTiles { work, tiles, shared } = split;
        let cluster = cluster.filter(|_| shared.tiles == 0);
        // q once more, for tiles that several heads share.
        let shared_box = (shared.tiles > 0).then(|| (1 << shared.token_bits, kernel.launch.rows >> shared.token_bits));
        let held = call.ranges.k.iter().map(|k| u64::from(k.len)).sum::<u64>();
        let head_bytes = held * u64::from(call.k.dim + call.v.dim) * call.k.dtype.size() as u64;
        let section = section(self.l2_bytes, head_bytes, call.heads.group).min(call.q.heads).max(1);
        // Items are never more than those of the other kernel, whose number fits.
        let (tiles, items) = (tiles as u32, tiles as u32 * call.q.heads + shared.tiles * shared.parts);
        let other = Sm80Fallback { module: AttentionModule::Forward, instance, items: params.heads.items };
        let params = HopperParams { call: params, tile_counter, work, q_span, k_span, tiles, section, shared };
        (params, Hopper { kernel, cluster, items, tensors, d_o: None, shared_box, other })
    }
}
