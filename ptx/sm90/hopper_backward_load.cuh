// SPDX-License-Identifier: MIT OR Apache-2.0
// The first warpgroup of the backward kernel of sm_90a, and the shared memory between it and the multiplying ones.
//
// Its first warp takes items by a counter (tiles of keys, see `fused.cuh`), walks over the tiles of q rows that read one, and
// fills the buffers: k and v once an item, then q, do, lse and delta of each step, into STAGES buffers in turn. The second
// waits, a step ahead of the multiplying warps, until the tile of dq may be added to; the third lets the successor add.
// Neither wait then stands between two products.
//
// Barriers: `kv_full` gets an arrival for each of k and v, and the bytes of their copies; `q_full` one of the copy and one of lse
// and delta; `kv_empty` one of each multiplying warp, `q_empty`, which frees do too, two more, of the second and the third warp.
// `turn` gets one, of the second warp; `added` one of each multiplying warp. A step's buffer of q is free only when the second
// and the third warp have read what is to be done, and the third has seen `added`: so neither barrier is a phase ahead of one
// that waits for it.
#pragma once
#include "sm80/fused.cuh"
#include "hopper_rows.cuh"

struct HopperBackwardMaps {
    TensorMap q, k, v, d_o;
    TensorMap shared_q, shared_d_o;  // for tiles that heads share: boxes of 16 rows
};

// Begins with what the fused kernel of sm_80 is given, which does the call where maps cannot say what its tensors are.
struct HopperBackwardParams {
    FusedParams call;
    u32 q_span;  // rows to a part of the maps of q and do
    u32 k_span;  // and of those of k and v
};

template <class Shape>
struct HopperBackwardBlock {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, THREADS = Shape::THREADS;
    static constexpr u32 BATCH = Shape::BATCH, STAGES = 2, WARPS = 8;
    // Slots of items. One is found while the one before it is multiplied and dk and dv of the one before that are written; three would
    // do, but four are counted by two bits.
    static constexpr u32 ITEMS = 4;
    // A panel of 64 columns, in bytes.
    static constexpr u32 Q_PANEL = BM * 128, K_PANEL = BN * 128;
    static constexpr u32 Q_BYTES = BM * D * 2, O_BYTES = BM * DV * 2, K_BYTES = BN * D * 2, V_BYTES = BN * DV * 2;
    static constexpr u32 STAGE_BYTES = Q_BYTES + O_BYTES, DS_BYTES = BM * BN * 2;
    static_assert(D % 64 == 0 && DV % 64 == 0, "whole panels");

    // A tile of keys, or of q rows that meet none.
    struct Item {
        Own own;
        u32 zero;
        u32 head0, head1;
        u32 part;           // of the group's q heads
        u32 key_semaphore;  // the word of the tile's dk and dv
        u32 meets;          // whether any q row reads it
        u32 is_end;         // whether there are no more
    };

    struct Stage {
        DqStep step;  // rows is 0 behind the last one of all
        u32 number;   // of the tile of keys, plus one
        u32 flags;
    };
    // No mask, softcap, slope or large row (`score.cuh`); the last one of its item; all rows and columns of dq are there; dq holds
    // something already; a q row is large.
    enum : u32 { PLAIN = 1, LAST = 2, WHOLE = 4, ADD = 8, HAS_LARGE = 16 };

    struct Control {
        u64 kv_full, kv_empty;
        u64 q_full[STAGES], q_empty[STAGES], d_o_full[STAGES], turn[STAGES], added[STAGES];
        float stats[STAGES][2 * BM];
        float zeros[BM];
        Item items[ITEMS];
        Stage stages[STAGES];
        DqStep batch[BATCH];
        Round<true> round;
    };
    static_assert(sizeof(Control) + Shape::PARKED <= Shape::CONTROL, "behind the tiles");

    // Addresses in shared memory.
    struct Shared {
        u32 k, v, queries, slopes, control;
        __device__ __forceinline__ explicit Shared(u32 base)
            : k(base), v(k + K_BYTES), queries(v + V_BYTES), slopes(queries + STAGES * STAGE_BYTES),
              control(slopes + STAGES * DS_BYTES) {}
        __device__ __forceinline__ u32 q(u32 s) const { return queries + s * STAGE_BYTES; }
        __device__ __forceinline__ u32 d_o(u32 s) const { return q(s) + Q_BYTES; }
        __device__ __forceinline__ u32 ds(u32 s) const { return slopes + s * DS_BYTES; }
        __device__ __forceinline__ u32 kv_full() const { return control + offsetof(Control, kv_full); }
        __device__ __forceinline__ u32 kv_empty() const { return control + offsetof(Control, kv_empty); }
        __device__ __forceinline__ u32 q_full(u32 s) const { return control + offsetof(Control, q_full) + 8 * s; }
        __device__ __forceinline__ u32 q_empty(u32 s) const { return control + offsetof(Control, q_empty) + 8 * s; }
        __device__ __forceinline__ u32 d_o_full(u32 s) const { return control + offsetof(Control, d_o_full) + 8 * s; }
        __device__ __forceinline__ u32 turn(u32 s) const { return control + offsetof(Control, turn) + 8 * s; }
        __device__ __forceinline__ u32 added(u32 s) const { return control + offsetof(Control, added) + 8 * s; }
        __device__ __forceinline__ u32 stats(u32 s) const { return control + offsetof(Control, stats) + 8 * BM * s; }
        __device__ __forceinline__ u32 parked() const { return control + Shape::CONTROL - Shape::PARKED; }
        __device__ __forceinline__ u32 zeros() const { return control + offsetof(Control, zeros); }
    };

    // Of the buffers that steps take in turn: which is the next step's, and the parity of its phase.
    struct PipelineState {
        u32 count = 0;
        __device__ __forceinline__ u32 stage() const { return count & 1; }
        __device__ __forceinline__ u32 parity() const { return count >> 1 & 1; }
    };

    // The same for the loading warp, which has few registers: the lowest two bits count its items.
    struct LoadState {
        u32 word = 0;
        __device__ __forceinline__ u32 slot() const { return word % ITEMS; }
        __device__ __forceinline__ u32 item_parity() const { return word & 1; }
        __device__ __forceinline__ u32 stage() const { return word / ITEMS & 1; }
        __device__ __forceinline__ u32 parity() const { return word / ITEMS >> 1 & 1; }
        __device__ __forceinline__ void next_item() { word = (word & ~(ITEMS - 1)) | (word + 1) % ITEMS; }
        __device__ __forceinline__ void next_step() { word += ITEMS; }
    };

    static __device__ __forceinline__ void init_barriers(const Shared& at) {
        barrier_init(at.kv_full(), 2);
        barrier_init(at.kv_empty(), WARPS);
#pragma unroll
        for (u32 s = 0; s < STAGES; ++s) {
            barrier_init(at.q_full(s), 2);
            barrier_init(at.q_empty(s), WARPS + 2);
            barrier_init(at.d_o_full(s), 1);
            barrier_init(at.turn(s), 1);
            barrier_init(at.added(s), WARPS);
        }
        fence_made_barriers();
    }
};

template <class Shape>
struct HopperBackwardLoad {
    using Block = HopperBackwardBlock<Shape>;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using LoadState = typename Block::LoadState;
    using Item = typename Block::Item;
    using Stage = typename Block::Stage;
    static constexpr int D = Block::D, DV = Block::DV, BM = Block::BM, BN = Block::BN;
    static constexpr u32 BATCH = Block::BATCH;
    static_assert(BM == 64, "two q rows for each lane of a warp");

    // The base of exponents and delta of one q row. Rows that no head has get p = 0.
    static __device__ __forceinline__ float2 stats(const BackwardParams& p, volatile const DqStep& step, u32 row) {
        const u32 skipped = row >> step.token_bits, token = row - (skipped << step.token_bits);
        if (skipped >= step.heads || token >= step.rows) return make_float2(-minus_infinity(), 0.0f);
        const i64 at = step.row + token;
        const u32 head = step.head + skipped;
        const float lse = *(const float*)(p.lse.ptr + head * p.lse.head + at * p.lse.token);
        const float delta = *(const float*)(p.delta.ptr + head * p.delta.head + at * p.delta.token);
        return make_float2(exponent_base(lse), delta);
    }

    // The tile of q or do of a step: of one head, or of those that share it.
    template <int WIDTH>
    static __device__ __forceinline__ void load_queries(u32 to, const TensorMap& map, const TensorMap& shared_map, u32 span,
                                                        const BackwardParams& p, volatile const DqStep& step, u32 barrier) {
        const Run& query = p.queries[p.partners[step.pair].run];
        if ((1u << step.token_bits) == BM)
            load_rows<BM, WIDTH>(to, map, span, query, step.first, query.len, step.head, barrier);
        else
            load_shared_rows<BM, WIDTH>(to, shared_map, span, query, step.first, query.len, step.head, step.heads, step.token_bits,
                                        barrier);
    }

    // The first warp's.
    static __device__ __forceinline__ void produce(const HopperBackwardMaps& maps, const HopperBackwardParams& p,
                                                   const Shared& at, volatile Control& control) {
        const BackwardParams& call = p.call.call;
        const u32 lane = threadIdx.x;
        Round<true>& round = *const_cast<Round<true>*>(&control.round);
        LoadState position;
        for (;; position.next_item()) {
            volatile Item& item = control.items[position.slot()];
            // All warps were done with k and v of the item before the last when those of the last one were loaded. So they have written
            // what the item before that one made, and its slot is free, as is the one before it.
            if (lane == 0) {
                const u32 number = atomicAdd(p.call.tile_counter, 1);
                item.is_end = number >= call.heads.items;
                if (number < call.heads.items) begin_item<BM, BN>(p.call, item, round, number);
            }
            __syncwarp();
            if (item.is_end) break;
            if (!item.zero) round.template fill<BM, BN, BATCH>(control.batch, item.own, p.call);
            // The walk to here ran beside the products of the last item.
            barrier_wait(at.kv_empty(), position.item_parity() ^ 1);
            __syncwarp();
            if (lane == 0) {
                item.meets = !item.zero && control.batch[0].rows;
                if (item.meets) {
                    const Run& keys = call.keys[item.own.run];
                    load_rows<BN, D>(at.k, maps.k, p.k_span, keys, item.own.first, keys.len, item.own.partner, at.kv_full());
                    load_rows<BN, DV>(at.v, maps.v, p.k_span, keys, item.own.first, keys.len, item.own.partner, at.kv_full());
                } else {
                    barrier_arrive(at.kv_full());
                    barrier_arrive(at.kv_full());
                }
            }
            __syncwarp();
            if (!item.meets) continue;
            for (u32 i = 0, more = 1; more; ++i) {
                if (i == BATCH) {
                    i = 0;
                    round.template fill<BM, BN, BATCH>(control.batch, item.own, p.call);
                    __syncwarp();
                }
                more = i + 1 == BATCH ? round.tile != round.tile_begin : control.batch[i + 1].rows != 0;
                produce_step(maps, p, at, control, control.batch[i], position, !more);
                position.next_step();
            }
        }
        // The waiting warps are told in a step of no rows, the multiplying ones in the item.
        const u32 stage = position.stage();
        barrier_wait(at.q_empty(stage), position.parity() ^ 1);
        if (lane == 0) {
            control.stages[stage].step.rows = 0;
            barrier_arrive(at.q_full(stage));
            barrier_arrive(at.q_full(stage));
            barrier_wait(at.kv_empty(), position.item_parity() ^ 1);
            barrier_arrive(at.kv_full());
            barrier_arrive(at.kv_full());
        }
    }

    static __device__ __forceinline__ void produce_step(const HopperBackwardMaps& maps, const HopperBackwardParams& p,
                                                        const Shared& at, volatile Control& control, volatile const DqStep& step,
                                                        const LoadState& position, bool is_last) {
        const BackwardParams& call = p.call.call;
        const u32 lane = threadIdx.x, stage = position.stage(), free = position.parity() ^ 1;
        const float2 low = stats(call, step, lane), high = stats(call, step, lane + 32);
        const auto finite = [](float base) { return base != -minus_infinity(); };
        const bool has_large = __any_sync(~0u, (is_large(low.x) && finite(low.x)) || (is_large(high.x) && finite(high.x)));
        barrier_wait(at.q_empty(stage), free);
        volatile Stage& to = control.stages[stage];
        if (lane == 0) {
            load_queries<D>(at.q(stage), maps.q, maps.shared_q, p.q_span, call, step, at.q_full(stage));
            to.number = control.round.number;
            to.flags = (step.flags & DQ_FULL && !(call.score.flags & SCORE_GENERAL) && !has_large ? Block::PLAIN : 0) | (is_last ? Block::LAST : 0) |
                       (step.rows == BM && call.heads.dim == D ? Block::WHOLE : 0) | (step.flags & DQ_ADD ? Block::ADD : 0) |
                       (has_large ? Block::HAS_LARGE : 0);
        }
        if (lane < sizeof(DqStep) / 4) ((volatile u32*)&to.step)[lane] = ((volatile const u32*)&step)[lane];
        volatile float* const stats = control.stats[stage];
        stats[lane] = low.x;
        stats[lane + 32] = high.x;
        stats[BM + lane] = low.y;
        stats[BM + lane + 32] = high.y;
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(at.q_full(stage));
            load_queries<DV>(at.d_o(stage), maps.d_o, maps.shared_d_o, p.q_span, call, step, at.d_o_full(stage));
        }
        __syncwarp();
    }

    // The second warp's: waits until the tile of dq of each step may be added to, and says so.
    static __device__ __forceinline__ void wait_turns(const FusedParams& p, const Shared& at, volatile Control& control) {
        if (threadIdx.x & 31) return;
        for (PipelineState position;; ++position.count) {
            const u32 stage = position.stage();
            barrier_wait(at.q_full(stage), position.parity());
            volatile const DqStep& step = control.stages[stage].step;
            if (!step.rows) break;
            const u32 after = step.after;
            const u32* const semaphore = p.dq_semaphore + step.semaphore;
            barrier_arrive(at.q_empty(stage));
            if (after) wait_semaphore(semaphore, after, poll_semaphore(semaphore));
            barrier_arrive(at.turn(stage));
        }
    }

    // The third warp's: lets the successor add to the tile of each step.
    static __device__ __forceinline__ void pass_turns(const FusedParams& p, const Shared& at, volatile Control& control) {
        if (threadIdx.x & 31) return;
        for (PipelineState position;; ++position.count) {
            const u32 stage = position.stage();
            barrier_wait(at.q_full(stage), position.parity());
            volatile const Stage& here = control.stages[stage];
            if (!here.step.rows) break;
            const u32 number = here.number;
            u32* const semaphore = here.step.flags & DQ_PASSES ? p.dq_semaphore + here.step.semaphore : nullptr;
            barrier_wait(at.added(stage), position.parity());
            barrier_arrive(at.q_empty(stage));
            if (semaphore) store_semaphore(semaphore, number);
        }
    }
};
