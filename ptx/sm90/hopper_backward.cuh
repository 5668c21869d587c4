// SPDX-License-Identifier: MIT OR Apache-2.0
// Backward attention on sm_90a: the items of a block, and what becomes of dk and dv.
//
// The sums and their order are those of `fused.cuh`: a block owns a tile of keys and walks over the q rows that read it. Two
// warpgroups own 64 keys each over all columns of dk and dv (`hopper_backward_steps.cuh`), or one of the two over the same 64 keys
// (`hopper_backward_pair.cuh`); a third one loads.
#pragma once
#include "hopper_backward_pair.cuh"

template <class T, class Shape>
struct HopperBackward {
    using Block = HopperBackwardBlock<Shape>;
    using Load = HopperBackwardLoad<Shape>;
    using Steps = HopperBackwardSteps<T, Shape>;
    using Pair = HopperBackwardPair<T, Shape>;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    using Item = typename Block::Item;
    static constexpr int D = Block::D, DV = Block::DV, BM = Block::BM, THREADS = Block::THREADS;

    // dk or dv of the warp's keys: added to what is there, or written.
    template <int N>
    static __device__ __forceinline__ void write_keys(const Tensor& to, volatile const Item& item, u32 group,
                                                      const float (&c)[1][N][4], float scale, int dim, bool add) {
        const int row = (int)(group * 64 + Steps::warp_row() + Steps::lane() / 4), rows = (int)item.own.rows - row;
        char* const at = to.ptr + item.own.head * to.head + (item.own.row + row) * to.token;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (h * 8 < rows) write_row(at + h * 8 * to.token, c[0], h, scale, add, dim);
    }

    // Parts of a group add to one dk and dv, in order; the word of their semaphore is how many have. Whether they are to be added to.
    static __device__ __forceinline__ bool begin_keys(const FusedParams& p, volatile const Item& item) {
        u32* const semaphore = p.key_semaphore + item.key_semaphore;
        const u32 part = item.part;
        if (part) {
            if (threadIdx.x == 128) wait_semaphore(semaphore, part, poll_semaphore(semaphore));
            named_wait<2 * 128>(BARRIER_BOTH);
        }
        return p.call.accumulate || part;
    }

    static __device__ __forceinline__ void end_keys(const FusedParams& p, volatile const Item& item) {
        if (item.part + 1 >= p.parts) return;
        named_wait<2 * 128>(BARRIER_BOTH);
        if (threadIdx.x == 128) store_semaphore(p.key_semaphore + item.key_semaphore, item.part + 1);
    }

    static __device__ __forceinline__ void consume(const FusedParams& p, const Shared& at, volatile Control& control) {
        // Which of the two: read from one lane, so that the compiler can see that it is the same in all.
        const u32 group = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;
        PipelineState position;
        for (u32 n = 0;; ++n) {
            barrier_wait(at.kv_full(), n & 1);
            volatile const Item& item = control.items[n % Block::ITEMS];
            if (item.is_end) break;
            if (item.zero) {
                clear_queries(p.call, item, (fresh_thread() >> 5) - 4, Block::WARPS);
                Steps::release(at.kv_empty());
                continue;
            }
            if constexpr (Shape::PAIR) {
                typename Pair::Sums sums;
                clear(sums);
                if (item.meets) Pair::multiply(p.call, at, control, item, group, position, sums);
                Steps::release(at.kv_empty());
                const bool add = begin_keys(p, item);
                const Tensor to = group ? p.call.dk : p.call.dv;
                write_keys(to, item, 0, sums, group ? p.call.score.scale : 1.0f, (int)(group ? p.call.heads.dim : p.call.heads.value), add);
            } else {
                typename Steps::KeySums dk;
                typename Steps::ValueSums dv;
                clear(dk);
                clear(dv);
                if (item.meets) Steps::multiply(p.call, at, control, item, group, position, dk, dv);
                Steps::release(at.kv_empty());
                const bool add = begin_keys(p, item);
                write_keys(p.call.dk, item, group, dk, p.call.score.scale, (int)p.call.heads.dim, add);
                write_keys(p.call.dv, item, group, dv, 1.0f, (int)p.call.heads.value, add);
            }
            end_keys(p, item);
        }
    }

    static __device__ __forceinline__ void run(const HopperBackwardMaps& maps, const HopperBackwardParams& p) {
        SHARED_MEMORY;
        const Shared at(shared_address(shared));
        volatile Control& control = *(Control*)(shared + (at.control - at.k));
        if (threadIdx.x == 0) {
            prefetch_map(maps.q);
            prefetch_map(maps.k);
            prefetch_map(maps.v);
            prefetch_map(maps.d_o);
            prefetch_map(maps.shared_q);
            prefetch_map(maps.shared_d_o);
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
