/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * One rank of several, each a process, over MPI: forward and backward, compared with one rank that has the whole batch; and
 * the error of a rank when another one ends the run.
 *
 * From the repository's root, with the MPI whose compiler is mpicc:
 *
 *   capi/build --features mpi && mpicc -std=c99 examples/c/mpi_ranks.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lm -o target/mpi_ranks
 *   mpirun -n 2 target/mpi_ranks
 */
#include <cpattn.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, DOCUMENTS = 3, TOKENS = 90 };
static const int32_t documents[] = {0, 37, 58, 90};

/* MPI cannot be finalised with a rank that has failed. */
static void try(int32_t status, const char *what) {
  if (status == CPATTN_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, cpattn_status_name(status), cpattn_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}
#define TRY(call) try(call, #call)

/* q, k, v, o, lse, gradient of o, dq, dk, dv */
enum { Q, K, V, O, LSE, D_O, DQ, DK, DV, COUNT };
static int on_k(int i) { return i == K || i == V || i == DK || i == DV; }
static int heads_of(int i) { return on_k(i) ? KV_HEADS : HEADS; }

typedef struct {
  cpattn_tensor t[COUNT];
  int64_t shape[COUNT][3];
} tensors;

/* Tensors of f64 [n, heads, DIM], lse [HEADS, n], in memory that is 0. */
static void make(tensors *all, uint64_t q_tokens, uint64_t k_tokens) {
  memset(all, 0, sizeof *all);
  for (int i = 0; i < COUNT; i++) {
    const int64_t n = (int64_t)(on_k(i) ? k_tokens : q_tokens);
    int64_t *shape = all->shape[i];
    shape[0] = i == LSE ? HEADS : n, shape[1] = i == LSE ? n : heads_of(i), shape[2] = DIM;
    all->t[i].shape = shape, all->t[i].ndim = i == LSE ? 2 : 3;
    all->t[i].data = calloc((size_t)n * HEADS * DIM + 1, sizeof(double));
    all->t[i].device.device_type = CPATTN_DEVICE_CPU;
    all->t[i].dtype.code = 2, all->t[i].dtype.bits = 64, all->t[i].dtype.lanes = 1;
    if (!all->t[i].data) MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

static void release(tensors *all) {
  for (int i = 0; i < COUNT; i++) free(all->t[i].data);
}

static void forward(cpattn_rank *rank, const cpattn_plan *plan, const tensors *a) {
  cpattn_forward_args args = CPATTN_FORWARD_ARGS_INIT;
  args.q = &a->t[Q], args.k = &a->t[K], args.v = &a->t[V], args.o = &a->t[O], args.lse = &a->t[LSE];
  TRY(cpattn_forward(rank, plan, &args));
}

static void backward(cpattn_rank *rank, const cpattn_plan *plan, const tensors *a) {
  cpattn_backward_args args = CPATTN_BACKWARD_ARGS_INIT;
  args.q = &a->t[Q], args.k = &a->t[K], args.v = &a->t[V], args.o = &a->t[O], args.lse = &a->t[LSE];
  args.d_o = &a->t[D_O], args.dq = &a->t[DQ], args.dk = &a->t[DK], args.dv = &a->t[DV];
  TRY(cpattn_backward(rank, plan, &args));
}

int main(int count, char **arguments) {
  int provided = 0, number = 0, world = 0;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm comm = MPI_COMM_WORLD;
  MPI_Comm_rank(comm, &number);
  MPI_Comm_size(comm, &world);
  const uint32_t r = (uint32_t)number;

  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents, problem.documents = DOCUMENTS;
  problem.heads = HEADS, problem.kv_heads = KV_HEADS, problem.head_dim = DIM, problem.dtype = CPATTN_F64;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = (uint32_t)world, options.ulysses = 1, options.ring = (uint32_t)world;
  cpattn_plan *plan = NULL, *single = NULL;
  TRY(cpattn_plan_create(&problem, &options, &plan));

  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL, *alone = NULL;
  TRY(cpattn_mpi_group(&comm, 60000, &transport)); /* on all processes at the same time */
  TRY(cpattn_rank_create(transport, NULL, &rank));

  /* The whole batch, the same on every rank; each cuts its own tokens out of it. */
  cpattn_share share = CPATTN_SHARE_INIT;
  TRY(cpattn_plan_share(plan, r, &share));
  tensors whole, mine, wanted;
  make(&whole, TOKENS, TOKENS);
  make(&mine, share.q_tokens, share.k_tokens);
  make(&wanted, share.q_tokens, share.k_tokens);
  static const int inputs[4] = {Q, K, V, D_O}, outputs[4] = {O, DQ, DK, DV};
  uint32_t random = 7;
  for (int i = 0; i < 4; i++) {
    double *x = whole.t[inputs[i]].data;
    for (int j = 0; j < TOKENS * heads_of(inputs[i]) * DIM; j++) {
      random = random * 1664525u + 1013904223u;
      x[j] = (random >> 8) / 8388608.0 - 1.0;
    }
    const int side = on_k(inputs[i]) ? CPATTN_K : CPATTN_Q;
    TRY(cpattn_plan_shard(plan, side, r, &whole.t[inputs[i]], &mine.t[inputs[i]]));
  }
  forward(rank, plan, &mine);
  backward(rank, plan, &mine);

  /* One rank with the whole batch, and this rank's rows of what it finds. */
  cpattn_options one = CPATTN_OPTIONS_INIT;
  TRY(cpattn_plan_create(&problem, &one, &single));
  TRY(cpattn_local_group(1, 1000, &transport));
  TRY(cpattn_rank_create(transport, NULL, &alone));
  forward(alone, single, &whole);
  backward(alone, single, &whole);
  double error = 0, size = 0;
  for (int i = 0; i < 4; i++) {
    const int side = on_k(outputs[i]) ? CPATTN_K : CPATTN_Q;
    TRY(cpattn_plan_shard(plan, side, r, &whole.t[outputs[i]], &wanted.t[outputs[i]]));
    const double *a = mine.t[outputs[i]].data, *b = wanted.t[outputs[i]].data;
    const int64_t n = mine.shape[outputs[i]][0] * heads_of(outputs[i]) * DIM;
    for (int64_t j = 0; j < n; j++) error += (a[j] - b[j]) * (a[j] - b[j]), size += b[j] * b[j];
  }
  const double relative = sqrt(error / size);
  int ok = relative <= 1e-13; /* false for a NaN */
  printf(ok ? "ok: rank %u of %d differs from one rank by %.1e\n" : "FAILED: rank %u of %d differs by %.1e\n", r, world, relative);

  /* Rank 0 ends the run: every other rank is told so, by the call that it is in or by the next one. So rank 0 first waits
     until all backwards have returned. A new group would work. */
  MPI_Barrier(comm);
  if (r == 0) TRY(cpattn_rank_abort(rank));
  int32_t status = CPATTN_OK;
  for (int i = 0; i < 60000 && status == CPATTN_OK; i++) {
    MPI_Barrier(comm); /* the caller's own communicator goes on working */
    status = cpattn_rank_poll(rank);
    int failed = status != CPATTN_OK, all = 0;
    MPI_Allreduce(&failed, &all, 1, MPI_INT, MPI_MIN, comm);
    if (!all) status = CPATTN_OK;
  }
  if (status != CPATTN_PEER || (r != 0 && !strstr(cpattn_last_error(), "rank 0"))) {
    printf("FAILED: rank %u: %s: %s\n", r, cpattn_status_name(status), cpattn_last_error());
    ok = 0;
  }

  release(&whole), release(&mine), release(&wanted);
  TRY(cpattn_rank_destroy(alone));
  TRY(cpattn_rank_destroy(rank)); /* before MPI_Finalize */
  TRY(cpattn_plan_destroy(single));
  TRY(cpattn_plan_destroy(plan));
  MPI_Finalize();
  return ok ? 0 : 1;
}
