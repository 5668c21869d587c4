// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "dropped_shapes.cuh"
#include "forward.cuh"
#include "wide_forward.cuh"

#if SHAPE == 576512
using Tiles = WideForwardShape<SHAPE>;
using Kernel = WideForward<ELEMENT, Tiles, PagedForwardParams, false, Paged>;
#else
using Tiles = DroppedForwardShape<SHAPE>;
using Kernel = Forward<ELEMENT, Tiles, PagedForwardParams, false, Paged>;
#endif

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, Tiles::BLOCKS)
    cpattn_paged_forward(const __grid_constant__ PagedForwardParams p) {
    Kernel::run(p);
}
