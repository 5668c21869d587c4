// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "backward.cuh"
#include "shapes.cuh"

using Queries = BackwardQueries<ELEMENT, QueriesShape<SHAPE>>;

extern "C" __global__ void __launch_bounds__(Queries::THREADS, QueriesShape<SHAPE>::BLOCKS)
    cpattn_backward_queries(const __grid_constant__ BackwardParams p) {
    Queries::run(p);
}

#if SHAPE == 256

using Keys = BackwardKeys<ELEMENT, KeysShape<SHAPE>, DK>;
using Values = BackwardKeys<ELEMENT, KeysShape<SHAPE>, DV_>;

extern "C" __global__ void __launch_bounds__(Values::THREADS, KeysShape<SHAPE>::BLOCKS)
    cpattn_backward_values(const __grid_constant__ BackwardParams p) {
    Values::run(p);
}

#else

using Keys = BackwardKeys<ELEMENT, KeysShape<SHAPE>, DK | DV_>;

#endif

extern "C" __global__ void __launch_bounds__(Keys::THREADS, KeysShape<SHAPE>::BLOCKS)
    cpattn_backward_keys(const __grid_constant__ BackwardParams p) {
    Keys::run(p);
}
