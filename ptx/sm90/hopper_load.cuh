// SPDX-License-Identifier: MIT OR Apache-2.0
// The loading thread of the forward kernel of sm_90a.
//
// It takes items by a counter until none are left, and the last one brings the counter back to 0: a tile of BM q rows of one head or, where ranges are short, of fewer
// rows of several heads that read the same kv head (a shared tile). It walks over the keys that an item may meet and issues
// the copies: q once, then k and v of each step into STAGES buffers in turn. With each k it leaves a `HopperStep` beside the
// buffer, with each q an `Item`.
//
// The blocks of a cluster take items of neighbouring heads of one tile, which read the same keys by the same walk: an item of the
// counter is then a pair of items, and there are no shared tiles. The block of rank 0 takes the pair and sends its number to
// the other, when that has read the one before.
#pragma once
#include "hopper_block.cuh"
#include "hopper_rows.cuh"

// What a walk reads of the other side.
struct KeyRuns {
    const Run* runs;
    const Pair* list;
    const Band* bands;
};

template <class Shape, u32 CLUSTER>
struct HopperLoad {
    using Block = HopperBlock<Shape, CLUSTER>;
    using Control = typename Block::Control;
    using Shared = typename Block::Shared;
    using PipelineState = typename Block::PipelineState;
    static constexpr int BM = Block::BM, BN = Block::BN, WIDTH = Block::WIDTH, VALUE_WIDTH = Block::VALUE_WIDTH;
    static constexpr u32 K_BYTES = Block::K_BYTES, V_BYTES = Block::V_BYTES;
    using ItemState = typename Block::ItemState;

    // The shared tile that is the `at`-th of them, and the kv head it reads.
    static __device__ __forceinline__ void begin_shared(volatile Item& item, const HopperForwardParams& p, u32 at) {
        const SharedTiles& s = p.shared;
        const u32 part = at % s.parts, kv = part / s.each, skipped = (part - kv * s.each) * ((u32)BM >> s.token_bits);
        const u32 head = (kv == 0 ? 0 : s.first_heads + (kv - 1) * s.group) + skipped;
        const u32 end = min(p.call.heads.q_heads, s.first_heads + kv * s.group);
        const Work work = p.shared.work[at / s.parts];
        describe(item.own, p.call.queries[work.run], work, 1u << s.token_bits, head, kv_head_of(p.call.heads, head));
        item.heads = min(end - head, (u32)BM >> s.token_bits);
        item.token_bits = s.token_bits;
    }

    // The tile of one head that is the `at`-th of them.
    static __device__ __forceinline__ void begin_single(volatile Item& item, const HopperForwardParams& p, u32 at) {
        const ForwardParams& call = p.call;
        const u32 section = at / (p.tiles * p.section), before = section * p.section;
        const u32 heads = min(p.section, call.heads.q_heads - before), inside = at - before * p.tiles;
        const u32 head = before + inside % heads;
        const Work work = p.work[inside / heads];
        describe(item.own, p.call.queries[work.run], work, BM, head, kv_head_of(call.heads, head));
        item.heads = 1;
        item.token_bits = Block::ROW_BITS;
    }

    // Whether this block takes items from the counter.
    static __device__ __forceinline__ bool takes() { return CLUSTER == 1 || blockIdx.x % CLUSTER == 0; }

    // The item that it takes after `item`, which the counter gives. With CPATTN_FIXED_ITEMS no counter is used: a block (of a
    // cluster, the pair) has every n-th item, of n of them.
    static __device__ __forceinline__ u32 take(u32 item, const HopperForwardParams& p, u32 items) {
#ifdef CPATTN_FIXED_ITEMS
        return item + (CLUSTER == 1 ? gridDim.x : fresh_clusters());
#else
        return (CLUSTER == 1 ? gridDim.x : fresh_clusters()) + atomicInc(p.tile_counter, items - 1);
#endif
    }

    // In a cluster of two: the item after the one that `n` counts goes to the other block, or is expected from it.
    static __device__ __forceinline__ void pass_on(const Shared& at, u32 next, const ItemState& n) {
        if (takes()) {
            barrier_acquire(at.item_empty(), n.parity() ^ 1);
            send(at.next_item(), next, at.item_full(), 1);
        } else {
            barrier_expect(at.item_full(), 4);
        }
    }

    // The item after the one that `n` counts.
    static __device__ __forceinline__ u32 next_item(const Shared& at, volatile const Control& control, const ItemState& n) {
        if (takes()) return control.next_item;
        barrier_acquire(at.item_full(), n.parity());
        const u32 next = control.next_item;
        barrier_release_at(at.item_empty(), 0);
        return next;
    }

    // Rows of k or v: by this block, or each block some panels of them to all.
    template <int COLUMNS>
    static __device__ __forceinline__ void load_keys(u32 to, const TensorMap& map, u32 span, const Run& run, u32 first, u32 end, u32 head,
                                                     u32 barrier) {
        if (CLUSTER > 1)
            load_rows_to_all<BN, COLUMNS, CLUSTER>(to, map, span, run, first, end, head, barrier);
        else
            load_rows<BN, COLUMNS>(to, map, span, run, first, end, head, barrier);
    }

    static __device__ __forceinline__ void produce(const HopperMaps& maps, const HopperForwardParams& p, const Shared& at,
                                                   volatile Control& control) {
        const ForwardParams& call = p.call;
        const KeyRuns side = {call.keys, call.partners, call.bands};
        const u32 general = call.score.flags & SCORE_GENERAL ? STEP_GENERAL : 0;
        const u32 shared_items = p.shared.tiles * p.shared.parts;
        const u32 items = (p.tiles * call.heads.q_heads + shared_items) / CLUSTER;
        PipelineState position;
        u32 at_item = blockIdx.x / CLUSTER;
        for (ItemState n;; n.advance()) {
            // All have read the item that was in the slot: q of the one after it has been free since before this item.
            volatile Item& item = control.items[n.slot()];
            volatile Own& own = item.own;
            if (at_item >= items) {
                own.rows = 0;
                barrier_wait(at.q_empty(), n.parity() ^ 1);
                barrier_arrive(at.q_full());
                break;
            }
            const bool is_shared = CLUSTER == 1 && at_item - p.shared.begin < shared_items;
            if (CLUSTER > 1)
                begin_single(item, p, at_item * CLUSTER + blockIdx.x % CLUSTER);
            else if (is_shared)
                begin_shared(item, p, at_item - p.shared.begin);
            else
                begin_single(item, p, at_item < p.shared.begin ? at_item : at_item - shared_items);
            const Run& query = p.call.queries[own.run];
            volatile Sweep<1>& sweep = control.sweep;
            sweep.start(query.begin, query.end, own.partner, own.partner + 1, own, side);
            item.run = &query;
            item.mode = query.mode;
            item.meets = sweep.row != sweep.row_end;
            // The next item is taken now, so that it is there when it is needed.
            const u32 next = takes() ? take(at_item, p, items) : 0;
            // The walk to here ran beside the products of the item before.
            barrier_wait(at.q_empty(), n.parity() ^ 1);
            if (sweep.row == sweep.row_end)
                barrier_arrive(at.q_full());
            else
                load_rows<BM, WIDTH>(at.q, is_shared ? maps.q_shared : maps.q, p.q_span, query, own.first, query.len, own.head,
                            at.q_full());
            if (takes()) control.next_item = next;
            if (CLUSTER > 1) pass_on(at, next, n);
            while (sweep.row != sweep.row_end) {
                const u32 first = sweep.row, end = sweep.row_end, pair = sweep.pair();
                const bool whole = end - first >= BN && first >= sweep.full_begin && first + BN <= sweep.full_end;
                if (end - first > BN)
                    sweep.row = first + BN;
                else
                    sweep.find(own, side);
                const bool last = sweep.row == sweep.row_end;
                const Run& keys = side.runs[side.list[pair].run];
                const u32 stage = position.stage(), free = position.parity() ^ 1;
                barrier_wait(at.k_empty(stage), free);
                volatile HopperStep& step = control.steps[stage];
                step.run = &keys;
                step.band = side.bands + side.list[pair].band;
                step.first = first;
                step.flags = general | (whole ? 0 : STEP_MASKED) | (last ? STEP_LAST : 0);
                load_keys<WIDTH>(at.k + stage * K_BYTES, maps.k, p.k_span, keys, first, end, own.partner, at.k_full(stage));
                barrier_wait(at.v_empty(stage), free);
                load_keys<VALUE_WIDTH>(at.v + stage * V_BYTES, maps.v, p.k_span, keys, first, end, own.partner, at.v_full(stage));
                position.advance();
            }
            at_item = next_item(at, control, n);
        }
    }
};
