// SPDX-License-Identifier: MIT OR Apache-2.0
// Whose turn it is: how blocks add to one dq in a fixed order, with no atomic addition and no second buffer.
//
// A tile of keys adds to every tile of q rows that it meets, in the order of k runs and of tiles in them. Each tile of q
// rows has, per q head, a word that names the last tile of keys that has added (its number plus one). A block waits until
// the word names its predecessor, adds, and writes its own name. The predecessor is nearly always the tile before it in the
// same run; only a run's first tile that meets these rows has to look through the other runs.
//
// Both sides must agree on who meets whom, or a block waits for one that never comes. So there is one test, and it is
// symmetric: tiles meet when the last q row reaches the first key and the last key reaches the first q row. Stripes leave
// gaps in which a pair meets though no row of it does. `turns.rs` of the host holds the same test and proves it.
//
// Nobody waits for what has not begun: items are taken one by one from a list in which a tile comes after all that it may
// wait for, so the earliest unfinished one waits for nobody. How many blocks run at a time does not matter.
//
// Q tiles are walked from the last to the first. Under a causal mask the tiles of keys that run side by side then begin
// together at the end of the document, each a turn behind the one before, and go on without waiting; walked the other way,
// each would begin where its predecessor comes last. So the longest tiles can start first, as they should.
#pragma once
#include "ranges.cuh"

// Tiles of a run: `begin..end`, empty when begin >= end.
struct Span {
    u32 begin;
    u32 end;
};

// The tiles of SIZE rows whose last position is at least `low` and whose first is at most `high`. A tile counts too when
// `low..=high` lies in a gap between two of its rows.
template <int SIZE>
__device__ __forceinline__ Span tiles_met(const Run& run, i64 low, i64 high) {
    const u32 before = rows_below(run, low - run.pos), until = rows_below(run, high - run.pos + 1);
    Span span = {before / SIZE, (until + (SIZE - 1)) / SIZE};
    if (before >= run.len) span.end = 0;
    return span;
}

// One tile of q rows, and the turn to add to its dq.
struct Visit {
    Step step;
    u32 turn;  // which word
    u32 after; // what it says when the turn has come; 0 when there is nothing to wait for
    u32 name;  // what to write there, 0 when the block comes back to the same tile
    u32 add;   // whether dq holds something already
};

__device__ __forceinline__ u32 read_turn(const u32* turn) {
    u32 r;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(turn) : "memory");
    return r;
}

// Waits until the word says `name`; `seen` is what it said before. One thread's, before a barrier of the block: what the
// predecessor wrote is then visible to all.
__device__ __forceinline__ void await_turn(const u32* turn, u32 name, u32 seen) {
    while (seen != name) seen = read_turn(turn);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// One thread's, after a barrier of the block: what all its threads wrote is visible to whoever finds the name.
__device__ __forceinline__ void pass_turn(u32* turn, u32 name) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(name) : "memory");
}

// The walk of a tile of keys over the tiles of q rows that it meets, head by head, each list from its end. Thread 0's alone.
struct Round {
    Run own;
    Run partner;
    u32 head, head_end;
    u32 next, begin, end;      // entries of the list of q runs, taken from the end
    u32 run;                   // the current q run
    u32 tile, tile_begin;      // its tiles that are still to be met, from the last on
    u32 full_begin, full_end;  // its rows that every key meets
    u32 turn;                  // the tiles of q runs before it
    u32 name;                  // the number of the own tile plus one
    u32 again, more;           // whether the list named this run just before, and whether it will again

    __device__ __forceinline__ void start(const Run& key, u32 number, u32 head0, u32 head1) {
        own = key;
        name = number + 1;
        begin = key.begin;
        next = key.end;
        end = key.end;
        head = head0;
        head_end = key.begin < key.end ? head1 : head0;
        tile = 0;
        tile_begin = 0;
    }

    template <int BM, int BN>
    __device__ __forceinline__ void step(volatile Visit& out, volatile const Own& tile_of, const FusedParams& p) {
        const Run& query = partner;
        const i64 left = p.call.score.left, right = p.call.score.right;
        while (tile == tile_begin) {
            if (next == begin) {
                next = end;
                head = head + 1;
            }
            if (head >= head_end) {
                out.step.live = 0;
                return;
            }
            const u32 at = next - 1;
            next = at;
            const u32 r = p.call.partners[at];
            run = r;
            again = at + 1 < end && p.call.partners[at + 1] == r;
            more = at > begin && p.call.partners[at - 1] == r;
            turn = p.query_tiles[r];
            partner = p.call.queries[r];
            const i64 lowest = tile_of.lowest - query.pos, highest = tile_of.highest - query.pos;
            full_begin = rows_below(query, highest - right);
            full_end = rows_below(query, lowest + left + 1);
            const Span span = tiles_met<BM>(query, tile_of.lowest - right, tile_of.highest + left);
            tile = span.begin < span.end ? span.end : 0;
            tile_begin = span.begin < span.end ? span.begin : 0;
        }
        const u32 i = tile - 1;
        tile = i;
        const u32 first = i * BM, rows = query.len - first < BM ? query.len - first : BM;
        out.step.row = query.row + first;
        out.step.run = run;
        out.step.first = first;
        out.step.rows = rows;
        out.step.head = head;
        out.step.live = 1;
        out.step.full = rows == BM && tile_of.rows == BN && first >= full_begin && first + BM <= full_end;
        u32 after = 0;
        if (!again) {
            const i64 low = query.pos + run_offset(query, first) - left;
            const i64 high = query.pos + run_offset(query, first + rows - 1) + right;
            const bool leads = tile_of.first / BN == rows_below(own, low - own.pos) / BN;
            after = leads ? last_before<BN>(query, low, high, tile_of.run, p) : name - 1;
        }
        out.turn = (turn + i) * p.call.heads.q_heads + head;
        out.after = after;
        out.name = more ? 0 : name;
        out.add = again || after != 0 || query.mode == MODE_MERGE || query.mode == MODE_LAST;
    }

    // The name of the last tile that adds to these rows of a q run before any of k run `run` does, 0 when there is none.
    template <int BN>
    static __device__ __forceinline__ u32 last_before(const Run& query, i64 low, i64 high, u32 run, const FusedParams& p) {
        u32 name = 0, best = 0;
        // Lists mostly grow, so that the first one found from the end stays the best.
        for (u32 at = query.end; at > query.begin; --at) {
            const u32 r = p.keys_of[at - 1];
            if (r >= run || (name != 0 && r <= best)) continue;
            const Span span = tiles_met<BN>(p.call.keys[r], low, high);
            if (span.begin < span.end) {
                name = p.key_tiles[r] + span.end;
                best = r;
            }
        }
        return name;
    }
};
