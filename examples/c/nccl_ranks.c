/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * One rank of several, each a process with a CUDA device, over NCCL: a forward, compared with one rank on the CPU.
 *
 * From the repository's root, two ranks on a machine with two devices:
 *
 *   capi/build --cuda && cc -std=c99 examples/c/nccl_ranks.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lm -ldl -o target/nccl_ranks
 *   rm -f id; target/nccl_ranks 0 2 id 0 & target/nccl_ranks 1 2 id 1; wait
 *
 * The arguments are the rank, the number of ranks, a file for the unique id (rank 0 writes it, the others read it), and the device.
 */
#define _POSIX_C_SOURCE 200112L
#include <cpattn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include "driver.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 32, DOCUMENTS = 3, TOKENS = 90 };
static const int32_t documents[] = {0, 37, 58, 90};

static int check(int32_t status, const char *what) {
  if (status != CPATTN_OK) fprintf(stderr, "%s: %s: %s\n", what, cpattn_status_name(status), cpattn_last_error());
  return status == CPATTN_OK;
}
#define TRY(call) \
  do { \
    if (!check(call, #call)) return 1; \
  } while (0)
#define CUDA(call) \
  do { \
    if (!driver_ok(call, #call)) return 1; \
  } while (0)

/* Rank 0 makes the id and leaves it in a file; the others wait for it. */
static int unique_id(uint32_t rank, const char *path, uint8_t id[128]) {
  char fresh[4096];
  const struct timespec moment = {0, 1000000};
  FILE *file = NULL;
  if (rank == 0) {
    if (!check(cpattn_nccl_unique_id(id), "unique id")) return 0;
    if (snprintf(fresh, sizeof fresh, "%s.fresh", path) >= (int)sizeof fresh || !(file = fopen(fresh, "wb"))) return 0;
    return (fwrite(id, 1, 128, file) == 128) & !fclose(file) && !rename(fresh, path);
  }
  for (int i = 0; i < 60000 && !(file = fopen(path, "rb")); i++) nanosleep(&moment, NULL);
  return file && (fread(id, 1, 128, file) == 128) & !fclose(file);
}

/* A tensor of f16 [n, heads, DIM], or lse [HEADS, n] of f32. */
static cpattn_tensor tensor(int64_t *shape, int64_t n, int heads, void *data, int32_t device_type, int32_t device) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  shape[0] = heads ? n : HEADS, shape[1] = heads ? heads : n, shape[2] = DIM;
  t.data = data, t.shape = shape, t.ndim = heads ? 3 : 2;
  t.device.device_type = device_type, t.device.device_id = device;
  t.dtype.code = 2, t.dtype.bits = heads ? 16 : 32, t.dtype.lanes = 1;
  return t;
}

static double from_f16(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double x = exponent == 0 ? ldexp(fraction, -24) : exponent == 31 ? NAN : ldexp(fraction + 1024, exponent - 25);
  return h >> 15 ? -x : x;
}

int main(int count, char **arguments) {
  if (count != 5) return fprintf(stderr, "usage: %s RANK WORLD FILE DEVICE\n", arguments[0]), 2;
  const uint32_t r = (uint32_t)atoi(arguments[1]), world = (uint32_t)atoi(arguments[2]);
  const int device = atoi(arguments[4]);
  if (!driver_open(device)) return printf("not run: %s\n", driver_missing), 0;

  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents, problem.documents = DOCUMENTS;
  problem.heads = HEADS, problem.kv_heads = KV_HEADS, problem.head_dim = DIM, problem.dtype = CPATTN_F16;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = world, options.ulysses = 1, options.ring = world;
  cpattn_plan *plan = NULL;
  TRY(cpattn_plan_create(&problem, &options, &plan));

  uint8_t id[128];
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  if (!unique_id(r, arguments[3], id)) return 1;
  TRY(cpattn_nccl_group(id, NULL, 0, r, world, device, 60000, &transport)); /* returns when all ranks are there */
  TRY(cpattn_rank_create(transport, NULL, &rank));                          /* on the device of its transport */

  /* The whole batch: inputs between 0.25 and 1 of either sign, the same on every rank. */
  static uint16_t whole[3][TOKENS * HEADS * DIM], expected[TOKENS * HEADS * DIM], mine[4][TOKENS * HEADS * DIM];
  static float lse[TOKENS * HEADS];
  uint32_t random = 7;
  for (int i = 0; i < 3; i++) {
    for (int j = 0; j < TOKENS * HEADS * DIM; j++) {
      random = random * 1664525u + 1013904223u;
      whole[i][j] = (uint16_t)((random >> 16 & 0x83ff) | (13u + (random >> 15 & 1)) << 10);
    }
  }

  /* This rank's tokens to its device, a forward there, o back: all in the order of one stream. */
  cpattn_share share = CPATTN_SHARE_INIT;
  TRY(cpattn_plan_share(plan, r, &share));
  void *stream = NULL;
  CUDA(driver.stream_create(&stream, 1 /* not ordered with the default stream */));
  static const int heads[5] = {HEADS, KV_HEADS, KV_HEADS, HEADS, 0}; /* q, k, v, o, lse */
  int64_t shapes[5][3], all[3];
  cpattn_tensor t[5];
  device_address memory[5];
  size_t bytes[5];
  for (int i = 0; i < 5; i++) {
    const int64_t n = (int64_t)(i == 1 || i == 2 ? share.k_tokens : share.q_tokens);
    bytes[i] = (size_t)n * (i == 4 ? HEADS * sizeof(float) : (size_t)heads[i] * DIM * sizeof(uint16_t));
    CUDA(driver.alloc(&memory[i], bytes[i] + 1));
    if (i < 3) {
      cpattn_tensor from = tensor(all, TOKENS, heads[i], whole[i], CPATTN_DEVICE_CPU, 0);
      cpattn_tensor to = tensor(shapes[i], n, heads[i], mine[i], CPATTN_DEVICE_CPU, 0);
      TRY(cpattn_plan_shard(plan, i ? CPATTN_K : CPATTN_Q, r, &from, &to));
      CUDA(driver.upload(memory[i], mine[i], bytes[i], stream));
    }
    t[i] = tensor(shapes[i], n, heads[i], (void *)(uintptr_t)memory[i], CPATTN_DEVICE_CUDA, device);
  }
  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = &t[0], forward.k = &t[1], forward.v = &t[2], forward.o = &t[3], forward.lse = &t[4];
  forward.stream = stream;
  TRY(cpattn_forward(rank, plan, &forward));
  CUDA(driver.download(mine[3], memory[3], bytes[3], stream));
  CUDA(driver.stream_wait(stream));
  TRY(cpattn_rank_poll(rank)); /* whether anything failed meanwhile */

  /* The whole batch on the CPU, and this rank's rows of it. */
  cpattn_plan *single = NULL;
  cpattn_transport *alone = NULL;
  cpattn_rank *cpu = NULL;
  cpattn_options one = CPATTN_OPTIONS_INIT;
  TRY(cpattn_plan_create(&problem, &one, &single));
  TRY(cpattn_local_group(1, 1000, &alone));
  TRY(cpattn_rank_create(alone, NULL, &cpu));
  for (int i = 0; i < 5; i++)
    t[i] = tensor(shapes[i], TOKENS, heads[i], i < 3 ? whole[i] : i == 3 ? (void *)expected : (void *)lse, CPATTN_DEVICE_CPU, 0);
  forward.stream = NULL;
  TRY(cpattn_forward(cpu, single, &forward));
  t[3] = tensor(shapes[3], TOKENS, HEADS, expected, CPATTN_DEVICE_CPU, 0);
  t[0] = tensor(shapes[0], (int64_t)share.q_tokens, HEADS, mine[0], CPATTN_DEVICE_CPU, 0);
  TRY(cpattn_plan_shard(plan, CPATTN_Q, r, &t[3], &t[0]));
  double error = 0, size = 0;
  for (size_t j = 0; j < bytes[3] / sizeof(uint16_t); j++) {
    double x = from_f16(mine[0][j]), e = from_f16(mine[3][j]) - x;
    error += e * e, size += x * x;
  }
  const double relative = sqrt(error / size);

  TRY(cpattn_rank_destroy(cpu));
  TRY(cpattn_rank_destroy(rank));
  TRY(cpattn_plan_destroy(single));
  TRY(cpattn_plan_destroy(plan));
  for (int i = 0; i < 5; i++) CUDA(driver.free(memory[i]));
  CUDA(driver.stream_destroy(stream));
  const int ok = relative <= 2e-3; /* false for a NaN. Each side rounds to f16: about 4e-4 */
  printf(ok ? "ok: rank %u of %u: o differs from the CPU's by %.2e\n" : "FAILED: rank %u of %u: o differs by %.2e\n", r, world, relative);
  return ok ? 0 : 1;
}
