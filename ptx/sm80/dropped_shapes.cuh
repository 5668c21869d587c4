// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles of the kernels with dropout, and of the forward over pages, for head dims up to 64 and up to 128; those of `wide.cuh` serve
// all above. `src/kernel/cuda/abi/shapes.rs` mirrors these numbers.
//
// Four warps have 16 own rows each, half of what a warp has elsewhere: a kernel that hashes is bound by that, not by what it reads from
// shared memory, and its text has half the size.
#pragma once
#include "shared/shapes.cuh"

// BM q rows by BN keys.
template <int S>
struct DroppedForwardShape : Dims<S> {
    using Dims<S>::D;
    using Dims<S>::DV;
    static constexpr int BM = 64, BN = 64, WARPS = 4, BLOCKS = 2, THREADS = WARPS * 32, MT = 1, BATCH = 16;
    static constexpr int TILES = 2 * (BM * D + BN * D + BN * DV), ROW_STATE = 0, SHARED = TILES;
};

// BM q rows by BN keys, in STAGES buffers.
template <int S>
struct DroppedQueriesShape : Dims<S> {
    using Dims<S>::D;
    using Dims<S>::DV;
    static constexpr int BM = 64, BN = 32, WARPS = 4, STAGES = 2, BLOCKS = 2, THREADS = WARPS * 32, BATCH = 16;
    static constexpr int STAGE = 2 * BN * (D + DV), TILES = 2 * BM * (D + DV) + STAGES * STAGE;
    static constexpr int SHARED = TILES + 2 * BM * 4;
};

// BN keys by BM q rows, all of them in registers. At head dim 64 three blocks fit where registers are bounded for them.
template <int S>
struct DroppedKeysShape : Dims<S> {
    using Dims<S>::D;
    using Dims<S>::DV;
    static constexpr int BN = 64, BM = 32, SUB = BM, WARPS = 4, STAGES = 2, BLOCKS = S == 64 ? 3 : 2, THREADS = WARPS * 32, BATCH = 16;
    static constexpr int STAGE_TILES = 2 * BM * (D + DV), STAGE = STAGE_TILES + 2 * BM * 4;
    static constexpr int SHARED = 2 * BN * (D + DV) + STAGES * STAGE;
};
