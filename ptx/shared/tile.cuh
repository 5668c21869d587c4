// SPDX-License-Identifier: MIT OR Apache-2.0
// Tiles of 16-bit elements in shared memory: rows of D elements in chunks of 16 bytes, swizzled.
//
// Chunk c of row r lies where chunk c ^ f(r) would: f(r) = r mod 8 when a row is a multiple of 128 bytes, else
// (r / 2) mod 4. The eight rows that one ldmatrix phase or one warp of copies touches then hit all banks once.
// Rows and columns past the end are zeros, always: 0 * NaN is NaN, so what lies behind a tail must never be read.
#pragma once
#include "mma.cuh"

// The thread's index, read anew: addresses made from it are then not kept in registers across a loop that needs them all.
__device__ __forceinline__ int fresh_thread() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

template <int D>
struct Swizzle {
    static constexpr int CHUNKS = D / 8;
    static constexpr int GROUP = CHUNKS % 8 == 0 ? 8 : 4;
    static constexpr int ROW_BYTES = D * 2;
    static_assert(D % 32 == 0, "rows are whole swizzle groups");

    static __device__ __forceinline__ int twist(int row) { return GROUP == 8 ? row & 7 : (row >> 1) & 3; }

    static __device__ __forceinline__ u32 at(int row, int chunk) {
        return (u32)(row * ROW_BYTES + ((chunk ^ twist(row)) << 4));
    }
};

// What one lane of ldmatrix needs to walk a tile whose row (mod 8) stays the same: chunk c + x, with c even and known at
// compile time and x the lane's own 0 or 1.
template <int D>
struct Walk {
    u32 row;    // address of the lane's row
    u32 twist;  // (x ^ f(row)) * 16

    __device__ __forceinline__ Walk(u32 tile, int r, int x)
        : row(tile + (u32)(r * Swizzle<D>::ROW_BYTES)), twist((u32)((x ^ Swizzle<D>::twist(r)) << 4)) {}

    // Rows must be a multiple of 8, `chunk` even.
    __device__ __forceinline__ u32 at(int rows, int chunk) const {
        constexpr int GROUP = Swizzle<D>::GROUP;
        u32 inside = (u32)((chunk % GROUP) << 4) ^ twist;
        return row + inside + (u32)(rows * Swizzle<D>::ROW_BYTES + (chunk / GROUP) * (GROUP << 4));
    }
};

// x + a * b, with 32-bit factors: one instruction.
__device__ __forceinline__ const char* advance(const char* x, int a, int b) {
    const char* r;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(x));
    return r;
}

// COLUMNS columns of a tile, each CHUNKS chunks wide, from chunk FIRST on: eight (or four) neighbouring threads copy a row of
// one. Where there are several, they are whole swizzle groups: a thread's chunks then lie at constant distances, in both
// places.
template <int ROWS, int D, int THREADS, int FIRST, int CHUNKS, int COLUMNS>
__device__ __forceinline__ void load_columns(u32 dst, const char* src, int stride, int rows, int dim) {
    constexpr int STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0, "every thread copies as often");
    static_assert(COLUMNS == 1 || CHUNKS == Swizzle<D>::GROUP, "whole groups");
    const u32 thread = fresh_thread();
    const int row = thread / CHUNKS, chunk = FIRST + thread % CHUNKS;
    const u32 to = dst + Swizzle<D>::at(row, chunk);
    const char* const from = advance(src, row, stride) + chunk * 16;
    // Rows that this thread has yet to reach.
    int left[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) left[c] = ((chunk + c * CHUNKS) * 8 < dim ? rows : 0) - row;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            copy_async(to + i * STEP * Swizzle<D>::ROW_BYTES + c * CHUNKS * 16,
                       advance(from, i * STEP, stride) + c * CHUNKS * 16, left[c] > i * STEP);
}

// Copies ROWS x D elements; rows from `rows` on and columns from `dim` on become zeros, and are not read.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void load_tile(u32 dst, const char* src, int stride, int rows, int dim) {
    constexpr int WIDE = Swizzle<D>::GROUP == 8 ? D / 64 : 1, REST = D / 8 - 8 * WIDE;
    static_assert(REST == 0 || REST == 4, "columns of eight chunks, and one of four");
    load_columns<ROWS, D, THREADS, 0, 8, WIDE>(dst, src, stride, rows, dim);
    if constexpr (REST == 4) load_columns<ROWS, D, THREADS, 8 * WIDE, 4, 1>(dst, src, stride, rows, dim);
}

// c += A B^T over 16 columns, the k-th of `b`, with the fragments of A of these columns in registers.
template <class T, int MT, int NT, int D>
__device__ __forceinline__ void multiply_columns(float (&c)[MT][NT][4], const u32 (&a)[MT][4], const Walk<D>& b, int k) {
    static_assert(NT % 2 == 0, "B tiles come in pairs");
#pragma unroll
    for (int n = 0; n < NT / 2; ++n) {
        u32 fb[4];
        load_matrices(fb, b.at(n * 16, 2 * k));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            multiply(T{}, c[m][2 * n], a[m], fb[0], fb[1]);
            multiply(T{}, c[m][2 * n + 1], a[m], fb[2], fb[3]);
        }
    }
}

// c += A B^T: A has 16 * MT rows at `a`, B has 8 * NT rows at `b`, both D wide (row-major).
template <class T, int MT, int NT, int D>
__device__ __forceinline__ void multiply_rows(float (&c)[MT][NT][4], const Walk<D>& a, const Walk<D>& b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(fa[m], a.at(m * 16, 2 * k));
        multiply_columns<T>(c, fa, b, k);
    }
}

// The fragments of A that a warp reads anew in each `multiply_rows`, for one that keeps them in registers.
template <int MT, int D>
__device__ __forceinline__ void load_fragments(u32 (&held)[D / 16][MT][4], const Walk<D>& a) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(held[k][m], a.at(m * 16, 2 * k));
}

// c += A B^T as above, with A in registers.
template <class T, int MT, int NT, int D>
__device__ __forceinline__ void multiply_held(float (&c)[MT][NT][4], const u32 (&held)[D / 16][MT][4], const Walk<D>& b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) multiply_columns<T>(c, held[k], b, k);
}

// c += P B: P (16 * MT x 8 * NT) comes from the registers of an earlier product, B has 8 * NT rows of D elements.
template <class T, int MT, int NT, int D>
__device__ __forceinline__ void multiply_columns(float (&c)[MT][D / 8][4], const float (&p)[MT][NT][4],
                                                 const Walk<D>& b, int first) {
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) {
        u32 fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            fa[m][0] = pack(T{}, p[m][2 * k][0], p[m][2 * k][1]);
            fa[m][1] = pack(T{}, p[m][2 * k][2], p[m][2 * k][3]);
            fa[m][2] = pack(T{}, p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
            fa[m][3] = pack(T{}, p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            u32 fb[4];
            load_matrices_transposed(fb, b.at(first + k * 16, 2 * n));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                multiply(T{}, c[m][2 * n], fa[m], fb[0], fb[1]);
                multiply(T{}, c[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

// c += A B, both from shared memory. A has 16 * MT rows of K elements, or K rows of 16 * MT where it is stored TRANSPOSED; B
// has K rows, of which the warp takes every PARTS-th block of 16 columns: the first one is in the walk already.
template <class T, int MT, int NT, int K, int PARTS, bool TRANSPOSED, int DA, int DB>
__device__ __forceinline__ void multiply_tiles(float (&c)[MT][NT][4], const Walk<DA>& a, const Walk<DB>& b) {
    static_assert(NT % 2 == 0 && 2 * PARTS <= Swizzle<DB>::GROUP, "blocks of 16 columns, within a swizzle group");
#pragma unroll
    for (int k = 0; k < K / 16; ++k) {
        u32 fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if (TRANSPOSED)
                load_matrices_transposed(fa[m], a.at(k * 16, 2 * m));
            else
                load_matrices(fa[m], a.at(m * 16, 2 * k));
        }
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) {
            u32 fb[4];
            load_matrices_transposed(fb, b.at(k * 16, 2 * PARTS * n));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                multiply(T{}, c[m][2 * n], fa[m], fb[0], fb[1]);
                multiply(T{}, c[m][2 * n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

// The lane's walk over a tile used as A (16 rows from `first`), as B with its rows as columns, and as B transposed.
template <int D>
__device__ __forceinline__ Walk<D> walk_a(u32 tile, int first) {
    int lane = fresh_thread() & 31;
    return Walk<D>(tile, first + (lane & 15), lane >> 4);
}

template <int D>
__device__ __forceinline__ Walk<D> walk_b(u32 tile) {
    int lane = fresh_thread() & 31;
    return Walk<D>(tile, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

template <int D>
__device__ __forceinline__ Walk<D> walk_b_transposed(u32 tile) {
    int lane = fresh_thread() & 31;
    return Walk<D>(tile, lane & 15, lane >> 4);
}

// As A where it is stored transposed, from column 16 * `block` on; as B transposed, from there on. The columns that the
// walk then steps over are whole multiples of what `block` counts in, so that the swizzle stays a XOR.
template <int D>
__device__ __forceinline__ Walk<D> walk_a_transposed(u32 tile, int block) {
    int lane = fresh_thread() & 31;
    return Walk<D>(tile, (lane & 7) + ((lane >> 4) << 3), ((lane >> 3) & 1) | 2 * block);
}

template <int D>
__device__ __forceinline__ Walk<D> walk_b_transposed(u32 tile, int block) {
    int lane = fresh_thread() & 31;
    return Walk<D>(tile, lane & 15, lane >> 4 | 2 * block);
}

template <int A, int B>
__device__ __forceinline__ void clear(float (&c)[A][B][4]) {
#pragma unroll
    for (int a = 0; a < A; ++a)
#pragma unroll
        for (int b = 0; b < B; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) c[a][b][i] = 0.0f;
}
