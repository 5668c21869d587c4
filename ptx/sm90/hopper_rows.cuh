// SPDX-License-Identifier: MIT OR Apache-2.0
// Copies of rows of a tensor by tensor maps.
//
// Maps are made for one call and tensor, and have columns, rows, heads, and parts. A part is as far from the next as a row
// from the next; there are SPAN rows to a part, and the map begins SPAN rows before the tensor. Row SPAN - end + i of part
// first + end is thus row first + i of the tensor, and everything from `end` on lies outside of the map and comes as zeros:
// rows behind a range are never read. So are columns past the head dim.
//
// With CPATTN_WRAPPED_MAPS a map begins at the tensor, SPAN is 2^30, and what takes those rows back is a fifth dimension: 2^30 of
// its stride, a multiple of 2^34 bytes less a row, is a multiple of 2^64 less 2^30 rows. Addresses have 64 bits. (Triton's
// `ragged_tma.py` reads so.)
#pragma once
#include "hopper.cuh"

// Rows first .. end of a run, as many as a tile has; those from `end` on come as zeros.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap& map, u32 span, const Run& run, u32 first, u32 end, u32 head,
                                          u32 barrier) {
    // Read once: the copies are volatile, and the compiler takes each for a write to memory.
    const int part = (int)((u32)run.row + end);
    barrier_expect(barrier, ROWS * WIDTH * 2);
#pragma unroll
    for (int panel = 0; panel < WIDTH / 64; ++panel)
        copy_box(to + panel * ROWS * 128, map, panel * 64, (int)(span - end + first), (int)head, part, barrier);
}

// The same for a tile that `heads` heads share, from `head` on: 2^token_bits rows of each, one behind the other, by a map whose
// boxes have 16 rows. What no head has comes as zeros too: it lies outside of the map.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_shared_rows(u32 to, const TensorMap& map, u32 span, const Run& run, u32 first, u32 end, u32 head,
                                                 u32 heads, u32 token_bits, u32 barrier) {
    const int part = (int)((u32)run.row + end);
#ifdef CPATTN_NO_EMPTY_BOXES
    // Rows that no head has are not copied: this thread stores zeros there.
    const u32 rows = heads << token_bits;
    for (u32 at = rows * 128; at < ROWS * 128; at += 16)
#pragma unroll
        for (int panel = 0; panel < WIDTH / 64; ++panel) store_shared_words(to + panel * ROWS * 128 + at, {0, 0, 0, 0});
    fence_proxy();
#else
    const u32 rows = ROWS;
#endif
    barrier_expect(barrier, rows * WIDTH * 2);
    for (u32 row = 0; row < rows; row += 16) {
        const u32 skipped = row >> token_bits, token = row - (skipped << token_bits);
        const bool is_there = skipped < heads;
#pragma unroll
        for (int panel = 0; panel < WIDTH / 64; ++panel)
            copy_box(to + panel * ROWS * 128 + row * 128, map, panel * 64, (int)(is_there ? span - end + first + token : span),
                     (int)(is_there ? head + skipped : head), part, barrier);
    }
}

// Of a cluster's blocks, each loads as many panels, and to all.
template <int ROWS, int WIDTH, u32 CLUSTER>
__device__ __forceinline__ void load_rows_to_all(u32 to, const TensorMap& map, u32 span, const Run& run, u32 first, u32 end, u32 head,
                                                 u32 barrier) {
    static_assert(WIDTH / 64 % CLUSTER == 0, "each block loads as many panels");
    const int part = (int)((u32)run.row + end);
    barrier_expect(barrier, ROWS * WIDTH * 2);
#pragma unroll
    for (int panel = 0; panel < WIDTH / 64; ++panel)
        if (blockIdx.x % CLUSTER == panel % CLUSTER)
            copy_box_to((1 << CLUSTER) - 1, to + panel * ROWS * 128, map, panel * 64, (int)(span - end + first), (int)head, part, barrier);
}
