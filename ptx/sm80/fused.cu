// SPDX-License-Identifier: MIT OR Apache-2.0
// The entry of one compilation: `compile` defines ELEMENT and SHAPE.
#include "fused.cuh"
#include "shared/shapes.cuh"

using Fused = BackwardFused<ELEMENT, FusedShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Fused::THREADS, FusedShape<SHAPE>::BLOCKS)
    cpattn_backward_fused(const __grid_constant__ FusedParams p) {
    Fused::run(p);
}
