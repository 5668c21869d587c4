// SPDX-License-Identifier: MIT OR Apache-2.0
// The shared memory of a block of the forward kernel of sm_90a: tiles, barriers, and what the loading thread leaves for the
// multiplying warps.
//
// Barriers: a `full` one gets one arrival, of the loading thread, and the bytes of the copies; an `empty` one an arrival of
// each multiplying warp, when its last product or read of that buffer is done. Only copies write tiles, and only
// products read them, so no proxy fence is needed between them.
//
// In a cluster of two blocks, k and v of a step are those of both: each block copies half of a tile to both. So an `empty`
// barrier of k or v gets arrivals of the warps of both blocks. One of them takes items for both and sends them to the other.
#pragma once
#include "hopper_params.cuh"

template <class Shape, u32 CLUSTER>
struct HopperBlock {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, STAGES = Shape::STAGES;
    static constexpr int THREADS = Shape::THREADS;
    // A panel of 64 columns, in bytes.
    static constexpr u32 Q_PANEL = BM * 128, K_PANEL = BN * 128;
    static constexpr int WIDTH = Shape::WIDTH, VALUE_WIDTH = Shape::VALUE_WIDTH;
    static constexpr u32 Q_BYTES = Q_PANEL * (WIDTH / 64), K_BYTES = K_PANEL * (WIDTH / 64);
    static constexpr u32 V_BYTES = K_PANEL * (VALUE_WIDTH / 64);
    // Multiplying warpgroups, of 64 rows each.
    static constexpr u32 WARPS = BM / 16, GROUP_ROWS = 64, GROUPS = BM / GROUP_ROWS;
    // A tile of one head counts as one of this many rows, a power of two.
    static constexpr u32 ROW_BITS = BM > 128 ? 8 : 7;
    static_assert(BM % GROUP_ROWS == 0 && BM <= 1 << ROW_BITS && WIDTH % 64 == 0 && DV % 32 == 0, "whole warpgroups and panels");

    // One that is being multiplied, one whose epilogue may still read it, and one that the loading thread prepares.
    static constexpr u32 ITEMS = 3;

    struct Control {
        u64 q_full, q_empty;
        u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        Item items[ITEMS];
        u32 next_item;  // the loading thread's: it has no register for it
        HopperStep steps[STAGES];
        Sweep<1> sweep;
        u64 item_full, item_empty;  // of a cluster: `next_item` was sent, and read
    };
    static_assert(sizeof(Control) <= Shape::CONTROL, "behind the tiles");

    // Addresses in shared memory.
    struct Shared {
        u32 q, k, v, control;
        __device__ __forceinline__ explicit Shared(u32 base)
            : q(base), k(q + Q_BYTES), v(k + STAGES * K_BYTES), control(v + STAGES * V_BYTES) {}
        __device__ __forceinline__ u32 state() const { return control + Shape::CONTROL; }
        __device__ __forceinline__ u32 next_item() const { return control + offsetof(Control, next_item); }
        __device__ __forceinline__ u32 item_full() const { return control + offsetof(Control, item_full); }
        __device__ __forceinline__ u32 item_empty() const { return control + offsetof(Control, item_empty); }
        __device__ __forceinline__ u32 q_full() const { return control + offsetof(Control, q_full); }
        __device__ __forceinline__ u32 q_empty() const { return control + offsetof(Control, q_empty); }
        __device__ __forceinline__ u32 k_full(u32 s) const { return control + offsetof(Control, k_full) + 8 * s; }
        __device__ __forceinline__ u32 k_empty(u32 s) const { return control + offsetof(Control, k_empty) + 8 * s; }
        __device__ __forceinline__ u32 v_full(u32 s) const { return control + offsetof(Control, v_full) + 8 * s; }
        __device__ __forceinline__ u32 v_empty(u32 s) const { return control + offsetof(Control, v_empty) + 8 * s; }
    };

    // Of the buffers that steps take in turn: which is the next step's, and the parity of its phase.
    struct PipelineState {
        u32 at = 0, phase = 0;
        __device__ __forceinline__ u32 stage() const { return at; }
        __device__ __forceinline__ u32 parity() const { return phase; }
        __device__ __forceinline__ void advance() {
            at = at + 1;
            if (at == STAGES) {
                at = 0;
                phase ^= 1;
            }
        }
    };

    // The same of the slots of items, with the parity of the phase that each item is of the barriers of q.
    struct ItemState {
        u32 count = 0;
        __device__ __forceinline__ u32 slot() const { return count < ITEMS ? count : count - ITEMS; }
        __device__ __forceinline__ u32 parity() const { return count & 1; }
        __device__ __forceinline__ void advance() { count = count + 1 == 2 * ITEMS ? 0 : count + 1; }
    };

    static __device__ __forceinline__ void init_barriers(const Shared& at) {
        barrier_init(at.q_full(), 1);
        barrier_init(at.q_empty(), WARPS);
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(at.k_full(s), 1);
            barrier_init(at.k_empty(s), CLUSTER * WARPS);
            barrier_init(at.v_full(s), 1);
            barrier_init(at.v_empty(s), CLUSTER * WARPS);
        }
        if (CLUSTER > 1) {
            barrier_init(at.item_full(), 1);
            barrier_init(at.item_empty(), 1);
        }
        fence_made_barriers();
    }
};
