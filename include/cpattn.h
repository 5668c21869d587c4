/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * cpattn: exact context-parallel attention.
 *
 * One long batch of documents is spread over many ranks; every rank ends with the exact attention output and gradients
 * of its own tokens, as if one device had seen the whole batch. This header is the whole C interface, and its manual.
 *
 * The job, in the order of this file:
 *
 *   cpattn_problem p = CPATTN_PROBLEM_INIT;              what is to be computed: documents, heads, mask, types
 *   cpattn_options o = CPATTN_OPTIONS_INIT;              over how many ranks, and how
 *   cpattn_plan_create(&p, &o, &plan);                   planned once, the same on every rank
 *   cpattn_plan_shard(plan, ..., rank, &whole, &mine);   which tokens are mine
 *   cpattn_local_group(world, 60000, transports);        ranks as threads of one process (cpattn_peer_group: on CUDA
 *                                                        devices; cpattn_mpi_group, cpattn_nccl_group: as processes;
 *                                                        cpattn_transport_create: bring a transport)
 *   cpattn_rank_create(transports[r], NULL, &rank);      on each rank
 *   cpattn_forward(rank, plan, &forward_args);           o and lse of this rank's tokens
 *   cpattn_backward(rank, plan, &backward_args);         dq, dk, dv
 *
 * The kernels (attention over ranges, its backward, merging, transforms) can be called by themselves: last section.
 *
 * STATUS. Every call that can fail returns an int32_t: CPATTN_OK (0) or one of the codes below. What went wrong, with
 * the argument, the value found and the value expected, is then in cpattn_last_error() of the same thread. A call that
 * refuses its arguments has touched nothing. No panic, exception or signal crosses this interface.
 *
 * HANDLES. cpattn_plan, cpattn_transport, cpattn_rank and cpattn_scratch are opaque. The caller that creates one
 * destroys it, once, with the function of its name; destroying NULL does nothing. A NULL handle, a handle of another
 * kind and (in debug builds of the library always, in release builds with luck) a handle that was destroyed are refused
 * with CPATTN_INVALID_HANDLE.
 *
 * THREADS. A plan never changes: any number of threads may use it. A rank or a scratch serves one call at a time; a
 * second one is refused with CPATTN_BUSY. cpattn_rank_poll and cpattn_rank_abort may be called from any thread at any
 * time, in particular while another thread is inside cpattn_forward. A handle that is in use must not be destroyed.
 *
 * MEMORY. Tensors are the caller's: they are read or written where they lie, never copied, kept or freed. The memory
 * that a run works in is the caller's too, if lent (cpattn_plan_workspace, cpattn_rank_lend_workspace). What a plan
 * needs besides is allocated when a rank first sees it (cpattn_rank_prepare) and not later.
 *
 * DEVICES. A library that was built with CUDA (capi/build --cuda) serves the CPU and CUDA devices of compute capability
 * 8.0 and later, one without it the CPU; both have the same functions, and what a build or device lacks is refused with
 * CPATTN_UNSUPPORTED. The driver is loaded when a device is first asked for: without one the library loads and serves
 * the CPU. A rank and a scratch have one device (or the CPU), and all tensors and workspace of a call lie in its
 * memory. Devices take f16 and bf16 with head_dim and value_dim that are multiples of 8 up to 256, and no reproducible
 * plans.
 *
 * STREAMS. On the CPU `stream` is NULL and a call returns when its work is done. On a device it is a cudaStream_t
 * (CUstream) of the device's primary context, the one that the CUDA runtime uses; NULL is the legacy default stream.
 * The call returns when its work is enqueued: behind what was on the stream before, and before what is put there
 * afterwards. So inputs need not be ready when the call is made, and tensors stay in use until the stream has passed
 * it. Other streams are ordered by the caller's events, as with any kernel. The library makes the context current for
 * itself and restores what was current.
 *
 * CUDA GRAPHS. A run of a rank can be captured: call cpattn_rank_prepare (of an all-to-all,
 * cpattn_rank_prepare_all_to_all) before the capture begins, then cpattn_forward, cpattn_backward, cpattn_rank_to_heads
 * or cpattn_rank_to_tokens with the stream that is being captured. While a run of the rank is being captured, calls
 * that would end the capture are refused with CPATTN_UNSUPPORTED, and leave it valid: lending workspace and taking it
 * back, preparing what is not prepared, cpattn_rank_record but for a capacity of 0, and a run on a stream outside of the
 * capture. cpattn_rank_poll is allowed. Each replay reads and writes the tensors and the workspace that were given then. The
 * rank must live until the last replay is done, and a lent workspace stay valid as long. Ranks of cpattn_peer_group are
 * captured into one graph, all of them, their streams joined by events: what finds a peer in another graph, or in none,
 * ends the group, and later calls say so; over a table of the caller's own, and for kernels called alone, a stream that is being captured is
 * refused.
 *
 * STRUCTS OF OPTIONS begin with `struct_size` and are initialised with the macro of their name, never by hand: a
 * program then works with libraries of other ages. A shorter struct, of an earlier header, gets the defaults for what
 * it does not know, which are 0 in all later members. A longer struct than the library knows is taken if the rest is
 * zero, and refused otherwise: no option is ever ignored.
 *
 * Words: a `rank` is one participant, the `world` all of them. Lengths, rows and tokens are counts, strides are counted
 * in elements, sizes in bytes, times in milliseconds. Flags are 0 or 1. */
#ifndef CPATTN_H
#define CPATTN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ----------------------------------------------------------------------------------------------------- */

#define CPATTN_VERSION_MAJOR 0
#define CPATTN_VERSION_MINOR 1
#define CPATTN_VERSION_PATCH 0

/* 10000 * major + 100 * minor + patch, of the header that was compiled against. */
#define CPATTN_VERSION (CPATTN_VERSION_MAJOR * 10000 + CPATTN_VERSION_MINOR * 100 + CPATTN_VERSION_PATCH)

/* The same number, of the library that was linked. While major is 0, libraries of another minor are incompatible. */
uint32_t cpattn_version(void);

/* ---- Status ------------------------------------------------------------------------------------------------------ */

#define CPATTN_OK 0
/* An argument contradicts another one, or is impossible by itself. Nothing was touched. */
#define CPATTN_INVALID 1
/* Legal, but not honoured by this build, device or mode. Refused, never approximated. */
#define CPATTN_UNSUPPORTED 2
/* Ranks of a group planned different things. Found before anything moved; all of them may go on. */
#define CPATTN_DISAGREEMENT 3
/* A peer failed, left, aborted or did not answer in time. The transport stays failed: make new ranks. */
#define CPATTN_PEER 4
/* The verifier found a flaw in a schedule. */
#define CPATTN_SCHEDULE 5
/* A call into a device driver or the operating system failed. */
#define CPATTN_DEVICE 6
/* The handle is NULL, of another kind, or was destroyed. */
#define CPATTN_INVALID_HANDLE 7
/* The handle is inside a call of another thread. */
#define CPATTN_BUSY 8
/* A defect of the library. The handles of the call should be destroyed. */
#define CPATTN_PANIC 9

/* The text of this thread's last error, UTF-8; "" when there was none. Valid until the next failure on this thread. */
const char *cpattn_last_error(void);

/* "CPATTN_INVALID" for CPATTN_INVALID, and so on; "unknown status" otherwise. Static. */
const char *cpattn_status_name(int32_t status);

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/*
 * A cpattn_tensor is a DLTensor (github.com/dmlc/dlpack), field for field, so that a program with DLPack tensors has
 * nothing to convert. With dlpack/dlpack.h included before this file it is that very type; otherwise cast the pointer.
 *
 *   device       kDLCPU (1) with device_id 0, or kDLCUDA (2) with the device's number. kDLCUDAHost (3) is memory of the
 *                CPU. kDLCUDAManaged (13) does not say which side may touch it and is refused: describe it as 1 or 2
 *   ndim, shape  q, k, v, o and their gradients: 3, [tokens, heads, head_dim]
 *                lse, delta:                     2, [heads, tokens]
 *                alibi_slopes, sinks, dsinks:    1, [heads]
 *                the lse of a partial result:    3, [heads, tokens, 2], or 2, [heads, tokens] (see cpattn_merge)
 *   dtype        f16 {2, 16, 1}, bf16 {4, 16, 1}, f32 {2, 32, 1}, f64 {2, 64, 1} as {code, bits, lanes}
 *   strides      in elements; NULL means compact (row-major). head_dim must be contiguous. What is only read may have
 *                stride 0; what is written must not overlap itself or anything else of the call
 *   data         aligned to the element together with byte_offset, a multiple of the element's size; may be NULL when
 *                a dimension is 0. On a device, rows of q, k, v, o, d_o and of f32 tensors with head_dim begin at
 *                multiples of 16 bytes (true of compact tensors that cudaMalloc or a framework made; cpattn_transform
 *                takes any rows), strides are below 2 GiB, and the driver has to know the memory as that device's
 *
 * The library cannot see how long the memory behind `data` is: shape and strides must not reach beyond it. Messages
 * call data + byte_offset a tensor's ptr, and its strides by what they step over: token_stride and head_stride. */
#ifdef DLPACK_DLPACK_H_
typedef DLTensor cpattn_tensor;
#else
typedef struct cpattn_dl_device {
  int32_t device_type;
  int32_t device_id;
} cpattn_dl_device;

typedef struct cpattn_dl_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} cpattn_dl_dtype;

typedef struct cpattn_tensor {
  void *data;
  cpattn_dl_device device;
  int32_t ndim;
  cpattn_dl_dtype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} cpattn_tensor;
#endif

/* DLPack's numbers for `device_type`. */
#define CPATTN_DEVICE_CPU 1
#define CPATTN_DEVICE_CUDA 2

/* Element types, where one is named without a tensor. On devices q, k, v, o are f16 or bf16. */
#define CPATTN_F16 0
#define CPATTN_BF16 1
#define CPATTN_F32 2
#define CPATTN_F64 3

/* ---- Problem ----------------------------------------------------------------------------------------------------- */

/* For windows: no limit on that side. */
#define CPATTN_UNLIMITED INT64_MAX

/* Softmax attention. */
#define CPATTN_SOFTMAX 0
/* Any other mixing of whole sequences between two all-to-alls: planned for Ulysses only. Shares can be asked for, and
 * the two all-to-alls run (cpattn_rank_to_heads); attention, its workspace and its verification are refused with
 * CPATTN_UNSUPPORTED. */
#define CPATTN_OTHER 1

/*
 * One attention over one packed batch, as if one device saw it. Pointers are read during the call and not kept.
 *
 * Documents lie end to end without padding: cu_seqlens_q has documents + 1 entries, the first 0, non-decreasing, the
 * last the number of tokens. Positions count within a document. Where q and k are the same tokens (most of the time)
 * cu_seqlens_k and q_start are NULL. Otherwise q token 0 of document d has position q_start[d] among its k tokens, by
 * default len_k - len_q (the last q sees the last k).
 *
 * Tensors of a fixed shape are padded with two documents more: one that has the spare q rows and no keys, one that has
 * the spare k rows and no queries. Nothing attends to them; whatever finite numbers they hold, o, dq, dk and dv of them
 * are 0 and lse is -inf.
 *
 * A score is s = scale * q.k, then softcap * tanh(s / softcap), then - slope * |q_pos - k_pos|, then the mask: a key
 * counts when q_pos - k_pos <= window_left and k_pos - q_pos <= window_right. INIT is causal; a sliding window of W
 * tokens that counts the query itself is window_left = W - 1, window_right = 0. */
typedef struct cpattn_problem {
  size_t struct_size;
  const int32_t *cu_seqlens_q; /* documents + 1 entries */
  const int32_t *cu_seqlens_k; /* documents + 1 entries; NULL: q and k are the same tokens */
  const int64_t *q_start;      /* documents entries, or NULL; needs cu_seqlens_k */
  size_t documents;
  uint32_t heads;            /* q heads, a multiple of kv_heads */
  uint32_t kv_heads;         /* 0: as heads */
  uint32_t head_dim;         /* of q and k, 1 to 512 */
  uint32_t value_dim;        /* of v and o; 0: as head_dim */
  int32_t dtype;             /* of q, k, v, o and their gradients: CPATTN_F16, ... */
  int32_t kind;              /* CPATTN_SOFTMAX or CPATTN_OTHER */
  int64_t window_left;       /* 0 to UINT32_MAX, or CPATTN_UNLIMITED */
  int64_t window_right;      /* 0 (causal) to UINT32_MAX, or CPATTN_UNLIMITED */
  double scale;              /* 0: 1 / sqrt(head_dim) */
  double softcap;            /* 0: none */
  const float *alibi_slopes; /* heads entries, finite; NULL: none */
  int32_t sinks;             /* 1: each q head has a learnable sink, given with each run */
  int32_t reserved;          /* 0 */
} cpattn_problem;

#define CPATTN_PROBLEM_INIT \
  { sizeof(cpattn_problem), NULL, NULL, NULL, 0, 0, 0, 0, 0, CPATTN_F32, CPATTN_SOFTMAX, CPATTN_UNLIMITED, 0, \
    0.0, 0.0, NULL, 0, 0 }

/* ---- Options ----------------------------------------------------------------------------------------------------- */

/* How tokens are dealt to the ring ranks. */
#define CPATTN_LAYOUT_AUTO 0        /* whichever balances the work best */
#define CPATTN_LAYOUT_CONTIGUOUS 1  /* one run of the batch each */
#define CPATTN_LAYOUT_ZIGZAG 2      /* each document in 2R chunks: chunk r and chunk 2R-1-r */
#define CPATTN_LAYOUT_ZIGZAG_PACK 3 /* the whole batch in 2R chunks, likewise */
#define CPATTN_LAYOUT_STRIPED 4     /* token t goes to (t / layout_parameter) mod R */
#define CPATTN_LAYOUT_BALANCED 5    /* layout_parameter chunks for each rank, dealt by mask area */

/* Which side travels round the ring in the backward. */
#define CPATTN_CIRCULATE_AUTO 0 /* whichever moves fewer bytes */
#define CPATTN_CIRCULATE_KEYS 1
#define CPATTN_CIRCULATE_QUERIES 2

/* In which type partial gradients travel. */
#define CPATTN_WIRE_FULL 0 /* f32 (f64 for f64): nothing is lost */
#define CPATTN_WIRE_BF16 1 /* half the bytes; each partial is rounded once to 8 bits before it is summed */

/*
 * Over how many ranks, and how. The mesh is replicas x ring x ulysses = world; ranks of one Ulysses group are adjacent,
 * replicas work on batches of their own. Where ulysses and ring are 0 both are chosen; where one is 0 it is what the
 * other leaves of the world.
 */
typedef struct cpattn_options {
  size_t struct_size;
  uint32_t world;            /* ranks of the transport */
  uint32_t ulysses;          /* ranks that exchange tokens for heads; at most heads */
  uint32_t ring;             /* ranks among which k and v travel */
  int32_t layout;            /* CPATTN_LAYOUT_... */
  uint32_t layout_parameter; /* tokens of a stripe, or chunks of a rank; 0 for the other layouts */
  uint32_t passes;           /* over groups of kv heads: divides what is in flight; at least 1 */
  int32_t circulate;         /* CPATTN_CIRCULATE_... */
  int32_t wire;              /* CPATTN_WIRE_... */
  int32_t gather;            /* 1: all k and v at once instead of step by step */
  int32_t reproducible;      /* 1: the same bits for any number of ranks; for the CPU */
  int32_t pack_inputs;       /* 1: tensors that travel may have any strides; 0: they must be compact */
  int32_t reserved;          /* 0 */
} cpattn_options;

#define CPATTN_OPTIONS_INIT \
  { sizeof(cpattn_options), 1, 0, 0, CPATTN_LAYOUT_AUTO, 0, 1, CPATTN_CIRCULATE_AUTO, CPATTN_WIRE_FULL, 0, 0, 0, 0 }

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

typedef struct cpattn_plan cpattn_plan;

/* Plans, or refuses. Every rank makes the same plan from the same arguments; that they did is checked when they run. */
int32_t cpattn_plan_create(const cpattn_problem *problem, const cpattn_options *options, cpattn_plan **plan);

int32_t cpattn_plan_destroy(cpattn_plan *plan);

/* What a plan decided. */
typedef struct cpattn_plan_info {
  size_t struct_size;
  uint32_t replicas;
  uint32_t ring;
  uint32_t ulysses;
  int32_t layout; /* never AUTO */
  uint32_t layout_parameter;
  uint32_t reserved;
  uint64_t q_tokens; /* of the whole batch */
  uint64_t k_tokens;
  uint64_t fingerprint; /* equal for equal plans */
} cpattn_plan_info;

#define CPATTN_PLAN_INFO_INIT \
  { sizeof(cpattn_plan_info), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

int32_t cpattn_plan_describe(const cpattn_plan *plan, cpattn_plan_info *info);

/* A rank's coordinates in the mesh, how many tokens it brings, and the heads it holds between the two all-to-alls. */
typedef struct cpattn_share {
  size_t struct_size;
  uint32_t replica;
  uint32_t ring;
  uint32_t ulysses;
  uint32_t reserved;
  uint64_t q_tokens; /* rows of its q, o, lse, do, dq */
  uint64_t k_tokens; /* rows of its k, v, dk, dv */
  uint32_t q_head_begin;
  uint32_t q_head_end;
  uint32_t kv_head_begin;
  uint32_t kv_head_end;
} cpattn_share;

#define CPATTN_SHARE_INIT \
  { sizeof(cpattn_share), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

int32_t cpattn_plan_share(const cpattn_plan *plan, uint32_t rank, cpattn_share *share);

/* Why this mesh, what each rank holds, bytes per step, imbalance, workspace: text for people. Writes at most `capacity`
 * bytes including the final 0, and to *needed how many the whole takes; text may be NULL when capacity is 0. */
int32_t cpattn_plan_explain(const cpattn_plan *plan, char *text, size_t capacity, size_t *needed);

/* Proves the schedules of all ranks of a group, forward and backward: messages match, nothing deadlocks or races, every
 * pair that counts is attended once. For tests: takes time and memory that grow with tokens times heads, some 50 bytes
 * for each row of each head, besides ranks and documents. */
int32_t cpattn_plan_verify(const cpattn_plan *plan);

#define CPATTN_FORWARD 0
#define CPATTN_BACKWARD 1

/* Bytes of memory that a run takes on a rank, on the CPU and on devices alike; see cpattn_rank_lend_workspace. */
int32_t cpattn_plan_workspace(const cpattn_plan *plan, uint32_t rank, int32_t direction, uint64_t *bytes);

/* ---- Tokens of a rank -------------------------------------------------------------------------------------------- */

/* The side of q, o, lse and their gradients, or of k and v and theirs. */
#define CPATTN_Q 0
#define CPATTN_K 1

/* The tokens of the packed batch that a rank holds, in its order, and their positions in their documents (for rotary
 * embeddings and the like). `capacity` is the length of the array, at least the q_tokens or k_tokens of its share. */
int32_t cpattn_plan_tokens(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *tokens, size_t capacity);
int32_t cpattn_plan_positions(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *positions,
    size_t capacity);

/* Copies a rank's rows out of `whole` into `local`, in the rank's order, or back; the other rows of `whole` stay as
 * they are. Tensors of the CPU (elsewhere cpattn_plan_tokens is the index to gather by) with tokens first, of any
 * element type of 1, 2, 4 or 8 bytes, of 1 to 3 dimensions that agree but for the tokens: ids [tokens], activations
 * [tokens, heads, head_dim]. A last dimension other than the tokens is contiguous. */
int32_t cpattn_plan_shard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *whole,
    const cpattn_tensor *local);
int32_t cpattn_plan_unshard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *local,
    const cpattn_tensor *whole);

/* For each of a rank's q tokens the row of `whole` that lies `by` tokens on in the same document, and the one element
 * at `fill` where the document has none: labels for next-token prediction with by = 1. Tensors as above. */
int32_t cpattn_plan_shift(const cpattn_plan *plan, uint32_t rank, int64_t by, const void *fill,
    const cpattn_tensor *whole, const cpattn_tensor *local);

/* ---- Transports -------------------------------------------------------------------------------------------------- */

typedef struct cpattn_transport cpattn_transport;

/* `world` ranks as threads of this process. Writes `world` handles to `transports`, by rank; each goes to its thread.
 * A call that waits for `deadline_ms` without any of its messages moving fails on every rank. world: 1 to 4096. */
int32_t cpattn_local_group(uint32_t world, uint64_t deadline_ms, cpattn_transport **transports);

/* The same for tensors on CUDA devices: rank r is on devices[r], and ranks may share a device. The data moves by device
 * copies in stream order; the threads of the ranks meet at each exchange only to have the copies enqueued, under the
 * deadline, and never wait for a device. */
int32_t cpattn_peer_group(uint32_t world, const int32_t *devices, uint64_t deadline_ms, cpattn_transport **transports);

/* Ranks as processes, over MPI. `comm` is the address of an MPI_Comm (handles are of different types in different
 * MPIs), of the MPI that the library was built with; its processes call together, and rank r of it is rank r here. The
 * library works on duplicates of it. MPI was initialised with MPI_THREAD_MULTIPLE. The others name a process that does
 * not call within the deadline (CPATTN_PEER). A failure is told to all ranks; a process that died shows as a deadline
 * where MPI lets the others live, and ends the job where it does not, which is MPI's default. After a failure leave with
 * MPI_Abort: MPI_Finalize may wait for the dead. Destroy transports and ranks before MPI_Finalize. A build without MPI
 * (capi/build without --features mpi) refuses with CPATTN_UNSUPPORTED. */
int32_t cpattn_mpi_group(const void *comm, uint64_t deadline_ms, cpattn_transport **transport);

/*
 * Ranks over NCCL, each a thread or process with a CUDA device of its own, on one host or many. libnccl.so.2, of
 * version 2.14 or later, is opened when the first of these is called (CPATTN_UNSUPPORTED without one).
 *
 * cpattn_nccl_unique_id writes the 128 bytes that a group has in common. One rank calls it and brings them to all
 * others (a broadcast of MPI's, a store of the framework's, a file). Each group needs bytes of its own.
 *
 * cpattn_nccl_group gives one rank's end: from a unique_id with comm NULL, or from an ncclComm_t that a framework has,
 * with unique_id NULL. From a unique_id it returns when all `world` ranks have called it, or fails after deadline_ms. A
 * comm has to be of this rank, world and device_id. It lives longer than the transport, nothing else calls NCCL with it
 * while a run is being enqueued, and it is not freed.
 *
 * An exchange that is under way for longer than deadline_ms, an error that NCCL reports, or cpattn_rank_abort ends the
 * group: poll and later calls fail with CPATTN_PEER and say rank, operation, step, peers, bytes and time. NCCL does not
 * say which of several peers did not answer. The communicator is then aborted, so that streams go on: a comm of the
 * framework's only with may_abort 1, and its owner must not touch it afterwards. With may_abort 0 what is on the
 * streams stays there until the owner aborts it, and whatever waits for them, or frees device memory, waits until then.
 * Other ranks learn of a failure from NCCL, where it notices, or at their own deadline: give all ranks the same. */
int32_t cpattn_nccl_unique_id(uint8_t *unique_id);
int32_t cpattn_nccl_group(const uint8_t *unique_id, void *comm, int32_t may_abort, uint32_t rank, uint32_t world,
    int32_t device_id, uint64_t deadline_ms, cpattn_transport **transport);

/* Contiguous bytes that go to `peer`, or come from it. A send is only read. On a device, device addresses. */
typedef struct cpattn_message {
  size_t peer;
  void *data;
  size_t bytes; /* at least 1 */
} cpattn_message;

/*
 * A transport of the caller's: a framework's own communicator. Functions return 0, or anything else for a failure and
 * may then set *blame (-1 on entry) to the rank at fault; without it the rank blames itself. The call that needed them
 * then fails with CPATTN_PEER, and its message ends with the function and what it returned: "rank 0, exchange, step 1:
 * rank 2 failed: the transport's exchange returned 7". They must not throw or longjmp. `context` is handed through.
 *
 * The contract: a send meets one receive of the same size; between two ranks messages meet in the order in which both
 * list them; exchanges of one rank are serial, are rendezvous (nothing may rely on buffering) and complete as a whole;
 * empty messages and messages to oneself do not occur. Nothing may hang: when a peer dies, fails or does not answer
 * before a deadline of the transport's choice, all calls fail, now and later. A rank on the CPU does not rely on
 * "later": after the first failure it calls abort, makes no other call, and answers with that failure.
 *
 * For a rank on a device, `exchange` gets a stream of the rank's own, enqueues the batch there and returns: ncclSend
 * and ncclRecv between ncclGroupStart and ncclGroupEnd are one. The device's primary context is then current. What
 * fails after it has returned is for poll to say; after abort, what is enqueued must end soon. */
typedef struct cpattn_transport_table {
  size_t struct_size;
  void *context;
  uint32_t rank;
  uint32_t world;
  /* An all-gather over ranks first ... end-1: all[i] = the number that rank first + i gave. Waits for all of them. The
   * library compares. Called on the thread that runs, when the ranks first run a plan in a direction; later runs carry
   * the comparison along, 16 bytes (24 on a device) before the first message from one rank to another. */
  int32_t (*agree)(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame);
  /* Moves a batch. On the CPU: returns when it is complete, stream is NULL, and it is called on a thread of the rank's
   * own, one call at a time. On a device: returns when it is enqueued, and is called on the thread that runs. */
  int32_t (*exchange)(void *context, const char *operation, uint32_t step, const cpattn_message *sends,
      size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame);
  /* Whether anything has failed so far. Never waits. Any thread, at any time. */
  int32_t (*poll)(void *context, int64_t *blame);
  /* Ends the run on every rank: their calls must fail soon. Any thread, at any time, any number of times. */
  void (*abort)(void *context);
  /* The transport is no longer used. May be NULL. */
  void (*release)(void *context);
} cpattn_transport_table;

#define CPATTN_TRANSPORT_TABLE_INIT \
  { sizeof(cpattn_transport_table), NULL, 0, 0, NULL, NULL, NULL, NULL, NULL }

int32_t cpattn_transport_create(const cpattn_transport_table *table, cpattn_transport **transport);

/* One link of a ring of ranks, one way. */
typedef struct cpattn_link {
  uint32_t from;
  uint32_t to;
  double latency;          /* seconds: half the shortest round trip of eight bytes */
  double bytes_per_second; /* of the quickest message of `bytes`, the latency taken off */
} cpattn_link;

/* Is every link of the ring there, and how fast is it? Bytes that are stamped with their sender go over each link, all
 * the way round the ring and back, one link at a time. All ranks call it with the same `bytes` (4 MiB is a good
 * choice), before the transport becomes a rank. Writes links in the order in which they were measured, and how many to
 * *count: all 2 * world on rank 0, those before its last turn on another. `capacity`, how many `links` has room for, is
 * at least 2 * world. A failure names the link and what to try, and ends the group. Over transports of devices the bytes
 * go from device to device; over tables they lie in host memory, and exchange is called on the calling thread. */
int32_t cpattn_ring_check(cpattn_transport *transport, size_t bytes, cpattn_link *links, size_t capacity,
    size_t *count);

/* For transports that never became a rank. Peers that need this rank are told that it left. */
int32_t cpattn_transport_destroy(cpattn_transport *transport);

/* ---- Ranks ------------------------------------------------------------------------------------------------------- */

typedef struct cpattn_rank cpattn_rank;

/* Which instruction set the CPU kernels use. One that the machine lacks is refused with CPATTN_UNSUPPORTED. They round
 * differently: a backward needs that of its forward, and the ranks of a reproducible plan all need the same one. On
 * CPATTN_ISA_AMX numbers below 1e-30 lose digits in f32; CPATTN_ISA_AVX512 keeps them. */
#define CPATTN_ISA_AUTO 0        /* the best of the machine, or what the environment variable CPATTN_CPU_ISA names */
#define CPATTN_ISA_PORTABLE 1    /* nothing in particular */
#define CPATTN_ISA_NEON 2        /* NEON */
#define CPATTN_ISA_AVX2 3        /* AVX2 and FMA */
#define CPATTN_ISA_AVX512 4      /* AVX-512 F and DQ */
#define CPATTN_ISA_AVX512_BF16 5 /* AVX-512 with dot products of bf16, for bf16 */
#define CPATTN_ISA_AMX 6         /* AMX tiles of bf16, for bf16, f16 and f32 */

typedef struct cpattn_rank_options {
  size_t struct_size;
  uint32_t workers;    /* threads of the CPU kernels, 1 to 1024; results do not depend on it. On a device 1 */
  int32_t device_type; /* CPATTN_DEVICE_CPU or CPATTN_DEVICE_CUDA; that of the transport, unless that is a table */
  int32_t device_id;   /* 0 on the CPU */
  uint32_t sm_margin;  /* multiprocessors; 0: none, and on the CPU. See below */
  int32_t isa;         /* CPATTN_ISA_..., of the CPU kernels; on a device CPATTN_ISA_AUTO */
  int32_t reserved;    /* 0 */
} cpattn_rank_options;

#define CPATTN_RANK_OPTIONS_INIT \
  { sizeof(cpattn_rank_options), 1, CPATTN_DEVICE_CPU, 0, 0, CPATTN_ISA_AUTO, 0 }

/* A rank lives long and runs many plans. It takes the transport over: on success the transport's handle is gone, after
 * a refusal it is still the caller's. options NULL: one worker, on the device of a peer group, otherwise on the CPU. */
int32_t cpattn_rank_create(cpattn_transport *transport, const cpattn_rank_options *options, cpattn_rank **rank);

/* SM MARGIN. The blocks of an attention kernel fill a device, and a communicator's kernels that are launched meanwhile
 * wait for the first of them to end. With sm_margin > 0 attention is bounded to the blocks that fit on all but so many
 * multiprocessors (fewer than the device has), each of which then does more; results are the same. It concerns every
 * attention of this process on the device for as long as the rank lives, and of several numbers the largest counts. */

/* The rank leaves: peers that still need it get an error. On a device it first waits for what it enqueued. */
int32_t cpattn_rank_destroy(cpattn_rank *rank);

/* Does all that may allocate for runs of this plan; on a device it also loads the kernels, which takes the driver up to
 * seconds, and may wait for earlier runs. Optional: the first run does it otherwise. A rank remembers the last 16
 * (plan, direction) pairs, an all-to-all being one. */
int32_t cpattn_rank_prepare(cpattn_rank *rank, const cpattn_plan *plan, int32_t direction);

/* cpattn_ring_check by a rank, between runs: of any group, also one whose transports became ranks when they were made. On a
 * device it waits for what the rank enqueued. With links NULL and capacity 0 it checks nothing, and writes to *count how many
 * links there are at most. */
int32_t cpattn_rank_ring_check(cpattn_rank *rank, size_t bytes, cpattn_link *links, size_t capacity, size_t *count);

/* Workspaces begin at a multiple of this many bytes. */
#define CPATTN_WORKSPACE_ALIGNMENT 256

/* Lends memory to work in, in the memory of the rank's device (or the CPU's): `bytes` at `workspace`, the largest of
 * cpattn_plan_workspace (and cpattn_plan_all_to_all_workspace) over the plans to run. It stays lent, untouched by
 * others, until another is lent, it is taken back or the rank is destroyed; on a device all three wait for what was
 * enqueued. NULL and 0 bytes take it back: the rank then allocates its own, as it does without this call. */
int32_t cpattn_rank_lend_workspace(cpattn_rank *rank, void *workspace, size_t bytes);

/*
 * The tensors of a forward: this rank's own tokens, in the order of cpattn_plan_tokens, with all heads. Nq, Nk: its
 * q_tokens and k_tokens; H, Hk: heads, kv_heads; D, Dv: head_dim, value_dim.
 */
typedef struct cpattn_forward_args {
  size_t struct_size;
  const cpattn_tensor *q;     /* read, [Nq, H, D] */
  const cpattn_tensor *k;     /* read, [Nk, Hk, D] */
  const cpattn_tensor *v;     /* read, [Nk, Hk, Dv] */
  const cpattn_tensor *sinks; /* read, [H] f32; NULL unless the problem has sinks */
  const cpattn_tensor *o;     /* written, [Nq, H, Dv] */
  const cpattn_tensor *lse;   /* written, [H, Nq] f32 (f64 for f64): natural log-sum-exp of the scores and the sink,
                                 -inf for a row that attends to nothing */
  void *stream;               /* cudaStream_t on a device; NULL on the CPU */
} cpattn_forward_args;

#define CPATTN_FORWARD_ARGS_INIT \
  { sizeof(cpattn_forward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* The tensors of a backward. It repeats the forward's exchanges, so only o and lse have to be kept. */
typedef struct cpattn_backward_args {
  size_t struct_size;
  const cpattn_tensor *q;      /* read; q, k, v, sinks as given to the forward, o and lse as written by it */
  const cpattn_tensor *k;      /* read */
  const cpattn_tensor *v;      /* read */
  const cpattn_tensor *sinks;  /* read */
  const cpattn_tensor *o;      /* read */
  const cpattn_tensor *lse;    /* read */
  const cpattn_tensor *d_o;    /* read, [Nq, H, Dv]: gradient of o */
  const cpattn_tensor *dq;     /* written, [Nq, H, D] */
  const cpattn_tensor *dk;     /* written, [Nk, Hk, D] */
  const cpattn_tensor *dv;     /* written, [Nk, Hk, Dv] */
  const cpattn_tensor *dsinks; /* written, [H] of lse's type, summed over the group; NULL unless there are sinks */
  void *stream;                /* cudaStream_t on a device; NULL on the CPU */
} cpattn_backward_args;

#define CPATTN_BACKWARD_ARGS_INIT \
  { sizeof(cpattn_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* Run a plan. All ranks of the group call with equal plans in the same order, each on a thread of its own, and wait for
 * each other. CPATTN_DISAGREEMENT: they do not. Found before anything moves where a plan is first run in a direction
 * (the ranks may then go on), later with the first message between two ranks (the group has failed then; on a device
 * the device finds out, cpattn_rank_poll and the next run say it, and results that depend on the other rank are NaN).
 * CPATTN_INVALID: a tensor that does not fit, or overlaps one that is written; the peers of a rank that is refused wait
 * until their deadline or until it calls again.
 *
 * On a device they return when all of the run is enqueued. Runs of one rank come one after another even on different
 * streams, since they share the workspace. A prepared run uploads nothing and does not wait for the device. After a
 * failure (not a refusal) the call waits until nothing of the run is left on the device; what was written is
 * undefined. */
int32_t cpattn_forward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_forward_args *args);
int32_t cpattn_backward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_backward_args *args);

/*
 * The two all-to-alls of Ulysses as calls of their own, for what mixes tokens head by head and is not softmax
 * attention: linear attention, state spaces, convolutions. Between the two a rank sees all tokens of its ring share (of
 * the whole batch, where the ring is 1, as for CPATTN_OTHER), in the layout's order, for some heads. Plans of any kind
 * have them; all ranks of the group call them alike, as they run plans. side: CPATTN_Q, with q's tokens and heads, or
 * CPATTN_K, with k's tokens and the kv heads. Any dim and element type.
 *
 * to_heads:  from [own tokens, heads, dim] to [share's tokens, own heads, dim] (cpattn_share: q_head_begin to
 * q_head_end, or kv_head_begin to kv_head_end; the share's tokens are the sum of those of the Ulysses ranks). `to` is
 * compact. to_tokens: back. `from` is compact. Of a kv head that several ranks hold, `to` gets the sum over them, in
 * rank order: what a gradient needs. stream: a cudaStream_t on a device, in the order of which the tensors are read and
 * written, as in cpattn_forward; NULL on the CPU. A device takes f16, bf16 and f32. */
int32_t cpattn_rank_to_heads(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream);
int32_t cpattn_rank_to_tokens(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream);

/* Of both all-to-alls of tensors of that side, innermost dimension and element type (CPATTN_F16, ...): does what
 * cpattn_rank_prepare does for attention; the bytes of workspace that either takes on a rank at most. */
int32_t cpattn_rank_prepare_all_to_all(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, uint32_t dim,
    int32_t dtype);
int32_t cpattn_plan_all_to_all_workspace(const cpattn_plan *plan, uint32_t rank, int32_t side, uint32_t dim,
    int32_t dtype, uint64_t *bytes);

/* Proves both all-to-alls of such tensors, as cpattn_plan_verify does forward and backward. Plans of any kind. */
int32_t cpattn_plan_verify_all_to_all(const cpattn_plan *plan, int32_t side, uint32_t dim, int32_t dtype);

#define CPATTN_COMPUTE 0
#define CPATTN_COMMUNICATION 1

/* One operation of a rank, as it ran. The times are on the clock of cpattn_clock. */
typedef struct cpattn_event {
  char name[32];     /* what it was: "attend", "exchange", ...; ends in a 0 */
  char phase[32];    /* what for: "ring", "all-to-all", ... */
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t bytes;    /* sent and received; 0 for what is no exchange */
  uint32_t rank;
  uint32_t step;     /* the ring step */
  int32_t lane;      /* CPATTN_COMPUTE, CPATTN_COMMUNICATION */
  uint32_t reserved; /* 0 */
} cpattn_event;

/* Nanoseconds of the clock that events are on, one for all ranks of the process. It stands at 0 when this function or
 * cpattn_rank_record is first called. Ranks of several processes compare what it says at one moment. */
int32_t cpattn_clock(uint64_t *ns);

/* Starts to record what a rank does, for at most `capacity` operations from now on (2^24 at most), and as many again
 * whenever cpattn_rank_trace has taken all of them; 0 stops. What was recorded before is gone. On a device an operation
 * lies between two events with timing, which are made now, after a wait for what the rank enqueued; a run that records
 * waits no more than others do, cannot be captured into a CUDA graph, and replays are not recorded. */
int32_t cpattn_rank_record(cpattn_rank *rank, uint64_t capacity);

/* Takes what was recorded, at most `capacity` operations, in the order in which they ended within each lane. *count is
 * how many there are, those taken among them: what does not fit comes with the next call. events may be NULL when
 * capacity is 0. On a device: operations that are over by now; wait for the run's stream first to have them all. */
int32_t cpattn_rank_trace(cpattn_rank *rank, cpattn_event *events, size_t capacity, size_t *count);

/* By how many nanoseconds the times of events may be off, beside the half microsecond of a device's events; 0 on the
 * CPU, and while nothing is recorded. */
int32_t cpattn_rank_trace_accuracy(const cpattn_rank *rank, uint64_t *ns);

/* Whether anything has failed so far, on any rank, or on the device in what was enqueued; never waits. */
int32_t cpattn_rank_poll(const cpattn_rank *rank);

/* Ends the run on every rank of the world: calls that wait return CPATTN_PEER. What is enqueued on devices already is
 * not taken back. For good: make a new group after it. */
int32_t cpattn_rank_abort(const cpattn_rank *rank);

/* ---- The kernels ------------------------------------------------------------------------------------------------- */

/*
 * Attention over ranges: what ranks run between exchanges. A range is a run of rows of a [tokens, heads, dim] tensor:
 * row `row + i` holds the token at position pos + (i / block) * period + i % block of document doc. A plain run has
 * block = period = 1. Masking is by position alone; a pair joins ranges of one document.
 */
typedef struct cpattn_range {
  int64_t row;
  int64_t pos;     /* within +-2^40 */
  uint32_t len;    /* rows */
  uint32_t block;  /* consecutive positions in one block of the stripe; at least 1 */
  uint32_t period; /* positions from one block to the next; at least block */
  uint32_t doc;
} cpattn_range;

#define CPATTN_FIRST 0 /* first of several calls for this range: write the running (o, lse). Backward: write dq */
#define CPATTN_MERGE 1 /* a later call: merge into the (o, lse) that the first one wrote. Backward: add to dq */
#define CPATTN_LAST 2  /* the last of several: merge, then apply the sink and write o. Backward: as MERGE */
#define CPATTN_ONLY 3  /* first and last at once. Backward: as FIRST */

/* A q range, what becomes of its result, and the k ranges it attends to: ranges.k[pairs[i]], keys_begin <= i <
 * keys_end, read in this order. */
typedef struct cpattn_q_range {
  cpattn_range range;
  uint32_t keys_begin;
  uint32_t keys_end;
  uint8_t mode; /* CPATTN_FIRST, ... */
  uint8_t reserved[7];
} cpattn_q_range;

/* A row that a call writes lies in one range: two would be refused, since both write it at once. Written are the rows
 * of q ranges (but by a backward of CPATTN_GRADIENTS_KEYS) and, by a backward that makes dk and dv, those of k ranges;
 * rows that are only read may lie in several ranges. A q range without pairs attends to nothing in this call. */
typedef struct cpattn_ranges {
  const cpattn_q_range *q;
  size_t q_count;
  const cpattn_range *k;
  size_t k_count;
  const uint32_t *pairs;
  size_t pair_count;
} cpattn_ranges;

/* q head h of the call is head q_offset + h of the model and reads kv head (q_offset + h) / group - kv_offset of the
 * call. All heads: {0, 0, H / Hk}. */
typedef struct cpattn_head_map {
  uint32_t q_offset;
  uint32_t kv_offset;
  uint32_t group; /* q heads per kv head */
} cpattn_head_map;

/* As in cpattn_problem, but nothing is chosen here: scale 0 is 0. */
typedef struct cpattn_score {
  double scale;
  double softcap;       /* 0: none */
  int64_t window_left;  /* 0 to UINT32_MAX, or CPATTN_UNLIMITED, as in cpattn_problem */
  int64_t window_right; /* likewise */
} cpattn_score;

/* The kernels of one device (or the CPU) and the memory that calls take there, for one call at a time. Calls allocate
 * nothing; one that finds the scratch too small is refused with the number it needs. */
typedef struct cpattn_scratch cpattn_scratch;

/* On the CPU: memory for tiles. workers: 1 to 1024. */
int32_t cpattn_scratch_create(uint32_t workers, cpattn_scratch **scratch);

/* On a CUDA device: kernels, and a ring that the scheduler metadata of calls (their ranges and tiles) travels through,
 * of 256 KiB for 64 calls in flight. The ranks and scratches of a process share the kernels of a device. */
int32_t cpattn_scratch_create_cuda(int32_t device_id, cpattn_scratch **scratch);

/* On a device, waits for the calls that were made with it, and for nothing else; streams that are being captured stay so.
 * Its ring is kept for the next scratch of the device. Beyond 16 MiB of rings, and with the last rank and scratch of the
 * device, memory is freed and kernels are unloaded, for which the driver may wait until the device is idle. */
int32_t cpattn_scratch_destroy(cpattn_scratch *scratch);

/* Grows it to attention of this kind: memory on the CPU, loaded kernels on a device. The other kernels need no call. */
int32_t cpattn_scratch_reserve(cpattn_scratch *scratch, int32_t dtype, uint32_t head_dim, uint32_t value_dim);

/* On a device: what cpattn_rank_options.sm_margin is for a rank, until it is set again or the scratch is destroyed. On
 * the CPU 0. */
int32_t cpattn_scratch_set_sm_margin(cpattn_scratch *scratch, uint32_t multiprocessors);

/* On the CPU: calls run on this instruction set (CPATTN_ISA_..., as in cpattn_rank_options) until another is set. On a
 * device CPATTN_ISA_AUTO. */
int32_t cpattn_scratch_set_isa(cpattn_scratch *scratch, int32_t isa);

/* On the CPU: the calls that follow are parts of attention over the documents of this problem, as the steps of a ring
 * are. On CPATTN_ISA_AMX calls of f32 and f16 take tiles where documents are long and vectors where they are short, and
 * vectors of f32 err by twice as much as tiles. With the documents known, each part takes what one call over all of
 * them would take, and a sum of parts errs as that call does; a rank does this for its plans. A range's `doc` is the
 * number of its document in the problem, of which lengths, windows, heads and kv_heads count. NULL, or no documents: not
 * known, and the ranges of each call decide, as before the first such call. A device's kernels are the same for documents
 * of any length: there all else is refused with CPATTN_UNSUPPORTED. */
int32_t cpattn_scratch_set_documents(cpattn_scratch *scratch, const cpattn_problem *problem);

/* On a device: grows the ring to `calls` calls in flight (1 to 65536) whose metadata takes `bytes` in all. One call
 * must fit by itself; while the ring is full, a call waits for the oldest one, and for nothing else.
 * cpattn_attend_metadata and cpattn_attend_backward_metadata say what a call takes; cpattn_finish takes at most 80
 * bytes for each range and 8 for each row, cpattn_transform at most 4096, the others none. Growing waits for the calls
 * in flight. */
int32_t cpattn_scratch_reserve_metadata(cpattn_scratch *scratch, uint64_t bytes, uint32_t calls);

/* acc: f32, or f64 when q is f64. */
typedef struct cpattn_attend_args {
  size_t struct_size;
  const cpattn_tensor *q;       /* [*, heads, head_dim] */
  const cpattn_tensor *k;       /* [*, kv heads, head_dim] */
  const cpattn_tensor *v;       /* [*, kv heads, value_dim] */
  /* acc [*, heads, value_dim], normalised; NULL when every mode is ONLY; may be o itself. */
  const cpattn_tensor *running;
  const cpattn_tensor *o;       /* written by LAST and ONLY, of q's type [*, heads, value_dim]; NULL when none occurs */
  /* Final, written by LAST and ONLY, acc [heads, *]; running too when running_lse is NULL. */
  const cpattn_tensor *lse;
  const cpattn_tensor *alibi_slopes; /* f32 [heads], or NULL */
  const cpattn_tensor *sinks;   /* f32 [heads], or NULL; applied by LAST and ONLY */
  cpattn_head_map heads;
  /* 1: tiles break at positions, so that a row's bits do not depend on how its keys were cut. The CPU's alone. */
  int32_t aligned;
  cpattn_score score;
  cpattn_ranges ranges; /* read during the call, also on a device */
  void *stream;
  /* acc [heads, *, 2]: the lse of `running` in two words, as cpattn_merge describes it; with NULL it is kept in `lse`,
   * in one: a merge then loses digits as scores grow. */
  const cpattn_tensor *running_lse;
} cpattn_attend_args;

#define CPATTN_ATTEND_ARGS_INIT \
  { sizeof(cpattn_attend_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {0, 0, 1}, 0, \
    {1.0, 0.0, CPATTN_UNLIMITED, 0}, {NULL, 0, NULL, 0, NULL, 0}, NULL, NULL }

int32_t cpattn_attend(cpattn_scratch *scratch, const cpattn_attend_args *args);

/* Bytes of scheduler metadata that this call takes on the scratch's device; 0 on the CPU. No memory of a tensor is
 * touched. */
int32_t cpattn_attend_metadata(cpattn_scratch *scratch, const cpattn_attend_args *args, uint64_t *bytes);

#define CPATTN_GRADIENTS_ALL 0
#define CPATTN_GRADIENTS_QUERIES 1 /* dq only; dk and dv NULL */
#define CPATTN_GRADIENTS_KEYS 2    /* dk and dv only; dq NULL */

typedef struct cpattn_attend_backward_args {
  size_t struct_size;
  const cpattn_tensor *q;
  const cpattn_tensor *k;
  const cpattn_tensor *v;
  const cpattn_tensor *d_o;    /* of q's type [*, heads, value_dim] */
  const cpattn_tensor *lse;    /* final, acc [heads, *] */
  const cpattn_tensor *delta;  /* acc [heads, *]: see cpattn_delta */
  const cpattn_tensor *dq;     /* acc [*, heads, head_dim] */
  const cpattn_tensor *dk;     /* acc [*, kv heads, head_dim] */
  const cpattn_tensor *dv;     /* acc [*, kv heads, value_dim] */
  const cpattn_tensor *alibi_slopes; /* f32 [heads], or NULL */
  cpattn_head_map heads;
  int32_t accumulate_keys; /* 1: add to dk and dv; 0: write every row of every k range */
  int32_t per_q_head;      /* 1: dk and dv have q's heads, one partial each */
  int32_t gradients;       /* CPATTN_GRADIENTS_... */
  int32_t aligned;
  int32_t reserved; /* 0 */
  cpattn_score score;
  cpattn_ranges ranges;
  void *stream;
} cpattn_attend_backward_args;

#define CPATTN_ATTEND_BACKWARD_ARGS_INIT \
  { sizeof(cpattn_attend_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {0, 0, 1}, 0, 0, \
    CPATTN_GRADIENTS_ALL, 0, 0, {1.0, 0.0, CPATTN_UNLIMITED, 0}, {NULL, 0, NULL, 0, NULL, 0}, NULL }

int32_t cpattn_attend_backward(cpattn_scratch *scratch, const cpattn_attend_backward_args *args);
int32_t cpattn_attend_backward_metadata(cpattn_scratch *scratch, const cpattn_attend_backward_args *args,
    uint64_t *bytes);

/* For the rest, scratch says where the tensors are; on the CPU it may be NULL, since no memory is needed. f64 is for
 * the CPU, as is any dim that is no multiple of 8 (of 4 in cpattn_merge), but for cpattn_transform, which takes them
 * all. */

/* delta[h, t] = sum over d of d_o[t, h, d] * o[t, h, d], from the final o. */
int32_t cpattn_delta(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *d_o,
    const cpattn_tensor *delta, void *stream);

/* Rows that no range covers: o = 0, lse = -inf, or the sink where `sinks` is not NULL. */
int32_t cpattn_finish(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *sinks, const cpattn_range *rows, size_t row_count, void *stream);

/* dsinks[h] = - sum over t of exp(sinks[h] - lse[h, t]) * delta[h, t]. */
int32_t cpattn_sink_gradient(cpattn_scratch *scratch, const cpattn_tensor *lse, const cpattn_tensor *delta,
    const cpattn_tensor *sinks, const cpattn_tensor *dsinks, void *stream);

/* Merges the partial result (other_o, other_lse) into (o, lse): all f32 or all f64, o [tokens, heads, dim] normalised,
 * lse [heads, tokens, 2]: a natural logarithm, and what rounding it to the first word lost. Without the second word, as
 * [heads, tokens], weights exp(lse_1 - lse_2) err by |lse| * 2^-24 in f32; each of the two may have one word or two. A
 * side whose lse is -inf counts for nothing; a NaN stays a NaN. */
int32_t cpattn_merge(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *other_o, const cpattn_tensor *other_lse, void *stream);

/* dst = the sum of the sources, element by element in this order in f32 (f64 if one of them is f64), rounded once. All
 * [tokens, heads, dim], any strides, types may differ. One source is a copy or a cast, none fills with zeros; the first
 * may be dst itself. The layout changes of an all-to-all are such copies between slices of tokens and of heads. */
#define CPATTN_MAX_SOURCES 64
int32_t cpattn_transform(cpattn_scratch *scratch, const cpattn_tensor *dst, const cpattn_tensor *const *sources,
    size_t source_count, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* CPATTN_H */
