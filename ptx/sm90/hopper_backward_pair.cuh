// SPDX-License-Identifier: MIT OR Apache-2.0
// The steps of the backward kernel of sm_90a at head dim 256, where the two warpgroups make different products.
//
// dk and dv of 64 keys take all registers that one warpgroup has for sums, so each warpgroup owns one of them, for the same keys:
//
//   first   s^T = k q^T,    p,                 dv += p^T do,   dq = ds k, the first 128 columns
//   second  dp^T = v do^T,  ds from p and dp,  dk += ds^T q,   dq = ds k, the others
//
// Both are one text with other operands, but for what stands between the first two products. s^T and dp^T lie in registers alike, so p
// goes rounded from each thread of the first warpgroup to the same thread of the second, by 64 bytes of shared memory: each score is made
// once, and by one warpgroup. Beside dk or dv (128 registers) a thread has 32 for s^T or dp^T, then 16 for p or ds, then 64 for dq.
//
// A step takes 2,624 cycles of shared memory (products, copies, p and ds) beside 2,560 of the tensor cores. A tile of 64 keys by 80 q
// rows, whose columns of dk and dv are halved, would take 4,128 beside 3,200: p and ds are then left matrices in shared memory.
//
// Two meetings a step. Behind the first, p is there; the first warpgroup does not wait. Behind the second, ds is there, and p has been
// read; all have then made dq of the step before, so that the buffer of ds of the next one is free. Softcap's slopes wait in it with p.
#pragma once
#include "hopper_backward_steps.cuh"

// The number of the barrier behind which p is there.
enum : u32 { BARRIER_WEIGHTS = 2 };

template <class T, class Shape>
struct HopperBackwardPair : HopperBackwardSteps<T, Shape> {
    using Steps = HopperBackwardSteps<T, Shape>;
    using Block = typename Steps::Block;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using Item = typename Block::Item;
    using Stage = typename Block::Stage;
    using Operands = typename Steps::Operands;
    using typename Steps::Scores;
    using typename Steps::Weights;
    static constexpr int D = Block::D, BM = Block::BM, BN = Block::BN;
    static constexpr u32 Q_PANEL = Block::Q_PANEL, K_PANEL = Block::K_PANEL;
    static_assert(BN == 64 && D == Block::DV, "dk and dv are alike, and a warpgroup's keys are all");

    // dv of the first warpgroup, dk of the second.
    using Sums = float[1][D / 8][4];

    static __device__ __forceinline__ void multiply(const BackwardParams& p, const Shared& at, volatile Control& control,
                                                    volatile const Item& item, u32 group, PipelineState& position, Sums& sums) {
        const Operands of(at, 0);
        u32 flags;
        do {
            const u32 stage = position.stage();
            flags = step(p, at, of, control.stages[stage], item, group, stage, position.parity(), sums);
            ++position.count;
        } while (!(flags & Block::LAST));
    }

    static __device__ __forceinline__ u32 step(const BackwardParams& p, const Shared& at, const Operands& of,
                                               volatile const Stage& here, volatile const Item& item, u32 group, u32 stage,
                                               u32 parity, Sums& sums) {
        const u64 q = of.first_q + stage * (Block::STAGE_BYTES >> 4), d_o = q + (Block::Q_BYTES >> 4);
        const u32 stats = at.stats(stage), own_ds = at.ds(stage) + of.own_ds;
        Scores s;
        barrier_wait(at.q_full(stage), parity);
        if (group) barrier_wait(at.d_o_full(stage), parity);
        product_fence();
        Steps::template multiply_rows<D, K_PANEL, Q_PANEL>(s, group ? of.v : of.k, group ? d_o : q);
        product_commit();
        const u32 flags = here.flags;
        product_wait<0>();
        hold(s);
        Weights weights;
        if (group)
            slopes(weights, s, p, at, flags, stats, own_ds);
        else
            weigh(weights, s, p, at, here, item, flags, stats, own_ds);
        barrier_wait(at.d_o_full(stage), parity);
        hold(sums);
        hold(weights);
        product_fence();
        Steps::multiply_weights(sums, weights, group ? q : d_o);
        product_commit();
        named_wait<2 * 128>(BARRIER_BOTH);
        // Beside the sums and weights there are not enough registers for dq. The other warpgroup's product runs in this time.
        product_wait<0>();
        hold(sums);
        hold(weights);
        const u32 column = group * (D / 2);
        float dq[1][D / 16][4];
        product_fence();
        Steps::multiply_keys(dq, of.first_ds + stage * (Block::DS_BYTES >> 4), of.k_columns, column);
        product_commit();
        barrier_wait(at.turn(stage), parity);
        product_wait<0>();
        hold(dq);
        Steps::add(p, here, flags, column, dq);
        Steps::release(at.added(stage));
        // The third warp frees the buffers behind `added` alone, so nothing is gained by an earlier one.
        Steps::release(at.q_empty(stage));
        return flags;
    }

    // Where the thread's i-th four words of p lie.
    static __device__ __forceinline__ u32 weights_at(const Shared& at, int i) {
        return at.parked() + i * 128 * 16 + (fresh_thread() & 127) * 16;
    }

    // The first warpgroup's: p, for itself and the other.
    static __device__ __forceinline__ void weigh(Weights& weights, Scores& s, const BackwardParams& p, const Shared& at,
                                                 volatile const Stage& here, volatile const Item& item, u32 flags, u32 stats,
                                                 u32 own_ds) {
        const u32 bases = stats + (Steps::lane() & 3) * 8;
        if (flags & Block::PLAIN) {
            Steps::template probabilities<false>(s, p, bases);
        } else {
            Steps::shape_wide(s, p, item, here.step, 0, own_ds);
            Steps::probabilities(s, p, bases, flags);
        }
        Steps::round(weights, s);
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) store_shared_words(weights_at(at, i), weights[i]);
        named_arrive<2 * 128>(BARRIER_WEIGHTS);
    }

    // The second one's: ds, for itself and for dq. g has dp.
    static __device__ __forceinline__ void slopes(Weights& weights, Scores& g, const BackwardParams& p, const Shared& at, u32 flags,
                                                  u32 stats, u32 own_ds) {
        named_wait<2 * 128>(BARRIER_WEIGHTS);
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) load_shared_words(weights[i], weights_at(at, i));
        const u32 pair = (Steps::lane() & 3) * 8;
        u32 delta = stats + BM * 4;
        if (!(flags & Block::PLAIN)) {
            Steps::shape_wide_gradients(g, weights, p, delta + pair, own_ds);
            delta = at.zeros();
        }
        Steps::gradients(weights, g, delta + pair);
        Steps::share(weights, own_ds);
    }
};
