// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "hopper_backward.cuh"
#include "hopper_shapes.cuh"

using Kernel = HopperBackward<ELEMENT, HopperBackwardShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, 1)
    cpattn_hopper_backward(const __grid_constant__ HopperBackwardMaps maps, const __grid_constant__ HopperBackwardParams p) {
    Kernel::run(maps, p);
}
