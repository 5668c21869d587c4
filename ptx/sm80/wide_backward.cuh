// SPDX-License-Identifier: MIT OR Apache-2.0
// Backward attention for head dims above 256, in two kernels, as in `backward.cuh`: one for dq, one for dk and dv.
//
// Both are one loop. The own tile has 32 rows of two tensors (q and do, or k and v). Two passes over the partner's chunks make both
// squares of 32 by 64, q k and do v; p and ds go through shared memory; and one pass more (dq += ds k) or two (dv += p do, dk += ds q)
// sum up what the block owns, 72 or 136 registers of a thread. So chunks are copied once more than in kernels whose partner's
// tile stays in shared memory: 26 of 8 KB for 32 q rows and 64 keys, 34 for 32 keys and 64 q rows.
#pragma once
#include "backward.cuh"
#include "wide.cuh"

template <class T, class Shape>
struct WideTile {
    static constexpr int BM = Shape::BM, THREADS = Shape::THREADS;
    static constexpr u32 OWN = Chunk<BM>::BYTES;
    static constexpr int KN = Shape::D / CHUNK, VN = Shape::DV / CHUNK;
    using Control = ::Control<Shape::BATCH>;
    static_assert(BM == 32 && Shape::BN == CHUNK && THREADS == 64 * PARTS, "two by four warps of 16 rows");

    static __device__ __forceinline__ int row() { return warp_half() * 16 + ((fresh_thread() & 31) >> 2); }
    static __device__ __forceinline__ int column() { return warp_part() * 16 + 2 * (fresh_thread() & 3); }

    // Both squares, of the own tiles and of the chunks of two passes. `begin` runs behind the first barrier.
    template <class Chunks, class Begin>
    static __device__ __forceinline__ void squares(float (&s)[1][2][4], float (&g)[1][2][4], Chunks& chunks, volatile Control& control,
                                                   const Tensor& a, const Tensor& b, u32 own_a, u32 own_b, const Heads& heads,
                                                   const Begin& begin) {
        clear(s);
        clear(g);
#pragma unroll 1
        for (int c = 0; c < chunks_of(heads.dim); ++c) {
            const u32 chunk = chunks.take(control, a, b, heads.dim, heads.value);
            if (c == 0) begin();
            multiply_chunk<T, 1>(s, own_a + c * OWN, chunk);
        }
#pragma unroll 1
        for (int c = 0; c < chunks_of(heads.value); ++c)
            multiply_chunk<T, 1>(g, own_b + c * OWN, chunks.take(control, a, b, heads.dim, heads.value));
    }

    // From q k and do v to p and ds, but for the exponent.
    static __device__ __forceinline__ void shape(float (&s)[1][2][4], float (&g)[1][2][4], const BackwardParams& p, u32 head,
                                                 const Run* owns, const Run* partners, volatile const Own& own, volatile const Step& step) {
        const Pair pair = p.partners[step.pair];
        const Run &run = owns[own.run], &partner = partners[pair.run];
        const Band& band = p.bands[pair.band];
        const u32 from = own.first + row(), first = step.first + warp_part() * 16;
        general_gradients(s, g, p.score, p.alibi_slopes, head, run, from, partner, band, first);
        if (!step.full) mask_gradients(s, g, band, run, from, BM, partner, first);
    }

    // sum += square times the chunks of one pass, all of whose columns are `width`. The first barrier in there also stands between
    // the square in shared memory and its reading.
    template <int N, class Chunks>
    static __device__ __forceinline__ void add(float (&sum)[N][1][2][4], u32 square, Chunks& chunks, volatile Control& control,
                                               const Tensor& a, const Tensor& b, const Heads& heads, u32 width) {
        u32 weights[CHUNK / 16][1][4];
#pragma unroll 1
        for (int c = 0; c < chunks_of(width); ++c) {
            const Walk<CHUNK> chunk = walk_columns(chunks.take(control, a, b, heads.dim, heads.value));
            if (c == 0) load_fragments<1, CHUNK>(weights, walk_a<CHUNK>(square, warp_half() * 16));
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (c == i) multiply_square<T, 1>(sum[i], weights, chunk);
        }
    }

    // Adds to or overwrites what is there; `staging` is where the tiles were.
    template <int N>
    static __device__ __forceinline__ void write(const Tensor& to, u32 staging, u32 head, i64 first, u32 rows, const float (&sum)[N][1][2][4],
                                                 float scale, bool adds, u32 width) {
        const float scales[2] = {scale, scale};
        Staged<N>::template store<0>(staging, sum, scales);
        __syncthreads();
        const int units = (int)width / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < (int)rows * units; i += THREADS) {
            const int row = i / units, unit = i - row * units;
            float4* at = (float4*)(to.ptr + head * to.head + (first + row) * to.token) + unit;
            float4 x = Staged<N>::load(staging, row, unit);
            if (adds) {
                const float4 old = *at;
                x = make_float4(x.x + old.x, x.y + old.y, x.z + old.z, x.w + old.w);
            }
            *at = x;
        }
        __syncthreads();
    }
};

// dq.
template <class T, class Shape, class Params = BackwardParams, bool DROPPED = false>
struct WideQueries : WideTile<T, Shape> {
    using Tile = WideTile<T, Shape>;
    using Control = typename Tile::Control;
    using Chunks = Feed<Shape::STAGES, 3, 2, Shape::THREADS, Control>;
    static constexpr int BM = Shape::BM, THREADS = Shape::THREADS;

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, u32 sq, u32 item) {
        const u32 sdo = sq + Tile::KN * Tile::OWN, ring = sdo + Tile::VN * Tile::OWN, sds = ring + Shape::STAGES * Chunk<CHUNK>::BYTES;
        const u32 stats = sds + 2 * Tile::OWN;
        const Partners side = {p.keys, p.partners, p.bands, &p.k, &p.v};
        if (threadIdx.x < 32) control.template begin_queries<BM, CHUNK>(p, item, side);
        __syncthreads();
        volatile const Own& own = control.own;
        load_own<BM, THREADS>(sq, p.q.ptr + own.head * p.q.head + own.row * p.q.token, p.q.token, own.rows, p.heads.dim);
        load_own<BM, THREADS>(sdo, p.d_o.ptr + own.head * p.d_o.head + own.row * p.d_o.token, p.d_o.token, own.rows, p.heads.value);
        load_stats<BM>(p, stats, own.head, own.row, own.rows);
        Chunks chunks(ring);
#pragma unroll
        for (int i = 0; i < Shape::STAGES - 1; ++i) chunks.next(control, p.k, p.v, p.heads.dim, p.heads.value);

        float dq[Tile::KN][1][2][4];
#pragma unroll
        for (int c = 0; c < Tile::KN; ++c) clear(dq[c]);
        for (u32 at = 0; control.steps[at].rows; at = Control::after(at)) {
            volatile const Step& step = control.steps[at];
            float s[1][2][4], g[1][2][4];
            Tile::squares(s, g, chunks, control, p.k, p.v, sq, sdo, p.heads, [&] {
                if (threadIdx.x < 32) control.template prepare<CHUNK>(at, side);
                __syncwarp();
            });
            if constexpr (DROPPED) {
                const Pair pair = p.partners[step.pair];
                u32 kept[2];
                draw_keys<1, 2>(kept, p.dropout, p.heads.q_offset + own.head, p.queries[own.run], p.dropout.q_tokens[own.run],
                                own.first + warp_half() * 16, p.keys[pair.run], p.dropout.k_tokens[pair.run],
                                step.first + warp_part() * 16);
                drop(g, kept, p.dropout.factor);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float delta = load_shared(stats + (BM + Tile::row() + r * 8) * 4);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    g[0][n][r * 2] -= delta;
                    g[0][n][r * 2 + 1] -= delta;
                }
            }
            Tile::shape(s, g, p, own.head, p.queries, p.keys, own, step);
            const bool large = any_large<16>(stats + warp_half() * 16 * 4);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = load_shared(stats + (Tile::row() + r * 8) * 4);
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = r * 2; i < r * 2 + 2; ++i)
                        s[0][n][i] = (large ? probability<true>(s[0][n][i], p.score.exp_scale, base)
                                            : probability<false>(s[0][n][i], p.score.exp_scale, base)) * g[0][n][i];
            }
            store_square<T, 1>(sds, s);
            Tile::add(dq, sds, chunks, control, p.k, p.v, p.heads, p.heads.dim);
        }
        copy_wait<0>();
        __syncthreads();
        const u32 mode = p.queries[own.run].mode;
        Tile::write(p.dq, sq, own.head, own.row, own.rows, dq, p.score.scale, mode == MODE_MERGE || mode == MODE_LAST, p.heads.dim);
    }
};

// dk and dv.
template <class T, class Shape, class Params = BackwardParams, bool DROPPED = false>
struct WideKeys : WideTile<T, Shape> {
    using Tile = WideTile<T, Shape>;
    using Control = typename Tile::Control;
    using Chunks = Feed<Shape::STAGES, 4, 2 | 4, Shape::THREADS, Control>;
    static constexpr int BM = Shape::BM, THREADS = Shape::THREADS;

    static __device__ __forceinline__ void tile(const Params& p, volatile Control& control, u32 sk, u32 item) {
        const u32 sv = sk + Tile::KN * Tile::OWN, ring = sv + Tile::VN * Tile::OWN, sds = ring + Shape::STAGES * Chunk<CHUNK>::BYTES;
        const u32 sp = sds + Tile::OWN, stats = sp + Tile::OWN;
        const Partners side = {p.queries, p.partners, p.bands, &p.q, &p.d_o};
        if (threadIdx.x < 32) begin_keys<BM, CHUNK>(p, control, item, side);
        __syncthreads();
        volatile const Own& own = control.own;
        load_own<BM, THREADS>(sk, p.k.ptr + own.partner * p.k.head + own.row * p.k.token, p.k.token, own.rows, p.heads.dim);
        load_own<BM, THREADS>(sv, p.v.ptr + own.partner * p.v.head + own.row * p.v.token, p.v.token, own.rows, p.heads.value);
        Chunks chunks(ring);
#pragma unroll
        for (int i = 0; i < Shape::STAGES - 1; ++i) chunks.next(control, p.q, p.d_o, p.heads.dim, p.heads.value);

        float dk[Tile::KN][1][2][4], dv[Tile::VN][1][2][4];
#pragma unroll
        for (int c = 0; c < Tile::KN; ++c) clear(dk[c]);
#pragma unroll
        for (int c = 0; c < Tile::VN; ++c) clear(dv[c]);
        for (u32 at = 0; control.steps[at].rows; at = Control::after(at)) {
            volatile const Step& step = control.steps[at];
            float s[1][2][4], g[1][2][4];
            Tile::squares(s, g, chunks, control, p.q, p.d_o, sk, sv, p.heads, [&] {
                // Read behind the barriers of the chunks that follow.
                load_stats<CHUNK>(p, stats, step.head, step.row, step.rows);
                if (threadIdx.x < 32) control.template prepare<CHUNK>(at, side);
                __syncwarp();
            });
            u32 kept[2];
            if constexpr (DROPPED) {
                const Pair pair = p.partners[step.pair];
                draw_queries<1, 2>(kept, p.dropout, p.heads.q_offset + step.head, p.keys[own.run], p.dropout.k_tokens[own.run],
                                   own.first + warp_half() * 16, p.queries[pair.run], p.dropout.q_tokens[pair.run],
                                   step.first + warp_part() * 16);
                drop(g, kept, p.dropout.factor);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 delta = load_shared_pair(stats + (CHUNK + Tile::column() + n * 8) * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) g[0][n][i] -= i & 1 ? delta.y : delta.x;
            }
            Tile::shape(s, g, p, step.head, p.keys, p.queries, own, step);
            const u32 bases = stats + warp_part() * 16 * 4;
            const auto base_of = [](float base) { return base; };
            if (any_large<16>(bases))
                columns_gradients<true>(s, g, p.score.exp_scale, bases, base_of);
            else
                columns_gradients<false>(s, g, p.score.exp_scale, bases, base_of);
            if constexpr (DROPPED) drop(s, kept, 1.0f);
            store_square<T, 1>(sp, s);
            store_square<T, 1>(sds, g);
            Tile::add(dv, sp, chunks, control, p.q, p.d_o, p.heads, p.heads.value);
            Tile::add(dk, sds, chunks, control, p.q, p.d_o, p.heads, p.heads.dim);
        }
        copy_wait<0>();
        __syncthreads();
        Tile::write(p.dk, sk, own.head, own.row, own.rows, dk, p.score.scale, p.accumulate, p.heads.dim);
        float factor = 1.0f;
        if constexpr (DROPPED) factor = p.dropout.factor;
        Tile::write(p.dv, sk, own.head, own.row, own.rows, dv, factor, p.accumulate, p.heads.value);
    }
};

template <class Kernel, class Control, class Params>
__device__ __forceinline__ void run_wide(const Params& p) {
    __shared__ Control control;
    extern __shared__ __align__(128) char shared[];
    const u32 own = shared_address(shared);
    for (u32 item = blockIdx.x; item < p.heads.items; item += gridDim.x) Kernel::tile(p, control, own, item);
}
