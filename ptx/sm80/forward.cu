// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "forward.cuh"
#include "shared/shapes.cuh"
#include "wide_forward.cuh"

#if SHAPE == 576512
using Tiles = WideForwardShape<SHAPE>;
using Kernel = WideForward<ELEMENT, Tiles>;
#else
using Tiles = ForwardShape<SHAPE>;
using Kernel = Forward<ELEMENT, Tiles>;
#endif

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, Tiles::BLOCKS)
    cpattn_forward(const __grid_constant__ ForwardParams p) {
    Kernel::run(p);
}

#if SHAPE == 64

using Narrow = Forward<ELEMENT, ForwardShape<6464>>;

extern "C" __global__ void __launch_bounds__(Narrow::THREADS, ForwardShape<6464>::BLOCKS)
    cpattn_forward_narrow(const __grid_constant__ ForwardParams p) {
    Narrow::run(p);
}

#endif
