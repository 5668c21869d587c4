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
pub(super) mod shared_tiles;

use crate::call::RawTensor;
use crate::device::driver::{check, sys};
use crate::element::Dtype;
use crate::error::Result;
use crate::kernel::cuda::abi::params::{Addresses, ForwardParams, Parameters, Tensor, addresses};
use crate::kernel::cuda::abi::shapes::{SHAPES, Shaped};
use crate::kernel::cuda::family::Family;
use crate::kernel::cuda::hopper::shared_tiles::SharedTiles;
use crate::kernel::cuda::memory::metadata::TileRows;
use crate::kernel::cuda::modules::{AttentionModule, Instance, LoadedKernel};
use bytemuck::{Pod, Zeroable};
use core::mem::offset_of;

/// Columns of a box: 128 bytes.
const COLUMNS: u32 = 64;

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

/// The kernel for a shape that has one.
pub(super) fn kernel_of(shape: usize) -> HopperShape {
    FORWARD[shape].expect("a shape with a kernel for sm_90a")
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

/// `TensorMap`: the bytes that the driver wrote.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Map(pub [u8; 128]);

/// The maps of a backward, `HopperBackwardMaps`: of q, k, v and do, and of q and do for tiles that several heads share.
/// A forward has fewer, `HopperMaps`: of q, k and v, and of q for such tiles.
pub(super) const BACKWARD_MAPS: usize = 6;

/// The maps of a launch: those that it uses, then that of q.
pub(super) type Maps = [Map; BACKWARD_MAPS];

/// A tensor without its address and strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapShape {
    pub dtype: Dtype,
    pub dim: u32,
    pub heads: u32,
    pub tokens: u64,
    /// Rows of a part.
    pub span: u32,
    /// Rows and heads of a box.
    pub rows: u32,
    pub box_heads: u32,
}

/// The driver's arguments for a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ragged {
    address: u64,
    /// Columns, rows, heads, parts.
    dims: [u64; 4],
    /// Bytes from one row, head, part to the next.
    strides: [u64; 3],
}

impl MapShape {
    /// Boxes of `rows` rows of one head.
    pub(super) fn new(t: &RawTensor, span: u32, rows: u32) -> Self {
        Self { dtype: t.dtype, dim: t.dim, heads: t.heads, tokens: t.tokens, span, rows, box_heads: 1 }
    }

    /// The arguments for a map; `None` if no map can describe the tensor.
    fn ragged(&self, t: Tensor) -> Option<Ragged> {
        let compact = i64::from(self.dim) * self.dtype.size() as i64;
        let stride = |bytes: i64, used: bool| {
            let bytes = u64::try_from(if used { bytes } else { compact }).ok()?;
            (bytes > 0 && bytes.is_multiple_of(16) && bytes < 1 << 40).then_some(bytes)
        };
        let (row, head) = (stride(t.token, self.tokens > 1)?, stride(t.head, self.heads > 1)?);
        if !(1..1 << 31).contains(&self.tokens) || !(1..1 << 31).contains(&self.heads) || self.span == 0 {
            return None;
        }
        let address = t.ptr.checked_sub(u64::from(self.span).checked_mul(row)?)?;
        Some(Ragged {
            address: Some(address).filter(|a| a.is_multiple_of(16))?,
            dims: [self.dim.into(), self.span.into(), self.heads.into(), self.tokens + 1],
            strides: [row, head, row],
        })
    }

    /// The map; `None` if no map can describe the tensor. If the driver refuses a map that can be described, this is an
    /// error. To use the other kernel instead would be slower, and never noticed.
    pub(super) fn encode(&self, t: Tensor) -> Result<Option<Map>> {
        let Some(ragged) = self.ragged(t) else { return Ok(None) };
        let mut map = Map([0; 128]);
        let code = self.encode_into(&mut map, ragged);
        check("cuTensorMapEncodeTiled", code).map_err(Family::with_way_out)?;
        Ok(Some(map))
    }

    /// Encodes the map and returns the driver's status.
    fn encode_into(&self, map: &mut Map, Ragged { address, dims, strides }: Ragged) -> sys::CUresult {
        let element = if self.dtype == Dtype::Bf16 { sys::TENSOR_MAP_BFLOAT16 } else { sys::TENSOR_MAP_FLOAT16 };
        // SAFETY: the map is aligned to 64 bytes and has 128; the arrays are as long as the rank says, one stride less.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                core::ptr::from_mut(map).cast(),
                element,
                4,
                address as usize as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                [COLUMNS, self.rows, self.box_heads, 1].as_ptr(),
                [1; 4].as_ptr(),
                sys::TENSOR_MAP_INTERLEAVE_NONE,
                sys::TENSOR_MAP_SWIZZLE_128B,
                sys::TENSOR_MAP_L2_PROMOTION_256B,
                sys::TENSOR_MAP_FILL_ZEROS,
            )
        }
    }
}

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

/// Whether the driver can encode maps at all. Drivers that cannot are too old for `sm_90a`.
pub(super) fn driver_makes_maps() -> bool {
    let shape = MapShape { dtype: Dtype::F16, dim: COLUMNS, heads: 1, tokens: 1, span: 1, rows: 8, box_heads: 1 };
    let ragged = shape.ragged(Tensor { ptr: 1 << 20, token: 0, head: 0 });
    ragged.is_some_and(|ragged| shape.encode_into(&mut Map([0; 128]), ragged) != sys::NOT_SUPPORTED)
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

    fn text(name: &str) -> Option<String> {
        crate::kernel::cuda::embedded::find(name).map(|text| text.into_string().expect("text"))
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
        let lines: Vec<Vec<u32>> = include_str!("../../../../ptx/sm90/hopper_shapes.cuh")
            .lines()
            .filter_map(|line| line.strip_prefix("HOPPER_FORWARD(")?.strip_suffix(')'))
            .map(|numbers| numbers.split(", ").filter_map(|n| n.parse().ok()).collect())
            .collect();
        assert_eq!(lines.len(), FORWARD.iter().flatten().count());
        for (shape, hopper) in SHAPES.iter().zip(FORWARD) {
            let Some(hopper) = hopper else { continue };
            let line = lines.iter().find(|l| l[0] == shape.name).expect("a line");
            let same = forward(shape.head_dim, shape.value_dim, line[1], line[2], line[3]);
            assert_eq!((hopper.launch, hopper.keys), (same.launch, same.keys));
            assert!(hopper.launch.shared <= 227 * 1024, "{hopper:?}");
            for element in ELEMENTS {
                let text = text(&format!("hopper_forward_{element}_{}", shape.name)).expect("embedded");
                agrees("forward", &text, "8.0", hopper.launch);
                assert!(!text.contains(".reqnctapercluster"));
            }
        }
    }

    /// The launch in clusters is the launch of the forward, except for the cluster's shape, which is in the text only.
    #[test]
    fn clusters_are_those_of_the_sources() {
        for ((shape, hopper), has_kernel) in
            SHAPES.iter().zip(FORWARD).zip(crate::kernel::cuda::hopper::clusters::HAS_KERNEL)
        {
            for element in ELEMENTS {
                let found = text(&format!("hopper_cluster_{element}_{}", shape.name));
                assert_eq!(found.is_some(), has_kernel, "{}", shape.name);
                let Some(text) = found else { continue };
                agrees("cluster", &text, "8.1", hopper.expect("a forward").launch);
                // `Launch::start_hopper` rounds the grid down to pairs.
                assert!(text.contains(".explicitcluster\n.reqnctapercluster 2, 1, 1\n"));
            }
        }
    }

    const SHAPE: MapShape =
        MapShape { dtype: Dtype::Bf16, dim: 128, heads: 8, tokens: 1000, span: 300, rows: 128, box_heads: 1 };
    const TENSOR: Tensor = Tensor { ptr: 1 << 30, token: 2064, head: 256 };

    #[test]
    fn maps_are_ragged() {
        let expected =
            Ragged { address: (1 << 30) - 300 * 2064, dims: [128, 300, 8, 1001], strides: [2064, 256, 2064] };
        assert_eq!(SHAPE.ragged(TENSOR), Some(expected));
    }

    #[test]
    fn what_maps_cannot_say() {
        let change = |f: fn(&mut MapShape, &mut Tensor)| {
            let (mut shape, mut tensor) = (SHAPE, TENSOR);
            f(&mut shape, &mut tensor);
            shape.ragged(tensor)
        };
        for (i, f) in [
            (|_, t| t.token = -2064) as fn(&mut MapShape, &mut Tensor),
            |_, t| t.head = -256,
            |_, t| t.token = 0,
            |_, t| t.head = 0,
            |_, t| t.token = 2056,
            |_, t| t.head = 1 << 40,
            |s, _| s.tokens = 1 << 31,
            |s, _| s.tokens = 0,
            |s, _| s.heads = 0,
            |s, _| s.span = 0,
            |_, t| t.ptr = 300 * 2064 - 16,
            |_, t| t.ptr += 8,
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(change(f), None, "{i}");
        }
        // Strides of dimensions of size 1 are not used and may be anything.
        let one = change(|s, t| (s.tokens, s.heads, t.token, t.head) = (1, 1, -5, 0)).expect("one row");
        assert_eq!(one.strides, [256; 3]);
        assert!(change(|_, t| t.head = (1 << 40) - 16).is_some());
        assert!(change(|s, _| s.tokens = (1 << 31) - 1).is_some());
    }

    #[test]
    fn sections_fill_half_the_cache() {
        assert_eq!(section(50 << 20, 1 << 20, 8), 25 * 8);
        assert_eq!(section(50 << 20, 1 << 30, 8), 8);
        assert_eq!(section(50 << 20, 0, 1), 25 << 20);
        assert_eq!(section(u64::MAX, 0, u32::MAX), u32::MAX);
    }
}
