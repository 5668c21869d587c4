// SPDX-License-Identifier: MIT OR Apache-2.0
// Where a forward finds the rows of k and v: one after another, or in pages.
//
// Keys is a template parameter of the forwards. `Adjoining` copies the rows of a step from where the step says. `Paged` looks
// each row up in the table of pages: a division and a load for each row that a thread copies, not for each chunk of 16
// bytes. Rows past the end have no entry of the table, and are not looked up.
#pragma once
#include "shared/ranges.cuh"
#include "shared/tile.cuh"

struct Adjoining {
    __device__ __forceinline__ Adjoining() {}
    template <class Params>
    __device__ __forceinline__ explicit Adjoining(const Params&) {}

    // The `rows` rows of a step in tensor x: columns from byte `skipped` on, of which there are `dim` more. Where rows adjoin, the
    // first is at `from`, and the next one `token` bytes further.
    template <int ROWS, int D, int THREADS>
    __device__ __forceinline__ void load(u32 to, volatile const Step&, const char* from, int token, int rows, const Tensor&,
                                         int, int dim) const {
        load_tile<ROWS, D, THREADS>(to, from, token, rows, dim);
    }
};

struct Paged {
    const PagedForwardParams& p;
    __device__ __forceinline__ explicit Paged(const PagedForwardParams& params) : p(params) {}

    template <int ROWS, int D, int THREADS>
    __device__ __forceinline__ void load(u32 to, volatile const Step& step, const char*, int, int rows, const Tensor& x,
                                         int skipped, int dim) const {
        constexpr int STEP = THREADS / 8;
        static_assert(ROWS % STEP == 0 && STEP % 8 == 0 && D % 64 == 0, "every thread copies as often, whole groups");
        const int thread = fresh_thread(), row = thread / 8, chunk = thread % 8;
        const PageRun run = p.pages.runs[p.partners[step.pair].run];
        const int* table = p.pages.table + (u64)run.document * p.pages.per_document;
        const u32 first = run.first + step.first + row;
        const char* from = x.ptr + step.head * x.head + skipped + chunk * 16;
        to += Swizzle<D>::at(row, chunk);
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP) {
            const bool ok = row + i < rows;
            const char* at = from;
            if (ok) {
                const u32 page = divide(first + i, p.pages.size);
                const u32 within = first + i - page * p.pages.size.by;
                at += ((i64)table[page] * p.pages.stride + within) * x.token;
            }
#pragma unroll
            for (int c = 0; c < D / 64; ++c)
                copy_async(to + i * Swizzle<D>::ROW_BYTES + c * 128, at + c * 128, ok && (chunk + c * 8) * 8 < dim);
        }
    }
};
