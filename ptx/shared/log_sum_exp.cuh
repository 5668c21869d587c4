// SPDX-License-Identifier: MIT OR Apache-2.0
// The log-sum-exp of a partial result in two words, and the merge of two of them.
//
// In one f32 an lse of 1,000 is known to 3e-5, and so would be every weight exp(a - b) made from it. So there is a second
// word, which holds what rounding the first one lost; differences are taken word by word. `src/kernel/merge.rs` is the same
// for the CPU. The rounding modes that are spelled out keep the compiler from fusing a product into a sum.
#pragma once
#include "mma.cuh"
#include "params.cuh"

struct LogSumExp {
    float lse;
    float rest;  // 0 where lse is minus infinity
};

// What LN2 lacks.
constexpr float LN2_REST = -1.9046542999577676e-9f;

// a + b, rounded, and what rounding lost (Knuth's TwoSum).
__device__ __forceinline__ LogSumExp two_sum(float a, float b) {
    const float sum = __fadd_rn(a, b);
    const float of_b = __fsub_rn(sum, a), of_a = __fsub_rn(sum, of_b);
    return {sum, __fadd_rn(__fsub_rn(a, of_a), __fsub_rn(b, of_b))};
}

// ln(sum * 2^base): that of a row whose probabilities were made with `base`, in base-2 units, and sum up to `sum`.
__device__ __forceinline__ LogSumExp log_sum_exp(float base, float sum) {
    if (sum == 0.0f) return {minus_infinity(), 0.0f};
    const LogSumExp units = two_sum(base, log2f(sum));
    const float high = __fmul_rn(units.lse, LN2);
    const float low = fmaf(units.lse, LN2, -high) + fmaf(units.lse, LN2_REST, units.rest * LN2);
    return two_sum(high, low);
}

// From memory: one word or two.
__device__ __forceinline__ LogSumExp load_lse(const char* at, u32 words) {
    const float lse = ((const float*)at)[0];
    return {lse, words > 1 && lse != minus_infinity() ? ((const float*)at)[1] : 0.0f};
}

__device__ __forceinline__ void store_lse(char* at, u32 words, const LogSumExp& x) {
    ((float*)at)[0] = x.lse;
    if (words > 1) ((float*)at)[1] = x.rest;
}

// That of both, and the weight of each. Without a key on either side the weights are 0; a NaN stays a NaN.
__device__ __forceinline__ LogSumExp merge(const LogSumExp& a, const LogSumExp& b, float& weight_a, float& weight_b) {
    weight_a = weight_b = 0.0f;
    if (a.lse == minus_infinity() && b.lse == minus_infinity()) return {minus_infinity(), 0.0f};
    const float above = __fadd_rn(__fsub_rn(a.lse, b.lse), __fsub_rn(a.rest, b.rest));
    const bool first = above > 0.0f;
    const float x = exp2_fast(-fabsf(above) * LOG2E);
    const float inverse = reciprocal(1.0f + x);
    weight_a = first ? inverse : x * inverse;
    weight_b = first ? x * inverse : inverse;
    return two_sum(first ? a.lse : b.lse, (first ? a.rest : b.rest) + log1pf(x));
}

// That of all sinks of a head, of which there are `count`: they act in a softmax as one sink with this value.
__device__ __forceinline__ LogSumExp load_sinks(const Tensor& sinks, i64 head, u32 count) {
    const float* at = (const float*)(sinks.ptr + head * sinks.head);
    LogSumExp all = {count ? at[0] : minus_infinity(), 0.0f};
#pragma unroll 1
    for (u32 i = 1; i < count; ++i) {
        float weight, other;
        all = merge(all, {at[i], 0.0f}, weight, other);
        // Of infinity nothing is lost.
        if (all.lse - all.lse != 0.0f) all.rest = 0.0f;
    }
    return all;
}
