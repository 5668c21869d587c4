/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Four ranks on one CUDA device, each a thread with its own stream: forward and backward, compared with one rank on
 * the CPU.
 *
 * From the repository's root:
 *
 *   capi/build --cuda && cc -std=c99 examples/c/cuda_ranks.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lpthread -lm -ldl -o target/cuda_ranks && target/cuda_ranks
 *
 * Each rank enqueues its uploads, the forward, the backward and its downloads on its stream, in this order, and waits once,
 * at the end: the calls return when their work is enqueued, and read their inputs in stream order.
 */
#define _POSIX_C_SOURCE 200112L
#include <cpattn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include "driver.h"

enum { WORLD = 4, DEVICE = 0, HEADS = 4, KV_HEADS = 2, DIM = 32, TENSORS = 9 };

static const int32_t documents[] = {0, 37, 37, 58, 90};
enum { DOCUMENTS = 4, TOKENS = 90 };

/* q, k, v, d_o are inputs, the rest is computed. */
enum { Q, K, V, DO, O, DQ, DK, DV, LSE };
static int on_k_side(int i) { return i == K || i == V || i == DK || i == DV; }

static uint16_t whole[TENSORS - 1][TOKENS * HEADS * DIM]; /* the batch; what the ranks computed, by token */
static float whole_lse[TOKENS * HEADS];
static cpattn_plan *plan;
static cpattn_transport *transports[WORLD];

static int check(int32_t status, const char *what) {
  if (status != CPATTN_OK) fprintf(stderr, "%s: %s: %s\n", what, cpattn_status_name(status), cpattn_last_error());
  return status == CPATTN_OK;
}
#define TRY(call) \
  do { \
    if (!check(call, #call)) return (void *)1; \
  } while (0)
#define CUDA(call) \
  do { \
    if (!driver_ok(call, #call)) return (void *)1; \
  } while (0)

/* The tensors of one rank and what their descriptions point to. */
typedef struct {
  cpattn_tensor t[TENSORS];
  int64_t shape[TENSORS][3], by_token[2];
} described;

/* Tensor i with `n` of its rows at `data`. lse is [heads, tokens]; these strides lay it out by token. */
static void describe(described *d, int i, int64_t n, void *data, int32_t device_type) {
  cpattn_tensor *t = &d->t[i];
  int64_t shape[] = {n, on_k_side(i) ? KV_HEADS : HEADS, DIM};
  memset(t, 0, sizeof *t);
  memcpy(d->shape[i], shape, sizeof shape);
  t->data = data;
  t->device.device_type = device_type;
  t->device.device_id = device_type == CPATTN_DEVICE_CUDA ? DEVICE : 0;
  t->dtype.code = 2;
  t->dtype.bits = i == LSE ? 32 : 16;
  t->dtype.lanes = 1;
  t->ndim = i == LSE ? 2 : 3;
  t->shape = d->shape[i];
  if (i == LSE) {
    d->shape[i][0] = HEADS, d->shape[i][1] = n;
    d->by_token[0] = 1, d->by_token[1] = HEADS;
    t->strides = d->by_token;
  }
}

static size_t bytes_of(int i, int64_t n) {
  return (size_t)n * (i == LSE ? HEADS * sizeof(float) : (size_t)(on_k_side(i) ? KV_HEADS : HEADS) * DIM * sizeof(uint16_t));
}

static int run(cpattn_rank *rank, const cpattn_plan *p, const cpattn_tensor *t, void *stream) {
  cpattn_forward_args f = CPATTN_FORWARD_ARGS_INIT;
  f.q = &t[Q], f.k = &t[K], f.v = &t[V], f.o = &t[O], f.lse = &t[LSE];
  f.stream = stream;
  if (!check(cpattn_forward(rank, p, &f), "forward")) return 0;
  cpattn_backward_args b = CPATTN_BACKWARD_ARGS_INIT;
  b.q = &t[Q], b.k = &t[K], b.v = &t[V], b.o = &t[O], b.lse = &t[LSE];
  b.d_o = &t[DO], b.dq = &t[DQ], b.dk = &t[DK], b.dv = &t[DV];
  b.stream = stream;
  return check(cpattn_backward(rank, p, &b), "backward");
}

static void *device_rank(void *argument) {
  uint32_t r = *(const uint32_t *)argument;
  cpattn_rank *rank = NULL;
  void *stream = NULL;
  if (!driver_open(DEVICE)) return (void *)1; /* the context becomes current on this thread */
  CUDA(driver.stream_create(&stream, 1 /* not ordered with the default stream */));

  TRY(cpattn_rank_create(transports[r], NULL, &rank)); /* on the device of its transport */
  TRY(cpattn_rank_prepare(rank, plan, CPATTN_FORWARD, NULL));
  TRY(cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  uint64_t forward = 0, backward = 0;
  TRY(cpattn_plan_workspace(plan, r, CPATTN_FORWARD, &forward));
  TRY(cpattn_plan_workspace(plan, r, CPATTN_BACKWARD, &backward));
  size_t workspace_bytes = (size_t)(forward > backward ? forward : backward);
  device_address workspace = 0, device[TENSORS] = {0};
  CUDA(driver.alloc(&workspace, workspace_bytes));
  TRY(cpattn_rank_lend_workspace(rank, (void *)(uintptr_t)workspace, workspace_bytes));

  cpattn_share share = CPATTN_SHARE_INIT;
  TRY(cpattn_plan_share(plan, r, &share));
  char *host[TENSORS] = {0};
  described all, mine, on_device;
  for (int i = 0; i < TENSORS; i++) {
    int64_t n = (int64_t)(on_k_side(i) ? share.k_tokens : share.q_tokens);
    if (!(host[i] = malloc(bytes_of(i, n) + 1))) return (void *)1;
    CUDA(driver.alloc(&device[i], bytes_of(i, n) + 1));
    describe(&all, i, TOKENS, i == LSE ? (void *)whole_lse : whole[i], CPATTN_DEVICE_CPU);
    describe(&mine, i, n, host[i], CPATTN_DEVICE_CPU);
    describe(&on_device, i, n, (void *)(uintptr_t)device[i], CPATTN_DEVICE_CUDA);
    if (i < O) {
      TRY(cpattn_plan_shard(plan, on_k_side(i) ? CPATTN_K : CPATTN_Q, r, &all.t[i], &mine.t[i]));
      CUDA(driver.upload(device[i], host[i], bytes_of(i, n), stream));
    }
  }
  if (!run(rank, plan, on_device.t, stream)) return (void *)1;
  for (int i = O; i < TENSORS; i++) {
    CUDA(driver.download(host[i], device[i], bytes_of(i, (int64_t)(on_k_side(i) ? share.k_tokens : share.q_tokens)), stream));
  }
  CUDA(driver.stream_wait(stream)); /* the only one */
  TRY(cpattn_rank_poll(rank));

  for (int i = O; i < TENSORS; i++) {
    if (i == LSE) { /* rows of HEADS floats */
      all.t[i].shape[0] = TOKENS, all.t[i].shape[1] = HEADS, all.t[i].strides = NULL;
      mine.t[i].shape[0] = (int64_t)share.q_tokens, mine.t[i].shape[1] = HEADS, mine.t[i].strides = NULL;
    }
    TRY(cpattn_plan_unshard(plan, on_k_side(i) ? CPATTN_K : CPATTN_Q, r, &mine.t[i], &all.t[i]));
  }
  TRY(cpattn_rank_destroy(rank));
  for (int i = 0; i < TENSORS; i++) {
    free(host[i]);
    CUDA(driver.free(device[i]));
  }
  CUDA(driver.free(workspace));
  CUDA(driver.stream_destroy(stream));
  return NULL;
}

static double from_f16(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double x = exponent == 0 ? ldexp(fraction, -24) : exponent == 31 ? NAN : ldexp(fraction + 1024, exponent - 25);
  return h >> 15 ? -x : x;
}

/* The same job, one rank, on the CPU. */
static int on_cpu(cpattn_problem problem, uint16_t (*expected)[TOKENS * HEADS * DIM], float *expected_lse) {
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *single = NULL;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  if (!check(cpattn_plan_create(&problem, &options, &single), "plan") || !check(cpattn_local_group(1, 1000, &transport), "group") ||
      !check(cpattn_rank_create(transport, NULL, &rank), "rank"))
    return 0;
  described d;
  for (int i = 0; i < TENSORS; i++)
    describe(&d, i, TOKENS, i == LSE ? (void *)expected_lse : i < O ? whole[i] : expected[i], CPATTN_DEVICE_CPU);
  int ok = run(rank, single, d.t, NULL);
  return check(cpattn_rank_destroy(rank), "rank") && check(cpattn_plan_destroy(single), "plan") && ok;
}

int main(void) {
  if (!driver_open(DEVICE)) return printf("not run: %s\n", driver_missing), 0;
  uint32_t random = 7;
  for (int i = 0; i < TENSORS - 1; i++) {
    for (int j = 0; j < TOKENS * HEADS * DIM; j++) {
      random = random * 1664525u + 1013904223u;
      /* Inputs between 0.25 and 1 of either sign; outputs begin as NaN, so that what is never written is seen. */
      whole[i][j] = i < O ? (uint16_t)((random >> 16 & 0x83ff) | (13u + (random >> 15 & 1)) << 10) : 0xffff;
    }
  }
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents;
  problem.documents = DOCUMENTS;
  problem.heads = HEADS;
  problem.kv_heads = KV_HEADS;
  problem.head_dim = DIM;
  problem.dtype = CPATTN_F16;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = WORLD;
  options.ulysses = 2;
  options.ring = 2;
  const int32_t devices[WORLD] = {DEVICE, DEVICE, DEVICE, DEVICE};
  if (!check(cpattn_plan_create(&problem, &options, &plan), "plan")) return 1;
  if (!check(cpattn_peer_group(WORLD, devices, 60000, transports), "group")) return 1;

  pthread_t threads[WORLD];
  uint32_t ranks[WORLD];
  int ok = 1;
  for (uint32_t r = 0; r < WORLD; r++) {
    ranks[r] = r;
    if (pthread_create(&threads[r], NULL, device_rank, &ranks[r])) return 2;
  }
  for (int r = 0; r < WORLD; r++) {
    void *failed;
    pthread_join(threads[r], &failed);
    ok = ok && !failed;
  }
  static uint16_t expected[TENSORS - 1][TOKENS * HEADS * DIM];
  static float expected_lse[TOKENS * HEADS];
  if (!ok || !on_cpu(problem, expected, expected_lse)) return 1;

  static const char *const names[] = {"q", "k", "v", "do", "o", "dq", "dk", "dv"};
  for (int i = O; i < LSE; i++) {
    double error = 0, size = 0;
    for (size_t j = 0; j < bytes_of(i, TOKENS) / sizeof(uint16_t); j++) {
      double x = from_f16(expected[i][j]), e = from_f16(whole[i][j]) - x;
      error += e * e;
      size += x * x;
    }
    double relative = sqrt(error / size);
    printf("%-3s differs from the CPU's by %.2e (RMS, relative)\n", names[i], relative);
    ok = ok && relative <= 2e-3; /* false for a NaN. Each side rounds to f16: about 4e-4 */
  }
  double worst = 0;
  for (int j = 0; j < TOKENS * HEADS; j++) {
    double e = fabs((double)whole_lse[j] - (double)expected_lse[j]);
    if (!(e <= worst)) worst = e;
  }
  printf("lse differs by %.2e at most\n", worst);
  ok = ok && worst <= 1e-4;
  check(cpattn_plan_destroy(plan), "plan");
  printf(ok ? "ok: %d ranks on a CUDA device agree with the CPU\n" : "FAILED on %d ranks\n", WORLD);
  return ok ? 0 : 1;
}
