// SPDX-License-Identifier: MIT OR Apache-2.0
// Forward attention for head dims above 256: up to 576 of q and k, 512 of v (MLA in its latent form).
//
// A block owns 64 q rows of one head. Sums of 64 by 512 take 128 registers of a thread if each of eight warps has 32 rows of a quarter of
// the columns; scores are shared out likewise, 16 keys to a warp. So the four warps of a row tell each other its largest score,
// and then p, through shared memory. Each keeps the sum of its own keys to the end. Everything else is as in `forward.cuh`.
#pragma once
#include "dropout.cuh"
#include "shared/log_sum_exp.cuh"
#include "shared/max_logit.cuh"
#include "wide.cuh"

template <class T, class Shape, class Params = ForwardParams, bool DROPPED = false, class Keys = Adjoining>
struct WideForward {
    static constexpr int DV = Shape::DV, BM = Shape::BM, THREADS = Shape::THREADS, MT = BM / 32, COLUMNS = DV / CHUNK;
    static constexpr int ROWS = 2 * MT;  // of a thread
    static constexpr u32 OWN = Chunk<BM>::BYTES;
    using Control = ::Control<Shape::BATCH>;
    using Chunks = Feed<Shape::STAGES, 2, 2, THREADS, Control, Keys>;
    static_assert(Shape::BN == CHUNK && THREADS == 64 * PARTS, "two by four warps");

    // The row of a tile that is the thread's r-th.
    static __device__ __forceinline__ int row_of(int r) { return warp_half() * 16 * MT + r * 8 + ((fresh_thread() & 31) >> 2); }

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, u32 sq, u32 item) {
        const u32 ring = sq + Shape::D / CHUNK * OWN, sp = ring + Shape::STAGES * Chunk<CHUNK>::BYTES, stats = sp + OWN;
        const Partners side = {p.keys, p.partners, p.bands, &p.k, &p.v};
        if (threadIdx.x < 32) control.template begin_queries<BM, CHUNK>(p, item, side);
        __syncthreads();
        volatile const Own& own = control.own;
        const u32 dim = p.heads.dim, value = p.heads.value;
        load_own<BM, THREADS>(sq, p.q.ptr + own.head * p.q.head + own.row * p.q.token, p.q.token, own.rows, dim);
        Chunks chunks(ring, Keys(p));
#pragma unroll
        for (int i = 0; i < Shape::STAGES - 1; ++i) chunks.next(control, p.k, p.v, dim, value);

        float out[COLUMNS][MT][2][4], row_max[ROWS], row_sum[ROWS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) clear(out[c]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            row_max[r] = minus_infinity();
            row_sum[r] = 0.0f;
        }

        for (u32 at = 0; control.steps[at].rows; at = Control::after(at)) {
            float s[MT][2][4];
            clear(s);
#pragma unroll 1
            for (int c = 0; c < chunks_of(dim); ++c) {
                const u32 keys = chunks.take(control, p.k, p.v, dim, value);
                if (c == 0 && threadIdx.x < 32) control.template prepare<CHUNK>(at, side);
                __syncwarp();
                multiply_chunk<T, MT>(s, sq + c * OWN, keys);
            }
            shape(s, p, control.own, control.steps[at]);
            float rescale[ROWS];
            softmax(s, stats, row_max, row_sum, rescale, p.score.exp_scale);
            if constexpr (DROPPED) {
                volatile const Step& step = control.steps[at];
                const Pair pair = p.partners[step.pair];
                u32 kept[ROWS];
                draw_keys<MT, 2>(kept, p.dropout, p.heads.q_offset + own.head, p.queries[own.run], p.dropout.q_tokens[own.run],
                                 own.first + warp_half() * 16 * MT, p.keys[pair.run], p.dropout.k_tokens[pair.run],
                                 step.first + warp_part() * 16);
                drop(s, kept, 1.0f);
            }
            store_square<T, MT>(sp, s);
            u32 weights[CHUNK / 16][MT][4];
#pragma unroll 1
            for (int c = 0; c < chunks_of(value); ++c) {
                const Walk<CHUNK> values = walk_columns(chunks.take(control, p.k, p.v, dim, value));
                // The barrier in there also stands between p in shared memory and its reading.
                if (c == 0) load_fragments<MT, CHUNK>(weights, walk_a<CHUNK>(sp, warp_half() * 16 * MT));
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    if (c == i) {
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
#pragma unroll
                            for (int n = 0; n < 2; ++n) {
                                out[i][r / 2][n][r % 2 * 2] *= rescale[r];
                                out[i][r / 2][n][r % 2 * 2 + 1] *= rescale[r];
                            }
                        multiply_square<T, MT>(out[i], weights, values);
                    }
            }
        }
        copy_wait<0>();
        __syncthreads();
        epilogue(p, own, sq, sp, stats, out, row_max, row_sum);
    }

    // Everything between q k and the exponent.
    static __device__ __forceinline__ void shape(float (&s)[MT][2][4], const ForwardParams& p, volatile const Own& own,
                                                 volatile const Step& step) {
        const u32 row = own.first + row_of(0), first = step.first + warp_part() * 16;
        if (p.score.flags & SCORE_GENERAL) {
            general_scores<false>(s, s, p.score);
            if (p.alibi_slopes.ptr) {
                const float slope = *(const float*)(p.alibi_slopes.ptr + own.head * p.alibi_slopes.head);
                const Pair pair = p.partners[step.pair];
                alibi(s, p.queries[own.run], row, p.keys[pair.run], p.bands[pair.band], first, slope * LOG2E);
            }
        }
        if (!step.full) {
            const Pair pair = p.partners[step.pair];
            mask(s, minus_infinity(), p.bands[pair.band], p.queries[own.run], row, p.keys[pair.run], first);
        }
    }

    // Turns scores into probabilities of the row's new largest score; `rescale` is what makes older sums such too. A barrier.
    static __device__ __forceinline__ void softmax(float (&s)[MT][2][4], u32 stats, float (&row_max)[ROWS], float (&row_sum)[ROWS],
                                                   float (&rescale)[ROWS], float scale) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float(&a)[4] = s[r / 2][0];
            const float(&b)[4] = s[r / 2][1];
            const int h = r % 2 * 2;
            float largest = fmaxf(fmaxf(a[h], a[h + 1]), fmaxf(b[h], b[h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            if ((threadIdx.x & 3) == 0) store_shared(stats + (row_of(r) * PARTS + warp_part()) * 4, largest);
        }
        __syncthreads();
        float base[ROWS];
        bool large = false;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint4 of = load_shared_16(stats + row_of(r) * PARTS * 4);
            float largest = fmaxf(fmaxf(__uint_as_float(of.x), __uint_as_float(of.y)), fmaxf(__uint_as_float(of.z), __uint_as_float(of.w)));
            // Kept in base-2 units, as it is rounded here: what was summed before was summed with that very number.
            largest = fmaxf(row_max[r], largest * scale);
            // A row that met nothing yet: any finite base keeps exp2(-inf) = 0 from becoming NaN.
            base[r] = largest == minus_infinity() ? 0.0f : largest;
            rescale[r] = exp2_fast(row_max[r] - base[r]);
            row_max[r] = largest;
            large |= is_large(base[r]);
        }
        large = __any_sync(~0u, large);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Exponents exponents(scale, base[r]);
            float total = row_sum[r] * rescale[r];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[r / 2][n][r % 2 * 2 + e];
                    x = exp2_fast(large ? exponents.of(x) : fmaf(x, scale, -base[r]));
                    total += x;
                }
            row_sum[r] = total;
        }
    }

    static __device__ __forceinline__ void epilogue(const Params& p, volatile const Own& own, u32 sq, u32 kept, u32 stats,
                                                    const float (&out)[COLUMNS][MT][2][4], const float (&row_max)[ROWS],
                                                    const float (&row_sum)[ROWS]) {
        const u32 mode = p.queries[own.run].mode, head = own.head;
        const i64 first_row = own.row;
        const int rows = (int)own.rows, t = fresh_thread() & 3, part = warp_part();
        const bool continues = mode == MODE_MERGE || mode == MODE_LAST, finishes = mode == MODE_LAST || mode == MODE_ONLY;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float total = row_sum[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (t == 0) store_shared(stats + (row_of(r) * PARTS + part) * 4, total);
            if (t == 0 && part == 0) store_shared(kept + row_of(r) * 4, row_max[r]);
        }
        // The warps of a row have the same largest score.
        if (p.max_logit.ptr && part == 0) {
            float largest = minus_infinity();
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (row_of(r) < rows) largest = fmaxf(largest, row_max[r]);
            raise_max_logit(p.max_logit, head, largest);
        }
        __syncthreads();
        // A thread for each row: its lse, the factor of its new sums, and that of its running ones.
        const int own_row = threadIdx.x;
        if (own_row < BM) {
            const bool ok = own_row < rows;
            const uint4 of = load_shared_16(stats + own_row * PARTS * 4);
            const float total = (__uint_as_float(of.x) + __uint_as_float(of.y)) + (__uint_as_float(of.z) + __uint_as_float(of.w));
            LogSumExp lse = log_sum_exp(load_shared(kept + own_row * 4), total);
            float scale = total == 0.0f ? 0.0f : reciprocal(total), keep = 0.0f;
            if constexpr (DROPPED) scale *= p.dropout.factor;
            char* running_lse = p.running_lse.ptr + head * p.running_lse.head + (first_row + own_row) * p.running_lse.token;
            if (continues && ok) {
                float weight;
                lse = merge(load_lse(running_lse, p.running_lse_words), lse, keep, weight);
                scale *= weight;
            }
            if (finishes && p.sinks.ptr) {
                const LogSumExp sink = load_sinks(p.sinks, head, p.sink_count);
                float weight, of_sink;
                lse = merge(lse, sink, weight, of_sink);
                // Without a running row `keep` stays 0: times the weight of a NaN it would be NaN, and there is nothing to read.
                if (continues) keep *= weight;
                scale *= weight;
            }
            store_shared(kept + own_row * 4, keep);
            store_shared(stats + own_row * PARTS * 4, scale);
            if (ok && finishes) *(float*)(p.lse.ptr + head * p.lse.head + (first_row + own_row) * p.lse.token) = lse.lse;
            if (ok && !finishes) store_lse(running_lse, p.running_lse_words, lse);
        }
        __syncthreads();
        float scales[MT][2];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) scales[r / 2][r % 2] = load_shared(stats + row_of(r) * PARTS * 4);
        const int units = (int)p.heads.value / 4;
#pragma unroll 1
        for (int m = 0; m < MT; ++m) {
            if (m == 0)
                Staged<COLUMNS>::template store<0>(sq, out, scales[0]);
            else
                Staged<COLUMNS>::template store<MT - 1>(sq, out, scales[MT - 1]);
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < 32 * units; i += THREADS) {
                const int slot = i / units, unit = i - slot * units;
                const int row = (slot >> 4) * 16 * MT + m * 16 + (slot & 15);
                if (row >= rows) continue;
                float4 x = Staged<COLUMNS>::load(sq, slot, unit);
                float4* running = (float4*)(p.running.ptr + head * p.running.head + (first_row + row) * p.running.token) + unit;
                // A running row with lse = -inf has no say, whatever its o holds.
                const float keep = load_shared(kept + row * 4);
                if (keep != 0.0f) {
                    const float4 old = *running;
                    x.x += old.x * keep;
                    x.y += old.y * keep;
                    x.z += old.z * keep;
                    x.w += old.w * keep;
                }
                if (finishes)
                    ((uint2*)(p.o.ptr + head * p.o.head + (first_row + row) * p.o.token))[unit] = make_uint2(pack(T{}, x.x, x.y), pack(T{}, x.z, x.w));
                else
                    *running = x;
            }
            __syncthreads();
        }
    }

    static __device__ __forceinline__ void run(const Params& p) {
        __shared__ Control control;
        extern __shared__ __align__(128) char shared[];
        const u32 sq = shared_address(shared);
        for (u32 item = blockIdx.x; item < p.heads.items; item += gridDim.x) tile(p, control, sq, item);
    }
};
