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
 *   cpattn_plan_create(&p, &o, &plan);                   make the plan, the same on every rank
 *   cpattn_plan_shard(plan, ..., rank, &whole, &mine);   copy this rank's tokens out of the whole batch
 *   cpattn_local_group(world, 60000, transports);        ranks as threads of one process (cpattn_peer_group: on CUDA
 *                                                        devices; cpattn_mpi_group, cpattn_nccl_group: as processes;
 *                                                        cpattn_transport_create: your own transport)
 *   cpattn_rank_create(transports[r], NULL, &rank);      on each rank
 *   cpattn_forward(rank, plan, &forward_args);           o and lse of this rank's tokens
 *   cpattn_backward(rank, plan, &backward_args);         dq, dk, dv
 *
 * The kernels (attention over ranges, its backward, merging, transforms) can also be called without plans and ranks, and a
 * plan's operations can be executed by the caller on its own streams and communicator: see the last two sections.
 *
 * STATUS. Every call that can fail returns an int32_t: CPATTN_OK (0) or one of the codes below. After a failure,
 * cpattn_last_error() on the same thread returns the message: the argument, the value found and the value expected. A
 * call that refuses its arguments has written nothing. No panic, exception or signal crosses this interface.
 *
 * HANDLES. cpattn_plan, cpattn_transport, cpattn_rank, cpattn_scratch and cpattn_schedule are opaque. The caller that creates one
 * destroys it, once, with the destroy function of its type; destroying NULL does nothing. A NULL handle and a handle of
 * another type are refused with CPATTN_INVALID_HANDLE. A handle that was already destroyed is always refused in debug
 * builds of the library; release builds do not always notice.
 *
 * THREADS. A plan and a schedule never change: any number of threads may use them. A rank or a scratch serves one call at
 * a time; a second one is refused with CPATTN_BUSY. cpattn_rank_poll and cpattn_rank_abort may be called from any thread at any
 * time, in particular while another thread is inside cpattn_forward. A handle that is in use must not be destroyed.
 *
 * FORK. A child of a process has its memory, but only the thread that forked. Plans, schedules and scratches can be used there. A
 * rank that has prepared or run exchanges in the parent is refused with CPATTN_INVALID, and destroying it waits for nothing: make a
 * new group in the child. The CUDA driver, NCCL and MPI do not serve a child of a process that used them.
 *
 * MEMORY. Tensors belong to the caller. They are read and written in place; the library does not keep or free them. A
 * run's workspace is allocated by the rank, or lent by the caller (cpattn_plan_workspace, cpattn_rank_lend_workspace).
 * Everything else that a plan needs is allocated when a rank first prepares or runs it (cpattn_rank_prepare).
 *
 * DEVICES. A library that was built with CUDA (capi/build --cuda) serves the CPU and CUDA devices of compute capability
 * 8.0 and later; a library without it serves the CPU. Both have the same functions. What a build or a device lacks is
 * refused with CPATTN_UNSUPPORTED. The CUDA driver is loaded when a device is first asked for; on a machine without a
 * driver the library loads and serves the CPU. Each rank and each scratch has one device (or the CPU), and all tensors
 * and the workspace of a call are in its memory. Devices support f16 and bf16, with head_dim a multiple of 8 up
 * to 576 and value_dim up to 512, and refuse reproducible plans.
 *
 * STREAMS. On the CPU `stream` is NULL and a call returns when its work is done. On a device `stream` is a cudaStream_t
 * (CUstream) of the device's primary context, the one that the CUDA runtime uses; NULL is the legacy default stream.
 * The call returns when its work is enqueued, in stream order. So inputs need not be ready when the call is made, and
 * tensors stay in use until the stream has executed the work. To order other streams, use events, as with any kernel.
 * The library makes the context current during a call and then restores the previous one.
 *
 * CUDA GRAPHS. A run of a rank can be captured; over NCCL only one of a plan without exchanges, as that of a single
 * rank: others are refused. Before the capture begins, call cpattn_rank_prepare. Then call cpattn_forward, cpattn_backward, cpattn_rank_to_heads or
 * cpattn_rank_to_tokens with the stream that is being captured. While a run of the rank is being captured, calls that
 * would invalidate the capture are refused with CPATTN_UNSUPPORTED, and the capture stays valid: lending workspace or
 * taking it back, preparing a plan that is not prepared, cpattn_rank_record with a capacity other than 0, and a run on
 * a stream outside of the capture. cpattn_rank_poll is allowed. Each replay reads and writes the tensors and the
 * workspace of the captured run. Replays and runs of one rank must not overlap: the rank orders those that are launched
 * one after the other, so do not launch them from several threads at the same time. The rank must live, and a lent
 * workspace must stay valid, until the last replay is done. Ranks of a cpattn_peer_group are captured into one graph,
 * all of them, their streams joined by events: a run that finds a peer in another graph, or in none, ends the group,
 * and later calls report it. Over a caller's own transport table, and for kernels called directly, a stream that is
 * being captured is refused.
 *
 * STRUCTS OF OPTIONS begin with `struct_size`. Initialise them with the INIT macro of the same name, never by hand: a
 * program then works with older and newer libraries. A shorter struct, from an earlier header, gets the default for
 * every member that it lacks, which is 0. A struct longer than the library knows is accepted if the rest is zero, and
 * refused otherwise: no option is ever ignored.
 *
 * STRUCTS IN ARRAYS. The same holds for cpattn_q_range and for pairs: the struct with their array says how large the
 * program's elements are. Other structs in arrays have one layout as long as the soname is the same.
 *
 * TERMS. A `rank` is one participant, the `world` is the number of ranks. A `plan` is what all ranks compute, and how.
 * To `run` a plan is one forward, backward or all-to-all. An `exchange` is a batch of sends and receives that complete
 * together. Lengths, rows and tokens are counts; strides are in elements, sizes in bytes, times in milliseconds unless
 * the name says otherwise (_ns). Flags are 0 or 1. */
#ifndef CPATTN_H
#define CPATTN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Version ----------------------------------------------------------------------------------------------------- */

#define CPATTN_VERSION_MAJOR 0
#define CPATTN_VERSION_MINOR 2
#define CPATTN_VERSION_PATCH 0

/* 10000 * major + 100 * minor + patch of this header. */
#define CPATTN_VERSION (CPATTN_VERSION_MAJOR * 10000 + CPATTN_VERSION_MINOR * 100 + CPATTN_VERSION_PATCH)

/* The same number for the linked library. While major is 0, libraries with another minor version are incompatible. */
uint32_t cpattn_version(void);

/* What the linked library was built with. Without CPATTN_FEATURE_KERNELS (capi/build --planner) it plans, lists
 * schedules, carries messages, combines and moves heads; calls and runs of attention are refused with
 * CPATTN_UNSUPPORTED. */
#define CPATTN_FEATURE_KERNELS 1
#define CPATTN_FEATURE_RAYON 2
#define CPATTN_FEATURE_CUDA 4
#define CPATTN_FEATURE_NCCL 8
#define CPATTN_FEATURE_MPI 16

/* A set of CPATTN_FEATURE_.... */
uint32_t cpattn_features(void);

/* ---- Status ------------------------------------------------------------------------------------------------------ */

#define CPATTN_OK 0
/* An argument contradicts another one, or is invalid by itself. Nothing was written. */
#define CPATTN_INVALID 1
/* Valid, but not supported by this build, device or mode. */
#define CPATTN_UNSUPPORTED 2
/* Ranks of a group made different calls or plans. Found before any data moved, the group stays usable; found later, in
 * messages of a run, the group has failed (see cpattn_forward). */
#define CPATTN_DISAGREEMENT 3
/* A peer failed, left, aborted or did not answer in time. The transport stays failed: make a new group. */
#define CPATTN_PEER 4
/* The verifier found a flaw in a schedule. */
#define CPATTN_SCHEDULE 5
/* A call into a device driver or the operating system failed, or a kernel of the caller's (cpattn_kernel_table). */
#define CPATTN_DEVICE 6
/* The handle is NULL, of another kind, or was destroyed. */
#define CPATTN_INVALID_HANDLE 7
/* Another thread is in a call with this handle. */
#define CPATTN_BUSY 8
/* A bug in the library. Destroy the handles of the call. */
#define CPATTN_PANIC 9

/* The message of this thread's last error, UTF-8; "" if there was none. Valid until the next failure on this thread. */
const char *cpattn_last_error(void);

/* The rank that this thread's last error names: the rank at fault, or, if ranks run different plans, one of two ranks that
 * differ, both of which the message names; -1 if it names none. */
int64_t cpattn_last_error_peer(void);

/* "CPATTN_INVALID" for CPATTN_INVALID, and so on; "unknown status" otherwise. The string is static. */
const char *cpattn_status_name(int32_t status);

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/*
 * A cpattn_tensor has the members of a DLTensor (github.com/dmlc/dlpack), so DLPack tensors need no conversion. If
 * dlpack/dlpack.h is included before this file, it is the same type; otherwise cast the pointer.
 *
 *   device       kDLCPU (1) with device_id 0, or kDLCUDA (2) with the device's number. kDLCUDAHost (3) counts
 *                as CPU memory. kDLCUDAManaged (13) does not say which side may access it and is refused: use 1 or 2
 *   ndim, shape  q, k, v, o and their gradients: 3, [tokens, heads, head_dim]
 *                lse, delta:                     2, [heads, tokens]
 *                alibi_slopes:                   1, [heads], or 2, [documents, heads]
 *                max_logit:                      1, [heads]
 *                sinks, dsinks:                  1, [heads], or 2, [heads, sinks of each head], those of a head side by side
 *                the lse of a partial result:    3, [heads, tokens, 2], or 2, [heads, tokens] (see cpattn_merge)
 *   dtype        f16 {2, 16, 1}, bf16 {4, 16, 1}, f32 {2, 32, 1}, f64 {2, 64, 1} as {code, bits, lanes}
 *   strides      in elements, none negative (such a tensor is refused); NULL means compact (row-major). head_dim must
 *                be contiguous. A tensor that is only read may have stride 0; one that is written must not overlap
 *                itself or another tensor of the call
 *   data         data + byte_offset is aligned to the element's size; may be NULL when a dimension is 0. On a device,
 *                rows of q, k, v, o, d_o and of f32 tensors with head_dim begin at multiples of 16 bytes (this holds for
 *                compact tensors allocated by cudaMalloc or a framework; cpattn_transform accepts any alignment),
 *                strides are below 2 GiB, and the memory belongs to that device according to the driver
 *
 * The library cannot know the size of the memory at `data`: shape and strides must stay within it. Error messages call
 * data + byte_offset the tensor's ptr, and its strides token_stride and head_stride. */
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

/* Element types, for arguments that name a type without a tensor. On devices q, k, v, o are f16 or bf16. */
#define CPATTN_F16 0
#define CPATTN_BF16 1
#define CPATTN_F32 2
#define CPATTN_F64 3

/* ---- Problem ----------------------------------------------------------------------------------------------------- */

/* For windows: no limit on that side. */
#define CPATTN_UNLIMITED INT64_MAX

/* Softmax attention. */
#define CPATTN_SOFTMAX 0
/* A kernel of the caller's that mixes whole sequences, such as linear attention, between two all-to-alls; needs ring = 1.
 * cpattn_plan_share and the two all-to-alls (cpattn_rank_to_heads) work; attention, its workspace and its verification are
 * refused with CPATTN_UNSUPPORTED. */
#define CPATTN_OTHER 1

/*
 * Which queries attend to which keys: a run of q tokens, a run of k tokens, and limits of the distance of their positions.
 * Tokens are numbered in the whole batch. In the slice the first k token is at position 0 and the first q token at q_start;
 * a key is attended when low <= k_pos - q_pos <= high, and window_left and window_right of the problem allow the distance.
 *
 *   tokens [a, b), causal                              {a, b, a, b, 0, INT64_MIN, 0}
 *   tokens [a, b), each sees all of them               {a, b, a, b, 0, INT64_MIN, CPATTN_UNLIMITED}
 *   tokens [c, d) see [a, b), which comes just before  {c, d, a, b, b - a, INT64_MIN, CPATTN_UNLIMITED}
 *
 * A token may be in several slices, a pair of tokens in one at most: slices that allow the same pair are refused, with both
 * and the pair. A slice that allows no pair is accepted. A q token that attends to nothing has o 0 and lse -inf (with a sink,
 * lse is the sink). */
typedef struct cpattn_slice {
  int32_t q_begin; /* first q token */
  int32_t q_end;   /* one past the last */
  int32_t k_begin;
  int32_t k_end;
  int64_t q_start; /* position of the first q token, when the first k token is at 0; within +-2^40 */
  int64_t low;     /* least k_pos - q_pos; INT64_MIN: no limit */
  int64_t high;    /* largest k_pos - q_pos, 0 is causal; CPATTN_UNLIMITED: no limit */
} cpattn_slice;

/*
 * One attention over one packed batch, as if one device held all of it. Pointers are read during the call and not kept.
 *
 * Documents are stored one after another without padding: cu_seqlens_q has documents + 1 non-decreasing entries, the
 * first is 0, the last is the number of tokens. Positions count from the start of the document. If q and k are the same
 * tokens (the usual case), cu_seqlens_k and q_start are NULL. Otherwise the first q token of document d has position
 * q_start[d] among the document's k tokens; the default is len_k - len_q (the last q is aligned with the last k).
 *
 * Without slices each document attends to itself. With `slices` queries attend to what these say and to nothing else, also
 * across documents. Documents are then what layouts cut, what positions of tokens count in, and where labels end. The window
 * applies inside each slice, by its positions: give window_right = CPATTN_UNLIMITED. A window_right of 0, as the INIT macro
 * has it, is refused if some slice has a key after its query.
 *
 * To pad tensors to a fixed shape, add two documents: one that has the spare q rows and no keys, and one that has the
 * spare k rows and no queries. Nothing attends to them. If they hold finite numbers, their o, dq, dk and dv are 0 and
 * their lse is -inf.
 *
 * A score is s = scale * q.k, then softcap * tanh(s / softcap), then - slope * |q_pos - k_pos|, then the mask: a key
 * is attended when q_pos - k_pos <= window_left and k_pos - q_pos <= window_right. CPATTN_PROBLEM_INIT is causal. A
 * sliding window of W tokens, including the query's own, is window_left = W - 1, window_right = 0. */
typedef struct cpattn_problem {
  size_t struct_size;
  const int32_t *cu_seqlens_q; /* documents + 1 entries */
  const int32_t *cu_seqlens_k; /* documents + 1 entries; NULL: q and k are the same tokens */
  const int64_t *q_start;      /* documents entries, or NULL; needs cu_seqlens_k */
  size_t documents;          /* 0: an empty batch, with cu_seqlens_q of the one entry 0. Its plans take tensors of no tokens */
  uint32_t heads;            /* q heads, a multiple of kv_heads */
  uint32_t kv_heads;         /* 0: same as heads */
  uint32_t head_dim;         /* of q and k, 1 to 576 */
  uint32_t value_dim;        /* of v and o; 0: same as head_dim */
  int32_t dtype;             /* of q, k, v, o and their gradients: CPATTN_F16, ... */
  int32_t kind;              /* CPATTN_SOFTMAX or CPATTN_OTHER */
  int64_t window_left;       /* 0 to UINT32_MAX, or CPATTN_UNLIMITED */
  int64_t window_right;      /* 0 (causal) to UINT32_MAX, or CPATTN_UNLIMITED */
  double scale;              /* 0: 1 / sqrt(head_dim) */
  double softcap;            /* 0: none */
  const float *alibi_slopes; /* alibi_rows x heads entries, -1e18 to 1e18; NULL: none. Distances above 2^24 are rounded in f32 */
  int32_t sinks;             /* learnable sinks of each q head, 0 to 4096; their values come with each run: finite, or
                                -inf for none. +inf takes all weight of its head: o is 0, lse +inf, dq 0, dk and dv get
                                nothing, its own gradient is NaN. NaN makes all results of its head NaN */
  int32_t alibi_rows;        /* 0: alibi_slopes has one row, for all documents; documents: a row for each, and a pair has the slope of
                                its q token's document (CPU only) */
  const cpattn_slice *slices; /* slice_count entries; NULL: each document attends to itself */
  size_t slice_count;         /* at least 1 with slices */
  /* 0: none, up to but not including 1. Each probability is dropped with this probability, those that are kept are multiplied
   * by 1 / (1 - dropout); lse is that of all pairs, and sinks are not dropped. Which pairs are dropped depends on the two tokens'
   * places in the batch, the q head and the seed of each run (cpattn_dropout_mask), on no mesh. Runs that are captured into a graph refuse it. */
  double dropout;
} cpattn_problem;

#define CPATTN_PROBLEM_INIT \
  { sizeof(cpattn_problem), NULL, NULL, NULL, 0, 0, 0, 0, 0, CPATTN_F32, CPATTN_SOFTMAX, CPATTN_UNLIMITED, 0, \
    0.0, 0.0, NULL, 0, 0, NULL, 0, 0.0 }

/* ---- Options ----------------------------------------------------------------------------------------------------- */

/* How tokens are distributed over the R ring ranks. */
#define CPATTN_LAYOUT_AUTO 0        /* the least work on the busiest rank; within 1 % of that the fewest rows from other ranks */
#define CPATTN_LAYOUT_CONTIGUOUS 1  /* consecutive tokens of the batch */
#define CPATTN_LAYOUT_ZIGZAG 2      /* each document in 2R chunks: chunk r and chunk 2R-1-r. Slow for packs of short documents,
                                       which are cut for every rank */
#define CPATTN_LAYOUT_ZIGZAG_PACK 3 /* the same with the whole batch in 2R chunks */
#define CPATTN_LAYOUT_STRIPED 4     /* token t goes to (t / layout_parameter) mod R */
#define CPATTN_LAYOUT_BALANCED 5    /* layout_parameter chunks for each rank, assigned by mask area */

/* Which side is sent round the ring, in the backward (circulate) and in the forward (circulate_forward): k and v, or q. */
#define CPATTN_CIRCULATE_AUTO 0 /* whichever moves fewer bytes; in the forward k and v where q and k are the same tokens, and with
                                   passes, another gather and reproducible */
#define CPATTN_CIRCULATE_KEYS 1
#define CPATTN_CIRCULATE_QUERIES 2 /* forward: partial o and lse come back to the owner of q, and k and v stay; for few q rows over
                                      many keys. Needs 1 pass, CPATTN_GATHER_AUTO or _STEPS, and no reproducible */

/* Whether a rank receives k and v step by step or all at once. A reproducible plan always gathers them; STEPS is
 * refused with it. */
#define CPATTN_GATHER_AUTO 0     /* STEPS, or TOGETHER if there are many short documents, each cut for every rank */
#define CPATTN_GATHER_OTHERS 1   /* receive from all other ranks at once, while the kernel computes with the own k and v */
#define CPATTN_GATHER_STEPS 2    /* one ring step after another */
#define CPATTN_GATHER_TOGETHER 3 /* receive all at once, then one kernel call over all keys, the rank's own included */

/* The type in which partial gradients are sent. */
#define CPATTN_WIRE_FULL 0 /* f32 (f64 for f64): no rounding */
#define CPATTN_WIRE_BF16 1 /* half the bytes; each partial gradient is rounded once to 8 bits before it is summed. Over several
                              nodes: what crosses between them, the sum over a node's ranks */

/*
 * Over how many ranks, and how. The mesh is replicas x ring x ulysses = world. Ranks of one Ulysses group have adjacent
 * numbers; each replica works on its own batch. If ulysses and ring are both 0, both are chosen automatically; if one of
 * them is 0, it becomes world divided by the other.
 */
/* Which rows of k and v move in runs over listed keys (CPATTN_KEYS_LISTED). */
#define CPATTN_KEY_ROWS_AUTO 0    /* those of the two that are fewer bytes over all ranks, counted in each run; ALLOWED on a rank \
                                     with a lent workspace, or whose k and v are not compact */
#define CPATTN_KEY_ROWS_LISTED 1  /* those that lists name, each once to each ring rank whose tokens list it. They may need more \
                                     workspace than the plan names; if a lent one is too small, all ranks refuse the run before \
                                     rows move (CPATTN_INVALID), and the message names the bytes */
#define CPATTN_KEY_ROWS_ALLOWED 2 /* those that the mask allows, as without lists */

typedef struct cpattn_options {
  size_t struct_size;
  uint32_t world;            /* ranks of the transport */
  uint32_t ulysses;          /* ranks that exchange tokens for heads; at most heads */
  uint32_t ring;             /* ranks that send each other k and v */
  int32_t layout;            /* CPATTN_LAYOUT_... */
  uint32_t layout_parameter; /* STRIPED: tokens per stripe; BALANCED: chunks per rank; otherwise 0 */
  uint32_t passes;           /* passes over groups of kv heads, 1 to kv_heads: divides the workspace for k and v in flight */
  int32_t circulate;         /* CPATTN_CIRCULATE_... */
  int32_t wire;              /* CPATTN_WIRE_... */
  int32_t gather;            /* CPATTN_GATHER_... */
  int32_t reproducible;      /* 1: bit-equal results for any number of ranks; CPU only */
  int32_t pack_inputs;       /* 1: tensors that are sent may have any strides; 0: they must be compact */
  uint32_t ranks_per_node;   /* ranks that share a node: rank r is in node r / ranks_per_node, and a row crosses from one node
                                to another once; 0, or as many as all ranks or more: all links are alike. See cpattn_ranks_per_node */
  int32_t circulate_forward; /* CPATTN_CIRCULATE_... */
  int32_t key_rows;          /* CPATTN_KEY_ROWS_... */
} cpattn_options;

#define CPATTN_OPTIONS_INIT \
  { sizeof(cpattn_options), 1, 0, 0, CPATTN_LAYOUT_AUTO, 0, 1, CPATTN_CIRCULATE_AUTO, CPATTN_WIRE_FULL, CPATTN_GATHER_AUTO, 0, 0, 0, CPATTN_CIRCULATE_AUTO, CPATTN_KEY_ROWS_AUTO }

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

typedef struct cpattn_plan cpattn_plan;

/* options.ranks_per_node, from the node of each rank: nodes[r] is any number that the ranks of rank r's node have in common, and
 * no others. The ranks of a node must have adjacent numbers, and every node as many; CPATTN_INVALID names both values otherwise. */
int32_t cpattn_ranks_per_node(const uint64_t *nodes, size_t ranks, uint32_t *ranks_per_node);

/* Makes a plan. Every rank makes the same plan from the same arguments; ranks compare their plans when they run them. */
int32_t cpattn_plan_create(const cpattn_problem *problem, const cpattn_options *options, cpattn_plan **plan);

/* As cpattn_plan_create, with the mesh and the layout that are predicted to take the least time on a machine. `machine` is the
 * text of its description, such as those in the folder machines; every rank gives the same. In `options` ulysses, ring and
 * layout are 0: they are chosen. ranks_per_node 0: the machine's nodes; schedules of one level and of two are rated, and a plan
 * of two levels has the machine's ranks_per_node. Another value is taken as it is; that of all ranks means one level.
 * cpattn_plan_explain lists the candidates. It takes longer than cpattn_plan_create: for the next batch give that the mesh, the
 * layout and the ranks_per_node that were chosen (cpattn_plan_describe). */
int32_t cpattn_plan_create_on(const cpattn_problem *problem, const cpattn_options *options, const char *machine,
                              cpattn_plan **plan);

/* Makes a plan for another kind of layer over the same documents, with the tokens of `base`: its mesh, its layout and, where
 * that goes by mask area, its chunks. Heads, dims, dtype, mask and score options of `problem` are free. Two plans that were made
 * separately may give a rank other tokens even when all shapes match: make all plans of a model from one.
 * `problem` gives the documents of `base`, or none: cu_seqlens_q, cu_seqlens_k and q_start NULL, documents 0. Slices need not be
 * those of `base`: `problem` gives its own; with no documents and no slices it has the slices of `base`, if there are any; with
 * documents and no slices, none. `options` may be NULL: those of `base`. Otherwise world, ulysses, ring and layout are 0 or those
 * of `base`. */
int32_t cpattn_plan_with_tokens_of(const cpattn_plan *base, const cpattn_problem *problem, const cpattn_options *options,
                                   cpattn_plan **plan);

/* Makes the plans of a model whose layers are of several kinds: problems[i] is kind i, of which the model has layers[i]. All plans
 * have the mesh and the tokens that cost all layers together the least, so they have one distribution. The first problem gives
 * the documents; the others give the same ones, or none, and slices as for cpattn_plan_with_tokens_of. In `options` ulysses, ring and layout are
 * 0: they are chosen. `plans` has room for `kinds` plans, and is written only if all of them were made. */
int32_t cpattn_plan_auto_for(const cpattn_problem *const *problems, const uint64_t *layers, size_t kinds,
                             const cpattn_options *options, cpattn_plan **plans);

/* What groups of ranks may be: see cpattn_plan_groups. */
typedef struct cpattn_group_limits {
  size_t struct_size;
  const uint32_t *sizes;   /* numbers of ranks of a group: ascending, each a multiple of the one before; the last divides world */
  size_t size_count;
  uint64_t room;           /* tokens that a rank has room for in a pass; a group of n ranks has room for n times as many */
  uint64_t token_flops;    /* operations of a token outside of attention in one layer's forward, such as twice its parameters; 0: none */
  uint32_t world;          /* ranks */
  uint32_t passes;         /* the most passes; 0: as many as are needed */
  uint32_t ranks_per_node; /* as in cpattn_options, where no machine is given */
  uint32_t reserved;       /* 0 */
} cpattn_group_limits;

#define CPATTN_GROUP_LIMITS_INIT \
  { sizeof(cpattn_group_limits), NULL, 0, 0, 0, 1, 0, 0, 0 }

/* Costs are picoseconds of one layer's forward and backward if a machine is given, otherwise multiply-adds divided by 1,024. */
typedef struct cpattn_groups_info {
  size_t struct_size;
  uint64_t makespan; /* of all passes, each as long as its most expensive group */
  uint64_t bound;    /* no dealing of these documents costs less */
  uint32_t passes;
  uint32_t reserved;
} cpattn_groups_info;

#define CPATTN_GROUPS_INFO_INIT \
  { sizeof(cpattn_groups_info), 0, 0, 0, 0 }

/* Deals documents over groups of ranks that change size: short ones are packed for small groups, which work apart, long ones for
 * groups of many ranks, by what a document costs a group of each size. A step has several passes if the ranks have no room for all
 * tokens at once. Document d is in pass[d], in the group of ranks[d] ranks from first_rank[d] on, a multiple of ranks[d]; arrays have
 * room for problem.documents numbers. Two documents of one pass are in the same group or have no rank in common. `machine` is the
 * text of a machine's description, or NULL. All ranks get the same result from the same arguments. The documents of `problem` attend
 * to themselves: slices and cu_seqlens_k are refused. */
int32_t cpattn_plan_groups(const cpattn_problem *problem, const cpattn_group_limits *limits, const char *machine,
                           uint32_t *pass, uint32_t *first_rank, uint32_t *ranks, cpattn_groups_info *info);

/* A number that names who holds which tokens: equal for two plans exactly if their documents are equal and each rank holds the
 * same tokens in the same order. A tensor may be used with every plan of its distribution, and with no other plan. */
int32_t cpattn_plan_distribution(const cpattn_plan *plan, uint64_t *distribution);

int32_t cpattn_plan_destroy(cpattn_plan *plan);

/* What a plan decided. */
typedef struct cpattn_plan_info {
  size_t struct_size;
  uint32_t replicas;
  uint32_t ring;
  uint32_t ulysses;
  int32_t layout; /* never AUTO */
  uint32_t layout_parameter;
  uint32_t ranks_per_node; /* as in cpattn_options: given there, or by the machine */
  uint64_t q_tokens; /* of the whole batch */
  uint64_t k_tokens;
  uint64_t fingerprint; /* equal for equal plans */
} cpattn_plan_info;

#define CPATTN_PLAN_INFO_INIT \
  { sizeof(cpattn_plan_info), 0, 0, 0, 0, 0, 0, 0, 0, 0 }

int32_t cpattn_plan_describe(const cpattn_plan *plan, cpattn_plan_info *info);

/* A rank's coordinates in the mesh, its number of tokens, and the heads it computes between the two all-to-alls: begin
 * inclusive, end exclusive. */
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

/* Text that explains the plan: why this mesh, what each rank holds, bytes per step, imbalance, workspace. Writes at most
 * `capacity` bytes including the final 0, and to *needed the size of the whole text; `text` may be NULL if capacity is 0. */
int32_t cpattn_plan_explain(const cpattn_plan *plan, char *text, size_t capacity, size_t *needed);

/* Verifies the schedules of all ranks of a group, forward and backward: messages match, nothing deadlocks or races, every
 * allowed (query, key) pair is attended once. CPATTN_SCHEDULE: they do not. Meant for tests: time and memory grow with
 * tokens times heads (about 50 bytes for each row of each head), and with ranks and documents. */
int32_t cpattn_plan_verify(const cpattn_plan *plan);

#define CPATTN_FORWARD 0
#define CPATTN_BACKWARD 1
#define CPATTN_TO_HEADS 2
#define CPATTN_TO_TOKENS 3
#define CPATTN_COMBINE 4
#define CPATTN_SCAN 5

/* Bytes of workspace that a run takes on a rank, the same on the CPU and on devices; see cpattn_rank_lend_workspace.
 * direction: CPATTN_FORWARD or CPATTN_BACKWARD. */
int32_t cpattn_plan_workspace(const cpattn_plan *plan, uint32_t rank, int32_t direction, uint64_t *bytes);

/* ---- Tokens of a rank -------------------------------------------------------------------------------------------- */

/* `side`: q, o, lse and their gradients, or k, v and their gradients. */
#define CPATTN_Q 0
#define CPATTN_K 1

/* The tokens of the packed batch that a rank holds, in its order, and their positions in their documents (for rotary
 * embeddings and the like). `capacity` is the length of the array, at least the q_tokens or k_tokens of its share. */
int32_t cpattn_plan_tokens(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *tokens, size_t capacity);
int32_t cpattn_plan_positions(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *positions,
    size_t capacity);

/* cpattn_plan_shard copies a rank's rows out of `whole` into `local`, in the rank's order; cpattn_plan_unshard copies them
 * back and leaves the other rows of `whole` as they are. Both tensors are on the CPU (on a device, gather by the indices of
 * cpattn_plan_tokens), have elements of 1, 2, 4 or 8 bytes and 1 to 3 dimensions, tokens first, for example ids [tokens] or
 * activations [tokens, heads, head_dim]. All dimensions except the tokens are equal. With 2 or 3 dimensions the last one is
 * contiguous. */
int32_t cpattn_plan_shard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *whole,
    const cpattn_tensor *local);
int32_t cpattn_plan_unshard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *local,
    const cpattn_tensor *whole);

/* Labels: for each of a rank's q tokens, copies the row of `whole` that is `by` tokens later in the same document, or
 * repeats the one element at `fill` if the document has no such token. by = 1 gives labels for next-token prediction.
 * Tensors as above. If no rank has the whole batch, use cpattn_rank_shift. */
int32_t cpattn_plan_shift(const cpattn_plan *plan, uint32_t rank, int64_t by, const void *fill,
    const cpattn_tensor *whole, const cpattn_tensor *local);

/* ---- Transports -------------------------------------------------------------------------------------------------- */

typedef struct cpattn_transport cpattn_transport;

/* `world` ranks (1 to 4096) as threads of this process. Writes `world` handles to `transports`, in rank order; give each to
 * its thread. deadline_ms is a timeout: if a call waits so long while none of its messages moves, it fails on every rank. */
int32_t cpattn_local_group(uint32_t world, uint64_t deadline_ms, cpattn_transport **transports);

/* The same for tensors on CUDA devices: rank r is on devices[r], and ranks may share a device. Data is moved by
 * device copies in stream order. At each exchange the threads of the ranks wait for each other, up to the deadline, to
 * enqueue the copies; they never wait for a device. */
int32_t cpattn_peer_group(uint32_t world, const int32_t *devices, uint64_t deadline_ms, cpattn_transport **transports);

/* Ranks as processes, over MPI. `comm` is the address of an MPI_Comm (its type depends on the MPI), of the MPI that the
 * library was built with. All processes of the communicator make this call; rank r of it is rank r here. The library works on
 * duplicates of it. MPI must be initialised with MPI_THREAD_MULTIPLE. If a process does not call within the deadline, the
 * call fails on the others with CPATTN_PEER and names it. A failure is reported to all ranks. A process that dies is found
 * when the deadline passes, if MPI lets the other processes live; by default MPI ends the job. After a failure end the
 * process with MPI_Abort: MPI_Finalize may wait for the dead process. Destroy transports and ranks before MPI_Finalize. A
 * library built without `--features mpi` refuses with CPATTN_UNSUPPORTED. */
int32_t cpattn_mpi_group(const void *comm, uint64_t deadline_ms, cpattn_transport **transport);

/* options.ranks_per_node for the ranks of an MPI communicator: those of a node share memory (MPI_COMM_TYPE_SHARED). All processes
 * of `comm` make this call; it is a collective of MPI on it, and waits as such. Refused as by cpattn_ranks_per_node. */
int32_t cpattn_mpi_ranks_per_node(const void *comm, uint32_t *ranks_per_node);

/*
 * Ranks over NCCL, each a thread or process with a CUDA device of its own, on one host or many. libnccl.so.2, of
 * version 2.14 or later, is opened when the first of these is called (CPATTN_UNSUPPORTED without one).
 *
 * cpattn_nccl_unique_id writes the 128 bytes that identify a group. One rank calls it and sends them to all others (by
 * MPI_Bcast, a framework's store, a file). Each group needs its own id.
 *
 * cpattn_nccl_group makes this rank's transport: from a unique_id with comm NULL, or from a framework's ncclComm_t with
 * unique_id NULL. With a unique_id it returns when all `world` ranks have called it, or fails after deadline_ms. A comm
 * must have this rank, world and device_id. It must live longer than the transport, nothing else may call NCCL with it
 * while a run is being enqueued, and the library does not free it.
 *
 * An exchange that takes longer than deadline_ms, an error that NCCL reports, or cpattn_rank_abort ends the group: poll
 * and later calls fail with CPATTN_PEER and name rank, operation, step, peers, bytes and time. NCCL does not say which of
 * several peers did not answer. After a failure the library aborts its own communicator, so that the streams continue. It
 * aborts a framework's comm only if may_abort is 1; the owner must not use the comm afterwards. With may_abort 0 the
 * unfinished work stays on the streams until the owner aborts the comm; whatever waits for those streams, or frees device
 * memory, waits until then. Other ranks learn of a failure from NCCL, if it notices, or when their own deadline passes:
 * give all ranks the same deadline. */
int32_t cpattn_nccl_unique_id(uint8_t *unique_id);
int32_t cpattn_nccl_group(const uint8_t *unique_id, void *comm, int32_t may_abort, uint32_t rank, uint32_t world,
    int32_t device_id, uint64_t deadline_ms, cpattn_transport **transport);

/* Contiguous bytes to send to `peer`, or to receive from it. The bytes of a send are only read. On a device, `data` is a
 * device address. */
typedef struct cpattn_message {
  size_t peer;
  void *data;
  size_t bytes; /* at least 1 */
} cpattn_message;

/*
 * A transport that the caller implements, for example over a framework's communicator. The functions return 0 on success
 * and any other number on failure; on failure they may set *blame (-1 on entry) to the rank at fault, otherwise the rank
 * itself is named. The cpattn call in progress then fails with CPATTN_PEER, and its message ends with the function and
 * its result: "rank 0, fetch, step 1 of the forward of plan ...: rank 2 failed: the transport's exchange returned 7". The
 * functions must not throw or longjmp. `context` is passed to each of them.
 *
 * The contract (docs/transport_contract.md names the test of each rule): each send matches one receive of the same size; between two
 * ranks, sends and receives match in the order in which each rank lists them. A rank makes one exchange at a time. An exchange
 * is a rendezvous (schedules do not rely on buffering) and completes as a whole. Empty messages and messages to oneself do not
 * occur. One exchange has at most eight messages to each peer and at most eight from it, so requests can be allocated once.
 * agree on one rank and exchange on another may run at the same time: they need different tags or communicators. `peer` is a
 * rank number in the transport's group, not in the job. Nothing may hang: when a peer dies, fails or does not answer within a
 * timeout that the transport chooses, this call and all later calls fail. The timeout must be longer than a peer computes between two
 * exchanges. (A rank on the CPU calls abort after the first failure, makes no other call, and returns that failure from then on: for it
 * the later calls need not fail.) When a call has returned, also with a failure, the transport no longer accesses the memory of its
 * messages: posted receives are cancelled, or go to the transport's own memory.
 *
 * For a rank on a device, `exchange` gets one of the rank's own streams, enqueues the batch there and returns, as ncclSend
 * and ncclRecv between ncclGroupStart and ncclGroupEnd do. The device's primary context is current during the call. A
 * failure after the return is reported by poll. After abort, enqueued work must end soon. */
typedef struct cpattn_transport_table {
  size_t struct_size;
  void *context;
  uint32_t rank;
  uint32_t world;
  /* An all-gather over ranks first ... end-1: all[i] = the number that rank first + i gave. Waits for all of them; the
   * library compares the numbers. Called on the thread that runs the plan, the first time a plan runs in a direction. Later
   * runs instead send 16 bytes (24 on a device) to compare before the first message from one rank to another. */
  int32_t (*agree)(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame);
  /* Moves a batch of messages. On the CPU it returns when all are complete; stream is NULL; the rank calls it on a thread
   * of its own, one call at a time. On a device it returns when all are enqueued; called on the thread that runs the plan. */
  int32_t (*exchange)(void *context, const char *operation, uint32_t step, const cpattn_message *sends,
      size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame);
  /* Fails if anything has failed so far. Never waits. Any thread, at any time. */
  int32_t (*poll)(void *context, int64_t *blame);
  /* Ends the run on every rank: their calls must fail soon. Any thread, at any time, any number of times. */
  void (*abort)(void *context);
  /* The transport is no longer used: the last call, when the rank is destroyed. Until then all functions, and what they use,
   * must stay valid. May be NULL. */
  void (*release)(void *context);
} cpattn_transport_table;

#define CPATTN_TRANSPORT_TABLE_INIT \
  { sizeof(cpattn_transport_table), NULL, 0, 0, NULL, NULL, NULL, NULL, NULL }

int32_t cpattn_transport_create(const cpattn_transport_table *table, cpattn_transport **transport);

/*
 * An engine: send, receive and key-value store functions that the caller implements, on the CPU, for example over a
 * framework's process group and its store. The library makes a transport of them: it joins small messages into packets,
 * compares sizes and plans before it accepts data, and enforces deadlines. After a failure the ranks ask each other, through
 * the store, which of them is at fault: cpattn_last_error_peer, the same on every rank.
 *
 * Functions return 0 on success; CPATTN_ENGINE_GROUP if a peer or a connection failed or the time has passed; any other
 * number if this rank's own part failed, which makes it the rank at fault. On failure they may write a reason to `text`
 * (CPATTN_ENGINE_TEXT bytes, zeros on entry, UTF-8 up to a zero). They must not throw or longjmp. `context` is passed to
 * each of them.
 *
 * Several threads, of the library and of the caller, call them at the same time. While one thread waits in wait_for, put
 * and get must still work on other threads, which may take a second connection to the store. If a call does not return
 * (the process that holds the store is stopped), the library stops waiting for it at the deadline, and does not call
 * release. */
#define CPATTN_ENGINE_GROUP 1
#define CPATTN_ENGINE_TEXT 512
#define CPATTN_ENGINE_VALUE 4096

typedef struct cpattn_engine_table {
  size_t struct_size;
  void *context;
  uint32_t rank;
  uint32_t world;
  /* Connects to the store. If this fails the group still works, but no error can name the rank at fault. */
  int32_t (*open)(void *context, char *text);
  /* Waits until all ranks have called it and are connected. */
  int32_t (*connect)(void *context, char *text);
  /* Starts a receive (1) or a send (0) and writes a number for it to *request. From one rank to another, messages of one
   * tag match in the order in which they are posted. A receive has room for the longest possible message: fewer bytes may
   * arrive. */
  int32_t (*post)(void *context, int32_t receive, uint32_t peer, uint32_t tag, void *data, size_t bytes,
      uint64_t *request, char *text);
  /* Waits until the request is complete, at most timeout_ms; called at most once for each request. Fails at once when the
   * engine is closed or the peer is gone. After it returned 0 nothing accesses the memory of the message. */
  int32_t (*wait)(void *context, uint64_t request, uint64_t timeout_ms, char *text);
  /* Ends all posted requests, and all calls that wait, with a failure. When it has returned nothing accesses the memory of
   * messages. Any thread, at any time, any number of times. */
  void (*close)(void *context);
  /* The store: keys are C strings, values 1 to CPATTN_ENGINE_VALUE bytes. put writes the value unless the key exists. Either
   * way it writes the value now stored to `there` (CPATTN_ENGINE_VALUE bytes) and its size to *there_bytes. */
  int32_t (*put)(void *context, const char *key, const void *value, size_t bytes, void *there, size_t *there_bytes,
      char *text);
  /* Reads the value of a key without waiting for it: *there_bytes is 0 on entry and stays 0 if the key does not exist. */
  int32_t (*get)(void *context, const char *key, void *there, size_t *there_bytes, char *text);
  /* Waits without a time limit until the key exists. Fails when the store is gone. */
  int32_t (*wait_for)(void *context, const char *key, char *text);
  /* The engine is no longer used. May be NULL. */
  void (*release)(void *context);
} cpattn_engine_table;

#define CPATTN_ENGINE_TABLE_INIT \
  { sizeof(cpattn_engine_table), NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* Makes a transport over an engine. Does not wait: every rank makes one, then calls cpattn_engine_connect before anything
 * else. deadline_ms is a timeout: a call fails if it waits so long while none of its messages moves. It must be longer than
 * the longest time that a peer computes between two calls. */
int32_t cpattn_engine_group(const cpattn_engine_table *table, uint64_t deadline_ms, cpattn_transport **transport);

/* Waits for all ranks to call it and to connect. It fails as soon as the engine's connect fails. If that call does not
 * return, it fails after 2.5 deadlines (the half at most 5 s), and at least 10 s; opening the store and the search for the rank at
 * fault are not counted. cpattn_engine_abort on another thread ends the wait, and so does a failure of another rank. */
int32_t cpattn_engine_connect(cpattn_transport *transport);

/* A second handle of the same transport: one becomes a rank, the other is for the calls below, between runs. This rank leaves
 * the group when both are destroyed. */
int32_t cpattn_engine_share(cpattn_transport *transport, cpattn_transport **other);

/* The agree, exchange, poll and abort of cpattn_transport_table, over the engine, for a program's own messages. agree and
 * exchange: one call at a time; poll and abort: any time. all[i] = the number that rank first + i gave; agree compares
 * nothing. */
int32_t cpattn_engine_agree(cpattn_transport *transport, uint32_t first, uint32_t end, uint64_t number, uint64_t *all);
int32_t cpattn_engine_exchange(cpattn_transport *transport, uint32_t step, const cpattn_message *sends, size_t send_count,
    const cpattn_message *recvs, size_t recv_count);
int32_t cpattn_engine_poll(cpattn_transport *transport);
/* Returns when all other connected ranks know of it; the process may end right afterwards. It waits at most 1 s for ranks
 * that do not answer. If the store does not answer, it waits half the deadline, at least 0.5 s and at most 5 s. The same
 * holds for cpattn_rank_abort. */
int32_t cpattn_engine_abort(cpattn_transport *transport);

/* One link of a ring of ranks, one way. */
typedef struct cpattn_link {
  uint32_t from;
  uint32_t to;
  double latency;          /* seconds: half the shortest round trip of eight bytes */
  double bytes_per_second; /* of the fastest message of `bytes`, without the latency */
} cpattn_link;

/* Checks every link of the ring and measures its speed. Bytes that are stamped with their sender go over each link, round
 * the ring and back, one link at a time. All ranks call it with the same `bytes` per message (4 MiB is a good choice),
 * before the transport becomes a rank. Writes links in the order in which they were measured, and their number to *count:
 * all 2 * world on rank 0, on another rank those measured before its last turn. `capacity` is the length of `links`, at
 * least 2 * world. A failure names the link and what to try, and ends the group. With transports of devices the bytes go
 * from device to device; with a transport table they are in host memory, and exchange is called on the calling thread.
 * With a communicator given to cpattn_nccl_group with may_abort 0, a failed check returns when the owner has aborted it. */
int32_t cpattn_ring_check(cpattn_transport *transport, size_t bytes, cpattn_link *links, size_t capacity,
    size_t *count);

/* For transports that did not become a rank. Peers that need this rank get an error that it left. */
int32_t cpattn_transport_destroy(cpattn_transport *transport);

/* ---- Ranks ------------------------------------------------------------------------------------------------------- */

typedef struct cpattn_rank cpattn_rank;

/* The instruction set of the CPU kernels. One that the machine lacks is refused with CPATTN_UNSUPPORTED. Instruction sets
 * round differently: use the same one for a forward and its backward, and on all ranks of a reproducible plan. With
 * CPATTN_ISA_AMX, f32 numbers below 1e-30 lose precision; CPATTN_ISA_AVX512 keeps it. */
#define CPATTN_ISA_AUTO 0        /* the best of the machine, or what the environment variable CPATTN_CPU_ISA names */
#define CPATTN_ISA_PORTABLE 1    /* no particular instruction set */
#define CPATTN_ISA_NEON 2        /* NEON */
#define CPATTN_ISA_AVX2 3        /* AVX2 and FMA */
#define CPATTN_ISA_AVX512 4      /* AVX-512 F and DQ */
#define CPATTN_ISA_AVX512_BF16 5 /* AVX-512 with bf16 dot products; these are used for bf16 */
#define CPATTN_ISA_AMX 6         /* AMX bf16 tiles, used for bf16, f16 and f32 */

/*
 * A kernel of the caller's computes the attention of a rank's runs, on the CPU. It gets packed copies of rows, as kernels for
 * sequences of several lengths take them; masks, slices, stripes, rings and Ulysses become such calls, and sinks, merges and the
 * gradient of lse are computed outside of it. cpattn_kernel_call is one call. Sequence i has rows cu_seqlens_q[i] to
 * cu_seqlens_q[i + 1] and keys cu_seqlens_k[i] to cu_seqlens_k[i + 1], at least one of each. With sq rows and sk keys, row r
 * sees key j if
 *   r + (sk - sq) - window_left <= j <= r + (sk - sq) + window_right
 * where -1 is no limit. Each row has a key, and each key a row. q head h reads kv head h / (heads / kv_heads).
 *
 * Tensors are compact: q, o, d_o, dq [rows, heads, dim], k, v, dk, dv [keys, kv_heads, dim], in `dtype`, but o, dq, dk and dv in
 * the accumulator's type (f32; f64 for CPATTN_F64); lse and delta [heads, rows] in the accumulator's type. The natural lse of a
 * row has all of the row's keys in the call. A backward gets lse and delta of whole rows, of which the call may have a part of
 * the keys: p = exp(s - lse), and the gradient of a score is p * (d_o·v - delta); where lse is +inf, p is 0. What is written is NaN
 * before the call; an lse of NaN or +-inf for finite q and k is refused. */
typedef struct cpattn_kernel_call {
  size_t struct_size;
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_k;
  uint32_t sequences;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t value_dim;
  int32_t dtype;        /* CPATTN_F16, ... */
  int64_t window_left;  /* -1 unless CPATTN_KERNEL_WINDOWS */
  int64_t window_right; /* -1 or 0 unless CPATTN_KERNEL_WINDOWS */
  double scale;
  double softcap;            /* 0: none */
  const float *alibi_slopes; /* [sequences, heads]; NULL: none. slope * |distance| is subtracted from a score */
  const int64_t *corners;    /* with slopes: the distance of key j from row r is corners[i] + (j - sk) - (r - sq) */
  const void *q;
  const void *k;
  const void *v;
  void *o;         /* forward; backward NULL */
  void *lse;       /* forward: written; backward: read */
  const void *d_o; /* this and all below: backward; forward NULL */
  const void *delta;
  void *dq;
  void *dk;
  void *dv;
} cpattn_kernel_call;

/* For programs that test their kernel by itself. */
#define CPATTN_KERNEL_CALL_INIT \
  { sizeof(cpattn_kernel_call), NULL, NULL, 0, 0, 0, 0, 0, CPATTN_F32, -1, -1, 0.0, 0.0, NULL, NULL, \
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* What a kernel honours; a plan that needs more is refused with CPATTN_UNSUPPORTED before anything moves. */
#define CPATTN_KERNEL_WINDOWS 1    /* any limits; without, slices and masks with a left limit are refused */
#define CPATTN_KERNEL_SOFTCAP 2
#define CPATTN_KERNEL_SLOPES 4
#define CPATTN_KERNEL_GROUPS 8     /* several q heads for each kv head; else it gets copies of k and v */
#define CPATTN_KERNEL_VALUE_DIM 16 /* a value_dim other than head_dim */
#define CPATTN_KERNEL_ROUNDED_O 32 /* o is returned in `dtype`: each merge then costs up to half a bit of it */
#define CPATTN_KERNEL_TEXT 512

/* The functions return 0 on success. After a failure the run ends on all ranks; the error names the rank, the operation and the
 * kernel, and has the text, if they wrote one (CPATTN_KERNEL_TEXT bytes, zeros on entry, UTF-8 up to a zero). They must not throw
 * or longjmp, nor call the rank. They are called by the thread that runs the plan. All ranks of a group need the same kernel: they
 * compare the name and what it honours. Dropout, reproducible plans, pages, lists of keys and max_logit are refused. */
typedef struct cpattn_kernel_table {
  size_t struct_size;
  void *context;
  const char *name;  /* in errors; copied */
  uint32_t dtypes;   /* a set: 1 << CPATTN_F32 | ... */
  uint32_t head_dim; /* the largest, of q, k and v */
  uint32_t honours;  /* a set of CPATTN_KERNEL_... */
  int32_t reserved;  /* 0 */
  int32_t (*forward)(void *context, const cpattn_kernel_call *call, char *text);
  int32_t (*backward)(void *context, const cpattn_kernel_call *call, char *text); /* NULL: backwards are refused */
  void (*release)(void *context); /* the kernel is no longer used; not called if cpattn_rank_create fails. May be NULL */
} cpattn_kernel_table;

#define CPATTN_KERNEL_TABLE_INIT \
  { sizeof(cpattn_kernel_table), NULL, NULL, 0, 0, 0, 0, NULL, NULL, NULL }

typedef struct cpattn_rank_options {
  size_t struct_size;
  uint32_t workers;    /* threads of the CPU kernels, 1 to 1024; more than 1 needs rayon; same results. On a device 1 */
  int32_t device_type; /* CPATTN_DEVICE_CPU or CPATTN_DEVICE_CUDA: the transport's; with a transport table, either */
  int32_t device_id;   /* 0 on the CPU */
  uint32_t sm_margin;  /* multiprocessors that attention leaves free; on the CPU 0. See below */
  int32_t isa;         /* CPATTN_ISA_... of the CPU kernels; on a device CPATTN_ISA_AUTO */
  int32_t reserved;    /* 0 */
  const cpattn_kernel_table *kernel; /* NULL: the library's kernels */
} cpattn_rank_options;

#define CPATTN_RANK_OPTIONS_INIT \
  { sizeof(cpattn_rank_options), 1, CPATTN_DEVICE_CPU, 0, 0, CPATTN_ISA_AUTO, 0, NULL }

/* Make a rank once; it runs many plans. On success the rank owns the transport and the transport's handle is no longer
 * valid; after a failure the handle is still the caller's. options NULL: one worker, on the device of a peer group or NCCL
 * group, otherwise on the CPU. */
int32_t cpattn_rank_create(cpattn_transport *transport, const cpattn_rank_options *options, cpattn_rank **rank);

/* SM MARGIN. The blocks of an attention kernel fill the device, so a communicator's kernels that are launched meanwhile wait
 * until the first of these blocks end. With sm_margin > 0, attention launches only as many blocks as fit on all but sm_margin
 * multiprocessors (fewer than the device has), and each block does more work; results are the same. While the rank lives,
 * the margin applies to every attention of this process on the device; of several margins the largest applies. */

/* The rank leaves the group: peers that still need it get an error. On a device it first waits for the work it enqueued. */
int32_t cpattn_rank_destroy(cpattn_rank *rank);

/* What an all-to-all or a combine is of. */
typedef struct cpattn_purpose {
  size_t struct_size;
  int32_t side;  /* all-to-all: CPATTN_Q or CPATTN_K */
  uint32_t dim;  /* all-to-all: the innermost dimension */
  int32_t dtype; /* the element type, CPATTN_F16, ...: all-to-all: of its tensors; combine: of partial_o */
  int32_t to;    /* combine: CPATTN_COMBINE_TO_... */
} cpattn_purpose;

#define CPATTN_PURPOSE_INIT \
  { sizeof(cpattn_purpose), 0, 0, 0, 0 }

/* Does everything that may allocate for runs of this plan: CPATTN_FORWARD or CPATTN_BACKWARD, purpose NULL; CPATTN_TO_HEADS,
 * CPATTN_TO_TOKENS or CPATTN_COMBINE, with what it is of. On a device it also loads the kernels, which can take the driver
 * seconds, and may wait for earlier runs. Optional: otherwise the first run does it, as it does for a scan, which this does not
 * take. A rank keeps the last 16 prepared pairs of a plan and one of these. */
int32_t cpattn_rank_prepare(cpattn_rank *rank, const cpattn_plan *plan, int32_t direction, const cpattn_purpose *purpose);

/* cpattn_ring_check with a rank, between runs, for any group. On a device it waits for the work the rank enqueued. With links
 * NULL and capacity 0 it checks nothing and writes the largest possible number of links to *count. */
int32_t cpattn_rank_ring_check(cpattn_rank *rank, size_t bytes, cpattn_link *links, size_t capacity, size_t *count);

/* Required alignment of a lent workspace, in bytes. */
#define CPATTN_WORKSPACE_ALIGNMENT 256

/* Lends a workspace of `bytes` in the memory of the rank's device (or the CPU). It must be as large as the largest
 * cpattn_plan_workspace and cpattn_plan_all_to_all_workspace of the plans to run. Nothing else may use it until another one
 * is lent, it is taken back or the rank is destroyed; on a device these three wait for enqueued work. NULL and 0 bytes take
 * it back: the rank then allocates its own workspace, as it does without this call. An address and 0 bytes lend a workspace for
 * plans that need none. CPATTN_INVALID: NULL with bytes. */
int32_t cpattn_rank_lend_workspace(cpattn_rank *rank, void *workspace, size_t bytes);

/* Which keys a run of attention reads, and where they lie. Members of other kinds are NULL and 0.
 *
 * CPATTN_KEYS_ALL: all that the mask allows, one row after another in k and v; so is NULL in place of the struct.
 *
 * CPATTN_KEYS_PAGES, of a forward: all that the mask allows, in pages, without copying them. k and v have the rows of all pages,
 * [rows, kv_heads, dim] (an array of [pages, page_size, kv_heads, dim] seen as rows). block_table is [documents, pages_per_document],
 * in memory of the rank's device: row i of this rank's k rows of document d, in the rank's order, is row
 *   block_table[d * pages_per_document + i / page_size] * page_stride + i % page_size
 * of k and v. page_stride is page_size if pages adjoin, more if something lies between them. Entries beyond a document's rows are
 * not read; documents may share pages. On one rank this is the block_table of vLLM and FlashAttention, with the lengths of the
 * sequences as the batch's k side; over a ring each rank has a table of the pages of its own rows. On the CPU the result has the bits
 * of a forward whose k and v have these rows one after another, and entries are checked. On a device the kernels read the table when
 * the run executes, in each replay of a graph too, and read where its entries say: they must be pages of k and v. The first call of a
 * plan prepares it; make one before a capture begins.
 * CPATTN_UNSUPPORTED: a backward; a plan that copies or sends k and v (Ulysses ranks; a ring whose k circulates) or has dropout.
 *
 * CPATTN_KEYS_LISTED: those that each q token lists: the results of dense calls whose mask has these pairs alone. key_indices is
 * [tokens, heads, entries], compact, on the CPU, a row for each of this rank's q tokens (q_tokens of cpattn_share) in the rank's
 * order: positions of keys in the token's document, from 0, each at most once in a list, in any order; -1 for none. heads is 1 for
 * lists that all kv heads share, or kv_heads. All ranks have the same heads and entries, and a backward is given the lists of its
 * forward. A token without keys gets o 0 and lse -inf, or the sinks' values. Rows of k and v that no token lists may hold anything,
 * and get gradients 0. In a ring either the rows of k and v that lists name go to the ranks whose tokens list them, or those that the
 * plan's mask allows: options.key_rows.
 * CPATTN_INVALID: a key outside the document or the mask of its token, named by token, head and entry.
 * CPATTN_UNSUPPORTED: a batch with slices, a reproducible plan, a device, a plan made with circulate_forward or circulate
 * CPATTN_CIRCULATE_QUERIES. Where the plan may choose the side (CPATTN_CIRCULATE_AUTO), k and v circulate. entries may be 0. */
#define CPATTN_KEYS_ALL 0
#define CPATTN_KEYS_PAGES 1
#define CPATTN_KEYS_LISTED 2
typedef struct cpattn_keys {
  size_t struct_size;
  int32_t kind; /* CPATTN_KEYS_... */
  int32_t reserved; /* 0 */
  const int32_t *block_table;
  size_t documents; /* those of the plan */
  size_t pages_per_document;
  size_t page_size;
  size_t page_stride;
  const int32_t *key_indices;
  size_t tokens;
  size_t heads;
  size_t entries;
} cpattn_keys;

#define CPATTN_KEYS_INIT \
  { sizeof(cpattn_keys), CPATTN_KEYS_ALL, 0, NULL, 0, 0, 0, 0, NULL, 0, 0, 0 }

/* The base of an lse that a run reads or writes; sinks are natural logarithms always. Each conversion from and to base 2 rounds
 * once. CPATTN_UNSUPPORTED: base 2 on a device. */
#define CPATTN_LSE_NATURAL 0
#define CPATTN_LSE_BASE_2 1

/*
 * The tensors of a forward: this rank's own tokens, in the order of cpattn_plan_tokens, with all heads. Nq, Nk: the
 * rank's q_tokens and k_tokens (cpattn_share); H, Hk: heads, kv_heads; D, Dv: head_dim, value_dim.
 */
typedef struct cpattn_forward_args {
  size_t struct_size;
  const cpattn_tensor *q;     /* read, [Nq, H, D] */
  const cpattn_tensor *k;     /* read, [Nk, Hk, D] */
  const cpattn_tensor *v;     /* read, [Nk, Hk, Dv] */
  const cpattn_tensor *sinks; /* read, [H] or [H, sinks] f32; NULL unless the problem has sinks */
  const cpattn_tensor *o;     /* written, [Nq, H, Dv] */
  const cpattn_tensor *lse;   /* written, [H, Nq] f32 (f64 for f64): natural log-sum-exp of the scores and the sinks,
                                 -inf for a row that attends to nothing */
  void *stream;               /* cudaStream_t on a device; NULL on the CPU */
  /* written, [H] f32: the largest score of each head, after scale, softcap and ALiBi, over the allowed pairs that this rank
   * computed, without sinks; -inf for a head of which it computed none. The largest over the group is that of the whole batch:
   * reduce it as often as it is needed. NULL if it is not needed, on each rank by itself. */
  const cpattn_tensor *max_logit;
  /* The seed of dropout, another one for each layer and step, and the same on all ranks of the group, which is checked as plans
   * are. NULL unless the problem has dropout. */
  const uint64_t *dropout_seed;
  const cpattn_keys *keys; /* the keys that are read; NULL for all that the mask allows, in k and v */
  int32_t lse_base;        /* CPATTN_LSE_...: the base of lse, on each rank by itself */
  int32_t reserved;        /* 0 */
} cpattn_forward_args;

#define CPATTN_FORWARD_ARGS_INIT \
  { sizeof(cpattn_forward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, CPATTN_LSE_NATURAL, 0 }

/* The tensors of a backward, with Nq, H, ... as above. It repeats the forward's exchanges, so besides the inputs only o and
 * lse have to be kept. */
typedef struct cpattn_backward_args {
  size_t struct_size;
  const cpattn_tensor *q;      /* read; q, k, v, sinks as given to the forward, o and lse as written by it */
  const cpattn_tensor *k;      /* read */
  const cpattn_tensor *v;      /* read */
  const cpattn_tensor *sinks;  /* read; NULL unless the problem has sinks */
  const cpattn_tensor *o;      /* read */
  const cpattn_tensor *lse;    /* read */
  const cpattn_tensor *d_o;    /* read, [Nq, H, Dv]: gradient of o */
  const cpattn_tensor *dq;     /* written, [Nq, H, D] */
  const cpattn_tensor *dk;     /* written, [Nk, Hk, D] */
  const cpattn_tensor *dv;     /* written, [Nk, Hk, Dv] */
  const cpattn_tensor *dsinks; /* written, as sinks, of lse's type, summed over the group; NULL unless there are sinks */
  void *stream;                /* cudaStream_t on a device; NULL on the CPU */
  /* read, [H, Nq] of lse's type: gradient of lse, if something was computed from lse too; NULL if not, on each rank by itself.
   * A row whose lse is -inf has no gradient, and its d_lse is not used. */
  const cpattn_tensor *d_lse;
  const uint64_t *dropout_seed; /* as given to the forward */
  const cpattn_keys *keys;      /* as given to the forward */
  int32_t lse_base;             /* CPATTN_LSE_...: the base of lse, and of the lse that d_lse is the gradient of */
  int32_t reserved;             /* 0 */
} cpattn_backward_args;

#define CPATTN_BACKWARD_ARGS_INIT \
  { sizeof(cpattn_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
    CPATTN_LSE_NATURAL, 0 }

/* Run a plan. All ranks of the group make the same calls with equal plans in the same order, each rank on its own thread or
 * process, and wait for each other.
 *
 * CPATTN_DISAGREEMENT: ranks differ. If the plan and direction are new to all ranks of the group, this is found before any data
 * moves, and the group stays usable. If they are new to some ranks only, while the others repeat what all have run, every rank
 * gets it at once, and the group has failed. If none is new, it is found with the first message between two ranks, and the group
 * has failed; on a device cpattn_rank_poll and the next run report it, and results that depend on the other rank are NaN. Then
 * it can also be reported as CPATTN_PEER: with both sizes if a message had another size, or with both ranks if two others differ.
 * CPATTN_INVALID: a tensor does not fit, or overlaps one that is written. The peers of a rank that is refused wait until
 * their deadline passes or the rank calls again.
 *
 * On a device the calls return when the whole run is enqueued. Runs of one rank execute one after another, even on different
 * streams, since they share the workspace. A run of a prepared plan uploads nothing and does not wait for the device. After a
 * failure other than a refused argument, the call waits until none of the run's work is left on the device; the contents of
 * its outputs are undefined. */
int32_t cpattn_forward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_forward_args *args);
int32_t cpattn_backward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_backward_args *args);

/* The pairs that dropout keeps, for a comparison with a computation that has the whole mask: kept[i * k_count + j] is 1 if q token
 * q_begin + i keeps k token k_begin + j, and 0 if it drops it. Tokens are places in the whole batch; head is a q head of the
 * whole problem. probability is above 0.
 *
 * The rule is Philox 4x32-10. Its counter is (q token, k token / 4, head, 0), its key (the seed's low 32 bits, its high 32 bits). Of
 * the four words that result, number (k token mod 4) decides: the pair is dropped if it is below probability * 2^32. */
int32_t cpattn_dropout_mask(double probability, uint64_t seed, uint32_t q_begin, uint32_t q_count, uint32_t k_begin,
    uint32_t k_count, uint32_t head, uint8_t *kept);

/*
 * The two all-to-alls of Ulysses as separate calls, for kernels that mix the tokens of each head and are not softmax
 * attention: linear attention, state space models, convolutions. Between the two calls a rank holds all tokens of its ring
 * share, in the layout's order, for some of the heads. (If the ring is 1, as for CPATTN_OTHER, the ring share is the whole
 * batch.) Plans of any kind have them; all ranks of the group make the same calls, as for runs. side: CPATTN_Q, with q's
 * tokens and heads, or CPATTN_K, with k's tokens and the kv heads. Any dim and element type on the CPU; f16, bf16 and f32 on a
 * device.
 *
 * to_heads: from [own tokens, all heads, dim] to [tokens of the ring share, own heads, dim]. The own heads are
 * q_head_begin to q_head_end, or kv_head_begin to kv_head_end, of cpattn_share; the tokens of the ring share are the sum
 * over its Ulysses ranks. `to` is compact.
 * to_tokens: the way back. `from` is compact. If several ranks hold a kv head, `to` gets the sum over them, in rank order,
 * as a gradient needs.
 * stream: on a device a cudaStream_t, in whose order the tensors are read and written, as in cpattn_forward; NULL on the
 * CPU. */
int32_t cpattn_rank_to_heads(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream);
int32_t cpattn_rank_to_tokens(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream);

/* Writes the larger workspace, in bytes, of both all-to-alls of tensors of this side, innermost dimension and element type
 * (CPATTN_F16, ...) on a rank. */
int32_t cpattn_plan_all_to_all_workspace(const cpattn_plan *plan, uint32_t rank, int32_t side, uint32_t dim,
    int32_t dtype, uint64_t *bytes);

/* Verifies both all-to-alls of such tensors, as cpattn_plan_verify does forward and backward. For plans of any kind. */
int32_t cpattn_plan_verify_all_to_all(const cpattn_plan *plan, int32_t side, uint32_t dim, int32_t dtype);

/*
 * Partial results merged over the ring, as a call of its own: decode context parallelism. A server that spreads a cache over
 * ranks has the same queries on all of them; each rank attends to its own part of the keys with any kernel that returns lse,
 * and the parts are merged here. Of the plan, only the number of q tokens, the heads, value_dim, the element type, the sinks and
 * the mesh matter: its batch is the queries of the step (cu_seqlens 0, tokens), its ring the ranks that have
 * parts of the keys, its Ulysses ranks hold different heads. All ranks of the group make the same calls, as for runs.
 *
 * Given: partial_o [tokens, own heads, value_dim] of all q tokens, f16, bf16 or f32 (f64 if the plan is of f64), normalised, without
 * sinks; and partial_lse [own heads, tokens], natural log, f32 (f64), -inf in a row without keys, whose o is then not read.
 * The own heads are q_head_begin to q_head_end of cpattn_share: all heads, without Ulysses. sinks: [heads, n] f32 if the plan has
 * sinks, else NULL; they are applied once.
 * Written: o in the plan's type, and lse [heads, tokens]. With T tokens and H own heads, ring rank j of R gets
 *   CPATTN_COMBINE_TO_ALL     all rows: [T, H, value_dim], with the same bits on every rank;
 *   CPATTN_COMBINE_TO_HEADS   the own heads from j*H/R to (j+1)*H/R, rounded down: what tensor parallelism goes on with;
 *   CPATTN_COMBINE_TO_TOKENS  the tokens from j*T/R to (j+1)*T/R.
 * Parts are merged in f32 (f64), in the order of the ring ranks, and rounded once, so that every run gives the same bits. A row
 * without keys on any rank gets o 0 and lse -inf, or the sink's value. On a device, in the
 * order of the stream: f16, bf16 and f32, a value_dim that is a multiple of 8, and rows of o at multiples of 16 bytes.
 *
 * partial: the type of partial_o (CPATTN_F32, ...). The other functions do for a combine what cpattn_plan_verify and
 * cpattn_plan_workspace do for attention. */
#define CPATTN_COMBINE_TO_ALL 0
#define CPATTN_COMBINE_TO_HEADS 1
#define CPATTN_COMBINE_TO_TOKENS 2
typedef struct cpattn_combine_args {
  size_t struct_size;
  const cpattn_tensor *partial_o;   /* read */
  const cpattn_tensor *partial_lse; /* read */
  const cpattn_tensor *sinks;       /* read; NULL unless the plan has sinks */
  const cpattn_tensor *o;           /* written */
  const cpattn_tensor *lse;         /* written */
  void *stream;                     /* cudaStream_t on a device; NULL on the CPU */
  int32_t lse_base;                 /* CPATTN_LSE_...: the base of partial_lse and of lse, on each rank by itself */
  int32_t reserved;                 /* 0 */
} cpattn_combine_args;

#define CPATTN_COMBINE_ARGS_INIT \
  { sizeof(cpattn_combine_args), NULL, NULL, NULL, NULL, NULL, NULL, CPATTN_LSE_NATURAL, 0 }

int32_t cpattn_rank_combine(cpattn_rank *rank, const cpattn_plan *plan, int32_t to, const cpattn_combine_args *args);
int32_t cpattn_plan_verify_combine(const cpattn_plan *plan, int32_t to, int32_t partial);
int32_t cpattn_plan_combine_workspace(const cpattn_plan *plan, uint32_t rank, int32_t to, int32_t partial, uint64_t *bytes);

/*
 * States of recurrent layers (gated delta net, Mamba, linear attention with decay) passed on along documents. A rank runs its layer
 * over each of its segments from a zero state, and has for each a decay and an end state. A segment is as many of the rank's q
 * tokens, in its order, as follow one another in one document. Along a document, in the order of positions:
 *   initial_state[first] = 0, initial_state[next] = decay[i] * initial_state[i] + state[i].
 * All ranks of the group make the same calls, as for runs, whatever the mesh; of the plan only documents, mesh and layout
 * matter. On the CPU alone.
 *
 * Given, of each own segment and compact: decay [segments, heads, key_dim], each number for value_dim numbers of the state, or with
 * CPATTN_DECAY_MATRIX [segments, heads, key_dim * key_dim], rows together, multiplied by the state; and state
 * [segments, heads, key_dim * value_dim]. Written: initial_state, of state's shape. A rank without segments gives tensors of 0 rows.
 * The decay of a document's first segment is not read, nor are decay and state of its last.
 *
 * With reverse 1 it goes from the last segment of a document to the first: with d = the gradient of initial_state as state, and with
 * transposed matrices, result[i] is the gradient of state[i], and that of decay[i] is result[i] times the transpose of
 * initial_state[i].
 *
 * form: how states travel along a document of S segments. CHAIN: S - 1 exchanges, each of a state. TREE: log2(S) exchanges, each of
 * a state and a decay. DIRECT: one exchange, all earlier states and decays to each rank, for at most 1024 segments. AUTO: for each
 * document what takes the least time by counts of bytes and products over the link of one node; DIRECT for at most 64 segments. A
 * document of more than 4096 segments is refused. Every form gives the same bits in every run; two forms round differently. */
#define CPATTN_DECAY_DIAGONAL 0
#define CPATTN_DECAY_MATRIX 1
#define CPATTN_SCAN_AUTO 0
#define CPATTN_SCAN_CHAIN 1
#define CPATTN_SCAN_TREE 2
#define CPATTN_SCAN_DIRECT 3
typedef struct cpattn_scan {
  size_t struct_size;
  int32_t decay; /* CPATTN_DECAY_... */
  uint32_t heads;
  uint32_t key_dim;
  uint32_t value_dim;
  int32_t dtype;   /* of all three tensors: CPATTN_F32 or CPATTN_F64 */
  int32_t reverse; /* 0 or 1 */
  int32_t form;    /* CPATTN_SCAN_... */
  int32_t reserved; /* 0 */
} cpattn_scan;

#define CPATTN_SCAN_INIT \
  { sizeof(cpattn_scan), CPATTN_DECAY_DIAGONAL, 0, 0, 0, CPATTN_F32, 0, CPATTN_SCAN_AUTO, 0 }

typedef struct cpattn_segment {
  uint64_t row;      /* first of the rank's q tokens, in its order */
  uint64_t token;    /* first token of the batch */
  uint64_t tokens;
  uint64_t document;
  int64_t position;  /* of the first token in its document */
} cpattn_segment;

/* The segments of a rank, in their order: writes at most `capacity`, and to *count how many there are. segments may be NULL if
 * capacity is 0. */
int32_t cpattn_plan_segments(const cpattn_plan *plan, uint32_t rank, cpattn_segment *segments, size_t capacity, size_t *count);

int32_t cpattn_rank_scan(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_scan *scan, const cpattn_tensor *decay,
    const cpattn_tensor *state, const cpattn_tensor *initial_state);
/* These do for a scan what cpattn_plan_verify and cpattn_plan_workspace do for attention. */
int32_t cpattn_plan_verify_scan(const cpattn_plan *plan, const cpattn_scan *scan);
int32_t cpattn_plan_scan_workspace(const cpattn_plan *plan, uint32_t rank, const cpattn_scan *scan, uint64_t *bytes);

/* Labels where each rank has only its own tokens (compare cpattn_plan_shift): for each of the rank's q tokens, `out` gets the
 * row that is `by` tokens later in the same document, which another rank may hold, or repeats the one element at `fill` if the
 * document has no such token. All ranks of the group call it, between runs. `rows` and `out` have one row for each of the
 * rank's q tokens, in its order. They are on the CPU, also for a rank on a device, and have the same element type and 1 to 3
 * dimensions, [tokens, ...], the last one contiguous. The rows are sent in one exchange, at most one message from each rank to
 * each other. On a device they pass through device memory, and the call waits for the work the rank enqueued.
 * CPATTN_DISAGREEMENT: ranks have different plans, `by`, types or shapes, or make different calls; nothing was written, and the
 * group stays usable. After any other failure `out` is undefined. */
int32_t cpattn_rank_shift(cpattn_rank *rank, const cpattn_plan *plan, int64_t by, const void *fill,
    const cpattn_tensor *rows, const cpattn_tensor *out);

#define CPATTN_COMPUTE 0
#define CPATTN_COMMUNICATION 1

/* One operation of a rank, as it ran. The times are on the clock of cpattn_clock. */
typedef struct cpattn_event {
  char name[32];     /* the operation: "attend", "exchange", ...; zero-terminated */
  char phase[32];    /* the part of the run: "ring", "all-to-all", ...; zero-terminated */
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t bytes;    /* sent and received; 0 for operations other than exchanges */
  uint32_t rank;
  uint32_t step;     /* the ring step */
  int32_t lane;      /* CPATTN_COMPUTE or CPATTN_COMMUNICATION */
  uint32_t reserved; /* 0 */
} cpattn_event;

/* The clock of the events, in nanoseconds, the same for all ranks of the process. It starts at 0 when this function or
 * cpattn_rank_record is first called. cpattn_rank_gather_trace aligns the clocks of several processes. */
int32_t cpattn_clock(uint64_t *ns);

/* Starts to record the rank's operations, at most `capacity` (at most 2^24) until cpattn_rank_trace has taken all of them,
 * then as many again. A capacity of 0 stops. Earlier records are discarded. On a device each operation is timed by two CUDA
 * events; they are created by this call, after a wait for the work the rank enqueued. A recorded run does not wait for the
 * device and cannot be captured into a CUDA graph; replays are not recorded. */
int32_t cpattn_rank_record(cpattn_rank *rank, uint64_t capacity);

/* Takes recorded operations, at most `capacity`, ordered by their end within each lane. *count is the number there was,
 * including those taken; the rest comes with the next call. `events` may be NULL if capacity is 0. On a device only
 * operations that have finished are taken; wait for the run's stream first to get all of them. */
int32_t cpattn_rank_trace(cpattn_rank *rank, cpattn_event *events, size_t capacity, size_t *count);

/* Moves the recorded operations that were not yet taken from all ranks to rank 0, with times on the clock of its process.
 * cpattn_rank_trace on rank 0 then takes them, ordered by their start, and finds nothing on the other ranks. All ranks call
 * it, between runs, over any transport; on a device it waits for the work the rank enqueued. The error of aligned clocks is
 * at most half of the fastest of 16 round trips between rank 0 and the rank. Rank 0 asks one rank after another, some
 * milliseconds each: deadlines must be longer than the sum. CPATTN_DISAGREEMENT: a rank makes a different call; the group
 * stays usable and no record is lost. */
int32_t cpattn_rank_gather_trace(cpattn_rank *rank);

/* The possible error of the times of events, in nanoseconds, in addition to the half microsecond resolution of CUDA events;
 * 0 on the CPU, and while nothing is recorded. */
int32_t cpattn_rank_trace_accuracy(const cpattn_rank *rank, uint64_t *ns);

/* The text of a file that shows the events: an SVG picture, or Chrome trace events (JSON, for Perfetto and
 * chrome://tracing). The events may be in any order and may be the caller's own, with any names and phases; those of phase
 * "ring" are drawn with their step. Times count from the earliest event. `text`, `capacity` and *needed as in
 * cpattn_plan_explain. Memory for each new name is kept until the process ends. */
int32_t cpattn_timeline_svg(const cpattn_event *events, size_t count, char *text, size_t capacity, size_t *needed);
int32_t cpattn_chrome_trace(const cpattn_event *events, size_t count, char *text, size_t capacity, size_t *needed);

/* Returns the failure, if anything has failed so far: on any rank, or on the device in enqueued work. Never waits. */
int32_t cpattn_rank_poll(const cpattn_rank *rank);

/* Ends the run on every rank: calls that wait return CPATTN_PEER. Work already enqueued on devices is not cancelled. The group
 * stays failed: make a new one. */
int32_t cpattn_rank_abort(const cpattn_rank *rank);

/* ---- The kernels ------------------------------------------------------------------------------------------------- */

/*
 * Attention over ranges: what ranks compute between exchanges. A range is `len` consecutive rows of a [tokens, heads, dim]
 * tensor: row `row + i` holds the token at position pos + (i / block) * period + i % block of document doc. Consecutive
 * positions have block = period = 1. The mask depends only on positions. A pair is a q range, a k range and a band of
 * `ranges.bands`, which says what of the two attends to each other.
 */
typedef struct cpattn_range {
  int64_t row;     /* first row */
  int64_t pos;     /* position of the first row in its document; within +-2^40 */
  uint32_t len;    /* rows */
  uint32_t block;  /* consecutive positions in one block of the stripe; at least 1 */
  uint32_t period; /* positions from one block to the next; at least block */
  uint32_t doc;
} cpattn_range;

#define CPATTN_FIRST 0 /* first of several calls for this range: write the running (o, lse). Backward: write dq */
#define CPATTN_MERGE 1 /* a later call: merge into the (o, lse) that the first one wrote. Backward: add to dq */
#define CPATTN_LAST 2  /* the last of several: merge, then apply the sink and write o. Backward: as MERGE */
#define CPATTN_ONLY 3  /* first and last at once. Backward: as FIRST */

/* What a q range and a k range have of a slice. A q row at position x and a k row at position y are a pair if q_begin <= x <
 * q_end, k_begin <= y < k_end, low <= y - x + shift <= high, and the window of the score allows the distance y - x + shift.
 * ALiBi is computed from this distance too. INT64_MIN (of low, q_begin and k_begin) and INT64_MAX (of high, q_end and k_end)
 * are no limit. Ranges of different documents need a band other than CPATTN_BAND_WHOLE. */
typedef struct cpattn_band {
  int64_t q_begin;
  int64_t q_end;
  int64_t k_begin;
  int64_t k_end;
  int64_t low;
  int64_t high;
  int64_t shift; /* of slices whose positions begin elsewhere than those of documents; within +-2^42 */
} cpattn_band;

/* No limits: the mask is that of the score alone. */
#define CPATTN_BAND_WHOLE { INT64_MIN, INT64_MAX, INT64_MIN, INT64_MAX, INT64_MIN, INT64_MAX, 0 }

typedef struct cpattn_pair {
  uint32_t k;    /* index of the k range in ranges.k */
  uint32_t band; /* index in ranges.bands */
} cpattn_pair;

/* A q range, how its result is stored (mode), and the k ranges it attends to: ranges.pairs[i] for keys_begin <= i < keys_end, in
 * this order. The same two ranges may be in several pairs, with different bands; two rows must be in one pair at most.
 *
 * document: the tokens of q and of k of the whole document, of which a call may have parts, as a step of a ring has; {0, 0} if
 * they are not given. All q ranges of a document in a call have the same, and if any has lengths, q ranges are in the order of
 * their documents. They matter with CPATTN_ISA_AMX: calls in f32 and
 * f16 compute long documents with tiles and short ones with vectors, and in f32 the error with vectors is twice as large. If
 * the lengths are given, each part uses what one call over the whole document would use, so the sum of the parts has the error
 * of that call; the ranges of plans have them. If not, the ranges of each call decide. */
typedef struct cpattn_q_range {
  cpattn_range range;
  uint32_t document[2];
  uint32_t keys_begin;
  uint32_t keys_end;
  uint8_t mode; /* CPATTN_FIRST, ... */
  uint8_t reserved[7];
} cpattn_q_range;

/* A row that a call writes may be in only one range; a second range with that row is refused, since both would write it at
 * the same time. Written are the rows of q ranges (except in a backward with CPATTN_GRADIENTS_KEYS) and, in a backward that
 * computes dk and dv, the rows of k ranges. Rows that are only read may be in several ranges. A q range without pairs
 * attends to nothing in this call. */
typedef struct cpattn_ranges {
  const cpattn_q_range *q;
  size_t q_count;
  const cpattn_range *k;
  size_t k_count;
  const cpattn_pair *pairs;
  size_t pair_count;
  const cpattn_band *bands; /* for documents one, CPATTN_BAND_WHOLE */
  size_t band_count;
} cpattn_ranges;

/* q head h of the call's tensors is head q_offset + h of the model, and uses kv head (q_offset + h) / group - kv_offset of
 * the call's tensors. With all heads: {0, 0, H / Hk}. */
typedef struct cpattn_head_map {
  uint32_t q_offset;
  uint32_t kv_offset;
  uint32_t group; /* q heads per kv head */
} cpattn_head_map;

/* As in cpattn_problem, but without defaults: scale 0 means 0. */
typedef struct cpattn_score {
  double scale;
  double softcap;       /* 0: none */
  int64_t window_left;  /* 0 to UINT32_MAX, or CPATTN_UNLIMITED, as in cpattn_problem */
  int64_t window_right; /* likewise */
} cpattn_score;

/* A scratch holds the kernels of one device (or the CPU) and the memory that calls need there, for one call at a time. Calls
 * allocate nothing; if the scratch is too small the call is refused, with the size it needs. */
typedef struct cpattn_scratch cpattn_scratch;

/* A scratch on the CPU. workers: threads, 1 to 1024. */
int32_t cpattn_scratch_create(uint32_t workers, cpattn_scratch **scratch);

/* A scratch on a CUDA device: kernels, and a ring buffer for the scheduler metadata of calls (their ranges and tiles), of 256
 * KiB for 64 calls in flight. The ranks and scratches of a process share the kernels of a device. */
int32_t cpattn_scratch_create_cuda(int32_t device_id, cpattn_scratch **scratch);

/* On a device, waits for the calls that were made with this scratch, and for nothing else; it does not invalidate stream
 * captures. Its ring buffer is kept for the next scratch of the device. When more than 16 MiB of ring buffers are kept, memory
 * is freed; with the last rank and scratch of the device kernels are unloaded too. The driver may then wait until the device
 * is idle. */
int32_t cpattn_scratch_destroy(cpattn_scratch *scratch);

/* Prepares attention of this type and these dims: allocates memory on the CPU, loads kernels on a device. The other kernels
 * need no such call. */
int32_t cpattn_scratch_reserve(cpattn_scratch *scratch, int32_t dtype, uint32_t head_dim, uint32_t value_dim);

/* On a device: the same as cpattn_rank_options.sm_margin, until it is set again or the scratch is destroyed. On the CPU only
 * 0 is accepted. */
int32_t cpattn_scratch_set_sm_margin(cpattn_scratch *scratch, uint32_t multiprocessors);

/* On the CPU: later calls use this instruction set (CPATTN_ISA_..., as in cpattn_rank_options). On a device only
 * CPATTN_ISA_AUTO is accepted. */
int32_t cpattn_scratch_set_isa(cpattn_scratch *scratch, int32_t isa);

/* On a device: enlarges the ring buffer to `calls` calls in flight (1 to 65536) whose metadata takes `bytes` in all. The
 * metadata of one call must fit into it; while it is full, a call waits for the oldest call in flight, and for nothing else.
 *   cpattn_attend, cpattn_attend_backward   what cpattn_attend_metadata and cpattn_attend_backward_metadata return
 *   cpattn_finish                           at most 80 bytes for each range and 8 for each row
 *   cpattn_transform                        at most 4096
 *   others                                  none
 * Enlarging waits for the calls in flight. */
int32_t cpattn_scratch_reserve_metadata(cpattn_scratch *scratch, uint64_t bytes, uint32_t calls);

/* acc: f32, or f64 if q is f64. *: any number of rows, those that the ranges refer to. */
typedef struct cpattn_attend_args {
  size_t struct_size;
  const cpattn_tensor *q;       /* [*, heads, head_dim] */
  const cpattn_tensor *k;       /* [*, kv heads, head_dim] */
  const cpattn_tensor *v;       /* [*, kv heads, value_dim] */
  /* The running o: acc [*, heads, value_dim], normalised; NULL if every mode is ONLY; may be o itself. */
  const cpattn_tensor *running;
  const cpattn_tensor *o;       /* written by LAST and ONLY, of q's type [*, heads, value_dim]; NULL if no range has them */
  /* acc [heads, *]: the final lse, written by LAST and ONLY; if running_lse is NULL, also the running lse. */
  const cpattn_tensor *lse;
  /* f32 [heads], -1e18 to 1e18, or NULL; or [documents, heads], of which a q range has row `doc` (CPU only). */
  const cpattn_tensor *alibi_slopes;
  const cpattn_tensor *sinks;   /* f32 [heads] or [heads, n], or NULL; applied by LAST and ONLY */
  cpattn_head_map heads;
  /* 1: tiles begin at fixed positions, so that a row's bits do not depend on how its keys are split into ranges. CPU only. */
  int32_t aligned;
  cpattn_score score;
  cpattn_ranges ranges; /* read during the call, also on a device */
  void *stream;
  /* acc [heads, *, 2]: the lse of `running` in two words, as cpattn_merge describes it. If NULL, it is kept in `lse`, in one
   * word: a merge then loses precision as scores grow. */
  const cpattn_tensor *running_lse;
  size_t q_range_size; /* sizeof(cpattn_q_range) and sizeof(cpattn_pair), by the INIT macro: see STRUCTS IN ARRAYS */
  size_t pair_size;
  /* f32 [heads], or NULL: raised to the largest score of each head, after scale, softcap and ALiBi, over the allowed pairs of
   * the call, without sinks; a NaN does not count. Set it to -inf before the first of several calls. */
  const cpattn_tensor *max_logit;
} cpattn_attend_args;

#define CPATTN_ATTEND_ARGS_INIT \
  { sizeof(cpattn_attend_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {0, 0, 1}, 0, \
    {1.0, 0.0, CPATTN_UNLIMITED, 0}, {NULL, 0, NULL, 0, NULL, 0, NULL, 0}, NULL, NULL, sizeof(cpattn_q_range), \
    sizeof(cpattn_pair), NULL }

int32_t cpattn_attend(cpattn_scratch *scratch, const cpattn_attend_args *args);

/* Bytes of scheduler metadata that this call takes on the scratch's device; 0 on the CPU. Does not access the memory of
 * tensors. */
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
  const cpattn_tensor *delta;  /* acc [heads, *]: see cpattn_delta, cpattn_delta_with_lse */
  const cpattn_tensor *dq;     /* acc [*, heads, head_dim] */
  const cpattn_tensor *dk;     /* acc [*, kv heads, head_dim] */
  const cpattn_tensor *dv;     /* acc [*, kv heads, value_dim] */
  const cpattn_tensor *alibi_slopes; /* as in cpattn_attend_args */
  cpattn_head_map heads;
  int32_t accumulate_keys; /* 1: add to dk and dv; 0: write every row of every k range */
  int32_t per_q_head;      /* 1: dk and dv have one partial gradient for each q head, [*, heads, ...] */
  int32_t gradients;       /* CPATTN_GRADIENTS_... */
  int32_t aligned;
  int32_t reserved; /* 0 */
  cpattn_score score;
  cpattn_ranges ranges;
  void *stream;
  size_t q_range_size; /* as in cpattn_attend_args */
  size_t pair_size;
} cpattn_attend_backward_args;

#define CPATTN_ATTEND_BACKWARD_ARGS_INIT \
  { sizeof(cpattn_attend_backward_args), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {0, 0, 1}, 0, 0, \
    CPATTN_GRADIENTS_ALL, 0, 0, {1.0, 0.0, CPATTN_UNLIMITED, 0}, {NULL, 0, NULL, 0, NULL, 0, NULL, 0}, NULL, \
    sizeof(cpattn_q_range), sizeof(cpattn_pair) }

int32_t cpattn_attend_backward(cpattn_scratch *scratch, const cpattn_attend_backward_args *args);
int32_t cpattn_attend_backward_metadata(cpattn_scratch *scratch, const cpattn_attend_backward_args *args,
    uint64_t *bytes);

/* In the functions below, scratch says on which device the tensors are; on the CPU it may be NULL. Devices refuse f64, and
 * dims that are not multiples of 8 (of 4 in cpattn_merge); cpattn_transform accepts any dim. */

/* delta[h, t] = sum over d of d_o[t, h, d] * o[t, h, d], from the final o. */
int32_t cpattn_delta(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *d_o,
    const cpattn_tensor *delta, void *stream);

/* As cpattn_delta, less the gradient of lse: delta[h, t] = sum over d of d_o[t, h, d] * o[t, h, d] - d_lse[h, t]. A backward
 * with this delta, and cpattn_sink_gradient with it, are those of a loss of o and lse. lse is the final one; where it is -inf,
 * d_lse is not used. lse and d_lse: acc [heads, tokens]. */
int32_t cpattn_delta_with_lse(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *d_o,
    const cpattn_tensor *lse, const cpattn_tensor *d_lse, const cpattn_tensor *delta, void *stream);

/* For the given rows, which no q range covered: writes o = 0 and lse = -inf, or lse = the log-sum-exp of the sinks if `sinks` is not NULL. */
int32_t cpattn_finish(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *sinks, const cpattn_range *rows, size_t row_count, void *stream);

/* dsinks[h] = - sum over t of exp(sinks[h] - lse[h, t]) * delta[h, t]; with sinks [heads, n] the same for each of a head. On the
 * CPU dsinks may also be [heads, 28 n]: 28 words for each sink, the digits of a sum without rounding. Digits of several ranks
 * are added element by element, in any order; cpattn_sink_total makes the gradient of them. */
int32_t cpattn_sink_gradient(cpattn_scratch *scratch, const cpattn_tensor *lse, const cpattn_tensor *delta,
    const cpattn_tensor *sinks, const cpattn_tensor *dsinks, void *stream);

/* dsinks [heads, n] from digits [heads, 28 n]: both f32 or both f64, on the CPU. */
int32_t cpattn_sink_total(const cpattn_tensor *digits, const cpattn_tensor *dsinks);

/* Merges the partial result (other_o, other_lse) into (o, lse): all f32 or all f64, o [tokens, heads, dim] normalised,
 * lse [heads, tokens, 2]: the natural logarithm, and the rounding error of that first word. Without the second word, as
 * [heads, tokens], weights exp(lse_1 - lse_2) have a relative error of |lse| * 2^-24 in f32; each of the two lse may have one
 * word or two. A part whose lse is -inf has weight 0; a NaN stays a NaN. */
int32_t cpattn_merge(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *other_o, const cpattn_tensor *other_lse, void *stream);

/* dst = the sum of the sources, element by element, added in this order in f32 (f64 if one of them or dst is f64) and rounded
 * once.
 * All are [tokens, heads, dim], with any strides and types. One source makes a copy or a cast, no source fills dst with zeros;
 * the first source may be dst itself. Use it to copy slices of tokens and heads before and after an all-to-all. */
#define CPATTN_MAX_SOURCES 64
int32_t cpattn_transform(cpattn_scratch *scratch, const cpattn_tensor *dst, const cpattn_tensor *const *sources,
    size_t source_count, void *stream);

/* ---- Schedules --------------------------------------------------------------------------------------------------- */

/*
 * What a rank does in one direction of a plan, as a list of operations with all their arguments. cpattn_forward and
 * cpattn_backward execute this list. A program can execute it by itself: with its own streams, kernels and communicator,
 * inside a framework's graph, or to see what a run will do. No rank and no transport is needed.
 *
 *   cpattn_schedule_create(plan, rank, CPATTN_FORWARD, &schedule);
 *   cpattn_schedule_describe(schedule, &info);              the buffers; allocate those of the workspace
 *   for (i = 0; i < info.op_count; i++) {
 *     cpattn_schedule_op(schedule, i, &op);                 execute it
 *   }
 *   cpattn_schedule_destroy(schedule);
 *
 * ORDER. The order of the list is a legal order of execution on one stream. What may overlap is said by the lanes: the
 * operations of a lane run in the order of the list, and an operation begins after operation `after`, which is of the other
 * lane. So two streams and one event for each `after` execute a schedule with all its overlap.
 *
 * MEMORY. All buffers are [rows, heads, dim]. Those of the workspace are compact and begin at `offset` bytes of one allocation
 * of workspace_bytes; buffers whose lives do not overlap share bytes, so either use the offsets or allocate each buffer by
 * itself. The caller's tensors may have any strides, except those that a message sends in place (pack_inputs of
 * cpattn_options: none is): they must be compact. lse, which other calls take as [heads, tokens], is a [tokens, heads, 1]
 * buffer here. Every row that an operation reads was written before, by the caller or by an operation.
 *
 * lse of partial results (running_lse, and the second buffer of a merge) has dim 2: the value, and the rounding error of that
 * first word, as cpattn_merge describes. A program that has no such error writes 0. The sinks' gradients of a reproducible plan
 * have dim 28 n for n sinks of each head, from CPATTN_OP_SINK_GRADIENT to CPATTN_OP_SINK_TOTAL: the digits of
 * cpattn_sink_gradient, which cpattn_sink_total makes a number again. A program with a sum of its own writes it to the first of
 * a sink's 28 words and 0 to the others, and adds these words in the second operation. The two ways do not mix.
 *
 * All that these functions return belongs to the schedule: it lives until cpattn_schedule_destroy, is only to be read, and does
 * not need the plan to live. */
typedef struct cpattn_schedule cpattn_schedule;

/* Lists a rank's operations. direction: CPATTN_FORWARD or CPATTN_BACKWARD. Refused for plans of the kind CPATTN_OTHER and for
 * plans with dropout, which cpattn_attend does not have. Time and memory grow with the ranges of all operations: for long-lived
 * use keep the schedule. */
int32_t cpattn_schedule_create(const cpattn_plan *plan, uint32_t rank, int32_t direction, cpattn_schedule **schedule);

/* The same for one all-to-all of a tensor of this side, innermost dimension and type (cpattn_rank_to_heads,
 * cpattn_rank_to_tokens); its operations are exchanges and sums. For plans of any kind. */
int32_t cpattn_schedule_create_all_to_all(const cpattn_plan *plan, uint32_t rank, int32_t direction, int32_t side, uint32_t dim,
    int32_t dtype, cpattn_schedule **schedule);

/* The same for a combine (cpattn_rank_combine); its operations are exchanges, sums and CPATTN_OP_COMBINE. Its direction is
 * CPATTN_COMBINE. */
int32_t cpattn_schedule_create_combine(const cpattn_plan *plan, uint32_t rank, int32_t to, int32_t partial,
    cpattn_schedule **schedule);

/* The same for a scan (cpattn_rank_scan), on any device; its operations are exchanges, sums, and CPATTN_OP_COMPOSE or
 * CPATTN_OP_COMPOSE_MATRIX. Its direction is CPATTN_SCAN. */
int32_t cpattn_schedule_create_scan(const cpattn_plan *plan, uint32_t rank, const cpattn_scan *scan, cpattn_schedule **schedule);

int32_t cpattn_schedule_destroy(cpattn_schedule *schedule);

/* The caller's tensors, as in cpattn_backward_args: those of a rank's own tokens. OWN_... are of an all-to-all. d_lse
 * and max_logit, which a run may leave out, are in no list: a program that executes one subtracts d_lse where it makes delta, and
 * takes the largest score of its pairs where it makes o. */
#define CPATTN_TENSOR_Q 0      /* [q_tokens, heads, head_dim] */
#define CPATTN_TENSOR_K 1      /* [k_tokens, kv_heads, head_dim] */
#define CPATTN_TENSOR_V 2      /* [k_tokens, kv_heads, value_dim] */
#define CPATTN_TENSOR_O 3      /* [q_tokens, heads, value_dim] */
#define CPATTN_TENSOR_LSE 4    /* [q_tokens, heads, 1] */
#define CPATTN_TENSOR_D_O 5
#define CPATTN_TENSOR_DQ 6
#define CPATTN_TENSOR_DK 7
#define CPATTN_TENSOR_DV 8
#define CPATTN_TENSOR_SINKS 9  /* [1, heads, n] f32, for n sinks of each head */
#define CPATTN_TENSOR_DSINKS 10 /* [1, heads, n], the sum over all ranks of the replica */
#define CPATTN_TENSOR_D_LSE 11     /* [q_tokens, heads, 1] */
#define CPATTN_TENSOR_MAX_LOGIT 12 /* [1, heads, 1] f32, of the pairs that this rank computed */
#define CPATTN_TENSOR_OWN_TOKENS 13 /* [own tokens, all heads, dim] */
#define CPATTN_TENSOR_OWN_HEADS 14  /* [tokens of the ring share, own heads, dim], compact */
#define CPATTN_TENSOR_PARTIAL_O 15   /* of a combine: [all q_tokens, own heads, value_dim] */
#define CPATTN_TENSOR_PARTIAL_LSE 16 /* of a combine: [all q_tokens, own heads, 1] */
#define CPATTN_TENSOR_DECAY 17         /* of a scan, as the two below: a row for each of the rank's segments */
#define CPATTN_TENSOR_STATE 18
#define CPATTN_TENSOR_INITIAL_STATE 19

/* A buffer. Views name it by its index in cpattn_schedule_info.buffers. */
typedef struct cpattn_buffer {
  char name[32];    /* zero-terminated */
  int32_t tensor;   /* CPATTN_TENSOR_..., or -1: in the workspace */
  int32_t dtype;    /* CPATTN_F16, ... */
  uint64_t rows;
  uint32_t heads;
  uint32_t dim;
  uint64_t offset;  /* first byte in the workspace, a multiple of CPATTN_WORKSPACE_ALIGNMENT; 0 for the caller's tensors */
  int32_t written;  /* 0: a tensor of the caller that the schedule only reads */
  uint32_t reserved;
} cpattn_buffer;

typedef struct cpattn_schedule_info {
  size_t struct_size;
  const cpattn_buffer *buffers; /* first the caller's tensors that this direction uses, then the workspace */
  size_t buffer_count;
  size_t op_count;
  uint64_t workspace_bytes;
  uint32_t rank;
  int32_t direction; /* as given */
} cpattn_schedule_info;

#define CPATTN_SCHEDULE_INFO_INIT \
  { sizeof(cpattn_schedule_info), NULL, 0, 0, 0, 0, 0 }

int32_t cpattn_schedule_describe(const cpattn_schedule *schedule, cpattn_schedule_info *info);

/* Rows and heads of a buffer. heads is 0 where an operation does not have this view. */
typedef struct cpattn_view {
  uint64_t row;    /* first row */
  uint64_t rows;
  uint32_t buffer; /* index in cpattn_schedule_info.buffers */
  uint32_t head;   /* first head */
  uint32_t heads;
  uint32_t reserved;
} cpattn_view;

/* A message of an exchange: whole rows of a buffer, so contiguous bytes of a compact one. */
typedef struct cpattn_op_message {
  cpattn_view view;
  uint64_t offset; /* first byte in the buffer */
  uint64_t bytes;
  uint32_t peer;   /* a rank of the plan's world */
  uint32_t tag;    /* counts the messages of this schedule from the sender to the receiver: both have the same number */
  int32_t send;    /* 1: send it to peer, 0: receive it from peer */
  uint32_t reserved;
} cpattn_op_message;

/* dst = the sum of sources[sources_begin] to sources[sources_end - 1], element by element, added in this order in f32 (f64 if one
 * of them or dst is f64) and rounded once to the type of dst; one source is a copy or a cast, and
 * without any dst is filled with zeros. All have dst's rows and heads. dst may be the first source itself. */
typedef struct cpattn_sum {
  cpattn_view dst;
  uint32_t sources_begin; /* in cpattn_op.sources */
  uint32_t sources_end;
  uint32_t part; /* sums of one part may run in any order; parts run one after another */
  uint32_t reserved;
} cpattn_sum;

#define CPATTN_OP_DELTA 0           /* delta = rowsum(d_o * o), as cpattn_delta */
#define CPATTN_OP_SINK_GRADIENT 1   /* dsinks = this rank's part, from lse, delta and sinks, as cpattn_sink_gradient */
#define CPATTN_OP_SINK_TOTAL 2      /* sums: one, of digits (see MEMORY): cpattn_sink_total */
#define CPATTN_OP_SUM 3             /* sums */
#define CPATTN_OP_MERGE 4           /* sums, in pairs: o, then its lse. Merge source 1 into source 0, which is dst: cpattn_merge */
#define CPATTN_OP_EXCHANGE 5        /* messages, which complete together; between two ranks both list them in one order */
#define CPATTN_OP_ATTEND 6          /* as cpattn_attend */
#define CPATTN_OP_ATTEND_BACKWARD 7 /* as cpattn_attend_backward */
#define CPATTN_OP_COMBINE 8 /* sums, two: o and its lse. Merge all sources, in order, apply the sinks once, write to dst */
/* sums, none of which touches another's dst: dst = source 0 * source 1, plus source 2 if there is one. Source 0 is a decay. In COMPOSE
 * number i of it scales the i-th of as many equal parts of a head; in COMPOSE_MATRIX it is a square matrix, rows together, and the others are
 * matrices with as many rows. */
#define CPATTN_OP_COMPOSE 9
#define CPATTN_OP_COMPOSE_MATRIX 10

/*
 * An operation. Lists and views that its kind does not have are empty.
 *
 * In ATTEND and ATTEND_BACKWARD the members from `heads` on are those of cpattn_attend_args and cpattn_attend_backward_args, and so
 * are the views: rows of ranges and heads count within them. ALiBi slopes are the problem's from head heads.q_offset on (of row
 * `doc` of a q range, if the problem has some of each document). A call without pairs finishes rows whose running result is
 * complete. With delta = rowsum(d_o * o) and a row's final lse: p = exp(s - lse), 0 where lse is -inf; ds = p * (d_o.v - delta). */
typedef struct cpattn_op {
  size_t struct_size;
  int32_t kind;      /* CPATTN_OP_... */
  int32_t lane;      /* CPATTN_COMPUTE or CPATTN_COMMUNICATION */
  int64_t after;     /* index of the last operation of the other lane that must be complete; -1: none */
  char name[32];     /* as in cpattn_event: "attend", "fetch", ... */
  char phase[32];
  uint32_t step;     /* the ring step */
  uint32_t reserved;
  const cpattn_op_message *messages;
  size_t message_count;
  const cpattn_sum *sums;
  size_t sum_count;
  const cpattn_view *sources;
  size_t source_count;
  cpattn_view q;
  cpattn_view k;
  cpattn_view v;
  cpattn_view running;     /* ATTEND: the running o; if there is none, every mode is ONLY */
  cpattn_view running_lse; /* dim 2 */
  cpattn_view o;           /* ATTEND: the result, of LAST and ONLY; DELTA: the final o */
  cpattn_view lse;
  cpattn_view d_o;
  cpattn_view delta;
  cpattn_view dq;
  cpattn_view dk;
  cpattn_view dv;
  cpattn_view sinks;  /* ATTEND with a result, SINK_GRADIENT, COMBINE: if the problem has sinks */
  cpattn_view dsinks; /* SINK_GRADIENT: one row */
  cpattn_head_map heads;
  int32_t aligned;
  int32_t accumulate_keys;
  int32_t per_q_head;
  int32_t gradients;
  int32_t reserved_2;
  cpattn_score score;
  cpattn_ranges ranges;
  size_t q_range_size; /* of the library's elements in ranges: a later library's may be larger than this header's */
  size_t pair_size;
} cpattn_op;

#define CPATTN_OP_INIT \
  { sizeof(cpattn_op), 0, 0, 0, "", "", 0, 0, NULL, 0, NULL, 0, NULL, 0, \
    {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, \
    {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, \
    {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, \
    {0, 0, 1}, 0, 0, 0, 0, 0, {1.0, 0.0, CPATTN_UNLIMITED, 0}, {NULL, 0, NULL, 0, NULL, 0, NULL, 0}, \
    sizeof(cpattn_q_range), sizeof(cpattn_pair) }

/* Operation `index`, from 0 to op_count - 1. */
int32_t cpattn_schedule_op(const cpattn_schedule *schedule, size_t index, cpattn_op *op);

#ifdef __cplusplus
}
#endif

#endif /* CPATTN_H */
