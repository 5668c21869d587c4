// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "backward.cuh"
#include "shared/shapes.cuh"
#include "wide_backward.cuh"

#if SHAPE == 576512

using Tiles = WideBackwardShape<SHAPE>;
using Queries = WideQueries<ELEMENT, Tiles>;
using Keys = WideKeys<ELEMENT, Tiles>;

extern "C" __global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    cpattn_backward_queries(const __grid_constant__ BackwardParams p) {
    run_wide<Queries, Queries::Control>(p);
}

extern "C" __global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    cpattn_backward_keys(const __grid_constant__ BackwardParams p) {
    run_wide<Keys, Keys::Control>(p);
}

#else

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

#endif
