/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The main example: a layer's q, k, v, do over eight ranks (threads), Ulysses 4 x ring 2, forward and backward, compared
 * with references that were computed in float64.
 *
 * From the repository's root:
 *
 *   capi/build && cc -std=c99 examples/c/main_job.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lpthread -lm -o target/main_job && target/main_job tests/data/minilm_263.safetensors
 *
 * Each thread uses its own tokens only: it copies them out of the file's tensors, lends its rank a workspace, runs, and
 * copies its results into their places in the whole.
 */
#define _POSIX_C_SOURCE 200112L
#include <cpattn.h>
#include <math.h>
#include <pthread.h>
#include "safetensors.h"

enum { ULYSSES = 4, RING = 2, WORLD = ULYSSES * RING, HEADS = 12, DIM = 32, ROW = HEADS * DIM };

/* q, k, v, do as they are in the file; results of all ranks. */
static struct {
  int64_t tokens;
  uint16_t *q, *k, *v, *d_o, *o, *dq, *dk, *dv;
  float *lse;
} all;

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

static cpattn_tensor tensor(void *data, uint8_t bits, int32_t ndim, int64_t *shape, int64_t *strides) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype.code = 2;
  t.dtype.bits = bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  t.strides = strides;
  return t;
}

static void *run(void *argument) {
  uint32_t r = *(const uint32_t *)argument;
  cpattn_rank *rank = NULL;
  TRY(cpattn_rank_create(transports[r], NULL, &rank));

  cpattn_share share = CPATTN_SHARE_INIT;
  TRY(cpattn_plan_share(plan, r, &share));
  int64_t n = (int64_t)share.q_tokens;
  int64_t whole[] = {all.tokens, HEADS, DIM}, mine[] = {n, HEADS, DIM};

  /* This rank's memory: inputs, outputs, workspace. */
  size_t row_bytes = ROW * sizeof(uint16_t), bytes = (size_t)n * row_bytes;
  char *memory = malloc(8 * bytes + (size_t)n * HEADS * sizeof(float));
  uint64_t forward = 0, backward = 0;
  TRY(cpattn_plan_workspace(plan, r, CPATTN_FORWARD, &forward));
  TRY(cpattn_plan_workspace(plan, r, CPATTN_BACKWARD, &backward));
  size_t workspace_bytes = (size_t)(forward > backward ? forward : backward);
  void *workspace = NULL;
  if (!memory || posix_memalign(&workspace, CPATTN_WORKSPACE_ALIGNMENT, workspace_bytes)) return (void *)1;
  TRY(cpattn_rank_lend_workspace(rank, workspace, workspace_bytes));

  uint16_t *wholes[] = {all.q, all.k, all.v, all.d_o, all.o, all.dq, all.dk, all.dv};
  cpattn_tensor t[8], w[8];
  for (int i = 0; i < 8; i++) {
    w[i] = tensor(wholes[i], 16, 3, whole, NULL);
    t[i] = tensor(memory + (size_t)i * bytes, 16, 3, mine, NULL);
    if (i < 4) TRY(cpattn_plan_shard(plan, i == 1 || i == 2 ? CPATTN_K : CPATTN_Q, r, &w[i], &t[i]));
  }
  /* lse is [heads, tokens]; these strides lay it out by token, as the file has it. */
  int64_t lse_shape[] = {HEADS, n}, by_token[] = {1, HEADS};
  float *lse_data = (float *)(void *)(memory + 8 * bytes);
  cpattn_tensor lse = tensor(lse_data, 32, 2, lse_shape, by_token);

  cpattn_forward_args f = CPATTN_FORWARD_ARGS_INIT;
  f.q = &t[0];
  f.k = &t[1];
  f.v = &t[2];
  f.o = &t[4];
  f.lse = &lse;
  TRY(cpattn_forward(rank, plan, &f));

  cpattn_backward_args b = CPATTN_BACKWARD_ARGS_INIT;
  b.q = &t[0];
  b.k = &t[1];
  b.v = &t[2];
  b.d_o = &t[3];
  b.o = &t[4];
  b.lse = &lse;
  b.dq = &t[5];
  b.dk = &t[6];
  b.dv = &t[7];
  TRY(cpattn_backward(rank, plan, &b));

  for (int i = 4; i < 8; i++) TRY(cpattn_plan_unshard(plan, i >= 6 ? CPATTN_K : CPATTN_Q, r, &t[i], &w[i]));
  int64_t lse_whole[] = {all.tokens, HEADS}, lse_mine[] = {n, HEADS};
  cpattn_tensor lse_from = tensor(lse_data, 32, 2, lse_mine, NULL), lse_to = tensor(all.lse, 32, 2, lse_whole, NULL);
  TRY(cpattn_plan_unshard(plan, CPATTN_Q, r, &lse_from, &lse_to));

  TRY(cpattn_rank_destroy(rank));
  free(workspace);
  free(memory);
  return NULL;
}

static double from_f16(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double x = exponent == 0 ? ldexp(fraction, -24) : exponent == 31 ? NAN : ldexp(fraction + 1024, exponent - 25);
  return h >> 15 ? -x : x;
}

/* Root mean square of the error over that of the reference. Rounding the result to f16 alone gives about 2.8e-4. Units that
   multiply f16 tiles (AMX-FP16, tensor cores) take the weights and the scores' gradients in f16 too: two more roundings of
   that size in dq and dk, measured 4.2e-4. Anything summed in f16 or bf16 would be at 2e-3 or above. */
static int compare(const safetensors *s, const char *name, const uint16_t *got) {
  size_t bytes, n = (size_t)all.tokens * ROW;
  const float *want = safetensors_find(s, name, &bytes);
  if (!want || bytes != n * sizeof(float)) return fprintf(stderr, "no %s in the file\n", name), 0;
  double error = 0, size = 0;
  for (size_t i = 0; i < n; i++) {
    float x;
    memcpy(&x, want + i, sizeof x);
    error += (from_f16(got[i]) - x) * (from_f16(got[i]) - x);
    size += (double)x * x;
  }
  double relative = sqrt(error / size);
  printf("%-10s relative RMS error %.2e\n", name, relative);
  return relative <= 6e-4; /* false for a NaN */
}

int main(int argc, char **argv) {
  safetensors s;
  if (argc != 2 || !safetensors_open(&s, argv[1])) return fprintf(stderr, "usage: main_job FILE.safetensors\n"), 2;
  const char *names[] = {"q", "k", "v", "do"};
  uint16_t **inputs[] = {&all.q, &all.k, &all.v, &all.d_o}, **outputs[] = {&all.o, &all.dq, &all.dk, &all.dv};
  size_t bytes = 0, cu_bytes = 0;
  for (int i = 0; i < 4; i++) {
    const void *found = safetensors_find(&s, names[i], &bytes);
    /* Copies: entries of the file are not aligned. 0xff: a row that nothing writes stays a NaN. */
    if (!found || !(*inputs[i] = malloc(bytes)) || !(*outputs[i] = malloc(bytes))) return 2;
    memcpy(*inputs[i], found, bytes);
    memset(*outputs[i], 0xff, bytes);
  }
  all.tokens = (int64_t)(bytes / (ROW * sizeof(uint16_t)));
  all.lse = malloc((size_t)all.tokens * HEADS * sizeof(float));
  const void *cu_found = safetensors_find(&s, "cu_seqlens", &cu_bytes);
  int32_t *cu_seqlens = malloc(cu_bytes);
  if (!cu_found || !cu_seqlens || !all.lse) return 2;
  memcpy(cu_seqlens, cu_found, cu_bytes);

  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = cu_seqlens;
  problem.documents = cu_bytes / sizeof(int32_t) - 1;
  problem.heads = HEADS;
  problem.head_dim = DIM;
  problem.dtype = CPATTN_F16;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = WORLD;
  options.ulysses = ULYSSES;
  options.ring = RING;
  options.layout = CPATTN_LAYOUT_ZIGZAG;
  if (!check(cpattn_plan_create(&problem, &options, &plan), "plan")) return 1;
  if (!check(cpattn_plan_verify(plan), "verify")) return 1;
  if (!check(cpattn_local_group(WORLD, 60000, transports), "group")) return 1;

  pthread_t threads[WORLD];
  uint32_t ranks[WORLD];
  int ok = 1;
  for (uint32_t r = 0; r < WORLD; r++) {
    ranks[r] = r;
    if (pthread_create(&threads[r], NULL, run, &ranks[r])) return 2;
  }
  for (int r = 0; r < WORLD; r++) {
    void *failed;
    pthread_join(threads[r], &failed);
    ok = ok && !failed;
  }
  if (!ok) return 1;

  ok &= compare(&s, "o_causal", all.o);
  ok &= compare(&s, "dq_causal", all.dq);
  ok &= compare(&s, "dk_causal", all.dk);
  ok &= compare(&s, "dv_causal", all.dv);
  const char *lse_want = safetensors_find(&s, "lse_causal", &bytes);
  double worst = 0;
  for (size_t i = 0; lse_want && i < (size_t)all.tokens * HEADS; i++) {
    float x;
    memcpy(&x, lse_want + i * sizeof x, sizeof x);
    double e = fabs(all.lse[i] - (double)x);
    if (!(e <= worst)) worst = e;
  }
  printf("lse_causal largest error %.2e\n", worst);
  ok &= lse_want && worst <= 1e-5;

  for (int i = 0; i < 4; i++) free(*inputs[i]), free(*outputs[i]);
  free(all.lse);
  free(cu_seqlens);
  free(s.file);
  cpattn_plan_destroy(plan);
  printf(ok ? "ok: %d ranks agree with the references\n" : "FAILED on %d ranks\n", WORLD);
  return ok ? 0 : 1;
}
