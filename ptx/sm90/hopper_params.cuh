// SPDX-License-Identifier: MIT OR Apache-2.0
// What the forward kernel of sm_90a is given, and what its loading thread leaves for the multiplying warps.
// `src/kernel/cuda/hopper/mod.rs` mirrors the parameters.
#pragma once
#include "hopper.cuh"
#include "shared/log_sum_exp.cuh"
#include "shared/max_logit.cuh"
#include "shared/score.cuh"
#include "shared/tile.cuh"

struct HopperMaps {
    TensorMap q, k, v;
    TensorMap q_shared;  // that of q with the box of a shared tile
};

// Tiles of 2^token_bits q rows: head after head, as many heads as fill BM rows. The q heads of a call that read one kv head
// are cut into `each` parts of so many heads; the first kv head has `first_heads` of them, the others up to `group`.
struct SharedTiles {
    const Work* work;
    u32 begin;  // the first item: 0, or behind those of one head
    u32 tiles;
    u32 parts;  // items of a tile
    u32 each;
    u32 first_heads;
    u32 group;
    u32 token_bits;
    u32 unused;
};

// Begins with what the kernel of sm_80 is given, which does the call where maps cannot say what its tensors are.
struct HopperForwardParams {
    ForwardParams call;
    u32* tile_counter; // 0 before the launch, and after it
    const Work* work;  // tiles of BM rows
    u32 q_span;        // rows to a part of the map of q
    u32 k_span;        // and of those of k and v
    u32 tiles;         // work items of one head
    u32 section;       // q heads whose tiles are taken before any of the next ones
    SharedTiles shared;
};

// What a block works on.
struct Item {
    Own own;         // its first head, and the rows of each
    u32 heads;
    u32 token_bits;  // of the rows that lie between one head and the next; those of BM where there is one head
    u32 meets;       // whether it meets any key
    u32 mode;        // of its q run
    const Run* run;  // that q run
};

// A tile of keys.
struct HopperStep {
    const Run* run;
    const Band* band;
    u32 first;  // its first row in the run
    u32 flags;
};

// What is to be done with its scores, and whether it is the item's last.
enum : u32 { STEP_MASKED = 1, STEP_GENERAL = 2, STEP_LAST = 4 };
