// SPDX-License-Identifier: MIT OR Apache-2.0
// The check that runs on devices carry along: see src/kernel/cuda/launch/tags.rs.
//
// Both kernels run on the communication stream: `cpattn_begin_run` before the first exchange of a run,
// `cpattn_arrived` behind every exchange that brings something. Neither waits for anything. A run that disagreed is
// noted where the host sees it, once; what arrived with it, and whatever arrives later, becomes NaN in every element
// type, so that no result is made of it in silence.
#include "params.cuh"

constexpr int THREADS = 256;
// Odd in both halves, so that neither zeros nor equal words are a tag.
constexpr u64 SEAL = 0x9e3779b97f4a7c15ull;

static __device__ u64 seal(u64 fingerprint, u64 run) {
    return (fingerprint << 32 | fingerprint >> 32) ^ run ^ SEAL;
}

extern "C" __global__ void __launch_bounds__(32) cpattn_begin_run(const __grid_constant__ BeginRunParams p) {
    if (threadIdx.x == 0) {
        const u64 run = *p.runs + 1;
        *p.runs = run;
        p.tags[0] = {p.fingerprint, run, seal(p.fingerprint, run)};
    }
    for (u32 i = 1 + threadIdx.x; i < p.tag_count; i += 32) p.tags[i] = {0, 0, 0};
}

// The first of the tags that came with this exchange which is not the own one; `end` if there is none.
static __device__ u32 first_other(const ArrivedParams& p) {
    const u64 fingerprint = p.tags[0].fingerprint, run = p.tags[0].run;
    u32 i = p.tags_begin;
    while (i < p.tags_end && p.tags[i].fingerprint == fingerprint && p.tags[i].run == run &&
           p.tags[i].seal == p.tags[0].seal) {
        i++;
    }
    return i;
}

static __device__ void note(const ArrivedParams& p, u32 tag) {
    if (*p.disagreed != 0) return;  // the first one counts
    *p.disagreed = 1;
    const Tag ours = p.tags[0], theirs = p.tags[tag];
    p.note->tag = tag;
    p.note->ours = ours.fingerprint;
    p.note->our_run = ours.run;
    p.note->theirs = theirs.fingerprint;
    p.note->their_run = theirs.run;
    p.note->is_tag = theirs.seal == seal(theirs.fingerprint, theirs.run);
    __threadfence_system();
    *(volatile u64*)&p.note->written = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) cpattn_arrived(const __grid_constant__ ArrivedParams p) {
    const u32 other = first_other(p);
    if (other == p.tags_end) {
        // No thread writes the word in this launch: every thread has found the same.
        if (*p.disagreed == 0) return;
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
        note(p, other);
    }
    const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, all = (u64)gridDim.x * THREADS;
    for (u32 i = 0; i < p.range_count; i++) {
        const ArrivedRange range = p.ranges[i];
        const Tensor base = p.bases[range.base];
        char* const at = base.ptr + range.row * base.token + (i64)range.first_head * base.head;
        if ((((u64)at | range.bytes) & 15) == 0) {
            const u64 ones = ~0ull;
            for (u64 k = first; k < range.bytes / 16; k += all) *(ulonglong2*)(at + k * 16) = {ones, ones};
        } else {
            for (u64 k = first; k < range.bytes / 2; k += all) *(u16*)(at + k * 2) = 0xffff;
        }
    }
}
