// SPDX-License-Identifier: MIT OR Apache-2.0
// What the host hands a kernel: one plain struct per kernel, passed by value.
//
// `src/kernel/cuda/abi/params.rs` holds the same structs field by field and asserts their sizes. Strides are in bytes.
// Nothing here may gain a field of another size without its twin.
#pragma once

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;
using u16 = unsigned short;

// A `[tokens, heads, dim]` tensor: address and strides in bytes.
struct Tensor {
    char* ptr;
    i64 token;
    i64 head;
};

// A number to divide by: x / by = (t + ((x - t) >> (shift & 1))) >> (shift >> 1), with t the upper half of x * magic.
// (Granlund and Montgomery, 1994.) Division itself would cost a matrix kernel too many registers.
struct Divisor {
    u32 by;
    u32 magic;
    u32 shift;
};

// A run of rows with positions. `begin..end` are entries of the list of partners: of a q run its k runs, of a k run the
// q runs that read it. A run without stripes has block == period == 1.
struct Run {
    i64 row;
    i64 pos;
    u32 len;
    u32 begin;
    u32 end;
    u32 mode;
    Divisor block;
    Divisor period;
};

// An entry of a list of partners: a run of the other side, and the band of the two runs.
struct Pair {
    u32 run;
    u32 band;
};

// Which rows of an own run meet which rows of a partner, by position: those within `from..to` on either side, where the partner's
// row lies at most `before` back and `after` ahead of the own one. The call's window is in it. Whatever meets nothing has no own
// rows. A table has bands as one side sees them: own rows are those of q or those of k.
struct Band {
    i64 own_from, own_to;
    i64 partner_from, partner_to;
    i64 before, after;
    i64 shift;  // ALiBi's distance is that of the positions, own less partner, less this
};

// One tile of work: the run, and its first row in that run. In the fused backward a `first` with the bit WORK_ZERO is a
// tile of a q run that meets nothing, and is written with zeros.
struct Work {
    u32 run;
    u32 first;
};

enum : u32 { WORK_ZERO = 0x80000000u };

enum : u32 { MODE_FIRST = 0, MODE_MERGE = 1, MODE_LAST = 2, MODE_ONLY = 3 };
enum : u32 { SCORE_GENERAL = 1, SCORE_SOFTCAP = 2 };

// How scores are made. The plain score keeps q·k as it is and folds `exp_scale` into the exponent. The general one
// (softcap, ALiBi, a scale that is not a positive normal f32) turns q·k into base-2 units first, and `exp_scale` is then 1.
struct Score {
    float exp_scale;   // of the exponent
    float scale_log2;  // scale * log2(e)
    float cap_in;      // 2 * log2(e) * scale / cap
    float cap_log2;    // cap * log2(e)
    float scale;       // scale of the gradients
    u32 flags;
};

struct Heads {
    u32 q_heads;
    u32 kv_heads;
    u32 q_offset;
    u32 kv_offset;
    u32 group;
    u32 dim;    // of q and k, a multiple of 8
    u32 value;  // of v and o, a multiple of 8
    u32 items;  // work items times heads
};

struct ForwardParams {
    Tensor q, k, v, running, running_lse, o, lse, alibi_slopes, sinks;
    Tensor max_logit;  // or null
    const Run* queries;
    const Run* keys;
    const Pair* partners;
    const Band* bands;
    const Work* work;
    Score score;
    Heads heads;
    u32 running_lse_words;  // 1 or 2: see log_sum_exp.cuh
    u32 sink_count;         // of each head; 0 without sinks
};

// Dropout of a call: see dropout.cuh. The token of the first row of each run, in the packed batch.
struct Dropout {
    const u32* q_tokens;
    const u32* k_tokens;
    u32 key[2];        // of Philox: the seed
    u32 last_dropped;  // words up to this one drop
    float factor;      // of pairs that are kept
};

struct DroppedForwardParams : ForwardParams {
    Dropout dropout;
};

// Where a run of k rows lies in its document, among the rows that the rank has of it.
struct PageRun {
    u32 document;
    u32 first;  // its first row
};

// Pages of k and v: row i of a document is row table[document * per_document + i / size] * stride + i % size of both.
struct Pages {
    const PageRun* runs;  // of each k run
    const int* table;
    Divisor size;
    u32 stride;
    u32 per_document;
    u32 unused;
};

struct PagedForwardParams : ForwardParams {
    Pages pages;
};

struct BackwardParams {
    Tensor q, k, v, d_o, lse, delta, dq, dk, dv, alibi_slopes;
    const Run* queries;
    const Run* keys;
    const Pair* partners;
    const Band* bands;
    const Work* work;
    Score score;
    Heads heads;
    u32 per_q_head;
    u32 accumulate;
};

struct DroppedBackwardParams : BackwardParams {
    Dropout dropout;
};

// The backward in one kernel. `partners` of `call` are the q runs of each k run, and its bands are those of keys; `dq_semaphore` holds a word for each tile
// of q rows and q head, `key_semaphore` one for each tile of keys and head of dk, all zero before the launch, as is
// `tile_counter`, the number of items that were taken.
struct FusedParams {
    BackwardParams call;
    const Pair* keys_of;      // of each q run, its k runs
    const Band* query_bands;  // as q rows see them
    const u32* query_tiles;  // of each q run, the tiles of all q runs before it
    const u32* key_tiles;    // of each k run, the tiles of all k runs before it
    u32* dq_semaphore;
    u32* key_semaphore;
    u32* tile_counter;
    u32 parts;       // items of one tile of keys and head: each has some of the q heads of the group
    u32 part_heads;  // that many
};

// Where a tensor of a transform lies. Lists hold no addresses, so that they serve any: a launch brings those of its bases.
// Base 0 is plain memory: `row` counts its bytes, and the strides are the tensor's own. The others are whole tensors, of
// which this one is the part from `row` and `first_head` on, with their strides.
struct TransformTensor {
    i64 row;
    i64 token;
    i64 head;
    u32 first_head;
    u32 base;
};

// A block of a transform, cut into tiles of steps. A step is 8 elements where the dim is a multiple of 8, else one; the
// 8 are moved one by one where an address or a stride of the block's tensors is no multiple of 16 bytes.
struct TransformBlock {
    TransformTensor dst;
    u64 rows;        // tokens times heads
    u64 first_tile;  // tiles of the blocks before this one
    Divisor heads;   // rows of one token
    Divisor units;   // steps of one row
    Divisor dim;     // elements of one row
    u32 eights;      // whether a step is 8 elements
    u32 dtype;       // of dst
    u32 sources_begin;
    u32 sources_end;
    u32 unused;
};

struct TransformSource {
    TransformTensor src;
    u32 dtype;
    u32 unused;
};

enum : u32 { TRANSFORM_BASES = 14 };

struct TransformParams {
    const TransformBlock* blocks;
    const TransformSource* sources;
    u64 tiles;
    u32 block_count;
    u32 unused;
    Tensor bases[TRANSFORM_BASES];  // of base 0, the address alone
};

struct DeltaParams {
    Tensor o, d_o, delta;
    Tensor lse, d_lse;  // d_lse may be null; lse is read beside it only
    u64 rows;
    u32 heads;
    u32 dim;
    u32 dtype;
    u32 lanes;  // threads of one row: a power of two, at most 32
};

struct FinishParams {
    Tensor o, lse, sinks;
    const Run* runs;
    const Work* work;
    u32 items;
    u32 heads;
    u32 dim;
    u32 rows;  // of one work item
    u32 sink_count;  // of each head; 0 without sinks
    u32 unused;
};

struct MergeParams {
    Tensor o, lse, with_o, with_lse;
    u64 rows;
    u32 heads;
    u32 dim;
    u32 lse_words;  // 1 or 2: see log_sum_exp.cuh
    u32 with_lse_words;
};

struct CombineParams {
    Tensor o, lse, sinks;
    const TransformSource* parts;  // o of each part, then lse of each
    u64 rows;
    u32 part_count;
    u32 heads;
    u32 dim;
    u32 dtype;  // of o
    u32 lanes;  // threads of a row: a power of two, at most 32
    u32 sink_count;
    Tensor bases[TRANSFORM_BASES];
};

// What ranks compare in a run: what is run, its number in the life of the group, and a word that makes it a tag.
struct Tag {
    u64 fingerprint;
    u64 run;
    u64 seal;
};

struct BeginRunParams {
    u64* runs;  // of the group, so far
    Tag* tags;  // the own one, then those that arrive
    u64 fingerprint;
    u32 tag_count;
    u32 unused;
};

// What a rank's host reads: page-locked memory of the host. `written` comes last.
struct Note {
    u64 tag;
    u64 ours, our_run;
    u64 theirs, their_run;
    u64 is_tag;
    u64 written;
};

// Bytes that an exchange brought, in a base of the launch: as TransformTensor says it.
struct ArrivedRange {
    i64 row;
    u64 bytes;
    u32 first_head;
    u32 base;
};

struct ArrivedParams {
    const Tag* tags;
    const ArrivedRange* ranges;
    u64* disagreed;
    Note* note;
    u32 tags_begin;  // those that came with this exchange
    u32 tags_end;
    u32 range_count;
    u32 unused;
    Tensor bases[TRANSFORM_BASES];
};
