// SPDX-License-Identifier: MIT OR Apache-2.0
// Everything around attention that only moves memory: copies, casts and ordered sums of blocks, the row sums before the
// backward, rows that nothing covers, and the merge of partial results: of two, and of those of all ranks of a ring.
//
// All of it is bound by bandwidth, so every thread keeps several 16-byte accesses in flight, and a transform is bounded to
// registers with which four blocks of it share a multiprocessor: 64 KB in flight there.
#include "log_sum_exp.cuh"
#include "ranges.cuh"
#include "tile.cuh"

enum : u32 { DTYPE_F16 = 0, DTYPE_BF16 = 1, DTYPE_F32 = 2 };

constexpr int THREADS = 256;
constexpr int STEPS = 4;  // of one thread

// Element `i` of a row, widened; exact.
__device__ __forceinline__ float widen(const char* row, u32 i, u32 dtype) {
    if (dtype == DTYPE_F32) return ((const float*)row)[i];
    float low, high;
    const u32 x = ((const u16*)row)[i];
    if (dtype == DTYPE_F16)
        unpack(F16{}, x, low, high);
    else
        unpack(Bf16{}, x, low, high);
    return low;
}

__device__ __forceinline__ void narrow(char* row, u32 i, u32 dtype, float x) {
    if (dtype == DTYPE_F32)
        ((float*)row)[i] = x;
    else
        ((u16*)row)[i] = (u16)(dtype == DTYPE_F16 ? pack(F16{}, x, 0.0f) : pack(Bf16{}, x, 0.0f));
}

template <class T>
__device__ __forceinline__ void unpack8(float (&x)[8], const uint4& raw) {
    unpack(T{}, raw.x, x[0], x[1]);
    unpack(T{}, raw.y, x[2], x[3]);
    unpack(T{}, raw.z, x[4], x[5]);
    unpack(T{}, raw.w, x[6], x[7]);
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack(T{}, x[0], x[1]), pack(T{}, x[2], x[3]), pack(T{}, x[4], x[5]), pack(T{}, x[6], x[7]));
}

// Elements 8 i .. 8 i + 8 of a row.
__device__ __forceinline__ void widen8(float (&x)[8], const char* row, u32 i, u32 dtype) {
    if (dtype == DTYPE_F32) {
        const float4 a = ((const float4*)row)[2 * i], b = ((const float4*)row)[2 * i + 1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        const uint4 raw = ((const uint4*)row)[i];
        if (dtype == DTYPE_F16)
            unpack8<F16>(x, raw);
        else
            unpack8<Bf16>(x, raw);
    }
}

__device__ __forceinline__ void narrow8(char* row, u32 i, u32 dtype, const float (&x)[8]) {
    if (dtype == DTYPE_F32) {
        ((float4*)row)[2 * i] = make_float4(x[0], x[1], x[2], x[3]);
        ((float4*)row)[2 * i + 1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        ((uint4*)row)[i] = dtype == DTYPE_F16 ? pack8<F16>(x) : pack8<Bf16>(x);
    }
}

// What the threads of a block share: the bases of the launch, where they can be picked by number, and where the tile's
// block and its first source lie.
struct Bases {
    Tensor at[TRANSFORM_BASES];
    Tensor dst, src;
    __device__ __forceinline__ Tensor locate(const TransformTensor& x) const {
        const Tensor& base = at[x.base];
        if (x.base == 0) return {base.ptr + x.row, x.token, x.head};
        return {base.ptr + x.row * base.token + x.first_head * base.head, base.token, base.head};
    }
};

struct Place {
    u32 token, head, unit;
    __device__ __forceinline__ char* in(const Tensor& x) const { return x.ptr + token * x.token + head * x.head; }
};

// Where a unit of a row is, of `units` to a row.
__device__ __forceinline__ Place place(const TransformBlock& block, const Divisor& units, u32 step) {
    const u32 row = divide(step, units);
    const u32 token = divide(row, block.heads);
    return {token, row - token * block.heads.by, step - row * units.by};
}

// Bits, whatever they mean, of `left` steps from `first` on, in pieces of 16 bytes: a step of f32 has two.
__device__ __forceinline__ void copy_steps(const TransformBlock& block, const Bases& bases, u32 first, u32 left) {
    const u32 two = block.dtype == DTYPE_F32;
#pragma unroll 1
    for (u32 pass = threadIdx.x; pass < left << two; pass += THREADS * STEPS) {
        uint4 x[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u32 piece = pass + i * THREADS;
            if (piece < left << two) {
                const Place at = place(block, block.units, first + (piece >> two));
                x[i] = ((const uint4*)at.in(bases.src))[at.unit << two | (piece & two)];
            }
        }
        // Read anew, so that places are not kept across the loads: more blocks then fit, and keep more bytes in flight.
        const u32 again = pass - threadIdx.x + fresh_thread();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u32 piece = again + i * THREADS;
            if (piece < left << two) {
                const Place at = place(block, block.units, first + (piece >> two));
                ((uint4*)at.in(bases.dst))[at.unit << two | (piece & two)] = x[i];
            }
        }
    }
}

// Casts and ordered sums, 8 elements a step, two steps of a thread at a time.
__device__ __forceinline__ void sum_steps(const TransformBlock& block, const Bases& bases, const TransformSource* sources, u32 first, u32 left) {
    constexpr int SOME = 2;
#pragma unroll 1
    for (u32 pass = threadIdx.x; pass < left; pass += THREADS * SOME) {
        float sum[SOME][8];
        for (u32 k = block.sources_begin; k < block.sources_end; ++k) {
            const TransformSource& source = sources[k];
            const Tensor src = bases.locate(source.src);
#pragma unroll
            for (int i = 0; i < SOME; ++i) {
                const u32 step = pass + i * THREADS;
                if (step < left) {
                    const Place at = place(block, block.units, first + step);
                    float x[8];
                    widen8(x, at.in(src), at.unit, source.dtype);
                    // The first is taken as it is: 0 + (-0) would lose a sign.
#pragma unroll
                    for (int e = 0; e < 8; ++e) sum[i][e] = k == block.sources_begin ? x[e] : sum[i][e] + x[e];
                }
            }
        }
        if (block.sources_begin == block.sources_end)
#pragma unroll
            for (int i = 0; i < SOME; ++i)
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[i][e] = 0.0f;
#pragma unroll
        for (int i = 0; i < SOME; ++i) {
            const u32 step = pass + i * THREADS;
            if (step < left) {
                const Place at = place(block, block.units, first + step);
                narrow8(at.in(bases.dst), at.unit, block.dtype, sum[i]);
            }
        }
    }
}

// One element at a time, where rows are not aligned.
__device__ __forceinline__ void sum_elements(const TransformBlock& block, const Bases& bases, const TransformSource* sources, u32 first, u32 left) {
    for (u32 step = threadIdx.x; step < left; step += THREADS) {
        const Place at = place(block, block.dim, first + step);
        float sum = 0.0f;
        for (u32 k = block.sources_begin; k < block.sources_end; ++k) {
            const float x = widen(at.in(bases.locate(sources[k].src)), at.unit, sources[k].dtype);
            sum = k == block.sources_begin ? x : sum + x;
        }
        narrow(at.in(bases.dst), at.unit, block.dtype, sum);
    }
}

// Whether every row of a tensor begins at a multiple of 16 bytes.
__device__ __forceinline__ bool is_aligned(const TransformBlock& block, const Tensor& x) {
    const u64 token = block.rows > block.heads.by ? x.token : 0, head = block.heads.by > 1 ? x.head : 0;
    return (((u64)x.ptr | token | head) & 15) == 0;
}

__device__ __forceinline__ bool are_aligned(const TransformBlock& block, const Bases& bases, const TransformSource* sources) {
    bool aligned = is_aligned(block, bases.dst);
    for (u32 k = block.sources_begin; k < block.sources_end; ++k)
        aligned &= is_aligned(block, bases.locate(sources[k].src));
    return aligned;
}

__device__ __forceinline__ void transform_tile(const TransformParams& p, Bases& bases, u64 tile) {
    u32 low = 0, high = p.block_count - 1;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (p.blocks[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    const TransformBlock& block = p.blocks[low];
    __syncthreads();
    if (threadIdx.x == 0) {
        bases.dst = bases.locate(block.dst);
        if (block.sources_begin < block.sources_end) bases.src = bases.locate(p.sources[block.sources_begin].src);
    }
    __syncthreads();
    const u32 first = (u32)(tile - block.first_tile) * (THREADS * STEPS);
    const u32 steps = (u32)block.rows * block.units.by - first;
    const u32 left = steps < THREADS * STEPS ? steps : THREADS * STEPS;
    if (!block.eights)
        sum_elements(block, bases, p.sources, first, left);
    else if (!are_aligned(block, bases, p.sources))
        sum_elements(block, bases, p.sources, 8 * first, 8 * left);
    else if (block.sources_end == block.sources_begin + 1 && p.sources[block.sources_begin].dtype == block.dtype)
        copy_steps(block, bases, first, left);
    else
        sum_steps(block, bases, p.sources, first, left);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) cpattn_transform(const __grid_constant__ TransformParams p) {
    __shared__ Bases bases;
    // Parameters are picked by constant numbers only.
#pragma unroll
    for (u32 i = 0; i < TRANSFORM_BASES; ++i)
        if (threadIdx.x == i) bases.at[i] = p.bases[i];
    for (u64 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) transform_tile(p, bases, tile);
}

// One group of `lanes` threads per row.
extern "C" __global__ void __launch_bounds__(THREADS) cpattn_delta(const __grid_constant__ DeltaParams p) {
    const u32 groups = THREADS / p.lanes;
    const u32 lane = threadIdx.x % p.lanes;
    for (u64 base = (u64)blockIdx.x * groups; base < p.rows; base += (u64)gridDim.x * groups) {
        const u64 row = base + threadIdx.x / p.lanes;
        const bool ok = row < p.rows;
        const u32 token = (u32)row / p.heads;
        const u32 head = (u32)row - token * p.heads;
        float sum = 0.0f;
        for (u32 unit = lane; ok && unit * 8 < p.dim; unit += p.lanes) {
            float x[8], y[8];
            widen8(x, p.o.ptr + token * p.o.token + head * p.o.head, unit, p.dtype);
            widen8(y, p.d_o.ptr + token * p.d_o.token + head * p.d_o.head, unit, p.dtype);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
        }
        for (u32 far = p.lanes / 2; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
        if (ok && lane == 0) {
            // Where lse is minus infinity it depends on no score, and its gradient may be anything.
            if (p.d_lse.ptr && *(const float*)(p.lse.ptr + token * p.lse.token + head * p.lse.head) != minus_infinity())
                sum -= *(const float*)(p.d_lse.ptr + token * p.d_lse.token + head * p.d_lse.head);
            *(float*)(p.delta.ptr + token * p.delta.token + head * p.delta.head) = sum;
        }
    }
}

// Rows that no pair covers: o = 0, lse = the sink or minus infinity.
extern "C" __global__ void __launch_bounds__(THREADS) cpattn_finish(const __grid_constant__ FinishParams p) {
    const u32 units = p.dim / 8;
    for (u32 item = blockIdx.x; item < p.items; item += gridDim.x) {
        const Work work = p.work[item];
        const Run& run = p.runs[work.run];
        const u32 rows = run.len - work.first < p.rows ? run.len - work.first : p.rows;
        for (u32 i = threadIdx.x; i < rows * p.heads * units; i += THREADS) {
            const u32 unit = i % units, head = i / units % p.heads;
            const i64 row = run.row + work.first + i / units / p.heads;
            ((uint4*)(p.o.ptr + row * p.o.token + head * p.o.head))[unit] = make_uint4(0, 0, 0, 0);
            if (unit == 0)
                *(float*)(p.lse.ptr + row * p.lse.token + head * p.lse.head) =
                    load_sinks(p.sinks, head, p.sink_count).lse;
        }
    }
}

// (o, lse) becomes the merge of itself and another partial; both f32. One warp per row.
extern "C" __global__ void __launch_bounds__(THREADS) cpattn_merge(const __grid_constant__ MergeParams p) {
    const u32 lane = threadIdx.x & 31;
    for (u64 row = ((u64)blockIdx.x * THREADS + threadIdx.x) / 32; row < p.rows; row += (u64)gridDim.x * (THREADS / 32)) {
        const u32 token = (u32)row / p.heads;
        const u32 head = (u32)row - token * p.heads;
        char* lse_at = p.lse.ptr + token * p.lse.token + head * p.lse.head;
        const LogSumExp a = load_lse(lse_at, p.lse_words);
        const LogSumExp b = load_lse(p.with_lse.ptr + token * p.with_lse.token + head * p.with_lse.head, p.with_lse_words);
        __syncwarp();
        float wa, wb;
        const LogSumExp lse = merge(a, b, wa, wb);
        float4* x = (float4*)(p.o.ptr + token * p.o.token + head * p.o.head);
        const float4* y = (const float4*)(p.with_o.ptr + token * p.with_o.token + head * p.with_o.head);
        for (u32 i = lane; i < p.dim / 4; i += 32) {
            // A side that saw no key has no say whatever bytes its o holds: a weight of 0 times a NaN would be one. That
            // is asked of lse, not of the weight, which is 0 for a side that is merely far below.
            const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float4 u = a.lse == minus_infinity() ? none : x[i], v = b.lse == minus_infinity() ? none : y[i];
            x[i] = make_float4(wa * u.x + wb * v.x, wa * u.y + wb * v.y, wa * u.z + wb * v.z, wa * u.w + wb * v.w);
        }
        if (lane == 0) store_lse(lse_at, p.lse_words, lse);
    }
}

// The lse of a part, or of the result, in one word.
__device__ __forceinline__ const float* lse_at(const Tensor& x, u32 token, u32 head) {
    return (const float*)(x.ptr + token * x.token + head * x.head);
}

// The merge of `part_count` parts of the same rows, in their order, and of the sinks. `lanes` threads a row.
extern "C" __global__ void __launch_bounds__(THREADS) cpattn_combine(const __grid_constant__ CombineParams p) {
    __shared__ Bases bases;
    // Parameters are picked by constant numbers only.
#pragma unroll
    for (u32 i = 0; i < TRANSFORM_BASES; ++i)
        if (threadIdx.x == i) bases.at[i] = p.bases[i];
    __syncthreads();
    const u32 groups = THREADS / p.lanes;
    const u32 lane = threadIdx.x % p.lanes;
    const TransformSource* lse_parts = p.parts + p.part_count;
    for (u64 row = (u64)blockIdx.x * groups + threadIdx.x / p.lanes; row < p.rows; row += (u64)gridDim.x * groups) {
        const u32 token = (u32)row / p.heads;
        const u32 head = (u32)row - token * p.heads;
        float weight, other;
        LogSumExp total = {minus_infinity(), 0.0f};
        for (u32 k = 0; k < p.part_count; ++k)
            total = merge(total, {*lse_at(bases.locate(lse_parts[k].src), token, head), 0.0f}, weight, other);
        if (p.sink_count) total = merge(total, load_sinks(p.sinks, head, p.sink_count), weight, other);
        char* o = p.o.ptr + token * p.o.token + head * p.o.head;
        for (u32 unit = lane; 8 * unit < p.dim; unit += p.lanes) {
            float sum[8] = {};
            for (u32 k = 0; k < p.part_count; ++k) {
                const float lse = *lse_at(bases.locate(lse_parts[k].src), token, head);
                // A part without keys is not read: a weight of 0 times a NaN would be one.
                if (lse == minus_infinity()) continue;
                const float of_part = exp2_fast(__fsub_rn(__fsub_rn(lse, total.lse), total.rest) * LOG2E);
                const Tensor part = bases.locate(p.parts[k].src);
                const char* from = part.ptr + token * part.token + head * part.head;
                float x[8];
                widen8(x, from, unit, p.parts[k].dtype);
#pragma unroll
                for (int e = 0; e < 8; ++e) sum[e] = fmaf(x[e], of_part, sum[e]);
            }
            narrow8(o, unit, p.dtype, sum);
        }
        if (lane == 0) *(float*)lse_at(p.lse, token, head) = total.lse;
    }
}
