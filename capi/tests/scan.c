/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * States passed on along documents. Each rank, a thread, has a segment of the first document, and the last one also the second
 * document: it halves the state and adds its own number. Then the same as matrices, in every form and in reverse.
 */
#include <cpattn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "expect.h"

#define RANKS 3

static cpattn_transport *transports[RANKS];
static cpattn_plan *plan;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
#define LOCKED(check) (pthread_mutex_lock(&turn), (check), pthread_mutex_unlock(&turn))

static cpattn_tensor tensor(float *data, int64_t *shape) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, 3, {2, 32, 1}, shape, NULL, 0};
  return t;
}

static cpattn_scan numbers(void) {
  cpattn_scan scan = CPATTN_SCAN_INIT;
  scan.heads = 2, scan.key_dim = 1, scan.value_dim = 1;
  return scan;
}

static void *run(void *number) {
  int r = (int)(uintptr_t)number;
  cpattn_rank *rank = NULL;
  LOCKED(OK(cpattn_rank_create(transports[r], NULL, &rank)));
  /* Rows that nobody reads are NaN: the first decay and the last state of the document, and all of a document of one segment. */
  float decay[] = {r == 0 ? NAN : 0.5f, r == 0 ? NAN : 2.0f, NAN, NAN}, state[] = {r == 2 ? NAN : r + 1, 1, NAN, NAN};
  float found[4];
  int64_t shape[] = {r == 2 ? 2 : 1, 2, 1};
  cpattn_tensor d = tensor(decay, shape), s = tensor(state, shape), to = tensor(found, shape);
  const float wanted[RANKS][2] = {{0, 0}, {1, 1}, {2.5f, 3}};
  for (int32_t matrix = 0; matrix < 2; matrix++) {
    for (int32_t form = 0; form < 4; form++) {
      cpattn_scan scan = numbers();
      scan.decay = matrix ? CPATTN_DECAY_MATRIX : CPATTN_DECAY_DIAGONAL, scan.form = form;
      found[0] = found[1] = found[2] = found[3] = NAN;
      int32_t status = cpattn_rank_scan(rank, plan, &scan, &d, &s, &to);
      LOCKED(OK(status));
      LOCKED(failures += found[0] != wanted[r][0] || found[1] != wanted[r][1]);
      if (r == 2) LOCKED(failures += found[2] != 0 || found[3] != 0);
    }
  }
  cpattn_scan reverse = numbers();
  reverse.reverse = 1;
  float back[] = {r == 2 ? NAN : 0.5f, 2, NAN, NAN}, gradient[] = {r == 0 ? NAN : 4.0f * r, 1, NAN, NAN};
  if (r == 2) back[1] = NAN;
  d = tensor(back, shape), s = tensor(gradient, shape);
  int32_t status = cpattn_rank_scan(rank, plan, &reverse, &d, &s, &to);
  LOCKED(OK(status));
  LOCKED(failures += found[0] != (r == 0 ? 8 : r == 1 ? 8 : 0) || found[1] != (r == 0 ? 3 : r == 1 ? 1 : 0));
  cpattn_scan wide = numbers();
  wide.value_dim = 4;
  LOCKED(REFUSED(CPATTN_INVALID, "state.dim is 1, expected 4", cpattn_rank_scan(rank, plan, &wide, &d, &s, &to)));
  LOCKED(REFUSED(CPATTN_INVALID, "state is NULL", cpattn_rank_scan(rank, plan, &reverse, &d, NULL, &to)));
  LOCKED(REFUSED(CPATTN_INVALID, "overlaps", cpattn_rank_scan(rank, plan, &reverse, &d, &s, &s)));
  LOCKED(OK(cpattn_rank_destroy(rank)));
  return NULL;
}

int main(void) {
  const int32_t cu_seqlens[] = {0, 10, 12};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.documents = 2, problem.cu_seqlens_q = cu_seqlens, problem.heads = problem.kv_heads = 1;
  problem.head_dim = problem.value_dim = 8, problem.dtype = CPATTN_BF16;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = options.ring = RANKS, options.ulysses = 1, options.layout = CPATTN_LAYOUT_CONTIGUOUS;
  OK(cpattn_plan_create(&problem, &options, &plan));
  cpattn_segment segments[2];
  size_t count = 0;
  OK(cpattn_plan_segments(plan, 2, NULL, 0, &count));
  failures += count != 2;
  OK(cpattn_plan_segments(plan, 2, segments, 2, &count));
  failures += segments[0].position != 8 || segments[0].tokens != 2 || segments[1].document != 1 || segments[1].row != 2;
  cpattn_scan scan = numbers();
  for (scan.form = 0; scan.form < 4; scan.form++) OK(cpattn_plan_verify_scan(plan, &scan));
  REFUSED(CPATTN_INVALID, "scan.form is 4", cpattn_plan_verify_scan(plan, &scan));
  scan.form = CPATTN_SCAN_CHAIN;
  uint64_t bytes = 0;
  OK(cpattn_plan_scan_workspace(plan, 2, &scan, &bytes));
  failures += bytes == 0;
  cpattn_schedule *schedule = NULL;
  OK(cpattn_schedule_create_scan(plan, 1, &scan, &schedule));
  cpattn_schedule_info info = CPATTN_SCHEDULE_INFO_INIT;
  OK(cpattn_schedule_describe(schedule, &info));
  cpattn_op op = CPATTN_OP_INIT;
  int joins = 0;
  for (size_t i = 0; i < info.op_count; i++) {
    OK(cpattn_schedule_op(schedule, i, &op));
    if (op.kind == CPATTN_OP_COMPOSE) joins++, failures += op.sum_count != 1 || op.source_count != 3;
  }
  failures += info.direction != CPATTN_SCAN || joins != 1;
  OK(cpattn_schedule_destroy(schedule));
  scan.dtype = CPATTN_BF16;
  REFUSED(CPATTN_INVALID, "scan.dtype is bf16, expected f32 or f64", cpattn_plan_verify_scan(plan, &scan));
  scan = numbers(), scan.key_dim = 0;
  REFUSED(CPATTN_INVALID, "scan.key_dim is 0", cpattn_schedule_create_scan(plan, 0, &scan, &schedule));
  scan = numbers(), scan.reverse = 2;
  REFUSED(CPATTN_INVALID, "scan.reverse is 2", cpattn_plan_verify_scan(plan, &scan));
  OK(cpattn_local_group(RANKS, 60000, transports));
  pthread_t threads[RANKS];
  for (uintptr_t r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, run, (void *)r);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
