// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernel of fused.cu for devices on which a block has 99 KB of shared memory: `compile` defines ELEMENT; head dim 128 alone has it.
#include "fused.cuh"
#include "shared/shapes.cuh"

using Fused = BackwardFused<ELEMENT, FusedShape<128128>>;

extern "C" __global__ void __launch_bounds__(Fused::THREADS, 1)
    cpattn_backward_fused_narrow(const __grid_constant__ FusedParams p) {
    Fused::run(p);
}
