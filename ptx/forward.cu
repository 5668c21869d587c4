// SPDX-License-Identifier: MIT OR Apache-2.0
// One entry per compilation: `compile` defines ELEMENT and SHAPE.
#include "forward.cuh"
#include "shapes.cuh"

using Kernel = Forward<ELEMENT, ForwardShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, ForwardShape<SHAPE>::BLOCKS)
    cpattn_forward(const __grid_constant__ ForwardParams p) {
    Kernel::run(p);
}
