// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles and warps of every compiled shape. `src/kernel/cuda/abi/shapes.rs` mirrors these numbers.
//
// A shape is named by the head dims it holds: SHAPE 128 serves q, k and v of up to 128, 192128 serves q and k of up to
// 192 with v of up to 128. What bounds the choices: no spills at 255 registers, at most 99 KB of shared memory (so that
// sm_86, sm_89 and sm_120 run the same code; above head dim 64 the fused backward takes more, and head dim 128 has a second one
// that fits), and as many own rows per warp as fit, since each B fragment read from shared memory then serves more products.
//
// BATCH is how many steps of its walk a block prepares at a time: 16, and fewer where the steps, which lie in shared memory
// too, would leave no room for a second block on a multiprocessor of sm_80.
#pragma once

template <int S>
struct Dims {
    static constexpr int D = S, DV = S;
};
template <>
struct Dims<192128> {
    static constexpr int D = 192, DV = 128;
};
template <>
struct Dims<6464> {
    static constexpr int D = 64, DV = 64;
};
template <>
struct Dims<128128> {
    static constexpr int D = 128, DV = 128;
};

template <>
struct Dims<576512> {
    static constexpr int D = 576, DV = 512;
};

// BM q rows, BN keys, WARPS warps of BM / WARPS q rows each; BLOCKS per multiprocessor is what registers are bounded for.
// TILES bytes hold q, k and v; behind them lie largest score and sum of each thread's rows, where registers are too few.
// 6464 is what serves head dims up to 64 where a multiprocessor has no room for two blocks of 64: sm_86, sm_89 and sm_120.
template <int S>
struct ForwardShape;
#define FORWARD(shape, m, n, w, b)                                                                             \
    template <>                                                                                                \
    struct ForwardShape<shape> : Dims<shape> {                                                                 \
        static constexpr int BM = m, BN = n, WARPS = w, BLOCKS = b, THREADS = w * 32, MT = m / (16 * w);       \
        static constexpr int TILES = 2 * (m * D + n * D + n * DV), ROW_STATE = MT > 1 ? 2 * MT * THREADS * 4 : 0; \
        static constexpr int SHARED = TILES + 2 * ROW_STATE, BATCH = 16;                                       \
    };
FORWARD(64, 128, 128, 4, 2)
FORWARD(6464, 128, 64, 4, 2)
FORWARD(96, 128, 64, 4, 2)
FORWARD(128, 128, 64, 4, 2)
FORWARD(192, 128, 64, 8, 1)
FORWARD(192128, 128, 64, 8, 1)
FORWARD(256, 64, 64, 4, 1)
#undef FORWARD

// dq: BM q rows by BN keys, in STAGES buffers of STAGE bytes; behind the TILES, lse and delta of the q rows.
template <int S>
struct QueriesShape;
#define QUERIES(shape, m, n, w, st, b, batch)                                                              \
    template <>                                                                                            \
    struct QueriesShape<shape> : Dims<shape> {                                                             \
        static constexpr int BM = m, BN = n, WARPS = w, STAGES = st, BLOCKS = b, THREADS = w * 32;         \
        static constexpr int STAGE = 2 * n * (D + DV), TILES = 2 * m * (D + DV) + st * STAGE;              \
        static constexpr int SHARED = TILES + 2 * m * 4, BATCH = batch;                                    \
    };
QUERIES(64, 128, 64, 4, 2, 2, 16)
QUERIES(96, 128, 32, 4, 2, 1, 16)
QUERIES(128, 128, 32, 4, 2, 1, 16)
QUERIES(192, 64, 32, 4, 2, 1, 16)
QUERIES(192128, 64, 32, 4, 2, 1, 5)
QUERIES(256, 64, 32, 4, 1, 1, 16)
#undef QUERIES

// dk and dv: BN keys by BM q rows, of which SUB at a time are in registers. A stage is the tiles of q and do with lse and
// delta behind them. SPLIT makes dk and dv in two passes, because both sums together would not fit.
template <int S>
struct KeysShape;
#define KEYS(shape, n, m, sub, w, st, b, split, batch)                                                     \
    template <>                                                                                            \
    struct KeysShape<shape> : Dims<shape> {                                                                \
        static constexpr int BN = n, BM = m, SUB = sub, WARPS = w, STAGES = st, BLOCKS = b, THREADS = w * 32; \
        static constexpr int STAGE_TILES = 2 * m * (D + DV), STAGE = STAGE_TILES + 2 * m * 4;              \
        static constexpr int SHARED = 2 * n * (D + DV) + st * STAGE, BATCH = batch;                        \
        static constexpr bool SPLIT = split;                                                               \
    };
KEYS(64, 128, 64, 32, 4, 2, 2, false, 16)
KEYS(96, 64, 64, 32, 4, 2, 2, false, 16)
KEYS(128, 64, 64, 32, 4, 2, 2, false, 16)
KEYS(192, 64, 32, 16, 4, 2, 1, false, 16)
KEYS(192128, 64, 32, 32, 4, 2, 1, false, 5)
KEYS(256, 64, 32, 32, 4, 1, 1, true, 16)
#undef KEYS

// dq, dk and dv in one kernel: BN keys by BM q rows. WARPS are KEY_PARTS over the keys times COLUMN_PARTS, first over q rows
// (SUB of them at a time), then over the columns of dk and dv. For dq they are QUERY_PARTS over q rows, the rest over
// columns. With one column part, p stays in registers and one tile of 16-bit ds lies behind the stages, else both do; then
// lse and delta of one tile of q rows. All that is declared statically takes CONTROL bytes at most. Two blocks of head dim 64
// just fit on sm_80.
//
// A buffer holds q and do, STAGE bytes, and there are two. Where v is HELD in registers, it takes no shared memory, and there is
// one buffer of do behind two of q: 128128 is what serves head dim 128 on sm_86, sm_89 and sm_120.
template <int S>
struct FusedShape;
#define FUSED(shape, n, m, sub, kp, cp, qp, st, b, batch, held)                                             \
    template <>                                                                                            \
    struct FusedShape<shape> : Dims<shape> {                                                               \
        static constexpr int BN = n, BM = m, SUB = sub, KEY_PARTS = kp, COLUMN_PARTS = cp, QUERY_PARTS = qp; \
        static constexpr int WARPS = kp * cp, STAGES = st, BLOCKS = b, THREADS = 32 * kp * cp;             \
        static constexpr bool HELD = held;                                                                 \
        static constexpr int STAGE = 2 * m * (held ? D : D + DV);                                          \
        static constexpr int TILES = 2 * n * (held ? D : D + DV) + st * STAGE + (held ? 2 * m * DV : 0);   \
        static constexpr int PROBABILITIES = 2 * n * m, STATS = TILES + (cp > 1 ? 2 : 1) * PROBABILITIES;  \
        static constexpr int SHARED = STATS + 2 * m * 4, BATCH = batch, CONTROL = batch > 6 ? 1280 : 512;     \
    };
FUSED(64, 128, 64, 32, 4, 1, 2, 2, 2, 6, false)
FUSED(96, 128, 64, 32, 4, 2, 4, 2, 1, 16, false)
FUSED(128, 128, 64, 32, 4, 2, 2, 2, 1, 16, false)
FUSED(128128, 128, 64, 32, 8, 1, 2, 2, 1, 16, true)
FUSED(192, 64, 64, 16, 2, 4, 2, 2, 1, 16, false)
FUSED(192128, 64, 64, 16, 2, 4, 2, 2, 1, 16, false)
FUSED(256, 64, 64, 16, 2, 4, 2, 2, 1, 16, false)
#undef FUSED

// The kernels of `wide.cuh`: BM own rows, of which all columns lie in shared memory, by BN rows of partners in chunks of 64 columns,
// STAGES of them. Behind them the squares of p and ds, 16-bit, and numbers of rows: four each of own rows in the forward, two each of
// own rows or partners in the backward.
template <int S>
struct WideForwardShape;
template <int S>
struct WideBackwardShape;
#define WIDE(shape, m, own, n, st)                                                                              \
    template <>                                                                                                 \
    struct WideForwardShape<shape> : Dims<shape> {                                                              \
        static constexpr int BM = m, BN = n, STAGES = st, THREADS = 256, BLOCKS = 1, BATCH = 16;                 \
        static constexpr int SHARED = 2 * (m * D + st * n * 64 + m * n) + 4 * m * 4;                            \
    };                                                                                                          \
    template <>                                                                                                 \
    struct WideBackwardShape<shape> : Dims<shape> {                                                             \
        static constexpr int BM = own, BN = n, STAGES = st, THREADS = 256, BLOCKS = 1, BATCH = 16;               \
        static constexpr int SHARED = 2 * (own * (D + DV) + st * n * 64 + 2 * own * n) + 2 * n * 4;              \
    };
WIDE(576512, 64, 32, 64, 2)
#undef WIDE
