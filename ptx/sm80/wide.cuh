// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles whose rows are too long to lie in shared memory beside their partners: head dims above 256.
//
// The own tile stays, in chunks of 64 columns. The rows of partners come chunk by chunk, through a ring of STAGES buffers of 64 rows of
// 64 columns each: a product over all columns is a loop over chunks, and so is one whose result has all columns. Warps are two over own
// rows by four over partner rows, and in products with columns as their result two by four columns of 16 in each chunk. The result of
// the first kind, rounded, goes through shared memory, since every warp of a row needs all of it for the second kind.
#pragma once
#include "pages.cuh"
#include "shared/score.cuh"
#include "shared/tile.cuh"

enum : int { CHUNK = 64, PARTS = 4 };

// Bytes of ROWS rows of a chunk.
template <int ROWS>
struct Chunk {
    static constexpr u32 BYTES = ROWS * CHUNK * 2;
};

__device__ __forceinline__ int chunks_of(u32 dim) { return (int)(dim + CHUNK - 1) / CHUNK; }

// The warp's rows are the first or the second half of a tile; its columns one of PARTS sixteens.
__device__ __forceinline__ int warp_half() { return fresh_thread() >> 7; }
__device__ __forceinline__ int warp_part() { return (fresh_thread() >> 5) & (PARTS - 1); }

// A tile of an own tensor, chunk behind chunk.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_own(u32 to, const char* from, i64 token, u32 rows, u32 dim) {
#pragma unroll 1
    for (int c = 0; c < chunks_of(dim); ++c)
        load_tile<ROWS, CHUNK, THREADS>(to + c * Chunk<ROWS>::BYTES, from + c * CHUNK * 2, (int)token, (int)rows, (int)dim - c * CHUNK);
}

// What loads the chunks of every step in the order in which they are multiplied: PASSES passes over the partner's tensors, of which the
// passes with a bit in SECOND are over the second one (v, or do). Keys finds their rows.
template <int STAGES, int PASSES, int SECOND, int THREADS, class Control, class Keys = Adjoining>
struct Feed {
    u32 ring;
    u32 at;     // step, of the chunk that is loaded next
    int pass;
    int chunk;
    u32 load;   // buffers that are next to be filled, and to be read
    u32 read;
    Keys keys;

    __device__ __forceinline__ explicit Feed(u32 ring, Keys keys = Keys())
        : ring(ring), at(0), pass(0), chunk(0), load(0), read(0), keys(keys) {}

    static __device__ __forceinline__ u32 after(u32 buffer) { return buffer + 1 == STAGES ? 0 : buffer + 1; }

    // One chunk more, if there is one; a group of copies even if there is none.
    __device__ __forceinline__ void next(volatile Control& control, const Tensor& a, const Tensor& b, u32 dim, u32 value) {
        volatile const Step& step = control.steps[at];
        if (step.rows) {
            const bool second = SECOND >> pass & 1;
            const int width = (int)(second ? value : dim);
            keys.template load<CHUNK, CHUNK, THREADS>(ring + load * Chunk<CHUNK>::BYTES, step,
                                                      (second ? step.b : step.a) + chunk * CHUNK * 2,
                                                      (int)(second ? b.token : a.token), (int)step.rows, second ? b : a,
                                                      chunk * CHUNK * 2, width - chunk * CHUNK);
            load = after(load);
            chunk += 1;
            if (chunk * CHUNK >= width) {
                chunk = 0;
                pass += 1;
                if (pass == PASSES) {
                    pass = 0;
                    at = Control::after(at);
                }
            }
        }
        copy_commit();
    }

    // Waits for the next chunk, loads another one in the place of the last one, and returns where it lies. A barrier of the block.
    __device__ __forceinline__ u32 take(volatile Control& control, const Tensor& a, const Tensor& b, u32 dim, u32 value) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        next(control, a, b, dim, value);
        const u32 buffer = ring + read * Chunk<CHUNK>::BYTES;
        read = after(read);
        return buffer;
    }
};

// c += A B^T over the columns of one chunk: 16 * MT own rows of the warp, by its 16 partner rows.
template <class T, int MT>
__device__ __forceinline__ void multiply_chunk(float (&c)[MT][2][4], u32 own, u32 partner) {
    multiply_rows<T, MT, 2, CHUNK>(c, walk_a<CHUNK>(own, warp_half() * 16 * MT), walk_b<CHUNK>(partner + warp_part() * 16 * CHUNK * 2));
}

// The warp's rows of a square of own rows by partner rows, rounded, to shared memory.
template <class T, int MT>
__device__ __forceinline__ void store_square(u32 to, const float (&c)[MT][2][4]) {
    const int lane = fresh_thread() & 31;
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r)
#pragma unroll
        for (int n = 0; n < 2; ++n)
            store_shared(to + Swizzle<CHUNK>::at(warp_half() * 16 * MT + r * 8 + (lane >> 2), 2 * warp_part() + n) + 4 * (lane & 3),
                         pack(T{}, c[r / 2][n][r % 2 * 2], c[r / 2][n][r % 2 * 2 + 1]));
}

// The warp's 16 columns of a chunk of partner rows, for `multiply_square`.
__device__ __forceinline__ Walk<CHUNK> walk_columns(u32 partner) { return walk_b_transposed<CHUNK>(partner, warp_part()); }

// c += P B: P is a square in registers, B such columns.
template <class T, int MT>
__device__ __forceinline__ void multiply_square(float (&c)[MT][2][4], const u32 (&p)[CHUNK / 16][MT][4], const Walk<CHUNK>& b) {
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {
        u32 fb[4];
        load_matrices_transposed(fb, b.at(k * 16, 0));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            multiply(T{}, c[m][0], p[k][m], fb[0], fb[1]);
            multiply(T{}, c[m][1], p[k][m], fb[2], fb[3]);
        }
    }
}

// Results leave through shared memory, where the tiles were: 32 rows of N chunks of f32 at a time, so that a thread writes 16 bytes and a warp
// whole lines. Rows lie 32 bytes further apart than they are long, against bank conflicts.
template <int N>
struct Staged {
    static constexpr u32 PITCH = N * CHUNK * 4 + 32;

    // Of the thread's rows 2 M and 2 M + 1, times a factor each: row 0 to 7 of the warp's sixteen, and 8 to 15.
    template <int M, int MT>
    static __device__ __forceinline__ void store(u32 to, const float (&c)[N][MT][2][4], const float (&scale)[2]) {
        const int lane = fresh_thread() & 31;
        const u32 at = to + (warp_half() * 16 + (lane >> 2)) * PITCH + warp_part() * 64 + (lane & 3) * 8;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < N; ++i)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + h * 8 * PITCH + i * CHUNK * 4 + n * 32),
                                 "f"(c[i][M][n][2 * h] * scale[h]), "f"(c[i][M][n][2 * h + 1] * scale[h])
                                 : "memory");
    }

    static __device__ __forceinline__ float4 load(u32 from, int row, int unit) {
        const uint4 x = load_shared_16(from + row * PITCH + unit * 16);
        return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
    }
};
