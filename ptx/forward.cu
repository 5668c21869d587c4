// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "forward.cuh"
#include "shapes.cuh"

using Kernel = Forward<ELEMENT, ForwardShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Kernel::THREADS, ForwardShape<SHAPE>::BLOCKS)
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
