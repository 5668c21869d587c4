// SPDX-License-Identifier: MIT OR Apache-2.0
// Forward attention on sm_90a: one warpgroup loads, two multiply.
//
// A block takes items by a counter until none are left: a tile of BM q rows of one head or, where ranges are short, of fewer
// rows of several heads that read the same kv head (a shared tile). One thread of the loading warpgroup walks over the keys
// that an item may meet and issues the copies: q once, then k and v of each step into rings of STAGES buffers. With each k it
// leaves a `HopperStep` beside the buffer, with each q an `Item`. Two warpgroups own 64 rows of q each.
// In each step a warpgroup issues Q K^T of this tile of keys and P V of the one before, turns the new scores into
// probabilities while P V still runs, and rescales o when that is done; the two take turns in issuing, so that the softmax
// of one runs beside the products of the other. (FlashAttention-3: Shah et al., 2024.)
//
// Barriers: a `full` one gets one arrival, of the loading thread, and the bytes of the copies; an `empty` one an arrival of
// each multiplying warp, when its last product or read of that buffer is done. Only copies write tiles, and only
// products read them, so no proxy fence is needed between them.
//
// Maps are made for one call and tensor, and have columns, rows, heads, and parts. A part is as far from the next as a row
// from the next; there are SPAN rows to a part, and the map begins SPAN rows before the tensor. Row SPAN - end + i of part
// first + end is thus row first + i of the tensor, and everything from `end` on lies outside of the map and comes as zeros:
// rows behind a range are never read. So are columns past the head dim.
#pragma once
#include "hopper_params.cuh"

// Numbers of `bar.sync`: the turn of the first and of the second multiplying warpgroup.
enum : u32 { BARRIER_TURN = 1 };

template <class T, class Shape>
struct HopperForward {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, STAGES = Shape::STAGES;
    static constexpr int THREADS = Shape::THREADS, NT = BN / 8;
    // A panel of 64 columns, in bytes.
    static constexpr u32 Q_PANEL = BM * 128, K_PANEL = BN * 128;
    static constexpr int WIDTH = Shape::WIDTH, VALUE_WIDTH = Shape::VALUE_WIDTH;
    static constexpr u32 Q_BYTES = Q_PANEL * (WIDTH / 64), K_BYTES = K_PANEL * (WIDTH / 64);
    static constexpr u32 V_BYTES = K_PANEL * (VALUE_WIDTH / 64);
    static constexpr u32 WARPS = BM / 16, GROUP_ROWS = 64;
    static constexpr u32 BM_BITS = 7;
    static_assert(BM == 1 << BM_BITS && WIDTH % 64 == 0 && DV % 32 == 0 && STAGES == 2, "two warpgroups, whole panels");

    // Where the lists are: on the device, or among the parameters. The loading thread has no registers for their addresses,
    // and reads them here each time.
    struct Lists {
        const Run* queries;
        const Run* runs;  // of keys
        const u32* list;  // of each q run, its runs of keys
        const Work* work;
        const Work* shared_work;
    };

    struct Control {
        u64 q_full, q_empty;
        u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        Item items[2];
        HopperStep steps[STAGES];
        Sweep<1> sweep;
        Lists lists;
    };
    static_assert(sizeof(Control) <= Shape::CONTROL, "behind the tiles");

    using Scores = float[1][NT][4];
    using Out = float[1][DV / 8][4];
    using Weights = u32[NT / 2][4];

    // Addresses in shared memory.
    struct Shared {
        u32 q, k, v, control;
        __device__ __forceinline__ explicit Shared(u32 base)
            : q(base), k(q + Q_BYTES), v(k + STAGES * K_BYTES), control(v + STAGES * V_BYTES) {}
        __device__ __forceinline__ u32 q_full() const { return control + offsetof(Control, q_full); }
        __device__ __forceinline__ u32 q_empty() const { return control + offsetof(Control, q_empty); }
        __device__ __forceinline__ u32 k_full(u32 s) const { return control + offsetof(Control, k_full) + 8 * s; }
        __device__ __forceinline__ u32 k_empty(u32 s) const { return control + offsetof(Control, k_empty) + 8 * s; }
        __device__ __forceinline__ u32 v_full(u32 s) const { return control + offsetof(Control, v_full) + 8 * s; }
        __device__ __forceinline__ u32 v_empty(u32 s) const { return control + offsetof(Control, v_empty) + 8 * s; }
    };

    // Where in the rings a step lies: the buffer, and the parity of its phase.
    struct RingPosition {
        u32 count = 0;
        __device__ __forceinline__ u32 stage() const { return count & 1; }
        __device__ __forceinline__ u32 parity() const { return count >> 1 & 1; }
    };

    // `from` is what addresses of lists are counted from.
    static __device__ __forceinline__ void find_lists(volatile Lists& lists, const HopperForwardParams& p, u64 from) {
        lists.queries = (const Run*)(from + (u64)p.call.queries);
        lists.runs = (const Run*)(from + (u64)p.call.keys);
        lists.list = (const u32*)(from + (u64)p.call.partners);
        lists.work = (const Work*)(from + (u64)p.work);
        lists.shared_work = (const Work*)(from + (u64)p.shared.work);
    }

    // -- The loading thread.

    // Rows first .. end of a run, as many as a tile has; those from `end` on come as zeros.
    template <int ROWS, int WIDTH>
    static __device__ __forceinline__ void load(u32 to, const TensorMap& map, u32 span, const Run& run, u32 first, u32 end,
                                                u32 head, u32 barrier) {
        barrier_expect(barrier, ROWS * WIDTH * 2);
#pragma unroll
        for (int panel = 0; panel < WIDTH / 64; ++panel)
            copy_box(to + panel * ROWS * 128, map, panel * 64, (int)(span - end + first), (int)head,
                     (int)((u32)run.row + end), barrier);
    }

    // The shared tile that is the `at`-th of them, and the kv head it reads.
    static __device__ __forceinline__ void begin_shared(volatile Item& item, volatile const Control& control,
                                                        const HopperForwardParams& p, u32 at) {
        const SharedTiles& s = p.shared;
        const u32 part = at % s.parts, kv = part / s.each, skipped = (part - kv * s.each) << (BM_BITS - s.token_bits);
        const u32 head = (kv == 0 ? 0 : s.first_heads + (kv - 1) * s.group) + skipped;
        const u32 end = min(p.call.heads.q_heads, s.first_heads + kv * s.group);
        const Work work = control.lists.shared_work[at / s.parts];
        describe(item.own, control.lists.queries[work.run], work, 1u << s.token_bits, head, kv_head_of(p.call.heads, head));
        item.heads = min(end - head, (u32)BM >> s.token_bits);
        item.token_bits = s.token_bits;
    }

    // The tile of one head that is the `at`-th of them.
    static __device__ __forceinline__ void begin_single(volatile Item& item, volatile const Control& control,
                                                        const HopperForwardParams& p, u32 at) {
        const ForwardParams& call = p.call;
        const u32 section = at / (p.tiles * p.section), before = section * p.section;
        const u32 heads = min(p.section, call.heads.q_heads - before), inside = at - before * p.tiles;
        const u32 head = before + inside % heads;
        const Work work = control.lists.work[inside / heads];
        describe(item.own, control.lists.queries[work.run], work, BM, head, kv_head_of(call.heads, head));
        item.heads = 1;
        item.token_bits = BM_BITS;
    }

    static __device__ __forceinline__ void produce(const HopperMaps& maps, const HopperForwardParams& p, const Shared& at,
                                                   volatile Control& control) {
        const ForwardParams& call = p.call;
        const Window window = {call.score.left, call.score.right};
        volatile const Lists& side = control.lists;
        const u32 general = call.score.flags & SCORE_GENERAL ? STEP_GENERAL : 0;
        const u32 shared_items = p.shared.tiles * p.shared.parts, items = p.tiles * call.heads.q_heads + shared_items;
        RingPosition position;
        u32 at_item = blockIdx.x;
        for (u32 n = 0;; ++n) {
            const u32 slot = n & 1;
            // The item before has been read from its slot by all when q is free again for the next.
            barrier_wait(at.q_empty(), slot ^ 1);
            volatile Item& item = control.items[slot];
            volatile Own& own = item.own;
            if (at_item >= items) {
                own.rows = 0;
                barrier_arrive(at.q_full());
                break;
            }
            // The next item is taken now, so that it is there when it is needed.
            const u32 next = gridDim.x + atomicAdd(p.tile_counter, 1);
            const bool is_shared = at_item - p.shared.begin < shared_items;
            if (is_shared)
                begin_shared(item, control, p, at_item - p.shared.begin);
            else
                begin_single(item, control, p, at_item < p.shared.begin ? at_item : at_item - shared_items);
            const u32 kv_head = own.partner;
            const Run& query = control.lists.queries[own.run];
            volatile Sweep<1>& sweep = control.sweep;
            sweep.start(query.begin, query.end, kv_head, kv_head + 1, own, window, side);
            item.run = &query;
            item.mode = query.mode;
            item.meets = sweep.row != sweep.row_end;
            if (sweep.row == sweep.row_end)
                barrier_arrive(at.q_full());
            else
                load<BM, WIDTH>(at.q, is_shared ? maps.q_shared : maps.q, p.q_span, query, own.first, query.len, own.head,
                            at.q_full());
            while (sweep.row != sweep.row_end) {
                const u32 first = sweep.row, end = sweep.row_end, run = sweep.run;
                const bool whole = end - first >= BN && first >= sweep.full_begin && first + BN <= sweep.full_end;
                if (end - first > BN)
                    sweep.row = first + BN;
                else
                    sweep.find(own, window, side);
                const bool last = sweep.row == sweep.row_end;
                const Run& keys = control.lists.runs[run];
                const u32 stage = position.stage(), free = position.parity() ^ 1;
                barrier_wait(at.k_empty(stage), free);
                volatile HopperStep& step = control.steps[stage];
                step.run = &keys;
                step.first = first;
                step.flags = general | (whole ? 0 : STEP_MASKED) | (last ? STEP_LAST : 0);
                load<BN, WIDTH>(at.k + stage * K_BYTES, maps.k, p.k_span, keys, first, end, kv_head, at.k_full(stage));
                barrier_wait(at.v_empty(stage), free);
                load<BN, VALUE_WIDTH>(at.v + stage * V_BYTES, maps.v, p.k_span, keys, first, end, kv_head, at.v_full(stage));
                ++position.count;
            }
            at_item = next;
        }
    }

    // -- The multiplying warps.

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

    // One arrival of the warp, once all its lanes are done.
    static __device__ __forceinline__ void release(u32 barrier) {
        __syncwarp();
        if ((fresh_thread() & 31) == 0) barrier_arrive(barrier);
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
        for (int i = 0; i < BN / 16; ++i) product_add(T{}, out, weights[i], v + i * (16 * 128 >> 4));
    }

    // Everything between q k and the exponent.
    static __device__ __forceinline__ void shape(Scores& s, const ForwardParams& p, volatile const Item& item,
                                                 volatile const HopperStep& step, u32 flags) {
        if (!(flags & (STEP_MASKED | STEP_GENERAL))) return;
        volatile const Own& own = item.own;
        const u32 row = head_row(item) + (fresh_thread() & 31) / 4;
        if (flags & STEP_GENERAL) {
            general_scores<false>(s, s, p.score);
            if (p.alibi_slopes.ptr) {
                // Of a head that is there: the scores of the others are not used.
                const u32 before = min(heads_before(item), item.heads - 1);
                const float slope = *(const float*)(p.alibi_slopes.ptr + (own.head + before) * p.alibi_slopes.head);
                alibi(s, *item.run, own.first + row, *step.run, step.first, slope * LOG2E);
            }
        }
        if (flags & STEP_MASKED) {
            const Window window = {p.score.left, p.score.right};
            mask(s, minus_infinity(), window, *item.run, own.first + row, *step.run, step.first);
        }
    }

    // Turns scores into probabilities, and says by how much what was summed before shrinks.
    static __device__ __forceinline__ void softmax(Scores& s, float (&row_max)[2], float (&row_sum)[2], float (&rescale)[2],
                                                   float scale) {
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
            const float base = largest == minus_infinity() ? 0.0f : largest;
            rescale[h] = exp2_fast(row_max[h] - base);
            row_max[h] = largest;
            float total = row_sum[h] * rescale[h];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[0][n][2 * h + e];
                    x = exp2_fast(x * scale - base);
                    total += x;
                }
            row_sum[h] = total;
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
                                                    volatile const Item& item, u32 group, RingPosition& position, Out& out,
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
        shape(s, p, item, control.steps[stage], flags);
        release(at.k_empty(stage));
        softmax(s, row_max, row_sum, rescale, p.score.exp_scale);
        round(weights, s);

        while (!(flags & STEP_LAST)) {
            const u32 before = stage, parity_before = position.parity();
            ++position.count;
            stage = position.stage();
            barrier_wait(at.v_full(before), parity_before);
            barrier_wait(at.k_full(stage), position.parity());
            named_wait<2 * 128>(BARRIER_TURN + group);
            hold(out);
            hold(weights);
            product_fence();
            multiply_keys(s, q, k + stage * (K_BYTES >> 4));
            product_commit();
            multiply_values(out, weights, v + before * (V_BYTES >> 4));
            product_commit();
            named_arrive<2 * 128>(BARRIER_TURN + (group ^ 1));
            product_wait<1>();
            hold(s);
            flags = control.steps[stage].flags;
            if (flags & STEP_LAST) {
                release(at.q_empty());
                expect_running(p, item);
            }
            shape(s, p, item, control.steps[stage], flags);
            release(at.k_empty(stage));
            softmax(s, row_max, row_sum, rescale, p.score.exp_scale);
            product_wait<0>();
            hold(out);
            hold(weights);
            release(at.v_empty(before));
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
        release(at.v_empty(stage));
        ++position.count;
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
            if (finishes && ok && p.sinks.ptr) {
                const LogSumExp sink = {*(const float*)(p.sinks.ptr + head * p.sinks.head), 0.0f};
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
        // Which of the two: read from one lane, so that the compiler can see that it is the same in all.
        const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
        // The first warpgroup has the first turn.
        if (group == 1) named_arrive<2 * 128>(BARRIER_TURN);
        RingPosition position;
        for (u32 n = 0;; ++n) {
            const u32 slot = n & 1;
            barrier_wait(at.q_full(), slot);
            volatile const Item& item = control.items[slot];
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
        // No warpgroup takes the last turn that the second one gives.
        if (group == 0) named_wait<2 * 128>(BARRIER_TURN);
    }

    static __device__ __forceinline__ void run(const HopperMaps& maps, const HopperForwardParams& p, const HopperLists& lists) {
        extern __shared__ __align__(1024) char shared[];
        const Shared at(shared_address(shared));
        volatile Control& control = *(Control*)(shared + (at.control - at.q));
        if (threadIdx.x == 0) {
            find_lists(control.lists, p, p.has_lists ? (u64)&lists : 0);
            barrier_init(at.q_full(), 1);
            barrier_init(at.q_empty(), WARPS);
#pragma unroll
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(at.k_full(s), 1);
                barrier_init(at.k_empty(s), WARPS);
                barrier_init(at.v_full(s), 1);
                barrier_init(at.v_empty(s), WARPS);
            }
            fence_proxy();
        }
        __syncthreads();
        if (threadIdx.x < 128) {
            registers_down<40>();
            if (threadIdx.x == 0) produce(maps, p, at, control);
        } else {
            registers_up<232>();
            consume(p, at, control);
        }
    }
};
