/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What servers need: k and v in pages, and partial results of two ranks merged. Each rank, a thread, has half of the keys of
 * one sequence, attends to them from its pages, and the parts are merged; one rank with all keys gives the expected result.
 */
#include <cpattn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

#define RANKS 2
#define KEYS 10 /* of each rank */
#define HEADS 4
#define DIM 8
#define PAGE 4
#define PAGES 5

static cpattn_transport *transports[RANKS];
static cpattn_plan *merge, *merge_with_sinks;
static float expected[HEADS * DIM], expected_lse[HEADS];
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
#define LOCKED(check) (pthread_mutex_lock(&turn), (check), pthread_mutex_unlock(&turn))

static float number(int i, double step) { return (float)sin(i * step); }

static cpattn_tensor tensor(float *data, int32_t ndim, int64_t *shape) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
  return t;
}

/* A plan of queries that see all keys, with so many sinks for each head. */
static cpattn_plan *plan_of(const int32_t *q, const int32_t *k, uint32_t world, int32_t sinks) {
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.documents = 1, problem.cu_seqlens_q = q, problem.cu_seqlens_k = k;
  problem.heads = problem.kv_heads = HEADS, problem.head_dim = problem.value_dim = DIM, problem.dtype = CPATTN_F32;
  problem.window_right = CPATTN_UNLIMITED, problem.sinks = sinks;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = world, options.ulysses = 1, options.ring = world, options.layout = CPATTN_LAYOUT_CONTIGUOUS;
  cpattn_plan *plan = NULL;
  LOCKED(OK(cpattn_plan_create(&problem, &options, &plan)));
  return plan;
}

static int32_t over_pages(cpattn_rank *rank, const cpattn_plan *plan, cpattn_forward_args args, const int32_t *table,
                          size_t documents, size_t each, size_t size, size_t stride) {
  cpattn_keys keys = CPATTN_KEYS_INIT;
  keys.kind = CPATTN_KEYS_PAGES, keys.block_table = table, keys.documents = documents;
  keys.pages_per_document = each, keys.page_size = size, keys.page_stride = stride;
  args.keys = &keys;
  return cpattn_forward(rank, plan, &args);
}

static int32_t combine(cpattn_rank *rank, const cpattn_plan *plan, int32_t to, const cpattn_tensor *partial_o,
                       const cpattn_tensor *partial_lse, const cpattn_tensor *sinks, const cpattn_tensor *o,
                       const cpattn_tensor *lse) {
  cpattn_combine_args args = CPATTN_COMBINE_ARGS_INIT;
  args.partial_o = partial_o, args.partial_lse = partial_lse, args.sinks = sinks, args.o = o, args.lse = lse;
  return cpattn_rank_combine(rank, plan, to, &args);
}

static void attend(cpattn_rank *rank, int first, int keys, float *o, float *lse, int paged) {
  const int32_t cu_q[] = {0, 1}, cu_k[] = {0, keys};
  cpattn_plan *plan = plan_of(cu_q, cu_k, 1, 0);
  static const int32_t table[] = {3, 0, 4, -1};
  int64_t one[] = {1, HEADS, DIM}, heads[] = {HEADS, 1}, rows[] = {paged ? PAGE * PAGES : keys, HEADS, DIM};
  float q[HEADS * DIM];
  for (int i = 0; i < HEADS * DIM; i++) q[i] = number(i, 0.3);
  size_t n = (size_t)rows[0] * HEADS * DIM;
  float *k = malloc(n * sizeof *k), *v = malloc(n * sizeof *v);
  for (size_t i = 0; i < n; i++) k[i] = v[i] = NAN;
  for (int row = 0; row < keys; row++) {
    int to = paged ? table[row / PAGE] * PAGE + row % PAGE : row;
    for (int i = 0; i < HEADS * DIM; i++) {
      k[to * HEADS * DIM + i] = number((first + row) * HEADS * DIM + i, 0.7);
      v[to * HEADS * DIM + i] = number((first + row) * HEADS * DIM + i, 0.11);
    }
  }
  cpattn_tensor tq = tensor(q, 3, one), tk = tensor(k, 3, rows), tv = tensor(v, 3, rows), to = tensor(o, 3, one);
  cpattn_tensor tl = tensor(lse, 2, heads);
  cpattn_forward_args args = CPATTN_FORWARD_ARGS_INIT;
  args.q = &tq, args.k = &tk, args.v = &tv, args.o = &to, args.lse = &tl;
  if (paged) {
    LOCKED(REFUSED(CPATTN_INVALID, "documents is 2", over_pages(rank, plan, args, table, 2, 4, PAGE, PAGE)));
    LOCKED(REFUSED(CPATTN_INVALID, "block_table is NULL", over_pages(rank, plan, args, NULL, 1, 4, PAGE, PAGE)));
    LOCKED(REFUSED(CPATTN_INVALID, "page_size is 0", over_pages(rank, plan, args, table, 1, 4, 0, PAGE)));
    LOCKED(REFUSED(CPATTN_INVALID, "block_table[0][0] is 3",
                   over_pages(rank, plan, args, table, 1, 4, PAGE, 2 * PAGE)));
    LOCKED(OK(over_pages(rank, plan, args, table, 1, 4, PAGE, PAGE)));
  } else {
    LOCKED(OK(cpattn_forward(rank, plan, &args)));
  }
  LOCKED(OK(cpattn_plan_destroy(plan)));
  free(k), free(v);
}

static void *run(void *argument) {
  int number_of_rank = (int)(uintptr_t)argument;
  cpattn_rank *rank = NULL, *alone = NULL;
  cpattn_transport *own = NULL;
  LOCKED(OK(cpattn_rank_create(transports[number_of_rank], NULL, &rank)));
  LOCKED(OK(cpattn_local_group(1, 60000, &own)));
  LOCKED(OK(cpattn_rank_create(own, NULL, &alone)));
  float o[HEADS * DIM], lse[HEADS], all[HEADS * DIM], all_lse[HEADS], half[HEADS * DIM / 2], half_lse[HEADS / 2];
  attend(alone, number_of_rank * KEYS, KEYS, o, lse, 1);
  int64_t one[] = {1, HEADS, DIM}, heads[] = {HEADS, 1}, part[] = {1, HEADS / 2, DIM}, part_heads[] = {HEADS / 2, 1};
  cpattn_tensor to = tensor(o, 3, one), tl = tensor(lse, 2, heads);
  cpattn_tensor ta = tensor(all, 3, one), tal = tensor(all_lse, 2, heads);
  cpattn_tensor th = tensor(half, 3, part), thl = tensor(half_lse, 2, part_heads);
  LOCKED(REFUSED(CPATTN_INVALID, "to is 3", combine(rank, merge, 3, &to, &tl, NULL, &ta, &tal)));
  LOCKED(REFUSED(CPATTN_INVALID, "o.heads is 4",
                 combine(rank, merge, CPATTN_COMBINE_TO_HEADS, &to, &tl, NULL, &ta, &tal)));
  LOCKED(REFUSED(CPATTN_INVALID, "sinks", combine(rank, merge, 0, &to, &tl, &tl, &ta, &tal)));
  cpattn_purpose purpose = CPATTN_PURPOSE_INIT;
  purpose.to = CPATTN_COMBINE_TO_ALL, purpose.dtype = CPATTN_F32;
  LOCKED(OK(cpattn_rank_prepare(rank, merge, CPATTN_COMBINE, &purpose)));
  purpose.dim = DIM;
  LOCKED(REFUSED(CPATTN_INVALID, "purpose.dim is given, expected 0 in CPATTN_COMBINE",
                 cpattn_rank_prepare(rank, merge, CPATTN_COMBINE, &purpose)));
  LOCKED(REFUSED(CPATTN_INVALID, "purpose is NULL", cpattn_rank_prepare(rank, merge, CPATTN_COMBINE, NULL)));
  LOCKED(REFUSED(CPATTN_INVALID, "purpose is given, expected NULL: CPATTN_FORWARD is of the plan alone",
                 cpattn_rank_prepare(rank, merge, CPATTN_FORWARD, &purpose)));
  LOCKED(REFUSED(CPATTN_INVALID, "direction is 5", cpattn_rank_prepare(rank, merge, 5, NULL)));
  int32_t first = combine(rank, merge, CPATTN_COMBINE_TO_ALL, &to, &tl, NULL, &ta, &tal);
  LOCKED(OK(first));
  int32_t second = combine(rank, merge, CPATTN_COMBINE_TO_HEADS, &to, &tl, NULL, &th, &thl);
  LOCKED(OK(second));
  /* To base 2: parts, and what is merged. */
  float lse2[HEADS], all2[HEADS * DIM], all_lse2[HEADS];
  for (int h = 0; h < HEADS; h++) lse2[h] = lse[h] / (float)log(2);
  cpattn_tensor tl2 = tensor(lse2, 2, heads), ta2 = tensor(all2, 3, one), tal2 = tensor(all_lse2, 2, heads);
  cpattn_combine_args base2 = CPATTN_COMBINE_ARGS_INIT;
  base2.partial_o = &to, base2.partial_lse = &tl2, base2.o = &ta2, base2.lse = &tal2, base2.lse_base = 2;
  LOCKED(REFUSED(CPATTN_INVALID, "lse_base is 2", cpattn_rank_combine(rank, merge, CPATTN_COMBINE_TO_ALL, &base2)));
  base2.lse_base = CPATTN_LSE_BASE_2;
  int32_t in_base2 = cpattn_rank_combine(rank, merge, CPATTN_COMBINE_TO_ALL, &base2);
  LOCKED(OK(in_base2));
  for (int i = 0; i < HEADS * DIM; i++) LOCKED(failures += !(fabsf(all2[i] - all[i]) < 1e-5f));
  for (int h = 0; h < HEADS; h++) LOCKED(failures += !(fabsf(all_lse2[h] * (float)log(2) - all_lse[h]) < 1e-5f));
  for (int i = 0; i < HEADS * DIM; i++) LOCKED(failures += !(fabsf(all[i] - expected[i]) < 1e-6f));
  for (int h = 0; h < HEADS; h++) LOCKED(failures += !(fabsf(all_lse[h] - expected_lse[h]) < 1e-6f));
  LOCKED(failures += memcmp(half, all + number_of_rank * HEADS / 2 * DIM, sizeof half) != 0);
  LOCKED(failures += memcmp(half_lse, all_lse + number_of_rank * HEADS / 2, sizeof half_lse) != 0);
  float sinks[HEADS][2], others[HEADS * DIM];
  for (int h = 0; h < HEADS; h++) sinks[h][0] = (float)h - 1, sinks[h][1] = h ? 0.5f : -INFINITY;
  int64_t pairs[] = {HEADS, 2};
  cpattn_tensor ts = tensor(sinks[0], 2, pairs), to2 = tensor(others, 3, one);
  int32_t third = combine(rank, merge_with_sinks, CPATTN_COMBINE_TO_ALL, &to, &tl, &ts, &to2, &tal);
  LOCKED(OK(third));
  for (int h = 0; h < HEADS; h++) {
    double with = log(exp(expected_lse[h]) + exp(sinks[h][0]) + exp(sinks[h][1])), factor = exp(expected_lse[h] - with);
    LOCKED(failures += !(fabs(all_lse[h] - with) < 1e-6));
    for (int d = h * DIM; d < (h + 1) * DIM; d++) LOCKED(failures += !(fabs(others[d] - factor * expected[d]) < 1e-6));
  }
  LOCKED(OK(cpattn_rank_destroy(rank)));
  LOCKED(OK(cpattn_rank_destroy(alone)));
  return NULL;
}

int main(void) {
  const int32_t cu_q[] = {0, 1};
  merge = plan_of(cu_q, NULL, RANKS, 0), merge_with_sinks = plan_of(cu_q, NULL, RANKS, 2);
  for (int32_t to = 0; to < 3; to++) OK(cpattn_plan_verify_combine(merge, to, CPATTN_BF16));
  REFUSED(CPATTN_INVALID, "partial is 9", cpattn_plan_verify_combine(merge, 0, 9));
  REFUSED(CPATTN_INVALID, "partial_o.dtype is f64", cpattn_plan_verify_combine(merge, 0, CPATTN_F64));
  uint64_t bytes = 0;
  OK(cpattn_plan_combine_workspace(merge, 0, CPATTN_COMBINE_TO_ALL, CPATTN_F32, &bytes));
  failures += bytes < 2 * HEADS * DIM * sizeof(float);
  cpattn_schedule *schedule = NULL;
  OK(cpattn_schedule_create_combine(merge, 1, CPATTN_COMBINE_TO_ALL, CPATTN_F32, &schedule));
  cpattn_schedule_info info = CPATTN_SCHEDULE_INFO_INIT;
  OK(cpattn_schedule_describe(schedule, &info));
  failures += info.direction != CPATTN_COMBINE || info.op_count != 3;
  cpattn_op op = CPATTN_OP_INIT;
  OK(cpattn_schedule_op(schedule, 2, &op));
  failures += op.kind != CPATTN_OP_COMBINE || op.sum_count != 2 || op.source_count != 2 * RANKS;
  OK(cpattn_schedule_destroy(schedule));
  cpattn_transport *own = NULL;
  cpattn_rank *alone = NULL;
  OK(cpattn_local_group(1, 60000, &own));
  OK(cpattn_rank_create(own, NULL, &alone));
  attend(alone, 0, RANKS * KEYS, expected, expected_lse, 0);
  OK(cpattn_rank_destroy(alone));
  OK(cpattn_local_group(RANKS, 60000, transports));
  pthread_t threads[RANKS];
  for (uintptr_t r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run, (void *)r);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  OK(cpattn_plan_destroy(merge));
  OK(cpattn_plan_destroy(merge_with_sinks));
  return failures != 0;
}
