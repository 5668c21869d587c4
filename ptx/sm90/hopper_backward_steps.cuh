// SPDX-License-Identifier: MIT OR Apache-2.0
// The steps of the backward kernel of sm_90a over one item: all q rows that read its keys, in one of two orders.
//
// Up to head dim 128 a warpgroup issues s^T and dp^T, turns scores into probabilities while dp^T runs, makes ds while dv runs,
// and adds dq while dk runs.
//
// With head dims 192 and 128, dk and dv take 160 registers of a thread, and the compiler gives sums and factors of products 206 in
// all. So dp^T is issued when scores are rounded probabilities, and ds is made from these; a quarter of them waits in shared
// memory while dp^T is made. dq is made in two pieces: half a panel of columns beside dk, a whole one after it. Softcap's slopes
// wait, rounded, where the lane will store ds. No more than 204 registers are then taken at a time.
//
// ds has two buffers: one barrier a step says that both halves of ds are there, and that both warpgroups are done with the
// buffer of the step before.
#pragma once
#include "hopper_backward_products.cuh"

template <class T, class Shape>
struct HopperBackwardSteps : HopperBackwardProducts<T, Shape> {
    using Products = HopperBackwardProducts<T, Shape>;
    using Block = typename Products::Block;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using Item = typename Block::Item;
    using Stage = typename Block::Stage;
    using typename Products::Scores;
    using typename Products::Weights;
    using Products::add_queries;
    using Products::HALF_PANEL;
    using Products::lane;
    using Products::multiply_half;
    using Products::multiply_keys;
    using Products::multiply_rows;
    using Products::multiply_weights;
    using Products::probabilities;
    using Products::release;
    using Products::round;
    using Products::round_pair;
    using Products::warp_row;
    static constexpr int D = Block::D, DV = Block::DV, BM = Block::BM, BN = Block::BN, NT = Products::NT;
    static constexpr u32 Q_PANEL = Block::Q_PANEL, K_PANEL = Block::K_PANEL;
    static constexpr bool WIDE = D + DV > 256;

    using KeySums = float[1][D / 8][4];
    using ValueSums = float[1][DV / 8][4];

    // What all steps of an item have in common: matrices, and addresses of the lane.
    struct Operands {
        u64 k, v, first_q, first_ds;
        u32 k_columns;
        u32 pair;    // the lane's two q rows of each product of eight, in bytes of f32
        u32 own_ds;  // the row of ds that it names to `store_matrices_transposed`: of its warpgroup's panel, its warp's two chunks
        __device__ __forceinline__ Operands(const Shared& at, u32 group)
            : k(matrix_at(at.k + group * 64 * 128, K_PANEL)), v(matrix_at(at.v + group * 64 * 128, K_PANEL)),
              first_q(matrix_at(at.q(0), Q_PANEL)), first_ds(matrix_at(at.ds(0), Q_PANEL)), k_columns(at.k), pair((lane() & 3) * 8) {
            const u32 chunk = warp_row() / 8 + (lane() >> 3 & 1);
            own_ds = group * Q_PANEL + ((lane() >> 4) * 8 + (lane() & 7)) * 128 + ((chunk ^ (lane() & 7)) << 4);
        }
    };

    // p (dp - delta), of which g has dp.
    static __device__ __forceinline__ void gradients(Scores& g, const Scores& s, u32 delta) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 less = load_shared_pair(delta + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) g[0][n][i] = s[0][n][i] * (g[0][n][i] - (i & 1 ? less.y : less.x));
        }
    }

    // The warpgroup's half of ds, for dq: it is there for both behind the barrier.
    static __device__ __forceinline__ void share(const Weights& slopes, u32 own_ds) {
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) store_matrices_transposed(own_ds + i * 16 * 128, slopes[i]);
        fence_proxy();
    }

    // Adds columns of dq.
    template <int N>
    static __device__ __forceinline__ void add(const BackwardParams& p, volatile const Stage& here, u32 flags, u32 column,
                                               const float (&dq)[1][N][4]) {
        if (flags & Block::WHOLE)
            add_queries<true>(p, here.step, flags & Block::ADD, column, dq);
        else
            add_queries<false>(p, here.step, flags & Block::ADD, column, dq);
    }

    // The half of a panel that the warpgroup adds.
    static __device__ __forceinline__ void add_half(const BackwardParams& p, volatile const Stage& here, u32 flags, u32 column, u32 half,
                                                    const float (&dq)[1][HALF_PANEL][4]) {
        if constexpr (HALF_PANEL == 4) {
            add(p, here, flags, column + half * 32, dq);
        } else {
            float own[1][4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) own[0][i / 4][i % 4] = half ? dq[0][4 + i / 4][i % 4] : dq[0][i / 4][i % 4];
            add(p, here, flags, column + half * 32, own);
        }
    }

    static __device__ __forceinline__ void multiply(const BackwardParams& p, const Shared& at, volatile Control& control,
                                                    volatile const Item& item, u32 group, PipelineState& position, KeySums& dk,
                                                    ValueSums& dv) {
        const Operands of(at, group);
        u32 flags;
        do {
            const u32 stage = position.stage(), parity = position.parity();
            volatile const Stage& here = control.stages[stage];
            if constexpr (WIDE)
                flags = wide_step(p, at, of, here, item, group, stage, parity, dk, dv);
            else
                flags = step(p, at, of, here, item, group, stage, parity, dk, dv);
            ++position.count;
        } while (!(flags & Block::LAST));
    }

    static __device__ __forceinline__ u32 step(const BackwardParams& p, const Shared& at, const Operands& of,
                                               volatile const Stage& here, volatile const Item& item, u32 group, u32 stage,
                                               u32 parity, KeySums& dk, ValueSums& dv) {
        const u64 q = of.first_q + stage * (Block::STAGE_BYTES >> 4), d_o = q + (Block::Q_BYTES >> 4);
        Scores s, g;
        barrier_wait(at.q_full(stage), parity);
        product_fence();
        multiply_rows<D, K_PANEL, Q_PANEL>(s, of.k, q);
        product_commit();
        barrier_wait(at.d_o_full(stage), parity);
        product_fence();
        multiply_rows<DV, K_PANEL, Q_PANEL>(g, of.v, d_o);
        product_commit();
        const u32 stats = at.stats(stage);
        u32 delta = stats + BM * 4;
        const u32 flags = here.flags;
        if (flags & Block::PLAIN) {
            product_wait<1>();
            hold(s);
            Products::template probabilities<false>(s, p, stats + of.pair);
        } else {
            product_wait<0>();
            hold(s);
            hold(g);
            Products::shape(s, g, p, item, here.step, stats, group);
            delta = at.zeros();
            probabilities(s, p, stats + of.pair, flags);
        }
        Weights weights;
        round(weights, s);
        hold(dv);
        hold(weights);
        product_fence();
        multiply_weights(dv, weights, d_o);
        product_commit();
        product_wait<1>();
        hold(g);
        gradients(g, s, delta + of.pair);
        Weights slopes;
        round(slopes, g);
        share(slopes, at.ds(stage) + of.own_ds);
        named_wait<2 * 128>(BARRIER_BOTH);
        static_assert(D == 128 || D == 64, "each warpgroup's columns lie in one panel");
        constexpr bool HALF = D == 64;
        const u64 ds = of.first_ds + stage * (Block::DS_BYTES >> 4);
        float dq[1][HALF ? HALF_PANEL : D / 16][4];
        hold(dk);
        hold(slopes);
        product_fence();
        if constexpr (HALF)
            multiply_half(dq, ds, of.k_columns, 0, group);
        else
            multiply_keys(dq, ds, of.k_columns, group * 64);
        product_commit();
        multiply_weights(dk, slopes, q);
        product_commit();
        product_wait<1>();
        hold(dv);
        hold(weights);
        hold(dq);
        barrier_wait(at.turn(stage), parity);
        if constexpr (HALF)
            add_half(p, here, flags, 0, group, dq);
        else
            add(p, here, flags, group * 64, dq);
        release(at.added(stage));
        product_wait<0>();
        hold(dk);
        hold(slopes);
        release(at.q_empty(stage));
        return flags;
    }

    // Softcap, ALiBi and masks of a step that is not plain, before dp^T is made. Softcap's slopes, rounded, go to where the lane will
    // store ds: two tiles of scores at a time, for want of registers.
    static __device__ __forceinline__ void shape_wide(Scores& s, const BackwardParams& p, volatile const Item& item,
                                                      volatile const DqStep& step, u32 group, u32 own_ds) {
        const u32 row = group * 64 + warp_row() + lane() / 4;
        const Run& key = p.keys[item.own.run];
        const Pair pair = p.partners[step.pair];
        const Run& query = p.queries[pair.run];
        const Band& band = p.bands[pair.band];
        const u32 own_row = item.own.first + row;
        if (p.score.flags & SCORE_GENERAL) {
            const typename Products::Rows of(step);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                float factors[1][2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) factors[0][i / 4][i % 4] = 1.0f;
                general_gradients(Products::sixteen(s, n), factors, p.score, p.alibi_slopes, of.head(n), key, own_row, query, band,
                                  of.first(n));
                if (!(p.score.flags & SCORE_SOFTCAP)) continue;
                u32 packed[4];
                round_pair(packed, factors, 0);
                store_shared_words(own_ds + n / 2 * 16 * 128, packed);
            }
        }
        if (step.flags & DQ_FULL) return;
        Scores unused;
        clear(unused);
        mask_gradients(s, unused, band, key, own_row, (int)item.own.rows - (int)row, query, step.first, (1u << step.token_bits) - 1);
    }

    // What p is multiplied by in such a step: dp less delta, times softcap's slope; 0 where p is, which may be masked.
    static __device__ __forceinline__ void shape_wide_gradients(Scores& g, const Weights& weights, const BackwardParams& p, u32 delta,
                                                                u32 own_ds) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 less = load_shared_pair(delta + n * 32);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float low, high;
                widen(T{}, weights[n / 2][n % 2 * 2 + h], low, high);
                g[0][n][2 * h] = low == 0.0f ? 0.0f : g[0][n][2 * h] - less.x;
                g[0][n][2 * h + 1] = high == 0.0f ? 0.0f : g[0][n][2 * h + 1] - less.y;
            }
        }
        if (!(p.score.flags & SCORE_SOFTCAP)) return;
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 packed[4];
            load_shared_words(packed, own_ds + n / 2 * 16 * 128);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float low, high;
                widen(T{}, packed[i], low, high);
                g[0][n + i / 2][i % 2 * 2] *= low;
                g[0][n + i / 2][i % 2 * 2 + 1] *= high;
            }
        }
        // A lane's words of ds come from others.
        __syncwarp();
    }

    // p (dp - delta), rounded, in the place of p. g has dp.
    static __device__ __forceinline__ void gradients(Weights& weights, const Scores& g, u32 delta) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 less = load_shared_pair(delta + n * 32);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32& both = weights[n / 2][n % 2 * 2 + h];
                float low, high;
                widen(T{}, both, low, high);
                both = pack(T{}, low * (g[0][n][2 * h] - less.x), high * (g[0][n][2 * h + 1] - less.y));
            }
        }
    }

    static __device__ __forceinline__ u32 wide_step(const BackwardParams& p, const Shared& at, const Operands& of,
                                                    volatile const Stage& here, volatile const Item& item, u32 group, u32 stage,
                                                    u32 parity, KeySums& dk, ValueSums& dv) {
        const u64 q = of.first_q + stage * (Block::STAGE_BYTES >> 4), d_o = q + (Block::Q_BYTES >> 4);
        const u32 stats = at.stats(stage), own_ds = at.ds(stage) + of.own_ds;
        Scores s;
        barrier_wait(at.q_full(stage), parity);
        product_fence();
        multiply_rows<D, K_PANEL, Q_PANEL>(s, of.k, q);
        product_commit();
        const u32 flags = here.flags;
        u32 delta = stats + BM * 4;
        product_wait<0>();
        hold(s);
        if (flags & Block::PLAIN) {
            Products::template probabilities<false>(s, p, stats + of.pair);
        } else {
            shape_wide(s, p, item, here.step, group, own_ds);
            probabilities(s, p, stats + of.pair, flags);
        }
        Weights weights;
        round(weights, s);
        // Its product goes first, so that its registers are free for those of dp^T.
        constexpr int LAST = BM / 16 - 1;
        const u32 parked = at.parked() + (fresh_thread() - 128) * 16;
        store_shared_words(parked, weights[LAST]);
        barrier_wait(at.d_o_full(stage), parity);
        hold(dv);
        hold(weights);
        product_fence();
        panels_add<Q_PANEL>(T{}, dv, weights[LAST], d_o + LAST * (16 * 128 >> 4));
        product_commit();
#pragma unroll
        for (int i = 0; i < LAST; ++i) panels_add<Q_PANEL>(T{}, dv, weights[i], d_o + i * (16 * 128 >> 4));
        product_commit();
        product_wait<1>();
        Scores g;
        product_fence();
        multiply_rows<DV, K_PANEL, Q_PANEL>(g, of.v, d_o);
        product_commit();
        product_wait<0>();
        hold(dv);
        hold(weights);
        hold(g);
        load_shared_words(weights[LAST], parked);
        if (!(flags & Block::PLAIN)) {
            shape_wide_gradients(g, weights, p, delta + of.pair, own_ds);
            delta = at.zeros();
        }
        gradients(weights, g, delta + of.pair);
        share(weights, own_ds);
        hold(dk);
        hold(weights);
        product_fence();
        multiply_weights(dk, weights, q);
        product_commit();
        // Beside the whole panel there are not enough registers for these weights.
        if (HALF_PANEL == 8) {
            product_wait<0>();
            hold(dk);
            hold(weights);
        }
        named_wait<2 * 128>(BARRIER_BOTH);
        // Half a panel of dq while dk is made, then a whole one.
        const u64 ds = of.first_ds + stage * (Block::DS_BYTES >> 4);
        const u32 panel_column = group * 64;
        float half[1][HALF_PANEL][4];
        product_fence();
        multiply_half(half, ds, of.k_columns, 128, group);
        product_commit();
        product_wait<0>();
        hold(dk);
        hold(weights);
        hold(half);
        barrier_wait(at.turn(stage), parity);
        add_half(p, here, flags, 128, group, half);
        float panel[1][8][4];
        product_fence();
        multiply_keys(panel, ds, of.k_columns, panel_column);
        product_commit();
        product_wait<0>();
        hold(panel);
        add(p, here, flags, panel_column, panel);
        release(at.added(stage));
        // The third warp frees the buffers behind `added` alone, so nothing is gained by an earlier one.
        release(at.q_empty(stage));
        return flags;
    }
};
