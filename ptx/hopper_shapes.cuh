// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles of every shape compiled for sm_90a. `src/kernel/cuda/hopper.rs` mirrors these numbers.
//
// Two warpgroups own 64 q rows each and have 232 registers a thread: 64 for scores, 64 for o, 32 for probabilities at head
// dim 128; 32, 128 and 16 at 256. A third one loads; of its 128 threads one works, with 40 registers. What else bounds the tiles is shared memory, q
// and STAGES buffers of k and v each: a block may have 227 KB.
#pragma once
#include "shapes.cuh"

// BM q rows, BN keys.
template <int S>
struct HopperForwardShape;
#define HOPPER_FORWARD(shape, m, n, stages)                                                             \
    template <>                                                                                         \
    struct HopperForwardShape<shape> : Dims<shape> {                                                    \
        static constexpr int BM = m, BN = n, STAGES = stages, THREADS = 2 * m + 128;                    \
        static constexpr int CONTROL = 512, SHARED = 2 * (m * D + stages * n * (D + DV)) + CONTROL;     \
    };
HOPPER_FORWARD(64, 128, 128, 2)
HOPPER_FORWARD(128, 128, 128, 2)
HOPPER_FORWARD(192128, 128, 128, 2)
HOPPER_FORWARD(256, 128, 64, 2)
#undef HOPPER_FORWARD
