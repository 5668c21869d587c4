// SPDX-License-Identifier: MIT OR Apache-2.0
// The dq semaphore: how blocks add to one dq in a fixed order, with no atomic addition and no second buffer.
//
// A tile of keys adds to every tile of q rows that it meets, in the order of k runs and of tiles in them. Each tile of q
// rows has, per q head, a word that holds the number (plus one) of the last tile of keys that has added. A block waits until
// the word holds its predecessor's number, adds, and stores its own. The predecessor is nearly always the tile before it in
// the same run; only a run's first tile that meets these rows has to look through the other runs.
//
// Both sides must agree on which tiles meet, or a block waits for one that never comes. So there is one test, and it is
// symmetric: of each tile, as much as the band has rows for; these meet when the last q row reaches the first key and the last key
// reaches the first q row. Stripes leave gaps in which a pair meets though no row of it does. `dq_semaphore.rs` of the host holds the
// same test and proves it. A list may name a run several times, under different bands: a block adds to such a tile of q rows once for
// each band under which they meet, waits before the first of these, and lets the successor go on behind the last.
//
// No block waits for one that has not begun: items are taken one by one from a list in which a tile comes after all that it
// may wait for, so the earliest unfinished one waits for none. How many blocks run at a time does not matter.
//
// Q tiles are walked from the last to the first, with the heads of a group innermost. Under a causal mask the tiles of keys
// that run side by side then begin together at the end of the document, each one step behind the one before, and go on
// without waiting; walked the other way, each would begin where its predecessor comes last, and head by head, it would come
// back to the end before the longer tile that goes before it. So the longest tiles can start first, as they should.
#pragma once
#include "ranges.cuh"
#include "tile.cuh"

// Tiles of a run: `begin..end`, empty when begin >= end.
struct Span {
    u32 begin;
    u32 end;
};

// The tiles of `size` rows whose last position is at least `low` and whose first is at most `high`. A tile counts too when
// `low..=high` lies in a gap between two of its rows.
__device__ __forceinline__ Span tiles_met(const Run& run, i64 low, i64 high, u32 size) {
    const u32 before = rows_below(run, low - run.pos), until = rows_below(run, high - run.pos + 1);
    Span span = {before / size, (until + (size - 1)) / size};
    if (before >= run.len) span.end = 0;
    return span;
}

// The same of a run of partners: those that an own tile at `lowest..=highest` meets under a band.
__device__ __forceinline__ Span tiles_met(const Run& run, const Band& band, i64 lowest, i64 highest, u32 size) {
    const Reach met(band, lowest, highest);
    if (met.first > met.last) return {0, 0};
    return tiles_met(run, met.first, met.last, size);
}

// One tile of q rows for one head (or for several, which share it), and when to add to its dq. Kept small: several lie in shared
// memory, where there is little left.
struct DqStep {
    i64 row;               // its first row in the tensor
    u32 pair;              // entry of the list of q runs: its run, and the band
    u32 first;             // its first row in the run
    u32 head;
    u32 semaphore;         // which word
    u32 after;             // what it holds when this block may add; 0 when there is nothing to wait for
    unsigned char rows;  // 0 past the last step
    unsigned char flags;
    unsigned char heads;       // with SHARES (see Round): how many there are, from `head` on
    unsigned char token_bits;  // and the binary logarithm of the rows that each has in the tile
};

// Of a step: all its rows meet all own rows, so that no mask is needed; dq holds something already; the own number is to be
// stored in the word (not when the block comes back to the same tile).
enum : u32 { DQ_FULL = 1, DQ_ADD = 2, DQ_PASSES = 4 };

// Of two tiles: they have met under another band, or will.
enum : u32 { MET_BEFORE = 1, MET_BEHIND = 2 };

// What a semaphore holds at the moment. It orders nothing: a thread that finds what it waits for goes on to `wait_semaphore`.
__device__ __forceinline__ u32 poll_semaphore(const u32* semaphore) {
    u32 r;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(semaphore) : "memory");
    return r;
}

// Waits until a semaphore holds `number`; `seen` is what it held before. For one thread, before a barrier of the block: what
// the predecessor wrote is then visible to all its threads. Polling is relaxed; only the last read acquires. It finds the
// same number, because no other block stores the next one.
__device__ __forceinline__ void wait_semaphore(const u32* semaphore, u32 number, u32 seen) {
    while (seen != number) {
#ifdef CPATTN_PAUSE
        asm volatile("nanosleep.u32 64;");
#endif
        seen = poll_semaphore(semaphore);
    }
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(semaphore) : "memory");
}

// For one thread, after a barrier of the block: what all its threads wrote is visible to every thread that waits for `number`.
__device__ __forceinline__ void store_semaphore(u32* semaphore, u32 number) {
#ifdef CPATTN_FENCES
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(semaphore), "r"(number) : "memory");
}

// The walk of a tile of keys over the tiles of q rows that it meets, from the last to the first, and over the heads of each.
// The first warp's alone: lane 0 moves from run to run, and each of BATCH lanes describes one step. That takes some hundred
// dependent instructions, which a lane alone would spend in every step while all other warps wait for its own.
//
// With SHARES, where a run's last tile has at most half of the rows of a tile, several heads share a step: 16 or 32 rows of each, as
// many heads as fill the tile. Which heads do depends on the tile and on the heads of the item alone, so all tiles of keys agree,
// and the word of the first of these heads serves all of them.
template <bool SHARES>
struct Round {
    u32 head, heads;           // q heads of each tile, from `head` on
    u32 next, begin, end;      // entries of the list of q runs, taken from the end
    u32 run;                   // the current q run
    u32 tile, tile_begin;      // its tiles that are still to be met, from the last on
    u32 at;                    // steps that the last one of these has had
    u32 full_begin, full_end;  // its rows that every key meets
    u32 number;                // of the own tile, plus one
    bool again, more;          // whether the list named this run just before, and whether it will again
    unsigned char token_bits;  // of the next tile to be met: the binary logarithm of the rows that a head has in a step

    // Lane 0's.
    __device__ __forceinline__ void start(const Run& key, u32 tile_number, u32 head0, u32 head1, volatile const Own& tile_of,
                                          const FusedParams& p, u32 size) {
        number = tile_number + 1;
        begin = key.begin;
        next = head0 < head1 ? key.end : key.begin;
        end = key.end;
        head = head0;
        heads = head1 - head0;
        at = 0;
        tile = 0;
        tile_begin = 0;
        if (SHARES) token_bits = log2_of(size);
        find(tile_of, p, size);
    }

    // The whole warp's: the next BATCH steps; those past the end have no rows.
    template <int BM, int BN, u32 BATCH>
    __device__ __forceinline__ void fill(volatile DqStep* out, volatile const Own& tile_of, const FusedParams& p) {
        const u32 lane = fresh_thread() & 31;
        u32 filled = 0;
        do {
            // Beyond what fits, more tiles make no difference; their product with the heads stays small.
            u32 tiles = tile - tile_begin < BATCH + 1 ? tile - tile_begin : BATCH + 1;
            u32 each = 1, steps = heads;  // heads of a step, and steps of a tile
            if (SHARES && (1u << token_bits) < BM) {
                tiles = 1;
                each = (u32)BM >> token_bits;
                steps = (heads + each - 1) / each;
            }
            const u32 ready = tiles * steps - at, room = BATCH - filled;
            const u32 some = ready < room ? ready : room;
            if (lane >= filled && lane < filled + some) {
                const u32 index = at + lane - filled, skipped = index % steps * each;
                if (SHARES) {
                    out[lane].heads = heads - skipped < each ? heads - skipped : each;
                    out[lane].token_bits = token_bits;
                }
                meet<BM, BN>(out[lane], tile - 1 - index / steps, head + skipped, tile_of, p);
            }
            filled += some;
            __syncwarp();
            if (lane == 0 && some > 0) {
                const u32 index = at + some;
                tile = tile - index / steps;
                at = index % steps;
                if (SHARES && at == 0) token_bits = log2_of(BM);
                if (tile == tile_begin) find(tile_of, p, BM);
            }
            __syncwarp();
        } while (filled < BATCH && tile != tile_begin);
        if (lane >= filled && lane < BATCH) out[lane].rows = 0;
    }

    // The next run that has tiles for us, if there is one: else none are left. Lane 0's.
    __device__ __forceinline__ void find(volatile const Own& tile_of, const FusedParams& p, u32 size) {
        while (tile == tile_begin && next != begin) {
            const u32 entry = next - 1;
            next = entry;
            const Pair pair = p.call.partners[entry];
            run = pair.run;
            again = entry + 1 < end && p.call.partners[entry + 1].run == run;
            more = entry > begin && p.call.partners[entry - 1].run == run;
            const Run& partner = p.call.queries[run];
            const Band& band = p.call.bands[pair.band];
            const FullReach full(band, tile_of.lowest, tile_of.highest);
            full_begin = rows_below(partner, full.first - partner.pos);
            full_end = rows_below(partner, full.last + 1 - partner.pos);
            const Span span = tiles_met(partner, band, tile_of.lowest, tile_of.highest, size);
            tile = span.begin < span.end ? span.end : 0;
            tile_begin = span.begin < span.end ? span.begin : 0;
            if (SHARES) {
                // Of the last tile met, if there is one; only a run's last tile has fewer than `size`.
                const u32 rows = partner.len - (tile - 1) * size;
                const bool is_short = tile != tile_begin && rows <= size / 2;
                token_bits = heads > 1 && is_short ? (rows > 16 ? 5 : 4) : log2_of(size);
            }
        }
    }

    // The binary logarithm of the rows of a tile.
    static __device__ __forceinline__ u32 log2_of(u32 size) { return 31 - __clz(size); }

    // Describes the step of one tile for one head.
    template <int BM, int BN>
    __device__ __forceinline__ void meet(volatile DqStep& out, u32 met, u32 for_head, volatile const Own& tile_of,
                                         const FusedParams& p) {
        const Run& partner = p.call.queries[run];
        const u32 first = met * BM, rows = partner.len - first < BM ? partner.len - first : BM;
        // Written as soon as it is known: there are few registers.
        out.row = partner.row + first;
        out.pair = next;
        out.first = first;
        out.head = for_head;
        out.semaphore = (p.query_tiles[run] + met) * p.call.heads.q_heads + for_head;
        out.rows = rows;
        u32 flags = rows == BM && tile_of.rows == BN && first >= full_begin && first + BM <= full_end ? DQ_FULL : 0;
        if (partner.mode == MODE_MERGE || partner.mode == MODE_LAST) flags |= DQ_ADD;
        const i64 lowest = partner.pos + run_offset(partner, first), highest = partner.pos + run_offset(partner, first + rows - 1);
        u32 others = 0;
        if (again || more) others = other_meetings(lowest, highest, tile_of, p);
        if (!(others & MET_BEHIND)) flags |= DQ_PASSES;
        out.flags = flags | (others & MET_BEFORE ? DQ_ADD : 0);
        out.after = 0;
        if (others & MET_BEFORE) return;
        const Run& own = p.call.keys[tile_of.run];
        // The two meet, so the own tile is one of those in reach; is it the first?
        const i64 low = first_in_reach(p.query_bands[p.call.partners[next].band], lowest);
        u32 after = number - 1;
        if (tile_of.first / BN == rows_below(own, low - own.pos) / BN)
            after = last_before<BN>(partner, lowest, highest, tile_of.run, again || more ? tile_of.first / BN : 0, p);
        if (after == 0) return;
        out.after = after;
        out.flags = flags | DQ_ADD;
    }

    // Whether the own tile has met, or will meet, rows of the current run at `lowest..=highest` under other bands that the list has for
    // it: those behind the current entry come before it.
    __device__ __forceinline__ u32 other_meetings(i64 lowest, i64 highest, volatile const Own& tile_of, const FusedParams& p) const {
        u32 at = next, found = 0;
        while (at > begin && p.call.partners[at - 1].run == run) --at;
        for (; at < end; ++at) {
            const Pair pair = p.call.partners[at];
            if (pair.run != run) break;
            const Reach met(p.call.bands[pair.band], tile_of.lowest, tile_of.highest);
            if (at != next && met.first <= met.last && met.first <= highest && lowest <= met.last)
                found |= at > next ? MET_BEFORE : MET_BEHIND;
        }
        return found;
    }

    // The number (plus one) of the last tile that adds to these rows of a q run before tile `tile` of k run `run` does, 0 when there
    // is none.
    template <int BN>
    static __device__ __forceinline__ u32 last_before(const Run& query, i64 lowest, i64 highest, u32 run, u32 tile,
                                                      const FusedParams& p) {
        u32 number = 0, best = 0;
        // Lists mostly grow, so that the first one found from the end stays the best.
        for (u32 at = query.end; at > query.begin; --at) {
            const Pair pair = p.keys_of[at - 1];
            const u32 r = pair.run;
            if (r > run || (r == run && tile == 0) || (number != 0 && r < best)) continue;
            const Span span = tiles_met(p.call.keys[r], p.query_bands[pair.band], lowest, highest, BN);
            const u32 last = r == run && tile < span.end ? tile : span.end;
            if (span.begin < last) {
                const u32 found = p.key_tiles[r] + last;
                number = found > number ? found : number;
                best = r;
            }
        }
        return number;
    }
};
