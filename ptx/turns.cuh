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
// Q tiles are walked from the last to the first, with the heads of a group innermost. Under a causal mask the tiles of keys
// that run side by side then begin together at the end of the document, each a turn behind the one before, and go on without
// waiting; walked the other way, each would begin where its predecessor comes last, and head by head, it would come back to
// the end before the longer tile that goes before it. So the longest tiles can start first, as they should.
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

// The walk of a tile of keys over the tiles of q rows that it meets, from the last to the first, and over the heads of each.
// Thread 0's alone.
struct Round {
    Run own;
    Run partner;
    Visit visit;               // the one handed out last
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
        next = head0 < head1 ? key.end : key.begin;
        end = key.end;
        head = head0;
        head_end = head1;
        tile = 0;
        tile_begin = 0;
        visit.step.live = 0;
    }

    template <int BM, int BN>
    __device__ __forceinline__ void step(volatile Visit& out, volatile const Own& tile_of, const FusedParams& p) {
        if (visit.step.live && visit.step.head + 1 < head_end) {
            visit.step.head += 1;
            visit.turn += 1;
        } else {
            visit.step.live = find<BM>(tile_of, p);
            if (!visit.step.live) {
                out.step.live = 0;
                return;
            }
            meet<BM, BN>(tile_of, p);
        }
        out.step.row = visit.step.row;
        out.step.run = visit.step.run;
        out.step.first = visit.step.first;
        out.step.rows = visit.step.rows;
        out.step.head = visit.step.head;
        out.step.live = 1;
        out.step.full = visit.step.full;
        out.turn = visit.turn;
        out.after = visit.after;
        out.name = visit.name;
        out.add = visit.add;
    }

    // The next tile of q rows; whether there is one.
    template <int BM>
    __device__ __forceinline__ bool find(volatile const Own& tile_of, const FusedParams& p) {
        while (tile == tile_begin) {
            if (next == begin) return false;
            const u32 at = next - 1;
            next = at;
            run = p.call.partners[at];
            again = at + 1 < end && p.call.partners[at + 1] == run;
            more = at > begin && p.call.partners[at - 1] == run;
            turn = p.query_tiles[run];
            partner = p.call.queries[run];
            const i64 low = tile_of.lowest - p.call.score.right, high = tile_of.highest + p.call.score.left;
            full_begin = rows_below(partner, tile_of.highest - p.call.score.right - partner.pos);
            full_end = rows_below(partner, tile_of.lowest + p.call.score.left + 1 - partner.pos);
            const Span span = tiles_met<BM>(partner, low, high);
            tile = span.begin < span.end ? span.end : 0;
            tile_begin = span.begin < span.end ? span.begin : 0;
        }
        tile -= 1;
        return true;
    }

    // Describes it, for the first head.
    template <int BM, int BN>
    __device__ __forceinline__ void meet(volatile const Own& tile_of, const FusedParams& p) {
        const u32 first = tile * BM, rows = partner.len - first < BM ? partner.len - first : BM;
        visit.step.row = partner.row + first;
        visit.step.run = run;
        visit.step.first = first;
        visit.step.rows = rows;
        visit.step.head = head;
        visit.step.full = rows == BM && tile_of.rows == BN && first >= full_begin && first + BM <= full_end;
        u32 after = 0;
        if (!again) {
            const i64 low = partner.pos + run_offset(partner, first) - p.call.score.left;
            const i64 high = partner.pos + run_offset(partner, first + rows - 1) + p.call.score.right;
            const bool leads = tile_of.first / BN == rows_below(own, low - own.pos) / BN;
            after = leads ? last_before<BN>(partner, low, high, tile_of.run, p) : name - 1;
        }
        visit.turn = (turn + tile) * p.call.heads.q_heads + head;
        visit.after = after;
        visit.name = more ? 0 : name;
        visit.add = again || after != 0 || partner.mode == MODE_MERGE || partner.mode == MODE_LAST;
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
