// SPDX-License-Identifier: MIT OR Apache-2.0
// Backward attention in two kernels, bit for bit the same on every run: nothing is added by atomics. They make one side alone;
// both at once is `fused.cuh`, where the device has room for it.
//
// Two kernels recompute the scores. One owns a tile of q rows and walks over its keys (dq), the other owns a tile of keys
// and walks over the queries that read it, head by head of its group (dk, dv). That is seven products for the five of a
// kernel that adds dq atomically; in exchange every sum has one owner and one order.
//
//   p = exp2(s - lse), ds = p * (do·v - delta) * (slope of the softcap), dq = scale * ds k, dk = scale * ds^T q, dv = p^T do
//
// The second kernel computes s^T and ds^T, so that both are, rounded, the A operand of the next product without leaving
// the registers.
#pragma once
#include "dropout.cuh"
#include "shared/score.cuh"
#include "shared/tile.cuh"

// lse in base-2 units. A row that attends to nothing has lse = -inf, and p = 0: +inf does that.
__device__ __forceinline__ float exponent_base(float lse) {
    return lse == minus_infinity() ? -minus_infinity() : lse * LOG2E;
}

// Whose keys a tile of dk and dv has, and the q heads that read them: all of the group that are here, or one.
struct Group {
    u32 kv_head;
    u32 begin, end;
};

__device__ __forceinline__ Group group_of(const BackwardParams& p, u32 head) {
    if (p.per_q_head) return {kv_head_of(p.heads, head), head, head + 1};
    const u32 from = (head + p.heads.kv_offset) * p.heads.group, to = from + p.heads.group;
    const u32 begin = from > p.heads.q_offset ? from - p.heads.q_offset : 0;
    const u32 end = to > p.heads.q_offset ? to - p.heads.q_offset : 0;
    const u32 last = end < p.heads.q_heads ? end : p.heads.q_heads;
    return {head, begin < last ? begin : last, last};
}

// The first warp's: the tile of ROWS keys that is item `item` of a call, and its first steps of SIZE q rows.
template <u32 ROWS, u32 SIZE, class Control>
__device__ __forceinline__ void begin_keys(const BackwardParams& p, volatile Control& control, u32 item, const Partners& side) {
    if (threadIdx.x == 0) {
        const u32 heads = p.per_q_head ? p.heads.q_heads : p.heads.kv_heads;
        const u32 head = item % heads;
        const Work work = p.work[item / heads];
        const Run& key = p.keys[work.run];
        const Group group = group_of(p, head);
        describe(control.own, key, work, ROWS, head, group.kv_head);
        control.sweep.start(key.begin, key.end, group.begin, group.end, control.own, side);
    }
    __syncwarp();
    control.sweep.template fill<SIZE>(control.steps, control.own, side);
}

// f32 result of one accumulator row: adds to or overwrites what is there.
template <int N>
__device__ __forceinline__ void write_row(char* to, const float (&c)[N][4], int h, float scale, bool add, int dim) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (n * 8 < dim) {
            float2* at = (float2*)(to + (n * 8 + 2 * t) * 4);
            float2 x = make_float2(c[n][2 * h] * scale, c[n][2 * h + 1] * scale);
            if (add) {
                const float2 old = *at;
                x.x += old.x;
                x.y += old.y;
            }
            *at = x;
        }
    }
}

// lse (as a base of exponents) and delta of SIZE q rows to shared memory, one after the other. Rows past the end get p = 0.
template <int SIZE>
__device__ __forceinline__ void load_stats(const BackwardParams& p, u32 to, u32 head, i64 first, u32 rows) {
    const u32 row = fresh_thread();
    if (row < SIZE) {
        float base = -minus_infinity(), delta = 0.0f;
        if (row < rows) {
            base = exponent_base(*(const float*)(p.lse.ptr + head * p.lse.head + (first + row) * p.lse.token));
            delta = *(const float*)(p.delta.ptr + head * p.delta.head + (first + row) * p.delta.token);
        }
        store_shared(to + row * 4, base);
        store_shared(to + SIZE * 4 + row * 4, delta);
    }
}

// Softcap and ALiBi on q k and, where they have a slope, on do v (already less delta). Own rows start at `row` of their run.
template <int MT, int NT>
__device__ __forceinline__ void general_gradients(float (&s)[MT][NT][4], float (&g)[MT][NT][4], const Score& score,
                                                  const Tensor& slopes, u32 head, const Run& run, u32 row,
                                                  const Run& partner, const Band& band, u32 first) {
    if (score.flags & SCORE_GENERAL) {
        general_scores<true>(s, g, score);
        if (slopes.ptr) {
            const float slope = *(const float*)(slopes.ptr + head * slopes.head);
            alibi(s, run, row, partner, band, first, slope * LOG2E);
        }
    }
}

// From q k and do v to p and ds, but for the exponent.
template <int MT, int NT>
__device__ __forceinline__ void shape_gradients(float (&s)[MT][NT][4], float (&g)[MT][NT][4], const Score& score,
                                                const Tensor& slopes, u32 head, const Run& run, u32 row,
                                                const Run& partner, const Band& band, u32 first, bool full) {
    general_gradients(s, g, score, slopes, head, run, row, partner, band, first);
    if (!full) {
        mask(s, minus_infinity(), band, run, row, partner, first);
        mask(g, 0.0f, band, run, row, partner, first);
    }
}

// p and ds of columns that are q rows; their bases are what `base_of` makes of the words at `stats`.
template <bool MAY_BE_LARGE, int MT, int NT, class Base>
__device__ __forceinline__ void columns_gradients(float (&s)[MT][NT][4], float (&g)[MT][NT][4], float scale, u32 stats,
                                                  const Base& base_of) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float2 words = load_shared_pair(stats + (n * 8 + 2 * (fresh_thread() & 3)) * 4);
        const float2 base = make_float2(base_of(words.x), base_of(words.y));
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[m][n][i] = probability<MAY_BE_LARGE>(s[m][n][i], scale, i & 1 ? base.y : base.x);
                g[m][n][i] *= s[m][n][i];
            }
    }
}

// With DROPPED, do·v of dropped pairs counts nothing, and that of the others more.
template <class T, class Shape, class Params = BackwardParams, bool DROPPED = false>
struct BackwardQueries {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, WARPS = Shape::WARPS;
    static constexpr int STAGES = Shape::STAGES, STAGE = Shape::STAGE, TILES = Shape::TILES, THREADS = Shape::THREADS;
    static constexpr int MT = BM / (16 * WARPS);
    static constexpr int NT = BN / 8;
    using Control = ::Control<Shape::BATCH>;
    static_assert(BM <= THREADS, "one thread per q row");

    static __device__ __forceinline__ int warp_row() { return (fresh_thread() >> 5) * 16 * MT; }

    static __device__ __forceinline__ void load_keys(const BackwardParams& p, u32 to, volatile const Step& step) {
        load_tile<BN, D, THREADS>(to, step.a, (int)p.k.token, (int)step.rows, (int)p.heads.dim);
        load_tile<BN, DV, THREADS>(to + BN * D * 2, step.b, (int)p.v.token, (int)step.rows, (int)p.heads.value);
    }

    // ds, in the place of the scores; `bases` is where the lane's first row has its base of exponents.
    template <bool MAY_BE_LARGE>
    static __device__ __forceinline__ void gradients(float (&s)[MT][NT][4], const float (&g)[MT][NT][4], float scale, u32 bases) {
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const float base = load_shared(bases + r * 32);
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = r % 2 * 2; i < r % 2 * 2 + 2; ++i)
                    s[r / 2][n][i] = probability<MAY_BE_LARGE>(s[r / 2][n][i], scale, base) * g[r / 2][n][i];
        }
    }

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, u32 sq, u32 item) {
        const u32 sdo = sq + BM * D * 2, skv = sdo + BM * DV * 2;
        const Partners side = {p.keys, p.partners, p.bands, &p.k, &p.v};
        if (threadIdx.x < 32) control.template begin_queries<BM, BN>(p, item, side);
        __syncthreads();
        volatile const Own& own = control.own;
        load_tile<BM, D, THREADS>(sq, p.q.ptr + own.head * p.q.head + own.row * p.q.token, (int)p.q.token,
                                  (int)own.rows, (int)p.heads.dim);
        load_tile<BM, DV, THREADS>(sdo, p.d_o.ptr + own.head * p.d_o.head + own.row * p.d_o.token, (int)p.d_o.token,
                                   (int)own.rows, (int)p.heads.value);
        if (STAGES == 2 && control.steps[0].rows) load_keys(p, skv, control.steps[0]);
        copy_commit();

        float dq[MT][D / 8][4];
        clear(dq);
        const u32 stats = sq + TILES;
        load_stats<BM>(p, stats, own.head, own.row, own.rows);

        for (u32 at = 0; control.steps[at].rows; at = Control::after(at)) {
            volatile const Step& step = control.steps[at];
            const u32 stage = STAGES == 2 ? at % 2 * STAGE : 0;
            if (STAGES == 2) {
                volatile const Step& next = control.steps[Control::after(at)];
                if (next.rows) load_keys(p, skv + (STAGE - stage), next);
            } else {
                load_keys(p, skv, step);
            }
            copy_commit();
            copy_wait<STAGES - 1>();
            __syncthreads();
            if (threadIdx.x < 32) control.template prepare<BN>(at, side);
            __syncwarp();

            const u32 sk = skv + stage, sv = sk + BN * D * 2;
            u32 kept[2 * MT];
            if constexpr (DROPPED) {
                const Pair pair = p.partners[step.pair];
                draw_keys<MT, NT>(kept, p.dropout, p.heads.q_offset + own.head, p.queries[own.run], p.dropout.q_tokens[own.run],
                                  own.first + warp_row(), p.keys[pair.run], p.dropout.k_tokens[pair.run], step.first);
            }
            float s[MT][NT][4], g[MT][NT][4];
            clear(s);
            multiply_rows<T, MT, NT, D>(s, walk_a<D>(sq, warp_row()), walk_b<D>(sk));
            clear(g);
            multiply_rows<T, MT, NT, DV>(g, walk_a<DV>(sdo, warp_row()), walk_b<DV>(sv));
            if constexpr (DROPPED) drop(g, kept, p.dropout.factor);
            const u32 row = warp_row() + (fresh_thread() & 31) / 4;
#pragma unroll
            for (int r = 0; r < 2 * MT; ++r) {
                const float delta = load_shared(stats + BM * 4 + (row + r * 8) * 4);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    g[r / 2][n][r % 2 * 2] -= delta;
                    g[r / 2][n][r % 2 * 2 + 1] -= delta;
                }
            }
            const Pair pair = p.partners[step.pair];
            shape_gradients(s, g, p.score, p.alibi_slopes, own.head, p.queries[own.run], own.first + row, p.keys[pair.run],
                            p.bands[pair.band], step.first, step.full);
            if (any_large<16 * MT>(stats + warp_row() * 4))
                gradients<true>(s, g, p.score.exp_scale, stats + row * 4);
            else
                gradients<false>(s, g, p.score.exp_scale, stats + row * 4);
            multiply_columns<T, MT, NT, D>(dq, s, walk_b_transposed<D>(sk), 0);
            __syncthreads();
        }
        copy_wait<0>();

        const u32 mode = p.queries[own.run].mode;
#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const u32 row = warp_row() + r * 8 + (fresh_thread() & 31) / 4;
            if (row < own.rows)
                write_row(p.dq.ptr + own.head * p.dq.head + (own.row + row) * p.dq.token, dq[r / 2], r & 1,
                          p.score.scale, mode == MODE_MERGE || mode == MODE_LAST, (int)p.heads.dim);
        }
        __syncthreads();
    }

    static __device__ __forceinline__ void run(const Params& p) {
        __shared__ Control control;
        extern __shared__ __align__(128) char shared[];
        const u32 sq = shared_address(shared);
        for (u32 item = blockIdx.x; item < p.heads.items; item += gridDim.x) tile(p, control, sq, item);
    }
};

// Which sums one pass keeps.
enum { DK = 1, DV_ = 2 };

template <class T, class Shape, int WHAT, class Params = BackwardParams, bool DROPPED = false>
struct BackwardKeys {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, WARPS = Shape::WARPS;
    static constexpr int STAGES = Shape::STAGES, STAGE = Shape::STAGE, STAGE_TILES = Shape::STAGE_TILES;
    static constexpr int SUB = Shape::SUB, THREADS = Shape::THREADS;
    static constexpr int MT = BN / (16 * WARPS);
    static constexpr int NT = SUB / 8;
    using Control = ::Control<Shape::BATCH>;
    static_assert(BM <= THREADS, "one thread per q row");

    static __device__ __forceinline__ int warp_row() { return (fresh_thread() >> 5) * 16 * MT; }

    static __device__ __forceinline__ void load_queries(const BackwardParams& p, u32 to, volatile const Step& step) {
        load_tile<BM, D, THREADS>(to, step.a, (int)p.q.token, (int)step.rows, (int)p.heads.dim);
        load_tile<BM, DV, THREADS>(to + BM * D * 2, step.b, (int)p.d_o.token, (int)step.rows, (int)p.heads.value);
        load_stats<BM>(p, to + STAGE_TILES, step.head, step.row, step.rows);
    }

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, u32 sk, u32 item) {
        const u32 sv = sk + BN * D * 2, sqs = sv + BN * DV * 2;
        const Partners side = {p.queries, p.partners, p.bands, &p.q, &p.d_o};
        if (threadIdx.x < 32) begin_keys<BN, BM>(p, control, item, side);
        __syncthreads();
        volatile const Own& own = control.own;
        load_tile<BN, D, THREADS>(sk, p.k.ptr + own.partner * p.k.head + own.row * p.k.token, (int)p.k.token,
                                  (int)own.rows, (int)p.heads.dim);
        if (WHAT & DK)
            load_tile<BN, DV, THREADS>(sv, p.v.ptr + own.partner * p.v.head + own.row * p.v.token, (int)p.v.token,
                                       (int)own.rows, (int)p.heads.value);
        if (STAGES == 2 && control.steps[0].rows) load_queries(p, sqs, control.steps[0]);
        copy_commit();

        constexpr int KN = WHAT & DK ? D / 8 : 1, VN = WHAT & DV_ ? DV / 8 : 1;
        float dk[MT][KN][4], dv[MT][VN][4];
        clear(dk);
        clear(dv);

        for (u32 at = 0; control.steps[at].rows; at = Control::after(at)) {
            volatile const Step& step = control.steps[at];
            const u32 stage = STAGES == 2 ? at % 2 * STAGE : 0;
            if (STAGES == 2) {
                volatile const Step& next = control.steps[Control::after(at)];
                if (next.rows) load_queries(p, sqs + (STAGE - stage), next);
            } else {
                load_queries(p, sqs, step);
            }
            copy_commit();
            copy_wait<STAGES - 1>();
            __syncthreads();
            if (threadIdx.x < 32) control.template prepare<BM>(at, side);
            __syncwarp();

            const u32 sq = sqs + stage, sdo = sq + BM * D * 2, stats = sqs + stage + STAGE_TILES;
            const bool has_large = any_large<BM>(stats);
#pragma unroll 1
            for (int sub = 0; sub < BM; sub += SUB) {
                u32 kept[2 * MT];
                if constexpr (DROPPED) {
                    const Pair pair = p.partners[step.pair];
                    draw_queries<MT, NT>(kept, p.dropout, p.heads.q_offset + step.head, p.keys[own.run],
                                         p.dropout.k_tokens[own.run], own.first + warp_row(), p.queries[pair.run],
                                         p.dropout.q_tokens[pair.run], step.first + sub);
                }
                float s[MT][NT][4], g[MT][NT][4];
                clear(s);
                clear(g);
                multiply_rows<T, MT, NT, D>(s, walk_a<D>(sk, warp_row()), walk_b<D>(sq + sub * D * 2));
                if (WHAT & DK) {
                    multiply_rows<T, MT, NT, DV>(g, walk_a<DV>(sv, warp_row()), walk_b<DV>(sdo + sub * DV * 2));
                    if constexpr (DROPPED) drop(g, kept, p.dropout.factor);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const float2 delta =
                            load_shared_pair(stats + BM * 4 + (sub + n * 8 + 2 * (fresh_thread() & 3)) * 4);
#pragma unroll
                        for (int m = 0; m < MT; ++m) {
                            g[m][n][0] -= delta.x;
                            g[m][n][1] -= delta.y;
                            g[m][n][2] -= delta.x;
                            g[m][n][3] -= delta.y;
                        }
                    }
                }
                const Pair pair = p.partners[step.pair];
                shape_gradients(s, g, p.score, p.alibi_slopes, step.head, p.keys[own.run],
                                own.first + warp_row() + (fresh_thread() & 31) / 4, p.queries[pair.run], p.bands[pair.band],
                                step.first + sub, step.full);
                const auto base_of = [](float base) { return base; };
                if (has_large)
                    columns_gradients<true>(s, g, p.score.exp_scale, stats + sub * 4, base_of);
                else
                    columns_gradients<false>(s, g, p.score.exp_scale, stats + sub * 4, base_of);
                if constexpr (DROPPED && (WHAT & DV_) != 0) drop(s, kept, 1.0f);
                if constexpr ((WHAT & DV_) != 0)
                    multiply_columns<T, MT, NT, DV>(dv, s, walk_b_transposed<DV>(sdo + sub * DV * 2), 0);
                if constexpr ((WHAT & DK) != 0)
                    multiply_columns<T, MT, NT, D>(dk, g, walk_b_transposed<D>(sq + sub * D * 2), 0);
            }
            __syncthreads();
        }
        copy_wait<0>();

#pragma unroll
        for (int r = 0; r < 2 * MT; ++r) {
            const u32 row = warp_row() + r * 8 + (fresh_thread() & 31) / 4;
            if (row < own.rows) {
                if constexpr ((WHAT & DK) != 0)
                    write_row(p.dk.ptr + own.head * p.dk.head + (own.row + row) * p.dk.token, dk[r / 2], r & 1,
                              p.score.scale, p.accumulate, (int)p.heads.dim);
                if constexpr ((WHAT & DV_) != 0) {
                    float factor = 1.0f;
                    if constexpr (DROPPED) factor = p.dropout.factor;
                    write_row(p.dv.ptr + own.head * p.dv.head + (own.row + row) * p.dv.token, dv[r / 2], r & 1, factor,
                              p.accumulate, (int)p.heads.value);
                }
            }
        }
        __syncthreads();
    }

    static __device__ __forceinline__ void run(const Params& p) {
        __shared__ Control control;
        extern __shared__ __align__(128) char shared[];
        const u32 sk = shared_address(shared);
        for (u32 item = blockIdx.x; item < p.heads.items; item += gridDim.x) tile(p, control, sk, item);
    }
};
