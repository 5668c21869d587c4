// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "hopper_forward.cuh"
#include "hopper_shapes.cuh"

using Kernel = HopperForward<ELEMENT, HopperForwardShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, 1)
    cpattn_hopper_forward(const __grid_constant__ HopperMaps maps, const __grid_constant__ HopperForwardParams p) {
    Kernel::run(maps, p);
}
