// SPDX-License-Identifier: MIT OR Apache-2.0
// From q·k to the exponent: softcap, ALiBi, mask; and the exponent of scores of any size.
//
// A row's exponents are `fmaf(x, scale, -base)`, whose product has all its digits, while the base, a row's largest such product or
// its lse, is rounded. What the base lost is a factor of all of a row's probabilities. It is at most 2^0.5 up to
// |base| = 2^24, but 2^128 from 2^31 on. Rows beyond 2^24 are large, and warps that have one take instructions of their own; those
// of other rows are then bit for bit what they are elsewhere.
//
// All of it works on accumulator fragments in place: own rows are `own_first + 8 r` of their run, for the thread's r-th row,
// and columns are rows of the partner from `first` on. Every branch here is uniform over the block.
#pragma once
#include "mma.cuh"
#include "ranges.cuh"
#include "tile.cuh"

// The size of a base from which on it has no digits below 1.
constexpr float LARGE = 16777216.0f;

__device__ __forceinline__ bool is_large(float base) { return fabsf(base) > LARGE; }

// The exponent of a score in a warp with a large row: of such a row the product is rounded as the base was, so that the largest
// score has exponent 0, and no score a larger one.
struct Exponents {
    float scale, fused, apart;
    __device__ __forceinline__ Exponents(float scale, float base)
        : scale(scale), fused(is_large(base) ? 0.0f : base), apart(is_large(base) ? base : 0.0f) {}
    __device__ __forceinline__ float of(float x) const { return __fsub_rn(fmaf(x, scale, -fused), apart); }
};

// p of a backward, whose base is lse: it was rounded more than once. In a large row, what exceeds it but for these digits is taken
// for its one largest score. With MAY_BE_LARGE false, no row is large.
template <bool MAY_BE_LARGE>
__device__ __forceinline__ float probability(float x, float scale, float base) {
    const float exponent = fmaf(x, scale, -base);
    if (!MAY_BE_LARGE) return exp2_fast(exponent);
    return is_large(base) && fmaf(fabsf(base), 0x1p-21f, exponent) > 0.0f ? 1.0f : exp2_fast(exponent);
}

// Whether any of COUNT bases in shared memory is large: one answer for the warp. Infinity is the base of rows without keys.
template <int COUNT, class Base>
__device__ __forceinline__ bool any_large(u32 from, const Base& base_of) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < COUNT; i += 32) {
        const float base = base_of(load_shared(from + (i + (fresh_thread() & (COUNT < 32 ? COUNT - 1 : 31))) * 4));
        found |= is_large(base) && fabsf(base) != -minus_infinity();
    }
    return __any_sync(~0u, found);
}
template <int COUNT>
__device__ __forceinline__ bool any_large(u32 from) {
    return any_large<COUNT>(from, [](float base) { return base; });
}

// Scores in base-2 units: softcap, else the plain scale. With FACTOR, multiplies `grad` by the softcap's slope.
template <bool FACTOR, int MT, int NT>
__device__ __forceinline__ void general_scores(float (&s)[MT][NT][4], float (&grad)[MT][NT][4], const Score& score) {
    if (score.flags & SCORE_SOFTCAP) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
                    float t = 1.0f - 2.0f * reciprocal(exp2_fast(s[m][n][i] * score.cap_in) + 1.0f);
                    s[m][n][i] = t * score.cap_log2;
                    if (FACTOR) grad[m][n][i] *= 1.0f - t * t;
                }
    } else {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][n][i] *= score.scale_log2;
    }
}

// Subtracts slope * distance. Where the distance does not fit in an int, the host has made sure that the mask forbids.
template <int MT, int NT>
__device__ __forceinline__ void alibi(float (&s)[MT][NT][4], const Run& run, u32 own_first, const Run& partner, const Band& band,
                                      u32 first, float slope_log2) {
    int shift = (int)(run.pos - partner.pos - band.shift);
    int t = threadIdx.x & 3;
    int rel[2 * MT];
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) rel[r] = (int)run_offset(run, own_first + r * 8) + shift;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int there = (int)run_offset(partner, first + n * 8 + 2 * t + e);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int distance = rel[2 * m + h] - there;
                    s[m][n][2 * h + e] -= slope_log2 * (float)(distance < 0 ? -distance : distance);
                }
        }
}

// The ends of the intervals of columns that own rows meet, of the thread's rows 2 m and 2 m + 1 (their first is `row`): the four lanes of
// a quad have the same rows, and each finds one end of one row.
__device__ __forceinline__ int own_end(const Band& band, const Run& run, u32 row, const Run& partner, u32 first) {
    const u32 lane = fresh_thread();
    const bool upper = lane & 1;
    const i64 here = run.pos + run_offset(run, row + (lane & 2) * 4);
    const i64 end = upper ? smaller(here + band.after + 1, band.partner_to) : larger(here - band.before, band.partner_from);
    const int column = (int)rows_below(partner, end - partner.pos) - (int)first;
    // A row that the band has nothing for meets no column before the first.
    return upper && (here < band.own_from || here >= band.own_to) ? 0 : column;
}

// What the quad's lane for row `h` (0 or 1) has found: the first column, and one past the last.
__device__ __forceinline__ void allowed(int& low, int& high, int end, int h) {
    low = __shfl_sync(~0u, end, 2 * h, 4);
    high = __shfl_sync(~0u, end, 2 * h + 1, 4);
}

// Writes `value` wherever the mask forbids.
template <int MT, int NT>
__device__ __forceinline__ void mask(float (&s)[MT][NT][4], float value, const Band& band, const Run& run, u32 own_first,
                                     const Run& partner, u32 first) {
    int t = threadIdx.x & 3;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const int end = own_end(band, run, own_first + m * 16, partner, first);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int low, high;
            allowed(low, high, end, h);
            low -= 2 * t;
            high -= 2 * t;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    bool keep = n * 8 + e >= low && n * 8 + e < high;
                    s[m][n][2 * h + e] = keep ? s[m][n][2 * h + e] : value;
                }
        }
    }
}

// The mask of both scores and their gradients, in one pass; own rows from `rows` on are past the end and meet nothing. Where
// several heads share the columns, `tokens` is one less than the columns of each, a power of two: each begins with row `first`.
template <int MT, int NT>
__device__ __forceinline__ void mask_gradients(float (&s)[MT][NT][4], float (&g)[MT][NT][4], const Band& band,
                                               const Run& run, u32 own_first, int rows, const Run& partner, u32 first,
                                               u32 tokens = ~0u) {
    const int t = threadIdx.x & 3;
    int low[2 * MT], high[2 * MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        const int end = own_end(band, run, own_first + m * 16, partner, first);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = 2 * m + h;
            allowed(low[r], high[r], end, h);
            low[r] -= 2 * t;
            high[r] = r * 8 < rows ? high[r] - 2 * t : low[r];
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = (int)(n * 8 & tokens) + i % 2, r = 2 * m + i / 2;
                const bool keep = column >= low[r] && column < high[r];
                s[m][n][i] = keep ? s[m][n][i] : minus_infinity();
                g[m][n][i] = keep ? g[m][n][i] : 0.0f;
            }
}
