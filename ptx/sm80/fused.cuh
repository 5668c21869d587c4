// SPDX-License-Identifier: MIT OR Apache-2.0
// Backward attention in one kernel: five products, and bit for bit the same on every run.
//
// A block owns a tile of keys and walks over the q rows that read it, as `BackwardKeys` does, but also makes dq: ds goes to
// shared memory, and ds k is added to global memory in a fixed order of the blocks (dq_semaphore.cuh).
//
//   s^T = k q^T, dp^T = v do^T, p = exp2(s - lse), ds = p * (dp - delta), dv += p^T do, dk += ds^T q, dq += scale * ds k
//
// What bounds it is shared memory, 128 bytes a cycle, and not only the products. Each B fragment should serve as many rows
// as a warp's sums leave room for:
//
// - Head dims up to 64: each warp owns 32 keys over all columns, so that p^T and ds^T, rounded, are A operands without
//   leaving the registers; ds is stored besides, for dq alone.
// - Above, sums of 32 keys over all columns do not fit. Groups of warps share 32 keys: each makes s^T and dp^T of its own
//   part of the q rows, then its own columns of dk and dv, with both p^T and ds^T through shared memory. At head dim 128,
//   warps of 16 keys that keep p^T to themselves would read 18 % more.
//
// KB of shared memory in a step of 64 q rows, and its mma instructions (m16n8k16):
//
//   head dim  keys  s^T  dp^T  p^T, ds^T  dv   dk   dq   tiles  sum  mma
//   64        128   48   48    16         32   32   64   16     256  1280
//   96        128   96   96    32         80   80   128  24     536  1920
//   128       128   128  128   32         96   96   128  32     640  2560
//   192, 128  64    144  96    16         64   80   80   40     520  1664
//   192       64    144  144   16         80   80   80   48     592  1920
//   256       64    192  192   16         96   96   128  64     784  2560
//   128, held 128   192  128   16         128  128  192  32     816  2560
//
// At head dim 128 that is 5120 cycles of shared memory; the products take as many on sm_80, and some 4100 on sm_90. Global
// memory is read for q and do, and for dq both read and written, in f32: 96 KB a step there, and 192 KB at head dim 256.
// That is why tiles have 128 keys where their sums fit.
//
// "Held" is head dim 128 on devices where a block has 99 KB (sm_86, sm_89, sm_120), of which this takes 98. Each warp owns 16 keys
// over all columns, as at head dim 64, and reads its rows of v once, into 32 registers of a thread. do has one buffer: behind
// the second barrier it is free, and its copy runs beside the products of dq. dq is made in two pieces: in one, the kernel was too
// close to the limit of 255 registers (assembled for sm_90, where it is never run, it spilled 20 bytes in bf16). Their
// multiprocessors make at most half as many products a cycle as that of sm_80: 10240 cycles a step, of which shared memory is
// read in 6528. Two kernels apart, at head dim 128, would take 3584 mma instructions (14336 cycles), 1056 KB of shared memory,
// every exponential twice, and the same 96 KB of global memory, with 4 warps on a multiprocessor in the place of 8.
//
// Where tiles of keys times heads are too few to fill the device, the q heads of a group are dealt out over several blocks,
// which add to dk and dv one after the other.
//
// A step has two barriers. Behind the first one, tiles have arrived and those of the step before are free; behind the
// second, p^T and ds^T are in place and the predecessor has added. dq is made first of what follows, so that its stores are
// long done when the next step stores the semaphore. Three warps have more to do than products: the walk, the wait, the word
// to the successor. Each would delay the barrier after it, so many steps are prepared at once, one by every lane.
#pragma once
#include "backward.cuh"
#include "shared/dq_semaphore.cuh"

// The block's own tile, and what it took. Steps lie in two halves: one is filled while the other is worked off.
template <u32 BATCH>
struct FusedControl {
    Own own;
    DqStep steps[2 * BATCH];
    u32 item;
    u32 zero;
    u32 head0, head1;
    u32 part;      // of the group's q heads
    u32 key_semaphore;  // the word of the tile's dk and dv
};

// What one thread does for an item: whose tile it is, and where its round starts. `Item` has what `FusedControl` begins with.
template <int BM, int BN, class Item, bool SHARES>
__device__ __forceinline__ void begin_item(const FusedParams& p, volatile Item& item, Round<SHARES>& round, u32 number) {
    const BackwardParams& call = p.call;
    const u32 heads = call.per_q_head ? call.heads.q_heads : call.heads.kv_heads;
    const u32 part = number % p.parts, head = number / p.parts % heads;
    Work work = call.work[number / p.parts / heads];
    const Group group = group_of(call, head);
    u32 head0 = group.begin, head1 = group.end;
    if (!call.per_q_head) {
        head0 = head0 + part * p.part_heads;
        head1 = head0 + p.part_heads < head1 ? head0 + p.part_heads : head1;
        head0 = head0 < head1 ? head0 : head1;
    }
    const u32 zero = work.first & WORK_ZERO;
    work.first &= ~WORK_ZERO;
    item.zero = zero;
    item.head0 = head0;
    item.head1 = head1;
    item.part = part;
    const Run& run = (zero ? call.queries : call.keys)[work.run];
    describe(item.own, run, work, zero ? BM : BN, head, group.kv_head);
    if (!zero) {
        const u32 tile = p.key_tiles[work.run] + work.first / BN;
        item.key_semaphore = tile * heads + head;
        round.start(run, tile, head0, head1, item.own, p, BM);
    }
}

// Zeros for the dq of a tile that meets no key: what one of `warps` warps does.
template <class Item>
__device__ __forceinline__ void clear_queries(const BackwardParams& p, volatile const Item& item, u32 warp, u32 warps) {
    const u32 lane = fresh_thread() & 31;
    for (u32 head = item.head0; head < item.head1; ++head)
        for (u32 row = warp; row < item.own.rows; row += warps) {
            char* const to = p.dq.ptr + head * p.dq.head + (item.own.row + row) * p.dq.token;
            for (u32 at = lane * 4; at < p.heads.dim; at += 128)
                *(float4*)(to + at * 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
}

template <class T, class Shape>
struct BackwardFused {
    static constexpr int D = Shape::D, DV = Shape::DV, BM = Shape::BM, BN = Shape::BN, SUB = Shape::SUB;
    static constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS, STAGE = Shape::STAGE;
    static constexpr int KEY_PARTS = Shape::KEY_PARTS, PARTS = Shape::COLUMN_PARTS;
    static constexpr int QUERY_PARTS = Shape::QUERY_PARTS, DQ_PARTS = WARPS / QUERY_PARTS;
    static constexpr int MT = BN / (16 * KEY_PARTS), NT = SUB / 8;
    static constexpr int KN = D / 8 / PARTS, VN = DV / 8 / PARTS;
    static constexpr bool HELD = Shape::HELD;
    // dq is made in pieces of columns where its sums and what they are added to would not fit beside those of dk and dv.
    static constexpr int PIECES = D > 192 || HELD ? 2 : 1;
    static constexpr int QM = BM / (16 * QUERY_PARTS), QN = D / 8 / DQ_PARTS / PIECES;
    static constexpr u32 BATCH = Shape::BATCH, STEPS = 2 * BATCH;
    using Control = FusedControl<BATCH>;
    static_assert(sizeof(Control) + sizeof(Round<false>) <= Shape::CONTROL, "what the host counts on");
    static_assert(Shape::STAGES == 2, "the next tile is loaded while this one is used");
    static_assert(!HELD || (PARTS == 1 && BN <= 2 * BM), "do is read before ds is in place; v passes through the room of both");
    static_assert(2 * BM <= THREADS, "one thread per q row for lse, and one for delta");
    static_assert(PARTS == 1 || PARTS * SUB == BM, "one piece of scores per warp where they pass through shared memory");
    static_assert(THREADS > 64, "three warps for what is not a product");
    static_assert(BATCH >= 3 && BATCH <= 32, "filled in step 1, first looked at in step BATCH - 1; a lane for each");

    // Where the warp stands among the keys, among q rows or columns, and in dq.
    static __device__ __forceinline__ int warp() { return fresh_thread() >> 5; }
    static __device__ __forceinline__ int key_row() { return warp() % KEY_PARTS * 16 * MT; }
    static __device__ __forceinline__ int part() { return PARTS == 1 ? 0 : warp() / KEY_PARTS; }
    static __device__ __forceinline__ int query_row() { return warp() % QUERY_PARTS * 16 * QM; }
    static __device__ __forceinline__ int dq_part() { return warp() / QUERY_PARTS; }

    // Fragments of the warp's rows of v, where it keeps them.
    using Held = u32[HELD ? DV / 16 : 1][MT][4];

    static __device__ __forceinline__ void load_outputs(const BackwardParams& p, u32 to, volatile const DqStep& step) {
        load_tile<BM, DV, THREADS>(to, p.d_o.ptr + step.head * p.d_o.head + step.row * p.d_o.token, (int)p.d_o.token,
                                   (int)step.rows, (int)p.heads.value);
    }

    // q, and do behind it where it has as many buffers.
    static __device__ __forceinline__ void load_queries(const BackwardParams& p, u32 to, volatile const DqStep& step) {
        load_tile<BM, D, THREADS>(to, p.q.ptr + step.head * p.q.head + step.row * p.q.token, (int)p.q.token,
                                  (int)step.rows, (int)p.heads.dim);
        if constexpr (!HELD) load_outputs(p, to + BM * D * 2, step);
    }

    // lse and delta, one after the other. Rows past the end get zeros, and are masked.
    static __device__ __forceinline__ void load_stats(const BackwardParams& p, u32 to, volatile const DqStep& step) {
        const u32 thread = fresh_thread(), row = thread % BM;
        if (thread < 2 * BM) {
            const Tensor& from = thread < BM ? p.lse : p.delta;
            copy_async_word(to + thread * 4, from.ptr + step.head * from.head + (step.row + row) * from.token,
                            row < step.rows);
        }
    }

    // p^T and ds^T of the warp's keys and SUB q rows from `sub` on.
    static __device__ __forceinline__ void scores(float (&s)[MT][NT][4], float (&g)[MT][NT][4], const FusedParams& p,
                                                  volatile const Control& control, volatile const DqStep& step,
                                                  u32 sk, u32 sq, u32 sdo, const Held& held, u32 stats, int sub) {
        clear(s);
        multiply_rows<T, MT, NT, D>(s, walk_a<D>(sk, key_row()), walk_b<D>(sq + sub * D * 2));
        clear(g);
        if constexpr (HELD)
            multiply_held<T, MT, NT, DV>(g, held, walk_b<DV>(sdo + sub * DV * 2));
        else
            multiply_rows<T, MT, NT, DV>(g, walk_a<DV>(sk + BN * D * 2, key_row()), walk_b<DV>(sdo + sub * DV * 2));
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 delta = load_shared_pair(stats + BM * 4 + (sub + n * 8 + 2 * (fresh_thread() & 3)) * 4);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) g[m][n][i] -= i & 1 ? delta.y : delta.x;
        }
        const u32 row = key_row() + (fresh_thread() & 31) / 4;
        const Run& key = p.call.keys[control.own.run];
        const Pair pair = p.call.partners[step.pair];
        const Run& query = p.call.queries[pair.run];
        const Band& band = p.call.bands[pair.band];
        general_gradients(s, g, p.call.score, p.call.alibi_slopes, step.head, key, control.own.first + row, query, band,
                          step.first + sub);
        // Rows of the own tile past its end must not make ds either: lse of a q row may be anything.
        if (!(step.flags & DQ_FULL))
            mask_gradients(s, g, band, key, control.own.first + row, (int)control.own.rows - (int)row, query,
                           step.first + sub);
        const auto base_of = [](float lse) { return exponent_base(lse); };
        if (any_large<SUB>(stats + sub * 4, base_of))
            columns_gradients<true>(s, g, p.call.score.exp_scale, stats + sub * 4, base_of);
        else
            columns_gradients<false>(s, g, p.call.score.exp_scale, stats + sub * 4, base_of);
    }

    // Rounds to a tile of BN keys by BM q rows.
    static __device__ __forceinline__ void store(u32 to, const float (&x)[MT][NT][4], int sub) {
        const int lane = fresh_thread() & 31, g = lane >> 2, t = lane & 3;
        const u32 twist = (u32)((sub / 8 ^ Swizzle<BM>::twist(g)) << 4);
        const u32 row = to + (key_row() + g) * (BM * 2) + 4 * t;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    store_shared(row + ((n << 4) ^ twist) + (m * 16 + h * 8) * (BM * 2),
                                 pack(T{}, x[m][n][2 * h], x[m][n][2 * h + 1]));
    }

    // The first column of a warp's n-th product of 8, from its own first on, when blocks of 16 are dealt out over `parts`.
    static __device__ __forceinline__ constexpr int column(int n, int parts) { return n / 2 * parts * 16 + n % 2 * 8; }

    // The warp's sums c times `scale` to f32 rows at `to`, which is where its first row and column lie; `rows` and `columns`
    // are what is left from there on.
    template <int M, int N, int OVER>
    static __device__ __forceinline__ void write(char* to, i64 stride, int rows, int columns, const float (&c)[M][N][4],
                                                 const float2 (&old)[2 * M][N], float scale) {
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) {
            char* const row = to + r * 8 * stride;
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (r * 8 < rows && column(n, OVER) < columns)
                    *(float2*)(row + column(n, OVER) * 4) =
                        make_float2(old[r][n].x + c[r / 2][n][r % 2 * 2] * scale,
                                    old[r][n].y + c[r / 2][n][r % 2 * 2 + 1] * scale);
        }
    }

    template <int M, int N, int OVER>
    static __device__ __forceinline__ void read(float2 (&old)[2 * M][N], const char* from, i64 stride, int rows,
                                                int columns) {
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) {
            const char* const row = from + r * 8 * stride;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                old[r][n] = make_float2(0.0f, 0.0f);
                if (r * 8 < rows && column(n, OVER) < columns) old[r][n] = *(const float2*)(row + column(n, OVER) * 4);
            }
        }
    }

    // dq of one tile of q rows, added or, where nothing is there yet, written.
    static __device__ __forceinline__ void add_queries(const BackwardParams& p, volatile const DqStep& step, u32 sk,
                                                       u32 sds) {
        const int lane = fresh_thread() & 31, from = dq_part() * 16 + 2 * (lane & 3);
        const int row = query_row() + lane / 4, rows = (int)step.rows - row, columns = (int)p.heads.dim - from;
        char* to = p.dq.ptr + step.head * p.dq.head + (step.row + row) * p.dq.token + from * 4;
        // All of it is there, nearly always; then no access needs a condition of its own.
        const bool whole = step.rows == BM && p.heads.dim == D;
        constexpr int ALL = 1 << 30, WIDTH = D / PIECES;
        static_assert(PIECES == 1 || WIDTH * 2 % 128 == 0, "a piece is whole swizzle groups");
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const int left = columns - piece * WIDTH;
            float2 old[2 * QM][QN];
            if (whole && step.flags & DQ_ADD)
                read<QM, QN, DQ_PARTS>(old, to, p.dq.token, ALL, ALL);
            else
                read<QM, QN, DQ_PARTS>(old, to, p.dq.token, step.flags & DQ_ADD ? rows : 0, left);
            float c[QM][QN][4];
            clear(c);
            multiply_tiles<T, QM, QN, BN, DQ_PARTS, true>(c, walk_a_transposed<BM>(sds, query_row() / 16),
                                                          walk_b_transposed<D>(sk + piece * WIDTH * 2, dq_part()));
            if (whole)
                write<QM, QN, DQ_PARTS>(to, p.dq.token, ALL, ALL, c, old, p.score.scale);
            else
                write<QM, QN, DQ_PARTS>(to, p.dq.token, rows, left, c, old, p.score.scale);
            to += WIDTH * 4;
        }
    }

    // dk or dv of the warp's keys.
    template <int N>
    static __device__ __forceinline__ void write_keys(const BackwardParams& p, const Tensor& to,
                                                      volatile const Own& own, const float (&c)[MT][N][4], float scale,
                                                      int dim, bool add) {
        const int lane = fresh_thread() & 31, from = part() * 16 + 2 * (lane & 3);
        const int row = key_row() + lane / 4, rows = (int)own.rows - row;
        char* const at = to.ptr + own.head * to.head + (own.row + row) * to.token + from * 4;
        float2 old[2 * MT][N];
        read<MT, N, PARTS>(old, at, to.token, add ? rows : 0, dim - from);
        write<MT, N, PARTS>(at, to.token, rows, dim - from, c, old, scale);
    }

    static __device__ __forceinline__ void tile(const FusedParams& p, volatile Control& control, Round<false>& round, u32 sk) {
        const u32 sqs = sk + BN * (HELD ? D : D + DV) * 2, outputs = sqs + 2 * STAGE;
        const u32 sds = sk + Shape::TILES, sp = sds + Shape::PROBABILITIES, stats = sk + Shape::STATS;
        const u32 sv = HELD ? outputs : sk + BN * D * 2;
        volatile const Own& own = control.own;
        load_tile<BN, D, THREADS>(sk, p.call.k.ptr + own.partner * p.call.k.head + own.row * p.call.k.token,
                                  (int)p.call.k.token, (int)own.rows, (int)p.call.heads.dim);
        load_tile<BN, DV, THREADS>(sv, p.call.v.ptr + own.partner * p.call.v.head + own.row * p.call.v.token,
                                   (int)p.call.v.token, (int)own.rows, (int)p.call.heads.value);
        if (control.steps[0].rows) {
            load_queries(p.call, sqs, control.steps[0]);
            load_stats(p.call, stats, control.steps[0]);
        }
        copy_commit();
        Held held;
        if constexpr (HELD) {
            copy_wait<0>();
            __syncthreads();
            load_fragments<MT, DV>(held, walk_a<DV>(sv, key_row()));
            __syncthreads();
            if (control.steps[0].rows) load_outputs(p.call, outputs, control.steps[0]);
            copy_commit();
        }

        float dk[MT][KN][4], dv[MT][VN][4];
        clear(dk);
        clear(dv);

        u32 at = 0;
        for (; control.steps[at].rows; at = at + 1 == STEPS ? 0 : at + 1) {
            volatile const DqStep& step = control.steps[at];
            volatile const DqStep& next = control.steps[(at + 1) % STEPS];
            const u32 sq = sqs + at % 2 * STAGE, sdo = HELD ? outputs : sq + BM * D * 2;
            copy_wait<0>();
            __syncthreads();
            // First of all: another block waits for it, and the release would wait for copies that were issued before.
            if (threadIdx.x == 64) pass(p, control.steps[(at + STEPS - 1) % STEPS], round.number);
            __syncwarp();
            if (next.rows) load_queries(p.call, sqs + (at + 1) % 2 * STAGE, next);
            u32 seen = 0;
            if (threadIdx.x == 32 && step.after) seen = poll_semaphore(p.dq_semaphore + step.semaphore);
            // The other half: its last step was passed on a step ago, and its first is looked at in the last step of this.
            if ((at == 1 || at == BATCH + 1) && warp() == 0)
                round.template fill<BM, BN, BATCH>(control.steps + (at == 1 ? BATCH : 0), control.own, p);
            __syncwarp();

            if constexpr (PARTS == 1) {
#pragma unroll 1
                for (int sub = 0; sub < BM; sub += SUB) {
                    float s[MT][NT][4], g[MT][NT][4];
                    scores(s, g, p, control, step, sk, sq, sdo, held, stats, sub);
                    store(sds, g, sub);
                    multiply_columns<T, MT, NT, DV>(dv, s, walk_b_transposed<DV>(sdo + sub * DV * 2), 0);
                    multiply_columns<T, MT, NT, D>(dk, g, walk_b_transposed<D>(sq + sub * D * 2), 0);
                }
            } else {
                float s[MT][NT][4], g[MT][NT][4];
                scores(s, g, p, control, step, sk, sq, sdo, held, stats, part() * SUB);
                store(sp, s, part() * SUB);
                store(sds, g, part() * SUB);
            }
            if (threadIdx.x == 32 && step.after) wait_semaphore(p.dq_semaphore + step.semaphore, step.after, seen);
            __syncthreads();
            if (next.rows) {
                load_stats(p.call, stats, next);
                if constexpr (HELD) load_outputs(p.call, outputs, next);
            }
            copy_commit();

            add_queries(p.call, step, sk, sds);
            if constexpr (PARTS > 1) {
                multiply_tiles<T, MT, VN, BM, PARTS, false>(dv, walk_a<BM>(sp, key_row()),
                                                            walk_b_transposed<DV>(sdo, part()));
                multiply_tiles<T, MT, KN, BM, PARTS, false>(dk, walk_a<BM>(sds, key_row()),
                                                            walk_b_transposed<D>(sq, part()));
            }
        }
        copy_wait<0>();
        __syncthreads();
        if (threadIdx.x == 64) pass(p, control.steps[(at + STEPS - 1) % STEPS], round.number);
        // Parts of a group add to one dk and dv, in order too; here the word is how many have.
        u32* const semaphore = p.key_semaphore + control.key_semaphore;
        if (control.part) {
            if (threadIdx.x == 32) wait_semaphore(semaphore, control.part, poll_semaphore(semaphore));
            __syncthreads();
        }
        const bool add = p.call.accumulate || control.part;
        write_keys(p.call, p.call.dk, own, dk, p.call.score.scale, (int)p.call.heads.dim, add);
        write_keys(p.call, p.call.dv, own, dv, 1.0f, (int)p.call.heads.value, add);
        if (control.part + 1 < p.parts) {
            __syncthreads();
            if (threadIdx.x == 64) store_semaphore(semaphore, control.part + 1);
        }
    }

    // Lets the successor add to the tile of a step, if there was one.
    static __device__ __forceinline__ void pass(const FusedParams& p, volatile const DqStep& step, u32 number) {
        if (step.rows && step.flags & DQ_PASSES) store_semaphore(p.dq_semaphore + step.semaphore, number);
    }

    static __device__ __forceinline__ void run(const FusedParams& p) {
        __shared__ Control shared_control;
        __shared__ Round<false> round;
        volatile Control& control = shared_control;
        extern __shared__ __align__(128) char shared[];
        for (;;) {
            if (warp() == 0) {
                if (threadIdx.x == 0) {
                    const u32 item = atomicAdd(p.tile_counter, 1);
                    control.item = item;
                    control.steps[STEPS - 1].rows = 0;
                    if (item < p.call.heads.items) begin_item<BM, BN>(p, control, round, item);
                }
                __syncwarp();
                if (control.item < p.call.heads.items && !control.zero)
                    round.template fill<BM, BN, BATCH>(control.steps, control.own, p);
            }
            __syncthreads();
            if (control.item >= p.call.heads.items) break;
            if (control.zero)
                clear_queries(p.call, control, warp(), WARPS);
            else
                tile(p, control, round, shared_address(shared));
            __syncthreads();
        }
    }
};
