// SPDX-License-Identifier: MIT OR Apache-2.0
// Backward attention on sm_90a: what the multiplying warps do with the tiles that `hopper_backward_load.cuh` fills.
//
// The sums and their order are those of `fused.cuh`: a block owns a tile of keys and walks over the q rows that read it. Two
// warpgroups own 64 keys each over all columns of dk and dv. Scores are made transposed, keys by q rows, so that p^T and
// ds^T, rounded, are left matrices in the registers that they were made in:
//
//   s^T = k q^T, dp^T = v do^T, dv += p^T do, dk += ds^T q          each warpgroup for its keys
//   dq = ds k                                                       each warpgroup half of the columns, over all keys
//
// Only ds passes through shared memory, for dq alone. dq is added to global memory from registers, in the order of the dq
// semaphore, and stored where nothing is yet. Staged through shared memory for a bulk addition, it would make shared memory
// what bounds the kernel (2,944 of its cycles beside 2,560 of the products in a step of 64 q rows at head dim 128; so it takes 2,432).
//
// In a step a warpgroup issues s^T and dp^T, turns scores into probabilities while dp^T runs, makes ds while dv runs, and
// adds dq while dk runs. ds has two buffers: one barrier a step says that both halves of ds are there, and that both
// warpgroups are done with the buffer of the step before.
#pragma once
#include "hopper_backward_load.cuh"

// The number of `bar.sync` of both multiplying warpgroups.
enum : u32 { BARRIER_BOTH = 1 };

// Adds two neighbouring f32 to global memory. The semaphore orders all that are added to one address.
__device__ __forceinline__ void add_pair(char* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// Four 8 x 8 matrices, each with its rows and columns exchanged. Lane 8 i + r says where row r of matrix i goes.
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

template <class T, class Shape>
struct HopperBackward {
    using Block = HopperBackwardBlock<Shape>;
    using Load = HopperBackwardLoad<Shape>;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using Item = typename Block::Item;
    using Stage = typename Block::Stage;
    static constexpr int D = Block::D, DV = Block::DV, BM = Block::BM, BN = Block::BN, THREADS = Block::THREADS;
    static constexpr int NT = BM / 8;
    static constexpr u32 Q_PANEL = Block::Q_PANEL, K_PANEL = Block::K_PANEL;
    // Columns of dq that a warpgroup makes: a panel of k, or half of one, which begins 64 bytes into each of its rows. There
    // the swizzle, by bits of the address, is that of the whole panel.
    static constexpr int PART = D / 2;
    static_assert((PART == 64 || PART == 32) && BN == 128 && BM == 64, "no warpgroup's columns reach over two panels");

    using Scores = float[1][NT][4];
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
        for (int i = 0; i < BM / 16; ++i) product_add(T{}, c, a[i], b + i * (16 * 128 >> 4));
    }

    // Rounds to a left matrix.
    static __device__ __forceinline__ void round(Weights& weights, const Scores& s) {
#pragma unroll
        for (int i = 0; i < BM / 16; ++i) {
            weights[i][0] = pack(T{}, s[0][2 * i][0], s[0][2 * i][1]);
            weights[i][1] = pack(T{}, s[0][2 * i][2], s[0][2 * i][3]);
            weights[i][2] = pack(T{}, s[0][2 * i + 1][0], s[0][2 * i + 1][1]);
            weights[i][3] = pack(T{}, s[0][2 * i + 1][2], s[0][2 * i + 1][3]);
        }
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
        const Window window = {p.score.right, p.score.left};
        const u32 row = group * 64 + warp_row() + lane() / 4;
        const Run& key = p.keys[item.own.run];
        const Run& query = p.queries[step.run];
        general_gradients(s, g, p.score, p.alibi_slopes, step.head, key, item.own.first + row, query, step.first);
        // Rows of the own tile past its end must not make ds either: lse of a q row may be anything.
        if (!step.full)
            mask_gradients(s, g, window, key, item.own.first + row, (int)item.own.rows - (int)row, query, step.first);
    }

    // Adds the warpgroup's columns of dq, or stores them where nothing is yet. WHOLE: all rows and columns are there.
    template <bool WHOLE>
    static __device__ __forceinline__ void add_queries(const BackwardParams& p, volatile const DqStep& step, bool add, u32 group,
                                                       const float (&dq)[1][PART / 8][4]) {
        const int row = (int)(warp_row() + lane() / 4), from = (int)(group * PART + 2 * (lane() & 3));
        char* const to = p.dq.ptr + step.head * p.dq.head + (step.row + row) * p.dq.token + from * 4;
        const int rows = (int)step.rows - row, columns = (int)p.heads.dim - from;
        const float scale = p.score.scale;
        // One branch, so that all additions follow one another.
        if (add) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < PART / 8; ++n)
                    if (WHOLE || (h * 8 < rows && n * 8 < columns))
                        add_pair(to + h * 8 * p.dq.token + n * 32, dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < PART / 8; ++n)
                    if (WHOLE || (h * 8 < rows && n * 8 < columns))
                        *(float2*)(to + h * 8 * p.dq.token + n * 32) =
                            make_float2(dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);
        }
    }

    // All q rows that read an item's keys.
    static __device__ __forceinline__ void multiply(const BackwardParams& p, const Shared& at, volatile Control& control,
                                                    volatile const Item& item, u32 group, PipelineState& position,
                                                    float (&dk)[1][D / 8][4], float (&dv)[1][DV / 8][4]) {
        const u64 k = matrix_at(at.k + group * 64 * 128, K_PANEL), v = matrix_at(at.v + group * 64 * 128, K_PANEL);
        const u64 k_columns = matrix_at(at.k + group * (PART == 64 ? K_PANEL : PART * 2), K_PANEL);
        const u64 first_q = matrix_at(at.q(0), Q_PANEL), first_ds = matrix_at(at.ds(0), Q_PANEL);
        // The lane's two q rows of each product of eight, in bytes of f32.
        const u32 pair = (lane() & 3) * 8;
        // Where it has the row of ds that it names to `store_matrices_transposed`: of its warpgroup's panel, its warp's two chunks.
        const u32 chunk = warp_row() / 8 + (lane() >> 3 & 1);
        const u32 own_ds = group * Q_PANEL + ((lane() >> 4) * 8 + (lane() & 7)) * 128 + ((chunk ^ (lane() & 7)) << 4);
        bool last;
        do {
            const u32 stage = position.stage(), parity = position.parity();
            const u64 q = first_q + stage * (Block::STAGE_BYTES >> 4), d_o = q + (Block::Q_BYTES >> 4);
            Scores s, g;
            barrier_wait(at.q_full(stage), parity);
            volatile const Stage& here = control.stages[stage];
            product_fence();
            multiply_rows<D, K_PANEL, Q_PANEL>(s, k, q);
            product_commit();
            barrier_wait(at.d_o_full(stage), parity);
            product_fence();
            multiply_rows<DV, K_PANEL, Q_PANEL>(g, v, d_o);
            product_commit();
            const u32 stats = at.stats(stage);
            u32 delta = stats + BM * 4;
            const u32 flags = here.flags;
            if (flags & Block::PLAIN) {
                product_wait<1>();
            } else {
                product_wait<0>();
                hold(s);
                hold(g);
                shape(s, g, p, item, here.step, stats, group);
                delta = at.zeros();
            }
            hold(s);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float2 base = load_shared_pair(stats + pair + n * 32);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    s[0][n][i] = exp2_fast(s[0][n][i] * p.score.exp_scale - (i & 1 ? base.y : base.x));
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
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float2 less = load_shared_pair(delta + pair + n * 32);
#pragma unroll
                for (int i = 0; i < 4; ++i) g[0][n][i] = s[0][n][i] * (g[0][n][i] - (i & 1 ? less.y : less.x));
            }
            Weights slopes;
            round(slopes, g);
#pragma unroll
            for (int i = 0; i < BM / 16; ++i)
                store_matrices_transposed(at.ds(stage) + own_ds + i * 16 * 128, slopes[i]);
            fence_proxy();
            named_wait<2 * 128>(BARRIER_BOTH);
            float dq[1][PART / 8][4];
            hold(dk);
            hold(slopes);
            product_fence();
            multiply_keys(dq, first_ds + stage * (Block::DS_BYTES >> 4), k_columns);
            product_commit();
            multiply_weights(dk, slopes, q);
            product_commit();
            product_wait<2>();
            hold(dv);
            hold(weights);
            release(at.d_o_empty(stage));
            product_wait<1>();
            hold(dq);
            barrier_wait(at.turn(stage), parity);
            if (flags & Block::WHOLE)
                add_queries<true>(p, here.step, flags & Block::ADD, group, dq);
            else
                add_queries<false>(p, here.step, flags & Block::ADD, group, dq);
            release(at.added(stage));
            last = flags & Block::LAST;
            product_wait<0>();
            hold(dk);
            hold(slopes);
            release(at.q_empty(stage));
            ++position.count;
        } while (!last);
    }

    // dq = ds k: ds has q rows by keys, in a panel for each warpgroup's keys; of k, the keys are the inner dimension.
    static __device__ __forceinline__ void multiply_keys(float (&dq)[1][PART / 8][4], u64 ds, u64 k) {
#pragma unroll
        for (int i = 0; i < BN / 16; ++i) {
            const u64 x = ds + (i / 4) * (Q_PANEL >> 4) + (i % 4) * 2, y = k + i * (16 * 128 >> 4);
            if (i == 0)
                product_new_columns(T{}, dq, x, y);
            else
                product_add_columns(T{}, dq, x, y);
        }
    }

    // dk or dv of the warp's keys: added to what is there, or written.
    template <int N>
    static __device__ __forceinline__ void write_keys(const Tensor& to, volatile const Item& item, u32 group,
                                                      const float (&c)[1][N][4], float scale, int dim, bool add) {
        const int row = (int)(group * 64 + warp_row() + lane() / 4), rows = (int)item.own.rows - row;
        char* const at = to.ptr + item.own.head * to.head + (item.own.row + row) * to.token;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (h * 8 < rows) write_row(at + h * 8 * to.token, c[0], h, scale, add, dim);
    }

    static __device__ __forceinline__ void consume(const FusedParams& p, const Shared& at, volatile Control& control) {
        // Which of the two: read from one lane, so that the compiler can see that it is the same in all.
        const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
        PipelineState position;
        for (u32 n = 0;; ++n) {
            const u32 slot = n & 1;
            barrier_wait(at.kv_full(), slot);
            volatile const Item& item = control.items[slot];
            if (item.is_end) break;
            if (item.zero) {
                clear_queries(p.call, item, (fresh_thread() >> 5) - 4, Block::WARPS);
                release(at.kv_empty());
                continue;
            }
            float dk[1][D / 8][4], dv[1][DV / 8][4];
            clear(dk);
            clear(dv);
            if (item.meets) multiply(p.call, at, control, item, group, position, dk, dv);
            release(at.kv_empty());
            // Parts of a group add to one dk and dv, in order; the word is how many have.
            u32* const semaphore = p.key_semaphore + item.key_semaphore;
            const u32 part = item.part;
            if (part) {
                if (threadIdx.x == 128) wait_semaphore(semaphore, part, poll_semaphore(semaphore));
                named_wait<2 * 128>(BARRIER_BOTH);
            }
            const bool add = p.call.accumulate || part;
            write_keys(p.call.dk, item, group, dk, p.call.score.scale, (int)p.call.heads.dim, add);
            write_keys(p.call.dv, item, group, dv, 1.0f, (int)p.call.heads.value, add);
            if (part + 1 < p.parts) {
                named_wait<2 * 128>(BARRIER_BOTH);
                if (threadIdx.x == 128) store_semaphore(semaphore, part + 1);
            }
        }
    }

    static __device__ __forceinline__ void run(const HopperBackwardMaps& maps, const HopperBackwardParams& p) {
        extern __shared__ __align__(1024) char shared[];
        const Shared at(shared_address(shared));
        volatile Control& control = *(Control*)(shared + (at.control - at.k));
        if (threadIdx.x == 0) {
            prefetch_map(maps.q);
            prefetch_map(maps.k);
            prefetch_map(maps.v);
            prefetch_map(maps.d_o);
            Block::init_barriers(at);
        }
        if (threadIdx.x < BM) control.zeros[threadIdx.x] = 0.0f;
        __syncthreads();
        if (threadIdx.x < 128) {
            registers_down<40>();
            const u32 warp = threadIdx.x >> 5;
            if (warp == 0) Load::produce(maps, p, at, control);
            if (warp == 1) Load::wait_turns(p.call, at, control);
            if (warp == 2) Load::pass_turns(p.call, at, control);
        } else {
            registers_up<232>();
            consume(p.call, at, control);
        }
    }
};
