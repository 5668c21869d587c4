// SPDX-License-Identifier: MIT OR Apache-2.0
// What the multiplying warps of the backward kernel of sm_90a do with the tiles that `hopper_backward_load.cuh` fills: the products
// of a step, and what stands between them. `hopper_backward_steps.cuh` has their order.
//
// Scores are made transposed, keys by q rows, so that p^T and ds^T, rounded, are left matrices in the registers that they were
// made in:
//
//   s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q          each warpgroup for its 64 keys
//   dq = ds k                                                       each warpgroup half of the columns, over all keys
//
// Only ds passes through shared memory, for dq alone. dq is added to global memory from registers, in the order of the dq
// semaphore, and stored where nothing is yet. Staged through shared memory for a bulk addition, it would make shared memory
// what bounds the kernel (2,944 of its cycles beside 2,560 of the products in a step of 64 q rows at head dim 128; so it takes 2,432).
#pragma once
#include "hopper_backward_load.cuh"

// The number of `bar.sync` of both multiplying warpgroups.
enum : u32 { BARRIER_BOTH = 1 };

// Adds two neighbouring f32 to global memory. The semaphore orders all that are added to one address.
__device__ __forceinline__ void add_pair(char* to, float x, float y) {
#ifdef CPATTN_LOAD_STORE
    // The semaphore gives the words to one block at a time, and only one of its threads adds to them.
    const float2 old = *(const float2*)to;
    *(float2*)to = make_float2(__fadd_rn(old.x, x), __fadd_rn(old.y, y));
#else
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#endif
}

#if defined(CPATTN_RED_V4) && defined(CPATTN_LOAD_STORE)
#error "RED_V4 and LOAD_STORE are two ways to add to dq: give one"
#endif
#ifdef CPATTN_RED_V4
__device__ __forceinline__ void add_four(char* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
#endif

// Four 8 x 8 matrices, each with its rows and columns exchanged. Lane 8 i + r says where row r of matrix i goes.
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

template <class T, class Shape>
struct HopperBackwardProducts {
    using Block = HopperBackwardBlock<Shape>;
    using Item = typename Block::Item;
    static constexpr int D = Block::D, DV = Block::DV, BM = Block::BM, BN = Block::BN;
    static constexpr int NT = BM / 8;
    static constexpr u32 Q_PANEL = Block::Q_PANEL, K_PANEL = Block::K_PANEL;
    static_assert(BN % 64 == 0 && BM == 64, "64 keys to a warpgroup, and as many rows of dq");

    using Scores = float[1][NT][4];
    // Tiles of eight columns that a warpgroup makes of a panel of dq of which it adds half: with CPATTN_WHOLE_PANELS all.
#ifdef CPATTN_WHOLE_PANELS
    static constexpr int HALF_PANEL = 8;
#else
    static constexpr int HALF_PANEL = 4;
#endif
    using Weights = u32[NT / 2][4];

    static __device__ __forceinline__ u32 lane() { return fresh_thread() & 31; }
    // The warp's first row of 64, among its warpgroup's keys and among the q rows of dq.
    static __device__ __forceinline__ u32 warp_row() { return (fresh_thread() >> 5 & 3) * 16; }

    static __device__ __forceinline__ void release(u32 barrier) {
        __syncwarp();
        if (lane() == 0) barrier_arrive(barrier);
    }

    // c = A B^T over all WIDTH columns, not waited for: A of tiles with panels of A_PANEL bytes, B of such with B_PANEL.
    template <int WIDTH, u32 A_PANEL, u32 B_PANEL>
    static __device__ __forceinline__ void multiply_rows(Scores& c, u64 a, u64 b) {
#pragma unroll
        for (int i = 0; i < WIDTH / 16; ++i) {
            const u64 x = a + (i / 4) * (A_PANEL >> 4) + (i % 4) * 2, y = b + (i / 4) * (B_PANEL >> 4) + (i % 4) * 2;
            if (i == 0)
                product_new(T{}, c, x, y);
            else
                product_add(T{}, c, x, y);
        }
    }

    // c += A B with A in registers and the BM q rows as the inner dimension, not waited for.
    template <int N>
    static __device__ __forceinline__ void multiply_weights(float (&c)[1][N][4], const Weights& a, u64 b) {
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) panels_add<Q_PANEL>(T{}, c, a[i], b + i * (16 * 128 >> 4));
    }

    // Rounds to a left matrix.
    static __device__ __forceinline__ void round(Weights& weights, const Scores& s) {
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) round_pair(weights[i], s, 2 * i);
    }

    // The n-th of its tiles and the one behind it.
    template <int N>
    static __device__ __forceinline__ void round_pair(u32 (&weights)[4], const float (&s)[1][N][4], int n) {
        weights[0] = pack(T{}, s[0][n][0], s[0][n][1]);
        weights[1] = pack(T{}, s[0][n][2], s[0][n][3]);
        weights[2] = pack(T{}, s[0][n + 1][0], s[0][n + 1][1]);
        weights[3] = pack(T{}, s[0][n + 1][2], s[0][n + 1][3]);
    }

    // Everything between the two products and p and ds, where a step is not plain: both are there, and g is made less by delta.
    static __device__ __forceinline__ void shape(Scores& s, Scores& g, const BackwardParams& p, volatile const Item& item,
                                                 volatile const DqStep& step, u32 stats, u32 group) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 delta = load_shared_pair(stats + BM * 4 + (n * 8 + 2 * (lane() & 3)) * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) g[0][n][i] -= i & 1 ? delta.y : delta.x;
        }
        const u32 row = group * 64 + warp_row() + lane() / 4, own_row = item.own.first + row;
        const Run& key = p.keys[item.own.run];
        const Pair pair = p.partners[step.pair];
        const Run& query = p.queries[pair.run];
        const Band& band = p.bands[pair.band];
        if (p.score.flags & SCORE_GENERAL) {
            const Rows of(step);
#pragma unroll
            for (int n = 0; n < NT; n += 2)
                general_gradients(sixteen(s, n), sixteen(g, n), p.score, p.alibi_slopes, of.head(n), key, own_row, query, band, of.first(n));
        }
        // Rows of the own tile past its end must not make ds either: lse of a q row may be anything.
        if (!(step.flags & DQ_FULL))
            mask_gradients(s, g, band, key, own_row, (int)item.own.rows - (int)row, query, step.first, (1u << step.token_bits) - 1);
    }

    // Scores of 16 q rows, which are of one head also where heads share a step: from the n-th tile of eight columns on.
    using Sixteen = float[1][2][4];
    static __device__ __forceinline__ Sixteen& sixteen(Scores& s, int n) { return *(Sixteen*)&s[0][n]; }

    // Their head (the last one of the step where there is none), and the first of these rows in its run. A copy of what a step says:
    // shared memory would be read for each.
    struct Rows {
        u32 first_head, last_skipped, first_row, bits;
        __device__ __forceinline__ explicit Rows(volatile const DqStep& step)
            : first_head(step.head), last_skipped(step.heads - 1u), first_row(step.first), bits(step.token_bits) {}
        __device__ __forceinline__ u32 head(int n) const { return first_head + min((u32)n * 8 >> bits, last_skipped); }
        __device__ __forceinline__ u32 first(int n) const { return first_row + (n * 8 & ((1u << bits) - 1)); }
    };

    // p, from scores. `stats` is where the lane's bases of exponents lie.
    static __device__ __forceinline__ void probabilities(Scores& s, const BackwardParams& p, u32 stats, u32 flags) {
        if (flags & Block::HAS_LARGE)
            probabilities<true>(s, p, stats);
        else
            probabilities<false>(s, p, stats);
    }

    template <bool MAY_BE_LARGE>
    static __device__ __forceinline__ void probabilities(Scores& s, const BackwardParams& p, u32 stats) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 base = load_shared_pair(stats + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[0][n][i] = probability<MAY_BE_LARGE>(s[0][n][i], p.score.exp_scale, i & 1 ? base.y : base.x);
        }
    }

    // Adds columns of dq from `column` on, or stores them where nothing is yet. WHOLE: all rows and columns are there.
    template <bool WHOLE, int N>
    static __device__ __forceinline__ void add_queries(const BackwardParams& p, volatile const DqStep& step, bool add, u32 column,
                                                       const float (&dq)[1][N][4]) {
        // The warp's rows are of one head.
        const u32 skipped = WHOLE ? 0 : warp_row() >> step.token_bits;
        const int row = (int)(warp_row() - (skipped << step.token_bits) + lane() / 4), from = (int)(column + 2 * (lane() & 3));
        char* const to = p.dq.ptr + (step.head + skipped) * p.dq.head + (step.row + row) * p.dq.token + from * 4;
        const int rows = WHOLE || skipped < step.heads ? (int)step.rows - row : 0, columns = (int)p.heads.dim - from;
        const float scale = p.score.scale;
        // One branch, so that all additions follow one another.
        if (add) {
#ifdef CPATTN_RED_V4
            // Of four columns of two rows, a lane and its neighbour each have two columns of both, and here each adds all four of one.
            const bool second = lane() & 1;
            char* const to_four = second ? to + 8 * p.dq.token - 8 : to;
            const bool has_row = WHOLE || (second ? 8 : 0) < rows;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float low = dq[0][n][0] * scale, high = dq[0][n][1] * scale, low8 = dq[0][n][2] * scale, high8 = dq[0][n][3] * scale;
                const float x = __shfl_xor_sync(~0u, second ? low : low8, 1), y = __shfl_xor_sync(~0u, second ? high : high8, 1);
                if (has_row && (WHOLE || n * 8 < columns))
                    add_four(to_four + n * 32, second ? x : low, second ? y : high, second ? low8 : x, second ? high8 : y);
            }
#else
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < N; ++n)
                    if (WHOLE || (h * 8 < rows && n * 8 < columns))
                        add_pair(to + h * 8 * p.dq.token + n * 32, dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);
#endif
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < N; ++n)
                    if (WHOLE || (h * 8 < rows && n * 8 < columns))
                        *(float2*)(to + h * 8 * p.dq.token + n * 32) =
                            make_float2(dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);
        }
    }

    // Columns of dq = ds k from `column` on, not waited for: ds has q rows by keys, in a panel for each warpgroup's keys; of k, the
    // keys are the inner dimension. Columns that begin 64 bytes into the rows of a panel end with it: there the swizzle, by bits of
    // the address, is that of the whole panel. (With CPATTN_WHOLE_PANELS none do: `multiply_half`.)
    template <int N>
    static __device__ __forceinline__ void multiply_keys(float (&dq)[1][N][4], u64 ds, u32 k, u32 column) {
        const u64 from = matrix_at(k + column / 64 * K_PANEL + column % 64 * 2, K_PANEL);
#pragma unroll
        for (int i = 0; i < BN / 16; ++i) {
            const u64 x = ds + (i / 4) * (Q_PANEL >> 4) + (i % 4) * 2, y = from + i * (16 * 128 >> 4);
            if (i == 0)
                panels_new_columns<K_PANEL>(T{}, dq, x, y);
            else
                panels_add_columns<K_PANEL>(T{}, dq, x, y);
        }
    }

    // 32 columns of dq, the first or the second half of a panel that begins with `column`.
    static __device__ __forceinline__ void multiply_half(float (&dq)[1][HALF_PANEL][4], u64 ds, u32 k, u32 column, u32 half) {
        multiply_keys(dq, ds, k, column + (HALF_PANEL == 4 ? half * 32 : 0));
    }
};
