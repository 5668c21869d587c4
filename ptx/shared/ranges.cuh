// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs of rows, their positions, and the walk of one tile over all that it may meet.
//
// A tile belongs to its own run and meets the rows of its partners. In every run positions grow with the row, so the
// rows of a partner that one own row may meet are an interval: masks are two integers per row and partner tile, and the
// rows that the whole tile may meet are an interval too: the band of the pair of runs says which. The same code serves both
// directions: a q tile walks over keys by bands of q rows, a k tile walks over queries by bands of k rows.
//
// The host guarantees |position| < 2^61, limits of bands clamped to 2^62, and that a run spans less than 2^32 positions.
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
// what a matrix kernel is short of: the first warp alone writes, all warps read (volatile, so that no copies are kept).
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
    const char* a;       // its first row in the one tensor of the other side (k, or q), for its head
    const char* b;       // and in the other (v, or do)
    i64 row;             // in any tensor
    u32 pair;            // entry of the partner list: its run, and the band
    u32 first;           // its first row in the run
    u32 head;
    unsigned char rows;  // 0 past the last tile
    unsigned char full;  // whether all its rows meet all own rows, so that no mask is needed
};

// The kv head that a q head reads.
__device__ __forceinline__ u32 kv_head_of(const Heads& heads, u32 head) {
    return (heads.q_offset + head) / heads.group - heads.kv_offset;
}

__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// The first and the last position of partners that own rows at `lowest..=highest` may meet under a band; none when first > last.
struct Reach {
    i64 first, last;
    __device__ __forceinline__ Reach(const Band& band, i64 lowest, i64 highest) {
        const i64 from = larger(lowest, band.own_from), to = smaller(highest, band.own_to - 1);
        first = larger(from - band.before, band.partner_from);
        last = smaller(to + band.after, band.partner_to - 1);
        if (from > to) first = last + 1;
    }
};

// The first of these where there is one.
__device__ __forceinline__ i64 first_in_reach(const Band& band, i64 lowest) {
    return larger(larger(lowest, band.own_from) - band.before, band.partner_from);
}

// The same of the rows that each own row meets: no rows where some own row meets none.
struct FullReach {
    i64 first, last;
    __device__ __forceinline__ FullReach(const Band& band, i64 lowest, i64 highest) {
        first = larger(highest - band.before, band.partner_from);
        last = smaller(lowest + band.after, band.partner_to - 1);
        if (lowest < band.own_from || highest >= band.own_to) first = last + 1;
    }
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

// The other side: its runs, the list of those that are met, the bands, and both its tensors.
struct Partners {
    const Run* runs;
    const Pair* list;
    const Band* bands;
    const Tensor* a;
    const Tensor* b;
};

// The tiles of up to SIZE partner rows that an own tile meets, for each head of `head..head_end`. The first warp's alone: lane
// 0 moves from partner to partner, and each of BATCH lanes describes one tile. One lane alone would take a hundred cycles or
// two for each, in every step, while all other warps wait for its own at the next barrier.
template <u32 BATCH>
struct Sweep {
    u32 next, end, begin;      // entries of the partner list
    u32 head, head_end;
    u32 run;
    u32 row, row_end;          // rows of the current partner that are still to be met
    u32 full_begin, full_end;  // rows that every own row meets

    // The entry of the current partner.
    __device__ __forceinline__ u32 pair() const volatile { return next - 1; }

    // Lane 0's. Of the other side, only `runs`, `list` and `bands` are read.
    template <class Side>
    __device__ __forceinline__ void start(u32 from, u32 to, u32 head0, u32 head1, volatile const Own& own,
                                          const Side& side) volatile {
        begin = from;
        next = from;
        end = to;
        head = head0;
        head_end = from < to ? head1 : head0;
        row = 0;
        row_end = 0;
        find(own, side);
    }

    // The next partner that has rows for us, if there is one: else none are left. Lane 0's.
    template <class Side>
    __device__ __forceinline__ void find(volatile const Own& own, const Side& side) volatile {
        u32 first = 0, last = 0;
        while (first >= last) {
            if (next == end) {
                next = begin;
                head = head + 1;
            }
            if (head >= head_end) {
                first = last = 0;
                break;
            }
            const u32 at = next;
            next = at + 1;
            const u32 r = side.list[at].run;
            const Run& partner = side.runs[r];
            const Band& band = side.bands[side.list[at].band];
            run = r;
            const FullReach full(band, own.lowest, own.highest);
            full_begin = rows_below(partner, full.first - partner.pos);
            full_end = rows_below(partner, full.last + 1 - partner.pos);
            const Reach met(band, own.lowest, own.highest);
            first = rows_below(partner, met.first - partner.pos);
            last = rows_below(partner, met.last + 1 - partner.pos);
        }
        row = first;
        row_end = last;
    }

    // The whole warp's: the next BATCH tiles; those past the end have no rows.
    template <u32 SIZE>
    __device__ __forceinline__ void fill(volatile Step* out, volatile const Own& own, const Partners& side) volatile {
        const u32 lane = threadIdx.x & 31;
        u32 filled = 0;
        do {
            // Beyond what fits, more rows make no difference, and rounding up might not fit in 32 bits.
            const u32 left = row_end - row < BATCH * SIZE ? row_end - row : BATCH * SIZE;
            const u32 tiles = (left + (SIZE - 1)) / SIZE, room = BATCH - filled;
            const u32 some = tiles < room ? tiles : room;
            if (lane >= filled && lane < filled + some) describe_step<SIZE>(out[lane], row + (lane - filled) * SIZE, side);
            filled += some;
            __syncwarp();
            if (lane == 0) {
                row = row_end - row > some * SIZE ? row + some * SIZE : row_end;
                if (row == row_end) find(own, side);
            }
            __syncwarp();
        } while (filled < BATCH && row != row_end);
        if (lane >= filled && lane < BATCH) out[lane].rows = 0;
    }

    template <u32 SIZE>
    __device__ __forceinline__ void describe_step(volatile Step& out, u32 first, const Partners& side) volatile {
        const u32 rows = row_end - first < SIZE ? row_end - first : SIZE;
        const i64 at = side.runs[run].row + first;
        out.a = side.a->ptr + head * side.a->head + at * side.a->token;
        out.b = side.b->ptr + head * side.b->head + at * side.b->token;
        out.row = at;
        out.pair = pair();
        out.first = first;
        out.head = head;
        out.rows = rows;
        out.full = rows == SIZE && first >= full_begin && first + SIZE <= full_end;
    }
};

// Tiles lie in two halves of BATCH: one is filled while the other is worked off.
template <u32 BATCH>
struct Control {
    static constexpr u32 STEPS = 2 * BATCH;
    static_assert(BATCH >= 3 && BATCH <= 32, "filled in step 1, first looked at in step BATCH - 1; a lane for each");

    Own own;
    Sweep<BATCH> sweep;
    Step steps[STEPS];

    // The first warp's: the tile of ROWS q rows that is item `item` of a call, and its first steps.
    template <u32 ROWS, u32 SIZE, class Params>
    __device__ __forceinline__ void begin_queries(const Params& p, u32 item, const Partners& side) volatile {
        if (threadIdx.x == 0) {
            const u32 head = item % p.heads.q_heads;
            const Work work = p.work[item / p.heads.q_heads];
            const Run& query = p.queries[work.run];
            const u32 kv_head = kv_head_of(p.heads, head);
            describe(own, query, work, ROWS, head, kv_head);
            sweep.start(query.begin, query.end, kv_head, kv_head + 1, own, side);
        }
        __syncwarp();
        sweep.template fill<SIZE>(steps, own, side);
    }

    static __device__ __forceinline__ u32 after(u32 at) { return at + 1 == STEPS ? 0 : at + 1; }

    // The first warp's, in step `at`, once no thread is in the step before any more: that was the last one to look at the
    // other half, which is filled here. Its first tile is looked at in the last step of this half.
    template <u32 SIZE>
    __device__ __forceinline__ void prepare(u32 at, const Partners& side) volatile {
        if (at == 1 || at == BATCH + 1) sweep.template fill<SIZE>(steps + (at == 1 ? BATCH : 0), own, side);
    }
};
