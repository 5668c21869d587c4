// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward kernels for `sm_90a`: which launches they do, and their parameters.
//!
//! They compute all gradients, with the metadata and the parameters of the fused kernel for `sm_80`. That kernel does
//! the calls that tensor maps cannot describe, and every shape without a kernel here. The options of a call do not
//! matter for this choice. At head dims 192 and 128 the tiles have twice the keys of the other kernel's, which then has
//! its own list ([`DealtOut`]); all other metadata is shared. At 256 the two multiplying warpgroups share the keys of a
//! tile, and at other head dims each has 64 of its own.

use crate::call::AttendBackward;
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::params::FusedParams;
use crate::kernel::cuda::abi::shapes::{Fused, SHAPES, Shaped};
use crate::kernel::cuda::hopper::either_backward::{DealtOut, EitherParams, HopperBackwardParams};
use crate::kernel::cuda::hopper::hopper_calls::span_of;
use crate::kernel::cuda::hopper::maps::MapShape;
use crate::kernel::cuda::hopper::{Hopper, Sm80Fallback};
use crate::kernel::cuda::launch::Launch;
use crate::kernel::cuda::modules::{AttentionModule, Instance, LoadedKernel};

/// Bytes of shared memory behind the tiles, for barriers.
const CONTROL: u32 = 2560;

/// Bytes of probabilities that wait in shared memory: a quarter of them if dk and dv leave too few registers, and all
/// of them if one warpgroup makes them for both.
const fn parked(d: u32, dv: u32, m: u32, n: u32) -> u32 {
    if n == 64 {
        2 * m * n
    } else if d + dv > 256 {
        32 * n
    } else {
        0
    }
}

const fn backward(d: u32, dv: u32, m: u32, n: u32) -> Option<Fused> {
    let parked = parked(d, dv, m, n);
    let shared = 2 * (n * (d + dv) + 2 * m * (d + dv) + 2 * m * n) + CONTROL + parked;
    Some(Fused { launch: Shaped { rows: n, threads: 384, shared }, queries: m, control: 0 })
}

/// By the index of [`SHAPES`].
pub(in crate::kernel::cuda) const BACKWARD: [Option<Fused>; SHAPES.len()] = [
    backward(64, 64, 64, 128),
    None,
    backward(128, 128, 64, 128),
    backward(192, 128, 64, 128),
    None,
    backward(256, 256, 64, 64),
    None,
];

// The order of additions to dq is of tiles of q rows, in one list for both kernels.
const _: () = {
    let mut i = 0;
    while i < SHAPES.len() {
        if let Some(Fused { launch, queries, .. }) = BACKWARD[i] {
            let Some(other) = SHAPES[i].fused else { panic!("the other kernel") };
            assert!(launch.rows >= other.launch.rows && queries == other.queries);
        }
        i += 1;
    }
};

impl Cuda {
    /// The kernel for a shape, if there is one and the device is to run it.
    pub(in crate::kernel::cuda) fn hopper_backward(&self, shape: usize) -> Option<Fused> {
        BACKWARD[shape].filter(|s| self.hopper && s.launch.shared <= self.shared_limit)
    }
}

/// Rows of a box of q or do where heads share a tile, which has 16 or 32 rows of each.
const PIECE: u32 = 16;

/// Whether q heads share a tile in some step: `Round::find` of `ptx/shared/dq_semaphore.cuh`. A tile of `queries` rows
/// is shared where a range's last one has at most half of them, and an item has several heads.
fn shares(call: &AttendBackward, part_heads: u32, queries: u32) -> bool {
    let is_short = |len: u32| (1..=queries / 2).contains(&(len % queries));
    !call.per_q_head && part_heads > 1 && call.ranges.q.iter().any(|q| is_short(q.range.len))
}

/// The launch of a call whose other parameters are `params`.
pub(in crate::kernel::cuda) fn launch(
    call: &AttendBackward,
    kernel: LoadedKernel,
    instance: Instance,
    params: FusedParams,
    other: DealtOut,
) -> Launch {
    let (q_span, k_span) = (span_of(call.ranges.q.iter().map(|q| &q.range)), span_of(call.ranges.k.iter()));
    let queries = BACKWARD[instance.index].map_or(1, |s| s.queries);
    let keys = kernel.launch.rows;
    let of = MapShape::new;
    let hopper = Hopper {
        kernel,
        cluster: None,
        items: params.call.heads.items,
        tensors: [of(&call.q, q_span, queries), of(&call.k, k_span, keys), of(&call.v, k_span, keys)],
        d_o: Some(of(&call.d_o, q_span, queries)),
        shared_box: shares(call, params.part_heads, queries).then_some((PIECE, 1)),
        other: Sm80Fallback { module: AttentionModule::Fused, instance, items: other.items },
    };
    let hopper_params = HopperBackwardParams { call: params, q_span, k_span };
    Launch::hopper_or_other(hopper, &EitherParams { hopper: hopper_params, other })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::cuda::hopper::BACKWARD_MAPS;
    use crate::kernel::cuda::hopper::maps::Map;
    use crate::kernel::cuda::modules::ELEMENTS;
    use alloc::format;
    use alloc::vec::Vec;

    #[test]
    fn shapes_are_those_of_the_sources() {
        let lines: Vec<Vec<u32>> = include_str!("../../../../ptx/sm90/hopper_shapes.cuh")
            .lines()
            .filter_map(|line| line.strip_prefix("HOPPER_BACKWARD(")?.strip_suffix(')'))
            .map(|numbers| numbers.split(", ").filter_map(|n| n.parse().ok()).collect())
            .collect();
        assert_eq!(lines.len(), BACKWARD.iter().flatten().count());
        for (shape, backward_shape) in SHAPES.iter().zip(BACKWARD) {
            let Some(found) = backward_shape else { continue };
            let line = lines.iter().find(|l| l[0] == shape.name).expect("a line");
            assert_eq!(Some(found), backward(shape.head_dim, shape.value_dim, line[1], line[2]));
            assert!(found.launch.shared <= 227 * 1024, "{found:?}");
            for element in ELEMENTS {
                let name = format!("hopper_backward_{element}_{}", shape.name);
                let text = crate::kernel::cuda::embedded::find(&name).expect("embedded").into_string().expect("text");
                assert!(text.contains(".target sm_90a") && text.contains(".version 8.1"));
                let maps = BACKWARD_MAPS * size_of::<Map>();
                assert!(text.contains(&format!("cpattn_hopper_backward_param_0[{maps}]")));
                assert!(
                    text.contains(&format!("cpattn_hopper_backward_param_1[{}]", size_of::<HopperBackwardParams>()))
                );
                assert!(text.contains(&format!(".maxntid {},", found.launch.threads)));
            }
        }
    }

    /// Cycles of the tensor cores and of shared memory (128 bytes each) in a step of a block: every product stands in
    /// the text once, for one of two warpgroups. Each reads its right matrix from shared memory, and its left one where
    /// registers do not hold it; ds is written there, and q and do are copied there. `ptx/DESIGN.md` has these figures.
    fn cycles(shape: &crate::kernel::cuda::abi::shapes::Shape, kernel: Fused) -> (u32, u32) {
        let name = format!("hopper_backward_bf16_{}", shape.name);
        let text = crate::kernel::cuda::embedded::find(&name).expect("embedded").into_string().expect("text");
        let (mut tensor, mut bytes) = (0, 0);
        for line in text.lines() {
            let Some((_, product)) = line.split_once("wgmma.mma_async.sync.aligned.m64n") else { continue };
            let columns: u32 = product.split('k').next().and_then(|n| n.parse().ok()).expect("a number");
            let left = if product.contains("}, {") { 0 } else { 64 * 16 * 2 };
            // Half a cycle for each column, twice.
            tensor += columns;
            bytes += 2 * (columns * 16 * 2 + left);
        }
        let (d, dv) = (shape.head_dim, shape.value_dim);
        let (queries, keys) = (kernel.queries, kernel.launch.rows);
        // The parked probabilities are written once and read once.
        let parked = 2 * parked(d, dv, queries, keys);
        (tensor, (bytes + queries * keys * 2 + queries * (d + dv) * 2 + parked) / 128)
    }

    #[test]
    fn shared_memory_keeps_up_with_the_products() {
        let found = SHAPES.iter().zip(BACKWARD).filter_map(|(shape, b)| Some((shape.name, cycles(shape, b?))));
        let expected = [(64, (1280, 1408)), (128, (2560, 2432)), (192128, (3328, 3328)), (256, (2560, 2624))];
        assert_eq!(found.collect::<Vec<_>>(), expected);
        let (_, (tensor, shared)) = expected[1];
        assert!(shared * 100 <= tensor * 95);
    }
}
