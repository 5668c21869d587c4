// SPDX-License-Identifier: MIT OR Apache-2.0
// The forward kernel for clusters of two blocks: `compile` defines ELEMENT and SHAPE.
#include "hopper_forward.cuh"
#include "hopper_shapes.cuh"

enum : u32 { CLUSTER = 2 };
using Kernel = HopperForward<ELEMENT, HopperForwardShape<SHAPE>, CLUSTER>;

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(Kernel::THREADS, 1)
    cpattn_hopper_cluster(const __grid_constant__ HopperMaps maps, const __grid_constant__ HopperForwardParams p) {
    Kernel::run(maps, p);
}
