// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles of every shape compiled for sm_90a. `src/kernel/cuda/hopper/mod.rs` mirrors these numbers.
//
// Two warpgroups own 64 q rows each and have 232 registers a thread: 64 for scores, 64 for o, 32 for probabilities at head
// dim 128; 56, 96 and 28 at 192; 40, 128 and 20 at 256. Another one loads; of its 128 threads one works, with 40 registers.
// At head dim 64 three own 64 rows each, with 160 registers: 64 for scores, 32 for o, 32 for probabilities. What else bounds the
// tiles is shared memory, q and STAGES buffers of k and v each, in whole panels of 64 columns: a block may have 227 KB.
// Head dim 192 would need 241 KB with 128 keys to a tile, and has 112; 256 would need 258 KB with 96, and has 80. With
// CPATTN_SMALL_TILES both have 64, and 145 and 193 KB.
#pragma once
#include "shared/shapes.cuh"

// BM q rows, BN keys.
template <int S>
struct HopperForwardShape;
#define HOPPER_FORWARD(shape, m, n, stages)                                                             \
    template <>                                                                                         \
    struct HopperForwardShape<shape> : Dims<shape> {                                                    \
        static constexpr int BM = m, BN = n, STAGES = stages, THREADS = 2 * m + 128;                    \
        static constexpr int REGISTERS = m > 128 ? 160 : 232, LOAD_REGISTERS = m > 128 ? 32 : 40;           \
        static constexpr int WIDTH = (D + 63) / 64 * 64, VALUE_WIDTH = (DV + 63) / 64 * 64;             \
        static constexpr int TILES = 2 * (m * WIDTH + stages * n * (WIDTH + VALUE_WIDTH));              \
        static constexpr int CONTROL = 512, STATE = m > 128 ? 32 * m : 0, SHARED = TILES + CONTROL + STATE; \
    };
HOPPER_FORWARD(64, 192, 128, 2)
HOPPER_FORWARD(96, 128, 128, 2)
HOPPER_FORWARD(128, 128, 128, 2)
HOPPER_FORWARD(192128, 128, 128, 2)
#ifdef CPATTN_SMALL_TILES
#define HOPPER_SMALL HOPPER_FORWARD
HOPPER_SMALL(192, 128, 64, 2)
HOPPER_SMALL(256, 128, 64, 2)
#undef HOPPER_SMALL
#else
HOPPER_FORWARD(192, 128, 112, 2)
HOPPER_FORWARD(256, 128, 80, 2)
#endif
#undef HOPPER_FORWARD

// The backward: BM q rows by BN keys, in two buffers of q and do, and two of ds. Two warpgroups own 64 keys each and have 232
// registers a thread: at head dim 128 64 each for dk and dv, 32 each for scores and their gradients, and 16 for the
// probabilities; half for dk and dv at 64. At 192/128 they are 96 and 64, and PARKED bytes behind the barriers hold a quarter of the
// probabilities, 16 bytes for each thread (see hopper_backward_steps.cuh). At 256 both warpgroups have the same 64 keys, and 128
// registers for either dk or dv; there they hold all probabilities, on their way from one to the other (hopper_backward_pair.cuh).
template <int S>
struct HopperBackwardShape;
#define HOPPER_BACKWARD(shape, m, n, batch)                                                               \
    template <>                                                                                           \
    struct HopperBackwardShape<shape> : Dims<shape> {                                                     \
        static constexpr int BM = m, BN = n, BATCH = batch, THREADS = 384;                                \
        static constexpr bool PAIR = n == 64;                                                             \
        static constexpr int TILES = 2 * (n * (D + DV) + 2 * m * (D + DV) + 2 * m * n);                   \
        static constexpr int PARKED = PAIR ? 2 * m * n : D + DV > 256 ? 32 * n : 0;                       \
        static constexpr int CONTROL = 2560 + PARKED, SHARED = TILES + CONTROL;                           \
    };
HOPPER_BACKWARD(64, 64, 128, 16)
HOPPER_BACKWARD(128, 64, 128, 16)
HOPPER_BACKWARD(192128, 64, 128, 16)
HOPPER_BACKWARD(256, 64, 64, 16)
#undef HOPPER_BACKWARD
