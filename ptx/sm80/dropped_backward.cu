// SPDX-License-Identifier: MIT OR Apache-2.0
// Entries of one compilation: `compile` defines ELEMENT and SHAPE.
#include "backward.cuh"
#include "dropped_shapes.cuh"
#include "wide_backward.cuh"

#if SHAPE == 576512

using Tiles = WideBackwardShape<SHAPE>;
using Queries = WideQueries<ELEMENT, Tiles, DroppedBackwardParams, true>;
using Keys = WideKeys<ELEMENT, Tiles, DroppedBackwardParams, true>;

extern "C" __global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    cpattn_dropped_queries(const __grid_constant__ DroppedBackwardParams p) {
    run_wide<Queries, Queries::Control>(p);
}

extern "C" __global__ void __launch_bounds__(Tiles::THREADS, Tiles::BLOCKS)
    cpattn_dropped_keys(const __grid_constant__ DroppedBackwardParams p) {
    run_wide<Keys, Keys::Control>(p);
}

#else

using OfQueries = DroppedQueriesShape<SHAPE>;
using OfKeys = DroppedKeysShape<SHAPE>;
using Queries = BackwardQueries<ELEMENT, OfQueries, DroppedBackwardParams, true>;
using Keys = BackwardKeys<ELEMENT, OfKeys, DK | DV_, DroppedBackwardParams, true>;

extern "C" __global__ void __launch_bounds__(OfQueries::THREADS, OfQueries::BLOCKS)
    cpattn_dropped_queries(const __grid_constant__ DroppedBackwardParams p) {
    Queries::run(p);
}

extern "C" __global__ void __launch_bounds__(OfKeys::THREADS, OfKeys::BLOCKS)
    cpattn_dropped_keys(const __grid_constant__ DroppedBackwardParams p) {
    Keys::run(p);
}

#endif
