// SPDX-License-Identifier: MIT OR Apache-2.0
// The gradient of the sinks: dsink = -sum over rows of exp(sink - lse) * delta, for each sink of each head.
//
// One block per sink. The sum is as long as the sequence, so each thread keeps a compensated one (Kahan, 1965), and the
// block adds them in a tree: the order depends on nothing but the number of rows.
#include "mma.cuh"

struct SinkParams {
    Tensor lse;
    Tensor delta;
    Tensor sinks;
    Tensor dsinks;
    u64 rows;
    u32 count;  // sinks of each head
    u32 unused;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) cpattn_sinks(const __grid_constant__ SinkParams p) {
    __shared__ float sums[THREADS];
    const i64 head = blockIdx.x / p.count, which = blockIdx.x % p.count;
    const float sink = ((const float*)(p.sinks.ptr + head * p.sinks.head))[which];
    float sum = 0.0f, lost = 0.0f;
    for (u64 row = threadIdx.x; row < p.rows; row += THREADS) {
        const float lse = *(const float*)(p.lse.ptr + (i64)row * p.lse.token + head * p.lse.head);
        const float delta = *(const float*)(p.delta.ptr + (i64)row * p.delta.token + head * p.delta.head);
        // A row without lse had no probability to give; a NaN stays one.
        const float term = lse == minus_infinity() ? 0.0f : -exp2_fast((sink - lse) * LOG2E) * delta;
        const float y = term - lost, t = sum + y;
        lost = (t - sum) - y;
        sum = t;
    }
    sums[threadIdx.x] = sum;
    for (int far = THREADS / 2; far > 0; far /= 2) {
        __syncthreads();
        if (threadIdx.x < far) sums[threadIdx.x] += sums[threadIdx.x + far];
    }
    if (threadIdx.x == 0) ((float*)(p.dsinks.ptr + head * p.dsinks.head))[which] = sums[0];
}
