// SPDX-License-Identifier: MIT OR Apache-2.0
// Dropout by token: which pairs of a warp's accumulators are kept. The mask is that of `src/call/dropout.rs`, bit for bit.
//
// Philox 4x32-10 of (q token, k token / 4, q head of the problem, 0) gives the words of four neighbouring k tokens, so four keys
// of one q row are a lane's: in 16 by 8 accumulators each lane has one such set, and then fetches the bits of its own pairs from
// the lanes that have them. A lane hashes once for its four keys where they share k token / 4; else (a tile whose first token
// is no multiple of four, or stripes of fewer tokens) once for each that they have.
//
// kept[r] holds the thread's row r of accumulators: bit 4 n + e is that of column 8 n + 2 t + e, so NT is at most 8.
#pragma once
#include "shared/mma.cuh"
#include "shared/ranges.cuh"
#include "shared/tile.cuh"

__device__ __forceinline__ void philox(u32 (&x)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p = (u64)x[0] * 0xD2511F53u, q = (u64)x[2] * 0xCD9E8D57u;
        x[0] = (u32)(q >> 32) ^ x[1] ^ k0;
        x[2] = (u32)(p >> 32) ^ x[3] ^ k1;
        x[1] = (u32)q;
        x[3] = (u32)p;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// The bits of four keys, rows `row..row + 4` of their run, with one q token.
__device__ __forceinline__ u32 draw_four(const Dropout& d, u32 q_token, u32 head, const Run& keys, u32 k_token, u32 row) {
    u32 words[4], bits = 0, hashed = ~0u;
#pragma unroll 1
    for (u32 i = 0; i < 4; ++i) {
        const u32 token = k_token + run_offset(keys, row + i);
        if (token >> 2 != hashed) {
            hashed = token >> 2;
            words[0] = q_token;
            words[1] = hashed;
            words[2] = head;
            words[3] = 0;
            philox(words, d.key[0], d.key[1]);
        }
        const u32 low = token & 1 ? words[1] : words[0], high = token & 1 ? words[3] : words[2];
        bits |= (u32)((token & 2 ? high : low) > d.last_dropped) << i;
    }
    return bits;
}

// Own rows are q rows, the warp's from `own_first` of their run on; columns are keys, from row `first` of theirs on.
template <int MT, int NT>
__device__ __forceinline__ void draw_keys(u32 (&kept)[2 * MT], const Dropout& d, u32 head, const Run& run, u32 q_token,
                                          u32 own_first, const Run& keys, u32 k_token, u32 first) {
    static_assert(NT <= 8, "four bits for each tile of columns");
    const u32 lane = fresh_thread() & 31, t = lane & 3;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const u32 token = q_token + run_offset(run, own_first + m * 16 + lane / 4 + (t >> 1) * 8);
        u32 bits = 0;
#pragma unroll 1
        for (u32 n = 0; n < NT; ++n) bits |= draw_four(d, token, head, keys, k_token, first + n * 8 + (t & 1) * 4) << (n * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) kept[2 * m + h] = __shfl_sync(~0u, bits, 2 * h + (t >> 1), 4) >> ((t & 1) * 2);
    }
}

// Own rows are keys, the warp's from `own_first` of their run on; columns are q rows, from row `first` of theirs on.
template <int MT, int NT>
__device__ __forceinline__ void draw_queries(u32 (&kept)[2 * MT], const Dropout& d, u32 head, const Run& keys, u32 k_token,
                                             u32 own_first, const Run& run, u32 q_token, u32 first) {
    static_assert(NT <= 8, "four bits for each tile of columns");
    const u32 lane = fresh_thread() & 31, g = lane / 4, t = lane & 3;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        u32 bits = 0;
#pragma unroll 1
        for (u32 n = 0; n < NT; ++n) {
            const u32 token = q_token + run_offset(run, first + n * 8 + (lane & 7));
            bits |= draw_four(d, token, head, keys, k_token, own_first + m * 16 + lane / 8 * 4) << (n * 4);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 from = (g / 4 + 2 * h) * 8 + 2 * t;
            const u32 even = __shfl_sync(~0u, bits, from) >> (g & 3), odd = __shfl_sync(~0u, bits, from + 1) >> (g & 3);
            kept[2 * m + h] = (even & 0x11111111u) | (odd & 0x11111111u) << 1;
        }
    }
}

// Multiplies by `factor`; what is dropped becomes 0.
template <int MT, int NT>
__device__ __forceinline__ void drop(float (&x)[MT][NT][4], const u32 (&kept)[2 * MT], float factor) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[m][n][i] = kept[2 * m + i / 2] >> (n * 4 + i % 2) & 1 ? x[m][n][i] * factor : 0.0f;
}
