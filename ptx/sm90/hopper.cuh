// SPDX-License-Identifier: MIT OR Apache-2.0
// The instructions of sm_90a, one wrapper each: barriers in shared memory, tensor copies, products of a warpgroup.
//
// wgmma m64nNk16 is issued by the four warps of a warpgroup and runs beside them. Its sums lie in registers as those of
// mma.sync do: warp w of the warpgroup holds rows 16 w to 16 w + 15, as N / 8 tiles of 16 x 8 (see mma.cuh). From the
// product to its wait nothing may touch the sums, nor the registers of A; so every wait and every fence here is followed or
// preceded by `hold`, an empty statement that the compiler believes to change them, and over which it moves nothing that
// uses them.
//
// Tiles in shared memory are panels of 64 columns (128 bytes), each with all rows one after the other, in the 128-byte
// swizzle that tensor copies write: a box of a copy is a panel. A panel begins at a multiple of 1024 bytes.
#pragma once
#include "shared/mma.cuh"

// What cuTensorMapEncodeTiled wrote.
struct alignas(64) TensorMap {
    char opaque[128];
};

// Brings a map to where copies read it from, so that the first copy does not wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
#ifndef CPATTN_NO_PREFETCH
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Declares `shared`, where the tiles of a block begin: at a multiple of 1024.
#ifdef CPATTN_ROUND_BASE
// No alignment is asked for. Static shared memory lies before dynamic, so the next lower multiple lies in these bytes, wherever
// dynamic memory begins: with 16 bytes more than needed, at no multiple itself.
#define SHARED_MEMORY                                               \
    __shared__ char before[1024 + 16];                              \
    extern __shared__ __align__(16) char unaligned[];               \
    char* const shared = round_down(unaligned, before)
__device__ __forceinline__ char* round_down(char* unaligned, const char* before) {
    const u32 begin = shared_address(unaligned) & ~1023u;
    if (begin < shared_address(before)) asm volatile("trap;");
    return (char*)__cvta_shared_to_generic(begin);
}
#else
#define SHARED_MEMORY extern __shared__ __align__(1024) char shared[]
#endif

// -- Barriers in shared memory. A phase ends when all arrivals and all announced bytes have come.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: 0 for the first one, 1 for the second, and so on. A wait for parity 1
// before the first phase has ended returns at once.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "AGAIN:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
        "@!p bra AGAIN;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Two neighbouring f32 to shared memory.
__device__ __forceinline__ void store_shared_pair(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Four words of 32 bits to shared memory, at a multiple of 16 bytes, and from there.
__device__ __forceinline__ void store_shared_words(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

__device__ __forceinline__ void load_shared_words(u32 (&x)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Two elements to two floats, as `unpack`, by the same instruction for both types.
#define WIDEN(type, name)                                                                                              \
    __device__ __forceinline__ void widen(type, u32 x, float& low, float& high) {                                     \
        asm("{\n\t.reg .b16 l, h;\n\tcvt.u16.u32 l, %2;\n\tcvt.u16.u32 h, %3;\n\tcvt.f32." name " %0, l;\n\tcvt.f32." name    \
            " %1, h;\n\t}"                                                                                            \
            : "=f"(low), "=f"(high)                                                                                   \
            : "r"(x), "r"(x >> 16));                                                                                  \
    }
WIDEN(F16, "f16")
WIDEN(Bf16, "bf16")
#undef WIDEN

// -- Barriers of the block by number: threads that wait, and threads that only arrive.

template <u32 THREADS>
__device__ __forceinline__ void named_wait(u32 number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

template <u32 THREADS>
__device__ __forceinline__ void named_arrive(u32 number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// -- Tensor copies.

// The dimensions of a map, and the coordinate that is the same in every copy (see hopper_rows.cuh).
#ifdef CPATTN_WRAPPED_MAPS
#define MAP_DIMS "5d"
#define FIXED_COORDINATE(operand) ", " operand
#define FIXED_VALUE , "r"(1 << 30)
#else
#define MAP_DIMS "4d"
#define FIXED_COORDINATE(operand) ""
#define FIXED_VALUE
#endif

// One box to shared memory; the barrier is told of its bytes. Coordinates: column, row, head, part.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, int head, int part, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor." MAP_DIMS ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5" FIXED_COORDINATE("%7") "}], [%6];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(part), "r"(barrier) FIXED_VALUE
        : "memory");
}

// -- Clusters: blocks on neighbouring multiprocessors that reach into each other's shared memory. The address of the same place in
// the block of another rank is what `mapa` says.

// Clusters of the grid; read anew each time, so that no register holds it.
__device__ __forceinline__ u32 fresh_clusters() {
    u32 n;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(n));
    return n;
}

// All threads of the cluster meet. What they have written is known to those that wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Arrives at the barrier of the block of a rank. For another block it orders no memory but what copies and products have done that
// were waited for: a release to the cluster is a fence of all memory in machine code.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// The same with that release.
__device__ __forceinline__ void barrier_release_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// As `barrier_wait`, and acquires what other blocks released.
__device__ __forceinline__ void barrier_acquire(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "AGAIN:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
        "@!p bra AGAIN;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A word to the block of a rank; the barrier there is told of its four bytes.
__device__ __forceinline__ void send(u32 to, u32 word, u32 barrier, u32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there, told;\n\t"
        "mapa.shared::cluster.u32 there, %0, %3;\n\t"
        "mapa.shared::cluster.u32 told, %2, %3;\n\t"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [told];\n\t"
        "}" ::"r"(to),
        "r"(word), "r"(barrier), "r"(rank)
        : "memory");
}

// As `copy_box`, to the same place in each block of the mask, whose barrier at the same place is told.
__device__ __forceinline__ void copy_box_to(unsigned short mask, u32 to, const TensorMap& map, int column, int row, int head, int part,
                                            u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor." MAP_DIMS ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
        "%3, %4, %5" FIXED_COORDINATE("%8") "}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(part), "r"(barrier), "h"(mask) FIXED_VALUE
        : "memory");
}

// Brings bytes into L2 soon: address and count are multiples of 16.
__device__ __forceinline__ void prefetch(const void* from, u32 bytes) {
#ifndef CPATTN_NO_PREFETCH
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Makes what ordinary instructions wrote known to copies and products.
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same behind the first writes of barriers, by the thread that makes them.
__device__ __forceinline__ void fence_made_barriers() {
#ifdef CPATTN_FENCES
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    fence_proxy();
}

// -- Registers of a warpgroup.

template <int COUNT>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// -- Products of a warpgroup.

// Everything that is issued from here on finds its registers as they are now.
__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are not done.
template <int PENDING>
__device__ __forceinline__ void product_wait() {
#ifdef CPATTN_WAIT_ALL
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

template <int N>
__device__ __forceinline__ void hold(float (&c)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
        asm volatile("" : "+f"(c[0][n][0]), "+f"(c[0][n][1]), "+f"(c[0][n][2]), "+f"(c[0][n][3])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

// Where a matrix lies: bits 0 to 13 the address, 16 to 29 the distance of panels (where columns are the inner dimension of a
// transposed matrix), 32 to 45 the distance of groups of eight rows, all in units of 16 bytes; bit 62 the 128-byte swizzle.
__device__ __forceinline__ u64 matrix_at(u32 address, u32 panel_bytes) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define SUMS4(how, n) how(c[0][n][0]), how(c[0][n][1]), how(c[0][n][2]), how(c[0][n][3])
#define SUMS16(how, n) SUMS4(how, n), SUMS4(how, n + 1), SUMS4(how, n + 2), SUMS4(how, n + 3)
#define SUMS32(how, n) SUMS16(how, n), SUMS16(how, n + 4)
#define SUMS64(how, n) SUMS32(how, n), SUMS32(how, n + 8)
#define SUMS40(how, n) SUMS32(how, n), SUMS4(how, n + 8), SUMS4(how, n + 9)
#define SUMS48(how, n) SUMS32(how, n), SUMS16(how, n + 8)
#define SUMS56(how, n) SUMS48(how, n), SUMS4(how, n + 12), SUMS4(how, n + 13)
#define SUMS96(how, n) SUMS64(how, n), SUMS32(how, n + 16)
#define SUMS128(how, n) SUMS64(how, n), SUMS64(how, n + 16)
#define ADDED "+f"
#define NEW "=f"

#define REGISTERS16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS32                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS40 \
    REGISTERS32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS48 \
    REGISTERS40     \
    ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS56 \
    REGISTERS48     \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS64                                                                                              \
    REGISTERS32                                                                                                  \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS96 \
    REGISTERS64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76" \
    ", %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89" \
    ", %90, %91, %92, %93, %94, %95"
#define REGISTERS128 \
    REGISTERS96 \
    ", %96, %97, %98, %99, %100, %101, %102" \
    ", %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115" \
    ", %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The forms of one product of N columns: A B^T with both matrices in shared memory, rows of 16 elements of the inner
// dimension, as a new sum and added to one; A B with A in registers and B's rows along the inner dimension; and A B with
// both in shared memory, as a new sum and added to one (`_columns`).
#define PRODUCTS(type, name, columns, sums, registers, o0, o1, o2, o3, o4)                                             \
    __device__ __forceinline__ void product_new(type, float (&c)[1][columns / 8][4], u64 a, u64 b) {                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" registers             \
                     "}, " o0 ", " o1 ", 0, 1, 1, 0, 0;"                                                              \
                     : sums(NEW, 0)                                                                                   \
                     : "l"(a), "l"(b)                                                                                 \
                     : "memory");                                                                                     \
    }                                                                                                                 \
    __device__ __forceinline__ void product_add(type, float (&c)[1][columns / 8][4], u64 a, u64 b) {                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" registers             \
                     "}, " o0 ", " o1 ", 1, 1, 1, 0, 0;"                                                              \
                     : sums(ADDED, 0)                                                                                 \
                     : "l"(a), "l"(b)                                                                                 \
                     : "memory");                                                                                     \
    }                                                                                                                 \
    __device__ __forceinline__ void product_add(type, float (&c)[1][columns / 8][4], const u32 (&a)[4], u64 b) {      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" registers             \
                     "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", 1, 1, 1, 1;"                                       \
                     : sums(ADDED, 0)                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                             \
                     : "memory");                                                                                     \
    }
// One of the `_columns`: the operand of its sums, and whether it adds to them.
#define PRODUCT_COLUMNS(type, name, columns, sums, registers, o0, o1, form, operand, adds)                             \
    __device__ __forceinline__ void form(type, float (&c)[1][columns / 8][4], u64 a, u64 b) {                         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name " {" registers             \
                     "}, " o0 ", " o1 ", " adds ", 1, 1, 0, 1;"                                                       \
                     : sums(operand, 0)                                                                               \
                     : "l"(a), "l"(b)                                                                                 \
                     : "memory");                                                                                     \
    }
PRODUCT_COLUMNS(F16, "f16", 32, SUMS16, REGISTERS16, "%16", "%17", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(Bf16, "bf16", 32, SUMS16, REGISTERS16, "%16", "%17", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(F16, "f16", 32, SUMS16, REGISTERS16, "%16", "%17", product_add_columns, ADDED, "1")
PRODUCT_COLUMNS(Bf16, "bf16", 32, SUMS16, REGISTERS16, "%16", "%17", product_add_columns, ADDED, "1")
PRODUCT_COLUMNS(F16, "f16", 64, SUMS32, REGISTERS32, "%32", "%33", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(Bf16, "bf16", 64, SUMS32, REGISTERS32, "%32", "%33", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(F16, "f16", 64, SUMS32, REGISTERS32, "%32", "%33", product_add_columns, ADDED, "1")
PRODUCT_COLUMNS(Bf16, "bf16", 64, SUMS32, REGISTERS32, "%32", "%33", product_add_columns, ADDED, "1")
PRODUCT_COLUMNS(F16, "f16", 128, SUMS64, REGISTERS64, "%64", "%65", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(Bf16, "bf16", 128, SUMS64, REGISTERS64, "%64", "%65", product_new_columns, NEW, "0")
PRODUCT_COLUMNS(F16, "f16", 128, SUMS64, REGISTERS64, "%64", "%65", product_add_columns, ADDED, "1")
PRODUCT_COLUMNS(Bf16, "bf16", 128, SUMS64, REGISTERS64, "%64", "%65", product_add_columns, ADDED, "1")
#undef PRODUCT_COLUMNS
PRODUCTS(F16, "f16", 32, SUMS16, REGISTERS16, "%16", "%17", "%18", "%19", "%20")
PRODUCTS(Bf16, "bf16", 32, SUMS16, REGISTERS16, "%16", "%17", "%18", "%19", "%20")
PRODUCTS(F16, "f16", 64, SUMS32, REGISTERS32, "%32", "%33", "%34", "%35", "%36")
PRODUCTS(Bf16, "bf16", 64, SUMS32, REGISTERS32, "%32", "%33", "%34", "%35", "%36")
PRODUCTS(F16, "f16", 80, SUMS40, REGISTERS40, "%40", "%41", "%42", "%43", "%44")
PRODUCTS(Bf16, "bf16", 80, SUMS40, REGISTERS40, "%40", "%41", "%42", "%43", "%44")
PRODUCTS(F16, "f16", 112, SUMS56, REGISTERS56, "%56", "%57", "%58", "%59", "%60")
PRODUCTS(Bf16, "bf16", 112, SUMS56, REGISTERS56, "%56", "%57", "%58", "%59", "%60")
PRODUCTS(F16, "f16", 96, SUMS48, REGISTERS48, "%48", "%49", "%50", "%51", "%52")
PRODUCTS(Bf16, "bf16", 96, SUMS48, REGISTERS48, "%48", "%49", "%50", "%51", "%52")
PRODUCTS(F16, "f16", 128, SUMS64, REGISTERS64, "%64", "%65", "%66", "%67", "%68")
PRODUCTS(Bf16, "bf16", 128, SUMS64, REGISTERS64, "%64", "%65", "%66", "%67", "%68")
PRODUCTS(F16, "f16", 192, SUMS96, REGISTERS96, "%96", "%97", "%98", "%99", "%100")
PRODUCTS(Bf16, "bf16", 192, SUMS96, REGISTERS96, "%96", "%97", "%98", "%99", "%100")
PRODUCTS(F16, "f16", 256, SUMS128, REGISTERS128, "%128", "%129", "%130", "%131", "%132")
PRODUCTS(Bf16, "bf16", 256, SUMS128, REGISTERS128, "%128", "%129", "%130", "%131", "%132")
#undef PRODUCTS

// Products with B in panels of PANEL bytes, of 64 columns each, whose rows are the inner dimension. With CPATTN_PANEL_PRODUCTS each
// panel has a product of its own, and the distance of panels is not used.
#ifdef CPATTN_PANEL_PRODUCTS
#define EACH_PANEL(form)                                                                          \
    _Pragma("unroll") for (int n = 0; n + 8 <= N; n += 8)                                              \
        form(type, *(float(*)[1][8][4])&c[0][n], a, b + n / 8 * (PANEL >> 4));                         \
    if constexpr (N % 8 != 0) form(type, *(float(*)[1][N % 8][4])&c[0][N / 8 * 8], a, b + N / 8 * (PANEL >> 4))
#else
#define EACH_PANEL(form) form(type, c, a, b)
#endif
template <u32 PANEL, class T, int N>
__device__ __forceinline__ void panels_add(T type, float (&c)[1][N][4], const u32 (&a)[4], u64 b) {
    EACH_PANEL(product_add);
}
template <u32 PANEL, class T, int N>
__device__ __forceinline__ void panels_new_columns(T type, float (&c)[1][N][4], u64 a, u64 b) {
    EACH_PANEL(product_new_columns);
}
template <u32 PANEL, class T, int N>
__device__ __forceinline__ void panels_add_columns(T type, float (&c)[1][N][4], u64 a, u64 b) {
    EACH_PANEL(product_add_columns);
}
#undef EACH_PANEL
