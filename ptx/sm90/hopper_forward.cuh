// SPDX-License-Identifier: MIT OR Apache-2.0
// Forward attention on sm_90a: one warpgroup loads, two or three multiply.
//
// A thread of the loading warpgroup fills tiles of q, k and v (`hopper_load.cuh`, where items of work are described too). The
// others own 64 rows of q each.
// In each step a warpgroup issues Q K^T of this tile of keys and P V of the one before, turns the new scores into
// probabilities while P V still runs, and rescales o when that is done; they take turns in issuing, so that the softmax
// of one runs beside the products of the others. (FlashAttention-3: Shah et al., 2024.) At head dim 64 a step's products
// are too short for the softmax of two warpgroups: there are three.
#pragma once
#include "hopper_load.cuh"

// Numbers of `bar.sync`: the turn of the first multiplying warpgroup, and behind it those of the others.
enum : u32 { BARRIER_TURN = 1 };

// CLUSTER blocks multiply the same keys with rows of as many q heads: 1, or 2.
template <class T, class Shape, u32 CLUSTER = 1>
struct HopperForward {
    using Block = HopperBlock<Shape, CLUSTER>;
    using Load = HopperLoad<Shape, CLUSTER>;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using ItemState = typename Block::ItemState;
    static constexpr int D = Block::D, DV = Block::DV, BN = Block::BN, THREADS = Block::THREADS, NT = BN / 8;
    static constexpr u32 Q_PANEL = Block::Q_PANEL, K_PANEL = Block::K_PANEL;
    static constexpr u32 K_BYTES = Block::K_BYTES, V_BYTES = Block::V_BYTES, GROUP_ROWS = Block::GROUP_ROWS, GROUPS = Block::GROUPS;

    using Scores = float[1][NT][4];
    using Out = float[1][DV / 8][4];
    using Weights = u32[NT / 2][4];

    // The warp's first row in the tile. Its 16 rows are of one head.
    static __device__ __forceinline__ u32 warp_row() { return ((fresh_thread() >> 5) - 4) * 16; }

    // That row among those of its head, how many heads lie before it, and whether there is such a head.
    static __device__ __forceinline__ u32 head_row(volatile const Item& item) {
        return warp_row() & ((1u << item.token_bits) - 1);
    }
    static __device__ __forceinline__ u32 heads_before(volatile const Item& item) { return warp_row() >> item.token_bits; }
    static __device__ __forceinline__ u32 rows_of_head(volatile const Item& item) {
        return heads_before(item) < item.heads ? item.own.rows : 0;
    }

    // The warpgroup whose turn comes after that of `group`.
    static __device__ __forceinline__ u32 next_group(u32 group) {
        return GROUPS == 2 ? group ^ 1 : group + 1 == GROUPS ? 0 : group + 1;
    }

    // One arrival of the warp, once all its lanes are done.
    static __device__ __forceinline__ void release(u32 barrier) {
        __syncwarp();
        if ((fresh_thread() & 31) == 0) barrier_arrive(barrier);
    }

    // The same, of a buffer that the copies of all blocks write.
    static __device__ __forceinline__ void release_to_all(u32 barrier) {
        if (CLUSTER == 1) return release(barrier);
        __syncwarp();
        const u32 rank = fresh_thread() & 31;
#ifdef CPATTN_RELEASE
        if (rank < CLUSTER) barrier_release_at(barrier, rank);
#else
        if (rank < CLUSTER) barrier_arrive_at(barrier, rank);
#endif
    }

    // scores = Q K^T, not waited for.
    static __device__ __forceinline__ void multiply_keys(Scores& s, u64 q, u64 k) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            const u64 a = q + (i / 4) * (Q_PANEL >> 4) + (i % 4) * 2, b = k + (i / 4) * (K_PANEL >> 4) + (i % 4) * 2;
            if (i == 0)
                product_new(T{}, s, a, b);
            else
                product_add(T{}, s, a, b);
        }
    }

    // out += P V, not waited for.
    static __device__ __forceinline__ void multiply_values(Out& out, const Weights& weights, u64 v) {
#pragma unroll
        for (int i = 0; i < BN / 16; ++i) panels_add<K_PANEL>(T{}, out, weights[i], v + i * (16 * 128 >> 4));
    }

    // Everything between q k and the exponent. Where registers are few, what is not needed meanwhile lies at `state`.
    static __device__ __forceinline__ void shape(Scores& s, const ForwardParams& p, volatile const Item& item,
                                                 volatile const HopperStep& step, u32 flags, u32 state, float (&row_max)[2],
                                                 float (&row_sum)[2]) {
        if (!(flags & (STEP_MASKED | STEP_GENERAL))) return;
        const u32 own = state + (fresh_thread() - 128) * 16;
        if (Shape::STATE) {
            store_shared_pair(own, row_max[0], row_max[1]);
            store_shared_pair(own + 8, row_sum[0], row_sum[1]);
        }
        shape_scores(s, p, item, step, flags);
        if (Shape::STATE) {
            const u32 same = state + (fresh_thread() - 128) * 16;
            const float2 largest = load_shared_pair(same), sum = load_shared_pair(same + 8);
            row_max[0] = largest.x;
            row_max[1] = largest.y;
            row_sum[0] = sum.x;
            row_sum[1] = sum.y;
        }
    }

    // The lane's first row in the run. Found where it is used: in a register it would be in the way of scores.
    static __device__ __forceinline__ u32 lane_row(volatile const Item& item) {
        return item.own.first + head_row(item) + (fresh_thread() & 31) / 4;
    }

    static __device__ __forceinline__ void shape_scores(Scores& s, const ForwardParams& p, volatile const Item& item,
                                                        volatile const HopperStep& step, u32 flags) {
        volatile const Own& own = item.own;
        if (flags & STEP_GENERAL) {
            general_scores<false>(s, s, p.score);
            if (p.alibi_slopes.ptr) {
                // Of a head that is there: the scores of the others are not used.
                const u32 before = min(heads_before(item), item.heads - 1);
                const float slope = *(const float*)(p.alibi_slopes.ptr + (own.head + before) * p.alibi_slopes.head);
                alibi(s, *item.run, lane_row(item), *step.run, *step.band, step.first, slope * LOG2E);
            }
        }
        if (flags & STEP_MASKED) mask(s, minus_infinity(), *step.band, *item.run, lane_row(item), *step.run, step.first);
    }

    // Turns scores into probabilities, and says by how much what was summed before shrinks.
    static __device__ __forceinline__ void softmax(Scores& s, float (&row_max)[2], float (&row_sum)[2], float (&rescale)[2],
                                                   float scale) {
        float base[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = minus_infinity();
#pragma unroll
            for (int n = 0; n < NT; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * h], s[0][n][2 * h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // Kept in base-2 units, as it is rounded here: what was summed before was summed with that very number.
            largest = fmaxf(row_max[h], largest * scale);
            // A row that met nothing yet: any finite base keeps exp2(-inf) = 0 from becoming NaN.
            base[h] = largest == minus_infinity() ? 0.0f : largest;
            rescale[h] = exp2_fast(row_max[h] - base[h]);
            row_max[h] = largest;
        }
        if (__any_sync(~0u, is_large(base[0]) || is_large(base[1]))) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Exponents exponents(scale, base[h]);
                float total = row_sum[h] * rescale[h];
#pragma unroll
                for (int i = 0; i < 2 * NT; ++i) {
                    float& x = s[0][i / 2][2 * h + i % 2];
                    x = exp2_fast(exponents.of(x));
                    total += x;
                }
                row_sum[h] = total;
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float total = row_sum[h] * rescale[h];
#pragma unroll
                for (int i = 0; i < 2 * NT; ++i) {
                    float& x = s[0][i / 2][2 * h + i % 2];
                    x = exp2_fast(fmaf(x, scale, -base[h]));
                    total += x;
                }
                row_sum[h] = total;
            }
        }
    }

    // Probabilities as the left matrix of a product.
    static __device__ __forceinline__ void round(Weights& weights, const Scores& s) {
#pragma unroll
        for (int i = 0; i < BN / 16; ++i) {
            weights[i][0] = pack(T{}, s[0][2 * i][0], s[0][2 * i][1]);
            weights[i][1] = pack(T{}, s[0][2 * i][2], s[0][2 * i][3]);
            weights[i][2] = pack(T{}, s[0][2 * i + 1][0], s[0][2 * i + 1][1]);
            weights[i][3] = pack(T{}, s[0][2 * i + 1][2], s[0][2 * i + 1][3]);
        }
    }

    // In an item's last step: what the epilogue will read of the running result, so that it does not wait for memory.
    static __device__ __forceinline__ void expect_running(const ForwardParams& p, volatile const Item& item) {
        volatile const Own& own = item.own;
        const u32 mode = item.mode;
        if (mode != MODE_MERGE && mode != MODE_LAST) return;
        const u32 row = head_row(item) + (fresh_thread() & 31), head = own.head + heads_before(item);
        const char* from = p.running.ptr + head * p.running.head + (own.row + row) * p.running.token;
        // Half of the lanes, a row each. The host requires rows that begin at multiples of 16 bytes.
        if ((fresh_thread() & 31) < 16 && row < rows_of_head(item)) prefetch(from, p.heads.value * 4);
    }

    // All keys of one item.
    static __device__ __forceinline__ void multiply(const ForwardParams& p, const Shared& at, volatile Control& control,
                                                    volatile const Item& item, u32 group, PipelineState& position, Out& out,
                                                    float (&row_max)[2], float (&row_sum)[2]) {
        const u64 q = matrix_at(at.q + group * GROUP_ROWS * 128, Q_PANEL);
        const u64 k = matrix_at(at.k, K_PANEL), v = matrix_at(at.v, K_PANEL);
        Scores s;
        Weights weights;
        float rescale[2];
        u32 stage = position.stage();

        barrier_wait(at.k_full(stage), position.parity());
        product_fence();
        multiply_keys(s, q, k + stage * (K_BYTES >> 4));
        product_commit();
        product_wait<0>();
        hold(s);
        u32 flags = control.steps[stage].flags;
        if (flags & STEP_LAST) {
            release(at.q_empty());
            expect_running(p, item);
        }
        shape(s, p, item, control.steps[stage], flags, at.state(), row_max, row_sum);
        release_to_all(at.k_empty(stage));
        softmax(s, row_max, row_sum, rescale, p.score.exp_scale);
        round(weights, s);

        while (!(flags & STEP_LAST)) {
            const u32 before = stage, parity_before = position.parity();
            position.advance();
            stage = position.stage();
            barrier_wait(at.k_full(stage), position.parity());
            flags = control.steps[stage].flags;
            named_wait<2 * 128>(BARRIER_TURN + group);
            hold(out);
            hold(weights);
            product_fence();
            multiply_keys(s, q, k + stage * (K_BYTES >> 4));
            product_commit();
            // Scores do not wait for v.
            barrier_wait(at.v_full(before), parity_before);
            product_fence();
            multiply_values(out, weights, v + before * (V_BYTES >> 4));
            product_commit();
            named_arrive<2 * 128>(BARRIER_TURN + next_group(group));
            product_wait<1>();
            hold(s);
            if (flags & STEP_LAST) {
                release(at.q_empty());
                expect_running(p, item);
            }
            shape(s, p, item, control.steps[stage], flags, at.state(), row_max, row_sum);
            release_to_all(at.k_empty(stage));
            softmax(s, row_max, row_sum, rescale, p.score.exp_scale);
            product_wait<0>();
            hold(out);
            hold(weights);
            release_to_all(at.v_empty(before));
            // Most tiles of keys raise no row's largest score.
            if (!__all_sync(~0u, rescale[0] == 1.0f && rescale[1] == 1.0f))
#pragma unroll
                for (int n = 0; n < DV / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) out[0][n][i] *= rescale[i / 2];
            round(weights, s);
        }

        barrier_wait(at.v_full(stage), position.parity());
        hold(out);
        hold(weights);
        product_fence();
        multiply_values(out, weights, v + stage * (V_BYTES >> 4));
        product_commit();
        product_wait<0>();
        hold(out);
        hold(weights);
        release_to_all(at.v_empty(stage));
        position.advance();
    }

    // Word t of four chunks of 16 bytes, in lane t of a quad, becomes all four words of chunk t.
    static __device__ __forceinline__ uint4 transpose(const u32 (&x)[4], int t) {
        const bool odd = t & 1, upper = t & 2;
        const u32 a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
        // Two words each of chunks (t & 1) and 2 + (t & 1).
        const u32 low0 = odd ? a : x[0], low1 = odd ? x[1] : a, high0 = odd ? b : x[2], high1 = odd ? x[3] : b;
        const u32 c = __shfl_xor_sync(~0u, upper ? low0 : high0, 2), d = __shfl_xor_sync(~0u, upper ? low1 : high1, 2);
        return upper ? make_uint4(c, d, high0, high1) : make_uint4(low0, low1, c, d);
    }

    // As in the kernel of sm_80: merges with the running result, adds the sink, writes.
    static __device__ __forceinline__ void epilogue(const ForwardParams& p, volatile const Item& item, Out& out,
                                                    const float (&row_max)[2], const float (&row_sum)[2]) {
        const u32 mode = item.mode;
        const u32 head = item.own.head + heads_before(item);
        const i64 first_row = item.own.row;
        const int rows = (int)rows_of_head(item);
        const int base = head_row(item);
        const int lane = threadIdx.x & 31;
        const int g = lane >> 2, t = lane & 3;
        const bool continues = mode == MODE_MERGE || mode == MODE_LAST;
        const bool finishes = mode == MODE_LAST || mode == MODE_ONLY;
        const LogSumExp sink = load_sinks(p.sinks, head, finishes && rows ? p.sink_count : 0);
        if (p.max_logit.ptr) {
            // Rows past the end are zeros or a neighbour's, and have scores.
            const float largest = base + g < rows ? row_max[0] : minus_infinity();
            raise_max_logit(p.max_logit, head, base + 8 + g < rows ? fmaxf(largest, row_max[1]) : largest);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = base + h * 8 + g;
            const bool ok = row < rows;
            float total = row_sum[h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            LogSumExp lse = log_sum_exp(row_max[h], total);
            float scale = total == 0.0f ? 0.0f : reciprocal(total);
            float keep = 0.0f;
            char* running_lse = p.running_lse.ptr + head * p.running_lse.head + (first_row + row) * p.running_lse.token;
            char* running = p.running.ptr + head * p.running.head + (first_row + row) * p.running.token;
            if (continues && ok) {
                float weight;
                lse = merge(load_lse(running_lse, p.running_lse_words), lse, keep, weight);
                scale *= weight;
            }
            if (finishes && ok && p.sink_count) {
                float weight, of_sink;
                lse = merge(lse, sink, weight, of_sink);
                // Without a running row `keep` stays 0: times the weight of a NaN it would be NaN, and there is nothing to read.
                if (continues) keep *= weight;
                scale *= weight;
            }
            char* o = p.o.ptr + head * p.o.head + (first_row + row) * p.o.token;
#pragma unroll
            for (int four = 0; four < DV / 8; four += 4) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int n = four + i;
                    float x = out[0][n][2 * h] * scale, y = out[0][n][2 * h + 1] * scale;
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
                    words[i] = pack(T{}, x, y);
                }
                if (finishes) {
                    const uint4 chunk = transpose(words, t);
                    if (ok && (four + t) * 8 < p.heads.value) *(uint4*)(o + (four + t) * 16) = chunk;
                }
            }
            // The row's other lanes have read the running lse.
            __syncwarp();
            if (ok && t == 0) {
                if (finishes)
                    *(float*)(p.lse.ptr + head * p.lse.head + (first_row + row) * p.lse.token) = lse.lse;
                else
                    store_lse(running_lse, p.running_lse_words, lse);
            }
        }
    }

    static __device__ __forceinline__ void consume(const HopperForwardParams& p, const Shared& at, volatile Control& control) {
        // Which of them: read from one lane, so that the compiler can see that it is the same in all.
        const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
        // The first warpgroup has the first turn.
        if (group == GROUPS - 1) named_arrive<2 * 128>(BARRIER_TURN);
        PipelineState position;
        for (ItemState n;; n.advance()) {
            barrier_wait(at.q_full(), n.parity());
            volatile const Item& item = control.items[n.slot()];
            if (item.own.rows == 0) break;
            Out out;
            clear(out);
            float row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.0f, 0.0f};
            if (item.meets)
                multiply(p.call, at, control, item, group, position, out, row_max, row_sum);
            else
                release(at.q_empty());
            epilogue(p.call, item, out, row_max, row_sum);
        }
        // No warpgroup takes the last turn that the last one gives.
        if (group == 0) named_wait<2 * 128>(BARRIER_TURN);
    }

    static __device__ __forceinline__ void run(const HopperMaps& maps, const HopperForwardParams& p) {
        SHARED_MEMORY;
        const Shared at(shared_address(shared));
        volatile Control& control = *(Control*)(shared + (at.control - at.q));
        if (threadIdx.x == 0) {
            prefetch_map(maps.q);
            prefetch_map(maps.k);
            prefetch_map(maps.v);
            if (p.shared.tiles) prefetch_map(maps.q_shared);
            Block::init_barriers(at);
        }
        if (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        if (threadIdx.x < 128) {
            registers_down<Shape::LOAD_REGISTERS>();
            if (threadIdx.x == 0) Load::produce(maps, p, at, control);
        } else {
            registers_up<Shape::REGISTERS>();
            consume(p, at, control);
        }
        // Until the last arrivals of the other block have come, the barriers have to be there.
        if (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        }
    }
};
