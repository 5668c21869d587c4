// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward kernels for `sm_90a`: which launches they do, and the parameters that only they have.
//!
//! They load through tensor maps, which the driver encodes on the host, one for each tensor. A map is encoded when a
//! launch is put on a stream, unless one for the same addresses and strides is kept (`kept_maps`). A map has columns,
//! rows, heads and parts (see `ptx/sm90/hopper_load.cuh`), strides that are positive multiples of 16 bytes below 2^40,
//! and coordinates of 32 bits. For tensors that no map can describe, the kernel for `sm_80` does the launch with the
//! same metadata and the same parameters: negative strides and strides of 0, tensors of 2^31 rows, addresses too close
//! to 0.

pub(super) mod clusters;
pub(super) mod either_backward;
pub(super) mod hopper_backward;
pub(super) mod hopper_calls;
pub(super) mod kept_maps;
pub(super) mod maps;
pub(super) mod shared_tiles;
mod switches;

use crate::error::Result;
use crate::kernel::cuda::abi::params::{Addresses, ForwardParams, Parameters, Tensor, addresses};
use crate::kernel::cuda::abi::shapes::{SHAPES, Shaped};
use crate::kernel::cuda::hopper::maps::{COLUMNS, Map, MapShape};
use crate::kernel::cuda::hopper::shared_tiles::SharedTiles;
use crate::kernel::cuda::hopper::switches::switches;
use crate::kernel::cuda::memory::metadata::TileRows;
use crate::kernel::cuda::modules::{AttentionModule, Instance, LoadedKernel};
use bytemuck::{Pod, Zeroable};
use core::mem::offset_of;

/// Bytes of shared memory behind the tiles, for barriers.
const CONTROL: u32 = 512;

/// The kernel for the head dims of one of [`SHAPES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct HopperShape {
    pub launch: Shaped,
    /// Rows of a tile of keys.
    pub keys: u32,
    /// Whether this kernel is used when no family is forced.
    pub is_taken: bool,
}

impl HopperShape {
    /// The same kernel, used only when it is forced: its speed against the kernel for `sm_80` has not been measured.
    const fn if_forced(self) -> Self {
        Self { is_taken: false, ..self }
    }

    pub(super) const fn tile(self) -> TileRows {
        TileRows { queries: self.launch.rows, keys: self.keys }
    }
}

const fn forward(d: u32, dv: u32, m: u32, n: u32, stages: u32) -> HopperShape {
    // Whole boxes.
    let (d, dv) = (d.next_multiple_of(COLUMNS), dv.next_multiple_of(COLUMNS));
    // With three multiplying warpgroups, the largest score and the sum of each row are stored there while scores are
    // masked.
    let state = if m > 128 { 32 * m } else { 0 };
    let shared = 2 * (m * d + stages * n * (d + dv)) + CONTROL + state;
    HopperShape { launch: Shaped { rows: m, threads: 2 * m + 128, shared }, keys: n, is_taken: true }
}

/// By the index of [`SHAPES`].
pub(super) const FORWARD: [Option<HopperShape>; SHAPES.len()] = [
    Some(forward(64, 64, 192, 128, 2)),
    Some(forward(96, 96, 128, 128, 2).if_forced()),
    Some(forward(128, 128, 128, 128, 2)),
    Some(forward(192, 128, 128, 128, 2)),
    Some(forward(192, 192, 128, 112, 2).if_forced()),
    Some(forward(256, 256, 128, 80, 2)),
    None,
];

/// The same with the switch `SMALL_TILES`.
const SMALL_TILES: [Option<HopperShape>; SHAPES.len()] = {
    let mut shapes = FORWARD;
    shapes[4] = Some(forward(192, 192, 128, 64, 2).if_forced());
    shapes[5] = Some(forward(256, 256, 128, 64, 2));
    shapes
};

/// The kernel for a shape, if there is one.
pub(super) fn find_kernel(shape: usize) -> Option<HopperShape> {
    if switches().small_tiles { SMALL_TILES[shape] } else { FORWARD[shape] }
}

/// The kernel for a shape that has one.
pub(super) fn kernel_of(shape: usize) -> HopperShape {
    find_kernel(shape).expect("a shape with a kernel for sm_90a")
}

/// Rows of the tiles of the kernel for a shape, if they are not `rows`: it then has its own list.
pub(super) fn other_rows(shape: usize, rows: u32) -> Option<u32> {
    Some(kernel_of(shape).launch.rows).filter(|&own| own != rows)
}

/// `HopperForwardParams`. It begins with the parameters of the kernel for `sm_80`, which can be launched with it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HopperParams {
    pub call: ForwardParams,
    /// A word that is 0 when the launch begins, and when it has ended.
    pub tile_counter: u64,
    /// The tiles of this kernel, which may differ from those of `call`.
    pub work: u64,
    pub q_span: u32,
    pub k_span: u32,
    pub tiles: u32,
    pub section: u32,
    pub shared: SharedTiles,
}

addresses! {
    HopperParams {
        metadata: [call.queries, call.keys, call.partners, call.bands, call.work, tile_counter, work, shared.work],
        ..ForwardParams::ADDRESSES
    }
}

const _: () = assert!(offset_of!(HopperParams, call) == 0);

/// The maps of a backward, `HopperBackwardMaps`: of q, k, v and do, and of q and do for tiles that several heads share.
/// A forward has fewer, `HopperMaps`: of q, k and v, and of q for such tiles.
pub(super) const BACKWARD_MAPS: usize = 6;

/// The maps of a launch: those that it uses, then that of q.
pub(super) type Maps = [Map; BACKWARD_MAPS];

/// The kernel for `sm_90a` of a launch, and the tensors of its maps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hopper {
    pub kernel: LoadedKernel,
    /// The same kernel in clusters of two blocks, if the call can use them.
    pub cluster: Option<LoadedKernel>,
    /// The number of its tiles times heads.
    pub items: u32,
    /// Of q, k and v.
    pub tensors: [MapShape; 3],
    /// Of do, in a backward.
    pub d_o: Option<MapShape>,
    /// Rows and heads of a box of q (and do) for tiles that several heads share, if there are such tiles.
    pub shared_box: Option<(u32, u32)>,
    pub other: Sm80Fallback,
}

/// The kernel for `sm_80` that does a launch if maps cannot describe its tensors: a forward or a fused backward, and
/// the number of its tiles times heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sm80Fallback {
    pub module: AttentionModule,
    pub instance: Instance,
    pub items: u32,
}

impl Hopper {
    /// The maps of the tensors, made by `map`; `None` if the kernel for `sm_80` must do the launch.
    pub(super) fn maps(
        &self,
        tensors: [Tensor; 4],
        map: impl Fn(MapShape, Tensor) -> Result<Option<Map>>,
    ) -> Result<Option<Maps>> {
        let boxed = |shape| self.shared_box.map(|(rows, box_heads)| MapShape { rows, box_heads, ..shape });
        let [q, k, v] = self.tensors;
        let shapes = [Some(q), Some(k), Some(v), self.d_o, boxed(q), self.d_o.and_then(boxed)];
        let (mut maps, mut used) = ([Map([0; 128]); BACKWARD_MAPS], 0);
        for (shape, tensor) in shapes.into_iter().zip([0, 1, 2, 3, 0, 3]) {
            let Some(shape) = shape else { continue };
            let Some(made) = map(shape, tensors[tensor])? else { return Ok(None) };
            maps[used] = made;
            used += 1;
        }
        let q = maps[0];
        maps[used..].fill(q);
        Ok(Some(maps))
    }
}

/// The number of q heads whose k and v fill half of the L2 cache, with `head_bytes` bytes for each kv head.
pub(super) fn section(l2_bytes: u64, head_bytes: u64, group: u32) -> u32 {
    let heads = l2_bytes / 2 / head_bytes.max(1);
    heads.max(1).saturating_mul(group.into()).min(u32::MAX.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::cuda::modules::ELEMENTS;
    use alloc::string::String;
    use alloc::vec::Vec;

    /// Maps in `HopperMaps`.
    const FORWARD_MAPS: usize = 4;

    use crate::kernel::cuda::embedded::{apart, find};

    /// The text of a kernel; none for those that no library has.
    fn text(name: &str) -> Option<String> {
        let text = find(name).map(|text| text.into_string().expect("text"));
        assert!(text.is_some() != apart(name).is_some(), "{name}");
        text
    }

    /// The numbers of the lines of the sources that begin so.
    fn lines(macro_name: &str) -> Vec<Vec<u32>> {
        include_str!("../../../../ptx/sm90/hopper_shapes.cuh")
            .lines()
            .filter_map(|line| line.strip_prefix(macro_name)?.strip_suffix(')'))
            .map(|numbers| numbers.split(", ").filter_map(|n| n.parse().ok()).collect())
            .collect()
    }

    /// Compares the parameters that the host passes to the kernel of this module, and its launch, with the text.
    #[track_caller]
    fn agrees(kernel: &str, text: &str, version: &str, launch: Shaped) {
        let parameter = |i: u32, bytes: usize| format!("cpattn_hopper_{kernel}_param_{i}[{bytes}]");
        for expected in [
            format!(".version {version}\n"),
            ".target sm_90a\n".into(),
            parameter(0, FORWARD_MAPS * size_of::<Map>()),
            parameter(1, size_of::<HopperParams>()),
            format!(".maxntid {},", launch.threads),
        ] {
            assert!(text.contains(&expected), "{kernel}: no {expected}");
        }
    }

    #[test]
    fn shapes_are_those_of_the_sources() {
        let lines = lines("HOPPER_FORWARD(");
        assert_eq!(lines.len(), FORWARD.iter().flatten().count());
        for (shape, hopper) in SHAPES.iter().zip(FORWARD) {
            let Some(hopper) = hopper else { continue };
            let line = lines.iter().find(|l| l[0] == shape.name).expect("a line");
            let same = forward(shape.head_dim, shape.value_dim, line[1], line[2], line[3]);
            assert_eq!((hopper.launch, hopper.keys), (same.launch, same.keys));
            assert!(hopper.launch.shared <= 227 * 1024, "{hopper:?}");
            for element in ELEMENTS {
                let Some(text) = text(&format!("hopper_forward_{element}_{}", shape.name)) else {
                    assert!(!hopper.is_taken, "{}", shape.name);
                    continue;
                };
                agrees("forward", &text, "8.0", hopper.launch);
                assert!(!text.contains(".reqnctapercluster"));
            }
        }
    }

    #[test]
    fn small_tiles_are_those_of_the_sources() {
        let lines = lines("HOPPER_SMALL(");
        let mut changed = 0;
        for ((shape, hopper), small) in SHAPES.iter().zip(FORWARD).zip(SMALL_TILES) {
            let Some((hopper, small)) = hopper.zip(small) else { continue };
            match lines.iter().find(|line| line[0] == shape.name) {
                Some(line) => {
                    changed += 1;
                    let same = forward(shape.head_dim, shape.value_dim, line[1], line[2], line[3]);
                    assert_eq!((small.launch, small.keys), (same.launch, same.keys));
                    assert!(small.launch.shared <= 193 * 1024, "{small:?}");
                    // The lists of tiles of q are the same.
                    assert_eq!(
                        (small.launch.rows, small.launch.threads, small.is_taken),
                        (hopper.launch.rows, hopper.launch.threads, hopper.is_taken)
                    );
                }
                None => assert_eq!((small.launch, small.keys), (hopper.launch, hopper.keys)),
            }
        }
        assert_eq!((changed, lines.len()), (2, 2));
    }

    /// Kernels in clusters are apart, and none for a shape that is not.
    #[test]
    fn clusters_are_those_of_the_sources() {
        for (shape, has_kernel) in SHAPES.iter().zip(crate::kernel::cuda::hopper::clusters::HAS_KERNEL) {
            for element in ELEMENTS {
                let name = format!("hopper_cluster_{element}_{}", shape.name);
                assert_eq!((apart(&name).is_some(), find(&name).is_some()), (has_kernel, false), "{name}");
            }
        }
        assert!(apart(crate::kernel::cuda::hopper::clusters::MODULE).is_some());
    }

    #[test]
    fn sections_fill_half_the_cache() {
        assert_eq!(section(50 << 20, 1 << 20, 8), 25 * 8);
        assert_eq!(section(50 << 20, 1 << 30, 8), 8);
        assert_eq!(section(50 << 20, 0, 1), 25 << 20);
        assert_eq!(section(u64::MAX, 0, u32::MAX), u32::MAX);
    }
}
