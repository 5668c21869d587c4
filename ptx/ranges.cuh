// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs of rows, their positions, and the walk of one tile over all that it may meet.
//
// A tile belongs to its own run and meets the rows of its partners. In every run positions grow with the row, so the
// rows of a partner that one own row may meet are an interval: masks are two integers per row and partner tile, and the
// rows that the whole tile may meet are an interval too. The same code serves both directions: a q tile walks over keys
// (left, right), a k tile walks over queries (right, left).
//
// The host guarantees |position| < 2^61, windows clamped to 2^62, and that a run spans less than 2^32 positions.
#pragma once
#include "params.cuh"

__device__ __forceinline__ u32 divide(u32 x, const Divisor& d) {
    const u32 t = __umulhi(x, d.magic);
    return (t + ((x - t) >> (d.shift & 1))) >> (d.shift >> 1);
}

// How far the position of row `i` lies from the run's first.
__device__ __forceinline__ u32 run_offset(const Run& run, u32 i) {
    const u32 stripe = divide(i, run.block);
    return stripe * run.period.by + (i - stripe * run.block.by);
}

// How many rows of the run lie less than `x` positions from its first.
__device__ __forceinline__ u32 rows_below(const Run& run, i64 x) {
    if (x <= 0) return 0;
    if (x > 0xffffffffll) return run.len;
    const u32 y = (u32)x;
    const u32 stripe = divide(y, run.period);
    const u32 rest = y - stripe * run.period.by;
    const u32 rows = stripe * run.block.by + (rest < run.block.by ? rest : run.block.by);
    return rows < run.len ? rows : run.len;
}

// The own tile, and the walk, as all threads of the block share them. They lie in shared memory because registers are
// what a matrix kernel is short of: thread 0 alone writes, everybody reads (volatile, so that no copies are kept).
struct Own {
    i64 lowest;   // position of the tile's first row
    i64 highest;  // and of its last
    i64 row;      // of the tile's first row in the tensor
    u32 run;
    u32 first;    // row of the tile in its run
    u32 rows;
    u32 head;     // that the tile belongs to
    u32 partner;  // head of the other side, where there is only one
    u32 unused;
};

// One partner tile.
struct Step {
    i64 row;    // its first row in the tensor
    u32 run;
    u32 first;  // its first row in the run
    u32 rows;
    u32 head;
    u32 live;   // 0 past the last one
    u32 full;   // whether all its rows meet all own rows, so that no mask is needed
};

// How far back and ahead a partner row may lie.
struct Window {
    i64 before;
    i64 after;
};

__device__ __forceinline__ void describe(volatile Own& own, const Run& run, const Work& work, u32 size, u32 head,
                                         u32 partner) {
    const u32 rows = run.len - work.first < size ? run.len - work.first : size;
    own.lowest = run.pos + run_offset(run, work.first);
    own.highest = run.pos + run_offset(run, work.first + rows - 1);
    own.row = run.row + work.first;
    own.run = work.run;
    own.first = work.first;
    own.rows = rows;
    own.head = head;
    own.partner = partner;
}

// The tiles of up to `size` partner rows that an own tile meets, for each head of `head..head_end`. Thread 0's alone, and
// all others wait for it: what can be known per partner is not computed per tile.
struct Sweep {
    i64 base;                  // the current partner's first row in the tensor
    u32 next, end, begin;      // entries of the partner list
    u32 head, head_end;
    u32 run;
    u32 row, row_end;          // rows of the current partner that are still to be met
    u32 full_begin, full_end;  // rows that every own row meets

    __device__ __forceinline__ void start(u32 from, u32 to, u32 head0, u32 head1) volatile {
        begin = from;
        next = from;
        end = to;
        head = head0;
        head_end = from < to ? head1 : head0;
        row = 0;
        row_end = 0;
    }

    __device__ __forceinline__ void step(volatile Step& out, volatile const Own& own, const Window& window,
                                         const Run* runs, const u32* partners, u32 size) volatile {
        u32 first = row, last = row_end;
        while (first >= last) {
            if (next == end) {
                next = begin;
                head = head + 1;
            }
            if (head >= head_end) {
                out.live = 0;
                return;
            }
            const u32 at = next;
            next = at + 1;
            const u32 r = partners[at];
            const Run& partner = runs[r];
            const i64 lowest = own.lowest - partner.pos, highest = own.highest - partner.pos;
            first = rows_below(partner, lowest - window.before);
            last = rows_below(partner, highest + window.after + 1);
            full_begin = rows_below(partner, highest - window.before);
            full_end = rows_below(partner, lowest + window.after + 1);
            run = r;
            base = partner.row;
            row_end = last;
        }
        const u32 rows = last - first < size ? last - first : size;
        row = first + rows;
        out.row = base + first;
        out.run = run;
        out.first = first;
        out.rows = rows;
        out.head = head;
        out.live = 1;
        out.full = rows == size && first >= full_begin && first + size <= full_end;
    }
};

struct Control {
    Own own;
    Sweep sweep;
    Step steps[3];
};
