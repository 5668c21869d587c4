// SPDX-License-Identifier: MIT OR Apache-2.0
// The largest score of a head, which the epilogue of a forward raises once for each warp.
//
// The largest score of a row is there: the softmax keeps it in base-2 units, masked, with softcap and ALiBi in it. The maximum
// of all is the same in every order, so atomics give the same bits in every run.
#pragma once
#include "mma.cuh"
#include "params.cuh"

// `largest` is that of the lane's rows, minus infinity where there are none; all rows of the warp are of `head`.
__device__ __forceinline__ void raise_max_logit(const Tensor& to, u32 head, float largest) {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, far));
    if ((threadIdx.x & 31) != 0 || largest == minus_infinity()) return;
    const float x = largest * LN2;
    char* at = to.ptr + head * to.head;
    // As integers, positive floats are in order, and all above negative ones; negative ones are in reverse order if unsigned. -0 is 0.
    if (x >= 0.0f)
        atomicMax((int*)at, __float_as_int(fabsf(x)));
    else
        atomicMin((u32*)at, __float_as_uint(x));
}
