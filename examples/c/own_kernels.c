/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A kernel of the program's own computes attention in plans of the library: loops in f32 over packed rows, forward and
 * backward. Two ranks (threads) on a ring run a packed batch with a window, first with the library's kernels, then with the
 * program's; results are compared. Then what a kernel does not honour is refused, and one that fails ends the run on both ranks.
 *
 * From the repository's root:
 *
 *   capi/build && cc -std=c99 examples/c/own_kernels.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lpthread -lm -o target/own_kernels && target/own_kernels
 */
#define _POSIX_C_SOURCE 200112L
#include <cpattn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 2, TOKENS = 90, HEADS = 4, KV_HEADS = 2, DIM = 8, GROUP = HEADS / KV_HEADS };

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

static const float *row_of(const void *x, int64_t row, int64_t heads, int64_t head, int64_t dim) {
  return (const float *)x + (row * heads + head) * dim;
}

static float dot(const float *a, const float *b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

static void add(const float *to, float by, const float *from, int64_t n) {
  float *x = (float *)to;
  for (int64_t i = 0; i < n; i++) x[i] += by * from[i];
}

/* The keys that row r of sq sees of sk, from *begin to *end: limits count from the bottom-right corner. */
static void seen(const cpattn_kernel_call *c, int64_t r, int64_t sq, int64_t sk, int64_t *begin, int64_t *end) {
  int64_t here = r + sk - sq;
  *begin = c->window_left < 0 || here < c->window_left ? 0 : here - c->window_left;
  *end = c->window_right < 0 || here + c->window_right + 1 > sk ? sk : here + c->window_right + 1;
}

/* Calls `each` for every sequence, row and head of a call. */
static void for_rows(const cpattn_kernel_call *c, void (*each)(const cpattn_kernel_call *, int64_t q, int64_t k, int64_t n, int64_t head)) {
  for (uint32_t i = 0; i < c->sequences; i++)
    for (int64_t q = c->cu_seqlens_q[i]; q < c->cu_seqlens_q[i + 1]; q++)
      for (uint32_t head = 0; head < c->heads; head++) {
        int64_t begin, end, k = c->cu_seqlens_k[i];
        seen(c, q - c->cu_seqlens_q[i], c->cu_seqlens_q[i + 1] - c->cu_seqlens_q[i], c->cu_seqlens_k[i + 1] - k, &begin, &end);
        each(c, q, k + begin, end - begin, head);
      }
}

static float score(const cpattn_kernel_call *c, int64_t q, int64_t k, int64_t head) {
  int64_t kv = head / (c->heads / c->kv_heads);
  return (float)c->scale * dot(row_of(c->q, q, c->heads, head, c->head_dim), row_of(c->k, k, c->kv_heads, kv, c->head_dim), c->head_dim);
}

static void forward_row(const cpattn_kernel_call *c, int64_t q, int64_t k, int64_t n, int64_t head) {
  int64_t rows = c->cu_seqlens_q[c->sequences], kv = head / (c->heads / c->kv_heads), dim = c->value_dim;
  float most = -INFINITY, total = 0, *o = (float *)row_of(c->o, q, c->heads, head, dim);
  for (int64_t j = k; j < k + n; j++) most = fmaxf(most, score(c, q, j, head));
  for (int64_t i = 0; i < dim; i++) o[i] = 0;
  for (int64_t j = k; j < k + n; j++) {
    float p = expf(score(c, q, j, head) - most);
    add(o, p, row_of(c->v, j, c->kv_heads, kv, dim), dim);
    total += p;
  }
  for (int64_t i = 0; i < dim; i++) o[i] /= total;
  ((float *)c->lse)[head * rows + q] = most + logf(total);
}

static void backward_row(const cpattn_kernel_call *c, int64_t q, int64_t k, int64_t n, int64_t head) {
  int64_t rows = c->cu_seqlens_q[c->sequences], kv = head / (c->heads / c->kv_heads);
  float lse = ((const float *)c->lse)[head * rows + q], delta = ((const float *)c->delta)[head * rows + q];
  const float *d_o = row_of(c->d_o, q, c->heads, head, c->value_dim);
  for (int64_t j = k; j < k + n; j++) {
    float p = expf(score(c, q, j, head) - lse);
    float ds = (float)c->scale * p * (dot(d_o, row_of(c->v, j, c->kv_heads, kv, c->value_dim), c->value_dim) - delta);
    add(row_of(c->dq, q, c->heads, head, c->head_dim), ds, row_of(c->k, j, c->kv_heads, kv, c->head_dim), c->head_dim);
    add(row_of(c->dk, j, c->kv_heads, kv, c->head_dim), ds, row_of(c->q, q, c->heads, head, c->head_dim), c->head_dim);
    add(row_of(c->dv, j, c->kv_heads, kv, c->value_dim), p, d_o, c->value_dim);
  }
}

/* The context: how often a kernel was called, and the call that fails. */
typedef struct {
  int calls;
  int failing;
  int released;
} counts;

static int32_t enter(counts *n, char *text) {
  if (++n->calls != n->failing) return 0;
  snprintf(text, CPATTN_KERNEL_TEXT, "call %d fails, on purpose", n->calls);
  return 5;
}

static int32_t forward(void *context, const cpattn_kernel_call *c, char *text) {
  int32_t status = enter(context, text);
  if (status == 0) for_rows(c, forward_row);
  return status;
}

static int32_t backward(void *context, const cpattn_kernel_call *c, char *text) {
  int32_t status = enter(context, text);
  if (status != 0) return status;
  size_t rows = (size_t)c->cu_seqlens_q[c->sequences], keys = (size_t)c->cu_seqlens_k[c->sequences];
  memset(c->dq, 0, rows * c->heads * c->head_dim * sizeof(float));
  memset(c->dk, 0, keys * c->kv_heads * c->head_dim * sizeof(float));
  memset(c->dv, 0, keys * c->kv_heads * c->value_dim * sizeof(float));
  for_rows(c, backward_row);
  return 0;
}

static void released(void *context) { ((counts *)context)->released++; }

static cpattn_kernel_table table_of(counts *n) {
  cpattn_kernel_table table = CPATTN_KERNEL_TABLE_INIT;
  table.context = n;
  table.name = "loops";
  table.dtypes = 1 << CPATTN_F32;
  table.head_dim = 256;
  table.honours = CPATTN_KERNEL_WINDOWS | CPATTN_KERNEL_GROUPS;
  table.forward = forward;
  table.backward = backward;
  table.release = released;
  return table;
}

/* ---- Two ranks --------------------------------------------------------------------------------------------------- */

static void must(int32_t status) {
  if (status == CPATTN_OK) return;
  fprintf(stderr, "%s: %s\n", cpattn_status_name(status), cpattn_last_error());
  exit(1);
}

static cpattn_tensor tensor(float *data, int32_t ndim, int64_t *shape) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype.code = 2; /* float */
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape; /* strides NULL: compact */
  return t;
}

/* One rank's run: its results, o, lse, dq, dk and dv one after another, or the message of its failure. */
typedef struct {
  cpattn_plan *plan;
  cpattn_transport *transport;
  uint32_t number;
  const cpattn_kernel_table *kernel;
  float results[TOKENS * (3 * HEADS * DIM + 2 * KV_HEADS * DIM + HEADS)];
  int32_t status;
  char message[512];
} job;

static int32_t attention(job *j, cpattn_rank *rank) {
  static const float steps[4] = {0.37f, 0.71f, 0.13f, 0.53f};
  cpattn_share share = CPATTN_SHARE_INIT;
  int64_t tokens[TOKENS];
  must(cpattn_plan_share(j->plan, j->number, &share));
  must(cpattn_plan_tokens(j->plan, CPATTN_Q, j->number, tokens, TOKENS));
  int64_t n = (int64_t)share.q_tokens;
  static const int64_t heads[4] = {HEADS, KV_HEADS, KV_HEADS, HEADS};
  float *in[4];
  for (int t = 0; t < 4; t++) {
    int64_t row = heads[t] * DIM;
    in[t] = malloc((size_t)(TOKENS * row) * sizeof(float));
    for (int64_t i = 0; i < n * row; i++) in[t][i] = sinf((float)(tokens[i / row] * row + i % row) * steps[t]);
  }
  int64_t of_q[] = {n, HEADS, DIM}, of_k[] = {n, KV_HEADS, DIM}, head_major[] = {HEADS, n};
  float *o = j->results, *lse = o + n * HEADS * DIM, *dq = lse + n * HEADS, *dk = dq + n * HEADS * DIM, *dv = dk + n * KV_HEADS * DIM;
  cpattn_tensor q = tensor(in[0], 3, of_q), k = tensor(in[1], 3, of_k), v = tensor(in[2], 3, of_k), d_o = tensor(in[3], 3, of_q);
  cpattn_tensor to = tensor(o, 3, of_q), tl = tensor(lse, 2, head_major);
  cpattn_tensor tq = tensor(dq, 3, of_q), tk = tensor(dk, 3, of_k), tv = tensor(dv, 3, of_k);
  cpattn_forward_args fw = CPATTN_FORWARD_ARGS_INIT;
  fw.q = &q, fw.k = &k, fw.v = &v, fw.o = &to, fw.lse = &tl;
  cpattn_backward_args bw = CPATTN_BACKWARD_ARGS_INIT;
  bw.q = &q, bw.k = &k, bw.v = &v, bw.o = &to, bw.lse = &tl, bw.d_o = &d_o, bw.dq = &tq, bw.dk = &tk, bw.dv = &tv;
  int32_t status = cpattn_forward(rank, j->plan, &fw);
  if (status == CPATTN_OK) status = cpattn_backward(rank, j->plan, &bw);
  for (int t = 0; t < 4; t++) free(in[t]);
  return status;
}

static void *run(void *argument) {
  job *j = argument;
  cpattn_rank *rank = NULL;
  cpattn_rank_options options = CPATTN_RANK_OPTIONS_INIT;
  options.kernel = j->kernel;
  must(cpattn_rank_create(j->transport, &options, &rank));
  j->status = attention(j, rank);
  if (j->status != CPATTN_OK) snprintf(j->message, sizeof j->message, "%s", cpattn_last_error());
  must(cpattn_rank_destroy(rank));
  return NULL;
}

/* Runs the plan on both ranks, with the library's kernels or those of the tables. */
static void run_all(cpattn_plan *plan, const cpattn_kernel_table *tables, job *jobs) {
  cpattn_transport *transports[WORLD];
  pthread_t threads[WORLD];
  must(cpattn_local_group(WORLD, 20000, transports));
  for (uint32_t r = 0; r < WORLD; r++) {
    memset(&jobs[r], 0, sizeof jobs[r]);
    jobs[r].plan = plan;
    jobs[r].transport = transports[r];
    jobs[r].number = r;
    jobs[r].kernel = tables ? &tables[r] : NULL;
    if (pthread_create(&threads[r], NULL, run, &jobs[r])) exit(1);
  }
  for (int r = 0; r < WORLD; r++) pthread_join(threads[r], NULL);
}

static int failures;

static void expect(int holds, const char *what) {
  if (!holds) fprintf(stderr, "wrong: %s\n", what);
  failures += !holds;
}

int main(void) {
  int32_t documents[] = {0, 60, 67, TOKENS};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents;
  problem.documents = 3;
  problem.heads = HEADS;
  problem.kv_heads = KV_HEADS;
  problem.head_dim = DIM;
  problem.window_left = 30;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.ring = WORLD;
  options.world = WORLD;
  options.layout = CPATTN_LAYOUT_ZIGZAG;
  cpattn_plan *plan = NULL, *capped = NULL;
  must(cpattn_plan_create(&problem, &options, &plan));
  problem.softcap = 20;
  must(cpattn_plan_create(&problem, &options, &capped));

  static job library[WORLD], own[WORLD];
  counts n[WORLD] = {{0, 0, 0}};
  cpattn_kernel_table tables[WORLD];
  for (int r = 0; r < WORLD; r++) tables[r] = table_of(&n[r]);
  run_all(plan, NULL, library);
  run_all(plan, tables, own);
  float apart = 0;
  for (int r = 0; r < WORLD; r++) {
    expect(library[r].status == CPATTN_OK && own[r].status == CPATTN_OK, own[r].message);
    for (size_t i = 0; i < sizeof own[r].results / sizeof(float); i++) {
      float difference = fabsf(own[r].results[i] - library[r].results[i]);
      if (!(difference <= apart)) apart = difference; /* a NaN stays */
    }
    expect(n[r].calls > 2 && n[r].released == 1, "calls and a release");
  }
  printf("calls of rank 0: %d; largest difference from the library's kernels: %.1e\n", n[0].calls, apart);
  expect(apart < 1e-5f, "results");

  run_all(capped, tables, own);
  printf("refused: %s\n", own[1].message);
  for (int r = 0; r < WORLD; r++)
    expect(own[r].status == CPATTN_UNSUPPORTED && strstr(own[r].message, "softcap 20 with kernel \"loops\""), "a softcap is refused");

  n[1].failing = n[1].calls + 2;
  run_all(plan, tables, own);
  printf("failed: %s\n", own[1].message);
  expect(own[1].status == CPATTN_DEVICE && strstr(own[1].message, "on purpose") && strstr(own[1].message, "rank 1, attend"), "the error names rank and operation");
  expect(own[0].status == CPATTN_PEER, "the other rank is told");

  /* A table that is wrong, and the options that it does not go with. */
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  cpattn_rank_options wrong = CPATTN_RANK_OPTIONS_INIT;
  must(cpattn_local_group(1, 1000, &transport));
  for (int i = 0; i < 7; i++) {
    cpattn_kernel_table table = table_of(&n[0]);
    static const char *words[] = {"kernel.forward is NULL", "kernel.name is NULL", "kernel.dtypes is 0", "kernel.head_dim is 0",
                                  "kernel.honours is 64", "kernel.struct_size is 8", "workers is 2, expected 1 with options.kernel"};
    wrong.kernel = &table;
    if (i == 0) table.forward = NULL;
    if (i == 1) table.name = NULL;
    if (i == 2) table.dtypes = 0;
    if (i == 3) table.head_dim = 0;
    if (i == 4) table.honours = 64;
    if (i == 5) table.struct_size = 8;
    if (i == 6) wrong.workers = 2;
    int before = n[0].released;
    expect(cpattn_rank_create(transport, &wrong, &rank) == CPATTN_INVALID && strstr(cpattn_last_error(), words[i]), words[i]);
    expect(n[0].released == before, "a refused table is not released");
  }
  must(cpattn_transport_destroy(transport));
  must(cpattn_plan_destroy(plan));
  must(cpattn_plan_destroy(capped));
  return failures != 0;
}
