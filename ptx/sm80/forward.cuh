// SPDX-License-Identifier: MIT OR Apache-2.0
// Forward attention: one block owns a tile of q rows of one head and walks over the keys it may meet.
//
// K of the next tile travels while the softmax and P V of this one run, V of this one while Q K^T runs: one buffer each
// is enough. The online softmax follows Milakov and Gimelshein (2018) and FlashAttention-2 (Dao, 2023): the row sum
// stays per thread until the end, the scale is folded into the exponent's base. The epilogue merges with the running
// result, applies the sink and writes either the running f32 result or the element type.
#pragma once
#include "dropout.cuh"
#include "pages.cuh"
#include "shared/log_sum_exp.cuh"
#include "shared/max_logit.cuh"
#include "shared/score.cuh"
#include "shared/tile.cuh"

// One float per thread and row. With two product rows per warp the loops have no register left, and the values are spilt
// by hand, to shared memory; they are touched once a tile.
template <int ROWS, int THREADS, bool SPILT>
struct PerRow {
    float x[ROWS];
    __device__ __forceinline__ explicit PerRow(u32) {}
    __device__ __forceinline__ float get(int r) const { return x[r]; }
    __device__ __forceinline__ void set(int r, float y) { x[r] = y; }
};

template <int ROWS, int THREADS>
struct PerRow<ROWS, THREADS, true> {
    u32 at;
    __device__ __forceinline__ explicit PerRow(u32 shared) : at(shared) {}
    __device__ __forceinline__ float get(int r) const { return load_shared(at + (r * THREADS + fresh_thread()) * 4); }
    __device__ __forceinline__ void set(int r, float y) { store_shared(at + (r * THREADS + fresh_thread()) * 4, y); }
};

// With DROPPED, probabilities of some pairs are dropped before they meet v: the sum of a row has them all. Keys finds rows of k
// and v.
template <class T, class Shape, class Params = ForwardParams, bool DROPPED = false, class Keys = Adjoining>
struct Forward {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, WARPS = Shape::WARPS;
    static constexpr int THREADS = Shape::THREADS, MT = Shape::MT, NT = BN / 8;
    static constexpr int TILES = Shape::TILES, ROW_STATE = Shape::ROW_STATE;
    using Rows = PerRow<2 * MT, THREADS, (MT > 1)>;
    using Control = ::Control<Shape::BATCH>;
    static_assert(DV <= D, "o is staged where q was");

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, volatile LogSumExp& sinks, u32 sq,
                                                u32 sk, u32 sv, u32 item) {
        const Partners side = {p.keys, p.partners, p.bands, &p.k, &p.v};
        if (threadIdx.x < 32) control.template begin_queries<BM, BN>(p, item, side);
        // For the epilogue, where no register is free.
        if (threadIdx.x < 32 && p.sink_count) {
            __syncwarp();
            const LogSumExp all = load_sinks(p.sinks, control.own.head, p.sink_count);
            sinks.lse = all.lse;
            sinks.rest = all.rest;
        }
        __syncthreads();
        volatile const Own& own = control.own;
        load_tile<BM, D, THREADS>(sq, p.q.ptr + own.head * p.q.head + own.row * p.q.token, (int)p.q.token,
                                  (int)own.rows, (int)p.heads.dim);
        if (control.steps[0].rows) load_keys<D>(p, sk, control.steps[0].a, p.k, control.steps[0], p.heads.dim);
        copy_commit();

        float out[MT][DV / 8][4];
        Rows row_max(sq + TILES), row_sum(sq + TILES + ROW_STATE);
        clear(out);
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            row_max.set(r, minus_infinity());
            row_sum.set(r, 0.0f);
        }

        for (u32 at = 0; control.steps[at].rows;) {
            volatile const Step& step = control.steps[at];
            copy_wait<0>();
            __syncthreads();
            load_keys<DV>(p, sv, step.b, p.v, step, p.heads.value);
            copy_commit();
            if (threadIdx.x < 32) control.template prepare<BN>(at, side);
            __syncwarp();

            u32 kept[2 * MT];
            if constexpr (DROPPED) {
                const Pair pair = p.partners[step.pair];
                draw_keys<MT, NT>(kept, p.dropout, p.heads.q_offset + own.head, p.queries[own.run], p.dropout.q_tokens[own.run],
                                  own.first + warp_row(), p.keys[pair.run], p.dropout.k_tokens[pair.run], step.first);
            }

            float s[MT][NT][4];
            clear(s);
            multiply_rows<T, MT, NT, D>(s, walk_a<D>(sq, warp_row()), walk_b<D>(sk));
            shape(s, p, control.own, step);
            at = Control::after(at);

            copy_wait<0>();
            __syncthreads();
            volatile const Step& next = control.steps[at];
            if (next.rows) load_keys<D>(p, sk, next.a, p.k, next, p.heads.dim);
            copy_commit();

            softmax(s, out, row_max, row_sum, p.score.exp_scale);
            if constexpr (DROPPED) drop(s, kept, 1.0f);
            multiply_columns<T, MT, NT, DV>(out, s, walk_b_transposed<DV>(sv), 0);
        }
        copy_wait<0>();
        __syncthreads();
        epilogue(p, own, sinks, sq, out, row_max, row_sum);
        __syncthreads();
    }

    // The warp's first row in the tile.
    static __device__ __forceinline__ int warp_row() { return (fresh_thread() >> 5) * 16 * MT; }

    template <int WIDTH>
    static __device__ __forceinline__ void load_keys(const Params& p, u32 to, const char* from, const Tensor& x,
                                                     volatile const Step& step, u32 dim) {
        Keys(p).template load<BN, WIDTH, THREADS>(to, step, from, (int)x.token, (int)step.rows, x, 0, (int)dim);
    }

    // Everything between q k and the exponent.
    static __device__ __forceinline__ void shape(float (&s)[MT][NT][4], const ForwardParams& p, volatile const Own& own,
                                                 volatile const Step& step) {
        const u32 row = warp_row() + (fresh_thread() & 31) / 4;
        if (p.score.flags & SCORE_GENERAL) {
            general_scores<false>(s, s, p.score);
            if (p.alibi_slopes.ptr) {
                const float slope = *(const float*)(p.alibi_slopes.ptr + own.head * p.alibi_slopes.head);
                const Pair pair = p.partners[step.pair];
                alibi(s, p.queries[own.run], own.first + row, p.keys[pair.run], p.bands[pair.band], step.first, slope * LOG2E);
            }
        }
        if (!step.full) {
            const Pair pair = p.partners[step.pair];
            mask(s, minus_infinity(), p.bands[pair.band], p.queries[own.run], own.first + row, p.keys[pair.run], step.first);
        }
    }

    // Turns scores into probabilities, and rescales what was summed before.
    static __device__ __forceinline__ void softmax(float (&s)[MT][NT][4], float (&out)[MT][DV / 8][4],
                                                   Rows& row_max, Rows& row_sum, float scale) {
        bool large = false;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = 2 * m + h;
                float largest = minus_infinity();
#pragma unroll
                for (int n = 0; n < NT; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                // Kept in base-2 units, as it is rounded here: what was summed before was summed with that very number.
                const float before = row_max.get(r);
                largest = fmaxf(before, largest * scale);
                row_max.set(r, largest);
                const float rescale = exp2_fast(before - base_of(largest));
                row_sum.set(r, row_sum.get(r) * rescale);
#pragma unroll
                for (int n = 0; n < DV / 8; ++n) {
                    out[m][n][2 * h] *= rescale;
                    out[m][n][2 * h + 1] *= rescale;
                }
                large |= is_large(base_of(largest));
            }
        if (__any_sync(~0u, large))
            exponentials<true>(s, row_max, row_sum, scale);
        else
            exponentials<false>(s, row_max, row_sum, scale);
    }

    // A row that met nothing yet: any finite base keeps exp2(-inf) = 0 from becoming NaN.
    static __device__ __forceinline__ float base_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

    template <bool MAY_BE_LARGE>
    static __device__ __forceinline__ void exponentials(float (&s)[MT][NT][4], const Rows& row_max, Rows& row_sum, float scale) {
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const float base = base_of(row_max.get(r));
            const Exponents exponents(scale, base);
            float total = row_sum.get(r);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[r / 2][n][r % 2 * 2 + e];
                    x = exp2_fast(MAY_BE_LARGE ? exponents.of(x) : fmaf(x, scale, -base));
                    total += x;
                }
            row_sum.set(r, total);
        }
    }

    static __device__ __forceinline__ void epilogue(const Params& p, volatile const Own& own, volatile const LogSumExp& sinks, u32 sq,
                                                    float (&out)[MT][DV / 8][4], const Rows& row_max, const Rows& row_sum) {
        const u32 mode = p.queries[own.run].mode;
        const u32 head = own.head;
        const i64 first_row = own.row;
        const int rows = (int)own.rows;
        const int base = warp_row();
        const int lane = threadIdx.x & 31;
        const int g = lane >> 2, t = lane & 3;
        const bool continues = mode == MODE_MERGE || mode == MODE_LAST;
        const bool finishes = mode == MODE_LAST || mode == MODE_ONLY;
        if (MT == 1) raise_largest(p, own, row_max);
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const int m = r / 2, h = r % 2;
            const int row = base + r * 8 + g;
            const bool ok = row < rows;
            float total = row_sum.get(r);
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            LogSumExp lse = log_sum_exp(row_max.get(r), total);
            float scale = total == 0.0f ? 0.0f : reciprocal(total);
            if constexpr (DROPPED) scale *= p.dropout.factor;
            float keep = 0.0f;
            char* lse_at = p.lse.ptr + head * p.lse.head + (first_row + row) * p.lse.token;
            char* running_lse = p.running_lse.ptr + head * p.running_lse.head + (first_row + row) * p.running_lse.token;
            char* running = p.running.ptr + head * p.running.head + (first_row + row) * p.running.token;
            if (continues && ok) {
                float weight;
                lse = merge(load_lse(running_lse, p.running_lse_words), lse, keep, weight);
                scale *= weight;
            }
            if (finishes && p.sink_count) {
                const LogSumExp sink = {sinks.lse, sinks.rest};
                float weight, of_sink;
                lse = merge(lse, sink, weight, of_sink);
                // Without a running row `keep` stays 0: times the weight of a NaN it would be NaN, and there is nothing to read.
                if (continues) keep *= weight;
                scale *= weight;
            }
#pragma unroll
            for (int n = 0; n < DV / 8; ++n) {
                float x = out[m][n][2 * h] * scale, y = out[m][n][2 * h + 1] * scale;
                if (ok && n * 8 < p.heads.value) {
                    float2* at = (float2*)(running + (n * 8 + 2 * t) * 4);
                    // A running row with lse = -inf has no say, whatever its o holds.
                    if (keep != 0.0f) {
                        const float2 old = *at;
                        x += old.x * keep;
                        y += old.y * keep;
                    }
                    if (!finishes) *at = make_float2(x, y);
                }
                if (finishes) store_shared(sq + Swizzle<D>::at(row, n) + 4 * t, pack(T{}, x, y));
            }
            // The row's other lanes have read the running lse.
            __syncwarp();
            if (ok && t == 0) {
                if (finishes)
                    *(float*)lse_at = lse.lse;
                else
                    store_lse(running_lse, p.running_lse_words, lse);
            }
        }
        if (finishes) {
            // That barrier also stands between the row of o in shared memory and its reading here.
#pragma unroll
            for (int i = 0; i < 16 * MT * (DV / 8); i += 32) {
                const int row = base + (i + lane) / (DV / 8), chunk = (i + lane) % (DV / 8);
                const uint4 x = load_shared_16(sq + Swizzle<D>::at(row, chunk));
                if (row < rows && chunk * 8 < p.heads.value)
                    *(uint4*)(p.o.ptr + head * p.o.head + (first_row + row) * p.o.token + chunk * 16) = x;
            }
        }
        // Here registers are free, and the largest scores of rows are still in shared memory.
        if (MT > 1) raise_largest(p, own, row_max);
    }

    static __device__ __forceinline__ void raise_largest(const ForwardParams& p, volatile const Own& own, const Rows& row_max) {
        if (!p.max_logit.ptr) return;
        const int first = warp_row() + (fresh_thread() & 31) / 4, rows = (int)own.rows;
        float largest = minus_infinity();
        // Rows past the end are zeros, and have scores.
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r)
            if (first + r * 8 < rows) largest = fmaxf(largest, row_max.get(r));
        raise_max_logit(p.max_logit, own.head, largest);
    }

    static __device__ __forceinline__ void run(const Params& p) {
        __shared__ Control control;
        __shared__ LogSumExp sinks;
        extern __shared__ __align__(128) char shared[];
        const u32 sq = shared_address(shared);
        const u32 sk = sq + BM * D * 2, sv = sk + BN * D * 2;
        for (u32 item = blockIdx.x; item < p.heads.items; item += gridDim.x) tile(p, control, sinks, sq, sk, sv, item);
    }
};
